"""Small training runs of a Tutel layer, and the losses that Tutel itself gives for them.

`python -m torch.distributed.run --nproc_per_node=N tests/tutel_cases.py` with Tutel on PYTHONPATH
prints the losses that `tests/numerics/tutel_losses.json` holds for N ranks.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

MODEL_DIM, HIDDEN, BATCH, TOKENS, STEPS = 16, 24, 2, 19, 4
RECORDED = Path(__file__).parent / "numerics" / "tutel_losses.json"
RECIPE_OF_SWIN = {"batch_prioritized_routing": True, "normalize_gate": False}
RECIPE_OF_SWIN |= {"is_gshard_loss": False}

# Options that differ from those of `make_layer`: of the gate, the experts, the layer and a call.
CASES: dict[str, dict[str, Any]] = {
    "top-2": {},
    "top-1": {"gate": {"k": 1}},
    "half the capacity": {"gate": {"k": 1, "capacity_factor": 0.5}},
    "dropless": {"gate": {"capacity_factor": 0}},
    "negative factor": {"gate": {"capacity_factor": -0.5}},
    "cosine gate": {"gate": {"type": "cosine_top"}},
    "noise": {"gate": {"k": 1, "gate_noise": 1.0}},
    "recipe of Swin-MoE": {
        "gate": {"k": 1, "gate_noise": 1.0, "capacity_factor": 1.25},
        "layer": RECIPE_OF_SWIN,
    },
    "gelu": {"experts": {"activation_fn": F.gelu}},
    "tanh": {"experts": {"activation_fn": torch.tanh}},
    "no fc2 bias": {"experts": {"has_fc2_bias": False}},
    "gates before experts": {"layer": {"is_postscore": False}},
    "output dim": {"experts": {"output_dim": 8}},
    "three chunks": {
        "gate": {"k": 1, "capacity_factor": 0.6},
        "layer": {"a2a_ffn_overlap_degree": 3},
    },
    "options of a call": {"call": {"top_k": 1, "capacity_factor": 0.3}},
    "llama experts": {"experts": {"type": "llama_ffn", "activation_fn": F.silu}},
    "fp64": {"dtype": "float64"},
}
SHARED = {"num_experts_per_device": -2}  # two ranks share an expert
CASES_ON_RANKS: dict[str, dict[str, Any]] = {
    "top-2": {},
    "half the capacity": {"gate": {"k": 1, "capacity_factor": 0.5}},
    "recipe of Swin-MoE": CASES["recipe of Swin-MoE"],
    "tanh": CASES["tanh"],
    "weights gathered": {"call": {"adaptive_r": 0}},
    "2DH": {"layer": {"use_2dh": True}},
    "shared experts": {"experts": SHARED},
    "shared experts, few places": {"experts": SHARED, "gate": {"k": 1, "capacity_factor": 0.7}},
    "shared experts, model parallel": {"experts": SHARED, "layer": {"parallel_type": "model"}},
    "shared experts, weights gathered": {"experts": SHARED, "call": {"adaptive_r": 0}},
    "shared experts, tanh": {
        "experts": {**SHARED, "activation_fn": torch.tanh},
        "layer": {"parallel_type": "model"},
    },
    "shared llama experts": {"experts": {**SHARED, "type": "llama_ffn", "activation_fn": F.silu}},
}


def make_layer(case: dict[str, Any], moe, rank: int = 0):
    """The layer of a case, by `moe.moe_layer` of Tutel or of the engine."""
    gate = {"type": "top", "k": 2, "capacity_factor": 1.0, "fp32_gate": True}
    experts = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": HIDDEN}
    experts["activation_fn"] = F.relu
    return moe.moe_layer(
        gate_type=gate | case.get("gate", {}),
        model_dim=MODEL_DIM,
        experts=experts | case.get("experts", {}),
        scan_expert_func=lambda name, parameter: setattr(parameter, "skip_allreduce", True),
        seeds=(1, rank + 1, 1),
        **case.get("layer", {}),
    )


def losses(case: dict[str, Any], moe, net, rank: int = 0) -> list[float]:
    """The loss and the auxiliary loss of every step; each rank has its own tokens."""
    dtype = getattr(torch, case.get("dtype", "float32"))
    layer = make_layer(case, moe, rank).to(dtype)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    torch.manual_seed(rank)
    x = torch.randn(BATCH, TOKENS, MODEL_DIM).to(dtype)
    width = case.get("experts", {}).get("output_dim", MODEL_DIM)
    targets = torch.randint(width, (BATCH * TOKENS,))
    values = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        y = layer(x, **case.get("call", {}))
        loss = F.cross_entropy(y.flatten(0, 1), targets)
        values += [loss.item(), y.l_aux.item()]
        (loss + 0.1 * y.l_aux).backward()
        for parameter in layer.parameters():
            if not hasattr(parameter, "skip_allreduce") and parameter.grad is not None:
                average = net.simple_all_reduce(parameter.grad) / net.get_world_size()
                parameter.grad = average
        optimizer.step()
    return values


def recorded(num_ranks: int) -> dict[str, list[float]]:
    """By case, what `losses` gives with Tutel, on the first rank."""
    return json.loads(RECORDED.read_text())[str(num_ranks)]


def record() -> None:
    """Print the losses of every case as JSON."""
    from tutel import moe, net, system  # Tutel itself

    env = system.init_data_model_parallel(backend="gloo")
    cases = CASES if env.global_size == 1 else CASES_ON_RANKS
    values = {name: losses(case, moe, net, env.global_rank) for name, case in cases.items()}
    env.dist_print(json.dumps({env.global_size: values}))


if __name__ == "__main__":
    record()
