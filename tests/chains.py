"""How many functions and files of this project a call goes through: the yardstick of its design.

    python tests/chains.py [--list]

The forward pass of a layer, the loading of a configuration, one step of a training run. --list
names the files of each.

Then two journeys, as the files that hand something on, in order. A file that comes again after
another one is a return:

- The tokens, from `MoELayer._forward` on one process of a CPU: functions that receive tokens (a
  floating-point tensor [..., M]) and give a tensor back. Functions that only look at them are not
  counted. The combine is a return by its nature.
- The configuration, from `swinv2_moe.train.run.train`: functions with a parameter that is a yacs
  tree or a section. This one is read from the text with all its branches, in the order in which it
  is written, each pair of a calling and a called function once. Objects that keep a section are
  followed, but calls of their methods are not counted.
"""

import argparse
import ast
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import CO_VARARGS
from pathlib import Path
from types import CodeType
from typing import TypeGuard

import torch

from moe_core import MoEConfig, MoELayer
from swinv2_moe.config import all_sections, load_config
from swinv2_moe.train.run import train
from swinv2_moe.train.step import TrainingStep

ROOT = Path(__file__).parents[1]


class Calls:
    """Calls of the project's functions, by code object."""

    def __init__(self, folders: tuple[str, ...]) -> None:
        self.folders = tuple(f"{ROOT}/{folder}/" for folder in folders)
        self.counts: Counter[CodeType] = Counter()

    def __call__(self, frame, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self.folders):
            self.counts[code] += 1

    @property
    def files(self) -> Counter[str]:
        files: Counter[str] = Counter()
        for code, count in self.counts.items():
            files[code.co_filename.removeprefix(f"{ROOT}/")] += count
        return files

    @property
    def functions(self) -> set[CodeType]:
        """Without comprehensions and generator expressions."""
        return {code for code in self.counts if not code.co_name.startswith("<")}


@contextmanager
def counted(*folders: str) -> Iterator[Calls]:
    calls = Calls(folders)
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def forward_pass() -> Calls:
    layer = MoELayer(MoEConfig(model_dim=32, hidden_dim=64, num_experts=4))
    tokens = torch.randn(2, 16, 32)
    layer(tokens)
    with counted("moe_core") as calls:
        layer(tokens)
    return calls


def loading() -> Calls:
    all_sections(load_config("quickstart_digits"))
    with counted("moe_core", "swinv2_moe") as calls:
        all_sections(load_config("quickstart_digits"))
    return calls


class SecondStep(Calls):
    """The calls from the beginning of the second step to the beginning of the third."""

    steps = 0

    def __call__(self, frame, event: str, arg: object) -> None:
        if event == "call" and frame.f_code is TrainingStep.run.__code__:
            self.steps += 1
        if self.steps == 2:
            super().__call__(frame, event, arg)


def training_step() -> Calls:
    calls = SecondStep(("swinv2_moe",))
    with tempfile.TemporaryDirectory() as output:
        opts = ["TRAIN.MAX_STEPS", "3", "DATA.NUM_WORKERS", "0"]
        config = load_config("quickstart_digits", opts, output=output)
        sys.setprofile(calls)
        try:
            train(config)
        finally:
            sys.setprofile(None)
    return calls


Stay = tuple[str, str]  # a file and a function in it


class TokenJourney:
    """The functions that receive tokens of M channels and give tensors back, as a profiler."""

    M = 40  # no other size of the layer

    def __init__(self) -> None:
        self.entered: list[CodeType] = []
        self.gave_tensors: set[CodeType] = set()

    def __call__(self, frame, event: str, arg: object) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(f"{ROOT}/moe_core/") or code.co_name.startswith("<"):
            return
        if event == "return" and code in self.entered and any(map(is_tensor, members(arg))):
            self.gave_tensors.add(code)
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)
        arguments = members([frame.f_locals.get(name) for name in code.co_varnames[:count]])
        if event == "call" and code not in self.entered and any(map(self.is_tokens, arguments)):
            self.entered.append(code)

    def is_tokens(self, value: object) -> bool:
        if not is_tensor(value) or isinstance(value, torch.nn.Parameter):
            return False
        return value.is_floating_point() and value.ndim > 1 and value.shape[-1] == self.M

    @property
    def stays(self) -> list[Stay]:
        start = f"{ROOT}/"
        codes = [code for code in self.entered if code in self.gave_tensors]
        first = codes.index(MoELayer._forward.__code__)
        return [(code.co_filename.removeprefix(start), code.co_name) for code in codes[first:]]


def is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor)


def members(value: object) -> Iterator[object]:
    """The value, and what tuples and lists in it hold."""
    yield value
    if isinstance(value, (tuple, list)):
        for member in value:
            yield from members(member)


def journey_of_tokens() -> list[Stay]:
    journey = TokenJourney()
    layer = MoELayer(MoEConfig(model_dim=journey.M, hidden_dim=64, num_experts=4))
    tokens = torch.randn(2, 16, journey.M)
    layer(tokens)
    sys.setprofile(journey)
    try:
        layer(tokens)
    finally:
        sys.setprofile(None)
    return journey.stays


@dataclass(frozen=True, eq=False)
class Function:
    file: str
    owner: str  # its class; empty: none
    node: ast.FunctionDef

    def takes(self, classes: set[str]) -> bool:
        """Whether a parameter has one of the classes in its annotation."""
        arguments = self.node.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return any(words(parameter.annotation) & classes for parameter in parameters)

    def calls(self) -> Iterator[ast.Call]:
        """In the order of their execution, if all branches were taken."""
        for statement in self.node.body:
            yield from calls_of(statement)


def words(node: ast.AST | None) -> set[str]:
    if node is None:
        return set()
    names = {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    return names | {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}


def calls_of(node: ast.AST) -> Iterator[ast.Call]:
    for child in ast.iter_child_nodes(node):
        yield from calls_of(child)
    if isinstance(node, ast.Call):
        yield node


class ConfigurationJourney:
    """The functions that receive the configuration or a part of it."""

    def __init__(self, package: Path) -> None:
        self.functions: dict[str, list[Function]] = {}  # by name; __init__ by its class's name
        self.imports: dict[str, dict[str, str]] = {}  # by file: a name -> where it comes from
        self.parts = {"CfgNode"}  # the classes of the configuration and of its sections
        for path in sorted(package.rglob("*.py")):
            self._read(str(path.relative_to(package.parent)), ast.parse(path.read_text()))
        everyone = [function for group in self.functions.values() for function in group]
        self.holders = {f.owner for f in everyone if f.node.name == "__init__" and self.counts(f)}
        self.stays: list[Stay] = []
        self._handed: set[tuple[Function, Function]] = set()
        self._visited: set[Function] = set()

    def _read(self, file: str, tree: ast.Module) -> None:
        self.imports[file] = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                self._add(node.name, Function(file, "", node))
            elif isinstance(node, ast.ClassDef):
                if node.name.endswith(("Config", "Sections")):
                    self.parts.add(node.name)
                for method in node.body:
                    if isinstance(method, ast.FunctionDef):
                        name = method.name.replace("__init__", node.name)
                        self._add(name, Function(file, node.name, method))

    def _add(self, name: str, function: Function) -> None:
        self.functions.setdefault(name, []).append(function)

    def counts(self, function: Function) -> bool:
        return function.takes(self.parts)

    def follows(self, function: Function) -> bool:
        """Whether it receives the configuration, or an object that keeps it."""
        keeps = function.owner in self.holders or function.takes(self.holders)
        return keeps or self.counts(function)

    def walk(self, function: Function) -> None:
        self._visited.add(function)
        for call in function.calls():
            called = self._called(function, call.func)
            if called is None:
                continue
            if self.counts(called) and (function, called) not in self._handed:
                self._handed.add((function, called))
                self.stays.append((called.file, called.node.name))
            if called not in self._visited:
                self.walk(called)

    def _called(self, function: Function, node: ast.expr) -> Function | None:
        """The function that is called, if it receives the configuration or an object with it."""
        origin = ""  # the module that an imported name belongs to
        imports = self.imports[function.file]
        if isinstance(node, ast.Name):
            origin, _, name = imports.get(node.id, node.id).rpartition(".")
        elif isinstance(node, ast.Attribute):
            name = node.attr
            if isinstance(node.value, ast.Name):
                origin = imports.get(node.value.id, "")
        else:
            return None
        found = [f for f in self.functions.get(name, []) if self.follows(f)]
        if isinstance(node, ast.Attribute) and not origin:
            found = [f for f in found if f.owner]
        if origin:
            found = [f for f in found if f.file.startswith(origin.replace(".", "/"))]
        elif len(found) > 1:
            found = [f for f in found if f.file == function.file]
        if len(found) == 1:
            return found[0]
        return None


def journey_of_configuration() -> list[Stay]:
    journey = ConfigurationJourney(ROOT / "swinv2_moe")
    [start] = [f for f in journey.functions["train"] if f.file == "swinv2_moe/train/run.py"]
    journey.stays.append((start.file, "train"))
    journey.walk(start)
    return journey.stays


def print_journey(name: str, stays: list[Stay], named: bool) -> None:
    """Print the number of files and of returns; `named`: the stations, too."""
    visited: set[str] = set()
    returns = 0
    lines = []
    for file, part in itertools.groupby(stays, key=lambda stay: stay[0]):
        mark = " "
        if file in visited:
            returns += 1
            mark = "<"
        visited.add(file)
        lines.append(f"  {mark} {file}: {', '.join(function for _, function in part)}")
    print(f"{name}: {len(stays)} times handed on, {len(visited)} files, {returns} returns (<)")
    if named:
        print(*lines, sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name the files")
    args = parser.parse_args()
    torch.set_num_threads(1)
    chains = {
        "MoELayer.forward": forward_pass,
        "load_config of the quickstart": loading,
        "one training step, above the engine": training_step,
    }
    for name, measure in chains.items():
        calls = measure()
        print(
            f"{name}: {calls.counts.total()} calls of {len(calls.functions)} functions"
            f" in {len(calls.files)} files"
        )
        if args.list:
            for file, count in calls.files.most_common():
                print(f"{count:8}  {file}")
    print_journey("the tokens", journey_of_tokens(), args.list)
    print_journey("the configuration", journey_of_configuration(), args.list)


if __name__ == "__main__":
    main()
