"""Make the index (swinv2_moe.data.shards) of tars that another program wrote in the WebDataset
format.

A sample consists of members whose names are equal up to the first dot: an image, and a .cls file
(the label as text) or a .json file (with the key "label"), or both. Each tar is read once, for both
index and checksum.
"""

import os
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from moe_core.files import open_regular
from swinv2_moe.data.images import MAX_FILE_BYTES, MAX_PIXELS, SUFFIXES, decode, is_skipped
from swinv2_moe.data.prepare.shard_jobs import (
    Job,
    ReportProgress,
    begin,
    finish,
    finish_job,
    run_jobs,
)
from swinv2_moe.data.shards import SPLITS
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.files import HashedFile, parse_json
from swinv2_moe.locks import lock
from swinv2_moe.tables import TransferBar

_IMAGES = {ending.removeprefix(".") for ending in SUFFIXES} | {"avif", "heic", "heif"}
_MAX_LABEL = 2**31 - 1
_MAX_LABEL_BYTES = 1 << 20  # limit of a .cls or .json file
# Raised by tarfile. All but TarError are raised for headers with invalid numbers or deeply nested
# headers.
_DAMAGE = (tarfile.TarError, ArithmeticError, LookupError, RecursionError, ValueError)


def index_shards(
    root: str, num_classes: int, check: bool, workers: int, max_pixels: int = MAX_PIXELS
) -> dict:
    """Make members.npy and index.json for `root`/train/*.tar and `root`/val/*.tar.

    Args:
        num_classes: number of classes; 0: determined by the largest label of train. Then every
            smaller label must have an image.
        check: omit images that cannot be decoded, or have more than `max_pixels`.

    Returns:
        The content of index.json.

    Raises:
        UserError: there are no tars, a tar is damaged, an image has no label or a label no image,
            or a label is invalid.
    """
    jobs = _jobs(root)
    with lock(root):
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
            max_decoded = None
            if check:
                max_decoded = max_pixels
            work = partial(_index, root, num_classes, max_decoded)
            run_jobs(root, jobs, work, workers, TransferBar("index", size, "bytes"))
        class_names = None
        if num_classes:
            class_names = [str(label) for label in range(num_classes)]
        return finish(root, jobs, class_names, plan)


def _jobs(root: str) -> list[Job]:
    """One job for each tar."""
    jobs = []
    for split in SPLITS:
        names = []
        folder = os.path.join(root, split)
        if os.path.isdir(folder):
            names = sorted(name for name in os.listdir(folder) if name.endswith(".tar"))
        if not names:
            raise UserError(f"--index {root}: there is no {split}/*.tar")
        jobs += [Job(split, name, number) for number, name in enumerate(names)]
    return jobs


def _index(
    root: str, num_classes: int, max_pixels: int | None, job: Job, report_progress: ReportProgress
) -> dict:
    """Index one tar.

    Args:
        max_pixels: decode every image, and omit broken and larger images; None: decode no image.
    """
    path = job.path(root)
    rows = []
    left_out = []
    last_name = None
    done = 0
    with open_regular(path) as file:
        reader: Any = HashedFile(file)  # tarfile only reads
        try:
            with tarfile.open(fileobj=reader, mode="r|", bufsize=1 << 20) as tar:
                members = _members(tar, os.fstat(file.fileno()).st_size)
                for sample in _samples(path, tar, members, num_classes, max_pixels):
                    image = sample.image
                    if sample.is_usable:
                        rows.append((image.offset_data, image.size, sample.label))
                    else:
                        left_out.append(f"{path}: {image.name}")
                    last_name = image.name
                    report_progress(1, tar.offset - done)
                    done = tar.offset
                # tarfile takes a cut between two members for the end of the archive.
                end = os.pread(file.fileno(), tarfile.BLOCKSIZE, tar.offset)
                is_complete = end == bytes(tarfile.BLOCKSIZE)
        except _DAMAGE:
            is_complete = False
        if not is_complete:
            place = "from the beginning"
            if last_name:
                place = f"after {one_line(last_name)}"
            raise UserError(f"{path}: is cut off or damaged {place}")
        while reader.read(1 << 20):  # read the rest of the file, for the checksum
            pass
        size = file.tell()
    report_progress(0, size - done)
    return finish_job(path, size, reader.sha256, rows, left_out)


class _Sample(NamedTuple):
    image: tarfile.TarInfo
    label: int
    is_usable: bool  # result of `_is_usable` for the image


def _samples(
    path: str,
    tar: tarfile.TarFile,
    members: Iterator["_Member"],
    num_classes: int,
    max_pixels: int | None,
) -> Iterator[_Sample]:
    for key, group in groupby(members, key=itemgetter(0)):
        image = None
        is_usable = True
        labels = {}
        where = f"{path}: {one_line(key)}"
        # The tar is a stream: a member's content can only be read now.
        for _, kind, member in group:
            if kind in _IMAGES:
                if image is not None:
                    raise UserError(
                        f"{where} has two images, .{image.name.rpartition('.')[2]} and .{kind}"
                    )
                image = member
                is_usable = _is_usable(tar, member, max_pixels)
            elif kind in ("cls", "json"):
                if member.size > _MAX_LABEL_BYTES:
                    raise UserError(
                        f"{where}: its .{kind} has {member.size:,} bytes, a label has few"
                    )
                labels[kind] = _read(tar, member)
        if image is None:
            raise UserError(f"{where} has no image ({' '.join(sorted(_IMAGES))} count)")
        yield _Sample(image, _label(where, labels, num_classes), is_usable)


_Member = tuple[str, str, tarfile.TarInfo]


def _members(tar: tarfile.TarFile, size: int) -> Iterator[_Member]:
    """Yield key, extension and member of each file in a tar of `size` bytes. Key and extension are
    those of webdataset."""
    for member in tar:
        # tarfile would search for the next member beyond the end.
        if not member.offset < tar.offset <= size:
            raise tarfile.ReadError("a member that does not end within the tar")
        folder, _, name = member.name.rpartition("/")
        stem, _, kind = name.partition(".")
        # A sparse member is not stored as its plain bytes.
        is_file = member.isfile() and not member.issparse()
        parts = set(member.name.split("/")) - {".", ".."}
        if any(map(is_skipped, parts)) or member.name.startswith("__"):
            continue
        if is_file and stem and kind:
            yield f"{folder}/{stem}".lstrip("/"), kind.lower(), member


def _read(tar: tarfile.TarFile, file: tarfile.TarInfo) -> bytes:
    content = tar.extractfile(file)
    assert content is not None  # of `_members`
    return content.read()


def _is_usable(tar: tarfile.TarFile, image: tarfile.TarInfo, max_pixels: int | None) -> bool:
    """Whether the member is not empty and is an image of at most `max_pixels` pixels. With
    `max_pixels` None, the image is not decoded."""
    if not 0 < image.size <= MAX_FILE_BYTES:
        return False
    try:
        if max_pixels is not None:
            decode(_read(tar, image), max_pixels)
    except ValueError:
        return False
    return True


def _label(where: str, labels: dict[str, bytes], num_classes: int) -> int:
    """The label in the .cls file or the value "label" in the .json file, whichever is a number."""
    texts = {}
    if "cls" in labels:
        texts["cls"] = labels["cls"].decode(errors="replace").strip()
    with suppress(KeyError, TypeError, ValueError):
        texts["json"] = str(parse_json(labels["json"])["label"])
    numbers = {}
    for kind, text in texts.items():
        with suppress(ValueError):
            numbers[kind] = int(text)
    if not texts:
        raise UserError(f'{where} has no label: no .cls, and no .json with a "label"')
    if not numbers:
        text = next(iter(texts.values()))
        raise UserError(
            f"{where}: label {text[:60]!r} is not an integer; write the number of the class, from"
            " 0, to the .cls, or make shards of a folder with a folder for each class"
        )
    if len(set(numbers.values())) > 1:
        raise UserError(
            f"{where}: label {numbers['cls']} in its .cls, {numbers['json']} in its .json; leave"
            " the right one in the tar"
        )
    label = next(iter(numbers.values()))
    num_classes = num_classes or _MAX_LABEL
    if not 0 <= label < num_classes:
        raise UserError(f"{where}: label {label} is out of range, with {num_classes} classes")
    return label
