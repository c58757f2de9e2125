"""The tuner when the rate of every link is halved in mid-run, on a cluster of network namespaces
(netns.py); needs root, Linux and iproute2.

sudo .venv/bin/python benchmarks/tuner_drift.py                (about 5 minutes on 2 idle cores)
sudo .venv/bin/python benchmarks/tuner_drift.py --layout 2x2 --rate 200 --rounds 5

One MoE layer runs in training, another time in inference, with strategy "auto" and a check every 10
steps. After the tuner has decided, the links get half the rate, and 60 steps follow. Then every
fixed strategy and the tuner's layer are timed in the same interleaved rounds. A step counts as
within 10% if the median of its strategy there is.
"""

# N nodes of g ranks, W = N g

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from cluster import interleaved_over_ranks
from netns import Cluster, require

from moe_core import MoEConfig, MoELayer
from moe_core.parallel import ParallelStrategy, Tuner, make_expert_groups
from moe_core.parallel.cost_model import candidates
from swinv2_moe.measure.rounds import machine
from swinv2_moe.measure.spread import median_and_spread, ratios

# Tokens of a rank, shapes, and rates in Mbit/s at which halving the rate changes the best strategy.
TOKENS = 2048
RATES = {"training": 200.0, "inference": 300.0}
SHAPES = {
    "training": {"model_dim": 128, "hidden_dim": 512, "num_experts": 2},
    "inference": {"model_dim": 128, "hidden_dim": 768, "num_experts": 2},
}
CHECK_STEPS = 10
MOST_STEPS = 200  # maximum number of steps until the first decision
CALM_STEPS = 23  # steps from the decision to the change of the rate, which is between two checks
STEPS_AFTER = 60
WITHIN = 1.1


class Step:
    """A call of one layer on this rank's tokens, with its backward pass in training."""

    def __init__(self, group, strategy: ParallelStrategy | str, mode: str) -> None:
        torch.manual_seed(0)
        self.training = mode == "training"
        shape = SHAPES[mode]
        config = MoEConfig(**shape, capacity_factor=0.0, gate_noise=0.0)
        self.layer = MoELayer(config, group, strategy=strategy).train(self.training)
        self.x = torch.randn(TOKENS, shape["model_dim"]).requires_grad_(self.training)

    def __call__(self) -> None:
        with torch.set_grad_enabled(self.training):
            y, aux_loss = self.layer(self.x)
        if self.training:
            (y.sum() + aux_loss).backward()


class TunedStep(Step):
    """A `Step` with strategy "auto", which checks every 10 calls."""

    def __init__(self, group, mode: str) -> None:
        super().__init__(group, "auto", mode)
        self.tuner = Tuner.of(group)
        self.strategies: list[str] = []  # strategy of each call
        choose = self.tuner.choose

        def record(*args):
            strategy, trial = choose(*args)
            self.strategies.append(str(strategy))
            return strategy, trial

        self.tuner.choose = lambda layer, key, explore: record(layer, key, explore)

    def __call__(self) -> None:
        super().__call__()
        if len(self.strategies) % CHECK_STEPS == 0:
            self.tuner.check()


# On a rank


def drift(rank: int, world_size: int, per_node: int, mode: str, rounds: int, flags: str):
    """Measure a drift: steps, their strategies, and milliseconds of each strategy after the
    change."""
    group = make_expert_groups(world_size, ranks_per_node=per_node)
    tuned = TunedStep(group, mode)
    while not tuned.tuner.decisions() and len(tuned.strategies) < MOST_STEPS:
        tuned()
    until_decided = len(tuned.strategies)
    while len(tuned.strategies) < until_decided + CALM_STEPS or (
        len(tuned.strategies) % CHECK_STEPS != CHECK_STEPS // 2
    ):
        tuned()
    _wait_for_the_change(rank, group, Path(flags))
    change = len(tuned.strategies)
    milliseconds = []
    for _ in range(STEPS_AFTER):
        started = time.perf_counter()
        tuned()
        milliseconds.append(1e3 * (time.perf_counter() - started))
    after = tuned.strategies[change:]
    fixed = candidates(SHAPES[mode]["num_experts"], world_size, world_size // per_node)
    steps = {"tuner": tuned} | {str(s): Step(group, s, mode) for s in fixed}
    times = interleaved_over_ranks(steps, rounds)
    events = [f"{e.kind}: {e.before} -> {e.after}" for e in tuned.tuner.take_events()]
    return {
        "until_decided": until_decided,
        "before": tuned.strategies[change - 1],
        "after": after,
        "step_ms": milliseconds,
        "ms": times,
        "events": [event for event in events if not event.startswith("time")],
    }


def _wait_for_the_change(rank: int, group, flags: Path) -> None:
    group.ranks.barrier(torch.device("cpu"))
    if rank == 0:
        (flags / "ready").touch()
    while not (flags / "changed").exists():
        time.sleep(0.01)
    group.ranks.barrier(torch.device("cpu"))


# In the command


def halve_when_ready(cluster: Cluster, rate: float, flags: Path) -> None:
    while not (flags / "ready").exists():
        time.sleep(0.01)
    cluster.set_rate(rate / 2)
    (flags / "changed").touch()


def measure(cluster: Cluster, rate: float, mode: str, rounds: int) -> dict:
    cluster.set_rate(rate)
    with tempfile.TemporaryDirectory() as directory:
        flags = Path(directory)
        arguments = (cluster, rate, flags)
        threading.Thread(target=halve_when_ready, args=arguments, daemon=True).start()
        return cluster.run(drift, cluster.ranks_per_node, mode, rounds, directory, timeout=900)[0]


def steps_until_near(measured: dict) -> int | None:
    """Number of steps after the change until all following steps are within 10% of the best fixed
    strategy; None if that is not reached in the run."""
    medians = {name: statistics.median(times) for name, times in measured["ms"].items()}
    medians.pop("tuner")
    limit = WITHIN * min(medians.values())
    last_far = 0
    for step, strategy in enumerate(measured["after"], start=1):
        if medians[strategy] > limit:
            last_far = step
    if last_far == len(measured["after"]):
        return None
    return last_far


def row(mode: str, rate: float, measured: dict) -> str:
    medians = {name: statistics.median(times) for name, times in measured["ms"].items()}
    medians.pop("tuner")
    best = min(medians, key=medians.get)
    until = steps_until_near(measured)
    if until is None:
        until = f"more than {STEPS_AFTER}"
    to_best = median_and_spread(ratios(measured["ms"]["tuner"], measured["ms"][best]), 2)
    kept = medians[measured["before"]] / medians[best]
    return (
        f"| {mode} | {rate:g} -> {rate / 2:g} | {measured['until_decided']} | {measured['before']}"
        f" | {kept:.2f} | {until} | {measured['after'][-1]} | {best} | {to_best} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", default="2x2", metavar="NxG", help="nodes x ranks per node")
    parser.add_argument("--rate", type=float, metavar="MBIT", help="of each link, before")
    parser.add_argument("--modes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every number")
    args = parser.parse_args()
    require()
    torch.set_num_threads(1)
    nodes, per_node = map(int, args.layout.split("x"))
    print(f"{machine('cpu')}; load {os.getloadavg()[0]:.1f}")
    print(
        "\n| | Mbit/s | steps to the first decision | before | its time to the new best"
        " | steps to within 10% | after | best fixed | tuner's time to it |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    records = {}
    with Cluster(nodes, per_node) as cluster:
        for mode in args.modes:
            rate = args.rate or RATES[mode]
            measured = measure(cluster, rate, mode, args.rounds)
            records[mode] = measured
            print(row(mode, rate, measured), flush=True)
    if args.json:
        args.json.write_text(json.dumps({"machine": machine("cpu"), **records}) + "\n")


if __name__ == "__main__":
    main()
