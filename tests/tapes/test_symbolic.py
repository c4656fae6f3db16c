"""Symbolic integers: their arithmetic is that of ints, and a trace serves every run that passes its guards."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from math import ceil, isqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_memory.readers import resolve_model
from bridge_memory.spec import BatchSpec, ParallelSpec, RecomputeSpec, RunSpec
from bridge_memory.tapes import symbolic as sizes
from bridge_memory.tapes.blocks import block
from bridge_memory.tapes.context import TraceCache, context_of
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.symbolic import DIMENSIONS, SIZES, ShapeEnv, Traces, computed, largest, smallest

#: A sentence of arithmetic: leaves are positions in DIMENSIONS or numbers, nodes (operation, left, right).
Expression = Any


def plain(few: int) -> list[int]:
    """Dimensions of a run: so many sizes, then every switch off."""
    return [few] * len(SIZES) + [0] * (len(DIMENSIONS) - len(SIZES))


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "%": operator.mod,
    "/": operator.truediv, "largest": largest, "smallest": smallest, "round": lambda a, _: round(a),
    "ceil": lambda a, _: ceil(a), "negative": lambda a, _: -a, "square": lambda a, _: a**2,
}  # fmt: skip
#: What an int does where a Size has a word of its own.
OF_INTS = {**OPERATIONS, "largest": max, "smallest": min}
EXPRESSIONS: st.SearchStrategy[Expression] = st.recursive(
    st.integers(0, 99) | st.sampled_from([f"d{i}" for i in range(len(SIZES))]),
    lambda inner: st.tuples(st.sampled_from(sorted(OPERATIONS)), inner, inner),
    max_leaves=12,
)
DIMENSION_VALUES = st.lists(st.integers(1, 64), min_size=len(SIZES), max_size=len(SIZES)).map(
    lambda sizes: [*sizes, *plain(0)[len(SIZES) :]]
)


def worked_out(expression: Expression, dimensions: Any, operations: dict[str, Callable[[Any, Any], Any]]) -> Any:
    if isinstance(expression, tuple):
        name, left, right = expression
        return operations[name](
            worked_out(left, dimensions, operations), worked_out(right, dimensions, operations)
        )
    return dimensions[int(expression[1:])] if isinstance(expression, str) else expression


@given(EXPRESSIONS, DIMENSION_VALUES, DIMENSION_VALUES)
def test_arithmetic_is_that_of_ints_there_and_in_any_run_it_serves(
    expression: Expression, traced: list[int], asked: list[int]
) -> None:
    env = ShapeEnv(traced)
    try:
        size = round(worked_out(expression, env.sizes, OPERATIONS))
        expected = round(worked_out(expression, traced, OF_INTS))
    except (ZeroDivisionError, OverflowError):
        return
    assert int(getattr(size, "value", size)) == expected
    if isinstance(size, int):  # a constant, or a product with 0
        return
    found = Traces()
    found.add(env, "trace", [size])
    try:
        expected = round(worked_out(expression, asked, OF_INTS))
    except (ZeroDivisionError, OverflowError):
        return
    assert found.find(asked) == ("trace", [expected])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(0, 9))
def test_every_comparison_is_that_of_ints(few: list[int], bound: int) -> None:
    env = ShapeEnv([*few, *plain(0)[len(few) :]])
    for i, n in enumerate(few):
        for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
            assert compare(env.sizes[i], bound) is compare(n, bound)
        assert bool(env.sizes[i]) is bool(n)


def test_a_step_is_noted_once() -> None:
    env = ShapeEnv(plain(3))
    seq, batch = env.sizes[:2]
    assert seq * batch is seq * batch
    assert computed(isqrt, seq) is not computed(isqrt, batch)
    assert env.formula((seq * batch + 1) // 2) == "(((seq * batch) + 1) // 2)"


def test_nothing_stays_a_plain_nothing() -> None:
    """A tensor that does not exist has no size: 0 times anything is 0, and adding 0 records no step."""
    seq = ShapeEnv(plain(3)).sizes[0]
    assert seq * 0 == 0 and type(seq * 0) is int
    assert seq + 0 is seq and seq - 0 is seq and seq * 1 is seq and seq // 1 is seq


# ---- traces and their guards ----


def traced(traces: Traces, dimensions: list[int], record: Callable[..., Any]) -> str:
    """Trace under ``dimensions`` unless a trace serves; the trace that was found or made."""
    found = traces.find(dimensions)
    if found is None:
        env = ShapeEnv(dimensions)
        name, size = record(*env.sizes)
        traces.add(env, name, [size])
        found = traces.find(dimensions)
        assert found is not None
    return found[0]


def at(seq: int, tp: int = 1) -> list[int]:
    dimensions = plain(1)
    dimensions[SIZES.index("seq")], dimensions[SIZES.index("tp")] = seq, tp
    return dimensions


def a_layer(asked: list[str]) -> Callable[..., Any]:
    """Records one way where the sequence is long, another where it is not; each time it is noted in ``asked``."""

    def record(seq: Any, batch: Any, tp: Any, *_: Any) -> tuple[str, Any]:
        name = "long" if seq > 1000 else "short"
        if name == "long" and tp > 1:
            name = "long, divided"
        asked.append(name)
        return name, seq * batch // tp

    return record


def test_a_trace_serves_every_run_that_passes_its_guards() -> None:
    asked: list[str] = []
    traces, record = Traces(), a_layer(asked)
    assert traced(traces, at(4096), record) == "long"
    assert traced(traces, at(8192), record) == "long"
    assert traced(traces, at(512), record) == "short"
    assert traced(traces, at(8192, tp=2), record) == "long, divided"
    # The trace of a short one has no guard on tp, so that it serves every tp.
    assert traced(traces, at(256, tp=8), record) == "short"
    assert asked == ["long", "short", "long, divided"]
    assert traces.find(at(2048)) == ("long", [2048])
    assert traces.find(at(256, tp=8)) == ("short", [32])


def test_a_number_taken_out_serves_that_number_only() -> None:
    """``range(tp)`` needs the number itself (``__index__``), which becomes a guard."""

    def record(seq: Any, batch: Any, tp: Any, *_: Any) -> tuple[str, Any]:
        return f"{len(range(tp))} shards", seq

    traces = Traces()
    assert traced(traces, at(10, tp=2), record) == "2 shards"
    assert traces.find(at(99, tp=2)) == ("2 shards", [99])
    assert traces.find(at(10, tp=4)) is None


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=8), st.data())
def test_what_is_found_is_what_would_have_been_traced(runs: list[tuple[int, int]], data: st.DataObject) -> None:
    """Traces whose sizes, and whose guards, depend on earlier guards."""
    bounds = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))

    def record(seq: Any, batch: Any, tp: Any, *_: Any) -> tuple[str, Any]:
        path, size = [], seq * 2
        for bound in bounds:
            if size % bound == 0:
                path.append(f"divisible by {bound}")
                size = size // bound + tp
            elif tp > bound:
                path.append(f"more than {bound} shards")
                size = size * tp
        return ", ".join(path), size

    traces = Traces()
    for seq, tp in runs:
        traced(traces, at(seq, tp), record)
    for seq, tp in runs:
        name, size = record(*at(seq, tp))
        assert traces.find(at(seq, tp)) == (name, [size])
    # Cached one after the other: a later trace may depend on dimensions that no earlier one did.
    traces = Traces()
    for seq, tp in runs:
        result = traces.kept(at(seq, tp))
        if result is None:
            traced(traces, at(seq, tp), record)
            result = traces.find(at(seq, tp))
            traces.keep(at(seq, tp), result)
        name, size = record(*at(seq, tp))
        assert result == (name, [size])


def test_a_cached_result_serves_all_dimensions_that_no_trace_depends_on() -> None:
    """The block of one sequence length is one for every tp, until a trace has a guard on tp."""
    traces, record = Traces(), a_layer([])
    short = at(512)
    traces.add(env := ShapeEnv(short), "short", [env.sizes[0] * 2])
    traces.keep(short, "1024 of whoever asks")
    assert traces.kept(at(512, tp=4)) == "1024 of whoever asks"
    assert traces.kept(at(513)) is None
    traces = Traces()
    assert traced(traces, at(512, tp=2), record) == "short"
    traces.keep(at(512, tp=2), "of two ranks")
    assert traces.kept(at(512, tp=2)) == "of two ranks" and traces.kept(at(512, tp=4)) is None


def test_so_many_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "MOST_KEPT", 3)
    traces = Traces()
    traces.add(env := ShapeEnv(at(1)), "any", [env.sizes[0] * 2])
    for seq in range(1, 8):
        traces.keep(at(seq), seq)
        assert traces.kept(at(seq)) == seq
    assert sum(traces.kept(at(seq)) is not None for seq in range(1, 8)) <= 3


# ---- the same of a real block ----

LLAMA = resolve_model("meta-llama/Llama-3.2-1B")


def run_of(seq: int, tp: int = 1, recompute: RecomputeSpec | None = None) -> RunSpec:
    return RunSpec(
        model=LLAMA, parallel=ParallelSpec(world_size=tp, tensor_model_parallel_size=tp),
        batch=BatchSpec(seq_length=seq), recompute=recompute or RecomputeSpec(),
    )


def test_a_block_is_traced_again_only_where_a_guard_fails() -> None:
    """Tensor parallelism gathers: tp 2 has another trace than tp 1, tp 4 has that of tp 2. The sequence is only a size.
    """
    calls: list[int] = []

    def record(r: Recorder) -> None:
        calls.append(1)
        ctx = r.ctx
        x = r.tape.input("x", ctx.hidden_bytes)
        if ctx.tp > 1:
            x = r.tape.make("gathered", x, ctx.tokens * ctx.hidden_size * ctx.act)
        r.tape.output(r.tape.make("y", x, ctx.tokens * ctx.hidden_size * ctx.act, saves=(x,)))
        r.parameter("weight", (ctx.hidden_size // ctx.tp, ctx.hidden_size))

    owner = TraceCache()

    def cost(run: RunSpec) -> tuple[int, int]:
        found = block(context_of(run, owner), "a linear", record)
        return found.cost.retained, reduce(operator.mul, next(found.parameters.expanded()).shape)

    # 2048 wide in bf16; without sequence parallelism tp 1 keeps x, with it tp 2 and 4 the gathered input.
    assert cost(run_of(100)) == (100 * 2048 * 2, 2048 * 2048)
    assert cost(run_of(300)) == (300 * 2048 * 2, 2048 * 2048) and len(calls) == 1
    assert cost(run_of(100, tp=2)) == (100 * 2048 * 2, 2048 * 1024) and len(calls) == 2
    assert cost(run_of(400, tp=4)) == (400 * 2048 * 2, 2048 * 512) and len(calls) == 2
    # An emptied cache traces again.
    owner.clear()
    assert cost(run_of(100)) == (100 * 2048 * 2, 2048 * 2048) and len(calls) == 3


def test_each_combination_of_settings_has_its_cache() -> None:
    """A trace in bf16 does not serve fp32, whatever the sizes are."""
    owner = TraceCache()
    bf16, fp32 = run_of(128), replace(run_of(128), precision=replace(run_of(128).precision, params_dtype="fp32"))
    assert context_of(bf16, owner).cache is context_of(run_of(256), owner).cache
    assert context_of(bf16, owner).cache is not context_of(fp32, owner).cache


def test_a_trace_that_another_thread_adds_meanwhile_is_not_found_yet():
    """``find`` allocates its registers first; here a longer trace is added on its path in between."""
    traces = Traces()
    for_one, for_many = plain(1), plain(2)

    def add(dimensions: list[int]) -> None:
        env = ShapeEnv(dimensions)
        batch = env.sizes[SIZES.index("batch")]
        size = batch + 1
        if batch > 1:
            size = reduce(operator.mul, range(2, 50), size)
        traces.add(env, "one" if batch.value == 1 else "many", [size])

    class Meanwhile(list[int]):
        def __iter__(self) -> Any:
            add(for_many)
            return super().__iter__()

    add(for_one)
    assert traces.find(Meanwhile(for_many)) is None
    found = traces.find(for_many)
    assert found is not None and found[0] == "many" and traces.find(for_one) == ("one", [2])


def test_a_longer_trace_that_another_thread_adds_meanwhile_serves_many_runs():
    """As above, of ``find_many``: registers are allocated, and then the trace is added that needs more of them."""
    np = pytest.importorskip("numpy")
    from bridge_memory.tapes.batched import AXES, Subgrid, step

    traces, for_one = Traces(), plain(1)

    class Meanwhile(Subgrid):
        def take(self, values: Any) -> Any:
            if not traces.count:
                env = ShapeEnv(for_one)
                batch = env.sizes[SIZES.index("batch")]
                traces.add(env, "long", [reduce(operator.mul, range(2, 20), batch)])
            return super().take(values)

    def missing(part: Subgrid) -> bool:
        raise AssertionError("the trace is there")

    shape = np.ones([1] * AXES, dtype=int)
    grid = Meanwhile(tuple(np.arange(1) for _ in range(AXES)))
    ((_, trace, (size,)),) = traces.find_many([n * shape for n in for_one], grid, step, missing)
    assert trace == "long" and int(np.max(size)) == reduce(operator.mul, range(2, 20), 1)
