"""Training, evaluation and use of vision models with mixtures of experts.

>>> import swinv2_moe
>>> model = swinv2_moe.load("output/mine")
>>> model.predict("dog.jpg")[0].class_name
'dog'

timm knows the models, whether it is imported before or after this package.
"""

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swinv2_moe.predict.predictor import Predictor

__all__ = ["fit", "load"]


def fit(
    data: str, output: str | None = None, opts: "list[str] | tuple[str, ...]" = ()
) -> "Predictor":
    """Fine-tune a model on a folder of pictures, as `swinv2-moe train --data` does.

    Args:
        data: the folder: `train/` and `val/` with a folder for each class, `train/` alone, or
            folders of classes.
        output: the run directory, which must not hold a run; None: `output/` and the name of
            `data`.
        opts: KEY VALUE pairs that override what is chosen.

    Returns:
        The best model in validation, as `load` returns it.

    Raises:
        swinv2_moe.errors.UserError: pictures or weights that cannot be used, too little memory for
            one picture, or as `load`.
        KeyboardInterrupt: the training was told to stop, and has saved its state.
    """
    from swinv2_moe.output import print_lines
    from swinv2_moe.train.defaults import choose

    choice = choose(data, opts, output)
    print_lines(*choice.lines, flush=True)
    from swinv2_moe.train.run import train

    config = choice.config
    continuation = f"swinv2-moe train {config.OUTPUT}"
    if train(config, None, continuation, largest_batch=choice.largest_batch) is None:
        raise KeyboardInterrupt
    return load(config.OUTPUT, config.DEVICE)


def load(
    run: str,
    device: str = "auto",
    opts: "list[str] | tuple[str, ...]" = (),
    checkpoint: str = "best",
) -> "Predictor":
    """A trained model that predicts the classes of pictures.

    Args:
        run: a run directory, a checkpoint, or "tiny", the model of this package.
        device: "auto", "cpu" or "cuda".
        opts: KEY VALUE pairs that override the checkpoint's configuration.
        checkpoint: the checkpoint of a run: "best", "latest" or the number of a step.

    Raises:
        swinv2_moe.errors.UserError: there is no complete checkpoint, or it cannot be used.
    """
    # Not imported with the package: importing torch and timm takes seconds.
    from swinv2_moe.predict.predictor import load_predictor

    return load_predictor(run, checkpoint, ["DEVICE", device, *opts])


class _AfterTimm(MetaPathFinder):
    """Registers the models with timm as soon as timm has been imported.

    The package does not import timm itself: that takes seconds, and commands need the package to
    answer at once.
    """

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        if name != "timm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("timm")
        if spec is not None and spec.loader is not None:
            load_timm = spec.loader.exec_module

            def load_and_register(module) -> None:
                load_timm(module)
                # A module of ours that imports timm is not ready yet. `models.build`, which
                # whoever builds a model imports, registers then.
                ours = {name for name in sys.modules if name.startswith("swinv2_moe.models.")}
                if ours <= {"swinv2_moe.models.section", "swinv2_moe.models.bundled"}:
                    importlib.import_module("swinv2_moe.models.api")

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


if "timm" in sys.modules:
    importlib.import_module("swinv2_moe.models.api")
else:
    sys.meta_path.insert(0, _AfterTimm())
