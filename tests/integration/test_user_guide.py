"""Every command of docs/tutorial/first-model.md, one after the other, on small photographs."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial" / "first-model.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TUTORIAL, re.DOTALL | re.MULTILINE)
TRAINING = ("swinv2-moe train ", "swinv2_moe train ")
CUT = (
    "TRAIN.MAX_STEPS 2 TRAIN.EPOCHS 1 TRAIN.WARMUP_EPOCHS 0 DATA.BATCH_SIZE 8 DATA.NUM_WORKERS 0"
    " PRINT_FREQ 1"
)


def commands(block: str) -> str:
    """The block as it stands, but trainings stop after two steps."""
    lines = block.replace("\\\n", " ").splitlines()
    cut = [
        f"{line}{'' if '--opts' in line else ' --opts'} {CUT}"
        if any(word in line for word in TRAINING)
        else line
        for line in lines
    ]
    return "\n".join(cut)


def make_images(root: Path, classes: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 6)):
        for number, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 80, (90, 120, 3), dtype=np.uint8)
                pixels[..., number % 3] += 150
                Image.fromarray(pixels).save(root / split / name / f"{i:03d}.jpg")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A checkout's look: its folders, linked, and the guide's images."""
    root = tmp_path_factory.mktemp("guide")
    for name in ("tools", "configs", "examples"):
        (root / name).symlink_to(ROOT / name)
    make_images(root / "my_images", ("cat", "dog"))
    make_images(root / "more_images", ("apple", "pear", "plum"))
    return root


def test_the_guide_names_every_command():
    text = "".join(BLOCKS)
    # elsewhere, or part of others
    absent = "quickstart workflow convert-checkpoint plan-cluster detect sweep ablate scaling"
    tools = {tool.stem.replace("_", "-") for tool in (ROOT / "tools").glob("*.py")}
    assert tools - set(absent.split()) <= set(re.findall(r"swinv2-moe ([\w-]+)", text))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_command_of_the_guide(place):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    assert len(BLOCKS) > 10
    for block in BLOCKS:
        script = commands(block)
        words = [shutil.which("bash"), "-euo", "pipefail", "-c", script]
        done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    made = (
        "mine/report.html mine_beside_dense.html mine_routing/routing.png accuracy.json"
        " predictions.csv annotated/000.jpg capacity.png speed/throughput.png"
        " roofline/roofline.png deployed/model.onnx"
    )
    for name in made.split():
        assert (place / "output" / name).is_file()
