"""Host memory of a job: what each process holds, and what a node needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bridge_memory.components import GIB, Provenance, State
from bridge_memory.estimation import explain, stage_parts
from bridge_memory.inventory.layer_links import layer_link, offloaded_layers
from bridge_memory.outside.amount import Amount, Range, exactly, total
from bridge_memory.outside.phase import Phase
from bridge_memory.schedule.events import ChunkCost
from bridge_memory.schedule.peak import peak_bytes
from bridge_memory.spec import LayerSpec, OptimizerSpec, RunSpec, SpecError, show
from bridge_memory.spec.layout import ChunkShape, layout
from bridge_memory.spec.ranks import ranks_per_stage, stage_of_rank
from bridge_memory.tapes.context import context_of

#: Python, torch, CUDA libraries and Transformer Engine, resident, without tensors; processes of a node share a part.
PROCESS = Amount("process: Python, torch, CUDA libraries", 2 * GIB, 6 * GIB, Provenance.ASSUMED, "no source")
#: A forked worker of the data loader: pages that it writes, and the batches that it prefetches.
WORKER = Amount("data loader worker", GIB // 4, 2 * GIB, Provenance.ASSUMED, "no source")
#: Megatron-LM's ``--num-workers``.
WORKERS = 2
#: torch rounds a pinned allocation up to a power of two (``CachingHostAllocator.h: CachingHostAllocatorImpl``).
_ROUNDED = 2
_HYBRID = "optimizer/cpu_offloading/hybrid_optimizer.py: HybridDeviceOptimizer"


class Moment(NamedTuple):
    """What a phase holds in host memory beside what all of training does: on every rank, and on the job's first one."""

    phase: Phase
    every: tuple[Amount, ...] = ()
    first: tuple[Amount, ...] = ()


class HostMemory(NamedTuple):
    """Host memory of the rank that needs most, and of the node that needs most, in the phase in which it does."""

    #: The pipeline stage of that rank.
    stage: int
    rank: tuple[Amount, ...]
    #: The sum over all ranks of a node, in bytes, and how many these are.
    node: Range
    ranks: int
    phase: Phase = Phase.TRAINING


def host_memory(
    run: RunSpec, gpus_per_node: int = 8, *, moments: Sequence[Moment] = (), workers: int = WORKERS
) -> HostMemory:
    """What the processes of a job hold in host memory.

    Args:
        run: The run.
        gpus_per_node: Ranks of a node; fewer if the job has fewer.
        moments: What phases hold beside what training does, such as a checkpoint while it is saved.
        workers: Data loader workers of a rank.

    Raises:
        SpecError: A number is below what it can be, or the layers do not go onto the stages.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec
        >>> run = RunSpec(model="meta-llama/Llama-3.1-8B", parallel=ParallelSpec(world_size=8))
        >>> offloaded = run.with_fields(optimizer_cpu_offload=True)
        >>> more = host_memory(offloaded).node.least - host_memory(run).node.least
        >>> more == 16 * 8030261248  # parameters, gradients and both moments in fp32
        True
    """
    for name, value, least in (("gpus_per_node", gpus_per_node, 1), ("workers", workers, 0)):
        if type(value) is not int or value < least:
            raise SpecError(f"{name} ({show(value)}) is not a whole number of {least} or more; give one")
    own = [offloaded(run, stage) for stage in range(run.parallel.pp)]
    found = [_at(run, gpus_per_node, own, moment, workers) for moment in (Moment(Phase.TRAINING), *moments)]
    return max(found, key=lambda memory: memory.node.most)


def _at(
    run: RunSpec, gpus_per_node: int, own: Sequence[tuple[Amount, ...]], moment: Moment, workers: int
) -> HostMemory:
    """Host memory in one phase, of which ``own`` is what each stage's ranks offload."""
    loaders = () if moment.phase is Phase.LOAD else _loaders(workers)  # the first step starts them
    stages = [(*of, *moment.every, PROCESS, *loaders) for of in own]
    sums = [total(amounts) for amounts in stages]
    fullest = max(range(len(sums)), key=lambda stage: sums[stage].most)
    if moment.first:
        fullest = 0
        stages[0] = (*moment.first, *stages[0])
    nodes = [total([sums[stage] for stage in node]) for node in _nodes(run, gpus_per_node)]
    nodes[0] = total([nodes[0], *moment.first])
    most = max(nodes, key=lambda node: node.most)
    ranks = min(gpus_per_node, run.parallel.world_size)
    return HostMemory(fullest, stages[fullest], most, ranks, moment.phase)


def _nodes(run: RunSpec, gpus_per_node: int) -> list[list[int]]:
    """The stages of the ranks of those nodes that differ: at each stage's first rank, and the one after it."""
    parallel, world = run.parallel, run.parallel.world_size
    firsts = [stage * ranks_per_stage(parallel) // gpus_per_node for stage in range(parallel.pp)]
    found = []
    for node in sorted({n for first in firsts for n in (first, first + 1)}):
        ranks = range(node * gpus_per_node, min(world, (node + 1) * gpus_per_node))
        if ranks:
            found.append([stage_of_rank(parallel, rank) for rank in ranks])
    return found


def _loaders(workers: int) -> tuple[Amount, ...]:
    if not workers:
        return ()
    name = f"{workers} data loader workers" if workers > 1 else WORKER.name
    return (WORKER._replace(name=name, least=workers * WORKER.least, most=workers * WORKER.most),)


def offloaded(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """What a rank of the stage offloads."""
    kept = [_pinned(name, nbytes, "the estimate's host memory") for name, nbytes in explain(run, stage).host]
    return (*kept, *_activations(run, stage), *_optimizer(run, stage))


def _pinned(name: str, nbytes: int, source: str) -> Amount:
    return Amount(name, nbytes, _ROUNDED * nbytes, Provenance.FORMULA, source)


def _activations(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """Activations of all microbatches in flight: megatron-core's offloading."""
    if run.implementation.torch_layers:
        return ()
    ctx, shapes = context_of(run), layout(run.model, run.parallel).shapes(run.model)[stage]
    whole = offloaded_layers(run.model, ctx)
    offloaded = [
        sum([count * link.offloaded for link, count in chunk.links])
        + sum([layer_link(kind, ctx).retained for kind in _first(shape, whole)])
        for shape, chunk in zip(shapes, stage_parts(run, stage).inventories, strict=True)
    ]
    if not any(offloaded):
        return ()
    alive = peak_bytes(
        run.parallel.pp, stage, run.num_microbatches, [ChunkCost(n, n, n) for n in offloaded],
        run.parallel.microbatch_group_size_per_vp_stage,
        overlap_moe_expert_parallel_comm=run.implementation.overlap_moe_expert_parallel_comm,
    )  # fmt: skip
    source = "pipeline_parallel/fine_grained_activation_offload.py: OffloadTensorPool; TE cpu_offload.py"
    return (_pinned("offloaded activations", alive, source),)


def _first(shape: ChunkShape, number: int) -> list[LayerSpec]:
    """The first layers of a chunk, whose saved tensors all go to the host (``cpu_offloading_num_layers``)."""
    return [kind for kind, count in shape.layers for _ in range(count)][:number]


def _optimizer(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """What the optimizer of offloaded parameters holds, in fp32: the parameters and gradients, pinned, and its states.
    """
    spec = run.optimizer
    if not spec.optimizer_cpu_offload:
        return ()
    elements = int(spec.optimizer_offload_fraction * sharded_elements(run, stage))
    states = 2 if spec.optimizer == "adam" else int(spec.sgd_momentum > 0 or spec.optimizer == "muon")
    return (
        _pinned("offloaded parameters", 4 * elements, _HYBRID), _pinned("offloaded gradients", 4 * elements, _HYBRID),
        *([exactly("offloaded optimizer states", 4 * states * elements, source=_HYBRID)] if states else []),
    )  # fmt: skip


def sharded_elements(run: RunSpec, stage: int) -> int:
    """Parameters that a rank's optimizer updates: the first moments that Adam would keep of them on the GPU."""
    on_gpu = run.with_(optimizer=OptimizerSpec())
    moments = [part.bytes for part in explain(on_gpu, stage).components if part.state is State.EXP_AVG]
    return sum(moments) // 4
