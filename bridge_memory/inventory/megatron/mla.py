"""Multi-latent attention.

Source: megatron-core ``transformer/multi_latent_attention.py: MLASelfAttention``. With Transformer Engine (from 0.14)
the two down-projections are replicated on every tensor-parallel rank and run on the sequence shard; the local
implementation shards their outputs and gathers them.
Shapes: q = a (d_nope + d_rope) / t, v = a d_v / t, T = s b, T_sp = T / t under SP.
"""

from __future__ import annotations

from bridge_memory.inventory.megatron.attention import core_attention, cosine_and_sine, rotation_fused
from bridge_memory.inventory.megatron.sparse_attention import MODULES, record_sparse_attention
from bridge_memory.releases import (
    LATENTS_HELD,
    NORMS_BEFORE_UP_PROJECTIONS,
    PACKED_VALUES_PADDED,
    QUERY_NORM_WITHOUT_LATENT,
    WHOLE_DOWN_PROJECTIONS,
)
from bridge_memory.spec import MLASpec, divide
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Region, Tensor


def record_mla(r: Recorder, spec: MLASpec, x: Tensor) -> Tensor:
    """From the residual stream [T_sp, h] to the output of linear_proj [T_sp, h] (input norm included)."""
    if spec.sparse is not None:
        return record_sparse_attention(r, spec, x)
    ctx, tape, first = r.ctx, r.tape, len(r.rows)
    a = divide(spec.num_attention_heads, ctx.tp, "num_attention_heads", "tensor_model_parallel_size")
    q_head = spec.qk_head_dim + spec.qk_pos_emb_head_dim
    q_width, v_width = a * q_head, a * spec.v_head_dim
    h = ctx.hidden_size

    recompute_norm = ctx.recomputes("layernorm")
    with r.offload("attn_norm"), tape.discardable("input_layernorm", (x,), enabled=recompute_norm) as norm_region:
        normed = r.hold(r.norm("input_layernorm", x, h, ctx.tokens_sp))
    recompute_up = ctx.recomputes("mla_up_proj")
    with r.offload("qkv_linear"):
        qkv, latents, up_region = _query_key_value(r, spec, normed, recompute=recompute_up)
    with (
        tape.checkpoint("core_attn", qkv, enabled=ctx.recomputes("core_attn")),
        r.offload("core_attn"),
    ):
        # Kernels for packed sequences need values as wide as keys: zeros are appended, and cut off the output.
        padded = ctx.packed and PACKED_VALUES_PADDED(ctx.impl) and v_width != q_width
        wide = q_width if padded else v_width
        query, key, value = qkv
        if padded:
            # Recomputed outputs stay until the region has run backward.
            held = (value,) if recompute_up else ()
            value = tape.make("padded value", value, ctx.tokens * q_width * ctx.act, saves=held)
        out = core_attention(
            r, (query, key, value), heads=a, q_width=q_width, kv_width=q_width, v_width=wide, out_width=wide,
            grouped=False, recomputed=recompute_up,
        )
        if padded:
            (out,) = tape.views("cut", out, ("core_attention output, cut", ctx.tokens * v_width * ctx.act))
    if padded:
        out = tape.make("core_attention output without padding", out, ctx.tokens * v_width * ctx.act)
    if recompute_up:
        tape.keep_alive(*qkv)
        tape.discard(up_region, *qkv)
    with r.offload("attn_proj"):
        y = r.row_linear(
            "self_attention.linear_proj", out, v_width, h, bias=spec.add_output_bias, original=r.proj_keeps_original
        )
    if not recompute_up:
        tape.keep_alive(*qkv)  # variables of ``MultiLatentAttention.forward``
    if LATENTS_HELD(ctx.impl):
        tape.keep_alive(*latents)
    if recompute_norm:
        tape.discard(norm_region, normed)
    r.arrange(first, "input_layernorm", *(f"self_attention.{m}" for m in MODULES))
    return y


def _query_key_value(
    r: Recorder, spec: MLASpec, normed: Tensor, *, recompute: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor], Region]:
    """Down-projections, their norms, up-projections and rotary embedding: q, k [T, a (d_nope + d_rope) / t] and
    v [T, a d_v / t], with the latents and the region of the up-projections."""
    ctx, tape = r.ctx, r.tape
    a = spec.num_attention_heads // ctx.tp
    q_width, v_width = a * (spec.qk_head_dim + spec.qk_pos_emb_head_dim), a * spec.v_head_dim
    act = ctx.act
    q_in: Tensor = normed
    if spec.q_lora_rank is not None:
        q_in, _ = _down_projection(r, "self_attention.linear_q_down_proj", normed, spec.q_lora_rank, 0)
    kv_in, k_rope = _down_projection(
        r, "self_attention.linear_kv_down_proj", normed, spec.kv_lora_rank, spec.qk_pos_emb_head_dim
    )
    fused_norm = ctx.te and spec.qk_layernorm
    own_norms = spec.qk_layernorm and not fused_norm
    norms_first = NORMS_BEFORE_UP_PROJECTIONS(ctx.impl)
    if own_norms and norms_first:
        q_in, kv_in = _norms(r, spec, q_in, kv_in)
    latents = (q_in, kv_in)

    with tape.discardable("mla_up_proj", (q_in, kv_in, k_rope), enabled=recompute) as up_region:
        if own_norms and not norms_first:
            q_in, kv_in = _norms(r, spec, q_in, kv_in)
        if spec.q_lora_rank is None:
            q = r.column_linear(
                "self_attention.linear_q_proj", q_in, ctx.hidden_size, q_width,
                fused_norm=fused_norm and QUERY_NORM_WITHOUT_LATENT(ctx.impl),
            )
        else:
            q = r.column_linear(
                "self_attention.linear_q_up_proj", q_in, spec.q_lora_rank, q_width, fused_norm=fused_norm
            )
        if ctx.te and (_down_projections_are_whole(ctx) or not ctx.sp):
            # Transformer Engine makes the latent contiguous, inside the recomputed region.
            kv_in = tape.make("kv_compressed", kv_in, ctx.tokens_sp * spec.kv_lora_rank * act)
        kv = r.column_linear(
            "self_attention.linear_kv_up_proj", kv_in, spec.kv_lora_rank,
            a * (spec.qk_head_dim + spec.v_head_dim), fused_norm=fused_norm,
        )
        q_bytes, v_bytes = ctx.tokens * q_width * act, ctx.tokens * v_width * act
        query = q  # The fused form rotates in place (``fused_mla_yarn_rope_apply.py: ApplyMLARotaryEmbQ``).
        angles: tuple[Tensor, ...] = ()
        if not rotation_fused(ctx):
            angles = tuple(cosine_and_sine(r, part, spec.qk_pos_emb_head_dim) for part in ("query", "key"))
            query = tape.make("query", q, q_bytes, workspace=q_bytes // 2, saves=angles[:1], also=angles[:1])
        key = tape.make("key", (kv, k_rope), q_bytes, saves=angles[1:], also=angles[1:])
        value = tape.make("value", kv, v_bytes)
    return (query, key, value), latents, up_region


def _norms(r: Recorder, spec: MLASpec, q_in: Tensor, kv_in: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of both latents; the query has one only with q_lora_rank."""
    if spec.q_lora_rank is not None:
        q_in = r.norm("self_attention.q_layernorm", q_in, spec.q_lora_rank, r.ctx.tokens_sp)
    return q_in, r.norm("self_attention.kv_layernorm", kv_in, spec.kv_lora_rank, r.ctx.tokens_sp)


def _down_projections_are_whole(ctx: BlockContext) -> bool:
    """Whether every rank computes whole latents, of its own tokens; true without tensor parallelism."""
    return ctx.te and (ctx.tp == 1 or WHOLE_DOWN_PROJECTIONS(ctx.impl))


def _down_projection(r: Recorder, name: str, x: Tensor, rank: int, rope: int) -> tuple[Tensor, Tensor]:
    """h -> rank + rope: returns (tensor that holds the latent [T_sp, rank], tensor that holds the rotary part [T,
    rope]).

    Replicated: the latent is a view of the output, and so is the rotary part unless sequence parallelism gathers it.
    Sharded (local, and TE before 0.14): the output is gathered, and the rotary part is a view of that. The latent is a
    view too if there is no rotary part; else it is copied when it is scattered to the sequence shards.
    """
    ctx, tape = r.ctx, r.tape
    width, latent_bytes = rank + rope, ctx.tokens_sp * rank * ctx.act
    if _down_projections_are_whole(ctx):
        original = ctx.recomputes("layernorm")
        down = r.plain_linear(name, x, ctx.tokens_sp, ctx.hidden_size, width, original=original)
        gathered = rope and ctx.sp
        return down, tape.make("gathered k_pos_emb", down, ctx.tokens * rope * ctx.act) if gathered else down
    local = divide(width, ctx.tp, f"width of {name}", "tensor_model_parallel_size")
    down = r.column_linear(name, x, ctx.hidden_size, local)
    if ctx.tp > 1:
        whole = ctx.tokens * width * ctx.act
        down = tape.make(f"{name} gathered", down, whole, workspace=whole)
    if ctx.sp and rope:
        return tape.make(f"{name} scattered", down, latent_bytes), down
    return down, down
