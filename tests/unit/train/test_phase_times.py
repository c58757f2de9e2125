"""Each moment of a run belongs to one phase."""

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swinv2_moe.train import progress
from swinv2_moe.train.progress import PHASES, PhaseTimes, accounted_share


def test_a_phase_inside_another_interrupts_it(clock):
    times = PhaseTimes()
    clock.append(3)
    times.started()
    clock.append(1)
    with times.phase("training"):
        clock.append(10)
        with times.phase("data"):
            clock.append(4)
        clock.append(20)
    clock.append(2)
    expected = {"start": 3, "data": 4, "training": 30, "other": 3}
    assert times.seconds() == dict.fromkeys(PHASES, 0) | expected


def test_an_error_ends_its_phase(clock):
    times = PhaseTimes()
    times.started()

    def fail() -> None:
        with times.phase("validation"):
            clock.append(1)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    clock.append(5)
    assert (times.seconds()["validation"], times.seconds()["other"]) == (1, 5)


def test_what_happened_before_is_the_start(clock, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1100.0)
    assert PhaseTimes(began=1000.0).seconds()["start"] == 100
    assert PhaseTimes(began=1200.0).seconds()["start"] == 0  # a clock that was set


def test_the_parts_of_a_run_add_up(clock):
    times = PhaseTimes()
    clock.append(2)
    times.load({"start": 5, "training": 7})
    assert (times.seconds()["start"], times.seconds()["training"]) == (7, 7)


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.integers(0, 100)), max_size=20))
def test_nothing_is_counted_twice_or_lost(steps):
    with pytest.MonkeyPatch.context() as patch:
        passed = [0]
        patch.setattr(progress.time, "perf_counter", lambda: sum(passed))
        times = PhaseTimes()
        for name, seconds in steps:
            with times.phase(name):
                passed.append(seconds)
        assert sum(times.seconds().values()) == sum(passed)
        for name in PHASES:
            assert times.seconds()[name] == sum(s for other, s in steps if other == name)


def test_another_thread_may_read():
    times = PhaseTimes()
    totals = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            totals.append(sum(times.seconds().values()))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(2000):
        with times.phase("data"):
            pass
    done.set()
    reader.join()
    assert totals == sorted(totals)


def test_the_share_that_is_accounted_for():
    assert accounted_share({"training": 19, "other": 1}) == 0.95
    assert accounted_share({}) == 1
