"""Read untrusted weight files: .safetensors, and torch's formats without running code from the
file."""

import pickle
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from moe_core.files import open_regular
from swinv2_moe.errors import UserError
from swinv2_moe.files import parse_json
from swinv2_moe.forms import TEXT, list_of

_ZIP = b"PK\x03\x04"  # start of torch's zip files; torch before 1.6 used another format
_EMBEDDING = "patch_embed.proj.weight"
# Where training programs keep a state dict in a file, the first choice first.
_CONTAINERS = ("model", "state_dict", "teacher", "model_ema", "state_dict_ema", "ema", "module")
# Names that wrappers put in front of a model's own: DDP, compile, EMA, Lightning and others.
_WRAPPERS = {"module", "_orig_mod", "model", "net", "network", "backbone", "ema_model"}
_WRAPPERS |= {"student", "teacher", "encoder", "encoder_q", "momentum_encoder"}
# int8 rows times the numbers of this name are the rows of a weight (`as_int8`)
SCALE = ".scale"
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16}
_DTYPES |= {"BF16": torch.bfloat16, "I8": torch.int8}  # by safetensors' names
_LEAST_INT8 = 1 << 14  # numbers of a tensor that is stored as int8
_MAX_READ = 64 << 20  # limit of a zip's directory, and of a record that holds no tensor


def read_weights(file: Path) -> dict[str, Tensor]:
    """Read a state dict from .safetensors, or from .pth / .pt / .bin without running code in the
    file.

    Raises:
        UserError: as `read_torch_file`.
    """
    return read_one_of(file)[0]


def read_one_of(file: Path) -> tuple[dict[str, Tensor], str]:
    """As `read_weights`, and a line that names the state dict if the file has several of them."""
    if file.suffix != ".safetensors":
        content, line = read_torch_file(file), ""
        kept = [key for key in _CONTAINERS if isinstance(content.get(key), dict)]
        if kept[1:]:
            line = f"holds {' and '.join(map(repr, kept))}: {kept[0]!r} is used"
        return without_prefixes(unwrapped(content), f"weights {file}"), line
    with _opened(file):
        try:
            tensors = _without_scales(load_file(file))
            return without_prefixes(tensors, f"weights {file}"), ""
        # MemoryError: a file larger than the address space
        except (SafetensorError, MemoryError) as error:
            raise ValueError(f"cannot be read as weights ({_first_line(error)})") from error


def read_headers(file: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors file on the meta device: as `read_weights`, without values.

    Raises:
        UserError: the file cannot be read.
    """
    with _opened(file):
        try:
            tensors = {}
            with safe_open(file, "pt") as content:
                for name in content.keys():  # noqa: SIM118
                    part = content.get_slice(name)
                    # what is not of floating point is refused, whatever it is
                    dtype = _DTYPES.get(part.get_dtype(), torch.int64)
                    tensors[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")
            return without_prefixes(_without_scales(tensors), f"weights {file}")
        except (SafetensorError, MemoryError) as error:
            raise ValueError(f"cannot be read as weights ({_first_line(error)})") from error


def as_int8(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Store large matrices in a byte for each number, and other tensors in bfloat16.

    A row of n numbers becomes n int8 and one scale, under the tensor's name and `SCALE`. Rows are
    along the last dim. Reading gives float32 again, within half a scale of the original: 1/254 of
    the row's largest number.
    """
    packed = {}
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            packed[name] = tensor
        elif tensor.ndim < 2 or tensor.numel() < _LEAST_INT8:
            packed[name] = tensor.bfloat16()
        else:
            rows = tensor.float()
            # rounded up: 127 scales must reach the largest number
            scale = (rows.abs().amax(-1) / 127 * (1 + 2**-8)).bfloat16()
            steps = rows / scale.float().clamp(min=1e-30).unsqueeze(-1)
            packed[name] = steps.round().clamp(-127, 127).to(torch.int8)
            packed[f"{name}{SCALE}"] = scale
    return packed


def _without_scales(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that `as_int8` packed, in float32, and all others as they are.

    Raises:
        ValueError: a scale does not fit its rows.
    """
    tensors = dict(state)
    for name, scale in state.items():
        packed = state.get(name.removesuffix(SCALE))
        if not name.endswith(SCALE) or packed is None or packed.dtype != torch.int8:
            continue
        if scale.shape != packed.shape[:-1] or not scale.is_floating_point():
            raise ValueError(
                f"{name!r} is {scale.dtype} {list(scale.shape)}, it does not scale the rows of"
                f" int8 {list(packed.shape)}"
            )
        tensors[name.removesuffix(SCALE)] = packed.float() * scale.float().unsqueeze(-1)
        del tensors[name]
    return tensors


def read_metadata(file: Path) -> dict[str, str]:
    """The metadata of a .safetensors file.

    Raises:
        UserError: the file cannot be read.
    """
    with _opened(file):
        try:
            with safe_open(file, "pt") as content:
                return content.metadata() or {}
        except (SafetensorError, MemoryError) as error:
            raise ValueError(f"cannot be read as weights ({_first_line(error)})") from error


def read_class_names(file: Path) -> list[str]:
    """The class names in the metadata of a .safetensors file; empty without any.

    Raises:
        UserError: the file cannot be read, or has no list of names in their place.
    """
    text = read_metadata(file).get("class_names", "[]")
    with _opened(file):
        names = parse_json(text)
        list_of(TEXT)(names, "class_names")
    return names


def read_torch_file(file: Path, allowed: Sequence[object] = ()) -> dict:
    """Read a file of torch.save: a state dict, or a dictionary with a state dict under the key
    "model" or "state_dict".

    Tensors stay in the file until they are used (memory-mapped), except in the format of torch
    before 1.6. Tensors of the state dict are compared with the sizes and checksums of their
    records. No tensor takes more memory than its data in the file.

    Args:
        allowed: classes and functions, beyond torch's own list, that the file's pickle may use.

    Raises:
        UserError: the file does not exist, is damaged, or has other than dense tensors.
    """
    with _opened(file) as content:
        return _read_torch_file(file, content, allowed)


@contextmanager
def _opened(file: Path) -> Iterator[BinaryIO]:
    """Open a file of weights. A ValueError in the block becomes a UserError that names the file."""
    if file.is_dir():
        raise UserError(f"weights {file}: is a directory")
    try:
        with open_regular(file) as content:
            yield content
    except OSError as error:
        raise UserError(f"weights {file}: {(error.strerror or str(error)).lower()}") from error
    except ValueError as error:
        raise UserError(f"weights {file}: {error}") from error


def unwrapped(content: Any) -> Any:
    """The state dict in the content of a training program's file: the value of the first of
    `_CONTAINERS`, also of one inside of another, or the whole content."""
    for _ in _CONTAINERS:
        inner = []
        if isinstance(content, dict):
            inner = [content[key] for key in _CONTAINERS if isinstance(content.get(key), dict)]
        if not inner:
            break
        content = inner[0]
    return content


def without_prefixes(state: dict[str, Tensor], source: str) -> dict[str, Tensor]:
    """The state dict without the names that wrappers put in front: `module._orig_mod.` and the
    like. A prefix is what precedes the patch embedding, if it consists of `_WRAPPERS`.

    Raises:
        UserError: there are several such prefixes, or two names become one.
    """
    prefixes = set()
    for name in state:
        prefix = name.removesuffix(_EMBEDDING)
        if prefix != name and set(prefix.split(".")[:-1]) <= _WRAPPERS:
            prefixes.add(prefix)
    if prefixes <= {""}:
        return state
    if len(prefixes) > 1:
        names = " and ".join(f"{prefix}{_EMBEDDING}" for prefix in sorted(prefixes)[:2])
        raise UserError(f"{source}: holds the weights of two models: {names}")
    prefix = prefixes.pop()
    renamed = {}
    for name, tensor in state.items():
        short_name = name.removeprefix(prefix)
        for part in prefix.split(".")[:-1]:  # a head may have the outer wrappers only
            short_name = short_name.removeprefix(f"{part}.")
        if short_name in renamed:
            raise UserError(f"{source}: two tensors are {short_name!r} without prefix {prefix!r}")
        if short_name != "n_averaged":  # a counter of torch's AveragedModel
            renamed[short_name] = tensor
    return renamed


def _read_torch_file(file: Path, content: BinaryIO, allowed: Sequence[Any]) -> dict:
    """Read an opened file. Raises ValueError with the reason, without the file's name."""
    is_zip = content.read(len(_ZIP)) == _ZIP
    content.seek(0)
    records = None
    if is_zip:
        records = _check_zip(content)
    if not is_zip and tarfile.is_tarfile(content):  # torch would unpack it
        raise ValueError("cannot be read as weights (a tar file, which torch wrote before 0.1.10)")
    content.seek(0)
    with torch.serialization.safe_globals(list(allowed)):
        loaded = _load(file if is_zip else content, is_zip)
    state = unwrapped(loaded)
    if not isinstance(state, dict) or not all(
        isinstance(value, Tensor) for value in state.values()
    ):
        raise ValueError("holds no state dict of tensors")
    for name, tensor in state.items():
        problem: str | None = "has a name that is no text"
        if isinstance(name, str):
            problem = _why_unusable(tensor)
        if problem:
            raise ValueError(f"{name!r} {problem}")
    _check_total(state.values(), file.stat().st_size)
    if records is not None:
        _check_records(state, records)
    return loaded


def _load(source: Path | BinaryIO, is_zip: bool) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the error message gives the reason
            return torch.load(source, map_location="cpu", weights_only=True, mmap=is_zip)
    except Exception as error:  # a damaged file makes torch raise any type
        reason = _first_line(error).partition(". This is an internal")[0]
        if isinstance(error, pickle.UnpicklingError):
            reason = "no pickle, or one that holds more than tensors"
        elif "resize storage" in reason:
            reason = "a tensor is larger than its data"
        raise ValueError(f"cannot be read as weights ({reason})") from error


def _check_zip(content: BinaryIO) -> set[tuple[int, int]]:
    """(size, CRC-32) of each record of a torch file. The checksums are 0 if torch was told not to
    compute them.

    Raises:
        ValueError: parts that do not hold tensors are damaged, or records cannot be mapped into
            memory.
    """
    try:
        with zipfile.ZipFile(_BoundedReads(content)) as archive:
            records = archive.infolist()
            has_checksums = any(record.CRC for record in records)
            for record in records:
                _check_record(record)
                if has_checksums and not _holds_tensor(record):
                    archive.read(record)  # compares the checksum
    except ValueError:
        raise
    except Exception as error:  # a damaged file makes zipfile raise any type
        raise ValueError(f"cannot be read as weights ({_first_line(error)})") from error
    return {(record.file_size, record.CRC) for record in records}


def _check_record(record: zipfile.ZipInfo) -> None:
    name, size = record.filename, record.file_size
    if record.compress_type != zipfile.ZIP_STORED:
        raise ValueError(
            f"record {name!r} is compressed, which torch.save never does; load it and save it anew"
        )
    if not _holds_tensor(record) and size > _MAX_READ:
        raise ValueError(f"record {name!r} has {size:,} bytes, at most {_MAX_READ:,} are read")


def _holds_tensor(record: zipfile.ZipInfo) -> bool:
    return "/data/" in record.filename


class _BoundedReads:
    """A file for `zipfile` that limits the size of a read. `zipfile` reads the directory at once,
    with the size that the file states."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self.seekable, self._read = (
            file.seek,
            file.tell,
            file.seekable,
            file.read,
        )

    def read(self, size: int = -1) -> bytes:
        if size > _MAX_READ:
            raise zipfile.BadZipFile(
                f"its directory has {size:,} bytes, at most {_MAX_READ:,} are read"
            )
        return self._read(size)


def _why_unusable(tensor: Tensor) -> str | None:
    """A phrase with the reason; None if the tensor is dense, in memory, and no larger than its
    data."""
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"is a {type(tensor).__name__}, not a plain tensor"
    if tensor.is_nested or tensor.layout != torch.strided:
        return f"is no dense tensor ({tensor.layout})"
    if tensor.is_quantized:
        return f"is quantized ({tensor.dtype})"
    if tensor.device.type != "cpu":
        return f"has no data (it is on the device {tensor.device.type!r})"
    available = tensor.untyped_storage().nbytes()
    if tensor.nbytes > available:
        return (
            f"of shape {list(tensor.shape)} takes {tensor.nbytes:,} bytes, its data has"
            f" {available:,}"
        )
    return None


def _check_total(tensors: Iterable[Tensor], file_size: int) -> None:
    """Raise ValueError if so many tensors share their data that copies of them would fill the
    memory."""
    total = sum(tensor.nbytes for tensor in tensors)
    if total > 2 * file_size:
        raise ValueError(f"its tensors take {total:,} bytes, the file has {file_size:,}")


def _check_records(state: dict[str, Tensor], records: set[tuple[int, int]]) -> None:
    """Raise ValueError unless the data of each tensor is exactly one record."""
    has_checksums = any(checksum for _, checksum in records)
    sizes = {size for size, _ in records}
    checked = set()
    for name, tensor in state.items():
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if size == 0 or (place, size) in checked:
            continue
        checked.add((place, size))
        if size not in sizes:
            raise ValueError(
                f"{name!r} is damaged: its data takes {size:,} bytes, no record has that size"
            )
        content = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
        checksum = 0
        if has_checksums:
            checksum = zlib.crc32(content.data)
        if (size, checksum) not in records:
            raise ValueError(f"{name!r} is damaged (its checksum differs)")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
