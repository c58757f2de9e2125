"""Readings of the machine's counters, divided among the phases of a run."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch

from swinv2_moe.train.progress import PhaseTimes
from swinv2_moe.train.run import train
from swinv2_moe.train.telemetry import COUNTERS, Machine, Telemetry, combine, energy, open_machine

CPU = torch.device("cpu")


class FakeMachine:
    """Counters that grow when the test says so."""

    def __init__(self) -> None:
        self.values = {"cpu_busy": 0.0, "cpu_time": 0.0, "disk_read": 0.0}
        self.memory = 5.0

    def counters(self):
        return dict(self.values)

    def gauges(self):
        return {"memory": self.memory}


def test_growth_is_divided_by_the_seconds_of_the_phases(clock):
    phases, machine = PhaseTimes(), FakeMachine()
    phases.started()
    with Telemetry(phases, machine) as telemetry:
        with phases.phase("training"):
            clock.append(3)
        with phases.phase("validation"):
            clock.append(1)
        machine.values = {"cpu_busy": 4.0, "cpu_time": 8.0, "disk_read": 100.0}
        first = telemetry.take()
        with phases.phase("validation"):
            clock.append(2)
        machine.memory = 7.0
        second = telemetry.take()
    table = combine([first])
    assert table["training"]["seconds"] == 3
    assert table["training"]["disk_read"] == 25  # 75 bytes in 3 seconds
    nothing = dict.fromkeys(("disk_written", "net_received", "net_sent"), 0)
    expected = {"seconds": 1, "cpu": 0.5, "memory": 5, "disk_read": 25} | nothing
    assert table["validation"] == expected
    assert list(second) == ["validation"]
    assert (second["validation"]["seconds"], second["validation"]["memory"]) == (2, 7)


def test_several_machines():
    sums = {"seconds": 2.0, "cpu_busy": 1.0, "cpu_time": 4.0, "net_sent": 10.0, "memory": 3.0}
    other = sums | {"cpu_busy": 3.0, "memory": 9.0, "cpu_joules": 50.0, "gpu_seconds": 1.0}
    table = combine([{"training": sums}, None, {"training": other}])
    values = table["training"]
    assert (values["seconds"], values["cpu"], values["memory"]) == (2, 0.5, 9)
    assert (values["net_sent"], values["gpu"]) == (10, 0.25)
    assert (values["joules"], values["watts"]) == (50, 25)
    assert energy(table) == 50
    assert energy(combine([{"training": sums}])) is None


def test_only_the_first_process_of_a_machine_reads(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert open_machine(CPU) is None
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert open_machine(CPU) is not None
    with Telemetry(PhaseTimes(), None) as telemetry:
        assert telemetry.take() is None


def test_a_reading_that_fails_ends_nothing(caplog):
    machine = FakeMachine()
    with Telemetry(PhaseTimes(), machine) as telemetry:
        machine.gauges = lambda: 1 / 0
        assert telemetry.take() == {}
    assert "a reading failed (ZeroDivisionError" in caplog.text


def test_this_machine():
    machine = Machine(CPU)
    before = machine.counters()
    while machine.counters()["cpu_time"] == before["cpu_time"]:
        pass  # until the kernel has counted the time that this loop takes
    after = machine.counters()
    assert set(after) <= set(COUNTERS)
    assert all(after[name] >= before[name] for name in before)
    assert after["cpu_busy"] - before["cpu_busy"] <= after["cpu_time"] - before["cpu_time"] + 1e-6
    assert machine.gauges()["memory"] > 0


def test_energy_of_cpus(tmp_path):
    for name, microjoules in (
        ("intel-rapl:0", 900),
        ("intel-rapl:0:0", 1),  # a part of a package
        ("intel-rapl:1", 10),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{microjoules}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("1000\n")
    machine = Machine(CPU, tmp_path)
    assert machine.counters()["cpu_joules"] == 0
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("50\n")  # has wrapped around
    (tmp_path / "intel-rapl:1" / "energy_uj").write_text("30\n")
    assert machine.counters()["cpu_joules"] == pytest.approx(170e-6)


@pytest.fixture
def nvml(monkeypatch):
    """NVML with two GPUs, of which the second has no energy counter if the test says so."""
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
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=len(state.opened) * 25),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=ord(handle[-1])),
    )
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="ab"[index])
    )
    return state


def test_gpus(nvml, monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    machine = Machine(torch.device("cuda", 0), tmp_path)
    assert nvml.opened == ["GPU-a", "GPU-b"]
    assert machine.counters()["gpu_joules"] == 12
    gauges = machine.gauges()
    assert (gauges["gpu"], gauges["gpu_memory"]) == (0.5, ord("b"))
    nvml.energy["GPU-b"] = None  # the sum would be wrong without it
    assert "gpu_joules" not in machine.counters()


def test_only_the_gpus_of_the_run(nvml, monkeypatch, tmp_path):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    Machine(torch.device("cuda", 0), tmp_path)
    assert nvml.opened == ["GPU-a"]


def test_a_run_records_it(tmp_path, make_config, monkeypatch):
    monkeypatch.setattr("swinv2_moe.train.telemetry.PERIOD", 0.05)
    train(make_config(tmp_path / "run", {"TRAIN.MAX_STEPS": 2}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    (line,) = (line for line in lines if "telemetry" in line)
    assert {"data", "training", "validation"} <= set(line["telemetry"])
    training = line["telemetry"]["training"]
    assert 0 < training["cpu"] <= 1
    assert training["memory"] > 0
