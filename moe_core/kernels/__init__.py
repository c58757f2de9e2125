"""The layer's operations behind torch.library; `reference` is their specification."""

from moe_core.kernels.grouped import grouped_linear
from moe_core.kernels.rows import combine_rows, dispatch_rows

__all__ = ["combine_rows", "dispatch_rows", "grouped_linear"]
