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
from bridge_memory.evidence import Measured, kind_of


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
            kind = kind_of(run_of(record), gpu_of_name(record.gpu))
            found.append(Measured(kind, highest.max_allocated_error or 0.0, rows[0].scale == SCALES[0]))
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
        kind = kind_of(run, gpu_of_name(str(row.data.get("gpu"))))
        found.append(Measured(kind, highest.error, real, highest.meaning == torch_records.RESERVED))
    return found


def of_field_runs(rows: Sequence[RecordLine]) -> list[Measured]:
    """Of the highest figure of every row that is compared like with like."""
    found = []
    for row in rows:
        highest = described.like_with_like(described.outcomes_of(row))
        if highest is None or highest.residual is None or highest.measured_bytes is None:
            continue
        run = read_run(row.data).run
        real = scale_of(run, highest.measured_bytes) == SCALES[0]
        kind = kind_of(run, gpu_of_name(str(row.data.get("gpu"))))
        found.append(Measured(kind, highest.residual, real, highest.meaning is Meaning.RESERVED))
    return found
