"""Training runs."""

from swinv2_moe.train.run import train

__all__ = ["train"]
