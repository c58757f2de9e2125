"""Copy shards to a local disk: every checksum compared, timed, and resumed where it was stopped.

swinv2-moe stage SHARDS LOCAL
swinv2-moe train --cfg CONFIG --data LOCAL --opts DATA.DATASET shards

On several nodes, started by torchrun with one process on each, a shard is read from SHARDS by one
node, which sends it to the others:

torchrun --nnodes 4 --nproc-per-node 1 ... -m swinv2_moe stage SHARDS LOCAL
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from swinv2_moe.commands.options import CommandParser
from swinv2_moe.errors import UserError
from swinv2_moe.output import print_lines

if TYPE_CHECKING:  # it imports torch
    from swinv2_moe.data.prepare.shard_exchange import ShardExchange

_TIMEOUT = 86_400  # in seconds; a node may have to compare the checksums of many existing files


@contextmanager
def open_exchange() -> Iterator["ShardExchange | None"]:
    """The exchange among the nodes that torchrun started; None without torchrun."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield None
        return
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    if per_node != 1:
        raise UserError(
            f"--nproc-per-node is {per_node}, it must be 1: stage has one process on each node"
        )
    from moe_core.parallel import Ranks
    from swinv2_moe.data.prepare.shard_exchange import ShardExchange
    from swinv2_moe.ranks.world import open_world

    with open_world("cpu", _TIMEOUT) as world:
        yield ShardExchange(Ranks(world.group, f"node {world.rank} of {world.size}"))


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("shards", metavar="SHARDS", help="made by make-shards")
    parser.add_argument("local", metavar="LOCAL", help="a directory on the local disk")
    parser.add_setting("--workers", 4, "threads")
    parser.add_argument(
        "--trust", action="store_true", help="keep files of the right size without reading them"
    )
    args = parser.parse_args()
    if args.workers < 1:
        parser.error(f"--workers is {args.workers}, it must be at least 1")
    from swinv2_moe.data.prepare.staging import stage

    with open_exchange() as exchange:
        done = stage(args.shards, args.local, args.workers, args.trust, exchange)
    notes = []
    if exchange is not None:
        notes.append(f"{done.source_bytes:,} of them from {args.shards}")
    if done.kept:
        notes.append(f"{done.kept:,} files were there")
    note = ""
    if notes:
        note = f" ({', '.join(notes)})"
    rate = f"{done.bytes / done.seconds:,.0f} bytes/s"
    print_lines(
        f"{args.local}: {done.shards:,} shards, {done.bytes:,} bytes in {done.seconds:.1f} s,"
        f" {rate}{note}"
    )
