"""One run has one peak, by every way it is asked for, under every engine."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from random import Random

import pytest
from scripts_of import load_script

from bridge_memory import Estimate, RunSpec, SpecError, estimate, explain, peaks
from bridge_memory.report.json import estimate_to_json
from bridge_memory.report.page.data import page_data, timeline_data
from bridge_memory.report.printing import print_blocks
from bridge_memory.report.snapshot import snapshot
from bridge_memory.report.table import components_csv, estimate_blocks
from bridge_memory.report.trace import perfetto
from bridge_memory.timeline import step_timeline
from bridge_memory.verdict import fits

freeze = load_script("maintain/freeze")
DRAWN = 12


def runs(engine: str) -> list[RunSpec]:
    """Some runs of one engine that can be estimated, always the same."""
    draw, found = Random(f"same number {engine}"), []
    while len(found) < DRAWN:
        try:
            run = freeze.built(freeze.drawn(engine, draw))
            estimate(run)
        except SpecError:
            continue
        found.append(run)
    return found


def highest_of_perfetto(text: str, stage: int) -> int:
    events = json.loads(text)["traceEvents"]
    totals = [e["args"]["total"] for e in events if e["name"] == "allocated, bytes" and e["pid"] == stage]
    return max(totals[1:])  # the first is the start of the step, between steps


def highest_of_replay(data: bytes) -> int:
    """The most bytes alive in a memory snapshot's trace of allocations."""
    alive = highest = 0
    for event in pickle.loads(data)["device_traces"][0]:
        if event["action"] == "alloc":
            alive += event["size"]
            highest = max(highest, alive)
        elif event["action"] == "free_completed":
            alive -= event["size"]
    return highest


def shown(answer: Estimate) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        print_blocks(estimate_blocks(answer, fits(answer, ["H100"]), unit="bytes"))
    return out.getvalue()


@pytest.mark.parametrize("engine", freeze.ENGINES)
def test_every_way_has_the_same_peak(engine: str) -> None:
    for run in runs(engine):
        answer = estimate(run)
        expected = [(s.stage, s.static_bytes, s.peak_bytes) for s in answer.stages]
        assert [tuple(stage) for stage in peaks(run)] == expected
        worst = answer.peak_stage
        document = estimate_to_json(answer, fits(answer, ["H100"]))
        assert [s["peak_bytes"] for s in document["stages"]] == [peak for *_, peak in expected]
        assert document["peak"]["bytes"] == worst.peak_bytes
        page = page_data(answer, fits(answer, ["H100"]), flags="")
        by_stage = {s["stage"]: s["peak_bytes"] for s in page["stages"]}
        assert by_stage.items() <= {stage: peak for stage, _, peak in expected}.items()
        assert f"{worst.peak_bytes:,}" in shown(answer) or str(worst.peak_bytes) in shown(answer)
        for stage, static, peak in expected[:: max(1, len(expected) // 2)]:
            explained = explain(run, stage)
            assert sum(c.bytes for c in explained.components) == explained.peak_bytes == peak
            timeline = step_timeline(run, stage)
            assert timeline.peak().total == peak, run
            assert next(iter(timeline.points())).total <= static
            assert timeline_data(answer, stage)["peak"]["bytes"] == peak
            assert highest_of_perfetto(perfetto(answer, stage), stage) == peak
            assert highest_of_replay(snapshot(answer, stage)) == peak, run
            rows = components_csv(answer, stage).splitlines()[1:]
            assert rows


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "zero2", "ddp", "single"])
def test_gradients_that_backward_makes_are_alive_once(engine: str) -> None:
    """Llama-3.2-1B: before backward no gradient of this step exists; after it all of them do."""
    run = RunSpec(model="meta-llama/Llama-3.2-1B").with_fields(engine=engine, world_size=1 if engine == "single" else 8)
    timeline = step_timeline(run, 0)
    points = list(timeline.points())
    forward = [p for p in points if 0 <= p.pass_number < len(timeline.passes)
               and timeline.passes[p.pass_number].phase == "forward"]  # fmt: skip
    assert all(p.gradients == 0 for p in forward)
    stage = explain(run, 0)
    whole = sum(c.bytes for c in stage.components if c.role == "gradients") + sum(
        c.bytes for c in stage.carried_over if c.role == "gradients"
    )
    held = sum(nbytes for role, nbytes in timeline.persistent.items() if role == "gradients")
    assert held + points[-1].gradients == whole
