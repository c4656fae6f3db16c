"""The range of training's reserved memory: layers of experts whose sizes vary on two streams, and a device that is full
and makes the allocator try again. Real runs of ``tests/data/field`` say how far it goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridge_memory import RunSpec, estimate, find_gpu
from bridge_memory import reserved as replays
from bridge_memory.accuracy.described.run import read_run
from bridge_memory.job.job import Job, PhaseMemory, job_of
from bridge_memory.job.overload import FROM_SCRATCH
from bridge_memory.outside.phase import Phase
from bridge_memory.verdict import Verdict

FIELD = Path(__file__).resolve().parents[1] / "data" / "field" / "runs.jsonl"
ROWS = {row["id"]: row for row in map(json.loads, FIELD.read_text().splitlines())}
GH200 = find_gpu("GH200-96GB")


def run_of(name: str) -> RunSpec:
    (row,) = (row for key, row in ROWS.items() if key.endswith(name))
    return read_run(row).run


def training(job: Job) -> PhaseMemory:
    return next(phase for phase in job.phases if phase.phase is Phase.TRAINING)


@pytest.mark.parametrize(
    ("row", "measured"), [("nano30b-pretrain/E-044-on", 91.69e9), ("nano30b-midtrain/cp4", 83.1e9)]
)
def test_natural_routing_reserves_more_than_even_routing(row: str, measured: float) -> None:
    """Overlapped experts, natural routing: further than 8% above the replay with even routing, within 8% of that
    in which layers differ."""
    run = run_of(row)
    even, uneven = replays.held(run, 0), replays.held(run, 0, FROM_SCRATCH.least)
    assert even == replays.replayed(run, 0).expandable
    assert even < measured * 0.92 <= uneven < measured


def test_the_least_is_even_routing() -> None:
    """The same posture as E-044 with routing forced to be even: 87.16 GB."""
    job = job_of(estimate(run_of("nano30b-pretrain/E-053")), GH200)
    assert job.uneven == FROM_SCRATCH.least and not job.retries
    found = training(job).reserved
    assert found.least == replays.replayed(run_of("nano30b-pretrain/E-053"), 0).expandable
    assert 0.92 * 87.16e9 <= found.least < found.most < 87.16e9


def test_a_full_device_makes_the_allocator_try_again() -> None:
    """E-044 without expandable segments ran on 95 GB with 94.6 GB reserved and 19 to 49 retries."""
    run = run_of("nano30b-pretrain/E-044-on").with_fields(expandable_segments=False)
    job = job_of(estimate(run), GH200)
    found = training(job)
    assert job.retries
    assert found.reserved.least <= 94.6e9 <= found.reserved.most
    assert found.verdict(GH200.capacity_bytes) is Verdict.TIGHT


def test_retries_do_not_make_more_fit_than_is_allocated() -> None:
    run = run_of("nano30b-pretrain/E-044-on").with_fields(expandable_segments=False)
    allocated = replays.replayed(run, 0).allocated
    assert not replays.trace_of(run, 0).fits(int(0.98 * allocated), expandable=False)


def test_sizes_that_do_not_vary() -> None:
    """Experts padded to their capacity, with a budget of a rank, on one expert-parallel rank; passes that take no
    turns."""
    run = run_of("nano30b-pretrain/E-044-on")
    assert replays.sizes_vary(run)
    for fields in (
        {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {"overlap_moe_expert_parallel_comm": False},
    ):
        assert not replays.sizes_vary(run.with_fields(**fields)), fields
