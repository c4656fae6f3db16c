"""DeepSeek Sparse Attention: an indexer chooses keys for each query, and absorbed multi-latent attention runs over
them.

Source: megatron-core 0.19 ``transformer/experimental_attention_variant/absorbed_mla.py: AbsorbedMLASelfAttention``,
``dsa.py: DSAttention, DSAIndexer, FusedDSAIndexerLoss, _unfused_absorbed_dsa_fn``, ``dsa_masking.py: masked_softmax``.
Without kernels (``SparseSpec.kernels``) torch makes scores of every query and key in fp32. The kernels of cuDNN and
FlashMLA (``dsa_cudnn_kernels.py: FusedIndexerSparseAttnFunc, FusedQKTopKWithSparseLossFunc, FusedSparseAttentionFunc``)
save the indices of the chosen keys, the output and its statistics, and the indexer's gradients, which they compute
together with its loss.
Shapes: a heads of this rank share one key, w = kv + d_rope wide, whose first kv are the value; T = s b tokens, n keys
in a sequence (s c), P = T n pairs; the indexer has i heads of width d on every rank.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.megatron.attention import cosine_and_sine
from bridge_memory.spec import IndexerSpec, MLASpec, SparseSpec, divide
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.symbolic import largest, smallest
from bridge_memory.tapes.tape import Tensor

CORE = "self_attention.core_attention."
#: Submodules, in the order in which multi-latent attention registers them, absorbed or not (``mla``).
MODULES = (
    "core_attention", "linear_proj", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj",
    "linear_kv_up_proj", "q_layernorm", "kv_layernorm",
)
INDEXER = CORE + "indexer."
#: Width of values that FlashMLA's sparse kernel supports.
FLASH_MLA_VALUE = 512
#: Bytes of scores that are computed at a time.
SCORES_AT_ONCE = 1 << 30
#: Scratch of cuDNN's choice of keys: two int32 a score, rows at a time (``dsa_cudnn_kernels.py:
#: _TOPK_WRAPPER_SCRATCH_INT32_FACTOR, _TOPK_WRAPPER_MAX_SCRATCH_BYTES``).
CHOICE_PER_SCORE, CHOICE_AT_ONCE = 2, 2 << 30


def record_sparse_attention(r: Recorder, spec: MLASpec, x: Tensor) -> Tensor:
    """From the residual stream [T_sp, h] to the output of linear_proj [T_sp, h] (input norm included)."""
    ctx, tape, first = r.ctx, r.tape, len(r.rows)
    assert spec.sparse is not None
    a = divide(spec.num_attention_heads, ctx.tp, "num_attention_heads", "tensor_model_parallel_size")
    h, rank, rope = ctx.hidden_size, spec.kv_lora_rank, spec.qk_pos_emb_head_dim
    up_width = spec.qk_head_dim + spec.v_head_dim
    recompute_norm = ctx.recomputes("layernorm")
    with r.offload("attn_norm"), tape.discardable("input_layernorm", (x,), enabled=recompute_norm) as norm_region:
        normed = r.hold(r.norm("input_layernorm", x, h, ctx.tokens_sp))
    with r.offload("qkv_linear"):
        latent = normed
        if spec.q_lora_rank is not None:
            name = "self_attention.linear_q_down_proj"
            latent = r.plain_linear(name, normed, ctx.tokens_sp, h, spec.q_lora_rank, original=recompute_norm)
        name = "self_attention.linear_kv_down_proj"
        down = r.plain_linear(name, normed, ctx.tokens_sp, h, rank + rope, original=recompute_norm)
        kv, k_rope = tape.views(
            "split latent", down, ("kv latent", ctx.tokens_sp * rank * ctx.act),
            ("k_pos_emb", ctx.tokens_sp * rope * ctx.act),
        )  # fmt: skip
        if ctx.sp:
            k_rope = tape.make("gathered k_pos_emb", k_rope, ctx.tokens * rope * ctx.act)
        if spec.qk_layernorm:
            if spec.q_lora_rank is not None:
                latent = r.norm("self_attention.q_layernorm", latent, spec.q_lora_rank, ctx.tokens_sp)
            kv = tape.make("kv_layernorm input", kv, ctx.tokens_sp * rank * ctx.act)
            kv = r.norm("self_attention.kv_layernorm", kv, rank, ctx.tokens_sp)
        if ctx.sp:
            kv = tape.make("gathered kv latent", kv, ctx.tokens * rank * ctx.act)
        # Key and value half of the weight are used directly, not through its linear; each makes a gradient of the whole
        # weight.
        weight = tape.input("kv up-projection's weight", 0)
        weight_bytes = a * up_width * rank * ctx.act
        r.parameter("self_attention.linear_kv_up_proj.weight", (a * up_width, rank), sharded=ctx.tp > 1)
        weight.grad_bytes = 0 if r.frozen else weight_bytes
        recompute = ctx.recomputes("mla_up_proj")
        with tape.discardable("mla_up_proj", (latent, kv, k_rope), enabled=recompute) as region:
            query, key = _query_and_key(r, spec, latent, kv, k_rope, weight)
    v_weight = a * spec.v_head_dim * rank * ctx.act
    inputs = (query, key, normed, latent)
    with tape.checkpoint("core_attn", inputs, enabled=ctx.recomputes("core_attn")), r.offload("core_attn"):
        half = tape.make(
            "value half of the up-projection's weight", weight, v_weight, backward_workspace=weight.grad_bytes
        )
        out = _core_attention(r, spec, normed, latent, query, key, half)
    tape.keep_alive(query, key, latent)
    if recompute:
        tape.discard(region, query, key)
    with r.offload("attn_proj"):
        y = r.row_linear(
            "self_attention.linear_proj", out, a * spec.v_head_dim, h, bias=spec.add_output_bias,
            original=r.proj_keeps_original,
        )
    if recompute_norm:
        tape.discard(norm_region, normed)
    r.arrange(first, "input_layernorm", *(f"self_attention.{m}" for m in MODULES))
    return y


def _query_and_key(
    r: Recorder, spec: MLASpec, latent: Tensor, kv: Tensor, k_rope: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Query [T, a w], into which the keys' up-projection is absorbed, and the single key [T, w]."""
    ctx, tape = r.ctx, r.tape
    a, rank, rope = spec.num_attention_heads // ctx.tp, spec.kv_lora_rank, spec.qk_pos_emb_head_dim
    q_head = spec.qk_head_dim + rope
    if spec.q_lora_rank is None:
        q = r.column_linear("self_attention.linear_q_proj", latent, ctx.hidden_size, a * q_head)
    else:
        q = r.column_linear("self_attention.linear_q_up_proj", latent, spec.q_lora_rank, a * q_head)
    plain, rotary = tape.views(
        "split query", q, ("query without position", ctx.tokens * a * spec.qk_head_dim * ctx.act),
        ("query's position", ctx.tokens * a * rope * ctx.act),
    )  # fmt: skip
    wide = ctx.tokens * a * rank * ctx.act
    absorbed = tape.make(
        "absorbed query, heads first", (plain, weight), wide, saves=(plain,), backward_workspace=weight.grad_bytes
    )
    absorbed = tape.make("absorbed query", absorbed, wide)
    rotated = _rotated(r, "query", rotary, ctx.tokens * a * rope * ctx.act, rope)
    k_rotated = _rotated(r, "key", k_rope, ctx.tokens * rope * ctx.act, rope)
    query = tape.make("query", (absorbed, rotated), wide + ctx.tokens * a * rope * ctx.act)
    tape.keep_alive(absorbed, rotated)
    key = tape.make("key", (kv, k_rotated), ctx.tokens * (rank + rope) * ctx.act)
    return query, key


def _rotated(r: Recorder, name: str, x: Tensor, nbytes: int, rope: int) -> Tensor:
    """``rope_utils.py: _apply_rotary_pos_emb_bshd`` with interleaved pairs, which are deinterleaved first."""
    angles = cosine_and_sine(r, f"{name} rope", rope)
    return r.tape.make(
        f"rotated {name}", x, nbytes, saves=(angles,), also=(angles,), workspace=3 * nbytes,
        backward_workspace=2 * nbytes,
    )


def _core_attention(
    r: Recorder, spec: MLASpec, normed: Tensor, latent: Tensor, query: Tensor, key: Tensor, v_weight: Tensor
) -> Tensor:
    """Sparse attention over the latent, and its up-projection: [T, a d_v]."""
    ctx, tape, sparse = r.ctx, r.tape, spec.sparse
    assert sparse is not None
    a, rank = spec.num_attention_heads // ctx.tp, spec.kv_lora_rank
    width = rank + spec.qk_pos_emb_head_dim
    keys = ctx.seq * ctx.cp
    if ctx.cp > 1:
        whole = keys * ctx.batch * width * ctx.act
        key = tape.make("gathered key", key, whole)
        order = tape.tensor("order of the keys", 8 * keys, grad=False)
        key = tape.make("key in order", key, whole, saves=(order,), also=(order,))
    loss: Tensor | None = None
    variables: tuple[Tensor, ...] = ()
    if spec.indexer is not None:
        index, loss, variables = _choose(r, spec, spec.indexer, sparse, normed, latent, query, key, keys)
        if sparse.shares_choice:  # a dictionary holds it until the next forward pass
            kept = tape.tensor("choice for later layers", 0, grad=False)
            tape.op(kept.name, index, kept, saves=(index,))
    else:
        index = tape.tensor("another layer's choice", 0, grad=False)
    if fused(r, spec):
        context = _fused(r, spec, query, key, index, keys)
    else:
        context = _unfused(r, a, width, rank, query, key, index, keys)
    up = ctx.tokens * a * spec.v_head_dim * ctx.act
    out = tape.make("core_attention output, heads first", (context, v_weight), up, saves=(context, v_weight))
    # ``DSAIndexerLossAutoScaler`` returns the output unchanged, and gives the loss its gradient.
    out = tape.make("core_attention output", (out,) if loss is None else (out, loss), up)
    tape.keep_alive(*variables)
    return out


def _unfused(
    r: Recorder, a: int, width: int, rank: int, query: Tensor, key: Tensor, index: Tensor, keys: int
) -> Tensor:
    """softmax(q k^T) v from all scores [b, a, s, n] in fp32, in which keys that were not chosen are masked: [T, a kv].
    """
    ctx, tape = r.ctx, r.tape
    pairs = ctx.tokens * keys
    scores, mask = 4 * a * pairs, a * pairs
    several = ctx.batch > 1
    q = tape.make("query in fp32", query, 4 * ctx.tokens * a * width)
    k = tape.make("key in fp32", key, 4 * keys * ctx.batch * width)
    if several:  # heads and sequences become one dimension of the batched product
        q = tape.make("query in fp32, sequences first", q, q.bytes)
        k = tape.make("key in fp32, once a head", k, k.bytes * a)
    raw = tape.make("attention scores", (q, k), scores, saves=(q, k))
    scaled = tape.make("scaled scores", raw, scores)
    chosen = tape.make("mask of the chosen keys", index, 4 * pairs, grad=False, workspace=4 * pairs + pairs)
    added = tape.make("masked scores", scaled, scores)
    valid = tape.make("chosen keys", chosen, pairs, grad=False)

    def masked(name: str, x: Tensor) -> Tensor:
        one = tape.tensor(f"{name}: mask", mask, grad=False)
        return tape.make(name, x, scores, saves=(one,), also=(one,))

    logits = masked("scores of the chosen keys", added)
    places = tape.tensor("indices of the largest scores", 8 * ctx.tokens * a, grad=False)
    some = tape.tensor("rows with a chosen key", ctx.tokens * a, grad=False)
    shifted = tape.make("shifted scores", logits, scores, saves=(places, some), also=(places, some))
    exponentials = tape.make("exponentials", shifted, scores, save_output=True)
    found = masked("exponentials of the chosen keys", exponentials)
    sums = tape.tensor("sums of exponentials", 8 * ctx.tokens * a, grad=False)
    shares = tape.make(
        "attention shares", found, scores, saves=(found, sums), also=(sums,), backward_workspace=3 * scores
    )
    weights = masked("attention weights in fp32", shares)
    tape.keep_alive(logits, added, shares)
    half = tape.make("attention weights", weights, 2 * a * pairs)
    saved = key
    if several:
        saved = tape.make("value, once a head", key, keys * ctx.batch * a * rank * ctx.act)
    wide = ctx.tokens * a * rank * ctx.act
    out = tape.make(
        "attention context, heads first", (half, saved), wide, saves=(half, saved),
        backward_workspace=0 if several else keys * ctx.batch * a * rank * ctx.act,
    )
    tape.keep_alive(half, chosen, valid)
    context = tape.make("attention context", out, wide)
    tape.keep_alive(index)
    return context


def _choose(
    r: Recorder, spec: MLASpec, indexer: IndexerSpec, sparse: SparseSpec, normed: Tensor, latent: Tensor,
    query: Tensor, key: Tensor, keys: int,
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:  # fmt: skip
    """(indices of the chosen keys [T, k], the indexer's loss or None, its query, key and weights). Its inputs are
    detached from the model's graph."""
    ctx, tape = r.ctx, r.tape
    i, d, rope = indexer.num_heads, indexer.head_dim, spec.qk_pos_emb_head_dim
    rank = spec.q_lora_rank or ctx.hidden_size
    pairs, scores = ctx.tokens * keys, 4 * i * ctx.tokens * keys
    chosen = tape.tensor("chosen keys of every token", 8 * ctx.tokens * smallest(sparse.topk, keys), grad=False)
    slots = 4 * ctx.tokens * smallest(sparse.topk, keys)
    kernels = fused(r, spec)
    # Dense scores of packed sequences, or under context parallelism, are torch's (``run_fused_dsa_attention``).
    by_kernels = kernels and (sparse.sparse_loss or not (ctx.packed or ctx.cp > 1 or sparse.shares_choice))
    if kernels:
        scores = smallest(4 * pairs, SCORES_AT_ONCE)
        if by_kernels or not sparse.indexer_loss:
            chosen = tape.tensor("chosen keys of every token", slots, grad=False)
    if not sparse.indexer_loss:
        _indexer_parameters(r, spec, indexer)
        q, k, weights = (
            tape.tensor(f"indexer {name}", ctx.tokens * n * ctx.act, grad=False)
            for name, n in (("query", i * d), ("key", d * ctx.cp), ("weights", i))
        )
        tape.op("indexer", (), (q, k, weights))
        tape.op("indexer scores", (q, k, weights), workspace=scores + _choice(scores) if kernels else 2 * scores)
        tape.op("choice of keys", (q, k, weights), chosen)
        return chosen, None, (q, k, weights)
    x, q_in = (tape.make("indexer input cut off", t, 0, grad=False) for t in (normed, latent))
    x.whole, q_in.whole = normed.whole or normed, latent.whole or latent
    if ctx.sp:
        x = tape.make("indexer input gathered", x, ctx.tokens * ctx.hidden_size * ctx.act, grad=False)
        q_in = tape.make("indexer latent gathered", q_in, ctx.tokens * rank * ctx.act, grad=False)
    q_bytes, k_bytes = ctx.tokens * i * d * ctx.act, ctx.tokens * d * ctx.act
    q = r.plain_linear(INDEXER + "linear_wq_b", q_in, ctx.tokens, rank, i * d)
    q = _partly_rotated(r, "indexer query", q, q_bytes, d, rope)
    k = r.plain_linear(INDEXER + "linear_wk", x, ctx.tokens, ctx.hidden_size, d)
    k = _layer_norm(r, k, d)
    k = _partly_rotated(r, "indexer key", k, k_bytes, d, rope)
    if sparse.rotate_activation:
        q, k = tape.make("rotated indexer query", q, q_bytes), tape.make("rotated indexer key", k, k_bytes)
    weights = r.plain_linear(INDEXER + "linear_weights_proj", x, ctx.tokens, ctx.hidden_size, i)
    weights = tape.make("indexer weights", weights, weights.bytes, workspace=weights.bytes)
    if ctx.cp > 1:
        k = tape.make("gathered indexer key", k, k_bytes * ctx.cp)
        k = tape.make("indexer key in order", k, k_bytes * ctx.cp)
    if by_kernels:
        made = (q, k, weights)
        return chosen, _loss_of_kernels(r, indexer, sparse, made, chosen, slots, pairs), made
    a, scores = spec.num_attention_heads // ctx.tp, 4 * i * pairs
    attention = 4 * (4 * a * pairs) + a * pairs
    # The gradient of the scores, multiplied by the mask of the ReLU if there is one; then in two layouts, together with
    # the query and its gradient in fp32.
    again = largest(3 * scores + i * pairs if sparse.scoring_relu else 0, 2 * scores + 3 * 4 * ctx.tokens * i * d)
    tape.op("indexer scores", (), workspace=2 * scores)
    loss = tape.make(
        "indexer loss", (q, k, weights), 4, saves=(q, k, weights, query, key, chosen), also=(chosen,),
        workspace=attention, backward_workspace=largest(again, attention),
    )
    return chosen, loss, (q, k, weights)


def _loss_of_kernels(
    r: Recorder, indexer: IndexerSpec, sparse: SparseSpec, inputs: tuple[Tensor, ...], chosen: Tensor, slots: int,
    pairs: int,
) -> Tensor:  # fmt: skip
    """The loss, computed together with the gradients of its inputs, which are saved and scaled by the loss's gradient.
    Temporaries: queries padded to 64 heads and their gradient; and, of the chosen keys (of all keys without
    sparse_loss), in fp32: scores, their logarithm, the prediction, the target, and the terms of the divergence.

    Source: ``dsa_cudnn_kernels.py: _compute_sparse_indexer_loss_and_grads, _compute_dense_indexer_loss_and_grads``.
    """
    tape = r.tape
    scores = slots if sparse.sparse_loss else 4 * pairs
    alive = smallest(4 * pairs, SCORES_AT_ONCE) if sparse.sparse_loss else scores
    tape.op("indexer scores", inputs, workspace=alive + _choice(alive))
    made = tuple(
        tape.tensor(f"gradient of the {name}", t.bytes, grad=False)
        for name, t in zip(("indexer query", "indexer key", "indexer weights"), inputs, strict=True)
    )
    padded = inputs[0].bytes * largest(indexer.num_heads, 64) // indexer.num_heads
    return tape.make(
        "indexer loss", inputs, 4, saves=made, also=(*made, chosen), workspace=2 * padded + 8 * scores,
        backward_workspace=0,
    )


def _choice(scores: Any) -> Any:
    """Scratch of the choice from these bytes of scores."""
    return smallest(CHOICE_PER_SCORE * scores, CHOICE_AT_ONCE)


def fused(r: Recorder, spec: MLASpec) -> bool:
    """Whether FlashMLA runs attention: it supports only values of width 512, and numbers of heads that are a multiple
    or a divisor of 64 (or of 128, on Blackwell) (``dsa_cudnn_kernels.py: _supports_flash_mla_value_layout,
    _flash_mla_head_padding``)."""
    assert spec.sparse is not None
    if spec.sparse.kernels == "none" or r.ctx.impl.attention_backend == "unfused":
        return False
    return spec.kv_lora_rank == FLASH_MLA_VALUE and _padded_heads(r, spec) > 0


def _padded_heads(r: Recorder, spec: MLASpec) -> int:
    """Heads that FlashMLA's kernel runs with, padding included; 0: it has no kernel."""
    a = spec.num_attention_heads // r.ctx.tp
    for block in (64, 128) if r.ctx.impl.gpu_arch == "blackwell" else (64,):
        if a % block == 0:
            return a
        if a < block and block % a == 0:
            return block
    return 0


def _fused(r: Recorder, spec: MLASpec, query: Tensor, key: Tensor, index: Tensor, keys: int) -> Tensor:
    """FlashMLA over the chosen keys: [T, a kv]. With packed sequences under context parallelism every row has keys, and
    backward reads its saved tensors; else it copies them, and once more the rows that have keys. Indices that another
    layer uses too are copied."""
    ctx, tape, sparse = r.ctx, r.tape, spec.sparse
    assert sparse is not None
    a, heads = spec.num_attention_heads // ctx.tp, _padded_heads(r, spec)
    out_bytes = ctx.tokens * heads * spec.kv_lora_rank * ctx.act
    q_bytes = ctx.tokens * heads * (spec.kv_lora_rank + spec.qk_pos_emb_head_dim) * ctx.act
    shared = sparse.shares_choice or spec.indexer is None
    slots = 4 * ctx.tokens * smallest(sparse.topk, keys)
    kept = index
    if shared or sparse.indexer_loss:
        kept = tape.make("chosen keys for backward", index, slots, grad=False)
    rows = tape.tensor("log-sum-exp of the chosen keys", 4 * ctx.tokens * heads, grad=False)
    padded = 0 if a == heads else q_bytes
    whole_rows = ctx.packed and ctx.cp > 1 and not shared
    copies = 0 if whole_rows else 2 * (q_bytes + 2 * out_bytes + slots) + q_bytes
    if a != heads:
        copies += q_bytes + 2 * out_bytes
    # The key's gradient is summed in fp32.
    copies += 4 * keys * ctx.batch * (spec.kv_lora_rank + spec.qk_pos_emb_head_dim)
    out = tape.make(
        "attention context", (query, key), out_bytes, saves=(query, key, kept, rows), save_output=True, also=(rows,),
        workspace=padded, backward_workspace=copies,
    )
    if a == heads:
        return out
    return tape.make("attention context of the rank's heads", out, out_bytes * a // heads)


def _indexer_parameters(r: Recorder, spec: MLASpec, indexer: IndexerSpec) -> None:
    """Source: ``dsa.py: DSAIndexer.__init__``, every linear "duplicated"."""
    h, heads, d = r.ctx.hidden_size, indexer.num_heads, indexer.head_dim
    r.parameter(INDEXER + "linear_wq_b.weight", (heads * d, spec.q_lora_rank or h))
    r.parameter(INDEXER + "linear_wk.weight", (d, h))
    r.parameter(INDEXER + "k_norm.weight", (d,))
    r.parameter(INDEXER + "k_norm.bias", (d,))
    r.parameter(INDEXER + "linear_weights_proj.weight", (heads, h))


def _partly_rotated(r: Recorder, name: str, x: Tensor, nbytes: int, width: int, rope: int) -> Tensor:
    """The first ``rope`` of every head of ``width`` rotated, and concatenated with the others in a new tensor."""
    part = nbytes * rope // width
    angles = cosine_and_sine(r, f"{name} rope", rope)
    return r.tape.make(f"rotated {name}", x, nbytes, saves=(angles,), also=(angles,), workspace=3 * part)


def _layer_norm(r: Recorder, x: Tensor, width: int) -> Tensor:
    """The indexer's key norm, always a LayerNorm; Transformer Engine casts a key that it gets in fp32
    (dsa_indexer_k_norm_fp32) back."""
    tape, rows = r.tape, 4 * r.ctx.tokens
    r.parameter(INDEXER + "k_norm.weight", (width,))
    r.parameter(INDEXER + "k_norm.bias", (width,))
    stats = tuple(tape.tensor(f"{INDEXER}k_norm {one}", rows, grad=False) for one in ("rstd", "mean"))
    return tape.make(INDEXER + "k_norm", x, x.bytes, saves=(x, *stats), also=stats)
