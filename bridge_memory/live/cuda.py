"""One rank's reading of torch.cuda: host-side counters only, without a kernel launch or a synchronisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bridge_memory.calibration.records import is_figure
from bridge_memory.live.guard import error_words, pass_on


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
    #: The error where there is no reading; else "".
    error: str = ""

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

    def to_json(self) -> dict[str, int | str]:
        record: dict[str, int | str] = asdict(self)
        if not self.error:
            del record["error"]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Reading:
        """The inverse of ``to_json``; unknown keys are ignored. Raises TypeError where the rank is missing or a figure
        is not an integer."""
        known = {key: record[key] for key in cls.__dataclass_fields__ if key in record}
        for key, value in known.items():
            if not (isinstance(value, str) if key == "error" else is_figure(value)):
                raise TypeError(key)
        return cls(**known)


def read_cuda(rank: int, stage: int) -> Reading:
    """This process's current device. A failure is a Reading with an ``error``, never an exception."""
    try:
        import torch

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
        )
    except Exception as error:
        pass_on(error)
        return Reading(rank=rank, stage=stage, error=error_words(error))
