"""Expert groups and strategies through the command line: more ranks than experts, replicas, the
tuner's decisions."""

import json
import shlex
from pathlib import Path

import pytest
from safetensors.torch import load_file

CFG = ["--cfg", "configs/quickstart_digits.yaml"]
# What is left does not depend on how tokens lie on ranks.
EXACT = (
    "MODEL.MOE.CAPACITY_FACTOR 0 MODEL.MOE.EVAL_CAPACITY_FACTOR 0 MODEL.MOE.GATE_NOISE 0"
    " MODEL.DROP_PATH_RATE 0 MODEL.MOE.AUX_LOSS gshard MODEL.MOE.AUX_LOSS_WEIGHT 0.1"
    " MODEL.MOE.GLOBAL_BALANCE true MODEL.MOE.NUM_EXPERTS 2 TRAIN.EPOCHS 3"
)
STEPS, TUNED_STEPS = 6, 60  # an epoch has 44


@pytest.fixture(scope="module")
def run(tmp_path_factory, start_ranks, small):
    """`run(ranks, "KEY value ...", resume=run)` -> run directory, what it printed; 32 images a
    step, two experts."""

    def start(ranks: int, keys: str, *resume: Path) -> tuple[Path, str]:
        output = tmp_path_factory.mktemp("run") / "run"
        resume = ["--resume", *resume] if resume else []
        opts = [*small, EXACT, "DATA.BATCH_SIZE", 32 // ranks, "TRAIN.MAX_STEPS", STEPS]
        opts += map(Path, shlex.split(keys))  # paths are not split at spaces
        words = [*CFG, "--output", output, *resume, "--opts", *opts]
        ended = start_ranks(ranks, "tools/train.py", *words)
        assert [outcome.status for outcome in ended] == [0] * ranks, ended
        return output, ended[0].out

    return start


def losses(directory: Path) -> list[tuple[float, float]]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["aux_loss"]) for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def single(run):
    return run(1, "")[0]


@pytest.fixture(scope="module")
def tuned(run):
    return run(2, f"MODEL.MOE.STRATEGY auto TRAIN.MAX_STEPS {TUNED_STEPS}")


KEYS = {
    "parts of experts": "MODEL.MOE.STRATEGY 'r2 d2 2dh n2'",
    "replicas": "MODEL.MOE.EXPERT_PARALLEL_SIZE 1 MODEL.MOE.STRATEGY auto",
    # A capacity of 2 for 2 experts has room for all tokens.
    "static": (
        "MODEL.MOE.STRATEGY 'd2 static'"
        " MODEL.MOE.CAPACITY_FACTOR 2 MODEL.MOE.EVAL_CAPACITY_FACTOR 2"
    ),
    "weights": "MODEL.MOE.STRATEGY r0",
}


@pytest.mark.parametrize("name", KEYS)
def test_losses_are_those_of_one_process(run, single, name):
    """Sums in another order differ by some 2^-24 of each loss; training makes that larger, by far
    less than 100 times in a few steps."""
    ranks = 4 if name == "parts of experts" else 2
    spread = run(ranks, KEYS[name])[0]
    expected, found = losses(single), losses(spread)
    assert len(expected) == STEPS
    for here, there in zip(found, expected, strict=True):
        assert here == pytest.approx(there, rel=1e-4)  # of the global batch, whatever the ranks
    same_files(single / "checkpoints" / "latest", spread / "checkpoints" / "latest")


def same_files(one: Path, other: Path) -> None:
    """Names and shapes: every expert whole and once."""
    files = sorted(str(path.relative_to(one)) for path in one.rglob("*.safetensors"))
    assert files == sorted(str(path.relative_to(other)) for path in other.rglob("*.safetensors"))
    for file in files:
        shapes = [
            {name: tensor.shape for name, tensor in load_file(root / file).items()}
            for root in (one, other)
        ]
        assert shapes[0] == shapes[1]


def decisions(run: Path) -> list[dict]:
    meta = json.loads((run / "checkpoints" / "latest" / "meta.json").read_text())
    return meta["training"]["strategies"]


def test_the_tuner_decides_and_says_so(tuned, single):
    directory, out = tuned
    for here, there in zip(losses(directory), losses(single), strict=False):
        assert here[0] == pytest.approx(there[0], rel=1e-4)  # while it tries
    assert decisions(directory)
    assert all(decision["key"]["group_size"] == 2 for decision in decisions(directory))
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    events = [line["strategy"] for line in lines if "strategy" in line]
    decided = [event["layers"] for event in events]
    # each is said and recorded
    said = [line for line in out.splitlines() if " over 2 ranks, capacity up to " in line]
    assert all(any(line.startswith(f"{layers}: ") for line in said) for layers in decided)
    assert len(set(decided)) == len(decisions(directory))
    assert {event["event"] for event in events} == {"decided"}


def test_decisions_are_taken_over_on_resume(tuned, run):
    before = decisions(tuned[0])
    keys = f"MODEL.MOE.STRATEGY auto TRAIN.MAX_STEPS {TUNED_STEPS + 5} TRAIN.EPOCHS 4"
    directory, out = run(2, keys, tuned[0])
    assert all(decision in decisions(directory) for decision in before)
    for decision in before:
        capacity = f"capacity up to {2 ** decision['key']['bucket']}:"
        dim = f"M={decision['key']['model_dim']} "
        assert not [line for line in out.splitlines() if capacity in line and dim in line]
