"""Flags that do nothing: a mistake where another flag is missing, a note where it is the model that has no use for it
(one set of flags may serve several models)."""

from __future__ import annotations

from typing import Any

from bridge_memory.arguments.flags import spelling
from bridge_memory.spec import ModelSpec, SpecError
from bridge_memory.spec.limits import limits_of
from bridge_memory.spec.parts import MEGATRON_ENGINES
from bridge_memory.spec.unmodelled import NoEffect


def drop_idle(given: dict[str, dict[str, Any]], model: ModelSpec) -> list[NoEffect]:
    """Take out of ``given`` (group -> field -> value) what this model has no use for; a sentence for each."""
    parallel, impl = given["parallel"], given["implementation"]
    idle: list[tuple[dict[str, Any], str, str]] = []
    if not model.has_experts:
        about_experts = [name for name in impl if name.startswith("moe_")]
        idle += [(impl, f"implementation.{name}", "experts") for name in about_experts]
        if "expert_tensor_parallel_size" in parallel:
            idle.append((parallel, "parallel.expert_tensor_parallel_size", "experts"))
    elif impl.get("moe_shared_expert_overlap") and not limits_of(model).shared_experts:
        idle.append((impl, "implementation.moe_shared_expert_overlap", "shared experts"))
    batch = given["batch"]
    vision, audio = ([e for e in model.encoders if e.structure is not None and e.structure.audio is on]
                     for on in (False, True))
    if not vision:
        media = ("images_per_sample", "image_size", "patches_per_image", "video_frames")
        missing = "vision encoder whose activations are known"
        idle += [(batch, f"batch.{name}", missing) for name in media if name in batch]
    if not audio and "audio_seconds" in batch:
        idle.append((batch, "batch.audio_seconds", "audio encoder whose activations are known"))
    for group, field, _ in idle:
        group.pop(field.partition(".")[2])
    return [NoEffect(f"{spelling(field)} does nothing: the model has no {missing}") for _, field, missing in idle]


def check_silent(given: dict[str, dict[str, Any]], model: ModelSpec) -> None:
    """Raise SpecError for the first flag of ``given`` (group -> field -> value) that the other flags leave without
    effect."""
    precision, recompute, impl = given["precision"], given["recompute"], given["implementation"]
    optimizer, parallel = given["optimizer"], given["parallel"]
    needs = [
        ("fp8_recipe", "fp8_recipe" in precision, "fp8" in precision, "--fp8"),
        ("fp8_param", precision.get("fp8_param", False), "fp8" in precision, "--fp8"),
        ("fp8_dot_product_attention", precision.get("fp8_dot_product_attention", False), "fp8" in precision, "--fp8"),
        ("recompute_method", "method" in recompute, recompute.get("granularity") == "full",
         "--recompute-granularity full"),
        ("recompute_num_layers", "num_layers" in recompute, recompute.get("granularity") == "full",
         "--recompute-granularity full"),
        ("recompute_modules", "modules" in recompute, recompute.get("granularity") == "selective",
         "--recompute-granularity selective"),
        ("cross_entropy_fusion_impl", "cross_entropy_fusion_impl" in impl,
         impl.get("cross_entropy_loss_fusion", False), "--cross-entropy-loss-fusion"),
        ("optimizer_offload_fraction", "optimizer_offload_fraction" in optimizer,
         optimizer.get("optimizer_cpu_offload", False), "--optimizer-cpu-offload"),
        ("moe_pad_expert_input_to_capacity", impl.get("moe_pad_expert_input_to_capacity", False),
         "moe_expert_capacity_factor" in impl, "--moe-expert-capacity-factor"),
        ("bucket_size", "bucket_size" in given["data_parallel"],
         given["data_parallel"].get("overlap_grad_reduce", False),
         "--overlap-grad-reduce"),
        ("store_param_remainders", "store_param_remainders" in optimizer,
         optimizer.get("use_precision_aware_optimizer", False), "--use-precision-aware-optimizer"),
        ("distribute_saved_activations", recompute.get("distribute_saved_activations", False),
         recompute.get("granularity") == "full", "--recompute-granularity full"),
        ("microbatch_group_size_per_vp_stage", "microbatch_group_size_per_vp_stage" in parallel,
         "virtual_pipeline_model_parallel_size" in parallel or "pipeline_model_parallel_layout" in parallel, "--vpp"),
    ]
    needs += [
        (name, parallel.get(name, False) is not False, parallel.get("pipeline_model_parallel_size", 1) != 1,
         "--pp of 2 or more")
        for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
                     "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    ]
    needs += [
        (name, name in given["data_parallel"], given["data_parallel"].get("engine") == "megatron_fsdp",
         "--engine megatron_fsdp")
        for name in ("data_parallel_sharding_strategy", "suggested_communication_unit_size", "grad_comm_dtype",
                     "fsdp_double_buffer", "fsdp_db_use_persist_buf_on_alloc_fail",
                     "megatron_fsdp_max_pool_double_buffer")
    ]
    needs += [
        (name, name in optimizer, optimizer.get("use_precision_aware_optimizer", False),
         "--use-precision-aware-optimizer")
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    ]
    needs += [
        (f"peft.{name}", name in given["peft"], given["peft"].get("scheme") == "lora", "--peft lora")
        for name in ("dim", "target_modules")
    ]
    needs += [
        (name, bool(precision.get(name)), "fp8" in precision or "fp4" in precision, "--fp8 or --fp4")
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    ]
    needs += _of_dispatchers(impl) + _of_adapters(given) + _of_engines(given)
    local = impl.get("transformer_impl") == "local"
    needs += [
        ("fp8", "fp8" in precision, not local, "--transformer-impl transformer_engine"),
        ("transformer_engine", "transformer_engine" in impl, not local, "--transformer-impl transformer_engine"),
        ("attention_backend", impl.get("attention_backend") in ("flash", "fused"), not local,
         "--transformer-impl transformer_engine"),
        ("masked_softmax_fusion", "masked_softmax_fusion" in impl, local, "--transformer-impl local"),
        ("cp_comm_type", "cp_comm_type" in impl, parallel.get("context_parallel_size", 1) != 1, "--cp of 2 or more"),
    ]
    needs += [
        (name, name in optimizer, not optimizer.get("optimizer_cpu_offload", False),
         "--no-optimizer-cpu-offload: the offloaded optimizer keeps fp32 states")
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype", "store_param_remainders")
    ]
    for field, used, present, what in needs:
        if used and not present:
            raise SpecError(f"{field} does nothing without {what}; add it or drop the flag")
    imbalance, ranks = impl.get("moe_imbalance", 1.0), parallel.get("expert_model_parallel_size", 1)
    if imbalance > max(1, ranks):
        raise SpecError(
            f"moe_imbalance ({imbalance:g}) is more than expert_model_parallel_size ({ranks}), that of one rank with "
            "every token; lower it"
        )


def _of_dispatchers(impl: dict[str, Any]) -> list[tuple[str, bool, bool, str]]:
    """(field, given, whether the dispatcher that reads it runs, the flags that are missing)."""
    flex = impl.get("moe_token_dispatcher_type") == "flex"
    backend = impl.get("moe_flex_dispatcher_backend", "deepep")
    with_flex = "--moe-token-dispatcher-type flex"
    return [
        ("moe_flex_dispatcher_backend", "moe_flex_dispatcher_backend" in impl, flex, with_flex),
        ("moe_flex_dispatcher_num_sms", "moe_flex_dispatcher_num_sms" in impl, flex and backend == "deepep",
         f"{with_flex} --moe-flex-dispatcher-backend deepep"),
        ("moe_hybridep_ranks_per_nvlink_domain", "moe_hybridep_ranks_per_nvlink_domain" in impl,
         flex and backend == "hybridep", f"{with_flex} --moe-flex-dispatcher-backend hybridep"),
        ("moe_paged_stash_buffer_size_factor_cuda", "moe_paged_stash_buffer_size_factor_cuda" in impl,
         impl.get("moe_paged_stash", False), "--moe-paged-stash"),
    ]  # fmt: skip


def _of_adapters(given: dict[str, dict[str, Any]]) -> list[tuple[str, bool, bool, str]]:
    """Options of LoRA and of quantized weights in ``transformers``: as ``_of_dispatchers``."""
    spec, adapts = given["transformers"], given["peft"].get("scheme") == "lora"
    return [
        ("lora_dropout", bool(spec.get("lora_dropout")), adapts, "--peft lora"),
        ("autocast_adapter_dtype", "autocast_adapter_dtype" in spec, adapts, "--peft lora"),
        ("bnb_4bit_compute_dtype", "bnb_4bit_compute_dtype" in spec, spec.get("load_in_4bit", False), "--load-in-4bit"),
    ]


def _of_engines(given: dict[str, dict[str, Any]]) -> list[tuple[str, bool, bool, str]]:
    """Flags that one engine alone reads: (field, given, whether that engine runs, the flag that is missing)."""
    engine = given["data_parallel"].get("engine", "megatron_ddp")
    found = [
        ("use_distributed_optimizer", "use_distributed_optimizer" in given["data_parallel"],
         engine in MEGATRON_ENGINES, "--engine megatron_ddp"),
        ("grad_reduce_in_fp32", "grad_reduce_in_fp32" in given["data_parallel"], engine in MEGATRON_ENGINES,
         "--engine megatron_ddp (--fsdp-reduce-dtype, --grad-accum-dtype)"),
        ("stage", "stage" in given["deepspeed"], engine == "megatron_deepspeed", "--engine megatron_deepspeed"),
    ]
    stage3 = engine == "zero3" or given["deepspeed"].get("stage") == 3
    found += [
        (name, name in given["deepspeed"], stage3, "--engine zero3")
        for name in (
            "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
            "stage3_max_live_parameters", "stage3_max_reuse_distance", "sub_group_size", "zero_hpz_partition_size",
            "stage3_gather_16bit_weights_on_model_save",
        )
    ]  # fmt: skip
    return found
