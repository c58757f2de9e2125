"""Soft dispatch and soft combine in plain torch: the specification."""

# B images, N tokens of an image, S slots of an image, M model dim

from torch import Tensor


def soft_dispatch(tokens: Tensor, logits: Tensor) -> Tensor:
    """Slots as weighted means of the tokens: `slots_s = sum_n softmax_n(logits)_ns * tokens_n`.

    Args:
        tokens: [B, N, M].
        logits: [B, N, S].

    Returns:
        [B, S, M].
    """
    weights = logits.softmax(1).to(tokens.dtype)
    return weights.transpose(1, 2) @ tokens


def soft_combine(rows: Tensor, logits: Tensor) -> Tensor:
    """Tokens as weighted means of the slots' rows: `y_n = sum_s softmax_s(logits)_ns * rows_s`.

    Args:
        rows: [B, S, M].
        logits: [B, N, S].

    Returns:
        [B, N, M].
    """
    weights = logits.softmax(2).to(rows.dtype)
    return weights @ rows
