"""A rehearsal on a GPU as a record of the measured corpus (see tests/data/measurements/README.md)."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bridge_memory.components import GIB
from bridge_memory.files import write_whole
from bridge_memory.readers.run_spec import run_to_json
from bridge_memory.spec import RunSpec, SpecError


@dataclass(frozen=True, slots=True)
class Phase:
    """torch.cuda's figures at the end of a phase, its peak since the phase began, in bytes."""

    name: str
    allocated: int
    max_allocated: int
    reserved: int
    #: What the driver counts as used on the whole device, contexts and libraries included.
    driver_used: int | None = None
    #: How long the phase took on the GPU.
    seconds: float | None = None

    def as_json(self) -> dict[str, Any]:
        """With what was measured alone."""
        found = {
            "name": self.name, "allocated_bytes": self.allocated, "max_allocated_bytes": self.max_allocated,
            "reserved_bytes": self.reserved, "driver_used_bytes": self.driver_used, "seconds": self.seconds,
        }  # fmt: skip
        return {k: v for k, v in found.items() if v is not None}


def installed(package: str) -> str | None:
    """The release of an installed distribution."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def record_of(
    run: RunSpec, rank: int, gpu: str, steps: int, phases: Sequence[Phase], command: Sequence[str] | None = None
) -> dict[str, Any]:
    """One line of a corpus: ``run`` exactly, and what was measured after ``steps`` training steps.

    ``allocated_bytes`` is read after the last step, ``max_allocated_bytes`` is the peak of that step alone.
    """
    last = phases[-1]
    name = run.model.name.split("/")[-1]
    return {
        "id": f"rehearsal/{name}/rank{rank}of{run.parallel.world_size}",
        "family": f"rehearsal/{name}",
        "tier": 1 if last.max_allocated >= 4 * GIB else 2 if last.max_allocated >= GIB else 3,
        "provenance": {"source": "bridge-memory rehearse --device cuda", "loss": "meaningless: peers answer nothing"},
        "framework": {
            "name": "megatron-core", "megatron_core": installed("megatron-core"),
            "transformer_engine": installed("transformer-engine"), "torch": installed("torch"),
            "bridge_memory": installed("bridge-memory"), "python": platform.python_version(),
        },
        "gpu": gpu,
        "world_size": run.parallel.world_size,
        "config": {
            "kind": "run_spec", "run": run_to_json(run), "command": list(sys.argv if command is None else command)
        },
        "measured": [
            {
                "rank": rank, "allocated_bytes": last.allocated, "max_allocated_bytes": last.max_allocated,
                "after_step": steps,
            }
        ],
        "phases": [p.as_json() for p in phases],
    }  # fmt: skip


def append_record(path: str | Path, record: dict[str, Any]) -> None:
    """Add a line: the file is replaced as a whole, so that nobody ever reads half a record. Raises SpecError."""
    path = Path(path)
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        write_whole(path, before + ("\n" if before and not before.endswith("\n") else "") + json.dumps(record) + "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise SpecError(f"record {path}: {reason}; name a file in a folder that can be written") from None
