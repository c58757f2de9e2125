"""The index (swinv2_moe.data.shards) of tars that another program wrote in the WebDataset format.

A sample is what members of one name but for what follows its first dot make: an image, and its
label in a .cls (the number as text) or a .json (its "label"). Each tar is read once, for its
checksum.
"""

import os
import tarfile
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from moe_core.files import open_regular
from swinv2_moe.data.images import MAX_FILE_BYTES, MAX_PIXELS, decode
from swinv2_moe.data.prepare.shard_jobs import Job, Tick, begin, finish, finish_job, run_jobs
from swinv2_moe.data.prepare.transfer_bar import TransferBar
from swinv2_moe.data.shards import SPLITS
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.files import HashedFile, only_process, parse_json

_IMAGES = {"jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "pbm", "jfif"}
_MAX_LABEL = 2**31 - 1
_MAX_LABEL_BYTES = 1 << 20  # of a .cls or .json
# What tarfile raises: the others for headers with numbers that are none, or headers of headers of
# headers.
_DAMAGE = (tarfile.TarError, ArithmeticError, LookupError, RecursionError, ValueError)


def index_shards(
    root: str, num_classes: int, check: bool, workers: int, max_pixels: int = MAX_PIXELS
) -> dict:
    """Make members.npy and index.json for `root`/train/*.tar and `root`/val/*.tar; returns what
    index.json holds.

    Args:
        num_classes: 0: as many as the labels of train reach, all of which must have an image then.
        check: leave out images that cannot be decoded, or have more than `max_pixels`.

    Raises:
        UserError: no tars, a damaged one, an image without a label or the reverse, a label that is
            not one.
    """
    jobs = []
    for split in SPLITS:
        folder = os.path.join(root, split)
        names = (
            sorted(name for name in os.listdir(folder) if name.endswith(".tar"))
            if os.path.isdir(folder)
            else []
        )
        if not names:
            raise UserError(f"--index {root}: there is no {split}/*.tar")
        jobs += [Job(split, name, number) for number, name in enumerate(names)]
    with only_process(root):
        size = sum(os.path.getsize(job.path(root)) for job in jobs)
        asked = {
            "command": "index",
            "num_classes": num_classes,
            "check": check,
            "max_pixels": max_pixels,
        }
        asked |= {"tars": len(jobs), "bytes": size}
        plan = begin(root, asked, dict, "remove its index.json and plan.json")
        if not os.path.exists(os.path.join(root, "index.json")):
            work = partial(_index, root, num_classes, max_pixels if check else None)
            run_jobs(root, jobs, work, workers, TransferBar("index", size, "bytes"))
        return finish(root, jobs, [str(label) for label in range(num_classes)] or None, plan)


def _index(root: str, num_classes: int, max_pixels: int | None, job: Job, tick: Tick) -> dict:
    path = job.path(root)
    rows, left_out, last, done = [], [], None, 0
    with open_regular(path) as file:
        reader = HashedFile(file)
        try:
            with tarfile.open(fileobj=reader, mode="r|", bufsize=1 << 20) as tar:
                members = _members(tar, os.fstat(file.fileno()).st_size)
                for sample in _samples(path, tar, members, num_classes, max_pixels):
                    if sample.good:
                        rows.append((sample.image.offset_data, sample.image.size, sample.label))
                    else:
                        left_out.append(f"{path}: {sample.image.name}")
                    last = sample.image.name
                    tick(1, tar.offset - done)
                    done = tar.offset
                whole = os.pread(file.fileno(), tarfile.BLOCKSIZE, tar.offset) == bytes(
                    tarfile.BLOCKSIZE
                )
        except _DAMAGE:
            whole = False
        if not whole:  # tarfile itself takes a cut between two members for the end
            where = "from the beginning"
            if last:
                where = f"after {one_line(last)}"
            raise UserError(f"{path}: is cut off or damaged {where}")
        while reader.read(1 << 20):  # what follows the last member
            pass
        size = file.tell()
    tick(0, size - done)
    return finish_job(path, size, reader.sha256, rows, left_out)


class _Sample(NamedTuple):
    image: tarfile.TarInfo
    label: int
    good: bool  # whether there is an image in the bytes


def _samples(
    path: str,
    tar: tarfile.TarFile,
    members: Iterator["_Member"],
    num_classes: int,
    max_pixels: int | None,
) -> Iterator[_Sample]:
    for key, own in groupby(members, key=itemgetter(0)):
        image, labels, good = None, {}, True
        where = f"{path}: {one_line(key)}"
        for _, kind, member in own:  # the tar is read front to back: a content is read now or never
            if kind in _IMAGES:
                if image is not None:
                    raise UserError(
                        f"{where} has two images, .{image.name.rpartition('.')[2]} and .{kind}"
                    )
                image, good = member, _is_usable(tar, member, max_pixels)
            elif kind in ("cls", "json"):
                if member.size > _MAX_LABEL_BYTES:
                    raise UserError(
                        f"{where}: its .{kind} has {member.size:,} bytes, a label has few"
                    )
                labels[kind] = tar.extractfile(member).read()
        if image is None:
            raise UserError(f"{where} has no image ({' '.join(sorted(_IMAGES))} count)")
        yield _Sample(image, _label(where, labels, num_classes), good)


_Member = tuple[str, str, tarfile.TarInfo]


def _members(tar: tarfile.TarFile, size: int) -> Iterator[_Member]:
    """Key, extension and member of each file in a tar of `size` bytes, named as webdataset names
    them."""
    for member in tar:
        # where the next one should be: tarfile itself would look for it
        if not member.offset < tar.offset <= size:
            raise tarfile.ReadError("a member that does not end within the tar")
        folder, _, name = member.name.rpartition("/")
        stem, _, kind = name.partition(".")
        # sparse: its bytes do not lie there as they are
        is_file = member.isfile() and not member.issparse()
        if is_file and stem and kind and not member.name.startswith("__"):
            yield f"{folder}/{stem}".lstrip("/"), kind.lower(), member


def _is_usable(tar: tarfile.TarFile, image: tarfile.TarInfo, max_pixels: int | None) -> bool:
    """Whether there are bytes to read and, unless `max_pixels` is None, a picture of at most so
    many in them."""
    if not 0 < image.size <= MAX_FILE_BYTES:
        return False
    try:
        if max_pixels is not None:
            decode(tar.extractfile(image).read(), max_pixels)
    except ValueError:
        return False
    return True


def _label(where: str, labels: dict[str, bytes], num_classes: int) -> int:
    """The label that a .cls holds, or else the "label" of a .json."""
    try:
        text = (
            labels["cls"].decode() if "cls" in labels else str(parse_json(labels["json"])["label"])
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f'{where} has no label: no .cls, and no .json with a "label"') from error
    try:
        label = int(text)
    except ValueError as error:
        raise UserError(f"{where}: label {text.strip()[:60]!r} is not an integer") from error
    if not 0 <= label < (num_classes or _MAX_LABEL):
        raise UserError(
            f"{where}: label {label} is out of range, with {num_classes or _MAX_LABEL} classes"
        )
    return label
