"""Copy shards to a local disk: every checksum compared, timed, and resumed where it was stopped.

python data/stage.py SHARDS LOCAL
python tools/train.py --cfg CONFIG --data LOCAL --opts DATA.DATASET shards
"""

from swinv2_moe.command import CommandParser


def main() -> None:
    parser = CommandParser(description=__doc__)
    parser.add_argument("shards", metavar="SHARDS", help="made by make-shards")
    parser.add_argument("local", metavar="LOCAL", help="a directory on the local disk")
    parser.add_argument("--workers", type=int, default=4, help="threads (default: %(default)s)")
    parser.add_argument(
        "--trust", action="store_true", help="keep files of the right size without reading them"
    )
    args = parser.parse_args()
    from swinv2_moe.data.prepare.staging import stage

    if args.workers < 1:
        parser.error(f"--workers is {args.workers}, it must be at least 1")
    done = stage(args.shards, args.local, args.workers, args.trust)
    kept = ""
    if done.kept:
        kept = f" ({done.kept:,} files were there)"
    rate = f"{done.bytes / done.seconds:,.0f} bytes/s"
    print(
        f"{args.local}: {done.shards:,} shards, {done.bytes:,} bytes in {done.seconds:.1f} s,"
        f" {rate}{kept}"
    )
