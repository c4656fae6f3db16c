"""State-space mixers: Mamba-2 and the gated delta net.

Source: megatron-core ``ssm/mamba_mixer.py: MambaMixer``, mamba_ssm ``ssd_combined.py:
MambaSplitConv1dScanCombinedFn``; megatron-core ``ssm/gated_delta_net.py: GatedDeltaNet``, flash-linear-attention
``ops/gated_delta_rule/chunk.py``. d_inner, groups and heads are divided by t; T = s b.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

from bridge_memory.cards.rows import GPUS
from bridge_memory.releases import (
    DELTA_NET_TOKENS_FIRST,
    MAMBA_CONVOLUTION_IS_NO_MODULE,
    MAMBA_PROJECTION_HELD,
    SEQUENCES_NUMBERED_ONCE,
)
from bridge_memory.spec import GatedDeltaNetSpec, MambaSpec, divide
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.symbolic import largest, smallest
from bridge_memory.tapes.tape import Tensor

#: Tokens per chunk of flash-linear-attention's gated delta rule.
DELTA_CHUNK = 64
#: Streaming multiprocessors, over which mamba_ssm spreads the heads of a group.
MULTIPROCESSORS = GPUS["H100"].multiprocessors


def record_mamba(
    r: Recorder, spec: MambaSpec, x: Tensor, *, name: str = "mixer", normed: bool = False, scaled: bool = False
) -> Tensor:
    """From the residual stream [T_sp, h] to out_proj's output [T_sp, h], with the norm unless ``x`` is ``normed``.
    ``scaled``: zxBCdt is multiplied by a vector of constants (Falcon-H1)."""
    ctx, tape, first = r.ctx, r.tape, len(r.rows)
    heads = divide(spec.num_heads, ctx.tp, "mamba_num_heads", "tensor_model_parallel_size")
    groups = divide(spec.num_groups, ctx.tp, "mamba_num_groups", "tensor_model_parallel_size")
    inner = heads * spec.head_dim
    conv_dim = inner + 2 * groups * spec.state_dim
    in_width = 2 * inner + 2 * groups * spec.state_dim + heads
    sharded = ctx.tp > 1
    for part, shape in (("dt_bias", (heads,)), ("A_log", (heads,)), ("D", (heads,))):
        r.parameter(f"{name}.{part}", shape, sharded=sharded)
    convolution = f"{name}.conv1d_" if MAMBA_CONVOLUTION_IS_NO_MODULE(ctx.impl) else f"{name}.conv1d."
    r.parameter(f"{convolution}weight", (conv_dim, 1, spec.conv_kernel), sharded=sharded)
    if spec.conv_bias:
        r.parameter(f"{convolution}bias", (conv_dim,), sharded=sharded)
    if spec.rmsnorm:
        r.parameter(f"{name}.norm.weight", (inner,), sharded=sharded)
    if not ctx.te and not normed:
        x = r.hold(r.norm("norm", x, ctx.hidden_size, ctx.tokens_sp))
    zxbcdt = r.column_linear(
        f"{name}.in_proj", x, ctx.hidden_size, in_width, bias=spec.proj_bias, fused_norm=ctx.te and not normed
    )
    inner_bytes = ctx.tokens * inner * ctx.act
    # Rearranged to batch first: a copy when b > 1, else a view.
    projected, shared = zxbcdt, groups
    if ctx.cp > 1:
        # Every rank of context parallelism gets all tokens of its share of heads, and of at least one group of B and C
        # (``ssm/mamba_context_parallel.py: MambaContextParallel.pre_conv_ssm``). Variables hold the parts while they
        # are concatenated, and the result while it is reordered.
        shared = largest(groups, ctx.cp)
        conv_dim, in_width = (n + 2 * (shared - groups) * spec.state_dim for n in (conv_dim, in_width))
        joined = ctx.tokens * in_width * ctx.act
        zxbcdt = projected = tape.make("zxBCdt of all tokens", zxbcdt, joined, workspace=2 * joined)
    if ctx.batch > 1:
        zxbcdt = tape.make("zxBCdt", zxbcdt, ctx.tokens * in_width * ctx.act)
    if scaled:
        scale = tape.tensor("scale of zxBCdt", in_width * ctx.act, grad=False)
        zxbcdt = tape.make("scaled zxBCdt", zxbcdt, ctx.tokens * in_width * ctx.act, saves=(scale,), also=(scale,))
    if spec.memory_efficient:
        y = _scan_in_one_kernel(r, spec, zxbcdt, heads=heads, groups=shared, conv_dim=conv_dim)
    else:
        y = _scan_by_parts(r, spec, zxbcdt, heads=heads, groups=shared, conv_dim=conv_dim)
    if spec.memory_efficient and spec.rmsnorm:
        stats = tape.tensor("mixer norm rstd", 4 * ctx.tokens * groups, grad=False)
        y = tape.make("mixer norm output", y, inner_bytes, saves=(y, stats), also=(stats,))
    out = r.row_linear(f"{name}.out_proj", y, inner, ctx.hidden_size, bias=spec.proj_bias)
    if MAMBA_PROJECTION_HELD(ctx.impl):
        tape.keep_alive(projected)  # a variable of MambaMixer.forward
    r.arrange(first, *(f"{name}.{m}" for m in ("in_proj", "conv1d", "norm", "out_proj")), "norm")
    return out


def sequence_numbers(ctx: BlockContext) -> Any:
    """Bytes of the number of each token's sequence in a pack, int32, of the tokens of all context-parallel ranks."""
    return 4 * ctx.tokens * ctx.cp


def _scan_in_one_kernel(
    r: Recorder, spec: MambaSpec, zxbcdt: Tensor, *, heads: Any, groups: Any, conv_dim: Any
) -> Tensor:
    """Convolution, scan and gate (``MambaMixer._ssm_training``). ``groups``: of all ranks of context parallelism."""
    ctx, tape = r.ctx, r.tape
    inner_bytes = ctx.tokens * heads * spec.head_dim * ctx.act
    scratch = scan_scratch(
        spec, batch=ctx.batch, seq=ctx.seq, tokens=ctx.tokens, heads=heads, groups=groups, conv_dim=conv_dim,
        act=ctx.act, ranks=ctx.cp,
    )
    ungated = tape.tensor("scan output before the gate", inner_bytes, grad=False)
    own = [ungated]
    if ctx.packed and not SEQUENCES_NUMBERED_ONCE(ctx.impl):
        own.append(tape.tensor("number of each token's sequence", sequence_numbers(ctx), grad=False))
    with tape.checkpoint("scan", (zxbcdt,), enabled=spec.recompute_scan):
        y = tape.make(
            "scan output", zxbcdt, inner_bytes, saves=(zxbcdt, *own), also=tuple(own),
            workspace=scratch.forward + largest(scratch.states - 2 * inner_bytes, scratch.products),
            backward_workspace=scratch.backward + inner_bytes,
        )
    return _sequence_first(r, "scan output", y)


def _sequence_first(r: Recorder, name: str, y: Tensor) -> Tensor:
    """[b, s, d] to [s, b, d], a copy where b > 1, and with context parallelism reordered, exchanged and concatenated
    (``MambaContextParallel.post_conv_ssm``)."""
    if r.ctx.batch > 1:
        y = r.tape.make(f"{name}, sequence first", y, y.bytes)
    if r.ctx.cp > 1:
        y = r.tape.make(f"{name} of the rank's tokens", y, y.bytes, workspace=2 * y.bytes)
    return y


def _scan_by_parts(
    r: Recorder, spec: MambaSpec, zxbcdt: Tensor, *, heads: Any, groups: Any, conv_dim: Any
) -> Tensor:
    """A convolution with channels first, the scan of contiguous x, dt, B and C, then the gate, in the norm if there is
    one (``MambaMixer._ssm_prefill`` without a cache; ``CausalConv1dFn``, ``MambaChunkScanCombinedFn``,
    ``layernorm_gated.py: LayerNormFn``)."""
    ctx, tape = r.ctx, r.tape
    inner, shared = heads * spec.head_dim, groups * spec.state_dim
    size = {"z": inner, "xBC": conv_dim, "dt": heads, "x": inner, "B": shared, "C": shared}
    size = {name: ctx.tokens * width * ctx.act for name, width in size.items()}
    gate, mixed, steps = tape.views("split zxBCdt", zxbcdt, *((name, size[name]) for name in ("z", "xBC", "dt")))
    turned = tape.make("xBC, channels first", mixed, size["xBC"])
    conv = tape.make("conv output", turned, size["xBC"], saves=(turned,))
    conv = tape.make("conv output, tokens first", conv, size["xBC"])
    parts = tape.views("split xBC", conv, *((name, size[name]) for name in ("x", "B", "C")))
    x, b, c, steps, gate = (
        tape.make(f"contiguous {name}", part, size[name])
        for name, part in zip(("x", "B", "C", "dt", "z"), (*parts, steps, gate), strict=True)
    )
    scratch = scan_scratch(
        spec, batch=ctx.batch, seq=ctx.seq, tokens=ctx.tokens, heads=heads, groups=groups, conv_dim=0, act=ctx.act,
        ranks=ctx.cp,
    )
    sums = tape.tensor("running sum of dt A", 4 * ctx.tokens * heads, grad=False)
    own = () if spec.rmsnorm else (tape.tensor("scan output before the gate", x.bytes, grad=False),)
    given = (x, steps, b, c) if spec.rmsnorm else (x, steps, b, c, gate)
    y = tape.make(
        "scan output", given, x.bytes, saves=(*given, sums, *own), also=(sums, *own), save_output=spec.rmsnorm,
        workspace=scratch.forward - sums.bytes + largest(scratch.states - x.bytes, scratch.products),
        backward_workspace=scratch.backward - steps.bytes,
    )
    y = _sequence_first(r, "scan output", y)
    if spec.rmsnorm:
        gate = _sequence_first(r, "z", gate)
        stats = tape.tensor("mixer norm rstd", 4 * ctx.tokens * groups, grad=False)
        y = tape.make("mixer norm output", (y, gate), x.bytes, saves=(y, gate, stats), also=(stats,))
    tape.keep_alive(zxbcdt, conv)  # variables of MambaMixer._ssm_prefill
    return y


class ScanScratch(NamedTuple):
    """Temporaries of a scan, in bytes. Forward: ``forward`` throughout; in addition ``states`` before its outputs are
    made, and ``products`` together with them. Backward: ``backward``, in addition to gradients of its inputs."""

    forward: Any
    states: Any
    products: Any
    backward: Any


def scan_scratch(
    spec: MambaSpec, *, batch: Any, seq: Any, tokens: Any, heads: Any, groups: Any, conv_dim: Any, act: int,
    ranks: Any = 1,
) -> ScanScratch:  # fmt: skip
    """Temporaries of the convolution and of mamba_ssm ``ssd_combined.py: _mamba_chunk_scan_combined_fwd,
    _mamba_chunk_scan_combined_bwd``. ``ranks``: of context parallelism, which divide the heads."""
    shared = groups
    inner = heads * spec.head_dim
    # fp32: the states after each chunk and the last ones, dt and its running sum, C B^T of each chunk.
    chunks = ceil(seq / spec.chunk_size)
    state = 4 * batch * inner * spec.state_dim
    states, steps = state * chunks, 4 * tokens * heads
    state //= ranks  # of a rank's share of heads
    products = 4 * batch * chunks * shared * spec.chunk_size**2
    conv = tokens * conv_dim * act
    rounded = states // 4 * act
    # The memory-efficient kernel saves zxBCdt and the scan's output before its gate z, a separate tensor from the gated
    # one that it returns (megatron-core gives it no norm to fuse: MambaMixer._ssm_training); convolution and chunk
    # states are recomputed. In forward the states are rounded before the outputs are made. In backward the states and
    # their gradients are alive in fp32 and rounded (ssd_combined.py: _mamba_chunk_scan_combined_bwd,
    # ssd_state_passing.py: _state_passing_bwd), with the recomputed convolution, dxBC, ddt, the gradient of the ungated
    # output, and that of the decays as partial sums over 64 elements of a state.
    # Gradients of B, C and C B^T are partial sums, each over as many heads of a group as fill the GPU
    # (``_chunk_state_bwd_db, _chunk_scan_bwd_dC, _chunk_scan_bwd_dcb``); the fp32 states are freed by then.
    decays = 4 * batch * chunks * heads * (ceil(spec.head_dim * spec.state_dim / 64) + 1)
    together = largest(smallest(ceil(batch * chunks * heads / MULTIPROCESSORS), heads // shared), 1)
    parts = 1 + ceil(heads // shared / together)
    of_group = 4 * tokens * shared * spec.state_dim
    with_states = 2 * states + decays
    summed = 4 * batch * chunks * heads + largest(
        2 * steps + (1 + parts) * of_group, 3 * steps + 2 * of_group + parts * products
    )
    return ScanScratch(
        forward=conv + 2 * steps + state + rounded, states=states, products=products,
        backward=2 * conv + steps // 4 * act + 2 * steps + products + state + 2 * rounded
        + largest(with_states, summed),
    )


def record_gated_delta_net(r: Recorder, spec: GatedDeltaNetSpec, x: Tensor) -> Tensor:
    """From the residual stream [T_sp, h] to out_proj's output [T_sp, h] (norm included)."""
    ctx, tape, first = r.ctx, r.tape, len(r.rows)
    k_heads = divide(spec.num_key_heads, ctx.tp, "linear_num_key_heads", "tensor_model_parallel_size")
    v_heads = divide(spec.num_value_heads, ctx.tp, "linear_num_value_heads", "tensor_model_parallel_size")
    qk, v = k_heads * spec.key_head_dim, v_heads * spec.value_head_dim
    conv_dim = 2 * qk + v
    in_width = 2 * qk + 2 * v + 2 * v_heads
    sharded = ctx.tp > 1
    prefix = "self_attention."
    r.parameter(prefix + "dt_bias", (v_heads,), sharded=sharded)
    r.parameter(prefix + "A_log", (v_heads,), sharded=sharded)
    r.parameter(prefix + "conv1d.weight", (conv_dim, 1, spec.conv_kernel), sharded=sharded)
    r.parameter(prefix + "out_norm.weight", (spec.value_head_dim,))
    recompute_norm = not ctx.te and ctx.recomputes("layernorm")
    with tape.discardable("input_layernorm", (x,), enabled=recompute_norm) as region:
        normed = x if ctx.te else r.hold(r.norm("input_layernorm", x, ctx.hidden_size, ctx.tokens_sp))
    act, rows = ctx.act, ctx.tokens
    mixed = r.column_linear(prefix + "in_proj", normed, ctx.hidden_size, in_width, fused_norm=ctx.te)
    if ctx.cp > 1:
        # Heads are put in the order of the ranks, exchanged for the tokens of all ranks, and these put in order
        # (``gated_delta_net/common.py: tensor_a2a_cp2hp``).
        mixed = tape.make("projected tokens by rank", mixed, mixed.bytes)
        mixed = tape.make("projected tokens of all ranks", mixed, mixed.bytes, workspace=2 * mixed.bytes)
    more: tuple[Tensor, ...] = ()
    if DELTA_NET_TOKENS_FIRST(ctx.impl):
        conv = tape.make("conv output", mixed, rows * conv_dim * act, saves=(mixed,))
        both = _unit(r, "query and key", conv, rows, 2 * qk, 2 * k_heads)
        query, key = (tape.make(name, both, both.bytes // 2 * (v_heads // k_heads)) for name in ("query", "key"))
        value = tape.make("value", conv, rows * v * act)
        gate = tape.make("gate", mixed, rows * v * act)
        # One kernel computes them from a copy of alpha, which it saves; the rule saves beta and the running sum of g.
        more = (tape.tensor("g before it is summed up", 4 * rows * v_heads, grad=False),)
        decay = tape.make("g and beta", mixed, rows * v_heads * (4 + 2 * act), save_output=True, also=more)
    else:
        conv_in = tape.make("conv input", mixed, rows * conv_dim * act)
        gate = tape.make("gate", mixed, rows * v * act)
        conv = tape.make("conv output", conv_in, rows * conv_dim * act, saves=(conv_in,))
        query, key = (
            _repeated(r, name, _unit(r, name, conv, rows, qk, k_heads), v_heads // k_heads) for name in ("query", "key")
        )
        value = tape.make("value", conv, rows * v * act)
        # A few eager operations in fp32: softplus saves its input and output, the rule saves the running sum of g.
        decay = tape.make("g and beta", mixed, rows * v_heads * (12 + act), save_output=True)
    states = ctx.batch * ceil(ctx.seq / DELTA_CHUNK) * v_heads * spec.key_head_dim * spec.value_head_dim * act
    # Saves q, k, v, the decays and the triangular inverse A [T, heads, 64]. Backward recomputes w, u and the states,
    # and makes the new values, the gradients of both, dw, dk twice and dg (fp32) twice.
    inverse = tape.tensor("A", rows * v_heads * DELTA_CHUNK * act, grad=False)
    out = tape.make(
        "gated delta rule output", (query, key, value, decay), rows * v * act,
        saves=(query, key, value, inverse), also=(inverse,),
        workspace=states + key.bytes + 2 * value.bytes,
        backward_workspace=2 * states + 3 * key.bytes + 3 * value.bytes + 8 * rows * v_heads,
    )
    stats = tape.tensor("out_norm rstd", 4 * rows * v_heads, grad=False)
    if ctx.te:
        # Transformer Engine's norm is a graph break in the compiled gating around it (_apply_gated_norm).
        normed = tape.make("out_norm output", out, rows * v * act, saves=(out, stats), also=(stats,))
        gated = tape.make("gated norm output", (normed, gate), rows * v * act, saves=(normed, gate))
    else:
        gated = tape.make("gated norm output", (out, gate), rows * v * act, saves=(out, gate, stats), also=(stats,))
    if ctx.batch > 1:
        gated = tape.make("gated norm output, sequence first", gated, gated.bytes)
    if ctx.cp > 1:  # and back (``tensor_a2a_hp2cp``)
        gated = tape.make("gated norm output of the rank's tokens", gated, gated.bytes, workspace=2 * gated.bytes)
    projected = r.row_linear(prefix + "out_proj", gated, v, ctx.hidden_size)
    tape.keep_alive(mixed, conv, query, key, value, gate, decay, *more, out)  # variables of GatedDeltaNet.forward
    if recompute_norm:
        tape.discard(region, normed)
    r.arrange(first, *(prefix + m for m in ("in_proj", "conv1d", "out_norm", "out_proj")))
    r.arrange(first, "input_layernorm", "self_attention")
    return projected


def _unit(r: Recorder, name: str, conv: Tensor, rows: int, width: int, heads: int) -> Tensor:
    """Queries, keys or both scaled to unit length [T, heads, d]; the norm saves its output and 4 bytes per row (fla
    ``modules/l2norm.py: L2NormFunction``)."""
    rstd = r.tape.tensor(f"{name} rstd", 4 * rows * heads, grad=False)
    copied = r.tape.make(f"{name} of the convolution", conv, rows * width * r.ctx.act)
    return r.tape.make(f"{name} of unit length", copied, copied.bytes, saves=(rstd,), save_output=True, also=(rstd,))


def _repeated(r: Recorder, name: str, unit: Tensor, times: int) -> Tensor:
    """Each head repeated ``times`` times, if there are more value heads."""
    return r.tape.make(name, unit, unit.bytes * times) if times > 1 else unit
