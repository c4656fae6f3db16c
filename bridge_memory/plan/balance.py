"""Layers to stages and virtual chunks, so that the highest peak, or the slowest stage, is as low as can be.

The costs are those of ``estimate`` and of the time model. A stage's cost depends on what it holds and on its rank
alone, so the best split is found by dynamic programming over stages: of all ways to give the first k layers to the
first r stages, the one whose highest cost is lowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from bridge_memory.estimate import peaks, stage_peaks
from bridge_memory.plan.splits import NO_SPLIT, splits
from bridge_memory.spec import BatchSpec, ParallelSpec, RunSpec, SpecError
from bridge_memory.spec.layout import Chunk, StageShape, layout
from bridge_memory.spec.layout_string import short_layout_string
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.step_time import Step

#: Layers by which a chunk may differ from the average, and for virtual stages how many sizes are tried of each chunk.
WIDEST, SIZES_TRIED = 8, 4
#: Virtual stages of which every combination of sizes is tried.
MOST_VIRTUAL = 4

Cost = Callable[[int, StageShape], float]


class Balanced(NamedTuple):
    """One split, and what it costs."""

    run: RunSpec
    #: Layers of every chunk, in the order in which a microbatch passes them.
    layers: tuple[int, ...]
    #: Highest peak of every stage, bytes.
    peaks: tuple[int, ...]
    #: Seconds of one microbatch on every stage; empty without hardware.
    seconds: tuple[float, ...] = ()

    @property
    def peak(self) -> int:
        return max(self.peaks)


def balance(run: RunSpec, hardware: Hardware | None = None, *, capacity: int | None = None) -> Balanced:
    """The split of ``run``'s layers with the lowest highest peak.

    With ``capacity``, bytes that no stage may exceed, the one whose slowest stage is fastest (needs ``hardware``).
    Raises SpecError where there is nothing to balance, and where no split stays within ``capacity``.
    """
    model, p = run.model, run.parallel
    check_balanced(run)
    some = any_split(run, run.parallel)
    of_memory = stage_peaks(some)
    step = None if hardware is None else Step(some, hardware)

    def cost(rank: int, shapes: StageShape) -> float:
        peak = of_memory(rank, shapes).peak_bytes
        if capacity is None:
            return peak
        assert step is not None, "time needs hardware"
        return step.seconds_of(shapes) if peak <= capacity else float("inf")

    v = some.parallel.vpp
    sizes = _plain(some, cost) if v == 1 else _interleaved(some, v, cost)
    if sizes is None:
        raise SpecError(f"no split of {model.num_layers} layers over {p.pp} stages stays within {capacity} bytes")
    return described(with_sizes(some, sizes), hardware)


def check_balanced(run: RunSpec) -> None:
    """Raises SpecError where there is nothing to balance."""
    if run.parallel.pp == 1:
        raise SpecError("pipeline_model_parallel_size (1) leaves nothing to balance; give --pp of 2 or more")
    if run.model.hybrid:
        raise SpecError("a hybrid (Mamba) model takes no layout string; its layer pattern says where stages begin")


def described(run: RunSpec, hardware: Hardware | None = None) -> Balanced:
    """A run's own split and what it costs."""
    stages = _stages(run)
    layers = tuple(stage[c].num_layers for c in range(len(stages[0])) for stage in stages)
    seconds: tuple[float, ...] = ()
    if hardware is not None:
        step = Step(run, hardware)
        seconds = tuple(step.seconds_of(tuple(c.shape(run.model) for c in stage)) for stage in stages)
    return Balanced(run, layers, tuple(s.peak_bytes for s in peaks(run)), seconds)


def _stages(run: RunSpec) -> Sequence[Sequence[Chunk]]:
    return layout(run.model, run.parallel).stages


def default_split(run: RunSpec) -> RunSpec | None:
    """The split that Megatron makes without a layout string: even, or with embedding and loss as layers."""
    for fields in splits(run.model, run.parallel.pp, run.parallel.vpp):
        if "pipeline_model_parallel_layout" not in fields:
            return _without_split(run, **fields)
    return None


def any_split(run: RunSpec, parallel: ParallelSpec, batch: BatchSpec | None = None) -> RunSpec:
    """The run with these sizes, this batch, and some split that it can have: costs of stages do not depend on which.
    Raises SpecError."""
    p = replace(parallel, **NO_SPLIT)
    for fields in splits(run.model, p.pp, p.vpp, exhaustive=True):
        return run.with_(parallel=replace(p, **fields), batch=batch or run.batch)
    raise SpecError(
        f"num_layers ({run.model.num_layers}) is too small for pipeline_model_parallel_size ({p.pp}) x "
        f"virtual_pipeline_model_parallel_size ({p.vpp}); lower one of them"
    )


def _without_split(run: RunSpec, **fields: Any) -> RunSpec:
    return run.with_(parallel=replace(run.parallel, **{**NO_SPLIT, **fields}))


def with_sizes(run: RunSpec, sizes: Sequence[int]) -> RunSpec:
    """``sizes``: layers of every chunk, in the order in which a microbatch passes them."""
    texts = ["t" * n for n in sizes]
    texts[0] = "E" + texts[0]
    texts[-1] += "m" * run.model.mtp_num_layers + "L"
    return _without_split(run, pipeline_model_parallel_layout=short_layout_string(texts))


def _plain(run: RunSpec, cost: Cost) -> list[int] | None:
    """Layers of every stage without virtual ones: exact, whatever the order of kinds."""
    model, pp = run.model, run.parallel.pp
    layers, mean = model.num_layers, model.num_layers / pp
    known: dict[tuple[int, StageShape], float] = {}

    def of(rank: int, first: int, number: int) -> float:
        last = rank == pp - 1
        chunk = Chunk(first, number, rank == 0, last, 0, model.mtp_num_layers if last else 0)
        key = rank, (chunk.shape(model),)
        if key not in known:
            known[key] = cost(*key)
        return known[key]

    #: Layers given out -> (highest cost, how uneven, sizes).
    best: dict[int, tuple[float, int, list[int]]] = {0: (0.0, 0, [])}
    for rank in range(pp):
        after: dict[int, tuple[float, int, list[int]]] = {}
        for given, (highest, uneven, sizes) in best.items():
            for number in _sizes(mean, layers - given, rank == pp - 1):
                found = max(highest, of(rank, given, number)), uneven + number * number, [*sizes, number]
                if given + number not in after or found[:2] < after[given + number][:2]:
                    after[given + number] = found
        best = after
    given_out = best.get(layers)
    return given_out[2] if given_out is not None and given_out[0] < float("inf") else None


def _sizes(mean: float, left: int, last: bool) -> Iterator[int]:
    """Layers that one stage may hold; the last may hold the loss alone."""
    if last:
        yield left
        return
    yield from range(max(1, int(mean) - WIDEST), min(left, int(mean) + WIDEST + 1) + 1)


def _interleaved(run: RunSpec, v: int, cost: Cost) -> list[int] | None:
    """Layers of every chunk with virtual stages, where layers are of one kind but for the first few, which the first
    chunk holds: then it does not matter to a stage where its chunks begin."""
    model, pp = run.model, run.parallel.pp
    runs = model.layer_runs
    if len(runs) > 2:
        raise SpecError(
            f"virtual_pipeline_model_parallel_size ({v}) with layers that change kind {len(runs) - 1} times cannot be "
            "balanced yet; drop --vpp"
        )
    first = runs[0][2] if len(runs) == 2 else 0
    layers, chunks = model.num_layers, pp * v
    base = layers // chunks
    tried = [n for n in range(max(1, base - 1), base - 1 + SIZES_TRIED + (base < 2))]

    def stage(rank: int, sizes: Sequence[int]) -> StageShape:
        shapes = []
        for c, number in enumerate(sizes):
            embedding, output = rank == c == 0, rank == pp - 1 and c == v - 1
            # Any chunk without special layers stands for all of its size.
            start = 0 if embedding else layers - number if output else first
            chunk = Chunk(start, number, embedding, output, 0, model.mtp_num_layers if output else 0)
            shape = chunk.shape(model)
            shapes.append(shape if output else shape._replace(last_layer=False))
        return tuple(shapes)

    def options(rank: int) -> Iterator[tuple[int, ...]]:
        ends: list[list[int]] = [list(tried) for _ in range(v)]
        if rank == 0:
            ends[0] = [n for n in range(max(1, first), max(first, base) + 2)]
        if rank == pp - 1:
            ends[-1] = list(range(0, base + 3))
        if v <= MOST_VIRTUAL:
            yield from product(*ends)
            return
        # Of many virtual stages: one size, and from some chunk on the next.
        for size in tried:
            for at in range(v + 1):
                middle = [size + (c >= at) for c in range(v)]
                for head in ends[0] if rank == 0 else [middle[0]]:
                    for tail in ends[-1] if rank == pp - 1 else [middle[-1]]:
                        yield (head, *middle[1:-1], tail)

    best: dict[int, tuple[float, int, list[tuple[int, ...]]]] = {0: (0.0, 0, [])}
    for rank in range(pp):
        of_total: dict[int, tuple[float, int, tuple[int, ...]]] = {}
        for sizes in set(options(rank)):
            found = cost(rank, stage(rank, sizes)), sum(n * n for n in sizes), sizes
            total = sum(sizes)
            if total not in of_total or found < of_total[total]:
                of_total[total] = found
        after: dict[int, tuple[float, int, list[tuple[int, ...]]]] = {}
        for given, (highest, uneven, rows) in best.items():
            for total, (price, square, sizes) in of_total.items():
                if given + total > layers:
                    continue
                both = max(highest, price), uneven + square, [*rows, sizes]
                if given + total not in after or both[:2] < after[given + total][:2]:
                    after[given + total] = both
        best = after
    found_all = best.get(layers)
    if found_all is None or found_all[0] == float("inf"):
        return None
    return [found_all[2][rank][c] for c in range(v) for rank in range(pp)]
