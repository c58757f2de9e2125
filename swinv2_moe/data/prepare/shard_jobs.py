"""Work on shards by processes that can be killed: what is finished stays, and the index is made of
it at the end.

SHARDS/plan.json                        what was asked for; gone when index.json is there
SHARDS/train/000000.tar.members.json    rows and checksum of a finished shard, until the indexes
have them
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

import numpy as np

from swinv2_moe.data.images import MAX_PIXELS
from swinv2_moe.data.prepare.transfer_bar import TransferBar
from swinv2_moe.data.shards import (
    FORMAT_VERSION,
    MEMBER,
    SPLITS,
    check_shard,
    open_split,
    read_index,
)
from swinv2_moe.errors import UserError, short
from swinv2_moe.files import new_file, read_json, write_json

MAX_LEFT_OUT = 0.01  # the share of images that may be left out
_MAX_NUMBER = 2**31 - 1  # size and label of an image
_MAX_JSON_BYTES = 1 << 30  # of a plan or sidecar: 30 million rows


class Job(NamedTuple):
    split: str
    name: str  # of the shard: "000012.tar"
    number: int  # of the shard in its split

    def path(self, root: str) -> str:
        return os.path.join(root, self.split, self.name)


Tick = Callable[[int, int], None]  # called with so many images and bytes more
# does a job, writes its sidecar, returns the summary that `finish_job` makes
Work = Callable[[Job, Tick], dict]


def begin(root: str, asked: dict, more: Callable[[], dict], otherwise: str) -> dict:
    """The plan in `root`: that of an earlier start if there is one, else `asked` with what `more`
    adds, now written.

    Args:
        otherwise: what to do where it was begun in another way, for the message.

    Raises:
        UserError: the earlier one was asked for something else.
    """
    file = os.path.join(root, "plan.json")
    if os.path.exists(os.path.join(root, "index.json")):
        plan = read_index(root, "SHARDS").get("made", {})
    elif os.path.exists(file):
        plan = _read_json(file)
    else:
        plan = asked | more()
        write_json(file, plan)
    plan = {"max_pixels": MAX_PIXELS} | plan  # of before there was a choice
    for key, value in asked.items():
        if plan.get(key) != value:
            raise UserError(
                f"{root} was begun with {key} {short(plan.get(key))}, not {value!r}: go on as it"
                " was begun, or"
                f" {otherwise}"
            )
    return plan


def finish_job(
    path: str, size: int, sha256: str, rows: list[tuple[int, int, int]], left_out: list[str]
) -> dict:
    """Record that the shard at `path` is whole.

    Args:
        rows: offset, size and label of each image.
        left_out: names of the images that it should have and has not.
    """
    summary = {"images": len(rows), "bytes": size, "sha256": sha256}
    summary |= {"left_out": len(left_out), "first_left_out": left_out[0] if left_out else None}
    write_json(_sidecar(path), summary | {"rows": rows})
    return summary


def run_jobs(
    root: str,
    jobs: list[Job],
    work: Work,
    workers: int,
    bar: TransferBar,
    num_images: int | None = None,
) -> None:
    """Do the jobs that are not finished yet, in forked processes.

    Args:
        num_images: of all jobs, to stop as soon as too many of them are left out.

    Raises:
        UserError: a job did; no job is half done under its shard's name.
    """
    found = {job: _finished(job.path(root)) for job in jobs}
    todo = [job for job, summary in found.items() if summary is None]
    finished = [summary for summary in found.values() if summary is not None]
    if finished:
        bar.skip(
            sum(s["images"] + s["left_out"] for s in finished), sum(s["bytes"] for s in finished)
        )
        bar.console.print(
            f"{len(finished):,} of {len(jobs):,} shards were finished before", highlight=False
        )
    context = multiprocessing.get_context("fork")  # the lists of images are not copied
    counts = context.RawArray("q", 2 * workers)  # images and bytes of each worker
    processes = _start(context, work, todo, workers, counts)
    try:
        with bar:
            show = lambda: bar.show(sum(counts[::2]), sum(counts[1::2]))  # noqa: E731
            for summary in _results(dict(processes), show):
                finished.append(summary)
                check_left_out(root, finished, num_images)
    finally:
        for process in processes.values():
            process.terminate()
            process.join()
        for job in todo:  # of workers that were stopped
            temporary = os.path.join(root, job.split, f".{job.name}.tmp")
            if os.path.exists(temporary):
                os.unlink(temporary)


def _start(
    context, work: Work, jobs: list[Job], workers: int, counts
) -> dict[Connection, multiprocessing.Process]:
    """Workers that share the jobs, by where their results come from."""
    processes = {}
    # in the middle of a fork Ctrl-C would be lost
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        for worker in range(min(workers, len(jobs))):
            receive, send = context.Pipe(duplex=False)
            arguments = (send, counts, worker, work, jobs[worker::workers], os.getpid())
            processes[receive] = context.Process(target=_work, args=arguments, daemon=True)
            processes[receive].start()
            send.close()  # before the next fork: a worker's end is seen when nobody else can write
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return processes


def _work(
    results: Connection, counts, worker: int, work: Work, jobs: list[Job], parent: int
) -> None:
    def tick(images: int, bytes: int) -> None:
        counts[2 * worker] += images
        counts[2 * worker + 1] += bytes
        if os.getppid() != parent:  # it was killed
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent says what is to be said
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        for job in jobs:
            results.send(work(job, tick))
        results.send(None)
    except UserError as error:
        results.send(error)
    except OSError as error:  # of a shard that is read
        results.send(UserError(f"{error.filename or job.path('')}: {error.strerror}"))


def _results(
    processes: dict[Connection, multiprocessing.Process], show: Callable[[], None]
) -> Iterator[dict]:
    """What the processes send, until each has sent None."""
    while processes:
        for connection in wait(list(processes), timeout=0.2):
            try:
                result = connection.recv()
            except EOFError:
                process = processes[connection]
                process.join()
                raise UserError(
                    f"a worker ended with status {process.exitcode}; started again, the command"
                    " goes on"
                ) from None
            if isinstance(result, UserError):
                raise result
            if result is None:
                del processes[connection]
            else:
                yield result
        show()


def check_left_out(root: str, summaries: list[dict], num_images: int | None = None) -> None:
    """Raise UserError if more than MAX_LEFT_OUT of the images are left out, or all."""
    left_out = sum(summary["left_out"] for summary in summaries)
    num_images = num_images or left_out + sum(summary["images"] for summary in summaries)
    if left_out > MAX_LEFT_OUT * num_images:
        first = next(summary["first_left_out"] for summary in summaries if summary["left_out"])
        raise UserError(
            f"{left_out:,} of {num_images:,} images are missing, empty or broken, a share of"
            f" {MAX_LEFT_OUT} may be; the"
            f" first: {first} (where they come back, remove {root} before the next start)"
        )


def finish(root: str, jobs: list[Job], class_names: list[str] | None, plan: dict) -> dict:
    """Make members.npy and index.json of what the finished jobs left, and remove that; returns what
    index.json holds.

    Args:
        class_names: None: numbers, as many as the labels of the training images reach.

    Raises:
        UserError: labels that are out of range, labels without an image, too many images left out.
    """
    path = os.path.join(root, "index.json")
    index = (
        read_index(root, "SHARDS")
        if os.path.exists(path)
        else _make_index(root, jobs, class_names, plan)
    )
    for split in SPLITS:
        open_split(root, split, index)  # looks at labels and sizes
    if not os.path.exists(path):
        write_json(path, index)
    leftovers = [_sidecar(job.path(root)) for job in jobs] + [os.path.join(root, "plan.json")]
    for path in filter(os.path.exists, leftovers):
        os.unlink(path)
    return index


def _make_index(root: str, jobs: list[Job], class_names: list[str] | None, plan: dict) -> dict:
    """Writes members.npy of both splits; returns what index.json is to hold."""
    index = {"format_version": FORMAT_VERSION, "made": plan}
    for split in SPLITS:
        rows, shards = _read_sidecars(root, [job for job in jobs if job.split == split])
        check_left_out(root, shards)
        class_names = class_names or _class_names(root, rows["label"])
        with new_file(os.path.join(root, split, "members.npy")) as file:
            np.save(file, rows)
        members = {"name": "members.npy", "bytes": file.bytes, "sha256": file.sha256}
        index |= {"class_names": class_names, split: {"members": members, "shards": shards}}
    return index


def _read_sidecars(root: str, jobs: list[Job]) -> tuple[np.ndarray, list[dict]]:
    """The rows of a split, MEMBER [N], and the records of its shards."""
    rows, shards = [], []
    for job in jobs:
        record, table = _read_sidecar(job.path(root))
        part = np.zeros(len(table), MEMBER)
        part["offset"], part["size"], part["label"] = table.T
        part["shard"] = job.number
        rows.append(part)
        shards.append(record)
    return np.concatenate(rows), shards


def _class_names(root: str, labels: np.ndarray) -> list[str]:
    used = np.unique(labels)  # not a count for each label: one may be as large as any number
    num_classes = 0
    if len(used):
        num_classes = int(used[-1]) + 1
    if len(used) < num_classes:
        gap = int(np.flatnonzero(used != np.arange(len(used)))[0])
        raise UserError(
            f"{root}: the labels of train reach {num_classes - 1} but {num_classes - len(used)}"
            " below have no image,"
            f" the first is {gap}; labels count from 0, --num-classes allows gaps"
        )
    return [str(label) for label in range(num_classes)]


def _sidecar(path: str) -> str:
    return f"{path}.members.json"


def _read_json(path: str) -> dict:
    try:
        content = read_json(path, _MAX_JSON_BYTES)
        if not isinstance(content, dict):
            raise ValueError(f"it is {short(content)}")
        return content
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); remove it") from error


def _read_sidecar(path: str) -> tuple[dict, np.ndarray]:
    """The record of the shard at `path` for index.json, and offset, size and label of its n images,
    int64 [n, 3]."""
    sidecar = _sidecar(path)
    content = _read_json(sidecar)
    rows, record = content.pop("rows", None), {"name": os.path.basename(path)} | content
    try:
        check_shard("the shard", record)
        table = np.array(rows, np.int64).reshape(record["images"], 3)
        if table.min(initial=0) < 0 or table[:, 1:].max(initial=0) > _MAX_NUMBER:
            raise ValueError("rows out of range")
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise UserError(f"{sidecar}: is not what was written here ({error}); remove it") from error
    return record, table


def _finished(path: str) -> dict | None:
    """The record of a shard that is whole."""
    if not (os.path.exists(_sidecar(path)) and os.path.exists(path)):
        return None
    record, _ = _read_sidecar(path)
    if os.path.getsize(path) == record["bytes"]:
        return record
    return None
