"""Cache of values computed from parameters, for blocks of code in which these do not change.

The function `moe_core.prepared` has the same name as this module. Therefore the package imports
this module first, before any module that imports torch. This module imports torch only in the
functions that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from torch import Tensor, nn

Value = TypeVar("Value")


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Context in which values computed from the parameters and buffers of `model` are cached.

    The parameters and buffers must not change in this context. The values are weights in the dtype
    of computation, weights in the memory layout of a kernel, and position biases. The first pass
    without gradients that needs a value computes it; for a compiled model, run one pass that is not
    compiled before. The end of the context drops all values. Outside of a context nothing is
    cached.

    >>> with prepared(model), torch.inference_mode():
    ...     outputs = [model(batch) for batch in batches]

    A change of a parameter within the context, by an optimiser, `load_state_dict`, `.data` or
    `functional_call`, is not detected: results may be those of the previous weights. Contexts of
    the same model may be nested; the outermost one drops the values.
    """
    attributes = (value for module in model.modules() for value in vars(module).values())
    caches = [
        value for value in attributes if isinstance(value, PreparedValue) and value.values is None
    ]
    for cache in caches:
        cache.values = {}
    try:
        yield
    finally:
        for cache in caches:
            cache.values = None


class PreparedValue(Generic[Value]):
    """Cache of a value that a module computes from its parameters.

    It must be an attribute of the module, where `prepared` finds it. Copies and pickles of the
    module start with an empty cache, outside of any context.
    """

    def __init__(self) -> None:
        self.values: dict[Hashable, Value] | None = None  # None outside of `prepared`

    def get(
        self, sources: Iterable[Tensor], key: Hashable, compute: Callable[[], Value]
    ) -> Value | None:
        """The cached value of `compute()` for `key`, or None where caching is not possible.

        Caching is not possible outside of `prepared`, while a program is traced or exported, or if
        a tensor in `sources` needs a gradient. `sources` are the tensors that the value depends on.
        A compiled pass reads values that earlier passes without compilation cached. It adds none.
        """
        values = self.values  # read once: another thread may end the context
        if values is None:
            return None
        import torch

        from moe_core.context import in_transform

        sources = list(sources)
        if _is_tracing() or any(in_transform(source) for source in sources[:1]):
            return None
        if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
            return None
        if torch.compiler.is_dynamo_compiling():
            return values.get(key)
        if key not in values:
            # Not an inference tensor, because a pass with gradients may use the value later.
            with torch.inference_mode(False), torch.no_grad():
                values[key] = compute()
        return values[key]

    def __reduce__(self) -> tuple:
        return PreparedValue, ()


def _is_tracing() -> bool:
    """Whether a program is being traced or exported; torch.compile does not count."""
    import torch

    is_exporting = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
    return is_exporting or torch.jit.is_tracing()
