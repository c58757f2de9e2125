"""The whole chain on two folders of images: shards, staging, pretraining, fine-tuning, few-shot;
experts beside dense.

    python tools/workflow.py --pretrain tiny_imagenet --transfer imagenette --output output/workflow

Each step is a command of its own, printed as it is run; started again, it goes on where it was.
"""

import time
from pathlib import Path

from rich.console import Console

from swinv2_moe.command import CommandParser, run_command, run_tool, run_training
from swinv2_moe.data.unpack import image_folder
from swinv2_moe.errors import UserError
from swinv2_moe.files import read_json
from swinv2_moe.tables import number_table

MODELS = {"MoE, 8 experts": "8expert", "dense": "dense"}
PRETRAIN, FINETUNE = "configs/tiny_imagenet/{}.yaml", "configs/tiny_imagenet/finetune_96.yaml"
SHOTS = "5"
MAX_BYTES = 1 << 26  # of a file with results


def main() -> None:
    parser = CommandParser(description=__doc__)
    kinds = "a directory with train/ and val/, or a tar of one"
    parser.add_argument(
        "--pretrain", required=True, metavar="DATA", help=f"to pretrain on at 64 px: {kinds}"
    )
    parser.add_argument(
        "--transfer", required=True, metavar="DATA", help=f"to fine-tune on at 96 px: {kinds}"
    )
    parser.add_argument("--output", default="output/workflow", metavar="DIR")
    parser.add_argument("--epochs", type=int, default=6, help="of pretraining")
    parser.add_argument("--finetune-epochs", type=int, default=15)
    parser.add_argument(
        "--opts",
        nargs="+",
        default=[],
        metavar="KEY VALUE",
        help="configuration keys for all trainings",
    )
    args = parser.parse_args()
    output = Path(args.output)
    pretrain, transfer = (
        image_folder(Path(getattr(args, name)), output / "data" / name)
        for name in ("pretrain", "transfer")
    )
    started = time.perf_counter()
    run_tool(
        "data/make_shards.py",
        "--data",
        pretrain,
        "--dataset",
        "folder",
        "--output",
        output / "shards",
        "--shard-mb",
        8,
    )
    run_tool("data/stage.py", output / "shards", output / "staged")
    shards = ["DATA.DATASET", "shards", "TRAIN.EPOCHS", args.epochs, "TRAIN.WARMUP_EPOCHS", 1]
    for name in MODELS.values():
        run_training(
            PRETRAIN.format(name),
            output / "staged",
            output / "pretrained" / name,
            [*shards, *args.opts],
        )
    for name in MODELS.values():
        opts = [
            "MODEL.PRETRAINED",
            output / "pretrained" / name,
            "TRAIN.EPOCHS",
            args.finetune_epochs,
        ]
        opts += ["MODEL.MOE.NUM_EXPERTS", 0] if name == "dense" else []
        run_training(FINETUNE, transfer, output / "finetuned" / name, [*opts, *args.opts])
    for name in MODELS.values():
        file, checkpoint = output / f"few_shot_{name}.json", output / "pretrained" / name
        run_tool(
            "tools/few_shot.py",
            "--resume",
            checkpoint,
            "--data",
            transfer,
            "--shots",
            SHOTS,
            "--output",
            file,
        )
    try:
        show(output, time.perf_counter() - started)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problem = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{output}: the results are not as the steps wrote them ({problem})"
        ) from error


def show(output: Path, seconds: float) -> None:
    """What the steps have left in their files, side by side."""
    columns = []
    for name in MODELS.values():
        files = (
            f"pretrained/{name}/summary.json",
            f"finetuned/{name}/summary.json",
            f"few_shot_{name}.json",
        )
        before, after, few = (read_json(output / file, MAX_BYTES) for file in files)
        columns.append(
            {
                "parameters": f"{before['parameters'] / 1e6:.2f}M",
                "MACs an image, pretraining": f"{before['active_macs'] / 1e6:.1f}M",
                "images/s, pretraining": f"{before['images_per_second'] or 0:,.0f}",
                "top-1, pretraining data": f"{before['val_top1']:.2f}%",
                "top-1, fine-tuned": f"{after['val_top1']:.2f}%",
                f"{SHOTS}-shot, frozen features": "{mean:.2f} ± {std:.2f}%".format_map(
                    few["few_shot"][SHOTS]
                ),
                "20 nearest neighbours": f"{few['knn']['top1']:.2f}%",
            }
        )
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    staging = read_json(output / "staged" / "staging.json", MAX_BYTES)
    console = Console(highlight=False, soft_wrap=True)
    console.print(number_table(["", *MODELS], rows))
    staged = (
        f"Staged {staging['bytes'] / 1e6:.1f} MB in {staging['seconds']:.1f} s, {seconds:,.0f} s in"
        " all."
    )
    console.print(f"{staged} TensorBoard: .venv/bin/tensorboard --logdir {output}", markup=False)


if __name__ == "__main__":
    run_command(main)
