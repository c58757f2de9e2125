"""Damaged and hostile files: each is refused in one line, or read as what it was before. None ends
a process.

    python tests/integration/fuzz.py    # about 10 minutes on one core
    python tests/integration/fuzz.py --only weights --seed 3 --show
    python tests/integration/fuzz.py --few    # some of each kind, in seconds

Each case changes a copy of good files and reads it as the application does, in a process of its
own, with at most 20 seconds and 1 GB. The changes are in `hostile_files.py`. Prints counts; exit
status 1 if a case was accepted with other content, crashed, was late or took more memory.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.append(str(Path(__file__).parents[1]))  # as a script
import hostile_files as hostile
from hostile_configurations import configurations
from hostile_files import Change
from isolated import Outcome, digest, isolated
from trainer_cases import QUICKSTART, SMALL, make_trainer

from swinv2_moe.checkpoints.checkpoint import find_checkpoint, read_weights_of
from swinv2_moe.commands.call import run_command
from swinv2_moe.config import data_config, load_config, model_config
from swinv2_moe.convert.convert import export_weights, import_weights
from swinv2_moe.data.prepare.make_shards import ShardOptions, make_shards
from swinv2_moe.data.prepare.staging import stage
from swinv2_moe.data.shards import load_shards
from swinv2_moe.data.sources import load_sources
from swinv2_moe.models import build_model, load_dense
from swinv2_moe.train.run import train

SECONDS, BYTES = 20, 1 << 30
GOOD = ("refused", "right")  # how a case may end
COUNTS = {"checkpoints": 300, "weights": 150, "shards": 100, "configurations": 80}
FEW = {"checkpoints": 12, "weights": 12, "shards": 8, "configurations": 40}


class Case(NamedTuple):
    """One change to a copy of good files."""

    name: str
    prepare: Callable[[], object]
    read: Callable[[], str]  # the digest of what was read
    right: frozenset[str]  # the digests that may come of it; empty: it has to be refused
    secret: Path | None = None  # a file that must stay as it is; None: there is none


def verdict(case: Case, outcome: Outcome) -> str:
    """One of GOOD, or what is wrong."""
    if case.secret is not None and case.secret.read_text() != "secret":
        return "wrote outside"
    if outcome.bytes > BYTES:
        return "memory"
    if outcome.kind == "refused":
        return "refused" if outcome.text.strip() and "\n" not in outcome.text else "no one line"
    if outcome.kind == "returned":
        return "right" if outcome.text in case.right else "wrong"
    return outcome.kind


def spread(cases: list, count: int) -> list:
    """At most `count` of the cases, evenly spaced."""
    return cases[:: max(1, len(cases) // count)][:count]


def tensors_digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of names, shapes and values."""
    parts = []
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous()
        parts += [
            f"{name} {list(tensor.shape)} {tensor.dtype}".encode(),
            tensor.view(-1).view(torch.uint8).numpy(),
        ]
    return digest(*map(bytes, parts))


# 1. Checkpoints: a run's two, of which the newer one is changed


def checkpoints(work: Path, count: int, rng: random.Random) -> Iterator[Case]:
    good, root = work / "good", work / "run"
    options = f"{SMALL} TRAIN.EMA_DECAY 0.5 TRAIN.MAX_STEPS 4 CHECKPOINT.STEPS 2".split()
    options += ["DATA.BATCH_SIZE", "32"]
    train(load_config(QUICKSTART, options, output=str(good)))
    trainer = make_trainer(0, 1, "TRAIN.EMA_DECAY 0.5")
    newest = Path("checkpoints", "step-00000004")

    def restore() -> None:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(good, root, symlinks=True)

    def read() -> str:
        found = find_checkpoint("auto", root / "checkpoints")
        weights = read_weights_of(found, trainer.step.model)
        trainer.resume(found)
        return tensors_digest(
            weights | {f"trained {k}": v for k, v in trainer.step.model.state_dict().items()}
        )

    restore()
    whole = isolated(read, SECONDS).text
    shutil.rmtree(root / newest)
    right = frozenset({whole, isolated(read, SECONDS).text})
    assert len(right) == 2, right
    files = sorted(
        path.relative_to(good / newest) for path in (good / newest).rglob("*") if path.is_file()
    )
    for file, change in checkpoint_changes(good / newest, files, count, rng):

        def prepare(file: Path = file, change: Change = change) -> None:
            restore()
            change[1](root / newest / file)
            if file.name != "meta.json" and change[0].startswith("header"):
                reseal(root / newest, file)

        yield Case(f"{file}: {change[0]}", prepare, read, right)


def checkpoint_changes(
    checkpoint: Path, files: list[Path], count: int, rng: random.Random
) -> Iterator[tuple[Path, Change]]:
    """Half of them in meta.json, where most is to be gained."""
    meta = Path("meta.json")
    content = json.loads((checkpoint / meta).read_text())
    weights = [file for file in files if file != meta]
    fixed = [(meta, change) for change in hostile.SPECIAL]
    fixed += [(weights[i % len(weights)], change) for i, change in enumerate(hostile.SPECIAL)]
    fixed += [(meta, hostile.replace_by(hostile.DEEP, "deep JSON"))]
    fixed += [
        (weights[i % len(weights)], change)
        for i, change in enumerate(hostile.header_edits(count // 8))
    ]
    yield from spread(fixed, count)
    for i in range(count - len(fixed)):
        if i % 2:
            yield rng.choice(files), hostile.random_damage(rng)
        else:
            yield meta, hostile.random_edit(content, rng, hostile.seal_meta)


def reseal(checkpoint: Path, file: Path) -> None:
    """The record of a changed file in meta.json made right again, as a hostile writer would."""
    from moe_core.files import fsync_and_hash

    meta = checkpoint / "meta.json"
    content = json.loads(meta.read_text())
    content["files"][str(file)] = fsync_and_hash(checkpoint / file)
    meta.write_text(hostile.seal_meta(json.dumps(content, indent=1)))


# 2. Files of weights: dense ones to start from, others' and our own to import


def weights(work: Path, count: int, rng: random.Random) -> Iterator[Case]:
    config = load_config(QUICKSTART, f"{SMALL} MODEL.NUM_CLASSES 10".split())
    dense = load_config(QUICKSTART, f"{SMALL} MODEL.NUM_CLASSES 10 MODEL.MOE.NUM_EXPERTS 0".split())
    torch.manual_seed(0)
    state = build_model(model_config(dense), 10).state_dict()
    good, changed, output = work / "good", work / "changed", work / "imported"
    good.mkdir()
    torch.save({"model": state}, good / "dense.pth")
    model = build_model(model_config(config), 10)
    save_imports(good, config, model)

    def read_dense(file: Path) -> Callable[[], str]:
        def read() -> str:
            torch.manual_seed(0)
            load_dense(model, file, upcycle=True)
            return tensors_digest(
                {k: v for k, v in model.state_dict().items() if ".router." not in k}
            )

        return read

    def read_import(kind: str, file: Path) -> Callable[[], str]:
        def read() -> str:
            shutil.rmtree(output, ignore_errors=True)
            import_weights(kind, file, output, config if kind != "single" else None)
            return tensors_digest(read_weights_of(find_checkpoint(str(output), output), model))

        return read

    readers = {"dense.pth": read_dense(changed / "dense.pth")}
    readers["tutel.pth"] = read_import("tutel", changed / "tutel.pth")
    readers["single.safetensors"] = read_import("single", changed / "single.safetensors")
    shutil.copytree(good, changed)
    outcomes = {name: isolated(read, SECONDS) for name, read in readers.items()}
    assert all(outcome.kind == "returned" for outcome in outcomes.values()), outcomes
    for name, change in weight_changes(count, rng):

        def prepare(name: str = name, change: Change = change) -> None:
            shutil.rmtree(changed, ignore_errors=True)
            shutil.copytree(good, changed)
            change[1](changed / name)

        yield Case(f"{name}: {change[0]}", prepare, readers[name], frozenset({outcomes[name].text}))


def save_imports(directory: Path, config, model: torch.nn.Module) -> None:
    """Files that `export` writes, with the tensors of a torch file below "model"."""
    from swinv2_moe.checkpoints.checkpoint import write_weights

    checkpoint = directory.parent / "checkpoint"
    write_weights(checkpoint, model, model.state_dict(), config.dump(), [])
    export_weights("single", checkpoint, directory / "single.safetensors")
    export_weights("tutel", checkpoint, directory / "tutel.pth")
    file = directory / "tutel.pth"
    torch.save({"model": torch.load(file, weights_only=True)}, file)


def weight_changes(count: int, rng: random.Random) -> Iterator[tuple[str, Change]]:
    torch_files = ("dense.pth", "tutel.pth")
    fixed = [(file, change) for change in hostile.pth_changes() for file in torch_files]
    fixed += [
        (file, change)
        for change in hostile.SPECIAL
        for file in (*torch_files, "single.safetensors")
    ]
    lengths = (0, 1, 1 << 20, 1 << 40, (1 << 64) - 1)
    fixed += [("single.safetensors", change) for change in hostile.header_edits(14)]
    fixed += [("single.safetensors", hostile.header_length(length)) for length in lengths]
    yield from spread(fixed, count)
    for _ in range(count - len(fixed)):
        # safetensors has no checksum of its data
        yield rng.choice(torch_files), hostile.random_damage(rng)


# 3. Shards: staged, which compares checksums, and read


def shards(work: Path, count: int, rng: random.Random) -> Iterator[Case]:
    good, source, target = work / "good", work / "source", work / "target"
    secret = work / "secret"
    config = load_config(QUICKSTART, SMALL.split())
    make_shards(load_sources(data_config(config)), str(good), ShardOptions(shard_mb=0.1), workers=1)
    index = json.loads((good / "index.json").read_text())
    files = sorted(path.relative_to(good) for path in good.rglob("*") if path.is_file())

    def restore() -> None:
        for directory in (source, target):
            shutil.rmtree(directory, ignore_errors=True)
        shutil.copytree(good, source)
        secret.write_text("secret")

    def read() -> str:
        stage(str(source), str(target), workers=1)
        parts = []
        for split in load_shards(str(target))[:2]:
            parts += [split.read(i) + bytes([split.targets[i]]) for i in range(len(split))]
        return digest(*parts)

    restore()
    right = frozenset({isolated(read, SECONDS).text})
    for i in range(count):
        if i < 2 * len(hostile.SPECIAL):
            file, change = files[i % len(files)], hostile.SPECIAL[i % len(hostile.SPECIAL)]
        elif i % 3:
            file, change = Path("index.json"), hostile.random_edit(index, rng)
        else:
            file, change = rng.choice(files), hostile.random_damage(rng)

        def prepare(file: Path = file, change: Change = change) -> None:
            restore()
            change[1](source / file)

        yield Case(f"{file}: {change[0]}", prepare, read, right, secret)


# 4. Configurations


def configuration_cases(work: Path, count: int, rng: random.Random) -> Iterator[Case]:
    for name, write, accepted in configurations(work, count, rng):

        def read() -> str:
            return load_config(work / "config.yaml").dump()

        def prepare(write: Callable[[Path], object] = write) -> None:
            for file in work.iterdir():
                file.unlink()
            write(work / "config.yaml")

        right = frozenset()
        if accepted is not None:
            right = frozenset({load_config(None, accepted).dump()})
        yield Case(name, prepare, read, right)


KINDS = {
    "checkpoints": checkpoints,
    "weights": weights,
    "shards": shards,
    "configurations": configuration_cases,
}


# The command


def fuzz(kind: str, count: int, seed: int, show: bool = False) -> Counter[str]:
    """How many cases of a kind ended how; each that is not good is printed."""
    torch.set_num_threads(1)
    ends: Counter[str] = Counter()
    work = Path(tempfile.mkdtemp(prefix=f"fuzz-{kind}-"))
    for case in KINDS[kind](work, count, random.Random(seed)):
        case.prepare()
        outcome = isolated(case.read, SECONDS)
        end = verdict(case, outcome)
        ends[end] += 1
        if show or end not in GOOD:
            print(
                f"{end}: {case.name}: {outcome.text[:300]} ({outcome.seconds:.1f} s,"
                f" {outcome.bytes >> 20} MB)"
            )
    shutil.rmtree(work, ignore_errors=True)
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=KINDS, nargs="*", default=list(KINDS))
    parser.add_argument("--count", type=int, help="cases of each kind; default: " + str(COUNTS))
    parser.add_argument("--few", action="store_true", help="fewer: " + str(FEW))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--show", action="store_true", help="print every case")
    args = parser.parse_args()
    failed = False
    for kind in args.only:
        started = time.monotonic()
        count = args.count or (FEW if args.few else COUNTS)[kind]
        ends = fuzz(kind, count, args.seed, args.show)
        counts = ", ".join(f"{end} {count}" for end, count in sorted(ends.items()))
        print(
            f"{kind}: {ends.total()} cases: {counts} ({time.monotonic() - started:.0f} s)",
            flush=True,
        )
        failed |= any(end not in GOOD for end in ends)
    sys.exit(failed)


if __name__ == "__main__":
    run_command(main)
