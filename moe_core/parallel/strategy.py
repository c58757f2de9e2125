"""How the ranks of an expert group exchange data. All strategies compute the same result."""

# W ranks of the group, E experts of the layer, s = W / E ranks that share an expert (E < W)

import re
from dataclasses import dataclass
from typing import Any

from moe_core.options import EXCHANGES, check_integer
from moe_core.registry import ALL_TO_ALLS

_NUMBERS = {"r": "r", "d": "pipeline_degree", "n": "ranks_per_node"}  # letter in a text -> field


@dataclass(frozen=True)
class ParallelStrategy:
    """How the ranks exchange data in one call of a layer. It may differ in every call.

    A strategy moves no parameter and changes neither the loss nor the gradients.

    Args:
        r: 0: the expert weights are all-gathered, and tokens stay on their rank (data parallel).
            With E >= W, 1: tokens are sent to their experts (expert parallel). With E < W, a
            divisor of s: every token is sent to r ranks. Each of these computes 1/r of the hidden
            dim, after it has gathered weights from s/r neighbouring ranks (1: expert + data
            parallel, s: expert + model parallel).
        pipeline_degree: the number of chunks of an exchange. One chunk is sent while the experts
            compute another.
        all_to_all: the name of an algorithm. "linear" sends a message to every rank. "2dh" sends
            inside the node first and then between nodes, in fewer and larger messages. "channels"
            uses memory that CPU processes of one machine share.
            `moe_core.register_all_to_all` adds others.
        ranks_per_node: ranks of the group on each node; None: the value that torchrun sets.
        exchange: how many rows are sent. "counted": only existing rows. The ranks first tell each
            other their numbers, and the host waits for these. "static": as many rows for each
            expert as its capacity, without exchanging numbers; unused rows are empty. "static"
            needs r = 1, at least one expert for each rank, and a capacity.

    Raises:
        ValueError: a value is not valid for any group, or all_to_all is not registered.

    Source: arXiv 2206.03382 (Tutel), sections 3.1 to 3.4.
    """

    r: int = 1
    pipeline_degree: int = 1
    all_to_all: str = "linear"
    ranks_per_node: int | None = None
    exchange: str = "counted"

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            choices = ", ".join(EXCHANGES)
            raise ValueError(f"exchange ({self.exchange!r}) must be one of {choices}")
        if self.exchange == "static" and self.r != 1:
            raise ValueError(f"r ({self.r}) must be 1 with exchange 'static'")
        check_integer("r", self.r, 0)
        check_integer("pipeline_degree", self.pipeline_degree, 1)
        if self.ranks_per_node is not None:
            check_integer("ranks_per_node", self.ranks_per_node, 1)
        ALL_TO_ALLS.check(self.all_to_all)

    def check(self, num_experts: int, group_size: int) -> None:
        """Raise ValueError if the strategy is not valid for these sizes."""
        if self.exchange == "static" and num_experts < group_size:
            raise ValueError(
                f"num_experts ({num_experts}) must be at least the expert-parallel size"
                f" ({group_size}) with exchange 'static'"
            )
        valid = valid_r(num_experts, group_size)
        if self.r not in valid:
            choices = ", ".join(map(str, valid))
            raise ValueError(
                f"r ({self.r}) is not valid for num_experts ({num_experts}) over an expert-parallel"
                f" size of {group_size}: it must be one of {choices}"
            )

    @classmethod
    def parse(cls, text: str) -> "ParallelStrategy":
        """The strategy of words in any order, such as "r1 d2 2dh static n8": r, pipeline degree,
        all-to-all, exchange and ranks per node. What is not named has its default. `str` of a
        strategy ("r=1 d=2 2dh", without its ranks per node) is read, too.

        Raises:
            ValueError: no word, a word that means nothing or is there twice, an invalid value.
        """
        values: dict[str, Any] = {}
        for word in text.split():
            value: int | str = word
            number = re.fullmatch(r"([rdn])=?(\d{1,9})", word)
            if number:
                name, value = _NUMBERS[number[1]], int(number[2])
            elif word in EXCHANGES:
                name = "exchange"
            else:
                name = "all_to_all"
            if name in values:
                raise ValueError(f"strategy ({text!r}) has two words for {name}")
            values[name] = value
        if not values:
            raise ValueError(f"strategy ({text!r}) is empty")
        return cls(**values)

    def __str__(self) -> str:
        text = f"r={self.r} d={self.pipeline_degree} {self.all_to_all}"
        if self.exchange != "counted":
            text += f" {self.exchange}"
        return text


def parse_strategy(text: str) -> tuple[ParallelStrategy | str, int | None]:
    """A strategy and the ranks on each node (None: the value that torchrun sets), from a text.

    "auto" and "auto n8" are for a tuner, which searches the strategy. Others are those of
    `ParallelStrategy.parse`.

    Raises:
        ValueError: the text is no strategy.
    """
    first, *others = text.split() or [""]
    if first != "auto":
        strategy = ParallelStrategy.parse(text)
        return strategy, strategy.ranks_per_node
    if not others:
        return "auto", None
    if len(others) > 1 or not re.fullmatch(r"n=?\d{1,9}", others[0]):
        raise ValueError(f"strategy ({text!r}) has words of a fixed strategy after 'auto'")
    return "auto", ParallelStrategy.parse(others[0]).ranks_per_node


def valid_r(num_experts: int, group_size: int) -> list[int]:
    """The valid values of r: 0 and 1; with E < W, 0 and the divisors of W / E."""
    ranks_per_expert = max(group_size // num_experts, 1)
    valid = [0]
    for r in range(1, ranks_per_expert + 1):
        if ranks_per_expert % r == 0:
            valid.append(r)
    return valid


def check_ranks_per_node(ranks_per_node: int, group_size: int) -> None:
    """Raise ValueError if `ranks_per_node` does not divide the group."""
    if group_size % ranks_per_node:
        raise ValueError(
            f"ranks_per_node ({ranks_per_node}) must divide the expert-parallel size ({group_size})"
        )


def node_size(ranks_per_node: int, group_size: int) -> int:
    """The number of ranks of the group that share a node.

    Raises:
        ValueError: ranks_per_node does not divide the group.
    """
    if ranks_per_node >= group_size:
        return group_size
    check_ranks_per_node(ranks_per_node, group_size)
    return ranks_per_node
