"""Folders of images that come as one tar."""

import lzma
import shutil
import tarfile
import zlib
from pathlib import Path

from swinv2_moe.config import data_config, load_config
from swinv2_moe.data.sources import load_sources
from swinv2_moe.errors import UserError, one_line

# Raised by tarfile and the decompressors for damaged content,
_DAMAGE = (tarfile.TarError, zlib.error, lzma.LZMAError, OSError, EOFError)
# and by tarfile for names and numbers that cannot be parsed.
_DAMAGE += (ArithmeticError, LookupError, RecursionError, ValueError)


def image_folder(data: Path, target: Path) -> Path:
    """The directory `data`. If `data` is a tar, it is unpacked to `target`, unless it has been
    unpacked before, and `target` is returned.

    Raises:
        UserError: the tar cannot be unpacked, or the directory has no train/ and val/ with class
            folders of images.
    """
    if data.is_file() and not target.exists():
        temporary = target.with_name(f".{target.name}.tmp")
        # left by an interrupted unpacking, perhaps of another tar
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            with tarfile.open(data) as tar:
                tar.extractall(temporary, filter=_checked)
        except _DAMAGE as error:
            raise UserError(f"{data}: cannot be unpacked ({one_line(str(error))})") from error
        temporary.rename(target)
    folder = data
    if data.is_file():
        folder = target
    load_sources(data_config(load_config(data=str(folder))))
    return folder.resolve()


def _checked(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    """tarfile's filter, which keeps files below `path`, with two more checks.

    Symbolic links may lead out of `path` or in circles. After a member of negative size, tarfile
    finds the same member again.
    """
    if member.size < 0:
        raise tarfile.TarError(f"{member.name!r} has {member.size:,} bytes")
    if member.issym():
        raise tarfile.TarError(f"{member.name!r} is a symbolic link")
    return tarfile.data_filter(member, path)
