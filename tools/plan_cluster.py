"""Predict a configuration's step time and memory from 1 to 4,096 GPUs, without a GPU
(docs/explanation/planner.md).

python tools/plan_cluster.py --nodes 4 --gpus-per-node 8 --cfg
configs/in22k/swin_moe_base_window12_192_32expert.yaml python tools/plan_cluster.py --nodes 2
--gpus-per-node 8 --cfg configs/imagenette_96.yaml --profile h100 --batch-size 64
"""

import argparse
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from swinv2_moe.command import CommandParser, run_command  # first: it makes Ctrl-C one line

# isort: split

from moe_core.parallel import PROFILES, Machine
from swinv2_moe import planner
from swinv2_moe.config import load_config, model_config, train_config
from swinv2_moe.errors import UserError


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--nodes", type=int, required=True, help="nodes of your cluster; its row is marked"
    )
    parser.add_argument(
        "--gpus-per-node", type=int, required=True, help="for every row of the table"
    )
    parser.add_argument(
        "--cfg", required=True, metavar="FILE", help="a YAML file below configs/, or your own"
    )
    parser.add_argument(
        "--opts",
        nargs="+",
        default=[],
        metavar="KEY VALUE",
        help="any configuration keys, in pairs",
    )
    parser.add_argument(
        "--batch-size", type=int, help="images per GPU and forward pass (DATA.BATCH_SIZE)"
    )
    parser.add_argument(
        "--profile",
        default="a100-hdr",
        choices=[*PROFILES, "here"],
        help=(
            "the hardware (default: a100-hdr); here: this machine's processor, measured, with"
            " a100-hdr's links"
        ),
    )
    parser.add_argument(
        "--output", default="plan.png", metavar="PNG", help="the figure (default: plan.png)"
    )
    args = parser.parse_args()
    for name in ("nodes", "gpus_per_node", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}, it must be at least 1")
    if not Path(args.output).parent.is_dir():
        raise UserError(f"--output {args.output}: its directory does not exist")
    return args


def table_of(plan: list[planner.Prediction], machine: Machine, own: int) -> Table:
    table = Table(
        box=SIMPLE_HEAD, collapse_padding=True, caption="* your cluster   ! more than a GPU has"
    )
    for column in (
        "GPUs",
        "nodes",
        "step, ms",
        "images/s",
        "all-to-all",
        "r",
        "d",
        "algorithm",
        "GiB a GPU",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    for row in plan:
        strategy = row.strategy
        choice = ["-"] * 3
        if strategy is not None:
            choice = [
                str(strategy.r),
                *([str(strategy.pipeline_degree), strategy.all_to_all] if strategy.r else "--"),
            ]
        table.add_row(
            f"{'* ' if row.gpus == own else ''}{row.gpus:,}",
            f"{row.nodes:,}",
            f"{1e3 * row.step:,.1f}",
            f"{row.images / row.step:,.0f}",
            f"{row.exchange_share:.1%}",
            *choice,
            f"{'! ' if row.memory > machine.memory else ''}{row.memory / 2**30:.3g}",
            style="bold" if row.gpus == own else None,
        )
    return table


def main() -> None:
    args = parse()
    config = load_config(args.cfg, args.opts)
    batch_size, own = args.batch_size or config.DATA.BATCH_SIZE, args.nodes * args.gpus_per_node
    machine, model = planner.machine_named(args.profile), planner.describe(model_config(config))
    training, plan, notes = train_config(config), [], []
    for gpus in planner.scales(args.gpus_per_node, own):
        try:
            plan.append(
                planner.predict(model, training, machine, gpus, args.gpus_per_node, batch_size)
            )
        except ValueError as error:
            notes.append(f"{gpus:,} GPUs left out: {error}")
    title = (
        f"{Path(args.cfg).stem} on {machine.name}, {args.gpus_per_node} GPUs a node, {batch_size}"
        " images per GPU"
    )
    planner.draw(plan, own, title, Path(args.output))
    console = Console(highlight=False)
    console.print(f"{title}; predicted (docs/explanation/planner.md)", soft_wrap=True)
    console.print(table_of(plan, machine, own))
    for note in notes:
        console.print(note, soft_wrap=True)
    console.print(f"figure: {args.output}", soft_wrap=True)


if __name__ == "__main__":
    run_command(main)
