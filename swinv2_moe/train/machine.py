"""Counters and gauges of this machine, from the operating system and NVML."""

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

_POWERCAP = Path("/sys/class/powercap")

# Units: counters are in bytes, seconds of all CPUs together, and joules.
COUNTERS = (
    "cpu_busy",
    "cpu_time",
    "disk_read",
    "disk_written",
    "net_received",
    "net_sent",
    "cpu_joules",
    "gpu_joules",
)


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

    def _read(self, function: Callable) -> object:
        """The result of an NVML function; None if this GPU does not support it."""
        import pynvml

        try:
            return function(self._handle)
        except pynvml.NVMLError:
            return None

    def joules(self) -> float | None:
        import pynvml

        millijoules = self._read(pynvml.nvmlDeviceGetTotalEnergyConsumption)
        if millijoules is None:
            return None
        return millijoules / 1e3

    def use(self) -> float:
        import pynvml

        rates = self._read(pynvml.nvmlDeviceGetUtilizationRates)
        if rates is None:
            return 0.0
        return rates.gpu / 100

    def memory(self) -> float:
        import pynvml

        memory = self._read(pynvml.nvmlDeviceGetMemoryInfo)
        if memory is None:
            return 0.0
        return float(memory.used)
