"""Records of measured runs: one JSON object per line.

``tests/data/measurements/README.md`` lists the fields. What a record says of its run is read in ``runs.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bridge_memory.accuracy.corpus import RecordLine, read_corpus
from bridge_memory.spec import SpecError


@dataclass(frozen=True, slots=True)
class Measurement:
    """Figures of torch on one rank, bytes; None where the source does not state them."""

    rank: int
    allocated_bytes: int | None
    max_allocated_bytes: int | None
    #: Steps completed when the peak was read; 0 where not stated (late in training).
    after_step: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """One measured run."""

    id: str
    family: str
    tier: int
    gpu: str
    world_size: int
    framework: Mapping[str, object]
    config: Mapping[str, object]
    measured: tuple[Measurement, ...]
    #: Parameters of the most loaded rank as the run itself logged them (Megatron-LM's ``report_theoretical_memory``).
    logged_parameters: float | None = None

    @property
    def arguments(self) -> Mapping[str, object]:
        """Megatron-LM arguments; empty where the run is specified otherwise."""
        args = self.config.get("args")
        return args if isinstance(args, Mapping) else {}

    @property
    def highest_bytes(self) -> int:
        """The highest measured peak of any rank; where peaks are unknown, static memory."""
        return max((m.max_allocated_bytes or m.allocated_bytes or 0 for m in self.measured), default=0)


def load_runs(path: str | Path) -> list[Record]:
    """Read a corpus. Raises SpecError, naming the line, for text that is not a record."""
    return [read_record(row) for row in read_corpus(path)]


def read_record(row: RecordLine) -> Record:
    """One line of a corpus. Raises SpecError."""
    where, data = row
    try:
        logged = data.get("logged_parameters")
        return Record(
            id=str(data["id"]),
            family=str(data.get("family", data["id"])),
            tier=int(data.get("tier", 0)),
            gpu=str(data.get("gpu", "")),
            world_size=int(data["world_size"]),
            framework=dict(data.get("framework") or {}),
            config=dict(data["config"]),
            measured=tuple(_measurements(data)),
            logged_parameters=None if logged is None else float(logged),
        )
    except KeyError as error:
        raise SpecError(f"{where} has no field {error}; see the corpus README for a record") from None
    except (TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        raise SpecError(f"{where} is malformed ({error}); see the corpus README for a record") from None


def _measurements(data: Mapping[str, object]) -> Iterator[Measurement]:
    for m in data.get("measured") or ():  # type: ignore[attr-defined]
        yield Measurement(
            int(m["rank"]), _bytes(m.get("allocated_bytes")), _bytes(m.get("max_allocated_bytes")),
            int(m.get("after_step", 0)),
        )


def _bytes(value: object) -> int | None:
    return round(value) if isinstance(value, (int, float)) else None
