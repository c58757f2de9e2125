"""Pretrain on one folder of images and transfer to another, with experts and dense.

    swinv2-moe workflow --output output/workflow
    swinv2-moe workflow --pretrain tiny_imagenet --transfer imagenette --output output/workflow

Without data, it uses the digits of scikit-learn: 0 to 4 to pretrain, 5 to 9 to transfer. The steps
are shards, staging, pretraining, fine-tuning and few-shot evaluation. Each is a command, which is
printed. When started again, the workflow continues where it stopped.
"""

import shlex
import sys
import time
from pathlib import Path

from swinv2_moe.commands.call import program, run_tool
from swinv2_moe.commands.options import CommandParser, add_opts_argument, check_opts
from swinv2_moe.errors import UserError
from swinv2_moe.output import print_lines
from swinv2_moe.tables import Console, number_table

MODELS = {"MoE": "8expert", "dense": "dense"}
# The dense model, whatever --opts says about experts.
LAST_OPTS = {"8expert": [], "dense": ["MODEL.MOE.NUM_EXPERTS", 0]}
PRETRAIN, FINETUNE = "configs/tiny_imagenet/{}.yaml", "configs/tiny_imagenet/finetune_96.yaml"
SHOTS = "5"
WHERE_PHOTOGRAPHS_ARE = """\
Data: digits. With photographs: make workflow PRETRAIN=DIR TRANSFER=DIR, for example Tiny-ImageNet
(http://cs231n.stanford.edu/tiny-imagenet-200.zip) and Imagenette (https://github.com/fastai/imagenette)"""
MAX_BYTES = 1 << 26  # limit of a file of results


def run_training(config: str, data: Path, output: Path, opts: list) -> None:
    """Start or continue a training with a configuration of this project.

    A finished run is not changed. If the training is told to stop, this process ends too.
    """
    arguments = ["--cfg", config, "--data", data, "--output", output]
    arguments += ["--resume", "auto", "--opts"] + opts
    run_tool("train", *arguments)
    if not (output / "summary.json").is_file():
        sys.exit()


def main() -> None:
    parser = CommandParser(description=__doc__)
    kinds = "a directory with train/ and val/, or a tar of one"
    parser.add_argument("--pretrain", metavar="DATA", help=f"to pretrain on at 64 px: {kinds}")
    parser.add_argument("--transfer", metavar="DATA", help=f"to fine-tune on at 96 px: {kinds}")
    parser.add_setting("--output", "output/workflow", "directory of all steps", "DIR")
    parser.add_setting("--epochs", 6, "epochs of pretraining", "N")
    parser.add_setting("--finetune-epochs", 15, "epochs of fine-tuning", "N")
    add_opts_argument(parser, help="configuration keys for all trainings")
    args = parser.parse_args()
    if bool(args.pretrain) != bool(args.transfer):
        parser.error("give both --pretrain and --transfer, or none of them")
    check_opts(args.opts)
    from swinv2_moe.data.prepare.folders import image_folder, write_digit_folders

    output = Path(args.output)
    if args.pretrain:
        pretrain_data = image_folder(Path(args.pretrain), output / "data" / "pretrain")
        transfer_data = image_folder(Path(args.transfer), output / "data" / "transfer")
    else:
        pretrain_data, transfer_data = write_digit_folders(output.absolute() / "digits")
        print_lines(*WHERE_PHOTOGRAPHS_ARE.split("\n"))
    started = time.perf_counter()
    make_shards(pretrain_data, output)
    for name in MODELS.values():
        pretrain(name, output, args.epochs, args.opts)
    for name in MODELS.values():
        finetune(name, transfer_data, output, args.finetune_epochs, args.opts)
    for name in MODELS.values():
        measure_few_shot(name, transfer_data, output)
    try:
        show(output, time.perf_counter() - started)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{output}: the results are not as the steps wrote them ({problem})"
        ) from error


def make_shards(data: Path, output: Path) -> None:
    shards = output / "shards"
    words = ["--data", data, "--dataset", "folder", "--output", shards, "--shard-mb", 8]
    run_tool("make-shards", *words)
    run_tool("stage", shards, output / "staged")


def pretrain(name: str, output: Path, epochs: int, opts: list[str]) -> None:
    keys = ["DATA.DATASET", "shards", "TRAIN.EPOCHS", epochs, "TRAIN.WARMUP_EPOCHS", 1]
    run = output / "pretrained" / name
    all_opts = keys + opts + LAST_OPTS[name]
    run_training(PRETRAIN.format(name), output / "staged", run, all_opts)


def finetune(name: str, data: Path, output: Path, epochs: int, opts: list[str]) -> None:
    keys = ["MODEL.PRETRAINED", output / "pretrained" / name, "TRAIN.EPOCHS", epochs]
    run_training(FINETUNE, data, output / "finetuned" / name, keys + opts + LAST_OPTS[name])


def measure_few_shot(name: str, data: Path, output: Path) -> None:
    words = ["--resume", output / "pretrained" / name, "--data", data, "--shots", SHOTS]
    run_tool("few-shot", *words, "--output", output / f"few_shot_{name}.json")


def show(output: Path, seconds: float) -> None:
    """Print the results of both models from the files that the steps have written."""
    from swinv2_moe.files import read_json

    results = {label: read_results(output, name) for label, name in MODELS.items()}
    rows = []
    for title in next(iter(results.values())):
        rows.append([title] + [cells[title] for cells in results.values()])
    staging = read_json(output / "staged" / "staging.json", MAX_BYTES)
    console = Console()
    console.print(number_table([""] + list(results), rows))
    staged = f"Staged {staging['bytes'] / 1e6:.1f} MB in {staging['seconds']:.1f} s"
    console.print(
        f"{staged}, {seconds:,.0f} s in all.",
        f"TensorBoard: {shlex.join([program('tensorboard'), '--logdir', str(output)])}",
    )


def read_results(output: Path, name: str) -> dict[str, str]:
    """The cells of a model's column, by row title."""
    from swinv2_moe.files import read_json

    pretrained = read_json(output / "pretrained" / name / "summary.json", MAX_BYTES)
    finetuned = read_json(output / "finetuned" / name / "summary.json", MAX_BYTES)
    few_shot = read_json(output / f"few_shot_{name}.json", MAX_BYTES)
    shots = few_shot["few_shot"][SHOTS]
    return {
        "parameters": f"{pretrained['parameters'] / 1e6:.2f}M",
        "MACs an image, pretraining": f"{pretrained['active_macs'] / 1e6:.1f}M",
        "images/s, pretraining": f"{pretrained['images_per_second'] or 0:,.0f}",
        "top-1, pretraining data": f"{pretrained['val_top1']:.2f}%",
        "top-1, fine-tuned": f"{finetuned['val_top1']:.2f}%",
        f"{SHOTS}-shot, frozen features": f"{shots['mean']:.2f} ± {shots['std']:.2f}%",
        "20 nearest neighbours": f"{few_shot['knn']['top1']:.2f}%",
    }
