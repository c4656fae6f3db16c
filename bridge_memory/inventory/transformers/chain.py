"""The whole model as transformers runs it, as one chunk: what its forward pass holds beside a layer.

Source: ``models/llama/modeling_llama.py: LlamaModel.forward, LlamaForCausalLM.forward``.
"""

from __future__ import annotations

from bridge_memory.inventory.chain import ChunkInventory, EngineBytes, Label, Link, compose, plain_link, with_engine
from bridge_memory.inventory.context import BlockContext
from bridge_memory.inventory.transformers.blocks import embedding_block, final_norm_block, layer_block, output_block
from bridge_memory.spec import ModelSpec
from bridge_memory.spec.layout import ChunkShape


def hugging_face_chunk(
    model: ModelSpec, shape: ChunkShape, ctx: BlockContext, concurrent: EngineBytes | None
) -> ChunkInventory:
    """Retained bytes and peaks of the model for one microbatch."""
    tied = model.share_embeddings_and_output_weights
    links: list[tuple[Link, int]] = [(plain_link(embedding_block(model, ctx), Label.EMBEDDING), 1)]
    layers = [(layer_block(kind, ctx), count) for kind, count in shape.layers]
    # ``inputs_embeds`` is a variable of the model's forward; the first layer may keep it too.
    held = 0 if layers and layers[0][0].cost.input_retained else ctx.hidden_bytes
    for i, (found, count) in enumerate(layers):
        link = plain_link(found, Label.LAYER)
        if i == 0:
            links.append((link, 1))
            count -= 1
        if count:
            links.append((_beside(link, held), count))
    links.append((_beside(plain_link(final_norm_block(ctx), Label.FINAL_NORM), held), 1))
    links.append((plain_link(output_block(model.output_bias, not tied, ctx), Label.LOSS), 1))
    if tied:
        links = _with_tied_gradient(links, ctx)
    if concurrent is not None:
        links = with_engine(links, concurrent)
    return compose(links)


def _beside(link: Link, held: int) -> Link:
    """A link whose forward pass runs while a variable holds so much."""
    return link._replace(forward_peak=link.forward_peak + held)


def _with_tied_gradient(links: list[tuple[Link, int]], ctx: BlockContext) -> list[tuple[Link, int]]:
    """The gradient of a tied weight as the output layer gives it waits for that of the embedding
    (``inventory/shared_weights.py``)."""
    dense = ctx.padded_vocab * ctx.hidden_size * ctx.act
    (embedding, _), *middle, last = links
    summed = embedding.retained + 2 * dense
    waiting = [(link.with_concurrent(dense), count) for link, count in middle]
    return [(embedding.with_concurrent(dense, summed), 1), *waiting, last]
