"""Channels through shared memory beside gloo, between processes of this machine.

    python benchmarks/channels.py                       (2, 4 and 8 ranks, some ten minutes)
    python benchmarks/channels.py --ranks 2 --most 65536

Primitives: a signal there and back, and a put of as many bytes. Collectives: `Collectives` and
torch.distributed with gloo; they are bit-equal, or the run ends. A layer: one training step of an
expert-parallel layer with `linear` and with `channels`. Where there are several GPUs: all-to-all
and all-reduce through their channels, beside NCCL.
"""

# P ranks

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import channels_gpu
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cluster import interleaved_over_ranks
from results_file import Table, publish
from timing import per_call, repeat
from torch import Tensor

from moe_core import MoEConfig, MoELayer
from moe_core.comm import ChannelGroup, Collectives
from moe_core.parallel import ParallelStrategy, Ranks, make_expert_groups
from swinv2_moe.measure.spread import Times, median_and_spread, ratios

SMALL = 2**16  # bytes of the largest input of an all-reduce
# bytes of all calls that are timed together; there are at most MOST_CALLS calls
TIMED_BYTES = 2**24
MOST_CALLS = 20
LAYER = {"model_dim": 256, "hidden_dim": 512}
LAYER_TOKENS = 512
COLUMNS = ["ranks", "", "bytes", "channels, ms", "gloo, ms", "to gloo", "memcpy / channels"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--least", type=int, default=64, metavar="BYTES")
    parser.add_argument("--most", type=int, default=2**26, metavar="BYTES")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--output", type=Path, metavar="FILE.json", help="in place of benchmarks/results/"
    )
    return parser.parse_args()


def sizes(args: argparse.Namespace) -> list[int]:
    """The powers of 16 times `least` up to `most`, and `most`."""
    listed = []
    size = args.least
    while size < args.most:
        listed.append(size)
        size *= 16
    return [*listed, args.most]


# On a rank


class Case(NamedTuple):
    """One collective of one size, through channels and gloo. Both write to `out`, which is
    allocated before."""

    name: str
    out: Tensor
    channels: Callable[[], object]
    gloo: Callable[[], object]


def cases(rows: Tensor, collectives: Collectives, most: int) -> Iterator[Case]:
    size = collectives.ranks.size
    out = torch.empty_like(rows)
    yield Case(
        "all-to-all",
        out,
        lambda: collectives.all_to_all(rows, out),
        lambda: dist.all_to_all_single(out, rows),
    )
    reduced = rows.new_empty(len(rows) // size)
    yield Case(
        "reduce-scatter",
        reduced,
        lambda: collectives.reduce_scatter(rows, reduced),
        lambda: dist.reduce_scatter_tensor(reduced, rows),
    )
    if size * rows.nbytes <= most:
        gathered = rows.new_empty(size * len(rows))
        yield Case(
            "all-gather",
            gathered,
            lambda: collectives.all_gather(rows, gathered),
            lambda: dist.all_gather_into_tensor(gathered, rows),
        )
    if rows.nbytes <= SMALL:
        summed = torch.empty_like(rows)
        yield Case(
            "all-reduce",
            summed,
            lambda: collectives.all_reduce(rows, summed),
            lambda: dist.all_reduce(summed.copy_(rows)),
        )


def timed(alternatives: dict[str, Callable], rounds: int, num_bytes: int) -> dict[str, Times]:
    """Milliseconds of one call on the slowest rank."""
    calls = max(1, min(MOST_CALLS, TIMED_BYTES // max(num_bytes, 1)))
    repeated = {name: partial(repeat, work, calls) for name, work in alternatives.items()}
    times = interleaved_over_ranks(repeated, rounds)
    return {name: per_call(times[name], calls) for name in times}


def measure_collectives(args: argparse.Namespace, rank: int, size: int) -> list[dict]:
    process_group = dist.group.WORLD
    collectives = Collectives(Ranks(process_group, f"rank {rank} of {size}"))
    records = []
    for num_bytes in sizes(args):
        # small integers, so that sums are exact
        rows = torch.arange(max(num_bytes // 4, size)).float() % 64 + rank
        memcpy = partial(torch.empty_like(rows).copy_, rows)
        for case in cases(rows, collectives, args.most):
            case.gloo()
            expected = case.out.clone()
            case.channels()
            if not torch.equal(case.out, expected):
                raise SystemExit(f"{case.name} of {num_bytes} bytes is not what gloo gives")
            alternatives = {"channels": case.channels, "gloo": case.gloo, "memcpy": memcpy}
            times = timed(alternatives, args.rounds, num_bytes)
            records.append({"ranks": size, "what": case.name, "bytes": rows.nbytes, "ms": times})
    return records


def measure_primitives(args: argparse.Namespace, rank: int, size: int) -> list[dict]:
    """Measure a put there and back between ranks 0 and 1. Other ranks only take part in the
    barriers of the timing."""
    ranks = Ranks(dist.group.WORLD, f"rank {rank} of {size}")
    group = ChannelGroup(ranks, args.most)
    records = []
    for num_bytes in [0, *sizes(args)]:
        source = torch.ones(num_bytes, dtype=torch.uint8)
        copied = torch.empty_like(source)

        def there_and_back(source: Tensor = source) -> None:
            if rank < 2:
                channel = group.channel(1 - rank)
                if rank == 0:
                    channel.put(0, source)
                    channel.wait()
                else:
                    channel.wait()
                    channel.put(0, source)

        def gloo(source: Tensor = source, copied: Tensor = copied) -> None:
            if rank == 0:
                dist.send(source, 1)
                dist.recv(copied, 1)
            elif rank == 1:
                dist.recv(copied, 0)
                dist.send(source, 0)

        def memcpy_twice(source: Tensor = source, copied: Tensor = copied) -> None:
            if rank == 0:
                copied.copy_(source)
                copied.copy_(source)

        alternatives = {"channels": there_and_back, "gloo": gloo, "memcpy": memcpy_twice}
        times = timed(alternatives, args.rounds, num_bytes)
        records.append({"ranks": size, "what": "put and back", "bytes": num_bytes, "ms": times})
    return records


def measure_layer(args: argparse.Namespace, rank: int, size: int) -> list[dict]:
    group = make_expert_groups(size)
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(num_experts=size, top_k=2, **LAYER), group)
    x = torch.randn(LAYER_TOKENS, LAYER["model_dim"], generator=torch.Generator().manual_seed(rank))

    def step(name: str) -> Tensor:
        layer.zero_grad()
        y, aux_loss = layer(x, strategy=ParallelStrategy(all_to_all=name))
        (y.square().mean() + aux_loss).backward()
        return y.detach()

    if not torch.equal(step("channels"), step("linear")):
        raise SystemExit("a layer gives another result with channels than with linear")
    alternatives = {"channels": partial(step, "channels"), "gloo": partial(step, "linear")}
    times = interleaved_over_ranks(alternatives, args.rounds)
    num_bytes = 4 * 2 * LAYER_TOKENS * LAYER["model_dim"]
    return [{"ranks": size, "what": "step of a layer", "bytes": num_bytes, "ms": times}]


def rank_main(rank: int, args: argparse.Namespace, size: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    records = measure_primitives(args, rank, size) if size == 2 else []
    records += measure_collectives(args, rank, size)
    records += measure_layer(args, rank, size)
    if rank == 0:
        torch.save(records, out)
    dist.destroy_process_group()


def row(record: dict) -> list[str]:
    times = record["ms"]
    share = ""
    if "memcpy" in times and record["bytes"]:
        share = median_and_spread(ratios(times["memcpy"], times["channels"]), 2)
    return [
        str(record["ranks"]),
        record["what"],
        f"{record['bytes']:,}",
        median_and_spread(times["channels"], 3),
        median_and_spread(times["gloo"], 3),
        median_and_spread(ratios(times["channels"], times["gloo"]), 2),
        share,
    ]


def main() -> None:
    args = arguments()
    records: list[dict] = []
    for size in args.ranks:
        with tempfile.TemporaryDirectory() as directory:
            out = f"{directory}/records"
            mp.spawn(rank_main, (args, size, f"{directory}/store", out), nprocs=size)
            records += torch.load(out, weights_only=False)
    command = shlex.join(["python", "benchmarks/channels.py", *sys.argv[1:]])
    notes = [
        "put and back: a put with its signal in both directions, between two ranks",
        "memcpy: every rank copies as many bytes once (put and back: one rank twice)",
        f"step of a layer: {LAYER_TOKENS} tokens of each rank, top 2, {LAYER}; gloo is `linear`",
    ]
    rows = [row(record) for record in records]
    table = Table("Channels on one machine", command, COLUMNS, rows, notes, records)
    publish(table, "cpu", args.output)
    channels_gpu.compare(args, sizes(args), args.ranks, command)


if __name__ == "__main__":
    main()
