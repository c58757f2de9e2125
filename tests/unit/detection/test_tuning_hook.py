"""What a detector's tuners decide is logged, and their times are recorded."""

from types import SimpleNamespace

import pytest

pytest.importorskip("mmdet", reason="needs the detection extra: make detection")

from swinv2_moe.detection.tuning import TuningHook


def test_decisions_are_logged_and_times_recorded():
    decided = {"event": "decided", "layers": "M=8", "from": None, "to": "r=0", "ms": 2.5}
    steps, lines, scalars = [], [], []

    def after_step(step: int) -> list[dict]:
        steps.append(step)
        return [decided, decided | {"event": "time", "ms": 2.0}]

    hook = TuningHook()
    hook.tuning = SimpleNamespace(after_step=after_step, take_events=lambda: [decided])
    runner = SimpleNamespace(
        iter=9,
        logger=SimpleNamespace(info=lines.append),
        visualizer=SimpleNamespace(add_scalar=lambda *point: scalars.append(point)),
    )
    hook.after_train_iter(runner, 0)
    hook.after_val_epoch(runner)
    assert steps == [10]
    assert lines == ["M=8: decided: None -> r=0, 2.5 ms"] * 2
    assert scalars == [("strategy_ms/M=8", 2.0, 10)]
