"""Layers of BLOOM in transformers: eager attention with ALiBi, layer norms with biases, BLOOM's GELU.

Source: ``models/bloom/modeling_bloom.py: BloomBlock, BloomAttention, BloomMLP, GeLUFunction``. Shapes: T tokens of
width h, a heads of width d, sequences of s tokens.
"""

from __future__ import annotations

from bridge_memory.components import Part
from bridge_memory.inventory.torch.norms import layer_norm
from bridge_memory.inventory.torch.ops import FP32, Array, Torch
from bridge_memory.spec import AttentionSpec, LayerSpec, MLPSpec

#: The last operation of a layer that saves anything.
LAST_SAVER = "mlp.dense_4h_to_h output"
LAST_SAVER_WITH_DROPOUT = "mlp dropout"


def record_bloom_layer(t: Torch, layer: LayerSpec, x: Array) -> Array:
    """``BloomBlock.forward``: [T, h] -> [T, h]; the layer returns the attention probabilities too."""
    ctx = t.r.ctx
    assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.ffn, MLPSpec)
    t.r.tape.part = Part.ATTENTION
    y = layer_norm(t, "input_layernorm", x, ctx.tokens, ctx.hidden_size)
    after = _attention(t, layer.mixer, y, x)
    t.keep_alive(y)
    t.r.tape.part = Part.MLP
    y = layer_norm(t, "post_attention_layernorm", after, ctx.tokens, ctx.hidden_size)
    out = _mlp(t, layer.ffn, y, after)
    t.keep_alive(x, after, y, *t.returned)
    return out


def _attention(t: Torch, spec: AttentionSpec, x: Array, residual: Array) -> Array:
    ctx = t.r.ctx
    tokens, h, a = ctx.tokens, ctx.hidden_size, spec.num_attention_heads
    width, scores = a * spec.kv_channels, ctx.tokens * ctx.seq * spec.num_attention_heads
    fused = t.linear("self_attention.query_key_value", x, tokens, h, 3 * width, bias=True)
    query, key, value = (t.slice(name, fused, tokens * width) for name in ("query", "key", "value"))
    if ctx.batch > 1:  # else views
        query, key, value = (t.copy(f"{x.tensor.name} by head", x) for x in (query, key, value))
    # ``alibi.baddbmm``: the gradients of the factors are scaled in new tensors.
    made = t.make(
        "attention scores", (query, key), scores, query.width,
        saves=(*((key.tensor,) if query.differentiable else ()), *((query.tensor,) if key.differentiable else ())),
        backward_workspace=query.bytes,
    )
    wide = t.widened(made, max(made.width, t.parameter_width))
    masked = t.make("masked scores", (wide,), scores, wide.width, alias=True)
    entering = t.cast("masked scores in fp32", masked, FP32)
    softmax = t.saves_output("attention probabilities in fp32", entering)
    narrow = t.cast("attention probabilities", softmax, query.width)
    probabilities = t.dropout("attention dropout", narrow, ctx.attention_dropout)
    t.keep_alive(narrow)
    by_head = t.matmul("attention output by head", probabilities, value, tokens * width)
    out = t.copy("attention output", by_head)
    t.keep_alive(by_head)
    y = t.linear("self_attention.dense", out, tokens, width, h, bias=True)
    summed = _dropout_add(t, "hidden states after attention", "attention output dropout", y, residual)
    t.keep_alive(x, fused, query, key, value, made, masked, probabilities, out, y)
    t.returned.append(probabilities)
    return summed


def _mlp(t: Torch, spec: MLPSpec, x: Array, residual: Array) -> Array:
    ctx = t.r.ctx
    tokens, h, f = ctx.tokens, ctx.hidden_size, spec.ffn_hidden_size
    wide = t.linear("mlp.dense_h_to_4h", x, tokens, h, f, bias=True)
    # GeLUFunction saves its input. Workspace: the most that its expressions hold at once, in addition to output or
    # gradient.
    act = t.make(
        "mlp activation", (wide,), wide.elements, wide.width, saves=(wide.tensor,), workspace=3 * wide.bytes,
        backward_workspace=4 * wide.bytes,
    )
    y = t.linear("mlp.dense_4h_to_h", act, tokens, f, h, bias=True)
    out = _dropout_add(t, "hidden states after the MLP", LAST_SAVER_WITH_DROPOUT, y, residual)
    t.keep_alive(act, y)
    return out


def _dropout_add(t: Torch, name: str, dropout: str, x: Array, residual: Array) -> Array:
    dropped = t.dropout(dropout, x, t.r.ctx.hidden_dropout)
    out = t.add(name, residual, dropped)
    t.keep_alive(dropped)
    return out
