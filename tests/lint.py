"""What the source must keep to: `make lint` runs this and prints what does not.

    python tests/lint.py

- Code uses public names of torch alone: private ones change from one release to the next.
- Imports run one way (docs/explanation/architecture.md): a module imports from its own layer or
  the ones before it. There are no circles, also not inside functions or for types alone.
- Functions and files stay short enough to read at once (CONTRIBUTING.md).
- What others name leaves `swinv2_moe` through `swinv2_moe.output` and `swinv2_moe.tables`, which
  escape it.
- Each file of tests says in its first line what it guards, and no test demands that something is
  quick: a busy machine takes any time.
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]

MAX_FILE = 600
MAX_FUNCTION = 80

# What has no public counterpart. All of it is in torch 2.11 to 2.15.
KNOWN = {
    # Whether a backward pass runs. Forward passes that recompute activations there are not counted
    # again, whoever recomputes them.
    "torch._C._current_graph_task_id",
    # torch.optim and clip_grads_with_norm_ are made of it; a loop would launch a kernel for every
    # parameter.
    "torch._foreach_mul_",
    # Whether a torch.func transform is active; torch.autograd.Function itself calls it.
    "torch._C",
    "torch._C._are_functorch_transforms_active",
    # Whether gradients are batched (is_grads_batched), which no public function tells.
    "torch._C._functorch",
    "torch._C._functorch.is_legacy_batchedtensor",
    # Whether the profiler or a dispatch mode watches the ops; otherwise they need no dispatcher.
    "torch.autograd._profiler_enabled",
    "torch.utils._python_dispatch.is_in_torch_dispatch_mode",
    # torch's documentation of extending it names this module.
    "torch.utils._python_dispatch",
    "torch.utils._python_dispatch.TorchDispatchMode",
    # Models without data, and the memory of their training: torch's documentation names the first.
    "torch._subclasses.fake_tensor.FakeTensorMode",
    "torch.distributed._tools.mem_tracker.MemTracker",
    # What runs at the end of the backward pass; torch's own FSDP2 uses it.
    "torch.autograd.Variable._execution_engine",
    "torch.autograd.Variable._execution_engine.queue_callback",
    # The only way to keep DistributedDataParallel from overwriting distributed experts, and to see
    # that it has; torch's documentation of DDP's ignored parameters names the first.
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module",
}

# Modules that may print: the exits themselves, and one that prints a constant.
PRINTING = {"output.py", "tables.py", "interrupt.py"}

CLOCKS = ("monotonic()", "perf_counter()", "process_time()", "time.time()")

OURS = ("moe_core", "swinv2_moe", "tools")
# The packages that moe_core may import, besides the standard library; moe_core.compat.NAME also
# imports NAME.
ENGINE_PACKAGES = {"torch", "triton", "safetensors"}

# A module belongs to the longest prefix in ALLOWED that names it. It may import from the modules
# that this entry lists, and from those of its own prefix.
BASICS = [
    "moe_core.options",
    "moe_core.config",
    "moe_core.capacity",
    "moe_core.context",
    "moe_core.prepared",
    "moe_core.losses",
    "moe_core.ops",
    "moe_core.files",
    "moe_core.registry",
    "moe_core.activations",
    "moe_core.balance",
    "moe_core.ranks",
]
PARTS = ["moe_core.router", "moe_core.experts", "moe_core.parallel"]
# Process groups and all-to-all algorithms. They know neither layers nor the cost model.
RANKS = [
    "moe_core.parallel.machine",
    "moe_core.parallel.strategy",
    "moe_core.parallel.comm_stream",
    "moe_core.parallel.calls",
    "moe_core.parallel.groups",
    "moe_core.parallel.algorithm",
    "moe_core.parallel.hierarchical",
    "moe_core.parallel.row_exchange",
]
# Rooms that no other module of ours imports from, and the modules that name one in a string: the
# registry finds the all-to-all `channels` when it is asked for.
LEAVES = {"moe_core.comm": ["moe_core.registry"], "moe_core.compat": []}
# What the other packages may import from.
PUBLIC = [
    "moe_core",
    "moe_core.parallel",
    "moe_core.parallel.cost_model",
    "moe_core.checkpoint",
    "moe_core.export",
    "moe_core.files",
    "moe_core.ops.autograd",
    "moe_core.ops.backend",
    "moe_core.ops.launch",
    "moe_core.ops.native.library",
    "moe_core.ops.route.reference",
    "moe_core.context",
    "moe_core.options",
    "moe_core.tutel",
]
SHARED = [
    "moe_core",
    "swinv2_moe.output",
    "swinv2_moe.errors",
    "swinv2_moe.files",
    "swinv2_moe.locks",
    "swinv2_moe.forms",
    "swinv2_moe.data.section",
    "swinv2_moe.tables",
]
MODELS_AND_DATA = SHARED + ["swinv2_moe.models", "swinv2_moe.data", "swinv2_moe.config"]
PICTURES = ["swinv2_moe.plots", "swinv2_moe.routing_pictures"]
RUNS = MODELS_AND_DATA + ["swinv2_moe.ranks", "swinv2_moe.checkpoints", "swinv2_moe.train.section"]
TRAINING = RUNS + PICTURES + ["swinv2_moe.start", "swinv2_moe.train"]

ALLOWED = {
    "moe_core": ["moe_core"],  # modules that use the layer: training, checkpoint, __init__
    "moe_core.layer": BASICS + PARTS + ["moe_core.routing", "moe_core.torch_tools"],
    "moe_core.routing": BASICS + PARTS,
    "moe_core.parallel": BASICS + ["moe_core.experts"],
    "swinv2_moe": ["moe_core", "swinv2_moe"],
    "swinv2_moe.output": [],
    "swinv2_moe.errors": ["swinv2_moe.output"],
    "swinv2_moe.threads": ["swinv2_moe.output"],
    "swinv2_moe.tables": ["swinv2_moe.output"],
    "swinv2_moe.plots": ["swinv2_moe.output", "swinv2_moe.errors"],
    "swinv2_moe.locks": ["moe_core.files", "swinv2_moe.output", "swinv2_moe.errors"],
    "swinv2_moe.files": ["moe_core", "swinv2_moe.errors"],
    "swinv2_moe.forms": ["swinv2_moe.files"],
    "swinv2_moe.imports": ["swinv2_moe.errors"],
    # The sections of a configuration stand beside what they configure, below the configuration.
    "swinv2_moe.data.section": ["moe_core.options"],
    "swinv2_moe.models.section": [
        "moe_core",
        "swinv2_moe.errors",
        "swinv2_moe.models.timm_names",
    ],
    "swinv2_moe.models.bundled": ["swinv2_moe.errors"],
    "swinv2_moe.train.section": ["moe_core.options", "swinv2_moe.data.section"],
    "swinv2_moe.input_paths": [
        "swinv2_moe.errors",
        "swinv2_moe.files",
        "swinv2_moe.data",
        "swinv2_moe.models.bundled",
    ],
    "swinv2_moe.config": [
        "moe_core",
        "swinv2_moe.output",
        "swinv2_moe.errors",
        "swinv2_moe.files",
        "swinv2_moe.imports",
        "swinv2_moe.data.section",
        "swinv2_moe.models.section",
        "swinv2_moe.train.section",
    ],
    "swinv2_moe.models": SHARED,
    "swinv2_moe.data": [
        "moe_core.files",
        "moe_core.parallel",
        "swinv2_moe.output",
        "swinv2_moe.tables",
        "swinv2_moe.errors",
        "swinv2_moe.files",
        "swinv2_moe.locks",
        "swinv2_moe.imports",
    ],
    "swinv2_moe.routing_pictures": [
        "swinv2_moe.output",
        "swinv2_moe.tables",
        "swinv2_moe.plots",
        "swinv2_moe.models",
    ],
    "swinv2_moe.ranks": MODELS_AND_DATA
    + ["swinv2_moe.imports", "swinv2_moe.threads", "swinv2_moe.train.section"],
    "swinv2_moe.checkpoints": RUNS,
    "swinv2_moe.start": RUNS
    + ["swinv2_moe.threads"]
    + [f"swinv2_moe.train.{name}" for name in ("step", "progress", "evaluation")],
    "swinv2_moe.train": RUNS
    + PICTURES
    + ["swinv2_moe.imports", "swinv2_moe.threads", "swinv2_moe.start"],
    "swinv2_moe.detection": TRAINING
    + ["swinv2_moe.imports", "swinv2_moe.predict", "swinv2_moe.export", "swinv2_moe.measure"],
    "swinv2_moe.measure": TRAINING + ["swinv2_moe.predict"],
    "swinv2_moe.export": TRAINING,
    "swinv2_moe.predict": TRAINING,
    "tools": ["moe_core", "swinv2_moe"],
}
ALLOWED["moe_core.router"] = BASICS
ALLOWED["moe_core.experts"] = BASICS
# By default a basic module imports from no other module of ours.
for name in BASICS:
    ALLOWED[name] = []
ALLOWED["moe_core.losses"] = ["moe_core.registry", "moe_core.ops"]
ALLOWED["moe_core.activations"] = ["moe_core.registry"]
ALLOWED["moe_core.config"] = ["moe_core.options", "moe_core.registry"]
ALLOWED["moe_core.balance"] = ["moe_core.context"]
ALLOWED["moe_core.prepared"] = ["moe_core.context"]
ALLOWED["moe_core.ops"] = [
    "moe_core.options",
    "moe_core.files",
    "moe_core.registry",
    "moe_core.activations",
    "moe_core.context",
]
for name in RANKS:
    ALLOWED[name] = ["moe_core.options", "moe_core.registry", "moe_core.ranks"]
    ALLOWED[name] += ["moe_core.context", *RANKS]
ALLOWED["moe_core.parallel.machine"] = []
ALLOWED["moe_core.comm"] = [
    "moe_core.context",
    "moe_core.ops.native.build_cache",
    "moe_core.parallel",
    "moe_core.ranks",
    "moe_core.registry",
]
ALLOWED["moe_core.parallel.cost_model"] = [
    "moe_core.capacity",
    "moe_core.config",
    "moe_core.registry",
    "moe_core.parallel.machine",
    "moe_core.parallel.strategy",
]


def main() -> None:
    problems, trees = [], {}
    for folder in ("moe_core", "swinv2_moe", "tools", "data", "examples", "benchmarks", "tests"):
        files = sorted((ROOT / folder).rglob("*.py"))
        if not files:
            problems.append(f"{folder}: has no Python files")
        for file in files:
            source, shown = file.read_text(), file.relative_to(ROOT)
            tree = ast.parse(source)
            problems += [f"{shown}: {problem}" for problem in problems_of(file, source, tree)]
            if folder in OURS:
                trees[file] = tree
    circle = circle_of_imports(trees)
    if circle:
        problems.append(" imports ".join(circle))
    print(*problems, sep="\n", end="\n" if problems else "")
    sys.exit(bool(problems))


def problems_of(file: Path, source: str, tree: ast.Module) -> list[str]:
    folder = file.relative_to(ROOT).parts[0]
    problems = []
    for name in sorted(private_names(tree) - KNOWN):
        problems.append(f"{name} is a private name of torch")
    if folder in OURS:
        problems += violations(module_name(file), imported_names(tree, file))
        problems += leaves_named(module_name(file), list(imported_names(tree, file)), tree)
    if folder in ("moe_core", "swinv2_moe", "tools", "benchmarks", "data"):
        problems += lengths(tree, source)
    if folder == "swinv2_moe" and file.name not in PRINTING:
        problems += other_exits(tree)
    if folder == "tests":
        problems += upper_bounds_of_time(tree)
        if not ast.get_docstring(tree):
            problems.append("does not say in its first line what it guards")
    return problems


def lengths(tree: ast.Module, source: str) -> Iterator[str]:
    if source.count("\n") > MAX_FILE:
        yield f"has {source.count(chr(10))} lines, at most {MAX_FILE}"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION:
                yield f"{node.name} has {length} lines, at most {MAX_FUNCTION}"


def other_exits(tree: ast.Module) -> Iterator[str]:
    """Uses of `print`, of streams, of csv and of rich's own Console."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if "csv" in names:
                yield "imports csv"
            if getattr(node, "module", "") == "rich.console" and "Console" in names:
                yield "imports rich's Console"
        called = getattr(node, "func", None)
        is_write = isinstance(called, ast.Attribute) and called.attr == "write"
        if is_write and "sys.std" in ast.unparse(called):
            yield f"line {node.lineno} writes to a stream"
        if isinstance(called, ast.Name) and called.id == "print":
            yield f"line {node.lineno} prints"


def upper_bounds_of_time(tree: ast.Module) -> Iterator[str]:
    """`assert time.monotonic() - started < 5`, with any clock."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and isinstance(node.test, ast.Compare):
            passed = node.test.left
            is_bound = isinstance(node.test.ops[0], ast.Lt | ast.LtE)
            is_span = isinstance(passed, ast.BinOp) and isinstance(passed.op, ast.Sub)
            if is_bound and is_span and ast.unparse(passed.left).endswith(CLOCKS):
                yield f"line {node.lineno} demands that something is quick"


def private_names(tree: ast.Module) -> set[str]:
    """Dotted names of torch with a part that begins with an underscore, however they are
    imported."""
    imported = dict(_imports(tree))
    names = set(imported.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            names.add(_dotted(node, imported))
    return {name for name in names if name.split(".")[0] == "torch" and _is_private(name)}


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(name in the file, dotted name) of what the file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield (alias.asname, alias.name) if alias.asname else (alias.name, alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _dotted(node: ast.expr, imported: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, imported)}.{node.attr}"
    if isinstance(node, ast.Name):
        return imported.get(node.id, "") or ("torch" if node.id == "torch" else "")
    return ""


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


def imported_names(tree: ast.Module, path: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere in it; `from a import b` gives a.b, and
    `import_module("a.b")` does, too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [node.value for node in node.args if isinstance(node, ast.Constant)]
            yield from (name for name in names if isinstance(name, str))
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ""
            if node.level:  # a relative import
                package = path.parent.relative_to(ROOT).parts
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


def leaves_named(name: str, imports: list[str], tree: ast.Module) -> Iterator[str]:
    """Imports from LEAVES, and strings that are names of modules in them."""
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    for leaf, registries in LEAVES.items():
        if within(name, leaf):
            continue
        for imported in imports:
            if within(imported, leaf):
                yield f"{name} imports {imported}: nothing imports from {leaf}"
        for string in strings:
            if isinstance(string, str) and within(string, leaf) and name not in registries:
                yield f"{name} names {string}: nothing names {leaf}"


def circle_of_imports(trees: dict[Path, ast.Module]) -> list[str]:
    """The first circle of modules that import each other, also inside functions or for types alone;
    [] if there is none."""
    modules = {module_name(file) for file in trees}
    graph = {}
    for file, tree in trees.items():
        name = module_name(file)
        imported = {_existing(dotted, modules) for dotted in imported_names(tree, file)}
        graph[name] = imported - {name, ""}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def _existing(dotted: str, modules: set[str]) -> str:
    """The module that a dotted name is, or is a name of."""
    parent = dotted.rpartition(".")[0]
    return next((name for name in (dotted, parent) if name in modules), "")


if __name__ == "__main__":
    main()
