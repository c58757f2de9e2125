"""Weights that are gathered one layer ahead (r = 0) beside weights gathered when they are used.

    sudo .venv/bin/python benchmarks/gather_ahead.py

Two ranks on two nodes with shaped links train a network of MoE layers and dense layers between
them. The link's rate is chosen so that the weights and their gradients of a step take about as long
as the work of the step. Each round runs both forms in turn.
"""

# T tokens, M model dim

import argparse
import time
from contextlib import nullcontext
from statistics import median

import netns
import torch
from torch import Tensor, nn

from moe_core import MoEConfig, MoELayer, gather_ahead
from moe_core.parallel import ExpertGroup, ParallelStrategy, make_expert_groups
from swinv2_moe.command import run_command

NUM_LAYERS = 4


class Network(nn.Module):
    """MoE layers with a dense layer before each."""

    def __init__(self, group: ExpertGroup | None, width: int, num_experts: int) -> None:
        super().__init__()
        config = MoEConfig(width, 2 * width, num_experts)
        strategy = ParallelStrategy(r=0) if group else ParallelStrategy()
        self.dense = nn.ModuleList(nn.Linear(width, width) for _ in range(NUM_LAYERS))
        self.moe = nn.ModuleList(
            MoELayer(config, group, strategy=strategy) for _ in range(NUM_LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for dense, moe in zip(self.dense, self.moe, strict=True):
            y, _ = moe(dense(x).relu())
            x = x + y
        return x.square().mean()


def step_seconds(network: Network, x: Tensor, ahead: bool) -> float:
    begin = time.perf_counter()
    with gather_ahead(network) if ahead else nullcontext():
        loss = network(x)
    loss.backward()
    network.zero_grad()
    return time.perf_counter() - begin


def measure(rank: int, world_size: int, width: int, num_tokens: int, rounds: int) -> list:
    """For each round, the seconds of a step: on one rank alone, with gathers in place, and with
    gathers ahead."""
    torch.manual_seed(0)
    group = make_expert_groups(world_size)
    network = Network(group, width, 4)
    alone = Network(None, width, 4)
    x = torch.randn(num_tokens, width)
    times = []
    for _ in range(rounds + 1):
        group.ranks.barrier(x.device)
        work = step_seconds(alone, x, ahead=False)
        both = []
        for ahead in (False, True):
            group.ranks.barrier(x.device)
            both.append(step_seconds(network, x, ahead))
        times.append([work, *both])
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rates", type=float, nargs="+", default=[100, 200, 400], metavar="MBIT")
    args = parser.parse_args()
    netns.require()
    print("| Mbit/s | work (ms) | in place (ms) | ahead (ms) | ahead / in place | hidden |")
    print("|---:|---:|---:|---:|---:|---:|")
    for rate in args.rates:
        with netns.Cluster(2, 1, rate) as cluster:
            sizes = (args.width, args.tokens, args.rounds)
            times = cluster.run(measure, *sizes, timeout=600)[0]
        print(row(rate, times))


def row(rate: float, times: list) -> str:
    """A line of the table: medians, and the ratio's range; `hidden` is the saved time divided by
    the time that could be hidden, which is the smaller of exchange and work."""
    work, in_place, ahead = (1e3 * median(column) for column in zip(*times, strict=True))
    ratios = sorted(after / before for _, before, after in times)
    ratio = f"{median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})"
    hidden = (in_place - ahead) / min(in_place - work, work)
    return f"| {rate:g} | {work:.0f} | {in_place:.0f} | {ahead:.0f} | {ratio} | {hidden:.0%} |"


if __name__ == "__main__":
    run_command(main)
