"""Values computed from weights, kept only while the caller promises that the weights do not
change."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

Value = TypeVar("Value")


@contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Within this context the parameters and buffers of `model` must not change, so that values
    computed from them are computed once.

    Such values are weights in the dtype of computation, weights in the order that a kernel reads,
    and position biases. They are made by the first pass without gradients that needs them, and
    dropped at the end of the context. Outside of it nothing is kept from pass to pass.

    >>> with prepared(model), torch.inference_mode():
    ...     outputs = [model(batch) for batch in batches]

    A change of a parameter within the context, by an optimiser, `load_state_dict`, `.data` or
    `functional_call`, is not noticed: results may be those of the weights before. Contexts of the
    same model may be nested; the outermost counts.
    """
    attributes = (value for module in model.modules() for value in vars(module).values())
    caches = [
        value for value in attributes if isinstance(value, PreparedValue) and not value.active
    ]
    for cache in caches:
        cache.start()
    try:
        yield
    finally:
        for cache in caches:
            cache.stop()


class PreparedValue(Generic[Value]):
    """A value that a module computes from its parameters. An attribute of the module; `prepared`
    finds it there.

    Copies and pickles of the module start without values and outside of any context.
    """

    def __init__(self) -> None:
        self._values: dict[Hashable, Value] | None = None  # None outside of `prepared`

    @property
    def active(self) -> bool:
        """Whether values are kept now."""
        return self._values is not None

    def start(self) -> None:
        self._values = {}

    def stop(self) -> None:
        self._values = None

    def get(
        self, sources: Iterable[Tensor], key: Hashable, compute: Callable[[], Value]
    ) -> Value | None:
        """`compute()`, kept under `key`; None where nothing can be kept, and the caller computes
        what it needs.

        Nothing is kept outside of `prepared`, while a program is traced or compiled, or where one
        of `sources`, the tensors that the value depends on, gets a gradient.
        """
        values = self._values  # once: another thread may leave the context
        if values is None or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return None
        if torch.is_grad_enabled() and any(source.requires_grad for source in sources):
            return None
        if key not in values:
            # a pass with gradients may use the value later
            with torch.inference_mode(False), torch.no_grad():
                values[key] = compute()
        return values[key]

    def __reduce__(self) -> tuple:
        return PreparedValue, ()
