"""The GPU part of channels.py: all-to-all and all-reduce through channels, compared with NCCL."""

# P ranks

import argparse
import tempfile
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cluster import interleaved_over_ranks
from results_file import Table, publish
from timing import per_call, repeat
from torch import Tensor

from moe_core.comm.cuda_collectives import CudaAllToAll
from moe_core.comm.switch import SwitchChannel
from moe_core.parallel import Ranks
from swinv2_moe.measure.spread import median_and_spread, ratios

CALLS = 20  # number of calls that are timed together
TITLE = "Channels between GPUs"
COLUMNS = ["ranks", "", "bytes", "channels, ms", "NCCL, ms", "to NCCL"]


def compare(args: argparse.Namespace, sizes: list[int], num_ranks: list[int], command: str) -> None:
    """Print and save the table, or print the reason why nothing is measured.

    Args:
        sizes: bytes of each rank's rows.
    """
    num_devices = torch.cuda.device_count()
    if num_devices < 2:
        print(f"{TITLE}: not measured ({num_devices} CUDA devices, at least 2 are needed)")
        return
    records: list[dict] = []
    note: list[str] = []
    for size in num_ranks:
        if size > num_devices:
            continue
        with tempfile.TemporaryDirectory() as directory:
            out = f"{directory}/records"
            mp.spawn(rank_main, (size, sizes, args.rounds, f"{directory}/store", out), nprocs=size)
            of_size, note = torch.load(out, weights_only=False)
            records += of_size
    notes = [f"{CALLS} calls between synchronisations", *note]
    rows = [row(record) for record in records]
    publish(Table(TITLE, command, COLUMNS, rows, notes, records), "cuda", args.output)


def row(record: dict) -> list[str]:
    times = record["ms"]
    return [
        str(record["ranks"]),
        record["what"],
        f"{record['bytes']:,}",
        median_and_spread(times["channels"], 3),
        median_and_spread(times["NCCL"], 3),
        median_and_spread(ratios(times["channels"], times["NCCL"]), 2),
    ]


def rank_main(rank: int, size: int, sizes: list[int], rounds: int, store: str, out: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=size)
    ranks = Ranks(dist.group.WORLD, f"rank {rank} of {size}")
    exchange = CudaAllToAll(ranks)
    switch, note = make_switch(ranks, max(sizes))
    records: list[dict] = []
    for num_bytes in sizes:
        # small integers, so that sums are exact; a multiple of 16 bytes for each rank
        num_rows = max(num_bytes // 16, size) // size * size
        rows = (torch.arange(4 * num_rows, device="cuda") % 64).float().view(num_rows, 4) + rank
        received = torch.empty_like(rows)

        def nccl(rows: Tensor = rows, received: Tensor = received) -> Tensor:
            dist.all_to_all_single(received, rows)
            return received

        times = timed("all-to-all", partial(exchange.all_to_all, rows), nccl, rounds)
        records.append({"ranks": size, "what": "all-to-all", "bytes": rows.nbytes, "ms": times})
        exchange.synchronize()
        if switch is not None:
            summed = torch.empty_like(rows)

            def nccl_sum(rows: Tensor = rows, summed: Tensor = summed) -> Tensor:
                dist.all_reduce(summed.copy_(rows))
                return summed

            times = timed("all-reduce", partial(switch.all_reduce, rows), nccl_sum, rounds)
            records.append(
                {"ranks": size, "what": "all-reduce, switch", "bytes": rows.nbytes, "ms": times}
            )
    if rank == 0:
        torch.save((records, note), out)
    dist.destroy_process_group()


def make_switch(ranks: Ranks, num_bytes: int) -> tuple[SwitchChannel | None, list[str]]:
    """The switch channel, or a note with the reason why it is not measured."""
    try:
        return SwitchChannel(ranks, num_bytes), []
    except RuntimeError as error:  # raised on all ranks
        return None, [f"switch channel: not measured ({error})"]


def timed(
    name: str, channels: Callable[[], Tensor], nccl: Callable[[], Tensor], rounds: int
) -> dict:
    """Milliseconds of one call on the slowest rank."""
    if not torch.equal(channels(), nccl()):
        raise SystemExit(f"{name} is not what NCCL gives")
    alternatives = {
        "channels": partial(repeat, channels, CALLS),
        "NCCL": partial(repeat, nccl, CALLS),
    }
    times = interleaved_over_ranks(alternatives, rounds, f"cuda:{dist.get_rank()}")
    return {which: per_call(times[which], CALLS) for which in times}
