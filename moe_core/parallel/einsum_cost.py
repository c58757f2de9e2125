"""Predicted time of a layer in GShard's einsum form, the baseline of `cost_model`."""

# T tokens of a rank, E experts, C capacity, M model dim

from dataclasses import replace

from moe_core.parallel.cost_model import LayerShape, LayerTime, layer_time
from moe_core.parallel.machine import Machine
from moe_core.parallel.strategy import ParallelStrategy


def einsum_layer_time(
    machine: Machine, shape: LayerShape, group_size: int, ranks_per_node: int
) -> LayerTime:
    """Predicted seconds of one layer in GShard's einsum form, with a linear all-to-all.

    fairseq uses this form as its baseline, and `moe_core.use_einsum` computes it. In addition to
    the memory traffic of the engine's form, dispatch and combine are products with a mask
    [T, E C]. The time to compute the masks is neglected.

    Raises:
        ValueError: as `volume`; or fewer experts than ranks.
    """
    if shape.num_experts < group_size:
        raise ValueError(
            f"the einsum form needs num_experts ({shape.num_experts}) to be at least the"
            f" expert-parallel size ({group_size})"
        )
    buffers = replace(shape, rows_per_expert=shape.capacity or shape.rows_per_expert)
    buffers = replace(buffers, counts_first=False)
    strategy = ParallelStrategy(1, 1, "linear", ranks_per_node)
    time = layer_time(machine, buffers, group_size, strategy)
    # A backward pass has three products: the gradients of tokens, buffers and combine weights.
    products = 2
    if shape.training:
        products = 5
    slots = buffers.num_experts * buffers.rows_per_expert  # E C
    flops = products * 2 * shape.tokens * slots * shape.model_dim
    return replace(time, dispatch=time.dispatch + flops / machine.rate(shape.element_size))
