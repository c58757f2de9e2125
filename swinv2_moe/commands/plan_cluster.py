"""Predict a configuration's step time and memory from 1 to 4,096 GPUs, without a GPU; with a run,
also the time to its target (docs/explanation/planner.md).

    swinv2-moe plan-cluster --nodes 4 --gpus-per-node 8 \\
        --cfg in22k/swin_moe_base_window12_192_32expert
    swinv2-moe plan-cluster --nodes 2 --gpus-per-node 8 \\
        --cfg imagenette_96 --profile h100 --batch-size 64
    torchrun --nproc_per_node 8 -m swinv2_moe plan-cluster --nodes 1 --gpus-per-node 8 --cfg FILE \\
        --profile here --save-profile machine.json
    swinv2-moe plan-cluster output/mine --nodes 4 --gpus-per-node 8 --profile machine.json
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from swinv2_moe.commands.options import (
    CommandParser,
    add_opts_argument,
    add_run_argument,
    check_output_file,
)
from swinv2_moe.errors import UserError
from swinv2_moe.tables import Console, number_table

if TYPE_CHECKING:
    from yacs.config import CfgNode

    from moe_core.parallel import Machine
    from swinv2_moe.measure import cluster
    from swinv2_moe.measure.cluster_time import RunTime


def parse() -> argparse.Namespace:
    parser = CommandParser(description=__doc__)
    parser.add_argument(
        "--nodes", type=int, required=True, help="nodes of your cluster; its row is marked with *"
    )
    parser.add_argument(
        "--gpus-per-node", type=int, required=True, help="the same in every row of the table"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cfg", metavar="FILE", help="predict a step of this configuration")
    add_run_argument(what, "--run", "predict the time that this run would have taken")
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
    parser.add_argument("--output", metavar="PNG", help="also draw a figure, into this file")
    args = parser.parse_args()
    for name in ("nodes", "gpus_per_node", "batch_size"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} is {value}, it must be at least 1")
    if args.output is not None:
        if not Path(args.output).suffix and not os.path.isdir(args.output):
            args.output += ".png"
        elif Path(args.output).suffix != ".png":
            raise UserError(f"--output {args.output}: must be a file that ends in .png")
        check_output_file(args.output)
    if args.run and (args.batch_size or args.opts):
        raise UserError(
            "--run takes the configuration of the run: leave out --batch-size and --opts"
        )
    return args


def table_of(plan: list[cluster.Prediction], machine: Machine, user_gpus: int) -> Table:
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


def cells_of(row: cluster.Prediction, machine: Machine, user_gpus: int) -> list[str]:
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


def time_table(times: list[RunTime], user_gpus: int) -> Table:
    """The seconds of each phase, with the user's cluster in bold."""
    from swinv2_moe.measure.cluster_time import phases_of

    phases = phases_of(times)
    rows = []
    for time in times:
        gpus = f"{time.step.gpus:,}"
        if time.step.gpus == user_gpus:
            gpus = f"* {gpus}"
        row = [gpus, f"{time.step.nodes:,}", f"{1e3 * time.step.step:,.1f}"]
        row += [f"{time.seconds[phase]:,.1f}" for phase in phases]
        row.append(f"{time.total:,.1f}")
        if time.joules is not None:
            row.append(f"{time.joules / 1e3:,.1f}")
        rows.append(row)
    columns = ["GPUs", "nodes", "step, ms", *phases, "all"]
    if times[0].joules is not None:
        columns.append("kJ")
    table = number_table(columns, rows, text_columns=[])
    table.caption = "* your cluster   phases in seconds"
    for line, time in zip(table.rows, times, strict=True):
        if time.step.gpus == user_gpus:
            line.style = "bold"
    return table


def plan_time(args: argparse.Namespace, machine: Machine, console: Console) -> None:
    """Print the predicted time of args.run on more and fewer GPUs."""
    from swinv2_moe.measure import cluster
    from swinv2_moe.measure.cluster_time import times_of_run

    run = times_of_run(Path(args.run), machine, args.gpus_per_node)
    measured = run.measured
    times, notes = [], []
    user_gpus = args.nodes * args.gpus_per_node
    for gpus in cluster.scales(args.gpus_per_node, user_gpus):
        try:
            times.append(run.predict(gpus))
        except ValueError as error:
            if gpus <= run.images or gpus == user_gpus:
                notes.append(f"{gpus:,} GPUs left out: {error}")
    aim = "its end"
    if measured.target:
        aim = f"{measured.target:g}% top-1"
    processes = "processes"
    if measured.gpus == 1:
        processes = "process"
    console.print(
        f"time to {aim} of {args.run}: {measured.steps:,} steps of {run.images:,} images,"
        f" {1e3 * measured.step:,.1f} ms each on {measured.gpus} {processes};"
        f" {machine.name} with processors that take {run.factor:.3g} times as long",
        soft_wrap=True,
    )
    if times:
        console.print(time_table(times, user_gpus))
    for note in notes:
        console.print(note)


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
    model = cluster.describe(model_config(config))
    user_gpus = args.nodes * args.gpus_per_node
    plan, notes = [], []
    for gpus in cluster.scales(args.gpus_per_node, user_gpus):
        try:
            per_gpu = args.batch_size or resolve_batch_size(config, gpus).DATA.BATCH_SIZE
            plan.append(
                cluster.predict(model, training, machine, gpus, args.gpus_per_node, per_gpu)
            )
        except (UserError, ValueError) as error:
            notes.append(f"{gpus:,} GPUs left out: {error}")
    if not plan:
        raise UserError(notes[0])
    title = (
        f"{Path(args.cfg).stem} on {machine.name}, {args.gpus_per_node} GPUs a node,"
        f" {batch_size} images {where}"
    )
    if args.output is not None:
        cluster.draw(plan, user_gpus, title, Path(args.output))
    console.print(f"{title}; predicted (docs/explanation/planner.md)")
    console.print(table_of(plan, machine, user_gpus))
    for note in notes:
        console.print(note)
    if args.output is not None:
        console.print(f"figure: {args.output}")


def main() -> None:
    args = parse()
    config = None
    if not args.run:
        from swinv2_moe.config import as_opts, load_config
        from swinv2_moe.measure.configurations import NOTHING_LOADED

        config = load_config(args.cfg, [*args.opts, *as_opts(NOTHING_LOADED)])
    from swinv2_moe.measure import cluster

    machine = cluster.machine_named(args.profile)
    if int(os.environ.get("RANK", 0)) > 0:  # under torchrun only the first rank continues
        return
    if args.save_profile:
        cluster.save_profile(machine, args.save_profile)
    console = Console(soft_wrap=False)
    if config is None:
        plan_time(args, machine, console)
    else:
        plan_steps(args, config, machine, console)
