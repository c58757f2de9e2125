"""The plans of this package.

A slot has the index of the rank whose message it holds, so no two ranks write to the same slot.
"""

# P ranks

from collections.abc import Callable

from moe_core.comm.plan import Input, Output, Place, Plan, Program, Slot


def linear_all_to_all(num_ranks: int) -> Plan:
    """Every rank puts a message to every other rank. Output i of rank j is input j of rank i."""
    plan = Plan("linear all-to-all", num_ranks, num_ranks, num_ranks, num_ranks)
    for rank, program in enumerate(plan.programs):
        _put_to_all(program, rank, num_ranks, Input)
        for source in range(num_ranks):
            program.copy(_arrived(rank, source, Input(rank)), Output(source))
    return plan


def linear_all_gather(num_ranks: int) -> Plan:
    """Output i of every rank is the input of rank i."""
    plan = Plan("linear all-gather", num_ranks, 1, num_ranks, num_ranks)
    for rank, program in enumerate(plan.programs):
        _put_to_all(program, rank, num_ranks, lambda peer: Input(0))
        for source in range(num_ranks):
            program.copy(_arrived(rank, source, Input(0)), Output(source))
    return plan


def linear_reduce_scatter(num_ranks: int) -> Plan:
    """The output of rank j is the sum of input j of all ranks, in the order of the ranks."""
    plan = Plan("linear reduce-scatter", num_ranks, num_ranks, num_ranks, 1)
    for rank, program in enumerate(plan.programs):
        _put_to_all(program, rank, num_ranks, Input)
        _sum_all(program, rank, num_ranks, Input(rank))
    return plan


def _put_to_all(
    program: Program, rank: int, num_ranks: int, message_to: Callable[[int], Place]
) -> None:
    """Put `message_to(peer)` to every other rank, the next rank first. Then wait for every rank."""
    for distance in range(1, num_ranks):
        peer = (rank + distance) % num_ranks
        program.put(message_to(peer), peer, Slot(rank))
    for distance in range(1, num_ranks):
        program.wait((rank - distance) % num_ranks)


def _sum_all(program: Program, rank: int, num_ranks: int, message: Place) -> None:
    """Sum the received messages and this rank's `message`, in the order of the ranks."""
    program.copy(_arrived(rank, 0, message), Output(0))
    for source in range(1, num_ranks):
        program.add(_arrived(rank, source, message), Output(0))


def _arrived(rank: int, source: int, message: Place) -> Place:
    """Where the message of rank `source` lies: in a slot, or in `message` if it is this rank."""
    if source == rank:
        return message
    return Slot(source)
