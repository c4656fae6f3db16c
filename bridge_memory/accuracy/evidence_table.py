"""What ``bridge_memory.evidence`` knows: errors of measured runs by their kind."""

from __future__ import annotations

from collections.abc import Sequence

from bridge_memory.accuracy.corpus import RecordLine
from bridge_memory.accuracy.features import SCALES, scale_of
from bridge_memory.accuracy.predictions import Outcome
from bridge_memory.accuracy.records import Record
from bridge_memory.accuracy.runs import run_of
from bridge_memory.accuracy.torch import records as torch_records
from bridge_memory.cards.names import gpu_of_name
from bridge_memory.evidence import Kind, kind_of

#: A run's kind, its absolute error as a share, and whether it is of real size.
Measured = tuple[Kind, float, bool]


def of_megatron(records: Sequence[Record], outcomes: Sequence[Outcome]) -> list[Measured]:
    """Of the peaks of every run whose ranks are all compared; its error is the mean of theirs."""
    by_record: dict[str, list[Outcome]] = {}
    for o in outcomes:
        by_record.setdefault(o.id, []).append(o)
    found = []
    for record in records:
        rows = by_record[record.id]
        errors = [abs(e) for o in rows if (e := o.max_allocated_error) is not None]
        if errors and all(o.status == "ok" for o in rows):
            kind = kind_of(run_of(record), gpu_of_name(record.gpu))
            found.append((kind, sum(errors) / len(errors), rows[0].scale == SCALES[0]))
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
        found.append((kind_of(run, gpu_of_name(str(row.data.get("gpu")))), abs(highest.error), real))
    return found
