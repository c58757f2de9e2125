"""The tuners of a detector's MoE layers, in mmengine's runner."""

from mmengine.hooks import Hook
from mmengine.runner import Runner

from swinv2_moe.train.schedules import Tuning


class TuningHook(Hook):
    """Checks the tuners' decided strategies every few iterations, and logs what they decide.

    Forward times go to the visualizer as `strategy_ms/...`. It does nothing unless the backbone's
    `expert_strategy` is "auto" on several processes.
    """

    def before_run(self, runner: Runner) -> None:
        self.tuning = Tuning(runner.detector)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch=None, outputs=None
    ) -> None:
        self._record(runner, self.tuning.after_step(runner.iter + 1))

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self._record(runner, self.tuning.take_events())

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self._record(runner, self.tuning.take_events())

    def _record(self, runner: Runner, events: list[dict]) -> None:
        for event in events:
            if event["event"] == "time":
                name = f"strategy_ms/{event['layers']}"
                runner.visualizer.add_scalar(name, event["ms"], runner.iter + 1)
            else:
                runner.logger.info(
                    f"{event['layers']}: {event['event']}: {event['from']} -> {event['to']},"
                    f" {event['ms']} ms"
                )
