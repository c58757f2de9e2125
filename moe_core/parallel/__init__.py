"""Expert parallelism over an explicit process group."""

from moe_core.parallel.all_to_all import Exchange
from moe_core.parallel.groups import ExpertGroup

__all__ = ["Exchange", "ExpertGroup"]
