"""Hooks of mmengine's runner: checkpoints in the per-expert store, and the tuners of MoE layers."""

from pathlib import Path

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from moe_core import moe_layers, strategy_decisions
from swinv2_moe.checkpoints.saver import Saver
from swinv2_moe.detection.weights import sharded_experts
from swinv2_moe.files import read_json, replace_link, write_json
from swinv2_moe.forms import NUMBER, RELATIVE_PATH, record
from swinv2_moe.ranks.world import World
from swinv2_moe.train.optim import optimizer_sections
from swinv2_moe.train.tuning import Tuning

_RECORD = record({"score": NUMBER}, {"checkpoint": RELATIVE_PATH})
_MAX_RECORD = 1 << 20  # bytes


@HOOKS.register_module()
class ExpertStoreHook(Hook):
    """Writes `<work_dir>/checkpoints/step-<iteration>`, `latest` and `best`.

    docs/reference/checkpoints.md describes them. If the experts are distributed, each rank writes
    its experts; otherwise only the main rank writes.

    Args:
        interval: epochs or iterations between checkpoints.
        by_epoch: `interval` counts epochs; False: iterations.
        keep_last: number of newest checkpoints to keep, besides `best`.
        save_best: the metric of `best`, where larger is better. None: no `best`.
    """

    priority = "VERY_LOW"

    def __init__(
        self,
        interval: int = 1,
        by_epoch: bool = True,
        keep_last: int = 1,
        save_best: str | None = None,
    ) -> None:
        self.interval = interval
        self.by_epoch = by_epoch
        self.keep_last = keep_last
        self.save_best = save_best
        self.saver: Saver | None = None

    def before_train(self, runner: Runner) -> None:
        world = runner.world
        # all ranks have all experts: the main rank writes in the same way as a single process
        if not sharded_experts(runner.detector):
            world = World(world.rank, 1, world.device)
        if world.is_main or world.size > 1:
            root = Path(runner.work_dir) / "checkpoints"
            root.mkdir(parents=True, exist_ok=True)
            self.saver = Saver(root, world, self.keep_last, runner.source, runner.logger.info)
            self.config = runner.cfg.pretty_text  # once: formatting it takes a second

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch=None, outputs=None
    ) -> None:
        due = self.every_n_train_iters(runner, self.interval) or self.is_last_train_iter(runner)
        if not self.by_epoch and due:
            self._save(runner, runner.epoch, runner.iter + 1)

    def after_train_epoch(self, runner: Runner) -> None:
        if self.by_epoch and (
            self.every_n_epochs(runner, self.interval) or self.is_last_train_epoch(runner)
        ):
            self._save(runner, runner.epoch + 1, runner.iter)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Point `best` at the newest checkpoint if its score is the best so far. Checkpoints are
        saved before the validation."""
        score = None
        if metrics and self.save_best:
            score = metrics.get(self.save_best)
        if score is None or self.saver is None or not self.saver.world.is_main:
            return
        self.saver.wait()
        root, newest = self.saver.root, self.saver.previous
        file = root / "best.json"
        best = None
        if (root / "best").is_symlink():
            best = _best_score(file, runner)
        if newest is not None and (best is None or score > best):
            name = newest.directory.name
            # The link last: if the process is killed before, `_best_score` makes it.
            write_json(file, {"score": score, "metric": self.save_best, "checkpoint": name})
            replace_link(root / "best", name)

    def after_train(self, runner: Runner) -> None:
        if self.saver is not None:
            self.saver.close()

    def _save(self, runner: Runner, epoch: int, iteration: int) -> None:
        if self.saver is None:
            return
        model, wrapper = runner.detector, runner.optim_wrapper
        sections = {"": model.state_dict(), **optimizer_sections(wrapper.optimizer, model)}
        training = {
            "epoch": epoch,
            "iter": iteration,
            "loss_scaler": wrapper.scaler.state(),
            "param_groups": [_plain(group) for group in wrapper.param_groups],
            "param_schedulers": [
                _plain(scheduler.state_dict()) for scheduler in runner.param_schedulers or []
            ],
            "strategies": strategy_decisions(model),
        }
        layers = moe_layers(model)
        meta = {
            "step": iteration,
            "training": training,
            "config": self.config,
            "backbone_windows": model.backbone.trunk.position_windows(),
            "class_names": list(
                (runner.train_dataloader.dataset.metainfo or {}).get("classes", [])
            ),
            "experts": {
                name: [iteration] * layer.config.num_experts for name, layer in layers.items()
            },
        }
        self.saver.save(model, sections, meta)


def _best_score(file: Path, runner: Runner) -> float | None:
    """The score of the best checkpoint so far, to which the link `best` then leads. None if
    best.json is missing, or is damaged; damage is logged."""
    try:
        content = read_json(file, _MAX_RECORD)
        _RECORD(content, "")
        link, name = file.with_name("best"), content.get("checkpoint", "best")
        if name != "best" and link.resolve() != link.with_name(name).resolve(strict=True):
            replace_link(link, name)
        return content["score"]
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        runner.logger.warning(
            f"{file} cannot be read, the next checkpoint becomes the best one: {error}"
        )
        return None


def _plain(values: dict) -> dict:
    """The values that JSON can represent without a change."""
    kinds = int | float | str | list | None
    return {
        key: value for key, value in values.items() if key != "params" and isinstance(value, kinds)
    }


class TuningHook(Hook):
    """Logs what the tuners decide: nothing unless the backbone's `expert_strategy` is "auto" on
    several processes."""

    def before_run(self, runner: Runner) -> None:
        self.tuning = Tuning(runner.detector)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch=None, outputs=None
    ) -> None:
        self._record(runner, self.tuning.take_events())

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self._record(runner, self.tuning.take_events())

    def after_test_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self._record(runner, self.tuning.take_events())

    def _record(self, runner: Runner, events: list[dict]) -> None:
        for event in events:
            runner.logger.info(f"{event['layers']}: {event['to']}, {event['ms']} ms")
