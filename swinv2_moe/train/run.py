"""A training run, from its configuration to its summary: the order in which its parts are opened
and closed."""

import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from yacs.config import CfgNode

from moe_core.parallel import largest_group
from swinv2_moe.checkpoints.checkpoint import Checkpoint
from swinv2_moe.checkpoints.saver import Saver
from swinv2_moe.config import AllSections, flatten
from swinv2_moe.data.build import Data
from swinv2_moe.data.prepare.staging import read_staging
from swinv2_moe.errors import StoppedElsewhere, UserError
from swinv2_moe.imports import imported_files
from swinv2_moe.models import MoEModel, measure_model
from swinv2_moe.output import print_lines
from swinv2_moe.ranks.agreement import check_same_start, differing_versions
from swinv2_moe.ranks.environment import describe_environment
from swinv2_moe.ranks.run_lock import only_run
from swinv2_moe.ranks.world import Stopped, World, expert_group, open_world
from swinv2_moe.start.defaults import Choice
from swinv2_moe.start.frozen import starting_model
from swinv2_moe.start.whole import Start, complete
from swinv2_moe.train.arrival import load_data
from swinv2_moe.train.distill import Distillation
from swinv2_moe.train.final import train_on_all
from swinv2_moe.train.loop import Trainer
from swinv2_moe.train.progress import PhaseTimes
from swinv2_moe.train.record import Recorder
from swinv2_moe.train.run_report import (
    closing_lines,
    headline,
    run_events,
    start_warnings,
    summarize,
)
from swinv2_moe.train.trackers import check_tracker

# waiting time for a current save when the run fails; if all ranks are well, it takes much less
_LAST_SAVE_SECONDS = 60

PlaceData = Callable[
    [Data, Distillation | None, AllSections, World], tuple[Data, Distillation | None]
]


def train(
    config: CfgNode,
    resume: str | None = None,
    resume_command: str = 'train(config, resume="auto")',
    began: float | None = None,
    check_images: bool = False,
    choice: Choice | None = None,
    place_data: PlaceData | None = None,
) -> dict | None:
    """Train, or continue to train, the configured model in the run directory `config.OUTPUT`.

    All input is checked before anything but a lock is written to the run directory.

    Args:
        resume: the state to continue from: "auto", a run or a checkpoint. None starts a new run.
        resume_command: the command that continues a stopped run, for a message to the user.
        began: when the program began, in seconds since 1970; None: now.
        check_images: read every image before the first step and list those that cannot be read.
        choice: whose configuration this is. A new run tries what it leaves open: the size of the
            image (`choose_size`), the batch and the epochs (`Trial`).
        place_data: replaces the loaders, and the teacher's outputs, by others of the same images.

    Returns:
        The summary; None if the run was told to stop before its end.

    Raises:
        UserError: input that cannot be used, or a loss that is not finite.
        CollectiveError: another rank has ended, or does not answer.
        StoppedElsewhere: another rank received SIGTERM, and a launcher may restart the ranks.
    """
    phases = PhaseTimes(began)
    root = Path(config.OUTPUT)
    with (
        open_world(config.DEVICE, config.TIMEOUT) as world,
        world.named_errors("a collective"),
        ExitStack() as stack,
    ):
        options = {"--resume": resume, "--check-files": check_images}
        check_same_start(flatten(config) | options, world)
        world.on_every_rank(lambda: check_tracker(config.TRACKER if world.is_main else ""))
        # before reading files that another run may be writing
        stack.enter_context(only_run(root, world))
        start = complete(config, resume, choice, world, phases.began)
        sections, source = start.sections, start.source
        staging = world.on_every_rank(lambda: read_staging(sections.data.path))
        data = load_data(sections.data, start.sources, world, source, stack, check_images)
        distillation = None
        if start.teacher is not None:
            data = replace(data, views=sections.train.distill.views)
            distillation = Distillation(sections, world, data, start.teacher)
        if place_data is not None:
            data, distillation = place_data(data, distillation, sections, world)
        size = measure_model(sections.model, data.num_classes)
        model, data = _first_model(sections, start, world, data)
        trainer = Trainer(sections, world, data, model, phases, distillation)
        if source is not None:
            trainer.resume(source)
        was_finished = _was_finished(trainer, root)
        _check_not_finished_elsewhere(trainer, source, root)
        lines = [*headline(trainer, size, source), *_notes(trainer), *start.lines]
        stack.enter_context(trainer.stop)  # all ranks get here at about the same time
        recorder = _open_recorder(root, trainer, lines, stack)
        saver = _open_saver(root / "checkpoints", trainer, source, recorder, stack)
        progress = trainer.progress
        if not was_finished:
            recorder.begin(describe_environment(world), progress.step, progress.steps_per_epoch)
        with run_events(recorder, trainer, phases.began, staging):
            trainer.fit(recorder, saver)
        if sections.train.on_all and progress.finished and not was_finished:
            _train_on_all(trainer, root / "checkpoints", recorder)
        if trainer.stopped_by:
            recorder.print_lines(_stopped(trainer, resume_command))
        summary = summarize(trainer, size, staging, time.time() - phases.began)
        if progress.finished and not trainer.stopped_by:
            _record_end(recorder, trainer, summary, root, was_finished)
    if trainer.stop.came_from_elsewhere(trainer.stopped_by):
        raise StoppedElsewhere
    return None if trainer.stopped_by else summary


def _first_model(
    sections: AllSections, start: Start, world: World, data: Data
) -> tuple[MoEModel, Data]:
    """The model before it is trained or a checkpoint is loaded, and the data with messages about
    its weights. Collective."""
    group, is_new = expert_group(sections.model.experts, world), start.source is None
    probes, known = is_new and sections.train.probe, start.probe
    model, probe, notes = starting_model(
        sections, start.sources, world, group, is_new, probes, known=known
    )
    if probe is not None and known is None and world.is_main:
        print_lines(f"a linear classifier on the frozen network: {probe.classifier}", flush=True)
    return model, replace(data, notes=data.notes + notes)


def _train_on_all(trainer: Trainer, root: Path, recorder: Recorder) -> None:
    """TRAIN.ON_ALL. Without its weights, those of the run are used."""
    if trainer.world.size > 1:
        recorder.print_lines("TRAIN.ON_ALL True: no effect on several processes")
        return
    try:
        with trainer.phases.phase("training"):
            lines = train_on_all(trainer, root)
    except Stopped as stopped:
        trainer.stopped_by = str(stopped)
    except UserError as error:
        recorder.print_lines(f"warning: TRAIN.ON_ALL True: {error}")
    else:
        recorder.print_lines(*lines)


def _was_finished(trainer: Trainer, root: Path) -> bool:
    """Whether an earlier part of the run has done all. Where TRAIN.EPOCHS was lowered to what is
    done, none has recorded the end."""
    return trainer.world.agree(trainer.progress.finished and (root / "summary.json").exists())


def _check_not_finished_elsewhere(trainer: Trainer, source: Checkpoint | None, root: Path) -> None:
    """Raise UserError for a finished checkpoint of another run: nothing would be trained or
    written."""
    if source is None or not trainer.progress.finished:
        return
    if root.resolve() not in source.directory.resolve().parents:
        raise UserError(
            f"checkpoint {source.directory} has done all steps; to continue from it in {root},"
            " raise TRAIN.EPOCHS or TRAIN.MAX_STEPS"
        )


def _open_recorder(
    root: Path, trainer: Trainer, first_lines: list[str], stack: ExitStack
) -> Recorder:
    tracker, step = trainer.config.run.tracker, trainer.progress.step
    recorder = Recorder(root, trainer.world, step, tracker)
    stack.enter_context(closing(recorder))
    stack.enter_context(recorder.engine_log())
    if not trainer.progress.finished:  # a finished run keeps its configuration and its summary
        recorder.config(trainer.config.yaml)
    recorder.print_lines(*first_lines)
    return recorder


def _open_saver(
    root: Path,
    trainer: Trainer,
    source: Checkpoint | None,
    recorder: Recorder,
    stack: ExitStack,
) -> Saver:
    """A saver of the run. Without a checkpoint `best`, the next validation is the best one."""
    world, keep_last = trainer.world, trainer.config.checkpoint.keep_last
    saver = Saver(root, world, keep_last, source, recorder.print_lines, recorder.checkpoint)
    has_best = world.agree(saver.has_best)
    if not has_best and not trainer.progress.finished:
        trainer.progress.best_top1 = -1.0
    stack.callback(saver.wait, _LAST_SAVE_SECONDS)
    return saver


def _record_end(
    recorder: Recorder, trainer: Trainer, summary: dict, root: Path, was_finished: bool
) -> None:
    if not was_finished:
        recorder.summary(summary)
    recorder.print_lines(*closing_lines(trainer, summary, root))


def _stopped(trainer: Trainer, resume_command: str) -> str:
    step = trainer.progress.step
    return f"{trainer.stopped_by}: stopped after step {step}; to continue: {resume_command}"


def _note_on_groups(trainer: Trainer) -> list[str]:
    """A line if the experts do not divide over all ranks."""
    experts, num_ranks = trainer.config.model.experts, trainer.world.size
    if experts.layer is None or experts.expert_parallel_size:
        return []
    size = largest_group(experts.num_experts, num_ranks)
    if size == num_ranks:
        return []
    return [
        f"{experts.num_experts} experts do not divide over {num_ranks} ranks: each group of {size}"
        " has all of them (MODEL.MOE.EXPERT_PARALLEL_SIZE)"
    ]


def _notes(trainer: Trainer) -> list[str]:
    """Lines of the log after the headline. All ranks call this."""
    lines = [f"imported {file}" for file in imported_files()]
    lines += [*_note_on_groups(trainer), *trainer.data.notes]
    warnings = start_warnings(trainer) + differing_versions(trainer.world)
    lines += [f"warning: {warning}" for warning in warnings]
    return lines
