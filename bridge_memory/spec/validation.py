"""What a RunSpec refuses: one line each, naming the field, its value and the fix.

Rules are megatron-core's own, with the function that enforces them named beside; where a rule changed, that of the
release in ``ImplementationSpec.megatron_core``. A search validates hundreds of thousands of runs, so a sound one
costs a few dozen comparisons and builds no string. Types, names and ranges of single fields are in ``fields``, what
depends on the model alone in ``limits``.

TC = ``transformer/transformer_config.py: TransformerConfig.__post_init__``, MPC = ``model_parallel_config.py:
ModelParallelConfig.__post_init__``, PS = ``parallel_state.py: initialize_model_parallel``, OC =
``optimizer/optimizer_config.py: OptimizerConfig.__post_init__``, all of megatron-core 0.16.1; MLM = Megatron-LM
``megatron/training/arguments.py: validate_args``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from math import ceil, gcd
from typing import TYPE_CHECKING

from bridge_memory.releases import (
    ATTENTION_TOKENS_FIRST,
    DELAYED_FP8_EXCLUDES_RECOMPUTED_PARTS,
    DELTA_NETS_EXCHANGE_HEADS,
    EXPERT_BIASES_CHECKED,
    EXPERT_BIASES_WITHOUT_ETP,
    EXPERT_COMMUNICATION_OVERLAPS,
    EXPERTS_FUSED_BY_OPS,
    FLEX_OVERLAPS_SHARED_EXPERTS,
    GATES_WITH_REPLICATED_GROUPS,
    HYBRID_END_STAGES,
    HYBRID_MTP,
    LAYOUT_STRINGS,
    LAYOUT_STRINGS_WITH_MTP,
    LAYOUT_STRINGS_WITH_MTP_ANYWHERE,
    LOCAL_WINDOWS,
    MTP_DEPTHS_RECOMPUTED,
    MTP_TAKES_PACKED_SEQUENCES,
    MUON_SHARDED,
    QUERY_GROUPS_REPLICATED,
    SEQUENCE_DISPATCHER_GONE,
    SHARED_EXPERTS_RECOMPUTED,
    UNEQUAL_HEADS_EXCHANGED,
    UNIFORM_GROUPS_MAY_END_SHORT,
    release_words,
)
from bridge_memory.spec.adapters import check_adapters, check_targets
from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.layout import Layout, layout
from bridge_memory.spec.layout_string import parse_layout_string, quote
from bridge_memory.spec.limits import Limits, divisors, limits_of
from bridge_memory.spec.model import (
    AttentionSpec,
    CompressedAttentionSpec,
    GatedDeltaNetSpec,
    MambaSpec,
    MLASpec,
)
from bridge_memory.spec.parts import SHARDING_STRATEGIES, ImplementationSpec, ParallelSpec
from bridge_memory.spec.rules.engine_options import check_engine
from bridge_memory.spec.rules.transformers import check_transformers

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


def validate(run: RunSpec) -> None:
    """Raise SpecError on the first contradiction in ``run``."""
    limits = limits_of(run.model)
    for rule in RULES:
        rule(run, limits)


def _next_multiple(value: int, of: int) -> int:
    return -(-value // of) * of


# --------------------------------------------------------------------------------------------------
# Parallel sizes
# --------------------------------------------------------------------------------------------------


def _check_stages(p: ParallelSpec, num_layers: int) -> None:
    """No more stages, nor virtual ones, than layers to put there; only a layout string makes empty ones.

    An embedding or a loss that is counted as a layer takes the place of one (``transformer_block.py:
    get_num_layers_to_build``).
    """
    pp, vpp, text = (
        p.pipeline_model_parallel_size, p.virtual_pipeline_model_parallel_size or 1, p.pipeline_model_parallel_layout
    )  # fmt: skip
    if text is not None:
        stages = len(_chunks(text)) if pp > 1 else 1
        if pp > stages:
            raise SpecError(
                f"pipeline_model_parallel_size ({pp}) is larger than the number of stages ({stages}) in "
                f"pipeline_model_parallel_layout {quote(text)}; use at most {stages}"
            )
        return
    most = num_layers + p.account_for_embedding_in_pipeline_split + p.account_for_loss_in_pipeline_split
    if pp > most:
        raise SpecError(
            f"pipeline_model_parallel_size ({pp}) is larger than num_layers ({num_layers}); use at most {most}"
        )
    if pp * vpp > most:
        raise SpecError(
            f"virtual_pipeline_model_parallel_size ({vpp}) x pipeline_model_parallel_size ({pp}) is larger than "
            f"num_layers ({num_layers}); use a virtual size of at most {most // pp}"
        )


def _check_parallel(p: ParallelSpec, limits: Limits) -> None:
    world, tp, pp, cp = (
        p.world_size,
        p.tensor_model_parallel_size,
        p.pipeline_model_parallel_size,
        p.context_parallel_size,
    )
    ranks = tp * pp * cp
    if world % ranks:  # PS
        raise SpecError(
            f"world_size ({world}) is not divisible by tensor_model_parallel_size ({tp}) x "
            f"pipeline_model_parallel_size ({pp}) x context_parallel_size ({cp}) = {ranks}; use a multiple of "
            f"{ranks} GPUs, such as {_next_multiple(world, ranks)}"
        )
    ep = p.expert_model_parallel_size
    etp = p.etp
    if world % (etp * ep * pp):  # PS
        size = etp * ep * pp
        raise SpecError(
            f"world_size ({world}) is not divisible by expert_tensor_parallel_size ({etp}) x "
            f"expert_model_parallel_size ({ep}) x pipeline_model_parallel_size ({pp}) = {size}; use a multiple "
            f"of {size} GPUs, such as {_next_multiple(world, size * ranks // gcd(size, ranks))}, or lower "
            "expert_tensor_parallel_size or expert_model_parallel_size"
        )
    if p.sequence_parallel and tp == 1:  # MPC
        raise SpecError("sequence_parallel (True) needs tensor_model_parallel_size of 2 or more, not 1; drop it")
    vpp = p.virtual_pipeline_model_parallel_size
    if vpp is not None and vpp > 1 and pp == 1:  # PS
        raise SpecError(
            f"virtual_pipeline_model_parallel_size ({vpp}) needs pipeline_model_parallel_size of 2 or more, not "
            "1; drop it"
        )
    n = p.num_distributed_optimizer_instances
    if n > 1:  # PS
        if world // (tp * pp) % n:
            raise SpecError(
                f"num_distributed_optimizer_instances ({n}) does not divide the data-parallel size with context "
                f"parallelism ({world // (tp * pp)}); use a divisor of it"
            )
        if limits.experts and p.expert_data_parallel_size % n:
            raise SpecError(
                f"num_distributed_optimizer_instances ({n}) does not divide the expert data-parallel size "
                f"({p.expert_data_parallel_size}); use a divisor of it"
            )


def _check_model_over_ranks(run: RunSpec, limits: Limits) -> None:
    p, i = run.parallel, run.implementation
    tp, cp, ep = p.tensor_model_parallel_size, p.context_parallel_size, p.expert_model_parallel_size
    if tp > 1:
        if limits.tp_gcd % tp:  # TC, tensor_parallel/layers.py
            for what, size in limits.tp:
                if size % tp:
                    raise SpecError(
                        f"{what} ({size}) is not divisible by tensor_model_parallel_size ({tp}); use "
                        f"{divisors(limits.tp_gcd, tp)}"
                    )
        if limits.groups_gcd % tp:
            _check_query_groups(p, i, limits)
    if ep > 1:
        if not limits.experts:  # TC
            raise SpecError(f"expert_model_parallel_size ({ep}) needs a model with experts; set it to 1")
        if limits.experts_gcd % ep:  # transformer/moe/moe_layer.py: BaseMoELayer
            raise SpecError(
                f"num_moe_experts ({limits.experts_gcd}) is not divisible by expert_model_parallel_size ({ep}); "
                f"use {divisors(limits.experts_gcd, ep)}"
            )
    if limits.experts:
        etp = p.etp
        if etp > 1 and limits.etp_gcd % etp:  # transformer/moe/experts.py
            raise SpecError(
                f"moe_ffn_hidden_size ({limits.etp_gcd}) is not divisible by expert_tensor_parallel_size ({etp}); use "
                + divisors(limits.etp_gcd, etp)
            )
        if limits.expert_bias:
            _check_expert_bias(etp, ep, i)
        if tp > 1 and not p.sp:  # transformer/moe/moe_layer.py: MoELayer.forward
            raise SpecError(
                f"sequence_parallel (False) with tensor_model_parallel_size ({tp}) is refused by megatron-core "
                "when training a model with experts; set sequence_parallel to True"
            )
    if cp > 1:
        s = run.batch.seq_length
        if 2 * cp > s:  # as in _check_batch
            raise SpecError(
                f"context_parallel_size ({cp}) is too large for seq_length ({s}), of which every rank takes two parts; "
                f"use at most {max(1, s // 2)}"
            )
        _check_context_parallel(p, i, limits)


def _check_expert_bias(etp: int, ep: int, i: ImplementationSpec) -> None:
    """TC; and what autograd refuses: without expert parallelism local experts hand their output to a reduction over
    one rank, which returns it as it is, and add their bias to that in place (``tensor_parallel/layers.py:
    RowParallelLinear.forward``, ``transformer/mlp.py: MLP.forward``)."""
    if EXPERT_BIASES_CHECKED(i) and not EXPERT_BIASES_WITHOUT_ETP(i):
        raise SpecError(
            "experts with biases (add_bias_linear) are not supported by megatron_core "
            f"{release_words(i.megatron_core)}; use {EXPERT_BIASES_WITHOUT_ETP.number} or later"
        )
    if etp > 1 and EXPERT_BIASES_WITHOUT_ETP(i):
        raise SpecError(
            f"expert_tensor_parallel_size ({etp}) is not supported for experts with biases (add_bias_linear); set "
            "expert_tensor_parallel_size to 1"
        )
    if ep == 1 and i.transformer_impl == "local" and EXPERT_BIASES_WITHOUT_ETP(i):
        raise SpecError(
            "expert_model_parallel_size (1) does not go with experts with biases (add_bias_linear) and the local "
            "transformer_impl, whose sum in place autograd refuses; use 2 or more, or transformer_engine"
        )


def _check_query_groups(p: ParallelSpec, i: ImplementationSpec, limits: Limits) -> None:
    """TC: a multiple of TP; since ``QUERY_GROUPS_REPLICATED`` a divisor will do."""
    tp = p.tensor_model_parallel_size
    for groups in limits.groups:
        if groups % tp and (tp % groups or not QUERY_GROUPS_REPLICATED(i)):
            fix = f"use {divisors(gcd(limits.groups_gcd, limits.tp_gcd), tp)}"
            if tp % groups == 0:
                fix += f", or {QUERY_GROUPS_REPLICATED} or later, which replicates keys and values"
            raise SpecError(
                f"num_query_groups ({groups}) is not divisible by tensor_model_parallel_size ({tp}) in "
                f"megatron-core {release_words(i.megatron_core)}; {fix}"
            )
        gated = any(isinstance(m, AttentionSpec) and m.attention_output_gate for m in limits.mixers)
        if groups < tp and gated and not GATES_WITH_REPLICATED_GROUPS(i):
            raise SpecError(
                f"tensor_model_parallel_size ({tp}) is more than num_query_groups ({groups}), which the gate over "
                f"attention's output of this model needs {GATES_WITH_REPLICATED_GROUPS} or later for, not "
                f"{release_words(i.megatron_core)}; use {divisors(gcd(limits.groups_gcd, limits.tp_gcd), tp)}"
            )


def _check_attention_release(run: RunSpec, limits: Limits) -> None:
    """Attention that older releases lack, or fail on."""
    i, b = run.implementation, run.batch.micro_batch_size
    if run.model.mtp_num_layers and run.batch.packed_sequences and not MTP_TAKES_PACKED_SEQUENCES(i):
        raise SpecError(
            f"packed_sequences (True) with mtp_num_layers ({run.model.mtp_num_layers}) needs "
            f"{MTP_TAKES_PACKED_SEQUENCES} or later, not {release_words(i.megatron_core)}; drop one of them"
        )
    turned = not ATTENTION_TOKENS_FIRST(i) and not run.batch.packed_sequences
    for m in limits.mixers:
        if isinstance(m, AttentionSpec) and m.window_size is not None and not i.te and not LOCAL_WINDOWS(i):
            raise SpecError(
                f"transformer_impl (local) takes the sliding windows of this model from {LOCAL_WINDOWS} on, not "
                f"{release_words(i.megatron_core)}; use transformer_engine"
            )
        if isinstance(m, MLASpec) and i.te and i.apply_rope_fusion and b > 1 and turned:
            # fusions/fused_mla_yarn_rope_apply.py: ApplyMLARotaryEmbKV.backward views gradients that lie [b, s].
            raise SpecError(
                f"apply_rope_fusion (True) with multi-latent attention and micro_batch_size ({b}) needs "
                f"{ATTENTION_TOKENS_FIRST} or later, not {release_words(i.megatron_core)}; set it to False, or "
                "micro_batch_size to 1"
            )


def _check_context_parallel(p: ParallelSpec, i: ImplementationSpec, limits: Limits) -> None:
    tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
    for m in limits.mixers:
        if isinstance(m, GatedDeltaNetSpec):  # TC, ssm/gated_delta_net.py: GatedDeltaNet.__init__
            if not DELTA_NETS_EXCHANGE_HEADS(i):
                raise SpecError(
                    f"context_parallel_size ({cp}) is not supported with gated delta net layers by megatron-core; "
                    f"set it to 1, or use {DELTA_NETS_EXCHANGE_HEADS} or later"
                )
            for what, heads in (("key", m.num_key_heads), ("value", m.num_value_heads)):
                if heads % (tp * cp):
                    raise SpecError(
                        f"linear_num_{what}_heads ({heads}) is not divisible by tensor_model_parallel_size ({tp}) x "
                        f"context_parallel_size ({cp}); use context_parallel_size {divisors(heads // tp, cp)}"
                    )
            continue
        if isinstance(m, MambaSpec):  # ssm/mamba_context_parallel.py: MambaContextParallel
            heads, groups = m.num_heads // tp, m.num_groups // tp
            if heads % cp:
                raise SpecError(
                    f"mamba_num_heads ({m.num_heads}) is not divisible by tensor_model_parallel_size ({tp}) x "
                    f"context_parallel_size ({cp}); use context_parallel_size {divisors(heads, cp)}"
                )
            if groups % cp and cp % groups:
                raise SpecError(
                    f"mamba_num_groups ({m.num_groups}) over tensor_model_parallel_size ({tp}) and "
                    f"context_parallel_size ({cp}) do not divide each other; use context_parallel_size "
                    f"{divisors(groups, cp)}"
                )
            continue
        if not i.te:  # transformer/dot_product_attention.py: DotProductAttention.__init__
            raise SpecError(
                f"context_parallel_size ({cp}) is not supported by the attention of transformer_impl local; set "
                "transformer_impl to transformer_engine"
            )
        if i.attention_kernel == "unfused":
            # TE attention/dot_product_attention/utils.py: get_attention_backend
            auto = i.attention_backend == "auto"
            field, value = ("gpu_arch", i.gpu_arch) if auto else ("attention_backend", i.attention_backend)
            other = "context_parallel_size 1: Transformer Engine has unfused attention alone there" if auto else (
                "flash, fused or auto"
            )
            raise SpecError(f"{field} ({value}) does not support context_parallel_size ({cp}); use {other}")
        # TE attention/dot_product_attention/context_parallel.py: AttnFuncWithCPAndQKVOA2A
        if i.cp_comm_type == "a2a" and isinstance(m, AttentionSpec):
            for what, n in (
                ("num_attention_heads", m.num_attention_heads),
                ("num_query_groups", max(m.num_query_groups, tp)),
            ):
                if n // tp % cp:
                    raise SpecError(
                        f"{what} ({n}) over tensor_model_parallel_size ({tp}) is not divisible by "
                        f"context_parallel_size ({cp}), which cp_comm_type a2a needs; use cp_comm_type p2p"
                    )


def _check_split_release(run: RunSpec) -> None:
    """Ways to split layers that older releases lack, or take and ignore."""
    p, i = run.parallel, run.implementation
    text, core = p.pipeline_model_parallel_layout, i.megatron_core
    if text is not None and not LAYOUT_STRINGS_WITH_MTP_ANYWHERE(i):
        if not LAYOUT_STRINGS(i):
            raise SpecError(
                f"pipeline_model_parallel_layout ({text[:40]}) needs {LAYOUT_STRINGS} or later, not "
                f"{release_words(core)}; use num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage"
            )
        *before, last = _chunks(text)
        if not LAYOUT_STRINGS_WITH_MTP(i) and any("m" in chunk for chunk in (*before, last)):
            raise SpecError(
                f"pipeline_model_parallel_layout ({text[:40]}) has m (MTP), which needs {LAYOUT_STRINGS_WITH_MTP} or "
                f"later, not {release_words(core)}; use num_layers_in_first_pipeline_stage and "
                "num_layers_in_last_pipeline_stage"
            )
        if any("m" in chunk for chunk in before):
            raise SpecError(
                f"pipeline_model_parallel_layout ({text[:40]}) has m (MTP) before the last stage, which needs "
                f"{LAYOUT_STRINGS_WITH_MTP_ANYWHERE} or later, not {release_words(core)}; put it into the last stage"
            )
    if run.model.hybrid and run.model.mtp_num_layers and not HYBRID_MTP(i):
        raise SpecError(
            f"mtp_num_layers ({run.model.mtp_num_layers}) builds nothing in hybrid (Mamba) models of megatron_core "
            f"{release_words(core)}; set it to 0, or use {HYBRID_MTP.number} or later"
        )
    if run.model.hybrid and not HYBRID_END_STAGES(i):
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
            if getattr(p, name) is not None:
                raise SpecError(
                    f"{name} ({getattr(p, name)}) is ignored for hybrid (Mamba) models by megatron-core "
                    f"{release_words(core)}; drop it, or use {HYBRID_END_STAGES.number} or later"
                )


# --------------------------------------------------------------------------------------------------
# Batch and schedule
# --------------------------------------------------------------------------------------------------


def _check_batch(run: RunSpec) -> None:
    p, b = run.parallel, run.batch
    tp, cp, s = p.tensor_model_parallel_size, p.context_parallel_size, b.seq_length
    m = run.model
    learned = m.position_embedding_type == "learned_absolute" and not b.packed_sequences
    if learned and 0 < m.max_position_embeddings < s:
        # MLM validate_args; an index out of range in models/common/embeddings/language_model_embedding.py
        raise SpecError(
            f"seq_length ({s}) is longer than the model's table of learned positions, max_position_embeddings "
            f"({m.max_position_embeddings}); use at most that"
        )
    if cp > 1 and s % (2 * cp):
        # MLM; Bridge training/config.py: ConfigContainer.validate
        raise SpecError(
            f"seq_length ({s}) is not divisible by 2 x context_parallel_size ({cp}); use a multiple of {2 * cp}, "
            f"such as {_next_multiple(s, 2 * cp)}"
            + (f", or context_parallel_size {divisors(s // 2, cp)}" if s % 2 == 0 else "")
        )
    if tp > 1 and p.sp and s // cp % tp:
        # tensor_parallel/mappings.py: _split_along_first_dim
        raise SpecError(
            f"seq_length ({s}) over context_parallel_size ({cp}) is not divisible by tensor_model_parallel_size "
            f"({tp}), which sequence_parallel needs; use a multiple of {tp * cp}, such as "
            f"{_next_multiple(s, tp * cp * (2 if cp > 1 else 1))}"
        )
    g = b.global_batch_size
    if g is not None:
        step = b.micro_batch_size * (p.world_size // (tp * p.pipeline_model_parallel_size * cp))
        if g % step:  # num_microbatches_calculator.py: ConstantNumMicroBatchesCalculator
            raise SpecError(
                f"global_batch_size ({g}) is not divisible by micro_batch_size ({b.micro_batch_size}) x "
                f"data-parallel size ({p.data_parallel_size}) = {step}; use a multiple of it, such as "
                f"{_next_multiple(g, step)}"
            )
    if p.pipeline_model_parallel_size > 1:
        _check_schedule(run)


def _check_schedule(run: RunSpec) -> None:
    """``pipeline_parallel/schedules.py: forward_backward_pipelining_with_interleaving``."""
    p = run.parallel
    pp, group = p.pipeline_model_parallel_size, p.microbatch_group_size_per_vp_stage
    vpp = p.virtual_pipeline_model_parallel_size or 1
    if vpp == 1 and p.pipeline_model_parallel_layout is not None:
        vpp = _virtual_stages(p.pipeline_model_parallel_layout, pp)
    if vpp == 1:
        return
    name = "microbatch_group_size_per_vp_stage"
    if group is None:
        group = pp
    elif group < pp:
        raise SpecError(f"{name} ({group}) is smaller than pipeline_model_parallel_size ({pp}); set it to {pp} or more")
    m = run.num_microbatches
    if run.batch.global_batch_size is None:
        said = f"the number of microbatches ({m}, for want of a global_batch_size)"
    else:
        said = f"the number of microbatches ({m} = global_batch_size / micro_batch_size / data-parallel size)"
    step = run.batch.micro_batch_size * p.data_parallel_size
    if p.microbatch_group_size_per_vp_stage is not None and pp <= m < group:
        raise SpecError(f"{name} ({group}) is larger than {said}; use {pp} to {m}")
    if m < group:
        raise SpecError(
            f"{said} is smaller than {name} ({group}), which virtual_pipeline_model_parallel_size ({vpp}) needs; "
            f"set global_batch_size to {group * step} or more"
        )
    if 0 < m % group < pp:
        raise SpecError(
            f"{said} leaves a last group of {m % group} with {name} ({group}), fewer than "
            f"pipeline_model_parallel_size ({pp}); set global_batch_size to {_next_multiple(m, group) * step}"
        )


def _virtual_stages(text: str, pp: int) -> int:
    return max(1, len(_chunks(text)) // pp)


@lru_cache(maxsize=1024)
def _chunks(text: str) -> tuple[str, ...]:
    return tuple(parse_layout_string(text))


# --------------------------------------------------------------------------------------------------
# Precision and optimizer
# --------------------------------------------------------------------------------------------------


def _check_precision(run: RunSpec) -> None:
    """TC."""
    precision = run.precision
    if precision.fp32_residual_connection and run.implementation.te and precision.params_dtype != "fp32":
        # TE module/base.py: TransformerEngineBaseModule.set_activation_dtype
        raise SpecError(
            f"fp32_residual_connection (True) needs params_dtype fp32, not {precision.params_dtype}, with Transformer "
            "Engine, whose linears refuse an input of another dtype; drop it, or set transformer_impl to local"
        )
    if precision.fp8 is not None and precision.fp4 is not None:
        raise SpecError(f"fp4 ({precision.fp4}) and fp8 ({precision.fp8}) do not go together; drop one of them")
    if precision.fp8 is None and precision.fp8_param:
        raise SpecError("fp8_param (True) needs fp8; set fp8 to hybrid or e4m3, or drop fp8_param")
    if precision.fp8 is None and precision.fp8_dot_product_attention:
        raise SpecError(
            "fp8_dot_product_attention (True) needs fp8; set fp8 to hybrid or e4m3, or drop fp8_dot_product_attention"
        )
    if precision.fp4 is None and precision.fp4_param:
        raise SpecError("fp4_param (True) needs fp4; set fp4 to e2m1, or drop fp4_param")
    if not precision.quantizes:
        return
    ends = (precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16)
    if any(ends) and precision.recipe == "delayed":
        raise SpecError(
            f"num_layers_at_start_in_bf16 ({ends[0]}) and num_layers_at_end_in_bf16 ({ends[1]}) do not go with "
            "fp8_recipe delayed; use another recipe"
        )
    most = run.model.num_layers // run.parallel.pipeline_model_parallel_size
    for name, n in zip(("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"), ends, strict=True):
        if n > most:
            raise SpecError(f"{name} ({n}) is larger than the {most} layers of a pipeline stage; lower it")
    if not run.implementation.te:  # transformer/fp8_utils.py: get_fp8_context is Transformer Engine's alone
        raise SpecError(
            f"{precision.format_words} does nothing with transformer_impl local, whose layers do not compute in it; "
            f"set transformer_impl to transformer_engine, or drop {precision.format_words[:3]}"
        )
    _check_fp8_tokens(run)


#: Rows that Transformer Engine's fp8 linears want in multiples (``utils.py: assert_dim_for_fp8_exec``; of what is
#: quantized, ``tensor/mxfp8_tensor.py: MXFP8Quantizer.is_quantizable``).
_FP8_ROWS = {"delayed": 8, "tensorwise": 8, "blockwise": 8, "mxfp8": 32, "nvfp4": 16}
#: And where sequence parallelism gathers their input (``utils.py: assert_dim_for_all_gather``,
#: ``tensor/float8_blockwise_tensor.py: Float8BlockQuantizer.is_quantizable``).
_FP8_GATHERED_ROWS = {**_FP8_ROWS, "blockwise": 128}


def _check_fp8_tokens(run: RunSpec) -> None:
    p, b, recipe = run.parallel, run.batch, run.precision.recipe
    gathers = p.sp and p.tensor_model_parallel_size > 1
    rows = b.seq_length // p.context_parallel_size * b.micro_batch_size
    rows //= p.tensor_model_parallel_size if p.sp else 1
    multiple = (_FP8_GATHERED_ROWS if gathers else _FP8_ROWS)[recipe]
    if rows % multiple:
        sizes = p.context_parallel_size * (p.tensor_model_parallel_size if p.sp else 1)
        ranks = " and sequence parallelism" * gathers
        raise SpecError(
            f"seq_length ({b.seq_length}) x micro_batch_size ({b.micro_batch_size}) over context_parallel_size "
            f"({p.context_parallel_size}){ranks} leaves {rows} tokens a rank; {run.precision.format_words[:3]} "
            f"({recipe}) needs a multiple of {multiple}; use a seq_length such as "
            f"{_next_multiple(b.seq_length, multiple * sizes)}"
        )


def _check_data_parallel(run: RunSpec) -> None:
    """Options of Megatron-FSDP: MLM; ``distributed/fsdp/mcore_fsdp_adapter.py: FullyShardedDataParallel.__init__``."""
    d = run.data_parallel
    if not d.fsdp:
        for name in ("data_parallel_sharding_strategy", "suggested_communication_unit_size", "grad_comm_dtype",
                     "fsdp_double_buffer"):  # fmt: skip
            if getattr(d, name) not in (None, False):
                raise SpecError(
                    f"{name} ({getattr(d, name)}) is for engine megatron_fsdp, not {d.engine}; drop it, or set engine "
                    "to megatron_fsdp"
                )
        return
    for name in ("fsdp_db_use_persist_buf_on_alloc_fail", "megatron_fsdp_max_pool_double_buffer"):
        if getattr(d, name) and not d.fsdp_double_buffer:
            raise SpecError(f"{name} (True) does nothing without fsdp_double_buffer; set that to True, or drop it")
    if d.data_parallel_sharding_strategy is None:
        raise SpecError(
            "engine (megatron_fsdp) needs data_parallel_sharding_strategy; set it to optim_grads_params, which divides "
            "all, or to " + " or ".join(SHARDING_STRATEGIES[:-1])
        )
    if not d.use_distributed_optimizer:
        raise SpecError(
            "use_distributed_optimizer (False) is not supported with engine megatron_fsdp; set it to True (what is "
            "divided says data_parallel_sharding_strategy)"
        )
    if run.optimizer.optimizer == "muon" or run.optimizer.use_layer_wise_distributed_optimizer:
        raise SpecError(
            f"optimizer ({run.optimizer.optimizer}) is not supported with engine megatron_fsdp; use adam or sgd, or "
            "engine megatron_ddp"
        )


def _check_optimizer(run: RunSpec) -> None:
    o, d, p = run.optimizer, run.data_parallel, run.parallel
    if o.use_precision_aware_optimizer:  # OC
        if o.optimizer != "adam":
            raise SpecError(f"use_precision_aware_optimizer (True) needs optimizer adam, not {o.optimizer}; drop it")
        if not d.use_distributed_optimizer:
            raise SpecError("use_precision_aware_optimizer (True) needs use_distributed_optimizer; set that to True")
    elif not o.main_grads_dtype == o.main_params_dtype == o.exp_avg_dtype == o.exp_avg_sq_dtype == "fp32":
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            if getattr(o, name) != "fp32":
                raise SpecError(
                    f"{name} ({getattr(o, name)}) other than fp32 needs use_precision_aware_optimizer; set that to True"
                )
    if o.optimizer == "muon" and not MUON_SHARDED(run.implementation):
        if d.use_distributed_optimizer:
            raise SpecError("use_distributed_optimizer (True) is not supported with optimizer muon; set it to False")
        if run.precision.params_dtype == "fp16":
            raise SpecError("params_dtype (fp16) is not supported with optimizer muon; use bf16")
    if d.overlap_param_gather and not d.use_distributed_optimizer:  # MLM
        raise SpecError("overlap_param_gather (True) needs use_distributed_optimizer; set that to True or drop it")
    if p.num_distributed_optimizer_instances > 1 and not d.use_distributed_optimizer:  # MLM
        raise SpecError(
            f"num_distributed_optimizer_instances ({p.num_distributed_optimizer_instances}) needs "
            "use_distributed_optimizer; set that to True"
        )


# --------------------------------------------------------------------------------------------------
# Recomputation
# --------------------------------------------------------------------------------------------------


def _check_recompute(run: RunSpec, limits: Limits) -> None:
    """TC, and ``transformer/transformer_block.py: TransformerBlock._checkpointed_forward``."""
    r = run.recompute
    if r.granularity == "full":
        if r.method is None:
            raise SpecError("recompute_granularity (full) needs recompute_method; set it to uniform or block")
        if r.num_layers is None:
            raise SpecError(f"recompute_method ({r.method}) needs recompute_num_layers; set it to 1 or more")
        if r.method == "uniform" and r.num_layers > run.model.num_layers:
            raise SpecError(
                f"recompute_num_layers ({r.num_layers}) is larger than num_layers ({run.model.num_layers}); lower it"
            )
        mtp = run.model.mtp_num_layers and MTP_DEPTHS_RECOMPUTED(run.implementation)
        if r.method == "uniform" and mtp and r.num_layers != 1:
            raise SpecError(
                f"recompute_num_layers ({r.num_layers}) is refused by megatron-core for a model with mtp_num_layers "
                "and recompute_method uniform; set it to 1"
            )
    else:
        if r.method is not None:  # MLM
            raise SpecError(
                f"recompute_method ({r.method}) does not go with recompute_granularity (selective); drop it, or "
                "set the granularity to full"
            )
        if r.num_layers is not None:
            raise SpecError(
                f"recompute_num_layers ({r.num_layers}) does not go with recompute_granularity "
                "(selective); drop it, or set the granularity to full"
            )
        _check_modules(run, limits)
    if r.distribute_saved_activations:
        p = run.parallel
        if p.sp:
            raise SpecError("distribute_saved_activations (True) does not go with sequence_parallel; drop one of them")
        if r.granularity != "full" or p.tensor_model_parallel_size == 1:  # MLM
            raise SpecError(
                "distribute_saved_activations (True) needs recompute_granularity full and "
                "tensor_model_parallel_size of 2 or more; drop it"
            )


def check_layout(run: RunSpec, plan: Layout) -> None:
    """Raise SpecError for what megatron-core refuses once the layers are laid out, but not before.

    ``transformer/transformer_block.py: TransformerBlock._checkpointed_forward``, 0.12 to 0.16.1: the uniform method
    takes groups of recompute_num_layers from a chunk's first layer on, and asks for the layers of a whole group.
    ``MambaStack`` of hybrid models knows no full recomputation in these releases.
    """
    r, n = run.recompute, run.recompute.num_layers
    if r.granularity != "full" or r.method != "uniform" or not n or n == 1:
        return
    if run.model.hybrid or UNIFORM_GROUPS_MAY_END_SHORT(run.implementation):
        return
    for stage, chunks in enumerate(plan.stages):
        for index, chunk in enumerate(chunks):
            size = len(chunk.layers)
            if size % n:
                where = f"virtual stage {index} of stage {stage}" if len(chunks) > 1 else f"pipeline stage {stage}"
                common = gcd(*(len(c.layers) for row in plan.stages for c in row))
                raise SpecError(
                    f"recompute_num_layers ({n}) does not divide the {size} layers of {where}, which recompute_method "
                    f"uniform needs; use {divisors(common, min(n, common), above=False)}, or recompute_method block"
                )


def _check_modules(run: RunSpec, limits: Limits) -> None:
    r, i = run.recompute, run.implementation
    if r.modules == ("core_attn",):
        return
    if "shared_experts" in r.modules:
        if not SHARED_EXPERTS_RECOMPUTED(i):
            raise SpecError(
                f"recompute_modules (shared_experts) needs {SHARED_EXPERTS_RECOMPUTED} or later, not "
                f"{release_words(i.megatron_core)}; drop it"
            )
        if i.moe_shared_expert_overlap and limits.shared_experts:
            raise SpecError(
                "recompute_modules (shared_experts) does not go with moe_shared_expert_overlap; drop one of them"
            )
    if "moe_act" in r.modules and not i.moe_grouped_gemm:
        raise SpecError("recompute_modules (moe_act) needs moe_grouped_gemm; set that to True or drop moe_act")
    if "moe_act" in r.modules and not limits.experts:
        raise SpecError(
            "recompute_modules (moe_act) needs a model with experts: megatron-core refuses it without their grouped "
            "GEMM; drop it"
        )
    if "mlp" in r.modules and limits.dense_bias:
        # ``mlp.py: MLP.forward`` returns linear_fc2's bias, which becomes an output of the checkpoint (``random.py:
        # CheckpointFunction``, TE ``distributed.py: _CheckpointFunction``): recomputed, its gradient leads back to the
        # checkpoint itself. Backward never ends, and with fp8 in an IndexError.
        raise SpecError(
            "recompute_modules (mlp) does not go with biases of the MLP (add_bias_linear): the backward pass of "
            "megatron-core's checkpoint calls itself without end; drop mlp, or use recompute_granularity full"
        )
    if "mla_up_proj" in r.modules and not limits.mla:
        raise SpecError("recompute_modules (mla_up_proj) needs a model with multi-latent attention; drop it")
    if run.precision.fp8 and run.precision.fp8_recipe == "delayed" and DELAYED_FP8_EXCLUDES_RECOMPUTED_PARTS(i):
        for name in ("moe_act", "layernorm"):
            if name in r.modules:
                raise SpecError(
                    f"recompute_modules ({name}) does not go with fp8_recipe delayed; use another recipe or drop it"
                )


# --------------------------------------------------------------------------------------------------
# Implementation
# --------------------------------------------------------------------------------------------------


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


def _check_kernels(run: RunSpec, limits: Limits) -> None:
    """What no attention kernel of Transformer Engine takes (``dot_product_attention/utils.py: get_attention_backend``,
    ``context_parallel.py: attn_forward_func_with_cp``)."""
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


def _check_fp8_attention(run: RunSpec, limits: Limits) -> None:
    """TE ``get_attention_backend``, for the recipes that are told of it (``fp8_utils.py: get_fp8_recipe``)."""
    p, i = run.precision, run.implementation
    told = p.fp8_recipe in ("delayed", "tensorwise", "mxfp8")
    if not (p.fp8_dot_product_attention and p.fp8 and i.te and told):
        return
    if not any(isinstance(m, AttentionSpec | MLASpec) for m in limits.mixers):
        return
    if i.attention_backend not in ("auto", "fused"):
        raise SpecError(
            f"attention_backend ({i.attention_backend}) does not compute in fp8, which fp8_dot_product_attention asks "
            "for; use fused or auto"
        )
    # So does mxfp8 itself, whatever attention computes in: the card's fit says that.
    if p.fp8_recipe == "tensorwise" and i.gpu_arch != "blackwell":
        raise SpecError(
            f"fp8_dot_product_attention with fp8_recipe {p.fp8_recipe} runs on Blackwell alone, not on gpu_arch "
            f"{i.gpu_arch}; name a Blackwell card, use fp8_recipe delayed or drop fp8_dot_product_attention"
        )


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


#: TC: balancing types that take a capacity factor.
_CAPACITY_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def _check_implementation(run: RunSpec, limits: Limits) -> None:
    i, p = run.implementation, run.parallel
    if run.batch.packed_sequences and not i.te and not i.torch_layers:
        # transformer/dot_product_attention.py: DotProductAttention.forward
        raise SpecError(
            f"packed_sequences (True) does not go with transformer_impl ({i.transformer_impl}), whose attention takes "
            "none; use transformer_engine"
        )
    if i.defer_embedding_wgrad_compute:  # MPC
        if p.pipeline_model_parallel_size == 1:
            raise SpecError(
                "defer_embedding_wgrad_compute (True) needs pipeline_model_parallel_size of 2 or more; drop it"
            )
        if not i.gradient_accumulation_fusion:
            raise SpecError("defer_embedding_wgrad_compute (True) needs gradient_accumulation_fusion; set that to True")
    if i.cpu_offloading_num_layers:
        _check_cpu_offloading(run)
    if i.offload_modules:
        _check_offload_modules(i)
    if limits.experts:
        _check_moe(i, p, limits)
        _check_padding(run, limits)
    if i.overlap_moe_expert_parallel_comm:
        _check_overlap(run, limits)
    elif i.delay_wgrad_compute:  # TC
        raise SpecError(
            "delay_wgrad_compute (True) needs overlap_moe_expert_parallel_comm; set that to True or drop it"
        )


def _check_cpu_offloading(run: RunSpec) -> None:
    """TC."""
    n = run.implementation.cpu_offloading_num_layers
    if n >= run.model.num_layers:
        raise SpecError(
            f"cpu_offloading_num_layers ({n}) is not a number of layers below num_layers "
            f"({run.model.num_layers}); lower it"
        )
    if run.parallel.pipeline_model_parallel_size > 1:
        raise SpecError(
            f"cpu_offloading_num_layers ({n}) does not go with pipeline_model_parallel_size "
            f"({run.parallel.pipeline_model_parallel_size}); set one of them to 0 or 1"
        )
    if run.recompute.granularity is not None:
        raise SpecError(
            f"cpu_offloading_num_layers ({n}) does not go with recompute_granularity "
            f"({run.recompute.granularity}); drop one of them"
        )


def _check_offload_modules(i: ImplementationSpec) -> None:
    """TC (``fine_grained_activation_offloading``, from 0.16)."""
    if i.cpu_offloading_num_layers:
        raise SpecError(
            f"offload_modules ({', '.join(i.offload_modules)}) does not go with cpu_offloading_num_layers "
            f"({i.cpu_offloading_num_layers}); drop one of them"
        )
    if "attn_proj" in i.offload_modules and "core_attn" not in i.offload_modules:
        raise SpecError("offload_modules (attn_proj) needs core_attn beside it; add core_attn")


def _check_moe(i: ImplementationSpec, p: ParallelSpec, limits: Limits) -> None:
    """TC, and ``transformer/moe/token_dispatcher.py``."""
    dispatcher = i.moe_token_dispatcher_type
    if dispatcher == "alltoall_seq" and SEQUENCE_DISPATCHER_GONE(i):
        raise SpecError(
            f"moe_token_dispatcher_type (alltoall_seq) is none of megatron_core {release_words(i.megatron_core)}; use "
            "alltoall"
        )
    if dispatcher != "alltoall":
        flex = dispatcher == "flex" and FLEX_OVERLAPS_SHARED_EXPERTS(i)
        if i.moe_shared_expert_overlap and limits.shared_experts and not flex:
            raise SpecError(
                f"moe_shared_expert_overlap (True) needs moe_token_dispatcher_type alltoall, not {dispatcher}; "
                "change one of them"
            )
        if dispatcher == "flex":
            if p.tensor_model_parallel_size * p.expert_model_parallel_size == 1:
                raise SpecError(
                    "moe_token_dispatcher_type (flex) needs tensor_model_parallel_size x "
                    "expert_model_parallel_size of 2 or more; use alltoall"
                )
            if i.moe_pad_expert_input_to_capacity and i.moe_flex_dispatcher_backend == "deepep":
                raise SpecError(
                    "moe_pad_expert_input_to_capacity (True) does not go with moe_flex_dispatcher_backend deepep; "
                    "drop it"
                )
    if i.moe_router_padding_for_quantization and dispatcher in ("allgather", "alltoall_seq"):
        raise SpecError(
            f"moe_router_padding_for_quantization (True) does not go with moe_token_dispatcher_type {dispatcher}; use "
            "alltoall or flex"
        )
    if i.moe_router_fusion and i.moe_router_dtype == "fp64":  # Transformer Engine router.py
        raise SpecError(
            "moe_router_fusion (True) does not go with moe_router_dtype fp64, which Transformer Engine's fused "
            "router refuses; use fp32"
        )
    _check_budget(i, p)
    capacity = i.moe_expert_capacity_factor
    if capacity is None:
        if i.moe_pad_expert_input_to_capacity:
            raise SpecError("moe_pad_expert_input_to_capacity (True) needs moe_expert_capacity_factor; set it")
        return
    for moe in limits.moes:
        if moe.router_load_balancing_type not in _CAPACITY_BALANCING:
            raise SpecError(
                f"moe_expert_capacity_factor ({capacity}) does not go with moe_router_load_balancing_type "
                f"({moe.router_load_balancing_type}); drop it, or use {', '.join(_CAPACITY_BALANCING)}"
            )


def _check_budget(i: ImplementationSpec, p: ParallelSpec) -> None:
    """TC, and ``transformer/moe/experts.py: TEGroupedMLP._is_fused_impl_supported``."""
    fuses = i.use_transformer_engine_op_fuser and i.te_grouped_gemm and EXPERTS_FUSED_BY_OPS(i)
    if fuses:
        if p.etp > 1:
            raise SpecError(
                f"use_transformer_engine_op_fuser (True) does not go with expert_tensor_parallel_size ({p.etp}); set "
                "it to 1"
            )
        for name in ("expert_fc1", "moe_act"):
            if name in i.offload_modules:
                raise SpecError(
                    f"use_transformer_engine_op_fuser (True) does not go with {name} in offload_modules; drop one of "
                    "them"
                )
        if i.moe_apply_probs_on_input:
            raise SpecError(
                "use_transformer_engine_op_fuser (True) does not go with moe_apply_probs_on_input; drop one of them"
            )
    factor = i.moe_expert_rank_capacity_factor
    if factor is None:
        if i.moe_paged_stash:
            raise SpecError("moe_paged_stash (True) needs moe_expert_rank_capacity_factor; set it")
        return
    if factor == 0:
        raise SpecError("moe_expert_rank_capacity_factor (0) drops every token; give a positive number, or None")
    if i.moe_token_dispatcher_type != "flex" or i.moe_flex_dispatcher_backend != "hybridep":
        raise SpecError(
            f"moe_expert_rank_capacity_factor ({factor}) needs moe_token_dispatcher_type flex and "
            "moe_flex_dispatcher_backend hybridep; set both, or drop it"
        )
    if not fuses:
        raise SpecError(
            f"moe_expert_rank_capacity_factor ({factor}) needs use_transformer_engine_op_fuser and grouped experts of "
            "Transformer Engine in megatron_core 0.18 or later; set them, or drop it"
        )
    if i.moe_paged_stash and i.cpu_offloading_num_layers:
        raise SpecError("moe_paged_stash (True) does not go with cpu_offloading_num_layers; drop one of them")


def _check_padding(run: RunSpec, limits: Limits) -> None:
    """The unfused permutation takes an expert's rows from those of the rank's tokens, and then wants as many as the
    capacity: a view of another size (``transformer/moe/moe_utils.py: permute``, drop_and_pad)."""
    i, p, b, factor = run.implementation, run.parallel, run.batch, run.implementation.moe_expert_capacity_factor
    if factor is None or not i.moe_pad_expert_input_to_capacity or i.moe_permute_fusion:
        return
    if i.moe_token_dispatcher_type in ("allgather", "flex"):
        return
    tokens = b.seq_length // p.context_parallel_size * b.micro_batch_size
    tokens //= p.tensor_model_parallel_size if p.sp else 1
    for moe in limits.moes:
        capacity = ceil(tokens * moe.topk / moe.num_experts * factor)  # moe_utils.py: get_capacity
        if capacity > tokens:
            raise SpecError(
                f"moe_expert_capacity_factor ({factor}) with moe_pad_expert_input_to_capacity pads every expert to "
                f"{capacity} tokens, more than the {tokens} of a rank, which megatron-core's unfused permutation "
                f"refuses; use at most num_moe_experts / moe_router_topk ({moe.num_experts / moe.topk:g}), or set "
                "moe_permute_fusion to True"
            )


def _check_overlap(run: RunSpec, limits: Limits) -> None:
    """TC, ``overlap_moe_expert_parallel_comm``."""
    i, p, r = run.implementation, run.parallel, run.recompute
    name = "overlap_moe_expert_parallel_comm (True)"
    if not EXPERT_COMMUNICATION_OVERLAPS(i):
        raise SpecError(
            f"{name} needs {EXPERT_COMMUNICATION_OVERLAPS} or later, not {release_words(i.megatron_core)}; drop it"
        )
    pp, layout = p.pipeline_model_parallel_size, p.pipeline_model_parallel_layout
    vpp = p.virtual_pipeline_model_parallel_size or 1
    if layout is not None and vpp == 1:
        vpp = _virtual_stages(layout, pp)
    if pp > 1 and vpp == 1:
        raise SpecError(
            f"{name} with pipeline_model_parallel_size ({pp}) needs virtual_pipeline_model_parallel_size; set it "
            "to 2 or more"
        )
    if p.expert_model_parallel_size == 1:
        raise SpecError(f"{name} needs expert_model_parallel_size of 2 or more; drop it")
    if i.moe_token_dispatcher_type not in ("alltoall", "flex"):
        raise SpecError(
            f"{name} needs moe_token_dispatcher_type alltoall or flex, not {i.moe_token_dispatcher_type}; change it"
        )
    if r.granularity == "full":
        raise SpecError(f"{name} does not go with recompute_granularity (full); use selective")
    for field, value in (("recompute_method", r.method), ("recompute_num_layers", r.num_layers)):
        if value is not None:
            raise SpecError(f"{name} does not go with {field} ({value}); drop that")
    if run.precision.params_dtype == "fp32":
        raise SpecError(f"{name} needs params_dtype bf16 or fp16, not fp32; drop it")
    if i.moe_shared_expert_overlap and limits.shared_experts:
        raise SpecError(f"{name} does not go with moe_shared_expert_overlap; drop one of them")
    mtp = run.model.mtp_num_layers
    if mtp > 1:
        raise SpecError(f"{name} supports one MTP layer, not mtp_num_layers ({mtp}); drop it")
    if mtp == 1 and pp == 1:
        raise SpecError(f"{name} with an MTP layer needs pipeline_model_parallel_size of 2 or more; drop it")


#: What a run is held to, in order: sizes that no number of GPUs makes right before those that another would.
RULES: tuple[Callable[[RunSpec, Limits], None], ...] = (
    lambda run, limits: check_engine(run),
    lambda run, limits: check_transformers(run),
    lambda run, limits: _check_stages(run.parallel, run.model.num_layers),
    _check_model_over_ranks,
    lambda run, limits: _check_parallel(run.parallel, limits),
    lambda run, limits: _check_split_release(run),
    lambda run, limits: _check_batch(run),
    lambda run, limits: _check_precision(run),
    lambda run, limits: _check_data_parallel(run),
    lambda run, limits: _check_optimizer(run),
    lambda run, limits: check_adapters(run.peft, run.parallel, run.model, limits),
    lambda run, limits: None if run.implementation.torch_layers else check_targets(run.peft, run.model, limits),
    lambda run, limits: None if run.recompute.granularity is None else _check_recompute(run, limits),
    _check_implementation,
    _check_attention_release,
    _check_kernels,
    lambda run, limits: check_layout(run, layout(run.model, run.parallel)),
)
