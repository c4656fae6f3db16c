"""Linears whose weight is frozen, and their LoRA adapters.

A frozen linear saves nothing of its input, which only its weight's gradient would need. Norms, activations and
attention save what they always do: gradients pass through them. An adapter saves its input and the r features between
its two linears; its output is scaled and added to that of the linear, three tensors of one size at a time.

Source: TE ``module/{linear,layernorm_linear,grouped_linear}.py``, megatron-core ``tensor_parallel/layers.py:
linear_with_frozen_weight``, Megatron Bridge ``peft/lora_layers.py: LoRALinear``, ``peft/utils.py:
ParallelLinearAdapter``. Shapes: T tokens, T_sp under sequence parallelism; r the adapter's rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge_memory.spec.adapters import divide_features, split_rank
from bridge_memory.tapes.tape import Tensor

if TYPE_CHECKING:
    from bridge_memory.tapes.recorder import Recorder


def column_linear(
    r: Recorder, name: str, x: Tensor, in_features: Any, out_features: Any, *, fused_norm: bool, gather: bool,
    label: str,
) -> Tensor:  # fmt: skip
    """``Recorder.column_linear`` of a frozen weight, with its adapter: [T_sp, in] -> [T, out / t]."""
    ctx, tape = r.ctx, r.tape
    sp = ctx.sp and gather
    shard, whole = (tokens * in_features * ctx.act for tokens in (ctx.tokens_sp, ctx.tokens))
    kept, entering = ctx.tokens_sp * in_features, ctx.tokens * in_features
    out_bytes = ctx.tokens * out_features * ctx.act
    backward = r.quantized_gradient(ctx.tokens * out_features)
    adapted = r.adapts(name)
    if fused_norm:
        stats = r.norm_statistics(name, ctx.tokens_sp)
        if not adapted:
            return tape.make(
                name, x, out_bytes, saves=(x, *stats), also=stats,
                workspace=(r.fp8_bytes(kept) if r.fp8 else shard) + (r.gathered(entering) if sp else 0),
                backward_workspace=backward + shard + (whole if sp else 0), label=label,
            )
        # The linear returns the norm's output, gathered, for the adapter, and saves its own copy of it
        # (``get_adapter_attributes_from_linear``: return_layernorm_output, return_layernorm_output_gathered).
        source = tape.tensor(f"{name} norm output" + (", gathered" if sp else ""), whole)
        own = source
        if r.fp8:
            own = tape.tensor(f"{name} norm output in fp8", r.fp8_bytes(kept), grad=False)
        elif sp:
            own = tape.tensor(f"{name} norm output", shard, grad=False)
        out = tape.make(
            name, x, out_bytes, saves=(x, own, *stats), also=tuple(dict.fromkeys((source, own, *stats))),
            workspace=r.fp8_bytes(entering) if r.fp8 and sp else 0,
            backward_workspace=backward + shard + (whole if sp else 0), label=label,
        )
        return _add_column_adapter(r, name, source, out, ctx.tokens, in_features, out_features)
    if sp and not ctx.te:
        gathered = tape.make(f"{name} gathered input", x, whole)
        out = tape.make(label, gathered, out_bytes)
    else:
        out = tape.make(
            label, x, out_bytes,
            workspace=(r.fp8_bytes(kept) if r.fp8 else 0) + (r.gathered(entering) if sp else 0),
            backward_workspace=backward + (whole if sp else 0),
        )
    if not adapted:
        return out
    if sp:
        x = tape.make(f"{name}.adapter gathered input", x, whole)
    return _add_column_adapter(r, name, x, out, ctx.tokens, in_features, out_features)


def row_linear(r: Recorder, name: str, x: Tensor, in_features: Any, out_features: Any, *, label: str) -> Tensor:
    """``Recorder.row_linear`` of a frozen weight, with its adapter: [T, in / t] -> [T_sp, out]."""
    ctx, tape = r.ctx, r.tape
    whole, part = (tokens * out_features * ctx.act for tokens in (ctx.tokens, ctx.tokens_sp))
    if ctx.sp and not ctx.te:
        partial = tape.make(f"{name} partial output", x, whole)
        out = tape.make(label, partial, part)
    else:
        backward = r.quantized_gradient(ctx.tokens * out_features)
        out = tape.make(
            label, x, part,
            workspace=(r.fp8_bytes(ctx.tokens * in_features) if r.fp8 else 0) + (whole if ctx.sp else 0),
            backward_workspace=backward + (whole if ctx.sp and not r.fp8 else 0),
        )
    if not r.adapts(name):
        return out
    return _add_row_adapter(r, name, x, out, ctx.tokens, in_features, out_features, scattered=ctx.sp)


def plain_linear(r: Recorder, name: str, x: Tensor, rows: Any, in_features: Any, out_features: Any) -> Tensor:
    """``Recorder.plain_linear`` of a frozen weight, with its adapter, whose output is sharded and then gathered."""
    ctx, tape = r.ctx, r.tape
    out = tape.make(
        f"{name} output", x, rows * out_features * ctx.act,
        workspace=r.fp8_bytes(rows * in_features) if r.fp8 else 0,
        backward_workspace=r.quantized_gradient(rows * out_features),
    )
    if not r.adapts(name):
        return out
    return _sum(r, name, x, out, _replicated_adapter(r, name, x, rows, in_features, out_features))


def router_logits(r: Recorder, x: Tensor, logits: Tensor, rows: Any, experts: Any) -> Tensor:
    """The router's logits [rows, E] with those of its adapter, in the router's dtype (``LoRATopKRouter.forward``)."""
    name, tape = "mlp.router", r.tape
    if not r.adapts(name):
        return logits
    wide = _replicated_adapter(r, name, x, rows, r.ctx.hidden_size, experts)
    scaled = tape.make(f"{name}.adapter output scaled", wide, rows * experts * r.ctx.act)
    term = scaled
    if r.ctx.impl.moe_router_dtype not in (None, r.ctx.params_dtype):
        term = tape.make(f"{name}.adapter output, cast", scaled, logits.bytes)
    total = tape.make("router logits + adapter", (logits, term), logits.bytes, alias=True)
    tape.keep_alive(scaled, logits)
    return total


def expert_linear(
    r: Recorder, name: str, x: Tensor, rows: Any, in_features: Any, out_features: Any, *, row: bool = False, label: str,
) -> Tensor:  # fmt: skip
    """A grouped linear over the rows of all experts of a rank, with the one adapter that they share; ``row``: fc2."""
    ctx, tape = r.ctx, r.tape
    out = tape.make(
        label, x, rows * out_features * ctx.act, workspace=r.fp8_bytes(rows * in_features) if r.fp8 else 0,
        backward_workspace=r.quantized_gradient(rows * out_features),
    )
    if not r.adapts(name):
        return out
    if row:
        return _add_row_adapter(r, name, x, out, rows, in_features, out_features, scattered=False, experts=True)
    return _add_column_adapter(r, name, x, out, rows, in_features, out_features, experts=True)


# ---- adapters ----


def _add_column_adapter(
    r: Recorder, name: str, x: Tensor, out: Tensor, rows: Any, in_features: Any, out_features: Any, *,
    experts: bool = False,
) -> Tensor:  # fmt: skip
    low = _linear_in(r, name, x, rows, in_features, r.ctx.etp if experts else r.ctx.tp, experts=experts)
    return _sum(r, name, x, out, _linear_out(r, name, low, rows, out_features))


def _add_row_adapter(
    r: Recorder, name: str, x: Tensor, out: Tensor, rows: Any, in_features: Any, out_features: Any, *,
    scattered: bool, experts: bool = False,
) -> Tensor:  # fmt: skip
    """The adapter of a row-parallel linear: linear_in is row-parallel; linear_out's output is sharded and gathered, and
    under sequence parallelism each rank takes its tokens."""
    ctx, tape = r.ctx, r.tape
    ranks = ctx.etp if experts else ctx.tp
    local = divide_features("hidden_size", out_features, ranks, experts=experts)
    low = _linear_in(r, name, x, rows, in_features, 1)
    wide = _linear_out(r, name, low, rows, local)
    if ranks > 1:
        whole = rows * out_features * ctx.act
        wide = tape.make(f"{name}.adapter output gathered", wide, whole, workspace=whole)
        if scattered:
            (wide,) = tape.views(f"{name}.adapter output scattered", wide, (f"{name}.adapter output", out.bytes))
    return _sum(r, name, x, out, wide)


def _replicated_adapter(r: Recorder, name: str, x: Tensor, rows: Any, in_features: Any, out_features: Any) -> Tensor:
    """The adapter of a replicated weight: its output is sharded and then gathered."""
    ctx = r.ctx
    local = divide_features(name, out_features, ctx.tp, experts=False)
    wide = _linear_out(r, name, _linear_in(r, name, x, rows, in_features, ctx.tp), rows, local)
    if ctx.tp == 1:
        return wide
    whole = rows * out_features * ctx.act
    return r.tape.make(f"{name}.adapter output gathered", wide, whole, workspace=whole)


def _linear_in(
    r: Recorder, name: str, x: Tensor, rows: Any, in_features: Any, ranks: Any, *, experts: bool = False
) -> Tensor:
    """[rows, in] -> [rows, r], gathered if ``ranks`` > 1 shard it. Backward makes a gradient of the input even where
    that has none (``LinearWithGradAccumulationAndAsyncCommunication.backward``)."""
    ctx, tape, dim = r.ctx, r.tape, r.rank
    local = split_rank(dim, ranks, experts=experts)
    dropped = 0 if x.has_gradient else rows * in_features * ctx.act
    low = tape.make(
        f"{name}.adapter.linear_in output", x, rows * local * ctx.act, saves=(x,), trains=True,
        backward_workspace=dropped + r.weight_grad((local, in_features), te=False, trains=True),
    )
    if ranks > 1:
        whole = rows * dim * ctx.act
        low = tape.make(f"{name}.adapter.linear_in output gathered", low, whole, workspace=whole)
    return low


def _linear_out(r: Recorder, name: str, low: Tensor, rows: Any, out_features: Any) -> Tensor:
    return r.tape.make(
        f"{name}.adapter.linear_out output", low, rows * out_features * r.ctx.act, saves=(low,), trains=True,
        backward_workspace=r.weight_grad((out_features, r.rank), te=False, trains=True),
    )


def _sum(r: Recorder, name: str, x: Tensor, out: Tensor, wide: Tensor) -> Tensor:
    """out + scale * wide; variables of ``LoRALinear.forward`` keep the terms and the input alive until then."""
    scaled = r.tape.make(f"{name}.adapter output scaled", wide, out.bytes)
    total = r.tape.make(f"{name} output + adapter", (out, scaled), out.bytes, alias=True)
    r.tape.keep_alive(x, out, scaled)
    return total
