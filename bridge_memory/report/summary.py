"""The run in words: what was estimated, in Megatron's terms, one line per subject."""

from __future__ import annotations

from bridge_memory.estimation import Estimate
from bridge_memory.releases import (
    DEFAULT_MEGATRON_CORE,
    DEFAULT_TORCH,
    DEFAULT_TRANSFORMER_ENGINE,
    ENGINE_RELEASES,
    Release,
    release_words,
)
from bridge_memory.report.units import format_bytes, format_count
from bridge_memory.spec import RunSpec
from bridge_memory.spec.encoders import items_of, media_words
from bridge_memory.spec.layout import layout

#: GPUs of one host on most training clusters (HGX boards), by which host memory is added up.
RANKS_OF_NODE = 8


def configuration(result: Estimate) -> tuple[tuple[str, str], ...]:
    """(subject, words): model, parallelism, batch, precision, optimizer, recompute, kernels, releases; "host memory"
    where the run offloads something."""
    run = result.run
    host = result.host_bytes
    return (
        ("model", _model(result)),
        ("parallelism", _parallelism(run)),
        ("batch", _batch(run)),
        ("precision", _precision(run)),
        ("optimizer", _optimizer(run)),
        ("recompute", _recompute(run)),
        ("kernels", _kernels(run)),
        ("releases", _releases(run)),
        *((("host memory", _host(result, host)),) if host else ()),
    )


def runs_with(run: RunSpec) -> str:
    """The dtypes of weights, gradients and optimizer states, and the releases, in one line."""
    return f"{_precision(run)}; {_releases(run)}"


def _join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _model(result: Estimate) -> str:
    model = result.run.model
    mtp = model.mtp_num_layers
    return _join(
        model.model_type,
        f"{model.num_layers} layers",
        f"hidden {model.hidden_size}",
        f"{format_count(result.parameters)} parameters",
        f"plus {mtp} MTP {'depth' if mtp == 1 else 'depths'} of {format_count(result.mtp_parameters)}" if mtp else "",
        *(f"plus {format_count(encoder.parameters)} of {encoder.name}" for encoder in model.encoders),
    )


def _parallelism(run: RunSpec) -> str:
    p, virtual = run.parallel, layout(run.model, run.parallel).virtual_pipeline_model_parallel_size
    shards = (("TP", p.tp), ("CP", p.cp), ("PP", p.pp), ("DP", p.data_parallel_size))
    product = " x ".join(f"{name} {size}" for name, size in shards if name != "CP" or size > 1)
    first, last = p.num_layers_in_first_pipeline_stage, p.num_layers_in_last_pipeline_stage
    counted = (
        ("embedding", p.account_for_embedding_in_pipeline_split), ("loss", p.account_for_loss_in_pipeline_split)
    )
    return _join(
        f"{p.world_size} {'GPU' if p.world_size == 1 else 'GPUs'} = {product}",
        f"experts: EP {p.ep} x ETP {p.etp} x DP {p.expert_data_parallel_size}" if run.model.has_experts else "",
        "sequence parallel" if p.sp else "",
        f"{virtual} virtual stages" if virtual > 1 else "",
        f"layout {p.pipeline_model_parallel_layout}" if p.pipeline_model_parallel_layout else "",
        f"{first} layers in the first stage" if first is not None else "",
        f"{last} layers in the last stage" if last is not None else "",
        *(f"{name} counted as a layer" for name, yes in counted if yes),
        f"{p.num_distributed_optimizer_instances} optimizer instances"
        if p.num_distributed_optimizer_instances > 1 else "",
    )


def _batch(run: RunSpec) -> str:
    b, m = run.batch, run.num_microbatches
    total = m * b.micro_batch_size * run.parallel.data_parallel_size
    return _join(
        f"{'packed to ' if b.packed_sequences else ''}sequence length {b.seq_length}",
        f"micro batch {b.micro_batch_size}",
        f"global batch {total}{' (default)' if b.global_batch_size is None else ''}",
        f"{m} {'microbatch' if m == 1 else 'microbatches'} a step",
        *media_of(run),
    )


def media_of(run: RunSpec) -> list[str]:
    """What a sample gives each encoder: "1 image of 64 x 80 patches (1280 tokens of the sequence) per sample"."""
    b = run.batch
    given = (b.images_per_sample, b.image_size, b.patches_per_image, b.audio_seconds, b.video_frames or None)
    default = " (default)" if all(value is None for value in given) else ""
    return [
        f"{media_words(encoder.structure, items_of(encoder.structure, b))} per sample{default}"
        for encoder in run.model.encoders
        if encoder.structure is not None and not run.implementation.torch_layers
    ]


def _precision(run: RunSpec) -> str:
    p = run.precision
    return _join(
        f"fp4 {p.fp4}{' (parameters too)' if p.fp4_param else ''}" if p.fp4 else "",
        f"fp8 {p.fp8} ({p.fp8_recipe}{', parameters too' if p.fp8_param else ''})" if p.fp8 else "",
        _weights(run),
        _gradients(run),
        f"optimizer states {_optimizer_states(run)}",
        f"computes in {run.compute_dtype}" if run.compute_dtype != p.params_dtype else "",
        "fp32 residual stream" if p.fp32_residual_connection else "",
    )


def _weights(run: RunSpec) -> str:
    """"weights bf16", and the dtype of what trains where that is not the same."""
    spec = run.transformers
    quantized = "4-bit" if spec.load_in_4bit else "int8" if spec.load_in_8bit else ""
    weights = f"weights {quantized or run.params_dtype}"
    return weights + (f" (frozen), adapters {run.adapters_dtype}" if run.peft.freezes else "")


def _trained_dtype(run: RunSpec) -> str:
    return run.adapters_dtype if run.peft.freezes else run.params_dtype


def _gradients(run: RunSpec) -> str:
    if run.data_parallel.of_megatron:
        fp32 = run.data_parallel.grad_reduce_in_fp32 or run.params_dtype == "fp32"
        return f"gradients {'fp32' if fp32 else run.params_dtype}"
    return f"gradients {(run.data_parallel.of_deepspeed and run.deepspeed.grad_accum_dtype) or _trained_dtype(run)}"


def _optimizer_states(run: RunSpec) -> str:
    """Their dtype, or that of each."""
    o, z = run.optimizer, run.deepspeed
    if run.data_parallel.of_deepspeed:
        main = "bf16" if z.bf16_master_weights_and_grads else "fp32"
        moments = "bf16" if z.bf16_optimizer_states else "fp32"
        return main if main == moments else f"{main} (main parameters), {moments} (moments)"
    if not run.data_parallel.of_megatron:
        if o.optimizer in ("adamw_8bit", "lion_8bit"):
            return "8-bit (embeddings: fp32)"
        # Adafactor, Lion and bitsandbytes' paged AdamW keep fp32 states whatever the parameters are.
        return "fp32" if o.optimizer in ("adafactor", "lion") or o.paged else _trained_dtype(run)
    if not o.use_precision_aware_optimizer or o.optimizer_cpu_offload:
        return "fp32"
    main = o.main_params_dtype
    if o.store_param_remainders and o.fused_main_parameters and (main, run.params_dtype) == ("fp32", "bf16"):
        main = "16-bit remainders"  # bf16 weights are the upper halves of fp32 main parameters
    states = {"main parameters": main, "exp_avg": o.exp_avg_dtype, "exp_avg_sq": o.exp_avg_sq_dtype}
    names: dict[str, list[str]] = {}
    for name, dtype in states.items():
        names.setdefault(dtype, []).append(name)
    if len(names) == 1:
        return main
    return ", ".join(f"{dtype} ({', '.join(of)})" for dtype, of in names.items())


def _optimizer(run: RunSpec) -> str:
    o, d = run.optimizer, run.data_parallel
    return _join(
        o.optimizer,
        d.engine_title if not d.of_megatron else
        "distributed" if d.use_distributed_optimizer else "state replicated over data parallel ranks",
        o.torch_implementation if not d.of_megatron and o.optimizer in ("adam", "adamw", "sgd") else "",
        f"precision-aware (main gradients {o.main_grads_dtype})" if o.use_precision_aware_optimizer else "",
        f"{o.optimizer_offload_fraction:.0%} offloaded to the CPU" if o.optimizer_cpu_offload else "",
        f"{d.engine_title} {d.data_parallel_sharding_strategy}" if d.data_parallel_sharding_strategy else "",
        f"PEFT {run.peft.scheme}" if run.peft.freezes else "",
    )


def _recompute(run: RunSpec) -> str:
    r = run.recompute
    if run.transformers.gradient_checkpointing:
        return f"gradient checkpointing of every layer, {'' if run.transformers.reentrant else 'not '}reentrant"
    if run.transformers.checkpoint_submodules:
        return "checkpoints of norms, attention and MLP, each by itself"
    option = run.transformers.selective_ac_option
    if option:
        return f"torchtitan's selective checkpointing ({option if option == 'op' else f'every {option} layers'})"
    if r.granularity is None:
        return "none"
    if r.granularity == "selective":
        return f"selective: {', '.join(r.modules)}"
    return _join(
        "full",
        r.method or "",
        f"num_layers {r.num_layers}" if r.num_layers is not None else "",
        "saved activations distributed over TP" if r.distribute_saved_activations else "",
    )


def _of_transformers(run: RunSpec) -> str:
    i, spec = run.implementation, run.transformers
    return _join(
        f"{i.transformer_impl}'s layers" if i.own_layers else "transformers' layers",
        f"{spec.attn_implementation} attention ({i.gpu_arch})",
        f"autocast to {spec.autocast}" if spec.autocast else "",
        f"liger-kernel: {' '.join(spec.liger_kernel)}" if spec.liger_kernel else "",
        "torch.compile" if spec.torch_compile else "",
        f"logits in {spec.num_output_chunks} chunks" if spec.num_output_chunks else "",
        "cut cross entropy" if spec.cut_cross_entropy else "",
        "optimizer steps in backward" if spec.optimizer_in_bwd else "",
        "activations offloaded" if spec.enable_activation_offloading else "",
    )


def _kernels(run: RunSpec) -> str:
    i = run.implementation
    if i.torch_layers:
        return _of_transformers(run)
    fused = f"{i.cross_entropy_fusion_impl} fused" if i.cross_entropy_loss_fusion else "unfused"
    away = 0 if run.model.hybrid else i.cpu_offloading_num_layers
    offloaded = f"{away} layers' activations offloaded" if away else ""
    return _join(
        i.transformer_impl,
        f"{i.attention_kernel} attention ({i.gpu_arch})",
        f"{fused} cross entropy",
        f"{i.moe_token_dispatcher_type} dispatcher" if run.model.has_experts else "",
        offloaded,
        f"offloaded: {' '.join(i.offload_modules)}" if i.offload_modules else "",
    )


def _releases(run: RunSpec) -> str:
    """"megatron-core 0.16, torch 2.9, Transformer Engine 2.17 (assumed)": whose rules the numbers follow."""
    i = run.implementation

    def named(package: str, release: Release | None, default: Release) -> str:
        return f"{package} {release_words(release or default)}{'' if release else ' (assumed)'}"

    layers = i.transformer_impl if i.own_layers else ""
    engine = "DeepSpeed" if run.data_parallel.of_deepspeed else ""
    return _join(
        f"transformers {release_words(run.transformers.transformers_version)}" if i.torch_layers and not layers else "",
        "" if i.torch_layers else named("megatron-core", i.megatron_core, DEFAULT_MEGATRON_CORE),
        named("Transformer Engine", i.transformer_engine, DEFAULT_TRANSFORMER_ENGINE) if i.te else "",
        named("torch", i.torch, DEFAULT_TORCH),
        *(named(name, None, ENGINE_RELEASES[name]) for name in (layers, engine) if name),
    )


def _host(result: Estimate, nbytes: int) -> str:
    """Of the rank with the most, and of a node."""
    ranks = min(RANKS_OF_NODE, result.run.parallel.world_size)
    place = "" if host_place(result) == "host memory" else f" in {host_place(result)}"
    node = f"{format_bytes(ranks * nbytes)} per node of {ranks} GPU{'s' * (ranks > 1)}"
    return f"{format_bytes(nbytes)} per rank{place}, {node}"


def host_place(result: Estimate) -> str:
    """Where an engine keeps what it offloads: "host memory", or with NVMe."""
    d = result.run.deepspeed
    nvme = "nvme" in (d.offload_optimizer_device, d.offload_param_device)
    return "host memory and NVMe" if nvme else "host memory"
