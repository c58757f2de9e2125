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
from swinv2_moe.data.sources import Sources, load_sources
from swinv2_moe.output import print_lines
from swinv2_moe.ranks.precision import without_slow_amp
from swinv2_moe.ranks.world import World
from swinv2_moe.start.defaults import Choice, values_of
from swinv2_moe.start.frozen import Probe, choose_size, start_from_probe
from swinv2_moe.start.initial import as_trained, starting_point
from swinv2_moe.start.rates import decide_rate
from swinv2_moe.start.teacher import Teacher, open_teacher
from swinv2_moe.start.trial import decide_batch, decide_length, measure_times
from swinv2_moe.tables import in_words


class Start(NamedTuple):
    """What a run begins with.

    Attributes:
        source: the checkpoint that it continues from, if any.
        teacher: that of the training, if any.
        probe: the classifier on the frozen network, if it is fitted to every training picture.
        lines: how the configuration was made whole, for the log.
    """

    sections: AllSections
    source: Checkpoint | None
    teacher: Teacher | None
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
    source = starting_point(Path(config.OUTPUT), resume, config, world)
    if choice is None or source is not None:
        config, lines = as_trained(config, source, world)
        sections, note = without_slow_amp(all_sections(config), world)
        teacher = open_teacher(sections.train.distill, world)
        return Start(sections, source, teacher, None, lines + note)
    unbounded = {"TRAIN.MINUTES": 0.0} if world.device.type != "cpu" else {}
    alone = {"TRAIN.ON_ALL": False} if world.size > 1 else {}  # it has no effect
    decided = {key: one for key, one in (unbounded | alone).items() if key not in choice.given}
    config = changed(config, decided)
    tried = [as_trained(changed(config, size), None, world) for size in choice.sizes or [{}]]
    candidates = [without_slow_amp(all_sections(one), world) for one, _ in tried]
    sections, note = candidates[0]
    # before the trial steps, which take time, and the memory that the teacher leaves free
    teacher = open_teacher(sections.train.distill, world)
    sources = world.on_every_rank(lambda: _pictures(sections, teacher))
    best, probe = 0, None
    if choice.sizes:
        to_try = [one for one, _ in candidates]
        best, probe, found = choose_size(to_try, sources, world, choice.trained)
        _show(found, world)
    config, lines = tried[best]
    lines = lines + note
    decisions = decide_batch(
        candidates[best][0], sources, choice.largest_batch, world, choice.given
    )
    config = changed(config, values_of(decisions))
    sections, _ = without_slow_amp(all_sections(config), world)
    times = measure_times(sections, sources, world)
    if sections.train.probe and world.size == 1:
        known = probe
        model, probe = start_from_probe(sections, sources, world, known=known)
        if known is None:
            _show([f"a linear classifier on the frozen network: {probe.classifier}"], world)
        elapsed = time.time() - began
        rates, found = decide_rate(sections, sources, model, times, elapsed, choice.given)
        _show(found, world)
        decisions += rates
        config = changed(config, values_of(rates))
        del model
    elapsed = world.agree(time.time() - began)
    length, seconds = decide_length(sections, times, elapsed, choice.given)
    config = changed(config, values_of(length))
    expected = f"expected duration: {in_words(seconds)}"
    if teacher is not None:
        expected += ", and the time of the teacher, which is not tried"
    sections, _ = without_slow_amp(all_sections(config), world)
    lines += [*map(str, decisions + length), expected]
    return Start(sections, None, teacher, probe, lines)


def _show(lines: list[str], world: World) -> None:
    if world.is_main:
        print_lines(*lines, flush=True)


def _pictures(sections: AllSections, teacher: Teacher | None) -> Sources:
    """The pictures, with the classes that they are trained with."""
    sources = load_sources(sections.data)
    if teacher is None:
        return sources
    if sections.train.distill.classes == "teacher":
        return teacher.relabel(sources)
    if sources.class_names != teacher.class_names:
        teacher.numbers(sources.class_names)
    return sources
