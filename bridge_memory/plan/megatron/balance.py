"""Layers to stages and virtual chunks, so that the highest peak, or the slowest stage, is as low as can be.

The costs are those of ``estimate`` and of the time model. A stage's cost depends on what it holds and on its rank
alone, so the best split is found by dynamic programming over stages: of all ways to give the first k layers to the
first r stages, the one whose highest cost is lowest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

from bridge_memory.estimation import peaks, stage_peaks
from bridge_memory.plan.megatron.splits import NO_SPLIT, splits
from bridge_memory.spec import BatchSpec, LayerSpec, ModelSpec, ParallelSpec, RunSpec, SpecError
from bridge_memory.spec.layout import Chunk, ChunkShape, StageShape, layout
from bridge_memory.spec.layout_string import short_layout_string
from bridge_memory.spec.parts import WITH_TRANSFORMERS
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.megatron.step_time import Step, added

#: Layers by which a chunk may differ from the average.
WIDEST = 8
#: Virtual stages -> how many sizes around the average are tried of each chunk; of more virtual stages four.
SIZES_TRIED = {2: 12, 3: 6}
#: Virtual stages of which every combination of sizes is tried.
MOST_VIRTUAL = 4
#: Ways in which rows of chunks may begin in a model whose layers are of several kinds.
MOST_BEGINNINGS = 64

#: Decimals of a stage's seconds that are compared: what differs by less is rounding, and the evener split is taken.
DECIMALS = 12

Cost = Callable[..., float]


class Balanced(NamedTuple):
    """One split of the layers over stages, and what it costs.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec, balance
        >>> sizes = ParallelSpec(world_size=4, pipeline_model_parallel_size=4)
        >>> split = balance(RunSpec(model="meta-llama/Llama-3.2-1B", parallel=sizes), gpu="H100")
        >>> sum(split.layers), split.peak == max(split.peaks), len(split.seconds)
        (16, True, 4)
    """

    run: RunSpec
    #: Layers of every chunk, in the order in which a microbatch passes them.
    layers: tuple[int, ...]
    #: Highest peak of every stage, bytes.
    peaks: tuple[int, ...]
    #: Seconds of one microbatch on every stage; empty without hardware.
    seconds: tuple[float, ...] = ()
    #: Seconds of one microbatch in which the slowest stage waits for others, for virtual stages that are not even.
    waiting: float = 0.0

    @property
    def peak(self) -> int:
        return max(self.peaks)


def balance(
    run: RunSpec, hardware: Hardware | None = None, *, capacity: int | None = None, within: float = float("inf")
) -> Balanced:
    """The split of ``run``'s layers with the lowest highest peak; of several, with ``hardware`` and without virtual
    stages, the one whose slowest stage is fastest, and of these the one whose next slowest is, and so on.

    With ``capacity``, bytes that no stage may exceed, the one whose slowest stage is fastest (needs ``hardware``), of
    those in which it takes at most ``within`` seconds for a microbatch.
    Raises SpecError where there is nothing to balance, and where no split stays within ``capacity`` and ``within``.
    """
    model = run.model
    check_balanced(run)
    some = any_split(run, run.parallel)
    of_memory = stage_peaks(some)
    step = None if hardware is None else Step(some, hardware)
    within = round(within, DECIMALS)

    def seconds_of(shapes: StageShape) -> float:
        assert step is not None, "time needs hardware"
        return round(step.seconds_of(shapes), DECIMALS)

    def cost(rank: int, shapes: StageShape, most: float = float("inf")) -> float:
        """``most``: of a stage that costs more no more is asked."""
        if capacity is None:
            return of_memory(rank, shapes).peak_bytes
        seconds = seconds_of(shapes)
        fits = seconds > min(most, within) or of_memory(rank, shapes).peak_bytes <= capacity
        return seconds if fits and seconds <= within else float("inf")

    if model.hybrid:
        ends = _hybrid(some, cost)
        if ends is None:
            raise SpecError(_no_split(run, capacity))
        return described(ends, hardware)
    v = some.parallel.vpp
    timed = None if step is None or capacity is None else partial(_seconds_of_chunk, step)
    sizes = _plain(some, cost, every=capacity is not None) if v == 1 else _interleaved(some, v, cost, timed)
    if sizes is None:
        raise SpecError(_no_split(run, capacity))
    found = described(with_sizes(some, sizes), hardware)
    if v == 1 and capacity is None and hardware is not None:
        # One stage often has the highest peak whatever the others hold (an encoder, the logits).
        return balance(run, hardware, capacity=found.peak)
    return found


def _seconds_of_chunk(step: Step, shape: ChunkShape) -> float:
    return step.seconds_of((shape,))


def _no_split(run: RunSpec, capacity: int | None) -> str:
    over = f"num_layers ({run.model.num_layers}) over pipeline_model_parallel_size ({run.parallel.pp})"
    if capacity is not None:
        return f"{over}: every split needs more than {capacity / 2**30:.2f} GiB on some stage"
    return f"{over}: fewer layers than stages; lower pipeline_model_parallel_size"


def check_balanced(run: RunSpec) -> None:
    """Raises SpecError where there is nothing to balance."""
    engine = run.data_parallel.engine
    if engine in WITH_TRANSFORMERS:
        raise SpecError(
            f"engine ({engine}) has no pipeline stages, so that there is nothing to balance; use engine megatron_ddp, "
            "or ask `bridge-memory search` for what fits"
        )
    if run.parallel.pp == 1:
        raise SpecError("pipeline_model_parallel_size (1) leaves nothing to balance; give --pp of 2 or more")


def described(run: RunSpec, hardware: Hardware | None = None) -> Balanced:
    """A run's own split and what it costs."""
    stages = _stages(run)
    layers = tuple(stage[c].num_layers for c in range(len(stages[0])) for stage in stages)
    seconds: tuple[float, ...] = ()
    waits = 0.0
    if hardware is not None:
        step = Step(run, hardware)
        seconds = tuple(step.seconds_of(tuple(c.shape(run.model) for c in stage)) for stage in stages)
        waits = step.waiting()
    return Balanced(run, layers, tuple(s.peak_bytes for s in peaks(run)), seconds, waits)


def _stages(run: RunSpec) -> Sequence[Sequence[Chunk]]:
    return layout(run.model, run.parallel).stages


def default_split(run: RunSpec) -> RunSpec | None:
    """The split that Megatron makes without a layout string: even, or with embedding and loss as layers."""
    for fields in splits(run.model, run.parallel.pp, run.parallel.vpp):
        if "pipeline_model_parallel_layout" not in fields:
            return _without_split(run, **fields)
    return None


def best_split(
    run: RunSpec, own: RunSpec | None, hardware: Hardware | None = None, *, capacity: int | None = None
) -> Balanced:
    """As ``balance``, or a split that takes no layout string where it is as good: ``own``, or Megatron's."""
    found = balance(run, hardware, capacity=capacity)
    for simple in filter(None, (default_split(run), own)):
        found = _keeping(described(simple, hardware), found)
    return found


def _keeping(given: Balanced, found: Balanced) -> Balanced:
    """``given`` if its highest peak and its slowest stage are no worse than those of the split that was found."""
    slowest = [max(b.seconds, default=0.0) + b.waiting for b in (given, found)]
    return given if given.peak <= found.peak and slowest[0] <= slowest[1] * (1 + 1e-9) else found


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


def _plain(run: RunSpec, cost: Cost, *, every: bool) -> list[int] | None:
    """Layers of every stage without virtual ones: exact, whatever the order of kinds. The highest cost decides, or the
    costs of ``every`` stage, the highest first; then how uneven the stages are."""
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

    #: Layers given out -> (costs, the highest first, how uneven, sizes).
    best: dict[int, tuple[list[float], int, list[int]]] = {0: ([], 0, [])}
    for rank in range(pp):
        after: dict[int, tuple[list[float], int, list[int]]] = {}
        for given, (costs, uneven, sizes) in best.items():
            for number in _sizes(mean, layers - given, rank == pp - 1):
                here = sorted((*costs, of(rank, given, number)), reverse=True)
                found = here if every else here[:1], uneven + number * number, [*sizes, number]
                if given + number not in after or found[:2] < after[given + number][:2]:
                    after[given + number] = found
        best = after
    given_out = best.get(layers)
    return given_out[2] if given_out is not None and given_out[0][0] < float("inf") else None


def _sizes(mean: float, left: int, last: bool) -> Iterator[int]:
    """Layers that one stage may hold; the last may hold the loss alone."""
    if last:
        yield left
        return
    yield from range(max(1, int(mean) - WIDEST), min(left, int(mean) + WIDEST + 1) + 1)


def _hybrid(run: RunSpec, cost: Cost) -> RunSpec | None:
    """The best of the splits that a hybrid can have: it takes no layout string, and all stages between the first and
    the last hold as many layers (``MambaStack._select_layers_for_pipeline_parallel``)."""
    known: dict[tuple[int, StageShape], float] = {}
    best: tuple[float, int, RunSpec] | None = None
    some = (None, *range(1, run.model.num_layers))
    for first, last in product(some, some):
        try:
            one = _without_split(
                run, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last
            )
        except SpecError:
            continue
        shapes = layout(one.model, one.parallel).shapes(one.model)
        for key in enumerate(shapes):
            if key not in known:
                known[key] = cost(*key)
        uneven = sum(sum(c.num_layers for c in stage) ** 2 for stage in shapes)
        found = max(known[key] for key in enumerate(shapes)), uneven, one
        if found[0] < float("inf") and (best is None or found[:2] < best[:2]):
            best = found
    return None if best is None else best[2]


class _Pattern(NamedTuple):
    """Kinds of layers by their position: the first ``prefix`` as they come, then ``period`` of them again and again."""

    kinds: tuple[LayerSpec, ...]
    prefix: int
    period: int

    def place(self, at: int) -> int:
        """The first position from which layers go on as from ``at``."""
        return at if at < self.prefix else self.prefix + (at - self.prefix) % self.period

    def layers(self, at: int, number: int) -> tuple[tuple[LayerSpec, int], ...]:
        """Kinds of ``number`` layers from ``at`` on, as a ChunkShape has them."""
        runs: list[tuple[LayerSpec, int]] = []
        for position in range(at, at + number):
            kind = self.kinds[self.place(position)]
            if runs and runs[-1][0] is kind:
                runs[-1] = kind, runs[-1][1] + 1
            else:
                runs.append((kind, 1))
        return tuple(runs)


def _pattern(model: ModelSpec) -> _Pattern:
    """The shortest that says all layers."""
    number, one = model.num_layers, {kind: kind for kind, _, _ in model.layer_runs}
    kinds = tuple([one[layer] for layer in model.layers])
    best = number, 1
    for period in range(1, number):
        differ = [i for i in range(number - period) if kinds[i] is not kinds[i + period]]
        best = min(best, (differ[-1] + 1 if differ else 0, period), key=lambda found: (sum(found), found[1]))
    return _Pattern(kinds[: sum(best)], *best)


class _Chunk(NamedTuple):
    """A chunk of some layers."""

    shape: ChunkShape
    #: 0 where time costs nothing.
    seconds: float
    #: What it adds to how uneven a split is.
    uneven: float
    #: Where the pattern of layers goes on after it.
    on: int


class _Alike:
    """Sizes of the chunks of one stage that hold ``number`` layers in all and go on ``on`` the same places: each as
    (seconds, how uneven, sizes, shapes)."""

    def __init__(self, number: int, on: tuple[int, ...]) -> None:
        self.number, self.on = number, on
        self.few: list[tuple[float, float, tuple[int, ...], StageShape]] = []
        self._best: list[tuple[float, float, tuple[int, ...]]] | None = None

    @property
    def least(self) -> tuple[float, float]:
        """No size takes less (seconds, or is more even)."""
        return min([one[0] for one in self.few]), min([one[1] for one in self.few])

    def best(self, price: Callable[[StageShape], float]) -> list[tuple[float, float, tuple[int, ...]]]:
        """(cost, how uneven, sizes) of those that no other is better than in both."""
        if self._best is None:
            self._best, least = [], float("inf")
            for _, uneven, sizes, shapes in sorted(self.few, key=lambda one: one[:3]):
                # Of what is as fast and as even as one that memory holds, memory is not asked for.
                if uneven < least and (here := price(shapes)) < float("inf"):
                    self._best.append((here, uneven, sizes))
                    least = uneven
        return self._best


def _interleaved(
    run: RunSpec, v: int, cost: Cost, timed: Callable[[ChunkShape], float] | None = None
) -> list[int] | None:
    """Layers of every chunk with virtual stages, in the order in which a microbatch passes them.

    A chunk's layers depend on where it begins, and so on all chunks before it, most of them on other stages. What is
    decided stage by stage is therefore kept with the place in the model's pattern at which each of the v rows of
    chunks goes on, and with the layers given out so far: where the rows begin on the first stage is tried in every way,
    and after the last stage each row must have come to where the next began.

    ``timed``: what stages cost is time, this much a chunk, or without end where memory does not hold them. Of splits
    that cost as much the one with the evenest chunks, by layers or by ``timed``: a chunk that takes longer than those
    that run beside it on other stages keeps them waiting.
    """
    model, pp = run.model, run.parallel.pp
    pattern, layers = _pattern(model), model.num_layers
    base = layers // (pp * v)
    number = SIZES_TRIED.get(v, 4)
    low = max(1, base + 1 - number // 2)
    tried = list(range(low, low + number))
    may_begin = [[at for at in range(len(pattern.kinds)) if at >= min(pattern.prefix, c * pp)] for c in range(1, v)]
    if (ways := prod(map(len, may_begin))) > MOST_BEGINNINGS:  # 10^23 of a model whose every sixth layer differs
        raise SpecError(
            f"virtual_pipeline_model_parallel_size ({v}) with kinds of layers that repeat after {pattern.period} has "
            f"{ways} ways to begin, more than {MOST_BEGINNINGS}; lower it"
        )
    begins = list(product(*may_begin))
    some = _stages(run)
    known: dict[tuple[int, StageShape], float] = {}

    best: tuple[float, float, list[int]] = float("inf"), 0, []

    def price(rank: int, shapes: StageShape) -> float:
        # What costs more than the best so far is not looked at again, and the best only gets better.
        key = rank, shapes
        if key not in known:
            known[key] = cost(rank, shapes, best[0])
        return known[key]

    def chunk_of(shape: ChunkShape, on: int) -> _Chunk:
        if timed is None:
            return _Chunk(shape, 0.0, shape.num_layers**2, on)
        seconds = timed(shape)
        return _Chunk(shape, seconds, round(seconds, DECIMALS) ** 2, on)

    def uneven_of(chunks: Iterable[_Chunk]) -> float:
        return sum(sorted([chunk.uneven for chunk in chunks]))

    given = [stage[c].num_layers for c in range(v) for stage in some]
    as_given = [tuple(c.shape(model) for c in stage) for stage in some]
    uneven = sum([uneven_of([chunk_of(shape, 0) for shape in shapes]) for shapes in as_given])
    best = max(price(*one) for one in enumerate(as_given)), uneven, given

    chunks: dict[tuple[bool, bool, bool, int, int], _Chunk] = {}

    def chunk(rank: int, c: int, at: int, number: int, bare: bool) -> _Chunk:
        last = c == v - 1
        embedding, output = rank == c == 0, rank == pp - 1 and last
        # The last layer is the output's, or where the loss stands alone that of the stage before.
        ends = bool(number) and (output or (bare and last and rank == pp - 2))
        key = embedding, output, ends, at, number
        if key not in chunks:
            depths = model.mtp_num_layers if output else 0
            shape = ChunkShape(pattern.layers(at, number), embedding, output, depths, ends)
            chunks[key] = chunk_of(shape, pattern.place(at + number))
        return chunks[key]

    def options(rank: int, bare: bool) -> Iterator[tuple[int, ...]]:
        ends: list[list[int]] = [list(tried) for _ in range(v)]
        if rank == 0:
            ends[0] = list(range(1, max(pattern.prefix + 2 if pattern.prefix <= WIDEST else 0, tried[-1] + 1)))
        if rank == pp - 1:
            ends[-1] = [0] if bare else list(range(1, tried[-1] + 1))
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

    #: Sizes of one stage, by rank, whether the loss stands alone, and where its chunks begin; those of the last by
    #: where all chunks but the last go on.
    of_stage: dict[tuple[int, bool, tuple[int, ...]], dict[tuple[int, ...], list[_Alike]]] = {}

    def sizes_of(rank: int, bare: bool, places: tuple[int, ...]) -> dict[tuple[int, ...], list[_Alike]]:
        key = rank, bare, places
        found = of_stage.get(key)
        if found is None:
            alike: dict[tuple[Any, ...], _Alike] = {}
            for sizes in dict.fromkeys(options(rank, bare)):
                here = [chunk(rank, c, at, n, bare) for c, (at, n) in enumerate(zip(places, sizes, strict=True))]
                seconds = round(added([one.seconds for one in here]), DECIMALS)
                if seconds > best[0]:
                    continue
                number, on = sum(sizes), tuple([one.on for one in here])
                group = (on, number) if timed else (sizes,)
                if group not in alike:
                    alike[group] = _Alike(number, on)
                alike[group].few.append((seconds, uneven_of(here), sizes, tuple([one.shape for one in here])))
            found = of_stage[key] = {}
            for one in alike.values():
                found.setdefault(one.on[:-1] if rank == pp - 1 else (), []).append(one)
        return found

    def ends(bare: bool, begin: tuple[int, ...], places: tuple[int, ...], total: int) -> bool:
        """Whether the last stage can hold what is left."""
        return any(total + one.number == layers for one in sizes_of(pp - 1, bare, places).get(begin, ()))

    # First the lowest highest cost, then of the splits that stay within it the evenest.
    for even, bare, begin in product((False, True), (False, True), begins):
        #: (where each row of chunks goes on, layers given out) -> (highest cost, how uneven, sizes by stage).
        states: dict[tuple[tuple[int, ...], int], tuple[float, float, list[tuple[int, ...]]]]
        states = {((0, *begin), 0): (0.0, 0, [])}
        for rank in range(pp):
            after: dict[tuple[tuple[int, ...], int], tuple[float, float, list[tuple[int, ...]]]] = {}
            last = rank == pp - 1
            for (places, total), (high, uneven, rows) in states.items():
                left = layers - total - v * (pp - 1 - rank) + bare
                for alike in sizes_of(rank, bare, places).get(begin if last else (), ()):
                    key = alike.on, total + alike.number
                    if alike.number > left or (last and key[1] != layers):
                        continue
                    # Memory is not asked for where the last stage cannot take the rest, or the best stays the best.
                    if rank == pp - 2 and not ends(bare, begin, *key):
                        continue
                    if last and (best[0] if even else max(high, alike.least[0]), uneven + alike.least[1]) >= best[:2]:
                        continue
                    for here, more, sizes in alike.best(partial(price, rank)):
                        both = 0.0 if even else max(high, here), uneven + more
                        if here <= best[0] and (key not in after or both < after[key][:2]):
                            after[key] = *both, [*rows, sizes]
            states = after
        for high, uneven, rows in states.values():
            found = best[0] if even else high, uneven
            if found < best[:2]:
                best = *found, [rows[rank][c] for c in range(v) for rank in range(pp)]
    return best[2] if best[0] < float("inf") else None
