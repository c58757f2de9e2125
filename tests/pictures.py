"""Draws the pictures of the documents anew, from recorded data and the package's model.

    python tests/pictures.py [--output docs/images]

`equal_time.png` shows docs/results/equal_time.csv. `routing.png` shows which expert computes which
patch of four photographs that scikit-image brings: it needs that package (`pip install --target DIR
scikit-image`, then `PYTHONPATH=DIR`), and is left out without it.
"""

import argparse
import csv
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image

ROOT = Path(__file__).parents[1]
RECORDED = ROOT / "docs" / "results" / "equal_time.csv"
PHOTOGRAPHS = ["astronaut.png", "chelsea.png", "coffee.png", "rocket.jpg"]
STYLES = {  # colours of Okabe and Ito
    "dense, 13 epochs": ("#0072b2", "o", "-"),
    "dense, 10 epochs": ("#56b4e9", "o", "--"),
    "8 experts, 10 epochs": ("#009e73", "^", "-"),
    "32 fine experts, 10 epochs": ("#d55e00", "s", "-"),
    "the same in the last stage alone": ("#cc79a7", "D", "-"),
}
IMAGES = 0.08  # of an epoch, millions
WIDTH = 1400  # of routing.png, pixels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
    output = parser.parse_args().output
    draw_equal_time(output / "equal_time.png")
    skimage = importlib.util.find_spec("skimage")
    if skimage is None or skimage.origin is None:
        print("routing.png is left out: scikit-image is not installed")
    else:
        draw_routing(Path(skimage.origin).parent / "data", output / "routing.png")


def curves() -> dict[str, list[tuple[int, float, float]]]:
    """Epoch, minutes and top-1 of each recorded run."""
    found = defaultdict(list)
    lines = [line for line in RECORDED.read_text().splitlines() if not line.startswith("#")]
    for row in csv.DictReader(lines):
        found[row["model"]].append((int(row["epoch"]), float(row["minutes"]), float(row["top1"])))
    return dict(found)


def draw_equal_time(path: Path) -> None:
    """Top-1 by images seen and by minutes of training."""
    plt.rcParams["font.size"] = 12
    figure, axes = plt.subplots(1, 2, figsize=(10.4, 4.4), sharey=True, layout="constrained")
    recorded = curves()
    for name, (color, marker, line) in STYLES.items():
        epochs, minutes, top1 = zip(*recorded[name], strict=True)
        for axis, places in ((axes[0], [epoch * IMAGES for epoch in epochs]), (axes[1], minutes)):
            axis.plot(places, top1, line, color=color, marker=marker, markersize=5, label=name)
    axes[0].set(xlabel="training images seen, millions", ylabel="validation top-1, %")
    axes[1].set(xlabel="minutes of training, one core")
    axes[0].legend(frameon=False, loc="lower right")
    for axis in axes:
        axis.grid(axis="y", color="0.9")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def draw_routing(photographs: Path, path: Path) -> None:
    """`show-routing` of the package's model, in few colours, so that the file stays small."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "swinv2_moe", "show-routing", "bundled:tiny"]
        command += [
            "--output",
            folder,
            "--images",
            *(str(photographs / name) for name in PHOTOGRAPHS),
        ]
        command += ["--opts", "DATA.IMG_SIZE", "256"]  # more patches than its 64 pixels have
        command += ["MODEL.SWINV2.PRETRAINED_WINDOW_SIZES", "[8,8,4]"]
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        }
        subprocess.run(command, check=True, env=environment)
        with Image.open(Path(folder) / "routing.png") as drawn:
            height = round(WIDTH * drawn.height / drawn.width)
            small = drawn.convert("RGB").resize((WIDTH, height), Image.Resampling.LANCZOS)
    small.quantize(256).save(path, optimize=True)


if __name__ == "__main__":
    main()
