"""Energy of the GPUs of a run: which are read, by which process, and what is not known."""

import sys
from types import SimpleNamespace

import pytest
import torch

from swinv2_moe.train.energy import GpuEnergy, total

CUDA = torch.device("cuda", 0)


@pytest.fixture
def nvml(monkeypatch):
    """NVML with two GPUs, a and b: `energy` in millijoules, None without a counter; `opened`."""
    state = SimpleNamespace(energy={"GPU-a": 5000, "GPU-b": 7000}, opened=[])

    class NVMLError(Exception):
        pass

    def open_gpu(uuid):
        state.opened.append(uuid)
        return uuid

    def energy_of(handle):
        if state.energy[handle] is None:
            raise NVMLError("not supported")
        return state.energy[handle]

    fake = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=open_gpu,
        nvmlDeviceGetTotalEnergyConsumption=energy_of,
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    properties = lambda index: SimpleNamespace(uuid="ab"[index])  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    return state


def test_energy_since_the_last_call(nvml, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    energy = GpuEnergy(CUDA)
    assert nvml.opened == ["GPU-a", "GPU-b"]
    nvml.energy = {"GPU-a": 6000, "GPU-b": 9000}
    assert (energy.take(), energy.take()) == (3, 0)
    nvml.energy["GPU-b"] = None  # the sum would be wrong without it
    assert energy.take() is None


def test_only_the_gpus_of_the_run_and_one_process_of_a_machine(nvml, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    GpuEnergy(CUDA)
    assert nvml.opened == ["GPU-a"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert GpuEnergy(CUDA).take() is None
    assert nvml.opened == ["GPU-a"]


def test_without_a_gpu_nothing_is_known():
    assert GpuEnergy(torch.device("cpu")).take() is None
    assert (total([None, 2.0, 3.0]), total([None])) == (5.0, None)
