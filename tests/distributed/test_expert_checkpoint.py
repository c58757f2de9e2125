"""Checkpoint files of the experts belong to the model, not to the number of ranks that wrote
them."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo_processes import patches
from moe_cases import make_layer
from safetensors.torch import load_file, save_file
from torch import nn

from moe_core import MoEConfig, MoELayer, checkpoint
from moe_core.checkpoint import count_experts, load_tensors, save_tensors
from moe_core.training import local_tensor


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


def layer_of(value: float, num_experts: int) -> MoELayer:
    layer = MoELayer(MoEConfig(model_dim=4, hidden_dim=2, num_experts=num_experts))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(value)
    return layer


def values_in(directory: Path, model: nn.Module) -> set[float]:
    tensors = load_tensors(directory, model)
    assert tensors.keys() == model.state_dict().keys()
    return {float(value) for tensor in tensors.values() for value in tensor.flatten()}


def killed_in_save(directory: Path, layer: MoELayer, number: int) -> bool:
    """Save in a child process that is killed at the change of this number in `directory`."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL), status
        return status == signal.SIGKILL
    try:
        changes = 0

        def count(event: str, arguments: tuple) -> None:
            nonlocal changes
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"):
                changes += 1
                if changes == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        save_tensors(directory, layer, layer.state_dict())
        os._exit(0)
    finally:
        os._exit(1)


def test_killed_at_any_change_a_save_leaves_the_old_or_the_new_one(tmp_path):
    """The older model has 3 experts and the newer one 2."""
    results, number, killed = [], 0, True
    smaller = layer_of(0, 2)
    while killed:
        number += 1
        directory = tmp_path / str(number)
        first = layer_of(1, 3)
        save_tensors(directory, first, first.state_dict())
        note = directory / "experts" / "layer" / "note.txt"
        note.write_text("of the user")
        killed = killed_in_save(directory, layer_of(7, 2), number)
        (value,) = values_in(directory, smaller)
        assert count_experts(directory) == {"layer": 3 if value == 1 else 2}
        results.append(value)
        if number % 4 == 0 or not killed:  # the next save puts everything in order
            save_tensors(directory, smaller, smaller.state_dict())
            assert values_in(directory, smaller) == {0}
            assert note.read_text() == "of the user"
            files = {str(path.relative_to(directory)) for path in directory.rglob("*.*")}
            expected = {f"experts/layer/000{e}.safetensors" for e in range(2)}
            assert files == expected | {"experts/layer/note.txt", "model.safetensors"}
    assert results == sorted(results)
    assert set(results) == {1, 7}


def a_rank_cannot_write(rank: int, directory: Path) -> None:
    old, new = model_of(1, dist.group.WORLD), model_of(2, dist.group.WORLD)
    save_tensors(directory, old, old.state_dict())  # as if every rank were the main one
    write = checkpoint.write_tensors

    def full(file: Path, tensors: dict) -> None:
        if rank == 1 and file.name == "0003.safetensors":
            raise OSError("no space")
        write(file, tensors)

    patches.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(OSError, match=r"no space$"):
        save_tensors(directory, new, new.state_dict(), is_main=rank == 0)
    dist.barrier()
    expected = {name: local_tensor(tensor) for name, tensor in old.state_dict().items()}
    torch.testing.assert_close(load_tensors(directory, old), expected, rtol=0, atol=0)
    assert sorted(path.name for path in directory.iterdir()) == ["experts", "model.safetensors"]


def test_a_rank_that_cannot_write_leaves_the_earlier_save(run_processes, tmp_path):
    run_processes(a_rank_cannot_write, 2, tmp_path)


def tied(seed: int, group=None) -> nn.Module:
    """One layer under two names, one with the router of the first, and a tied head."""
    model = model_of(seed, group)
    torch.manual_seed(seed)
    config = model["moe"].config
    model["again"] = model["moe"]
    model["other"] = MoELayer(config, group, router=model["moe"].router).to(torch.float32)
    model["other"].experts.b1 = model["moe"].experts.b1
    model["head"] = nn.Linear(6, 6, bias=False)
    model["head"].weight = model["stem"].weight
    return model


def save_and_load_tied(rank: int, directory: Path) -> None:
    model, other = tied(1, dist.group.WORLD), tied(2, dist.group.WORLD)
    save_tensors(directory, model, model.state_dict(), is_main=rank == 0)
    tensors = load_tensors(directory, other)
    expected = {name: local_tensor(tensor) for name, tensor in model.state_dict().items()}
    torch.testing.assert_close(tensors, expected, rtol=0, atol=0)


def test_tied_weights_are_saved_by_each_name(run_processes, tmp_path):
    model, other = tied(1), tied(2)
    save_tensors(tmp_path / "one", model, model.state_dict())
    other.load_state_dict(load_tensors(tmp_path / "one", other))
    torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)
    run_processes(save_and_load_tied, 2, tmp_path / "two")
    tensors = load_tensors(tmp_path / "two", other)
    torch.testing.assert_close(tensors, dict(model.state_dict()), rtol=0, atol=0)
