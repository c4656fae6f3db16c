"""A step as a trace: counters that are the timeline's, slices that follow one another."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
from report_runs import NAMES, result

from bridge_memory.cli import main
from bridge_memory.report.trace import perfetto


@pytest.mark.parametrize("name", NAMES)
def test_the_counters_peak_at_the_peak_and_slices_do_not_overlap(name: str) -> None:
    answer = result(name)
    events = json.loads(perfetto(answer))["traceEvents"]
    totals: dict[int, list[int]] = defaultdict(list)
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C" and event["name"] == "allocated, bytes":
            totals[event["pid"]].append(event["args"]["total"])
        elif event["ph"] == "C":
            assert all(type(n) is int and n >= 0 for n in event["args"].values())
        elif event["ph"] == "X":
            slices[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert {stage: max(values) for stage, values in totals.items()} == {
        s.stage: s.peak_bytes for s in answer.stages
    }
    for rows in slices.values():
        assert all(a < b for a, b in rows)
        ordered = sorted(rows)
        assert all(before[1] <= after[0] for before, after in pairwise(ordered))


def test_the_suffix_asks_for_it(tmp_path: Path) -> None:
    file = tmp_path / "step.perfetto.json"
    assert main(["estimate", "Llama-3.2-1B", "--output", str(file)]) == 0
    assert json.loads(file.read_text())["otherData"]["model"] == "meta-llama/Llama-3.2-1B"
