"""The index (swinv2_moe.data.shards) of tars that another program wrote in the WebDataset format.

A sample is what members of one name but for what follows its first dot make: an image, and its label in a .cls (the
number as text) or a .json (its "label"). Each tar is read once, for its checksum.
"""

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from swinv2_moe.data.files import TransferBar, only_process
from swinv2_moe.data.images import decode
from swinv2_moe.data.shard_jobs import Job, Tick, begin, finish, finish_job, run_jobs
from swinv2_moe.data.shards import SPLITS
from swinv2_moe.errors import UserError

_IMAGES = {"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "jfif"}
_MAX_LABEL = 2**31 - 1


def index_shards(root: str, num_classes: int, check: bool, workers: int) -> dict:
    """Make members.npy and index.json for `root`/train/*.tar and `root`/val/*.tar; returns what index.json holds.

    Args:
        num_classes: 0: as many as the labels of train reach, all of which must have an image then.
        check: leave out images that cannot be decoded.

    Raises:
        UserError: no tars, a damaged one, an image without a label or the reverse, a label that is not one.
    """
    jobs = []
    for split in SPLITS:
        folder = os.path.join(root, split)
        names = sorted(name for name in os.listdir(folder) if name.endswith(".tar")) if os.path.isdir(folder) else []
        if not names:
            raise UserError(f"--index {root}: there is no {split}/*.tar")
        jobs += [Job(split, name, number) for number, name in enumerate(names)]
    with only_process(root):
        size = sum(os.path.getsize(job.path(root)) for job in jobs)
        asked = {"command": "index", "num_classes": num_classes, "check": check, "tars": len(jobs), "bytes": size}
        plan = begin(root, asked, dict, "remove its index.json and plan.json")
        if not os.path.exists(os.path.join(root, "index.json")):
            work = partial(_index, root, num_classes, check)
            run_jobs(root, jobs, work, workers, TransferBar("index", size, "bytes"))
        return finish(root, jobs, [str(label) for label in range(num_classes)] or None, plan)


class _Reader:
    """A file to read front to back that knows the checksum of what was read."""

    def __init__(self, file):
        self._file, self.digest = file, hashlib.sha256()

    def read(self, size: int) -> bytes:
        content = self._file.read(size)
        self.digest.update(content)
        return content


def _index(root: str, num_classes: int, check: bool, job: Job, tick: Tick) -> dict:
    path = job.path(root)
    rows, left_out, last, done = [], [], None, 0
    with open(path, "rb") as file:
        reader = _Reader(file)
        try:
            with tarfile.open(fileobj=reader, mode="r|", bufsize=1 << 20) as tar:
                for sample in _samples(path, tar, num_classes, check):
                    if sample.good:
                        rows.append((sample.image.offset_data, sample.image.size, sample.label))
                    else:
                        left_out.append(f"{path}: {sample.image.name}")
                    last = sample.image.name
                    tick(1, tar.offset - done)
                    done = tar.offset
                whole = os.pread(file.fileno(), tarfile.BLOCKSIZE, tar.offset) == bytes(tarfile.BLOCKSIZE)
        except tarfile.TarError:
            whole = False
        if not whole:  # tarfile itself takes a cut between two members for the end
            raise UserError(f"{path}: is cut off or damaged {f'after {last}' if last else 'from the beginning'}")
        while reader.read(1 << 20):  # what follows the last member
            pass
        size = file.tell()
    tick(0, size - done)
    return finish_job(path, size, reader.digest.hexdigest(), rows, left_out)


class _Sample(NamedTuple):
    image: tarfile.TarInfo
    label: int
    good: bool  # whether there is an image in the bytes


def _samples(path: str, tar: tarfile.TarFile, num_classes: int, check: bool) -> Iterator[_Sample]:
    for key, members in groupby(_members(tar), key=itemgetter(0)):
        image, labels, good = None, {}, True
        for _, kind, member in members:  # the tar is read front to back: a content is read now or never
            if kind in _IMAGES:
                if image is not None:
                    raise UserError(f"{path}: {key} has two images, .{image.name.rpartition('.')[2]} and .{kind}")
                image, good = member, member.size > 0 and not (check and not _is_image(tar.extractfile(member).read()))
            elif kind in ("cls", "json"):
                labels[kind] = tar.extractfile(member).read()
        if image is None:
            raise UserError(f"{path}: {key} has no image ({' '.join(sorted(_IMAGES))} count)")
        yield _Sample(image, _label(f"{path}: {key}", labels, num_classes), good)


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, str, tarfile.TarInfo]]:
    """Key, extension and member of each file, named as webdataset names them."""
    for member in tar:
        folder, _, name = member.name.rpartition("/")
        stem, _, kind = name.partition(".")
        if member.isfile() and stem and kind and not member.name.startswith("__"):
            yield f"{folder}/{stem}".lstrip("/"), kind.lower(), member


def _is_image(content: bytes) -> bool:
    try:
        decode(content)
    except Exception:  # as in read_image
        return False
    return True


def _label(where: str, labels: dict[str, bytes], num_classes: int) -> int:
    """The label that a .cls holds, or else the "label" of a .json."""
    try:
        text = labels["cls"].decode() if "cls" in labels else str(json.loads(labels["json"])["label"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f'{where} has no label: no .cls, and no .json with a "label"') from error
    try:
        label = int(text)
    except ValueError as error:
        raise UserError(f"{where}: label {text.strip()[:60]!r} is not an integer") from error
    if not 0 <= label < (num_classes or _MAX_LABEL):
        raise UserError(f"{where}: label {label} is out of range, with {num_classes or _MAX_LABEL} classes")
    return label
