"""Experts: dispatchers, capacities, biases, and overlapped communication."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from bridge_memory.releases import (
    EXPERT_BIASES_CHECKED,
    EXPERT_BIASES_WITHOUT_ETP,
    EXPERT_COMMUNICATION_OVERLAPS,
    EXPERTS_FUSED_BY_OPS,
    FLEX_OVERLAPS_SHARED_EXPERTS,
    HYBRID_EP_ALONE,
    SEQUENCE_DISPATCHER_GONE,
    core_of,
    release_words,
)
from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.limits import Limits
from bridge_memory.spec.parts import ImplementationSpec, ParallelSpec
from bridge_memory.spec.rules.pipeline import virtual_stages

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


def check_expert_bias(etp: int, ep: int, i: ImplementationSpec) -> None:
    """TC; and what autograd refuses: without expert parallelism the output of local experts goes through a reduction
    over one rank, which returns the same tensor, and the bias is then added in place (``tensor_parallel/layers.py:
    RowParallelLinear.forward``, ``transformer/mlp.py: MLP.forward``)."""
    if EXPERT_BIASES_CHECKED(i) and not EXPERT_BIASES_WITHOUT_ETP(i):
        raise SpecError(
            "experts with biases (add_bias_linear) are not supported by megatron_core "
            f"{release_words(core_of(i))}; use {EXPERT_BIASES_WITHOUT_ETP.number} or later"
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


#: TC: load-balancing types that support a capacity factor.
_CAPACITY_BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")


def check_experts(i: ImplementationSpec, p: ParallelSpec, limits: Limits) -> None:
    """TC, and ``transformer/moe/token_dispatcher.py``."""
    dispatcher = i.moe_token_dispatcher_type
    if dispatcher == "alltoall_seq" and SEQUENCE_DISPATCHER_GONE(i):
        raise SpecError(
            f"moe_token_dispatcher_type (alltoall_seq) is none of megatron_core {release_words(core_of(i))}; use "
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
            alone = i.moe_flex_dispatcher_backend == "hybridep" and HYBRID_EP_ALONE(i)
            if p.etp * p.ep == 1 and not alone:
                raise SpecError(
                    "moe_token_dispatcher_type (flex) needs expert_tensor_parallel_size x "
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


def check_padding(run: RunSpec, limits: Limits) -> None:
    """Raise SpecError for a capacity above the rank's tokens: the unfused permutation selects an expert's rows from
    those tokens and views them as ``capacity`` rows (``transformer/moe/moe_utils.py: permute``, drop_and_pad)."""
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


def check_overlap(run: RunSpec, limits: Limits) -> None:
    """TC, ``overlap_moe_expert_parallel_comm``."""
    i, p, r = run.implementation, run.parallel, run.recompute
    name = "overlap_moe_expert_parallel_comm (True)"
    if not EXPERT_COMMUNICATION_OVERLAPS(i):
        raise SpecError(
            f"{name} needs {EXPERT_COMMUNICATION_OVERLAPS} or later, not {release_words(core_of(i))}; drop it"
        )
    pp = p.pipeline_model_parallel_size
    if pp > 1 and virtual_stages(p) == 1:
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
    if r.granularity == "selective" and "moe" in r.modules:  # 0.16 passes by it (``fine_grained_callables.py``)
        raise SpecError(f"{name} does not go with moe in recompute_modules; drop one of them")
    if run.precision.params_dtype == "fp32":
        raise SpecError(f"{name} needs params_dtype bf16 or fp16, not fp32; drop it")
    if i.moe_shared_expert_overlap and limits.shared_experts:
        raise SpecError(f"{name} does not go with moe_shared_expert_overlap; drop one of them")
    mtp = run.model.mtp_num_layers
    if mtp > 1:
        raise SpecError(f"{name} supports one MTP layer, not mtp_num_layers ({mtp}); drop it")
    if mtp == 1 and pp == 1:
        raise SpecError(f"{name} with an MTP layer needs pipeline_model_parallel_size of 2 or more; drop it")
