"""Signals that make a run save and end, and those that end it at once."""

import signal

import pytest

from swinv2_moe.ranks import world as world_module
from swinv2_moe.ranks.world import StopSignal


@pytest.fixture
def clock(monkeypatch):
    """`clock.append(seconds)`: time passes."""
    passed = []
    monkeypatch.setattr(world_module.time, "monotonic", lambda: sum(passed, 100.0))
    return passed


@pytest.fixture
def ended(monkeypatch):
    """The signals that would have ended this process, and what handled them then."""
    found = []
    monkeypatch.setattr(
        world_module.signal, "raise_signal", lambda n: found.append((n, signal.getsignal(n)))
    )
    return found


def deliver(number: int) -> None:
    """What a signal does, without one: its handler is called."""
    signal.getsignal(number)(number, None)


def test_the_first_signal_counts_and_handlers_come_back():
    before = {number: signal.getsignal(number) for number in StopSignal.SIGNALS}
    with StopSignal() as stop:
        assert stop.received is None
        deliver(signal.SIGUSR1)
        deliver(signal.SIGTERM)
    assert stop.received == "SIGUSR1"
    assert {number: signal.getsignal(number) for number in StopSignal.SIGNALS} == before


def test_a_second_interrupt_ends_the_process(clock, ended):
    with StopSignal() as stop:
        deliver(signal.SIGTERM)
        deliver(signal.SIGINT)
        clock.append(0.2)
        deliver(signal.SIGTERM)
        assert (stop.received, ended) == ("SIGTERM", [])
        deliver(signal.SIGINT)
        assert ended == [(signal.SIGINT, signal.SIG_DFL)]


def test_one_interrupt_that_is_sent_twice_is_one(clock, ended):
    with StopSignal() as stop:
        for _ in range(3):
            deliver(signal.SIGINT)
            clock.append(0.02)
    assert (stop.received, ended) == ("SIGINT", [])


def test_a_signal_that_is_ignored_stays_ignored():
    """As `nohup` and a shell's background jobs ask for."""
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with StopSignal():
            assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, before)
