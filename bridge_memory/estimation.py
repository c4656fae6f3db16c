"""RunSpec -> Estimate: every stage's bytes, by component, with provenance.

``peaks(run)`` gives totals of every stage, ``explain(run, stage)`` the components of one stage, and ``estimate(run)``
both for all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bridge_memory.caveats.ignored import ignored
from bridge_memory.caveats.unmodelled import Needs, unmodelled_features
from bridge_memory.components import Component, Lifetime, Part, Provenance, Role
from bridge_memory.engines.by_name import engine_of
from bridge_memory.engines.engine import Engine, HasFirstStep, Phase, StageState
from bridge_memory.inventory.counts import model_parameters
from bridge_memory.inventory.deferred import deferred_bytes
from bridge_memory.inventory.layer_links import ignores_full_recompute, offloaded_layers
from bridge_memory.inventory.stack import (
    Unit,
    chunk_before_its_backward,
    chunk_inventory,
    chunk_units,
    stage_inventories,
)
from bridge_memory.result import OPTIMIZER_STEP, Estimate, StageEstimate, StagePeak
from bridge_memory.schedule.events import ChunkCost, PeakMoment
from bridge_memory.schedule.peak import dynamic_peak, peak_bytes
from bridge_memory.spec import RunSpec, SpecError, show
from bridge_memory.spec.encoders import default_words
from bridge_memory.spec.layout import ChunkShape, StageShape, layout
from bridge_memory.spec.ranks import stage_of_rank
from bridge_memory.spec.unmodelled import Bounds, NoEffect
from bridge_memory.tapes.chain import AtPeak, ChunkInventory, EngineBytes, Label, Links
from bridge_memory.tapes.context import TRACE_CACHE, BlockContext, context_of
from bridge_memory.tapes.symbolic import largest
from bridge_memory.workspaces.batch import batch_bytes, input_buffers
from bridge_memory.workspaces.chunk_costs import chunk_costs, overlap_cost
from bridge_memory.workspaces.dispatcher import held_by_nodes
from bridge_memory.workspaces.graphs import GraphMemory, Passes, graph_memory
from bridge_memory.workspaces.persistent import ChunkFacts, chunk_facts, persistent_buffers
from bridge_memory.workspaces.teacher import teacher_buffers

__all__ = [
    "Estimate",
    "StageEstimate",
    "StageParts",
    "StagePeak",
    "clear_caches",
    "estimate",
    "explain",
    "model_state",
    "peaks",
    "peaks_with",
    "stage_graphs",
    "stage_parts",
    "stage_peaks",
    "stage_phases",
]  # fmt: skip


def peaks(run: RunSpec) -> tuple[StagePeak, ...]:
    """Return static memory and peak of every pipeline stage: ``estimate`` without its explanations.

    A layout that was never asked for costs some 100 microseconds once its blocks are known.

    Args:
        run: The run.

    Returns:
        One ``StagePeak`` a pipeline stage, in bytes.

    Raises:
        SpecError: The layers do not go onto the stages.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec, peaks
        >>> run = RunSpec(
        ...     model="meta-llama/Llama-3.1-70B",
        ...     parallel=ParallelSpec(world_size=64, tensor_model_parallel_size=8, pipeline_model_parallel_size=2),
        ... )
        >>> [stage.stage for stage in peaks(run)]
        [0, 1]
        >>> recomputed = run.with_fields(
        ...     recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
        ... )
        >>> max(stage.peak_bytes for stage in peaks(recomputed)) < max(stage.peak_bytes for stage in peaks(run))
        True
    """
    stages = _Stages(run)
    return tuple([stages.peak(rank, held) for rank, held in enumerate(stages)])


def peaks_with(run: RunSpec, engine: Engine) -> tuple[StagePeak, ...]:
    """As ``peaks``, with ``engine`` in place of the one that ``run`` names."""
    stages = _Stages(run, engine=engine)
    return tuple([stages.peak(rank, held) for rank, held in enumerate(stages)])


def estimate(run: RunSpec) -> Estimate:
    """Estimate the GPU memory of every pipeline stage of a run, component by component.

    Every parameter is counted with its shape, sharding and dtype. So is every tensor that the implementation saves for
    backward, and every temporary that can make the peak.

    Args:
        run: The run.

    Returns:
        The stages with their components, and what was assumed and what is not modelled. Bytes on one GPU.

    Raises:
        SpecError: The layers do not go onto the stages.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec, estimate
        >>> run = RunSpec(
        ...     model="Qwen/Qwen3-8B",
        ...     parallel=ParallelSpec(world_size=8, tensor_model_parallel_size=2),
        ... )
        >>> result = estimate(run)
        >>> result.parameters
        8190735360
        >>> stage = result.peak_stage
        >>> stage.peak_bytes == sum(component.bytes for component in stage.components)
        True
    """
    stages = _Stages(run)
    ctx, plan = stages.ctx, stages.plan
    parameters, mtp = model_parameters(run.model)
    explained = tuple(_explained(stages, rank) for rank in range(len(plan.stages)))
    needs = Needs(
        max(stage.activation_bytes + stage.transient_bytes for stage in explained),
        max(
            (link.backward_peak for held in stages for chunk in held.inventories for link, _ in chunk.links
             if link.label not in (Label.EMBEDDING, Label.LOSS)),
            default=None,
        ),
        _captured(stages),
    )
    return Estimate(
        run=run,
        stages=explained,
        parameters=parameters,
        mtp_parameters=mtp,
        assumptions=run.model.assumptions + run.assumptions + _assumptions(run, ctx) + ignored(run, plan),
        not_modelled=run.model.not_modelled + run.not_modelled + unmodelled_features(run, needs),
    )


def explain(run: RunSpec, stage: int, *, rank: int | None = None) -> StageEstimate:
    """Return the components of one pipeline stage: ``estimate(run).stages[stage]`` without the other stages.

    Args:
        run: The run.
        stage: The pipeline stage, from 0.
        rank: A global rank of that stage. Ranks of a stage differ where the optimizer deals out whole parameters
            (``use_layer_wise_distributed_optimizer``). None: the one with most optimizer state.

    Returns:
        The stage, in bytes on one GPU.

    Raises:
        SpecError: There is no such stage, or the rank is of another.

    Example:
        >>> from bridge_memory import RunSpec, explain
        >>> stage = explain(RunSpec(model="meta-llama/Llama-3.2-1B"), 0)
        >>> {part.name: part.bytes for part in stage.components}["weights"]  # 1,235,814,400 parameters of 2 bytes
        2471628800
    """
    stages = _LATEST.of(run) if rank is None else _Stages(run, rank)
    _checked(stages, stage)
    of_rank = stage if rank is None else stage_of_rank(run.parallel, rank)
    if of_rank != stage:
        raise SpecError(f"rank ({rank}) is not one of stage {stage} but of stage {of_rank}; give that stage")
    return _explained(stages, stage)


def model_state(run: RunSpec) -> tuple[int, ...]:
    """Bytes of weights, gradients and optimizer state on every stage: a lower bound of its peak. Raises SpecError."""
    model, ctx, engine = run.model, context_of(run), engine_of(run)
    stages = layout(model, run.parallel).shapes(model)
    known = {
        shapes: sum([n for _, n in engine.stage([chunk_units(model, shape, ctx) for shape in shapes]).amounts])
        for shapes in dict.fromkeys(stages)
    }
    return tuple([known[shapes] for shapes in stages])


def stage_peaks(run: RunSpec) -> Callable[[int, StageShape], StagePeak]:
    """A function (pipeline rank, chunks of the stage) -> StagePeak: what a stage of ``run`` would take with other
    layers.

    Raises SpecError if the run itself has no valid layout.
    """
    stages = _Stages(run)

    def peak(rank: int, shapes: StageShape) -> StagePeak:
        return stages.peak(rank, stages.held(shapes))

    return peak


class StageParts(NamedTuple):
    """The parts of a stage in bytes, for a timeline of a training step."""

    #: For each virtual stage: its decoder layers, its links, and its costs for the schedule.
    layers: tuple[tuple[int, ...], ...]
    inventories: tuple[ChunkInventory, ...]
    costs: tuple[ChunkCost, ...]
    #: Alive from the first to the last operation of a step.
    persistent: tuple[Component, ...]
    #: Alive from the optimizer's step to the first forward pass.
    between_steps: tuple[Component, ...]
    #: Alive during forward and backward passes: the batch, and parameters gathered for all passes.
    batch: int
    gathered: int
    #: Unsharded gradients of earlier microbatches, during every pass.
    accumulated: int
    #: Kept for deferred weight gradients of the output layer, during the last microbatch.
    deferred: int
    #: Allocated only for the optimizer's step.
    in_step: int
    #: One hidden state that is sent between stages.
    hidden_state: int
    #: The peak of forward and backward passes.
    moment: PeakMoment
    #: Of ``persistent``: gradients that every step's passes make anew.
    freed_between_steps: int

    def alive_at_peak(self) -> Iterator[tuple[int, Links, int]]:
        """(virtual stage, links whose retained tensors are all alive, number of microbatches) at ``moment``."""
        one = _running(self.moment, self.inventories)
        for number, (chunk, alive) in enumerate(zip(self.inventories, self.moment.alive, strict=True)):
            runs = one is not None and number == self.moment.chunk
            if alive > runs:
                yield number, chunk.links, alive - runs
            if one is not None and runs:
                yield number, one.links, 1


def _running(moment: PeakMoment, inventories: Sequence[ChunkInventory]) -> AtPeak | None:
    """What is alive of the microbatch that runs at the peak; None in phase "overlapped", where each of the two chunks
    is counted as a whole."""
    if moment.phase == "overlapped":
        return None
    return inventories[moment.chunk].at_peak(backward=moment.phase == "backward")


def stage_parts(run: RunSpec, stage: int) -> StageParts:
    """The parts of one pipeline stage, whose peak ``peaks`` reports. Raises SpecError."""
    stages = _LATEST.of(run)
    held = stages[_checked(stages, stage)]
    return StageParts(
        tuple(chunk.layers for chunk in stages.plan.stages[stage]), held.inventories, held.costs,
        (*held.state.components(run.parallel), *held.persistent), held.between_steps, held.batch, held.state.gathered,
        held.state.accumulated, held.deferred, held.state.in_step, stages.ctx.hidden_bytes, stages.moment(stage, held),
        held.state.freed_between_steps,
    )


def stage_graphs(run: RunSpec, stage: int, *, left: int | None = None) -> GraphMemory | None:
    """What CUDA graphs add to the reserved memory of one pipeline stage; None: the run has none. ``left``: as for
    ``graph_memory``. Raises SpecError."""
    stages = _LATEST.of(run)
    _checked(stages, stage)
    return _graphs(stages, stage, left)


def _graphs(stages: _Stages, rank: int, left: int | None = None) -> GraphMemory | None:
    held = stages[rank]
    if stages.run.implementation.cuda_graph_impl == "none":
        return None
    activations = stages.moment(rank, held).bytes
    return graph_memory(
        Passes(
            stages.run, rank, held.inventories, held.costs, held.static_bytes, held.between_bytes + held.state.in_step,
            stages.peak(rank, held).peak_bytes, held.in_passes(0), activations,
        ),
        left,
    )


def _captured(stages: _Stages) -> Bounds | None:
    """Bounds, on every rank, of what CUDA graphs add; None: the run has none."""
    found = [graphs.total for rank, _ in enumerate(stages) if (graphs := _graphs(stages, rank)) is not None]
    return Bounds(min(g.least for g in found), max(g.most for g in found)) if found else None


def stage_phases(run: RunSpec, stage: int) -> dict[Phase, int]:
    """Peak bytes of one pipeline stage in each phase of training that is modelled. Raises SpecError."""
    stages = _LATEST.of(run)
    return _phases(stages, _checked(stages, stage))


def _phases(stages: _Stages, rank: int) -> dict[Phase, int]:
    """Peaks by phase, in the order of training. The first step's passes are without optimizer states, which its end
    allocates. In overlapped schedules forward and backward have the same peak."""
    held = stages[rank]
    state = held.state
    forward, backward = _passes(stages, rank)
    found: dict[Phase, int] = {}
    if state.building is not None:
        found[Phase.BUILDING] = state.building
    first = stages.of_first_step()
    later = sum([nbytes for line, nbytes in first[rank].state.amounts if line.lifetime is Lifetime.FIRST_STEP])
    first_forward, first_backward = (forward, backward) if first is stages else _passes(first, rank)
    found |= {Phase.FIRST_FORWARD: first_forward - later, Phase.FIRST_BACKWARD: first_backward - later}
    found |= {Phase.FORWARD: forward, Phase.BACKWARD: backward}
    found[Phase.STEP] = held.static_bytes + held.between_bytes + state.in_step
    if state.saving is not None:
        found[Phase.SAVING] = held.static_bytes - state.freed_between_steps + held.between_bytes + state.saving
    return found


def _passes(stages: _Stages, rank: int) -> tuple[int, int]:
    """(peak bytes of a stage in forward passes, in backward passes)."""
    held = stages[rank]
    forward, backward = (held.in_passes(stages.moment(rank, held, phase).bytes) for phase in ("forward", "backward"))
    return held.static_bytes + forward, held.static_bytes + backward


def _checked(stages: _Stages, stage: int) -> int:
    number = len(stages.plan.stages)
    if type(stage) is not int or not 0 <= stage < number:
        raise SpecError(f"stage ({show(stage)}) is not a stage of the pipeline; give a number from 0 to {number - 1}")
    return stage


def clear_caches() -> None:
    """Free what the estimates of this process share: traces of blocks and their costs.

    Results stay as they are. Only long-running servers need this.

    Example:
        >>> from bridge_memory import RunSpec, clear_caches, peaks
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B")
        >>> before = peaks(run)
        >>> clear_caches()
        >>> peaks(run) == before
        True
    """
    TRACE_CACHE.clear()
    _LATEST.clear()


class Held(NamedTuple):
    """What a stage holds, which does not depend on its position in the pipeline; stages of equal shape share it."""

    state: StageState
    #: Buffers that persist until the end of training; model state is not among them.
    persistent: tuple[Component, ...]
    #: Alive from the end of a step to some point in the next.
    between_steps: tuple[Component, ...]
    batch: int
    inventories: tuple[ChunkInventory, ...]
    costs: tuple[ChunkCost, ...]
    static_bytes: int
    between_bytes: int
    #: Of ``static_bytes``: gradients that every backward pass allocates.
    fresh: int = 0
    #: Kept for deferred weight gradients of the output layer, of earlier microbatches.
    deferred: int = 0

    def in_passes(self, moment: int) -> int:
        """Bytes beyond ``static_bytes`` when the chunks need ``moment`` bytes."""
        return moment - self.fresh + self.batch + self.deferred + self.state.in_passes

    def beyond_static(self, moment: int) -> int:
        """The most bytes beyond ``static_bytes``: in the optimizer's step, or in passes whose chunks need ``moment``.
        """
        most: int = largest(self.in_passes(moment), self.between_bytes + self.state.in_step)
        return most


class _Chunk:
    """What chunks of one shape hold. ``inventory``: of a chunk after whose forward others run; made on first use."""

    __slots__ = ("facts", "inventory")

    def __init__(self, facts: ChunkFacts) -> None:
        self.facts = facts
        self.inventory: ChunkInventory | None = None


class StageContents:
    """What stages hold, by their shapes; of one run, or of many at once (then ``run`` and ``ctx`` have arrays)."""

    def __init__(self, run: RunSpec, ctx: BlockContext, engine: Engine) -> None:
        self.run = run
        self.ctx = ctx
        self.engine = engine
        self._chunks: dict[ChunkShape, _Chunk] = {}
        self._units: dict[ChunkShape, list[Unit]] = {}
        self._of_shapes: dict[StageShape, Held] = {}

    def evict(self, few: int) -> None:
        """Drops cached stages, and chunks if there are more than ``few``."""
        if len(self._chunks) > few:
            self._chunks.clear()
        self._units.clear()
        self._of_shapes.clear()

    def held(self, shapes: StageShape) -> Held:
        """What a stage of these shapes holds."""
        held = self._of_shapes.get(shapes)
        if held is None:
            held = self._of_shapes[shapes] = self._held(shapes)
        return held

    def state(self, shapes: StageShape) -> StageState:
        """The engine's state on such a stage."""
        return self.engine.stage([self._units_of(shape) for shape in shapes])

    def _units_of(self, shape: ChunkShape) -> list[Unit]:
        found = self._units.get(shape)
        if found is None:
            found = self._units[shape] = chunk_units(self.run.model, shape, self.ctx)
        return found

    def _held(self, shapes: StageShape) -> Held:
        run, ctx = self.run, self.ctx
        chunks = [self._chunk(shape) for shape in shapes]
        state = self.state(shapes)
        inventories = self._inventories(chunks, shapes, state.concurrent)
        carried_over = sum([inventory.carried_over for inventory in inventories])
        persistent, between = by_lifetime(
            (
                *persistent_buffers(run, [chunk.facts for chunk in chunks], ctx, carried_over),
                *teacher_buffers(run, shapes),
                *input_buffers(run, shapes),
                *state.buffers(),
            )
        )
        static_bytes = sum([nbytes for _, nbytes in state.amounts]) + sum([b.bytes for b in persistent])
        return Held(
            state, tuple(persistent), tuple(between), batch_bytes(run, shapes), inventories,
            tuple(self._costs(inventories, chunks)), static_bytes, sum([b.bytes for b in between]), state.fresh,
            self._deferred(shapes),
        )

    def _deferred(self, shapes: StageShape) -> int:
        if not (self.ctx.impl.defer_embedding_wgrad_compute and any(shape.output for shape in shapes)):
            return 0
        nbytes: int = deferred_bytes(self.run.model, self.run.num_microbatches, self.ctx)
        return nbytes

    def _costs(self, inventories: Sequence[ChunkInventory], chunks: Sequence[_Chunk]) -> list[ChunkCost]:
        costs = chunk_costs(inventories)
        if not self.run.implementation.overlap_moe_expert_parallel_comm:
            return costs
        overlap = [
            overlap_cost(inventory, held_by_nodes(chunk.facts.experts, self.ctx))
            for inventory, chunk in zip(inventories, chunks, strict=True)
        ]
        return [cost._replace(overlap=each) for cost, each in zip(costs, overlap, strict=True)]

    def _chunk(self, shape: ChunkShape) -> _Chunk:
        found = self._chunks.get(shape)
        if found is None:
            found = self._chunks[shape] = _Chunk(chunk_facts(self.run, shape, self.ctx))
        return found

    def _inventories(
        self, chunks: Sequence[_Chunk], shapes: StageShape, concurrent: Sequence[EngineBytes]
    ) -> tuple[ChunkInventory, ...]:
        """As ``stage_inventories``; inventories that do not depend on the stage are shared by chunks of equal shape."""
        model, ctx = self.run.model, self.ctx
        if concurrent:
            return tuple(stage_inventories(model, shapes, ctx, concurrent))
        found = [self._inventory(chunk, shape) for chunk, shape in zip(chunks, shapes, strict=True)]
        last = chunk_before_its_backward(shapes)
        if last >= 0 and found[last].offloads:
            found[last] = chunk_inventory(model, shapes[last], ctx, backward_next=True)
        return tuple(found)

    def _inventory(self, chunk: _Chunk, shape: ChunkShape) -> ChunkInventory:
        if chunk.inventory is None:
            chunk.inventory = chunk_inventory(self.run.model, shape, self.ctx)
        return chunk.inventory


class _Stages(StageContents):
    """Every stage of one run."""

    def __init__(self, run: RunSpec, rank: int | None = None, engine: Engine | None = None) -> None:
        """``engine``: replaces the one that ``run`` names."""
        if type(run) is not RunSpec:
            inside = f"model={show(run)}" if isinstance(run, str) else "model=..."
            raise SpecError(f"run ({show(run)}) is not a RunSpec; give RunSpec({inside}, parallel=ParallelSpec(...))")
        super().__init__(run, context_of(run), engine or engine_of(run, rank))
        self.plan = layout(run.model, run.parallel)
        self._explained: dict[int, tuple[list[Component], list[dict[tuple[Part, Provenance], int]]]] = {}
        self._microbatches = run.num_microbatches
        #: Arguments of ``dynamic_peak`` and ``peak_bytes`` that are the same for every stage.
        self._of_schedule: dict[str, Any] = {
            "group_size": run.parallel.microbatch_group_size_per_vp_stage, "hidden_bytes": self.ctx.hidden_bytes,
            "overlap_moe_expert_parallel_comm": run.implementation.overlap_moe_expert_parallel_comm,
            "keeps_outputs": not run.implementation.deallocate_pipeline_outputs,
        }  # fmt: skip
        self._stages = [self.held(shapes) for shapes in self.plan.shapes(run.model)]

    def of_first_step(self) -> _Stages:
        """The same stages in the first step, which differs with some engines."""
        return _Stages(self.run, engine=self.engine.first_step()) if isinstance(self.engine, HasFirstStep) else self

    def __iter__(self) -> Iterator[Held]:
        return iter(self._stages)

    def __getitem__(self, rank: int) -> Held:
        return self._stages[rank]

    def explained(self, held: Held) -> tuple[list[Component], list[dict[tuple[Part, Provenance], int]]]:
        """(static components of stages that hold ``held``, retained bytes of each of their chunks by part)."""
        found = self._explained.get(id(held))
        if found is None:
            found = self._explained[id(held)] = (
                [*held.state.components(self.run.parallel), *held.persistent],
                [inventory.parts() for inventory in held.inventories],
            )  # fmt: skip
        return found

    def moment(self, rank: int, held: Held, phase: str | None = None) -> PeakMoment:
        """The peak of a stage's passes; ``phase``: only of forward or of backward passes."""
        return dynamic_peak(
            self.run.parallel.pp, rank, self._microbatches, held.costs, phase=phase, **self._of_schedule
        )

    def peak(self, rank: int, held: Held) -> StagePeak:
        """Static memory and peak of the stage of pipeline rank ``rank`` if it holds ``held``."""
        moment = peak_bytes(self.run.parallel.pp, rank, self._microbatches, held.costs, **self._of_schedule)
        static = held.static_bytes
        return StagePeak(rank, static + held.between_bytes, static + held.beyond_static(moment))


class _Latest:
    """The stages of the last run whose parts were asked for: whoever asks goes from stage to stage."""

    def __init__(self) -> None:
        self._found: tuple[RunSpec, _Stages] | None = None

    def of(self, run: RunSpec) -> _Stages:
        """Those of ``run``, the very object."""
        found = self._found
        if found is None or found[0] is not run:
            found = self._found = run, _Stages(run)
        return found[1]

    def clear(self) -> None:
        self._found = None


_LATEST = _Latest()


def by_lifetime(buffers: Iterable[Component]) -> tuple[list[Component], list[Component]]:
    """(buffers that persist until the end of training, buffers that are alive only between steps)."""
    persistent: list[Component] = []
    between: list[Component] = []
    for b in buffers:
        (between if b.lifetime is Lifetime.BETWEEN_STEPS else persistent).append(b)
    return persistent, between


def _explained(stages: _Stages, rank: int) -> StageEstimate:
    held = stages[rank]
    moment = stages.moment(rank, held)
    static, parts = stages.explained(held)
    components, carried_over = [*static], held.between_steps
    running = held.inventories[moment.chunk]
    phase = moment.phase
    operation = running.forward_operation if phase == "forward" else running.backward_operation
    # The peak is in the optimizer's step if that needs more than forward and backward.
    in_step = held.beyond_static(moment.bytes) > held.in_passes(moment.bytes)
    if in_step:
        components += carried_over
        carried_over, phase, operation = (), OPTIMIZER_STEP, "main gradients in fp32"
        if held.state.in_step:
            operation = held.state.step_name
            components.append(_transient(f"temporaries: {operation}", held.state.in_step, Part.RUNNING))
    else:
        one = _running(moment, held.inventories)
        retained: dict[tuple[Part, Provenance], int] = one.parts() if one else {}
        for chunk, (of_chunk, alive) in enumerate(zip(parts, moment.alive, strict=True)):
            alive -= chunk == moment.chunk and one is not None
            if alive:
                for key, nbytes in of_chunk.items():
                    retained[key] = retained.get(key, 0) + alive * nbytes
        components += [
            Component(
                "activations: " + part.value, nbytes, Role.ACTIVATION, provenance, lifetime=Lifetime.RETAINED,
                part=part, routed=provenance is Provenance.ASSUMED,
            )
            for (part, provenance), nbytes in retained.items()
        ]
        if moment.hidden_bytes:
            components.append(_transient("pipeline sends and receives", moment.hidden_bytes, Part.PIPELINE))
        if held.batch:
            components.append(_transient("batch: tokens, labels, masks", held.batch, Part.BATCH))
        if held.deferred:
            name = "inputs and logit gradients of deferred output-layer weight gradients"
            components.append(_transient(name, held.deferred, Part.LOSS))
        if held.state.gathered:
            name = f"parameters gathered by {stages.run.data_parallel.engine_title}"
            components.append(_transient(name, held.state.gathered, Part.DATA_PARALLEL))
        # Gradients that no component holds are among the temporaries: an engine that offloads them leaves none.
        made, freed = (one.gradients if held.fresh else 0, one.freed) if one else (0, 0)
        if held.state.accumulated:
            name = "unsharded gradients of earlier microbatches"
            components.append(_transient(name, held.state.accumulated - freed, Part.DATA_PARALLEL))
        if held.fresh:
            components, waiting = _made_so_far(components, made)
            carried_over = (*carried_over, *waiting)
        transient = moment.bytes - moment.hidden_bytes - sum(retained.values()) - made + freed
        components.append(_transient(f"temporaries: {operation}", transient, Part.RUNNING))
    return StageEstimate(
        stage=rank,
        layers=tuple(i for chunk in stages.plan.stages[rank] for i in chunk.layers),
        parameters=held.state.parameters,
        in_flight=(0,) * len(moment.alive) if in_step else tuple(moment.alive),
        components=tuple(components),
        peak_phase=phase,
        peak_operation=operation,
        carried_over=carried_over,
        host=held.state.host,
        phases=tuple((str(phase), nbytes) for phase, nbytes in _phases(stages, rank).items()),
    )


def _made_so_far(components: list[Component], made: int) -> tuple[list[Component], list[Component]]:
    """(``components`` with the gradients that backward has made so far, ``made`` bytes; the gradients not yet made)."""
    alive: list[Component] = []
    later: list[Component] = []
    for c in components:
        if c.lifetime is Lifetime.BACKWARD:
            now = min(c.bytes, made)
            made -= now
            if now < c.bytes:
                later.append(c._replace(name=f"{c.name} (not yet allocated)", bytes=c.bytes - now))
            c = c._replace(bytes=now)
        if c.bytes or c.lifetime is not Lifetime.BACKWARD:
            alive.append(c)
    return alive, later


def _transient(name: str, nbytes: int, part: Part) -> Component:
    return Component(name, nbytes, Role.TRANSIENT, Provenance.FORMULA, lifetime=Lifetime.TRANSIENT, part=part)


def _assumptions(run: RunSpec, ctx: BlockContext) -> tuple[str, ...]:
    out: list[str] = []
    impl = run.implementation
    if run.model.has_experts and not impl.moe_pad_expert_input_to_capacity:
        out.append(
            "routing is balanced over the experts"
            if impl.moe_imbalance == 1.0
            else f"the most loaded rank gets {impl.moe_imbalance:g} times the balanced number of tokens"
        )
    if impl.deterministic_attention and impl.attention_kernel == "fused":
        out.append(
            "deterministic_mode: cuDNN's attention needs no more scratch in backward than it does otherwise (for "
            "packed sequences on Hopper it can need tens of GiB)"
        )
    if impl.cuda_graph_impl == "full_iteration" and impl.overlap_moe_expert_parallel_comm:
        # CUDACachingAllocator.cpp: free, while captures are underway.
        out.append(
            "PYTORCH_CUDA_ALLOC_CONF has graph_capture_record_stream_reuse:True: without it the graph's pool keeps "
            "every block that both streams of overlapped exchanges use until the capture ends"
        )
    if run.model.mtp_num_layers and ctx.mtp_without_gradients:
        out.append(
            f"mtp_num_layers ({run.model.mtp_num_layers}) with fp8 and full recomputation: depths get no gradients, "
            "since this megatron-core hands their inputs to Transformer Engine's checkpoint by name"
        )
    for encoder in ctx.encoders:
        if words := default_words(encoder.structure, run.batch):
            out.append(f"{encoder.spec.name}: {words}")
    asked = []
    if ignores_full_recompute(run.model, ctx) and run.recompute.granularity == "full":
        asked.append("recompute_granularity (full)")
    if impl.cpu_offloading_num_layers and not offloaded_layers(run.model, ctx):
        asked.append(f"cpu_offloading_num_layers ({impl.cpu_offloading_num_layers})")
    out += [
        NoEffect(f"{name} does nothing: megatron-core's stack of hybrid models does not ask for it") for name in asked
    ]
    return tuple(out)
