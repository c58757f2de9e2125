"""Work on shards in processes that may be killed. Finished shards are kept; the index is made last.

SHARDS/plan.json                        options of the command; removed when index.json exists
SHARDS/train/000000.tar.members.json    "sidecar": rows and checksum of a finished shard, until the
                                        index has them
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import numpy as np

from moe_core.files import remove_leftovers
from swinv2_moe.data.images import MAX_PIXELS
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
from swinv2_moe.tables import TransferBar

MAX_LEFT_OUT = 0.01  # maximum share of omitted images
_MAX_NUMBER = 2**31 - 1  # maximum size and label of an image
_MAX_JSON_BYTES = 1 << 30  # limit of a plan or sidecar: 30 million rows


class Job(NamedTuple):
    split: str
    name: str  # of the shard: "000012.tar"
    number: int  # of the shard in its split

    def path(self, root: str) -> str:
        return os.path.join(root, self.split, self.name)


# called with the numbers of images and bytes that were done since the last call
ReportProgress = Callable[[int, int], None]
Work = Callable[[Job, ReportProgress], dict]  # does a job and returns the summary from `finish_job`


def begin(root: str, asked: dict, more: Callable[[], dict], otherwise: str) -> dict:
    """The plan in `root`. If there is none from an earlier call, a new plan is written.

    Args:
        asked: the options of the command.
        more: a function that returns the other entries of a new plan.
        otherwise: the end of the message about an earlier call with other options.

    Raises:
        UserError: an earlier call had other options.
    """
    file = os.path.join(root, "plan.json")
    if os.path.exists(os.path.join(root, "index.json")):
        plan = read_index(root, "SHARDS").get("made", {})
    elif os.path.exists(file):
        plan = _read_json(file)
    else:
        plan = asked | more()
        write_json(file, plan)
    plan = {"max_pixels": MAX_PIXELS} | plan  # older plans do not have this entry
    for key, value in asked.items():
        if plan.get(key) != value:
            raise UserError(
                f"{root} was begun with {key} {short(plan.get(key))}, not {value!r}: continue"
                f" with that value, or {otherwise}"
            )
    return plan


def finish_job(
    path: str, size: int, sha256: str, rows: list[tuple[int, int, int]], left_out: list[str]
) -> dict:
    """Write the sidecar of the finished shard at `path`.

    Args:
        rows: offset, size and label of each image.
        left_out: names of the omitted images.

    Returns:
        The sidecar's content without the rows.
    """
    first_left_out = None
    if left_out:
        first_left_out = left_out[0]
    summary = {
        "images": len(rows),
        "bytes": size,
        "sha256": sha256,
        "left_out": len(left_out),
        "first_left_out": first_left_out,
    }
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
    """Do the unfinished jobs, in forked processes.

    Args:
        num_images: number of images of all jobs; None: unknown. If it is known, the work stops as
            soon as too many images are omitted.

    Raises:
        UserError: raised by a job. Unfinished shards are removed.
    """
    remove_leftovers(root)  # of a call that was killed
    todo = []
    finished = []
    for job in jobs:
        summary = _finished(job.path(root))
        if summary is None:
            todo.append(job)
        else:
            finished.append(summary)
    if finished:
        num_done = sum(summary["images"] + summary["left_out"] for summary in finished)
        bar.skip(num_done, sum(summary["bytes"] for summary in finished))
        bar.console.print(f"{len(finished):,} of {len(jobs):,} shards were finished before")
    context = multiprocessing.get_context("fork")  # "fork" does not copy the lists of images
    counts = context.RawArray("q", 2 * workers)  # images and bytes of each worker
    processes = _start(context, work, todo, workers, counts)

    def show() -> None:
        bar.show(sum(counts[::2]), sum(counts[1::2]))

    try:
        with bar:
            for summary in _results(dict(processes), show):
                finished.append(summary)
                check_left_out(root, finished, num_images)
    finally:
        for process in processes.values():
            process.terminate()
            process.join()
        remove_leftovers(root)  # of workers that were stopped


def _start(
    context, work: Work, jobs: list[Job], workers: int, counts
) -> dict[Connection, multiprocessing.Process]:
    """Start workers that share the jobs. Returns each worker by the connection for its results."""
    processes = {}
    # Ctrl-C in the middle of a fork would be lost.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        for worker in range(min(workers, len(jobs))):
            receive, send = context.Pipe(duplex=False)
            arguments = (send, counts, worker, work, jobs[worker::workers], os.getpid())
            processes[receive] = context.Process(target=_work, args=arguments, daemon=True)
            processes[receive].start()
            # Closed before the next fork, so that only this worker can send: `receive` then ends
            # when the worker ends.
            send.close()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return processes


def _work(
    results: Connection, counts, worker: int, work: Work, jobs: list[Job], parent: int
) -> None:
    def report_progress(images: int, bytes: int) -> None:
        counts[2 * worker] += images
        counts[2 * worker + 1] += bytes
        if os.getppid() != parent:  # the parent was killed
            os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent prints the message
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        for job in jobs:
            results.send(work(job, report_progress))
        results.send(None)
    except UserError as error:
        results.send(error)
    except OSError as error:  # reading a shard
        results.send(UserError(f"{error.filename or job.path('')}: {error.strerror}"))


def _results(
    processes: dict[Connection, multiprocessing.Process], show: Callable[[], None]
) -> Iterator[dict]:
    """Yield the summaries that the processes send, until each has sent None.

    Raises:
        UserError: a job raised it, or a process was killed.
        KeyboardInterrupt: Ctrl-C has ended a process.
    """
    connection: Any
    while processes:
        for connection in wait(list(processes), timeout=0.2):
            try:
                result = connection.recv()
            except EOFError:
                process = processes[connection]
                process.join()
                if process.exitcode == -signal.SIGINT:  # Ctrl-C, which this process gets, too
                    raise KeyboardInterrupt from None
                raise UserError(
                    f"a worker ended with status {process.exitcode}; run the command again to"
                    " continue"
                ) from None
            if isinstance(result, UserError):
                raise result
            if result is None:
                del processes[connection]
            else:
                yield result
        show()


def check_left_out(root: str, summaries: list[dict], num_images: int | None = None) -> None:
    """Raise UserError if all images or more than a share of MAX_LEFT_OUT were omitted."""
    left_out = sum(summary["left_out"] for summary in summaries)
    if num_images is None:
        num_images = left_out + sum(summary["images"] for summary in summaries)
    if left_out > MAX_LEFT_OUT * num_images:
        first = next(summary["first_left_out"] for summary in summaries if summary["left_out"])
        raise UserError(
            f"{left_out:,} of {num_images:,} images are missing, empty or broken, at most a share"
            f" of {MAX_LEFT_OUT} is allowed; the first: {first} (if you restore them, remove {root}"
            " before you run the command again)"
        )


def finish(root: str, jobs: list[Job], class_names: list[str] | None, plan: dict) -> dict:
    """Make members.npy and index.json from the sidecars and the plan, and remove sidecars and plan.

    Args:
        class_names: names of the classes; None: the numbers from 0 to the highest label of the
            training images.

    Returns:
        The content of index.json.

    Raises:
        UserError: labels are out of range or have no image, or too many images were omitted.
    """
    index_file = os.path.join(root, "index.json")
    if os.path.exists(index_file):
        index = read_index(root, "SHARDS")
    else:
        index = _make_index(root, jobs, class_names, plan)
    for split in SPLITS:
        open_split(root, split, index)  # this checks labels and sizes
    if not os.path.exists(index_file):
        write_json(index_file, index)
    temporary_files = [_sidecar(job.path(root)) for job in jobs]
    temporary_files.append(os.path.join(root, "plan.json"))
    for file in temporary_files:
        if os.path.exists(file):
            os.unlink(file)
    return index


def _make_index(root: str, jobs: list[Job], class_names: list[str] | None, plan: dict) -> dict:
    """Write members.npy of both splits. Returns the content for index.json."""
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
    rows = []
    shards = []
    for job in jobs:
        record, table = _read_sidecar(job.path(root))
        part = np.zeros(len(table), MEMBER)
        part["shard"] = job.number
        part["offset"] = table[:, 0]
        part["size"] = table[:, 1]
        part["label"] = table[:, 2]
        rows.append(part)
        shards.append(record)
    return np.concatenate(rows), shards


def _class_names(root: str, labels: np.ndarray) -> list[str]:
    """Numbers from 0 to the highest label.

    Raises:
        UserError: a smaller label has no image.
    """
    used = np.unique(labels)  # not a count per label, because a label may be huge
    num_classes = 0
    if len(used):
        num_classes = int(used[-1]) + 1
    if len(used) < num_classes:
        gap = int(np.flatnonzero(used != np.arange(len(used)))[0])
        raise UserError(
            f"{root}: the labels of train reach {num_classes - 1} but {num_classes - len(used)}"
            f" below have no image, the first is {gap}; labels count from 0, --num-classes"
            " allows gaps"
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
    """The record of the shard at `path` for index.json; and offset, size and label of its n images,
    int64 [n, 3]."""
    sidecar = _sidecar(path)
    content = _read_json(sidecar)
    rows = content.pop("rows", None)
    record = {"name": os.path.basename(path)} | content
    try:
        check_shard("the shard", record)
        table = np.array(rows, np.int64).reshape(record["images"], 3)
        if table.min(initial=0) < 0 or table[:, 1:].max(initial=0) > _MAX_NUMBER:
            raise ValueError("rows out of range")
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise UserError(f"{sidecar}: is not what was written here ({error}); remove it") from error
    return record, table


def _finished(path: str) -> dict | None:
    """The record of the shard at `path`; None if it is not finished."""
    if not (os.path.exists(_sidecar(path)) and os.path.exists(path)):
        return None
    record, _ = _read_sidecar(path)
    if os.path.getsize(path) == record["bytes"]:
        return record
    return None
