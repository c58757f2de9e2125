"""What follows from parameters alone, computed once while they do not change."""

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

Value = TypeVar("Value")


class Derived(Generic[Value]):
    """A value that a module computes from its parameters, kept in evaluation.

    It is computed anew when a parameter has changed: by copy_, load_state_dict, a move or an optimiser; a fused one
    counts no version up, so a pass that learns forgets the value. A write through `.data` or NumPy leaves no trace;
    after one, the module's `train()` must call `clear`. Copies and pickles of the module start without it.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the value."""
        self._kept: tuple[list, list[StorageWeakRef], Value] | None = None  # one write: threads may share it

    def get(
        self, module: nn.Module, sources: Iterable[Tensor], key: Hashable, compute: Callable[[], Value]
    ) -> Value | None:
        """`compute()` from `sources`, for which `key` stands with all else that it depends on; None in a pass that
        learns them (training, or with gradients) or that is traced: the caller then computes it there."""
        sources = list(sources)
        if torch.compiler.is_compiling() or any(t.is_meta or t.is_inference() for t in sources):
            return None
        if module.training or (torch.is_grad_enabled() and any(t.requires_grad for t in sources)):
            self.clear()
            return None
        state, kept = [key, *((t.data_ptr(), t._version) for t in sources)], self._kept
        # others may lie at the addresses of storages that are gone
        if kept is None or kept[0] != state or any(storage.expired() for storage in kept[1]):
            storages = [StorageWeakRef(t.untyped_storage()) for t in sources]
            with torch.inference_mode(False), torch.no_grad():
                kept = self._kept = (state, storages, compute())
        return kept[2]

    def __reduce__(self) -> tuple:
        return Derived, ()
