"""Kill training at random moments, mostly in the middle of a save, and see that it goes on as if
nothing had happened.

    python tests/integration/kill_and_resume.py --runs 50

Every run trains a small model on a few of the digits, loses one rank or all of them to SIGKILL,
once or twice, goes on with `--resume auto` on as many ranks or others, and is compared with runs
that were never interrupted. Prints what it counted; exit status 1 if any count that has to be 0 is
not. The other tests of survival use its parts.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

sys.path.append(str(Path(__file__).parents[1]))  # as a script
import trainer_cases
from gloo_processes import Outcome, Processes

from moe_core.checkpoint import expert_file
from swinv2_moe.checkpoints import saver
from swinv2_moe.checkpoints.checkpoint import (
    Checkpoint,
    find_checkpoint,
    open_checkpoint,
    read_meta,
)
from swinv2_moe.commands.call import run_command
from swinv2_moe.config import load_config
from swinv2_moe.errors import UserError
from swinv2_moe.train.loop import Trainer
from swinv2_moe.train.run import train
from swinv2_moe.train.step import StepResult

ROOT = Path(__file__).parents[2]
SMALL = (
    f"{trainer_cases.SMALL} MODEL.MOE.AUX_LOSS_WEIGHT 0 DATA.GLOBAL_BATCH_SIZE 16"
    " TRAIN.EPOCHS 100 TRAIN.BASE_LR 6e-2 PRINT_FREQ 1 TIMEOUT 30"
)
IMAGES = {"train": 96, "val": 32}  # six steps an epoch
WORLDS = (1, 2, 4)
# of a run that nothing interrupts; of the last start, beyond its checkpoint
REFERENCE_STEPS, MORE_STEPS = 24, 4
# Relative, of losses, where a run goes on. Other ranks add up in another order.
TOLERANCE = {"the same ranks": 0.0, "other ranks": 1e-5}
# While files are written, renamed, recorded; while older checkpoints are removed; at start-up or in
# whatever step.
MOMENTS = ("in a save", "in a save", "after a save", "in a save", "any")
KILLS = ("of all ranks", "of one of several ranks", "during a save")


class Ranks(Processes):
    """The processes of one training run.

    Args:
        prepare: is called in every process first; to slow something down there, say.
    """

    def __init__(
        self,
        size: int,
        data: Path,
        output: Path,
        keys: str,
        resume: str | None = "auto",
        prepare: Callable[[], None] | None = None,
    ) -> None:
        self.output = output
        super().__init__(size, output.parent, partial(_train, data, output, keys, resume, prepare))

    def done(self) -> int:
        """The last step in metrics.jsonl."""
        return max((step for step, _ in steps(self.output)), default=0)


class Gate(NamedTuple):
    """A point at which a run waits until the test has done what it wants to do there. It says so by
    files."""

    directory: Path

    @property
    def reached(self) -> Path:
        return self.directory / "reached"

    @property
    def opened(self) -> Path:
        return self.directory / "opened"

    def wait_here(self) -> None:
        self.reached.touch()
        while not self.opened.exists():
            time.sleep(0.005)

    def hold_step(self, step: int) -> None:
        """In this process training waits here before this step."""
        train_step = Trainer.train_step

        def wait_and_train(trainer: Trainer, batches: list) -> StepResult:
            if trainer.progress.step + 1 == step:
                self.wait_here()
            return train_step(trainer, batches)

        Trainer.train_step = wait_and_train

    def hold_save(self, module: str, name: str, step: int) -> None:
        """In this process the save of a step waits here before it first calls this function."""
        module = import_module(module)
        function = getattr(module, name)

        def wait_and_call(*args, **kwargs):
            if f"step-{step:08d}" in repr(args) and not self.reached.exists():
                self.wait_here()
            return function(*args, **kwargs)

        setattr(module, name, wait_and_call)


def _train(
    data: Path, output: Path, keys: str, resume: str | None, prepare: Callable[[], None] | None
) -> None:
    if prepare is not None:
        prepare()
    opts = f"{SMALL} {keys}".split()
    config = load_config(trainer_cases.QUICKSTART, opts, str(data), str(output))
    run_command(lambda: train(config, resume))


def write_digits(root: Path) -> Path:
    """A folder data set of a few of scikit-learn's digits: an epoch takes moments, so runs get
    through several."""
    digits, first = load_digits(), 0
    for split, count in IMAGES.items():
        for i in range(first, first + count):
            folder = root / split / str(digits.target[i])
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray((digits.images[i] * 15.9).astype(np.uint8)).resize((16, 16)).save(
                folder / f"{i}.png"
            )
        first += count
    return root


def steps(run: Path) -> list[tuple[int, float]]:
    """(step, loss) of each step line in a run's metrics.jsonl; one whose writing was cut off does
    not count."""
    file = run / "metrics.jsonl"
    texts = file.read_text().splitlines() if file.is_file() else []
    lines = [json.loads(text) for text in texts if text.endswith("}")]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def uninterrupted(
    size: int, data: Path, output: Path, last: int, keys: str = "SAVE_FREQ 100"
) -> Path:
    """A run of `last` steps to compare others with."""
    output.parent.mkdir(exist_ok=True)
    ended = Ranks(size, data, output, f"TRAIN.MAX_STEPS {last} {keys}").wait()
    assert all(outcome.status == 0 for outcome in ended), ended
    return output


def saves_under_way(run: Path) -> set[str]:
    return {
        path.name for path in (run / "checkpoints").glob(".step-*.tmp") if path.stem[6:].isdigit()
    }


def slow_disk(seconds: float) -> None:
    """In this process every file of a checkpoint takes so much longer to write, to wait for and to
    remove, and so does what comes after the files. (The product has no hooks for tests.)"""
    for module, name in (
        (saver, "write_tensors"),
        (saver, "fsync_and_hash"),
        (saver, "write_meta"),
        (saver, "publish_directory"),
        (saver, "replace_link"),
    ):
        setattr(module, name, partial(_slowly, getattr(module, name), seconds))
    os.unlink = partial(_slowly, os.unlink, seconds)  # what rmtree calls for each file


def _slowly(function: Callable, seconds: float, *args, **kwargs):
    if seconds and (
        function.__name__ != "unlink" or threading.current_thread().name == "checkpoint"
    ):
        time.sleep(seconds)
    return function(*args, **kwargs)


class Plan(NamedTuple):
    """What happens in one run of the test."""

    worlds: list[int]  # the ranks of each start; all but the last start are killed
    keys: str
    slow: float  # seconds that each file of a checkpoint takes longer in the starts that are killed
    moment: str  # of MOMENTS
    one_rank: bool


def draw(rng: random.Random, moment: str, ranks: int | None) -> Plan:
    """A plan; `ranks` None draws the number of ranks of each start."""
    worlds = [ranks or rng.choice(WORLDS) for _ in range(rng.choice((2, 2, 3)))]
    if rng.random() < 0.4:
        worlds = [worlds[0]] * len(worlds)
    keys = f"CHECKPOINT.STEPS {rng.choice((1, 2))} CHECKPOINT.KEEP_LAST {rng.randint(1, 3)}"
    return Plan(worlds, keys, rng.choice((0.0, 0.002, 0.008)), moment, rng.random() < 0.5)


class Kill(NamedTuple):
    """What was there when ranks were killed."""

    victims: list[int]
    names: set[str]  # of the checkpoints
    under_way: set[str]  # saves


class Past(NamedTuple):
    """What a checkpoint has behind it."""

    step: int = 0
    worlds: tuple[int, ...] = ()  # the ranks of each start since the run began

    @property
    def kind(self) -> str:
        """Of `TOLERANCE`."""
        return "the same ranks" if len(set(self.worlds)) == 1 else "other ranks"


class KillTest:
    """Counts what happens in run after run."""

    MUST_BE_0 = ("unreadable", "lost", "hangs", "failed starts", "wrong losses", "wrong files")
    # "unclear": a rank that lost another and did not say so in one line
    MUST_BE_0 += ("left behind", "unclear")

    def __init__(self, directory: Path, seed: int = 0, ranks: int | None = None) -> None:
        self.directory, self.ranks, self.rng = directory, ranks, random.Random(seed)
        self.counts, self.largest = Counter(), Counter()
        self.data = write_digits(directory / "data")
        self.references: dict[int, Path] = {}

    def failures(self) -> dict[str, int]:
        return {name: self.counts[name] for name in self.MUST_BE_0 if self.counts[name]}

    def summary(self) -> str:
        names = ["runs", "starts", "kills", *(f"kills {what}" for what in KILLS), "losses compared"]
        lines = [f"{name:48}{self.counts[name]}" for name in (*names, *self.MUST_BE_0)]
        lines += [
            f"{f'largest difference, {kind}':48}{value:.1e}"
            for kind, value in sorted(self.largest.items())
        ]
        return "\n".join(lines)

    def run(self, number: int) -> None:
        """One run: killed once or twice, then left to its end."""
        plan = draw(self.rng, MOMENTS[number % len(MOMENTS)], self.ranks)
        output = self.directory / f"run-{number}" / "run"
        output.parent.mkdir()
        self.counts["runs"] += 1
        failures = self.failures()
        try:
            past = Past()
            for size in plan.worlds[:-1]:
                past = self._start_and_kill(plan, size, output, past)
            self._finish(plan, output, past)
        except (TimeoutError, UserError) as error:
            self._problem("failed starts", error)
        if self.failures() == failures:
            shutil.rmtree(output.parent)
        else:
            print(f"run {number}: {plan}; kept in {output.parent}", flush=True)

    def _problem(self, name: str, what: object) -> None:
        self.counts[name] += 1
        print(f"{name}: {what}", flush=True)

    # A start that is killed

    def _start_and_kill(self, plan: Plan, size: int, output: Path, past: Past) -> Past:
        self.counts["starts"] += 1
        ranks = Ranks(size, self.data, output, plan.keys, prepare=partial(slow_disk, plan.slow))
        try:
            kill = self._kill(plan, ranks)
            ended = ranks.wait()
        finally:
            ranks.kill()
        whole = len(kill.victims) == size
        completed = bool(_names(output) - kill.names)
        self.counts.update(["kills", f"kills {KILLS[not whole]}"])
        self.counts["kills during a save"] += bool(kill.under_way) and not completed
        survivors = [rank for rank in range(size) if rank not in kill.victims]
        self._check_survivors([ended[rank] for rank in survivors])
        past = Past(past.step, (*past.worlds, size))
        return self._check_checkpoints(output, kill, past)

    def _kill(self, plan: Plan, ranks: Ranks) -> Kill:
        size = len(ranks.processes)
        victims = [self.rng.randrange(size)] if plan.one_rank else list(range(size))
        while True:
            self._wait_for_the_moment(plan, ranks)
            names, under_way = _names(ranks.output), saves_under_way(ranks.output)
            if under_way or plan.moment != "in a save":
                ranks.signal(signal.SIGKILL, victims)
                return Kill(victims, names, under_way)

    def _wait_for_the_moment(self, plan: Plan, ranks: Ranks) -> None:
        run, some_time = ranks.output, time.monotonic() + self.rng.uniform(0.3, 4)
        last = ranks.done() + self.rng.randint(1, 8)
        ranks.wait_for(
            lambda: ranks.done() >= last or (plan.moment == "any" and time.monotonic() > some_time)
        )
        names = _names(run)
        if plan.moment == "in a save":
            ranks.wait_for(lambda: saves_under_way(run))
            time.sleep(self.rng.uniform(0, 0.05 + 60 * plan.slow / len(ranks.processes)))
        elif plan.moment == "after a save":
            ranks.wait_for(lambda: _names(run) - names)
            time.sleep(self.rng.uniform(0, 0.02 + 40 * plan.slow))

    def _check_survivors(self, survivors: list[Outcome]) -> None:
        for outcome in survivors:
            lines = outcome.err.splitlines()
            errors = [line for line in lines if line.startswith(("error: ", "Traceback"))]
            if outcome.status is None:
                self._problem("hangs", outcome)
            elif outcome.status != 1 or len(errors) != 1 or errors[0].startswith("Traceback"):
                self._problem("unclear", f"{outcome.status} {outcome.err[-1000:]}")

    def _check_checkpoints(self, output: Path, kill: Kill, past: Past) -> Past:
        """What a run that goes on from here has behind it."""
        root = output / "checkpoints"
        for name in _names(output):
            try:
                self._check_files(open_checkpoint(root / name), past)
            except UserError as error:
                self._problem("unreadable", error)
        source = find_checkpoint("auto", root)
        newest = max((int(name.split("-")[1]) for name in kill.names), default=0)
        if newest > (source.meta["step"] if source else 0):
            what = f"step {newest} was there, auto finds {source and source.directory}"
            self._problem("lost", what)
        if source is None:
            return Past()
        return Past(source.meta["step"], past.worlds)

    def _check_files(self, found: Checkpoint, past: Past) -> None:
        """Each file is the one that the reference wrote at the step it is of, to the byte."""
        if TOLERANCE[past.kind]:
            return
        root = self.reference(past.worlds[-1]) / "checkpoints"
        ages = {
            expert_file(layer, e): s
            for layer, steps in found.meta["experts"].items()
            for e, s in enumerate(steps)
        }
        for file, record in found.meta["files"].items():
            steps = [age for expert, age in ages.items() if file.endswith(expert)]
            step = steps[0] if steps else found.meta["step"]
            if step > REFERENCE_STEPS:
                continue
            if record != read_meta(root / f"step-{step:08d}")["files"][file]:
                self._problem("wrong files", f"{found.directory}: {file} of step {step}")
                return

    # The start that is left to its end

    def _finish(self, plan: Plan, output: Path, past: Past) -> None:
        self.counts["starts"] += 1
        size, last = plan.worlds[-1], past.step + MORE_STEPS
        ended = Ranks(size, self.data, output, f"{plan.keys} TRAIN.MAX_STEPS {last}").wait()
        if any(outcome.status is None for outcome in ended):
            self._problem("hangs", ended)
        elif any(outcome.status or outcome.err.strip() for outcome in ended):
            self._problem("failed starts", ended)
        hidden = [path.name for path in (output / "checkpoints").glob(".*")]
        if hidden:
            self._problem("left behind", hidden)
        self._check_losses(output, last, Past(past.step, (*past.worlds, size)))

    def _check_losses(self, output: Path, last: int, past: Past) -> None:
        found, kind = steps(output), past.kind
        expected = dict(steps(self.reference(past.worlds[-1])))
        numbers = [step for step, _ in found]
        if numbers != list(range(1, last + 1)):
            self._problem("wrong losses", f"{output}: steps {numbers}, the last should be {last}")
        pairs = [(loss, expected[step]) for step, loss in found if step in expected]
        self.counts["losses compared"] += len(pairs)
        difference = max((abs(loss / other - 1) for loss, other in pairs), default=0.0)
        self.largest[kind] = max(self.largest[kind], difference)
        if not difference <= TOLERANCE[kind]:
            self._problem("wrong losses", f"{output}: {difference:.1e} away, {kind}")

    def reference(self, size: int) -> Path:
        """A run of so many ranks that nothing interrupted, with a checkpoint of every step."""
        if size not in self.references:
            output = self.directory / f"reference-{size}" / "run"
            keys = f"CHECKPOINT.STEPS 1 CHECKPOINT.KEEP_LAST {REFERENCE_STEPS}"
            self.references[size] = uninterrupted(size, self.data, output, REFERENCE_STEPS, keys)
        return self.references[size]


def _names(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").glob("step-*")}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument(
        "--ranks", type=int, help="of every start (drawn from 1, 2 and 4 if not given)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    directory, started = Path(tempfile.mkdtemp(prefix="kill_and_resume-")), time.monotonic()
    test = KillTest(directory, args.seed, args.ranks)
    for number in range(args.runs):
        test.run(number)
    print(f"{test.summary()}\n{'seconds':48}{time.monotonic() - started:.0f}")
    if test.failures():
        print(f"kept: {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
