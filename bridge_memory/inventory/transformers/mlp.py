"""Dense feed-forward blocks of transformers' classes, unfused: gate, up, activated gate and product are kept.

Source: ``models/llama/modeling_llama.py: LlamaMLP``.
"""

from __future__ import annotations

from bridge_memory.inventory.transformers.ops import Array, Torch
from bridge_memory.spec import MLPSpec


def record_mlp(t: Torch, spec: MLPSpec, x: Array) -> Array:
    """[T, h] -> [T, h]."""
    ctx = t.r.ctx
    h, f, rows = ctx.hidden_size, spec.ffn_hidden_size, ctx.tokens
    gate = t.linear("mlp.gate_proj", x, rows, h, f, bias=spec.add_bias)
    act = t.activation("mlp activation of the gate", gate)
    up = t.linear("mlp.up_proj", x, rows, h, f, bias=spec.add_bias)
    product = t.mul("mlp product", act, up)
    down = t.linear("mlp.down_proj", product, rows, f, h, bias=spec.add_bias)
    t.keep_alive(x)
    return down
