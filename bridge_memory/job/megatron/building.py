"""Building a Megatron job on one rank: modules, DDP's buffers beside them, the optimizer's main parameters.

Modules make their parameters on the device, for every virtual stage before any DDP (Megatron-LM ``training/training.py:
get_model``, Bridge ``models/model_provider.py: get_model``). DDP makes the buffers of dense parameters, copies the
parameters into them and frees the old ones, and then does the same for routed experts (megatron-core ``distributed/
distributed_data_parallel.py: DistributedDataParallel.__init__``, ``param_and_grad_buffer.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from bridge_memory.components import Component, Lifetime, Provenance, Role, State, allocated
from bridge_memory.engines.by_name import engine_of
from bridge_memory.engines.megatron_ddp import experts_apart
from bridge_memory.estimation import stage_parts
from bridge_memory.inventory.stack import chunk_units, named_parameters
from bridge_memory.job.megatron import building_fsdp
from bridge_memory.outside.amount import Amount, exactly, total
from bridge_memory.spec import DTYPE_BYTES, ModelSpec, RecomputeSpec, RunSpec
from bridge_memory.spec.layout import ChunkShape, layout
from bridge_memory.tapes.context import TRACE_CACHE, BlockContext, Settings, context_of
from bridge_memory.tapes.parameters import Parameter

_MODULES = "training.py: get_model"
_HYBRID = "optimizer/cpu_offloading/hybrid_optimizer.py: _get_sub_optimizer_param_groups"
_HYBRID_AGAIN = "distrib_optimizer.py: DistributedOptimizer.__init__ (HybridDeviceOptimizer)"
_BUFFERS = "param_and_grad_buffer.py: _ParamAndGradBuffer.__init__"


def why_not(run: RunSpec) -> str | None:
    """Why the phases beside the step are not modelled for ``run``; None where they are."""
    if run.data_parallel.engine == "megatron_fsdp":
        return building_fsdp.why_not(run)
    if run.data_parallel.engine != "megatron_ddp":
        return f"engine {run.data_parallel.engine}: build, load, save and resume are not modelled"
    if run.optimizer.use_layer_wise_distributed_optimizer:
        return "use_layer_wise_distributed_optimizer: build, load, save and resume are not modelled"
    if run.teacher is not None:
        return "a teacher: build, load, save and resume are not modelled"
    return None


def building(run: RunSpec, stage: int) -> tuple[Amount, ...] | None:
    """What is alive at the highest moment of building; None if that is not modelled (``why_not``).

    Raises SpecError: there is no such stage.
    """
    if run.data_parallel.engine == "megatron_fsdp":
        return building_fsdp.building(run, stage)
    done = built(run, stage)
    if done is None:
        return None
    moments = [*_beside_modules(run, stage), (*done, *_copy_of_last(run, stage)), (*done, *_made_again(run, stage))]
    return max(moments, key=lambda amounts: total(amounts).most)


def built(run: RunSpec, stage: int) -> tuple[Amount, ...] | None:
    """What is alive once model and optimizer are built; None if that is not modelled (``why_not``).

    Moments of Adam's are made by the first step or a resume. Raises SpecError: there is no such stage.
    """
    if run.data_parallel.engine == "megatron_fsdp":
        return building_fsdp.built(run, stage)
    parts = stage_parts(run, stage)
    if why_not(run) is not None:
        return None
    return tuple(exactly(c.name, c.bytes, c.provenance) for c in parts.persistent if _made_early(run, c) and c.bytes)


def _made_early(run: RunSpec, component: Component) -> bool:
    """Whether model state exists before any pass. FusedAdam makes its main parameters at its first step (TE
    ``fused_adam.py: FusedAdam.initialize_state``), modules quantized copies of 16-bit weights at their first pass."""
    if component.lifetime is not Lifetime.MODEL or component.state is State.NONE:
        return False
    if component.state is State.FP8_COPIES:
        return run.precision.quantized_param
    late = run.optimizer.fused_main_parameters and not run.optimizer.optimizer_cpu_offload
    return not (component.state is State.MAIN_PARAMETERS and late)


@lru_cache(maxsize=1)  # asked for by every phase of a stage in turn
def stage_parameters(run: RunSpec, stage: int) -> list[list[Parameter]]:
    """The parameters of every virtual stage, in the modules' order. Not to be changed: others get the same lists."""
    ctx = context_of(run)
    shapes = layout(run.model, run.parallel).shapes(run.model)[stage]
    return _parameters(run.model, tuple(shapes), ctx.cache.settings, ctx.dimensions, run.recompute)


@lru_cache(maxsize=1)  # phases ask for those of one stage, one after the other; there may be tens of thousands
def _parameters(
    model: ModelSpec, shapes: tuple[ChunkShape, ...], settings: Settings, dimensions: tuple[Any, ...],
    recompute: RecomputeSpec,
) -> list[list[Parameter]]:  # fmt: skip
    ctx = BlockContext(TRACE_CACHE.cache(settings), dimensions, recompute)
    return [list(named_parameters(chunk_units(model, shape, ctx))) for shape in shapes]


class _Buffer(NamedTuple):
    """The parameters of one buffer, in bytes: as modules make them, in the buffer (0: none), and their gradients."""

    experts: bool
    modules: int
    weights: int
    gradients: int


def _buffers(run: RunSpec, stage: int) -> Iterator[_Buffer]:
    """In the order in which DDP makes them."""
    ctx, engine = context_of(run), engine_of(run)
    width, apart = DTYPE_BYTES[run.precision.params_dtype], experts_apart(run)
    # mxfp8 weights are in no buffer: they stay as modules made them.
    moves = run.data_parallel.use_distributed_optimizer
    for shape in layout(run.model, run.parallel).shapes(run.model)[stage]:
        units = chunk_units(run.model, shape, ctx)
        amounts = engine.stage([units]).amounts
        frozen = run.peft.freezes
        for kinds in ((False,), (True,)) if apart else ((False, True),):
            own = [(line, n) for line, n in amounts if line.experts in kinds and line.adapters is frozen]
            weights = sum(n for line, n in own if line.state is State.PARAMETERS)
            copies = sum(n for line, n in own if line.state is State.FP8_COPIES)
            modules = sum(
                unit.times * times * allocated(p.numel * width)
                for unit in units for some, times in unit.parameters.runs(*kinds) for p in some
            )  # fmt: skip
            if run.precision.quantized_param or frozen:
                modules = weights + copies * run.precision.quantized_param
            quantized_apart = run.precision.recipe == "mxfp8" and run.precision.quantized_param
            yield _Buffer(
                kinds[0], modules, weights if moves and not quantized_apart else 0,
                sum(n for line, n in own if line.role is Role.GRADIENTS),
            )  # fmt: skip


def _beside_modules(run: RunSpec, stage: int) -> Iterator[tuple[Amount, ...]]:
    """The moments at which a buffer is made and its parameters are still in the modules too."""
    buffers = list(_buffers(run, stage))
    frozen = sum(
        c.bytes for c in stage_parts(run, stage).persistent
        if run.peft.freezes and c.role is Role.WEIGHTS and not c.adapters and _made_early(run, c)
    )  # fmt: skip
    for at, buffer in enumerate(buffers):
        if not buffer.modules:
            continue
        modules = frozen + sum(b.modules for i, b in enumerate(buffers) if i >= at or not b.weights)
        made = buffers[: at + 1]
        parts = [exactly("parameters of modules", modules, Provenance.EXACT, _MODULES)]
        for experts in (False, True):
            of = " (routed experts)" if experts else ""
            own = [b for b in made if b.experts is experts]
            parts += [
                exactly(f"weights{of}", sum(b.weights for b in own), Provenance.EXACT, _BUFFERS),
                exactly(f"gradients{of}", sum(b.gradients for b in own), Provenance.EXACT, _BUFFERS),
            ]
        yield tuple(part for part in parts if part.most)


def copied_one_by_one(run: RunSpec, stage: int) -> Amount:
    """Of a parameter on its way to the host, or to fp32, the copy on the device; with which one an optimizer that is
    partly in host memory ends depends on the rank."""
    o = run.optimizer
    width = DTYPE_BYTES[run.precision.params_dtype] if o.fused_main_parameters else 4
    world = min(run.parallel.shard_worlds) if run.data_parallel.use_distributed_optimizer else 1
    parameters = [p.numel for chunk in stage_parameters(run, stage) for p in chunk]
    most = width * min(max(parameters, default=0), -(-sum(parameters) // world))
    return Amount("copy of one parameter", 0, most, Provenance.FORMULA, _HYBRID)


def _made_again(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """An optimizer that is partly in host memory is made of whole parameters first, whose fp32 copies are alive until
    it is made of a rank's shards."""
    o = run.optimizer
    if not o.optimizer_cpu_offload:
        return ()
    copy = copied_one_by_one(run, stage)
    if not run.data_parallel.use_distributed_optimizer or DTYPE_BYTES[run.precision.params_dtype] != 2:
        return (copy,)
    numel = sum(p.numel for chunk in stage_parameters(run, stage) for p in chunk)
    stays = round(4 * numel * (1 - o.optimizer_offload_fraction))
    whole = exactly("fp32 copies of whole parameters", stays, Provenance.FORMULA, _HYBRID_AGAIN)
    return tuple(a for a in (whole, copy) if a.most)


def _copy_of_last(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """The 16-bit copy of which the last main parameter is made, less the main parameters that are made after it.

    Matrices come first, then what has no weight decay; dense parameters before those of experts.
    """
    width = DTYPE_BYTES[run.precision.params_dtype]
    o = run.optimizer
    if width != 2 or o.fused_main_parameters or o.optimizer_cpu_offload or run.peft.freezes:
        return ()
    distributed, apart = run.data_parallel.use_distributed_optimizer, experts_apart(run)
    # A distributed optimizer goes through its buffers, which are filled from the last parameter to the first.
    chunks = [chunk[::-1] if distributed else chunk for chunk in stage_parameters(run, stage)]
    parameters = [p for chunk in chunks for p in chunk]
    kinds = [[p for p in parameters if p.expert is experts] for experts in (False, True)] if apart else [parameters]
    last = next((kind for kind in reversed(kinds) if kind), [])
    name, source = "16-bit copy of the last main parameter", "distrib_optimizer.py: _build_model_and_main_param_groups"
    world = run.parallel.shard_worlds[apart and last[0].expert] if distributed and last else 1
    if world == 1:
        copy = later = 0
        for p in sorted(reversed(last), key=lambda p: len(p.shape) > 1):  # vectors, then matrices, the last first
            copy, later = max(copy, width * p.numel - later), later + 4 * p.numel
        return (exactly(name, copy, Provenance.FORMULA, source),) if copy else ()
    # Which parameter a rank's shard ends with depends on the rank.
    shard = sum(p.numel for p in last) // world
    most = width * min(max(p.numel for p in last), shard)
    return (Amount(name, 0, most, Provenance.FORMULA, source),)
