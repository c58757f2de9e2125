"""The code uses public names of torch alone: private ones change from one release to the next."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("moe_core", "swinv2_moe", "tools", "data", "examples", "benchmarks", "tests")

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
    # torch's documentation of extending it names this module.
    "torch.utils._python_dispatch",
    "torch.utils._python_dispatch.TorchDispatchMode",
    # An alpha with documentation in torch 2.11; later versions are not checked. Channels between
    # GPUs alone import it.
    "torch.distributed._symmetric_memory",
    "torch.distributed._symmetric_memory.empty",
    "torch.distributed._symmetric_memory.rendezvous",
    # The only way to keep DistributedDataParallel from overwriting distributed experts, and to see
    # that it has; torch's documentation of DDP's ignored parameters names the first.
    "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    "torch.nn.parallel.DistributedDataParallel._get_active_ddp_module",
}


def private_names(source: str) -> set[str]:
    """Dotted names of torch with a part that begins with an underscore, however they are
    imported."""
    tree = ast.parse(source)
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


FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_uses_public_names(path):
    assert private_names(path.read_text()) <= KNOWN


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("import torch\ntorch._dynamo.reset()", "torch._dynamo.reset"),
        (
            "import torch.distributed as dist\ndist.distributed_c10d._world",
            "torch.distributed.distributed_c10d._world",
        ),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("from torch.nn.parallel import DDP\nDDP._ignore(1)", "torch.nn.parallel.DDP._ignore"),
        ("def f():\n    from torch._C import x as y", "torch._C.x"),
    ],
)
def test_finds_private_names(source, name):
    assert name in private_names(source)


def test_leaves_other_names_alone():
    assert (
        private_names(
            "import torch\nfrom ours import _x\ntorch.nn.functional.pad(_x._y, torch.__version__)"
        )
        == set()
    )
