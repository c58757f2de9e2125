"""The linear all-to-all: one message to every rank."""

from torch import Tensor

from moe_core.parallel.algorithm import AllToAll, RowCounts
from moe_core.parallel.machine import ExchangeCost, LinkTraffic
from moe_core.registry import register_all_to_all


@register_all_to_all("linear")
class Linear(AllToAll):
    """Every rank sends one message to every other rank."""

    def send(self, rows: Tensor, counts: RowCounts) -> Tensor:
        return self.ranks.all_to_all(rows, counts.send, counts.receive)

    @staticmethod
    def cost(elements: float, group_size: int, ranks_per_node: int) -> ExchangeCost:
        to_each = elements / group_size
        near = ranks_per_node - 1
        far = group_size - ranks_per_node
        return ExchangeCost((LinkTraffic(to_each * near, to_each * far, near, far),))
