"""Window attention with timm's parameters and results, in one fused operation.

The operation is `window_attention` where that runs, and scaled_dot_product_attention otherwise.
"""

# B images, W windows of an image, N tokens of a window, h heads, D channels of a head

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from timm.models import register_notrace_module
from timm.models.swin_transformer_v2 import WindowAttention
from torch import Tensor, nn

from moe_core import PreparedValue
from moe_core.context import in_transform
from swinv2_moe.models import window_attention
from swinv2_moe.models.window_attention import plain_attention


@register_notrace_module  # reason: the kernel depends on the input
class FusedWindowAttention(WindowAttention):
    """timm's SwinV2 attention (cosine similarity, log-spaced position bias) as one fused kernel.

    It has the same parameters as timm's, and the same output except for rounding. Source: Swin
    Transformer V2, arXiv 2111.09883, section 3. Within `moe_core.prepared` the position network
    runs once.
    """

    cosine = True  # queries and keys are normalised

    if TYPE_CHECKING:  # buffers of timm's class; TorchScript reads annotations
        relative_position_index: Tensor
        k_bias: Any

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._bias: PreparedValue[Tensor] = PreparedValue()

    def _init_buffers(self) -> None:
        """As timm, with the dtype and device of the parameters, which loading with `assign`
        changes."""
        weight = self.proj.weight
        for name, buffer in list(self.named_buffers(recurse=False)):
            dtype = weight.dtype if buffer.is_floating_point() else buffer.dtype
            if (buffer.dtype, buffer.device) != (dtype, weight.device):
                setattr(self, name, torch.empty_like(buffer, dtype=dtype, device=weight.device))
        super()._init_buffers()

    @classmethod
    def like(cls, attn: WindowAttention) -> "FusedWindowAttention":
        """A new attention with the same shape and on the same device as `attn`."""
        return cls(
            attn.dim,
            attn.window_size,
            attn.num_heads,
            qkv_bias=attn.q_bias is not None,
            attn_drop=attn.attn_drop.p,
            proj_drop=attn.proj_drop.p,
            pretrained_window_size=attn.pretrained_window_size,
            device=attn.proj.weight.device,
            dtype=attn.proj.weight.dtype,
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B*W, N, h*D], mask [W, N, N] or None -> like x."""
        windows, tokens, _ = x.shape
        qkv = self.project(x).view(windows, tokens, 3, self.num_heads, -1)
        dropout = 0.0
        if self.training:
            dropout = self.attn_drop.p
        if torch.jit.is_scripting():  # TorchScript compiles only this branch
            x = self._sdpa(qkv, mask, dropout)
        else:
            x = self._fastest(qkv, mask, dropout)
        return self.proj_drop(self.proj(x))

    def _fastest(self, qkv: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        """qkv [B*W, N, 3, h, D] -> [B*W, N, h*D]."""
        if in_transform(qkv):  # for which scaled_dot_product_attention has no rules
            bias, scale = self._position_bias(qkv.dtype), self.temperature().flatten()
            return plain_attention(qkv, bias, mask, scale, self.cosine, dropout)
        if not dropout and window_attention.runs(qkv):
            return self._fused(qkv, mask)
        return self._sdpa(qkv, mask, dropout)

    def _fused(self, qkv: Tensor, mask: Tensor | None) -> Tensor:
        """qkv [B*W, N, 3, h, D] -> [B*W, N, h*D]."""
        bias = self._position_bias(qkv.dtype)
        if mask is not None:
            mask = mask.to(qkv.dtype)
        return window_attention.window_attention(
            qkv, bias, mask, self.temperature().flatten().float(), self.cosine
        )

    def _sdpa(self, qkv: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        """As `_fused`. TorchScript compiles it; a trace of it works for any number of windows."""
        windows, tokens, _, _, channels = qkv.shape
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # [B*W, h, N, D]
        q, k, scale = self.scaled(q, k)
        bias = self._position_bias(q.dtype).unsqueeze(0)  # [1, h, N, N]
        if mask is not None:
            # The masks differ between the windows of an image. So the windows become part of the
            # heads' dim, and the batch dim holds images.
            bias = (bias + mask.unsqueeze(1).to(q.dtype)).flatten(0, 1)  # [W*h, N, N]
            folded = [-1, bias.shape[0], tokens, channels]  # [B, W*h, N, D]
            q, k, v = q.reshape(folded), k.reshape(folded), v.reshape(folded)
        x = F.scaled_dot_product_attention(
            q, k, v.to(q.dtype), attn_mask=bias, dropout_p=dropout, scale=scale
        )
        return (
            x.reshape(windows, self.num_heads, tokens, -1)
            .transpose(1, 2)
            .reshape(windows, tokens, -1)
        )

    def project(self, x: Tensor) -> Tensor:
        """x [..., h*D] -> queries, keys and values [..., 3*h*D]."""
        bias = None
        if self.q_bias is not None:
            bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        return F.linear(x, self.qkv.weight, bias)

    def scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        """Queries and keys of unit length, with the queries multiplied by the head's temperature;
        and the scale of the scores."""
        return (
            (F.normalize(q, dim=-1) * self.temperature()).to(q.dtype),
            F.normalize(k, dim=-1).to(q.dtype),
            1.0,
        )

    def temperature(self) -> Tensor:
        """[h, 1, 1]: the factor of the scores."""
        return self.logit_scale.clamp(max=math.log(1 / 0.01)).exp()

    def _position_bias(self, dtype: torch.dtype) -> Tensor:
        """The position bias in `dtype`: [h, N, N]."""
        if torch.jit.is_scripting():
            return self.position_bias().to(dtype)
        else:
            return self._kept_position_bias(dtype)

    def _kept_position_bias(self, dtype: torch.dtype) -> Tensor:
        """As `_position_bias`, but computed only once within `moe_core.prepared`."""

        def compute() -> Tensor:
            return self.position_bias().to(dtype).contiguous()

        device = self.relative_coords_table.device
        kept = self._bias.get(self.cpb_mlp.parameters(), (dtype, device), compute)
        if kept is None:
            return compute()
        return kept

    def position_bias(self) -> Tensor:
        """The position bias: [h, N, N]."""
        return 16 * torch.sigmoid(self.raw_position_bias())

    def raw_position_bias(self) -> Tensor:
        """The position network's output for every pair of tokens of a window: [h, N, N]."""
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        tokens = self.window_size[0] * self.window_size[1]
        return (
            table[self.relative_position_index.view(-1)].view(tokens, tokens, -1).permute(2, 0, 1)
        )


class DotProductWindowAttention(FusedWindowAttention):
    """The attention of the released Swin-MoE models.

    Scores are dot products divided by sqrt(D). Queries, keys and values have biases. The position
    bias is the position network's output without a sigmoid.
    """

    cosine = False

    def __init__(
        self, dim: int, *args, qkv_bias: bool = True, device=None, dtype=None, **kwargs
    ) -> None:
        super().__init__(dim, *args, qkv_bias=False, device=device, dtype=dtype, **kwargs)
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)
        del self.logit_scale

    def reset_parameters(self) -> None:
        self._init_buffers()

    def project(self, x: Tensor) -> Tensor:
        return self.qkv(x)

    def scaled(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        return q, k, (self.dim // self.num_heads) ** -0.5

    def temperature(self) -> Tensor:
        scale = (self.dim // self.num_heads) ** -0.5
        return torch.full(
            (self.num_heads, 1, 1), scale, dtype=torch.float32, device=self.proj.weight.device
        )

    def position_bias(self) -> Tensor:
        return self.raw_position_bias()
