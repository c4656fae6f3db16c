"""Norms of transformers' classes, computed in fp32 whatever the model's dtype.

Source: ``models/llama/modeling_llama.py: LlamaRMSNorm`` and, for other kinds, the class that ``Family.norm`` names.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.transformers.ops import FP32, Array, Torch


def norm(t: Torch, name: str, x: Array, rows: Any, width: Any) -> Array:
    """[rows, width] in, the same out."""
    kind = t.hf.family.norm
    t.r.parameter(f"{name}.weight", (width,))
    normed, x32 = _normed(t, name, x, rows)
    out = t.mul_weight(f"{name} output", t.cast(f"{name} normed", normed, x.width), f"{name}.weight", width)
    t.keep_alive(x, normed)
    assert kind == "llama"
    return out


def _normed(t: Torch, name: str, x: Array, rows: Any) -> tuple[Array, Array]:
    """x over its root mean square, in fp32; and x in fp32."""
    x32 = t.cast(f"{name} input in fp32", x, FP32)
    variance = t.mean(f"{name} variance", t.square(f"{name} squares", x32), rows)
    deviation = t.rsqrt(f"{name} rstd", variance)
    return t.mul(f"{name} normed in fp32", x32, deviation, broadcast=True), x32
