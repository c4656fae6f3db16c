"""Layers of Nemotron-H in transformers: a norm and one block, which is Mamba, attention, an MLP or experts.

Source: ``models/nemotron_h/modeling_nemotron_h.py: NemotronHBlock, NemotronHAttention, NemotronHMLP, NemotronHMoE``
(5.12). Shapes: T tokens of width h.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.components import Part
from bridge_memory.inventory.torch.attention import attend
from bridge_memory.inventory.torch.experts import last_saver as last_of_experts
from bridge_memory.inventory.torch.experts import record_moe
from bridge_memory.inventory.torch.mamba import record_mamba
from bridge_memory.inventory.torch.mlp import plain_mlp
from bridge_memory.inventory.torch.norms import norm
from bridge_memory.inventory.torch.ops import Array, Torch
from bridge_memory.spec import AttentionSpec, LayerSpec, MambaSpec, MLPSpec, MoESpec


def record_nemotron_layer(t: Torch, layer: LayerSpec, x: Array) -> Array:
    """``NemotronHBlock.forward``: [T, h] -> [T, h]."""
    ctx = t.r.ctx
    block: Any = layer.mixer or layer.ffn
    t.r.tape.part = part_of(block)
    y = norm(t, "norm", x, ctx.tokens, ctx.hidden_size)
    if isinstance(block, MambaSpec):
        done = record_mamba(t, block, y)
    elif isinstance(block, AttentionSpec):
        done = _attention(t, block, y)
    elif isinstance(block, MoESpec):
        done = record_moe(t, block, y)
    else:
        assert isinstance(block, MLPSpec)
        done = plain_mlp(t, "mixer", y, block.ffn_hidden_size, bias=block.add_bias)
    t.keep_alive(y)
    out = t.add("hidden states after the block", x, done)
    t.keep_alive(x, done, *t.returned)
    return out


def part_of(block: Any) -> Part:
    """The part of memory that a block belongs to."""
    kinds = {MambaSpec: Part.MAMBA, AttentionSpec: Part.ATTENTION, MoESpec: Part.MOE, MLPSpec: Part.MLP}
    return kinds[type(block)]


def last_saver(t: Torch, layer: LayerSpec) -> str:
    """The last operation of a layer that saves anything."""
    block = layer.mixer or layer.ffn
    if isinstance(block, MoESpec):
        return last_of_experts(t, block)
    if isinstance(block, MambaSpec):
        return "mixer.out_proj output"
    return "mixer.o_proj output" if isinstance(block, AttentionSpec) else "mixer.down_proj output"


def _attention(t: Torch, spec: AttentionSpec, x: Array) -> Array:
    """``NemotronHAttention.forward``: attention without position embeddings."""
    tokens, h, d = t.r.ctx.tokens, t.r.ctx.hidden_size, spec.kv_channels
    heads = (("q", spec.num_attention_heads), ("k", spec.num_query_groups), ("v", spec.num_query_groups))
    query, key, value = (t.linear(f"mixer.{name}_proj", x, tokens, h, n * d) for name, n in heads)
    if t.hf.spec.use_cache and not t.hf.spec.gradient_checkpointing:
        cached = t.copy("cached keys", key), t.copy("cached values", value)
        t.keep_alive(key, value)
        key, value = cached
    out = attend(t, spec, query, key, value)
    y = t.linear("mixer.o_proj", out, tokens, spec.num_attention_heads * d, h)
    t.keep_alive(x, query, key, value, out)
    return y
