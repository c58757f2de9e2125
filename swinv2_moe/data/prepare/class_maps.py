"""Class maps: for each class of a dataset, the number of the class with the same name in another
dataset.

MODEL.CLASS_MAP names a file of such numbers.
"""

from collections import Counter
from pathlib import Path

from timm.data import ImageNetInfo

from swinv2_moe.data.images import subfolders
from swinv2_moe.errors import UserError, short
from swinv2_moe.files import parse_json, read_bounded

IMAGENETS = (
    "imagenet-1k",
    "imagenet-12k",
    "imagenet-21k-goog",
    "imagenet-21k-miil",
    "imagenet-22k",
    "imagenet-22k-ms",
)
_MAX_BYTES = 1 << 26  # limit of a file with names


def class_names(source: str) -> list[str]:
    """The names of a dataset's classes in the order of their labels.

    Args:
        source: one of IMAGENETS (timm's lists of WordNet ids); a run or a checkpoint; shards; a
            folder of images, or its train/; a text file with one name per line.

    Raises:
        UserError: `source` is none of these, or has a duplicate name.
    """
    if source in IMAGENETS:
        return ImageNetInfo(source).label_names()
    path = Path(source)
    try:
        names = _names_in(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{source}: no class names can be read ({error}); known lists: {', '.join(IMAGENETS)}"
        ) from error
    if not names:
        raise UserError(f"{source}: no class names in it")
    name, count = Counter(names).most_common(1)[0]
    if count > 1:
        times = f"{count} times"
        if count == 2:
            times = "twice"
        raise UserError(f"{source}: the class {short(name)} comes {times}")
    return names


def _names_in(path: Path) -> list[str]:
    latest = path / "checkpoints" / "latest"
    if latest.is_dir():
        path = latest
    for file in (path / "meta.json", path / "index.json"):  # a checkpoint or shards
        if file.is_file():
            return _names_in_json(read_bounded(file, _MAX_BYTES))
    train = path / "train"
    if train.is_dir() and (path / "val").is_dir():
        path = train
    if path.is_dir():
        return subfolders(str(path))
    lines = read_bounded(path, _MAX_BYTES).decode().splitlines()
    return [line.strip() for line in lines if line.strip()]


def _names_in_json(text: bytes) -> list[str]:
    content = parse_json(text)
    names = None
    if isinstance(content, dict):
        names = content.get("class_names")
    is_valid = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not is_valid:
        raise ValueError(f"class_names is {short(names)}, it must be a list of strings")
    return names
