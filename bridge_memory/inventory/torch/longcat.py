"""Layers of LongCat-Flash in transformers: two attentions and two MLPs in a row, and experts beside the first MLP whose
output is added at the end of the layer.

Source: ``models/longcat_flash/modeling_longcat_flash.py: LongcatFlashDecoderLayer`` (4.57, 5.12). Shapes: T tokens of
width h.
"""

from __future__ import annotations

from bridge_memory.components import Part
from bridge_memory.inventory.torch.attention import Shared
from bridge_memory.inventory.torch.experts import record_moe
from bridge_memory.inventory.torch.mla import record_mla
from bridge_memory.inventory.torch.mlp import gated_mlp
from bridge_memory.inventory.torch.norms import norm
from bridge_memory.inventory.torch.ops import Array, Torch
from bridge_memory.spec import LayerSpec, MLASpec, MoESpec

#: The last operation of a layer that saves anything.
LAST_SAVER = "mlps.1.down_proj output"


def record_longcat_layer(t: Torch, layer: LayerSpec, x: Array, shared: Shared) -> Array:
    """``LongcatFlashDecoderLayer.forward``: [T, h] -> [T, h]."""
    ctx, mixer, ffn = t.r.ctx, layer.mixer, layer.ffn
    assert isinstance(mixer, MLASpec) and isinstance(ffn, MoESpec)
    tokens, h = ctx.tokens, ctx.hidden_size
    shortcut: Array | None = None
    for i in (0, 1):
        t.r.tape.part = Part.MLA
        entered = norm(t, f"input_layernorm.{i}", x, tokens, h)
        y = record_mla(t, mixer, entered, shared, f"self_attn.{i}")
        t.keep_alive(entered)
        x, before = t.add(f"hidden states after attention {i}", x, y), x
        t.keep_alive(before, y)
        entered = norm(t, f"post_attention_layernorm.{i}", x, tokens, h)
        if shortcut is None:
            t.r.tape.part = Part.MOE
            shortcut = record_moe(t, ffn, _view(t, entered))
        t.r.tape.part = Part.MLP
        y = gated_mlp(t, f"mlps.{i}", entered, tokens, h, ffn.shortcut_ffn_hidden_size)
        t.keep_alive(entered, *t.returned)
        x, before = t.add(f"hidden states after MLP {i}", x, y), x
        t.keep_alive(before, y)
    assert shortcut is not None
    out = t.add("hidden states and the experts' output", shortcut, x)
    t.keep_alive(before, y, x, shortcut)
    return out


def _view(t: Torch, x: Array) -> Array:
    """``hidden_states.view(-1, h)``: gradients of router and experts are summed before the MLP's is added."""
    view = t.tape.tensor("hidden states of the experts", 0, grad_bytes=x.bytes * x.differentiable)
    view.whole = x.tensor.whole or x.tensor
    t.tape.op("hidden states of the experts", (x.tensor,), view, alias=True)
    return Array(view, x.elements, x.width)
