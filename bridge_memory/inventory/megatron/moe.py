"""Mixture of experts: router, dispatch, routed and shared experts, combine.

Source: megatron-core ``transformer/moe/{moe_layer,router,token_dispatcher,experts,moe_utils}.py``;
TE ``module/grouped_linear.py``, ``permutation.py``. Shapes: N = T_sp tokens enter, each goes to k experts; P = N k
permuted tokens leave, R arrive at this rank's E / e experts (R = P x ETP when routing is balanced), f is the
expert's local inner width, w its model width (h, or the latent size).
"""

from __future__ import annotations

from functools import partial
from math import ceil, comb
from typing import Any, NamedTuple

from bridge_memory.components import Part
from bridge_memory.inventory.megatron.mlp import activation, halves
from bridge_memory.inventory.megatron.shared_experts import Overlapped, record_shared_experts
from bridge_memory.releases import (
    AUXILIARY_SCORES_IN_FP32,
    COMBINED_IN_TWO_STEPS,
    EXPERTS_FUSED_BY_OPS,
    FC1_OUTPUT_HELD,
    FP4_PADDED_TO_128,
    FUSED_ROUTER_SCORES_IN_FP32,
    GATES_CLAMPED,
    PERMUTED_BY_ARGSORT,
    ROUTER_SCORES_IN_FP32,
    ROWS_ADDED_DETERMINISTICALLY,
    SHARED_EXPERTS_FINISH_WITH_THE_EXCHANGE,
)
from bridge_memory.spec import DTYPE_BYTES, MoESpec, divide
from bridge_memory.tapes import frozen
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.parameters import EXPERT_NUMBER, Use
from bridge_memory.tapes.recorder import Recorder, Scratch
from bridge_memory.tapes.symbolic import chosen, computed, largest, smallest
from bridge_memory.tapes.tape import Tensor

#: Module of the routed experts.
EXPERTS = "mlp.experts"


class _Tokens(NamedTuple):
    """Token counts of one MoE layer on this rank."""

    entering: int
    permuted: int
    #: Tokens after the all-to-all, before ETP gathers them.
    arrived: int
    received: int
    #: Tokens that arrive when each is sent once to every rank that has an expert for it (flex dispatcher).
    arriving_once: int = 0


def routed_tokens(ctx: BlockContext, spec: MoESpec) -> _Tokens:
    """N, P and R: balanced routing times the imbalance, and at most the capacity of the experts if there is one.

    With a capacity factor a rank drops tokens beyond ceil(N k / E x factor) per expert; with padding it sends exactly
    that many (``moe_utils.py: get_capacity, apply_router_token_dropping``), however uneven the routing.
    """
    factor = ctx.impl.moe_expert_capacity_factor
    n = ctx.tokens_sp
    permuted, imbalance = n * spec.topk, ctx.impl.moe_imbalance
    if factor is not None:
        wanted = ceil(n * spec.topk / spec.num_experts * factor)
        capacity = smallest(wanted, n) * spec.num_experts
        if ctx.impl.moe_pad_expert_input_to_capacity:
            # The allgather dispatcher uses the routing map, which contains a token at most once per expert.
            by_map = ctx.impl.moe_token_dispatcher_type == "allgather"
            permuted, imbalance = capacity if by_map else wanted * spec.num_experts, 1.0
        else:
            imbalance = smallest(permuted * imbalance, capacity) / smallest(permuted, capacity)
            permuted = smallest(permuted, capacity)
    once = padding = 0
    if _routers_pad(ctx) and not _pads_in_dispatch(ctx):
        # Padding is half of the alignment on average. It is added for every expert before tokens are sent
        # (``token_dispatcher.py: MoEAlltoAllTokenDispatcher.dispatch_preprocess``), by DeepEP after they are received
        # (``_pad_routing_map``).
        half = _alignment(ctx) // 2
        if ctx.impl.moe_token_dispatcher_type == "flex":
            padding = spec.num_experts // ctx.ep * half
        else:
            permuted += spec.num_experts * half
    if ctx.impl.moe_token_dispatcher_type == "flex":
        once = round(n * computed(partial(ranks_per_token, spec), ctx.ep) * ctx.etp * imbalance)
    budget = ctx.impl.moe_expert_rank_capacity_factor
    if budget is not None:
        received = computed(partial(rank_budget, spec.topk, budget, _alignment(ctx)), n)
        return _Tokens(n, permuted, received, received, once)
    received = round(permuted * ctx.etp * imbalance) + padding
    return _Tokens(n, permuted, round(permuted * imbalance), received, once)


def rank_budget(topk: int, factor: float, alignment: int, tokens: int) -> int:
    """Rows that HybridEP allocates for a rank's experts, however many tokens arrive (``token_dispatcher.py:
    _HybridEPManager.setup_metadata``)."""
    return -(-int(tokens * topk * factor) // alignment) * alignment


def fused_by_ops(ctx: BlockContext) -> bool:
    """Whether fc1, activation and fc2 of experts are operations of Transformer Engine's fuser. They save the same as
    the modules: fc1's input and output, the probabilities, fc2's input (TE ``ops/fused/grouped_mlp.py``, ``ops/basic/
    {grouped_linear,swiglu}.py``)."""
    impl = ctx.impl
    fuses = impl.use_transformer_engine_op_fuser and impl.te_grouped_gemm
    return fuses and EXPERTS_FUSED_BY_OPS(impl)


#: Recipe -> rows; other recipes 16 (``fp8_utils.py: get_fp8_align_size``, ``fp4_utils.py: get_fp4_align_size``).
_ALIGNED = {"mxfp8": 32, "nvfp4": 128}


def _alignment(ctx: BlockContext) -> int:
    """The number of rows to multiples of which quantized experts' rows are padded (``moe_utils.py:
    get_align_size_for_quantization``)."""
    if fused_by_ops(ctx):
        return 256
    if not ctx.te or ctx.fp8 is None:
        return 1
    return _ALIGNED.get(ctx.fp8_recipe, 16)


def ranks_per_token(spec: MoESpec, ep: int) -> float:
    """Expected expert-parallel ranks that hold one of a token's k experts, under uniform routing.

    Group-limited routing selects from group_topk of num_groups groups. A rank holds a part of one group, or several
    groups, of which any number may be selected.
    """
    groups, selected = spec.router_num_groups or 1, spec.router_group_topk or spec.router_num_groups or 1
    if selected >= groups:
        groups = selected = 1
    in_group = spec.num_experts / groups
    candidates = round(selected * in_group)

    def holds_one(experts: int) -> float:
        """Of so many of the candidates."""
        return 1 - comb(candidates - experts, spec.topk) / comb(candidates, spec.topk)

    if ep >= groups:
        return max(1.0, ep * selected / groups * holds_one(round(spec.num_experts / ep)))
    own = round(groups / ep)
    some = sum(
        comb(own, n) * comb(groups - own, selected - n) * holds_one(round(n * in_group))
        for n in range(1, min(own, selected) + 1)
    )
    return ep * some / comb(groups, selected)


def record_moe(r: Recorder, spec: MoESpec, x: Tensor) -> Tensor:
    """From the residual stream [T_sp, h] to the MoE output [T_sp, h] (pre_mlp_layernorm included)."""
    ctx, tape = r.ctx, r.tape
    recompute_norm = ctx.recomputes("layernorm") and not r.discards_streams
    with r.offload("mlp_norm"), tape.discardable("pre_mlp_layernorm", (x,), enabled=recompute_norm) as region:
        normed = r.hold(r.norm("pre_mlp_layernorm", x, ctx.hidden_size, ctx.tokens_sp))
    r.discard_streams(normed)
    tape.landmark("router")
    with tape.checkpoint("moe", (normed,), enabled=ctx.recomputes("moe")):
        y = moe_layer(r, spec, normed)
    if recompute_norm:
        tape.discard(region, normed)
    return y


def moe_layer(r: Recorder, spec: MoESpec, x: Tensor, *, shared_input: Tensor | None = None,
              router_input: Tensor | None = None) -> Tensor:  # fmt: skip
    """The layer without its norm. ``shared_input``, ``router_input``: inputs of shared experts and router if not ``x``,
    as in Gemma 4, which also norms the router's input, scales its probabilities, and norms both outputs
    (megatron-bridge ``models/gemma/modeling_gemma4.py: Gemma4MoELayer, Gemma4TopKRouter``)."""
    ctx, tape, first = r.ctx, r.tape, len(r.rows)
    shared, hidden = None, ctx.tokens_sp * ctx.hidden_size * ctx.act
    gemma = router_input is not None
    overlaps = spec.shared_expert_intermediate_size and ctx.impl.moe_shared_expert_overlap and not gemma
    if spec.shared_expert_intermediate_size and not overlaps:
        tape.part = Part.MOE_SHARED_EXPERTS
        entering = shared_input or x
        with tape.checkpoint("shared_experts", (entering,), enabled=ctx.recomputes("shared_experts")):
            shared = record_shared_experts(r, spec, entering)
    n = routed_tokens(ctx, spec)
    tape.part = Part.MOE_ROUTER
    entering = x
    if router_input is not None:
        r.parameter("mlp.router.per_expert_scale", (spec.num_experts,))
        r.parameter("mlp.router.scale", (ctx.hidden_size,))
        normed = r.torch_norm("router norm", router_input, ctx.hidden_size, ctx.tokens_sp, scaled=False)
        weighted = tape.make("weighted router input", normed, hidden, saves=() if r.frozen else (normed,))
        entering = tape.make("scaled router input", weighted, hidden)
    probs, routing_map = _router(r, spec, entering, n)
    if gemma:
        table, kept = probs.bytes, () if r.frozen else (probs,)
        sums = tape.tensor("sums of probabilities", n.entering * _probability_width(ctx), grad=False)
        shares = tape.make("normed probabilities", probs, table, saves=(*kept, sums), also=(sums,))
        probs = tape.make("scaled probabilities", shares, table, saves=() if r.frozen else (shares,))
    width = spec.latent_size or ctx.hidden_size
    tokens = x
    if spec.latent_size:
        tokens = r.plain_linear("mlp.fc1_latent_proj", x, n.entering, ctx.hidden_size, width)
    later = tape.delaying
    overlapped = Overlapped(r, spec, x) if overlaps else None
    with tape.assumed(not ctx.impl.moe_pad_expert_input_to_capacity):
        dispatched, dispatched_probs, row_map = _dispatch(r, spec, tokens, probs, routing_map, n, width, overlapped)
        tape.part = Part.MOE_EXPERTS
        expert_out = _experts(r, spec, dispatched[-1], dispatched_probs, n, width)
        tape.part = Part.MOE_ROUTER
        y, combined, held = _combine(r, spec, expert_out, row_map, n, width, dispatched, overlapped)
    if spec.latent_size:
        y = r.plain_linear("mlp.fc2_latent_proj", y, n.entering, width, ctx.hidden_size)
    if later:
        tape.delay_ends()
    shared_output: tuple[Tensor, ...] = ()
    if gemma:
        y = r.norm("mlp.post_moe_layernorm", y, ctx.hidden_size, ctx.tokens_sp)
        if shared is not None:
            tape.part = Part.MOE_SHARED_EXPERTS
            shared_output = (shared,)
            shared = r.norm("mlp.post_shared_expert_layernorm", shared, ctx.hidden_size, ctx.tokens_sp)
    if shared is not None:
        # Overlapped, the node that made it refers to it until it has run backward (``TransformerLayerNode.detach``).
        kept = (shared,) if ctx.impl.overlap_moe_expert_parallel_comm else ()
        y = tape.make("routed + shared output", (y, shared), hidden, alias=True, saves=kept)
    tape.keep_alive(held)  # a variable of ``MoELayer.forward``, whatever ``postprocess`` makes of it
    if gemma:
        # Variables of ``forward_with_separate_inputs``, which calls the norms.
        tape.keep_alive(*shared_output, combined, *dispatched[1:-1])
    r.arrange(first, *(f"mlp.{m}" for m in _MODULES))
    return y


#: Submodules, in the order in which they are registered.
_MODULES = ("router", "fc1_latent_proj", "fc2_latent_proj", "experts", "shared_experts")


def _router(r: Recorder, spec: MoESpec, x: Tensor, n: _Tokens) -> tuple[Tensor, Tensor]:
    """Logits, scores and top-k: [N, E] each, in moe_router_dtype; the boolean map [N, E]."""
    ctx, tape = r.ctx, r.tape
    experts = spec.num_experts
    r.parameter("mlp.router.weight", (experts, ctx.hidden_size), use=Use.ROUTER)
    if spec.add_router_bias:
        r.parameter("mlp.router.bias", (experts,))
    width = _probability_width(ctx)
    table = n.entering * experts * width
    # RouterGatingLinearFunction saves its inputs in their original dtype; the casts are scratch.
    casts = (n.entering + experts) * ctx.hidden_size * width if width != ctx.act else 0
    if spec.router_in_fp32:  # Bridge models/minimax_m3/minimax_m3_bridge.py: MiniMaxM3TopKRouter.gating
        x, casts = tape.make("tokens in fp32", x, 4 * n.entering * ctx.hidden_size), 0
    logits = tape.make("router logits", x, table, saves=(x,), workspace=casts)
    if r.frozen:
        logits = frozen.router_logits(r, x, logits, n.entering, experts)
    if ctx.impl.moe_z_loss_coeff is not None:
        # The log-sum-exp saves the logits and its output; the loss saves that output too (``moe_utils.py:
        # z_loss_func``).
        sums = tape.make("z-loss of the logits", logits, n.entering * width, saves=(logits,), save_output=True)
        logits = tape.make("router logits with z-loss", (logits, sums), 0, saves=(sums,), alias=True)
        logits.grad_bytes = 0
    index = tape.tensor("top-k indices", n.entering * spec.topk * 8, grad=False)
    routing_map = tape.tensor("routing map", n.entering * experts, grad=False)
    probs = tape.tensor("routing probabilities", table)
    if ctx.impl.moe_router_fusion and not spec.experts_by_token:
        own = 4 if FUSED_ROUTER_SCORES_IN_FP32(ctx.impl) else width
        scores = tape.tensor("router scores", n.entering * experts * own, grad=False)
        tape.op("top-k", logits, (probs, routing_map, scores), saves=(routing_map, scores))
    else:
        chosen, kept = _scores(r, spec, logits, n, width)
        if _adds_rows(r):
            kept = (*kept, tape.tensor("rows of the router's tables", 8 * n.entering, grad=False))
        tape.op(
            "top-k", chosen, (probs, routing_map, index, *kept), saves=(index, *kept),
            workspace=n.entering * experts * 4 + table,
        )
    if ctx.impl.moe_expert_capacity_factor is not None:
        # Multiplied by the map of tokens that are not dropped, which replaces the router's map (``moe_utils.py:
        # apply_router_token_dropping``).
        within = tape.tensor("routing map within capacity", n.entering * experts, grad=False)
        tape.op("tokens within capacity", routing_map, within)
        routing_map = within
        probs = tape.make("routing probabilities within capacity", probs, table, saves=(routing_map,))
    if spec.router_load_balancing_type not in ("none", "sinkhorn"):
        if ctx.impl.moe_router_fusion:
            wide = FUSED_ROUTER_SCORES_IN_FP32(ctx.impl)
        else:
            wide = spec.router_score_function == "softmax" or AUXILIARY_SCORES_IN_FP32(ctx.impl)
        own = 4 if wide else width
        source = logits if ctx.impl.moe_router_fusion else _under_the_root(r, spec, logits, n.entering * experts, width)
        aux = tape.make("auxiliary-loss scores", source, n.entering * experts * own, save_output=True)
        out = tape.make("routing probabilities with auxiliary loss", (probs, aux), 0, saves=(aux,), alias=True)
        out.grad_bytes = 0
    return probs, routing_map


def _scores(r: Recorder, spec: MoESpec, logits: Tensor, n: _Tokens, width: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(the input of top-k, what computing the scores saves).

    The softmax is of the k chosen logits in fp32 (of all logits if k is 1); the sigmoid is of all logits in fp32, and
    so is the root of the softplus, which saves those logits too. With an expert bias, the scores before it, the chosen
    scores and their sums are saved too, in the router's dtype until 0.17 and in fp32 from then on (``moe_utils.py:
    topk_routing_with_score_function``). Experts that a table has for each token: scores of all experts, and the chosen
    ones and their sums (Megatron-LM ``router.py: TopKRouter._hash_routing``).
    """
    tape = r.tape
    everything, chosen = n.entering * spec.num_experts, n.entering * spec.topk
    if spec.router_score_function == "softmax" and spec.topk > 1:
        return logits, (tape.tensor("chosen scores", 4 * chosen, grad=False),)
    source = _under_the_root(r, spec, logits, everything, width)
    wide = tape.make(
        "router scores", source, 4 * everything, save_output=True,
        workspace=4 * everything if source is logits and width != 4 else 0,
    )
    if ROUTER_SCORES_IN_FP32(r.ctx.impl):
        width = 4
    scores = wide if width == 4 else tape.make("router scores, cast", wide, everything * width)
    if spec.router_score_function == "softmax" or not (spec.router_enable_expert_bias or spec.experts_by_token):
        return scores, ()
    return scores, (scores, tape.tensor("chosen scores", (chosen + n.entering) * width, grad=False))


def _under_the_root(r: Recorder, spec: MoESpec, logits: Tensor, everything: int, width: int) -> Tensor:
    """The softplus of the logits in fp32, which saves them, if scores are its roots; else the logits themselves."""
    if spec.router_score_function != "sqrtsoftplus":
        return logits
    copy = logits if width == 4 else r.tape.make("router logits in fp32", logits, 4 * everything)
    return r.tape.make("softplus of the router logits", copy, 4 * everything, saves=(copy,))


def _probability_width(ctx: BlockContext) -> int:
    """Bytes of one of the router's probabilities."""
    return DTYPE_BYTES[ctx.impl.moe_router_dtype or ctx.params_dtype]


def held_routing_bytes(ctx: BlockContext, spec: MoESpec) -> int:
    """Bytes that a layer's dispatcher holds from one microbatch to the next: probabilities and map, [N, E], of all
    tokens and experts; with allgather the map of the local experts (``token_dispatcher.py``: ``self.probs``,
    ``self.routing_map``, ``self.local_map``). A map that is saved for backward is in ``held_order_bytes``."""
    impl = ctx.impl
    if impl.moe_token_dispatcher_type == "flex":
        return 0
    held = _map_bytes(ctx, spec) - _map_kept_bytes(ctx, spec)
    if impl.moe_token_dispatcher_type != "allgather":
        held += ctx.tokens_sp * spec.num_experts * _probability_width(ctx)
    return held


def _map_bytes(ctx: BlockContext, spec: MoESpec) -> int:
    """Bytes of the map that a dispatcher holds."""
    if ctx.impl.moe_token_dispatcher_type == "allgather":
        return ctx.tokens_sp * ctx.ep * ctx.etp * (spec.num_experts // ctx.ep)
    return ctx.tokens_sp * spec.num_experts


def _map_kept_bytes(ctx: BlockContext, spec: MoESpec) -> int:
    """``_map_bytes`` if the same tensor is saved for backward, else 0.

    With alltoall it is the router's map: a fused top-k saves it (Transformer Engine ``router.py:
    FusedTopkScoreFunction``), and so does the multiplication by the map within capacity. With allgather it is the map
    of the local experts, whose transpose the selection of probabilities saves: the same storage if there is one expert
    (``token_dispatcher.py: MoEAllGatherTokenDispatcher.dispatch_postprocess``).
    """
    impl = ctx.impl
    if impl.moe_token_dispatcher_type == "allgather":
        turned: int = chosen(ctx.ep == spec.num_experts, _map_bytes(ctx, spec), 0)
        return turned
    kept = impl.moe_router_fusion or impl.moe_expert_capacity_factor is not None
    return _map_bytes(ctx, spec) if kept else 0


def held_order_bytes(ctx: BlockContext, spec: MoESpec) -> int:
    """Bytes that the dispatcher still holds once backward has freed its saved tensors: the row map of ``_dispatch``;
    with allgather also the probabilities of the received tokens; and a map that was saved for backward."""
    impl = ctx.impl
    if impl.moe_token_dispatcher_type == "flex":
        return 0
    alltoall = impl.moe_token_dispatcher_type != "allgather"
    received = ctx.tokens_sp * spec.topk * (1 if alltoall else ctx.etp)
    width = _probability_width(ctx)
    more = _map_kept_bytes(ctx, spec) + (0 if alltoall else received * width)
    if not impl.moe_permute_fusion:
        return more + 8 * received
    rows, columns = (ctx.tokens_sp, spec.num_experts) if alltoall else (
        ctx.tokens_sp * ctx.ep * ctx.etp, spec.num_experts // ctx.ep
    )  # fmt: skip
    return more + rows * (2 * columns + 1) * 4


def routed_gradients(ctx: BlockContext, spec: MoESpec) -> int:
    """Bytes of the gradients of a layer's tokens before the exchange, after it, and before the exchange back: [P, w],
    then [R, w] twice."""
    n = routed_tokens(ctx, spec)
    return (n.permuted + 2 * n.arrived) * (spec.latent_size or ctx.hidden_size) * ctx.act


def _dispatch(
    r: Recorder, spec: MoESpec, x: Tensor, probs: Tensor, routing_map: Tensor, n: _Tokens, width: int,
    overlapped: Overlapped | None,
) -> tuple[list[Tensor], Tensor, Tensor]:  # fmt: skip
    """Permute, exchange and sort tokens: [N, w] -> [R, w], with their probabilities and the row map. ``overlapped``:
    shared experts whose first half runs during the exchange.

    Returns the tokens after each of the three steps of ``moe_layer.py: MoELayer.forward``: its local variables hold the
    first two until the layer has run.
    """
    ctx, tape, impl = r.ctx, r.tape, r.ctx.impl
    local_experts = divide(spec.num_experts, ctx.ep, "num_moe_experts", "expert_model_parallel_size")
    row = width * ctx.act
    if impl.moe_token_dispatcher_type == "allgather":
        everyone = ctx.tokens_sp * ctx.ep * ctx.etp  # The group is that of the experts: pg_collection.tp_ep.
        if ctx.ep * ctx.etp > 1:
            gathered = everyone * row
            r.keep(Scratch.MPU, gathered)
            x = tape.make("gathered tokens", x, 0)
            x.grad_bytes = gathered
            probs = tape.make("gathered probabilities", probs, everyone * spec.num_experts * _probability_width(ctx))
            routing_map = tape.make(
                "gathered routing map", routing_map, everyone * spec.num_experts, grad=False
            )
    prob_bytes = _probability_width(ctx)
    if impl.moe_token_dispatcher_type == "flex":
        return _flex_dispatch(r, spec, x, probs, n, row, local_experts, overlapped)
    alltoall = impl.moe_token_dispatcher_type != "allgather"
    first = n.permuted if alltoall else n.received
    rows, columns = (n.entering, spec.num_experts) if alltoall else (everyone, local_experts)
    row_map, by_expert = _permutation(r, rows, columns, first, prob_bytes, alltoall=alltoall)
    permuted_probs = tape.tensor("permuted probabilities", first * prob_bytes)
    permuted = tape.make("permuted tokens", (x, probs), first * row, saves=(row_map, *by_expert),
                         also=(row_map, *by_expert, permuted_probs))
    tape.keep_alive(routing_map)
    if not alltoall:
        _node_of_experts(r)
        return [x, probs, permuted], permuted_probs, row_map
    steps = [permuted]
    if overlapped is not None:
        overlapped.first_half()
    _cut(r)
    if ctx.ep > 1:
        permuted = tape.make("tokens after all-to-all", permuted, n.arrived * row)
        permuted_probs = tape.make("probabilities after all-to-all", permuted_probs, n.arrived * prob_bytes)
    steps.append(permuted)
    _cut(r)
    _node_of_experts(r)
    if ctx.etp > 1:
        permuted = tape.make("tokens gathered over ETP", permuted, n.received * row)
        permuted_probs = tape.make("probabilities gathered over ETP", permuted_probs, n.received * prob_bytes)
    if _sorts(r, local_experts):
        order = _sort_order(r, n)
        permuted = tape.make("tokens sorted by expert", permuted, n.received * row, saves=order, also=order)
        permuted_probs = tape.make("sorted probabilities", permuted_probs, n.received * prob_bytes)
    return [*steps, permuted], permuted_probs, row_map


def _permutation(
    r: Recorder, rows: Any, columns: Any, first: Any, prob_bytes: int, *, alltoall: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """What the permutation of ``rows`` tokens for ``columns`` experts saves for tokens, and for probabilities: the
    row map, and tables by expert. ``first``: permuted rows."""
    tape, impl = r.tape, r.ctx.impl
    by_expert: tuple[Tensor, ...] = ()
    if impl.moe_permute_fusion:
        # int32 map of destination rows: [N, 2 E + 1] (TE permutation.py: _moe_permute_mask_map).
        row_map = tape.tensor("permutation row map", rows * (2 * columns + 1) * 4, grad=False)
    else:
        row_map = tape.tensor("permutation indices", first * 8, grad=False)
    if alltoall and impl.moe_pad_expert_input_to_capacity and not impl.moe_permute_fusion:
        # Probabilities are selected by separate indices (``moe_utils.py: permute``, drop_and_pad).
        by_expert = (tape.tensor("indices of probabilities", first * 8, grad=False),)
    elif alltoall and not impl.moe_permute_fusion and PERMUTED_BY_ARGSORT(impl):
        by_expert = (tape.tensor("order of the routing map", 8 * rows * columns, grad=False),)
    elif not (impl.moe_permute_fusion and alltoall):
        # Both are transposed, and masked_select saves the copies (``moe_utils.py: permute``,
        # ``token_dispatcher.py: MoEAllGatherTokenDispatcher.dispatch_postprocess``).
        by_expert = (
            tape.tensor("routing map by expert", rows * columns, grad=False),
            tape.tensor("probabilities by expert", rows * columns * prob_bytes, grad=False),
        )
    return row_map, by_expert


def _node_of_experts(r: Recorder) -> None:
    """After the exchange, weight gradients of experts are delayed until everything from here to the exchange back has
    run backward (megatron-core ``models/common/model_chunk_schedule_plan.py``: the node ``mlp``)."""
    if r.tape.delaying:
        r.tape.delay("experts' weight gradients")


def _cut(r: Recorder) -> None:
    """Before either exchange and after the first, if overlapped, a node of the schedule ends (``models/gpt/
    fine_grained_callables.py: build_transformer_layer_callables``)."""
    if r.ctx.impl.overlap_moe_expert_parallel_comm:
        r.tape.cut()


def _sorts(r: Recorder, local_experts: Any) -> bool:
    """Whether rows that came rank by rank are copied expert by expert. Padded to capacity they are a transposed view
    [ranks, experts, capacity, h], which is contiguous if only one rank sends (``MoEAlltoAllTokenDispatcher:
    dispatch_postprocess, combine_preprocess``)."""
    ctx = r.ctx
    return local_experts > 1 and not (ctx.impl.moe_pad_expert_input_to_capacity and ctx.ep == 1 and ctx.etp == 1)


def _sort_order(r: Recorder, n: _Tokens) -> tuple[Tensor, ...]:
    """int32 [R] of the fused sort (TE ``permutation.py: _moe_chunk_sort``). Unfused, views are concatenated, and padded
    to capacity transposed, which saves nothing."""
    impl = r.ctx.impl
    if not impl.moe_permute_fusion or impl.moe_pad_expert_input_to_capacity:
        return ()
    return (r.tape.tensor("sorted rows", 4 * n.received, grad=False),)


def _flex_dispatch(
    r: Recorder, spec: MoESpec, x: Tensor, probs: Tensor, n: _Tokens, row: int, local_experts: int,
    overlapped: Overlapped | None,
) -> tuple[list[Tensor], Tensor, Tensor]:  # fmt: skip
    """DeepEP sends a token to each rank once and permutes it there; HybridEP's exchange also permutes.

    Source: ``token_dispatcher.py: _DeepepManager, _HybridEPManager``, ``fused_a2a.py``. Probabilities are fp32.
    """
    tape = r.tape
    steps: list[Tensor] = []
    ranks, once = r.ctx.ep * r.ctx.etp, n.arriving_once
    made: tuple[Tensor, ...]
    kept: tuple[Tensor, ...]
    # Overlapped, the node of the exchange refers to its inputs (``models/common/utils.py: should_free_input``).
    sent = (x, probs) if r.ctx.impl.overlap_moe_expert_parallel_comm else ()
    _cut(r)
    if r.ctx.impl.moe_flex_dispatcher_backend == "deepep":
        handle = tape.tensor("DeepEP's handle", _deepep_handle(r.ctx, spec, n), grad=False)
        chosen_experts = tape.tensor("experts of every token", 8 * n.entering * spec.topk, grad=False)
        saves = (handle, chosen_experts)
        x = tape.make("dispatched tokens", (x, probs), once * row, saves=(*saves, *sent), also=saves)
        steps.append(x)
        _cut(r)
        _node_of_experts(r)
        row_map, by_expert = _permutation(r, once, local_experts, n.received, 4, alltoall=True)
        # Probabilities are scattered into a table of all experts, which saves its indices (``_indices_to_multihot``).
        places = tape.tensor("places of probabilities", once * spec.topk + 16 * n.received, grad=False)
        made = kept = (row_map, *by_expert, places)
    else:
        # Of ``handle``: places of every token on every rank, which local experts a token of the group goes to, and rows
        # of every received one (DeepEP ``csrc/hybrid_ep/executor/executor.cu: metadata_preprocess_core``,
        # ``extension/permute.cu: permute_processing``).
        row_map = tape.tensor(
            "HybridEP's handle", n.entering * ranks * (4 + local_experts) + 4 * once * local_experts, grad=False
        )
        made, kept = (row_map,), (row_map, *sent)
    permuted_probs = tape.tensor("permuted probabilities", n.received * 4)
    permuted = tape.make(
        "permuted tokens", (x, probs), n.received * row, saves=kept, also=(*made, permuted_probs)
    )
    if r.ctx.impl.moe_flex_dispatcher_backend != "deepep":
        _cut(r)
        _node_of_experts(r)
    if overlapped is not None:
        overlapped.first_half()
    return [*steps, permuted], permuted_probs, row_map


#: Ranks that reach each other over NVLink (DeepEP ``csrc/kernels/configs.cuh: NUM_MAX_NVL_PEERS``).
DEEPEP_PEERS = 8


def _deepep_handle(ctx: BlockContext, spec: MoESpec, n: _Tokens) -> Any:
    """Bytes of the handle that both of DeepEP's exchanges keep: which ranks a token goes to (bool), its places in the
    queues (int32), where received ones are from. Between nodes a token has a place per node, tokens that pass through
    this rank one per rank of the node (DeepEP ``csrc/deep_ep.cpp: Buffer::intranode_dispatch, internode_dispatch``)."""
    ranks = ctx.ep * ctx.etp
    if ranks <= DEEPEP_PEERS:
        return n.entering * ranks * (1 + 4) + 4 * n.arriving_once
    nodes = ranks // DEEPEP_PEERS
    passing = round(n.entering * computed(partial(ranks_per_token, spec), nodes))
    return n.entering * (ranks + 4 * nodes) + 4 * DEEPEP_PEERS * passing + 8 * n.arriving_once


def _experts(r: Recorder, spec: MoESpec, x: Tensor, probs: Tensor, n: _Tokens, width: int) -> Tensor:
    """fc1, weighted activation, fc2 of this rank's experts over R tokens."""
    ctx, tape, impl = r.ctx, r.tape, r.ctx.impl
    local_experts = divide(spec.num_experts, ctx.ep, "num_moe_experts", "expert_model_parallel_size")
    f = divide(spec.moe_ffn_hidden_size, ctx.etp, "moe_ffn_hidden_size", "expert_tensor_parallel_size")
    fc1_width = 2 * f if spec.gated else f
    _expert_parameters(r, spec, local_experts, f, fc1_width, width)
    grouped = impl.moe_grouped_gemm
    if not grouped:
        return _sequential_experts(r, spec, x, probs, n, width, local_experts, f)
    wgrad1 = r.weight_grad((fc1_width, width), te=ctx.te) * local_experts
    wgrad2 = r.weight_grad((width, f), te=ctx.te) * local_experts
    # fp8 GEMMs need every expert's rows in multiples of 16 or 32; on average half a multiple is padding. HybridEP pads
    # while it permutes; else there is a padded copy before and an unpadded one after (experts.py: TEGroupedMLP.forward,
    # quantization_padding).
    rows = _padded(r, n.received, local_experts)
    pads = _pads(ctx) and not _pads_in_dispatch(ctx) and not _routers_pad(ctx)
    unpadded = x
    if pads:
        x = tape.make("padded tokens", x, rows * width * ctx.act)
    # The fuser's gated units do not recompute (TE ``ops/basic/swiglu.py: _ScaledGLU.__init__``).
    selected = not fused_by_ops(ctx) and ctx.recomputes("moe_act")
    with r.offload("expert_fc1"):
        mid = _linear(r, "experts fc1", f"{EXPERTS}.linear_fc1", x, rows, width, fc1_width, wgrad1)
    with r.offload("moe_act"), tape.discardable("moe_act", (mid, probs), enabled=selected) as region:
        act = _weighted_activation(r, spec, mid, probs, rows, f)
    out = _linear(
        r, "experts fc2", f"{EXPERTS}.linear_fc2", act, rows, f, width, wgrad2, row=True, original=selected
    )
    if selected:
        tape.discard(region, act)
    if spec.add_bias and fused_by_ops(ctx):
        # Added in place; the probabilities are saved for its backward (TE ``ops/basic/grouped_linear.py``: scale_bias).
        out = tape.make("experts output with bias", (out, probs), out.bytes, saves=(probs,), alias=True)
    elif spec.add_bias:
        out = _add_weighted_bias(r, out, probs, rows * width, local_experts)
    if pads:
        out = tape.make("unpadded outputs", out, n.received * width * ctx.act)
    # Local variables of the experts' forward; fp8 GEMMs save copies instead of these. Earlier releases have no variable
    # for fc1's output.
    tape.keep_alive(unpadded, x, act, *((mid,) if FC1_OUTPUT_HELD(impl) else ()))
    return out


def _add_weighted_bias(r: Recorder, x: Tensor, probs: Tensor, elements: int, experts: int) -> Tensor:
    """x + bias * probability, expert by expert (``experts.py: TEGroupedMLP._apply_bias``).

    The sums are in the wider dtype of the two, concatenated, and cast. In backward an expert's gradient times bias and
    times probability are alive together with the gradient of all experts; the results are concatenated again.
    """
    act, wide = r.ctx.act, max(r.ctx.act, _probability_width(r.ctx))
    temporary = 2 * wide * elements // experts + (wide - act) * elements
    return r.tape.make(
        "experts output with bias", (x, probs), elements * act, saves=(probs,),
        workspace=(2 * wide - act) * elements,
        backward_workspace=temporary if wide > act else largest(0, temporary - act * elements),
    )


def _linear(
    r: Recorder, name: str, module: str, x: Tensor, rows: Any, in_features: Any, out_features: Any, wgrad: Any, *,
    row: bool = False, original: bool = False, grouped: bool = True,
) -> Tensor:  # fmt: skip
    """fc1 or (``row``) fc2, [rows, in] -> [rows, out], of all experts (``grouped``) or of one. ``wgrad``: scratch for
    the weight's gradient. ``original``: it saves its input unquantized, since that is recomputed for backward."""
    if r.frozen:
        return frozen.expert_linear(r, module, x, rows, in_features, out_features, row=row, label=f"{name} output")
    kept, also = r.linear_input(name, x, rows * in_features, original=original)
    layouts = r.quantized_input(rows * in_features, original=original)
    whole = 0
    if r.ctx.impl.moe_paged_stash:
        whole = kept[0].bytes
        layouts += whole if r.fp8 else 0
        kept = also = (_stashed(r, kept[0]),)
    again = whole + r.requantized_input(rows * in_features, original=original)
    later = None
    if r.tape.delaying:
        later = r.delayed(kept, rows * out_features, 0 if grouped else wgrad, gathered=again)
        if grouped:
            # Gradients of grouped weights are allocated in backward and returned; autograd copies them, because the
            # store holds them too (``grouped_linear.py``: wgrad_packed; torch ``accumulate_grad.h``).
            later = later._replace(made=later.made + 2 * wgrad)
    return r.tape.make(
        f"{name} output", x, rows * out_features * r.ctx.act, saves=kept, also=also, workspace=layouts,
        for_backward=0 if original else layouts,
        backward_workspace=(0 if later and not grouped else wgrad) + r.quantized_gradient(rows * out_features) + again,
        delayed=later,
    )


def _stashed(r: Recorder, x: Tensor) -> Tensor:
    """What the paged stash saves of a tensor with all rows of the budget: the average number of rows times the buffer's
    factor. The stash is one persistent buffer for all microbatches in flight; here each microbatch counts its share
    (``paged_stash.py: PagedStashManager.allocate_stash_buffers, on_save_for_backward``)."""
    impl = r.ctx.impl
    assert impl.moe_expert_rank_capacity_factor is not None
    share = impl.moe_paged_stash_buffer_size_factor_cuda / impl.moe_expert_rank_capacity_factor
    return r.tape.tensor(f"{x.name} in the stash", round(x.bytes * share), grad=False)


def _padded(r: Recorder, rows: Any, experts: Any) -> Any:
    """``rows`` with each expert's padding to the multiple that fp8 needs: half a multiple on average, and at least one
    multiple for each expert with a row. A budget of rows includes the padding."""
    multiple = _multiple(r)
    if not multiple:
        return rows
    return smallest(largest(rows + experts * (multiple // 2), experts * multiple), rows * multiple)


def _multiple(r: Recorder) -> int:
    """The multiple to which an expert's rows are padded; 0: they are not."""
    if not _pads(r.ctx) or r.ctx.impl.moe_expert_rank_capacity_factor is not None:
        return 0
    if _routers_pad(r.ctx) and not _pads_in_dispatch(r.ctx):
        return 0
    alignment = _alignment(r.ctx)
    if r.ctx.fp8_recipe == "nvfp4" and alignment == 128 and not _pads_in_dispatch(r.ctx):
        alignment = 128 if FP4_PADDED_TO_128(r.ctx.impl) else 64
    if r.unquantized and alignment < 256:
        # In an unquantized layer the recipe is Transformer Engine's default for the GPU (``quantization.py:
        # get_default_fp8_recipe``): mxfp8 on Blackwell.
        alignment = 32 if r.ctx.impl.gpu_arch == "blackwell" else 16
    return alignment


def _routers_pad(ctx: BlockContext) -> bool:
    return ctx.impl.moe_router_padding_for_quantization and _pads(ctx)


def _pads_in_dispatch(ctx: BlockContext) -> bool:
    """Whether HybridEP pads while it permutes, so that experts do not."""
    return ctx.impl.moe_token_dispatcher_type == "flex" and ctx.impl.moe_flex_dispatcher_backend == "hybridep"


def _pads(ctx: BlockContext) -> bool:
    """Whether experts' rows are padded: if the run uses fp8, even in layers that do not (``experts.py``:
    ``config.fp8``)."""
    return ctx.te and ctx.fp8 is not None


def _sequential_experts(
    r: Recorder, spec: MoESpec, x: Tensor, probs: Tensor, n: _Tokens, width: int, local_experts: int, f: int
) -> Tensor:
    """One expert after the other, on views of the tokens, which are padded copies in fp8; outputs are concatenated
    (``experts.py: SequentialMLP``)."""
    ctx, tape = r.ctx, r.tape
    fc1_width = 2 * f if spec.gated else f
    wgrad1, wgrad2 = (r.weight_grad(shape, te=ctx.te) for shape in ((fc1_width, width), (width, f)))
    each, more = n.received // local_experts, n.received % local_experts
    rows = [each + 1 if more > i else each for i in range(local_experts)]
    tokens: tuple[Tensor, ...] = (x,)
    scales: tuple[Tensor, ...] = (probs,)
    if local_experts > 1:
        tokens = tape.views("tokens by expert", x, *(("tokens of an expert", m * width * ctx.act) for m in rows))
        of_a_token = probs.bytes // n.received
        scales = tape.views(
            "probabilities by expert", probs, *(("probabilities of an expert", m * of_a_token) for m in rows)
        )
    outputs, pads = [], _pads(ctx) and not _routers_pad(ctx)
    for m, part, scale in zip(rows, tokens, scales, strict=True):
        whole = m
        if pads:
            whole = _padded(r, m, 1)
            part = tape.make("padded tokens", part, whole * width * ctx.act)
            scale = tape.make("padded probabilities", scale, whole * (probs.bytes // n.received))
        one = f"{EXPERTS}.local_experts.0"
        mid = _linear(r, "experts fc1", f"{one}.linear_fc1", part, whole, width, fc1_width, wgrad1, grouped=False)
        act = _weighted_activation(r, spec, mid, scale, whole, f)
        out = _linear(r, "experts fc2", f"{one}.linear_fc2", act, whole, f, width, wgrad2, row=True, grouped=False)
        if spec.add_bias:
            out = tape.make("experts output with bias", (out, scale), whole * width * ctx.act, saves=(scale,))
        if pads:
            tape.keep_alive(part)  # ``hidden``
            (out,) = tape.views("outputs without padding", out, ("output of an expert", m * width * ctx.act))
        outputs.append(out)
    if local_experts == 1:
        return outputs[0]
    tape.keep_alive(x)
    joined = tape.make("concatenated expert outputs", outputs, n.received * width * ctx.act, alias=True)
    if pads:
        tape.keep_alive(part)  # the last expert's ``hidden``
    return joined


def _weighted_activation(r: Recorder, spec: MoESpec, mid: Tensor, probs: Tensor, rows: int, f: int) -> Tensor:
    """activation(fc1) * probability (``experts.py: bias_act_func``). Fused: saves fc1's output and the probabilities.
    Unfused: saves the activation too, and the product may be in the router's dtype."""
    ctx, tape = r.ctx, r.tape
    out = rows * f * ctx.act
    fused = ctx.impl.bias_activation_fusion and spec.gated and spec.activation in ("silu", "quick_gelu")
    if spec.activation == "squared_relu":
        fused = ctx.impl.use_fused_weighted_squared_relu
    by_ops = fused_by_ops(ctx)
    if ctx.impl.moe_mlp_glu_interleave_size is not None and spec.gated and not (by_ops and r.fp8):
        # Gates and values are deinterleaved; quantized kernels of the fuser read them interleaved (``experts.py:
        # TEGroupedMLP._remove_glu_interleaving``; TE ``ops/basic/swiglu.py``).
        mid = tape.make("experts fc1 output, gates first", mid, mid.bytes)
    if fused and not by_ops and spec.activation == "quick_gelu" and spec.clamp_value and GATES_CLAMPED(ctx.impl):
        # Copies are clamped before the kernel, which saves them concatenated (``fused_bias_geglu.py:
        # weighted_bias_quick_geglu_impl``); that of SwiGLU clamps nothing.
        clamped = halves(r, "experts activation", mid, rows, f, clamped=True)
        mid = tape.make("experts fc1 output, clamped", clamped, 2 * out, alias=True)
    if fused or by_ops:
        kept = [mid, probs]
        if ctx.impl.moe_paged_stash:
            kept = [_stashed(r, mid), _stashed(r, probs)]
            return tape.make(
                "experts activation", (mid, probs), out, saves=kept, also=kept, backward_workspace=mid.bytes
            )
        return tape.make("experts activation", (mid, probs), out, saves=kept)
    # The grouped GEMM has added its bias.
    plain = activation(
        r, "experts activation", mid, rows, f, gated=spec.gated,
        bias=spec.add_bias and not ctx.impl.moe_grouped_gemm, kind="unfused", clamped=spec.clamp_value is not None,
    )
    wide = _probability_width(ctx)
    product = rows * f * wide
    # Backward: the gradient in the wider dtype, and its products with both factors before they are cast and summed.
    return tape.make(
        "experts weighted activation", (plain, probs), out, saves=(plain, probs),
        workspace=product if wide != ctx.act else 0,
        backward_workspace=3 * product - out if wide > ctx.act else product,
    )


def _expert_parameters(
    r: Recorder, spec: MoESpec, local_experts: int, f: int, fc1_width: int, width: int
) -> None:
    """One weight per local expert. TE's grouped linear numbers them; sequential experts are modules."""
    ctx = r.ctx
    sharded = ctx.etp > 1
    grouped = ctx.impl.moe_grouped_gemm
    if grouped and not ctx.impl.te_grouped_gemm:
        # The legacy grouped GEMM keeps all experts in two tensors (experts.py: GroupedMLP).
        r.parameter("mlp.experts.weight1", (width, fc1_width * local_experts), expert=True, sharded=sharded)
        r.parameter("mlp.experts.weight2", (f * local_experts, width), expert=True, sharded=sharded)
        return
    owner, n = ("mlp.experts.", EXPERT_NUMBER) if grouped else (f"mlp.experts.local_experts.{EXPERT_NUMBER}.", "")
    fc1, fc2 = f"{owner}linear_fc1.", f"{owner}linear_fc2."

    def of_fc1() -> None:
        r.parameter(f"{fc1}weight{n}", (fc1_width, width), expert=True, sharded=sharded)
        if spec.add_bias:
            r.parameter(f"{fc1}bias{n}", (fc1_width,), expert=True, sharded=sharded)

    def of_fc2() -> None:
        r.parameter(f"{fc2}weight{n}", (width, f), expert=True, sharded=sharded)
        if spec.add_bias:
            r.parameter(f"{fc2}bias{n}", (width,), expert=True)

    if grouped:
        for parameters in (of_fc1, of_fc2):
            with r.repeated(local_experts):
                parameters()
        return
    with r.repeated(local_experts):
        of_fc1()
        of_fc2()


def _combine(
    r: Recorder, spec: MoESpec, y: Tensor, row_map: Tensor, n: _Tokens, width: int, dispatched: list[Tensor],
    overlapped: Overlapped | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Unsort, exchange back and unpermute: [R, w] -> [N, w]; returns also the input of the last step, and what
    ``MoELayer.forward`` refers to until the layer ends. ``dispatched``: the tokens of each step of ``_dispatch``.
    ``overlapped``: shared experts whose second half runs during the exchange, and whose output is added."""
    ctx, tape, impl = r.ctx, r.tape, r.ctx.impl
    row = width * ctx.act
    by_layer = not impl.overlap_moe_expert_parallel_comm  # then these are no variables of one function
    if impl.moe_token_dispatcher_type == "allgather":
        everyone, taken = ctx.tokens_sp * ctx.ep * ctx.etp, y
        y = _unpermuted(r, "unpermuted tokens", y, row_map, everyone * row)
        if ctx.ep * ctx.etp > 1:
            taken = y
            y = _reduced(r, "reduce-scattered tokens", y, everyone * width, n.entering * width)
            tape.keep_alive(taken)  # an argument of ``token_combine``
        tape.keep_alive(*dispatched[:-1])
        return y, taken, y
    if impl.moe_token_dispatcher_type == "flex":
        if impl.moe_flex_dispatcher_backend == "deepep":
            y = tape.make("unpermuted tokens", y, n.arriving_once * row, saves=(row_map,))
        _cut(r)
        if overlapped is not None:
            overlapped.second_half()
        combined = tape.make("combined tokens", y, n.entering * row, saves=(row_map,))
        if overlapped is not None:
            overlapped.finish()
            combined = overlapped.add_to(combined)
        tape.keep_alive(*dispatched[: -1 if by_layer else 0])
        return combined, y, combined
    experts_out = y
    if _sorts(r, divide(spec.num_experts, ctx.ep, "num_moe_experts", "expert_model_parallel_size")):
        order = _sort_order(r, n)
        y = tape.make("outputs unsorted", y, n.received * row, saves=order, also=order)
    unsorted = y
    if ctx.etp > 1:
        y = _reduced(r, "outputs reduced over ETP", y, n.received * width, n.arrived * width)
    # Variables of ``MoELayer.routed_experts_compute``, which ends here.
    tape.keep_alive(experts_out, unsorted, dispatched[-1])
    sent = y
    _cut(r)
    if overlapped is not None:
        overlapped.second_half()
    if ctx.ep > 1:
        y = tape.make("outputs after all-to-all", y, n.permuted * row)
    if overlapped is not None:
        overlapped.finish()
        if SHARED_EXPERTS_FINISH_WITH_THE_EXCHANGE(impl):
            tape.keep_alive(sent)  # an argument of ``token_combine``
    unpermuted = _unpermuted(r, "unpermuted output", y, row_map, n.entering * row)
    if overlapped is not None:
        unpermuted = overlapped.add_to(unpermuted)
        tape.keep_alive(y)  # an argument of ``combine_postprocess``
    tape.keep_alive(*dispatched[: -1 if by_layer else 0])
    return unpermuted, y, y if COMBINED_IN_TWO_STEPS(impl) else sent


def _adds_rows(r: Recorder) -> bool:
    """Whether rows are added one by one in a fixed order (``releases.ROWS_ADDED_DETERMINISTICALLY``)."""
    impl = r.ctx.impl
    return impl.deterministic_mode and ROWS_ADDED_DETERMINISTICALLY(impl)


def _unpermuted(r: Recorder, name: str, y: Tensor, row_map: Tensor, nbytes: Any) -> Tensor:
    """Unpermuted rows. Deterministic and unfused, the rows are saved too, and the zeros are allocated twice."""
    if r.ctx.impl.moe_permute_fusion or not _adds_rows(r):
        return r.tape.make(name, y, nbytes, saves=(row_map,))
    return r.tape.make(name, y, nbytes, saves=(row_map, y), workspace=nbytes)


def _reduced(r: Recorder, name: str, y: Tensor, whole: int, part: int) -> Tensor:
    """``whole`` elements reduce-scattered to ``part``, in the dtype of the router's probabilities
    (``token_dispatcher.py: combine_preprocess, token_combine``)."""
    tape, act, wide = r.tape, r.ctx.act, _probability_width(r.ctx)
    if wide == act:
        return tape.make(name, y, part * act)
    y = tape.make(f"{name}, cast before", y, whole * wide)
    y = tape.make(f"{name} in the router's dtype", y, part * wide)
    return tape.make(name, y, part * act)
