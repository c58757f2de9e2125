"""Binding of ranks to NUMA nodes, on a sysfs tree of a machine that is not there."""

import os
from types import SimpleNamespace

import pytest
import torch

from swinv2_moe.errors import UserError
from swinv2_moe.train import placement
from swinv2_moe.train.placement import bound_to_node, equal_part, parse_cpu_list, placement_line

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
GPU = "0000:1b:00.0"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`machine(nodes, allowed, gpu_node)` -> sysfs; `machine.bound` records the affinities set."""
    bound = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cpus: bound.append(cpus))
    monkeypatch.setattr(placement, "_TASKS", tmp_path / "none")
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    address = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: address)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)

    def make(nodes, allowed=range(8), gpu_node=None):
        monkeypatch.setattr(os, "sched_getaffinity", lambda thread: set(allowed))
        for number, cpus in enumerate(nodes):
            directory = tmp_path / "devices/system/node" / f"node{number}"
            directory.mkdir(parents=True)
            (directory / "cpulist").write_text(f"{cpus}\n")
        if gpu_node is not None:
            device = tmp_path / "bus/pci/devices" / GPU
            device.mkdir(parents=True)
            (device / "numa_node").write_text(f"{gpu_node}\n")
        return tmp_path

    make.bound = bound
    return make


def test_a_rank_is_bound_to_the_node_of_its_gpu_and_released(machine):
    sysfs = machine(["0-1,4-5", "2-3,6-7", ""], gpu_node=1)
    with bound_to_node("auto", CUDA, sysfs) as text:
        assert machine.bound == [{2, 3, 6, 7}]
    assert text == "NUMA node 1 (4 CPUs)"
    assert machine.bound[1:] == [set(range(8))]


@pytest.mark.parametrize(
    ("rank", "size", "cpus"), [(0, 2, {0, 1, 2, 3}), (1, 2, {4, 5, 6, 7}), (3, 4, {6, 7})]
)
def test_ranks_without_a_gpu_share_the_nodes(rank, size, cpus, machine, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", str(rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(size))
    with bound_to_node("auto", CPU, machine(["0-1", "2-3", "4-5", "6-7"])):
        assert machine.bound == [cpus]


TWO = {"nodes": ["0-3", "4-7"]}


@pytest.mark.parametrize(
    ("bind", "device", "tree", "reason"),
    [
        ("none", CUDA, TWO | {"gpu_node": 0}, "--bind none"),
        ("auto", CPU, TWO, "one rank without a GPU"),
        ("auto", CUDA, TWO | {"allowed": range(2), "gpu_node": 0}, "scheduler allows 2 of 8 CPUs"),
        ("auto", CUDA, TWO | {"gpu_node": -1}, f"node of GPU {GPU} is -1"),
        ("auto", CUDA, TWO | {"gpu_node": "x"}, f"of GPU {GPU} is not known"),
        ("auto", CUDA, TWO, f"of GPU {GPU} is not known"),
    ],
)
def test_where_a_rank_is_not_bound(bind, device, tree, reason, machine):
    with bound_to_node(bind, device, machine(**tree)) as text:
        assert machine.bound == []
    assert text.startswith("not bound (")
    assert reason in text


@pytest.mark.parametrize("nodes", [["0-7"], [], ["0-3", "a-b"]])
def test_one_node_needs_no_line(nodes, machine):
    with bound_to_node("auto", CUDA, machine(nodes, gpu_node=0)) as text:
        assert (text, machine.bound) == ("", [])


def test_parts_that_do_not_divide():
    assert equal_part([0, 1], 3, 6) == [1]
    with pytest.raises(placement.NotBound, match="3 ranks do not divide over 2 NUMA nodes"):
        equal_part([0, 1], 0, 3)


def test_lists_of_cpus():
    assert parse_cpu_list("0-2,5,7-8\n") == {0, 1, 2, 5, 7, 8}
    assert parse_cpu_list("\n") == set()


def test_another_value_is_refused():
    with pytest.raises(UserError, match=r"--bind is 'numa', allowed: auto, none"):
        bound_to_node("numa", CPU).__enter__()


def test_the_threads_of_this_process_can_be_bound():
    """The real call, to the CPUs that the process has already."""
    placement._set_affinity(os.sched_getaffinity(0))


def test_the_line_of_the_log():
    placements = ["NUMA node 0 (4 CPUs)"] * 2 + ["NUMA node 1 (4 CPUs)"]
    assert placement_line(placements) == (
        "placement: NUMA node 0 (4 CPUs): 2 ranks; NUMA node 1 (4 CPUs): 1 rank"
    )
