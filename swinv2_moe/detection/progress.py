"""Progress of a detector's training at the terminal, in place of mmengine's log."""

import logging
import time
from pathlib import Path

import pycocotools.coco
from mmengine.hooks import Hook
from mmengine.runner import IterBasedTrainLoop, Runner

from swinv2_moe.output import printable
from swinv2_moe.tables import Bar, Console, in_words

_PACKAGE = Path(__file__).parents[1]


class ProgressHook(Hook):
    """A progress bar for each epoch and a line after it; the main rank shows them.

    Without a terminal only the lines are shown.
    """

    priority = "VERY_LOW"  # after the hooks that compute the shown values

    def __init__(self) -> None:
        self.console = Console()
        self.bar: Bar | None = None
        self.validates = False  # whether the bar is for a validation

    def before_run(self, runner: Runner) -> None:
        self.is_main = runner.rank == 0
        self._say(f"log of mmengine: {runner.log_dir}")

    def before_train_epoch(self, runner: Runner) -> None:
        self.images = 0
        self.losses = 0.0
        self.iterations = 0
        self.started = time.perf_counter()
        total, done, title = len(runner.train_dataloader), 0, ""
        if isinstance(runner.train_loop, IterBasedTrainLoop):
            total, done, title = runner.max_iters, runner.iter, "iterations"
        else:
            title = f"epoch {runner.epoch + 1}/{runner.max_epochs}"
        self._open_bar(title, total, done)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch=None, outputs=None
    ) -> None:
        loss = float(outputs["loss"].detach())
        self.losses += loss
        self.iterations += 1
        self.images += runner.world_size * len(data_batch["inputs"])
        rate = self.images / (time.perf_counter() - self.started)
        left = (runner.max_iters - runner.iter - 1) * self._seconds_per_iteration()
        if self.bar is not None:
            text = f"loss {loss:.3f}  {rate:.1f} images/s"
            self.bar.advance(text, f"left, {in_words(left)} of the run")

    def _seconds_per_iteration(self) -> float:
        return (time.perf_counter() - self.started) / self.iterations

    def after_train_epoch(self, runner: Runner) -> None:
        self.close()
        seconds = time.perf_counter() - self.started
        if self.iterations:
            loss = self.losses / self.iterations
            rate = self.images / seconds
            name = f"epoch {runner.epoch + 1}/{runner.max_epochs}"
            if isinstance(runner.train_loop, IterBasedTrainLoop):
                name = f"{self.iterations} iterations"
            self._say(f"{name}  train loss {loss:.4f}  {rate:.1f} images/s  {seconds:.1f} s")

    def before_val_epoch(self, runner: Runner) -> None:
        if self.bar is None:  # between two epochs
            self._open_bar("validation", len(runner.val_dataloader), 0)
            self.validates = True

    def after_val_iter(self, runner: Runner, batch_idx: int, data_batch=None, outputs=None) -> None:
        if self.bar is not None and self.validates:
            self.bar.advance("")

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        if self.validates:
            self.close()
        shown = []
        for name, value in (metrics or {}).items():
            if name.endswith("mAP"):
                shown.append(f"{name.removeprefix('coco/')} {value:.3f}")
        if shown:
            self._say(f"validation  {'  '.join(shown)}")

    def before_test_epoch(self, runner: Runner) -> None:
        self._open_bar("test", len(runner.test_dataloader), 0)

    def after_test_iter(
        self, runner: Runner, batch_idx: int, data_batch=None, outputs=None
    ) -> None:
        if self.bar is not None:
            self.bar.advance("")

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self.close()

    def close(self) -> None:
        """Remove the bar, if there is one."""
        if self.bar is not None:
            self.bar.__exit__()
        self.bar = None
        self.validates = False

    def _open_bar(self, title: str, total: int, done: int) -> None:
        visible = self.is_main and self.console.is_terminal
        self.validates = False
        self.bar = Bar(self.console, title, total, done, visible)
        self.bar.__enter__()

    def _say(self, line: str) -> None:
        if self.is_main:
            self.console.print(line)


def quiet_console(logger: logging.Logger) -> None:
    """Show warnings and this package's lines at the terminal; the log's file has everything.

    COCO's readers print while they make an index, and have no option to prevent it.
    """
    from mmdet.datasets.api_wrappers import coco_api

    for module in (pycocotools.coco, coco_api):
        vars(module)["print"] = _print_nothing
    for handler in logger.handlers:
        handler.addFilter(_escape)
        if type(handler) is logging.StreamHandler:
            handler.addFilter(_is_shown)


def _print_nothing(*words: object) -> None:
    pass


def _escape(record: logging.LogRecord) -> bool:
    record.msg, record.args = printable(record.getMessage(), keep="\n"), None
    return True


def _is_shown(record: logging.LogRecord) -> bool:
    is_ours = Path(record.pathname).is_relative_to(_PACKAGE)
    return is_ours or record.levelno >= logging.WARNING
