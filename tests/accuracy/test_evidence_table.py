"""The table of ``bridge_memory.evidence`` is that of the measured runs."""

from __future__ import annotations

from pathlib import Path

from bridge_memory import evidence
from bridge_memory.accuracy.corpus import read_corpus
from bridge_memory.accuracy.evidence_table import of_megatron, of_torch
from bridge_memory.accuracy.predictions import Outcome
from bridge_memory.accuracy.records import Record
from bridge_memory.evidence import evidence_table

ENGINES = Path(__file__).parents[1] / "data" / "engines" / "runs.jsonl"


def test_the_table_is_what_the_measured_runs_give(outcomes: list[Outcome], records: list[Record]) -> None:
    """Else ``python scripts/accuracy_report.py`` writes it anew."""
    engines = of_torch(read_corpus(str(ENGINES)))
    assert len(engines) > 15
    written = Path(evidence.PATH).read_text(encoding="utf-8")
    assert evidence_table([*of_megatron(records, outcomes), *engines]) == written
