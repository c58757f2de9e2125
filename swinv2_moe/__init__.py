"""Training, evaluation and use of vision models with mixtures of experts.

>>> import swinv2_moe
>>> model = swinv2_moe.load("output/mine")
>>> model.predict("dog.jpg")[0].class_name
'dog'

>>> model = swinv2_moe.add_experts(timm.create_model("vit_small_patch16_224", pretrained=True))

timm knows the models, whether it is imported before or after this package.
"""

import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swinv2_moe.detection.detector import Detector
    from swinv2_moe.models import add_experts
    from swinv2_moe.predict.predictor import Predictor
else:

    def __getattr__(name: str) -> object:  # importing torch takes seconds
        if name != "add_experts":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module("swinv2_moe.models").add_experts


__version__ = "1.0.0"

__all__ = ["add_experts", "fit", "fit_detector", "load"]


def fit(
    data: str | os.PathLike,
    output: str | os.PathLike | None = None,
    opts: Mapping[str, object] | Sequence[object] = (),
    **everyday: object,
) -> "Predictor":
    """Fine-tune a model on a folder of pictures, as `swinv2-moe train FOLDER` does.

    Args:
        data: the folder: `train/` and `val/` with a folder for each class, `train/` alone, or
            folders of classes.
        output: the run directory, which must not hold a run; None: `output/` and the name of
            `data`.
        opts: keys and values that override what is chosen: a mapping, or a sequence of KEY, VALUE,
            KEY, VALUE, ...
        everyday: the short options of `swinv2-moe train`: `epochs`, `size`, `batch`, `lr`,
            `weights`, `experts`, `minutes`, `device`.

    Returns:
        The model that was trained on all pictures, or the best in validation, as `load` returns it.

    Raises:
        TypeError: `opts` is a string, or an argument is unknown.
        swinv2_moe.errors.UserError: pictures or weights that cannot be used, too little memory for
            one picture, or as `load`.
        KeyboardInterrupt: the training was told to stop, and has saved its state.
    """
    from swinv2_moe.config import EVERYDAY, everyday_opts
    from swinv2_moe.errors import UserError
    from swinv2_moe.input_paths import check_training
    from swinv2_moe.output import print_lines
    from swinv2_moe.start.defaults import choose

    if output is not None:
        output = os.fspath(output)
    for name in everyday:
        if name not in EVERYDAY:
            raise TypeError(f"fit() has no argument {name!r}; it has {', '.join(EVERYDAY)}")
    choice = choose(os.fspath(data), everyday_opts(everyday, _pairs(opts)), output)
    config = choice.config
    continuation = shlex.join(["swinv2-moe", "train", config.OUTPUT])
    if os.path.exists(os.path.join(config.OUTPUT, "metrics.jsonl")):
        raise UserError(
            f"output {config.OUTPUT}: already holds a run; `{continuation}` continues it, another"
            " directory starts anew"
        )
    check_training(config, None)
    print_lines(*choice.lines, flush=True)
    from swinv2_moe.train.run import train

    if train(config, None, continuation, choice=choice) is None:
        raise KeyboardInterrupt
    from swinv2_moe.predict.predictor import load_predictor

    return load_predictor(config.OUTPUT, "final", ["DEVICE", config.DEVICE])


def fit_detector(
    data: str | os.PathLike, output: str | os.PathLike | None = None, **everyday: object
) -> "Detector":
    """Train a detector on a folder of labelled pictures, as `swinv2-moe detect train FOLDER` does.

    Args:
        data: the folder, with labels as COCO JSON, Pascal VOC XML or YOLO text.
        output: the run directory, which must not hold a run; None: `output/` and the name of
            `data`.
        everyday: the short options of `swinv2-moe detect train`: `epochs`, `size`, `batch`, `lr`,
            `weights`, `minutes`.

    Returns:
        The best detector in validation, as `load` returns it.

    Raises:
        TypeError: an argument is unknown.
        swinv2_moe.errors.UserError: mmdetection is not installed; pictures, labels or weights that
            cannot be used; or as `load`.
    """
    from swinv2_moe.detection.detector import load_detector
    from swinv2_moe.detection.fit import fit, parse_given

    name = None if output is None else os.fspath(output)
    return load_detector(fit(os.fspath(data), name, parse_given(everyday)))


def load(
    run: str | os.PathLike,
    device: str = "auto",
    opts: Mapping[str, object] | Sequence[object] = (),
    checkpoint: str = "final",
) -> Any:
    """A trained model that predicts the classes of pictures, or finds objects in them.

    Args:
        run: a run directory, a checkpoint, or "tiny", the model of this package. A run of a
            detector on a folder gives a detector, which takes neither `device` nor `opts`.
        device: "auto", "cpu" or "cuda".
        opts: keys and values that override the checkpoint's configuration, as in `fit`.
        checkpoint: the checkpoint of a run: "final", which was trained on all pictures, or the best
            where there is none; "best", "latest" or the number of a step.

    Raises:
        TypeError: `opts` is a string.
        swinv2_moe.errors.UserError: there is no complete checkpoint, or it cannot be used.
    """
    # Not imported with the package: importing torch and timm takes seconds.
    if os.path.isfile(os.path.join(os.path.expanduser(run), "detector.json")):
        from swinv2_moe.detection.detector import load_detector

        return load_detector(run, checkpoint)
    from swinv2_moe.predict.predictor import load_predictor

    return load_predictor(run, checkpoint, ["DEVICE", device, *_pairs(opts)])


def _pairs(opts: Mapping[str, object] | Sequence[object]) -> list[str]:
    """The keys and values as words KEY, VALUE, KEY, VALUE, ..."""
    from swinv2_moe.config import as_opts

    if isinstance(opts, Mapping):
        return as_opts(opts)
    if isinstance(opts, str):
        raise TypeError(f"opts is the string {opts!r}, it must be a mapping of keys to values")
    return [str(word) for word in opts]


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
