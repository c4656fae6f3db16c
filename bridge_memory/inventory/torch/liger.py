"""Kernels of liger-kernel that replace operations of transformers' classes, each one autograd function.

Source: liger-kernel 0.8.5 (with transformers 4: 0.6.4) ``ops/{rms_norm,swiglu,geglu,rope,cross_entropy,
fused_linear_cross_entropy}.py``, ``transformers/monkey_patch.py``. They save less than the classes do, and most
gradients are written over saved tensors or over the output's gradient.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.cards.rows import MULTIPROCESSORS
from bridge_memory.inventory.torch.ops import FP32, Array, Torch
from bridge_memory.releases import LIGER_ACCUMULATES_IN_PLACE as ACCUMULATES_IN_PLACE
from bridge_memory.tapes.symbolic import largest

INT64 = 8
GATED = ("swiglu", "geglu")


def rms_norm(t: Torch, name: str, x: Array, rows: Any, width: Any) -> Array:
    """``LigerRMSNormFunction``: saves its input and reciprocal deviations in fp32. The weight's gradient is the sum of
    one fp32 row per multiprocessor."""
    trains = t.trains(f"{name}.weight")
    deviations = t.tape.tensor(f"{name} rstd", FP32 * rows, grad=False)
    sums = FP32 * width * MULTIPROCESSORS[t.r.ctx.impl.gpu_arch] if trains else 0
    out = t.make(
        f"{name} output", (x,), x.elements, x.width, saves=(x.tensor, deviations), also=(deviations,), trains=trains,
        alias=t.hf.family.liger_norm_in_place, backward_workspace=sums,
    )
    t.keep_alive(x)
    return out


def gated_product(t: Torch, name: str, gate: Array, up: Array, *, halves: bool = False) -> Array:
    """``LigerSiLUMulFunction``, ``LigerGELUMulFunction``: save gate and up, which their gradients overwrite. If these
    are ``halves`` of one output they are copied first (``ensure_contiguous``)."""
    kept = gate.tensor, up.tensor
    if halves:
        kept = tuple(  # type: ignore[assignment]
            t.tape.tensor(f"{name}: {what}", part.bytes, grad=False) for what, part in (("gate", gate), ("up", up))
        )
    return t.make(
        name, (gate, up), gate.elements, gate.width, saves=kept, also=kept if halves else (),
        in_place=gate.differentiable + up.differentiable,
    )


def rotated(t: Torch, name: str, x: Array) -> Array:
    """``LigerRopeFunction``: in place on [b, s, heads, d]; slices of a fused projection are copied."""
    return t.copy(f"{name}, contiguous", x) if t.hf.family.fused_qkv else x


def fused_loss(t: Torch, x: Array) -> Array:
    """``LigerFusedLinearCrossEntropyFunction``: logits of one chunk of tokens at a time, in one buffer; gradients of
    the input and of the weight are made in forward and saved."""
    ctx = t.r.ctx
    tokens, h, v = ctx.tokens, ctx.hidden_size, ctx.padded_vocab
    trains = t.trains("lm_head.weight")
    kept = [t.tape.tensor("gradient of the normed hidden states", x.bytes, grad=False)]
    inputs = [x]
    if trains:
        kept.append(t.tape.tensor("gradient of the output layer's weight", v * h * t.parameter_width, grad=False))
        if t.hf.gradients_stay:
            inputs.append(t.waiting("lm_head.weight", v * h))
    # A padded copy of the labels, the shifted labels, the mask of labels that count, and the losses.
    chunk = chunk_of_tokens(tokens, v, h)
    workspace = chunk * v * t.compute_width + (2 * INT64 + 1 + FP32) * tokens
    if not ACCUMULATES_IN_PLACE(t.hf.spec):
        product, wide = chunk * h * t.compute_width, FP32 if t.compute_width != FP32 else 0
        workspace = workspace + (largest(product, v * h * (t.compute_width + wide)) if trains else product)
    if t.hf.autocast:
        workspace = workspace + v * h * t.compute_width
    loss = t.make(
        "loss", inputs, 1, FP32, saves=kept, also=kept, workspace=workspace, trains=trains, in_place=len(inputs)
    )
    t.keep_alive(x)
    return loss


def chunk_of_tokens(tokens: Any, v: Any, h: Any) -> Any:
    """``fused_linear_cross_entropy_forward``: tokens / (V / h), rounded up to a power of two, so that the logits of a
    chunk are about as large as all hidden states."""
    parts = (v + h - 1) // h
    rows = (tokens + parts - 1) // parts
    chunk = 1
    while chunk < rows:
        chunk *= 2
    return tokens if tokens < chunk else chunk


def loss_of(t: Torch, wide: Array, targets: Array) -> Array:
    """``LigerCrossEntropyFunction``: forward overwrites the fp32 logits with their gradient."""
    losses = FP32 * t.r.ctx.tokens
    return t.make("loss", (wide,), 1, FP32, saves=(wide.tensor,), in_place=1, workspace=losses + targets.elements)
