"""Make shards (swinv2_moe.data.shards) from any source: images are shuffled and written to tars.

The images of a shard depend only on the list of images, the seed and the number of images per
shard, not on the process that writes it.
"""

import io
import math
import os
import re
from dataclasses import asdict, dataclass

import numpy as np
from PIL import Image

from moe_core.files import sha256
from swinv2_moe.data.images import MAX_PIXELS, decode, to_mode
from swinv2_moe.data.prepare.shard_jobs import (
    Job,
    ReportProgress,
    begin,
    finish,
    finish_job,
    run_jobs,
)
from swinv2_moe.data.shards import SPLITS
from swinv2_moe.data.sources import Source, Sources
from swinv2_moe.errors import UserError, short
from swinv2_moe.files import make_directory, new_file
from swinv2_moe.locks import lock
from swinv2_moe.tables import TransferBar

_QUALITY = 90  # quality of images that are stored smaller
_BLOCK = 512  # bytes of a block of a tar
# number of images of each split from which the number of images per shard is estimated
_ESTIMATE = 256
# The content has precedence over the name: some of ImageNet's .JPEG files are PNGs.
_KINDS = {b"\xff\xd8": "jpg", b"\x89PNG": "png"}


@dataclass(frozen=True)
class ShardOptions:
    """Options for making shards.

    Args:
        seed: seed of the order of the images.
        shard_mb: approximate size of a shard in 10^6 bytes. All but the last of a split hold the
            same number of images.
        short_side: store images with a longer short side as JPEGs of this short side, in pixels; 0:
            store all images as they are.
        check: omit images that cannot be decoded.
        max_pixels: maximum size of an image that is decoded; larger images count as broken.
    """

    seed: int = 0
    shard_mb: float = 256
    short_side: int = 0
    check: bool = False
    max_pixels: int = MAX_PIXELS


def make_shards(sources: Sources, output: str, options: ShardOptions, workers: int) -> dict:
    """Write the images of both splits to shards in `output`, or continue an interrupted call.

    Images that are missing or empty are omitted; so are broken images, if images are decoded.

    Returns:
        The content of index.json.

    Raises:
        UserError: `output` has other content, a file cannot be read or written, or too many images
            were omitted.
    """
    _require_webdataset()
    make_directory(output)
    with lock(output):
        writers = {split: _Writer(getattr(sources, split), output, options) for split in SPLITS}
        asked = {"command": "make"} | asdict(options)
        for split, writer in writers.items():
            asked[f"{split}_images"] = len(writer.order)
            asked[f"{split}_sha256"] = _fingerprint(writer.source)
        plan = begin(output, asked, lambda: _new_plan(output, writers), "take another --output")
        jobs = []
        for split, writer in writers.items():
            make_directory(os.path.join(output, split))
            writer.images_per_shard = _images_per_shard(output, split, plan)
            count = math.ceil(len(writer.order) / writer.images_per_shard)
            jobs += [Job(split, f"{number:06d}.tar", number) for number in range(count)]
        if not os.path.exists(os.path.join(output, "index.json")):
            total = sum(len(writer.order) for writer in writers.values())

            def work(job: Job, report_progress: ReportProgress) -> dict:
                return writers[job.split].write(job, report_progress)

            run_jobs(output, jobs, work, workers, TransferBar("shards", total, "images"), total)
        return finish(output, jobs, sources.class_names, plan)


def _require_webdataset() -> None:
    try:
        import webdataset  # noqa: F401
    except ImportError as error:
        raise UserError(
            "making shards needs the webdataset library: pip install -e '.[data]'"
        ) from error


def _fingerprint(source: Source) -> str:
    """A checksum of a source's targets and its paths or pixels."""
    arrays = [value for value in vars(source).values() if isinstance(value, np.ndarray)]
    return sha256(np.ascontiguousarray(array).data for array in arrays)


def _new_plan(output: str, writers: "dict[str, _Writer]") -> dict:
    entries = [name for name in os.listdir(output) if not name.startswith(".")]
    if entries:
        raise UserError(
            f"--output {output}: is not empty and holds no unfinished shards; found:"
            f" {sorted(entries)[0]}"
        )
    return {f"{split}_images_per_shard": writer.estimate() for split, writer in writers.items()}


def _images_per_shard(output: str, split: str, plan: dict) -> int:
    count = plan.get(f"{split}_images_per_shard")
    if type(count) is not int or count < 1:
        raise UserError(
            f"{output}: its plan has {split}_images_per_shard {short(count)}, it must be at least 1"
        )
    return count


class _Writer:
    """Writes the shards of one split."""

    def __init__(self, source: Source, output: str, options: ShardOptions):
        self.source = source
        self.output = output
        self.options = options
        self.order = np.random.default_rng(options.seed).permutation(len(source))
        self.images_per_shard = 0

    def estimate(self) -> int:
        """The number of images that gives a shard of about the wanted size, estimated from the
        first images of the order, which is random."""
        rows = self.order[:_ESTIMATE].tolist()
        sizes = []  # sizes in a tar
        for row in rows:
            content = self._content(row)
            if content:
                # Four blocks: the two headers and the label.
                num_blocks = 4 + math.ceil(len(content) / _BLOCK)
                sizes.append(num_blocks * _BLOCK)
        if not sizes:
            raise UserError(
                f"none of {len(rows)} images that were tried is there, for example"
                f" {self.source.name(rows[0])}"
            )
        return max(1, round(1e6 * self.options.shard_mb / np.mean(sizes)))

    def write(self, job: Job, report_progress: ReportProgress) -> dict:
        from webdataset import TarWriter  # imported here, because it takes a second

        path = job.path(self.output)
        start = job.number * self.images_per_shard
        images = self.order[start : start + self.images_per_shard].tolist()
        rows = []
        left_out = []
        with new_file(path) as file, TarWriter(file, encoder=False, mtime=0) as tar:
            for image in images:
                content = self._content(image)
                if content is None:
                    left_out.append(self.source.name(image))
                    report_progress(1, 0)
                else:
                    rows.append(self._add(tar, image, content))
                    report_progress(1, len(content))
        return finish_job(path, file.bytes, file.sha256, rows, left_out)

    def _add(self, tar, row: int, content: bytes) -> tuple[int, int, int]:
        """Write an image, and return its offset in the tar, its size and its label."""
        stem, extension = os.path.splitext(os.path.basename(self.source.name(row)))
        kind = extension.removeprefix(".").lower() or "img"
        for start, kind_of_content in _KINDS.items():
            if content.startswith(start):
                kind = kind_of_content
        label = int(self.source.targets[row])
        # A key must have no dots: the first dot of a member's name begins the extension.
        key = f"{row:08d}-{re.sub('[^A-Za-z0-9]+', '_', stem)[:60]}"
        tar.write({"__key__": key, "cls": str(label).encode()})
        tar.write({"__key__": key, kind: content})
        padded_size = math.ceil(len(content) / _BLOCK) * _BLOCK
        return tar.tarstream.offset - padded_size, len(content), label

    def _content(self, row: int) -> bytes | None:
        """The bytes to store; None if they are not an image."""
        try:
            content = self.source.read(row)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # an error of the file system: a later call may succeed
            raise UserError(
                f"{self.source.name(row)}: cannot be read ({error.strerror})"
            ) from error
        if content and (self.options.check or self.options.short_side):
            try:
                image = decode(content, self.options.max_pixels)
            except ValueError:
                return None
            if 0 < self.options.short_side < min(image.size):
                return _smaller(image, self.options.short_side)
        return content or None


def _smaller(image: Image.Image, short_side: int) -> bytes:
    size = [round(side * short_side / min(image.size)) for side in image.size]
    resized = to_mode(image, "RGB").resize(size, Image.Resampling.BICUBIC)
    file = io.BytesIO()
    resized.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()
