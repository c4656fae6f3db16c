"""The table of ``bridge_memory.evidence`` is that of the measured runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge_memory import evidence
from bridge_memory.accuracy.corpus import RecordLine, read_corpus
from bridge_memory.accuracy.described.outcomes import outcomes_of
from bridge_memory.accuracy.evidence_table import of_field_runs, of_megatron, of_torch
from bridge_memory.accuracy.predictions import Outcome
from bridge_memory.accuracy.records import Record
from bridge_memory.evidence import Figure, evidence_table

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.slow
def test_the_table_is_what_the_measured_runs_give(outcomes: list[Outcome], records: list[Record]) -> None:
    """Else ``python scripts/accuracy_report.py`` writes it anew."""
    engines = of_torch(read_corpus(str(DATA / "engines" / "runs.jsonl")))
    field = of_field_runs(read_corpus(str(DATA / "field" / "runs.jsonl")))
    assert len(engines) > 15 and len(field) > 3
    written = Path(evidence.PATH).read_text(encoding="utf-8")
    assert evidence_table([*of_megatron(records, outcomes), *engines, *field]) == written


def described(**changed: object) -> RecordLine:
    """A run of PyTorch's figures in its source's words."""
    data: dict[str, object] = {
        "id": "one", "family": "f", "grade": "B", "framework": "Megatron-LM core 0.16, TE 2.11", "gpu": "H100",
        "world_size": 8, "model": "Llama 3.1 8B",
        "config": {"kind": "described", "args": {
            "seq_length": 8192, "micro_batch_size": 1, "global_batch_size": 8, "precision": "bf16", "recompute": None,
        }, "parallel": {"TP": 2, "PP": 1}},
        "measured_verbatim": {"allocated": 40.0, "max_allocated": 60.0, "max_reserved": 70.0},
        "measured_meaning": "GiB, rank 0, after 2 iterations", "kind": "run",
    }  # fmt: skip
    return RecordLine("here", {**data, **changed})


def test_field_runs_count_where_they_are_compared_like_with_like() -> None:
    """The peak, not static nor reserved memory; not rough rows, and none whose own words doubt what ran."""
    (found,) = of_field_runs([described()])
    assert found.real and found.figure is Figure.PEAK and found.kind.gpu == "Hopper"
    (row,) = [o for o in outcomes_of(described()) if o.measured_bytes == 60 << 30]
    assert found.error == row.residual
    assert not of_field_runs([described(grade="C")])
    assert not of_field_runs([described(model="Llama 3.1 8B?")])
    (static,) = of_field_runs([described(measured_verbatim={"allocated": 40.0})])
    assert static.figure is Figure.STATIC and '"runs"' not in evidence_table([static])
