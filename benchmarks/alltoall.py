"""All-to-all algorithms between processes of this machine; bit-equal, or the run ends.

    python benchmarks/alltoall.py --ranks 4 --ranks-per-node 2       (gloo, half a minute)
    python benchmarks/alltoall.py --algorithms linear 2dh channels
    torchrun --nproc-per-node 8 benchmarks/alltoall.py               (ranks that are there; NCCL on
    GPUs)

Without torchrun all ranks share the cores and talk over the loopback: it shows what an exchange
costs the processor, and "nodes" are groups of ranks.
"""

# W ranks, g ranks of a node

import argparse
import os
import shlex
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from results_file import Table, publish

from moe_core.parallel import all_to_all, make_expert_groups
from swinv2_moe.measure.rounds import interleaved
from swinv2_moe.measure.spread import median_and_spread, ratios
from swinv2_moe.ranks.world import World

SIZES = {"64 KiB": 2**14, "1 MiB": 2**18, "4 MiB": 2**20}  # floats that a rank sends


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="without torchrun")
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument(
        "--algorithms", nargs="+", default=["linear", "2dh"], help="ratios are to the first one"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="in place of benchmarks/results/"
    )
    return parser.parse_args()


def measure(args: argparse.Namespace, device: str) -> None:
    """Measure on every rank; rank 0 writes the results."""
    group = make_expert_groups(dist.get_world_size(), ranks_per_node=args.ranks_per_node)
    world = World(group.rank, group.size, torch.device(device), group=dist.group.WORLD)
    layout = f"{group.size // args.ranks_per_node} x {args.ranks_per_node}"
    first = args.algorithms[0]
    table, data = [], []
    for size, floats in SIZES.items():
        rows = (
            torch.arange(floats, dtype=torch.float32, device=device).view(group.size, -1)
            + group.rank
        )
        ways = {name: partial(all_to_all, rows, group, algorithm=name) for name in args.algorithms}
        for name, way in ways.items():
            if not torch.equal(way(), ways[first]()):
                raise SystemExit(f"{size}: {name} gives another result than {first}")
        times = interleaved(ways, args.rounds, warmup=1, world=world)
        for name in ways:
            ratio = ratios(times[name], times[first])
            cells = [median_and_spread(times[name], 2), median_and_spread(ratio, 2)]
            table.append([layout, size, name, *cells])
            data.append({"size": size, "algorithm": name, "ms": times[name]})
    if group.rank == 0:
        columns = ["nodes x ranks", "a rank sends", "", "ms", f"to {first}"]
        command = shlex.join(["python", "benchmarks/alltoall.py", *sys.argv[1:]])
        publish(
            Table("All-to-all on one machine", command, columns, table, (), data),
            device,
            args.output,
        )


def rank_main(rank: int, args: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    measure(args, "cpu")
    dist.destroy_process_group()


def main() -> None:
    args = arguments()
    if "RANK" in os.environ:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        measure(args, device)
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(rank_main, (args, f"{directory}/store"), nprocs=args.ranks)


if __name__ == "__main__":
    main()
