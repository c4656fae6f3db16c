"""A chunk of the pipeline: embedding, decoder layers and what follows them, composed from the blocks' costs.

Source: megatron-core ``models/gpt/gpt_model.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from bridge_memory.inventory.chain import ChunkInventory, Link, change_last_of, compose, plain_link
from bridge_memory.inventory.context import BlockContext, context_of
from bridge_memory.inventory.layer import (
    embedding_inventory,
    final_norm_inventory,
    layer_inventory,
    mtp_inventory,
    output_inventory,
)
from bridge_memory.inventory.layer_links import layer_links, runs_plain
from bridge_memory.inventory.parameters import Parameter
from bridge_memory.inventory.shared_weights import beside, waiting_gradients
from bridge_memory.inventory.tail import final_norm_name, holds_final_norm, tail_inventories, tail_links, untied_here
from bridge_memory.spec import ModelSpec, ParallelSpec, RunSpec
from bridge_memory.spec.layout import Chunk, layout


def stage_inventories(model: ModelSpec, chunks: Sequence[Chunk], ctx: BlockContext) -> list[ChunkInventory]:
    """Every chunk of a stage. On the last stage the last chunk with layers (or MTP) goes straight into its backward."""
    last = max((i for i, c in enumerate(chunks) if c.layers or c.mtp), default=0) if chunks[-1].output else -1
    return [chunk_inventory(model, chunk, ctx, i == last) for i, chunk in enumerate(chunks)]


@lru_cache(maxsize=65536)
def chunk_inventory(
    model: ModelSpec, chunk: Chunk, ctx: BlockContext, backward_next: bool = False
) -> ChunkInventory:
    """Saved bytes and peaks of one chunk for one microbatch.

    ``backward_next``: no other chunk of the rank runs between its forward and its backward.
    """
    links: list[tuple[Link, int]] = []
    if chunk.embedding:
        links.append((plain_link(embedding_inventory(model, ctx), "embedding"), 1))
    for link, count in layer_links([model.layers[i] for i in chunk.layers], ctx, plain=runs_plain(model, ctx)):
        if chunk.embedding and ctx.recompute.distribute_saved_activations:
            # ``gpt_model.py: GPTModel.forward`` holds decoder_input, of which the first layers keep a shard.
            link = replace(link, forward_peak=link.forward_peak + ctx.hidden_bytes)
        links.append((link, count))
    tied = model.share_embeddings_and_output_weights and (chunk.embedding or bool(chunk.mtp))
    tail = tail_inventories(model, chunk, ctx)
    labels = [link.label for link, _ in links] + [label for _, label in tail]
    waiting = waiting_gradients(labels, ctx, tied=tied)
    links = [(beside(link, found), count) for (link, count), found in zip(links, waiting, strict=False)]
    links += tail_links(tail, model, chunk, ctx, waiting[len(links) :])
    if not chunk.embedding:
        _beside_last_input(links, ctx)
    if backward_next:
        # The last offloading group of each name stays (``should_bulk_offload``).
        last = max((i for i, (link, _) in enumerate(links) if link.offloaded), default=None)
        if last is not None:
            change_last_of(links, last, links[last][0].kept_on_gpu())
    return compose(links, 0 if chunk.output else ctx.hidden_bytes)


def _beside_last_input(links: list[tuple[Link, int]], ctx: BlockContext) -> None:
    """The input that another stage sent last, and its gradient, are there until the last router has run: the graph of
    the dispatcher's probabilities ends in the node that accumulates the gradient (``token_dispatcher.py: self.probs``).
    """
    last = max((i for i, (link, _) in enumerate(links) if link.routed_peak), default=None)
    if last is not None:
        link, _ = links[last]
        peak = max(link.forward_peak, link.routed_peak + 2 * ctx.hidden_bytes)
        change_last_of(links, last, replace(link, forward_peak=peak))


@lru_cache(maxsize=4096)
def first_alike(model: ModelSpec, parallel: ParallelSpec) -> tuple[int, ...]:
    """For every stage, the first stage whose chunks hold the same kinds of layers and ends of the model."""
    seen: dict[tuple[object, ...], int] = {}
    out = []
    for rank, chunks in enumerate(layout(model, parallel).stages):
        kinds = tuple((tuple(model.layers[i] for i in c.layers), c.embedding, c.output, len(c.mtp)) for c in chunks)
        ends = tuple(model.num_layers - 1 in c.layers for c in chunks)
        out.append(seen.setdefault((kinds, ends), rank))
    return tuple(out)


def chunk_parameters(model: ModelSpec, chunk: Chunk, ctx: BlockContext) -> list[Parameter]:
    """Every parameter of one chunk on one rank, named as megatron-core's ``named_parameters`` names it."""
    out: list[Parameter] = []
    for prefix, params in parameter_groups(model, chunk, ctx):
        out += [p.under(prefix) for p in params] if prefix else list(params)
    return out


def parameter_groups(
    model: ModelSpec, chunk: Chunk, ctx: BlockContext
) -> list[tuple[str, tuple[Parameter, ...]]]:
    """(name prefix, parameters) of every block of the chunk, in model order."""
    groups: list[tuple[str, tuple[Parameter, ...]]] = []
    if chunk.embedding or chunk.mtp:
        groups.append(("", embedding_inventory(model, ctx).parameters))
    for i, layer in enumerate(chunk.layers):
        groups.append((f"decoder.layers.{i}.", layer_inventory(model.layers[layer], ctx).parameters))
    if holds_final_norm(model, chunk, ctx):
        groups.append(("", final_norm_inventory(final_norm_name(model), ctx).parameters))
    for n, _ in enumerate(chunk.mtp):
        assert model.mtp_layer is not None
        if n and model.mtp_use_repeated_layer:
            break
        groups.append((f"mtp.layers.{n}.", mtp_inventory(model.mtp_layer, ctx).parameters))
    if chunk.output:
        groups.append(("", output_inventory(model.output_bias, untied_here(model, chunk), ctx, False).parameters))
    return groups


@lru_cache(maxsize=65536)
def chunk_lasting(model: ModelSpec, chunk: Chunk, ctx: BlockContext) -> tuple[tuple[str, int], ...]:
    """Lasting scratch of one chunk, ((name, bytes), ...); the largest request under one name wins."""
    found: dict[str, int] = {}
    inventories = [layer_inventory(layer, ctx) for layer in dict.fromkeys(model.layers[i] for i in chunk.layers)]
    inventories += [inventory for inventory, _ in tail_inventories(model, chunk, ctx)]
    for inventory in inventories:
        for name, nbytes in inventory.lasting:
            found[name] = max(nbytes, found.get(name, 0))
    return tuple(found.items())


def stage_parameters(run: RunSpec, stage: int) -> list[list[Parameter]]:
    """Parameters of every chunk of pipeline stage ``stage``, chunk by chunk."""
    ctx = context_of(run)
    return [
        chunk_parameters(run.model, chunk, ctx) for chunk in layout(run.model, run.parallel).stages[stage]
    ]
