"""DeepSeek-V4's attention: a sliding window and compressed keys, from which an indexer may choose.

Source: Megatron-LM's main branch of 2026, not yet in megatron-core 0.19: ``experimental_attention_variant/
deepseek_v4_hybrid_attention.py: DSv4HybridSelfAttention``, ``csa.py: CompressedSparseAttention, Compressor,
CSAIndexer, unfused_compressed_sparse_attn``, ``dsa.py: FusedDSAIndexerLoss``. The indexer's loss is that of
megatron-core 0.19. Fused kernels (FlashMLA, cuDNN's DSA; ``csa_utils/fused_sparse_attention.py``) save the arguments of
their autograd function (query, keys, indices), output and statistics, and the indexer's gradients.
Shapes: one key of width d serves all a heads; T = s b, c tokens per compressed key, k keys per query, n = s + s / c
keys. Tensor parallelism is 1.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.megatron.attention import cosine_and_sine
from bridge_memory.spec import CompressedAttentionSpec, IndexerSpec
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.symbolic import smallest
from bridge_memory.tapes.tape import Region, Tensor

#: Tokens per compressed key if windows of compression overlap.
OVERLAPPING = 4
CORE = "self_attention.core_attention."


def record_compressed_attention(r: Recorder, spec: CompressedAttentionSpec, x: Tensor) -> Tensor:
    """From one stream [T, h] to the output of linear_proj [T, h] (input norm included)."""
    ctx, tape = r.ctx, r.tape
    a, d, h = spec.num_attention_heads, spec.head_dim, ctx.hidden_size
    recompute_norm = ctx.recomputes("layernorm") and not r.discards_streams
    with r.offload("attn_norm"), tape.discardable("input_layernorm", (x,), enabled=recompute_norm) as norm_region:
        normed = r.hold(r.norm("input_layernorm", x, h, ctx.tokens))
    r.discard_streams(normed)
    down = r.plain_linear("self_attention.linear_q_down_proj", normed, ctx.tokens, h, spec.q_lora_rank)
    latent = r.norm("self_attention.q_layernorm", down, spec.q_lora_rank, ctx.tokens)
    recompute = ctx.recomputes("mla_up_proj")
    query, key, region = _query_and_key(r, spec, latent, normed, recompute)
    with r.offload("core_attn"):
        out = _core_attention(r, spec, normed, latent, query, key)
    tape.keep_alive(query, key)
    if recompute:
        tape.discard(region, query, key)
    # One projection per group of heads; a plain parameter, whose gradient is a separate tensor.
    shape = (spec.output_groups * spec.output_lora_rank, a * d // spec.output_groups)
    r.parameter("self_attention.linear_o_group_proj", shape)
    gradient = 0 if r.frozen else shape[0] * shape[1] * ctx.act
    grouped = tape.make(
        "grouped output", out, ctx.tokens * shape[0] * ctx.act, saves=() if r.frozen else (out,),
        backward_workspace=gradient,
    )
    with r.offload("attn_proj"):
        y = r.row_linear(
            "self_attention.linear_proj", grouped, shape[0], h, bias=spec.add_output_bias,
            original=r.proj_keeps_original,
        )
    tape.keep_alive(latent)
    if recompute_norm:
        tape.discard(norm_region, normed)
    return y


def _query_and_key(
    r: Recorder, spec: CompressedAttentionSpec, latent: Tensor, normed: Tensor, recompute: bool
) -> tuple[Tensor, Tensor, Region]:
    """Query [T, a d], whose heads are normed without a weight, and the single key [T, d], which is also the value."""
    ctx, tape = r.ctx, r.tape
    a, d = spec.num_attention_heads, spec.head_dim
    q_bytes, kv_bytes = ctx.tokens * a * d * ctx.act, ctx.tokens * d * ctx.act
    with tape.discardable("mla_up_proj", (latent, normed), enabled=recompute) as region:
        q = r.column_linear("self_attention.linear_q_up_proj", latent, spec.q_lora_rank, a * d)
        # One compiled kernel.
        query = tape.make("normed query", q, q_bytes, saves=(q,))
        kv = r.column_linear("self_attention.linear_kv_proj", normed, ctx.hidden_size, d)
        key = r.norm("self_attention.kv_layernorm", kv, d, ctx.tokens)
        if not ctx.impl.apply_rope_fusion:  # fused, it rotates in place
            query = _rotated(r, spec, "normed heads", query, q_bytes)
            key = _rotated(r, spec, "single key", key, kv_bytes)
    return query, key, region


def _rotated(r: Recorder, spec: CompressedAttentionSpec, name: str, x: Tensor, nbytes: int) -> Tensor:
    angles = cosine_and_sine(r, f"{name} rope", spec.rope_dim)
    part = nbytes * spec.rope_dim // spec.head_dim
    return r.tape.make(f"rotated {name}", x, nbytes, saves=(angles,), also=(angles,), workspace=3 * part)


def _core_attention(
    r: Recorder, spec: CompressedAttentionSpec, normed: Tensor, latent: Tensor, query: Tensor, key: Tensor
) -> Tensor:
    ctx, tape = r.ctx, r.tape
    r.parameter(CORE + "attn_sink", (spec.num_attention_heads,))
    c, d = spec.compress_ratio, spec.head_dim
    keys, chosen, compressed = ctx.seq, spec.window_size, None
    if c > 1:
        compressed = _compress(r, CORE + "compressor", normed, c, d)
        keys = ctx.seq + ctx.seq // c
        whole = tape.make("window and compressed keys", (key, compressed), keys * ctx.batch * d * ctx.act)
    else:
        whole = key
    if spec.indexer is not None:
        assert compressed is not None
        count = smallest(spec.indexer.topk, ctx.seq // c)
        index = _choose(r, spec, spec.indexer, normed, latent, query, compressed, count)
        chosen = spec.window_size + count
    else:
        index = tape.tensor("chosen keys", 4 * ctx.tokens, grad=False)
        if c > 1:
            chosen = spec.window_size + ctx.seq // c
    slots = ctx.tokens * chosen
    wide = tape.make("indices of the window and of chosen keys", index, 8 * slots, grad=False)
    index = tape.make("indices of the keys", wide, 4 * slots, grad=False)
    if spec.fused:
        rows = tape.tensor("log-sum-exp of the chosen keys", 4 * ctx.tokens * spec.num_attention_heads, grad=False)
        return tape.make(
            "core_attention output", (query, whole), query.bytes, saves=(query, whole, index, rows),
            save_output=True, also=(rows,), backward_workspace=4 * keys * ctx.batch * d,
        )
    out = _unfused(r, spec, query, whole, index, keys, slots)
    tape.keep_alive(wide)
    return out


def _unfused(
    r: Recorder, spec: CompressedAttentionSpec, query: Tensor, whole: Tensor, index: Tensor, keys: int, slots: int
) -> Tensor:
    """softmax(q k^T) k with a sink over the chosen keys, gathered for each query: [T, k, d] in fp32. The gather's
    gradient has the size of the expanded keys, [b, s, n, d]."""
    ctx, tape = r.ctx, r.tape
    a, d = spec.num_attention_heads, spec.head_dim
    wide, scores = 4 * ctx.tokens * a * d, 4 * a * slots
    places = tape.tensor("indices of the gathered keys", 8 * slots, grad=False)
    tape.op(places.name, index, places, workspace=4 * slots)
    gathered = tape.make(
        "gathered keys", whole, slots * d * ctx.act, saves=(whole, places),
        backward_workspace=ctx.tokens * keys * d * ctx.act,
    )
    kv = tape.make("gathered keys in fp32", gathered, 4 * slots * d)
    q = tape.make("query in fp32", query, wide)
    raw = tape.make("attention scores", (q, kv), scores, saves=(q, kv))
    scaled = tape.make("scaled scores", raw, scores)
    mask = tape.tensor("mask of the keys", slots, grad=False)
    masked = tape.make("masked scores of the keys", scaled, scores, saves=(mask,), also=(mask,))
    largest_index = tape.tensor("largest scores", 12 * ctx.tokens * a, grad=False)
    shifted = tape.make("shifted scores", masked, scores, saves=(largest_index,), also=(largest_index,))
    exponentials = tape.make("exponentials", shifted, scores, save_output=True)
    sums = tape.tensor("sums of exponentials", 8 * ctx.tokens * a, grad=False)
    weights = tape.make("attention weights", exponentials, scores, saves=(exponentials, sums), also=(sums,))
    context = tape.make("attention context in fp32", (weights, kv), wide, saves=(weights, kv))
    out = tape.make("core_attention output", context, query.bytes)
    tape.keep_alive(gathered, kv, q, masked, exponentials, weights, context, whole, index)
    return out


def _compress(r: Recorder, name: str, x: Tensor, c: int, d: int) -> Tensor:
    """Keys [T / c, d], each pooled from c tokens (2 c if windows overlap) by a softmax in fp32."""
    ctx, tape = r.ctx, r.tape
    overlap = 2 if c == OVERLAPPING else 1
    width = overlap * d
    values = r.plain_linear(f"{name}.linear_wkv", x, ctx.tokens, ctx.hidden_size, width)
    gates = r.plain_linear(f"{name}.linear_wgate", x, ctx.tokens, ctx.hidden_size, width)
    r.parameter(f"{name}.ape", (c, width))
    size = ctx.tokens * width
    scores = tape.make(f"{name} scores", gates, 4 * size)
    if overlap > 1:
        values = tape.make(f"{name} overlapping values", values, size * ctx.act)
        scores = tape.make(f"{name} overlapping scores", scores, 4 * size)
    shares = tape.make(f"{name} shares", scores, 4 * size, save_output=True)
    product = tape.make(f"{name} weighted values", (values, shares), 4 * size, saves=(values, shares))
    pooled = tape.make(f"{name} pooled values", product, ctx.tokens // c * d * 4, workspace=0)
    pooled = tape.make(f"{name} pooled keys", pooled, ctx.tokens // c * d * ctx.act)
    tape.keep_alive(gates, values, scores, shares)
    return r.norm(f"{name}.norm", pooled, d, ctx.tokens // c)


def _choose(
    r: Recorder, spec: CompressedAttentionSpec, indexer: IndexerSpec, normed: Tensor, latent: Tensor, query: Tensor,
    compressed: Tensor, count: int,
) -> Tensor:  # fmt: skip
    """Indices of the chosen compressed keys [T, k], and the loss that trains the indexer. Its inputs are detached from
    the graph; the loss makes scores of every query and compressed key twice, [b, a, s, s / c] in fp32."""
    ctx, tape = r.ctx, r.tape
    name, heads, width = CORE + "indexer", indexer.num_heads, indexer.head_dim
    x, q_in = (tape.make("indexer input cut off", t, 0, grad=False) for t in (normed, latent))
    x.whole, q_in.whole = normed.whole or normed, latent.whole or latent
    q = r.plain_linear(f"{name}.linear_wq_b", q_in, ctx.tokens, spec.q_lora_rank, heads * width)
    if not ctx.impl.apply_rope_fusion:
        q = _rotated(r, spec, "indexer query", q, ctx.tokens * heads * width * ctx.act)
    q = tape.make("rotated indexer query", q, ctx.tokens * heads * width * ctx.act)
    k = _compress(r, f"{name}.compressor", x, spec.compress_ratio, width)
    k = tape.make("rotated indexer keys", k, k.bytes)
    weights = r.plain_linear(f"{name}.linear_weights_proj", x, ctx.tokens, ctx.hidden_size, heads)
    weights = tape.make("indexer weights", weights, 4 * ctx.tokens * heads)
    chosen = tape.tensor("chosen compressed keys", 8 * ctx.tokens * count, grad=False)
    pairs = ctx.tokens * (ctx.seq // spec.compress_ratio)
    if spec.fused:
        return _loss_of_kernels(r, spec, (q, k, weights), count, pairs)
    scratch = 3 * 4 * pairs * spec.num_attention_heads + 2 * query.bytes
    loss = tape.make(
        "indexer loss", (q, k, weights), 4, saves=(q, k, weights, query, compressed, chosen), also=(chosen,),
        workspace=scratch, backward_workspace=scratch,
    )
    tape.keep_alive(q, k, weights, loss)
    return chosen


def _loss_of_kernels(
    r: Recorder, spec: CompressedAttentionSpec, inputs: tuple[Tensor, ...], count: Any, pairs: Any
) -> Tensor:
    """As ``_choose``, by cuDNN's kernels, which compute the gradients of the indexer's query, keys and weights together
    with the loss and save these alone. Alive with the scores of all compressed keys in fp32: as many bytes of the
    prediction, the target, the terms of the divergence, and copies for the gradients; of the chosen keys alone with
    ``sparse_loss``.

    Source: Megatron-LM ``csa_utils/fused_sparse_attention.py: FusedIndexerSparseAttnFunc``.
    """
    tape = r.tape
    chosen = tape.tensor("chosen compressed keys", 4 * r.ctx.tokens * count, grad=False)
    made = tuple(
        tape.tensor(f"gradient of the {name}", t.bytes, grad=False)
        for name, t in zip(("indexer query", "indexer keys", "indexer weights"), inputs, strict=True)
    )
    terms = 8 * (chosen.bytes if spec.sparse_loss else 4 * pairs)
    loss = tape.make("indexer loss", inputs, 4, saves=made, also=(*made, chosen), workspace=4 * pairs + terms)
    tape.keep_alive(*inputs, loss)
    return chosen
