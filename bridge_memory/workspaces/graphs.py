"""CUDA graphs: what capture adds to reserved memory.

Graphs allocate from a private pool that stays reserved, and what runs outside of them cannot use it. So the passes are
divided in two: what graphs cover and what runs eagerly. Each half goes through the schedule alone, and needs its own
peak; together they need more than the peak of the whole, which is what one pool needs. All graphs of a rank share one
pool, in the order of the schedule; weak references let later graphs reuse in it what earlier ones have finished with
(megatron-core ``transformer/cuda_graphs.py: CudaGraphManager.global_mempool, _CudagraphGlobalRecord``,
``full_cuda_graph.py``; TE ``graph.py: _make_graphed_callables``). What the steps before a capture have cached is gone:
each capture empties the cache (torch ``cuda/graphs.py: graph.__enter__``).

Not counted: what the driver holds for the nodes of a graph, outside of torch; outputs and gradients of all microbatches
that Transformer Engine kept before 2.7 (``_reuse_graph_input_output_buffers``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from bridge_memory.components import Part, Provenance
from bridge_memory.inventory.layer import layer_block
from bridge_memory.inventory.layer_links import layer_link
from bridge_memory.inventory.stack import chunk_before_its_backward, chunk_inventory
from bridge_memory.schedule.events import ChunkCost
from bridge_memory.schedule.peak import peak_bytes
from bridge_memory.spec import (
    AttentionSpec,
    CompressedAttentionSpec,
    FeedForward,
    GatedDeltaNetSpec,
    LayerSpec,
    MambaSpec,
    Mixer,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    RunSpec,
    SideBySideSpec,
)
from bridge_memory.spec.graphs import static_masks
from bridge_memory.spec.layout import ChunkShape, StageShape, layout
from bridge_memory.tapes.chain import ChunkInventory, Label, Link, compose
from bridge_memory.tapes.context import BlockContext, context_of
from bridge_memory.workspaces.chunk_costs import chunk_costs, overlap_cost

_LAYERS = "transformer/cuda_graphs.py: CudaGraphManager, TECudaGraphHelper; TE graph.py: _make_graphed_callables"
_FULL = "full_cuda_graph.py: FullCudaGraphWrapper"
_BOUND = "at most, what forward and backward passes need is there twice"

#: What the router's part of a layer saves: the norm before it, the router, shared experts.
_OF_ROUTER = (Part.MOE, Part.MOE_ROUTER, Part.MOE_SHARED_EXPERTS)


class Between(NamedTuple):
    """Bytes, between ``least`` and ``most``, which are equal where the source leaves no range."""

    least: int
    most: int


_NONE = Between(0, 0)


class GraphMemory(NamedTuple):
    """What graphs add to the reserved memory of a stage; the sum is what is reserved beyond the peak of the same run
    without graphs."""

    pool: Between
    provenance: Provenance
    source: str
    #: Static attention masks.
    masks: Between = _NONE
    #: Below zero: what eager passes no longer need. None: not known.
    moved: Between | None = None

    @property
    def total(self) -> Between:
        parts = (self.pool, self.masks, self.moved or _NONE)
        return Between(sum(part.least for part in parts), sum(part.most for part in parts))


class Passes(NamedTuple):
    """The passes of a stage, whole."""

    run: RunSpec
    stage: int
    inventories: tuple[ChunkInventory, ...]
    costs: tuple[ChunkCost, ...]
    #: Bytes that are alive all the time; that the optimizer's step needs beside them; of the whole stage at its peak.
    static: int
    step: int
    peak: int
    #: Beside the activations of passes: the batch, what engines gather or accumulate.
    beside: int
    #: Activations at their highest moment.
    activations: int

    @property
    def ctx(self) -> BlockContext:
        return context_of(self.run)

    def peak_with(self, activations: int) -> int:
        """The stage's peak if its passes had these activations."""
        return self.static + max(self.beside + activations, self.step)

    def scheduled(self, chunks: Sequence[ChunkInventory], hidden_bytes: int = 0) -> int:
        """The most bytes of activations alive, of these chunks in place of the stage's."""
        run = self.run
        overlaps = run.implementation.overlap_moe_expert_parallel_comm
        costs = chunk_costs(chunks)
        if overlaps:
            costs = [
                cost._replace(
                    overlap=overlap_cost(chunk, whole.overlap.held if whole.overlap and hidden_bytes else 0)
                )
                for cost, chunk, whole in zip(costs, chunks, self.costs, strict=True)
            ]
        return peak_bytes(
            run.parallel.pp, self.stage, run.num_microbatches, costs, hidden_bytes=hidden_bytes,
            group_size=run.parallel.microbatch_group_size_per_vp_stage, overlap_moe_expert_parallel_comm=overlaps,
            keeps_outputs=not run.implementation.deallocate_pipeline_outputs,
        )

    @property
    def all(self) -> int:
        """Bytes of the whole passes beyond static memory."""
        return self.beside + self.activations


def graph_memory(whole: Passes, left: int | None = None) -> GraphMemory:
    """What CUDA graphs add to the reserved memory of a stage, whose run has some.

    ``left``: bytes of segments that an emptied cache cannot return after the first step, since part of each is used, as
    a replay of the allocator finds them. None: not known; then nothing with expandable segments, and without them up to
    all that the eager passes had.
    """
    run = whole.run
    masks = Between(*static_masks(run))
    if run.implementation.cuda_graph_impl == "full_iteration":
        # One graph of all passes; the optimizer runs outside of it, and what is alive between steps is not in its pool.
        pool = Between(whole.all, whole.all + _sent(whole))
        return GraphMemory(pool, Provenance.FORMULA, _FULL, moved=_moved(whole, whole.static + whole.step, left))
    split = _split_stage(whole)
    if split is None:
        # Up to all that passes need, once more.
        pool = Between(masks.least, whole.all + masks.most)
        return GraphMemory(pool, Provenance.ASSUMED, _BOUND)
    least, most = (whole.scheduled(half) for half in split.graphed)
    eager = whole.peak_with(whole.scheduled(split.eager, whole.ctx.hidden_bytes))
    pool = Between(least, max(least, most))
    return GraphMemory(pool, Provenance.FORMULA, _LAYERS, masks, _moved(whole, eager, left))


def _sent(whole: Passes) -> int:
    """Hidden states that the stage sends and receives in a step: during a capture torch does not reuse blocks that
    another stream has used (``CUDACachingAllocator.cpp: free``, needs_events_deferred_until_no_capture), and P2P
    records its streams. Before 2.8 all collectives do, whose tensors are not counted."""
    run, pp = whole.run, whole.run.parallel.pp
    chunks = len(whole.inventories)
    neighbours = 0 if pp == 1 else (whole.stage > 0 or chunks > 1) + (whole.stage < pp - 1 or chunks > 1)
    return 2 * neighbours * chunks * run.num_microbatches * whole.ctx.hidden_bytes


def _moved(whole: Passes, eager: int, left: int | None) -> Between:
    """What is no longer needed outside of the pool. The optimizer's states may lie in segments that the passes of the
    first step have left, which then stay."""
    moved = min(0, eager - whole.peak)
    if left is None:
        left = 0 if whole.run.implementation.expandable_segments else -moved
    return Between(moved, min(0, moved + left))


# ---- what graphs cover ----


class _Split(NamedTuple):
    """The chunks of a stage in two halves."""

    eager: tuple[ChunkInventory, ...]
    #: What graphs cover: at least, and at most.
    graphed: tuple[tuple[ChunkInventory, ...], tuple[ChunkInventory, ...]]


class _Covered(NamedTuple):
    """One layer in two halves; None: nothing of it."""

    graphed: LayerSpec | None
    eager: LayerSpec | None
    #: Whether graphs also cover the router of the eager half.
    router: bool = False

    @property
    def begins(self) -> bool:
        """Whether its first operation is in a graph."""
        return self.graphed is not None or (self.router and self.eager is not None and self.eager.mixer is None)

    @property
    def ends(self) -> bool:
        return self.graphed is not None and self.eager is None


_ATTENTIONS = (AttentionSpec, CompressedAttentionSpec, MLASpec, GatedDeltaNetSpec)


def _covered(layer: LayerSpec, run: RunSpec) -> _Covered:
    """What graphs cover of a layer (``_layer_is_graphable``; ``TransformerLayer._te_cuda_graph_capture,
    create_mcore_cudagraph_manager``; ``MoETransformerLayer``, of hybrid models)."""
    impl, mixer, ffn = run.implementation, layer.mixer, layer.ffn
    modules = impl.cuda_graph_modules
    attention = isinstance(mixer, _ATTENTIONS) and "attn" in modules
    mamba = isinstance(mixer, MambaSpec) and "mamba" in modules
    dense = isinstance(ffn, MLPSpec) and "mlp" in modules
    routed = isinstance(ffn, MoESpec)
    if not modules or (mamba and ffn is None):
        return _Covered(layer, None)
    if impl.cuda_graph_impl == "local":
        # The manager of a layer captures all of it, whichever of its modules was named.
        alone = routed and run.model.hybrid
        if attention or dense or mamba or (alone and "moe" in modules):
            return _Covered(layer, None)
        return _Covered(None, layer, alone and bool({"moe_router", "moe_preprocess"} & {*modules}))
    first, second = attention or mamba, dense or (routed and "moe" in modules)
    graphed = _half(layer, mixer if first else None, ffn if second else None)
    eager = _half(layer, None if first else mixer, None if second else ffn)
    return _Covered(graphed, eager, routed and "moe_router" in modules)


def _half(layer: LayerSpec, mixer: Mixer | None, ffn: FeedForward | None) -> LayerSpec | None:
    return None if mixer is None and ffn is None else replace(layer, mixer=mixer, ffn=ffn)


def _divides(layer: LayerSpec) -> bool:
    """Whether the halves of a layer are what they are in the layer: not with hyper-connections around both, or where
    one norm serves both."""
    side_by_side = isinstance(layer.mixer, SideBySideSpec)
    return layer.arrangement == "megatron" and not side_by_side and not isinstance(layer.mixer, CompressedAttentionSpec)


def _split_stage(whole: Passes) -> _Split | None:
    """The stage's chunks in two halves; None where layers are not divided so."""
    run, ctx = whole.run, whole.ctx
    model = run.model
    shapes: StageShape = layout(model, run.parallel).shapes(model)[whole.stage]
    if run.recompute.granularity == "full" or ctx.adapters is not None or ctx.torch_layers is not None:
        return None
    last = chunk_before_its_backward(shapes)
    plain = [chunk_inventory(model, shape, ctx, i == last) for i, shape in enumerate(shapes)]
    if any(_sizes(a) != _sizes(b) or a.offloads for a, b in zip(plain, whole.inventories, strict=True)):
        return None  # an engine gathers and reduces while layers run, or their tensors go to the host
    covered = {kind: _covered(kind, run) for shape in shapes for kind, _ in shape.layers}
    if any(one.graphed is not None and one.eager is not None and not _divides(kind) for kind, one in covered.items()):
        return None
    return _Split(
        tuple([_eager(model, shape, ctx, covered, i == last) for i, shape in enumerate(shapes)]),
        (
            tuple([_graphed(run, shape, ctx, covered, most=False) for shape in shapes]),
            tuple([_graphed(run, shape, ctx, covered, most=True) for shape in shapes]),
        ),
    )


def _sizes(chunk: ChunkInventory) -> tuple[int, int, int]:
    return chunk.retained, chunk.forward_peak, chunk.backward_peak


def _eager(
    model: ModelSpec, shape: ChunkShape, ctx: BlockContext, covered: dict[LayerSpec, _Covered], backward_next: bool
) -> ChunkInventory:
    """What of a chunk runs outside of graphs."""
    layers = [(covered[kind].eager, count) for kind, count in shape.layers]
    left = shape._replace(layers=tuple([(kind, count) for kind, count in layers if kind is not None]))
    found = chunk_inventory(model, left, ctx, backward_next)
    routers = [_router_bytes(one.eager, ctx) for one in covered.values() if one.router and one.eager is not None]
    if not routers:
        return found
    links = [(_without_router(link) if link.label is Label.LAYER else link, count) for link, count in found.links]
    return compose(links, found.output_bytes, kept=found.kept)


def _router_bytes(layer: LayerSpec, ctx: BlockContext) -> int:
    return _of_router(layer_link(layer, ctx))


def _of_router(link: Link) -> int:
    return sum([nbytes for (part, _), nbytes in link.parts() if part in _OF_ROUTER])


def _without_router(link: Link) -> Link:
    return _with(link, -_of_router(link))


def _with(link: Link, nbytes: int, temporaries: int = 0) -> Link:
    """The link with ``nbytes`` more retained, and peaks of ``temporaries`` at least beyond what it retains."""
    least = link.retained + nbytes + temporaries
    return link._replace(
        retained=link.retained + nbytes, forward_peak=max(link.forward_peak + nbytes, least),
        backward_peak=max(link.backward_peak + nbytes, least),
        backward_peak_held=max(link.backward_peak_held + nbytes, least), routed_peak=0,
    )  # fmt: skip


def _graphed(
    run: RunSpec, shape: ChunkShape, ctx: BlockContext, covered: dict[LayerSpec, _Covered], *, most: bool
) -> ChunkInventory:
    """What of a chunk is in graphs, static inputs and outputs among it. ``most``: with what a source leaves open."""
    every = [covered[kind] for kind, count in shape.layers for _ in range(count)]
    links: list[tuple[Link, int]] = []
    for place, one in enumerate(every):
        following = every[place + 1] if place + 1 < len(every) else None
        link = _NOTHING
        if one.graphed is not None:
            link = layer_link(one.graphed, ctx)
            if one.ends and following is not None and following.begins and _copies(run):
                link = _with(link, ctx.hidden_bytes)
        if one.router and one.eager is not None:
            link = _with_router(link, one.eager, run, ctx, most=most)
        if link is not _NOTHING:
            links.append((link, 1))
    if most and shape.num_depths and run.model.mtp_layer is not None:
        # The layers inside of MTP depths, which the eager half counts as well.
        inside = _covered(run.model.mtp_layer, run).graphed
        links += [(layer_link(inside, ctx), shape.num_depths)] if inside is not None else []
    return compose(links, ctx.hidden_bytes if links else 0)


def _nothing() -> str:
    return ""


#: A layer of which nothing is in a graph.
_NOTHING = Link(Label.LAYER, 0, 0, 0, 0, _nothing, _nothing)


def _copies(run: RunSpec) -> bool:
    """Whether the output of a graph is copied for the next graph: Transformer Engine's graphs have inputs of their own
    (``TECudaGraphHelper._get_sample_arguments``); those of ``local`` take the output itself where they can."""
    return run.implementation.cuda_graph_impl == "transformer_engine"


def _with_router(link: Link, layer: LayerSpec, run: RunSpec, ctx: BlockContext, *, most: bool) -> Link:
    """With the graphed router of ``layer``, and with outputs that eager passes would not keep: those of the shared
    experts, and the permuted tokens where their permutation precedes the exchange
    (``MoETransformerLayer._forward_mlp_router``; ``MoEAlltoAllTokenDispatcher.dispatch_preprocess``).
    """
    experts, impl = layer.ffn, run.implementation
    assert isinstance(experts, MoESpec)
    outputs = temporaries = 0
    table = 4 * ctx.tokens_sp * experts.num_experts
    shared = experts.shared_expert_intermediate_size
    if most:
        temporaries = 3 * ctx.hidden_bytes + 3 * table
    if shared and not impl.moe_shared_expert_overlap:
        outputs += ctx.hidden_bytes
        dense = replace(layer, mixer=None, ffn=MLPSpec(shared, gated=experts.gated, activation=experts.activation))
        cost = layer_block(dense, ctx).cost
        temporaries = max(temporaries, cost.backward_peak - cost.retained) if most else temporaries
    preprocessed = impl.cuda_graph_impl == "local" or "moe_preprocess" in impl.cuda_graph_modules
    if preprocessed and impl.moe_token_dispatcher_type == "alltoall":
        outputs += ctx.tokens_sp * experts.topk * (experts.latent_size or ctx.hidden_size) * ctx.act
    return _with(link, _router_bytes(layer, ctx) + outputs, temporaries)
