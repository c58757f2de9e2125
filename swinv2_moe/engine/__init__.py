"""Training and evaluation runs."""

from swinv2_moe.engine.run import evaluate, train

__all__ = ["evaluate", "train"]
