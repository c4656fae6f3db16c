"""Megatron-LM arguments -> RunSpec: parallel sizes, precision, optimizer, recomputation, implementation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from bridge_memory.readers.megatron_args.arguments import Arguments
from bridge_memory.readers.megatron_args.model import HybridPattern, hybrid_pattern, model_spec
from bridge_memory.readers.megatron_args.parsing import RawArguments, read_arguments, words_of
from bridge_memory.spec import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
    divide,
)

#: Release whose defaults apply where the caller names none.
DEFAULT_MEGATRON_CORE = (0, 16)

_ARCHITECTURES = (
    (r"GB\d{3}|B\d{3}\b|blackwell|RTX.?(PRO|50)", "blackwell"),
    (r"H\d{2,3}\b|H20\b|GH200|hopper", "hopper"),
    (r"A\d{2,3}\b|RTX.?(30|A\d)|ampere|L40|L4\b|ada", "ampere"),
)


def run_from_megatron_args(
    args: Mapping[str, object] | Sequence[str] | str,
    *,
    world_size: int | None = None,
    gpu: str | None = None,
    megatron_core: tuple[int, int] | str | None = None,
    transformer_engine: tuple[int, int] | str | None = None,
    env: Mapping[str, object] | None = None,
) -> RunSpec:
    """A RunSpec from Megatron-LM arguments, unset ones at Megatron-LM's defaults for that release.

    ``args``: a dict (``{"--num-layers": 32}``), a list of words, a command line, the text of a launch
    script or of a functional test's YAML. ``world_size``: number of ranks; taken from a script's torchrun
    options where it has them. ``gpu``: a GPU's name, for workspace sizes. ``env``: its
    CUBLAS_WORKSPACE_CONFIG and NVTE_* variables matter.

    Raises SpecError for missing or contradictory arguments. Arguments that change memory and are not
    modelled, and arguments that nobody here knows, are listed in ``RunSpec.not_modelled``.
    """
    raw = read_arguments(args)
    environment = {**raw.env, **{k: str(v) for k, v in (env or {}).items()}}
    a = Arguments(RawArguments(raw.values, environment))
    core = release(megatron_core) or DEFAULT_MEGATRON_CORE
    ranks = world_size or raw.world_size or a.optional_integer("world_size")
    if ranks is None:
        raise SpecError("world_size is unknown; give the number of GPUs (--world-size N)")
    pattern = hybrid_pattern(a)
    model = model_spec(a, core)
    gaps = list(a.not_modelled())
    precision = _precision(a)
    return RunSpec(
        model=model,
        parallel=_parallel(a, ranks, model.num_layers, pattern),
        batch=BatchSpec(
            seq_length=a.optional_integer("seq_length") or a.required("encoder_seq_length"),
            micro_batch_size=a.required("micro_batch_size"),
            # Megatron-LM's own default: one microbatch a data-parallel replica.
            global_batch_size=a.optional_integer("global_batch_size")
            or a.required("micro_batch_size") * _data_parallel(a, ranks),
        ),
        precision=precision,
        optimizer=_optimizer(a),
        data_parallel=_data_parallel_spec(a),
        recompute=_recompute(a),
        implementation=_implementation(a, core, gpu, release(transformer_engine)),
        assumptions=(_DETERMINISTIC_CUBLAS,) if _supposes_cublas(a) else (),
        not_modelled=tuple(gaps),
    )


def release(version: tuple[int, int] | str | None) -> tuple[int, int] | None:
    """``"0.15.0rc8"`` -> ``(0, 15)``; None where there is no release number in the text."""
    if version is None or isinstance(version, tuple):
        return version
    match = re.search(r"(\d+)\.(\d+)", version)
    return (int(match.group(1)), int(match.group(2))) if match else None


def gpu_architecture(gpu: str | None) -> str:
    """"ampere", "hopper" or "blackwell" from a GPU's name; hopper where the name says nothing."""
    for pattern, architecture in _ARCHITECTURES:
        if gpu and re.search(pattern, gpu, re.IGNORECASE):
            return architecture
    return "hopper"


def cublas_workspace_bytes(config: str | None) -> int | None:
    """Bytes of ``CUBLAS_WORKSPACE_CONFIG`` (":size:count" pairs, sizes in KiB); None where unset.

    Source: torch ``aten/src/ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize``.
    """
    pairs = re.findall(r":(\d+):(\d+)", config or "")
    return sum(int(size) * int(count) * 1024 for size, count in pairs) if pairs else None


def _data_parallel(a: Arguments, ranks: int) -> int:
    model = (
        a.integer("tensor_model_parallel_size", 1)
        * a.integer("pipeline_model_parallel_size", 1)
        * a.integer("context_parallel_size", 1)
    )
    return divide(ranks, model, "world_size", "tp x pp x cp", "change the parallel sizes")


def _parallel(a: Arguments, ranks: int, layers: int, pattern: HybridPattern | None) -> ParallelSpec:
    tp, pp = a.integer("tensor_model_parallel_size", 1), a.integer("pipeline_model_parallel_size", 1)
    _data_parallel(a, ranks)
    layout = a.text("pipeline_model_parallel_layout", "").replace("\\", "").strip("'\"") or None
    if pattern is not None and len(pattern.segments) > 1:
        end = "m" * len(pattern.mtp) + "L"
        last = len(pattern.segments) - 1
        layout = "|".join(
            ("E" if i == 0 else "") + f"t*{len(segment)}" + (end if i == last else "")
            for i, segment in enumerate(pattern.segments)
        )
    return ParallelSpec(
        world_size=ranks,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=_virtual_stages(a, layers, pp, pattern, layout),
        context_parallel_size=a.integer("context_parallel_size", 1),
        expert_model_parallel_size=a.integer("expert_model_parallel_size", 1),
        expert_tensor_parallel_size=a.optional_integer("expert_tensor_parallel_size"),
        # validate_args switches sequence parallelism off where there is no tensor parallelism.
        sequence_parallel=a.flag("sequence_parallel") and tp > 1,
        num_layers_in_first_pipeline_stage=a.optional_integer("decoder_first_pipeline_num_layers"),
        num_layers_in_last_pipeline_stage=a.optional_integer("decoder_last_pipeline_num_layers"),
        account_for_embedding_in_pipeline_split=a.flag("account_for_embedding_in_pipeline_split"),
        account_for_loss_in_pipeline_split=a.flag("account_for_loss_in_pipeline_split"),
        pipeline_model_parallel_layout=layout,
        microbatch_group_size_per_vp_stage=a.optional_integer("microbatch_group_size_per_virtual_pipeline_stage")
        or a.optional_integer("microbatch_group_size_per_vp_stage"),
        num_distributed_optimizer_instances=a.integer("num_distributed_optimizer_instances", 1),
    )


def _virtual_stages(
    a: Arguments, layers: int, pp: int, pattern: HybridPattern | None, layout: str | None
) -> int | None:
    """``validate_args``; a layout's own number of stages over PP where there is one."""
    if pattern is not None and len(pattern.segments) > 1:
        size = divide(len(pattern.segments), pp, "segments of --hybrid-layer-pattern",
                      "--pipeline-model-parallel-size", "split it into a multiple of them with |")
    elif layout is not None and (count := _stages_of_layout(layout)):
        size = divide(count, pp, "stages of --pipeline-model-parallel-layout",
                      "--pipeline-model-parallel-size", "list a multiple of it")
    elif given := (
        a.optional_integer("num_virtual_stages_per_pipeline_rank")
        or a.optional_integer("virtual_pipeline_model_parallel_size")
    ):
        size = given
    elif (per_chunk := a.optional_integer("num_layers_per_virtual_pipeline_stage")) is not None:
        slots = layers + a.flag("account_for_embedding_in_pipeline_split")
        slots += a.flag("account_for_loss_in_pipeline_split")
        a_stage = divide(slots, pp, "--num-layers", "--pipeline-model-parallel-size", "use a layer layout")
        size = divide(a_stage, per_chunk, "layers a pipeline stage",
                      "--num-layers-per-virtual-pipeline-stage", "choose a divisor")
    else:
        return None
    return size if size > 1 else None


def _stages_of_layout(layout: str) -> int:
    """Number of ``|``-separated stages after the repetitions ``(...)*n`` are written out."""
    if "[" in layout:
        return 0  # the nested-list form; the layout itself says how many
    text = layout
    while True:
        expanded = re.sub(r"\(([^()]*)\)\*(\d+)", lambda m: m.group(1) * int(m.group(2)), text)
        if expanded == text or len(expanded) > 1_000_000:
            return text.count("|") + 1
        text = expanded


def _precision(a: Arguments) -> PrecisionSpec:
    if a.flag("bf16") and a.flag("fp16"):
        raise SpecError("--bf16 and --fp16 are both set; keep one")
    fp8 = a.text("fp8_format", "") or a.text("fp8", "")
    ends = 1 if a.flag("first_last_layers_bf16") else 0
    return PrecisionSpec(
        params_dtype="bf16" if a.flag("bf16") else "fp16" if a.flag("fp16") else "fp32",
        fp8=fp8 if fp8 not in ("", "None", "none") else None,
        fp8_recipe=a.text("fp8_recipe", "delayed"),
        fp8_param=a.flag("fp8_param_gather") or a.flag("fp8_param"),
        num_layers_at_start_in_bf16=a.integer("num_layers_at_start_in_bf16", 1) * ends,
        num_layers_at_end_in_bf16=a.integer("num_layers_at_end_in_bf16", 1) * ends,
        fp32_residual_connection=a.flag("fp32_residual_connection"),
        # Scaling by the layer number keeps the softmax in fp32 (TransformerConfig.__post_init__).
        attention_softmax_in_fp32=a.flag("attention_softmax_in_fp32")
        or a.flag("apply_query_key_layer_scaling"),
    )


def _shards_whole_parameters(a: Arguments) -> bool:
    """A distributed optimizer for Muon deals whole parameters out (layer_wise_optimizer.py), which is its own thing."""
    name = a.text("optimizer", "adam")
    asked = a.flag("use_layer_wise_distributed_optimizer") or name.startswith("dist_")
    return asked or ("muon" in name and a.flag("use_distributed_optimizer"))


def _data_parallel_spec(a: Arguments) -> DataParallelSpec:
    sharded = a.flag("use_distributed_optimizer") and "muon" not in a.text("optimizer", "adam")
    fsdp = a.flag("use_megatron_fsdp") or a.flag("use_custom_fsdp")
    # validate_args: bf16 accumulates in fp32 unless the reduction is asked for in bf16; fp16 and fp32 do not.
    fp32_gradients = a.flag("accumulate_allreduce_grads_in_fp32") or (
        a.flag("bf16") and not a.flag("grad_reduce_in_bf16") and a.text("main_grads_dtype", "fp32") == "fp32"
    )
    half = a.flag("bf16") or a.flag("fp16")
    return DataParallelSpec(
        engine="megatron_fsdp" if fsdp else "megatron_ddp",
        use_distributed_optimizer=sharded,
        grad_reduce_in_fp32=fp32_gradients or not half,
        overlap_grad_reduce=a.flag("overlap_grad_reduce"),
        overlap_param_gather=a.flag("overlap_param_gather"),
        bucket_size=a.optional_integer("ddp_bucket_size"),
        # Without Megatron-FSDP the strategy is read by nobody.
        data_parallel_sharding_strategy=a.text("data_parallel_sharding_strategy", "no_shard") if fsdp else None,
    )


def _optimizer(a: Arguments) -> OptimizerSpec:
    return OptimizerSpec(
        optimizer=a.text("optimizer", "adam").removeprefix("dist_"),
        sgd_momentum=a.number("sgd_momentum", 0.9),
        use_precision_aware_optimizer=a.flag("use_precision_aware_optimizer"),
        main_grads_dtype=a.text("main_grads_dtype", "fp32"),
        main_params_dtype=a.text("main_params_dtype", "fp32"),
        fp8_recipe=a.text("fp8_recipe", "delayed"),
        exp_avg_dtype=a.text("exp_avg_dtype", "fp32"),
        exp_avg_sq_dtype=a.text("exp_avg_sq_dtype", "fp32"),
        optimizer_cpu_offload=a.flag("optimizer_cpu_offload"),
        optimizer_offload_fraction=a.number("optimizer_offload_fraction", 1.0),
        log_params_norm=a.flag("log_params_norm"),
        use_layer_wise_distributed_optimizer=_shards_whole_parameters(a),
    )


def _recompute(a: Arguments) -> RecomputeSpec:
    granularity = a.text("recompute_granularity", "") or None
    if granularity is None and a.flag("recompute_activations"):
        granularity = "selective"
    if granularity is None:
        return RecomputeSpec()
    method = a.text("recompute_method", "") or None
    layers = a.optional_integer("recompute_num_layers")
    if granularity == "full" and method == "block" and layers == 0:
        # transformer_block.py: _checkpointed_forward recomputes the first 0 layers of every stage.
        return RecomputeSpec()
    modules: tuple[str, ...] = ("core_attn",)
    if a.has("recompute_modules"):
        modules = tuple(words_of(a.raw("recompute_modules") or ""))
    if a.flag("moe_layer_recompute"):
        modules = (*modules, "moe")
    return RecomputeSpec(
        granularity=granularity,
        method=method,
        # "--recompute-method" unset leaves the number unused.
        num_layers=layers if granularity == "full" else None,
        modules=modules,
        distribute_saved_activations=a.flag("distribute_saved_activations"),
    )


#: First Transformer Engine whose containers carry a FlashAttention (2.4.1) with a deterministic backward.
_DETERMINISTIC_FLASH = (1, 6)


def _attention_backend(a: Arguments, architecture: str, te: tuple[int, int] | None) -> str:
    """``--attention-backend``, or what is left of "auto" (TE ``dot_product_attention/utils.py:
    get_attention_backend``): NVTE_* variables, and determinism where a backend's backward has none.
    """
    backend = a.text("attention_backend", "auto").rsplit(".", 1)[-1]
    if backend == "auto":
        flash, fused = (a.env.get(n, "1") != "0" for n in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"))
        if not flash or not fused:
            return "flash" if flash else "fused" if fused else "unfused"
        if _deterministic(a) and te is not None and te < _DETERMINISTIC_FLASH and architecture == "ampere":
            return "unfused"
    return backend


def _deterministic(a: Arguments) -> bool:
    return a.env.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"


#: What torch's deterministic mode asks of the environment (``torch.use_deterministic_algorithms``).
_DETERMINISTIC_CONFIG = ":4096:8"
_DETERMINISTIC_CUBLAS = (
    f"CUBLAS_WORKSPACE_CONFIG is {_DETERMINISTIC_CONFIG}: NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 asks for determinism "
    "and the environment names none (measured so on GB200)"
)


def _supposes_cublas(a: Arguments) -> bool:
    return _deterministic(a) and cublas_workspace_bytes(a.env.get("CUBLAS_WORKSPACE_CONFIG")) is None


def _implementation(
    a: Arguments, core: tuple[int, int], gpu: str | None, te: tuple[int, int] | None
) -> ImplementationSpec:
    local = a.text("transformer_impl", "transformer_engine") == "local" or a.flag("use_legacy_models")
    graphs = a.text("cuda_graph_impl", "none")
    if a.flag("enable_cuda_graph"):
        graphs = "local"
    elif a.flag("external_cuda_graph"):
        graphs = "transformer_engine"
    dispatchers = ("allgather", "alltoall", "flex", "alltoall_seq")
    dispatcher = a.choice("moe_token_dispatcher_type", "allgather", dispatchers)
    offload: tuple[str, ...] = ()
    if a.flag("fine_grained_activation_offloading"):
        offload = tuple(words_of(a.raw("offload_modules") or ""))
    return ImplementationSpec(
        transformer_impl="local" if local else "transformer_engine",
        megatron_core=core,
        transformer_engine=te,
        attention_backend=_attention_backend(a, gpu_architecture(gpu), te),
        gradient_accumulation_fusion=not a.flag("no_gradient_accumulation_fusion"),
        masked_softmax_fusion=not a.flag("no_masked_softmax_fusion"),
        bias_activation_fusion=not (
            a.flag("no_bias_swiglu_fusion") if a.flag("swiglu") else a.flag("no_bias_gelu_fusion")
        ),
        use_fused_weighted_squared_relu=a.flag("use_fused_weighted_squared_relu"),
        bias_dropout_fusion=not a.flag("no_bias_dropout_fusion"),
        apply_rope_fusion=not a.flag("no_rope_fusion"),
        cross_entropy_loss_fusion=a.flag("cross_entropy_loss_fusion"),
        cross_entropy_fusion_impl=a.choice("cross_entropy_fusion_impl", "native", ("native", "te", "linear")),
        create_attention_mask=not a.flag("no_create_attention_mask_in_dataloader"),
        calculate_per_token_loss=a.flag("calculate_per_token_loss"),
        deterministic_mode=a.flag("deterministic_mode"),
        nvte_deterministic=_deterministic(a),
        use_legacy_models=a.flag("use_legacy_models"),
        apply_query_key_layer_scaling=a.flag("apply_query_key_layer_scaling"),
        cp_comm_type=words_of(a.text("cp_comm_type", "p2p"))[0],
        cuda_graph_impl=graphs,
        use_transformer_engine_op_fuser=a.flag("use_transformer_engine_op_fuser"),
        defer_embedding_wgrad_compute=a.flag("defer_embedding_wgrad_compute"),
        delay_wgrad_compute=a.flag("delay_wgrad_compute"),
        moe_token_dispatcher_type="alltoall" if dispatcher == "alltoall_seq" else dispatcher,
        moe_flex_dispatcher_backend=a.text("moe_flex_dispatcher_backend", "deepep"),
        moe_grouped_gemm=a.flag("moe_grouped_gemm"),
        moe_permute_fusion=a.flag("moe_permute_fusion"),
        moe_router_fusion=a.flag("moe_router_fusion"),
        moe_router_dtype=a.text("moe_router_dtype", "") or None,
        moe_expert_capacity_factor=a.number("moe_expert_capacity_factor", 0.0) or None,
        moe_pad_expert_input_to_capacity=a.flag("moe_pad_expert_input_to_capacity"),
        moe_shared_expert_overlap=a.flag("moe_shared_expert_overlap"),
        moe_apply_probs_on_input=a.flag("moe_apply_probs_on_input"),
        overlap_moe_expert_parallel_comm=a.flag("overlap_moe_expert_parallel_comm"),
        cpu_offloading_num_layers=a.integer("cpu_offloading_num_layers", 0),
        offload_modules=offload,
        gpu_arch=gpu_architecture(gpu),
        expandable_segments="expandable_segments:true" in a.env.get("PYTORCH_CUDA_ALLOC_CONF", "").lower(),
        cublas_workspace_bytes=cublas_workspace_bytes(
            _DETERMINISTIC_CONFIG if _supposes_cublas(a) else a.env.get("CUBLAS_WORKSPACE_CONFIG")
        ),
    )
