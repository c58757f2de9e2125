"""Files like the released Swin-MoE ones, made from their published layout alone, and their weights
put into a model by hand: what the converter is held to."""

# W ranks, E experts, s = W / E slices of an expert where W > E, C channels of a block, H = 4 C

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from yacs.config import CfgNode


class Released(NamedTuple):
    master: dict[str, Tensor]
    ranks: list[dict[str, Tensor]]


def make_released(
    config: CfgNode,
    ranks: int,
    classes: int,
    legacy: bool = True,
    output_bias: bool = False,
    device: str = "cpu",
) -> Released:
    """Random weights (empty ones on the meta device) of the configured model as W ranks and their
    master would save."""
    swin, moe = config.MODEL.SWINV2, config.MODEL.MOE
    generator = torch.Generator().manual_seed(3)

    def new(*shape: int) -> Tensor:
        if device == "meta":
            return torch.empty(shape, device=device)
        return torch.randn(shape, generator=generator) * 0.2

    def norm(name: str, channels: int) -> dict[str, Tensor]:
        return {f"{name}.weight": 1 + new(channels), f"{name}.bias": new(channels)}

    def linear(name: str, outputs: int, inputs: int) -> dict[str, Tensor]:
        return {f"{name}.weight": new(outputs, inputs), f"{name}.bias": new(outputs)}

    patch, last = swin.PATCH_SIZE, len(swin.DEPTHS) - 1
    master = {"patch_embed.proj.weight": new(swin.EMBED_DIM, 3, patch, patch)}
    master["patch_embed.proj.bias"] = new(swin.EMBED_DIM)
    master |= norm("patch_embed.norm", swin.EMBED_DIM)
    states = [{} for _ in range(ranks)]
    for stage, (depth, heads) in enumerate(zip(swin.DEPTHS, swin.NUM_HEADS, strict=True)):
        channels = swin.EMBED_DIM * 2**stage
        for i in range(depth):
            block = f"layers.{stage}.blocks.{i}"
            master |= norm(f"{block}.norm1", channels) | norm(f"{block}.norm2", channels)
            master |= linear(f"{block}.attn.qkv", 3 * channels, channels)
            master |= linear(f"{block}.attn.proj", channels, channels)
            master |= linear(f"{block}.attn.cpb_mlp.0", 512, 2)
            master[f"{block}.attn.cpb_mlp.2.weight"] = new(heads, 512)
            master[f"{block}.attn.relative_coords_table"] = torch.zeros(1, 7, 7, 2)
            master[f"{block}.attn.relative_position_index"] = torch.zeros(16, 16, dtype=torch.int64)
            if i % 2:
                master[f"{block}.attn_mask"] = torch.zeros(4, 16, 16)
            if i not in moe.BLOCKS[stage]:
                master |= linear(f"{block}.mlp.fc1", 4 * channels, channels)
                master[f"{block}.mlp.fc2.weight"] = new(channels, 4 * channels)
                continue
            layer = f"{block}.mlp._moe_layer"
            if moe.ROUTER == "cosine":
                master |= linear(f"{layer}.gates.0.cosine_projector", 256, channels)
                master[f"{layer}.gates.0.temperature"] = new(1)
                master[f"{layer}.gates.0.sim_matrix"] = new(256, moe.NUM_EXPERTS)
            else:
                master[f"{layer}.gates.0.wg.weight"] = new(moe.NUM_EXPERTS, channels)
            if not legacy:
                master[f"{layer}._num_global_experts"] = torch.tensor(moe.NUM_EXPERTS)
            local, parts = max(moe.NUM_EXPERTS // ranks, 1), max(ranks // moe.NUM_EXPERTS, 1)
            hidden, outputs = 4 * channels // parts, channels // parts
            middle = (1,) if legacy else ()
            experts = f"{layer}.experts.batched"
            for state in states:
                state[f"{experts}_fc1_w"] = new(local, hidden, channels)
                state[f"{experts}_fc2_w"] = new(local, hidden, channels)
                state[f"{experts}_fc1_bias"] = new(local, *middle, hidden)
                if output_bias:  # then it is trained, and each rank's own
                    state[f"{experts}_fc2_bias"] = new(local, *middle, outputs)
            if not output_bias:
                master[f"{experts}_fc2_bias"] = torch.zeros(local, *middle, outputs)
        if stage < last:
            merging = f"layers.{stage}.downsample"
            master[f"{merging}.reduction.weight"] = new(2 * channels, 4 * channels)
            master |= norm(f"{merging}.norm", 4 * channels)
    master |= norm("norm", channels) | linear("head", classes, channels)
    return Released(master, states)


def write_released(released: Released, stem: Path) -> Path:
    """X.pth.rank0, ... and X.pth.master; returns X.pth."""
    for rank, state in enumerate(released.ranks):
        torch.save({"model": state}, f"{stem}.rank{rank}")
    torch.save({"model": released.master}, f"{stem}.master")
    return stem


@torch.no_grad()
def place(released: Released, model: nn.Module) -> nn.Module:
    """The weights into our model, module by module."""

    def fill(module: nn.Module, name: str) -> None:
        module.weight.copy_(released.master[f"{name}.weight"])
        if getattr(module, "bias", None) is not None:
            module.bias.copy_(released.master[f"{name}.bias"])

    fill(model.patch_embed.proj, "patch_embed.proj")
    fill(model.patch_embed.norm, "patch_embed.norm")
    for s, stage in enumerate(model.layers):
        if s:  # theirs is at the end of the stage before
            fill(stage.downsample.norm, f"layers.{s - 1}.downsample.norm")
            fill(stage.downsample.reduction, f"layers.{s - 1}.downsample.reduction")
        for i, block in enumerate(stage.blocks):
            name = f"layers.{s}.blocks.{i}"
            fill(block.norm1, f"{name}.norm1")
            fill(block.norm2, f"{name}.norm2")
            fill(block.attn.qkv, f"{name}.attn.qkv")
            fill(block.attn.proj, f"{name}.attn.proj")
            fill(block.attn.cpb_mlp[0], f"{name}.attn.cpb_mlp.0")
            fill(block.attn.cpb_mlp[2], f"{name}.attn.cpb_mlp.2")
            if hasattr(block.mlp, "moe"):
                _place_moe(released, block.mlp.moe, f"{name}.mlp._moe_layer")
            else:
                fill(block.mlp.fc1, f"{name}.mlp.fc1")
                fill(block.mlp.fc2, f"{name}.mlp.fc2")
    fill(model.norm, "norm")
    fill(model.head.fc, "head")
    return model


def _place_moe(released: Released, moe: nn.Module, name: str) -> None:
    gate = {
        key.removeprefix(f"{name}.gates.0."): value
        for key, value in released.master.items()
        if name in key
    }
    if "wg.weight" in gate:
        moe.router.weight.copy_(gate["wg.weight"])
    else:
        moe.router.temperature.copy_(gate["temperature"])
        moe.router.sim_matrix.copy_(gate["sim_matrix"])
        moe.router.projector.weight.copy_(gate["cosine_projector.weight"])
        moe.router.projector.bias.copy_(gate["cosine_projector.bias"])
    experts, ranks = len(moe.experts.w1), len(released.ranks)
    targets = {
        "batched_fc1_w": moe.experts.w1,
        "batched_fc1_bias": moe.experts.b1,
        "batched_fc2_w": moe.experts.w2,
    }
    targets |= {} if moe.experts.b2 is None else {"batched_fc2_bias": moe.experts.b2}
    for theirs, ours in targets.items():
        pieces = [state[f"{name}.experts.{theirs}"] for state in released.ranks]
        pieces = [
            piece.reshape(len(piece), -1, *piece.shape[2:]) if piece.ndim == 2 else piece
            for piece in pieces
        ]
        for rank, piece in enumerate(pieces):
            if ranks <= experts:
                for local in range(experts // ranks):
                    ours[rank * experts // ranks + local].copy_(piece[local].reshape(ours[0].shape))
            else:
                parts = ranks // experts
                length = ours.shape[1] // parts
                begin = rank % parts * length
                part = ours[rank // parts, begin : begin + length]
                part.copy_(piece[0].reshape(part.shape))
