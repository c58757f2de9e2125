"""What a measurement of throughput leaves: lines for a terminal, a CSV file and a figure."""

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swinv2_moe.errors import UserError
from swinv2_moe.measure.rounds import latencies, quartiles
from swinv2_moe.measure.throughput import PASSES, Combination, Plan, Row, Side
from swinv2_moe.plots import COLOURS, new_figure, save_png, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def headline(plan: Plan, ranks: int) -> str:
    """What is measured, on how many ranks."""
    config = plan[0][1]
    layers, experts = sum(map(len, config.MODEL.MOE.BLOCKS)), config.MODEL.MOE.NUM_EXPERTS
    return (
        f"{config.MODEL.TYPE}, {config.DATA.IMG_SIZE} px: {experts} experts in {layers} layers,"
        " beside dense;"
        f" {ranks} {'process' if ranks == 1 else 'processes'}"
    )


def protocol(row: Row, warmup: int) -> str:
    """How the figures came about, for the head of a table."""
    rounds, (experts, dense) = len(row.product), (row.moe.size, row.dense.size)
    return (
        f"{experts.parameters / 1e6:,.1f}M parameters and {experts.macs / 1e6:,.0f}M MACs/image,"
        " beside"
        f" {dense.parameters / 1e6:,.1f}M and {dense.macs / 1e6:,.0f}M\n{row.machine}\nmedians"
        f" (quartiles) of {rounds}"
        f" rounds after {warmup} to warm up; percentiles are of these {rounds} passes, MFU is of"
        " the measured peak;"
        " fresh weights and noise: 'dropped' and 'largest load' tell how evenly they route"
    )


def record(row: Row) -> dict[str, object]:
    """A row as flat columns: every figure, and every round's milliseconds."""
    columns = {
        "run": row.product.run,
        **row.combination._asdict(),
        "ranks": row.ranks,
        "rounds": len(row.product),
    }

    def add(name: str, values: Sequence[float]) -> None:
        columns.update(zip((f"{name}_q1", name, f"{name}_q3"), quartiles(values), strict=True))

    add("moe_over_dense", row.ratio())
    for name in ("moe", "dense"):
        side: Side = getattr(row, name)
        add(f"{name}_images_per_second", row.images_per_second(side))
        add(f"{name}_mfu", row.mfu(side))
        columns |= {f"{name}_{which}_ms": value for which, value in latencies(side.times).items()}
        columns |= {f"{name}_parameters": side.size.parameters, f"{name}_macs": side.size.macs}
        columns |= {f"{name}_peak_bytes": side.peak_memory, f"{name}_held_bytes": side.held}
        columns |= {
            f"{name}_first_call_s": side.first_call,
            f"{name}_ms": " ".join(f"{t:.3f}" for t in side.times),
        }
    columns |= {
        "product_flops": row.product_flops,
        "product_ms": " ".join(f"{t:.3f}" for t in row.product),
    }
    return columns | {
        "dropped": row.dropped,
        "largest_load": row.largest_load,
        "machine": row.machine,
    }


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Raises:
    UserError: the file cannot be written.
    """
    records = [record(row) for row in rows]
    try:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, records[0].keys())
            writer.writeheader()
            writer.writerows(records)
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from error


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """A PNG: images/s of both models for every row with quartiles, the ratio above them; a panel
    for each mode.

    Raises:
        UserError: a file that cannot be written.
    """
    modes = [[row for row in rows if row.combination.mode == mode] for mode in PASSES]
    modes = [found for found in modes if found]
    figure = new_figure(max(6.0, 1.1 * len(rows) + 2), 4.6)
    panels = figure.subplots(
        1, len(modes), width_ratios=[len(found) for found in modes], squeeze=False
    )[0]
    for axes, found in zip(panels, modes, strict=True):
        _bars(axes, found)
        axes.set_title(found[0].combination.mode, fontsize=10)
    panels[0].set_ylabel("images/s; in bold: experts / dense")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False
    )
    figure.suptitle(title, fontsize=10)
    save_png(figure, path)


def _bars(axes: "Axes", rows: Sequence[Row]) -> None:
    tops = [0.0] * len(rows)
    for offset, name, label, colour in (
        (-0.2, "moe", "experts", COLOURS[0]),
        (0.2, "dense", "dense", COLOURS[5]),
    ):
        spreads = [quartiles(row.images_per_second(getattr(row, name))) for row in rows]
        middles = [middle for _, middle, _ in spreads]
        errors = [
            [middle - low for low, middle, _ in spreads],
            [high - middle for _, middle, high in spreads],
        ]
        places = [i + offset for i in range(len(rows))]
        bars = axes.bar(
            places, middles, 0.38, yerr=errors, color=colour, label=label, error_kw={"linewidth": 1}
        )
        axes.bar_label(
            bars, [f"{middle:.3g}" for middle in middles], label_type="center", fontsize=7
        )
        tops = [max(top, high) for top, (*_, high) in zip(tops, spreads, strict=True)]
    for i, (row, top) in enumerate(zip(rows, tops, strict=True)):
        ratio = f"{statistics.median(row.ratio()):.2f}"
        axes.annotate(
            ratio,
            (i, top),
            (0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            weight="bold",
        )
    axes.set_xticks(range(len(rows)), [_label(row.combination) for row in rows], fontsize=8)
    axes.set_xlim(-0.6, len(rows) - 0.4)
    axes.set_ylim(0, 1.1 * max(tops))
    tidy(axes)


def _label(combination: Combination) -> str:
    compiled = ""
    if combination.compile == "on":
        compiled = "\ncompiled"
    return (
        f"batch {combination.batch_size}\n{combination.dtype}\nf ="
        f" {combination.capacity_factor:g}{compiled}"
    )
