"""The table of ``bridge_memory.evidence``: errors of the peaks of measured runs by their kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from bridge_memory.accuracy.features import SCALES
from bridge_memory.accuracy.predictions import Outcome
from bridge_memory.accuracy.records import Record
from bridge_memory.accuracy.runs import run_of
from bridge_memory.evidence import SCHEMA, Kind, kind_of

#: Digits of an error; the last is a thousandth of a per cent.
_DIGITS = 5


def evidence_table(records: Sequence[Record], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The document: of every kind the errors of runs and of small test models, a run's error being the mean over its
    ranks."""
    by_record: dict[str, list[Outcome]] = defaultdict(list)
    for o in outcomes:
        by_record[o.id].append(o)
    kinds: dict[Kind, tuple[list[float], list[float]]] = {}
    for record in records:
        rows = by_record[record.id]
        errors = [abs(e) for o in rows if (e := o.max_allocated_error) is not None]
        if not errors or any(o.status != "ok" for o in rows):
            continue
        runs, small_models = kinds.setdefault(kind_of(run_of(record)), ([], []))
        (small_models if rows[0].scale == SCALES[2] else runs).append(round(sum(errors) / len(errors), _DIGITS))
    return {
        "schema": SCHEMA,
        "kinds": [
            {"kind": list(kind), "errors": sorted(runs), "small_models": sorted(small_models)}
            for kind, (runs, small_models) in sorted(kinds.items())
        ],
    }
