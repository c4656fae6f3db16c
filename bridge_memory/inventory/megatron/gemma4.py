"""Gemma 4 as Megatron Bridge implements it: norms in torch, norms after each block, per-layer embeddings.

Source: megatron-bridge 0.6.2 ``models/gemma/modeling_gemma4.py: Gemma4DenseTransformerLayer, Gemma4TransformerLayer,
Gemma4MoELayer, Gemma4TopKRouter``. h: hidden size, w: width of one layer's embedding, W: of all layers' embeddings.
"""

from __future__ import annotations

from bridge_memory.components import Part
from bridge_memory.inventory.megatron.attention import record_attention
from bridge_memory.inventory.megatron.mlp import record_mlp
from bridge_memory.inventory.megatron.moe import moe_layer
from bridge_memory.spec import AttentionSpec, LayerSpec, MLPSpec, MoESpec, divide
from bridge_memory.tapes.parameters import Use
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor


def record_gemma4_layer(r: Recorder, layer: LayerSpec, x: Tensor) -> Tensor:
    """[T_sp, h] -> [T_sp, h]."""
    assert isinstance(layer.mixer, AttentionSpec)
    if isinstance(layer.ffn, MoESpec):
        return _layer_with_experts(r, layer.mixer, layer.ffn, x)
    assert isinstance(layer.ffn, MLPSpec)
    return _dense_layer(r, layer, layer.mixer, layer.ffn, x)


def _dense_layer(r: Recorder, layer: LayerSpec, mixer: AttentionSpec, ffn: MLPSpec, x: Tensor) -> Tensor:
    """Four norms and local modules (``Gemma4DenseTransformerLayer``)."""
    ctx, tape = r.ctx, r.tape
    h, rows = ctx.hidden_size, ctx.tokens_sp
    r.torch_norms = True
    tape.part = Part.ATTENTION
    residual = x
    y = record_attention(r, mixer, x)
    normed = r.norm("post_self_attn_layernorm", y, h, rows)
    tape.keep_alive(y)
    x = r.bias_dropout_add("self_attn_bda", normed, residual, bias=False)
    tape.keep_alive(residual)
    tape.part = Part.MLP
    residual = x
    # ``mlp_norm_manager``, an attribute, holds it until the next forward pass (``transformer_layer.py:
    # TransformerLayer._forward_pre_mlp_layernorm``); a norm in torch does not save it.
    held = tape.make("residual held by the layer", x, 0, saves=(x,))
    held.grad_bytes = 0
    y = record_mlp(r, ffn, x)
    normed = r.norm("post_mlp_layernorm", y, h, rows)
    tape.keep_alive(y)
    x = r.bias_dropout_add("mlp_bda", normed, residual, bias=False)
    if layer.per_layer_width:
        x = _add_layer_embedding(r, layer, x)
    # Multiplied by a buffer, which is all that the product saves.
    return tape.make("scaled layer output", x, ctx.hidden_bytes)


def _add_layer_embedding(r: Recorder, layer: LayerSpec, x: Tensor) -> Tensor:
    """x + norm(projection(gelu(gate(x)) * the layer's embedding)); the linears are torch's, replicated on every rank.

    The layer's embedding is a view of all layers' embeddings, which the embedding block counts. Its gradient has the
    size of all of them (PyTorch ``select_backward``) and is added to the gradient from the layers after it.
    """
    ctx, tape = r.ctx, r.tape
    h, w, rows = ctx.hidden_size, layer.per_layer_width, ctx.tokens_sp
    own = tape.input("the layer's embedding", 0)
    own.grad_bytes = rows * w * ctx.act
    residual = x
    gate = r.plain_linear("per_layer_input_gate", x, rows, h, w)
    activated = tape.make("per-layer gate, activated", gate, gate.bytes, saves=(gate,))
    everything = tape.make(
        "view of the layers' embeddings", own, 0, backward_workspace=rows * layer.all_layers_width * ctx.act
    )
    everything.grad_bytes = rows * w * ctx.act
    gated = tape.make("gated embedding", (activated, everything), gate.bytes, saves=(activated,))
    y = r.plain_linear("per_layer_projection", gated, rows, w, h)
    normed = r.norm("post_per_layer_input_norm", y, h, rows)
    out = tape.make("output with the layer's embedding", (residual, normed), ctx.hidden_bytes, alias=True)
    tape.keep_alive(residual, normed)
    return out


def record_layer_embeddings(r: Recorder, width: int, layers: int, vocabulary: int, embedded: Tensor) -> Tensor:
    """The embeddings of all layers, [T_sp, W]: rows of a table plus a projection of the token embeddings
    (``_compute_per_layer_inputs``). ``width``: W."""
    ctx, tape = r.ctx, r.tape
    rows = divide(vocabulary, ctx.tp, "vocab_size_per_layer_input", "tensor_model_parallel_size")
    r.parameter("per_layer_embedding.weight", (rows, width), sharded=ctx.tp > 1, use=Use.EMBEDDING)
    whole, shard = ctx.tokens * width * ctx.act, ctx.tokens_sp * width * ctx.act
    ids = tape.tensor("ids of the layers' embeddings", 8 * ctx.tokens if ctx.tp > 1 else 0, grad=False)
    mask = tape.tensor("mask of the layers' embeddings", ctx.tokens if ctx.tp > 1 else 0, grad=False)
    weight = tape.tensor("weight of the layers' embeddings", 0)
    tape.op("masked ids of the layers' embeddings", (), (ids, mask, weight))
    # The table's gradient is dense.
    found = tape.make(
        "layers' embeddings", (ids, weight), 0 if ctx.tp > 1 else whole, saves=(ids,),
        backward_workspace=rows * width * ctx.act,
    )
    if ctx.tp > 1:
        found.grad_bytes = 0 if r.frozen else whole
        found = tape.make("masked layers' embeddings", (found, mask), whole, saves=(mask,))
    table = tape.make("scaled layers' embeddings", found, whole)
    if ctx.sp:
        table = tape.make("layers' embeddings of this rank", table, shard)
    projected = r.column_linear("per_layer_model_proj", embedded, ctx.hidden_size, width // ctx.tp)
    if ctx.tp > 1:
        projected = tape.make("projected embeddings gathered", projected, whole, workspace=whole)
    if ctx.sp:
        projected = tape.make("projected embeddings of this rank", projected, shard)
    scaled = tape.make("scaled projection", projected, shard)
    r.torch_norms = True
    normed = r.norm("per_layer_proj_norm", scaled, width // layers, ctx.tokens_sp * layers)
    r.torch_norms = False
    both = tape.make("sum of the layers' embeddings", (normed, table), shard, alias=True)
    tape.keep_alive(table, projected, scaled, normed)
    # Each layer's product saves its part of them.
    return tape.make("embeddings of all layers", both, shard, save_output=True)


def _layer_with_experts(r: Recorder, mixer: AttentionSpec, ffn: MoESpec, x: Tensor) -> Tensor:
    """Attention of Transformer Engine with a norm after linear_proj; three norms of the same residual, for the experts,
    the shared expert and the router, and one after each output and after their sum (``Gemma4TransformerLayer``)."""
    ctx, tape = r.ctx, r.tape
    h, rows = ctx.hidden_size, ctx.tokens_sp
    tape.part = Part.ATTENTION
    residual = x
    y = record_attention(r, mixer, x)
    y = r.norm("self_attention.linear_proj.post_layernorm", y, h, rows)
    x = r.bias_dropout_add("self_attn_bda", y, residual, bias=False)
    tape.keep_alive(residual)
    residual = x
    r.torch_norms = True
    tape.part = Part.MOE
    for_experts = r.norm("pre_mlp_layernorm", x, h, rows)
    for_shared = r.norm("pre_shared_expert_layernorm", x, h, rows)
    tape.landmark("router")
    inputs = (for_experts, for_shared, x)
    with tape.checkpoint("moe", inputs, enabled=ctx.recomputes("moe")):
        y = moe_layer(r, ffn, for_experts, shared_input=for_shared, router_input=x)
    normed = r.norm("post_ffn_layernorm", y, h, rows)
    both = tape.make("residual + experts", (residual, normed), ctx.hidden_bytes, alias=True)
    tape.keep_alive(*inputs, y, normed)
    return tape.make("scaled layer output", both, ctx.hidden_bytes)
