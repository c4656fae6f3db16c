"""A step as a memory snapshot: replayed, it peaks at the peak; our own reader of snapshots and torch's take it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from report_runs import NAMES, result

from bridge_memory.cli import main
from bridge_memory.comparison.snapshot import at_peak, read_snapshot
from bridge_memory.report.snapshot import snapshot


@pytest.mark.parametrize("name", NAMES)
def test_replayed_it_peaks_at_the_peak(name: str) -> None:
    answer = result(name)
    for stage in {0, answer.peak_stage.stage, len(answer.stages) - 1}:
        data = pickle.loads(snapshot(answer, stage))
        (trace,) = data["device_traces"]
        alive: dict[int, int] = {}
        highest = now = 0
        for event in trace:
            if event["action"] == "alloc":
                assert event["addr"] not in alive
                alive[event["addr"]] = event["size"]
                now += event["size"]
                highest = max(highest, now)
            elif event["action"] == "free_completed":
                now -= alive.pop(event["addr"])
                assert event["size"] > 0
        assert highest == answer.stages[stage].peak_bytes
        assert now == answer.stages[stage].static_bytes == sum(b["size"] for b in data["segments"][0]["blocks"])


def test_our_reader_of_snapshots_reads_it(tmp_path: Path) -> None:
    """But for sizes that it rounds to the allocator's 512 bytes."""
    file = tmp_path / "step.pickle"
    command = ["estimate", "Llama-3.2-1B", "--num-gpus", "2", "--pp", "2"]
    assert main([*command, "--stage", "1", "--output", str(file)]) == 0
    alive = at_peak(read_snapshot(file.read_bytes(), str(file)))
    assert main([*command, "--output", str(tmp_path / "a.json")]) == 0
    peak = json.loads((tmp_path / "a.json").read_text())["stages"][1]["peak_bytes"]
    assert abs(alive.peak_bytes - peak) < 512 * len(alive.blocks)
    assert main(["estimate", "Llama-3.2-1B", "--format", "snapshot"]) == 2


def test_torchs_own_viewer_takes_it() -> None:
    viz = pytest.importorskip("torch.cuda._memory_viz")
    data = pickle.loads(snapshot(result("four stages"), 0))
    assert f"{len(data['device_traces'][0])} entries" in viz.trace(data)
    assert len(viz.trace_plot(data)) > 10_000 and viz.segsum(data)
