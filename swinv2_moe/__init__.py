"""Training, evaluation and use of vision models with mixtures of experts.

>>> import swinv2_moe
>>> model = swinv2_moe.load("output/mine")
>>> model.predict("dog.jpg")[0].class_name
'dog'
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swinv2_moe.predict.predictor import Predictor

__all__ = ["load"]


def load(
    run: str,
    device: str = "auto",
    opts: "list[str] | tuple[str, ...]" = (),
    checkpoint: str = "best",
) -> "Predictor":
    """A trained model that predicts the classes of pictures.

    Args:
        run: a run directory or a checkpoint.
        device: "auto", "cpu" or "cuda".
        opts: KEY VALUE pairs that override the checkpoint's configuration.
        checkpoint: the checkpoint of a run: "best", "latest" or the number of a step.

    Raises:
        swinv2_moe.errors.UserError: there is no complete checkpoint, or it cannot be used.
    """
    # Not imported with the package: importing torch and timm takes seconds.
    from swinv2_moe.predict.predictor import load_predictor

    return load_predictor(run, checkpoint, ["DEVICE", device, *opts])
