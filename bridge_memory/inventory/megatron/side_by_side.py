"""Falcon-H1: a Mamba mixer and attention over one norm's output, then an MLP, on residuals in fp32.

Source: megatron-bridge 0.6.2 ``models/falcon_h1/modeling_falconh1/falconh1_layer.py: FalconH1Layer, FalconH1MambaMixer,
FalconH1SelfAttention, FalconH1MLP``; its linears are Transformer Engine's. Inputs and outputs are multiplied by
constants; each product is a new tensor.
"""

from __future__ import annotations

from bridge_memory.components import Part
from bridge_memory.inventory.megatron.attention import record_attention
from bridge_memory.inventory.megatron.ssm import record_mamba
from bridge_memory.spec import MLPSpec, SideBySideSpec, divide
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor


def record_side_by_side(r: Recorder, spec: SideBySideSpec, ffn: MLPSpec | None, x: Tensor) -> Tensor:
    """[T_sp, h] in fp32 -> [T_sp, h] in fp32."""
    ctx, tape = r.ctx, r.tape
    size = ctx.tokens_sp * ctx.hidden_size * ctx.act
    tape.part = Part.MAMBA
    residual = x
    low = tape.make("hidden states, cast", x, size)
    normed = r.norm("norm", low, ctx.hidden_size, ctx.tokens_sp)
    entering = tape.make("scaled Mamba input", normed, size)
    mamba = record_mamba(r, spec.mamba, entering, name="mamba_mixer", normed=True, scaled=spec.scaled)
    mamba = tape.make("scaled Mamba output", mamba, size)
    tape.part = Part.ATTENTION
    entering = tape.make("scaled attention input", normed, size)
    attention = record_attention(r, spec.attention, entering, normed=True, scaled_key=spec.scaled)
    attention = tape.make("scaled attention output", attention, size)
    first = tape.make("sum of one mixer", mamba, size, alias=True)
    both = tape.make("sum of both mixers", (first, attention), size, alias=True)
    tape.keep_alive(mamba, attention, normed)
    x = r.bias_dropout_add("falconh1_bda", both, residual, bias=False)
    # Variables of ``FalconH1Layer.forward`` until it returns.
    variables = (residual, mamba, attention, both)
    if ffn is not None:
        tape.part = Part.MLP
        after, low = x, tape.make("mixers' output, cast", x, size)
        y = _mlp(r, ffn, low)
        x = r.bias_dropout_add("mlp_bda", y, after, bias=False)
        tape.keep_alive(after, low, y)
    tape.keep_alive(*variables)
    return x


def _mlp(r: Recorder, ffn: MLPSpec, x: Tensor) -> Tensor:
    """The MLP, unfused since gate and output are multiplied by constants (``FalconH1MLP.forward``)."""
    ctx, tape = r.ctx, r.tape
    f = divide(ffn.ffn_hidden_size, ctx.tp, "ffn_hidden_size", "tensor_model_parallel_size")
    out = ctx.tokens * f * ctx.act
    mid = r.column_linear("mlp.linear_fc1", x, ctx.hidden_size, 2 * f if ffn.gated else f, fused_norm=True)
    if ffn.gated:
        gate, linear = tape.views("halves of the MLP", mid, ("gate half", out), ("linear half", out))
        scaled = tape.make("scaled gate of the MLP", gate, out)
        activated = tape.make("activated gate of the MLP", scaled, out, saves=(scaled,))
        moved = tape.make("linear half with its offset", linear, out, alias=True)
        product = tape.make("product of the halves", (activated, moved), out, saves=(activated, moved))
    else:
        gate = linear = mid
        product = tape.make("activation of the MLP", mid, out, saves=(mid,))
    y = r.row_linear("mlp.linear_fc2", product, f, ctx.hidden_size)
    scaled_output = tape.make("scaled MLP output", y, ctx.tokens_sp * ctx.hidden_size * ctx.act)
    tape.keep_alive(mid, gate, linear, product)  # variables of the function
    return scaled_output
