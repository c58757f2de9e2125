"""A plan that no code of this package has: its messages are passed on, and summed, in slots."""

from moe_core.comm.plan import Input, Output, Place, Plan, Slot


def ring_reduce_scatter(num_ranks: int) -> Plan:
    """As `linear_reduce_scatter`, but each partial sum is passed around a ring of ranks.

    A slot has the index of the rank that receives the sum. The sum for rank j is in the order of
    the ring, from rank j + 1 to rank j.
    """
    plan = Plan("ring reduce-scatter", num_ranks, num_ranks, num_ranks, 1)
    for rank, program in enumerate(plan.programs):
        message: Place = Input((rank - 1) % num_ranks)
        for distance in range(1, num_ranks):
            program.put(message, (rank + 1) % num_ranks, Slot((rank - distance) % num_ranks))
            program.wait((rank - 1) % num_ranks)
            arriving = (rank - distance - 1) % num_ranks
            message = Slot(arriving)
            if arriving != rank:
                program.add(Input(arriving), message)
        program.copy(message, Output(0))
        if num_ranks > 1:
            program.add(Input(rank), Output(0))
    return plan
