"""Every command in the documents: its options, keys and configurations exist, and it runs as it
stands on the page, on small photographs."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from gloo_processes import free_port
from PIL import Image
from shapes_cases import CLASSES, Options, make_shapes
from torch.distributed.run import get_args_parser

from swinv2_moe.commands import COMMANDS
from swinv2_moe.config import load_config
from swinv2_moe.config.load import find_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "data" / "README.md"]
DOCUMENTS += sorted(ROOT.glob("docs/how-to/*.md"))
DOCUMENTS += [*ROOT.glob("docs/tutorial/*.md"), ROOT / "docs" / "reference" / "checkpoints.md"]
FENCED = re.compile(r"^```(?:bash|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?:^    (?:swinv2-moe|torchrun) .*\n(?:        .*\n)*)+", re.MULTILINE)
INLINE = re.compile(r"`(swinv2-moe [\w-]+ [^`]+)`")
# A part of a command, and why the command does not run here. Its options are checked all the same.
NOT_RUN = {
    r"(import|evaluate|--weights) vmoe\b": "needs the released weights",
    r"^make ": "installs the environment, or takes minutes",
    r"^source .venv": "the tests have their environment",
    r"pip install|timm:|campaign.py --wheels": "needs a network",
    r"^sbatch|sbatch ": "needs Slurm",
    r"^docker|^kubectl": "needs Docker or Kubernetes",
    r"--nnodes|--nproc_per_node[ =]8(?!.* detect )": "needs several machines, or 8 GPUs",
    r"campaign.py|campaign.json|--graph": "needs a GPU, or takes five minutes",
    r"quack_kernels.py": "needs packages for GPUs",
    r"train_on_gpu.py": "trains for minutes; test_train_on_gpu.py runs it",
    r"deployed_int8": "refuses a model of two steps, whose logits are near 0",
    r"RELEASED.pth|swin-moe released": "needs published weights",
    r"helloworld.py": "a program of Tutel's; tests/integration/test_tutel_programs.py runs it",
    r"^python examples/sweep.py": "trains for an hour; test_sweep_example.py runs it",
    r"^python examples/profile_step.py": "test_the_profile_of_a_training_step_runs runs it",
    r"cifar10|imagenet22k|data/imagenet\b": "needs a data set",
    r"\b(VERB|RUN|PICTURE|CHECKPOINT|NAME)\b|\.\.\.|^swinv2-moe train --check-files$": "a pattern",
    r"^(#SBATCH|export|--opts)": "a part of a command",
}
CUT = (
    "TRAIN.MAX_STEPS 2 TRAIN.EPOCHS 1 TRAIN.WARMUP_EPOCHS 0 DATA.BATCH_SIZE 8 DATA.NUM_WORKERS 0"
    " PRINT_FREQ 1"
)
if find_spec("mmdet") is None:
    NOT_RUN[r"swinv2[-_]moe detect"] = "needs the detection extra"
PLACES = {"DIR": "more_images", "OTHER": "my_images", "CONFIG": "imagenette_96"}
PLACES["detection/cascade_mask_rcnn/base_moe_frozen"] = "base_moe_frozen.py"
# The published configuration with a backbone that takes seconds, and without SyncBN, which needs
# GPUs
DETECTOR = """_base_ = "configs/detection/cascade_mask_rcnn/base_moe_frozen.py"
heads = [dict(head, norm_cfg=dict(type="GN", num_groups=32)) for head in
         _base_.model.roi_head.bbox_head]
model = dict(
    roi_head=dict(bbox_head=heads),
    backbone=dict(
        embed_dim=8,
        depths=(1, 1, 2, 1),
        num_heads=(1, 1, 2, 2),
        window_size=4,
        num_experts=2,
        moe_blocks=((), (), (1,), (0,)),
    ),
    neck=dict(in_channels=[8, 16, 32, 64]),
)
"""
PREPARED = ("mine", "dense", "pretrained")
MADE = {
    "first-model.md": "first/report.html mine_beside_dense.html routing/routing.png"
    " accuracy.json predictions.csv annotated/000.jpg speed/throughput.csv"
    " deployed/model.onnx"
}


def blocks(document: Path) -> list[str]:
    """The commands of a document in their order, those within sentences last."""
    text = document.read_text()
    found = FENCED.findall(text)
    if document.parent.name == "data":
        found += INDENTED.findall(text)
    found += [f"{command}\n" for command in INLINE.findall(FENCED.sub("", text))]
    return [block.replace("\\\n", " ") for block in found]


def lines(document: Path) -> list[str]:
    """Its commands, one a line, without comments."""
    found = []
    for block in blocks(document):
        block = re.sub(r"<<'(\w+)'\n.*?^\1\n", "\n", block, flags=re.DOTALL | re.MULTILINE)
        found += [re.sub(r"\s+# .*", "", line).strip() for line in block.splitlines()]
    return [line for line in found if line and not line.startswith("#")]


def why_not(line: str) -> str | None:
    return next((why for part, why in NOT_RUN.items() if re.search(part, line.strip())), None)


@cache
def help_of(*words: str) -> str:
    command = [sys.executable, "-m", "swinv2_moe", *words, "--help"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def keys() -> set[str]:
    def names(node, prefix: str) -> set[str]:
        if not isinstance(node, dict):
            return {prefix}
        return set().union(*(names(node[key], f"{prefix}.{key}") for key in node))

    return {name.removeprefix(".") for name in names(load_config("quickstart_digits"), "")}


def problems(line: str) -> list[str]:
    """What a command names that is not there."""
    words = shlex.split(re.sub(r"^(\w+=\S+ )+|^srun ", "", line.replace("$(", "").replace(")", "")))
    if words[0] == "torchrun":
        known = get_args_parser().parse_args([word for word in words[1:] if word != "..."])
        words = [known.training_script, *known.training_script_args]
        if known.module:
            words = ["swinv2-moe", *known.training_script_args]
    if words[0] == "python" and not words[1].startswith("-"):
        file = ROOT / words[1]
        source = file.read_text() if file.exists() else ""
        return [word for word in words if word.startswith("--") and f'"{word}"' not in source]
    if words[0] != "swinv2-moe" or len(words) == 1 or words[1] == "VERB":
        return []
    _, verb, *rest = words
    if verb not in COMMANDS:
        return [verb]
    depth = {"detect": 1, "convert-checkpoint": 2}.get(verb, 0)
    if rest[:1] == ["inspect"]:
        depth = 1
    shown = help_of(verb, *rest[:depth])
    cut = rest.index("--opts") if "--opts" in rest else len(rest)
    options = [word.partition("=")[0] for word in rest[:cut] if word.startswith("--")]
    missing = [word for word in options if not re.search(rf"{word}\b", shown)]
    pairs = [pair for word in rest[cut + 1 :] for pair in word.split("=", 1)]
    named = [word for word in pairs[::2] if word not in keys() and word != "..."]
    configs = [rest[i + 1] for i, word in enumerate(rest[:cut]) if word == "--cfg"]
    wrong = [name for name in configs if name[0].islower() and not is_configuration(name)]
    return missing + named + wrong


def is_configuration(name: str) -> bool:
    return name == "my_config.yaml" or find_config(name).is_file()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_commands_name_is_there(document):
    assert {line: problems(line) for line in lines(document) if problems(line)} == {}


def test_reasons_are_needed_and_most_commands_run():
    every = [line for document in DOCUMENTS for line in lines(document)]
    for part in NOT_RUN:
        assert any(re.search(part, line) for line in every), part
    assert sum(why_not(line) is None for line in every) >= 60


def test_the_tutorial_names_every_command():
    text = "\n".join(lines(ROOT / "docs" / "tutorial" / "first-model.md"))
    # elsewhere, or part of others
    absent = "quickstart convert-checkpoint plan-cluster detect compress install-detection"
    absent += " train-on-gpu"
    tools = {tool.stem.replace("_", "-") for tool in (ROOT / "tools").glob("*.py")}
    assert tools - set(absent.split()) <= set(re.findall(r"swinv2-moe ([\w-]+)", text))


def make_images(root: Path, classes: tuple[str, ...]) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 16), ("val", 6)):
        for number, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 80, (90, 120, 3), dtype=np.uint8)
                pixels[..., number % 3] += 150
                Image.fromarray(pixels).save(root / split / name / f"{i:03d}.jpg")


def make_coco(root: Path) -> None:
    """COCO 2017 in small, as it is downloaded: its 80 classes, two pictures for each split."""
    make_shapes(root, Options(train=2, val=2, min_size=64, max_size=96))
    names = CLASSES
    if find_spec("mmdet"):
        from mmdet.datasets import CocoDataset

        names = CocoDataset.METAINFO["classes"]
    for split in ("train", "val"):
        (root / split).rename(root / f"{split}2017")
        file = root / "annotations" / f"instances_{split}.json"
        content = json.loads(file.read_text())
        categories = [{"id": number, "name": name} for number, name in enumerate(names, 1)]
        file.unlink()
        file.with_stem(f"instances_{split}2017").write_text(
            json.dumps(content | {"categories": categories})
        )


def run(script: str, place: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment["PET_MASTER_PORT"] = str(free_port())  # torchrun's, where none is given
    words = [shutil.which("bash"), "-euo", "pipefail", "-c", script]
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with photographs and short runs, as the documents name them."""
    root = tmp_path_factory.mktemp("documents")
    make_images(root / "my_images", ("cat", "dog"))
    make_images(root / "more_images", ("apple", "pear", "plum"))
    shutil.copytree(root / "my_images" / "val" / "dog", root / "holiday")
    for name in ("pictures", "photos"):
        shutil.copytree(root / "my_images", root / name)
    for name in ("dog.jpg", "photo.jpg"):
        shutil.copy(root / "holiday" / "000.jpg", root / name)
    make_coco(root / "DOWNLOADS")
    make_shapes(root / "labelled", Options(train=8, val=2, min_size=64, max_size=96))
    (root / "base_moe_frozen.py").write_text(DETECTOR)
    (root / "book.txt").write_text("Once upon a time. " * 2000)
    for split in ("train", "val"):
        files = sorted((root / "pictures" / split).rglob("*.jpg"))
        rows = [
            f"{file.relative_to(root / 'pictures')} {int('dog' in str(file))}" for file in files
        ]
        (root / "pictures" / f"{split}.txt").write_text("\n".join(rows) + "\n")
    train = "swinv2-moe train --cfg imagenette_96 --data my_images --output output/mine --opts"
    run(f"{train} {CUT}", root)
    for name in PREPARED[1:]:
        shutil.copytree(root / "output" / "mine", root / "output" / name, symlinks=True)
    return root


@pytest.fixture
def place(trained, tmp_path):
    """A copy of `trained` that looks like a clone."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True, symlinks=True)
    for name in ("tools", "configs", "examples", "benchmarks"):
        (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def shortened(line: str) -> str:
    """The command with a small data set, few steps and few rounds; a training that is not resumed
    begins in a new directory."""
    line = re.sub(r"\s+# .*", "", line).replace("/local/shards", "local_shards")
    for name, there in PLACES.items():
        line = re.sub(rf"\b{name}\b", there, line)
    verb = re.search(r"swinv2[-_]moe ([\w-]+)", line)
    if verb and verb[1] == "train":
        cut = CUT.replace("MAX_STEPS 2", "MAX_STEPS 3") if "UPCYCLE" in line else CUT
        line += f"{'' if '--opts' in line else ' --opts'} {cut}"
        if "--output" not in line and "--cfg" in line:
            line = line.replace(" train ", " train --output output/another ")
        output = re.search(r"--output (\S+)", line)
        if output and "--resume" not in line:
            line = f"rm -rf {output[1]}\n{line}"
    if " detect train labelled" in line:
        line += " --epochs 1 --size 64"
    elif " detect train " in line and "output/labelled" not in line:
        line = re.sub(r" --pretrained \S+", "", line).replace("_per_node 8", "_per_node 2")
        line += " --opts train_cfg.max_epochs=1 train_dataloader.num_workers=0"
    if "--index shards" in line:  # of tars that another program has made
        line = f"rm -f shards/index.json shards/plan.json\n{line}"
    if verb and verb[1] == "throughput":
        line += " --rounds 1"
    if "language_model.py" in line:
        line += " --sample 10" if "--steps" in line else " --sample 10 --steps 2"
    return line


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_runs(document, place):
    for block in blocks(document):
        kept = [line for line in block.splitlines() if not why_not(line)]
        script = "\n".join(map(shortened, kept))
        if script.strip():
            run(script, place)
    for name in MADE.get(document.name, "").split():
        assert (place / "output" / name).is_file()


def test_the_profile_of_a_training_step_runs(tmp_path):
    words = [sys.executable, str(ROOT / "examples" / "profile_step.py")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counted = re.findall(r"([\d.]+) GFLOP  (\S+)", done.stdout)
    assert {"aten.mm", "moe_core.route"} <= {name for number, name in counted if float(number) > 0}
    assert "Self CPU time total" in done.stdout
    assert (tmp_path / "step.json").is_file()
