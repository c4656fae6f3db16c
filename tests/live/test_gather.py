"""Readings through torch's own store: late, broken and thousands of ranks."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from bridge_memory.calibration.records import ReportRecord, StageRecord
from bridge_memory.live import gather
from bridge_memory.live.cuda import Reading


@pytest.fixture
def store() -> Any:
    torch = pytest.importorskip("torch")
    return torch.distributed.TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=10))


def test_the_readings_of_four_thousand_ranks_are_collected_in_a_second(store: Any) -> None:
    for rank in range(1, 4096):
        gather.Publisher().publish(store, "m", Reading(rank, rank // 512, allocated=rank))
    started = time.monotonic()
    readings, missing = gather.collect(store, "m", range(1, 4096))
    assert time.monotonic() - started < 1.0
    assert [r.allocated for r in readings] == list(range(1, 4096)) and missing == []


def test_a_late_rank_costs_the_deadline_and_no_more(store: Any) -> None:
    gather.Publisher().publish(store, "m", Reading(1, 0, allocated=7))
    store.set("bridge_memory/m/3", "not a reading")
    started = time.monotonic()
    readings, missing = gather.collect(store, "m", [1, 2, 3], deadline=0.3)
    assert 0.25 < time.monotonic() - started < 2.0
    assert [r.rank for r in readings] == [1] and missing == [2, 3]


def test_a_long_run_leaves_two_readings_a_rank(store: Any) -> None:
    publisher = gather.Publisher()
    before = store.num_keys()
    for step in range(50):
        publisher.publish(store, f"m{step}", Reading(1, 0))
    assert store.num_keys() - before == 2


def test_the_table_of_the_right_report_is_fetched(store: Any) -> None:
    report = ReportRecord(iteration=4, missing_ranks=(3,), stages=(StageRecord(stage=1, failed={"2": "no driver"}),))
    gather.share(store, "r", 4, report)
    assert gather.fetch(store, "r", 4) == report
    assert gather.fetch(store, "r", 5, deadline=0.1) is None
