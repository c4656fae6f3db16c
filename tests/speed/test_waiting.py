"""How long stages wait in the interleaved schedule, against the schedule followed pass by pass."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from bridge_memory import BatchSpec, ParallelSpec, RunSpec, resolve_model
from bridge_memory.spec.layout import layout
from bridge_memory.speed.hardware import hardware_of
from bridge_memory.speed.megatron.step_time import Step
from bridge_memory.speed.megatron.waiting import schedule_seconds, waiting

Stage = list[tuple[float, float]]


def usual(times: list[Stage], number: int) -> float:
    """The slowest stage and the bubble: what other stages take for a microbatch, once (Narayanan et al. 2021, 2.2)."""
    totals = [sum(map(sum, stage)) for stage in times]
    return number * max(totals) + (sum(totals) - max(totals)) / len(times[0])


def of(*sizes: int) -> Stage:
    return [(n * 1.0, n * 2.0) for n in sizes]


def test_equal_chunks_fill_the_schedule() -> None:
    """Warm-up and cool-down are pp - 1 chunks of either direction (Narayanan et al. 2021, section 2.2)."""
    for pp, v, number in ((2, 2, 4), (4, 3, 8)):
        assert schedule_seconds([[(1.0, 2.0)] * v] * pp, number) == 3 * (number * v + pp - 1)


def test_the_slowest_stage_waits_where_others_are_slower_for_a_while() -> None:
    """One of 1, 2 and 4 layers waits for others of 2, 2 and 2, one of 2, 2 and 3 does not."""
    assert waiting([*[of(2, 2, 2)] * 3, of(2, 2, 3)], 32, 4) == 0
    times = [*[of(2, 2, 2)] * 3, of(1, 2, 4)]
    assert waiting(times, 32, 4) == pytest.approx(schedule_seconds(times, 32) - usual(times, 32))
    assert waiting(times, 32, 4) > 0.05 * usual(times, 32)
    # Unequal chunks that are the same on all stages do not run at the same time.
    assert waiting([of(1, 2, 4)] * 4, 32, 4) > 0


def test_whatever_the_chunks() -> None:
    draw = Random(7)
    waited = 0
    for _ in range(150):
        pp, v = draw.choice((2, 3, 4)), draw.choice((2, 3, 4))
        times = [of(*[draw.choice((2, 2, 2, 3)) for _ in range(v)]) for _ in range(pp)]
        times[-1][-1] = draw.uniform(0.5, 5), draw.uniform(1, 10)
        number = pp * draw.choice((6, 10))
        beyond = max(0.0, schedule_seconds(times, number) - usual(times, number))
        found = waiting(times, number, pp)
        assert found == pytest.approx(beyond, abs=0.01 * usual(times, number))
        assert waiting(times, None, pp) * number == pytest.approx(found, abs=0.1 * usual(times, number))
        waited += found > 0
    assert waited > 20


def test_many_runs_at_once_wait_as_each_of_them_does() -> None:
    np = pytest.importorskip("numpy")
    from bridge_memory.speed.megatron.waiting_of_many import waiting_of_many
    from bridge_memory.tapes.batched import batched

    draw = np.random.default_rng(3)
    waited = 0
    for pp, v, group in ((2, 3, 2), (4, 2, 4), (3, 4, 5)):
        kinds = [tuple(batched(draw.choice([1.0, 1.0, 1.5], (2, 1, 4))) for _ in range(2)) for _ in range(3)]
        times = [[kinds[i] for i in draw.integers(0, 3, v)] for _ in range(pp)]
        numbers = batched(np.array([4, 8]).reshape(2, 1, 1) * group)
        asked = draw.random((2, 1, 4)) < 0.8
        found = waiting_of_many(times, numbers, group, asked)
        for at in zip(*np.nonzero(asked), strict=True):
            alone = [[(float(forward[at]), float(backward[at])) for forward, backward in stage] for stage in times]
            assert found[at] == waiting(alone, int(numbers[at[0], 0, 0]), group)
            waited += found[at] > 0
    assert waited > 5


def test_step_time_has_what_stages_wait() -> None:
    model = resolve_model("Qwen/Qwen3-8B")
    kept = replace(model, layers=model.layers[:14], vocab_size=1024)
    parallel = ParallelSpec(
        world_size=8, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=3,
        pipeline_model_parallel_layout="Et|tt|tt|tt|tttt|tttL",
    )  # fmt: skip
    run = RunSpec(model=kept, parallel=parallel, batch=BatchSpec(seq_length=4096, global_batch_size=128))
    step = Step(run, hardware_of("H100"))
    shapes = layout(run.model, run.parallel).shapes(run.model)
    passes = [[step.passes.chunk(shape) for shape in stage] for stage in shapes]
    times = [[(one.forward_total, one.backward_total) for one in stage] for stage in passes]
    time = step.time()
    assert 0 < time.waiting == pytest.approx(schedule_seconds(times, 32) - usual(times, 32), rel=0.05)
    assert time.seconds > time.passes.total + time.bubble + time.waiting
