"""The measured runs and what the estimate says of them, read and predicted once."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge_memory.accuracy.predictions import Outcome, predict_all
from bridge_memory.accuracy.records import Record, load_runs


@pytest.fixture(scope="session")
def corpus() -> Path:
    return Path(__file__).parents[1] / "data" / "measurements" / "runs.jsonl"


@pytest.fixture(scope="session")
def records(corpus: Path) -> list[Record]:
    return load_runs(corpus)


@pytest.fixture(scope="session")
def outcomes(records: list[Record]) -> list[Outcome]:
    return predict_all(records)
