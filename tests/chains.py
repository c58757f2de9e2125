"""How many functions and files of this project a call goes through: the yardstick of its design.

    python tests/chains.py [--list]

The forward pass of a layer, the loading of a configuration, one step of a training run. --list
names the files of each.
"""

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType

import torch

from moe_core import MoEConfig, MoELayer
from swinv2_moe.config import all_sections, load_config
from swinv2_moe.train import train
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


if __name__ == "__main__":
    main()
