"""The dense feed-forward block.

Source: megatron-core ``transformer/mlp.py: MLP``, ``fusions/fused_bias_{swiglu,geglu,gelu}.py``. f is the local inner
width. A gated unit saves fc1's output, 2 f wide, and the activation, f wide, which is fc2's input.
"""

from __future__ import annotations

from bridge_memory.releases import GATES_CLAMPED
from bridge_memory.spec import MLPSpec, divide
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor


def record_mlp(r: Recorder, spec: MLPSpec, x: Tensor, *, normed: bool = False) -> Tensor:
    """From the residual stream [T_sp, h] to the output of linear_fc2 [T_sp, h], with the norm unless ``x`` is
    ``normed``."""
    ctx, tape = r.ctx, r.tape
    f = divide(spec.ffn_hidden_size, ctx.tp, "ffn_hidden_size", "tensor_model_parallel_size")
    recompute_norm = ctx.recomputes("layernorm") and not ctx.te
    later = tape.delaying
    if later:
        tape.delay("the MLP's weight gradients")
    entering, region = x, None
    if not ctx.te and not normed:
        with r.offload("mlp_norm"), tape.discardable("pre_mlp_layernorm", (x,), enabled=recompute_norm) as region:
            entering = r.hold(r.norm("pre_mlp_layernorm", x, ctx.hidden_size, ctx.tokens_sp))
    with tape.checkpoint("mlp", (entering,), enabled=ctx.recomputes("mlp")):
        y = dense_mlp(r, "mlp", entering, ctx.hidden_size, f, spec, fused_norm=ctx.te and not normed)
    if later:
        tape.delay_ends()
    if region is not None:
        tape.discard(region, entering)
    return y


def dense_mlp(
    r: Recorder, prefix: str, x: Tensor, width: int, f: int, spec: MLPSpec, *, fused_norm: bool = False,
    original: bool = False,
) -> Tensor:
    """fc1, activation, fc2 on this rank's tokens; ``f`` is local. ``original`` as in ``Recorder.linear_input``."""
    ctx = r.ctx
    fc1_width = 2 * f if spec.gated else f
    mid = r.column_linear(
        f"{prefix}.linear_fc1", x, width, fc1_width, bias=spec.add_bias, fused_norm=fused_norm,
        original=original,
    )
    act = activation(r, f"{prefix} activation", mid, ctx.tokens, f, gated=spec.gated, bias=spec.add_bias,
                     kind=spec.activation, clamped=spec.clamp_value is not None)
    return r.row_linear(f"{prefix}.linear_fc2", act, f, ctx.hidden_size, bias=spec.add_bias)


def halves(r: Recorder, name: str, x: Tensor, rows: int, f: int, *, clamped: bool) -> tuple[Tensor, Tensor]:
    """Gate and linear half of ``x``, [rows, 2 f]: views, or clamped copies. Clamping saves its input; backward makes a
    mask of one byte per element for each bound."""
    out = rows * f * r.ctx.act
    gate, linear = r.tape.views(f"{name} halves", x, (f"{name} gate half", out), (f"{name} linear half", out))
    if not clamped:
        return gate, linear
    return (
        r.tape.make(f"{name} gate half, clamped", gate, out, saves=(gate,), backward_workspace=rows * f),
        r.tape.make(f"{name} linear half, clamped", linear, out, saves=(linear,), backward_workspace=2 * rows * f),
    )


def activation(
    r: Recorder, name: str, x: Tensor, rows: int, f: int, *, gated: bool, bias: bool, kind: str, clamped: bool = False
) -> Tensor:
    """The elementwise unit between fc1 and fc2, [rows, f or 2 f] -> [rows, f].

    Fused: one kernel saves its input. Unfused: the sum with the bias (if any) is saved instead of fc1's output, and a
    gated unit saves the activated gate as well.
    """
    ctx, tape = r.ctx, r.tape
    out = rows * f * ctx.act
    # Operations of Transformer Engine's fuser are fused (``extensions/transformer_engine.py: TEFusedMLP``).
    fused = ctx.impl.bias_activation_fusion or (ctx.te and ctx.impl.use_transformer_engine_op_fuser)
    if fused and kind in ("silu", "gelu", "quick_gelu"):
        return tape.make(name, x, out, saves=(x,), workspace=0)
    if bias:
        x = tape.make(f"{name} input + bias", x, x.bytes, alias=True)
    if not gated:
        return tape.make(name, x, out, saves=(x,))
    clamped = clamped and GATES_CLAMPED(ctx.impl)
    gate, linear = halves(r, name, x, rows, f, clamped=clamped)
    variables = (x, linear) if clamped else (x,)
    gate = tape.make(f"{name} of the gate", gate, out, saves=(gate,))
    if GATES_CLAMPED(ctx.impl):
        linear = tape.make(f"{name} linear half + offset", linear, out, alias=True)
    product = tape.make(name, (gate, linear), out, saves=(gate, linear))
    tape.keep_alive(*variables)  # of ``glu``, and ``intermediate_parallel``, of which its inputs are views
    return product
