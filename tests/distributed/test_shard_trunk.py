"""TRAIN.SHARD_TRUNK: the shared parameters sharded by FSDP2 give the run that DDP gives, and the
same checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from trainer_cases import QUICKSTART, make_trainer, resume, save, train_steps

from moe_core import expert_parameters
from swinv2_moe.checkpoints.checkpoint import open_checkpoint, read_section
from swinv2_moe.config import load_config
from swinv2_moe.errors import UserError
from swinv2_moe.train.loop import Trainer

VARIANTS = [
    "TRAIN.ACCUMULATION_STEPS 2 TRAIN.CLIP_GRAD 0.5 TRAIN.USE_CHECKPOINT True TRAIN.EMA_DECAY 0.5",
    "TRAIN.OPTIMIZER.NAME sgd AMP_ENABLE True AMP_DTYPE float16 MODEL.TYPE swin_moe"
    " TRAIN.LAYER_DECAY 0.9",
]
MORE_VARIANTS = [
    "TRAIN.USE_CHECKPOINT True AMP_ENABLE True MODEL.MOE.ROUTER cosine",
    "MODEL.MOE.NUM_EXPERTS 0",
]


def whole_state(trainer: Trainer) -> dict[str, Tensor]:
    state = trainer.step.deployed.state_dict()
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


def local_bytes(tensors) -> int:
    return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)


def check_sharded_equals_replicated(rank: int, variant: str) -> None:
    """Validation comes first, in inference mode, and in between."""
    replicated, sharded = (
        make_trainer(rank, 2, f"{variant} TRAIN.SHARD_TRUNK {shard}") for shard in (False, True)
    )
    outcomes = []
    for trainer in (replicated, sharded):
        accuracies = [trainer.validate()]
        steps = train_steps(trainer, 2)
        accuracies.append(trainer.validate())
        steps += train_steps(trainer, 2)
        outcomes.append(
            (torch.tensor(steps), torch.tensor([accuracy[:3] for accuracy in accuracies]))
        )
    torch.testing.assert_close(
        outcomes[1], outcomes[0], rtol=1e-5, atol=1e-6, msg=lambda text: f"{variant}: {text}"
    )
    assert outcomes[0][1][0, 2] != outcomes[0][1][1, 2]
    torch.testing.assert_close(whole_state(sharded), whole_state(replicated), rtol=1e-4, atol=1e-6)
    assert sharded.step.scaler.state() == replicated.step.scaler.state()


def sharded_equals_replicated(rank: int, variants: list[str]) -> None:
    for variant in variants:
        check_sharded_equals_replicated(rank, variant)


@pytest.mark.parametrize(
    "variants", [VARIANTS, pytest.param(MORE_VARIANTS, marks=pytest.mark.slow)]
)
def test_sharded_equals_replicated(variants, run_processes):
    run_processes(sharded_equals_replicated, 2, variants)


def every_shared_tensor_is_sharded(rank: int) -> None:
    trainer = make_trainer(rank, 4, "TRAIN.SHARD_TRUNK True TRAIN.EMA_DECAY 0.9")
    train_steps(trainer, 1)
    trainer.validate()
    for model in (trainer.step.model, trainer.step.ema.module):
        experts = expert_parameters(model)
        shared = [p for name, p in model.named_parameters() if name not in experts]
        assert len(experts) == 8
        assert all(isinstance(p, DTensor) for p in shared)
        assert not any(isinstance(p, DTensor) for p in experts.values())
        whole = sum(p.numel() * p.element_size() for p in shared)
        # two heads' 512 weights are cut into 1, 1, 0 and 0
        assert local_bytes(shared) < 0.26 * whole + 512 * 4 * 4
        assert trainer.world.sum(torch.tensor(local_bytes(shared))) == whole
    state = trainer.step.optimizer.state
    for name, parameter in trainer.step.model.named_parameters():
        assert local_bytes([state[parameter]["exp_avg"]]) == local_bytes([parameter]), name


def test_a_rank_holds_its_share_of_the_trunk(run_processes):
    run_processes(every_shared_tensor_is_sharded, 4)


def goes_on_sharded(rank: int, source: Path, target: Path) -> None:
    """The checkpoint of one process, resumed sharded on four: the same state; two more steps;
    saved."""
    trainer = make_trainer(rank, 4, "TRAIN.SHARD_TRUNK True TRAIN.EMA_DECAY 0.5")
    train_steps(trainer, 1)  # a state that is to be replaced
    trunk = [n for n, t in trainer.step.model.state_dict().items() if isinstance(t, DTensor)]
    read = read_section(
        open_checkpoint(source), "", trainer.step.model, trainer.step.model.state_dict()
    )
    assert local_bytes([read[name] for name in trunk]) < 0.3 * sum(
        read[name].nbytes for name in trunk
    )
    resume(trainer, source)
    save(trainer, target / "again")
    train_steps(trainer, 2)
    save(trainer, target / "further")


def test_checkpoints_of_one_process_and_of_four_that_shard(run_processes, tmp_path):
    single = make_trainer(0, 1, "TRAIN.EMA_DECAY 0.5")
    train_steps(single, 2)
    first = save(single, tmp_path / "single")
    run_processes(goes_on_sharded, 4, first, tmp_path)
    assert_same_files(first, tmp_path / "again" / "latest", rtol=0, atol=0)

    back = make_trainer(0, 1, "TRAIN.EMA_DECAY 0.5")
    resume(back, tmp_path / "further" / "latest")
    assert (back.progress.step, back.step.scaler.updates) == (4, 4)
    train_steps(single, 2)
    expected, found = save(single, tmp_path / "expected"), save(back, tmp_path / "back")
    assert_same_files(expected, found, rtol=1e-2, atol=1e-4)


def assert_same_files(expected: Path, found: Path, **tolerance) -> None:
    files = sorted(path.relative_to(expected) for path in expected.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(found) for path in found.rglob("*.safetensors"))
    # weights, their average and two moments: the trunk, two layers' experts
    assert len(files) == 4 * (1 + 2 * 4)
    for file in files:
        torch.testing.assert_close(load_file(found / file), load_file(expected / file), **tolerance)


def a_number_that_is_not_finite(rank: int) -> None:
    trainer = make_trainer(rank, 2, "TRAIN.SHARD_TRUNK True")
    weight = trainer.step.model.layers[1].blocks[0].attn.proj.weight
    if rank == 0:
        weight.detach().to_local()[0, 0] = float("nan")
    with pytest.raises(
        UserError,
        match=r"step 1: .* begins at the parameter layers\.1\.blocks\.0\.attn\.proj\.weight",
    ):
        train_steps(trainer, 1)


def test_a_number_that_is_not_finite_is_named(run_processes):
    run_processes(a_number_that_is_not_finite, 2)


def test_one_process_has_nothing_to_shard():
    trainer = make_trainer(0, 1, "TRAIN.SHARD_TRUNK True")
    assert not any(isinstance(p, DTensor) for p in trainer.step.model.parameters())


def test_not_with_compile():
    with pytest.raises(
        UserError, match=r"TRAIN\.SHARD_TRUNK is True: it does not work with COMPILE"
    ):
        load_config(QUICKSTART, ["TRAIN.SHARD_TRUNK", "True", "COMPILE", "True"])
