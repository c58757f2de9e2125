"""Arrange the files of COCO 2017 as the configurations expect, without needing mmdetection."""

import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.progress import track

from swinv2_moe.data.images import decode, read_file
from swinv2_moe.detection.annotations import Annotations, check_annotations
from swinv2_moe.errors import UserError, one_line
from swinv2_moe.files import check_inner_path
from swinv2_moe.train.routing import evenly_spaced

# Exceptions of zipfile and the decompressors. RuntimeError: encrypted, or an unknown compression.
_DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError, ValueError)
_SITE = "http://images.cocodataset.org"


@dataclass(frozen=True)
class Part:
    """A folder of the data set and the archive that it comes in."""

    folder: str
    archive: str
    size: str

    @property
    def address(self) -> str:
        directory = "zips"
        if self.folder == "annotations":
            directory = "annotations"
        return f"{_SITE}/{directory}/{self.archive}"


PARTS = (
    Part("train2017", "train2017.zip", "118,287 images, 18 GB"),
    Part("val2017", "val2017.zip", "5,000 images, 1 GB"),
    Part("annotations", "annotations_trainval2017.zip", "0.25 GB"),
)


def lay_out(source: Path, target: Path) -> list[str]:
    """Create train2017/, val2017/ and annotations/ in `target` from `source`.

    Archives are unpacked, folders are linked to; nothing is moved or removed. The folders may also
    be named train/ and val/.

    Returns:
        A line for each missing part, with its address.

    Raises:
        UserError: no directory; an archive that is broken or cannot be unpacked. Another call
            continues where it stopped.
    """
    if not source.is_dir():
        raise UserError(f"{source}: no such directory")
    missing = []
    for part in PARTS:
        if archive := _archive(source, part):
            unpack(archive, target, part.folder)
        elif folder := _folder(source, part):
            _link(folder, target / folder.name)
        elif not _folder(target, part):
            missing.append(f"{part.folder}/ or {part.archive} ({part.size}): {part.address}")
    return missing


def splits(directory: Path) -> Iterator[tuple[Path, Path]]:
    """(annotation file, directory of images) of training and validation, made by `lay_out`."""
    for part in PARTS[:2]:
        images = _folder(directory, part)
        assert images is not None
        yield directory / "annotations" / f"instances_{images.name}.json", images


def _folder(directory: Path, part: Part) -> Path | None:
    names = (part.folder, part.folder.removesuffix("2017"))
    return next((directory / name for name in names if (directory / name).is_dir()), None)


def _archive(directory: Path, part: Part) -> Path | None:
    path = directory / part.archive
    if path.is_file():
        return path
    return None


def _link(folder: Path, link: Path) -> None:
    if link.is_dir():  # the folder itself, or what an earlier call linked
        if not link.samefile(folder):
            raise UserError(f"{link}: is there already, and is not {folder}")
        return
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(folder.resolve(), target_is_directory=True)
    except OSError as error:
        raise UserError(f"{link}: cannot be linked to {folder} ({error.strerror})") from error


def unpack(archive: Path, target: Path, folder: str) -> None:
    """Unpack an archive's only folder into `target`; files of the right size are kept.

    Raises:
        UserError: a wrong or broken archive, or no space. Incomplete files do not get their names.
    """
    try:
        with zipfile.ZipFile(archive) as content:
            files = [member for member in content.infolist() if not member.is_dir()]
            for member in files:
                if not _is_in(folder, member.filename):
                    name = member.filename
                    raise UserError(f"{archive}: holds {name!r}, which is not in {folder}/")
            todo = [member for member in files if not _is_unpacked(target, member)]
            for member in track(todo, f"unpacking {archive.name}", disable=not todo):
                _extract(content, member, target)
    except _DAMAGE as error:
        raise UserError(f"{archive}: a broken archive ({one_line(str(error))})") from error
    except OSError as error:
        problem = error.strerror or one_line(str(error))  # bz2's has none
        raise UserError(f"{archive}: cannot be unpacked into {target} ({problem})") from error


def _is_in(folder: str, name: str) -> bool:
    try:
        return check_inner_path(name).startswith(f"{folder}/")
    except ValueError:
        return False


def _is_unpacked(target: Path, member: zipfile.ZipInfo) -> bool:
    path = target / member.filename
    return path.is_file() and path.stat().st_size == member.file_size


def _extract(content: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    """Extract a file atomically: a full disk or a kill leaves no incomplete file of this name."""
    final = target / member.filename
    member.filename += ".part"
    part = Path(content.extract(member, target))  # compares the checksum
    os.replace(part, final)


def check_split(file: Path, images: Path, decode_count: int | None) -> Annotations:
    """Check the annotations and decode images.

    Args:
        decode_count: number of images to decode, evenly spaced; None: all.

    Raises:
        UserError: as `check_annotations`; or images that are broken or have another size than in
            the annotations.
    """
    annotations = check_annotations(file, images)
    num_images = len(annotations.image_files)
    if decode_count is None:
        decode_count = num_images
    rows = evenly_spaced(num_images, decode_count)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        decoded = pool.map(partial(_problem, annotations, images), rows)
        problems = list(filter(None, track(decoded, f"decoding {images.name}", len(rows))))
    if problems:
        raise UserError(
            f"{images}: {len(problems):,} of {len(rows):,} images are unusable, the first:"
            f" {problems[0]}"
        )
    return annotations


def _problem(annotations: Annotations, images: Path, row: int) -> str | None:
    name, size = annotations.image_files[row], tuple(annotations.image_sizes[row])
    try:
        image = decode(read_file(images / name))
    except (OSError, ValueError) as error:
        return f"{name} ({error})"
    if image.size != size:
        return (
            f"{name} ({image.width} x {image.height} px, its annotations say {size[0]} x {size[1]})"
        )
    return None
