"""Energy of the GPUs of a run, for time and energy to accuracy. Use of CPUs, memory, disks and
network is measured by W&B and MLflow (TRACKER)."""

import contextlib
import os
from collections.abc import Iterable

import torch


class GpuEnergy:
    """The energy counters of the GPUs of this run's processes on this machine (NVML).

    Only the first process of each machine reads them.
    """

    def __init__(self, device: torch.device) -> None:
        self._gpus: list[object] = []  # NVML's handles
        if device.type == "cuda" and os.environ.get("LOCAL_RANK", "0") == "0":
            self._gpus = _open_gpus()
        self._last = self._joules()

    def take(self) -> float | None:
        """Joules since the last call; None: not known, or another process of the machine reads
        them."""
        now, before = self._joules(), self._last
        self._last = now
        if now is None or before is None:
            return None
        return now - before

    def _joules(self) -> float | None:
        if not self._gpus:
            return None
        import pynvml

        try:
            return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in self._gpus) / 1e3
        except pynvml.NVMLError:  # the sum would be wrong without this GPU
            return None


def _open_gpus() -> list[object]:
    import pynvml

    gpus = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        count = min(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda.device_count())
        for index in range(count):
            uuid = torch.cuda.get_device_properties(index).uuid
            gpus.append(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
    return gpus


def total(joules: Iterable[float | None]) -> float | None:
    """The sum of what is known; None if nothing is."""
    known = [value for value in joules if value is not None]
    return sum(known) if known else None
