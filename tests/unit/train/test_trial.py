"""Trial steps before a training: the largest batch that fits into memory, and what memory is
free."""

import mmap
import os
import time
from dataclasses import replace

import pytest
import torch

from swinv2_moe.config import all_sections
from swinv2_moe.data.sources import Sources, load_sources
from swinv2_moe.errors import UserError
from swinv2_moe.ranks.environment import peak_memory
from swinv2_moe.ranks.world import World
from swinv2_moe.start import trial, whole
from swinv2_moe.start.defaults import Choice
from swinv2_moe.start.trial import (
    Times,
    Trial,
    _Plan,
    free_memory,
    largest_fitting,
)
from swinv2_moe.start.whole import complete
from swinv2_moe.train.step import TrainingStep

CPU = torch.device("cpu")


def linear(size: int) -> int:
    return 100 * size


@pytest.mark.parametrize(("free", "fitting"), [(10**6, 32), (2000, 16), (999, 4), (124, 0)])
def test_it_doubles_while_memory_may_suffice(free, fitting):
    """A step may take four fifths of the free memory, and one that would take more is not tried."""
    tried = []

    def peak_of(size: int) -> int:
        tried.append(size)
        return linear(size)

    assert largest_fitting(peak_of, 32, free) == fitting
    assert all(linear(size) <= 0.8 * free for size in tried[1:])


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory"
        ),
    ],
)
def test_full_memory_ends_the_search(error):
    def peak_of(size: int) -> int:
        if size > 4:
            raise error
        return 0

    assert largest_fitting(peak_of, 32, 10**9) == 4


def test_another_error_is_not_taken_for_full_memory():
    def peak_of(size: int) -> int:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        largest_fitting(peak_of, 32, 10**9)


def test_as_many_epochs_as_fit_into_the_minutes():
    """Epochs of 10 s with 1 s of validation every second one; those that are given stay."""
    plan = _Plan(epochs=20, warmup_epochs=4, max_steps=0, val_freq=2)
    times = Times(step=1.0, validation=1.0, steps=10)
    assert plan.seconds(times, probe=False) == 20 * 10 + 10
    fitted = plan.within(90.0, times, ())
    assert fitted == _Plan(8, 4, 0, 2)
    assert fitted.seconds(times, probe=False) <= 90
    assert plan.within(90.0, times, {"TRAIN.EPOCHS"}) == plan
    long = Times(step=1.0, validation=1.0, steps=1000)
    assert plan.within(90.0, long, ()) == _Plan(1, 0, 89, 2)


def completed(config, choice: Choice, world: World | None = None) -> whole.Start:
    return complete(config, None, choice, world or World(0, 1, CPU), began=time.time())


def open_choice(config, largest: int = 0, given: set[str] | None = None) -> Choice:
    return Choice(config, [], largest, [], 0, frozenset(given or ()))


def test_the_minutes_bound_a_run(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(Trial, "times", lambda *_: Times(1.0, 0.0, 10))
    config = make_config(tmp_path, {"TRAIN.EPOCHS": 99, "TRAIN.MINUTES": 2})
    start = complete(config, None, open_choice(config), World(0, 1, CPU), time.time() - 30.0)
    assert 1 <= start.sections.train.epochs <= 9  # 90 s, less what this took
    assert any(line.endswith("as many as fit into TRAIN.MINUTES") for line in start.lines)
    assert f"EPOCHS: {start.sections.train.epochs}" in start.sections.yaml
    config = make_config(tmp_path, {"TRAIN.EPOCHS": 99, "TRAIN.MINUTES": 0})
    start = completed(config, open_choice(config))
    assert start.sections.train.epochs == 99


def test_a_gpu_has_no_limit_of_its_own(make_config, tmp_path, monkeypatch):
    config = make_config(tmp_path, {"TRAIN.MINUTES": 10})
    monkeypatch.setattr(Trial, "decide_batch", lambda *_: [])
    monkeypatch.setattr(Trial, "times", lambda *_: Times(1.0, 1.0, 1))
    gpu, cpu = (World(0, 1, torch.device(kind)) for kind in ("cuda", "cpu"))
    limits = [
        completed(config, open_choice(config, given=given), world).sections.train.minutes
        for given, world in ((None, gpu), ({"TRAIN.MINUTES"}, gpu), (None, cpu))
    ]
    assert limits == [0, 10, 10]


def test_the_batch_and_the_duration_of_a_run(make_config, tmp_path):
    """The batch of digits is the limit; the lines say it and how long the training takes."""
    config = make_config(tmp_path)
    start = completed(config, open_choice(config, 16))
    assert start.sections.data.batch_size == start.sections.train.batch_size == 16
    assert any("DATA.BATCH_SIZE 16" in line for line in start.lines)
    assert start.lines[-1].startswith("expected duration: ")
    start = completed(config, open_choice(config))
    assert start.sections.data.batch_size == config.DATA.BATCH_SIZE
    assert not any("BATCH_SIZE" in line for line in start.lines)


def test_as_many_workers_as_cores(make_config, tmp_path, monkeypatch):
    """Before the first loader: torch warns of more."""
    cores = 3
    monkeypatch.setattr(trial, "available_cores", lambda: cores)
    config = make_config(tmp_path)
    start = completed(config, open_choice(config))
    assert start.sections.data.num_workers == cores
    assert "  DATA.NUM_WORKERS 3: one for each core, at most 8" in start.lines
    cores = 99
    [decision] = trial.decide_workers(World(0, 1, CPU), ())
    assert decision.values == {"DATA.NUM_WORKERS": 8}
    start = completed(config, open_choice(config, given={"DATA.NUM_WORKERS"}))
    assert start.sections.data.num_workers == config.DATA.NUM_WORKERS


def test_the_last_training_is_a_part_of_the_minutes(make_config, tmp_path):
    """On five quarters of the pictures: 100 s are 44 s and 55 s."""
    keys = {"TRAIN.EPOCHS": 999, "TRAIN.MINUTES": 100 / 60, "TRAIN.ON_ALL": True}
    sections = all_sections(make_config(tmp_path, keys | {"DATA.VAL_SPLIT": 0.0}))
    sections = replace(sections, data=replace(sections.data, val_split=0.2))
    sources = load_sources(sections.data)
    trial = Trial(sections, sources, World(0, 1, CPU))
    [decision], seconds = trial.decide_length(Times(1.0, 0.0, 1), elapsed=0.0)
    assert decision.values["TRAIN.EPOCHS"] == 44
    assert seconds == pytest.approx(44 * 2.25)


class TeacherOfLetters:
    class_names = ("a", "b")

    def numbers(self, names: list[str]) -> list[int]:
        raise UserError(f"does not know {names[0]}")

    def relabel(self, sources: Sources) -> Sources:
        return Sources(sources.train, sources.val, [str(number) for number in range(300)])


def test_a_teacher_is_asked_for_the_classes_before_any_step(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "TrainingStep", None)
    monkeypatch.setattr(whole, "open_teacher", lambda *_: TeacherOfLetters())
    config = make_config(tmp_path)
    with pytest.raises(UserError, match="does not know 0"):
        completed(config, open_choice(config, 16))


def test_the_trial_has_the_classes_of_the_training(make_config, tmp_path, monkeypatch):
    config = make_config(tmp_path, {"TRAIN.DISTILL.CLASSES": "teacher"})
    tried = []

    def step_of(trial: Trial, classes: int) -> TrainingStep:
        tried.append(classes)
        return usual(trial, classes)

    usual = Trial.step
    monkeypatch.setattr(Trial, "step", step_of)
    monkeypatch.setattr(whole, "open_teacher", lambda *_: TeacherOfLetters())
    lines = completed(config, open_choice(config, 16)).lines
    assert set(tried) == {300}
    assert lines[-1].endswith(", and the time of the teacher, which is not tried")


class WithSmallerRank(World):
    """The first of two ranks; the memory of the other one is full with four pictures."""

    def gather(self, value: object) -> list:
        return [value, 2 if isinstance(value, int) else value]

    def on_every_rank(self, load):
        return load()


def test_the_rank_with_the_least_memory_decides(make_config, tmp_path):
    config = make_config(tmp_path)
    start = completed(config, open_choice(config, 16), WithSmallerRank(0, 2, CPU))
    assert start.sections.data.batch_size == 2
    line = "  DATA.BATCH_SIZE 2: twice as many pictures might not fit into memory"
    assert line in start.lines


def test_a_batch_of_one_is_not_mixed(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "largest_fitting", lambda *_: 1)
    config = make_config(tmp_path, {"AUG.CUTMIX": 0.5})
    start = completed(config, open_choice(config, 16))
    assert (start.sections.data.batch_size, start.sections.train.augment.cutmix) == (1, 0)
    assert "  AUG.MIXUP 0.0, AUG.CUTMIX 0.0: one picture cannot be mixed" in start.lines
    config = make_config(tmp_path)
    lines = completed(config, open_choice(config, 16)).lines
    assert not any("MIXUP" in line for line in lines)


def test_too_little_memory_for_one_picture(make_config, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "free_memory", lambda device: 1000)
    monkeypatch.setattr(trial, "peak_memory", lambda device: 2**50)
    config = make_config(tmp_path)
    with pytest.raises(UserError, match=r"a batch of 1 picture of 16 px does not fit .* GiB"):
        completed(config, open_choice(config, 16))


def test_a_container_has_less_memory_than_its_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(trial, "_CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.stat").write_text("anon 50\ninactive_file 200\nactive_file 20\n")
    assert free_memory(torch.device("cpu")) > 1000
    (tmp_path / "memory.max").write_text("1000\n")
    assert free_memory(torch.device("cpu")) == 920  # the cache of files gives way
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert free_memory(torch.device("cpu")) == 230


@pytest.mark.skipif(not os.access(trial._PEAK, os.W_OK), reason="needs Linux")
def test_an_earlier_peak_does_not_count():
    """A process that once had much memory does not take a step for larger than it is."""
    device = torch.device("cpu")
    with mmap.mmap(-1, 300 << 20) as memory:  # a tensor's memory may stay with the process
        memory.write(bytes(300 << 20))
    assert peak_memory(device) - trial._used_memory(device) > 200 << 20
    trial._free_memory(device)
    assert peak_memory(device) - trial._used_memory(device) < 100 << 20


@pytest.mark.parametrize("accumulation", [3, 5])
def test_the_duration_with_accumulation(make_config, tmp_path, accumulation):
    """Of 5 batches an epoch: one step, also where some are left over."""
    config = make_config(tmp_path, {"TRAIN.ACCUMULATION_STEPS": accumulation})
    lines = completed(config, open_choice(config)).lines
    assert lines[-1].startswith("expected duration: ")


def test_more_accumulation_than_batches(make_config, tmp_path):
    config = make_config(tmp_path, {"TRAIN.ACCUMULATION_STEPS": 6})
    with pytest.raises(UserError, match=r"TRAIN.ACCUMULATION_STEPS is 6, an epoch has only"):
        completed(config, open_choice(config))


def test_trial_steps_do_not_learn(make_config, tmp_path):
    """A learning rate at which the loss would not stay finite without a warm-up."""
    config = make_config(tmp_path, {"TRAIN.BASE_LR": 1e30})
    completed(config, open_choice(config))
