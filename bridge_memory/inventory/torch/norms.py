"""Norms of transformers' classes, computed in fp32 in models of any dtype.

Source: ``models/llama/modeling_llama.py: LlamaRMSNorm`` and, for other kinds, the class that ``Family.norm`` names.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.torch import liger
from bridge_memory.inventory.torch.ops import FP32, Array, Torch
from bridge_memory.tapes.tape import Tensor


def norm(t: Torch, name: str, x: Array, rows: Any, width: Any) -> Array:
    """[rows, width] -> [rows, width]."""
    kind = t.hf.family.norm
    if kind == "olmo":
        return _without_weights(t, name, x, rows)
    if kind == "layernorm":
        return layer_norm(t, name, x, rows, width)
    t.r.parameter(f"{name}.weight", (width,))
    if t.compiled:
        return fused_rms_norm(t, name, x, rows)
    if kind == "fused":
        return fused_rms_norm(t, name, x, rows)
    if t.hf.liger("rms_norm"):
        return liger.rms_norm(t, name, x, rows, width)
    normed = norm_before_weight(t, name, x, rows)
    if kind == "llama":
        narrow = t.cast(f"{name} normed", normed, x.width)
        out = t.mul_weight(f"{name} output", narrow, f"{name}.weight")
    else:
        scale: tuple[Tensor, ...] = ()
        if kind == "gemma" and normed.differentiable:
            scale = (t.constant(f"{name}: one plus weight in fp32", width, FP32).tensor,)
        wide = t.mul_weight(f"{name} times weight in fp32", normed, f"{name}.weight", width=FP32, also_keeps=scale)
        out = t.cast(f"{name} output", wide, x.width)
    t.keep_alive(x, normed if kind == "llama" else None)
    return out


def gated_norm(t: Torch, name: str, x: Array, gate: Array, rows: Any, width: Any) -> Array:
    """``models/qwen3_next/modeling_qwen3_next.py: Qwen3NextRMSNormGated``: Llama's norm times silu of the gate in fp32,
    [rows, width]."""
    t.r.parameter(f"{name}.weight", (width,))
    normed = norm_before_weight(t, name, x, rows)
    narrow = t.cast(f"{name} normed", normed, x.width)
    t.keep_alive(normed)
    weighted = t.mul_weight(f"{name} weighted", narrow, f"{name}.weight")
    act = t.activation(f"{name} activation of the gate", t.cast(f"{name} gate in fp32", gate, FP32))
    wide = t.mul(f"{name} gated in fp32", act, weighted)
    t.keep_alive(weighted)
    out = t.cast(f"{name} output", wide, x.width)
    t.keep_alive(x, wide, gate)
    return out


def fused_gated_norm(t: Torch, name: str, x: Array, gate: Array, rows: Any, width: Any) -> Array:
    """fla ``modules/fused_norm_gate.py: LayerNormGatedFunction``: saves its input, the gate and deviations in fp32."""
    t.r.parameter(f"{name}.weight", (width,))
    deviations = t.tape.tensor(f"{name} rstd", FP32 * rows, grad=False)
    return t.make(
        f"{name} output", (x, gate), x.elements, x.width, saves=(x.tensor, gate.tensor, deviations), also=(deviations,),
        trains=t.trains(f"{name}.weight"),
    )


def norm_before_weight(t: Torch, name: str, x: Array, rows: Any) -> Array:
    """x over its root mean square, in fp32."""
    x32 = t.cast(f"{name} input in fp32", x, FP32)
    variance = t.mean(f"{name} variance", t.square(f"{name} squares", x32), rows)
    deviation = t.rsqrt(f"{name} rstd", variance)
    return t.mul(f"{name} normed in fp32", x32, deviation, broadcast=True)


def _without_weights(t: Torch, name: str, x: Array, rows: Any) -> Array:
    """``models/olmo/modeling_olmo.py: OlmoLayerNorm``."""
    x32 = t.cast(f"{name} input in fp32", x, FP32)
    statistics = tuple(t.tape.tensor(f"{name} {what}", FP32 * rows, grad=False) for what in ("mean", "rstd"))
    wide = t.make(
        f"{name} normed in fp32", (x32,), x.elements, FP32, saves=(x32.tensor, *statistics), also=statistics,
    )
    out = t.cast(f"{name} output", wide, x.width)
    t.keep_alive(x)
    return out


def layer_norm(t: Torch, name: str, x: Array, rows: Any, width: Any) -> Array:
    """``nn.LayerNorm``: saves its input, and means and reciprocal deviations in fp32."""
    t.r.parameter(f"{name}.weight", (width,))
    t.r.parameter(f"{name}.bias", (width,))
    statistics = tuple(t.tape.tensor(f"{name} {what}", FP32 * rows, grad=False) for what in ("mean", "rstd"))
    return t.make(
        f"{name} output", (x,), x.elements, x.width, saves=(x.tensor, *statistics), also=statistics,
        trains=t.trains(f"{name}.weight"),
    )


def fused_rms_norm(t: Torch, name: str, x: Array, rows: Any) -> Array:
    """``nn.RMSNorm`` from torch 2.8 on: one kernel, which saves its input and reciprocal deviations in fp32
    (``tools/autograd/derivatives.yaml: _fused_rms_norm``)."""
    deviations = t.tape.tensor(f"{name} rstd", FP32 * rows, grad=False)
    return t.make(
        f"{name} output", (x,), x.elements, x.width, saves=(x.tensor, deviations), also=(deviations,),
        trains=t.trains(f"{name}.weight"),
    )
