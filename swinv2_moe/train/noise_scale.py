"""The noise scale of the gradient: the batch size up to which larger batches save steps.

S = tr(covariance of one image's gradient) / |mean gradient|^2, in images (the "simple" noise scale
of arXiv 1812.06162, section 2.2). Well below S, twice the batch needs half the steps; well above S,
it needs as many.
"""

# B images a step over all ranks, g1 and g2 the gradients of two successive steps

import torch
from torch import Tensor, nn

from moe_core import global_grad_dot

_DECAY = 0.9  # of the averages over measurements


class NoiseScale:
    """Measures from pairs of successive steps.

    Their batches are independent and their weights almost equal, so the mean of g1.g2 is |G|^2, G
    the mean gradient, and that of |g1|^2 and |g2|^2 is |G|^2 + tr / B. Both are averaged over the
    measurements, as the paper does, because the quotient of single ones is biased.

    Args:
        every: steps from one pair to the next; 0: nothing is measured.
        images: B.
    """

    def __init__(self, every: int, images: int) -> None:
        self.every = every
        self.images = images
        self.value: float | None = None  # in images; None: not known, or no mean gradient is seen
        self._first: dict[nn.Parameter, Tensor] = {}  # g1, between the steps of a pair
        self._first_norm = 0.0
        self._squared_norm = 0.0
        self._squared_mean = 0.0

    def inner_product(self, model: nn.Module) -> Tensor:
        """g1.g2 over all ranks, [1], after the second step's backward pass; else empty, [0]."""
        device = next(model.parameters()).device
        if not self._first:
            return torch.zeros(0, device=device)
        return global_grad_dot(model, self._first).reshape(1)

    def add(self, model: nn.Module, step: int, norm: float, inner_products: list[float]) -> None:
        """Count a step, before its gradients are clipped.

        Args:
            step: number of steps before this one.
            norm: of the gradient over all ranks.
            inner_products: what `inner_product` returned in this step.
        """
        if inner_products:
            self._first.clear()
            self._average(self._first_norm, norm, inner_products[0])
        elif self.every and step % self.every == 0:
            gradients = ((p, p.grad) for p in model.parameters() if p.grad is not None)
            self._first = {p: gradient.clone() for p, gradient in gradients}
            self._first_norm = norm

    def forget(self) -> None:
        """Drop the first step of a pair, for example where the second has no finite gradient."""
        self._first.clear()

    def _average(self, first: float, second: float, product: float) -> None:
        squared_norm = (first**2 + second**2) / 2
        # both start at 0, which cancels in their quotient
        self._squared_norm = _DECAY * self._squared_norm + (1 - _DECAY) * squared_norm
        self._squared_mean = _DECAY * self._squared_mean + (1 - _DECAY) * product
        self.value = None
        if self._squared_mean > 0:
            noise = self.images * (self._squared_norm - self._squared_mean)
            self.value = max(0.0, noise / self._squared_mean)
