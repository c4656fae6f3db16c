"""Buffers that outlive a step: scratch of blocks, workspaces of libraries, and what dispatchers and pipelines hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bridge_memory.components import Component, Lifetime, Part
from bridge_memory.inventory.stack import chunk_scratch, stage_scratch
from bridge_memory.spec import MLASpec, ModelSpec, MoESpec, RunSpec
from bridge_memory.spec.layout import ChunkShape
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.recorder import Scratch
from bridge_memory.workspaces.dispatcher import ExpertLayers, expert_layers, held_by_dispatchers
from bridge_memory.workspaces.libraries import LibraryUse, buffer, library_use, library_workspaces


class ChunkFacts(NamedTuple):
    """The facts about a chunk on which persistent buffers depend."""

    #: Scratch by kind and shape.
    scratch: dict[tuple[Scratch, tuple[int, ...]], int]
    experts: list[ExpertLayers]
    #: Layers with multi-latent attention.
    latent: int
    #: Bytes of the tables of experts by token.
    tables: int
    uses: LibraryUse
    embedding: bool


def chunk_facts(run: RunSpec, shape: ChunkShape, ctx: BlockContext) -> ChunkFacts:
    return ChunkFacts(
        chunk_scratch(run.model, shape, ctx), expert_layers(run.model, shape, ctx), _latent_layers(run, shape),
        expert_tables(run.model, shape), library_use(shape), shape.embedding,
    )


def persistent_buffers(
    run: RunSpec, chunks: Sequence[ChunkFacts], ctx: BlockContext, carried_over: int
) -> Iterator[Component]:
    """What is allocated after a step in addition to model state: persistent, or (by its lifetime) until the next step.

    ``carried_over``: bytes that recomputed MoE layers carry over from backward (``ChunkInventory.carried_over``).
    """
    for kind, nbytes in stage_scratch([chunk.scratch for chunk in chunks], ctx).items():
        yield buffer(kind.value, nbytes)
    if run.model.rotary_dim:
        tables = rotary_tables(run, chunks)
        if tables:
            yield buffer("rotary embedding tables", tables, Part.ROTARY)
    by_token = sum([chunk.tables for chunk in chunks])
    if by_token:
        yield buffer("tables of experts by token", by_token, Part.MOE_ROUTER)
    experts = [layers for chunk in chunks for layers in chunk.experts]
    yield from library_workspaces(ctx, [chunk.uses for chunk in chunks], experts_here=bool(experts))
    if experts and ctx.torch_layers is None:
        yield from held_by_dispatchers(experts, ctx, carried_over)
    received = sum([not chunk.embedding for chunk in chunks])
    if received:
        # TransformerBlock.set_input_tensor holds the tensor that schedules.py received, retain_grad its gradient
        yield buffer(
            "pipeline: the last microbatch's input and its gradient", 2 * received * ctx.hidden_bytes, Part.PIPELINE,
            Lifetime.BETWEEN_STEPS,
        )


def rotary_tables(run: RunSpec, chunks: Sequence[ChunkFacts]) -> int:
    """Bytes of the cached angles, fp32 [s / c, 1, 1, d_rope]: one table per model chunk, or with MLA one per layer.

    Source: megatron-core ``models/common/embeddings/rotary_pos_embedding.py: RotaryEmbedding.forward`` (an
    ``lru_cache``); ``multi_latent_attention.py`` builds a rotary embedding in every layer. torchtitan and torchtune
    register one buffer, as many bytes a position; torchtune's has all positions up to the model's maximum.
    transformers makes tables in every forward (``inventory.torch.blocks.embedding_block``).
    """
    impl = run.implementation
    if impl.torch_layers and not impl.own_layers:
        return 0
    if impl.own_layers:
        positions = run.model.max_position_embeddings if impl.torchtune else run.batch.seq_length
        return 4 * run.model.rotary_dim * positions
    table = 4 * run.model.rotary_dim * run.batch.seq_length // run.parallel.cp
    return table * (sum([chunk.latent for chunk in chunks]) or len(chunks))


def expert_tables(model: ModelSpec, shape: ChunkShape) -> int:
    """Bytes of the tables of experts by token, int32 [vocabulary, k] a layer (Megatron-LM ``router.py: TopKRouter.
    __init__``: tid2eid)."""
    each = [
        count * kind.ffn.topk for kind, count in shape.layers
        if isinstance(kind.ffn, MoESpec) and kind.ffn.experts_by_token
    ]
    return 4 * model.vocab_size * sum(each)


def _latent_layers(run: RunSpec, shape: ChunkShape) -> int:
    model = run.model
    latent = sum([count for kind, count in shape.layers if isinstance(kind.mixer, MLASpec)])
    if shape.num_depths and model.mtp_layer is not None and isinstance(model.mtp_layer.mixer, MLASpec):
        latent += shape.num_depths
    return latent
