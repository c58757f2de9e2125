"""A model in standard operations, which exporters support.

Values that depend only on weights are constants.

B images, W windows of an image, N tokens of a window, h heads, D channels of a head
"""

import copy
from itertools import chain

import torch
from torch import Tensor, nn

from moe_core.export import StandardMoE
from swinv2_moe.models import MoEMlp, MoEModel
from swinv2_moe.models.attention import FusedWindowAttention


class StandardForm(nn.Module):
    """A copy of the model that computes in `dtype`.

    Input: float32 images [B, C, S, S]. Output: float32 logits [B, classes]. Routers and their
    probabilities stay in float32.

    Args:
        batched_experts: as `batched` of StandardMoE.
    """

    def __init__(
        self,
        model: MoEModel,
        dtype: torch.dtype = torch.float32,
        batched_experts: bool = False,
    ) -> None:
        super().__init__()
        replacements = {}  # deepcopy's memo: replacement by id of the original module
        for module in model.modules():
            if isinstance(module, MoEMlp):
                replacements[id(module)] = StandardMoE(module.moe, batched=batched_experts)
            elif isinstance(module, FusedWindowAttention):
                replacements[id(module)] = _Attention(module)
        self.model, self.dtype = (
            copy.deepcopy(model, replacements).eval().requires_grad_(False),
            dtype,
        )
        tensors = chain(self.model.named_parameters(), self.model.named_buffers())
        for name, tensor in tensors:
            # routers and their biases compute in fp32
            is_routing = ".router." in name or ".balance." in name
            if tensor.is_floating_point() and not is_routing:
                tensor.data = tensor.data.to(dtype)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images.to(self.dtype)).float()


class _Attention(nn.Module):
    """FusedWindowAttention in standard operations, with its position bias as a constant."""

    bias: Tensor  # [h, N, N]

    @torch.no_grad()
    def __init__(self, attention: FusedWindowAttention) -> None:
        super().__init__()
        self.register_buffer("bias", attention.position_bias().contiguous())
        self.attention = copy.deepcopy(attention)
        for name in ("cpb_mlp", "relative_coords_table", "relative_position_index"):
            delattr(self.attention, name)  # otherwise the file would contain them, unused

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B*W, N, h*D], mask [W, N, N] or None -> like x."""
        windows, tokens, _ = x.shape
        qkv = self.attention.project(x).view(windows, tokens, 3, self.attention.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [B*W, h, N, D]
        q, k, scale = self.attention.scaled(q, k)
        scores = (q * scale) @ k.transpose(-2, -1) + self.bias  # [B*W, h, N, N]
        if mask is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask.unsqueeze(1)).flatten(0, 1)
        x = (scores.softmax(-1) @ v).transpose(1, 2).reshape(windows, tokens, -1)
        return self.attention.proj(x)
