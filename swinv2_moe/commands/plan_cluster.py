"""Predict a configuration's step time and memory from 1 to 4,096 GPUs, without a GPU
(docs/explanation/planner.md).

    swinv2-moe plan-cluster --nodes 4 --gpus-per-node 8 \\
        --cfg in22k/swin_moe_base_window12_192_32expert
    swinv2-moe plan-cluster --nodes 2 --gpus-per-node 8 \\
        --cfg imagenette_96 --profile h100 --batch-size 64
    torchrun --nproc_per_node 8 -m swinv2_moe plan-cluster --nodes 1 --gpus-per-node 8 --cfg FILE \\
        --profile here --save-profile machine.json
    swinv2-moe plan-cluster --nodes 4 --gpus-per-node 8 --cfg FILE --profile machine.json
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from swinv2_moe.commands.options import CommandParser, add_left, add_opts_argument
from swinv2_moe.errors import UserError
from swinv2_moe.tables import Console, number_table

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from moe_core.parallel import Machine
    from swinv2_moe.measure import cluster


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument("--nodes", type=int, help="nodes of your cluster; its row is marked with *")
    parser.add_argument("--gpus-per-node", type=int, help="the same in every row of the table")
    for name in ("RUN", "--run"):
        add_left(
            parser,
            name,
            "--cfg RUN/config.yaml predicts a step, and the run's summary.json has the number of"
            " steps",
        )
    parser.add_argument("--cfg", metavar="FILE", help="predict a step of this configuration")
    add_opts_argument(parser)
    parser.add_argument(
        "--batch-size",
        type=int,
        help="images per GPU and forward pass (DATA.BATCH_SIZE); default: as configured, also by"
        " DATA.GLOBAL_BATCH_SIZE",
    )
    parser.add_argument(
        "--profile",
        default="a100-hdr",
        metavar="NAME|FILE",
        help="the hardware: a100-hdr (default), h100 and others (a wrong name lists them); here:"
        " measure this machine, under torchrun its links too; or a file of --save-profile",
    )
    parser.add_argument(
        "--save-profile", metavar="FILE", help="write the hardware, as measured, to this file"
    )
    add_left(parser, "--output", "the figure is gone, the table has its numbers")
    args = parser.parse_args()
    needed = {"--nodes": args.nodes, "--gpus-per-node": args.gpus_per_node, "--cfg": args.cfg}
    if missing := [name for name, value in needed.items() if value is None]:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    for name in ("nodes", "gpus_per_node", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}, it must be at least 1")
    return args


def table_of(plan: list[cluster.StepPrediction], machine: Machine, user_gpus: int) -> Table:
    """The predictions, with the user's cluster in bold."""
    columns = ["GPUs", "nodes", "step, ms", "images/s", "all-to-all"]
    table = number_table(
        [*columns, "r", "d", "algorithm", "GiB a GPU"],
        [cells_of(row, machine, user_gpus) for row in plan],
        text_columns=[],
    )
    table.caption = "* your cluster   ! more than a GPU has"
    for column in table.columns:
        column.no_wrap = True
    for line, row in zip(table.rows, plan, strict=True):
        if row.gpus == user_gpus:
            line.style = "bold"
    return table


def cells_of(row: cluster.StepPrediction, machine: Machine, user_gpus: int) -> list[str]:
    gpus = f"{row.gpus:,}"
    if row.gpus == user_gpus:
        gpus = f"* {gpus}"
    memory = f"{row.memory / 2**30:.3g}"
    if row.memory > machine.memory:
        memory = f"! {memory}"
    r, degree, algorithm = "-", "-", "-"
    if row.strategy is not None:
        r = str(row.strategy.r)
        if row.strategy.r:
            degree, algorithm = str(row.strategy.pipeline_degree), row.strategy.all_to_all
    step, rate = f"{1e3 * row.step:,.1f}", f"{row.images / row.step:,.0f}"
    share = f"{row.exchange_share:.1%}"
    return [gpus, f"{row.nodes:,}", step, rate, share, r, degree, algorithm, memory]


def plan_steps(
    args: argparse.Namespace, config: CfgNode, machine: Machine, console: Console
) -> None:
    """Print and draw the predicted step of a configuration on more and fewer GPUs."""
    from swinv2_moe.config import model_config, resolve_batch_size, train_config
    from swinv2_moe.measure import cluster

    training = train_config(config)
    batch_size, where = args.batch_size or config.DATA.BATCH_SIZE, "per GPU"
    if config.DATA.GLOBAL_BATCH_SIZE and not args.batch_size:
        batch_size, where = config.DATA.GLOBAL_BATCH_SIZE, "per step over all GPUs"
    model = cluster.count_model(model_config(config))
    user_gpus = args.nodes * args.gpus_per_node
    plan, notes = [], []
    for gpus in cluster.scales(args.gpus_per_node, user_gpus):
        try:
            per_gpu = args.batch_size or resolve_batch_size(config, gpus).DATA.BATCH_SIZE
            plan.append(
                cluster.predict_step(model, training, machine, gpus, args.gpus_per_node, per_gpu)
            )
        except (UserError, ValueError) as error:
            notes.append(f"{gpus:,} GPUs left out: {error}")
    if not plan:
        raise UserError(notes[0])
    title = (
        f"{Path(args.cfg).stem} on {machine.name}, {args.gpus_per_node} GPUs a node,"
        f" {batch_size} images {where}"
    )
    console.print(f"{title}; predicted (docs/explanation/planner.md)")
    console.print(table_of(plan, machine, user_gpus))
    for note in notes:
        console.print(note)


def main() -> None:
    args = parse()
    from swinv2_moe.config import as_opts, load_config
    from swinv2_moe.measure.configurations import NOTHING_LOADED

    config = load_config(args.cfg, [*args.opts, *as_opts(NOTHING_LOADED)])
    from swinv2_moe.measure import cluster

    machine = cluster.machine_named(args.profile)
    if int(os.environ.get("RANK", 0)) > 0:  # under torchrun only the first rank continues
        return
    if args.save_profile:
        cluster.save_profile(machine, args.save_profile)
    plan_steps(args, config, machine, Console(soft_wrap=False))
