"""Where gpt-oss differs from Llama: attention with a learned sink per head, and experts with biases and clamped gates.

Source: ``models/gpt_oss/modeling_gpt_oss.py``. Shapes: T tokens of width h; E experts of inner width f, k of them per
token; n = T k / E rows per expert (balanced routing).
"""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.torch.ops import Array, Torch
from bridge_memory.spec import MoESpec
from bridge_memory.tapes.parameters import Use
from bridge_memory.tapes.tape import Tensor

INT64 = 8


def rotated(t: Torch, name: str, x: Array, cos: Array, sin: Array) -> Array:
    """``_apply_rotary_emb``: tables are half as wide as a head; each half of the head is multiplied by both, and the
    results are concatenated."""
    first, second = t.split(f"{name}: halves", x, x.elements // 2, x.elements // 2)
    one = t.subtract(
        f"{name}: first half rotated", t.mul(f"{name}: first half times cos", first, cos),
        t.mul(f"{name}: second half times sin", second, sin),
    )
    other = t.add(
        f"{name}: second half rotated", t.mul(f"{name}: second half times cos", second, cos),
        t.mul(f"{name}: first half times sin", first, sin),
    )
    out = t.cat(f"rotated {name}", one, other)
    t.keep_alive(first, second)
    return out


def probabilities(t: Torch, masked: Array, rows: Any) -> tuple[Array, Array]:
    """``eager_attention_forward``: scores and sinks [rows, s + 1] minus the largest of each row, then a softmax in the
    same dtype. Returns (a view of the probabilities without the sinks', a variable that lives until the end)."""
    wide = masked.elements + rows
    combined = t.make("scores and sinks", (masked,), wide, masked.width, alias=True, trains=t.trains("sinks"))
    where = t.tape.tensor("indices of the largest scores", INT64 * rows, grad=False)
    largest = t.make("largest scores", (combined,), rows, combined.width, saves=(where,), also=(where,))
    less = t.subtract("scores less the largest", combined, largest, broadcast=True)
    t.keep_alive(masked, combined)
    whole = t.saves_output("attention probabilities and sinks'", less)
    return t.slice("attention probabilities", whole, masked.elements), less


def router(t: Torch, spec: MoESpec, x: Array, *, scattered: bool) -> tuple[Array, Tensor]:
    """``GptOssTopKRouter.forward``: (softmax of the largest k logits, their indices). ``scattered``: before 5 the
    softmax is scattered into zeros [T, E]."""
    ctx = t.r.ctx
    tokens, e, k = ctx.tokens, spec.num_experts, spec.topk
    logits = t.linear(
        "mlp.router", x, tokens, ctx.hidden_size, e, bias=True, use=Use.ROUTER, label="router logits"
    )
    chosen = t.tape.tensor("chosen experts", INT64 * tokens * k, grad=False)
    top = t.make("router logits of the chosen", (logits,), tokens * k, logits.width, saves=(chosen,), also=(chosen,))
    weights = t.saves_output("router weights", top)
    if scattered:
        weights = t.make("router scores", (weights,), tokens * e, weights.width, saves=(chosen,))
    t.keep_alive(logits)
    return weights, chosen


def gated(t: Torch, both: Array) -> tuple[Array, tuple[Array, ...]]:
    """``_apply_gate``: gates are every second column; both are clamped. Returns (quick GELU of the gate times the other
    plus one, variables that live until the end)."""
    half = both.elements // 2
    gate, up = (
        _clamped(t, f"experts' {name}", t.slice(f"experts' {name}, of both", both, half)) for name in ("gate", "up")
    )
    sigmoid = t.saves_output("sigmoid of the experts' gate", t.scale("experts' gate, scaled", gate))
    glu = t.mul("experts' gate, activated", gate, sigmoid)
    more = t.make("experts' up plus one", (up,), half, up.width, alias=True)
    return t.mul("experts' product", more, glu), (gate, up, glu)


def _clamped(t: Torch, name: str, x: Array) -> Array:
    """``clamp`` saves its input; backward makes a mask of one byte per element (``clamp_backward``)."""
    return t.make(f"{name}, clamped", (x,), x.elements, x.width, saves=(x.tensor,), backward_workspace=x.elements)


def with_bias(t: Torch, name: str, x: Array) -> Array:
    """A product plus a bias in the dtype of the parameters."""
    width = max(x.width, t.parameter_width)
    return t.make(name, (t.widened(x, width),), x.elements, width, alias=True, trains=t.trains(name))
