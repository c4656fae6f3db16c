"""Options of megatron-core's implementation, including activation offloading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge_memory.releases import GRAPHS_CHECKED, LOSS_REFUSES_FP16
from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.limits import Limits
from bridge_memory.spec.parts import ImplementationSpec
from bridge_memory.spec.rules.experts import check_experts, check_overlap, check_padding

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


def check_implementation(run: RunSpec, limits: Limits) -> None:
    i, p = run.implementation, run.parallel
    if run.batch.packed_sequences and not i.te and not i.torch_layers:
        # transformer/dot_product_attention.py: DotProductAttention.forward
        raise SpecError(
            f"packed_sequences (True) does not go with transformer_impl ({i.transformer_impl}), whose attention takes "
            "none; use transformer_engine"
        )
    fused_by_te = i.te and i.cross_entropy_loss_fusion and i.cross_entropy_fusion_impl == "te"
    if fused_by_te and run.precision.params_dtype == "fp16" and LOSS_REFUSES_FP16(i):
        raise SpecError(
            f"cross_entropy_fusion_impl (te) does not take params_dtype (fp16) in {LOSS_REFUSES_FP16} and later; use "
            "native"
        )
    if i.policy_loss == "none":
        for name in (
            "policy_entropy", "policy_chunk_size", "policy_forward_only", "policy_defers_fp32", "policy_rescales",
        ):  # fmt: skip
            if getattr(i, name):
                raise SpecError(f"{name} ({getattr(i, name)}) does nothing without policy_loss; give whose, or drop it")
    elif i.distillation != "none":
        raise SpecError(f"policy_loss ({i.policy_loss}) does not go with distillation ({i.distillation}); drop one")
    if i.cuda_graph_impl in ("local", "transformer_engine") and not i.torch_layers and GRAPHS_CHECKED(i):
        _check_graphs(run)
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
        check_experts(i, p, limits)
        check_padding(run, limits)
    if i.overlap_moe_expert_parallel_comm:
        check_overlap(run, limits)
    elif i.delay_wgrad_compute:  # TC
        raise SpecError(
            "delay_wgrad_compute (True) needs overlap_moe_expert_parallel_comm; set that to True or drop it"
        )


def _check_graphs(run: RunSpec) -> None:
    """TC."""
    i, r = run.implementation, run.recompute
    name = f"cuda_graph_impl ({i.cuda_graph_impl})"
    if r.granularity == "full":
        raise SpecError(f"{name} does not go with recompute_granularity (full); use selective, or full_iteration")
    modules = i.cuda_graph_modules
    if "moe" in modules and "moe_router" in modules:
        raise SpecError("cuda_graph_modules (moe) does not go with moe_router; drop one of them")
    if "moe_preprocess" in modules and "moe_router" not in modules and i.cuda_graph_impl == "transformer_engine":
        raise SpecError("cuda_graph_modules (moe_preprocess) needs moe_router beside it; add moe_router")
    if "moe" in modules and not i.moe_pad_expert_input_to_capacity:
        raise SpecError(
            "cuda_graph_modules (moe) needs moe_pad_expert_input_to_capacity; set that to True, or use "
            "attn,moe_router,moe_preprocess"
        )
    again = r.granularity == "selective" and "moe" in r.modules
    if again and "moe_router" in modules and i.cuda_graph_impl == "transformer_engine":
        raise SpecError("cuda_graph_modules (moe_router) does not go with moe in recompute_modules; drop one of them")


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
