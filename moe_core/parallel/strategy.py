"""How one call of a layer uses its expert group; every choice gives the same result on the same
parameters."""

# W ranks of the group, E experts of the layer, s = W / E ranks that share an expert (E < W), H
# hidden dim

from dataclasses import dataclass

from moe_core.registry import ALL_TO_ALLS


@dataclass(frozen=True)
class ParallelStrategy:
    """A per-call choice that moves no parameter and changes neither loss nor gradients.

    Args:
        r: what travels. 0: the expert weights do, all-gathered, and tokens stay (data parallel). E
            >= W: 1 sends the tokens to their experts (expert parallel). E < W: 1 or any divisor of
            s; every token goes to r ranks, each of which computes 1/r of the hidden dim after
            gathering weights from the s/r ranks beside it (1: expert + data parallel, s: expert +
            model parallel).
        pipeline_degree: chunks into which the exchange and the experts' work are cut, so that one
            chunk travels while another is worked on.
        all_to_all: the name of an algorithm: "linear" sends a message to every rank; "2dh" goes
            first to the ranks of this node, then between nodes, in fewer and larger messages; or
            one of your own (moe_core.register_all_to_all).
        ranks_per_node: of the group; None: as torchrun says.

    Raises:
        ValueError: a value that no group could take; an all_to_all that is not registered.

    Source: arXiv 2206.03382 (Tutel), sections 3.1 to 3.4.
    """

    r: int = 1
    pipeline_degree: int = 1
    all_to_all: str = "linear"
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        _check_integer("r", self.r, 0)
        _check_integer("pipeline_degree", self.pipeline_degree, 1)
        if self.ranks_per_node is not None:
            _check_integer("ranks_per_node", self.ranks_per_node, 1)
        ALL_TO_ALLS.check(self.all_to_all)

    def check(self, num_experts: int, group_size: int) -> None:
        """Raise ValueError where r is not valid for so many experts over so many ranks; the valid
        ones are listed."""
        valid = valid_r(num_experts, group_size)
        if self.r not in valid:
            raise ValueError(
                f"r ({self.r}) is not valid for num_experts ({num_experts}) over an expert-parallel"
                f" size of {group_size}: it must be one of {', '.join(map(str, valid))}"
            )

    def __str__(self) -> str:
        return f"r={self.r} d={self.pipeline_degree} {self.all_to_all}"


def valid_r(num_experts: int, group_size: int) -> list[int]:
    """0 and 1, or 0 and the divisors of W/E where experts are fewer than ranks."""
    ranks_per_expert = max(group_size // num_experts, 1)
    return [0, *(r for r in range(1, ranks_per_expert + 1) if ranks_per_expert % r == 0)]


def check_ranks_per_node(ranks_per_node: int, group_size: int) -> int:
    """`ranks_per_node`; raises ValueError where it does not divide the group."""
    if group_size % ranks_per_node:
        raise ValueError(
            f"ranks_per_node ({ranks_per_node}) must divide the expert-parallel size ({group_size})"
        )
    return ranks_per_node


def node_size(ranks_per_node: int, group_size: int) -> int:
    """How many ranks of the group share a node; raises ValueError where it does not divide the
    group."""
    if ranks_per_node >= group_size:
        return group_size
    return check_ranks_per_node(ranks_per_node, group_size)


def _check_integer(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} ({value!r}) must be an integer of at least {least}")
