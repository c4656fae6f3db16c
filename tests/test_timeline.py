"""A stage over one training step: its highest point is the peak of the estimate, to the byte."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from random_runs import Asked, asked_runs

from bridge_memory.components import Role
from bridge_memory.estimation import estimate, peaks
from bridge_memory.readers import resolve_model
from bridge_memory.spec import BatchSpec, ParallelSpec, RunSpec, SpecError
from bridge_memory.tapes.chain import Label, Link, compose, peaks_by_link
from bridge_memory.timeline import step_timeline

sys.path.insert(0, str(Path(__file__).parent / "report"))
from report_runs import NAMES, result


def _link(retained: int, forward: int, backward: int, held: int, carried: int) -> Link:
    return Link(
        Label.LAYER, retained, forward, backward, held, str, str, carried_over=carried,
        carried_over_gradient=carried // 2,
    )


@pytest.mark.parametrize("output", [0, 5])
def test_links_one_by_one_are_never_higher_than_the_chunk(output: int) -> None:
    """Three kinds in rows: the highest of all links' peaks are the chunk's."""
    links = [(_link(10, 30, 40, 42, 0), 3), (_link(4, 50, 20, 21, 6), 4), (_link(0, 9, 12, 14, 0), 2)]
    chunk = compose(links, output)
    by_link = list(peaks_by_link(chunk))
    assert len(by_link) == 9
    assert [one.before for one in by_link] == [0, 10, 20, 30, 34, 38, 42, 46, 46]
    assert max(one.forward for one in by_link) == chunk.forward_peak
    assert max(one.backward for one in by_link) == chunk.backward_peak


@pytest.mark.parametrize("name", NAMES)
def test_the_highest_point_is_the_peak(name: str) -> None:
    answer = result(name)
    for stage in answer.stages:
        timeline = step_timeline(answer.run, stage.stage)
        peak = timeline.peak()
        assert peak.total == stage.peak_bytes
        if stage.peak_phase in ("forward", "backward"):
            assert timeline.passes[peak.pass_number].phase == stage.peak_phase
            assert timeline.operation(peak) == stage.peak_operation
        else:
            assert peak.pass_number == len(timeline.passes)


@pytest.mark.slow
@given(asked_runs())
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_highest_point_is_the_peak_of_any_run(asked: Asked) -> None:
    try:
        run = asked.run()
        stages = peaks(run)
    except SpecError:
        assume(False)
    assume(len(stages) <= 16)
    for stage in {0, len(stages) // 2, len(stages) - 1}:
        timeline = step_timeline(run, stage)
        points = list(timeline.points())
        assert max(point.total for point in points) == stages[stage].peak_bytes
        assert all(min(point[2:]) >= 0 for point in points)


def test_a_step_by_hand() -> None:
    """Two stages, two microbatches: on the first stage two forwards before the first backward; on the last they take
    turns. What is alive between passes are whole microbatches of what a chunk saves."""
    run = RunSpec(
        model=resolve_model("meta-llama/Llama-3.2-1B"),
        parallel=ParallelSpec(world_size=2, pipeline_model_parallel_size=2), batch=BatchSpec(global_batch_size=2),
    )
    first, last = step_timeline(run, 0), step_timeline(run, 1)
    assert [(p.phase, p.microbatch) for p in first.passes] == [
        ("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1)
    ]
    assert [(p.phase, p.microbatch) for p in last.passes] == [
        ("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)
    ]
    saved = first.chunks[0].saved
    ends = [p.activations for p in first.points() if p.step < 0 and 0 <= p.pass_number < 4]
    assert ends == [saved, 2 * saved, 2 * saved, saved]
    assert [step.label for step in first.chunks[0].steps] == [Label.EMBEDDING] + 8 * [Label.LAYER]
    assert [step.layers for step in last.chunks[0].steps][:2] == [(8,), (9,)]
    assert last.chunks[0].steps[-1].label is Label.LOSS


def test_what_lasts_is_what_the_estimate_says() -> None:
    answer = result("virtual stages")
    timeline = step_timeline(answer.run, 1)
    stage = answer.stages[1]
    for role in (Role.WEIGHTS, Role.GRADIENTS, Role.OPTIMIZER, Role.BUFFERS):
        assert timeline.persistent[role] == stage.bytes_of(role)
    start = next(timeline.points())
    assert start.total == stage.static_bytes


def test_a_long_step_is_followed_as_far_as_it_differs() -> None:
    """1,024 microbatches: what is left out is like the rounds before, so the peak is the same."""
    answer = result("four stages")
    run = answer.run.with_(batch=BatchSpec(global_batch_size=4096))
    timeline = step_timeline(run, 1)
    assert timeline.microbatches == 1024 and timeline.followed < 20
    assert timeline.peak().total == estimate(run).stages[1].peak_bytes
