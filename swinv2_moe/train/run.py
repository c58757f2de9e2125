"""A training run, from its configuration to its summary: the order in which its parts are opened
and closed."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from yacs.config import CfgNode

from swinv2_moe.class_names import match_classes
from swinv2_moe.config import (
    AllSections,
    DataConfig,
    ModelConfig,
    RunConfig,
    all_sections,
    flatten,
    resolve_batch_size,
    run_config,
)
from swinv2_moe.data import Data, build_data
from swinv2_moe.errors import StoppedElsewhere, UserError, shortened
from swinv2_moe.imports import imported_files
from swinv2_moe.model_types import model_section
from swinv2_moe.models import (
    MoEModel,
    build_model,
    load_dense,
    measure_model,
)
from swinv2_moe.models.heads import fit_head
from swinv2_moe.models.hub import fetch_weights, is_hub_name, local_file, windows_of_name
from swinv2_moe.models.positions import check_windows
from swinv2_moe.models.weight_files import read_class_names
from swinv2_moe.train import checkpoint, optim, trained_with, upcycling
from swinv2_moe.train.agreement import check_same_data, check_same_start, differing_versions
from swinv2_moe.train.background_staging import background_staging
from swinv2_moe.train.check_files import check_files
from swinv2_moe.train.checkpoint import Checkpoint
from swinv2_moe.train.distributed import World, expert_group, open_world, seed_everything
from swinv2_moe.train.environment import describe_environment
from swinv2_moe.train.events import Staging, load_mllogger, read_staging
from swinv2_moe.train.loop import Trainer
from swinv2_moe.train.optim import without_slow_amp
from swinv2_moe.train.placement import bound_to_node, placement_line
from swinv2_moe.train.record import Recorder
from swinv2_moe.train.run_lock import only_run
from swinv2_moe.train.run_report import (
    closing_lines,
    headline,
    start_warnings,
    summarize,
    with_staging,
)
from swinv2_moe.train.saver import Saver, save_policy
from swinv2_moe.train.timing import PhaseTimes
from swinv2_moe.train.tracker_services import check_tracker

# waiting time for a current save when the run fails; if all ranks are well, it takes much less
_LAST_SAVE_SECONDS = 60


def train(
    config: CfgNode,
    resume: str | None = None,
    resume_command: str = 'train(config, resume="auto")',
    bind: str = "auto",
    began: float | None = None,
) -> dict | None:
    """Train, or continue to train, the configured model in the run directory `config.OUTPUT`.

    All input is checked before anything but a lock is written to the run directory.

    Args:
        resume: the state to continue from: "auto", a run or a checkpoint. None starts a new run.
        resume_command: the command that continues a stopped run, for a message to the user.
        bind: "auto" binds each rank to the NUMA node of its GPU, "none" does not.
        began: when the program began, in seconds since 1970; None: now.

    Returns:
        The summary; None if the run was told to stop before its end.

    Raises:
        UserError: input that cannot be used, or a loss that is not finite.
        CollectiveError: another rank has ended, or does not answer.
        StoppedElsewhere: another rank received SIGTERM, and a launcher may restart the ranks.
    """
    phases = PhaseTimes(began)
    run = run_config(config)
    root = Path(run.output)
    with (
        open_world(run.device, run.timeout) as world,
        world.named_errors("a collective"),
        ExitStack() as stack,
    ):
        # before data workers start, because they inherit the CPUs
        placement = stack.enter_context(bound_to_node(bind, world.device))
        check_same_start(flatten(config) | {"--resume": resume}, world)
        placements = world.gather(placement)
        world.everywhere(lambda: _check_packages(run, world))
        config = resolve_batch_size(config, world.size)
        # before reading files that another run may be writing
        stack.enter_context(only_run(root, world))
        source = _starting_point(root, resume, all_sections(config), world)
        config, taken_over = _as_trained(config, source, world)
        sections, amp_note = without_slow_amp(all_sections(config), world)
        data, staging = _load_data(sections.data, world, source, stack)
        trainer = _build_trainer(sections, world, data, source, phases)
        was_finished = trainer.progress.finished
        _check_not_finished_elsewhere(trainer, source, root)
        size = measure_model(sections.model, data.num_classes)
        first_lines = [*headline(trainer, size, source), *_notes(trainer, placements)]
        first_lines += taken_over + amp_note
        # all ranks get here at about the same time: they have just exchanged versions
        stack.enter_context(trainer.stop)
        recorder = stack.enter_context(
            closing(Recorder(root, world, trainer.progress.step, run.event_log, run.tracker))
        )
        stack.enter_context(recorder.engine_log())
        if not was_finished:  # a finished run keeps its configuration and its summary
            recorder.config(sections.yaml)
        recorder.say(*first_lines)
        saver = _open_saver(root / "checkpoints", trainer, source, recorder)
        stack.callback(saver.wait, _LAST_SAVE_SECONDS)
        if not was_finished:
            progress = trainer.progress
            recorder.begin(describe_environment(world), progress.step, progress.steps_per_epoch)
        with _run_events(recorder, trainer, phases.began, staging):
            trainer.fit(recorder, saver)
        if trainer.stopped_by:
            recorder.say(_stopped(trainer, resume_command))
        staging = staging or read_staging(sections.data.stage)
        summary = summarize(trainer, size, staging, time.time() - phases.began)
        if trainer.progress.finished:
            if not was_finished:
                recorder.summary(summary)
            recorder.say(*closing_lines(trainer, summary, root))
    if trainer.stop.came_from_elsewhere(trainer.stopped_by):
        raise StoppedElsewhere
    if trainer.stopped_by:
        return None
    return summary


def _check_not_finished_elsewhere(trainer: Trainer, source: Checkpoint | None, root: Path) -> None:
    """Raise UserError for a finished checkpoint of another run: nothing would be trained or
    written."""
    if source is None or not trainer.progress.finished:
        return
    if root.resolve() not in source.directory.resolve().parents:
        raise UserError(
            f"checkpoint {source.directory} has done all steps; to go on from it in {root}, raise"
            " TRAIN.EPOCHS or TRAIN.MAX_STEPS"
        )


def _open_saver(
    root: Path, trainer: Trainer, source: Checkpoint | None, recorder: Recorder
) -> Saver:
    """A saver of the run. Without a checkpoint `best`, the next validation is the best one."""
    policy = save_policy(trainer.config.checkpoint)
    saver = Saver(root, trainer.world, policy, source, recorder.say, recorder.checkpoint)
    has_best = trainer.world.agree(saver.has_best)
    if not has_best and not trainer.progress.finished:
        trainer.progress.best_top1 = -1.0
    return saver


def _stopped(trainer: Trainer, resume_command: str) -> str:
    step = trainer.progress.step
    return f"{trainer.stopped_by}: stopped after step {step}; to go on: {resume_command}"


def _check_packages(config: RunConfig, world: World) -> None:
    """Raise UserError if an optional package that the configuration needs is missing."""
    if config.event_log:
        load_mllogger()
    if world.is_main:
        check_tracker(config.tracker)


def _notes(trainer: Trainer, placements: list[str]) -> list[str]:
    """Lines of the log after the headline. All ranks call this."""
    lines = []
    if any(placements):
        lines.append(placement_line(placements))
    lines += [f"imported {file}" for file in imported_files()]
    lines += trainer.data.notes
    lines += [f"warning: {warning}" for warning in _warnings(trainer)]
    return lines


def _load_data(
    config: DataConfig, world: World, start: Checkpoint | None, stack: ExitStack
) -> tuple[Data, Staging | None]:
    """The data, and the record of an earlier staging.

    Args:
        start: the checkpoint that the run continues from.
        stack: an exit stack, which ends the staging that DATA.STAGE asks for.

    Raises:
        UserError: on every rank, if the data cannot be used on any rank; also what
            `check_same_data` and `check_files` raise.
    """
    staging = world.everywhere(lambda: read_staging(config.path))
    background = stack.enter_context(background_staging(config, world))

    def load() -> Data:
        sources = None
        if background is not None:
            sources = background.sources()
        return build_data(config, world.rank, world.size, sources)

    data = world.everywhere(load)
    if background is not None:
        epoch = 0
        if start is not None and start.meta["training"] is not None:
            epoch = start.meta["training"]["epoch"]
        background.start(data, epoch)
    train_images = data.train_loader.dataset.source
    val_images = data.val_loader.dataset.source
    check_same_data(config.path, world, train_images, val_images, data.class_names)
    if config.check_files:
        check_files(config, data, world)
    return data, staging


def _starting_point(
    root: Path, resume: str | None, sections: AllSections, world: World
) -> Checkpoint | None:
    """The checkpoint to continue from: of this run or, with MODEL.UPCYCLE_CONTINUE, of a dense one.

    None starts a new run. That is not allowed if `root` already has a run.
    """
    source = None
    if resume is not None:
        source = checkpoint.find_checkpoint(resume, root / "checkpoints", world)
    elif world.agree((root / "metrics.jsonl").exists()):
        raise UserError(
            f"--output {root}: already holds a run; --resume auto continues it, another directory"
            " starts anew"
        )
    if source is None and sections.model.upcycle_continue:
        source = upcycling.find_dense(sections.model.pretrained, sections.train, world)
    return source


def _as_trained(
    config: CfgNode, source: Checkpoint | None, world: World
) -> tuple[CfgNode, list[str]]:
    """The configuration with what its weights were trained with, and messages for the log.

    A resumed run keeps its own values without a message. Every rank calls this.
    """
    model = config.MODEL
    if source is not None:
        name = f"checkpoint {source.directory}"
        trained = trained_with.of_checkpoint(source.meta, name)
        config, notes = trained_with.take_over(config, trained, name)
        return config, notes if model.UPCYCLE_CONTINUE else []
    if not model.PRETRAINED:
        return config, []
    stages = len(model_section(config).get("DEPTHS", [0]) or [])
    if is_hub_name(model.PRETRAINED):
        _fetch_weights(model.PRETRAINED, world)
    trained = world.everywhere(lambda: trained_with.of_weights(model.PRETRAINED, stages))
    return trained_with.take_over(config, world.agree(trained), model.PRETRAINED)


def _warnings(trainer: Trainer) -> list[str]:
    """The warnings before the first step. Every rank calls this."""
    sections, world = trainer.config, trainer.world
    config = sections.train
    rate = optim.scaled_learning_rate(config, config.base_lr, world.size)
    lines = start_warnings(config, sections.data, trainer.data, rate)
    return lines + differing_versions(world)


def _build_trainer(
    sections: AllSections,
    world: World,
    data: Data,
    source: Checkpoint | None,
    phases: PhaseTimes,
) -> Trainer:
    """A trainer with the state of `source`, or with the initial weights of a new run."""
    config, seed = sections.model, sections.run.seed
    seed_everything(seed)  # the same weights on any number of ranks
    model = build_model(config, data.num_classes, expert_group(config.experts, world))
    if source is None:
        notes = _load_pretrained(config, model, world, seed, data.class_names)
        data = replace(data, notes=data.notes + notes)
    trainer = Trainer(sections, world, data, model, phases)
    if source is not None:
        trainer.resume(source)
    return trainer


def _load_pretrained(
    config: ModelConfig, model: MoEModel, world: World, seed: int, class_names: Sequence[str]
) -> tuple[str, ...]:
    """Load MODEL.PRETRAINED, if given.

    Args:
        seed: seed of the noise on upcycled experts.
        class_names: of the data. The classifier is matched with them where its names are known.

    Returns:
        Messages for the log.

    Raises:
        UserError: the weights do not fit the model.
    """
    source = local_file(config.pretrained)
    notes: tuple[str, ...] = ()
    if not source:
        return notes
    fit = partial(fit_head, model=model, config=config)
    if is_hub_name(source):
        file = _fetch_weights(source, world)
        windows = []
        if world.is_main:
            windows = windows_of_name(source)
        check_windows(model, world.agree(windows), source)
        source = str(file)
    try:
        pretrained = None
        if Path(source).is_dir():
            pretrained = checkpoint.find_checkpoint(
                source, Path(), world, "MODEL.PRETRAINED", weights_only=True
            )
        if pretrained:
            trained = pretrained.meta["class_names"]
        else:
            trained = read_class_names(Path(source))
        rows, notes = _head_rows(trained, config, class_names)
        fit = partial(fit, rows=rows)
        if pretrained and not config.upcycle:
            checkpoint.load_weights(pretrained, model, fit)
        else:
            dense = source
            if pretrained:
                dense = checkpoint.read_dense(pretrained, pretrained.weights_section, model)
            fresh = load_dense(model, dense, config.upcycle, config.upcycle_noise, seed, fit)
            if fresh and config.experts.freeze:
                raise UserError(
                    f"MODEL.MOE.FREEZE is True: weights {source} have no {fresh[0]}, it would stay"
                    " random"
                )
    except UserError as error:
        hint = ""
        if f"{model.classifier}." in str(error):
            hint = (
                " (other classes? MODEL.NEW_HEAD True starts a new head, MODEL.CLASS_MAP takes over"
                " some of its rows)"
            )
        raise UserError(f"{error}{hint}") from error
    return notes


def _head_rows(
    trained: list[str], config: ModelConfig, class_names: Sequence[str]
) -> tuple[list[int] | None, tuple[str, ...]]:
    """For each class its row in the pretrained classifier, matched by name, and a message for the
    log. None if the classifier is used as it is, or as MODEL.NEW_HEAD and MODEL.CLASS_MAP say.

    Args:
        trained: class names of the pretrained weights; empty if they are not known.
        class_names: of the data.
    """
    if config.new_head or config.class_map or not trained:
        return None, ()
    where = f"MODEL.PRETRAINED {config.pretrained}"
    try:
        match = match_classes(trained, class_names, where)
    except UserError as error:
        raise UserError(f"{error}; MODEL.NEW_HEAD True starts a new head") from error
    if match.by_number:
        return None, (f"{where}: the classes are matched by number, only one side has names",)
    if match.numbers == list(range(len(trained))):
        return None, ()
    count = len(class_names) - len(match.unknown)
    note = f"{where}: the classifier's rows of {count:,} classes are taken over by name"
    if match.unknown:
        note += f", {len(match.unknown):,} classes are new: {shortened(match.unknown)}"
    return match.numbers, (note,)


def _fetch_weights(name: str, world: World) -> Path:
    """The file of weights that the name in MODEL.PRETRAINED stands for. Every rank calls this.

    The main rank downloads the file. The others then read it from the cache, or download it to the
    cache of their own machine.

    Raises:
        UserError: as `fetch_weights`, on every rank.
    """
    if world.size > 1:
        world.everywhere(lambda: fetch_weights(name) if world.is_main else None)
    return world.everywhere(lambda: fetch_weights(name))


@contextmanager
def _run_events(
    recorder: Recorder, trainer: Trainer, began: float, staging: Staging | None
) -> Iterator[None]:
    """Write the events of this part of a run to the event log.

    Before the block: the starting point of the run, since `began` (in seconds since 1970). Around
    the block: the training. It ends with success when it reaches the target or, without a target,
    when the run has ended.
    """
    if trainer.progress.finished:  # finished before this part
        yield
        return
    config = trainer.config.train
    if staging is not None:
        _staging_events(recorder, staging)
    recorder.event("cache_clear", False, at=began)  # no command here empties the system's caches
    recorder.event("init_start", at=began)
    recorder.event("seed", config.seed)
    recorder.event("global_batch_size", trainer.progress.global_batch)
    recorder.event("train_samples", trainer.data.train_size)
    recorder.event("eval_samples", trainer.data.val_size)
    rate = optim.scaled_learning_rate(config, config.base_lr, trainer.world.size)
    recorder.event("opt_base_learning_rate", rate)
    recorder.event("init_stop")
    recorder.event("run_start")
    try:
        yield
    finally:
        meanwhile = read_staging(trainer.config.data.stage)
        if meanwhile is not None and meanwhile.started >= began:
            _staging_events(recorder, meanwhile)
        progress = trainer.progress
        succeeded = progress.finished
        if progress.to_target.target:
            succeeded = progress.to_target.reached is not None
        status = "aborted"
        if succeeded:
            status = "success"
        recorder.event("run_stop", status=status)
        reached = progress.to_target.reached
        if progress.finished and reached is not None and reached.phases:
            phases = with_staging(reached.phases, staging)
            stats = {"time_to_solution": sum(phases.values()), "phases": phases}
            recorder.event("tracked_stats", stats)


def _staging_events(recorder: Recorder, staging: Staging) -> None:
    recorder.event("staging_start", at=staging.started)
    recorder.event("staging_stop", at=staging.started + staging.seconds, bytes=staging.bytes)
