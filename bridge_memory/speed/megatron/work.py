"""The work of one microbatch on one rank, by block: matrix products, attention, bytes through memory, bytes sent.

Products are read off the parameters that ``inventory`` lists, so that every family is counted by the same lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from bridge_memory.inventory.layer import layer_block
from bridge_memory.inventory.megatron.attention import rotation_fused
from bridge_memory.inventory.megatron.moe import fused_by_ops, ranks_per_token
from bridge_memory.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    ImplementationSpec,
    LayerSpec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    ParallelSpec,
    RecomputeSpec,
    RunSpec,
)
from bridge_memory.spec.model import FeedForward, Mixer
from bridge_memory.speed.megatron.kernels import Kernels
from bridge_memory.tapes.context import BlockContext, context_of
from bridge_memory.tapes.parameters import Use
from bridge_memory.tapes.symbolic import chosen, computed, largest

#: Bytes an element that a norm in plain torch reads and writes beyond those of one kernel: a copy in fp32, its square,
#: the mean, the product, the cast back and the weight.
_UNFUSED_NORM = 32
#: Products of heads whose rows are no multiple of 16 bytes do without tensor cores. They add up in fp32 (PyTorch's
#: ``bgemm`` asks for ``CUBLAS_COMPUTE_32F``), for which an A100's other units reach 19.5 of 312 TFLOP/s (data sheet;
#: NVIDIA, "Matrix Multiplication Background User's Guide", 3).
_UNALIGNED = 16.0


#: Backward of fused attention over its forward: five products for two (FlashAttention, section 3: it makes the scores
#: anew).
FUSED_BACKWARD = 2.5


class Product(NamedTuple):
    """``times`` products of [rows, inner] by [inner, columns]."""

    rows: float
    columns: int
    inner: int
    times: int = 1
    #: Whether fp8 recipes run it in eight bits.
    quantized: bool = True
    #: Whether its weight is an expert's.
    expert: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.columns * self.inner * self.times


class Work(NamedTuple):
    """One block, forward, one microbatch."""

    products: tuple[Product, ...] = ()
    #: Floating-point operations of fused attention.
    attention: float = 0.0
    #: Bytes read and written by kernels that only pass over tensors.
    traffic: float = 0.0
    #: Bytes that tensor parallelism gathers and reduces (a whole tensor each), and how many collectives.
    tensor_parallel: float = 0.0
    tensor_collectives: int = 0
    #: Bytes that one rank sends to other expert-parallel ranks, and how many exchanges.
    expert_parallel: float = 0.0
    expert_exchanges: int = 0
    #: Experts whose tokens take one copy for all of them on a node, and on a rank; None: every expert takes its own.
    expert_copies: MoESpec | None = None
    #: Whether these are gathers and reductions of all tokens (``allgather``), and not an exchange of those routed.
    expert_gathers: bool = False
    #: Bytes of one rank's map of tokens to experts, which all ranks gather before they exchange tokens, and of its
    #: tokens' probabilities of all experts, of which those of a domain go with each copy one way.
    routing_map: float = 0.0
    probabilities: float = 0.0
    #: Bytes of keys and values that context parallelism passes round, and of queries and what attention makes of them.
    context_parallel: float = 0.0
    context_queries: float = 0.0
    #: Floating-point operations of a state-space scan.
    scan: float = 0.0
    #: Bytes of casts to eight or four bits, of inputs forward and of outputs' gradients backward.
    casts: float = 0.0
    casts_backward: float = 0.0
    #: Kernels one after the other, whoever launches them.
    kernels: float = 0.0
    #: Those that the host launches one by one, and experts' products that a loop in C++ does; 0: a CUDA graph does.
    launches: float = 0.0
    expert_launches: float = 0.0


class LayerWork(NamedTuple):
    """The two halves of a decoder layer; what is not there has no work."""

    mixer: Work
    feed_forward: Work


def layer_work(layer: LayerSpec, run: RunSpec, ctx: BlockContext, kernels: Kernels) -> LayerWork:
    """One decoder layer."""
    norm = 0.0 if kernels.fused_norm else _UNFUSED_NORM * ctx.tokens_sp * ctx.hidden_size
    mixer, feed_forward = _mixer_work(layer, run, ctx, kernels), _feed_forward_work(layer, ctx)
    if kernels.grouped_experts:  # in bf16, whatever linears compute in
        products = tuple(p._replace(quantized=p.quantized and not p.expert) for p in feed_forward.products)
        feed_forward = feed_forward._replace(products=products)
    halves = []
    for half, of in ((mixer, layer.mixer), (feed_forward, layer.ffn)):
        if half.products:
            casts, backward = _casts(half, of, ctx)
            half = half._replace(traffic=half.traffic + norm, casts=casts, casts_backward=backward)
            half = _with_launches(half, of, ctx, kernels)
        halves.append(half)
    return LayerWork(*halves)


#: Kernels forward beside the products: of a mixer or MLP norm, casts, split, rotation or activation, attention, bias
#: and dropout; of a router top-k, its probabilities, the balancing loss, counts and sorts, in half a dozen where fused
#: (``moe_router_fusion``); of experts permutation there and back, their activation and what the dispatcher launches.
_BESIDE, _ROUTER, _ROUTER_FUSED, _EXPERTS = 10, 40, 15, 20
#: Of query and key, rotated by plain operations in the place of a kernel each: 12 forward and 7 backward
#: (``_unfused_rotation``), as a third of both.
_ROTATION = 2 * ((12 + 7) / 3 - 1)
#: Streams that Transformer Engine deals experts' products to, so that as many begin at once
#: (``common/util/multi_stream.cpp: get_num_compute_streams``).
_STREAMS = 4


def _with_launches(half: Work, of: Mixer | FeedForward | None, ctx: BlockContext, kernels: Kernels) -> Work:
    """With the kernels that the host launches forward. Products of experts are launched one by one (Transformer
    Engine's ``multi_stream_cublas_gemm``) unless one kernel has them all, and each in eight or four bits has a cast of
    its input."""
    impl = ctx.impl
    graphs = {*impl.cuda_graph_modules} if impl.cuda_graph_impl != "none" else set()
    name = "moe" if isinstance(of, MoESpec) else "mlp" if isinstance(of, MLPSpec) else "attn"
    if isinstance(of, MambaSpec | GatedDeltaNetSpec):
        name = "mamba"
    launches: Any = 0
    of_experts: Any = 0
    for p in half.products:
        each = 2 if p.quantized and ctx.fp8 else 1
        if not p.expert:
            launches = launches + each * p.times
        elif kernels.grouped_experts or impl.use_transformer_engine_op_fuser:
            launches = launches + each
        else:
            of_experts = of_experts + each * p.times
    router = _ROUTER_FUSED if impl.moe_router_fusion else _ROUTER
    launches = launches + (router + _EXPERTS if isinstance(of, MoESpec) else _BESIDE)
    if _rotates_unfused(of, ctx):
        launches = launches + _ROTATION
    half = half._replace(kernels=launches + of_experts / _STREAMS)
    if impl.cuda_graph_impl != "none" and (not graphs or name in graphs):
        return half
    if "moe_router" in graphs and isinstance(of, MoESpec):
        launches = launches - router
    return half._replace(launches=launches, expert_launches=of_experts)


def _casts(half: Work, of: Mixer | FeedForward | None, ctx: BlockContext) -> tuple[Any, Any]:
    """Bytes with which quantized products' inputs are cast forward and their outputs' gradients backward: read, and
    written by rows and by columns; read once more for their largest element by recipes that scale a tensor by its own
    (TE ``pytorch/tensor/{float8,mxfp8,nvfp4}_tensor.py``). A norm that is part of a linear casts what it makes, as a
    kernel of experts' gated product with its activation does what comes after it."""
    if not ctx.fp8:
        return 0.0, 0.0
    own = ctx.fp8_recipe in ("tensorwise", "nvfp4")
    width = ctx.act * (2 if own else 1) + (1 if ctx.fp8_recipe == "nvfp4" else 2)
    forward: Any = 0.0
    backward: Any = 0.0
    normed = ctx.te and not own and isinstance(of, AttentionSpec | MLPSpec)
    experts = [p for p in half.products if p.expert and p.quantized]
    for i, p in enumerate(half.products):
        if not p.quantized:
            continue
        inside = p.expert and fused_by_ops(ctx) and ctx.fp8_recipe == "mxfp8"
        if not ((normed and i == 0) or (inside and p is not experts[0])):
            forward = forward + width * p.rows * p.inner * p.times
        if not (inside and p is experts[0]):
            backward = backward + width * p.rows * p.columns * p.times
    return forward, backward


def output_work(model: ModelSpec, ctx: BlockContext) -> Work:
    """Output layer and loss."""
    logits = ctx.tokens * (ctx.padded_vocab // ctx.tp)
    passes = _loss_passes(ctx) / 3  # backward counts as twice forward
    gathered = chosen(ctx.tp > 1, ctx.tokens * model.hidden_size * ctx.act, 0.0)
    return Work(
        (Product(ctx.tokens, ctx.padded_vocab // ctx.tp, model.hidden_size, quantized=False),), traffic=logits * passes,
        tensor_parallel=2.0 * gathered, tensor_collectives=_two(gathered),
    )  # fmt: skip


def _loss_passes(ctx: BlockContext) -> float:
    """Bytes a logit that the loss reads and writes, forward and backward."""
    impl, act = ctx.impl, ctx.act
    if impl.cross_entropy_loss_fusion and impl.cross_entropy_fusion_impl != "native":
        # Read for maximum and sum, and for the gradient, which is written; backward scales it (TE
        # ``common/triton/cross_entropy.py``).
        return 5 * act
    if impl.cross_entropy_loss_fusion:  # ``fused_cross_entropy.py``: a copy in fp32, its exponential, and the quotient
        return act + 4 + 8 + 8 + 4 + act
    # ``cross_entropy.py: VocabParallelCrossEntropy``: a copy in fp32, its maximum; less it; its exponential, their sum,
    # the quotient; backward times the loss's gradient, and cast back.
    return act + 4 + 4 + 8 + 8 + 4 + 8 + 8 + 4 + act


def model_flops(run: RunSpec) -> float:
    """Floating-point operations of one step as frameworks count them (Megatron-LM's ``num_floating_point_operations``):
    forward and twice as much backward, whatever is recomputed, and causal attention by half. The batch is given, and
    MTP not counted."""
    alone = replace(
        run, parallel=ParallelSpec(world_size=1), recompute=RecomputeSpec(), implementation=ImplementationSpec()
    )
    ctx, kernels = context_of(alone), Kernels()
    work = [half for layer in run.model.layers for half in layer_work(layer, alone, ctx, kernels)]
    forward = sum(sum(p.flops for p in w.products) + w.attention for w in [*work, output_work(run.model, ctx)])
    batch = run.batch
    return 3.0 * forward * (batch.global_batch_size or batch.micro_batch_size) / batch.micro_batch_size


def mtp_work(model: ModelSpec, ctx: BlockContext) -> Work:
    """What an MTP depth has beside its layer and its loss: two norms, and the projection of both inputs."""
    stream = ctx.tokens_sp * model.hidden_size * ctx.act
    product = Product(ctx.tokens, model.hidden_size // ctx.tp, 2 * model.hidden_size)
    return Work((product,), traffic=6 * stream)


def _mixer_work(layer: LayerSpec, run: RunSpec, ctx: BlockContext, kernels: Kernels) -> Work:
    if layer.mixer is None:
        return Work()
    attention, kv, queries = _attention(layer, run, ctx, kernels)
    tensor = _gathered_and_reduced(ctx)
    half = LayerSpec(layer.mixer, None, layer.post_layernorms, layer.pre_layernorms)
    return Work(
        tuple(_products(half, None, ctx)), attention, _mixer_traffic(layer, ctx, kernels), tensor, _two(tensor),
        context_parallel=kv, context_queries=queries, scan=_scan(layer.mixer, ctx),
    )  # fmt: skip


def _scan(mixer: Mixer, ctx: BlockContext) -> Any:
    """Of Mamba-2 in chunks of c tokens: scores of queries and keys in a chunk, these times the values, the chunk's
    state, and the state before it times the queries (Dao and Gu 2024, section 6)."""
    if not isinstance(mixer, MambaSpec):
        return 0.0
    c, heads, groups = mixer.chunk_size, mixer.num_heads / ctx.tp, largest(1, mixer.num_groups / ctx.tp)
    wide = heads * mixer.head_dim
    # Context parallelism gathers the sequence and divides the heads.
    return 2.0 * ctx.tokens * (c * groups * mixer.state_dim + c * wide + 2 * wide * mixer.state_dim)


def _feed_forward_work(layer: LayerSpec, ctx: BlockContext) -> Work:
    ffn = layer.ffn
    if ffn is None:
        return Work()
    tensor: Any = 0.0
    exchanged: Any = 0.0
    gathers = isinstance(ffn, MoESpec) and ctx.impl.moe_token_dispatcher_type == "allgather"
    if isinstance(ffn, MoESpec):
        token = (ffn.latent_size or ctx.hidden_size) * ctx.act
        if gathers:  # every rank takes the tokens of all others (``MoEAllGatherTokenDispatcher``)
            exchanged = 2.0 * ctx.tokens_sp * token * (ctx.ep * ctx.etp - 1)
        else:
            routed = ctx.tokens_sp * ffn.topk * token
            exchanged = 2.0 * routed * (ctx.ep - 1) / ctx.ep
            tensor = chosen(ctx.etp > 1, 2.0 * routed * ctx.etp, 0.0)
    else:
        tensor = _gathered_and_reduced(ctx)
    half = LayerSpec(None, ffn, layer.post_layernorms, layer.pre_layernorms)
    return Work(
        tuple(_products(half, ffn, ctx)), 0.0, _feed_forward_traffic(ffn, ctx), tensor, _two(tensor), exchanged,
        _two(exchanged), _copies(ffn, ctx), gathers, *_of_all_experts(ffn, ctx),
    )  # fmt: skip


def _gathered_and_reduced(ctx: BlockContext) -> Any:
    """Bytes of an all-reduce forward, or of a gather and a reduce-scatter of as much in all. What a quantized linear
    gathers under sequence parallelism is quantized before (Transformer Engine's ``distributed.py:
    gather_along_first_dim``): a byte an element, or half of one and a scale for every sixteen."""
    width: Any = ctx.act
    if ctx.fp8:
        width = chosen(ctx.tokens_sp < ctx.tokens, 0.5 + 1 / 16 if ctx.fp8_recipe == "nvfp4" else 1, ctx.act)
    return chosen(ctx.tp > 1, ctx.tokens * ctx.hidden_size * (width + ctx.act), 0.0)


def shared_experts_work(ffn: MoESpec, ctx: BlockContext) -> Work:
    """Of an MoE layer, its shared experts alone (``SharedExpertMLP``), which selective recomputation can run again."""
    wide = ffn.shared_expert_intermediate_size // ctx.tp
    products = (
        Product(ctx.tokens, wide * (2 if ffn.gated else 1), ctx.hidden_size),
        Product(ctx.tokens, ctx.hidden_size, wide),
    )
    return Work(products, traffic=_shared_experts_traffic(ffn, ctx))


def _copies(ffn: FeedForward, ctx: BlockContext) -> MoESpec | None:
    """DeepEP and HybridEP send a token to a node once, however many of its experts are there, and by NVLink to each of
    its ranks once (DeepEP, "Normal kernels with NVLink and RDMA forwarding"; ``csrc/deep_ep.cpp: is_token_in_rank``);
    an all-to-all sends a copy to each expert."""
    return ffn if isinstance(ffn, MoESpec) and ctx.impl.moe_token_dispatcher_type == "flex" else None


def _of_all_experts(ffn: FeedForward, ctx: BlockContext) -> tuple[Any, Any]:
    """HybridEP's (map, probabilities): a byte and a number in fp32 for every token and expert (DeepEP
    ``docs/Hybrid-EP_Implementation.md``, 4.2; ``csrc/hybrid_ep``, "allgather_routing_map")."""
    copies = _copies(ffn, ctx)
    if copies is None or ctx.impl.moe_flex_dispatcher_backend != "hybridep":
        return 0.0, 0.0
    of_all = chosen(ctx.ep > 1, ctx.tokens_sp * copies.num_experts, 0.0)
    return of_all, 4 * of_all


def _two(nbytes: Any) -> Any:
    """Collectives of what is sent there and back."""
    return chosen(nbytes > 0, 2, 0)


def _products(half: LayerSpec, ffn: FeedForward | None, ctx: BlockContext) -> Iterator[Product]:
    # What is recomputed, and how many sequences there are, changes no parameter.
    for parameters, times in layer_block(half, ctx.bare()).parameters.rows:
        for p in parameters:
            if len(p.shape) != 2 or p.use is Use.EMBEDDING:
                continue
            columns, inner = p.shape
            if p.expert:
                assert isinstance(ffn, MoESpec)
                rows = ctx.tokens * ffn.topk * ctx.etp / ctx.tp * ctx.ep / ffn.num_experts
                yield Product(rows, columns, inner, times, expert=True)
            else:
                rows = chosen(p.sharded, ctx.tokens, ctx.tokens_sp)
                yield Product(rows, columns, inner, times, p.is_gemm)


def _attention(layer: LayerSpec, run: RunSpec, ctx: BlockContext, kernels: Kernels) -> tuple[float, float, float]:
    """(floating-point operations of softmax attention forward; bytes of this rank's keys and values, and of its queries
    and outputs, both 0 without context parallelism).

    Unfused attention makes all scores and masks half of them.
    """
    mixer, length = layer.mixer, run.batch.seq_length
    if isinstance(mixer, AttentionSpec):
        heads, groups = mixer.num_attention_heads / ctx.tp, largest(1.0, mixer.num_query_groups / ctx.tp)
        width, wide = mixer.kv_channels, mixer.value_channels
        window = mixer.window_size
    elif isinstance(mixer, MLASpec):
        heads = groups = mixer.num_attention_heads / ctx.tp
        width, wide, window = mixer.qk_head_dim + mixer.qk_pos_emb_head_dim, mixer.v_head_dim, None
    else:
        return 0.0, 0.0, 0.0
    sent = [chosen(ctx.cp > 1, ctx.tokens * of * (width + wide) * ctx.act, 0.0) for of in (groups, heads)]
    if kernels.unfused_attention:
        slower = _UNALIGNED if width * ctx.act % 16 else 1.0
        flops = slower * 2.0 * ctx.tokens * length * heads * (width + wide)
        return flops, sent[0], sent[1]
    keys = length / 2 if window is None or window >= length else window * (1 - window / (2 * length))
    flops = 2.0 * ctx.tokens * keys * heads * (width + wide)
    return flops, sent[0], sent[1]


def _mixer_traffic(layer: LayerSpec, ctx: BlockContext, kernels: Kernels) -> float:
    """Bytes that elementwise kernels read and write forward."""
    stream, mixer = ctx.tokens_sp * ctx.hidden_size * ctx.act, layer.mixer
    traffic: float = (2 + 3) * stream  # norm: in, out; bias, dropout, add: two in, one out
    if isinstance(mixer, AttentionSpec):
        qkv = (mixer.num_attention_heads + 2 * mixer.num_query_groups) * mixer.kv_channels / ctx.tp
        traffic += 2 * 2 * ctx.tokens * qkv * ctx.act  # split and rotate
        if _rotates_unfused(mixer, ctx):
            d, groups = mixer.kv_channels, largest(1, mixer.num_query_groups / ctx.tp)
            traffic += _unfused_rotation(ctx, mixer.num_attention_heads / ctx.tp + groups, ctx.rotary_dim or d, d)
        if mixer.qk_layernorm:
            normed = (mixer.num_attention_heads + mixer.num_query_groups) * mixer.kv_channels / ctx.tp
            traffic += 2 * ctx.tokens * normed * ctx.act
        if kernels.unfused_attention:
            scores = ctx.tokens * ctx.seq * ctx.cp * mixer.num_attention_heads / ctx.tp
            traffic += 8 * scores * ctx.act  # scores, scaled and masked, softmax, dropout: each out and in
            if kernels.plain_softmax:  # copied and then masked in place, by a mask of a byte an element
                traffic += scores * (2 * 2 * ctx.act + 1)
    elif isinstance(mixer, MLASpec):
        wide = mixer.num_attention_heads * (mixer.qk_head_dim + mixer.qk_pos_emb_head_dim + mixer.v_head_dim)
        traffic += 3 * 2 * ctx.tokens * wide / ctx.tp * ctx.act
    elif isinstance(mixer, MambaSpec):
        inner = mixer.num_heads * mixer.head_dim / ctx.tp
        convolved = inner + 2 * largest(1, mixer.num_groups / ctx.tp) * mixer.state_dim
        # The convolution in and out, its parts into the chunks' states and the scan; the gated norm: two in, one out.
        traffic += (2 + 2) * ctx.tokens * convolved * ctx.act + (1 + 3) * ctx.tokens * inner * ctx.act
        # A chunk's state in fp32: made, passed on from chunk to chunk, and read by the scan.
        traffic += 4 * ctx.tokens / mixer.chunk_size * inner * mixer.state_dim * 4
    else:
        traffic += 12 * stream
    return traffic + _merged(layer, ctx)


def _rotates_unfused(mixer: Mixer | FeedForward | None, ctx: BlockContext) -> bool:
    """Whether queries and keys are rotated by plain operations."""
    return isinstance(mixer, AttentionSpec) and mixer.rotary and ctx.rotary and not rotation_fused(ctx)


def _unfused_rotation(ctx: BlockContext, heads: Any, turned: int, width: int) -> Any:
    """Bytes with which plain operations rotate ``turned`` channels of heads ``width`` wide, beyond one kernel's, which
    reads and writes them once (megatron-core ``rope_utils.py: _apply_rotary_pos_emb_bshd``).

    Forward: times cosine, half of it negated and joined with the other, times sine, their sum, 10 tensors read and
    written, and 2 as the result is joined with the channels that stay. Backward: both products, the half negated and
    joined, the sum of two gradients, 10; zeros for the channels that stay, and their sum with the others, 4, or 7 where
    both parts have channels. All is a third of what both passes take. Cosine and sine are made for query and for key:
    from angles in fp32, multiplied by YaRN's factor, and cast, 20 bytes and the cast's; two products read each.
    """
    joined = 2 + (4 if turned == width else 7)
    rotated = ctx.tokens * heads * ((10 + 10) * turned + joined * width) / 3 * ctx.act
    tables = 2 * 2 * (20 + (1 + 2) * ctx.act) * ctx.seq * turned / 3
    return rotated + tables - 2 * ctx.tokens * heads * width * ctx.act


def _merged(layer: LayerSpec, ctx: BlockContext) -> float:
    """Bytes with which what attention makes of the keys of other context-parallel ranks is added up: the first part is
    copied, every other read, and the sum read and written (Transformer Engine's ``context_parallel.py:
    flash_attn_fwd_incremental_out_correction``). Backward adds gradients of queries, keys and values likewise."""
    mixer = layer.mixer
    if not isinstance(mixer, AttentionSpec | MLASpec) or "p2p" not in ctx.impl.cp_comm_type:
        return 0.0
    wide = mixer.value_channels if isinstance(mixer, AttentionSpec) else mixer.v_head_dim
    made = ctx.tokens * mixer.num_attention_heads / ctx.tp * wide * ctx.act
    nbytes: float = chosen(ctx.cp > 1, (2 + 3 * (ctx.cp - 1)) * made, 0.0)
    return nbytes


def _feed_forward_traffic(ffn: FeedForward, ctx: BlockContext) -> float:
    """As ``_mixer_traffic``."""
    traffic: float = (2 + 3) * ctx.tokens_sp * ctx.hidden_size * ctx.act
    passes = _activation_passes(ffn)
    if isinstance(ffn, MLPSpec):
        return traffic + passes * ctx.tokens * ffn.ffn_hidden_size / ctx.tp * ctx.act
    routed = ctx.tokens_sp * ffn.topk
    traffic += experts_activation_traffic(ffn, ctx)
    width = ctx.etp * (ffn.latent_size or ctx.hidden_size) * ctx.act
    # A token is read once and written for each of its experts, and back: of one rank before an all-to-all, of all
    # their ranks after DeepEP's and HybridEP's, whose kernels read and write beside the link what they send (TE
    # ``common/triton/permutation.py``; DeepEP ``csrc/hybrid_ep/extension/permute.cu``).
    once: Any = ctx.tokens_sp
    if _copies(ffn, ctx) is not None:
        once = chosen(ctx.ep > 1, ctx.tokens_sp * computed(partial(ranks_per_token, ffn), ctx.ep), once)
    traffic += 2 * (once + routed) * width
    if ctx.impl.moe_token_dispatcher_type == "alltoall":  # sorted by local expert after the first, and back
        traffic += chosen((ctx.ep > 1) & (ctx.ep < ffn.num_experts), 2 * 2 * routed * width, 0.0)
    traffic += 4 * ctx.tokens_sp * ffn.num_experts * 4  # the router's scores in fp32
    if ffn.add_bias and not fused_by_ops(ctx):
        # Bias times probability in fp32, the sum, its concatenation and cast (``experts.py: _apply_bias``), 28 bytes an
        # element forward and 36 backward: as much as 21 forward and twice that backward.
        traffic += 21 * routed * ctx.etp * (ffn.latent_size or ctx.hidden_size)
    return traffic + _shared_experts_traffic(ffn, ctx)


def _shared_experts_traffic(ffn: MoESpec, ctx: BlockContext) -> float:
    return _activation_passes(ffn) * ctx.tokens * ffn.shared_expert_intermediate_size / ctx.tp * ctx.act


def experts_activation_traffic(ffn: MoESpec, ctx: BlockContext) -> float:
    """Of it, the routed experts' activation. Gates that are clamped first (``fused_bias_geglu.py:
    weighted_bias_quick_geglu_impl``): both halves are clamped and joined, 8 tensors of the inner width; backward makes
    a mask for every bound, chooses by it and joins, 15."""
    clamped = ffn.clamp_value is not None and ffn.gated and not fused_by_ops(ctx)
    passes = _activation_passes(ffn) + (8 if clamped else 0)
    return passes * ctx.tokens_sp * ffn.topk * ffn.moe_ffn_hidden_size * ctx.act


def _activation_passes(ffn: FeedForward) -> int:
    """Tensors of the inner width that an activation reads and writes."""
    return 3 if ffn.gated else 2
