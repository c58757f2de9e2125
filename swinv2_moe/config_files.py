"""The configuration files of this project, found by name from any folder."""

import difflib
from pathlib import Path

from swinv2_moe.errors import UserError

# In a clone this is a link to configs/, in an installed package a folder.
DIRECTORY = Path(__file__).parent / "configs"
_SUFFIXES = (".yaml", ".py")  # .py: mmdetection's


def find_config(name: str | Path) -> Path:
    """Find a configuration file by its path, or by the name of a configuration of this project.

    A name is the path below configs/, with or without `configs/` and suffix. The last part of the
    path suffices if it is unique.

    Raises:
        UserError: `name` is empty or a directory, or it has no suffix, and there is no
            configuration with this name, or more than one.
    """
    path = Path(name)
    if not str(name) or path.is_dir():
        kind = "is a directory"
        if not str(name):
            kind = "is empty"
        raise UserError(f"--cfg {str(name)!r}: {kind}; `swinv2-moe configs` lists the names")
    if path.exists():
        return path
    below = path
    if path.parts[:1] == (DIRECTORY.name,):
        below = path.relative_to(DIRECTORY.name)
    for suffix in ("",) + _SUFFIXES:
        candidate = DIRECTORY / f"{below}{suffix}"
        if not path.is_absolute() and candidate.is_file():
            return candidate
    if path.suffix or path.is_absolute():
        return path  # the caller that reads the file reports errors
    names = config_names()
    same = [full for full in names if Path(full).name == str(name)]
    if len(same) == 1:
        return names[same[0]]
    if same:
        raise UserError(f"--cfg {name}: there are several: {', '.join(same)}")
    hint = "`swinv2-moe configs` lists the names"
    nearest = difflib.get_close_matches(str(name), names, n=1)
    if nearest:
        hint = f"did you mean {nearest[0]!r}?"
    raise UserError(f"--cfg {name}: neither a file nor the name of a configuration; {hint}")


def config_names() -> dict[str, Path]:
    """The files below configs/ by name, sorted."""
    files = {}
    for suffix in _SUFFIXES:
        for path in DIRECTORY.rglob(f"*{suffix}"):
            files[str(path.relative_to(DIRECTORY).with_suffix(""))] = path
    return dict(sorted(files.items()))


def comment(path: Path) -> list[str]:
    """The lines of the comment that a configuration file begins with."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").removeprefix(" "))
    return lines
