"""LAMB and LARS of timm, optimisers for large batches, with a trust ratio for each expert.

Both multiply the update of a matrix by a trust ratio: the norm of the matrix divided by the norm of
its update. The experts of a layer are stored in one tensor, and each rank has a part of it. A
single ratio for this tensor would mix experts and depend on the number of ranks. Therefore each
expert counts as a separate matrix.

LAMB: arXiv 1904.00962; LARS: arXiv 1708.03888.
"""

from collections.abc import Collection, Iterable

import torch
from timm.optim import Lamb, Lars
from timm.optim.lamb import lamb
from timm.optim.lars import lars
from torch import Tensor, nn


class ExpertLamb(Lamb):
    """timm's Lamb with a trust ratio for each expert. It does not clip gradients: the training step
    does.

    Each group counts its updates in "step", which `restore_optimizer` sets.

    Args:
        stacked: parameters whose first dimension counts experts.
    """

    def __init__(
        self,
        groups: list[dict],
        stacked: Collection[nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(groups, lr=lr, betas=betas, eps=eps, max_grad_norm=None)
        self.stacked = set(stacked)
        for group in self.param_groups:
            group["step"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] += 1
            matrices = _Matrices(group["params"], self.stacked)
            for parameter in matrices.parameters:
                if not self.state[parameter]:
                    for name in ("exp_avg", "exp_avg_sq"):
                        self.state[parameter][name] = torch.zeros_like(parameter)
            states = [self.state[parameter] for parameter in matrices.parameters]
            beta1, beta2 = group["betas"]
            lamb(
                matrices.split(matrices.parameters),
                matrices.split(matrices.gradients),
                matrices.split(state["exp_avg"] for state in states),
                matrices.split(state["exp_avg_sq"] for state in states),
                lr=group["lr"],
                beta1=beta1,
                beta2=beta2,
                beta3=1 - beta1,
                bias_correction1=1 - beta1 ** group["step"],
                bias_correction2=1 - beta2 ** group["step"],
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                decoupled_decay=False,
                max_lr=None,
                trust_clip=False,
                always_adapt=False,
                caution=False,
            )


class ExpertLars(Lars):
    """timm's Lars with Nesterov's momentum and a trust ratio for each expert.

    Args:
        stacked: parameters whose first dimension counts experts.
    """

    def __init__(
        self, groups: list[dict], stacked: Collection[nn.Parameter], lr: float, momentum: float
    ) -> None:
        super().__init__(groups, lr=lr, momentum=momentum, nesterov=momentum > 0)
        self.stacked = set(stacked)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            matrices = _Matrices(group["params"], self.stacked)
            buffers: list[Tensor] = []
            if group["momentum"]:
                for parameter in matrices.parameters:
                    state = self.state[parameter]
                    if not state:
                        state["momentum_buffer"] = torch.zeros_like(parameter)
                    buffers.append(state["momentum_buffer"])
            lars(
                matrices.split(matrices.parameters),
                matrices.split(matrices.gradients),
                [*matrices.split(buffers)],
                lr=group["lr"],
                momentum=group["momentum"],
                dampening=0,
                weight_decay=group["weight_decay"],
                nesterov=group["nesterov"],
                trust_coeff=group["trust_coeff"],
                eps=group["eps"],
                trust_clip=False,
                always_adapt=False,
            )


class _Matrices:
    """The parameters that have gradients, and a function that splits tensors of their shapes by
    expert."""

    def __init__(self, parameters: Iterable[nn.Parameter], stacked: set[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.grad is not None]
        self.gradients = [p.grad for p in self.parameters if p.grad is not None]
        self.is_stacked = [p in stacked for p in self.parameters]

    def split(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The tensors of `parameters` in the same order, with one view for each expert."""
        matrices: list[Tensor] = []
        for tensor, is_stacked in zip(tensors, self.is_stacked, strict=False):
            if is_stacked:
                matrices += tensor.unbind(0)
            else:
                matrices.append(tensor)
        return matrices
