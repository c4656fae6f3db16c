"""Layers of GPT-2 (and GPT-3) in transformers: layer norms with biases, one projection for q, k and v, learned
positions, dropout.

Source: ``models/gpt2/modeling_gpt2.py: GPT2Block, GPT2Attention, GPT2MLP``, ``pytorch_utils.py: Conv1D``,
``activations.py: NewGELUActivation``. Shapes: T tokens of width h.
"""

from __future__ import annotations

from bridge_memory.components import Part
from bridge_memory.inventory.torch.attention import attend
from bridge_memory.inventory.torch.norms import layer_norm
from bridge_memory.inventory.torch.ops import Array, Torch
from bridge_memory.spec import AttentionSpec, LayerSpec, MLPSpec


def record_gpt2_layer(t: Torch, layer: LayerSpec, x: Array) -> Array:
    """``GPT2Block.forward``: [T, h] -> [T, h]; variables hold the outputs of attention and MLP until it returns."""
    ctx = t.r.ctx
    assert isinstance(layer.mixer, AttentionSpec) and isinstance(layer.ffn, MLPSpec)
    t.r.tape.part = Part.ATTENTION
    y = layer_norm(t, "ln_1", x, ctx.tokens, ctx.hidden_size)
    attention = _attention(t, layer.mixer, y)
    t.keep_alive(y)
    after = t.add("hidden states after attention", attention, x)
    t.r.tape.part = Part.MLP
    y = layer_norm(t, "ln_2", after, ctx.tokens, ctx.hidden_size)
    fed = _mlp(t, layer.ffn, y)
    t.keep_alive(y)
    out = t.add("hidden states after the MLP", after, fed)
    t.keep_alive(x, after, attention, fed, *t.returned)
    return out


def last_saver(t: Torch) -> str:
    """The last operation of a layer that saves anything."""
    return "mlp dropout" if t.r.ctx.hidden_dropout else "mlp.c_proj output"


def _attention(t: Torch, spec: AttentionSpec, x: Array) -> Array:
    ctx = t.r.ctx
    tokens, h, heads = ctx.tokens, ctx.hidden_size, spec.num_attention_heads * spec.kv_channels
    joined = t.linear("attn.c_attn", x, tokens, h, 3 * heads, bias=True, transposed=True)
    query, key, value = t.split("queries, keys and values", joined, *[tokens * heads] * 3)
    out = attend(t, spec, query, key, value)
    y = t.linear("attn.c_proj", out, tokens, heads, h, bias=True, transposed=True)
    t.keep_alive(out)
    done = t.dropout("attn dropout", y, ctx.hidden_dropout)
    t.keep_alive(x, query, key, value, y)
    return done


def _mlp(t: Torch, spec: MLPSpec, x: Array) -> Array:
    ctx = t.r.ctx
    tokens, h, f = ctx.tokens, ctx.hidden_size, spec.ffn_hidden_size
    wide = t.linear("mlp.c_fc", x, tokens, h, f, bias=True, transposed=True)
    act = gelu_new(t, wide) if spec.activation == "gelu" else t.activation("mlp activation", wide)
    t.keep_alive(wide)
    y = t.linear("mlp.c_proj", act, tokens, f, h, bias=True, transposed=True)
    t.keep_alive(act)
    done = t.dropout("mlp dropout", y, ctx.hidden_dropout)
    t.keep_alive(y)
    return done


def gelu_new(t: Torch, x: Array) -> Array:
    """0.5 x (1 + tanh(c (x + 0.044715 x**3))), one torch operation after another; under autocast the power is in fp32.
    """
    half = t.scale("mlp activation: half of x", x)
    cube = t.square("mlp activation: x cubed", t.precise("mlp activation: x in fp32", x))
    inner = t.add("mlp activation: sum", x, t.scale("mlp activation: x cubed, scaled", cube))
    tanh = t.saves_output("mlp activation: tanh", t.scale("mlp activation: sum, scaled", inner))
    more = t.make("mlp activation: one more", (tanh,), tanh.elements, tanh.width, alias=True)
    return t.mul("mlp activation", half, more)
