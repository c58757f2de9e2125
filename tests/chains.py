"""The longest chains of calls: how many functions and files of this project each goes through.

    python tests/chains.py

- The forward pass of a layer, on one process of a CPU.
- One step of a training run, above the engine.
- The configuration, from `swinv2_moe.train.run.train`: each time a function hands it or a part of
  it to another one. A file that comes again after another one is a return. This one is read from
  the text with all its branches, in the order in which it is written, each pair of a calling and a
  called function once. Objects that keep a section are followed, but calls of their methods are
  not counted.

Prints the files of each. `ceilings.py` has the most that they may be.
"""

import ast
import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import CodeType

import torch

from moe_core import MoEConfig, MoELayer
from swinv2_moe.config import load_config
from swinv2_moe.train.run import train
from swinv2_moe.train.step import TrainingStep

ROOT = Path(__file__).parents[1]


class Calls:
    """Calls of the project's functions, by code object."""

    def __init__(self, package: str) -> None:
        self.folder = f"{ROOT}/{package}/"
        self.counts: Counter[CodeType] = Counter()

    def __call__(self, frame, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(self.folder):
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
def profiled(calls: Calls) -> Iterator[None]:
    sys.setprofile(calls)
    try:
        yield
    finally:
        sys.setprofile(None)


def forward_pass() -> Calls:
    layer = MoELayer(MoEConfig(model_dim=32, hidden_dim=64, num_experts=4))
    tokens = torch.randn(2, 16, 32)
    layer(tokens)
    calls = Calls("moe_core")
    with profiled(calls):
        layer(tokens)
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
    calls = SecondStep("swinv2_moe")
    with tempfile.TemporaryDirectory() as output:
        opts = ["TRAIN.MAX_STEPS", "3", "DATA.NUM_WORKERS", "0"]
        config = load_config("quickstart_digits", opts, output=output)
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), profiled(calls):
            train(config)
    return calls


Stay = tuple[str, str]  # a file and a function in it


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


def files_and_returns(stays: list[Stay]) -> tuple[set[str], int]:
    """The files that are visited, and how often one comes again after another one."""
    changes = [file for file, _ in itertools.groupby(file for file, _ in stays)]
    return set(changes), len(changes) - len(set(changes))


def main() -> None:
    torch.set_num_threads(1)
    chains = {
        "the forward pass": forward_pass(),
        "a step of a training run, above the engine": training_step(),
    }
    for name, calls in chains.items():
        print(f"{name}: {len(calls.functions)} functions in {len(calls.files)} files")
        for file, count in calls.files.most_common():
            print(f"{count:8} calls  {file}")
    stays = journey_of_configuration()
    files, returns = files_and_returns(stays)
    handed = f"{len(stays)} times handed on"
    print(f"the configuration: {handed}, {len(files)} files, {returns} returns (<)")
    visited: set[str] = set()
    for file, part in itertools.groupby(stays, key=lambda stay: stay[0]):
        mark = "<" if file in visited else " "
        print(f"  {mark} {file}: {', '.join(function for _, function in part)}")
        visited.add(file)


if __name__ == "__main__":
    main()
