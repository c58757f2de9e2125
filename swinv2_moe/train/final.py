"""The last training of a run on a folder: the same again, on all pictures.

A share of the folder is held out, which tells how good the model is and which of its states is the
best. Then these pictures are trained on, too. The accuracy that is shown stays that of the run.
"""

import shutil
from contextlib import closing
from pathlib import Path

import numpy as np

from swinv2_moe.checkpoints.checkpoint import FINAL, open_checkpoint, write_weights
from swinv2_moe.data.build import Data, build_data
from swinv2_moe.data.sources import ImageFiles, Sources
from swinv2_moe.start.frozen import starting_model
from swinv2_moe.start.rates import train_epochs
from swinv2_moe.train.loop import Trainer


def train_on_all(trainer: Trainer, root: Path) -> list[str]:
    """Train on all pictures as long as the best model was trained, and write the weights to
    `root`/final. One process. Returns lines about it; none if the pictures are no files.

    Raises:
        Stopped: the run was told to stop; nothing is written.
        UserError: a loss is not finite, or the weights cannot be written.
    """
    config, data, world = trainer.config, trainer.data, trainer.world
    sources = all_pictures(data)
    if sources is None:
        return []
    model, *_ = starting_model(config, sources, world)
    epochs = trainer.progress.best_epoch
    if epochs:
        with closing(build_data(config.data, sources=sources)) as loaders:
            model = train_epochs(
                config.train, model, loaders, epochs, world, trainer.check_stop
            ).deployed
    # measured of pictures that the best model has not seen; this one has
    best = open_checkpoint(root / "best").meta
    temperature, novelty = best.get("temperature", 1.0), best.get("novelty")
    target = root / FINAL
    shutil.rmtree(target, ignore_errors=True)  # of the run before it was continued
    step, names = trainer.progress.step, data.class_names
    write_weights(target, model, model.state_dict(), config.yaml, names, step, temperature, novelty)
    how = f"{epochs} epochs" if epochs else "the classifier alone"
    return [
        f"{target}: trained on all {len(sources.train):,} pictures ({how}), for predict and export;"
        " its accuracy is not measured, that of the run is of fewer pictures"
    ]


def all_pictures(data: Data) -> Sources | None:
    """The pictures of both splits to train on; None if they are no files of one folder."""
    train, held_out = data.train_loader.dataset.source, data.val_loader.dataset.source
    if not isinstance(train, ImageFiles) or not isinstance(held_out, ImageFiles):
        return None
    if train.root != held_out.root:
        return None
    paths = np.concatenate([train.paths, held_out.paths])
    targets = np.concatenate([train.targets, held_out.targets])
    return Sources(ImageFiles(train.root, paths, targets), held_out, data.class_names)
