"""What ``bridge_memory.evidence`` knows: errors of measured runs by their kind."""

from __future__ import annotations

from collections.abc import Sequence

from bridge_memory.accuracy.corpus import RecordLine
from bridge_memory.accuracy.described import outcomes as described
from bridge_memory.accuracy.described.figures import Meaning
from bridge_memory.accuracy.described.run import read_run
from bridge_memory.accuracy.features import SCALES, scale_of
from bridge_memory.accuracy.predictions import Outcome
from bridge_memory.accuracy.records import Record
from bridge_memory.accuracy.runs import run_of
from bridge_memory.accuracy.torch import records as torch_records
from bridge_memory.cards.names import gpu_of_name
from bridge_memory.evidence import Figure, Measured, kind_of

_FIGURES: dict[Meaning | None, Figure] = {Meaning.RESERVED: Figure.RESERVED, Meaning.STATIC: Figure.STATIC}


def campaign_of(name: str) -> str:
    """Who measured a run, by the first part of its record's name."""
    return name.partition("/")[0]


def of_megatron(records: Sequence[Record], outcomes: Sequence[Outcome]) -> list[Measured]:
    """Of every run whose ranks are all compared: the rank with the highest peak."""
    by_record: dict[str, list[Outcome]] = {}
    for o in outcomes:
        by_record.setdefault(o.id, []).append(o)
    found = []
    for record in records:
        rows = by_record[record.id]
        peaks = [o for o in rows if o.max_allocated_error is not None]
        if peaks and all(o.status == "ok" for o in rows):
            highest = max(peaks, key=lambda o: o.measured_max_allocated_bytes or 0)
            run = run_of(record)
            found.append(
                Measured(
                    kind_of(run, gpu_of_name(record.gpu)), highest.max_allocated_error or 0.0,
                    rows[0].scale == SCALES[0], Figure.PEAK, run, campaign_of(record.id), record.gpu,
                    highest.measured_max_allocated_bytes or 0, highest.allocated_error,
                )
            )  # fmt: skip
    return found


def of_torch(rows: Sequence[RecordLine]) -> list[Measured]:
    """Of the highest figure, allocated or reserved, of every row that is counted."""
    found = []
    for row in rows:
        counted = [o for o in torch_records.outcomes([row]) if o.status == "counted" and o.error is not None]
        highest = max(counted, key=lambda o: o.measured_bytes or 0, default=None)
        if highest is None or highest.error is None or highest.measured_bytes is None:
            continue
        run = torch_records.read(row.data).run
        real = scale_of(run, highest.measured_bytes) == SCALES[0]
        gpu = str(row.data.get("gpu"))
        figure = Figure.RESERVED if highest.meaning == torch_records.RESERVED else Figure.PEAK
        static = next((o.error for o in counted if o.meaning == torch_records.ALLOCATED), None)
        found.append(
            Measured(
                kind_of(run, gpu_of_name(gpu)), highest.error, real, figure, run,
                highest.source.rpartition("/")[2], gpu, highest.measured_bytes, static,
            )
        )  # fmt: skip
    return found


def of_field_runs(rows: Sequence[RecordLine]) -> list[Measured]:
    """Of the highest peak, else reserved memory, else static memory, of every row that is compared like with like."""
    found = []
    for row in rows:
        figures = described.outcomes_of(row)
        highest = described.like_with_like(figures)
        if highest is None or highest.residual is None or highest.measured_bytes is None:
            continue
        run = read_run(row.data).run
        real = scale_of(run, highest.measured_bytes) == SCALES[0]
        gpu = str(row.data.get("gpu"))
        figure = _FIGURES.get(highest.meaning, Figure.PEAK)
        static = next((o.residual for o in figures if o.meaning is Meaning.STATIC), None)
        found.append(
            Measured(
                kind_of(run, gpu_of_name(gpu)), highest.residual, real, figure, run,
                campaign_of(highest.id), gpu, highest.measured_bytes, static,
            )
        )  # fmt: skip
    return found
