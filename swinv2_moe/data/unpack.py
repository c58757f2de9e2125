"""Data sets that come as one tar."""

import lzma
import shutil
import tarfile
import zlib
from pathlib import Path

from swinv2_moe.config import data_config, load_config
from swinv2_moe.data.sources import load_sources
from swinv2_moe.errors import UserError, one_line

# What tarfile and the decompressors raise; the second line for names and numbers that are none.
_DAMAGE = (tarfile.TarError, zlib.error, lzma.LZMAError, OSError, EOFError)
_DAMAGE += (ArithmeticError, LookupError, RecursionError, ValueError)


def image_folder(data: Path, target: Path) -> Path:
    """The directory `data`, or `target` where `data` is a tar, which is unpacked there unless it
    has been before.

    Raises:
        UserError: a tar that cannot be unpacked; no train/ and val/ with class folders of images in
            it.
    """
    if data.is_file() and not target.exists():
        temporary = target.with_name(f".{target.name}.tmp")
        shutil.rmtree(temporary, ignore_errors=True)  # of an earlier, perhaps another, tar
        try:
            with tarfile.open(data) as tar:
                tar.extractall(temporary, filter=_checked)
        except _DAMAGE as error:
            raise UserError(f"{data}: cannot be unpacked ({one_line(str(error))})") from error
        temporary.rename(target)
    folder = target if data.is_file() else data
    load_sources(data_config(load_config(data=str(folder))))
    return folder.resolve()


def _checked(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    """tarfile's own filter, which keeps what is unpacked below `path`, and what releases of Python
    lack: symbolic links may lead out of it or in circles, and behind a member of negative size
    comes the same one again."""
    if member.size < 0:
        raise tarfile.TarError(f"{member.name!r} has {member.size:,} bytes")
    if member.issym():
        raise tarfile.TarError(f"{member.name!r} is a symbolic link")
    return tarfile.data_filter(member, path)
