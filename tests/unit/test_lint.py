"""The rules of tests/lint.py catch what they forbid."""

import ast

import pytest
from lint import (
    MAX_FUNCTION,
    ROOT,
    circle_of_imports,
    imported_names,
    leaves_named,
    lengths,
    other_exits,
    private_names,
    upper_bounds_of_time,
    violations,
)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("import torch\ntorch._dynamo.reset()", "torch._dynamo.reset"),
        (
            "import torch.distributed as dist\ndist.distributed_c10d._world",
            "torch.distributed.distributed_c10d._world",
        ),
        ("from torch.utils._pytree import tree_map", "torch.utils._pytree.tree_map"),
        ("from torch.nn.parallel import DDP\nDDP._ignore(1)", "torch.nn.parallel.DDP._ignore"),
    ],
)
def test_finds_private_names(source, name):
    assert name in private_names(ast.parse(source))


def test_leaves_other_names_alone():
    source = "import torch\nfrom a import _x\ntorch.nn.functional.pad(_x._y, torch.__version__)"
    assert private_names(ast.parse(source)) == set()


@pytest.mark.parametrize(
    "source",
    [
        "print(1)",
        "import csv",
        "from rich.console import Console",
        "import sys\nsys.stderr.write(1)",
    ],
)
def test_finds_other_exits(source):
    assert list(other_exits(ast.parse(source)))


def test_finds_upper_bounds_of_time():
    lines = ["assert time.monotonic() - start < 5", "assert monotonic() - start <= 5"]
    lines += ["assert monotonic() - start >= 5", "assert time.monotonic() < deadline"]
    found = list(upper_bounds_of_time(ast.parse("\n".join(lines))))
    assert [problem.split()[1] for problem in found] == ["1", "2"]


def test_finds_long_functions():
    body = "    pass\n" * MAX_FUNCTION
    source = f"def f():\n{body}"
    assert list(lengths(ast.parse(source), source)) == ["f has 81 lines, at most 80"]


@pytest.mark.parametrize(
    ("name", "imported"),
    [
        ("moe_core.router", "moe_core.layer.MoELayer"),
        ("moe_core.ops.combine.op", "moe_core.router"),
        ("moe_core.parallel.groups", "moe_core.parallel.exchange.Exchanged"),
        ("moe_core.parallel.algorithm", "moe_core.parallel.cost_model.volume"),
        ("moe_core.parallel.cost_model", "moe_core.parallel.tuner.Tuner"),
        ("moe_core.layer", "swinv2_moe.config"),
        ("moe_core.checkpoint", "timm"),
        ("swinv2_moe.models.factory", "swinv2_moe.data.build"),
        ("swinv2_moe.train.loop", "swinv2_moe.detection.backbone"),
        ("swinv2_moe.train.loop", "tools.train"),
    ],
)
def test_the_rules_catch(name, imported):
    assert violations(name, iter([imported]))


@pytest.mark.parametrize(
    "source",
    ["def f():\n    import moe_core.comm", "A = {'b': 'moe_core.compat.tutel'}"],
)
def test_nothing_names_a_leaf(source):
    tree = ast.parse(source)
    imports = list(imported_names(tree, ROOT / "moe_core" / "layer.py"))
    assert list(leaves_named("moe_core.layer", imports, tree))
    assert not list(leaves_named("moe_core.comm.a", ["moe_core.comm.b"], ast.parse("")))


def test_finds_circles_of_imports():
    b, c = ROOT / "a" / "b.py", ROOT / "a" / "c.py"
    trees = {b: ast.parse("if True:\n    from a import c"), c: ast.parse("import a.d")}
    assert circle_of_imports(trees) == []
    call = 'importlib.import_module("a.b")'
    for source in (
        "from a.b import f",
        "def f(): import a.b",
        "if TYPE_CHECKING: import a.b",
        call,
    ):
        trees[c] = ast.parse(source)
        assert set(circle_of_imports(trees)) == {"a.b", "a.c"}
