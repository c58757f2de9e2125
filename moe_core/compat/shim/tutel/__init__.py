"""Serves `import tutel` from `moe_core.compat.tutel`, under the names of Tutel's modules."""

import sys
from importlib import import_module
from types import ModuleType

_PACKAGE = "moe_core.compat.tutel"
# Tutel's modules, and the modules of this engine that provide their names.
_MODULES = {
    "system": "system",
    "system_init": "system",
    "net": "net",
    "moe": "moe",
    "impls.communicate": "net",
    "impls.fast_dispatch": "dispatch",
    "impls.losses": "dispatch",
    "impls.moe_layer": "layer",
    "jit_kernels.gating": "dispatch",
}
# Tutel's modules in which a class has another name: (module here, name in Tutel, name here).
_CLASSES = {
    "gates.top": ("gates", "Gate", "LinearTopKGate"),
    "gates.cosine_top": ("gates", "Gate", "CosineTopKGate"),
    "experts.ffn": ("experts", "ExpertModule", "FusedExpertsNetwork"),
    "experts.llama_ffn": ("experts", "ExpertModule", "LlamaFFNNetwork"),
}


def _serve(name: str, module: ModuleType) -> None:
    """Make `module` importable as tutel.NAME."""
    parent, _, last = f"{__name__}.{name}".rpartition(".")
    if parent not in sys.modules:
        folder = ModuleType(parent)
        folder.__path__ = []  # makes it a package, which contains only the modules served here
        _serve(parent.removeprefix(f"{__name__}."), folder)
    sys.modules[f"{__name__}.{name}"] = module
    setattr(sys.modules[parent], last, module)


def _with_class(name: str, alias: str, class_name: str, source: ModuleType) -> ModuleType:
    module = ModuleType(f"{__name__}.{name}")
    for exported in (alias, class_name):
        setattr(module, exported, getattr(source, class_name))
    return module


for _name, _target in _MODULES.items():
    _serve(_name, import_module(f"{_PACKAGE}.{_target}"))
for _name, (_target, _alias, _class) in _CLASSES.items():
    _serve(_name, _with_class(_name, _alias, _class, import_module(f"{_PACKAGE}.{_target}")))
