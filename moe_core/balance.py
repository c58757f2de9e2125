"""Load balancing without a loss. Each expert has a bias, added to its score only for the choice.

After each step, the bias of an expert with less than the mean load is raised by a constant. The
bias of an expert with more than the mean load is lowered by it. Gate values do not include the
bias, so the bias has no gradient.

Source: Auxiliary-Loss-Free Load Balancing, arXiv 2408.15664, section 3, algorithm 1.
"""

# T tokens, E experts, K top-k, L layers with a bias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_core.context import in_backward, in_transform


class BalanceBias(nn.Module):
    """The biases of a layer's experts, and the experts' loads since the last update.

    Attributes:
        bias: [E]. It is saved in checkpoints and equal on all ranks. It stays in fp32 when the
            model is cast: bf16 would round an update of 1e-3 away.
    """

    def __init__(self, num_experts: int, rate: float, device=None) -> None:
        super().__init__()
        self.rate = rate
        self.bias: Tensor
        bias = torch.empty(num_experts, dtype=torch.float32, device=device)
        self.register_buffer("bias", bias)
        # Not a buffer: DistributedDataParallel would overwrite it with that of rank 0.
        self._load = torch.zeros(num_experts, dtype=torch.int64, device=bias.device)
        self.register_load_state_dict_pre_hook(_load_bias_in_fp32)
        self.reset_parameters()

    @property
    def load(self) -> Tensor:
        """[E] int64, the number of the router's choices for this rank's tokens since the last
        update, on the device of the bias."""
        device = self.bias.device
        if self._load.device != device:
            if self._load.is_meta:  # without values
                self._load = torch.zeros_like(self._load, device=device)
            self._load = self._load.to(device)
        return self._load

    def reset_parameters(self) -> None:
        """Set biases and loads to 0."""
        self.bias.zero_()
        self.load.zero_()

    def forward(self, scores: Tensor) -> Tensor:
        """scores [T, E] -> the scores [T, E] by which experts are chosen, without gradient."""
        return scores.detach() + self.bias.to(scores.dtype)

    @torch.no_grad()
    def add_load(self, expert_ids: Tensor) -> None:
        """Add the choices [T, K] of a forward pass to the load.

        A pass inside of a backward pass, which recomputes activations, is not counted again.

        Raises:
            ValueError: a torch.func transform or a forward-mode derivative is active.
        """
        if in_backward():
            return
        if in_transform(expert_ids):  # which allows no change of the load
            raise ValueError(
                "a MoELayer with balance 'bias' counts its choices in training: call eval() before"
                " a torch.func transform or a forward-mode derivative"
            )
        ids = expert_ids.flatten()
        self.load.scatter_add_(0, ids, torch.ones_like(ids))

    @torch.no_grad()
    def update(self, total: Tensor, applies: Tensor | bool = True) -> None:
        """Update the bias from `total`, the load [E] over all ranks, and reset the load to 0.

        Args:
            applies: a bool scalar; False: only the load is reset.
        """
        total = total.double()
        change = self.rate * torch.sign(total.mean() - total).to(self.bias.dtype)
        self.bias += change * applies
        self.load.zero_()

    def _apply(self, fn, recurse: bool = True) -> "BalanceBias":
        """As nn.Module's, which `to`, `half` and the like call; the bias keeps its dtype."""
        before = self.bias
        super()._apply(fn, recurse)
        if self.bias.dtype != before.dtype:
            self.bias = before.to(self.bias.device)
        return self


def _load_bias_in_fp32(module: nn.Module, state: dict, prefix: str, *_) -> None:
    """`load_state_dict(assign=True)` would take the dtype of the file."""
    bias = state.get(f"{prefix}bias")
    if isinstance(bias, Tensor):
        state[f"{prefix}bias"] = bias.float()


def update_balance(
    model: nn.Module,
    process_group: dist.ProcessGroup | None = None,
    applies: Tensor | bool = True,
) -> None:
    """Update the biases of all layers with `balance="bias"`. Call it once per optimiser step.

    This is a collective: one all-reduce for all layers. If no layer has a bias, it does nothing.

    Args:
        process_group: all data-parallel ranks; None: the world, if torch.distributed is used.
        applies: a bool scalar, equal on all ranks; False: the loads are only reset to 0.
    """
    biases = _biases(model)
    if not biases:
        return
    loads = torch.cat([balance.load for balance in biases])
    if dist.is_initialized():
        dist.all_reduce(loads, group=process_group)
    sizes = [len(balance.load) for balance in biases]
    for balance, total in zip(biases, loads.split(sizes), strict=True):
        balance.update(total, applies)


def reset_balance_loads(model: nn.Module) -> None:
    """Reset the loads since the last update to 0. Call it if an optimiser step is skipped."""
    for balance in _biases(model):
        balance.load.zero_()


def _biases(model: nn.Module) -> list[BalanceBias]:
    return [module for module in model.modules() if isinstance(module, BalanceBias)]
