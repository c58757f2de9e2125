"""Expert parallelism over explicit process groups: strategies, all-to-all, pipelining."""

from moe_core.parallel.all_to_all import all_to_all, flexible_all_to_all
from moe_core.parallel.groups import CollectiveError, ExpertGroup, Traffic
from moe_core.parallel.make_groups import make_expert_groups
from moe_core.parallel.strategy import ParallelStrategy, valid_r
from moe_core.parallel.tuner import Tuner

__all__ = [
    "CollectiveError",
    "ExpertGroup",
    "ParallelStrategy",
    "Traffic",
    "Tuner",
    "all_to_all",
    "flexible_all_to_all",
    "make_expert_groups",
    "valid_r",
]
