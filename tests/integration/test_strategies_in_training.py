"""Expert groups and strategies through the command line: more ranks than experts, replicas, the
tuner's decisions."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

CFG = ["--cfg", "configs/quickstart_digits.yaml"]
# What is left does not depend on how tokens lie on ranks.
EXACT = "MODEL.MOE.CAPACITY_FACTOR 0.0 MODEL.MOE.EVAL_CAPACITY_FACTOR 0.0 MODEL.MOE.GATE_NOISE 0.0"
EXACT += (
    " MODEL.DROP_PATH_RATE 0.0 MODEL.MOE.AUX_LOSS gshard MODEL.MOE.AUX_LOSS_WEIGHT 0.1"
    " MODEL.MOE.GLOBAL_BALANCE true"
)
STEPS, TUNED_STEPS = 15, 60


@pytest.fixture(scope="module")
def run(tmp_path_factory, start_ranks, small):
    """`run(ranks, "KEY value ...", resume=run)` -> run directory, what it printed; 64 images a
    step, two experts."""

    def start(ranks: int, keys: str, *resume: Path) -> tuple[Path, str]:
        output = tmp_path_factory.mktemp("run") / "run"
        opts = [
            *small,
            *EXACT.split(),
            "MODEL.MOE.NUM_EXPERTS",
            "2",
            "DATA.BATCH_SIZE",
            str(64 // ranks),
        ]
        # 22 steps an epoch
        opts += ["TRAIN.EPOCHS", "3", "TRAIN.MAX_STEPS", str(STEPS), *keys.split()]
        resume = ["--resume", *resume] if resume else []
        ended = start_ranks(
            ranks, "tools/train.py", *CFG, "--output", output, *resume, "--opts", *opts
        )
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


PARTS = (
    "MODEL.MOE.STRATEGY fixed MODEL.MOE.R 2 MODEL.MOE.PIPELINE_DEGREE 2 MODEL.MOE.ALL_TO_ALL 2dh"
)
PARTS += " MODEL.MOE.RANKS_PER_NODE 2"
REPLICAS = "MODEL.MOE.EXPERT_PARALLEL_SIZE 1 MODEL.MOE.STRATEGY auto"


# A capacity of 2 for 2 experts has room for all tokens.
STATIC = "MODEL.MOE.STRATEGY fixed MODEL.MOE.EXCHANGE static MODEL.MOE.PIPELINE_DEGREE 2"
STATIC += " MODEL.MOE.CAPACITY_FACTOR 2.0 MODEL.MOE.EVAL_CAPACITY_FACTOR 2.0"
WEIGHTS = "MODEL.MOE.STRATEGY fixed MODEL.MOE.R 0"


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [(4, PARTS), (2, REPLICAS), (2, STATIC), (2, WEIGHTS)],
    ids=["parts of experts", "replicas", "static", "weights"],
)
def test_losses_are_those_of_one_process(run, single, ranks, keys):
    spread = run(ranks, keys)[0]
    expected, found = losses(single), losses(spread)
    assert len(expected) == STEPS
    for (loss, aux_loss), (loss_here, aux_here) in zip(expected, found, strict=True):
        assert loss_here == pytest.approx(loss, rel=1e-4)
        # of the global batch, whatever the ranks
        assert aux_here == pytest.approx(aux_loss, rel=1e-4)
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


def test_the_tuner_decides_and_says_so(tuned, single):
    directory, out = tuned
    for (loss, _), (loss_here, _) in zip(losses(single), losses(directory), strict=False):
        assert loss_here == pytest.approx(loss, rel=1e-4)  # while it tries
    decisions = json.loads((directory / "checkpoints" / "latest" / "meta.json").read_text())[
        "training"
    ]["strategies"]
    assert decisions
    assert all(decision["key"]["group_size"] == 2 for decision in decisions)
    events = strategy_events(directory)
    decided = [event["layers"] for event in events if event["event"] == "decided"]
    # each is said and recorded, perhaps again after a drift
    said = [line for line in out.splitlines() if " over 2 ranks, capacity up to " in line]
    assert all(any(line.startswith(f"{layers}: ") for line in said) for layers in decided)
    assert len(set(decided)) == len(decisions)
    assert {event["event"] for event in events} <= {"decided", "drift", "time"}


def strategy_events(directory: Path) -> list[dict]:
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line["strategy"] for line in lines if "strategy" in line]


def test_decisions_are_taken_over_on_resume(tuned, run):
    directory, out = run(
        2, f"MODEL.MOE.STRATEGY auto TRAIN.MAX_STEPS {TUNED_STEPS + 5} TRAIN.EPOCHS 4", tuned[0]
    )
    before, after = (
        json.loads((root / "checkpoints" / "latest" / "meta.json").read_text())["training"][
            "strategies"
        ]
        for root in (tuned[0], directory)
    )
    assert all(decision in after for decision in before)
    decided = [f"capacity up to {2 ** decision['key']['bucket']}:" for decision in before]
    dims = [f"M={decision['key']['model_dim']} " for decision in before]
    assert not any(
        d in line and m in line
        for line in out.splitlines()
        for d, m in zip(decided, dims, strict=True)
    )
