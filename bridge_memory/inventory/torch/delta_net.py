"""Gated delta nets (Qwen3-Next) in transformers: in torch operations, or with the kernels of fla and causal_conv1d.

Source: ``models/qwen3_next/modeling_qwen3_next.py: Qwen3NextGatedDeltaNet, torch_chunk_gated_delta_rule, l2norm,
Qwen3NextRMSNormGated``. Shapes: T tokens, in chunks of 64, to whole ones of which a sequence is padded; n value heads
of width v, keys of width k. In torch operations all intermediate results are in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge_memory.inventory.torch.norms import fused_gated_norm, gated_norm
from bridge_memory.inventory.torch.ops import FP32, Array, Torch
from bridge_memory.releases import FAMILIES_OF_5
from bridge_memory.spec import GatedDeltaNetSpec
from bridge_memory.tapes.tape import Op, Tensor

#: Tokens of a chunk.
CHUNK = 64


def record_delta_net(t: Torch, spec: GatedDeltaNetSpec, x: Array) -> Array:
    """``Qwen3NextGatedDeltaNet.forward``: [T, h] -> [T, h]."""
    ctx = t.r.ctx
    tokens, h = ctx.tokens, ctx.hidden_size
    heads, groups, k, v = spec.num_value_heads, spec.num_key_heads, spec.key_head_dim, spec.value_head_dim
    keys, values = groups * k, heads * v
    if t.hf.spec.attention_mask == "padded" and ctx.batch > 1:
        x = t.scale("hidden states without padding", x)
    both = t.linear("linear_attn.in_proj_qkvz", x, tokens, h, 2 * keys + 2 * values)
    rates = t.linear("linear_attn.in_proj_ba", x, tokens, h, 2 * heads)
    parts = t.split("queries, keys, values and gates", both, *(tokens * n for n in (keys, keys, values, values)))
    b, a = t.split("rates and decays", rates, tokens * heads, tokens * heads)
    value, z = t.copy("values by head", parts[2]), t.copy("gates by head", parts[3])
    b, a = t.copy("rates by head", b), t.copy("decays by head", a)
    query, key = t.copy("queries by head", parts[0]), t.copy("keys by head", parts[1])
    mixed = t.cat("queries, keys and values", query, key, value)
    convolve = convolved_by_kernel if t.hf.spec.mixer_kernels else convolved
    mixed = convolve(t, "linear_attn.conv1d", mixed, 2 * keys + values, spec.conv_kernel, held=(query, key, value))
    query, key, value = t.split("convolved", mixed, tokens * keys, tokens * keys, tokens * values)
    beta = t.saves_output("beta", b)
    decay = _decay(t, a, heads)
    if heads > groups:
        query, key = (t.repeat(f"{name} of every head", each, heads // groups)
                      for name, each in (("queries", query), ("keys", key)))
    rule, gate_and_norm = (_rule, fused_gated_norm) if t.hf.spec.mixer_kernels else (_chunks, gated_norm)
    core = rule(t, spec, query, key, value, decay, beta)
    y = gate_and_norm(t, "linear_attn.norm", core, z, tokens * heads, v)
    out = t.linear("linear_attn.out_proj", y, tokens, values, h)
    t.keep_alive(x, both, rates, z, b, a, mixed, query, key, value, beta, decay, y)
    return out


def convolved(
    t: Torch, module: str, x: Array, channels: int, kernel: int, *, bias: bool = False, held: Sequence[Array] = ()
) -> Array:
    """``silu(conv1d(x)[:, :, :s])``; the activation saves the convolution's output whole. ``held``: variables until
    then."""
    done = t.activation(f"{module} activated", convolution(t, module, x, channels, kernel, bias=bias))
    t.keep_alive(x, *held)
    return done


def convolution(t: Torch, module: str, x: Array, channels: int, kernel: int, *, bias: bool = False) -> Array:
    """``conv1d(x)[:, :, :s]`` of x transposed to [b, channels, s]: the output has kernel - 1 more tokens per sequence;
    the kernel makes a contiguous copy of x, and another in backward (``aten/src/ATen/native/Convolution.cpp:
    _convolution, convolution_backward``)."""
    ctx = t.r.ctx
    t.r.parameter(f"{module}.weight", (channels, 1, kernel))
    if bias:
        t.r.parameter(f"{module}.bias", (channels,))
    entering, weight = t.cast_operands(f"{module}.weight", x, channels * kernel)
    copy = entering.bytes
    inputs = (entering,) if weight is None else (entering, weight)
    out = t.make(
        f"{module} output", inputs, (ctx.seq + kernel - 1) * ctx.batch * channels, entering.width,
        saves=(entering.tensor, *(() if weight is None else (weight.tensor,))), trains=t.trains(module),
        workspace=copy, backward_workspace=copy,
    )
    return t.slice(f"{module} output without what follows", out, ctx.tokens * channels)


def convolved_by_kernel(
    t: Torch, module: str, x: Array, channels: int, kernel: int, *, bias: bool = False, held: Sequence[Array] = ()
) -> Array:
    """causal_conv1d ``cpp_functions.py: CausalConv1dFn``: saves its input."""
    t.r.parameter(f"{module}.weight", (channels, 1, kernel))
    if bias:
        t.r.parameter(f"{module}.bias", (channels,))
    done = t.make(f"{module} activated", (x,), x.elements, x.width, saves=(x.tensor,), trains=t.trains(module))
    t.keep_alive(x, *held)
    return done


def _rule(
    t: Torch, spec: GatedDeltaNetSpec, query: Array, key: Array, value: Array, decay: Array, beta: Array
) -> Array:
    """fla ``ops/gated_delta_rule/chunk.py: ChunkGatedDeltaRuleFunction``: of contiguous copies, with queries and keys
    scaled to unit length. Saves these and 4 bytes per row, values, the running sum of the decay, beta and the inverse
    of each chunk."""
    ctx = t.r.ctx
    rows, k, v = ctx.tokens * spec.num_value_heads, spec.key_head_dim, spec.value_head_dim
    value = t.copy("values, contiguous", value)
    given = []
    for name, x in (("query", query), ("key", key)):
        if spec.num_value_heads == spec.num_key_heads:
            x = t.copy(f"{name}, contiguous", x)
        rstd = t.tape.tensor(f"{name} rstd", FP32 * rows, grad=False)
        given.append(t.make(f"{name} of unit length", (x,), x.elements, x.width, saves=(rstd,), save_output=True,
                            also=(rstd,)))
    query, key = given
    summed = t.tape.tensor("decay, summed up", decay.bytes, grad=False)
    inverse = t.tape.tensor("inverse of chunks", rows * CHUNK * key.width, grad=False)
    states = ctx.batch * -(-ctx.seq // CHUNK) * spec.num_value_heads * k * v * key.width
    return t.make(
        "output of all chunks", (query, key, value, decay, beta), rows * v, query.width,
        saves=(query.tensor, key.tensor, value.tensor, summed, beta.tensor, inverse), also=(summed, inverse),
        workspace=states + key.bytes + 2 * value.bytes,
        backward_workspace=2 * states + 3 * key.bytes + 3 * value.bytes + 2 * FP32 * rows,
    )


def _decay(t: Torch, a: Array, heads: int) -> Array:
    """-exp(A_log) softplus(a + dt_bias), in fp32 [T, n]."""
    for name in ("dt_bias", "A_log"):
        t.r.parameter(f"linear_attn.{name}", (heads,))
    trains = t.trains("A_log")
    rate = t.make("exp of A_log", (), heads, FP32, save_output=True, trains=trains)
    rate = t.scale("exp of A_log, negated", rate)
    wide = t.cast("decays in fp32", a, FP32)
    summed = t.make("decays and dt_bias", (wide,), wide.elements, FP32, alias=True, trains=trains)
    return t.mul("decay", t.activation("decays, softplus", summed), rate, broadcast=True)


def _chunks(
    t: Torch, spec: GatedDeltaNetSpec, query: Array, key: Array, value: Array, decay: Array, beta: Array
) -> Array:
    """``torch_chunk_gated_delta_rule``: [T, n v] in the model's dtype."""
    ctx = t.r.ctx
    heads, k, v = spec.num_value_heads, spec.key_head_dim, spec.value_head_dim
    width = query.width
    before = query, key
    query = l2norm(t, "query", query, ctx.tokens * heads)
    key = l2norm(t, "key", key, ctx.tokens * heads)
    given = query, key
    wide = []
    for name, x in (("query", query), ("key", key), ("value", value), ("beta", beta), ("decay", decay)):
        narrow = t.copy(f"{name} by head, contiguous", x)
        wide.append(t.cast(f"{name} by head in fp32", narrow, FP32))
    t.keep_alive(*given)
    chunks = -(-ctx.seq // CHUNK)
    rows = chunks * CHUNK * ctx.batch * heads
    for i, (name, each) in enumerate((("query", k), ("key", k), ("value", v), ("beta", 1), ("decay", 1))):
        whole = wide[i]
        wide[i] = t.make(f"{name} in whole chunks", (whole,), rows * each, FP32)
    query, key, value, beta, decay = wide
    query, plain = t.scale("query, scaled", query), query
    v_beta = t.mul("value times beta", value, beta, broadcast=True)
    k_beta = t.mul("key times beta", key, beta, broadcast=True)
    t.keep_alive(plain, value, beta)
    g, lone = t.cumulated("decay, summed up", decay), decay
    t.keep_alive(lone)
    square = rows * CHUNK
    g_rows = t.spread("decay of rows", g, square)
    g_columns = t.spread("decay of columns", g, square)
    apart = t.subtract("decay between tokens", g_rows, g_columns)
    low = t.scale("decay between tokens, of the past", apart)
    between = t.saves_output("exp of the decay", low)
    mask = t.scale("exp of the decay, of the past", between)
    attn = t.scaled_product("products of keys", k_beta, key, square, CHUNK)
    attn = t.mul("products of keys, decayed", attn, mask)
    attn = t.scale("products of keys of the past", attn)
    attn = t.scale("products of keys, negated", attn)
    attn, *loop = inverted(t, attn, rows // CHUNK)
    attn = t.make("inverse and one", (attn,), square, FP32, alias=True)
    values = t.scaled_product("values of chunks", attn, v_beta, rows * v, CHUNK)
    t.keep_alive(value)
    turned = t.mul("key times beta, decayed", k_beta, t.saves_output("exp of the summed decay", g), broadcast=True)
    k_decay = t.scaled_product("keys of chunks, decayed", attn, turned, rows * k, CHUNK)
    # In the dtype of a product, which autocast narrows.
    state = t.constant("state", ctx.batch * heads * k * v, values.width)
    out = t.constant("output of all chunks", rows * v, values.width)
    run = Walk(t, query, key, values, k_decay, mask, g, attn, chunks, k, v)
    out, state, variables = run.whole(out, state)
    t.keep_alive(beta, v_beta, k_beta, state, *loop, *variables)
    whole = t.slice("output of the tokens", out, ctx.tokens * heads * v)
    done = t.cast("output in the model's dtype", t.copy("output, contiguous", whole), width)
    t.keep_alive(query, key, values, k_decay, mask, g, v_beta, k_beta, out, *loop, *variables, *before)
    return done


def l2norm(t: Torch, name: str, x: Array, rows: Any) -> Array:
    """x / sqrt(sum of x squared + eps); the gradient through the sum is a view."""
    squares = t.make(
        f"{name} squared", (x,), x.elements, x.width, saves=(x.tensor,), backward_workspace=x.bytes
    )
    total = t.summed(f"{name} squared, summed", t.precise(f"{name} squared in fp32", squares), rows)
    inverse = t.rsqrt(f"{name}: one over its norm", t.make(f"{name}: its norm squared", (total,), rows, total.width,
                                                            alias=True))
    out = t.mul(f"{name} normed", x, inverse, broadcast=True)
    t.keep_alive(x, inverse)
    return out


def inverted(t: Torch, attn: Array, chunks: Any) -> tuple[Array, Array, Array]:
    """Inverts each chunk's matrix row by row, in place; clones of each row and of the rows above it are saved.
    ``chunks``: number of chunks, of all heads. Returns (the inverse, the last row, the rows above it); the last two are
    variables that live until the end.

    Each row is written to a view; backward copies the gradient of the whole and that of the row
    (``torch/csrc/autograd/functions/tensor.cpp: CopySlices::apply``).
    """
    row = sub = attn
    for i in range(1, CHUNK):
        part = t.slice("row of a chunk, its beginning", t.slice("row of a chunk", attn, chunks * CHUNK), chunks * i)
        above = t.slice("rows above, their beginning", t.slice("rows above", attn, chunks * i * CHUNK), chunks * i * i)
        new_row = t.copy("row of a chunk, cloned", part)
        if i > 1:
            t.keep_alive(row)
        row = new_row
        new_sub = t.copy("rows above, cloned", above)
        if i > 1:
            t.keep_alive(sub)
        sub = new_sub
        product = t.mul("rows above times the row", sub, row, broadcast=True)
        more = t.summed("rows above times the row, summed", product, chunks * i)
        attn = t.written("row of a chunk, replaced", attn, t.add("row of a chunk, new", row, more))
    return attn, row, sub


class Walk:
    """The loop over chunks, with a state that passes from each to the next."""

    def __init__(
        self, t: Torch, query: Array, key: Array, value: Array, k_decay: Array, mask: Array, g: Array,
        attn: Array, chunks: Any, k: int, v: int,
    ) -> None:  # fmt: skip
        self.t, self.query, self.key, self.value, self.k_decay = t, query, key, value, k_decay
        self.mask, self.g, self.chunks, self.k, self.v = mask, g, chunks, k, v
        #: Variables of the loop body, which live until the next iteration assigns them.
        self.variables: dict[str, Array] = {"attn": attn}

    def whole(self, out: Array, state: Array) -> tuple[Array, Array, Sequence[Array]]:
        """All chunks: (output, state, variables). The chunks in the middle are counted with the bytes that the second
        saves: they do not contain a peak."""
        tape = self.t.tape
        if self.chunks > 1:
            out, state = self._one(out, state)
        if self.chunks > 2:
            start = len(tape.nodes)
            out, state = self._one(out, state)
            kept = kept_bytes(tape.nodes[start:])
            if self.chunks > 4:
                more = tape.tensor("chunks in between", (self.chunks - 4) * kept, grad=False)
                tape.op("chunks in between", state.tensor, (), saves=(more,), trains=state.differentiable)
        if self.chunks > 3:
            out, state = self._one(out, state)
        out, last = self._one(out, state, last=True)
        return out, last, list(self.variables.values())

    def _set(self, **arrays: Array) -> None:
        """Assign variables: their previous values are freed now."""
        for name, array in arrays.items():
            if name in self.variables:
                self.t.keep_alive(self.variables[name])
            self.variables[name] = array

    def _one(self, out: Array, state: Array, *, last: bool = False) -> tuple[Array, Array]:
        """One chunk. The state that the ``last`` one makes is freed when the function returns, with all that it saved.
        """
        t, k, v = self.t, self.k, self.v
        rows = self.g.elements // self.chunks
        heads = rows // CHUNK

        def part(name: str, x: Array, each: int) -> Array:
            return t.slice(f"{name} of a chunk", x, rows * each)

        q, key, value = part("query", self.query, k), part("key", self.key, k), part("value", self.value, v)
        products = t.scaled_product("products of a chunk", q, key, rows * CHUNK, CHUNK)
        attn = t.mul("products of a chunk, decayed", products, part("decay between tokens", self.mask, CHUNK))
        if not FAMILIES_OF_5(t.hf.spec):  # masked_fill_ in place: its gradient is another tensor
            attn = t.in_place("products of a chunk, of the past", attn)
        self._set(attn=attn)
        before = t.scaled_product("values of the state", part("decayed key", self.k_decay, k), state, rows * v, k)
        self._set(before=before)
        new = t.subtract("values beyond the state's", value, before)
        self._set(new=new)
        decayed = t.mul(
            "query, decayed", q, t.saves_output("exp of a chunk's decay", part("summed decay", self.g, 1)),
            broadcast=True,
        )
        inter = t.scaled_product("output of the state", decayed, state, rows * v, k)
        self._set(inter=inter)
        inner = t.scaled_product("output of a chunk's own", attn, new, rows * v, CHUNK)
        out = t.written("output of a chunk", out, t.add("output of the state and a chunk's own", inter, inner))
        if last:
            return out, self._last_state(state, rows, heads)
        decay = t.slice("last decay of a chunk", part("summed decay", self.g, 1), heads)
        straight = t.mul("state, decayed", state, t.saves_output("exp of the last decay", decay), broadcast=True)
        decay = t.slice("last decay of a chunk", part("summed decay", self.g, 1), heads)
        each = part("summed decay", self.g, 1)
        rest = t.saves_output(
            "exp of the rest's decay", t.subtract("decay of the rest", t.spread("last decays", decay, rows), each)
        )
        turned = t.mul("key, decayed", key, rest, broadcast=True)
        added = t.scaled_product("state of a chunk", turned, new, heads * k * v, CHUNK)
        after = t.add("state", straight, added)
        t.keep_alive(state)
        return out, after

    def _last_state(self, state: Array, rows: Any, heads: Any) -> Array:
        t = self.t
        nbytes = heads * self.k * self.v
        straight = t.constant("last state, decayed", nbytes, FP32)
        turned = t.constant("last key, decayed", rows * self.k, FP32)
        added = t.constant("last state of a chunk", nbytes, FP32)
        t.keep_alive(straight, turned)
        after = t.constant("last state", nbytes, FP32)
        t.keep_alive(added)
        t.keep_alive(state)
        return after


def kept_bytes(nodes: Sequence[Any]) -> Any:
    """Bytes of storages that these operations both make and save."""
    made: set[Tensor] = {each for node in nodes if isinstance(node, Op) for each in node.outputs}
    saved = {each.whole or each: None for node in nodes if isinstance(node, Op) for each in node.saves}
    total: Any = 0
    for each in saved:
        if each in made:
            total = total + each.bytes
    return total
