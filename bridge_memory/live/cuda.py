"""One rank's reading of torch.cuda: host-side counters only, without a kernel launch or a synchronisation."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from typing import Any

from bridge_memory.calibration.records import Bounds, bounds_of, is_figure
from bridge_memory.live.guard import error_words, pass_on


@dataclass(frozen=True, slots=True)
class PhaseReading:
    """What one rank held in one phase, or in several that nothing separated, bytes (``live.phases``)."""

    phases: tuple[str, ...]
    #: torch's peaks: between a least and a most.
    allocated: Bounds
    reserved: Bounds
    #: As in ``Reading``, at the end of that stretch of it at which the GPU's used memory was highest.
    device_used: int = 0
    outside: int = 0
    process: int = 0
    #: Stretches of it so far.
    times: int = 1

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PhaseReading:
        """Raises TypeError for what is none."""
        allocated, reserved = bounds_of(record.get("allocated")), bounds_of(record.get("reserved"))
        numbers = {name: record.get(name, 0) for name in ("device_used", "outside", "process", "times")}
        if allocated is None or reserved is None or not all(map(is_figure, numbers.values())):
            raise TypeError("phases")
        return cls(tuple(map(str, record["phases"])), allocated, reserved, **numbers)


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes on one rank at one moment; counters since the process started, which are never reset here."""

    rank: int
    stage: int
    #: torch allocated_bytes.all.current and .peak, reserved_bytes.all.current and .peak.
    allocated: int = 0
    max_allocated: int = 0
    reserved: int = 0
    max_reserved: int = 0
    #: The GPU, from cudaMemGetInfo: all of its processes.
    device_total: int = 0
    device_used: int = 0
    #: cudaMalloc calls that failed and were repeated after the cache was emptied; and those that finally failed.
    retries: int = 0
    ooms: int = 0
    #: Bytes that were ever allocated and ever reserved; 0: not known.
    allocated_ever: int = 0
    reserved_ever: int = 0
    #: The GPU's memory of this process, from NVML; 0: not known.
    process: int = 0
    #: The error where there is no reading; else "".
    error: str = ""
    #: The phases up to now.
    phases: tuple[PhaseReading, ...] = ()

    @property
    def outside(self) -> int:
        """Memory outside of torch's allocator: context, NCCL, graphs, other processes."""
        return max(0, self.device_used - self.reserved)

    @property
    def headroom(self) -> int:
        """Free memory of the GPU if this rank reaches its highest reservation again."""
        return self.device_total - self.outside - self.max_reserved

    def checked(self) -> Reading:
        """Itself. Raises TypeError where a figure is not an integer."""
        return Reading.from_json(asdict(self))

    def to_json(self) -> dict[str, Any]:
        record = asdict(self)
        for name in ("error", "phases"):
            if not record[name]:
                del record[name]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Reading:
        """The inverse of ``to_json``; unknown keys are ignored. Raises TypeError where the rank is missing or a figure
        is not an integer."""
        known = {key: record[key] for key in cls.__dataclass_fields__ if key in record and key != "phases"}
        for key, value in known.items():
            if not (isinstance(value, str) if key == "error" else is_figure(value)):
                raise TypeError(key)
        return cls(**known, phases=tuple(map(PhaseReading.from_json, record.get("phases", ()))))


def read_cuda(rank: int, stage: int) -> Reading:
    """This process's current device, once CUDA is in use: nothing is started. A failure is a Reading with an ``error``,
    never an exception."""
    try:
        import torch

        if not torch.cuda.is_initialized():
            return Reading(rank=rank, stage=stage, error="CUDA is not in use")
        stats = torch.cuda.memory_stats()
        free, total = torch.cuda.mem_get_info()
        return Reading(
            rank=rank,
            stage=stage,
            allocated=int(stats.get("allocated_bytes.all.current", 0)),
            max_allocated=int(stats.get("allocated_bytes.all.peak", 0)),
            reserved=int(stats.get("reserved_bytes.all.current", 0)),
            max_reserved=int(stats.get("reserved_bytes.all.peak", 0)),
            device_total=int(total),
            device_used=int(total) - int(free),
            retries=int(stats.get("num_alloc_retries", 0)),
            ooms=int(stats.get("num_ooms", 0)),
            allocated_ever=int(stats.get("allocated_bytes.all.allocated", 0)),
            reserved_ever=int(stats.get("reserved_bytes.all.allocated", 0)),
            process=_of_process(torch.cuda.current_device()),
        )
    except Exception as error:
        pass_on(error)
        return Reading(rank=rank, stage=stage, error=error_words(error))


def _of_process(device: int) -> int:
    """This process's memory on ``device`` as NVML counts it; 0 without pynvml, or where a container hides the process.
    Never raises."""
    try:
        found = _nvml(device)
        if found is None:
            return 0
        nvml, handle = found
        used = [p.usedGpuMemory for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle) if p.pid == os.getpid()]
        return sum(int(n) for n in used if n is not None)
    except Exception as error:
        pass_on(error)
        return 0


@cache
def _nvml(device: int) -> tuple[Any, Any] | None:
    """pynvml and its handle of ``device``, whatever CUDA_VISIBLE_DEVICES says; None without them."""
    try:
        import torch

        nvml: Any = import_module("pynvml")
        nvml.nvmlInit()
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception as error:
        pass_on(error)
        return None
