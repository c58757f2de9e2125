"""Use of CPUs, memory, disks, network and GPUs, and energy, in each phase of a run."""

import contextlib
import logging
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from swinv2_moe.train.progress import PhaseTimes

_log = logging.getLogger(__name__)
PERIOD = 5.0  # seconds between two readings
_RATES = ("disk_read", "disk_written", "net_received", "net_sent")
_LARGEST = ("memory", "gpu_memory")
_ENERGY = ("cpu_joules", "gpu_joules")
_POWERCAP = Path("/sys/class/powercap")
# units: counters are in bytes, seconds of all CPUs together, and joules.
COUNTERS = ("cpu_busy", "cpu_time", *_RATES, *_ENERGY)


class Machine:
    """The counters and gauges of this machine, including the GPUs of this run."""

    def __init__(self, device: torch.device, powercap: Path = _POWERCAP) -> None:
        """Find the counters and GPUs.

        Args:
            device: the device of this process. With "cuda", the GPUs of all processes of this run
                on this machine are read.
            powercap: the directory in which Linux shows the energy counters of CPUs (RAPL).
        """
        self._packages = [_RaplPackage(path) for path in _rapl_packages(powercap)]
        self._gpus: list[_Gpu] = []
        if device.type == "cuda":
            self._gpus = _open_gpus()

    def counters(self) -> dict[str, float]:
        """The values of those `COUNTERS` that this machine has. Only differences between two calls
        have a meaning."""
        times = psutil.cpu_times()
        # guest time is part of user time
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        values = {"cpu_busy": total - idle, "cpu_time": total}
        disk = psutil.disk_io_counters()
        if disk is not None:
            values |= {"disk_read": disk.read_bytes, "disk_written": disk.write_bytes}
        interfaces = psutil.net_io_counters(pernic=True)
        outside = [counts for name, counts in interfaces.items() if name != "lo"]
        values["net_received"] = sum(counts.bytes_recv for counts in outside)
        values["net_sent"] = sum(counts.bytes_sent for counts in outside)
        if self._packages:
            values["cpu_joules"] = sum(package.joules() for package in self._packages)
        gpu_joules = [gpu.joules() for gpu in self._gpus]
        if gpu_joules and None not in gpu_joules:
            values["gpu_joules"] = sum(gpu_joules)
        return values

    def gauges(self) -> dict[str, float]:
        """Bytes of memory in use; the mean use (0 to 1) and the largest memory use of the GPUs."""
        memory = psutil.virtual_memory()
        values = {"memory": float(memory.total - memory.available)}
        if self._gpus:
            values["gpu"] = sum(gpu.use() for gpu in self._gpus) / len(self._gpus)
            values["gpu_memory"] = max(gpu.memory() for gpu in self._gpus)
        return values


def _rapl_packages(powercap: Path) -> list[Path]:
    """The CPU packages whose energy this process may read. Often only root may."""
    packages = []
    for path in sorted(powercap.glob("intel-rapl:*")):
        is_package = re.fullmatch(r"intel-rapl:\d+", path.name)
        if is_package and os.access(path / "energy_uj", os.R_OK):
            packages.append(path)
    return packages


class _RaplPackage:
    """The energy counter of one CPU package, corrected for wrap-around."""

    def __init__(self, path: Path) -> None:
        self._file = path / "energy_uj"
        self._range = int((path / "max_energy_range_uj").read_text())
        self._last = int(self._file.read_text())
        self._total = 0

    def joules(self) -> float:
        now = int(self._file.read_text())
        step = now - self._last
        if step < 0:
            step += self._range
        self._total += step
        self._last = now
        return self._total / 1e6


def _open_gpus() -> list["_Gpu"]:
    """The GPUs of this run's processes on this machine; none if NVML is not available."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    count = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    count = min(count, torch.cuda.device_count())
    gpus = []
    with contextlib.suppress(pynvml.NVMLError):
        for index in range(count):
            uuid = torch.cuda.get_device_properties(index).uuid
            gpus.append(_Gpu(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")))
    return gpus


class _Gpu:
    def __init__(self, handle: object) -> None:
        self._handle = handle

    def _read(self, name: str) -> Any:
        """The result of NVML's function `name`; None if this GPU does not support it."""
        import pynvml

        try:
            return getattr(pynvml, name)(self._handle)
        except pynvml.NVMLError:
            return None

    def joules(self) -> float | None:
        millijoules = self._read("nvmlDeviceGetTotalEnergyConsumption")
        if millijoules is None:
            return None
        return millijoules / 1e3

    def use(self) -> float:
        rates = self._read("nvmlDeviceGetUtilizationRates")
        if rates is None:
            return 0.0
        return rates.gpu / 100

    def memory(self) -> float:
        memory = self._read("nvmlDeviceGetMemoryInfo")
        if memory is None:
            return 0.0
        return float(memory.used)


class Telemetry:
    """A thread that reads this machine's counters, as a context manager.

    The increase of a counter between two readings is divided among the phases in that time, in
    proportion to their seconds. Only the first process of each machine reads.
    """

    def __init__(self, phases: PhaseTimes, machine: Machine | None) -> None:
        """Create the thread, which starts with the context.

        Args:
            machine: the machine to read; None: this process does not read.
        """
        self._phases = phases
        self._machine = machine
        self._sums: dict[str, dict[str, float]] = {}
        self._lock = threading.Lock()  # protects the readings
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Telemetry":
        if self._machine is not None:
            self._times = self._phases.seconds()
            self._counters = self._machine.counters()
            self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD):
            self._read()

    def _read(self) -> None:
        """Add the changes since the last reading."""
        try:
            self._add()
        except Exception as error:  # a counter that vanished must not end a run
            _log.warning("telemetry: a reading failed (%s: %s)", type(error).__name__, error)

    def _add(self) -> None:
        machine = self._machine
        assert machine is not None
        with self._lock:
            times = self._phases.seconds()
            counters = machine.counters()
            gauges = machine.gauges()
            spent = {phase: times[phase] - self._times[phase] for phase in times}
            interval = sum(spent.values())
            for phase, seconds in spent.items():
                if seconds <= 0:
                    continue
                sums = self._sums.setdefault(phase, {"seconds": 0.0})
                sums["seconds"] += seconds
                share = seconds / interval
                for name, value in counters.items():
                    grown = value - self._counters.get(name, value)
                    sums[name] = sums.get(name, 0.0) + share * grown
                for name in _LARGEST:
                    if name in gauges:
                        sums[name] = max(sums.get(name, 0.0), gauges[name])
                if "gpu" in gauges:
                    sums["gpu_seconds"] = sums.get("gpu_seconds", 0.0) + seconds * gauges["gpu"]
            self._times = times
            self._counters = counters

    def take(self) -> dict[str, dict[str, float]] | None:
        """The sums of each phase since the last call; None for a process that does not read."""
        if self._thread is None:
            return None
        self._read()
        with self._lock:
            sums = self._sums
            self._sums = {}
        return sums


def open_machine(device: torch.device) -> Machine | None:
    """This machine, for its first process; None for the others."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    return Machine(device)


def combine(machines: Sequence[dict[str, dict[str, float]] | None]) -> dict[str, dict]:
    """One table of the measurements of all machines, by phase.

    Returns:
        For each phase: `seconds` (mean over the machines), `cpu` and `gpu` (mean use, 0 to 1),
        `memory` and `gpu_memory` (maximum, in bytes), `disk_read`, `disk_written`, `net_received`,
        `net_sent` (bytes per second, summed over the machines), and `joules` and `watts` (summed
        over the machines), if known.
    """
    read = [sums for sums in machines if sums is not None]
    phases = dict.fromkeys(phase for sums in read for phase in sums)
    return {phase: _of_phase([sums[phase] for sums in read if phase in sums]) for phase in phases}


def _of_phase(machines: list[dict[str, float]]) -> dict[str, float]:
    def total(name: str) -> float:
        return sum(sums.get(name, 0.0) for sums in machines)

    seconds = total("seconds") / len(machines)
    values = {"seconds": seconds, "cpu": total("cpu_busy") / max(total("cpu_time"), 1e-9)}
    for name in _LARGEST:
        if any(name in sums for sums in machines):
            values[name] = max(sums.get(name, 0.0) for sums in machines)
    for name in _RATES:
        values[name] = total(name) / seconds
    if any("gpu_seconds" in sums for sums in machines):
        values["gpu"] = total("gpu_seconds") / total("seconds")
    if any(name in sums for name in _ENERGY for sums in machines):
        values["joules"] = sum(total(name) for name in _ENERGY)
        values["watts"] = values["joules"] / seconds
    return {name: float(f"{value:.5g}") for name, value in values.items()}


def energy(table: dict[str, dict]) -> float | None:
    """Joules of all phases of `combine`'s table; None if not known."""
    joules = [values["joules"] for values in table.values() if "joules" in values]
    if not joules:
        return None
    return sum(joules)
