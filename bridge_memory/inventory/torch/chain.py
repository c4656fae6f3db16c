"""The whole model as one chunk: what its forward pass holds while a layer runs, and checkpoints.

Source: ``models/llama/modeling_llama.py: LlamaModel.forward, LlamaForCausalLM.forward``, ``modeling_layers.py:
GradientCheckpointingLayer``, ``masking_utils.py``.
"""

from __future__ import annotations

from bridge_memory.components import Part, Provenance
from bridge_memory.inventory.encoders.chain import returned_by_encoders, torch_encoder_links
from bridge_memory.inventory.torch.attention import needs_mask
from bridge_memory.inventory.torch.blocks import (
    embedding_block,
    final_norm_block,
    layer_block,
    output_block,
    scaled_embeddings,
)
from bridge_memory.inventory.torch.checkpoints import checkpointed
from bridge_memory.inventory.torch.ops import FP32
from bridge_memory.spec import AttentionSpec, LayerSpec, MLASpec, MLPSpec, ModelSpec, MoESpec
from bridge_memory.spec.adapters import in_any_layer, is_target
from bridge_memory.spec.layout import ChunkShape
from bridge_memory.tapes.alive import BlockCost
from bridge_memory.tapes.chain import ChunkInventory, EngineBytes, Label, Link, compose, plain_link, with_engine
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.parameters import matrix_elements
from bridge_memory.tapes.symbolic import largest

#: Layers: torchtune ``OffloadActivations(max_fwd_stash_size=)``, its default, which recipes do not change.
STASHED = 5


def torch_chunk(
    model: ModelSpec, shape: ChunkShape, ctx: BlockContext, concurrent: EngineBytes | None
) -> ChunkInventory:
    """Retained bytes and peaks of the model for one microbatch."""
    assert ctx.torch_layers is not None
    spec, family = ctx.torch_layers.spec, ctx.torch_layers.family
    tied = model.share_embeddings_and_output_weights
    masks = mask_bytes(model, ctx)
    embedding = plain_link(embedding_block(model, ctx), Label.EMBEDDING)
    own = family.own_masks or family.typed_masks
    if masks and (spec.gradient_checkpointing or (own and ctx.torch_layers.attention == "sdpa")):
        # The arguments of every checkpoint hold the masks, or attention saves them; not one that no layer takes.
        unused = masks - mask_bytes(model, ctx, taken=True) if spec.gradient_checkpointing else 0
        masks = masks - unused
        embedding = embedding.with_kept(masks, Part.ATTENTION)
        masks = unused
    links: list[tuple[Link, int]] = [(embedding, 1), *torch_encoder_links(ctx)]
    returned = returned_by_encoders(ctx)
    # ``inputs_embeds`` is a variable of the model's forward; scaled embeddings are a separate tensor.
    unscaled = ctx.hidden_bytes if scaled_embeddings(model, ctx) == "model" else 0
    if model.position_embedding_type == "learned_absolute":
        leaf = ctx.adapters is not None and spec.gradient_checkpointing  # the graph holds it
        unscaled = ctx.seq * ctx.hidden_size * ctx.act + (0 if leaf else ctx.hidden_bytes)  # of positions, and tokens
    idle = ctx.batch * ctx.seq * ctx.seq if family.idle_mask and ctx.torch_layers.attention == "sdpa" else 0
    layers = _layers(shape, ctx)
    if ctx.adapters is not None and not spec.gradient_checkpointing:
        # Embeddings are frozen: nothing before the first adapter is saved.
        for i, (kind, count) in enumerate(shape.layers):
            unreached = layer_block(kind, ctx, reached=False)
            link = plain_link(unreached, Label.LAYER)
            if unreached.cost.output_reached:  # it has an adapter
                layers[i : i + 1] = [(link, 1), (layers[i][0], count - 1)]
                break
            layers[i] = link, count
    # Autocast's copies of weights stay until the end of its region, in checkpointed layers too.
    cast = [_cast_weights(kind, ctx) if spec.gradient_checkpointing else 0 for kind, _ in shape.layers]
    cast += [0] * (len(layers) - len(cast))
    checkpointed = spec.gradient_checkpointing or spec.selective_ac_option == "op"
    kept = checkpointed or layer_block(shape.layers[0][0], ctx).cost.input_retained
    held = masks + idle + returned + (unscaled or (0 if kept else ctx.hidden_bytes))
    if spec.gradient_checkpointing:
        held += _returned(shape.layers[0][0], ctx)  # of the layer before
    for i, (link, count) in enumerate(layers):
        if i == 0:
            links.append((_with_variables(link, masks + idle + unscaled + returned), 1))
            held += cast[0]
            count -= 1
        for _ in range(count if cast[i] else bool(count)):
            links.append((_with_variables(link, held), 1 if cast[i] else count))
            held += cast[i]
    links.append((_with_variables(plain_link(final_norm_block(ctx), Label.FINAL_NORM), held), 1))
    loss = plain_link(output_block(model.output_bias, not tied, ctx), Label.LOSS)
    held = returned + sum(n * count for n, (_, count) in zip(cast, layers, strict=True))
    links.append((_with_variables(loss, held), 1))
    makes_logits = not (ctx.torch_layers.liger("fused_linear_cross_entropy") or spec.cut_cross_entropy)
    if ctx.torch_layers.clones_outputs and makes_logits:
        logits = ctx.tokens * ctx.padded_vocab * ctx.torch_layers.compute_width
        loss, _ = links[-1]
        links[-1] = loss._replace(forward_peak=largest(loss.forward_peak, loss.retained + 2 * logits)), 1
    if spec.keeps_outputs and makes_logits:
        width = FP32 if family.wide_logits else ctx.torch_layers.compute_width
        logits = ctx.tokens * ctx.padded_vocab * width
        links = [(link.with_waiting(logits), count) for link, count in links]
        loss, _ = links[-1]
        links[-1] = loss._replace(retained=loss.retained + logits, more=(((Part.LOSS, Provenance.FORMULA), logits),)), 1
    if tied and ctx.adapters is None:
        links = _with_tied_gradient(links, ctx)
    if concurrent is not None:
        links = with_engine(links, concurrent)
    return compose(links)


def _layers(shape: ChunkShape, ctx: BlockContext) -> list[tuple[Link, int]]:
    """The layers' links; one link per layer if every nth layer is recomputed (torchtitan
    ``distributed/activation_checkpoint.py: _apply_layer_sac``)."""
    assert ctx.torch_layers is not None
    option = ctx.torch_layers.spec.selective_ac_option
    if option is None or option == "op":
        return [(_layer_link(kind, ctx), count) for kind, count in shape.layers]
    kinds = [kind for kind, count in shape.layers for _ in range(count)]
    found = []
    for number, kind in enumerate(kinds, start=1):
        block = layer_block(kind, ctx)
        recomputed = number % int(option) == 0
        link = checkpointed(block.cost, 0, reentrant=False) if recomputed else plain_link(block, Label.LAYER)
        found.append((link, 1))
    return found


def _cast_weights(layer: LayerSpec, ctx: BlockContext) -> int:
    """Bytes of the copies of a layer's matrices in autocast's dtype."""
    assert ctx.torch_layers is not None
    if not ctx.torch_layers.autocast:
        return 0
    matrices = layer_block(layer, ctx).parameters.sums(((matrix_elements, 0),))
    return sum(n for (n,) in matrices) * ctx.torch_layers.compute_width


def mask_bytes(model: ModelSpec, ctx: BlockContext, *, taken: bool = False) -> int:
    """Bytes of the masks that the model's forward makes for all layers: [b, 1, s, s] boolean, or in the model's dtype
    for eager attention; one for each kind of layer (``masking_utils.py: sdpa_mask, eager_mask``). ``taken``: only of
    those that some layer takes."""
    assert ctx.torch_layers is not None
    if ctx.torch_layers.attention == "flash_attention_2":
        return 0
    windows = _windows(model)
    both = ctx.torch_layers.family.both_masks and not taken
    if both:
        windows = windows | {None}
    if ctx.torch_layers.attention == "eager":
        family = ctx.torch_layers.family  # families with two kinds of layers make both masks in any case
        if family.own_masks and family.eager == "gpt2":
            return ctx.batch * ctx.seq * ctx.act  # the causal mask is a buffer of the module
        kinds = 2 if both or (family.idle_mask and not taken) else len(windows)
        if family.own_attention and ctx.torch_layers.spec.attention_mask == "none":
            return kinds * ctx.seq * ctx.seq * ctx.act  # all sequences share it
        return kinds * ctx.batch * ctx.seq * ctx.seq * ctx.act
    if ctx.torch_layers.family.always_masked:
        windows = {None}
    made = [needs_mask(ctx.torch_layers, window, ctx.seq, packed=ctx.packed) for window in windows]
    if both and len(windows) == 1:  # that of sliding layers, which it has not; their window is taken to be long
        made.append(needs_mask(ctx.torch_layers, None, ctx.seq, packed=ctx.packed))
    typed = ctx.torch_layers.family.own_masks or ctx.torch_layers.family.typed_masks
    width = ctx.act if typed else 1
    return sum(made) * width * ctx.batch * ctx.seq * ctx.seq


def _windows(model: ModelSpec) -> set[int | None]:
    """The sliding windows of the model's attention layers; None: a layer attends to all tokens."""
    mixers = [kind.mixer for kind, _, _ in model.layer_runs]
    windows = {mixer.window_size for mixer in mixers if isinstance(mixer, AttentionSpec)}
    return windows | {None for mixer in mixers if isinstance(mixer, MLASpec)}


def _layer_link(layer: LayerSpec, ctx: BlockContext) -> Link:
    assert ctx.torch_layers is not None
    spec = ctx.torch_layers.spec
    found = layer_block(layer, ctx)
    if spec.selective_ac_option == "op":
        return _with_products_kept(layer, found.cost, ctx)
    if not spec.gradient_checkpointing:
        return plain_link(found, Label.LAYER)
    before = _gradients_before(layer, ctx)
    link = checkpointed(found.cost, before, reentrant=spec.reentrant)
    if spec.reentrant:  # recomputed, and held as the output is
        more = _returned(layer, ctx)
        peak = link.backward_peak + more
        link = link._replace(backward_peak=peak, backward_peak_held=peak)
    return _offloaded(link) if spec.enable_activation_offloading else link


def _offloaded(link: Link) -> Link:
    """A checkpoint whose input is offloaded to host memory (torchtune ``training/_activation_offloading.py:
    OffloadActivations``). In forward the inputs of the last five layers are still being copied
    (``max_fwd_stash_size``), this layer's included; in backward that of the next layer stays until this one's backward
    is queued (``bwd_tensor_stash``)."""
    kept = link.retained
    return link._replace(
        retained=0, more=(), forward_peak=link.forward_peak + (STASHED - 1) * kept,
        backward_peak=link.backward_peak + kept, backward_peak_held=link.backward_peak_held + kept,
    )


def _returned(layer: LayerSpec, ctx: BlockContext) -> int:
    """Bytes that a layer returns in addition to its output: in BLOOM the attention probabilities [b, a, s, s]."""
    assert ctx.torch_layers is not None
    if ctx.torch_layers.family.layer != "bloom" or not isinstance(layer.mixer, AttentionSpec):
        return 0
    return ctx.tokens * ctx.seq * layer.mixer.num_attention_heads * ctx.torch_layers.compute_width


def _with_products_kept(layer: LayerSpec, cost: BlockCost, ctx: BlockContext) -> Link:
    """torchtitan ``distributed/activation_checkpoint.py: _apply_op_sac``: forward saves the layer's input and the
    outputs of attention and of every second matrix product, which the recomputation reuses.

    Compiled, a product is saved only if backward needs it, which it does not of w2 (torch ``_functorch/partitioners.py:
    min_cut_rematerialization_partition``: MUST_SAVE only forbids its recomputation).
    """
    mixer, ffn = layer.mixer, layer.ffn
    assert isinstance(mixer, AttentionSpec) and isinstance(ffn, MLPSpec) and ctx.torch_layers is not None
    heads, h, width = mixer.num_attention_heads, ctx.hidden_size, ctx.act
    # Of the seven products, in the order in which they run: wq, wv, w1 and w2; and attention's output and statistics.
    products = heads * mixer.kv_channels + mixer.num_query_groups * mixer.value_channels + ffn.ffn_hidden_size
    products += 0 if ctx.torch_layers.compiled else h
    kept = ctx.tokens * ((products + heads * mixer.value_channels) * width + 4 * heads)
    link = checkpointed(cost, 0, reentrant=False)
    return link._replace(
        retained=link.retained + kept, forward_peak=link.forward_peak + kept,
        more=(*link.more, ((Part.ATTENTION, Provenance.FORMULA), kept)),
    )


def _gradients_before(layer: LayerSpec, ctx: BlockContext) -> int:
    """Bytes of gradients that a layer's backward makes before it needs the first saved tensor, and so before a
    checkpoint recomputes: of the last linear's output, and of its adapter's output in the adapter's dtype; of experts,
    of the output's row for every token and expert."""
    assert ctx.torch_layers is not None
    hf = ctx.torch_layers
    ffn = layer.ffn
    if isinstance(ffn, MoESpec) and hf.grouped_experts and not ffn.shared_expert_intermediate_size:
        return ctx.tokens * ffn.topk * ctx.hidden_size * ctx.act  # ``sum(dim=1)``: one for each of the k rows
    if ctx.adapters is None or hf.family.norms[-1] or not isinstance(layer.ffn, MLPSpec):
        return 0
    if not is_target(in_any_layer(ctx.adapters), "down_proj", "model.layers.0.mlp.down_proj"):
        return 0
    wide = hf.adapter_width
    return ctx.tokens * ctx.hidden_size * (wide + (ctx.act if wide != ctx.act else 0))


def _with_variables(link: Link, held: int) -> Link:
    """The link with ``held`` bytes more in its forward pass, which a variable of the model's forward holds."""
    return link._replace(forward_peak=link.forward_peak + held)


def _with_tied_gradient(links: list[tuple[Link, int]], ctx: BlockContext) -> list[tuple[Link, int]]:
    """The output layer's gradient of a tied weight waits for the embedding's. Autograd adds them in a third tensor if
    the first is a view (``inventory/shared_weights.py``), which the gradient through autocast's copy of a weight is
    not. Engines count none of the three."""
    dense = ctx.padded_vocab * ctx.hidden_size * ctx.act
    (embedding, _), *middle, last = links
    assert ctx.torch_layers is not None
    hf = ctx.torch_layers
    whole = hf.plain_gradients or hf.autocast or hf.spec.num_output_chunks > 1
    summed = embedding.retained + embedding.waiting + (2 if whole else 3) * dense
    waiting = [(link.with_waiting(dense), count) for link, count in middle]
    # By the time an engine reduces the sum, the output layer's gradient is part of it.
    return [(embedding.with_concurrent(dense, summed), 1), *waiting, last]
