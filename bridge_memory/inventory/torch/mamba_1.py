"""Mixers of the first Mamba (Jamba) in transformers: token by token in torch operations, or with the kernels of
mamba_ssm and causal_conv1d.

Source: ``models/jamba/modeling_jamba.py: JambaMambaMixer.slow_forward, cuda_kernels_forward`` (5.12). Shapes: T = s b
tokens; i channels, each with N states; time steps of rank r. The decay and the input of every state of every token, [T,
i, N], are in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge_memory.inventory.torch.delta_net import convolved, convolved_by_kernel
from bridge_memory.inventory.torch.norms import norm
from bridge_memory.inventory.torch.ops import FP32, Array, Torch
from bridge_memory.spec.model import Mamba1Spec
from bridge_memory.tapes.tape import Op

#: Tokens of which ``selective_scan_cuda`` keeps one state (``csrc/selective_scan/selective_scan.cpp``).
SCAN_CHUNK = 2048


def record_mamba_1(t: Torch, spec: Mamba1Spec, x: Array) -> Array:
    """[T, h] -> [T, h]."""
    ctx = t.r.ctx
    tokens, h, inner, n = ctx.tokens, ctx.hidden_size, spec.inner_size, spec.state_dim
    kernels, padded = t.hf.spec.mixer_kernels, t.hf.spec.attention_mask == "padded"
    both = t.linear("mamba.in_proj", x, tokens, h, 2 * inner, bias=spec.proj_bias)
    states, gate = t.split("states and gates", both, tokens * inner, tokens * inner)
    if padded:
        states = t.scale("states without padding", states)
    convolve = convolved_by_kernel if kernels else convolved
    states = convolve(t, "mamba.conv1d", states, inner, spec.conv_kernel, bias=spec.conv_bias)
    if padded:
        before, states = states, t.scale("convolved without padding", states)
        t.keep_alive(before)
    # Transposed, which a product copies if there are several sequences; the convolution's kernel keeps tokens first.
    several = bool(ctx.batch > 1)
    entering = t.copy("states by token", states) if several and not kernels else states
    parameters = t.linear("mamba.x_proj", entering, tokens, inner, spec.dt_rank + 2 * n)
    parts = t.split("time steps, B and C", parameters, tokens * spec.dt_rank, tokens * n, tokens * n)
    names = (("dt", spec.dt_rank), ("b", n), ("c", n))
    step, b, c = (
        norm(t, f"mamba.{name}_layernorm", part, tokens, width)
        for part, (name, width) in zip(parts, names, strict=True)
    )
    dt = t.linear("mamba.dt_proj", step, tokens, spec.dt_rank, inner, bias=True)
    decay = _decay(t, spec)
    scan = _by_kernel if kernels else _token_by_token
    y, variables = scan(t, spec, states, gate, dt, decay, b, c)
    leaving = t.copy("output by token", y) if several else y
    out = t.linear("mamba.out_proj", leaving, tokens, inner, h, bias=spec.proj_bias)
    t.keep_alive(x, both, states, parameters, step, b, c, decay, y, *variables)
    return out


def _decay(t: Torch, spec: Mamba1Spec) -> Array:
    """-exp(A_log) in fp32, [i, N]."""
    for name, shape in (("A_log", (spec.inner_size, spec.state_dim)), ("D", (spec.inner_size,))):
        t.r.parameter(f"mamba.{name}", shape)
    trains, elements = t.trains("A_log"), spec.inner_size * spec.state_dim
    weight = t.make("A_log in fp32", (), elements, FP32, trains=trains) if t.parameter_width != FP32 else None
    grown = t.make("exp of A_log", () if weight is None else (weight,), elements, FP32, save_output=True, trains=trains)
    return t.scale("exp of A_log, negated", grown)


def _by_kernel(
    t: Torch, spec: Mamba1Spec, states: Array, gate: Array, dt: Array, decay: Array, b: Array, c: Array
) -> tuple[Array, Sequence[Array]]:
    """mamba_ssm ``ops/selective_scan_interface.py: SelectiveScanFn``, of copies in which tokens are last: saves these,
    its output before the gate, and a state of every ``SCAN_CHUNK`` tokens; gradients of B and C are first in fp32."""
    ctx = t.r.ctx
    given = [t.copy(f"{name}, tokens last", x) for name, x in
             (("states", states), ("time steps", dt), ("B", b), ("C", c), ("gates", gate))]
    kept = t.tape.tensor("scan output", states.bytes, grad=False)
    chunks = -(-ctx.seq // SCAN_CHUNK)
    last = t.tape.tensor("states of chunks", FP32 * ctx.batch * spec.inner_size * chunks * 2 * spec.state_dim,
                         grad=False)
    out = t.make(
        "scan output, gated", (*given, decay), states.elements, states.width, also=(kept, last),
        saves=(*(x.tensor for x in given), decay.tensor, kept, last), trains=t.trains("D"),
        backward_workspace=FP32 * (b.elements + c.elements) * (b.width != FP32),
    )
    t.tape.keep_alive(last)
    return out, (dt,)


def _token_by_token(
    t: Torch, spec: Mamba1Spec, states: Array, gate: Array, dt: Array, decay: Array, b: Array, c: Array
) -> tuple[Array, Sequence[Array]]:
    """``slow_forward`` from the softplus of the time steps on: [T, i], and variables that live until it returns."""
    ctx = t.r.ctx
    inner, n = spec.inner_size, spec.state_dim
    every = ctx.tokens * inner * n
    dt = t.activation("time steps, softplus", t.precise("time steps in fp32", dt))
    # Of decay times step each gradient first has the product's size.
    a = t.saves_output("decay of states", t.mul_spread("decay by steps", decay, t.widened(dt, FP32), every))
    b32 = t.cast("B in fp32", b, FP32)
    by_step = t.mul_spread("B by steps", t.widened(dt, FP32), b32, every)
    states32 = t.cast("states in fp32", states, FP32)
    u = t.mul("inputs of states", by_step, states32, broadcast=True)
    t.keep_alive(b32, states32)
    walk = _Walk(t, spec, a, u, c, states.width)
    outs, state, between = walk.whole()
    joined = t.make("outputs of all tokens", outs, states.elements, states.width, alias=True)
    skip = t.mul_weight("states by D", states, "mamba.D")
    summed = t.add("outputs and states by D", joined, skip)
    t.keep_alive(joined, skip)
    act = t.activation("activation of the gate", gate)
    out = t.mul("outputs, gated", summed, act)
    t.keep_alive(summed)
    return out, (dt, a, by_step, u, state, *outs, *between)


class _Walk:
    """The loop over tokens, whose state passes from each to the next. Tokens in the middle are counted with the bytes
    that the second saves, and with its output, which a list holds: they do not contain a peak."""

    def __init__(self, t: Torch, spec: Mamba1Spec, decay: Array, u: Array, c: Array, width: int) -> None:
        self.t, self.decay, self.u, self.c, self.width = t, decay, u, c, width
        ctx = t.r.ctx
        self.seq, self.channels = ctx.seq, ctx.batch * spec.inner_size
        self.states = self.channels * spec.state_dim
        self.row = ctx.batch * spec.state_dim

    def whole(self) -> tuple[list[Array], Array, list[Array]]:
        """(outputs of the tokens that are recorded one by one, the last state, the outputs of those in the middle)."""
        t, tape = self.t, self.t.tape
        state = t.constant("state", self.states, self.width)
        outs: list[Array] = []
        between: list[Array] = []
        for number, there in enumerate((self.seq > 1, self.seq > 2, self.seq > 3, True)):
            if not there:
                continue
            start = len(tape.nodes)
            out, state = self._one(state)
            outs.append(out)
            if number == 1 and self.seq > 4:
                more = tape.tensor("tokens in between", (self.seq - 4) * self._kept(tape.nodes[start:]), grad=False)
                tape.op("tokens in between", state.tensor, (), saves=(more,), trains=state.differentiable)
                between.append(t.constant("outputs in between", (self.seq - 4) * self.channels, self.width))
        return outs, state, between

    def _kept(self, nodes: Sequence[Any]) -> Any:
        """Bytes that these operations save, beside what all tokens share: the state before, and copies."""
        shared = {(x.tensor.whole or x.tensor) for x in (self.decay, self.u, self.c)}
        saved = {each.whole or each: None for node in nodes if isinstance(node, Op) for each in node.saves}
        total: Any = 0
        for each in saved:
            total = total + (0 if each in shared else each.bytes)
        return total

    def _one(self, state: Array) -> tuple[Array, Array]:
        t = self.t
        straight = t.mul("state, decayed", t.slice("decay of a token", self.decay, self.states), state)
        new = t.add("state of a token", straight, t.slice("input of a token", self.u, self.states))
        t.keep_alive(state)
        narrow = t.cast("state in the model's dtype", new, self.width)
        out = t.scaled_product("output of a token", narrow, t.slice("C of a token", self.c, self.row), self.channels, 1)
        return out, new
