"""The classes of pictures by an exported model.

    python examples/classify.py EXPORTED_DIR PICTURE_OR_FOLDER ...

Needs numpy, pillow and what runs the program: onnxruntime for model.onnx, torch for model.pt2. Of
both, it runs model.onnx. A picture that cannot be read is named on stderr, and the others go on;
the exit status is then 1.
"""

import argparse
import csv
import json
import logging
import os
import re
import sys
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
from PIL import Image, ImageOps, features

# for others, such as EPS, Pillow may start programs
FORMATS = ["JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF", "PPM"]
# of files in folders; those that cannot be read here are named
SUFFIXES = ".jpg .jpeg .png .ppm .bmp .pgm .tif .tiff .webp .gif .jfif .jpe .apng .dib .pbm .pnm"
SUFFIXES += " .avif .heic .heif .arw .cr2 .cr3 .dcm .dng .exr .hdr .ico .j2k .jp2 .jpx .jxl .nef"
SUFFIXES += " .orf .pcx .pfm .psd .raf .rw2 .svg .tga .xcf"
# folders that systems make beside a user's files, in small letters
SYSTEM_FOLDERS = ["__macosx", "@eadir", "@tmp", "#recycle", "#snapshot", "@recycle", "@__thumb"]
SYSTEM_FOLDERS += ["@recently-snapshot", "$recycle.bin", "recycler", "found.000"]
SYSTEM_FOLDERS += ["system volume information", "lost+found", "__pycache__"]
MAX_PIXELS = 120_000_000
MAX_RATIO = 32  # longer pictures are shortened before they are resized
# tags of a TIFF: BitsPerSample, Photometric, SampleFormat, MinSampleValue and others of its values
TIFF_TAGS = [258, 262, 339, 280, 281, 340, 341]
ANY_BATCH = 8  # pictures at a time, if the program takes any number

if "avif" in features.modules and features.check("avif"):  # else an old Pillow
    FORMATS.append("AVIF")
try:
    import pillow_heif
except ImportError:
    pass
else:
    pillow_heif.register_heif_opener()
    FORMATS.append("HEIF")


def prepare(picture: Image.Image, spec: dict) -> np.ndarray:
    """The picture resized, its middle cut out and normalised as in training: float32 [channels,
    side, side]."""
    how, side = spec["preprocessing"], spec["input"]["shape"][-1]
    picture = bounded(picture.convert(how["mode"]), side, bool(how["resize"]))
    size = [side, side]
    if how["resize"]:  # else the whole picture is squashed into a square
        size = [how["resize"] * length // min(picture.size) for length in picture.size]
    left, top = (round((length - side) / 2) for length in size)
    picture = picture.resize(size, Image.Resampling[how["interpolation"].upper()])
    picture = picture.crop((left, top, left + side, top + side))
    pixels = np.asarray(picture, np.float32).reshape(side, side, -1) / 255
    return ((pixels - np.float32(how["mean"])) / np.float32(how["std"])).transpose(2, 0, 1)


def bounded(picture: Image.Image, side: int, crop: bool) -> Image.Image:
    """The picture, shortened if it is so long that resizing would take much memory: to its middle
    with `crop`, else by averaging."""
    width, height = picture.size
    longest = MAX_RATIO * min(picture.size)
    if max(picture.size) <= longest:
        return picture
    if crop:
        left, top = max(0, width - longest) // 2, max(0, height - longest) // 2
        return picture.crop((left, top, left + min(width, longest), top + min(height, longest)))
    longest = max(longest, side)
    return picture.reduce((max(1, width // longest), max(1, height // longest)))


def to_8_bits(picture: Image.Image) -> Image.Image:
    """The picture with 8 bits a channel, scaled from the values of black and white that the file
    gives: the tags of a TIFF, or else the highest number of its bits.

    Raises:
        ValueError: the file does not give them.
    """
    tags = {}
    for tag in TIFF_TAGS:
        value = getattr(picture, "tag_v2", {}).get(tag)
        if isinstance(value, tuple) and value:
            value = value[0]
        if isinstance(value, (int, float)):
            tags[tag] = value
    low, high, bits = tags.get(340, tags.get(280)), tags.get(341, tags.get(281)), tags.get(258, 8)
    if not picture.mode.startswith(("I", "F")):
        if bits > 8 and high is not None and high < (1 << bits) - 1:
            raise ValueError(f"{bits} bits a channel with values up to {high:g}")
        return picture
    is_float = picture.mode == "F"
    if picture.mode.startswith("I;") or (picture.format in ("PNG", "PPM") and not is_float):
        low, high = low or 0, high or (1 << tags.get(258, 16)) - 1
    if low is None or high is None:
        raise ValueError(f"mode {picture.mode} without the values of black and white")
    if not -np.inf < low < high < np.inf:
        raise ValueError(f"values from {low:g} to {high:g}")
    values = np.asarray(picture)
    if picture.mode == "I" and tags.get(339) == 1:
        values = values.view(np.uint32)
    if not np.isfinite(values).all():
        raise ValueError("values that are NaN or infinite")
    scale = 256 / (high - low + (not is_float))
    pixels = np.floor((values.astype(np.float64) - low) * scale).clip(0, 255).astype(np.uint8)
    if tags.get(262) == 0:  # white is zero
        pixels = 255 - pixels
    narrow = Image.fromarray(pixels)
    narrow.info = picture.info
    return narrow


def read(file: str | Path) -> Image.Image:
    """The picture, upright and with 8 bits a channel, decoded if its header says that it is not too
    large.

    Raises:
        Exception: it cannot be read. Pillow raises OSError, SyntaxError, ValueError and more.
    """
    picture = Image.open(file, formats=FORMATS)
    if picture.width * picture.height > MAX_PIXELS:
        size = f"{picture.width} x {picture.height}"
        raise ValueError(f"{size} pixels, the limit is {MAX_PIXELS}")
    picture.load()
    picture = to_8_bits(picture)
    try:
        return ImageOps.exif_transpose(picture)
    except Exception:  # broken EXIF data
        return picture


def find(names: list[str]) -> list[Path]:
    """The named files, and the pictures in the named folders and their subfolders."""
    files = []
    for path in map(Path, names):
        if not path.is_dir():
            files.append(path)
            continue
        endings = SUFFIXES.split()
        inside = sorted(p for p in files_below(path) if p.suffix.lower() in endings)
        if not inside:
            fail(f"{path}: holds no pictures ({SUFFIXES})")
        files += inside
    return files


def files_below(folder: Path) -> Iterator[Path]:
    """The files of a folder and its subfolders, without hidden ones and those of systems. Links are
    followed; each folder is visited once, under its own name if it lies below `folder`."""
    real_path = os.path.realpath(folder)
    visited = set(map(str, Path(real_path).parents))
    folders, links = [folder], []
    while folders or links:
        directory = folders.pop() if folders else links.pop(0)
        real_path = os.path.realpath(directory)
        if real_path in visited:
            continue
        visited.add(real_path)
        for path in sorted(directory.iterdir()):
            if path.name.startswith(".") or path.name.lower() in SYSTEM_FOLDERS:
                continue
            if not path.is_dir():
                yield path
            elif path.is_symlink():
                links.append(path)
            else:
                folders.append(path)


class Classifier:
    """An exported model: model.onnx or model.pt2, and model.json, in one directory."""

    def __init__(self, directory: Path):
        files = [directory / "model.onnx", directory / "model.pt2"]
        self.file = next((file for file in files if file.is_file()), None)
        if self.file is None:
            fail(f"{directory}: no model.onnx and no model.pt2, which `swinv2-moe export` writes")
        try:
            self.spec = json.loads((directory / "model.json").read_text())
            self.class_names = self.spec["class_names"]
            self.batch_size = self.spec["input"]["shape"][0]  # None: any
            if self.batch_size is not None and self.batch_size < 1:
                raise ValueError(f"a batch of {self.batch_size}")
            prepare(Image.new("RGB", (64, 48)), self.spec)
        except Exception as error:  # missing, not JSON, or without one of these entries
            fail(f"{directory / 'model.json'}: cannot be used ({describe(error)})")
        load, package = load_onnx, "onnxruntime"
        if self.file.suffix == ".pt2":
            load, package = load_torch, "torch"
        try:
            self.logits = load(self.file, self.spec)
        except ImportError:
            sys.exit(f"{package} is not installed: pip install {package}")
        except Exception as error:  # onnxruntime has a class for each kind of damage
            fail(f"{self.file}: cannot be loaded ({describe(error)})")

    def probabilities(self, images: list[np.ndarray]) -> np.ndarray:
        """The probability of each class in each image: float32 [images, classes]."""
        count = len(images)
        if self.batch_size:  # fill the batch with copies of the last image
            images = images + images[-1:] * (self.batch_size - count)
        try:
            logits = self.logits(np.stack(images))[:count]
            if logits.shape[1] != len(self.class_names):
                raise ValueError(f"{logits.shape[1]} classes, not {len(self.class_names)}")
        except Exception as error:  # model.json of another model
            fail(f"{self.file}: cannot be run ({describe(error)})")
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        return odds / odds.sum(axis=1, keepdims=True)

    def classify(self, files: list[Path]) -> Iterator[tuple[Path, np.ndarray | None]]:
        """Each file with its probabilities, float32 [classes]; None if it cannot be read, which is
        printed."""
        step = self.batch_size or ANY_BATCH
        for start in range(0, len(files), step):
            images = []
            readable = set()
            for file in files[start : start + step]:
                try:
                    images.append(prepare(read(file), self.spec))
                    readable.add(file)
                except Exception as error:  # see `read`
                    problem = f"{file}: not a picture that can be read ({describe(error)})"
                    print(printable(problem), file=sys.stderr)
            rows = iter(())
            if images:
                rows = iter(self.probabilities(images))
            for file in files[start : start + step]:
                row = None
                if file in readable:
                    row = next(rows)
                yield file, row


def load_onnx(file: Path, spec: dict) -> Callable[[np.ndarray], np.ndarray]:
    """The program: from images [batch, channels, side, side] to logits [batch, classes]."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4  # else errors are printed as well as raised
    session = onnxruntime.InferenceSession(file, options)
    name = spec["input"]["name"]
    return lambda images: session.run(None, {name: images})[0]


def load_torch(file: Path, spec: dict) -> Callable[[np.ndarray], np.ndarray]:
    """As `load_onnx`, of a program of torch.export. It runs on the device that it was made on."""
    import torch

    logging.getLogger("torch.export").setLevel(logging.ERROR)  # an error is raised as well
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of how it reads its file
        program = torch.export.load(file).module()
    device = spec["programs"]["torch"]["device"]
    if device == "cuda" and spec["input"]["shape"][0]:  # every batch has this shape
        program = as_graph(program, torch.zeros(spec["input"]["shape"], device=device))

    @torch.inference_mode()
    def run(images: np.ndarray) -> np.ndarray:
        return program(torch.from_numpy(images).to(device)).cpu().numpy()

    return run


def as_graph(program: Callable, images) -> Callable:
    """The program for images of this shape on a GPU as a CUDA graph: the host launches all of its
    kernels at once. The program itself, if it cannot be captured."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(3):  # as usual: they load kernels
                    program(images)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                logits = program(images)
        except RuntimeError as error:
            problem = f"the program is not replayed as a CUDA graph ({describe(error)})"
            print(problem, file=sys.stderr)
            return program

    def replay(batch):
        images.copy_(batch)
        graph.replay()
        return logits

    return replay


def describe(error: Exception) -> str:
    """The error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


# `printable` and `cell` follow swinv2_moe/output.py; a test compares them.


def printable(text: object) -> str:
    """The text with escapes for what could control a terminal: names of files and classes may hold
    anything."""
    return "".join(map(shown, str(text)))


def shown(char: str) -> str:
    if char.isprintable() or char in "\u200c\u200d" or unicodedata.category(char) == "Zs":
        return char
    if "\udc80" <= char <= "\udcff":  # a byte that Python could not decode
        return f"\\x{ord(char) - 0xDC00:02x}"
    return char.encode("unicode_escape", "backslashreplace").decode()


def cell(value: object) -> str:
    """Text of a CSV file. If a spreadsheet would take it for a formula, it begins with '."""
    text = printable(value)
    number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?%?", text)
    if text.startswith(("=", "+", "-", "@")) and not number:
        return f"'{text}"
    return text


def fail(message: str) -> NoReturn:
    sys.exit(printable(message))


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))  # a word may be the name of a file, by *


def parse() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="EXPORTED_DIR", help="what `swinv2-moe export` wrote")
    parser.add_argument("pictures", nargs="+", metavar="PICTURE_OR_FOLDER")
    parser.add_argument(
        "--top-k", type=int, default=5, metavar="K", help="classes to print (default: %(default)s)"
    )
    parser.add_argument("--csv", metavar="FILE", help="file for a line of each picture")
    args = parser.parse_args()
    if args.top_k < 1:
        parser.error(f"--top-k is {args.top_k}, it must be at least 1")
    return args


def write_csv(file: str, rows: list[list], top_k: int) -> None:
    """A line for each picture: file, class, probability, class_2, probability_2, ..."""
    header = ["file", "class", "probability"]
    for rank in range(2, top_k + 1):
        header += [f"class_{rank}", f"probability_{rank}"]
    try:
        with open(file, "w", newline="", encoding="utf-8") as output:
            csv.writer(output).writerows([map(cell, row) for row in [header] + rows])
    except OSError as error:
        fail(f"--csv {file}: cannot be written ({error.strerror})")


def main() -> None:
    for stream in (sys.stdout, sys.stderr):  # their encoding may lack characters of names
        stream.reconfigure(errors="backslashreplace")
    args = parse()
    files = find(args.pictures)
    classifier = Classifier(Path(args.directory))
    top_k = min(args.top_k, len(classifier.class_names))
    rows = []
    for file, probabilities in classifier.classify(files):
        if probabilities is None:
            continue
        if len(files) > 1:
            print(printable(file))
        row = [file]
        for best in probabilities.argsort()[::-1][:top_k]:
            print(f"{probabilities[best]:6.1%}  {printable(classifier.class_names[best])}")
            row += [classifier.class_names[best], f"{probabilities[best]:.6f}"]
        rows.append(row)
    if args.csv:
        write_csv(args.csv, rows, top_k)
    if len(rows) < len(files):
        sys.exit(1)


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
