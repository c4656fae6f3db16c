"""Mixtures of experts: a loop over experts, or, from transformers 5 on, one grouped matrix product.

Source: ``models/mixtral/modeling_mixtral.py: MixtralSparseMoeBlock`` (4.57), ``models/deepseek_v3/
modeling_deepseek_v3.py: DeepseekV3MoE``, ``integrations/moe.py`` (5). Routing is balanced: n = T k / E rows per expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge_memory.inventory.torch import gpt_oss, liger
from bridge_memory.inventory.torch.mlp import gated_mlp, joined_mlp, plain_mlp, relu_squared
from bridge_memory.inventory.torch.ops import FP32, Array, Torch
from bridge_memory.releases import EXPERTS_BY_NUMBER
from bridge_memory.spec import MoESpec
from bridge_memory.tapes.parameters import EXPERT_NUMBER, Use
from bridge_memory.tapes.tape import Tensor

INT64 = 8


def last_saver(t: Torch, spec: MoESpec) -> str:
    """The last operation of the block that saves anything; "mlp": the last sum over experts."""
    if spec.shared_expert_intermediate_size and t.hf.family.moe not in ("hunyuan", "afmoe"):
        if t.hf.family.moe == "granite":
            return "shared_mlp.output_linear output"
        return "shared expert, gated" if spec.shared_expert_gate else f"{_module(t)}.shared_experts.down_proj output"
    return "experts' output in order" if t.hf.grouped_experts else "mlp"


def record_moe(t: Torch, spec: MoESpec, x: Array) -> Array:
    """[T, h] -> [T, h]."""
    # In transformers 5 Qwen2MoeSparseMoeBlock runs its shared expert first.
    hunyuan = t.hf.family.moe == "hunyuan"
    first = (spec.shared_expert_gate and t.hf.fused_experts) or hunyuan
    variables: Sequence[Array] = ()
    logits: Array | None = None
    if spec.noisy_input:
        x = _with_noise(t, x)
    if t.hf.family.moe == "granite":
        return _granite(t, spec, x)
    early = _mlp_of_shared(t, spec, x) if first else None
    with t.tape.assumed():
        if t.hf.family.moe in ("deepseek", "deepseek_v2"):
            weights, chosen, logits = _router_in_fp32(t, spec, x)
        elif t.hf.family.moe == "longcat":
            weights, chosen, _ = _router_in_fp32(t, spec, x)
        elif t.hf.family.moe == "mistral4":
            weights, chosen, logits = _router_in_its_dtype(t, spec, x)
        elif t.hf.family.moe == "phimoe":
            weights, chosen, logits = sparsemixer(t, spec, x)
        elif t.hf.family.moe == "gpt_oss":
            weights, which = gpt_oss.router(t, spec, x, scattered=not t.hf.fused_experts)
            chosen = Array(which, t.r.ctx.tokens * spec.topk, INT64)
        else:
            weights, chosen, logits = _softmax_router(t, spec, x)
    if t.hf.family.moe == "afmoe":
        t.r.parameter("mlp.expert_bias", (spec.num_experts,), trains=False)
        early = _mlp_of_shared(t, spec, x)
    with t.tape.assumed():
        given = _latent(t, spec, x, "fc1_latent_proj") if spec.latent_size else x
        if t.hf.grouped_experts:
            out = _grouped(t, spec, given, weights, chosen)
        elif t.hf.family.moe == "deepseek_v2" and not t.hf.fused_experts:
            out = _sorted_loop(t, spec, given, weights)
        else:
            out, variables = _loop(t, spec, given, weights, chosen)
        if spec.latent_size:
            out = _latent(t, spec, out, "fc2_latent_proj")
    if spec.shared_expert_intermediate_size:
        shared = early if early is not None else _mlp_of_shared(t, spec, x)
        if spec.shared_expert_gate:
            shared = _gated(t, x, shared)
        t.keep_alive(out)
        out, before = t.add("mlp routed and shared", out, shared), out
        t.keep_alive(before, shared)
        if (spec.shared_expert_gate or hunyuan) and not t.hf.fused_experts:
            t.keep_alive(*variables)  # the loop is in the same function
    t.keep_alive(x, weights, chosen, logits if t.hf.fused_experts else None)
    return out


def _width(t: Torch, spec: MoESpec) -> int:
    """Width in which the experts work."""
    return spec.latent_size or t.r.ctx.hidden_size


def _choices(spec: MoESpec) -> int:
    """Experts among which a token chooses, those that return their input included."""
    return spec.num_experts + spec.zero_experts


def _latent(t: Torch, spec: MoESpec, x: Array, name: str) -> Array:
    """``NemotronHMoE``: a linear into the experts' width (fc1_latent_proj), or out of it."""
    assert spec.latent_size is not None
    wide, narrow = t.r.ctx.hidden_size, spec.latent_size
    sizes = (wide, narrow) if name == "fc1_latent_proj" else (narrow, wide)
    return t.linear(f"{_module(t)}.{name}", x, t.r.ctx.tokens, *sizes, bias=spec.add_bias)


def _softmax_router(t: Torch, spec: MoESpec, x: Array) -> tuple[Array, Array, Array]:
    """(weights of the chosen experts [T, k] in the model's dtype, their indices, the logits of all experts)."""
    ctx = t.r.ctx
    tokens, e = ctx.tokens, spec.num_experts
    if t.hf.family.moe == "hunyuan":
        logits = _logits_in_fp32(t, spec, x)
    else:
        gate = {"afmoe": "router.gate", "jamba": "router"}.get(t.hf.family.moe, "gate")
        gate = f"{_module(t)}.{gate}"
        logits = t.linear(gate, x, tokens, ctx.hidden_size, e, use=Use.ROUTER, label="router logits")
    # LFM2's scores are a sigmoid in the model's dtype.
    wide = logits if t.hf.family.moe == "lfm2" else t.cast("router logits in fp32", logits, FP32)
    logits = wide if t.hf.family.moe == "afmoe" else logits  # which its router returns
    scores = t.saves_output("router probabilities", wide)  # softmax or sigmoid
    weights, chosen = _of_the_chosen(t, spec, scores)
    if not (t.hf.fused_experts and t.hf.family.moe in ("mixtral", "minimax", "hunyuan", "afmoe")):
        narrow = t.cast("router weights in the model's dtype", weights, x.width)
        t.keep_alive(logits, weights)
        weights = narrow
    if t.hf.family.moe == "afmoe":
        weights = t.scale("router weights, scaled", weights)
    t.keep_alive(logits)
    return weights, chosen, logits


def _router_in_its_dtype(t: Torch, spec: MoESpec, x: Array) -> tuple[Array, Array, Array]:
    """``Mistral4MoE.route_tokens_to_experts``: as ``_softmax_router``, without casts; weights are scaled. Scores of
    groups, and those of the chosen groups, are dropped."""
    ctx = t.r.ctx
    tokens, e = ctx.tokens, spec.num_experts
    logits = t.linear(f"{_module(t)}.gate", x, tokens, ctx.hidden_size, e, use=Use.ROUTER, label="router logits")
    scores = t.saves_output("router probabilities", logits)
    weights, chosen = _of_the_chosen(t, spec, scores)
    scaled = t.scale("router weights, scaled", weights)
    t.keep_alive(logits, scores)
    return scaled, chosen, logits


def _logits_in_fp32(t: Torch, spec: MoESpec, x: Array) -> Array:
    """``HunYuanMoEV1Gate.forward``: the router's weight is in fp32 in models of any dtype."""
    tokens, e, h = t.r.ctx.tokens, spec.num_experts, t.r.ctx.hidden_size
    wide = t.cast("hidden states of the router in fp32", x, FP32)
    if t.hf.autocast:
        return t.linear("mlp.gate.wg", wide, tokens, h, e, use=Use.ROUTER, label="router logits")
    t.r.parameter("mlp.gate.wg.weight", (e, h), use=Use.ROUTER)
    trains = t.trains("mlp.gate.wg.weight")
    return t.make(
        "router logits", (wide,), tokens * e, FP32, trains=trains, saves=(wide.tensor,) if trains else (),
        backward_workspace=e * h * FP32,
    )


def _with_noise(t: Torch, x: Array) -> Array:
    """``PhimoeSparseMoeBlock.forward``: the input times noise, in place, for which the noise is saved; from 5 on
    ``PhimoeTopKRouter.forward`` does so once more, with the same tensor."""
    for which in ("noise", "noise of the router")[: 2 if t.hf.fused_experts else 1]:
        made = t.constant(which, x.elements, x.width)
        view = t.tape.tensor(f"hidden states with {which}", 0, grad_bytes=x.bytes * x.differentiable)
        view.whole = x.tensor.whole or x.tensor
        t.tape.op(f"hidden states with {which}", x.tensor, view, saves=(made.tensor,) if x.differentiable else ())
        x = Array(view, x.elements, x.width)
    return x


def sparsemixer(t: Torch, spec: MoESpec, x: Array) -> tuple[Array, Array, Array]:
    """``models/phimoe/modeling_phimoe.py: sparsemixer``: two experts are sampled one after the other, each with a
    softmax over the scores that are not masked. (Weights [T, 2] in the model's dtype, indices, logits.)"""
    tokens, e = t.r.ctx.tokens, spec.num_experts
    module = "mlp.router" if t.hf.fused_experts else "block_sparse_moe.gate"
    logits = t.linear(module, x, tokens, t.r.ctx.hidden_size, e, use=Use.ROUTER, label="router logits")
    scores, parts, variables = logits, [], []
    for number in ("first", "second"):
        mask = t.constant(f"experts too weak for the {number}", tokens * e, 1)
        kept = t.make(f"scores of the {number}, masked", (scores,), tokens * e, scores.width, saves=(mask.tensor,))
        where = t.constant(f"{number} experts", tokens, INT64)
        gates = t.saves_output(f"gates of the {number}", kept)
        # ``PhimoeMultiplier.apply`` keeps the gathered gates, their indices and all gates.
        gathered = t.make(f"gates of the {number}, gathered", (gates,), tokens, gates.width, saves=(where.tensor,))
        parts.append(
            t.make(f"multiplier of the {number}", (scores, gathered), tokens, gates.width,
                   saves=(gathered.tensor, where.tensor, gates.tensor))
        )
        if number == "first":
            scores = t.make("scores without the first", (scores,), tokens * e, scores.width, saves=(where.tensor,))
        variables += [mask, where, gates]
    weights = t.cat("router weights", *parts)
    chosen = t.constant("chosen experts", tokens * spec.topk, INT64)
    t.keep_alive(logits, *variables)
    return weights, chosen, logits


def _router_in_fp32(t: Torch, spec: MoESpec, x: Array) -> tuple[Array, Array, Array]:
    """``DeepseekV3TopkRouter.forward``, ``DeepseekV2MoEGate.forward``: hidden states, weight and product are in fp32,
    except under autocast, which casts the operands of every product."""
    ctx = t.r.ctx
    tokens, e, h = ctx.tokens, _choices(spec), ctx.hidden_size
    module = "mlp.router.classifier" if t.hf.family.moe == "longcat" else f"{_module(t)}.gate"
    wide = t.cast("hidden states of the router in fp32", x, FP32)
    if t.hf.autocast:
        logits = t.linear(module, wide, tokens, h, e, use=Use.ROUTER, label="router logits")
    else:
        t.r.parameter(f"{module}.weight", (e, h), use=Use.ROUTER)
        trains = t.trains(f"{module}.weight")
        weight = t.constant("router weight in fp32", e * h, FP32)
        logits = t.make(
            "router logits", (wide,), tokens * e, FP32, trains=trains, backward_workspace=e * h * FP32,
            saves=(*((wide.tensor,) if trains else ()), *((weight.tensor,) if wide.differentiable else ())),
        )
    softmax = t.hf.family.moe in ("deepseek_v2", "longcat")  # of fp32 logits
    entering = t.cast("router logits in fp32", logits, FP32) if softmax else logits
    scores = t.saves_output("router scores", entering)
    if t.hf.family.moe == "deepseek_v2" and (spec.router_num_groups or 1) > 1:
        # ``masked_fill`` saves the mask of experts in groups that are not chosen.
        others = t.constant("experts of other groups", tokens * e, 1)
        scores = t.make("router scores of the chosen groups", (scores,), tokens * e, FP32, saves=(others.tensor,))
    weights, chosen = _of_the_chosen(t, spec, scores)
    scaled = t.scale("router weights, scaled", weights)
    t.keep_alive(logits, scores)
    return scaled, chosen, logits


def _of_the_chosen(t: Torch, spec: MoESpec, scores: Array) -> tuple[Array, Array]:
    """(scores of the chosen experts [T, k], divided by their sum if the family does so; the experts' indices)."""
    tokens, k = t.r.ctx.tokens, spec.topk
    chosen = t.tape.tensor("chosen experts", INT64 * tokens * k, grad=False)
    width = scores.width
    weights = t.make("router weights", (scores,), tokens * k, width, saves=(chosen,), also=(chosen,))
    if t.hf.family.normalized_router:
        total = t.mean("sum of the router weights", weights, tokens)
        before = t.constant("router weights before they are divided", tokens * k, width)
        weights = t.make(
            "router weights, divided", (weights, total), tokens * k, width, saves=(before.tensor, total.tensor)
        )
    return weights, Array(chosen, tokens * k, INT64)


def _loop(t: Torch, spec: MoESpec, x: Array, weights: Array, chosen: Array) -> tuple[Array, Sequence[Array]]:
    """Experts one by one: each gathers its tokens and adds its weighted output to the sum. Returns (the sum, variables
    that live until the function returns)."""
    ctx = t.r.ctx
    tokens, h, e, k = ctx.tokens, _width(t, spec), _choices(spec), spec.topk
    rows = tokens * k // e
    in_fp32 = t.hf.family.moe == "deepseek" or (t.hf.family.moe == "longcat" and not t.hf.fused_experts)
    out_width = weights.width if in_fp32 else x.width
    total = t.constant("mlp sum over experts", tokens * h, out_width)
    classes = e + 1 if t.hf.family.moe == "gpt_oss" and not t.hf.fused_experts else e  # one more for masked tokens
    mask = t.constant("experts by token, one-hot", tokens * k * classes, INT64)
    _declare(t, spec)
    fused = _fused_parameters(t, spec)
    variables: list[Array] = []
    for number in range(e):
        where = t.constant("tokens of an expert", 2 * rows, INT64)
        taken = t.make("expert input", (x,), rows * h, x.width, saves=(where.tensor,))
        done, inside = _expert(t, spec, taken, rows, fused, number) if number < spec.num_experts else (taken, ())
        share = t.make("router weights of an expert", (weights,), rows, weights.width, saves=(where.tensor,))
        weighted = t.mul("expert output, weighted", done, share, broadcast=True)
        if not in_fp32:
            weighted = t.cast("expert output, weighted, cast", weighted, x.width)
        t.keep_alive(*variables)
        variables = [taken, weighted, where, *([share] if t.hf.family.moe != "gpt_oss" else []), *inside]
        if number == e - 1 and t.last_saver == "mlp":
            t.tape.landmark("the last expert's tokens, the last to be kept")
        total = _added_rows(t, total, weighted, where, tokens * h)
    out = t.cast("mlp output", total, x.width)
    t.keep_alive(mask, chosen, *variables)
    return out, (mask, *variables)


def _sorted_loop(t: Torch, spec: MoESpec, x: Array, weights: Array) -> Array:
    """``DeepseekV2MoE.moe``: tokens are sorted by expert, and each expert gets a slice; outputs are concatenated, put
    back in order, and weighted in fp32 in place, for which autograd saves a copy."""
    ctx = t.r.ctx
    tokens, h, e, k = ctx.tokens, _width(t, spec), spec.num_experts, spec.topk
    rows = tokens * k
    _declare(t, spec)
    counts = t.constant("experts by token, one-hot", tokens * e, INT64)
    order = t.constant("order of tokens by expert", rows, INT64)
    places = t.constant("tokens by expert", rows, INT64)
    taken = t.make("tokens sorted by expert", (x,), rows * h, x.width, saves=(places.tensor,))
    done = []
    for number in range(e):
        part = t.slice("expert input", taken, rows // e * h)
        done.append(_expert(t, spec, part, rows // e, None, number)[0])
    joined = t.cat("experts' outputs joined", *done)
    ordered = t.make("experts' outputs in order", (joined,), rows * h, joined.width, saves=(order.tensor,))
    wide = t.cast("experts' outputs in fp32", ordered, FP32)
    kept = t.tape.tensor("experts' outputs in fp32, kept", rows * h * FP32, grad=False)
    weighted = t.tape.tensor("experts' outputs, weighted", 0, grad_bytes=wide.bytes * wide.differentiable)
    weighted.whole = wide.tensor.whole or wide.tensor
    saves = (*((kept,) if weights.differentiable else ()), *((weights.tensor,) if wide.differentiable else ()))
    # Without gradients the copy is not made; under a non-reentrant checkpoint it is. The weights' gradient first has
    # the product's size.
    made = t.hf.spec.gradient_checkpointing and not t.hf.spec.reentrant
    outputs = (weighted, kept) if made else (weighted,)
    # In an fp32 model it writes in place on a view of the ordered outputs: backward copies the gradient and a part of
    # it (``torch/csrc/autograd/functions/tensor.cpp: CopySlices``).
    over_a_view = 2 * wide.bytes if x.width == FP32 and not t.hf.autocast else 0
    t.tape.op(
        "experts' outputs, weighted", (wide.tensor, weights.tensor), outputs, saves=saves,
        backward_workspace=wide.bytes - weights.bytes + over_a_view,
    )
    total = t.make("mlp sum over experts", (Array(weighted, rows * h, FP32),), tokens * h, FP32)
    out = t.cast("mlp output", total, x.width)
    t.keep_alive(counts, order, taken, *done, joined, ordered)
    return out


def _granite(t: Torch, spec: MoESpec, x: Array) -> Array:
    """``GraniteMoeHybridMoE.forward`` and the shared MLP after it: tokens sorted by expert, a product for each expert's
    slice, outputs concatenated; the router's softmax is over the chosen logits."""
    ctx = t.r.ctx
    tokens, h, e, k, f = ctx.tokens, ctx.hidden_size, spec.num_experts, spec.topk, spec.moe_ffn_hidden_size
    rows, module = tokens * k, "block_sparse_moe"
    for name, shape in (("input_linear", (e, 2 * f, h)), ("output_linear", (e, h, f))):
        t.r.parameter(f"{module}.{name}.weight", shape, expert=True)
    with t.tape.assumed():
        logits = t.linear(f"{module}.router.layer", x, tokens, h, e, use=Use.ROUTER, label="router logits")
        wide = t.cast("router logits in fp32", logits, FP32)
        chosen = t.constant("chosen experts", rows, INT64)
        top = t.make("router logits of the chosen", (wide,), rows, FP32, saves=(chosen.tensor,))
        weights = t.cast("router weights", t.saves_output("router probabilities", top), x.width)
        order = t.constant("order of tokens by expert", rows, INT64)
        places = t.constant("tokens by expert", rows, INT64)
        share = t.make("router weights sorted by expert", (weights,), rows, weights.width, saves=(order.tensor,))
        t.keep_alive(logits, wide, top, weights, chosen)
        taken = t.make("tokens sorted by expert", (x,), rows * h, x.width, saves=(places.tensor,))
        both = _by_expert(t, "experts' gate and up", taken, _parameter(t, "input_linear", e * 2 * f * h), e, 2 * f, h)
        gate, up = t.split("experts' gate and up, halves", both, rows * f, rows * f)
        product = t.mul("experts' product", t.activation("experts' activation of the gate", gate), up)
        done = _by_expert(t, "experts' output", product, _parameter(t, "output_linear", e * h * f), e, h, f)
        weighted = t.mul("experts' output, weighted", done, share, broadcast=True)
        t.keep_alive(done)
        zeros = t.constant("mlp sum over experts, zeros", tokens * h, weighted.width)
        kept = (weighted.tensor, places.tensor) if weighted.differentiable else ()
        # ``index_add`` copies the zeros; it saves the rows, whose shape backward needs.
        out = t.make("mlp sum over experts", (zeros, weighted), tokens * h, weighted.width, saves=kept)
        t.keep_alive(taken, both, product, share, weighted, zeros)
    out = t.cast("mlp output", out, x.width)
    shared = joined_mlp(t, x, spec.shared_expert_intermediate_size)
    total = t.add("mlp routed and shared", out, shared)
    t.keep_alive(x, out, shared)
    return total


def _by_expert(t: Torch, name: str, x: Array, weights: Array, e: int, wide: int, narrow: int) -> Array:
    """``GraniteMoeHybridParallelExperts.forward``: [S, narrow] -> [S, wide], a list of products, then concatenated."""
    rows = x.elements // narrow // e
    parts = t.split(f"{name}: tokens of each expert", x, *[rows * narrow] * e)
    made = [_times(t, f"{name} of an expert", part, weights, rows * wide, wide * narrow) for part in parts]
    out = t.cat(name, *made)
    t.keep_alive(*made, x)
    return out


def _added_rows(t: Torch, total: Array, rows: Array, where: Array, elements: Any) -> Array:
    """``index_add_``, in place. It saves the rows, since backward needs their shape (``derivatives.yaml``); their
    gradient is selected from that of the whole."""
    spread = Tensor("rows in their places", 0, elements * total.width * rows.differentiable, t.tape.part)
    kept = (rows.tensor, where.tensor) if rows.differentiable else ()
    t.tape.op("rows in their places", rows.tensor, spread, saves=kept)
    summed = t.tape.tensor("mlp sum over experts", 0, grad_bytes=elements * total.width * rows.differentiable)
    summed.whole = total.tensor.whole or total.tensor
    t.tape.op("mlp sum over experts", (total.tensor, spread), summed, alias=True)
    return Array(summed, elements, total.width)


def _expert(
    t: Torch, spec: MoESpec, x: Array, rows: Any, fused: tuple[Array, Array] | None, number: int
) -> tuple[Array, tuple[Array, ...]]:
    """(one expert's output, variables that live until the next expert's)."""
    h, f = _width(t, spec), spec.moe_ffn_hidden_size
    if fused is None:
        names = _names(t)
        gate = t.linear(f"mlp.experts.{names[0]}", x, rows, h, f, declare=False, number=number)
        fused_product = t.hf.liger("swiglu")
        act = gate if fused_product else t.activation("expert activation of the gate", gate)
        up = t.linear(f"mlp.experts.{names[1]}", x, rows, h, f, declare=False, number=number)
        name = "expert product"
        product = liger.gated_product(t, name, gate, up) if fused_product else t.mul(name, act, up)
        down = t.linear(f"mlp.experts.{names[2]}", product, rows, f, h, declare=False, number=number)
        t.keep_alive(x, product)
        return down, ()
    wide = 2 * f if spec.gated else f
    both = _times(t, "expert gate and up", x, fused[0], rows * wide, wide * h)
    if t.hf.family.moe == "gpt_oss":
        both = gpt_oss.with_bias(t, "expert gate and up, with bias", both)
        product, inside = gpt_oss.gated(t, both)
        down = _times(t, "expert output", product, fused[1], rows * h, h * f)
        down = gpt_oss.with_bias(t, "expert output, with bias", down)
        return down, (both, product, down, *inside)
    if not spec.gated:
        product = relu_squared(t, "expert activation", both)
        t.keep_alive(both)
        down = _times(t, "expert output", product, fused[1], rows * h, h * f)
        t.keep_alive(x, product)
        return down, ()
    gate, up = t.split("expert gate and up", both, rows * f, rows * f)
    act = t.activation("expert activation of the gate", gate)
    product = t.mul("expert product", act, up)
    t.keep_alive(both)
    down = _times(t, "expert output", product, fused[1], rows * h, h * f)
    t.keep_alive(x, both, product)
    return down, ()


def _times(t: Torch, name: str, x: Array, weights: Array, out: Any, elements: Any) -> Array:
    """The product with one expert's slice of a parameter of all experts: the slice's gradient is copied into zeros of
    the whole, and these are summed."""
    saves = []
    if t.hf.family.moe == "gpt_oss" and not EXPERTS_BY_NUMBER(t.hf.spec):
        part = t.make(f"{name}: weight copied", (weights,), elements, weights.width)
        saves = [part.tensor] if x.differentiable and not t.hf.autocast else []
    else:
        part = t.slice(f"{name}: weight", weights, elements)
    if t.hf.autocast:
        x = t.cast(f"{name}: input, cast", x, t.compute_width)
        part = t.cast(f"{name}: weight in the compute dtype", part, t.compute_width)
        saves = [part.tensor] if x.differentiable else []
    saves += [x.tensor] if weights.differentiable else []
    return t.make(name, (x, part), out, t.compute_width, saves=saves, trains=weights.differentiable)


def _fused_parameters(t: Torch, spec: MoESpec) -> tuple[Array, Array] | None:
    if not t.hf.fused_experts and t.hf.family.moe != "gpt_oss":
        return None
    h, f, e = _width(t, spec), spec.moe_ffn_hidden_size, spec.num_experts
    wide = 2 * f if spec.gated else f
    first = _parameter(t, "experts.gate_up_proj", _choices(spec) * wide * h)
    return first, _parameter(t, "experts.down_proj", e * h * f)


def _parameter(t: Torch, name: str, elements: Any) -> Array:
    trains = t.trains(name)
    if trains and t.hf.gradients_stay:
        return t.waiting(name, elements)
    leaf = t.tape.tensor(f"{name}.weight", 0, grad_bytes=elements * t.parameter_width * trains)
    t.tape.op(f"{name} gradient", (), leaf, trains=trains)
    return Array(leaf, elements, t.parameter_width)


def _declare(t: Torch, spec: MoESpec) -> None:
    """Parameters of the experts."""
    r, h, f, e = t.r, _width(t, spec), spec.moe_ffn_hidden_size, spec.num_experts
    module = f"{_module(t)}.experts"
    if t.hf.family.moe == "gpt_oss":
        for name, wide, out in (("gate_up_proj", h, 2 * f), ("down_proj", f, h)):
            r.parameter(f"{module}.{name}", (e, wide, out), expert=True)
            r.parameter(f"{module}.{name}_bias", (e, out), expert=True)
        return
    if not spec.gated:
        r.parameter(f"{module}.up_proj", (e, f, h), expert=True)
        r.parameter(f"{module}.down_proj", (e, h, f), expert=True)
        return
    if t.hf.fused_experts:
        # ``LongcatFlashExperts`` has rows for experts that return their input too.
        r.parameter(f"{module}.gate_up_proj", (_choices(spec), 2 * f, h), expert=True)
        r.parameter(f"{module}.down_proj", (e, h, f), expert=True)
        return
    gate, up, down = _names(t)
    with r.repeated(e):
        for name, shape in ((gate, (f, h)), (up, (f, h)), (down, (h, f))):
            r.parameter(f"{module}.{EXPERT_NUMBER}.{name}.weight", shape, expert=True)


def _names(t: Torch) -> tuple[str, str, str]:
    """Names of an expert's linears: gate, up, down."""
    return ("w1", "w3", "w2") if t.hf.family.moe in ("mixtral", "phimoe") else ("gate_proj", "up_proj", "down_proj")


def _module(t: Torch) -> str:
    if t.hf.family.layer == "nemotron_h":
        return "mixer"
    if t.hf.family.moe in ("lfm2", "jamba"):
        return "feed_forward"
    return "block_sparse_moe" if t.hf.family.moe in ("mixtral", "phimoe") and not t.hf.fused_experts else "mlp"


def _grouped(t: Torch, spec: MoESpec, x: Array, weights: Array, chosen: Array) -> Array:
    """``grouped_mm_experts_forward``: every token is copied k times, sorted by expert: S = T k rows."""
    ctx = t.r.ctx
    tokens, h, e, k, f = ctx.tokens, _width(t, spec), spec.num_experts, spec.topk, spec.moe_ffn_hidden_size
    rows = tokens * k
    _declare(t, spec)
    counted = t.constant("experts, counted", rows, 4)
    experts = t.constant("experts, sorted", rows, INT64)
    order = t.constant("order of tokens by expert", rows, INT64)
    places = t.constant("tokens by expert", rows, INT64)
    taken = t.make("tokens sorted by expert", (x,), rows * h, x.width, saves=(places.tensor,))
    share = t.make("router weights sorted by expert", (weights,), rows, weights.width, saves=(order.tensor,))
    offsets = t.constant("ends of the experts' rows", e, 4)
    sentinel = t.constant("rows of no expert", rows, 1)
    # masked_fill_ saves its mask; its gradient is a new tensor.
    filled = t.tape.tensor("tokens sorted by expert, filled", 0, grad_bytes=rows * h * x.width * x.differentiable)
    filled.whole = taken.tensor
    t.tape.op("tokens sorted by expert, filled", taken.tensor, filled, saves=(sentinel.tensor,))
    taken = Array(filled, rows * h, x.width)
    wide = 2 * f if spec.gated else f
    first = _chosen_biases(t, spec, "gate and up", rows * wide, experts)
    both = _grouped_product(t, "experts' gate and up", taken, e * wide * h, rows * wide, offsets)
    both = _biased(t, both, first)
    if t.hf.family.moe == "gpt_oss":
        product, inside = gpt_oss.gated(t, both)
        t.keep_alive(both, *inside)
    elif not spec.gated:
        product = relu_squared(t, "experts' activation", both)
        t.keep_alive(both)
    else:
        gate, up = t.split("experts' gate and up", both, rows * f, rows * f)
        act = t.activation("experts' activation of the gate", gate)
        product = t.mul("experts' product", act, up)
        t.keep_alive(both)
    second = _chosen_biases(t, spec, "output", rows * h, experts)
    t.keep_alive(first)
    done = _grouped_product(t, "experts' output", product, e * h * f, rows * h, offsets)
    done = _biased(t, done, second)
    t.keep_alive(product)
    weighted = t.mul("experts' output, weighted", done, share, broadcast=True, sole=True)
    cleared = t.tape.tensor("experts' output, cleared", 0, grad_bytes=weighted.bytes * weighted.differentiable)
    cleared.whole = weighted.tensor
    t.tape.op("experts' output, cleared", weighted.tensor, cleared, saves=(sentinel.tensor,))
    weighted = Array(cleared, weighted.elements, weighted.width)
    back = t.constant("inverse order of tokens", rows, INT64)
    restored = t.make("experts' output in order", (weighted,), rows * h, weighted.width, saves=(back.tensor,))
    t.keep_alive(weighted)
    total = t.make("mlp sum over experts", (restored,), tokens * h, restored.width)
    out = t.cast("mlp output", total, x.width)
    t.keep_alive(counted, experts, order, taken, share, sentinel, done, restored, total, second)
    return out


def _chosen_biases(t: Torch, spec: MoESpec, what: str, elements: Any, experts: Array) -> Array | None:
    """The expert's bias for every row; None without biases."""
    if not spec.add_bias:
        return None
    trains = t.trains("experts")
    return t.make(
        f"biases of the experts' {what}", (), elements, t.parameter_width, saves=(experts.tensor,), trains=trains,
    )


def _biased(t: Torch, x: Array, biases: Array | None) -> Array:
    """``add_``: in place."""
    if biases is None:
        return x
    summed = t.tape.tensor(f"{x.tensor.name}, with biases", 0, grad_bytes=x.bytes * x.differentiable)
    summed.whole = x.tensor.whole or x.tensor
    t.tape.op(f"{x.tensor.name}, with biases", (x.tensor, biases.tensor), summed, alias=True)
    return Array(summed, x.elements, x.width)


def _grouped_product(t: Torch, name: str, x: Array, weights: Any, out: Any, offsets: Array) -> Array:
    """The grouped product with a parameter of ``weights`` elements; ``out``: elements of the output."""
    trains = t.trains(name)
    stays = trains and t.hf.gradients_stay
    inputs = (x, t.waiting(name, weights)) if stays else (x,)
    return t.make(
        name, inputs, out, t.compute_width, trains=trains, saves=(*((x.tensor,) if trains else ()), offsets.tensor),
        backward_workspace=weights * t.parameter_width * (trains and not stays),
    )


def _shared(t: Torch, spec: MoESpec) -> str:
    """The name of the shared experts' module."""
    if t.hf.family.moe == "hunyuan":
        return "shared_mlp"
    return "shared_expert" if spec.shared_expert_gate else "shared_experts"


def _mlp_of_shared(t: Torch, spec: MoESpec, x: Array) -> Array:
    module = f"{_module(t)}.{_shared(t, spec)}"
    ctx = t.r.ctx
    if not spec.gated:
        return plain_mlp(t, module, x, spec.shared_expert_intermediate_size, bias=spec.add_bias)
    return gated_mlp(t, module, x, ctx.tokens, ctx.hidden_size, spec.shared_expert_intermediate_size)


def _gated(t: Torch, x: Array, shared: Array) -> Array:
    """Shared experts times a sigmoid of their gate (``Qwen2MoeSparseMoeBlock``)."""
    gate = t.linear("mlp.shared_expert_gate", x, t.r.ctx.tokens, t.r.ctx.hidden_size, 1)
    gate = t.saves_output("shared expert's gate", gate)
    gated = t.mul("shared expert, gated", shared, gate, broadcast=True)
    t.keep_alive(shared, gate)
    return gated
