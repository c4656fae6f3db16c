"""Shared experts: a dense MLP over all tokens, before the routed experts or overlapped with the token exchange.

Source: megatron-core ``transformer/moe/shared_experts.py: SharedExpertMLP``, and with moe_shared_expert_overlap
``token_dispatcher.py: MoEAlltoAllTokenDispatcher``, which calls its steps one by one. [T_sp, h] -> [T_sp, h].
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from bridge_memory.components import Part
from bridge_memory.inventory.megatron.mlp import activation, dense_mlp
from bridge_memory.releases import SHARED_INPUT_KEPT
from bridge_memory.spec import MLPSpec, MoESpec, divide
from bridge_memory.tapes.parameters import Use
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor

PREFIX = "mlp.shared_experts"


def record_shared_experts(r: Recorder, spec: MoESpec, x: Tensor) -> Tensor:
    """The MLP without overlap, optionally scaled by a sigmoid gate."""
    ctx = r.ctx
    mlp = _mlp(r, spec)
    _gate_parameter(r, spec)
    y = dense_mlp(r, PREFIX, x, ctx.hidden_size, mlp.ffn_hidden_size, mlp, original=_keeps_input(r))
    return _gated(r, y, _gate(r, x)) if spec.shared_expert_gate else y


class Overlapped:
    """The MLP in steps. Its linears do not communicate under sequence parallelism: separate operations gather and
    scatter the tokens.

    Each half runs after an exchange of routed tokens, in forward and in backward (``set_tensor_grad_fn_sequence_sr``).
    A tape runs backward in reverse, so each half is recorded before the exchange, to be after it in backward;
    ``finish`` records what the second half allocates in forward.
    """

    def __init__(self, r: Recorder, spec: MoESpec, x: Tensor) -> None:
        self.r, self.spec, self.mlp, self._at = r, spec, _mlp(r, spec), x
        _gate_parameter(r, spec)
        with self._named():
            self._gate = _gate(r, x) if spec.shared_expert_gate else None

    def first_half(self) -> None:
        """fc1 and activation, during the exchange of tokens."""
        r, ctx, mlp = self.r, self.r.ctx, self.mlp
        f, h = mlp.ffn_hidden_size, ctx.hidden_size
        with self._named():
            if ctx.sp:
                self._at = r.tape.make("shared experts input", self._at, ctx.tokens * h * ctx.act)
            mid = r.column_linear(
                f"{PREFIX}.linear_fc1", self._at, h, 2 * f if mlp.gated else f, gather=False, original=_keeps_input(r)
            )
            self._at = activation(
                r, f"{PREFIX} activation", mid, ctx.tokens, f, gated=mlp.gated, bias=False, kind=mlp.activation,
                clamped=mlp.clamp_value is not None,
            )

    def second_half(self) -> None:
        """fc2, during the exchange back."""
        whole = self._whole_bytes()
        with self._named():
            self._at = self.r.row_linear(
                f"{PREFIX}.linear_fc2", self._at, self.mlp.ffn_hidden_size, self.r.ctx.hidden_size, scatter=False
            )
        self._at.bytes, self._at.grad_bytes = 0, whole

    def finish(self) -> None:
        """The output that ``second_half`` allocates in forward, when the exchange back is over."""
        ctx, whole, label = self.r.ctx, self._whole_bytes(), f"{PREFIX}.linear_fc2 output"
        with self._named():
            if ctx.sp:
                own = ctx.tokens_sp * ctx.hidden_size * ctx.act
                self._at = self.r.tape.make(f"{label}, scattered", self._at, own, workspace=whole)
            else:
                self._at = self.r.tape.make(label, self._at, whole, alias=True)

    def _whole_bytes(self) -> int:
        return self.r.ctx.tokens * self.r.ctx.hidden_size * self.r.ctx.act

    def add_to(self, routed: Tensor) -> Tensor:
        """The shared output added in place to a view of the routed one; its backward copies the gradient (torch
        ``csrc/autograd/functions/tensor.cpp: CopySlices``)."""
        r, hidden = self.r, self.r.ctx.tokens_sp * self.r.ctx.hidden_size * self.r.ctx.act
        with self._named():
            shared = self._at if self._gate is None else _gated(r, self._at, self._gate)
        out = r.tape.tensor("routed + shared output", 0, grad_bytes=hidden)
        out.whole = routed.whole or routed
        r.tape.op("routed + shared output", (routed, shared), out)
        return out

    def _named(self) -> AbstractContextManager[None]:
        return self.r.tape.of(Part.MOE_SHARED_EXPERTS)


def _mlp(r: Recorder, spec: MoESpec) -> MLPSpec:
    """The MLP with this rank's inner width."""
    f = divide(
        spec.shared_expert_intermediate_size, r.ctx.tp, "moe_shared_expert_intermediate_size",
        "tensor_model_parallel_size",
    )  # fmt: skip
    return MLPSpec(f, spec.gated, spec.activation, clamp_value=spec.clamp_value)


def _keeps_input(r: Recorder) -> bool:
    """Whether fc1 saves its input, which is the router's too, instead of an fp8 copy (``shared_experts.py:
    SharedExpertMLP.__init__``, ``moe_layer.py: set_for_recompute_pre_mlp_layernorm``)."""
    ctx = r.ctx
    delayed = ctx.fp8_recipe == "delayed" or not SHARED_INPUT_KEPT(ctx.impl)
    return (ctx.recomputes("layernorm") or not delayed) and not ctx.recomputes("shared_experts")


def _gate_parameter(r: Recorder, spec: MoESpec) -> None:
    if spec.shared_expert_gate:
        r.parameter(f"{PREFIX}.gate_weight", (1, r.ctx.hidden_size), use=Use.ROUTER)


def _gate(r: Recorder, x: Tensor) -> Tensor:
    """A sigmoid for each token, [T_sp, 1]; its linear saves its input only for the weight's gradient."""
    kept = () if r.frozen else (x,)
    return r.tape.make("shared expert gate", x, r.ctx.tokens_sp * r.ctx.act, saves=kept, save_output=True)


def _gated(r: Recorder, y: Tensor, gate: Tensor) -> Tensor:
    ctx = r.ctx
    return r.tape.make("gated shared output", (y, gate), ctx.tokens_sp * ctx.hidden_size * ctx.act, saves=(y, gate))
