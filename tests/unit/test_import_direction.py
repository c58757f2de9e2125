"""Imports run one way (docs/explanation/architecture.md): a module imports from its own layer or
the ones before it."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("moe_core", "swinv2_moe", "tools")
# The packages that moe_core may import, besides the standard library; moe_core.compat.NAME also
# imports NAME.
ENGINE_PACKAGES = {"torch", "triton", "safetensors"}

# A module belongs to the longest prefix in ALLOWED that names it. It may import from the modules
# that this entry lists, and from those of its own prefix.
BASICS = [
    "moe_core.checks",
    "moe_core.choices",
    "moe_core.config",
    "moe_core.capacity",
    "moe_core.precision",
    "moe_core.transforms",
    "moe_core.prepared",
    "moe_core.losses",
    "moe_core.ops",
    "moe_core.files",
    "moe_core.registry",
    "moe_core.activations",
    "moe_core.balance",
    "moe_core.expert_choice",
    "moe_core.layer_inputs",
    "moe_core.routing_stats",
    "moe_core.ranks",
]
PARTS = ["moe_core.router", "moe_core.soft", "moe_core.experts", "moe_core.parallel"]
# Process groups and all-to-all algorithms. They know neither layers nor the cost model.
RANKS = [
    "moe_core.parallel.machine",
    "moe_core.parallel.strategy",
    "moe_core.parallel.rank_subset",
    "moe_core.parallel.traffic",
    "moe_core.parallel.comm_stream",
    "moe_core.parallel.groups",
    "moe_core.parallel.algorithm",
    "moe_core.parallel.linear",
    "moe_core.parallel.hierarchical",
    "moe_core.parallel.row_exchange",
    "moe_core.parallel.channels",
]
# What the other packages may import from.
PUBLIC = [
    "moe_core",
    "moe_core.parallel",
    "moe_core.parallel.cost_model",
    "moe_core.checkpoint",
    "moe_core.export",
    "moe_core.files",
    "moe_core.ops.autograd",
    "moe_core.transforms",
    "moe_core.tutel",
]
SHARED = [
    "moe_core",
    "swinv2_moe.output",
    "swinv2_moe.errors",
    "swinv2_moe.class_names",
    "swinv2_moe.config_files",
    "swinv2_moe.owner_file",
    "swinv2_moe.files",
    "swinv2_moe.forms",
    "swinv2_moe.model_sections",
    "swinv2_moe.layer_names",
    "swinv2_moe.model_types",
    "swinv2_moe.dataset_registry",
    "swinv2_moe.tables",
    "swinv2_moe.time_left",
    "swinv2_moe.config",
]
MODELS_AND_DATA = SHARED + ["swinv2_moe.models", "swinv2_moe.data"]
PICTURES = ["swinv2_moe.plots", "swinv2_moe.routing_pictures"]
TRAINING = MODELS_AND_DATA + PICTURES + ["swinv2_moe.train"]

ALLOWED = {
    "moe_core": ["moe_core"],  # modules that use the layer: training, checkpoint, __init__
    "moe_core.layer": BASICS + PARTS + ["moe_core.rounding", "moe_core.torch_tools"],
    "moe_core.rounding": BASICS + ["moe_core.router"],
    "moe_core.parallel": BASICS + ["moe_core.experts"],
    "swinv2_moe": ["moe_core", "swinv2_moe"],
    "swinv2_moe.output": [],
    "swinv2_moe.errors": ["swinv2_moe.output"],
    "swinv2_moe.class_names": ["swinv2_moe.errors"],
    "swinv2_moe.malloc": [],
    "swinv2_moe.config_files": ["swinv2_moe.errors"],
    "swinv2_moe.tables": ["swinv2_moe.output"],
    "swinv2_moe.time_left": [],
    "swinv2_moe.layer_names": [],
    "swinv2_moe.plots": ["swinv2_moe.output", "swinv2_moe.errors"],
    "swinv2_moe.owner_file": ["swinv2_moe.output", "swinv2_moe.errors"],
    "swinv2_moe.files": ["moe_core", "swinv2_moe.errors", "swinv2_moe.owner_file"],
    "swinv2_moe.forms": ["swinv2_moe.files"],
    "swinv2_moe.imports": ["swinv2_moe.errors"],
    "swinv2_moe.model_sections": ["swinv2_moe.errors"],
    "swinv2_moe.model_types": ["swinv2_moe.model_sections"],
    "swinv2_moe.dataset_registry": [],
    "swinv2_moe.input_paths": [
        "swinv2_moe.errors",
        "swinv2_moe.dataset_registry",
        "swinv2_moe.files",
        "swinv2_moe.data",
    ],
    "swinv2_moe.config": [
        "moe_core",
        "swinv2_moe.output",
        "swinv2_moe.errors",
        "swinv2_moe.config_files",
        "swinv2_moe.files",
        "swinv2_moe.imports",
        "swinv2_moe.model_types",
        "swinv2_moe.dataset_registry",
    ],
    "swinv2_moe.models": SHARED,
    "swinv2_moe.data": [
        "moe_core.files",
        "moe_core.parallel",
        "swinv2_moe.output",
        "swinv2_moe.tables",
        "swinv2_moe.errors",
        "swinv2_moe.files",
        "swinv2_moe.imports",
        "swinv2_moe.dataset_registry",
        "swinv2_moe.config",
    ],
    "swinv2_moe.routing_pictures": [
        "swinv2_moe.output",
        "swinv2_moe.plots",
        "swinv2_moe.models",
    ],
    "swinv2_moe.train": MODELS_AND_DATA + PICTURES + ["swinv2_moe.imports", "swinv2_moe.malloc"],
    "swinv2_moe.detection": TRAINING
    + ["swinv2_moe.imports", "swinv2_moe.shapes_options", "swinv2_moe.time_left"],
    "swinv2_moe.measure": TRAINING,
    "swinv2_moe.export": TRAINING,
    "swinv2_moe.predict": TRAINING,
    "tools": ["moe_core", "swinv2_moe"],
}
ALLOWED["moe_core.router"] = BASICS
ALLOWED["moe_core.experts"] = BASICS
# By default a basic module imports from no other module of ours.
for name in BASICS:
    ALLOWED[name] = []
ALLOWED["moe_core.losses"] = ["moe_core.registry"]
ALLOWED["moe_core.activations"] = ["moe_core.registry"]
ALLOWED["moe_core.config"] = ["moe_core.checks", "moe_core.choices", "moe_core.registry"]
ALLOWED["moe_core.layer_inputs"] = ["moe_core.config", "moe_core.precision"]
ALLOWED["moe_core.routing_stats"] = ["moe_core.capacity", "moe_core.ops"]
ALLOWED["moe_core.balance"] = ["moe_core.transforms"]
ALLOWED["moe_core.prepared"] = ["moe_core.transforms"]
ALLOWED["moe_core.soft"] = BASICS + ["moe_core.router"]
ALLOWED["moe_core.ops"] = [
    "moe_core.choices",
    "moe_core.files",
    "moe_core.registry",
    "moe_core.activations",
    "moe_core.losses",
    "moe_core.transforms",
]
for name in RANKS:
    ALLOWED[name] = ["moe_core.choices", "moe_core.registry", "moe_core.comm", "moe_core.ranks"]
    ALLOWED[name] += ["moe_core.transforms", *RANKS]
ALLOWED["moe_core.parallel.strategy"] += ["moe_core.checks"]
ALLOWED["moe_core.parallel.machine"] = []
ALLOWED["moe_core.comm"] = ["moe_core.ops.native.build_cache", "moe_core.ranks"]
ALLOWED["moe_core.parallel.cost_model"] = [
    "moe_core.capacity",
    "moe_core.config",
    "moe_core.registry",
    "moe_core.parallel.machine",
    "moe_core.parallel.strategy",
]


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imported_names(path: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere in it; `from a import b` gives a.b."""
    package = path.parent.relative_to(ROOT).parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ""
            if node.level:  # a relative import
                base = ".".join(package[: len(package) - node.level + 1])
            for alias in node.names:
                yield ".".join(filter(None, [base, node.module, alias.name]))


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def violations(name: str, imports: Iterator[str]) -> list[str]:
    entry = max((prefix for prefix in ALLOWED if within(name, prefix)), key=len)
    prefixes = [entry] + ALLOWED[entry]
    engine_imports = ENGINE_PACKAGES | set(OURS) | sys.stdlib_module_names
    is_engine = within(name, "moe_core")
    if within(name, "moe_core.compat"):
        engine_imports |= set(name.split(".")[2:])
    problems = []
    for imported in imports:
        package = imported.split(".")[0]
        if package in OURS and not any(within(imported, prefix) for prefix in prefixes):
            problems.append(f"{name} imports {imported}")
        if is_engine and package not in engine_imports:
            problems.append(
                f"{name} imports {imported}: moe_core imports only {sorted(ENGINE_PACKAGES)}"
            )
        if not is_engine and package == "moe_core":
            module = imported.rpartition(".")[0]
            if module and module not in PUBLIC:
                problems.append(f"{name} imports {imported}: use the public names of moe_core")
    return problems


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


# Imports each of our modules in a child of its own, which has imported other packages alone.
IMPORT_EACH = """
import importlib, os, sys, traceback
for package in ("torch.distributed", "torch.utils.tensorboard", "torchvision", "timm", "sklearn"):
    importlib.import_module(package)
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except ImportError:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(name)
"""


def test_each_package_of_the_engine_can_be_imported_first():
    """Whatever a program imports first, no circle of imports meets a half-imported module."""
    paths = [*(ROOT / "moe_core").glob("*.py"), *(ROOT / "moe_core").rglob("*/__init__.py")]
    names = [module_name(path) for path in paths]
    command = [sys.executable, "-c", IMPORT_EACH, *names]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
