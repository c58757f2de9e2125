"""A detector on two gloo processes, through mmengine's own runner: shared parameters stay equal to
the bit."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("mmdet", reason="needs the detection extra: make detection")

from detection_cases import make_data, tiny_config

CLIP, STEPS = 0.5, 4  # one epoch


def config_of(data: Path, work_dir: Path, expert_parallel: bool):
    config = tiny_config(
        data,
        work_dir,
        backbone={
            "expert_parallel": expert_parallel,
            "expert_strategy": "auto",
            "num_experts": 4,
            "drop_path_rate": 0.1,
        },
        train_dataloader__batch_size=1,
        train_cfg__max_epochs=1,
        optim_wrapper__clip_grad={"max_norm": CLIP},
        default_hooks__checkpoint__interval=1,
    )
    config.val_cfg = config.val_dataloader = config.val_evaluator = None
    return config


def train(rank: int, config):
    """The runner after its training; norms of each step are in its message hub."""
    from swinv2_moe.detection.runner import MoERunner

    os.environ["LOCAL_RANK"] = str(rank)  # as torchrun sets it
    config.launcher = "pytorch"
    torch.manual_seed(rank)
    runner = MoERunner.from_cfg(config)
    runner.train()
    return runner


def everyones(tensor: torch.Tensor) -> list[torch.Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def bits(tensors) -> torch.Tensor:
    return torch.cat([tensor.detach().reshape(-1).view(torch.int32) for tensor in tensors])


def check_ranks(rank: int, data: Path, root: Path, expert_parallel: bool) -> None:
    from swinv2_moe.detection.weights import sharded_experts

    work_dir = root / ("sharded" if expert_parallel else "replicated")
    runner = train(rank, config_of(data, work_dir, expert_parallel))
    model, optimizer = runner.detector, runner.optim_wrapper.optimizer
    norms = torch.as_tensor(runner.message_hub.get_scalar("train/grad_norm").data[0])
    assert len(norms) == STEPS
    assert (norms > CLIP).all()  # every step was clipped
    first, second = everyones(norms)
    assert torch.equal(first, second)
    owned = sharded_experts(model)
    assert bool(owned) == expert_parallel
    shared = {name: p for name, p in model.named_parameters() if name not in owned}
    states = [
        optimizer.state[p][kind] for p in shared.values() for kind in ("exp_avg", "exp_avg_sq")
    ]
    for first, second in (everyones(bits(shared.values())), everyones(bits(states))):
        assert torch.equal(first, second)
    for parameter in owned.values():
        first, second = everyones(parameter.detach())
        assert not torch.equal(first, second)  # other experts


def check_the_checkpoint_loads_anywhere(rank: int, data: Path, root: Path) -> None:
    """What two ranks with half of the experts each have saved, on one rank with all of them, and on
    two again."""
    from moe_core import load_tensors, strategy_decisions
    from swinv2_moe.checkpoints.checkpoint import find_checkpoint
    from swinv2_moe.detection.run import build_detector
    from swinv2_moe.detection.runner import MoERunner

    found = find_checkpoint(str(root / "sharded"), Path())
    decisions = found.meta["training"]["strategies"]
    whole = build_detector(config_of(data, root, False), str(root / "sharded"))
    config = config_of(data, root / "again", True)
    config.launcher, config.load_from = "pytorch", str(root / "sharded")
    runner = MoERunner.from_cfg(config)
    runner.load_or_resume()
    assert strategy_decisions(runner.detector) == decisions
    saved = load_tensors(found.directory, whole)
    assert saved.keys() == whole.state_dict().keys()
    for name, tensor in runner.detector.state_dict().items():
        wanted = saved[name]
        if tensor.shape != wanted.shape:
            wanted = wanted.chunk(2)[rank]
        assert torch.equal(tensor, wanted), name


def two_ranks(rank: int, data: Path, root: Path) -> None:
    for expert_parallel in (False, True):
        check_ranks(rank, data, root, expert_parallel)
    check_the_checkpoint_loads_anywhere(rank, data, root)


def test_two_ranks(run_processes, tmp_path):
    data = make_data(tmp_path / "data")
    run_processes(two_ranks, 2, data, tmp_path)
