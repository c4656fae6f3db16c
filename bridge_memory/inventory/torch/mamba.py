"""Mamba-2 mixers (Nemotron-H) in transformers: in torch operations, or with the kernels of mamba_ssm.

Source: ``models/nemotron_h/modeling_nemotron_h.py: NemotronHMamba2Mixer.torch_forward, segment_sum``,
``models/zamba2/modeling_zamba2.py: Zamba2RMSNormGated`` (5.12). Shapes: S tokens, padded to whole chunks of l; n heads
of width p and states of N. Variables hold all intermediate results of ``torch_forward`` until it returns.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.megatron.ssm import scan_scratch
from bridge_memory.inventory.torch.delta_net import convolved
from bridge_memory.inventory.torch.norms import norm_before_weight
from bridge_memory.inventory.torch.ops import FP32, Array, Torch
from bridge_memory.spec import MambaSpec
from bridge_memory.tapes.symbolic import largest


def record_mamba(t: Torch, spec: MambaSpec, x: Array) -> Array:
    """``NemotronHMamba2Mixer.torch_forward``, ``BambaMixer.torch_forward``: [T, h] -> [T, h]."""
    ctx = t.r.ctx
    tokens, h, heads = ctx.tokens, ctx.hidden_size, spec.num_heads
    inner, states = heads * spec.head_dim, spec.num_groups * spec.state_dim
    mixed_width = inner + 2 * states
    padded = t.hf.spec.attention_mask == "padded"
    of_bamba = t.hf.family.mamba == "mamba"
    if padded and not (of_bamba and ctx.batch == 1):
        x = t.scale("hidden states without padding", x)
        if of_bamba and not t.hf.spec.mixer_kernels:  # once more in ``torch_forward``
            t.variables.append(x)
            x = t.scale("input states without padding", x)
    both = t.linear(f"{t.hf.family.mamba}.in_proj", x, tokens, h, inner + mixed_width + heads, bias=spec.proj_bias)
    if t.hf.spec.mixer_kernels:
        return _by_kernels(t, spec, x, both)
    gate, mixed, steps = t.split("gates, states and steps", both, tokens * inner, tokens * mixed_width, tokens * heads)
    mixed = convolved(t, f"{t.hf.family.mamba}.conv1d", mixed, mixed_width, spec.conv_kernel, bias=spec.conv_bias)
    if padded and not (of_bamba and ctx.batch == 1):
        mixed, before = t.scale("convolved without padding", mixed), mixed
        t.keep_alive(before)
    core = _scan(t, spec, mixed, steps)
    y = _gated_norm(t, f"{t.hf.family.mamba}.norm", core, gate, tokens, inner, 1 if of_bamba else spec.num_groups)
    narrow = t.cast("mixer output in the model's dtype", y, mixed.width)
    out = t.linear(f"{t.hf.family.mamba}.out_proj", narrow, tokens, inner, h, bias=spec.proj_bias)
    t.keep_alive(x, both, gate, steps, y, mixed if of_bamba else None, *t.variables)
    t.variables.clear()
    return out


def _by_kernels(t: Torch, spec: MambaSpec, x: Array, both: Array) -> Array:
    """mamba_ssm ``ssd_combined.py: MambaSplitConv1dScanCombinedFn`` with norm and output projection: saves its input,
    the scan's output and the deviations of its groups; the normed output is recomputed in backward."""
    ctx = t.r.ctx
    tokens, heads, h = ctx.tokens, spec.num_heads, ctx.hidden_size
    inner = heads * spec.head_dim
    conv_dim = inner + 2 * spec.num_groups * spec.state_dim
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("conv1d.weight", (conv_dim, 1, spec.conv_kernel)), ("dt_bias", (heads,)), ("A_log", (heads,)), ("D", (heads,)),
        ("norm.weight", (inner,)), ("out_proj.weight", (h, inner)),
    ]
    shapes += [("conv1d.bias", (conv_dim,))] if spec.conv_bias else []
    shapes += [("out_proj.bias", (h,))] if spec.proj_bias else []
    for name, shape in shapes:
        t.r.parameter(f"{t.hf.family.mamba}.{name}", shape)
    width = both.width
    scratch = scan_scratch(
        spec, batch=ctx.batch, seq=ctx.seq, tokens=tokens, heads=heads, groups=spec.num_groups, conv_dim=conv_dim,
        act=width,
    )
    scanned = t.tape.tensor("scan output", tokens * inner * width, grad=False)
    deviations = t.tape.tensor(f"{t.hf.family.mamba}.norm rstd", FP32 * tokens * spec.num_groups, grad=False)
    # Nemotron-H asks for the last states, which the kernel makes in any case.
    nbytes = FP32 * ctx.batch * inner * spec.state_dim
    last = t.tape.tensor("last states", nbytes, grad=False) if t.hf.family.mamba == "mixer" else None
    returned = nbytes if last is not None else 0
    done = tokens * inner * width
    weight, trains = h * inner * t.parameter_width, t.trains(f"{t.hf.family.mamba}.out_proj.weight")
    stays = trains and t.hf.gradients_stay
    inputs = (both, t.waiting(f"{t.hf.family.mamba}.out_proj.weight", h * inner)) if stays else (both,)
    # States in fp32 and products are freed before the scan's output is normed. Backward: the recomputed normed output,
    # its gradient, that of the scan's output, and zeros for the last states; the projection's weight gradient is made
    # after that scratch is freed.
    before = largest(scratch.states - done, scratch.products) - tokens * h * width
    out = t.make(
        f"{t.hf.family.mamba}.out_proj output", inputs, tokens * h, width, saves=(both.tensor, scanned, deviations),
        also=(scanned, deviations) if last is None else (scanned, deviations, last), trains=trains,
        workspace=scratch.forward - returned + largest(before, done),
        backward_workspace=largest(scratch.backward + 3 * done + returned, weight * (trains and not stays)),
    )
    if last is not None:
        t.tape.keep_alive(last)
    t.keep_alive(x, both)
    return out


def _gated_norm(t: Torch, name: str, x: Array, gate: Array, tokens: Any, width: int, groups: int) -> Array:
    """``Zamba2RMSNormGated``, ``BambaRMSNormGated`` (one group): x, already in fp32, times silu of the gate; a norm per
    group; times the weight."""
    t.r.parameter(f"{name}.weight", (width,))
    act = t.activation(f"{name} activation of the gate", t.cast(f"{name} gate in fp32", gate, FP32))
    gated = t.mul(f"{name} gated", x, act)
    t.keep_alive(x)
    normed = norm_before_weight(t, name, gated, tokens * groups)
    out = t.mul_weight(f"{name} output", normed, f"{name}.weight")
    t.keep_alive(gated, normed, gate)
    return out


def _scan(t: Torch, spec: MambaSpec, mixed: Array, steps: Array) -> Array:
    """The part of ``torch_forward`` from the comment "ssd naive implementation" on: [S, n p] in fp32."""
    ctx = t.r.ctx
    tokens, heads, p, n, size = ctx.tokens, spec.num_heads, spec.head_dim, spec.state_dim, spec.chunk_size
    chunks = -(-ctx.seq // size)
    rows = chunks * size * ctx.batch
    x, b, c = t.split(
        "convolved", mixed, tokens * heads * p, tokens * spec.num_groups * n, tokens * spec.num_groups * n
    )
    for name in ("dt_bias", "A_log", "D"):
        t.r.parameter(f"{t.hf.family.mamba}.{name}", (heads,))
    trains = t.trains("A_log")
    decay = t.scale("exp of A_log, negated", t.make("exp of A_log", (), heads, FP32, save_output=True, trains=trains))
    biased = t.make("steps and dt_bias", (steps,), steps.elements, steps.width, alias=True, trains=trains)
    soft = t.activation("steps, softplus", t.precise("steps and dt_bias in fp32", biased))
    dt = t.make("steps, clamped", (soft,), soft.elements, soft.width, saves=(soft.tensor,),
                backward_workspace=soft.elements)
    x32 = t.cast("states in fp32", x, FP32)
    spread = []
    for name, group in (("B", b), ("C", c)):
        wide = t.cast(f"{name} in fp32", group, FP32)
        spread.append((name, wide))
    many = [t.repeat(f"{name} of every head", wide, heads // spec.num_groups) for name, wide in spread]
    padded = t.make("states in whole chunks", (x32,), rows * heads * p, FP32)
    skip = t.mul_weight("states by D", padded, f"{t.hf.family.mamba}.D")
    discrete = t.mul("states by steps", x32, dt, broadcast=True)
    t.keep_alive(x32)
    rate = t.mul("decay by steps", dt, decay, broadcast=True)
    given = discrete, rate, *many
    chunked = [
        t.make(f"{name} in chunks", (each,), rows * width, FP32)
        for name, each, width in zip(("states", "decay", "B", "C"), given, (heads * p, heads, heads * n, heads * n),
                                    strict=True)
    ]
    t.keep_alive(*given)
    x, a, b, c = chunked
    summed = t.cumulated("decay, summed up", a)
    square = rows * heads * size
    within = t.saves_output("exp of the decay between tokens", _segments(t, "decay", a, square))
    # Scores: all pairs of a chunk's tokens, for each state; gradients of both factors first have that size.
    pairs = square * n
    products = t.mul_spread("C times B", c, b, pairs)
    scores = t.summed("C times B, summed", products, square)
    weights_of_one = t.mul("scores, decayed", scores, within)
    weights = t.summed("scores, decayed, summed", weights_of_one, square)
    diagonal = _summed_product(t, "states by scores", weights, x, square * p, rows * heads * p)
    rest = t.saves_output(
        "exp of the rest's decay", t.subtract("decay of the rest", t.spread("last decays", summed, summed.elements),
                                              summed)
    )
    faded = t.mul("B, decayed", b, rest, broadcast=True)
    every = rows * heads * n * p
    of_chunks = chunks * ctx.batch * heads * n * p
    state = _summed_product(t, "states of chunks", faded, x, every, of_chunks)
    before = t.constant("state before", ctx.batch * heads * n * p, FP32)
    joined = t.cat("states of chunks, joined", before, state)
    t.keep_alive(state)
    ends = t.make("decay of chunks", (summed,), ctx.batch * heads * (chunks + 1), FP32)
    decays = ctx.batch * heads * (chunks + 1) * (chunks + 1)
    between = t.saves_output("exp of the decay between chunks", _segments(t, "decay of chunks", ends, decays))
    result = _summed_product(
        t, "states after chunks", between, joined, decays * n * p, ctx.batch * heads * (chunks + 1) * n * p
    )
    entering = t.slice("states before chunks", result, of_chunks)
    out_decay = t.saves_output("exp of the summed decay", summed)
    read = t.mul_spread("C times states", c, entering, every)
    off = t.mul(
        "output of states", t.summed("C times states, summed", read, rows * heads * p), out_decay, broadcast=True
    )
    y = t.add("output", diagonal, off)
    t.variables += [
        b, c, x, a, skip, dt, decay, summed, within, products, scores, weights_of_one, weights, diagonal, rest,
        faded, joined, before, between, result, out_decay, read, off,
    ]
    done = t.add("output and states by D", y, skip)
    t.keep_alive(y)
    if ctx.seq % size:
        done = t.slice("output of the tokens", done, tokens * heads * p)
    return done


def _segments(t: Torch, name: str, x: Array, elements: Any) -> Array:
    """``segment_sum``: x expanded, its upper triangle zeroed, cumulatively summed, the upper triangle set to -inf."""
    first = t.scale(f"{name}, of the past", t.spread(f"{name}, expanded", x, elements))
    summed = t.cumulated(f"{name}, summed over the past", first)
    out = t.scale(f"{name} between tokens", summed)
    t.keep_alive(summed, first)
    return out


def _summed_product(t: Torch, name: str, a: Array, b: Array, elements: Any, summed: Any) -> Array:
    """``(a[...] * b[...]).sum()``: the full product is made, and in backward a gradient of its size for each factor."""
    product = t.mul_spread(name, a, b, elements)
    return t.summed(f"{name}, summed", product, summed)
