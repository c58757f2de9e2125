"""The configuration of a run, made whole before any part of the run is built.

Files and options do not decide everything: the number of ranks, the weights, the features of the
frozen network, trial steps and the CPU do the rest. Each changes keys here, once, and says why.
"""

import time
from pathlib import Path
from typing import NamedTuple

from yacs.config import CfgNode

from swinv2_moe.checkpoints.checkpoint import Checkpoint
from swinv2_moe.config import AllSections, all_sections, changed, resolve_batch_size
from swinv2_moe.data.section import DataConfig
from swinv2_moe.data.sources import Sources, load_sources
from swinv2_moe.output import print_lines
from swinv2_moe.ranks.precision import usable_amp
from swinv2_moe.ranks.world import World
from swinv2_moe.start.defaults import Choice, values_of
from swinv2_moe.start.frozen import Probe, choose_size, starting_model
from swinv2_moe.start.initial import as_trained, find_dense, find_start
from swinv2_moe.start.rates import decide_rate
from swinv2_moe.start.teacher import Teacher, open_teacher
from swinv2_moe.start.trial import Trial, decide_workers
from swinv2_moe.tables import in_words


class Start(NamedTuple):
    """What a run begins with.

    Attributes:
        source: the checkpoint that it continues from, if any.
        teacher: that of the training, if any.
        sources: the pictures, with the classes that they are trained with.
        probe: the classifier on the frozen network, if it is fitted to every training picture.
        lines: how the configuration was made whole, for the log.
    """

    sections: AllSections
    source: Checkpoint | None
    teacher: Teacher | None
    sources: Sources
    probe: Probe | None
    lines: list[str]


def complete(
    config: CfgNode, resume: str | None, choice: Choice | None, world: World, began: float
) -> Start:
    """The sections of a run and what it begins with. Collective.

    Args:
        resume: as in `swinv2_moe.train.run.train`.
        choice: what the configuration leaves open for a new run; None: nothing.
        began: when the program began, in seconds since 1970.

    Raises:
        UserError: on every rank, if the weights, the teacher or the pictures cannot be used.
    """
    config = resolve_batch_size(config, world.size)
    source = find_start(Path(config.OUTPUT), resume, world)
    if source is None and config.MODEL.UPCYCLE == "run":
        train = config.TRAIN
        source = find_dense(config.MODEL.PRETRAINED, train.EPOCHS, train.MAX_STEPS, world)
    amp_enable, notes = usable_amp(config.AMP_ENABLE, config.AMP_DTYPE, world)
    distill = config.TRAIN.DISTILL
    if choice is None or source is not None:
        config, lines = as_trained(config, source, world)
        teacher = open_teacher(distill.TEACHER, distill.IMG_SIZE, world)
        sections = all_sections(config, amp_enable)
        sources = world.on_every_rank(lambda: _pictures(sections.data, distill.CLASSES, teacher))
        return Start(sections, source, teacher, sources, None, lines + notes)
    workers = decide_workers(world, choice.given)  # before the first loader
    decided = values_of(workers)
    if world.device.type != "cpu" and "TRAIN.MINUTES" not in choice.given:
        decided["TRAIN.MINUTES"] = 0.0
    if world.size > 1 and "TRAIN.ON_ALL" not in choice.given:
        decided["TRAIN.ON_ALL"] = False  # it has no effect
    tried = [
        as_trained(changed(config, decided | size), None, world) for size in choice.sizes or [{}]
    ]
    candidates = [all_sections(one, amp_enable) for one, _ in tried]
    # before the trial steps, which take time, and the memory that the teacher leaves free
    teacher = open_teacher(distill.TEACHER, distill.IMG_SIZE, world)
    first = candidates[0].data
    sources = world.on_every_rank(lambda: _pictures(first, distill.CLASSES, teacher))
    best, probe = 0, None
    if choice.sizes:
        best, probe, found = choose_size(candidates, sources, world, choice.trained)
        _show(found, world)
    config, lines = tried[best]
    trial = Trial(candidates[best], sources, world)
    decisions = workers + trial.decide_batch(choice.largest_batch)
    config = changed(config, values_of(decisions))
    sections = all_sections(config, amp_enable)
    trial = Trial(sections, sources, world)
    times = trial.times()
    if sections.train.probe and world.size == 1:
        known = probe
        model, probe, _ = starting_model(sections, sources, world, known=known)
        assert probe is not None
        if known is None:
            _show([f"a linear classifier on the frozen network: {probe.classifier}"], world)
        elapsed = time.time() - began
        rates, found = decide_rate(sections, sources, model, times, elapsed, choice.given)
        _show(found, world)
        decisions += rates
        del model
    elapsed = world.agree(time.time() - began)
    length, seconds = trial.decide_length(times, elapsed, choice.given)
    decisions += length
    sections = all_sections(changed(config, values_of(decisions)), amp_enable)
    expected = f"expected duration: {in_words(seconds)}"
    if teacher is not None:
        expected += ", and the time of the teacher, which is not tried"
    lines = [*lines, *notes, *map(str, decisions), expected]
    return Start(sections, None, teacher, sources, probe, lines)


def _show(lines: list[str], world: World) -> None:
    if world.is_main:
        print_lines(*lines, flush=True)


def _pictures(config: DataConfig, classes: str, teacher: Teacher | None) -> Sources:
    """The pictures, with the classes that they are trained with.

    Args:
        classes: the value of TRAIN.DISTILL.CLASSES.
    """
    sources = load_sources(config)
    if teacher is None:
        return sources
    if classes == "teacher":
        return teacher.relabel(sources)
    if sources.class_names != teacher.class_names:
        teacher.numbers(sources.class_names)
    return sources
