"""Images per second and core: decoding JPEGs, the whole way to a training sample, and from files
against from shards.

    python benchmarks/data.py DIR [DIR ...]        (about two minutes a directory of photographs)

Alternatives take turns every few images; figures are medians (quartiles) over rounds, in one
process with one thread, by its CPU time, or by the clock where files are read cold: dropped from
the page cache before. `draft` lets libjpeg decode to a half, quarter or eighth where the image is
so much larger than --size. The augmentation is the default recipe's at --size, "pipeline" is all
that ImageDataset does for a sample.
"""

import argparse
import io
import itertools
import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg
from yacs.config import CfgNode

from swinv2_moe.config import data_config, default_config
from swinv2_moe.data.datasets import ImageDataset, preserved_random_states, seed_random_states
from swinv2_moe.data.images import FORMATS, decode, to_mode
from swinv2_moe.data.prepare.make_shards import Options, make_shards
from swinv2_moe.data.shards import load_shards
from swinv2_moe.data.sources import ImageFiles, Source, Sources
from swinv2_moe.data.transforms import build_transform
from swinv2_moe.measure.rounds import interleaved, machine
from swinv2_moe.measure.spread import Times, median_and_spread

_TURN = 5  # images of an alternative before the next one's turn
Decoder = Callable[[bytes], Image.Image]


def decoders(size: int) -> dict[str, Decoder]:
    """Decoders of JPEG bytes to RGB. The result is a Pillow image, as timm's augmentations need
    it."""

    def draft(content: bytes) -> Image.Image:
        image = Image.open(io.BytesIO(content), formats=FORMATS)
        image.draft("RGB", (size, size))
        return image.convert("RGB")

    def by_torchvision(content: bytes) -> Image.Image:
        # [3, H, W]
        pixels = decode_jpeg(
            torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB
        )
        return Image.fromarray(pixels.permute(1, 2, 0).numpy())

    by_name = {"Pillow": lambda content: to_mode(decode(content), "RGB"), "Pillow, draft": draft}
    by_name["torchvision"] = by_torchvision
    try:
        import simplejpeg
    except ImportError:
        return by_name
    return by_name | {
        "simplejpeg": lambda content: Image.fromarray(simplejpeg.decode_jpeg(content, "RGB"))
    }


def is_plain(path: Path) -> bool:
    """Whether a file holds a JPEG that is RGB or grey."""
    return Image.open(path, formats=FORMATS).mode in ("RGB", "L")


def sample(directory: str, count: int) -> ImageFiles:
    """A random sample of `count` JPEGs below a directory. Files that are neither RGB nor grey are
    skipped."""
    paths = sorted(
        path for path in Path(directory).rglob("*") if path.suffix.lower() in (".jpg", ".jpeg")
    )
    random.Random(0).shuffle(paths)
    kept = [os.fsencode(path.relative_to(directory)) for path in paths[:count] if is_plain(path)]
    if not kept:
        raise SystemExit(f"{directory}: no JPEGs")
    return ImageFiles(directory, np.array(kept), np.zeros(len(kept), np.int64))


def recipe(size: int) -> CfgNode:
    """The default configuration with another image size. No model has to fit this size."""
    config = default_config()
    config.DATA.IMG_SIZE = size
    return config


def by_turns(
    alternatives: dict[str, Callable[[list[int]], object]],
    count: int,
    rounds: int,
    clock: Callable[[], float] = time.process_time,
    before_round: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """Milliseconds of each alternative for images 0 to `count`, in each round after one warm-up
    round.

    The speed of a machine changes within a round. Each alternative takes only a few images before
    the next one's turn, so these changes affect all of them alike.
    """
    order = np.random.default_rng(0).permutation(count).tolist()
    parts = [order[start : start + _TURN] for start in range(0, count, _TURN)]

    def takes_turns(work: Callable[[list[int]], object]) -> Callable[[], object]:
        following = itertools.cycle(parts)
        return lambda: work(next(following))

    work = {name: takes_turns(alternative) for name, alternative in alternatives.items()}
    return interleaved(
        work, rounds, warmup=1, turns=len(parts), clock=clock, before_round=before_round
    )


def rates(name: str, alternatives: dict[str, Times], amount: float, unit: str) -> None:
    for alternative, times in alternatives.items():
        speed = median_and_spread([1e3 * amount / t for t in times], 0)
        print(f"| {name} | {alternative} | {speed} {unit} |")


def decoding(source: ImageFiles, size: int, rounds: int) -> None:
    contents = [source.read(i) for i in range(len(source))]
    transform = build_transform(data_config(recipe(size)), is_train=True)
    alternatives = decoders(size)
    reference = [np.asarray(alternatives["Pillow"](content), int) for content in contents]
    for name, decoder in alternatives.items():
        if name != "Pillow, draft":
            worst = max(
                np.abs(decoder(c) - r).mean() for c, r in zip(contents, reference, strict=True)
            )
            print(
                f"{name}: differs from Pillow by up to {worst:.3f} levels of 255, an image's mean"
            )

    def augmented(decoder: Decoder, images: list[int]) -> None:
        with preserved_random_states():
            for i in images:
                seed_random_states(0, 0, i)
                transform(decoder(contents[i]))

    alone = {
        name: lambda images, d=decoder: [d(contents[i]) for i in images]
        for name, decoder in alternatives.items()
    }
    whole = {name: partial(augmented, decoder) for name, decoder in alternatives.items()}
    print("\n| | | median (quartiles) |\n|---|---|---|")
    rates("decode", by_turns(alone, len(contents), rounds), len(contents), "images/s")
    rates("decode and augment", by_turns(whole, len(contents), rounds), len(contents), "images/s")


def reading(files: ImageFiles, shards: str, size: int, rounds: int) -> None:
    sources: dict[str, Source] = {"files": files, "shards": load_shards(shards).train}
    megabytes = sum(len(files.read(i)) for i in range(len(files))) / 1e6
    tars = [str(path) for path in Path(shards).rglob("*.tar")]
    on_disk = [os.path.join(os.fsencode(files.root), path) for path in files.paths] + tars
    read = {
        name: lambda images, s=source: [s.read(i) for i in images]
        for name, source in sources.items()
    }
    rates("read", by_turns(read, len(files), rounds), megabytes, "MB/s")
    cold = by_turns(
        read, len(files), rounds, clock=time.perf_counter, before_round=lambda: drop_pages(on_disk)
    )
    rates("read, cold", cold, megabytes, "MB/s")
    datasets = {
        name: ImageDataset(source, data_config(recipe(size)), is_train=True)
        for name, source in sources.items()
    }
    whole = {name: dataset.__getitems__ for name, dataset in datasets.items()}
    rates("pipeline", by_turns(whole, len(files), rounds), len(files), "images/s")


def drop_pages(paths: list) -> None:
    for path in paths:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "directories", nargs="+", metavar="DIR", help="with JPEGs anywhere below it"
    )
    for name, value in {"size": 192, "images": 200, "rounds": 9}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{machine('cpu')}; Pillow {Image.__version__}; {vars(args)}")
    for directory in args.directories:
        source = sample(directory, args.images)
        sizes = np.array([source.open(i).size for i in range(len(source))])
        typical = " x ".join(str(int(side)) for side in np.median(sizes, axis=0))
        with tempfile.TemporaryDirectory() as shards:
            make_shards(Sources(source, source, ["0"]), shards, Options(), workers=1)
            print(f"\n{directory}: {len(source)} images, {typical} pixels (medians)")
            decoding(source, args.size, args.rounds)
            reading(source, shards, args.size, args.rounds)


if __name__ == "__main__":
    main()
