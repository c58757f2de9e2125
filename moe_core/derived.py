"""What follows from parameters alone, computed once while they do not change."""

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

Value = TypeVar("Value")


class Derived(Generic[Value]):
    """A value that a module computes from its parameters, kept in evaluation.

    It is computed anew when a parameter has changed: by an optimiser, copy_, load_state_dict or a move. A write through
    `.data` or NumPy leaves no trace; after one, the module's `train()` must call `clear`. Copies and pickles of the
    module start without it.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the value."""
        self._state: list | None = None
        self._value: Value | None = None

    def get(
        self, module: nn.Module, sources: Iterable[Tensor], key: Hashable, compute: Callable[[], Value]
    ) -> Value | None:
        """`compute()` from `sources`, for which `key` stands with all else that it depends on; None in a pass that
        learns them (training, or with gradients) or that is traced: the caller then computes it there."""
        sources = list(sources)
        learning = module.training or (torch.is_grad_enabled() and any(t.requires_grad for t in sources))
        if learning or torch.compiler.is_compiling() or any(t.is_meta or t.is_inference() for t in sources):
            return None
        state = [key, *((t.data_ptr(), t._version) for t in sources)]
        if self._state != state:
            with torch.inference_mode(False), torch.no_grad():
                self._value = compute()
            self._state = state
        return self._value

    def __reduce__(self) -> tuple:
        return Derived, ()
