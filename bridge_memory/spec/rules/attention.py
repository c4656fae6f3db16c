"""Attention features that a release of megatron-core lacks, or that no kernel of Transformer Engine supports."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from bridge_memory.releases import (
    ATTENTION_TOKENS_FIRST,
    DELTA_NETS_TAKE_PACKED_SEQUENCES,
    GATES_WITH_REPLICATED_GROUPS,
    LOCAL_WINDOWS,
    MTP_TAKES_PACKED_SEQUENCES,
    QUERY_GROUPS_REPLICATED,
    SINKS_ARE_NOT_DETERMINISTIC,
    UNEQUAL_HEADS_EXCHANGED,
    core_of,
    release_words,
)
from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.limits import Limits, divisors
from bridge_memory.spec.model import AttentionSpec, CompressedAttentionSpec, GatedDeltaNetSpec, MambaSpec, MLASpec
from bridge_memory.spec.parts import ImplementationSpec, ParallelSpec

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


def check_query_groups(p: ParallelSpec, i: ImplementationSpec, limits: Limits) -> None:
    """TC: query groups must be a multiple of TP; since ``QUERY_GROUPS_REPLICATED`` also a divisor of it."""
    tp = p.tensor_model_parallel_size
    for groups in limits.groups:
        if groups % tp and (tp % groups or not QUERY_GROUPS_REPLICATED(i)):
            fix = f"use {divisors(gcd(limits.groups_gcd, limits.tp_gcd), tp)}"
            if tp % groups == 0:
                fix += f", or {QUERY_GROUPS_REPLICATED} or later, which replicates keys and values"
            raise SpecError(
                f"num_query_groups ({groups}) is not divisible by tensor_model_parallel_size ({tp}) in "
                f"megatron-core {release_words(core_of(i))}; {fix}"
            )
        gated = any(isinstance(m, AttentionSpec) and m.attention_output_gate for m in limits.mixers)
        if groups < tp and gated and not GATES_WITH_REPLICATED_GROUPS(i):
            raise SpecError(
                f"tensor_model_parallel_size ({tp}) is more than num_query_groups ({groups}), which the gate over "
                f"attention's output of this model needs {GATES_WITH_REPLICATED_GROUPS} or later for, not "
                f"{release_words(core_of(i))}; use {divisors(gcd(limits.groups_gcd, limits.tp_gcd), tp)}"
            )


def check_attention_release(run: RunSpec, limits: Limits) -> None:
    """Raise SpecError for attention that the release lacks or fails on."""
    i, b = run.implementation, run.batch.micro_batch_size
    if run.model.mtp_num_layers and run.batch.packed_sequences and not MTP_TAKES_PACKED_SEQUENCES(i):
        raise SpecError(
            f"packed_sequences (True) with mtp_num_layers ({run.model.mtp_num_layers}) needs "
            f"{MTP_TAKES_PACKED_SEQUENCES} or later, not {release_words(core_of(i))}; drop one of them"
        )
    turned = not ATTENTION_TOKENS_FIRST(i) and not run.batch.packed_sequences
    for m in limits.mixers:
        if isinstance(m, GatedDeltaNetSpec) and run.batch.packed_sequences and not DELTA_NETS_TAKE_PACKED_SEQUENCES(i):
            raise SpecError(
                f"packed_sequences (True) with gated delta nets needs {DELTA_NETS_TAKE_PACKED_SEQUENCES} or later, not "
                f"{release_words(core_of(i))}; drop it"
            )
        if isinstance(m, AttentionSpec) and m.core_attention and not i.torch_layers:
            # transformer/dot_product_attention.py, Bridge models/gemma/gemma2_provider.py
            cp, whose = run.parallel.context_parallel_size, "this model's own attention (Gemma 2, EXAONE 4)"
            if run.batch.packed_sequences:
                raise SpecError(
                    f"packed_sequences (True): {whose} takes none; set it, or dataset.enable_offline_packing, to False"
                )
            if cp > 1:
                raise SpecError(f"context_parallel_size ({cp}): {whose} refuses it; set it to 1")
        if isinstance(m, MambaSpec) and run.batch.packed_sequences and not m.memory_efficient:
            # ssm/mamba_mixer.py: MambaMixer.forward
            raise SpecError(
                "packed_sequences (True) with use_mamba_mem_eff_path (False), without which megatron-core's Mamba "
                "layers take no packed sequences; set use_mamba_mem_eff_path to True"
            )
        if isinstance(m, AttentionSpec) and m.window_size is not None and not i.te and not LOCAL_WINDOWS(i):
            raise SpecError(
                f"transformer_impl (local) takes the sliding windows of this model from {LOCAL_WINDOWS} on, not "
                f"{release_words(core_of(i))}; use transformer_engine"
            )
        if isinstance(m, MLASpec) and i.te and i.apply_rope_fusion and b > 1 and turned:
            # fusions/fused_mla_yarn_rope_apply.py: ApplyMLARotaryEmbKV.backward views gradients of layout [b, s].
            raise SpecError(
                f"apply_rope_fusion (True) with multi-latent attention and micro_batch_size ({b}) needs "
                f"{ATTENTION_TOKENS_FIRST} or later, not {release_words(core_of(i))}; set it to False, or "
                "micro_batch_size to 1"
            )


def check_kernels(run: RunSpec, limits: Limits) -> None:
    """Raise SpecError for attention that no kernel of Transformer Engine supports (``dot_product_attention/utils.py:
    get_attention_backend``, ``context_parallel.py: attn_forward_func_with_cp``)."""
    i, cp, fp32 = run.implementation, run.parallel.context_parallel_size, run.precision.params_dtype == "fp32"
    asked, how = i.attention_backend, i.cp_comm_type
    if asked == "local" and i.te and any(isinstance(m, AttentionSpec | MLASpec) for m in limits.mixers):
        # models/common/language_module/language_module.py: LanguageModule._set_attention_backend switches off all
        # three of Transformer Engine's, whose attention then refuses to run.
        raise SpecError(
            "attention_backend (local) leaves Transformer Engine no attention; use auto, or transformer_impl local"
        )
    _check_fp8_attention(run, limits)
    kernel = i.attention_kernel != "unfused"
    for m in limits.mixers:
        if isinstance(m, CompressedAttentionSpec):
            _check_compressed(run)
            continue
        if isinstance(m, AttentionSpec):
            window, sink, equal_heads = m.window_size is not None, m.learnable_softmax_sink, True
        elif isinstance(m, MLASpec) and m.sparse is not None:
            _check_sparse(run, cp, how)
            continue
        elif isinstance(m, MLASpec):
            window, sink, equal_heads = False, False, m.qk_head_dim + m.qk_pos_emb_head_dim == m.v_head_dim
        else:
            continue
        if cp > 1:
            if window and how not in ("a2a", "all_gather"):
                raise SpecError(
                    f"cp_comm_type ({how}) does not go with the sliding windows of this model and "
                    f"context_parallel_size ({cp}); use a2a or all_gather"
                )
            te = i.transformer_engine
            if not equal_heads and how in ("a2a", "all_gather") and te and not UNEQUAL_HEADS_EXCHANGED(i):
                raise SpecError(
                    f"cp_comm_type ({how}) does not go with multi-latent attention and context_parallel_size ({cp}) "
                    f"in Transformer Engine {release_words(te)}; use p2p"
                )
        if kernel and fp32 and (asked != "auto" or cp > 1):
            what = f"context_parallel_size ({cp})" if cp > 1 else f"attention_backend ({asked})"
            raise SpecError(f"{what} needs params_dtype bf16 or fp16: Transformer Engine has no such kernel for fp32")
        if asked == "fused" and window and run.model.attention_dropout and i.te and not fp32:
            raise SpecError(
                f"attention_backend (fused) does not go with sliding windows and attention_dropout "
                f"({run.model.attention_dropout}), which cuDNN does not take together; use auto"
            )
        if kernel and sink and not fp32:
            if asked == "flash":
                raise SpecError(
                    "attention_backend (flash) has no softmax sink, which this model has; use fused or auto"
                )
            if cp > 1 and how != "a2a":
                raise SpecError(
                    f"cp_comm_type ({how}) does not go with the softmax sinks of this model and "
                    f"context_parallel_size ({cp}); use a2a"
                )
            if i.deterministic_attention and SINKS_ARE_NOT_DETERMINISTIC(i) and (asked == "fused" or cp > 1):
                named = "deterministic_mode" if i.deterministic_mode else "nvte_deterministic"
                what = "attention_backend (fused)" if asked == "fused" else f"context_parallel_size ({cp})"
                raise SpecError(
                    f"{named} (True) does not go with the softmax sinks of this model and {what}: Transformer Engine's "
                    "deterministic attention with sinks is the unfused one; leave one of them out"
                )


def _check_fp8_attention(run: RunSpec, limits: Limits) -> None:
    """TE ``get_attention_backend``, for the recipes to which megatron-core passes fp8_dot_product_attention
    (``fp8_utils.py: get_fp8_recipe``)."""
    p, i = run.precision, run.implementation
    passed_on = p.fp8_recipe in ("delayed", "tensorwise", "mxfp8")
    if not (p.fp8_dot_product_attention and p.fp8 and i.te and passed_on):
        return
    if not any(isinstance(m, AttentionSpec | MLASpec) for m in limits.mixers):
        return
    if i.attention_backend not in ("auto", "fused"):
        raise SpecError(
            f"attention_backend ({i.attention_backend}) does not compute in fp8, which fp8_dot_product_attention asks "
            "for; use fused or auto"
        )
    # mxfp8 also needs Blackwell, whatever attention computes in: ``gpus.check_computes`` refuses it.
    if p.fp8_recipe == "tensorwise" and i.gpu_arch != "blackwell":
        raise SpecError(
            f"fp8_dot_product_attention with fp8_recipe {p.fp8_recipe} runs on Blackwell alone, not on gpu_arch "
            f"{i.gpu_arch}; name a Blackwell card, use fp8_recipe delayed or drop fp8_dot_product_attention"
        )


def _check_compressed(run: RunSpec) -> None:
    """Megatron-LM ``deepseek_v4_hybrid_attention.py: DSv4HybridAttention.__init__, forward``."""
    p = run.parallel
    if p.tp > 1:
        raise SpecError(f"tensor_model_parallel_size ({p.tp}): DeepSeek-V4's attention runs on one rank; set it to 1")
    if p.cp > 1 and not run.batch.packed_sequences:
        raise SpecError(
            f"context_parallel_size ({p.cp}): DeepSeek-V4's attention divides packed sequences alone; set it to 1"
        )
    if "core_attn" in run.recompute.modules and run.recompute.granularity == "selective":
        raise SpecError("recompute_modules (core_attn) is not supported by DeepSeek-V4's attention; drop it")


def _check_sparse(run: RunSpec, cp: int, how: str) -> None:
    """TC; ``absorbed_mla.py: AbsorbedMLASelfAttention.__init__``."""
    i, p = run.implementation, run.parallel
    if i.torch_layers:
        return
    if cp > 1 and how != "all_gather":
        raise SpecError(
            f"cp_comm_type ({how}) does not go with sparse attention and context_parallel_size ({cp}); use all_gather"
        )
    if p.tp > 1 and not p.sp:
        raise SpecError(
            f"sequence_parallel (False) with tensor_model_parallel_size ({p.tp}) is refused by sparse attention; set "
            "sequence_parallel to True"
        )
    if run.recompute.selects("mla_up_proj") and run.precision.quantizes:
        raise SpecError(
            f"recompute_modules (mla_up_proj) with {run.precision.format_words} is refused by sparse attention; leave "
            "it out"
        )
