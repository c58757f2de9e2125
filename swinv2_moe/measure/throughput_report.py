"""Report of a throughput measurement: lines for a terminal, a CSV file and a figure."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swinv2_moe.errors import UserError
from swinv2_moe.measure.spread import latencies, quartiles
from swinv2_moe.measure.throughput import Row
from swinv2_moe.measure.throughput_options import PASSES
from swinv2_moe.measure.throughput_plan import Combination, Plan
from swinv2_moe.output import csv_text
from swinv2_moe.plots import COLOURS, new_figure, save_png, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def headline(plan: Plan, ranks: int) -> str:
    """The measured model and the number of ranks."""
    config = plan[0][1]
    layers, experts = sum(map(len, config.MODEL.MOE.BLOCKS)), config.MODEL.MOE.NUM_EXPERTS
    processes = "1 process"
    if ranks > 1:
        processes = f"{ranks} processes"
    return (
        f"{config.MODEL.TYPE}, {config.DATA.IMG_SIZE} px: {experts} experts in {layers} layers, "
        f"beside dense; {processes}"
    )


def protocol(row: Row, warmup: int) -> list[str]:
    """A description of the measurement, for the head of a table, in lines."""
    rounds, experts, dense = len(row.product), row.moe.size, row.dense.size
    sizes = (
        f"{experts.parameters / 1e6:,.1f}M parameters and {experts.macs / 1e6:,.0f}M MACs/image, "
        f"beside {dense.parameters / 1e6:,.1f}M and {dense.macs / 1e6:,.0f}M"
    )
    return [
        sizes,
        row.machine,
        f"medians (quartiles) of {rounds} rounds after {warmup} to warm up; percentiles are of "
        f"these {rounds} passes;",
        "MFU is of the measured peak; the weights and images are random: 'dropped' and 'largest "
        "load'",
        "show how evenly they are routed",
    ]


def record(row: Row) -> dict[str, object]:
    """A row as flat columns: all figures, and the milliseconds of each round."""
    columns = {"run": row.product.run} | row.combination._asdict()
    columns |= {"ranks": row.ranks, "rounds": len(row.product)}

    def add(name: str, values: Sequence[float]) -> None:
        low, middle, high = quartiles(values)
        columns.update({f"{name}_q1": low, name: middle, f"{name}_q3": high})

    add("moe_over_dense", row.ratio())
    for name, side in (("moe", row.moe), ("dense", row.dense)):
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
    text = csv_text([list(records[0])] + [list(values.values()) for values in records])
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from error


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a PNG with a panel for each mode: images/s of both models with quartiles, and their
    ratio.

    Raises:
        UserError: a file that cannot be written.
    """
    by_mode = {mode: [row for row in rows if row.combination.mode == mode] for mode in PASSES}
    by_mode = {mode: mode_rows for mode, mode_rows in by_mode.items() if mode_rows}
    widths = [len(mode_rows) for mode_rows in by_mode.values()]
    figure = new_figure(max(6.0, 1.1 * len(rows) + 2), 4.6)
    panels = figure.subplots(1, len(by_mode), width_ratios=widths, squeeze=False)[0]
    for axes, (mode, mode_rows) in zip(panels, by_mode.items(), strict=True):
        _bars(axes, mode_rows)
        axes.set_title(mode, fontsize=10)
    panels[0].set_ylabel("images/s; in bold: experts / dense")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
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
        tops = [max(top, high) for top, (_, _, high) in zip(tops, spreads, strict=True)]
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
    capacity = f"f = {combination.capacity_factor:g}"
    return f"batch {combination.batch_size}\n{combination.dtype}\n{capacity}{compiled}"
