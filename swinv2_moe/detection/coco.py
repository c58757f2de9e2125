"""COCO 2017 as it is downloaded, laid out as the configurations expect it. Needs nothing of
mmdetection."""

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
from swinv2_moe.train.routing import spread

# What zipfile and the decompressors raise; RuntimeError: encrypted, or compressed in a way that is
# not known
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
        return f"{_SITE}/{'annotations' if self.folder == 'annotations' else 'zips'}/{self.archive}"


PARTS = (
    Part("train2017", "train2017.zip", "118,287 images, 18 GB"),
    Part("val2017", "val2017.zip", "5,000 images, 1 GB"),
    Part("annotations", "annotations_trainval2017.zip", "0.25 GB"),
)


def lay_out(source: Path, target: Path) -> list[str]:
    """Make `target` hold train2017/, val2017/ and annotations/ of `source`: archives are unpacked,
    folders that are elsewhere are linked to; nothing is moved or removed. train/ and val/ without
    the year are taken as well.

    Returns:
        What is missing and where it comes from, a line for each part; none: all is there.

    Raises:
        UserError: no directory; an archive that is broken or cannot be unpacked (the same call goes
            on from there).
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
    """(annotation file, directory of the images) of training and validation in what `lay_out`
    made."""
    for part in PARTS[:2]:
        images = _folder(directory, part)
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
    """Unpack the files of an archive's one folder into `target`; those that are there in their full
    size stay.

    Raises:
        UserError: not such an archive, a broken one, or no room; no half-written file gets its
            name.
    """
    try:
        with zipfile.ZipFile(archive) as content:
            files = [member for member in content.infolist() if not member.is_dir()]
            if strange := [
                member.filename for member in files if not _is_in(folder, member.filename)
            ]:
                raise UserError(f"{archive}: holds {strange[0]!r}, which is not in {folder}/")
            todo = [member for member in files if not _is_there(target, member)]
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


def _is_there(target: Path, member: zipfile.ZipInfo) -> bool:
    path = target / member.filename
    return path.is_file() and path.stat().st_size == member.file_size


def _extract(content: zipfile.ZipFile, member: zipfile.ZipInfo, target: Path) -> None:
    """Whole or not at all: a full disk or a kill must not leave a file of the right name."""
    final = target / member.filename
    member.filename += ".part"
    part = Path(content.extract(member, target))  # compares the checksum
    os.replace(part, final)


def check_split(file: Path, images: Path, decode_count: int | None) -> Annotations:
    """Check the annotations and decode images.

    Args:
        decode_count: so many of the images, evenly spaced; None: all of them.

    Raises:
        UserError: as `check_annotations`; images that are broken or of another size than the
            annotations say.
    """
    found = check_annotations(file, images)
    rows = spread(
        len(found.image_files), len(found.image_files) if decode_count is None else decode_count
    )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        problems = pool.map(partial(_problem, found, images), rows)
        problems = [one for one in track(problems, f"decoding {images.name}", len(rows)) if one]
    if problems:
        raise UserError(
            f"{images}: {len(problems):,} of {len(rows):,} images are unusable, the first:"
            f" {problems[0]}"
        )
    return found


def _problem(found: Annotations, images: Path, row: int) -> str | None:
    name, size = found.image_files[row], tuple(found.image_sizes[row])
    try:
        image = decode(read_file(images / name))
    except (OSError, ValueError) as error:
        return f"{name} ({error})"
    if image.size != size:
        return (
            f"{name} ({image.width} x {image.height} px, its annotations say {size[0]} x {size[1]})"
        )
    return None
