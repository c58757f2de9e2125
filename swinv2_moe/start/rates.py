"""The learning rate of a training that starts from a fitted classifier, found by brief trainings.

One rate fits nobody: with the rate at which drawn letters gain most, photographs of flowers lose.
"""

from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import replace

from swinv2_moe.config import AllSections
from swinv2_moe.data.build import Data, build_data
from swinv2_moe.data.sources import Sources
from swinv2_moe.models import MoEModel
from swinv2_moe.ranks.world import World
from swinv2_moe.start.defaults import Decision
from swinv2_moe.start.trial import Times
from swinv2_moe.train.evaluation import evaluate
from swinv2_moe.train.section import TrainConfig
from swinv2_moe.train.step import TrainingStep

FACTORS = (0.3, 1.0, 3.0)  # times TRAIN.BASE_LR
_EPOCHS = 3  # of each brief training
_LEAST_PICTURES = 20  # held out; fewer say nothing about a rate
_CLEARLY = 0.02  # the share of the log loss by which another rate must be better
_SHARE = 0.2  # of the time that is left, for all of them
_RATES = ("BASE_LR", "WARMUP_LR", "MIN_LR")  # of TRAIN


def decide_rate(
    sections: AllSections,
    sources: Sources,
    model: MoEModel,
    times: Times,
    elapsed: float,
    given: Collection[str] = (),
) -> tuple[list[Decision], list[str]]:
    """The rate after whose brief training the log loss of the held-out pictures is lowest, and
    lines about the rates. Nothing where a fifth of the time that is left does not suffice, or
    fewer than 20 pictures are held out.

    Args:
        model: the start of each training, on one process; it loses its weights.
        elapsed: seconds since the program began.
        given: keys that the user has set, which stay as they are.
    """
    epochs = _EPOCHS
    if sections.train.minutes:
        left = _SHARE * (60 * sections.train.minutes - elapsed) / len(FACTORS)
        epochs = min(epochs, int((left - times.validation) / (times.step * times.steps)))
    if "TRAIN.BASE_LR" in given or epochs < 1 or len(sources.val) < _LEAST_PICTURES:
        return [], []
    world = World(0, 1, next(model.parameters()).device)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    brief = replace(sections.train, epochs=epochs, warmup_epochs=0, compile=False, graph=False)
    losses = {}
    with closing(build_data(sections.data, sources=sources)) as data:
        for factor in FACTORS:
            model.load_state_dict(start)
            named = {key.lower(): factor * getattr(brief, key.lower()) for key in _RATES}
            step = train_epochs(replace(brief, **named), model, data, epochs, world)
            accuracy = evaluate(step.deployed, data.val_loader, world, step.autocast)
            losses[factor] = accuracy.calibrated  # log loss at its best temperature
            del step  # its moments, before those of the next
    best = min(losses, key=lambda factor: losses[factor])
    if losses[best] > (1 - _CLEARLY) * losses[1.0]:
        best = 1.0
    lines = [
        f"learning rates, epochs of each: {epochs}, on {data.val_size:,} held-out pictures:",
        *(
            f"  TRAIN.BASE_LR {factor * sections.train.base_lr:.2g}: log loss {loss:.2f}"
            for factor, loss in losses.items()
        ),
    ]
    keys = {f"TRAIN.{key}": best * getattr(sections.train, key.lower()) for key in _RATES}
    chosen = {key: float(f"{rate:.2g}") for key, rate in keys.items() if key not in given}
    return [Decision(chosen, "the best of those that were tried briefly")], lines


def train_epochs(
    config: TrainConfig,
    model: MoEModel,
    data: Data,
    epochs: int,
    world: World,
    after_step: Callable[[], None] = lambda: None,
) -> TrainingStep:
    """Train the first `epochs` of the configured schedule, without validation and records."""
    step = TrainingStep(config, world, model, data.num_classes)
    steps = len(data.train_loader) // config.accumulation_steps
    schedule = step.schedule(steps)
    number = 0
    for epoch in range(epochs):
        data.set_epoch(epoch)
        step.train()
        batches = iter(data.train_loader)
        for _ in range(steps):
            step.run([next(batches) for _ in range(config.accumulation_steps)], number)
            number += 1
            schedule.step_update(number)
            after_step()
    return step
