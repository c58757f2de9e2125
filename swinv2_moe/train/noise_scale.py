"""The noise scale of the gradient: up to which size larger batches save steps."""

import torch
from torch import Tensor, nn

from moe_core import global_grad_dot

_DECAY = 0.9  # of the averages over measurements


class NoiseScale:
    """Estimates the noise scale from pairs of successive steps: the batch size up to which larger
    batches save steps.

    S = tr(covariance of one image's gradient) / |mean gradient|^2, in images. This is the "simple"
    noise scale of arXiv 1812.06162, section 2.2. For batches much smaller than S, doubling the
    batch halves the number of steps. For batches much larger than S, it does not change the number
    of steps.

    B images per step over all ranks; g1 and g2: the gradients of two successive steps. The batches
    of a pair are independent and the weights almost equal. Let G be the mean gradient.
    Then the mean of g1.g2 is |G|^2, and the mean of |g1|^2 and |g2|^2 is |G|^2 + tr / B. Both are
    averaged over the measurements, as in the paper, because the quotient of single measurements is
    biased.

    Args:
        every: steps from one pair to the next; 0: nothing is measured.
        images: B.
    """

    def __init__(self, every: int, images: int) -> None:
        self.every = every
        self.images = images
        # in images; None: not known, or the estimate of |G|^2 is not positive
        self.value: float | None = None
        self._first: dict[nn.Parameter, Tensor] = {}  # g1, between the steps of a pair
        self._first_norm = 0.0
        self._squared_norm = 0.0
        self._squared_mean = 0.0

    def inner_product(self, model: nn.Module) -> Tensor:
        """g1.g2 over all ranks, [1], after the second backward pass of a pair; otherwise an empty
        tensor, [0]."""
        device = next(model.parameters()).device
        if not self._first:
            return torch.zeros(0, device=device)
        return global_grad_dot(model, self._first).reshape(1)

    def add(self, model: nn.Module, step: int, norm: float, inner_products: list[float]) -> None:
        """Count a step, before its gradients are clipped.

        Args:
            step: number of steps before this one.
            norm: norm of the gradient over all ranks.
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
        """Discard the first step of a pair, for example if the second step has no finite
        gradient."""
        self._first.clear()

    def _average(self, first: float, second: float, product: float) -> None:
        squared_norm = (first**2 + second**2) / 2
        # both averages start at 0; this bias cancels in their quotient
        self._squared_norm = _moved(self._squared_norm, squared_norm)
        self._squared_mean = _moved(self._squared_mean, product)
        self.value = None
        if self._squared_mean > 0:
            noise = self.images * (self._squared_norm - self._squared_mean)
            self.value = max(0.0, noise / self._squared_mean)


def _moved(average: float, value: float) -> float:
    """The moving average after one more value."""
    return _DECAY * average + (1 - _DECAY) * value
