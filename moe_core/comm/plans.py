"""The plans of this package.

A slot has the index of the rank whose message it holds, so no two ranks write to the same slot.
"""

# P ranks, g ranks per node, N nodes; rank (a, j) is local rank j of node a

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


def linear_all_reduce(num_ranks: int) -> Plan:
    """The output of every rank is the sum of all inputs, in the order of the ranks.

    Every message is sent to every rank, so this is for small messages.
    """
    plan = Plan("linear all-reduce", num_ranks, 1, num_ranks, 1)
    for rank, program in enumerate(plan.programs):
        _put_to_all(program, rank, num_ranks, lambda peer: Input(0))
        _sum_all(program, rank, num_ranks, Input(0))
    return plan


def two_level_all_to_all(num_ranks: int, ranks_per_node: int) -> Plan:
    """As `linear_all_to_all`, but in two steps.

    A message is first sent to the rank of this node with the local rank of the receiver, and then
    to the receiver. Between nodes, a rank signals N - 1 ranks instead of P - g.

    Source: arXiv 2206.03382 (Tutel), section 3.4.

    Raises:
        ValueError: ranks_per_node does not divide num_ranks.
    """
    if num_ranks % ranks_per_node:
        raise ValueError(f"ranks_per_node ({ranks_per_node}) must divide num_ranks ({num_ranks})")
    num_nodes = num_ranks // ranks_per_node
    plan = Plan("two-level all-to-all", num_ranks, num_ranks, 2 * num_ranks, num_ranks)
    for rank, program in enumerate(plan.programs):
        _two_level_program(program, rank, num_nodes, ranks_per_node)
    return plan


def _two_level_program(program: Program, rank: int, num_nodes: int, ranks_per_node: int) -> None:
    """Add the steps of a rank.

    The first slots are [g, N]: messages from a local rank of this node to a node. The next slots
    are [P]: messages from each rank to this one.
    """
    node, local = divmod(rank, ranks_per_node)
    near = [other for other in range(ranks_per_node) if other != local]
    far = [other for other in range(num_nodes) if other != node]
    num_ranks = num_nodes * ranks_per_node

    def from_node(source: int, target_node: int) -> Place:
        """The message from local rank `source` of this node to local rank `local` of a node."""
        if source == local:
            return Input(target_node * ranks_per_node + local)
        return Slot(source * num_nodes + target_node)

    for other in near:
        peer = node * ranks_per_node + other
        for target_node in range(num_nodes):
            message = Input(target_node * ranks_per_node + other)
            slot = Slot(local * num_nodes + target_node)
            program.put(message, peer, slot, signal=target_node == num_nodes - 1)
    for other in near:
        program.wait(node * ranks_per_node + other)
    for target_node in far:
        peer = target_node * ranks_per_node + local
        for source in range(ranks_per_node):
            slot = Slot(num_ranks + node * ranks_per_node + source)
            is_last = source == ranks_per_node - 1
            program.put(from_node(source, target_node), peer, slot, signal=is_last)
    for source_node in far:
        program.wait(source_node * ranks_per_node + local)
    for source in range(num_ranks):
        if source // ranks_per_node == node:
            program.copy(from_node(source % ranks_per_node, node), Output(source))
        else:
            program.copy(Slot(num_ranks + source), Output(source))


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
