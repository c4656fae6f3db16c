"""Kimi delta attention in transformers: a gated delta net whose decay has a value for every channel of a key.

In torch operations products of tokens are made channel by channel before they are summed.

Source: ``models/kimi_linear/modeling_kimi_linear.py: KimiLinearDeltaAttention, KimiLinearForgetGate,
chunk_kimi_delta_attention, KimiLinearRMSNormGated`` (5.17, 5.24). Shapes: T tokens, in chunks of 64, to whole ones of
which a sequence is padded; n heads of width d. Inside of the rule all results are in fp32.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.torch.delta_net import CHUNK, Walk, convolved, convolved_by_kernel, inverted
from bridge_memory.inventory.torch.norms import norm_before_weight
from bridge_memory.inventory.torch.ops import FP32, Array, Torch
from bridge_memory.spec.model import KimiDeltaSpec


def record_kimi_delta(t: Torch, spec: KimiDeltaSpec, x: Array) -> Array:
    """``KimiLinearDeltaAttention.forward``: [T, h] -> [T, h]."""
    ctx = t.r.ctx
    tokens, h, heads, d = ctx.tokens, ctx.hidden_size, spec.num_heads, spec.head_dim
    wide = heads * d
    if t.hf.spec.attention_mask == "padded":
        x = t.scale("hidden states without padding", x)
    parts = [t.linear(f"self_attn.{name}_proj", x, tokens, h, wide) for name in "qkv"]
    mixed = t.cat("queries, keys and values", *parts)
    kernels = t.hf.spec.mixer_kernels
    mixed = (convolved_by_kernel if kernels else convolved)(t, "self_attn.conv1d", mixed, 3 * wide, spec.conv_kernel)
    tail = t.slice("convolved tokens", mixed, 3 * tokens * wide)
    query, key, value = t.split("convolved", tail, *[tokens * wide] * 3)
    decay = _forget_gate(t, x, heads, d)
    rates = t.linear("self_attn.b_proj", x, tokens, h, heads)
    beta = t.saves_output("beta", rates)
    core = (_rule if kernels else _chunks)(t, spec, query, key, value, decay, beta)
    low = t.linear("self_attn.g_a_proj", x, tokens, h, d)
    gate = t.linear("self_attn.g_b_proj", low, tokens, d, wide)
    y = _gated_norm(t, core, gate, tokens * heads, d)
    t.keep_alive(y)
    out = t.linear("self_attn.o_proj", y, tokens, wide, h)
    t.keep_alive(x, mixed, query, key, value, decay, beta, core, gate, y)
    return out


def _forget_gate(t: Torch, x: Array, heads: int, d: int) -> Array:
    """``KimiLinearForgetGate.forward``: -exp(A_log) softplus(gate + dt_bias), in fp32 [T, n d]; the softplus is the
    input itself above 20, and log(1 + exp) below, both of which are made."""
    tokens, h = t.r.ctx.tokens, t.r.ctx.hidden_size
    module = "self_attn.forget_gate"
    for name, shape in (("dt_bias", (heads * d,)), ("A_log", (1, 1, heads, 1))):
        t.r.parameter(f"{module}.{name}", shape)
    trains = t.trains("A_log")
    low = t.linear(f"{module}.f_a_proj", x, tokens, h, d)
    given = t.linear(f"{module}.f_b_proj", low, tokens, d, heads * d)
    wide = t.cast("forget gate in fp32", given, FP32)
    summed = t.make("forget gate and dt_bias", (wide,), wide.elements, FP32, alias=True, trains=trains)
    rate = t.make("exp of A_log", (), heads, FP32, save_output=True, trains=trains)
    large = t.constant("where the forget gate is large", summed.elements, 1)
    grown = t.saves_output("exp of the forget gate", summed)
    one = t.make("one and exp of the forget gate", (grown,), grown.elements, FP32, alias=True)
    small = t.activation("log of one and exp", one)
    soft = t.make("softplus of the forget gate", (summed, small), summed.elements, FP32, saves=(large.tensor,))
    rate = t.scale("exp of A_log, negated", rate)
    out = t.mul("decay", soft, rate, broadcast=True)
    t.keep_alive(given, summed, soft)
    return out


def _gated_norm(t: Torch, x: Array, gate: Array, rows: Any, width: Any) -> Array:
    """``KimiLinearRMSNormGated.forward``: norm, weight and the sigmoid of the gate, all in fp32."""
    t.r.parameter("self_attn.o_norm.weight", (width,))
    normed = norm_before_weight(t, "self_attn.o_norm", x, rows)
    weighted = t.mul_weight("self_attn.o_norm weighted", normed, "self_attn.o_norm.weight", width=FP32)
    t.keep_alive(normed)
    act = t.saves_output("self_attn.o_norm sigmoid of the gate", t.cast("self_attn.o_norm gate in fp32", gate, FP32))
    wide = t.mul("self_attn.o_norm gated in fp32", weighted, act)
    t.keep_alive(weighted)
    out = t.cast("self_attn.o_norm output", wide, x.width)
    t.keep_alive(x, gate, wide)
    return out


def _rule(
    t: Torch, spec: KimiDeltaSpec, query: Array, key: Array, value: Array, decay: Array, beta: Array
) -> Array:
    """fla ``ops/kda/chunk.py: ChunkKDAFunction`` (0.6.0), of contiguous copies, with queries and keys scaled to unit
    length: saves these and 4 bytes per row, values, the decay as it is and summed up in fp32, beta, and two matrices of
    each chunk. Backward makes everything else again, and gradients of queries, keys and decays twice in fp32
    (``chunk_bwd.py: chunk_kda_bwd``, ``chunk_intra.py: chunk_kda_bwd_intra``)."""
    ctx = t.r.ctx
    heads, d = spec.num_heads, spec.head_dim
    rows = ctx.tokens * heads
    value = t.copy("values, contiguous", value)
    given = []
    for name, x in (("query", query), ("key", key)):
        rstd = t.tape.tensor(f"{name} rstd", FP32 * rows, grad=False)
        whole = t.copy(f"{name}, contiguous", x)
        given.append(t.make(f"{name} of unit length", (whole,), whole.elements, whole.width, saves=(rstd,),
                            save_output=True, also=(rstd,)))
    query, key = given
    summed = t.tape.tensor("decay, summed up", decay.bytes, grad=False)
    matrices = t.tape.tensor("matrices of chunks", 2 * rows * CHUNK * key.width, grad=False)
    states = ctx.batch * -(-ctx.seq // CHUNK) * heads * d * d * key.width
    return t.make(
        "output of all chunks", (query, key, value, decay, beta), rows * d, query.width,
        saves=(query.tensor, key.tensor, value.tensor, decay.tensor, summed, beta.tensor, matrices),
        also=(summed, matrices), workspace=states + 4 * key.bytes,
        backward_workspace=2 * states + 3 * key.bytes + 5 * decay.bytes + 2 * FP32 * CHUNK * rows,
    )


def _unit(t: Torch, name: str, x: Array, rows: Any) -> Array:
    """``l2norm``: x over the root of the sum of its squares."""
    squares = t.make(f"{name} squared", (x,), x.elements, x.width, saves=(x.tensor,), backward_workspace=x.bytes)
    total = t.summed(f"{name} squared, summed", squares, rows)
    total = t.make(f"{name}: its norm squared", (total,), rows, x.width, alias=True)
    length = t.saves_output(f"{name}: its norm", total)
    # Backward: the gradient over the norm, and of the norm three products of the size of x.
    kept = (x.tensor, length.tensor) if x.differentiable else ()
    out = t.make(
        f"{name} of unit length", (x, length), x.elements, x.width, saves=kept, backward_workspace=2 * x.bytes
    )
    t.keep_alive(x, length)
    return out


def _chunks(
    t: Torch, spec: KimiDeltaSpec, query: Array, key: Array, value: Array, decay: Array, beta: Array
) -> Array:
    """``chunk_kimi_delta_attention``: [T, n d] in the model's dtype."""
    ctx = t.r.ctx
    heads, d, width = spec.num_heads, spec.head_dim, query.width
    wide = []
    for name, x in (("query", query), ("key", key), ("value", value), ("beta", beta), ("decay", decay)):
        narrow = t.copy(f"{name} by head, contiguous", x)
        wide.append(t.cast(f"{name} by head in fp32", narrow, FP32))
    query, key, value, beta, g = wide
    query = _unit(t, "query", query, ctx.tokens * heads)
    key = _unit(t, "key", key, ctx.tokens * heads)
    chunks = -(-ctx.seq // CHUNK)
    rows = chunks * CHUNK * ctx.batch * heads
    query, key, value, g, beta = (
        t.make(f"{name} in whole chunks", (whole,), rows * each, FP32)
        for name, whole, each in zip(
            ("query", "key", "value", "decay", "beta"), (query, key, value, g, beta), (d, d, d, d, 1), strict=True
        )
    )
    query = t.scale("query, scaled", query)
    v_beta = t.mul("value times beta", value, beta, broadcast=True)
    k_beta = t.mul("key times beta", key, beta, broadcast=True)
    lone, g = g, t.cumulated("decay, summed up", g)
    t.keep_alive(lone)
    square, cube = rows * CHUNK, rows * CHUNK * d
    apart = t.subtract(
        "decay between tokens", t.spread("decay of rows", g, cube), t.spread("decay of columns", g, cube)
    )
    mask = t.saves_output("exp of the decay", t.scale("decay between tokens, of the past", apart))
    products = t.mul_spread("products of keys by channel", k_beta, key, cube)
    decayed = t.mul("products of keys by channel, decayed", products, mask)
    attn = t.summed("products of keys, decayed", decayed, square)
    attn = t.scale("products of keys of the past", attn)
    attn = t.scale("products of keys, negated", attn)
    attn, *loop = inverted(t, attn, rows // CHUNK)
    attn = t.make("inverse and one", (attn,), square, FP32, alias=True)
    before, value = value, t.scaled_product("values of chunks", attn, v_beta, rows * d, CHUNK)
    t.keep_alive(before)
    turned = t.mul("key times beta, decayed", k_beta, t.saves_output("exp of the summed decay", g))
    k_decay = t.scaled_product("keys of chunks, decayed", attn, turned, rows * d, CHUNK)
    state = t.constant("state", ctx.batch * heads * d * d, value.width)
    out = t.constant("output of all chunks", rows * d, value.width)
    run = _Walk(t, query, key, value, k_decay, mask, g, attn, chunks, d, d)
    out, state, variables = run.whole(out, state)
    t.keep_alive(beta, v_beta, k_beta, state, *loop, *variables)
    whole = t.slice("output of the tokens", out, ctx.tokens * heads * d)
    done = t.cast("output in the model's dtype", t.copy("output, contiguous", whole), width)
    t.keep_alive(query, key, value, k_decay, mask, g, v_beta, k_beta, out, *loop, *variables)
    return done


class _Walk(Walk):
    """The loop over chunks of ``chunk_kimi_delta_attention``."""

    def _one(self, out: Array, state: Array, *, last: bool = False) -> tuple[Array, Array]:
        t, d = self.t, self.k
        rows = self.g.elements // self.chunks // d

        def part(name: str, x: Array, each: int) -> Array:
            return t.slice(f"{name} of a chunk", x, rows * each)

        q, key, value = part("query", self.query, d), part("key", self.key, d), part("value", self.value, d)
        g = part("summed decay", self.g, d)
        decayed = t.mul("query, decayed", q, t.saves_output("exp of a chunk's decay", g))
        inter = t.scaled_product("output of the state", decayed, state, rows * d, d)
        self._set(inter=inter)
        products = t.mul_spread("products of a chunk by channel", q, key, rows * CHUNK * d)
        products = t.mul("products of a chunk by channel, decayed", products,
                         part("decay between tokens", self.mask, CHUNK * d))
        intra = t.scale("products of a chunk, of the past", t.summed("products of a chunk", products, rows * CHUNK))
        self._set(attn=intra)
        before = t.scaled_product("values of the state", part("decayed key", self.k_decay, d), state, rows * d, d)
        self._set(before=before)
        new = t.subtract("values beyond the state's", value, before)
        self._set(new=new)
        inner = t.scaled_product("output of a chunk's own", intra, new, rows * d, CHUNK)
        out = t.written("output of a chunk", out, t.add("output of the state and a chunk's own", inter, inner))
        heads = rows // CHUNK
        if last:
            return out, self._last_state(state, rows, heads)
        end = t.saves_output("exp of the last decay", t.slice("last decay of a chunk", g, heads * d))
        straight = t.mul("state, decayed", state, end, broadcast=True)
        ends = t.spread("last decays", t.slice("last decay of a chunk, kept", g, heads * d), rows * d)
        rest = t.saves_output("exp of the rest's decay", t.subtract("decay of the rest", ends, g))
        turned = t.mul("key, decayed", key, rest)
        added = t.scaled_product("state of a chunk", turned, new, heads * d * d, CHUNK)
        after = t.add("state", straight, added)
        t.keep_alive(state)
        return out, after
