"""Checkpoint files of the experts belong to the model, not to the number of ranks that wrote
them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from moe_cases import make_layer
from safetensors.torch import load_file, save_file
from torch import nn

from moe_core.checkpoint import count_experts, load_tensors, save_tensors


def model_of(seed: int, group=None) -> nn.Module:
    torch.manual_seed(seed)
    return nn.ModuleDict({"stem": nn.Linear(6, 6), "moe": make_layer(seed, torch.float32, group)})


def save(rank: int, directory: Path) -> None:
    model = model_of(1, dist.group.WORLD)
    save_tensors(directory, model, model.state_dict(), is_main=rank == 0)
    dist.barrier()


def load(rank: int, directory: Path) -> None:
    model, whole = model_of(2, dist.group.WORLD), model_of(1)
    model.load_state_dict(load_tensors(directory, model))
    first, count = model["moe"].shard[:2]
    for name, parameter in model.named_parameters():
        expected = whole.get_parameter(name)
        assert torch.equal(
            parameter, expected[first : first + count] if "experts" in name else expected
        )


def test_what_four_ranks_save_one_and_two_load_and_back(run_processes, tmp_path):
    run_processes(save, 4, tmp_path / "four")
    assert count_experts(tmp_path / "four") == {"moe": 4}
    model = model_of(2)
    model.load_state_dict(load_tensors(tmp_path / "four", model))
    torch.testing.assert_close(model.state_dict(), model_of(1).state_dict(), rtol=0, atol=0)
    save_tensors(tmp_path / "one", model, model.state_dict())
    for world_size in (2, 4):
        run_processes(load, world_size, tmp_path / "one")


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (Path.unlink, FileNotFoundError),
        (lambda file: file.write_bytes(b"not safetensors"), ValueError),
        (
            lambda file: file.write_bytes((file.parents[2] / "model.safetensors").read_bytes()),
            ValueError,
        ),
        (
            lambda file: save_file({k: v.half() for k, v in load_file(file).items()}, file),
            ValueError,
        ),
    ],
    ids=["missing", "unreadable", "another's", "of another dtype"],
)
def test_a_damaged_expert_file_is_named(tmp_path, damage, error):
    model = model_of(1)
    save_tensors(tmp_path, model, model.state_dict())
    damage(tmp_path / "experts" / "moe" / "0002.safetensors")
    with pytest.raises(error, match=r"0002\.safetensors"):
        load_tensors(tmp_path, model)
