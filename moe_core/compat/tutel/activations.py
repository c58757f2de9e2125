"""Recognises the activation function of Tutel's experts, which may be any callable.

An activation that the engine's kernels support, optionally followed by dropout, is recognised by
the torch functions that it calls. It is called with a placeholder. The functions are recorded but
not computed, so no random number is drawn.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NAMES = {
    F.relu: "relu",
    torch.relu: "relu",
    Tensor.relu: "relu",
    F.gelu: "gelu",
    F.silu: "silu",
}
# Arguments, with the values that do not change the result.
_NEUTRAL = {"inplace": (True, False), "approximate": ("none",)}


class KnownActivation(NamedTuple):
    """`dropout(activation(x))`."""

    name: str  # a name in moe_core.ACTIVATIONS
    dropout: float  # the current share of the results that become 0


class _UnknownError(Exception):
    pass


class _Recorder(TorchFunctionMode):
    """Records calls of known functions. Each must be called on the result of the previous one.

    Attributes:
        result: a placeholder for the result of the last call.
    """

    def __init__(self, placeholder: Tensor) -> None:
        super().__init__()
        self.result = placeholder
        self.name: str | None = None
        self.dropout = 0.0
        self.has_dropout = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        options = dict(kwargs or {})
        values = list(args)
        x = values.pop(0) if values else options.pop("input", None)
        if x is not self.result or values:
            raise _UnknownError
        if func in _NAMES and self.name is None:
            self._check_neutral(options)
            self.name = _NAMES[func]
        elif func is F.dropout and self.name is not None and not self.has_dropout:
            self.has_dropout = True
            if options.get("training", True):
                self.dropout = options.get("p", 0.5)
        else:
            raise _UnknownError
        self.result = torch.empty(0)
        return self.result

    @staticmethod
    def _check_neutral(options: dict) -> None:
        for name, value in options.items():
            if value not in _NEUTRAL.get(name, ()):
                raise _UnknownError


@torch.compiler.disable
def recognise(activation_fn: Callable[[Tensor], Tensor]) -> KnownActivation | None:
    """The activation that `activation_fn` currently computes.

    None if the kernels do not support it, or if the function raises an error, for example because
    it uses a module that does not exist yet.
    """
    placeholder = torch.empty(0)
    recorder = _Recorder(placeholder)
    try:
        with recorder:
            result = activation_fn(placeholder)
    except Exception:  # the error will be raised when the function is called with a tensor
        return None
    if recorder.name is None or result is not recorder.result or recorder.dropout >= 1:
        return None
    return KnownActivation(recorder.name, recorder.dropout)
