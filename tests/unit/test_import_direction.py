"""Imports run one way (docs/explanation/architecture.md): a module imports from its own layer or
the ones before it."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("moe_core", "swinv2_moe", "tools")
# all that moe_core needs besides the standard library
ENGINE_ROOM = {"torch", "triton", "safetensors"}

# A module belongs to the longest prefix here that names it, and may import what that one lists, and
# itself.
BASICS = [
    *(
        "moe_core.config",
        "moe_core.precision",
        "moe_core.prepared",
        "moe_core.losses",
        "moe_core.ops",
    ),
    *("moe_core.files", "moe_core.registry", "moe_core.activations"),
]
PARTS = ["moe_core.router", "moe_core.experts", "moe_core.parallel"]
# Process groups and all-to-all algorithms: they know neither layers nor costs of one.
RANKS = [
    f"moe_core.parallel.{name}"
    for name in (
        *("machine", "strategy", "ranks", "rank_subset", "traffic", "comm_stream", "groups"),
        *("algorithm", "linear", "hierarchical", "row_exchange"),
    )
]
# What the other packages may import from.
PUBLIC = (
    "moe_core",
    *(
        f"moe_core.{part}"
        for part in ("parallel", "parallel.cost_model", "checkpoint", "export", "files", "tutel")
    ),
)
SHARED = [
    "moe_core",
    "swinv2_moe.errors",
    "swinv2_moe.files",
    "swinv2_moe.forms",
    "swinv2_moe.model_types",
    "swinv2_moe.tables",
    "swinv2_moe.config",
]
MODELS_AND_DATA = [*SHARED, "swinv2_moe.models", "swinv2_moe.data"]
ALLOWED = {
    "moe_core": ["moe_core"],  # what stands on the layer: training, checkpoint, __init__
    "moe_core.layer": [*BASICS, *PARTS, "moe_core.rounding"],
    "moe_core.rounding": [*BASICS, "moe_core.router"],
    **dict.fromkeys(PARTS, BASICS),
    "moe_core.parallel": [*BASICS, "moe_core.experts"],
    **{name: ["moe_core.registry", *RANKS] for name in RANKS},
    "moe_core.parallel.cost_model": [
        *("moe_core.config", "moe_core.registry"),
        *("moe_core.parallel.machine", "moe_core.parallel.strategy"),
    ],
    "moe_core.parallel.machine": [],
    "moe_core.parallel.ranks": [],
    **dict.fromkeys(BASICS, ()),
    **{f"moe_core.{name}": ["moe_core.registry"] for name in ("losses", "activations")},
    "moe_core.config": ["moe_core.registry", "moe_core.ops"],
    "moe_core.ops": ["moe_core.files", "moe_core.activations"],
    "swinv2_moe": ["moe_core", "swinv2_moe"],
    "swinv2_moe.errors": [],
    "swinv2_moe.tables": [],
    "swinv2_moe.plots": ["swinv2_moe.errors"],
    "swinv2_moe.files": ["moe_core", "swinv2_moe.errors"],
    "swinv2_moe.forms": ["swinv2_moe.files"],
    "swinv2_moe.imports": ["swinv2_moe.errors"],
    "swinv2_moe.model_types": ["swinv2_moe.errors"],
    "swinv2_moe.config": [
        *("moe_core", "swinv2_moe.errors", "swinv2_moe.files", "swinv2_moe.imports"),
        "swinv2_moe.model_types",
    ],
    "swinv2_moe.models": SHARED,
    "swinv2_moe.data": [
        "moe_core.files",
        "swinv2_moe.errors",
        "swinv2_moe.files",
        "swinv2_moe.config",
    ],
    "swinv2_moe.train": [*MODELS_AND_DATA, "swinv2_moe.imports"],
    "swinv2_moe.detection": [
        *(*MODELS_AND_DATA, "swinv2_moe.train", "swinv2_moe.plots", "swinv2_moe.imports"),
    ],
    "swinv2_moe.measure": [*MODELS_AND_DATA, "swinv2_moe.train", "swinv2_moe.plots"],
    "swinv2_moe.export": [*MODELS_AND_DATA, "swinv2_moe.train"],
    "tools": ["moe_core", "swinv2_moe"],
}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_names(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, wherever in it; `from a import b` gives a.b."""
    package = path.parent.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield from (
                ".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names
            )


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def violations(name: str, imports: Iterator[str]) -> list[str]:
    layer = max((prefix for prefix in ALLOWED if within(name, prefix)), key=len)
    root = name.split(".")[0]
    found = []
    for imported in imports:
        top = imported.split(".")[0]
        if top in OURS and not any(within(imported, prefix) for prefix in [layer, *ALLOWED[layer]]):
            found.append(f"{name} imports {imported}")
        if root == "moe_core" and top not in {*OURS, *ENGINE_ROOM, *sys.stdlib_module_names}:
            found.append(
                f"{name} imports {imported}: the engine needs no more than {sorted(ENGINE_ROOM)}"
            )
        if (
            root != "moe_core"
            and top == "moe_core"
            and imported.rpartition(".")[0] not in ("", *PUBLIC)
        ):
            found.append(
                f"{name} reaches into {imported}: use the names that moe_core itself offers"
            )
    return found


FILES = sorted(p for package in OURS for p in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_run_one_way(path):
    assert violations(module_name(path), imported_names(path)) == []


@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("moe_core.router", "moe_core.layer.MoELayer"),
        ("moe_core.ops.combine.op", "moe_core.router"),
        ("moe_core.parallel.groups", "moe_core.parallel.exchange.Exchanged"),
        ("moe_core.parallel.groups", "moe_core.parallel.tuner.Tuner"),
        ("moe_core.parallel.linear", "moe_core.parallel.cost_model.volume"),
        ("moe_core.parallel.cost_model", "moe_core.parallel.tuner.Tuner"),
        ("moe_core.layer", "moe_core.training"),
        ("moe_core.layer", "swinv2_moe.config"),
        ("moe_core.checkpoint", "timm"),
        ("moe_core.experts", "torchvision.ops"),
        ("swinv2_moe.models.factory", "swinv2_moe.data.build"),
        ("swinv2_moe.models.factory", "moe_core.layer.MoELayer"),
        ("swinv2_moe.data.build", "swinv2_moe.models"),
        ("swinv2_moe.train.loop", "swinv2_moe.detection.backbone"),
        ("swinv2_moe.train.loop", "tools.train"),
    ],
)
def test_the_rules_catch(name, imported):
    assert violations(name, iter([imported]))
