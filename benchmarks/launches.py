"""How many kernels an MoE layer and a training step launch on a GPU, counted without one.

    python benchmarks/launches.py              (layers, half a minute)
    python benchmarks/launches.py --step       (a training step of SwinV2-MoE-B, two minutes)

Triton's kernels run in its interpreter, and each launch counts as one. Of torch's operators, those
count that compute; views, allocations and operators that consist of others do not. A GPU's own
counts differ a little: its sort is several kernels, for example. Two ranks communicate over gloo;
each of their collectives counts as one, and so does an operator on a list of tensors
(`_foreach_*`). The counts do not depend on the sizes: the network is narrow and its images small.
"""

# T tokens, E experts, K top-k, M model dim

import argparse
import importlib
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

LAUNCH = "triton launch"
LAYERS = {
    "E = 8, K = 1, capacity 1.25": {"num_experts": 8, "capacity_factor": 1.25},
    "E = 8, K = 2, capacity 1.25": {"num_experts": 8, "top_k": 2, "capacity_factor": 1.25},
    "E = 8, K = 1, dropless": {"num_experts": 8, "capacity_factor": 0.0},
    "E = 8, K = 1, dropout 0.1": {
        "num_experts": 8,
        "capacity_factor": 1.25,
        "hidden_dropout": 0.1,
    },
}
# torch's operators that launch no kernel: views, allocations, and operators that call others
_LAUNCH_NOTHING = """
promote_types dropout
empty empty_like empty_strided new_empty resize_ set_ view reshape _reshape_alias
_unsafe_view as_strided expand expand_as permute transpose t unsqueeze squeeze select
slice narrow split split_with_sizes chunk unbind detach alias flatten unflatten view_as
result_type lift_fresh _local_scalar_dense item is_nonzero to _to_copy contiguous clone
resolve_conj resolve_neg
"""
_NOTHING = {f"aten::{name}" for name in _LAUNCH_NOTHING.split()}
_CONFIGS = Path(__file__).parents[1] / "configs" / "in22k"
NETWORKS = ("swin_moe_base_window12_192_dense", "swin_moe_base_window12_192_8expert")
_SMALL = (
    "DEVICE cpu MODEL.SWINV2.EMBED_DIM 16 MODEL.SWINV2.NUM_HEADS [1,2,4,8] DATA.IMG_SIZE 64"
    " MODEL.SWINV2.WINDOW_SIZE 4 DATA.BATCH_SIZE 2 COMPILE False"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operators", action="store_true", help="list what was counted")
    parser.add_argument("--step", action="store_true", help="a training step, not layers")
    args = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") != "1":
        environment = {**os.environ, "TRITON_INTERPRET": "1"}
        raise SystemExit(subprocess.run([sys.executable, *sys.argv], env=environment).returncode)
    if args.step:
        print_steps(args.operators)
        return
    print("| layer | ranks | forward | forward and backward |")
    print("| --- | --- | --- | --- |")
    for num_ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            queue = mp.get_context("spawn").SimpleQueue()
            store = f"file://{folder}/store"
            mp.spawn(_layers_of_rank, (num_ranks, store, queue), num_ranks)
            for name, counts in queue.get().items():
                totals = [sum(count.values()) for count in counts]
                print(f"| {name} | {num_ranks} | {totals[0]} | {totals[1]} |")
                if args.operators:
                    print(dict(counts[1].most_common()), file=sys.stderr)


def _layers_of_rank(rank: int, num_ranks: int, store: str, queue) -> None:
    _prepare()
    group = None
    if num_ranks > 1:
        dist.init_process_group("gloo", store, rank=rank, world_size=num_ranks)
        group = dist.group.WORLD
    counts = {}
    for name, config in LAYERS.items():
        counts[name] = _counts_of_layer(config, group)
    if rank == 0:
        queue.put(counts)
    if num_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def _counts_of_layer(config: dict, group) -> tuple[Counter, Counter]:
    from moe_core import MoEConfig, MoELayer

    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(32, 64, kernels="triton", **config), group)
    x = torch.randn(40, 32, requires_grad=True)
    # the dtype that autocast gives to the experts; numpy, which the interpreter uses, has no bf16
    autocast = torch.autocast("cpu", torch.float16)

    def forward() -> torch.Tensor:
        with autocast:
            y, aux_loss = layer(x)
        return y, aux_loss

    def both() -> None:
        y, aux_loss = forward()
        torch.autograd.backward([y, aux_loss], [torch.ones_like(y), torch.ones_like(aux_loss)])

    both()
    layer.zero_grad()
    return count_launches(forward), count_launches(both)


def print_steps(list_operators: bool) -> None:
    """The launches of a training step of SwinV2-B, dense and with experts."""
    _prepare()
    print("| network | forward, backward and update |")
    print("| --- | --- |")
    for network in NETWORKS:
        counts = _counts_of_step(network)
        print(f"| {network} | {sum(counts.values())} |", flush=True)
        if list_operators:
            print(dict(counts.most_common()), file=sys.stderr)


def _counts_of_step(network: str) -> Counter:
    from swinv2_moe.config import all_sections, load_config
    from swinv2_moe.data import Batch
    from swinv2_moe.models import build_model, window_attention
    from swinv2_moe.train.distributed import World, expert_group
    from swinv2_moe.train.step import TrainingStep

    opts = [*_SMALL.split(), "MODEL.MOE.KERNELS", "triton"]
    config = all_sections(load_config(_CONFIGS / f"{network}.yaml", opts, data="none"))
    world = World(0, 1, torch.device("cpu"), None)
    torch.manual_seed(0)
    model = build_model(config.model, 10, expert_group(config.model.experts, world))
    # numpy, which the interpreter uses, has no bf16; a configuration does not allow fp16 on a CPU
    window_attention.runs = lambda qkv: qkv.dtype == torch.float16
    step = TrainingStep(config.train, world, model, 10)
    step.autocast = lambda: torch.autocast("cpu", torch.float16)
    step.compute_dtype = torch.float16
    step.wrapped.train()
    batch = Batch(torch.randn(2, 3, 64, 64), torch.arange(2), [])
    step.run([batch], 0)  # creates the optimiser's moments
    return count_launches(lambda: step.run([batch], 1))


def _prepare() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    importlib.import_module("triton_cases")  # repairs Triton's interpreter
    torch.set_num_threads(1)


def count_launches(function: Callable[[], object]) -> Counter:
    """The launches of one call, by operator."""
    from triton.runtime.interpreter import GridExecutor

    run = GridExecutor.__call__

    def recorded(*args, **kwargs):
        with record_function(LAUNCH):
            return run(*args, **kwargs)

    GridExecutor.__call__ = recorded
    try:
        with profile(activities=[ProfilerActivity.CPU]) as recording:
            function()
    finally:
        GridExecutor.__call__ = run
    counts: Counter = Counter()
    for event in recording.events():
        if event.cpu_parent is None:
            _add(event, counts)
    return counts


def _add(event, counts: Counter) -> None:
    """Count an operator or, if it calls others, the operators that it calls."""
    if event.name == LAUNCH:
        counts[LAUNCH] += 1
        return
    if event.name.startswith(("c10d::", "aten::_foreach_")):
        counts[event.name] += 1
        return
    of_children: Counter = Counter()
    for child in event.cpu_children:
        _add(child, of_children)
    counts.update(of_children)
    is_operator = event.name.startswith("aten::") and event.name not in _NOTHING
    if is_operator and not of_children:
        counts[event.name] += 1


if __name__ == "__main__":
    main()
