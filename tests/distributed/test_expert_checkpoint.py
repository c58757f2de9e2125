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
from moe_cases import make_layer, owned
from safetensors.torch import load_file, save_file
from torch import nn

from moe_core import MoEConfig, MoELayer, checkpoint
from moe_core.checkpoint import count_experts, load_tensors, save_tensors
from moe_core.training import local_tensor


def model_of(seed: int, group=None, **config) -> nn.Module:
    torch.manual_seed(seed)
    moe = make_layer(seed, torch.float32, group, **config)
    return nn.ModuleDict({"stem": nn.Linear(6, 6), "moe": moe})


def save(rank: int, directory: Path, config: dict) -> None:
    model = model_of(1, dist.group.WORLD, **config)
    save_tensors(directory, model, model.state_dict(), is_main=rank == 0)
    dist.barrier()


def load(rank: int, directory: Path, config: dict) -> None:
    model, whole = model_of(2, dist.group.WORLD, **config), model_of(1, **config)
    model.load_state_dict(load_tensors(directory, model))
    assert torch.equal(model["stem"].weight, whole["stem"].weight)
    for name, parameter in model["moe"].named_parameters():
        assert torch.equal(parameter, owned(whole["moe"].get_parameter(name), model["moe"], name))


# of the second, two ranks share an expert
@pytest.mark.parametrize("config", [{}, {"gated": True, "activation": "silu", "num_experts": 2}])
def test_what_four_ranks_save_one_and_two_load_and_back(run_processes, config, tmp_path):
    run_processes(save, 4, tmp_path / "four", config)
    assert count_experts(tmp_path / "four") == {"moe": config.get("num_experts", 4)}
    model = model_of(2, **config)
    model.load_state_dict(load_tensors(tmp_path / "four", model))
    whole = model_of(1, **config).state_dict()
    torch.testing.assert_close(model.state_dict(), whole, rtol=0, atol=0)
    save_tensors(tmp_path / "one", model, model.state_dict())
    for world_size in (2, 4):
        run_processes(load, world_size, tmp_path / "one", config)


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


def filled(value: float, num_experts: int, names: str = "ab") -> nn.Module:
    """A model with a layer of each name, all values of which are equal."""
    config = MoEConfig(model_dim=4, hidden_dim=2, num_experts=num_experts)
    model = nn.ModuleDict({name: MoELayer(config) for name in names} | {"stem": nn.Linear(2, 2)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def values_in(directory: Path, model: nn.Module) -> set[float]:
    tensors = load_tensors(directory, model)
    assert tensors.keys() == model.state_dict().keys()
    return {float(value) for tensor in tensors.values() for value in tensor.flatten()}


def killed_in_save(directory: Path, model: nn.Module, number: int) -> bool:
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
        save_tensors(directory, model, model.state_dict())
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("layers", ["b", ""])
def test_killed_at_any_change_a_save_leaves_the_old_or_the_new_one(layers, tmp_path):
    """The older model has two layers of 3 experts, the newer one a layer of 2, or none."""
    results, number, killed = [], 0, True
    smaller = filled(0, 2, layers)
    notes = [
        "experts/a/note.txt",
        "experts/a/0001.safetensors/mine",
        "experts/b/c/0000.safetensors",
    ]
    while killed:
        number += 1
        directory = tmp_path / str(number)
        first = filled(1, 3)
        save_tensors(directory, first, first.state_dict())
        (directory / "experts/a/0001.safetensors").unlink()
        for note in notes:
            (directory / note).parent.mkdir(parents=True, exist_ok=True)
            (directory / note).write_text("of the user")
        killed = killed_in_save(directory, filled(7, 2, layers), number)
        trunk = load_file(checkpoint._current(directory, "model.safetensors"))
        value = float(trunk["stem.bias"][0])
        if value == 7:
            assert values_in(directory, smaller) == {7}
        assert count_experts(directory) == (
            {"a": 2, "b": 3} if value == 1 else dict.fromkeys(layers, 2)
        )
        results.append(value)
        if number % 4 == 0 or not killed:  # the next save puts everything in order
            save_tensors(directory, smaller, smaller.state_dict())
            assert values_in(directory, smaller) == {0}
            assert all((directory / note).read_text() == "of the user" for note in notes)
            files = {str(path.relative_to(directory)) for path in directory.rglob("*")}
            kept = {path for path in files if (directory / path).is_file()}
            expected = {f"experts/{name}/000{e}.safetensors" for name in layers for e in range(2)}
            assert kept == expected | {"model.safetensors", *notes}
    assert results == sorted(results)
    assert set(results) == {1, 7}


@pytest.mark.parametrize(
    ("in_the_way", "is_folder"),
    [
        ("model.safetensors", True),
        ("experts/a/0001.safetensors", True),
        ("experts/a", False),
        ("experts", False),
    ],
)
@pytest.mark.parametrize("layers", ["a", ""])
def test_what_is_in_the_way_leaves_the_old_model(in_the_way, is_folder, layers, tmp_path):
    old, new = filled(1, 2, ""), filled(7, 2, layers)
    save_tensors(tmp_path, old, old.state_dict())
    path = tmp_path / in_the_way
    if path.exists():
        path.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir() if is_folder else path.write_text("of the user")
    before = sorted(tmp_path.rglob("*"))
    if not layers and in_the_way.startswith("experts/"):
        save_tensors(tmp_path, new, new.state_dict())  # nothing needs its name
        assert values_in(tmp_path, new) == {7}
        assert is_folder or path.read_text() == "of the user"
        return
    kind = "a folder" if is_folder else "no folder"
    with pytest.raises(OSError, match=f"{in_the_way} is {kind}, a save needs its name"):
        save_tensors(tmp_path, new, new.state_dict())
    assert sorted(tmp_path.rglob("*")) == before


def test_a_save_in_force_is_no_error(tmp_path, monkeypatch, caplog):
    old, new = filled(1, 2), filled(7, 2, "a")
    save_tensors(tmp_path, old, old.state_dict())

    def fail(path, target):
        raise PermissionError("not this one")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        save_tensors(tmp_path, new, new.state_dict())
    assert "the save is complete, but its files stay in .save" in caplog.text
    assert values_in(tmp_path, new) == {7}
    save_tensors(tmp_path, new, new.state_dict())
    assert count_experts(tmp_path) == {"a": 2}
    assert not (tmp_path / ".save").exists()


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
