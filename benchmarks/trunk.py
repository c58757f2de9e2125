"""The dense SwinV2 of this project beside timm's eager one: images/s in inference and in training.

    python benchmarks/trunk.py                     (about 3 minutes on two cores)

One model, with its own attention and with timm's forward pass of it, in interleaved rounds; both
compute the same, which is compared first. All else of the trunk is timm's.
"""

import shlex
import sys
from unittest import mock

import torch
from model import BATCHES, CONFIGS, make_parser
from results_file import Table, keep, publish
from timing import CALLS_NOTE, timed
from timm.models.swin_transformer_v2 import WindowAttention

from swinv2_moe.command import run_command
from swinv2_moe.config import all_sections
from swinv2_moe.measure.spread import Times, median_and_spread, ratios
from swinv2_moe.measure.throughput import Subject, prepare, prepared_for_inference
from swinv2_moe.measure.throughput_options import Options
from swinv2_moe.measure.throughput_plan import combinations
from swinv2_moe.model_types import model_section
from swinv2_moe.models.attention import FusedWindowAttention
from swinv2_moe.train.distributed import open_world

TOLERANCE = 1e-4  # in fp32, relative to the largest value


def eager():
    """A context in which attention is computed by timm."""
    return mock.patch.object(FusedWindowAttention, "forward", WindowAttention.forward)


@torch.no_grad()
def check(subject: Subject, config) -> None:
    device = next(subject.model.parameters()).device
    images = torch.randn(
        2, model_section(config).IN_CHANS, *2 * [config.DATA.IMG_SIZE], device=device
    )
    training = subject.model.training
    subject.model.eval()
    ours = subject.model(images)
    with eager():
        theirs = subject.model(images)
    subject.model.train(training)
    error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
    if not error < TOLERANCE:
        raise SystemExit(f"the two differ by {error:.1e} of the largest value")


def main() -> None:
    args = make_parser(__doc__).parse_args()
    command = shlex.join(["python", "benchmarks/trunk.py", *sys.argv[1:]])
    columns = ["", "images/s", "timm", "to timm"]
    rows: list[list[str]] = []
    data: list[dict] = []
    title = "The dense network beside timm's"
    table = Table(title, command, columns, rows, (CALLS_NOTE,), data)
    for mode in args.modes:
        batches = args.batch_sizes or BATCHES[args.device][mode]
        options = Options((mode,), tuple(batches), tuple(args.dtypes), rounds=args.rounds)
        opts = [*args.opts, "DEVICE", args.device]
        for combination, _, config in combinations(args.cfg or CONFIGS[args.device], opts, options):
            with open_world(args.device, config.TIMEOUT) as world:
                subject = prepare(mode, all_sections(config), world)
                check(subject, config)

                def by_timm(subject: Subject = subject) -> None:
                    with eager():
                        subject.run()

                with prepared_for_inference([subject]):
                    times = timed({"ours": subject.run, "timm": by_timm}, args.rounds, args.device)
            name = f"{mode}, batch {combination.batch_size}, {combination.dtype}"
            speeds = {
                k: Times((1e3 * combination.batch_size / ms for ms in t), t.run)
                for k, t in times.items()
            }
            speedup = ratios(speeds["ours"], speeds["timm"])
            cells = [median_and_spread(speeds["ours"], 2), median_and_spread(speeds["timm"], 2)]
            rows.append([name, *cells, median_and_spread(speedup, 3)])
            data.append({"name": name, **{k: list(t) for k, t in times.items()}})
            print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
            keep(table, args.device, args.output)
    publish(table, args.device, args.output)


if __name__ == "__main__":
    run_command(main)
