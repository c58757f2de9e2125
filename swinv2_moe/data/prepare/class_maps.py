"""Which class of one data set is which class of another, by name: the lines of MODEL.CLASS_MAP's
file."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from timm.data import ImageNetInfo
from torchvision.datasets.folder import find_classes

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
NO_CLASS = -1
_MAX_BYTES = 1 << 26  # of a file that holds names


def class_names(source: str) -> list[str]:
    """The names of a data set's classes in the order of their labels.

    Args:
        source: one of IMAGENETS (timm's lists of WordNet ids); a run or a checkpoint; shards; a
            folder of images, or its train/; a text file with a name in each line.

    Raises:
        UserError: none of these, or a name that comes twice.
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
        raise UserError(
            f"{source}: the class {short(name)} comes {'twice' if count == 2 else f'{count} times'}"
        )
    return names


def _names_in(path: Path) -> list[str]:
    if (path / "checkpoints" / "latest").is_dir():
        path = path / "checkpoints" / "latest"
    for file in ("meta.json", "index.json"):
        if (path / file).is_file():
            return _recorded(parse_json(read_bounded(path / file, _MAX_BYTES)))
    if path.is_dir():
        is_root = (path / "train").is_dir() and (path / "val").is_dir()
        return find_classes(str(path / "train" if is_root else path))[0]
    lines = read_bounded(path, _MAX_BYTES).decode().splitlines()
    return [line.strip() for line in lines if line.strip()]


def _recorded(content: object) -> list[str]:
    names = None
    if isinstance(content, dict):
        names = content.get("class_names")
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise ValueError(f"class_names is {short(names)}, it must be a list of strings")
    return names


def map_classes(pretrained: Sequence[str], classes: Sequence[str]) -> list[int]:
    """For each of `classes` the number of the class of that name in `pretrained`, or NO_CLASS."""
    numbers = {name: number for number, name in enumerate(pretrained)}
    return [numbers.get(name, NO_CLASS) for name in classes]
