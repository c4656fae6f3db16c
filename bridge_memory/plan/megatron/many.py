"""The layouts of a space evaluated together: legality, memory and step time as arrays.

What decides is written once, for single runs (``spec.validation``, ``estimation.StageContents``, ``speed.step_time``),
and evaluated here with arrays in the place of numbers; ``tapes.batched`` says how that cannot go wrong. Layouts of
one pipeline (its size, virtual stages and split of the layers) stand in a grid of parallel sizes x micro batches x sets
of recomputation. What of memory does not depend on the pipeline is worked out once for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from bridge_memory.engines.by_name import engine_of
from bridge_memory.engines.engine import StageState
from bridge_memory.estimation import Held, StageContents, by_lifetime
from bridge_memory.outside import communicators
from bridge_memory.plan.found import Limit, Refused
from bridge_memory.plan.jobs import spread
from bridge_memory.plan.megatron.space import (
    Sizes,
    Space,
    micro_batches,
    parallel_sizes,
    recomputations,
    split_choices,
)
from bridge_memory.schedule.peak import few_microbatches
from bridge_memory.schedule.rows import columns_of, peak_of_many, peak_rows
from bridge_memory.spec import BatchSpec, ParallelSpec, RecomputeSpec, RunSpec, SpecError
from bridge_memory.spec.layout import StageShape, layout
from bridge_memory.spec.limits import limits_of
from bridge_memory.spec.run import GROUPS
from bridge_memory.spec.validation import RULES
from bridge_memory.speed.constants import Constants
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.megatron.step_time import Passes, Step
from bridge_memory.tapes.batched import (
    Differs,
    Subgrid,
    along,
    batched,
    collapsed,
    distinct,
    numbered,
    parts,
    whole,
)
from bridge_memory.tapes.chain import Concurrent, EngineBytes
from bridge_memory.tapes.context import TRACE_CACHE, BlockContext, context_of, settings_of, sizes_of, switches_of
from bridge_memory.tapes.many import EXACT, RunGrid, Same, TooLarge
from bridge_memory.verdict import MemoryLimit
from bridge_memory.workspaces.batch import reads_static_inputs
from bridge_memory.workspaces.driver import may_have_driver_buffers

if TYPE_CHECKING:
    from bridge_memory.plan.megatron.kept import KeptCosts

_S = TypeVar("_S", ParallelSpec, BatchSpec)


class AsksForPipeline(Exception):
    """A rule or formula asks for a field of the pipeline, of runs whose pipelines differ."""


def stages_follow_pipeline(run: RunSpec) -> bool:
    """Whether what a stage holds beside model state depends on its pipeline, and is worked out for each: where an
    engine gathers beside layers, by the number of microbatches, and with a teacher."""
    impl = run.implementation
    return (
        run.data_parallel.engine != "megatron_ddp" or impl.defer_embedding_wgrad_compute or reads_static_inputs(run)
        or run.teacher is not None
    )


#: The fields of a ParallelSpec that say how a run is cut into stages, and over how many GPUs.
_PIPELINE = (
    "world_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split", "pipeline_model_parallel_layout",
    "microbatch_group_size_per_vp_stage",
)  # fmt: skip


def _asked(_: ParallelSpec) -> None:
    raise AsksForPipeline


#: A ParallelSpec whose pipeline is not there to be asked for.
_WithoutPipeline: type[ParallelSpec] = type(
    "_WithoutPipeline", (ParallelSpec,), {"__slots__": (), **dict.fromkeys(_PIPELINE, property(_asked))}
)


class Runs:
    """Many runs, with the fields of a RunSpec; arrays stand for what differs."""

    def __init__(self, base: RunSpec, parallel: ParallelSpec, batch: BatchSpec, recompute: Any) -> None:
        for name in ("model", "teacher", *GROUPS):
            setattr(self, name, getattr(base, name))
        self.parallel, self.batch, self.recompute = parallel, batch, recompute

    model: Any

    def __getattr__(self, name: str) -> Any:
        """What follows from the fields, as a RunSpec has it."""
        of_run = getattr(RunSpec, name, None)
        if isinstance(of_run, property) and of_run.fget is not None:
            return of_run.fget(self)
        raise AttributeError(name)


def _unchecked(base: _S, kind: type[_S] | None = None, without: tuple[str, ...] = (), **values: Any) -> _S:
    """A copy of a spec with arrays for some fields; of ``kind`` it is ``without`` some."""
    out: _S = object.__new__(kind or type(base))
    for f in fields(base):
        if f.name not in without:
            object.__setattr__(out, f.name, values.get(f.name, getattr(base, f.name)))
    return out


class Pipeline(NamedTuple):
    """Layouts that share their pipeline."""

    #: Where it stands among the splits of its sizes, for the order in which layouts are listed.
    number: int
    fields: dict[str, Any]
    pp: int
    #: Of the space's sizes, those with this pipeline size: number in the space's order, and in ``Sheet.sizes``.
    order: np.ndarray
    at: np.ndarray
    recomputes: tuple[RecomputeSpec, ...]


class Fitting(NamedTuple):
    """Layouts of one pipeline that fit, one entry each."""

    pipeline: Pipeline
    #: Numbers of places in ``Pipeline.at``, of micro batches, and of ``Pipeline.recomputes``.
    shape: tuple[int, int, int]
    #: Where in an array of that shape, flat; 32 bits: a large space has millions.
    at: np.ndarray
    peaks: np.ndarray
    seconds: np.ndarray
    #: How many legal layouts the pipeline has, and of them those whose model state alone is too large.
    looked_at: int
    without_activations: int
    #: How many more are tight.
    tight: int

    def places(self, which: Any = slice(None)) -> tuple[Any, Any, Any]:
        """Of some layouts the places in ``Pipeline.at``, among the micro batches, and in ``Pipeline.recomputes``."""
        sizes, batch, recompute = np.unravel_index(self.at[which], self.shape)
        return sizes, batch, recompute

    def order(self, sheet: Sheet, which: Any = slice(None)) -> np.ndarray:
        """Places of some layouts in the order in which a space lists them."""
        p, (sizes, batch, recompute) = self.pipeline, self.places(which)
        out: np.ndarray = p.order[sizes] * sheet.most_splits + p.number
        out = (out * len(sheet.batches) + batch) * sheet.most_recomputes + recompute
        return out


class Sheet:
    """The layouts of a space as arrays."""

    def __init__(self, space: Space) -> None:
        """Raises TooLarge."""
        self.space = space
        self.base = space.base
        self.total = space.global_batch_size or space.base.batch.global_batch_size
        self.batches = micro_batches(space)
        if space.base.batch.seq_length**2 * max(self.batches, default=1) >= EXACT:  # scores: 64 bits may not hold them
            raise TooLarge
        #: Sizes beside the pipeline's, each once.
        self.sizes: list[Sizes] = []
        self.pipelines: list[Pipeline] = []
        of_pp: dict[int, tuple[list[int], list[int]]] = {}
        known: dict[Sizes, int] = {}
        for number, sizes in enumerate(parallel_sizes(space)):
            rest = sizes._replace(pp=1)
            at = known.setdefault(rest, len(known))
            order, places = of_pp.setdefault(sizes.pp, ([], []))
            order.append(number)
            places.append(at)
        self.sizes = list(known)
        self.most_splits = self.most_recomputes = 1
        for pp, (order, places) in of_pp.items():
            for number, split in enumerate(split_choices(space, pp)):
                vpp = split.get("virtual_pipeline_model_parallel_size", self.base.parallel.vpp) or 1
                choices = tuple(recomputations(space, pp * vpp))
                self.pipelines.append(Pipeline(number, split, pp, np.array(order), np.array(places), choices))
                self.most_splits = max(self.most_splits, number + 1)
                self.most_recomputes = max(self.most_recomputes, len(choices))
        #: All sets of recomputation of any pipeline, and where each is.
        self.recomputes = tuple(dict.fromkeys(r for p in self.pipelines for r in p.recomputes))
        self.number = {r: i for i, r in enumerate(self.recomputes)}
        self._errors: list[SpecError | None] = [None]

    def run(self, pipeline: Pipeline, size: int, batch: int, recompute: int) -> RunSpec:
        """One of its layouts, by its places."""
        sizes = self.sizes[pipeline.at[size]]._replace(pp=pipeline.pp)
        base = self.base
        return base.with_(
            parallel=replace(base.parallel, world_size=self.space.num_gpus, **sizes.fields(), **pipeline.fields),
            batch=replace(base.batch, micro_batch_size=self.batches[batch], global_batch_size=self.total),
            recompute=pipeline.recomputes[recompute],
        )

    def unchecked(self, pipeline: Pipeline, place: int, batch: int) -> RunSpec:
        """One of its layouts that is known to be legal, by its place in ``sizes``, with nothing recomputed."""
        base, sizes = self.base, self.sizes[place]._replace(pp=pipeline.pp)
        parallel = _unchecked(base.parallel, world_size=self.space.num_gpus, **{**sizes.fields(), **pipeline.fields})
        batches = _unchecked(base.batch, micro_batch_size=self.batches[batch], global_batch_size=self.total)
        return Runs(base, parallel, batches, RecomputeSpec())  # type: ignore[return-value]

    # ---- arrays in the place of runs ----

    def parallel(self, places: np.ndarray, **more: Any) -> ParallelSpec:
        sizes = [self.sizes[i] for i in places]
        etp = None if sizes[0].etp is None else along(0, [s.etp for s in sizes])
        out: ParallelSpec = _unchecked(
            self.base.parallel, world_size=self.space.num_gpus,
            tensor_model_parallel_size=along(0, [s.tp for s in sizes]),
            context_parallel_size=along(0, [s.cp for s in sizes]),
            expert_model_parallel_size=along(0, [s.ep for s in sizes]), expert_tensor_parallel_size=etp, **more,
        )  # fmt: skip
        return out

    def runs(self, pipeline: Pipeline, part: Subgrid) -> Runs:
        """Those of a pipeline's layouts."""
        sizes, batches, choices = part.positions
        few = [pipeline.recomputes[i] for i in choices]
        return Runs(
            self.base,
            self.parallel(pipeline.at[sizes], pipeline_model_parallel_size=pipeline.pp, **pipeline.fields),
            self.batch(batches), few[0] if len(few) == 1 else Same(few),
        )  # fmt: skip

    def without_pipeline(self, part: Subgrid) -> Runs:
        """Runs of these sizes, micro batches and sets of recomputation; a pipeline's fields are not there to be asked
        for."""
        parallel = _unchecked(self.parallel(part.positions[0]), _WithoutPipeline, _PIPELINE)
        few = [self.recomputes[i] for i in part.positions[2]]
        return Runs(self.base, parallel, self.batch(part.positions[1]), few[0] if len(few) == 1 else Same(few))

    def batch(self, batches: np.ndarray) -> BatchSpec:
        return _unchecked(
            self.base.batch, micro_batch_size=along(1, [self.batches[i] for i in batches]),
            global_batch_size=self.total,
        )

    # ---- legality ----

    def legal(self, pipeline: Pipeline, refused: Refused) -> np.ndarray:
        """Which of a pipeline's layouts megatron-core runs; the others are counted as ``space.layouts`` counts them."""
        shape = len(pipeline.at), len(self.batches), len(pipeline.recomputes)
        legal = np.ones(shape, bool)
        if self.total is not None:
            sizes = [self.sizes[i] for i in pipeline.at]
            dp = np.array([self.space.num_gpus // (s.tp * pipeline.pp * s.cp) for s in sizes])
            whole_steps = self.total % (np.outer(dp, self.batches)) == 0
            refused["global_batch_size"] += int((~whole_steps).sum()) * shape[2]
            legal &= whole_steps[:, :, None]
            refused += Refused()  # without what was counted as none
        if not legal.any():
            return legal
        #: Why a layout is refused, as a number of ``errors``.
        reasons: np.ndarray = np.zeros(shape, np.int32)
        todo = legal.copy()
        around, runs = _around(todo), _kept_of(lambda part: self.runs(pipeline, part))
        choices = np.array([self.number[r] for r in pipeline.recomputes])
        for rule, everywhere in zip(RULES, self._everywhere, strict=True):
            if everywhere is None:
                numbers = np.zeros(shape, np.int32)
                for part, number in self._refusals(rule, around, runs):
                    numbers[part.index] = number
            else:
                numbers = _spread(everywhere, (pipeline.at, np.arange(shape[1]), choices))
            if numbers.any() and (todo & (numbers > 0)).any():
                reasons = np.where(todo, numbers, reasons)
                todo &= numbers == 0
                if not todo.any():
                    break
                around = _around(todo)
        # Where nothing is recomputed first, and that is refused, so are the others.
        first = reasons[:, :, :1]
        reasons = np.where(first > 0, first, reasons)
        for at, number in enumerate(np.bincount(reasons[legal]).tolist()):
            error = self._errors[at]
            if number and error is not None:
                refused.add(error, number)
        legal &= reasons == 0
        return legal

    @cached_property
    def _everywhere(self) -> list[np.ndarray | None]:
        """Of every rule why it refuses what, over all sizes, micro batches and sets of recomputation; None of a rule
        that asks for the pipeline."""
        every = whole((len(self.sizes), len(self.batches), len(self.recomputes)))
        runs = _kept_of(self.without_pipeline)
        out: list[np.ndarray | None] = []
        for rule in RULES:
            numbers = np.zeros(every.shape, np.int32)
            try:
                for part, number in self._refusals(rule, every, runs):
                    numbers[part.index] = number
            except AsksForPipeline:
                out.append(None)
            else:
                out.append(collapsed(numbers))
        return out

    def _refusals(
        self, rule: Callable[[Any, Any], None], of: Subgrid, runs: Callable[[Subgrid], Runs]
    ) -> Iterator[tuple[Subgrid, int]]:
        """Parts that a rule refuses, and why, as a number of ``errors``."""
        limits = limits_of(self.base.model)

        def refusal(part: Subgrid) -> SpecError | None:
            try:
                rule(runs(part), limits)
            except SpecError as error:
                return error
            return None

        for part, error in parts(of, refusal):
            if error is not None:
                self._errors.append(error)
                yield part, len(self._errors) - 1


def _kept_of(runs: Callable[[Subgrid], Runs]) -> Callable[[Subgrid], Runs]:
    """``runs``, made once of a part, of which many rules ask."""
    known: dict[int, tuple[Subgrid, Runs]] = {}

    def of(part: Subgrid) -> Runs:
        found = known.get(id(part))
        if found is None:
            found = known[id(part)] = part, runs(part)
        return found[1]

    return of


def _around(some: np.ndarray) -> Subgrid:
    """The smallest part of a grid that has all of ``some`` in it."""
    return Subgrid(tuple(
        np.flatnonzero(some.any(axis=tuple(other for other in range(some.ndim) if other != axis)))
        for axis in range(some.ndim)
    ))  # fmt: skip


# ---- memory ----

class _NoEngine:
    """In the place of an engine: model state depends on the pipeline, and is put beside what does not (``Memory``)."""

    def stage(self, chunks: Sequence[Any]) -> StageState:
        return StageState(0, ())


class _OfMany(StageContents):
    """Stages of many runs, with the state that ``state`` gives."""

    def __init__(self, runs: Any, ctx: BlockContext, state: Callable[[StageShape], StageState]) -> None:
        super().__init__(runs, ctx, _NoEngine())
        self._state = state

    def state(self, shapes: StageShape) -> StageState:
        return self._state(shapes)


def _stacked(states: Sequence[StageState], shape: tuple[int, ...]) -> StageState:
    """The states of many runs, on a grid of ``shape``, as one; without what only explanations name."""

    def stack(numbers: Sequence[int]) -> Any:
        first = numbers[0]
        return first if numbers.count(first) == len(numbers) else batched(np.array(numbers).reshape(shape))

    def concurrent(of_runs: Sequence[Concurrent]) -> Concurrent:
        first = of_runs[0]
        same = of_runs.count(first) == len(of_runs)
        return first if same else Concurrent(*map(stack, zip(*of_runs, strict=True)))

    def engine_bytes(of_runs: Sequence[EngineBytes]) -> EngineBytes:
        return EngineBytes(
            tuple(map(concurrent, zip(*[one.layers for one in of_runs], strict=True))),
            *[concurrent([getattr(one, name) for one in of_runs]) for name in EngineBytes._fields[1:]],
        )

    amounts = [dict(state.amounts) for state in states]
    lines = dict.fromkeys(line for of_run in amounts for line in of_run)
    numbers = ("parameters", "remainders", "gradient_copies", "gathered", "gathered_between_steps", "in_step",
               "accumulated", "pools")  # fmt: skip
    return StageState(
        **{name: stack([getattr(state, name) for state in states]) for name in numbers},
        amounts=tuple((line, stack([of_run.get(line, 0) for of_run in amounts])) for line in lines),
        concurrent=tuple(map(engine_bytes, zip(*[state.concurrent for state in states], strict=True))),
    )


class _Stage(NamedTuple):
    """What stages of one shape hold beside model state, over some runs."""

    static: Any
    between: Any
    batch: Any
    #: Which of ``costs`` each chunk has.
    which: tuple[int, ...]
    #: What a chunk saves and its peaks, one after the other; if ``carries``, what it carries over as well.
    costs: tuple[Any, ...]
    carries: bool
    hidden: Any


class _State(NamedTuple):
    """Model state of stages of one shape, over some runs."""

    #: Of it the lines alone, and all that stays.
    model: Any
    static: Any
    between: Any
    in_step: Any
    gathered: Any


class Pieces:
    """A function of parts of a grid, evaluated on the largest parts that answer every question alike. Parts that had to
    be divided once stay so for all that is asked later."""

    def __init__(self, of: Subgrid, make: Callable[[Subgrid], Any]) -> None:
        """``make``: what is kept of a part between evaluations. It may raise Differs."""
        self._make = make
        self._parts = list(parts(of, make))

    def each(
        self, evaluate: Callable[[Any], Any], needed: np.ndarray | None = None
    ) -> Iterator[tuple[Subgrid, Any]]:
        """(part, ``evaluate`` of what was made of it), of the parts in which anything is ``needed``."""
        kept: list[tuple[Subgrid, Any]] = []
        todo = self._parts[::-1]
        found = []
        while todo:
            part, made = todo.pop()
            if needed is not None and not needed[part.index].any():
                kept.append((part, made))
                continue
            try:
                result = evaluate(made)
            except Differs as differs:
                for few in part.divided(differs.values):
                    todo += list(parts(few, self._make))
                continue
            kept.append((part, made))
            found.append((part, result))
        self._parts = kept
        return iter(found)

    def made(self) -> Iterator[Any]:
        """What is kept of every part."""
        return (made for _, made in self._parts)


#: Of all chunks that are kept from one pipeline to the next the most entries of one array; a chunk is a few dozen.
_MOST_ENTRIES = 100_000


class Memory:
    """Peaks of the layouts of a sheet."""

    def __init__(self, sheet: Sheet, of_pp: dict[int, np.ndarray], costs: KeptCosts | None = None) -> None:
        """``of_pp``: which of ``sheet.sizes`` any legal layout of a pipeline size has; ``costs``: of blocks, kept by
        earlier searches. ``keep`` comes before peaks."""
        self.sheet = sheet
        self._of_pp = of_pp
        needed = np.any(list(of_pp.values()), axis=0)
        base = sheet.base
        #: Of the sheet's sizes -> the grid's.
        self.places = np.cumsum(needed) - 1
        self._sizes = np.flatnonzero(needed)
        of_all = self.runs(None, whole((len(self._sizes), len(sheet.batches), len(sheet.recomputes))))
        switches = [switches_of(r, base.implementation) for r in sheet.recomputes]
        self.grid = RunGrid(
            TRACE_CACHE.cache(settings_of(base)), sizes_of(of_all),  # type: ignore[arg-type]
            [along(2, [row[i] for row in switches]) for i in range(len(switches[0]))], sheet.recomputes,
        )
        #: Chunks that are kept from one pipeline to the next.
        self.few_chunks = _MOST_ENTRIES // max(1, prod(self.grid.shape))
        self._costs = costs
        if costs is not None:
            costs.take_up(self.grid.bare_grid())
        #: What model state is made of, of the last pipeline size.
        self._states: dict[int, Pieces] = {}
        #: Of a pipeline size, sizes and a micro batch, by their places.
        self._alone: dict[tuple[int, int, int], Callable[[StageShape], StageState]] = {}
        #: Stages with all that they hold, by pipeline; None where they do not depend on it.
        self._whole: dict[Any, Pieces] | None = {} if stages_follow_pipeline(base) else None
        #: Of a pipeline size, what stages of a shape keep of model state.
        self._of_shapes: dict[tuple[int, StageShape], _State] = {}

    def runs(self, pipeline: Pipeline | None, part: Subgrid) -> Runs:
        """Some runs of the grid; without a pipeline its fields are not there to be asked for."""
        sheet, sizes = self.sheet, self._sizes[part.positions[0]]
        runs = sheet.without_pipeline(Subgrid((sizes, *part.positions[1:])))
        if pipeline is not None:
            runs.parallel = sheet.parallel(sizes, pipeline_model_parallel_size=pipeline.pp, **pipeline.fields)
        return runs

    def _held_by(self, part: Subgrid) -> tuple[Subgrid, StageContents]:
        return part, StageContents(
            self.runs(None, part), self.grid.context(part), _NoEngine()  # type: ignore[arg-type]
        )

    def _stage(self, holds: StageContents, shapes: StageShape) -> _Stage:
        held = holds.held(shapes)
        distinct = list(dict.fromkeys(map(id, held.inventories)))
        which = tuple(distinct.index(id(inventory)) for inventory in held.inventories)
        costs: list[Any] = []
        carries = any([cost.carried_over for cost in held.costs])
        for i in range(len(distinct)):
            cost = held.costs[which.index(i)]
            costs += [cost.saved, cost.forward_peak, cost.backward_peak]
            if carries:
                costs.append(cost.carried_over)
        return _Stage(
            held.static_bytes, held.between_bytes, held.batch, which, tuple(costs), carries, holds.ctx.hidden_bytes
        )

    def _state(self, pipeline: Pipeline, shapes: StageShape) -> _State:
        """Model state over the whole grid (along its last axes one entry, where it is the same for all)."""
        pp = pipeline.pp
        known = self._of_shapes.get((pp, shapes))
        if known is not None:
            return known
        pieces = self._states.get(pp)
        if pieces is None:
            def made(part: Subgrid) -> StageContents:
                return self._contents(pipeline._replace(fields={}), part, bare=True)

            # The pipelines of one size follow each other, and need what another's state was made of no more.
            pieces = Pieces(self._with_pipeline(pp), made)
            self._states = {pp: pieces}

        def state(holds: StageContents) -> tuple[Any, ...]:
            found = holds.state(shapes)
            persistent, between = by_lifetime(found.buffers())
            model = sum([nbytes for _, nbytes in found.amounts])
            return (
                model, model + sum([b.bytes for b in persistent]), sum([b.bytes for b in between]), found.in_step,
                found.gathered,
            )

        out = [np.zeros(self.grid.shape, np.int64) for _ in _State._fields]
        for part, values in pieces.each(state):
            for into, value in zip(out, values, strict=True):
                into[part.index] = value
        answer = self._of_shapes[pp, shapes] = _State(*map(collapsed, out))
        return answer

    def _contents(self, pipeline: Pipeline, part: Subgrid, *, bare: bool) -> StageContents:
        """Stages of a pipeline, with their model state; ``bare``: only that. The engine of megatron-core's DDP takes
        arrays; of others each run's is asked by itself, for each of its sizes."""
        runs: Any = self.runs(pipeline, part)
        ctx = self.grid.context(part).bare() if bare else self.grid.context(part)
        engine = self.sheet.base.data_parallel.engine
        if engine == "megatron_ddp":
            return StageContents(runs, ctx, engine_of(runs))
        sizes, batches, _ = part.positions
        few = batches if engine == "megatron_deepspeed" else batches[:1]  # by the number of microbatches
        alone = [self._alone_of(pipeline.pp, int(size), int(batch)) for size in sizes for batch in few]
        shape = len(sizes), len(few), 1
        return _OfMany(runs, ctx, lambda shapes: _stacked([one(shapes) for one in alone], shape))

    def _alone_of(self, pp: int, size: int, batch: int) -> Callable[[StageShape], StageState]:
        """Model state of stages of a single run."""
        known = self._alone.get((pp, size, batch))
        if known is None:
            sheet = self.sheet
            sizes = sheet.sizes[self._sizes[size]]._replace(pp=pp)
            run: Any = Runs(
                sheet.base, _unchecked(sheet.base.parallel, world_size=sheet.space.num_gpus, **sizes.fields()),
                _unchecked(
                    sheet.base.batch, micro_batch_size=sheet.batches[batch], global_batch_size=sheet.total
                ), RecomputeSpec(),
            )  # fmt: skip
            contents = StageContents(run, context_of(run).bare(), engine_of(run))
            known = self._alone[pp, size, batch] = lru_cache(maxsize=1024)(contents.state)
        return known

    def _with_pipeline(self, pp: int) -> Subgrid:
        """The sizes that any legal layout of a pipeline size has; of others the number of replicas may be 0."""
        return Subgrid((np.flatnonzero(self._of_pp[pp][self._sizes]), *self.grid.all.positions[1:]))

    def _ranks(self, pipeline: Pipeline, legal: np.ndarray) -> tuple[ParallelSpec, dict[StageShape, list[int]]]:
        """The pipeline's own fields, and its stages by what they hold."""
        model, part = self.sheet.base.model, _around(legal)
        parallel = self.sheet.runs(pipeline, Subgrid(tuple(at[:1] for at in part.positions))).parallel
        ranks: dict[StageShape, list[int]] = {}
        for rank, shapes in enumerate(layout(model, parallel).shapes(model)):
            ranks.setdefault(shapes, []).append(rank)
        return parallel, ranks

    def fit_without_activations(
        self, pipeline: Pipeline, legal: np.ndarray, allowed: Callable[[np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Those of a pipeline's ``legal`` layouts whose model state alone fits. ``allowed``: which bytes the card
        holds."""
        _, ranks = self._ranks(pipeline, legal)
        found = np.nonzero(legal)
        cells = self.cells(pipeline, found)
        most = np.max([_at(self._state(pipeline, shapes).model, cells) for shapes in ranks], axis=0)
        kept: np.ndarray = legal.copy()
        kept[found] = allowed(most)
        return kept

    def keep(self, layouts: Iterable[tuple[Pipeline, np.ndarray]]) -> None:
        """Of which layouts of each pipeline peaks will be asked for: nothing else is recorded."""
        needed = np.zeros(self.grid.shape, bool)
        for pipeline, kept in layouts:
            needed[self.cells(pipeline, np.nonzero(kept))] = True
        self.grid.needed = needed
        if self._costs is not None:
            self._costs.take_up(self.grid)
        self.asked = _around(needed)
        self._holds = Pieces(self.asked, self._held_by)

    def keep_costs(self) -> None:
        """For later searches, what was worked out of blocks."""
        if self._costs is not None:
            self._costs.keep(self.grid.bare_grid())
            self._costs.keep(self.grid)

    def peaks(self, pipeline: Pipeline, kept: np.ndarray, allowed: Callable[[np.ndarray], np.ndarray]) -> Peaks:
        """Of those layouts of a pipeline that were kept, and fit. ``allowed``: which peaks the card holds."""
        parallel, ranks = self._ranks(pipeline, kept)
        states = {shapes: self._state(pipeline, shapes) for shapes in ranks} if self._whole is None else {}
        found = np.nonzero(kept)
        peaks = np.zeros(len(found[0]), np.int64)
        microbatches = self._microbatches(pipeline, found)
        for shapes, of_shape in ranks.items():
            if not len(peaks):
                break
            cells = self.cells(pipeline, found)
            if self._whole is None and self.sheet.base.implementation.overlap_moe_expert_parallel_comm:
                here = self._overlapped_peak(pipeline, shapes, of_shape, states[shapes], cells)
            elif self._whole is None:
                here = self._peak(pipeline, parallel, shapes, of_shape, states[shapes], cells, microbatches)
            else:
                here = self._whole_peak(self._whole, pipeline, shapes, of_shape, cells)
            np.maximum(peaks, here, out=peaks)
            # What one stage is too large for is looked at no further.
            fit = allowed(peaks)
            if not fit.all():
                found, peaks, microbatches = tuple(at[fit] for at in found), peaks[fit], microbatches[fit]
        of_parts = [holds for _, holds in self._holds.made()]
        for holds in (*of_parts, *(holds for pieces in (self._whole or {}).values() for holds in pieces.made())):
            holds.evict(self.few_chunks)
        return Peaks(found[0], found[1], found[2], peaks)

    def cells(self, pipeline: Pipeline, found: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Places of a pipeline's layouts in the grid."""
        choices = np.array([self.sheet.number[r] for r in pipeline.recomputes])
        return self.places[pipeline.at][found[0]], found[1], choices[found[2]]

    def _microbatches(self, pipeline: Pipeline, found: Sequence[np.ndarray]) -> np.ndarray:
        runs = self.sheet.runs(pipeline, whole((len(pipeline.at), len(self.sheet.batches), 1)))
        number = runs.num_microbatches
        shape = len(pipeline.at), len(self.sheet.batches), 1
        numbers: np.ndarray = np.broadcast_to(np.asarray(number), shape)[found[0], found[1], 0]
        return numbers

    def _peak(
        self, pipeline: Pipeline, parallel: ParallelSpec, shapes: StageShape, ranks: Sequence[int], state: _State,
        cells: tuple[np.ndarray, ...], microbatches: np.ndarray,
    ) -> np.ndarray:  # fmt: skip
        """The highest peak of the stages of one shape."""
        out = np.zeros(len(cells[0]), np.int64)
        used = np.zeros(self.grid.shape, bool)
        used[cells] = True
        pp, v = pipeline.pp, len(shapes)
        group = parallel.microbatch_group_size_per_vp_stage or pp
        todo: dict[tuple[tuple[int, ...], bool], list[tuple[Subgrid, _Stage]]] = {}
        for part, stage in self._holds.each(lambda of: self._stage(of[1], shapes), used):
            todo.setdefault((stage.which, stage.carries), []).append((part, stage))
        for (which, carries), pieces in todo.items():
            columns = columns_of(carries) * (max(which) + 1) + 1
            table = np.zeros((columns + 3, *self.grid.shape))
            here = np.zeros(self.grid.shape, bool)
            for part, stage in pieces:
                inside = part.index
                here[inside] = True
                for at, values in enumerate((*stage.costs, stage.hidden, stage.static, stage.between, stage.batch)):
                    table[at][inside] = values
            mine = here[cells]
            at = np.ravel_multi_index(tuple(each[mine] for each in cells), self.grid.shape)
            values = table.reshape(len(table), -1)[:, at]
            moments = np.empty(len(at))
            number = microbatches[mine]
            keeps = not self.sheet.base.implementation.deallocate_pipeline_outputs
            for m in distinct(number).tolist():
                few = number == m
                alike = few_microbatches(pp, m, v, group)
                rows = peak_rows(pp, tuple(ranks), alike, group, which, keeps, carries)
                moments[few] = (rows @ values[:columns, few]).max(axis=0)
            static, between, batch = values[columns:].astype(np.int64)
            some = tuple(each[mine] for each in cells)
            out[mine] = static + _at(state.static, some) + np.maximum(
                moments.astype(np.int64) + batch + _at(state.gathered, some),
                between + _at(state.between, some) + _at(state.in_step, some),
            )
        return out

    def _overlapped_peak(
        self, pipeline: Pipeline, shapes: StageShape, ranks: Sequence[int], state: _State,
        cells: tuple[np.ndarray, ...],
    ) -> np.ndarray:  # fmt: skip
        """As ``_peak``, where the forward pass of one chunk runs beside the backward pass of another."""
        used = np.zeros(self.grid.shape, bool)
        used[cells] = True
        moments, static, between, batch = (np.zeros(self.grid.shape, np.int64) for _ in range(4))

        def of_part(given: tuple[Subgrid, StageContents]) -> tuple[Any, ...]:
            part, holds = given
            held = holds.held(shapes)
            moment = self._moment(held, self.runs(pipeline, part), holds.ctx.hidden_bytes, ranks)
            return moment, held.static_bytes, held.between_bytes, held.batch

        with np.errstate(divide="ignore"):  # of sizes that this pipeline does not go with
            for part, values in self._holds.each(of_part, used):
                for into, value in zip((moments, static, between, batch), values, strict=True):
                    into[part.index] = value
        found: np.ndarray = static[cells] + _at(state.static, cells) + np.maximum(
            moments[cells] + batch[cells] + _at(state.gathered, cells),
            between[cells] + _at(state.between, cells) + _at(state.in_step, cells),
        )
        return found

    def _whole_peak(
        self, known: dict[Any, Pieces], pipeline: Pipeline, shapes: StageShape, ranks: Sequence[int],
        cells: tuple[np.ndarray, ...],
    ) -> np.ndarray:  # fmt: skip
        """As ``_peak``, where all that a stage holds depends on its pipeline."""
        # With the sequences of a step given, nothing but the number of virtual stages says how many microbatches run.
        key = (pipeline.pp, len(shapes)) if self.sheet.total is not None else (pipeline.pp, pipeline.number)
        pieces = known.get(key)
        if pieces is None:
            def made(part: Subgrid) -> StageContents:
                return self._contents(pipeline, part, bare=False)

            pieces = known[key] = Pieces(self._with_pipeline(pipeline.pp), made)

        def peak(holds: StageContents) -> Any:
            held = holds.held(shapes)
            moment = self._moment(held, holds.run, holds.ctx.hidden_bytes, ranks)
            return held.static_bytes + held.beyond_static(moment)

        used = np.zeros(self.grid.shape, bool)
        used[cells] = True
        out = np.zeros(self.grid.shape, np.int64)
        for part, values in pieces.each(peak, used):
            out[part.index] = values
        found: np.ndarray = out[cells]
        return found

    def _moment(self, held: Held, runs: Any, hidden: Any, ranks: Sequence[int]) -> Any:
        """The most bytes that the chunks of any of ``ranks`` need at once."""
        distinct = list(dict.fromkeys(map(id, held.inventories)))
        which = tuple([distinct.index(id(inventory)) for inventory in held.inventories])
        p, impl = runs.parallel, self.sheet.base.implementation
        return batched(peak_of_many(
            p.pp, ranks, runs.num_microbatches, p.microbatch_group_size_per_vp_stage or p.pp, which,
            [held.costs[which.index(i)] for i in range(len(distinct))], hidden,
            overlap_moe_expert_parallel_comm=impl.overlap_moe_expert_parallel_comm,
            keeps_outputs=not impl.deallocate_pipeline_outputs,
        ))  # fmt: skip


class Peaks(NamedTuple):
    """Layouts of one pipeline that fit, one entry each."""

    sizes: np.ndarray
    batch: np.ndarray
    recompute: np.ndarray
    #: Of the fullest stage, bytes.
    peaks: np.ndarray


def _spread(values: np.ndarray, positions: Sequence[np.ndarray]) -> np.ndarray:
    """An array over a grid at some positions along each axis."""
    for axis, at in enumerate(positions):
        if values.shape[axis] > 1:
            values = values.take(at, axis)
    return values


def _at(values: np.ndarray, cells: tuple[np.ndarray, ...]) -> np.ndarray:
    """The entries of an array over a grid at some of its cells."""
    index = tuple(at if values.shape[axis] > 1 else np.zeros_like(at) for axis, at in enumerate(cells))
    found: np.ndarray = values[index]
    return found


# ---- time ----


class Times:
    """Step times of the layouts of a sheet, as ``step_time`` gives them."""

    def __init__(self, memory: Memory, hardware: Hardware, constants: Constants) -> None:
        self._memory, self._hardware, self._constants = memory, hardware, constants
        self._passes = Pieces(memory.asked, self._passes_of)

    def _passes_of(self, part: Subgrid) -> tuple[Subgrid, Passes]:
        runs: Any = self._memory.runs(None, part)
        return part, Passes(runs, self._memory.grid.context(part), self._hardware, self._constants)

    def seconds(self, pipeline: Pipeline, cells: tuple[np.ndarray, ...]) -> np.ndarray:
        """Of a pipeline's layouts at ``cells`` of the grid."""
        memory, grid = self._memory, self._memory.grid
        used = np.zeros(grid.shape, bool)
        used[cells] = True

        def seconds(of: tuple[Subgrid, Passes]) -> Any:
            part, passes = of
            runs: Any = memory.runs(pipeline, part)
            return Step(runs, self._hardware, self._constants, passes=passes, asked=used[part.index]).time().seconds

        out = np.zeros(grid.shape)
        with np.errstate(divide="ignore", invalid="ignore"):  # of sizes that this pipeline does not go with
            for part, values in self._passes.each(seconds, used):
                out[part.index] = values
        for _, passes in self._passes.made():
            passes.evict(memory.few_chunks)
        found: np.ndarray = out[cells]
        return found


# ---- all of it ----


class Sweep:
    """The layouts of a space, with what all its pipelines share worked out."""

    def __init__(
        self, sheet: Sheet, hardware: Hardware, constants: Constants, limit: Limit, refused: Refused,
        costs: KeptCosts | None = None,
    ) -> None:
        """``costs``: what earlier searches kept."""
        self.sheet, self._limit = sheet, limit
        #: The highest peaks that fit for sure, and that may fit, by the sizes with the micro batch where buffers of
        #: libraries follow it, the number of pipeline stages and whether there are virtual ones.
        self._highest: dict[tuple[int, int, bool], tuple[int, ...]] = {}
        self._legal = [sheet.legal(pipeline, refused) for pipeline in sheet.pipelines]
        #: Numbers of the pipelines that any layout has.
        self.todo = [number for number, which in enumerate(self._legal) if which.any()]
        if not self.todo:
            return
        of_pp: dict[int, np.ndarray] = {}
        for pipeline, which in zip(sheet.pipelines, self._legal, strict=True):
            any_of = of_pp.setdefault(pipeline.pp, np.zeros(len(sheet.sizes), bool))
            any_of[pipeline.at[which.any(axis=(1, 2))]] = True
        self._memory = memory = Memory(sheet, of_pp, costs)
        self._kept = {
            n: memory.fit_without_activations(sheet.pipelines[n], self._legal[n], self._allowed) for n in self.todo
        }
        if not any(which.any() for which in self._kept.values()):
            return
        memory.keep((sheet.pipelines[n], which) for n, which in self._kept.items())
        self._times = Times(memory, hardware, constants)

    def _allowed(self, values: np.ndarray) -> np.ndarray:
        return _held(values, self._limit.alone)

    def _beside_others(self, pipeline: Pipeline, found: Peaks) -> tuple[Peaks, int]:
        """(those of ``found`` that fit beside what lies outside of torch, how many more are tight)."""
        if not len(found.peaks):
            return found, 0
        sheet = self.sheet
        batch = found.batch if may_have_driver_buffers(sheet.base) else np.zeros_like(found.batch)
        few, which = numbered(pipeline.at[found.sizes] * len(sheet.batches) + batch)
        one = Subgrid((found.sizes[:1], found.batch[:1], found.recompute[:1]))
        virtual = communicators.sizes_of(sheet.runs(pipeline, one).parallel).virtual
        highest = []
        for place in few.tolist():
            key = (place, pipeline.pp, virtual)
            limits = self._highest.get(key)
            if limits is None:
                outside = self._limit.outside(sheet.unchecked(pipeline, *divmod(place, len(sheet.batches))))
                limits = self._highest[key] = tuple(
                    highest_held(self._limit.alone._replace(outside=nbytes)) for nbytes in (outside.most, outside.least)
                )
            highest.append(limits)
        sure, lucky = np.array(highest, np.int64)[which].T
        kept = found.peaks <= sure
        tight = int(((found.peaks <= lucky) & ~kept).sum())
        return Peaks(*(each[kept] for each in found)), tight

    def keep_costs(self) -> None:
        """For later searches."""
        self._memory.keep_costs()

    def fitting(self, number: int) -> Fitting:
        """The layouts of one pipeline that fit."""
        pipeline, kept, memory = self.sheet.pipelines[number], self._kept[number], self._memory
        looked_at = int(self._legal[number].sum())
        too_large = looked_at - int(kept.sum())
        shape = self._legal[number].shape
        if too_large == looked_at:
            none = np.zeros(0, np.int64)
            return Fitting(pipeline, shape, none.astype(np.int32), none, np.zeros(0), looked_at, too_large, 0)
        found, tight = self._beside_others(pipeline, memory.peaks(pipeline, kept, self._allowed))
        places = found.sizes, found.batch, found.recompute
        seconds = self._times.seconds(pipeline, memory.cells(pipeline, places)) if len(found.peaks) else np.zeros(0)
        at = np.ravel_multi_index(places, shape).astype(np.int32)
        return Fitting(pipeline, shape, at, found.peaks, seconds, looked_at, too_large, tight)


@dataclass(frozen=True, eq=False)
class _Elsewhere:
    """One pipeline of a sweep in a process that shares nothing with this one: there the sweep is made once. Dask hashes
    what it is sent, so that it is equal to itself alone."""

    sweep: str
    space: Space
    hardware: Hardware
    constants: Constants
    limit: Limit

    def __call__(self, number: int) -> Fitting:
        global _swept
        with _sweeping:
            known = _swept
            if known is None or known[0] != self.sweep:
                sweep = Sweep(Sheet(self.space), self.hardware, self.constants, self.limit, Refused())
                known = _swept = self.sweep, sweep
            return known[1].fitting(number)


#: The last sweep that was made for another process, by its name there; one thread works at it.
_swept: tuple[str, Sweep] | None = None
_sweeping = Lock()


def _sweep_anew() -> None:
    """In a fork, whose parent's thread may be in the middle of a sweep."""
    global _sweeping, _swept
    _sweeping, _swept = Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_sweep_anew)


def fitting(
    sheet: Sheet, hardware: Hardware, constants: Constants, limit: Limit, refused: Refused,
    jobs: int = 1, backend: str | None = None, costs: KeptCosts | None = None,
) -> Iterator[Fitting]:  # fmt: skip
    """The layouts that fit, pipeline by pipeline, with their peaks and step times; others are counted."""
    sweep = Sweep(sheet, hardware, constants, limit, refused, costs)
    if not sweep.todo:
        return
    # What blocks cost is worked out with the first, before processes part.
    yield sweep.fitting(sweep.todo[0])
    work: Callable[[int], Fitting] = sweep.fitting
    if backend is not None:
        work = _Elsewhere(os.urandom(16).hex(), sheet.space, hardware, constants, limit)
    yield from spread(jobs, work, sweep.todo[1:], backend)
    sweep.keep_costs()


def highest_held(limit: MemoryLimit) -> int:
    """The highest peak that a limit holds; -1 where it holds none."""
    peak = max(-1, int((limit.capacity - limit.outside) / (1 + limit.fragmentation)) + 2)
    while peak >= 0 and not limit.holds(peak):
        peak -= 1
    return peak


def _held(peaks: np.ndarray, limit: MemoryLimit) -> np.ndarray:
    """Which of ``peaks`` fit."""
    held: np.ndarray = peaks <= highest_held(limit)
    return held


#: Layouts that are sorted at a time by more than their step time.
_SORTED = 1 << 18


class Sorted:
    """Layouts by step time, of equal ones by peak, of equal ones as the space lists them."""

    def __init__(self, found: Sequence[tuple[Sheet, Fitting]]) -> None:
        self._found = found
        #: Of each of ``found`` the number of its first layout, where they are counted one after the other.
        self._starts = np.cumsum([0, *[len(few.at) for _, few in found]])
        seconds = np.concatenate([few.seconds for _, few in found]) if found else np.zeros(0)
        order = np.argsort(seconds, kind="stable").astype(np.int32 if len(seconds) < 1 << 31 else np.int64)
        seconds = seconds[order]
        known: dict[int, int] = {}
        start = 0
        while start < len(order):
            end = int(np.searchsorted(seconds, seconds[min(start + _SORTED, len(order)) - 1], "right"))
            some = order[start:end]
            peaks, sheets, listed = (np.zeros(len(some), np.int64) for _ in range(3))
            for (sheet, few), here, at in self._by_group(some):
                peaks[here], sheets[here] = few.peaks[at], known.setdefault(id(sheet), len(known))
                listed[here] = few.order(sheet, at)
            order[start:end] = some[np.lexsort((listed, sheets, peaks, seconds[start:end]))]
            start = end
        self._order = order

    def __len__(self) -> int:
        return len(self._order)

    def _by_group(self, numbers: np.ndarray) -> Iterator[tuple[tuple[Sheet, Fitting], np.ndarray, np.ndarray]]:
        """(one of ``found``, places of its layouts in ``numbers``, and in it)."""
        group = np.searchsorted(self._starts, numbers, "right") - 1
        by_group = np.argsort(group, kind="stable")
        ends = np.searchsorted(group[by_group], np.arange(len(self._found) + 1))
        for number, one in enumerate(self._found):
            here = by_group[ends[number] : ends[number + 1]]
            yield one, here, numbers[here] - self._starts[number]

    def place(self, number: int) -> tuple[Sheet, Fitting, int]:
        """Of layout ``number`` the sheet, its pipeline's layouts, and where in these it is."""
        at = int(self._order[number])
        group = int(np.searchsorted(self._starts, at, "right")) - 1
        return *self._found[group], at - int(self._starts[group])

    def peaks(self) -> Iterator[int]:
        """Of every layout."""
        start = 0
        while start < len(self):
            # Most callers look at the first few.
            some = self._order[start : min(2 * start + 1024, start + _SORTED)]
            start += len(some)
            peaks = np.zeros(len(some), np.int64)
            for (_, few), here, at in self._by_group(some):
                peaks[here] = few.peaks[at]
            yield from peaks.tolist()
