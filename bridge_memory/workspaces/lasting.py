"""Buffers that outlive the step: scratch of blocks, workspaces of libraries, what dispatchers and pipelines hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bridge_memory.components import Component, Lifetime, Part
from bridge_memory.inventory.chain import ChunkInventory
from bridge_memory.inventory.context import BlockContext
from bridge_memory.inventory.stack import stage_scratch
from bridge_memory.spec import MLASpec, RunSpec
from bridge_memory.spec.layout import ChunkShape
from bridge_memory.workspaces.dispatcher import expert_layers, held_by_dispatchers
from bridge_memory.workspaces.libraries import buffer, library_workspaces


def lasting_buffers(
    run: RunSpec, shapes: Sequence[ChunkShape], ctx: BlockContext, inventories: Sequence[ChunkInventory]
) -> Iterator[Component]:
    """What is allocated after a step besides model state: for good, and (by their lifetime) until the next step."""
    for kind, nbytes in stage_scratch(run.model, shapes, ctx).items():
        yield buffer(kind.value, nbytes)
    tables = rotary_tables(run, shapes)
    if tables:
        yield buffer("rotary embedding tables", tables, Part.ROTARY)
    experts = expert_layers(run.model, shapes, ctx)
    yield from library_workspaces(run, shapes, experts_here=bool(experts))
    yield from held_by_dispatchers(experts, ctx, sum(chunk.residue for chunk in inventories))
    received = sum(1 for shape in shapes if not shape.embedding)
    if received:
        # TransformerBlock.set_input_tensor keeps what schedules.py received, retain_grad keeps its gradient
        yield buffer(
            "pipeline: the last microbatch's input and its gradient", 2 * received * ctx.hidden_bytes, Part.PIPELINE,
            Lifetime.BETWEEN_STEPS,
        )


def rotary_tables(run: RunSpec, shapes: Sequence[ChunkShape]) -> int:
    """Bytes of the cached angles, fp32 [s / c, 1, 1, d_rope]: one a model chunk, and one a layer for MLA.

    Source: megatron-core ``models/common/embeddings/rotary_pos_embedding.py: RotaryEmbedding.forward`` (an
    ``lru_cache``); ``multi_latent_attention.py`` builds an embedding of its own in every layer.
    """
    model = run.model
    if not model.rotary_dim:
        return 0
    latent = sum(count for shape in shapes for kind, count in shape.layers if isinstance(kind.mixer, MLASpec))
    if model.mtp_layer is not None and isinstance(model.mtp_layer.mixer, MLASpec):
        latent += sum(shape.num_depths for shape in shapes)
    table = 4 * model.rotary_dim * run.batch.seq_length // run.parallel.cp
    return table * (latent or len(shapes))
