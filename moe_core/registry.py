"""Registries of routers, losses, activations and all-to-all algorithms, by name.

A new entry is one file, inside or outside of this package:

>>> from moe_core import register_activation
>>> @register_activation("squared_relu")
... def squared_relu(x):
...     return x.relu().square()

From then on `MoEConfig(activation="squared_relu")` is valid.
"""

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")


class Registry(Mapping[str, Any]):
    """Entries of one kind by name, in the order of their registration.

    Args:
        kind: the field of MoEConfig or ParallelStrategy that selects an entry, for messages.
        modules: the module of each built-in entry, by the entry's name. A module is imported when
            its entry is looked up, because it imports torch.
    """

    def __init__(self, kind: str, modules: Mapping[str, str] | None = None) -> None:
        self.kind = kind
        self._modules = dict(modules or {})
        self._values: dict[str, Any] = dict.fromkeys(self._modules)  # None: not registered yet

    def register(self, name: str) -> Callable[[Value], Value]:
        """A decorator that adds a class or function under `name`.

        Raises:
            ValueError: the name is registered already, or is not a non-empty string.
        """
        if not isinstance(name, str) or not name:
            raise ValueError(f"{self.kind} is registered as {name!r}, which is not a name")
        value = self._look_up(name)
        if value is not None:
            place = f"{value.__module__}.{value.__qualname__}"
            raise ValueError(f"{self.kind} {name!r} is registered already: {place}")

        def add(value: Value) -> Value:
            self._values[name] = value
            return value

        return add

    def check(self, name: str) -> None:
        """Raise ValueError, which names the closest match, if `name` is not registered."""
        if not isinstance(name, str) or name not in self._values:
            nearest = difflib.get_close_matches(str(name), self._values, n=1)
            hint = ""
            if nearest:
                hint = f"; did you mean {nearest[0]!r}?"
            raise ValueError(
                f"{self.kind} ({name!r}) must be one of {', '.join(self._values)}{hint}"
            )

    def __getitem__(self, name: str) -> Any:
        value = self._values.get(name)
        if value is None:
            self.check(name)
            value = self._look_up(name)
        return value

    def _look_up(self, name: str) -> Any:
        """The entry; None if the name is not known, or if its module is being imported."""
        value = self._values.get(name)
        if value is None and name in self._modules:
            importlib.import_module(self._modules[name])
            value = self._values[name]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, name: object) -> bool:
        return name in self._values


# Every entry of this package is named here, with its module.
_LOSSES = ("gshard", "load_importance", "load_importance_tutel", "none")

ROUTERS = Registry(
    "router",
    dict.fromkeys(("linear", "cosine", "expert_choice", "soft"), "moe_core.router"),
)
LOSSES = Registry("aux_loss", dict.fromkeys(_LOSSES, "moe_core.losses"))
ACTIVATIONS = Registry(
    "activation",
    dict.fromkeys(("gelu", "gelu_tanh", "quick_gelu", "relu", "silu"), "moe_core.activations"),
)
# Functions of both products of gated experts, for activations that are not `act(z) * u`.
GATED_ACTIVATIONS = Registry(
    "activation", dict.fromkeys(("clamped_swiglu",), "moe_core.activations")
)
ALL_TO_ALLS = Registry(
    "all_to_all",
    {
        "linear": "moe_core.parallel.algorithm",
        "2dh": "moe_core.parallel.hierarchical",
        "channels": "moe_core.comm.all_to_all",
    },
)


def activations() -> tuple[str, ...]:
    """The names of the activations of all experts, gated or not."""
    return (*ACTIVATIONS, *GATED_ACTIVATIONS)


def check_activation(name: str, gated: bool) -> None:
    """Raise ValueError if `name` is not an activation of gated (or not gated) experts."""
    if name not in GATED_ACTIVATIONS:
        ACTIVATIONS.check(name)
    elif not gated:
        raise ValueError(f"activation ({name!r}) needs gated (False) to be True")


def register_router(name: str) -> Callable[[Value], Value]:
    """Register a router: a module class that maps tokens [T, M] to logits [T, E].

    It is constructed with (config, device).

    Raises:
        ValueError: the name is taken.
    """
    return ROUTERS.register(name)


def register_loss(name: str) -> Callable[[Value], Value]:
    """Register an auxiliary loss: a subclass of `moe_core.AuxiliaryLoss`.

    It is constructed without arguments.

    Raises:
        ValueError: the name is taken.
    """
    return LOSSES.register(name)


def register_activation(name: str) -> Callable[[Value], Value]:
    """Register an activation of the experts: a differentiable, element-wise function of a tensor.

    Raises:
        ValueError: the name is taken by this or by a gated activation.
    """
    if name in GATED_ACTIVATIONS:
        return GATED_ACTIVATIONS.register(name)  # which raises
    return ACTIVATIONS.register(name)


def register_gated_activation(name: str) -> Callable[[Value], Value]:
    """Register an activation of gated experts: a differentiable, element-wise function of z and u.

    z is `x w1^T + b1` and u is `x w3^T + b3`. Gated experts use an ordinary activation `act` as
    `act(z) * u`, so an ordinary activation need not be registered here.

    Raises:
        ValueError: the name is taken by this or by an ordinary activation.
    """
    if name in ACTIVATIONS:
        return ACTIVATIONS.register(name)  # which raises
    return GATED_ACTIVATIONS.register(name)


def register_all_to_all(name: str) -> Callable[[Value], Value]:
    """Register an all-to-all algorithm: a subclass of `moe_core.parallel.AllToAll`.

    Every rank registers the same algorithms, so that all tuners rank the same strategies.

    Raises:
        ValueError: the name is taken.
    """
    return ALL_TO_ALLS.register(name)
