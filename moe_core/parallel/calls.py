"""Which layer a collective belongs to.

Ranks that call different layers would exchange tokens with the wrong experts. So each rank keeps a
hash of its passes: the layers that it called, and their backward passes, in their order. It travels
with the first small message of a pass, and must be equal on all ranks.
"""

# W ranks

import math
import weakref
import zlib
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe_core.ranks import Ranks, bit_sums

_REMEDY = (
    "all ranks of an expert group must call the same layers in the same order, and run the same"
    " backward passes: draw what selects layers (LayerDrop, a branch) alike on these ranks, for"
    " example with a generator of one seed"
)
_MODULUS = 1 << 62  # hashes are integers of 64 bits, without overflow
_NEW = 1 << 32  # above all numbers of layers


class Calls:
    """The passes of this rank through the layers over one process group.

    A MoELayer is known by its experts. It gets its number in its first pass, which all ranks run
    together: they may create layers in different orders, or some that other ranks do not have.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._size, self._description = ranks.size, ranks.description
        # `_CALLS` must not keep the process group, which is its key.
        self._process_group: weakref.ref | None = None
        if ranks.process_group is not None:
            self._process_group = weakref.ref(ranks.process_group)
        self.history = 0  # hash of all passes
        self._places: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # by layer
        self._numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # by experts
        self._num_created = 0
        self._num_called = 0

    def __reduce__(self) -> tuple:
        return Calls, (self.ranks,)  # a pickle without the weak references

    @property
    def ranks(self) -> Ranks:
        process_group = None if self._process_group is None else self._process_group()
        return Ranks(process_group, self._description)

    @staticmethod
    def of(ranks: Ranks) -> "Calls":
        """Those of the process group: layers over it may have ExpertGroups of their own."""
        if ranks.process_group is None:
            return Calls(ranks)
        return _CALLS.setdefault(ranks.process_group, Calls(ranks))

    def add(self, layer: Any) -> None:
        """Note the order in which layers and their copies are created."""
        self._num_created += 1
        self._places[layer] = self._num_created

    def place(self, layer: Any) -> int:
        return self._places[layer]

    def earlier_twins(self, layer: Any, content: Tensor) -> Tensor:
        """The number of new layers that have the same content and were created before: a scalar on
        the device of `content`."""
        number = torch.zeros_like(content)
        for other, place in list(self._places.items()):
            on_device = all(p.device == content.device for p in other.router.parameters())
            if place < self._places[layer] and not self.number(other) and on_device:
                number += _content(other, content.device) == content
        return number

    def number(self, layer: Any) -> int:
        """0: no pass yet."""
        return self._numbers.get(layer.experts, 0)

    def after(self, event: int) -> int:
        """The history after another event."""
        return (self.history * 1_000_003 + event + 1) % _MODULUS

    def record(self, experts: nn.Module, backward: bool = False) -> None:
        """Add a pass to the history."""
        if experts not in self._numbers:
            self._num_called += 1
            self._numbers[experts] = self._num_called
        self.history = self.after(2 * self._numbers[experts] + backward)

    def fail(self, layer: Any | None = None) -> NoReturn:
        """Raise ValueError on all ranks, which know that their passes differ. It names the layers.
        A program that catches it on all ranks starts with an empty history."""
        called = None
        if layer is not None:
            called = (self.number(layer), self._describe(layer))
        of_ranks = self.ranks.gather_objects(called, "comparison of layers")
        self.history = 0
        if len(set(of_ranks)) == 1:
            when = "" if called is None else f" before this call of {called[1]}"
            raise ValueError(
                f"{self.ranks.description}: the ranks ran different passes of MoE layers{when}:"
                f" {_REMEDY}"
            )
        ranks = dist.get_process_group_ranks(self.ranks.process_group)
        names = [f"rank {r}: {name}" for r, (_, name) in zip(ranks, of_ranks, strict=True)]
        raise ValueError(
            f"{self.ranks.description}: the ranks called different MoE layers"
            f" ({'; '.join(names)}): {_REMEDY}"
        )

    def _describe(self, layer: Any) -> str:
        if layer.name_in_model:
            return layer.name_in_model
        return (
            f"MoELayer {self.place(layer)} in order of creation, {layer.config.num_experts} experts"
        )

    # Sums of tensors over the ranks can carry the history. On a GPU it would be a wait for the
    # device, so it is left out there.

    def with_history(self, values: Tensor) -> Tensor:
        """The values and the history, flat, to be summed over the ranks."""
        return torch.cat([values.flatten(), self._parts(values)])

    def without_history(self, summed: Tensor, like: Tensor) -> Tensor:
        """The sums of the values, in the shape of `like`.

        Raises:
            ValueError: the ranks ran different passes; raised on all ranks.
        """
        values, parts = summed[: like.numel()], summed[like.numel() :]
        if not torch.equal(parts, self._parts(like) * self._size):
            self.fail()
        return values.view(like.shape)

    def _parts(self, like: Tensor) -> Tensor:
        """The bits of the history in numbers whose sums over the ranks are exact in the dtype."""
        if like.is_cuda:
            return like.new_empty(0)
        bits = 1 - int(math.log2(torch.finfo(like.dtype).eps)) - self._size.bit_length()
        bits = max(bits, 1)
        parts = [self.history >> first & (1 << bits) - 1 for first in range(0, 48, bits)]
        return torch.tensor(parts, dtype=like.dtype, device=like.device)


def _content(layer: Any, device: torch.device) -> Tensor:
    """A hash of the configuration and the router's weights: a scalar, at least 0. The host waits
    for no device."""
    content = torch.full((), zlib.crc32(repr(layer.config).encode()), device=device)
    router = {n: p for n, p in layer.router.named_parameters() if not isinstance(p, DTensor)}
    if router:
        sums = bit_sums(router)
        content += (sums * torch.arange(3, 2 * len(sums) + 3, 2, device=device)).sum()
    return content % _MODULUS


_CALLS: WeakKeyDictionary[dist.ProcessGroup, Calls] = WeakKeyDictionary()


class LayerCall:
    """One pass of a layer over several ranks."""

    def __init__(self, calls: Calls, layer: Any) -> None:
        self._calls = calls
        self._layer = layer

    def tags(self, device: torch.device) -> Tensor:
        """The two values that this rank sends, int64, at least 0 and below 2^62.

        All ranks must send the same first or the same second value. They differ only in the first
        pass of a layer. The first value then contains the place of the layer in the order of
        creation, which ranks may not have in common. The second one contains the configuration, the
        router's weights, and the place among new layers that have the same.
        """
        calls, layer = self._calls, self._layer
        number = calls.number(layer)
        if number:
            return torch.full((2,), calls.after(2 * number), device=device)
        by_place = torch.full((), calls.after(_NEW + calls.place(layer)), device=device)
        content = _content(layer, device)
        twins = calls.earlier_twins(layer, content)
        by_content = (content + calls.after(_NEW) + twins) % _MODULUS
        return torch.stack([by_place, by_content])

    def check(self, tags: Tensor) -> None:
        """Compare the tags [W, 2] of the ranks, or the largest and smallest ones [2, 2], and record
        the pass. They are on the host.

        Raises:
            ValueError: the ranks call different layers, or ran different passes before. It is
                raised on all ranks.
        """
        first = tags[:1].expand_as(tags)
        if not torch.equal(tags, first) and not (tags == first).all(0).any():
            self._calls.fail(self._layer)
        self.begin()

    def begin(self, backward: bool = False) -> None:
        """Record the pass."""
        self._calls.record(self._layer.experts, backward)
