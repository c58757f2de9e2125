"""The layer's operations behind torch.library; `reference` is their specification, `backend` says
which kernels run."""

from moe_core.kernels import fused_ffn, routing
from moe_core.kernels.buffers import empty, release_buffers
from moe_core.kernels.ffn import expert_ffn
from moe_core.kernels.ffn_x86 import pack_weights
from moe_core.kernels.fused_ffn import moe_ffn
from moe_core.kernels.rows import combine_rows, dispatch_rows

__all__ = [
    "combine_rows",
    "dispatch_rows",
    "empty",
    "expert_ffn",
    "fused_ffn",
    "moe_ffn",
    "pack_weights",
    "release_buffers",
    "routing",
]
