"""Expert parallelism over explicit process groups: strategies, all-to-all, pipelining, costs."""

from moe_core.parallel.algorithm import AllToAll, Linear, RowCounts
from moe_core.parallel.calibration import calibrate
from moe_core.parallel.groups import ExpertGroup, largest_group, make_expert_groups
from moe_core.parallel.hierarchical import Hierarchical
from moe_core.parallel.machine import PROFILES, ExchangeCost, Link, LinkTraffic, Machine
from moe_core.parallel.row_exchange import all_to_all
from moe_core.parallel.strategy import EXCHANGES, ParallelStrategy, parse_strategy, valid_r
from moe_core.parallel.tuner import Tuner, TunerEvent
from moe_core.ranks import CollectiveError, Ranks

__all__ = [
    "EXCHANGES",
    "PROFILES",
    "AllToAll",
    "CollectiveError",
    "ExchangeCost",
    "ExpertGroup",
    "Hierarchical",
    "Linear",
    "Link",
    "LinkTraffic",
    "Machine",
    "ParallelStrategy",
    "Ranks",
    "RowCounts",
    "Tuner",
    "TunerEvent",
    "all_to_all",
    "calibrate",
    "largest_group",
    "make_expert_groups",
    "parse_strategy",
    "valid_r",
]
