"""Other implementations of the same layer with the same weights, for comparison.

Three need no library: GShard's einsums (as in fairseq), a loop over the experts, and F.grouped_mm
on sorted rows without other fusion (as in torchtitan). The others are libraries, which are used if
they are installed. `unavailable` gives the reason why a library is not measured. All
implementations are dropless. In fp32 their gate values are MoELayer's.
"""

# T tokens, E experts, K top-k, C capacity, N rows, M model dim, H hidden dim

import importlib
import os
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_core import MoELayer
from moe_core.context import expert_dtype
from moe_core.ops import DispatchPlan, make_plan
from moe_core.routing import gate_scores

Peer = Callable[[Tensor], Tensor]


def routed(layer: MoELayer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Gates and experts of every token [T, K]."""
    with torch.autocast(x.device.type, enabled=False):
        scores = gate_scores(layer.router(x.float()), layer.config.gate_activation)
        gates, ids = scores.topk(layer.config.top_k)
    return (gates / gates.sum(1, keepdim=True) if layer.config.top_k > 1 else gates), ids


def by_einsum(layer: MoELayer, x: Tensor) -> Tensor:
    """GShard's einsums (arXiv 2006.16668, algorithm 1), as in fairseq: padded buffers, which are
    filled and read with one-hot tensors. C is the largest load."""
    gates, ids = routed(layer, x)
    plan = make_plan(ids, layer.config.num_experts, None, kernels="torch")
    x = x.to(expert_dtype(x))
    combine_weights = combine_tensor(gates, ids, plan).to(x.dtype)  # [T, E, C]
    mask = (combine_weights.detach() != 0).to(x.dtype)
    rows = torch.einsum("tec,tm->ecm", mask, x)
    return torch.einsum("tec,ecm->tm", combine_weights, padded_experts(layer, rows))


def combine_tensor(gates: Tensor, ids: Tensor, plan: DispatchPlan) -> Tensor:
    """The gate value of each choice at its expert and its place there, else 0: [T, E, C].

    Args:
        gates, ids: [T, K].
    """
    num_experts, capacity = len(plan.offsets), int(plan.counts.max())
    starts = F.pad(plan.offsets.long(), (1, -1))
    places = plan.slots - starts[ids]  # [T, K]
    combine_weights = gates.new_zeros(len(gates), num_experts, capacity)
    with torch.autocast(gates.device.type, enabled=False):
        for k in range(gates.shape[1]):
            expert = F.one_hot(ids[:, k], num_experts) * gates[:, k : k + 1]  # [T, E]
            place = F.one_hot(places[:, k], capacity).to(gates.dtype)  # [T, C]
            combine_weights = combine_weights + torch.einsum("te,tc->tec", expert, place)
    return combine_weights


def padded_experts(layer: MoELayer, rows: Tensor) -> Tensor:
    """Each expert's outputs of its rows: [E, C, M] -> [E, C, M]."""
    weights = layer.experts.weights(rows.dtype)
    weights = weights.map(lambda weight: weight.to(rows.dtype))
    hidden = torch.einsum("ecm,ehm->ech", rows, weights.w1) + weights.b1.unsqueeze(1)
    return torch.einsum("ech,ehm->ecm", F.gelu(hidden), weights.w2) + weights.b2.unsqueeze(1)


def by_loop(layer: MoELayer, x: Tensor) -> Tensor:
    """A loop over the experts: find an expert's tokens, compute its output, and add it to the
    result."""
    gates, ids = routed(layer, x)
    y = torch.zeros_like(x)
    # unbind: indexing would allocate a gradient of the whole weight, filled with zeros, for each
    # expert
    for i, (w1, b1, w2, b2) in enumerate(
        zip(*(p.unbind() for p in layer.experts.parameters()), strict=True)
    ):
        token, k = (ids == i).nonzero(as_tuple=True)
        out = F.linear(F.gelu(F.linear(x[token], w1, b1)), w2.t(), b2)
        y = y.index_add(0, token, (out * gates[token, k].unsqueeze(1)).to(x.dtype))
    return y


def by_grouped_mm(layer: MoELayer, x: Tensor) -> Tensor:
    gates, ids = routed(layer, x)
    e, top_k = layer.experts, layer.config.top_k
    dtype = (
        torch.get_autocast_dtype(x.device.type)
        if torch.is_autocast_enabled(x.device.type)
        else x.dtype
    )
    expert, choices = ids.flatten().sort(stable=True)
    offsets = torch.bincount(expert, minlength=layer.config.num_experts).cumsum(0).int()
    rows = x[choices // top_k].to(dtype)  # [N, M]
    hidden = F.gelu(
        F.grouped_mm(rows, e.w1.to(dtype).transpose(1, 2), offs=offsets) + e.b1.to(dtype)[expert]
    )
    out = F.grouped_mm(hidden, e.w2.to(dtype), offs=offsets) + e.b2.to(dtype)[expert]
    return torch.zeros_like(x).index_add(
        0, choices // top_k, (out * gates.flatten()[choices].unsqueeze(1)).to(x.dtype)
    )


def tutel(layer: MoELayer, device: torch.device) -> tuple[Peer, nn.Module]:
    config = layer.config
    os.environ.setdefault("LOCAL_SIZE", "1")
    moe = importlib.import_module("tutel.moe")
    model = moe.moe_layer(
        gate_type={"type": "top", "k": config.top_k, "capacity_factor": 0, "fp32_gate": True},
        experts={
            "type": "ffn",
            "count_per_node": config.num_experts,
            "hidden_size_per_expert": config.hidden_dim,
            "activation_fn": F.gelu,
        },
        model_dim=config.model_dim,
        scan_expert_func=None,
    ).to(device)
    e, own = layer.experts, model.experts
    _fill(model.gates[0].wg.weight, layer.router.weight)
    for parameter, value in (
        (own.batched_fc1_w, e.w1),
        (own.batched_fc2_w, e.w2),
        (own.batched_fc1_bias, e.b1),
        (own.batched_fc2_bias, e.b2),
    ):
        _fill(parameter, value)
    return model, model


def deepspeed(layer: MoELayer, device: torch.device) -> tuple[Peer, nn.Module]:
    config, e = layer.config, layer.experts
    sharded_moe = importlib.import_module("deepspeed.moe.sharded_moe")
    experts_module = importlib.import_module("deepspeed.moe.experts")
    comm = importlib.import_module("deepspeed.comm")
    if not comm.is_initialized():
        for name, value in {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29513",
            "RANK": "0",
            "WORLD_SIZE": "1",
        }.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("LOCAL_RANK", "0")
        # replaced because it would be compiled, and serves only many ranks
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
        comm.init_distributed("nccl" if device.type == "cuda" else "gloo", verbose=False)
    gate = sharded_moe.TopKGate(
        config.model_dim,
        config.num_experts,
        config.top_k,
        min_capacity=0,
        drop_tokens=False,
        use_rts=False,
    )
    ffn = nn.Sequential(
        nn.Linear(config.model_dim, config.hidden_dim),
        nn.GELU(),
        nn.Linear(config.hidden_dim, config.model_dim),
    )
    group = torch.distributed.group.WORLD
    experts = experts_module.Experts(ffn, config.num_experts)
    model = sharded_moe.MOELayer(gate, experts, "ep_size_1", 1, config.num_experts).to(device)
    model._set_ep_group(group)
    _fill(gate.wg.weight, layer.router.weight)
    for i, ffn in enumerate(experts.deepspeed_experts):
        for parameter, value in zip(
            ffn.parameters(), (e.w1[i], e.b1[i], e.w2[i].t(), e.b2[i]), strict=True
        ):
            _fill(parameter, value)
    return lambda x: model(x, None), model  # None: no token is masked


def scattermoe(layer: MoELayer, device: torch.device) -> tuple[Peer, nn.Module]:
    config, e = layer.config, layer.experts
    if device.type != "cuda":
        raise RuntimeError("its kernels take a CUDA device")
    module = importlib.import_module("scattermoe.mlp")
    model = module.MLP(
        config.model_dim, config.hidden_dim, config.num_experts, config.top_k, activation=nn.GELU()
    )
    model = model.to(device)
    _fill(model.experts.weight, e.w1)
    _fill(model.output_experts.weight, e.w2.transpose(1, 2))
    return lambda x: model(x, *routed(layer, x)), model


BUILT_IN = {"einsum (GShard)": by_einsum, "loop": by_loop, "grouped_mm": by_grouped_mm}
COMPILED = "compiled"  # the dense network by torch.compile
LIBRARIES = {
    "DeepSpeed": deepspeed,
    "ScatterMoE": scattermoe,
    "Tutel": tutel,
}


def libraries(
    layer: MoELayer, device: torch.device, names: Sequence[str]
) -> tuple[dict[str, tuple[Peer, nn.Module]], dict[str, str]]:
    """The layers of the named libraries with the weights of `layer`, and for each one that is
    missing the reason."""
    peers, unavailable = {}, {}
    for name, adapter in LIBRARIES.items():
        if name not in names:
            continue
        try:
            peers[name] = adapter(layer, device)
        except Exception as error:  # any error of a library; the table continues without it
            unavailable[name] = (
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
    return peers, unavailable


@torch.no_grad()
def _fill(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value.view_as(parameter) if value.is_contiguous() else value)
