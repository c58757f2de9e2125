"""Linear against 2DH all-to-all between processes of this machine; bit-equal, or the run ends.

    python benchmarks/alltoall.py --ranks 4 --ranks-per-node 2       (gloo, half a minute)
    torchrun --nproc-per-node 8 benchmarks/alltoall.py               (ranks that are there; NCCL on
    GPUs)

Without torchrun all ranks share the cores and talk over the loopback: it shows what an exchange
costs the processor, and "nodes" are groups of ranks. cluster.py has links with rates between them.
"""

# W ranks, g ranks of a node

import argparse
import os
import shlex
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cluster import SIZES, interleaved_over_ranks
from results_file import Table, publish

from moe_core.parallel import all_to_all, make_expert_groups
from swinv2_moe.measure.spread import median_and_spread, ratios

ALGORITHMS = ("linear", "2dh")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="without torchrun")
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="in place of benchmarks/results/"
    )
    return parser.parse_args()


def measure(args: argparse.Namespace, device: str) -> None:
    """Measure on every rank; rank 0 writes the results."""
    group = make_expert_groups(dist.get_world_size(), ranks_per_node=args.ranks_per_node)
    table, data = [], []
    for size, floats in SIZES.items():
        rows = (
            torch.arange(floats, dtype=torch.float32, device=device).view(group.size, -1)
            + group.rank
        )
        ways = {
            name: lambda name=name, rows=rows: all_to_all(rows, group, algorithm=name)
            for name in ALGORITHMS
        }
        if not torch.equal(*(way() for way in ways.values())):
            raise SystemExit(f"{size}: 2dh gives another result than linear")
        times = interleaved_over_ranks(ways, args.rounds)
        for name in ALGORITHMS:
            ratio = ratios(times[name], times["linear"])
            layout = f"{group.size // args.ranks_per_node} x {args.ranks_per_node}"
            table.append(
                [layout, size, name, median_and_spread(times[name], 2), median_and_spread(ratio, 2)]
            )
            data.append({"size": size, "algorithm": name, "ms": times[name]})
    if group.rank == 0:
        columns = ["nodes x ranks", "a rank sends", "", "ms", "to linear"]
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
