"""Training runs."""

from swinv2_moe.engine.run import train

__all__ = ["train"]
