"""Train on one GPU for some minutes at a time, on small pictures that lie in its memory.

    python tools/train_on_gpu.py pack DATA             (packs of at most 40 MiB, to copy one by one)
    python tools/train_on_gpu.py train --minutes 9     (again, until the run has ended)

DATA has train/ and val/ with a folder for each class. The packs are output/pictures/*.zip; files
are kept as they are, or with --quality encoded anew as WebP. A call of `train` that does not find
all of them names the missing ones and ends. It needs no network: packages that are missing or too
old come from output/wheels, also that of the teacher.

`train` is `swinv2-moe train` with the same configurations, checkpoints and messages. But each
picture is decoded once, and crops, flips and the teacher's outputs are computed on the device, anew
in each epoch. --minutes stops the run with a checkpoint; the next call goes on from it. Each call
writes the weights, in 8 bits, to --keep; `swinv2-moe evaluate` takes them. To go on on another
machine with these alone: --opts MODEL.PRETRAINED FILE.

Not on the device, so refused: AUG.AUTO_AUGMENT and AUG.REPROB; AUG.COLOR_JITTER is left out.
Exit code: 0 if the call did its part, 2 for what cannot be used.
"""

# N pictures, B of a batch, C channels, S DATA.IMG_SIZE, s side of the teacher's input

import argparse
import io
import os
import re
import signal
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
from wheels import WheelError, unpack_missing  # noqa: E402 - needs the standard library alone

if TYPE_CHECKING:
    from torch import Tensor

PICTURES, WHEELS = ROOT / "output" / "pictures", ROOT / "output" / "wheels"
PACK_BYTES = 40 << 20
PACK = re.compile(r"pictures-(\d+)-of-(\d+)\.zip")
CONFIG = "tiny_imagenet/distilled"
RATIO = (3 / 4, 4 / 3)  # of a crop's sides, as timm's
REST = 25.0  # seconds of a call for saving and for the weights in 8 bits
WORKERS = 16


class PackError(Exception):
    """An error with a message of one line for the user."""


def main() -> int:
    args = arguments()
    try:
        if args.command == "pack":
            for file in pack(args.data, args.pictures, args.quality, args.most):
                print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB", flush=True)
            return 0
        with tempfile.TemporaryDirectory(prefix="packages-") as packages:
            unpack_missing(args.packages, Path(packages))
            sys.path.insert(0, packages)
            return train(args)
    except (PackError, WheelError) as error:
        print(f"train_on_gpu.py: {error}", file=sys.stderr)
        return 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="write the packs")
    packing.add_argument("data", type=Path, help="a folder with train/ and val/")
    packing.add_argument("--quality", type=int, help="encode as WebP, 1 to 100")
    packing.add_argument("--most", type=int, default=PACK_BYTES, help="bytes of a pack")
    training = commands.add_parser("train", help="train, or go on")
    training.add_argument("--minutes", type=float, default=9.0, help="of this call, default 9")
    training.add_argument("--cfg", default=CONFIG)
    training.add_argument("--output", type=Path, default=ROOT / "output" / "on_gpu", help="run")
    keep = Path(os.environ.get("OUT") or ROOT / "output" / "kept")
    training.add_argument("--keep", type=Path, default=keep, help="for the weights in 8 bits")
    training.add_argument("--packages", type=Path, default=WHEELS, help="wheels that were carried")
    training.add_argument("--opts", nargs="+", default=[], metavar="KEY VALUE")
    for command in (packing, training):
        command.add_argument("--pictures", type=Path, default=PICTURES, metavar="FOLDER")
    return parser.parse_args()


# Packs: zip archives, whose entries take less room than those of a tar


def pack(data: Path, folder: Path, quality: int | None, most: int) -> list[Path]:
    """Write the pictures of `data` to archives of at most `most` bytes, each with some of every
    class.

    Raises:
        PackError: there are no pictures, or one cannot be read.
    """
    files = sorted(file for split in ("train", "val") for file in (data / split).rglob("*.*"))
    if not files:
        raise PackError(f"{data}: no pictures in train/ and val/")
    contents = [(f"{file.relative_to(data)}", encoded(file, quality)) for file in files]
    size = sum(len(content) + 2 * len(name) + 100 for name, content in contents)
    count = -(-size // most)
    folder.mkdir(parents=True, exist_ok=True)
    packs = [folder / f"pictures-{number + 1}-of-{count}.zip" for number in range(count)]
    for number, file in enumerate(packs):
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in contents[number::count]:
                archive.writestr(name, content)
    return packs


def encoded(file: Path, quality: int | None) -> bytes:
    from PIL import Image

    if quality is None:
        return file.read_bytes()
    content = io.BytesIO()
    try:
        Image.open(file).convert("RGB").save(content, "WEBP", quality=quality)
    except (OSError, ValueError) as error:
        raise PackError(f"{file}: cannot be read ({error})") from error
    return content.getvalue()


def unpack(folder: Path) -> Path:
    """The folder of all pictures.

    Raises:
        PackError: a pack is missing or damaged.
    """
    found = {file: PACK.fullmatch(file.name) for file in sorted(folder.glob("*.zip"))}
    numbers = [tuple(map(int, match.groups())) for match in found.values() if match]
    if not numbers or len({count for _, count in numbers}) > 1:
        raise PackError(f"{folder}: needs the packs of one set, pictures-1-of-N.zip and so on")
    count = numbers[0][1]
    missing = sorted(set(range(1, count + 1)) - {number for number, _ in numbers})
    if missing:
        names = ", ".join(f"pictures-{number}-of-{count}.zip" for number in missing)
        raise PackError(f"{folder}: {names} must be copied there first")
    unpacked, done = folder / "unpacked", folder / "unpacked" / ".done"
    if not done.exists():
        for file in found:
            try:
                with zipfile.ZipFile(file) as archive:
                    archive.extractall(unpacked)
            except (OSError, zipfile.BadZipFile) as error:
                raise PackError(f"{file}: cannot be unpacked ({error})") from error
        done.write_text("")
    return unpacked


# Training


def train(args: argparse.Namespace) -> int:
    started = time.monotonic()
    data = unpack(args.pictures)
    print(f"unpacked: {time.monotonic() - started:.1f} s", flush=True)
    from swinv2_moe.config import load_config
    from swinv2_moe.errors import UserError
    from swinv2_moe.train.run import train as run

    opts = ["DATA.PATH", str(data), "OUTPUT", str(args.output), *args.opts]
    resume = "auto" if (args.output / "checkpoints").exists() else None
    deadline = started + 60 * args.minutes - REST
    try:
        config = load_config(args.cfg, opts)
        if config.AUG.AUTO_AUGMENT or config.AUG.REPROB:
            raise UserError("AUG.AUTO_AUGMENT and AUG.REPROB are not computed on the device")
        threading.Thread(target=stop_at, args=(deadline,), daemon=True).start()
        summary = run(config, resume, "the same call", place_data=place_data)
        keep_weights(args.output, args.keep)
    except UserError as error:
        raise PackError(str(error)) from error
    what = "has ended" if summary is not None else "goes on with the next call"
    print(f"the run {what}; {time.monotonic() - started:.1f} s", flush=True)
    return 0


def stop_at(deadline: float) -> None:
    """Send this process the signal with which a run saves and stops, once the run handles it."""
    while time.monotonic() < deadline or signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def keep_weights(run: Path, folder: Path) -> None:
    """The weights of the run's last checkpoint in one file of 8 bits."""
    from swinv2_moe.checkpoints.checkpoint import select_checkpoint
    from swinv2_moe.convert.convert import export_weights

    if not (run / "checkpoints").exists():
        return  # stopped before the first step
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "weights.safetensors"
    file.unlink(missing_ok=True)
    source = Path(select_checkpoint(str(run), "latest")[0])
    export_weights("single", source, file, dtype="int8")
    print(f"{file}: {file.stat().st_size / 2**20:.1f} MiB", flush=True)


def place_data(data: Any, distillation: Any, sections: Any, world: Any) -> tuple[Any, Any]:
    """The data with loaders from the device's memory, and the teacher beside them."""
    from dataclasses import replace

    started = time.monotonic()
    loader = OnDevice(data.train_loader, sections.data, world.device)
    val_loader = Kept(data.val_loader, world.device)
    count, size = len(loader.pictures), loader.pictures.nbytes / 2**20
    seconds = time.monotonic() - started
    print(f"decoded: {count:,} pictures, {size:,.0f} MiB, {seconds:.1f} s", flush=True)
    data = replace(data, train_loader=loader, val_loader=val_loader, views=0)
    return data, distillation and OnlineTeacher(distillation, loader)


class OnDevice:
    """A loader of training batches from pictures on the device, uint8 [N, C, S, S].

    The crop and the flip of a picture depend on (SEED, epoch, index) alone. Otherwise as the loader
    that it replaces.
    """

    def __init__(self, loader: Any, config: Any, device: Any) -> None:
        import torch

        self.loader, self.config, self.device = loader, config, device
        dataset = loader.dataset
        with ThreadPoolExecutor(WORKERS) as workers:
            decoded = list(workers.map(self._decoded, range(len(dataset))))
        self.pictures: Tensor = torch.stack(decoded).to(device)
        targets = torch.tensor([int(target) for target in dataset.source.targets])
        self.targets: Tensor = targets.to(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def _decoded(self, index: int) -> "Tensor":
        """uint8 [C, S, S]. A picture that cannot be read ends the run: there are few and small
        ones, and all of them are read."""
        import numpy as np
        import torch

        from swinv2_moe.data.datasets import read_image
        from swinv2_moe.errors import UserError

        dataset = self.loader.dataset
        image = read_image(dataset.source, index, dataset.mode)
        if image is None:
            raise UserError(f"{dataset.source.name(index)}: cannot be read")
        channels, *size = dataset.shape
        pixels = np.asarray(image.resize(size)).reshape(*size, channels)
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1)

    def __iter__(self) -> Iterator[Any]:
        import torch

        from swinv2_moe.data.datasets import Batch

        boxes = self.boxes()
        indices = torch.tensor(list(self.loader.sampler), device=self.device)
        for chosen in indices.split(self.loader.batch_size):
            if len(chosen) == self.loader.batch_size:
                images = self.crops(chosen, boxes, self.config)
                yield Batch(images, self.targets[chosen], [], chosen)

    def boxes(self) -> "Tensor":
        """Left, top, width and height of the crop of each picture in this epoch, in shares of its
        sides, negative widths for flipped ones: [N, 4]."""
        import torch

        dataset, augment = self.loader.dataset, self.config.augment
        seed = (dataset.seed << 20) + dataset.epoch
        draws = torch.rand(len(dataset), 5, generator=torch.Generator().manual_seed(seed))
        area, ratio, left, top, flip = draws.t()
        low, high = augment.scale
        area = low + (high - low) * area
        bounds = torch.tensor(RATIO).log()
        ratio = (bounds[0] + (bounds[1] - bounds[0]) * ratio).exp()
        width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
        if (low, high) == (1, 1):
            width = height = torch.ones_like(area)
        left, top = left * (1 - width), top * (1 - height)
        is_flipped = flip < augment.hflip
        left = torch.where(is_flipped, left + width, left)
        width = torch.where(is_flipped, -width, width)
        return torch.stack([left, top, width, height], 1).to(self.device)

    def crops(self, chosen: "Tensor", boxes: "Tensor", config: Any) -> "Tensor":
        """The crops of these pictures as an input of `config`: float32 [B, C, S, S], normalised."""
        import torch
        import torch.nn.functional as F

        side = config.img_size
        left, top, width, height = boxes[chosen].t().unsqueeze(-1)  # [B, 1] each
        steps = (torch.arange(side, device=self.device) + 0.5) / side
        x = (2 * (left + width * steps) - 1).unsqueeze(1).expand(-1, side, -1)  # [B, S, S]
        y = (2 * (top + height * steps) - 1).unsqueeze(2).expand(-1, -1, side)
        pictures = self.pictures[chosen].float() / 255
        options = {"mode": "bicubic", "padding_mode": "border", "align_corners": False}
        images = F.grid_sample(pictures, torch.stack([x, y], -1), **options).clamp(0, 1)
        mean, std = (
            torch.tensor(values, device=self.device).view(-1, 1, 1)
            for values in (config.mean, config.std)
        )
        return (images - mean) / std


class Kept:
    """A loader of validation batches, which lie on the device after the first pass."""

    def __init__(self, loader: Any, device: Any) -> None:
        self.loader, self.device = loader, device
        self.batches: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if len(self.batches) < len(self.loader):
            self.batches = [
                batch._replace(
                    images=batch.images.to(self.device), targets=batch.targets.to(self.device)
                )
                for batch in self.loader
            ]
        return iter(self.batches)


class OnlineTeacher:
    """In place of `Distillation`: the teacher's logits of the crops that the student sees."""

    def __init__(self, distillation: Any, loader: OnDevice) -> None:
        from swinv2_moe.train.graph import PassGraph

        self.outputs, self.loader = distillation, loader
        module = distillation.teacher.module
        self.forward = PassGraph(module, self._logits, loader.device)
        self.boxes: Tensor | None = None  # of the current epoch

    def _logits(self, images: "Tensor") -> "Tensor":
        with self.outputs.autocast():
            logits = self.outputs.teacher.module(images)
        if self.outputs.columns is not None:
            logits = logits[:, self.outputs.columns]
        return logits.float()

    def __call__(self, indices: "Tensor") -> "Tensor":
        """float32 [B, classes], for pictures of the current epoch."""
        import torch

        with torch.no_grad():
            images = self.loader.crops(indices, self.boxes, self.outputs.config)
            return self.forward(images.contiguous(memory_format=torch.channels_last)).clone()

    def prepare(self, view: int, recorder: Any, check_stop: Any) -> None:
        """The crops of this epoch."""
        self.loader.dataset.epoch = view
        self.boxes = self.loader.boxes()

    def hit_rate(self) -> None:
        return None

    def headline(self) -> str:
        return f"{self.outputs.headline().partition(';')[0]}; its outputs are not kept"

    def facts(self) -> dict:
        return {"teacher": self.outputs.teacher.name}


if __name__ == "__main__":
    sys.exit(main())
