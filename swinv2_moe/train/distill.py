"""Distillation: a teacher's outputs for augmented training images, computed once and kept on disk.

The augmentation of an image depends on (SEED, view, index) alone, so before an epoch the ranks
compute the outputs of its view that are missing, and the epoch reads them. timm's distillation
tasks do not fit: they run the teacher inside of each step.

CACHE/FINGERPRINT/teacher.json says what the outputs depend on; FINGERPRINT is its checksum.
CACHE/FINGERPRINT/view-0003/000012.f16 holds the outputs of CHUNK images, fp16 [n, C], and the
SHA-256 of its place and content. A file is there as a whole or not at all.

N training images, C classes of the model, B images of a batch
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from moe_core.files import open_regular, try_lock
from swinv2_moe.config import AllSections
from swinv2_moe.data.build import Data, training_loader
from swinv2_moe.data.classes import are_numbers, other_order
from swinv2_moe.data.sources import Source
from swinv2_moe.errors import UserError
from swinv2_moe.files import make_directory, new_file
from swinv2_moe.ranks.precision import build_autocast
from swinv2_moe.ranks.world import World
from swinv2_moe.start.teacher import Teacher
from swinv2_moe.tables import in_words
from swinv2_moe.train.record import Recorder

CHUNK = 512  # images of a file
_BATCH = {"cpu": 32, "cuda": 256}  # images of the teacher's forward pass; they divide CHUNK
_FORMAT = 1
_DIGEST_BYTES = 32
_SAMPLE = 64  # images whose content is part of the fingerprint
_SECONDS_BETWEEN_LINES = 60
_SECONDS_BETWEEN_LOCKS = 1.0


class OutputCache:
    """The files of one fingerprint.

    Args:
        folder: CACHE/FINGERPRINT.
        size: N.
        num_classes: C.
    """

    def __init__(self, folder: Path, size: int, num_classes: int) -> None:
        self.folder = folder
        self.size = size
        self.num_classes = num_classes
        self.num_chunks = -(-size // CHUNK)

    def indices(self, chunk: int) -> range:
        """The images of a chunk."""
        return range(chunk * CHUNK, min((chunk + 1) * CHUNK, self.size))

    def write(self, view: int, chunk: int, rows: np.ndarray) -> None:
        """Write the outputs of a chunk, fp16 [n, C]. Raises UserError if that is not possible."""
        assert rows.shape == (len(self.indices(chunk)), self.num_classes), rows.shape
        content = rows.astype("<f2").tobytes()
        path = self._path(view, chunk)
        make_directory(path.parent)
        with new_file(path) as file:
            file.write(content)
            file.write(self._digest(view, chunk, content))

    def problem(self, view: int, chunk: int) -> str | None:
        """Why the file of a chunk cannot be used; None if it is as it was written."""
        try:
            with open_regular(self._path(view, chunk)) as file:
                content = file.read(self._bytes(chunk) + _DIGEST_BYTES + 1)
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"cannot be read ({error.strerror})"
        if len(content) != self._bytes(chunk) + _DIGEST_BYTES:
            return "has another size"
        rows, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
        if digest != self._digest(view, chunk, rows):
            return "is damaged (its checksum differs)"
        return None

    def open(self, view: int) -> list[Tensor]:
        """The outputs of each chunk, fp16 [n, C], mapped from checked files."""
        chunks = []
        for chunk in range(self.num_chunks):
            count = len(self.indices(chunk)) * self.num_classes
            path = str(self._path(view, chunk))
            rows = torch.from_file(path, shared=False, size=count, dtype=torch.float16)
            chunks.append(rows.view(-1, self.num_classes))
        return chunks

    def count(self, view: int) -> int:
        """The number of files of a view."""
        names: set[str] = set()
        with suppress(OSError):
            names = set(os.listdir(self.folder / f"view-{view:04d}"))
        return sum(self._path(view, chunk).name in names for chunk in range(self.num_chunks))

    def total_bytes(self) -> int:
        """Size of the files of all views."""
        total = 0
        for path in self.folder.glob("view-*/*.f16"):
            with suppress(OSError):
                total += path.stat().st_size
        return total

    def _path(self, view: int, chunk: int) -> Path:
        return self.folder / f"view-{view:04d}" / f"{chunk:06d}.f16"

    def _bytes(self, chunk: int) -> int:
        return len(self.indices(chunk)) * self.num_classes * 2

    def _digest(self, view: int, chunk: int, content: bytes) -> bytes:
        place = f"{self.folder.name} {view} {chunk}\n".encode()
        return hashlib.sha256(place + content).digest()


class Distillation:
    """The teacher of a run and its outputs. `prepare` makes those of a view; calling the object
    looks some of them up."""

    def __init__(self, config: AllSections, world: World, data: Data, teacher: Teacher) -> None:
        """Check the classes and the cache before the training. Collective.

        Raises:
            UserError: the teacher does not know a class of the data, or CACHE cannot be used.
        """
        self.world = world
        self.teacher = teacher
        self.autocast = build_autocast(config.train.amp_enable, config.train.amp_dtype, world)
        self.batch_size = _BATCH[world.device.type]
        self.config = teacher.data_config(config.data, self.batch_size)
        self.dataset = data.train_loader.dataset
        self.class_names = data.class_names
        # columns of the teacher's output that the model has; None: all
        self.columns: Tensor | None = None
        all_classes = config.train.distill.classes == "teacher"
        if not all_classes and data.class_names != teacher.class_names:
            numbers = world.on_every_rank(lambda: teacher.numbers(data.class_names))
            self.columns = torch.tensor(numbers, device=world.device)
        dtype = config.train.amp_dtype if config.train.amp_enable else "float32"
        content = world.agree(self._describe(dtype) if world.is_main else {})
        folder = _folder(config.train.distill.cache, content)
        self.cache = OutputCache(folder, data.train_size, data.num_classes)
        self.views = data.views
        self.view: int | None = None  # that `chunks` holds
        self.chunks: list[Tensor] = []
        self.cached_images = 0  # outputs that were read, in this part of the run
        self.computed_images = 0
        self.seconds = 0.0  # of computing them
        self._open_folder(content)

    def __call__(self, indices: Tensor) -> Tensor:
        """The teacher's logits for images of the current view, float32 [B, C] on the device."""
        rows = [self.chunks[index // CHUNK][index % CHUNK] for index in indices.tolist()]
        return torch.stack(rows).to(self.world.device, non_blocking=True).float()

    def prepare(self, view: int, recorder: Recorder, check_stop: Callable[[], None]) -> None:
        """Compute what is missing of a view, and open it. Collective.

        Args:
            check_stop: called after each batch; it may raise.

        Raises:
            UserError: CACHE cannot be written, or the ranks do not see the same files there.
        """
        if view == self.view:
            self.cached_images += self.cache.size
            return
        self.view, self.chunks = None, []
        num_missing = 0
        if self._problems(view):
            with self._alone(view, recorder, check_stop):
                num_missing = self._complete(view, recorder, check_stop)
        self.computed_images += num_missing
        self.cached_images += self.cache.size - num_missing
        for rank, found in enumerate(self.world.gather(self.cache.count(view))):
            if found != self.cache.num_chunks:
                raise UserError(
                    f"TRAIN.DISTILL.CACHE: rank {rank} finds {found} of"
                    f" {self.cache.num_chunks} files in {self.cache.folder}; it must be a"
                    " directory that all ranks see"
                )
        self.chunks = self.cache.open(view)
        self.view = view
        recorder.print_lines(self._line(view, num_missing))

    def _complete(self, view: int, recorder: Recorder, check_stop: Callable[[], None]) -> int:
        """Compute what is missing of a view. Returns the number of these images."""
        problems = self._problems(view)  # another run may have written some meanwhile
        for chunk, problem in sorted(problems.items()):
            if problem != "is missing":
                recorder.print_lines(
                    f"{self.cache.folder}: part {chunk} of view {view} {problem};"
                    " it is computed again"
                )
        missing = sorted(problems)
        num_missing = sum(len(self.cache.indices(chunk)) for chunk in missing)
        if missing:
            self._fill(view, missing, num_missing, recorder, check_stop)
        return num_missing

    @contextmanager
    def _alone(
        self, view: int, recorder: Recorder, check_stop: Callable[[], None]
    ) -> Iterator[None]:
        """Wait until no other run computes this view; others wait until the block ends."""
        with ExitStack() as stack:
            told, lock = False, self._open_lock(view, stack)
            while not self.world.agree(self._try_lock(lock)):
                if not told:
                    told = True
                    recorder.print_lines(
                        f"teacher: another run computes view {view + 1}; waiting for it"
                    )
                time.sleep(_SECONDS_BETWEEN_LOCKS)
                check_stop()
            yield

    def _open_lock(self, view: int, stack: ExitStack) -> int | None:
        """The lock file of a view on the main rank, until the stack closes."""
        if not self.world.is_main:
            return None
        path = self.cache.folder / f"view-{view:04d}.lock"
        with suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, file)
            return file
        return None

    @staticmethod
    def _try_lock(file: int | None) -> bool:
        """Lock a file on the main rank; True also where there are no locks, since the work would
        only be done twice."""
        try:
            return file is None or try_lock(file, inherited=False)
        except OSError:
            return True

    def hit_rate(self) -> float | None:
        """The share of the outputs that were in the cache, in this part of the run, 0 to 1."""
        total = self.cached_images + self.computed_images
        if not total:
            return None
        return self.cached_images / total

    def facts(self) -> dict:
        """Values for summary.json, of this part of the run."""
        return {
            "teacher": self.teacher.name,
            "teacher_seconds": self.seconds,
            "teacher_hit_rate": self.hit_rate(),
            "teacher_cache_bytes": self.cache.total_bytes(),
        }

    def headline(self) -> str:
        """The teacher and its cache, for the log."""
        teacher, cache = self.teacher, self.cache
        views = "1 view" if self.views == 1 else f"{self.views} views"
        columns = ""
        if self.columns is not None:
            columns = f", {len(self.columns):,} of them are the data's"
            first = self.columns.tolist()[0]
            theirs, ours = teacher.class_names[first], self.class_names[0]
            is_counted = are_numbers(teacher.class_names)
            named = self.class_names if is_counted else teacher.class_names
            if (is_counted or are_numbers(self.class_names)) and theirs != ours:
                columns += f", matched by number: class {first} is {theirs!r} there, {ours!r} here"
                columns += other_order(named)
        return (
            f"teacher {teacher.name}: {len(teacher.class_names):,} classes{columns}, images of"
            f" {teacher.img_size} pixels; {views}, cache {cache.folder}"
            f" ({cache.total_bytes() / 1e6:,.1f} MB)"
        )

    def _line(self, view: int, num_missing: int) -> str:
        hit = 1 - num_missing / self.cache.size
        return (
            f"teacher: view {view + 1} of {self.views}: {hit:.0%} of {self.cache.size:,} outputs"
            f" were in the cache, which has {self.cache.total_bytes() / 1e6:,.1f} MB"
        )

    def _problems(self, view: int) -> dict[int, str]:
        """The problem of each chunk that cannot be used. The ranks share the work."""
        own = {}
        for chunk in range(self.world.rank, self.cache.num_chunks, self.world.size):
            problem = self.cache.problem(view, chunk)
            if problem is not None:
                own[chunk] = problem
        problems: dict[int, str] = {}
        for part in self.world.gather(own):
            problems |= part
        return problems

    def _fill(
        self,
        view: int,
        missing: Sequence[int],
        num_missing: int,
        recorder: Recorder,
        check_stop: Callable[[], None],
    ) -> None:
        """Compute and write chunks. Rank r has the chunks r, r + W, ... of the list."""
        own = missing[self.world.rank :: self.world.size]
        indices = [index for chunk in own for index in self.cache.indices(chunk)]
        loader = training_loader(self.config, self.dataset, view, indices)
        batches = iter(loader)
        num_rounds = -(-len(missing) // self.world.size)
        batches_of_chunk = CHUNK // self.batch_size
        started = told = time.perf_counter()
        title = f"teacher, view {view + 1}/{self.views}"
        with recorder.bar(title, num_rounds * batches_of_chunk) as bar:
            for number in range(num_rounds):
                rows = []
                for position in range(batches_of_chunk):
                    batch = next(batches, None)
                    if batch is not None:
                        rows.append(self._outputs(batch.images))
                    done = number * batches_of_chunk + position + 1
                    images = min(done * self.batch_size * self.world.size, num_missing)
                    rate = images / (time.perf_counter() - started)
                    bar.advance(f"{rate:,.0f} images/s")
                    check_stop()
                self.world.on_every_rank(partial(self._write, view, own, number, rows))
                if time.perf_counter() - told > _SECONDS_BETWEEN_LINES:
                    told = time.perf_counter()
                    left = in_words((num_missing - images) / rate)
                    recorder.print_lines(
                        f"{title}: {images:,} of {num_missing:,} images,"
                        f" {rate:,.0f} images/s, {left} left"
                    )
        self.seconds += time.perf_counter() - started

    @torch.inference_mode()
    def _outputs(self, images: Tensor) -> np.ndarray:
        """The teacher's logits of a batch, fp16 [B, C]."""
        images = images.to(self.world.device, non_blocking=True)
        with self.autocast():
            logits = self.teacher.module(images.contiguous(memory_format=torch.channels_last))
        if self.columns is not None:
            logits = logits[:, self.columns]
        return logits.half().cpu().numpy()

    def _write(self, view: int, own: Sequence[int], number: int, rows: list[np.ndarray]) -> None:
        """Write the outputs of this rank's chunk of this number, if it has one."""
        if number >= len(own):
            return
        outputs = np.concatenate(rows)
        if not np.isfinite(outputs).all():
            raise UserError(
                f"TRAIN.DISTILL.TEACHER {self.teacher.name}: its outputs are not finite in fp16"
            )
        self.cache.write(view, own[number], outputs)

    def _describe(self, dtype: str) -> dict:
        """What the outputs depend on."""
        given = self.config
        columns = None
        if self.columns is not None:
            columns = self.columns.tolist()
        return {
            "format": _FORMAT,
            "teacher": self.teacher.architecture,
            "weights": self.teacher.weights,
            "columns": columns,
            "dtype": dtype,
            "input": [given.channels, given.img_size, given.mean, given.std, given.interpolation],
            "augment": asdict(given.augment) | {"mixup": 0, "cutmix": 0},
            "seed": given.seed,
            "images": checksum_of_images(self.dataset.source),
        }

    def _open_folder(self, content: dict) -> None:
        """Make the folder. Raises UserError if a rank cannot write there, or does not see it."""
        folder = self.cache.folder
        record = folder / "teacher.json"

        def write() -> None:
            make_directory(folder)
            text = _as_text(content)
            with suppress(OSError), open_regular(record) as file:
                if file.read(len(text) + 1) == text:
                    return  # perhaps another user's, in a directory that only they may write
            with new_file(record) as file:
                file.write(text)

        self.world.on_every_rank(lambda: write() if self.world.is_main else None)
        for rank, sees in enumerate(self.world.gather(record.is_file())):
            if not sees:
                raise UserError(
                    f"TRAIN.DISTILL.CACHE: rank {rank} does not see {record}, which rank 0 wrote;"
                    " it must be a directory that all ranks see"
                )


def checksum_of_images(source: Source) -> str:
    """SHA-256 of the targets and names of all images, and of the content of some.

    Names count from the folder that all images have in common, so the data may move.
    """
    size = len(source)
    digest = hashlib.sha256(np.asarray(source.targets, dtype="<i8").tobytes())
    names = [source.name(index) for index in range(size)]
    prefix = os.path.commonprefix([names[0], names[-1]])  # noqa: RUF071 - commonpath may raise
    common = len(os.path.dirname(prefix))
    for name in names:
        digest.update(f"{name[common:]}\n".encode(errors="surrogateescape"))
    for index in range(0, size, -(-size // _SAMPLE)):
        with suppress(Exception):  # a damaged image; formats raise any type
            digest.update(hashlib.sha256(source.read(index)).digest())
    return digest.hexdigest()


def _folder(cache: str, content: dict) -> Path:
    parent = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "swinv2-moe" / "teacher"
    if cache:
        parent = Path(cache)
    return parent.expanduser() / hashlib.sha256(_as_text(content)).hexdigest()[:24]


def _as_text(content: dict) -> bytes:
    return f"{json.dumps(content, indent=1)}\n".encode()
