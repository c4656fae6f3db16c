"""Random runs with options that few use, of every engine: coherent bundles of them, and any field alone.

Wider than ``scripts/maintain/freeze.py: drawn``, on which it builds: any preset, MTP switched off, truncated and padded
models, layout strings, every fp8 recipe on a GPU that has it, dispatchers, offloading, CUDA graphs, releases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from scripts_of import load_script

from bridge_memory import RunSpec, SpecError, list_presets, resolve_model
from bridge_memory.plan.megatron.splits import balanced_layout
from bridge_memory.spec import MoESpec
from bridge_memory.spec.parts import MEGATRON_ENGINES, OFFLOAD_MODULES, RECOMPUTE_MODULES, SHARDING_STRATEGIES

freeze = load_script("maintain/freeze")
Fields = dict[str, Any]


def _fp8(d: Random) -> Fields:
    recipe = d.choice(("delayed", "tensorwise", "blockwise", "mxfp8"))
    ends = {"precision.num_layers_at_start_in_bf16": d.choice((0, 1, 2)),
            "precision.num_layers_at_end_in_bf16": d.choice((0, 1, 3))} if d.random() < 0.4 else {}  # fmt: skip
    return {
        "precision.fp8": d.choice(("hybrid", "e4m3")), "precision.fp8_recipe": recipe,
        "precision.fp8_param": d.random() < 0.5, "optimizer.fp8_recipe": d.choice((None, recipe, recipe)),
        "precision.fp8_dot_product_attention": d.random() < 0.1,
        "implementation.gpu_arch": "blackwell" if recipe == "mxfp8" else "hopper", **ends,
    }  # fmt: skip


def _fp4(d: Random) -> Fields:
    return {"precision.fp4": "e2m1", "precision.fp4_param": d.random() < 0.5, "implementation.gpu_arch": "blackwell",
            "implementation.transformer_engine": (2, 11)}  # fmt: skip


def _dispatch(d: Random) -> Fields:
    return {
        "implementation.moe_token_dispatcher_type": d.choice(("alltoall", "allgather", "flex", "flex")),
        "implementation.moe_flex_dispatcher_backend": d.choice(("deepep", "hybridep")),
        "implementation.moe_flex_dispatcher_num_sms": d.choice((None, 16, 24)),
        "implementation.moe_router_dtype": d.choice((None, "fp32", "fp64")),
        "implementation.moe_permute_fusion": d.random() < 0.5, "implementation.moe_router_fusion": d.random() < 0.3,
        "implementation.moe_grouped_gemm": d.random() < 0.8,
        "implementation.moe_expert_capacity_factor": d.choice((None, None, 1.0, 1.25)),
        "implementation.moe_z_loss_coeff": d.choice((None, 0.001)),
        "implementation.moe_router_padding_for_quantization": d.random() < 0.1,
        "implementation.moe_shared_expert_overlap": d.random() < 0.2,
    }  # fmt: skip


def _recompute(d: Random) -> Fields:
    if d.random() < 0.5:
        method = d.choice(("uniform", "block"))
        return {
            "recompute.granularity": "full", "recompute.method": method, "recompute.num_layers": d.choice((1, 2, 3)),
            "recompute.distribute_saved_activations": d.random() < 0.1,
        }  # fmt: skip
    modules = tuple(d.sample(RECOMPUTE_MODULES, d.choice((1, 2, 3))))
    return {"recompute.granularity": "selective", "recompute.modules": modules}


def _aware(d: Random) -> Fields:
    return {
        "optimizer.use_precision_aware_optimizer": True, "optimizer.main_grads_dtype": d.choice(("fp32", "bf16")),
        "data_parallel.grad_reduce_in_fp32": d.random() < 0.5,
        "optimizer.main_params_dtype": d.choice(("fp32", "fp16")),
        "optimizer.exp_avg_dtype": d.choice(("fp32", "fp16", "bf16", "fp8")),
        "optimizer.exp_avg_sq_dtype": d.choice(("fp32", "bf16", "fp8")),
        "optimizer.store_param_remainders": d.random() < 0.7, "optimizer.fp8_recipe": d.choice((None, "tensorwise")),
    }  # fmt: skip


def _optimizer(d: Random) -> Fields:
    name = d.choice(("adam", "sgd", "muon"))
    return {
        "optimizer.optimizer": name, "optimizer.sgd_momentum": d.choice((0.0, 0.5, 0.9)),
        "optimizer.use_layer_wise_distributed_optimizer": name == "muon" and d.random() < 0.5,
        "data_parallel.use_distributed_optimizer": name != "muon" and d.random() < 0.5,
        "checkpoint.dist_ckpt_optim_fully_reshardable": d.random() < 0.3,
        "checkpoint.ckpt_fully_parallel_load": d.random() < 0.3,
        "checkpoint.ckpt_fully_parallel_save": d.random() < 0.7,
        "checkpoint.async_save": d.random() < 0.3,
        "checkpoint.load_optim": d.random() < 0.7,
        "checkpoint.save_optim": d.random() < 0.7,
        "optimizer.optimizer_cpu_offload": d.random() < 0.3,
        "optimizer.optimizer_offload_fraction": d.choice((0.5, 1.0)),
        "optimizer.log_params_norm": d.random() < 0.3, "optimizer.clip_grad": d.choice((0.0, 1.0, 0.3)),
    }  # fmt: skip


def _buckets(d: Random) -> Fields:
    return {
        "data_parallel.overlap_grad_reduce": True, "data_parallel.overlap_param_gather": d.random() < 0.5,
        "data_parallel.bucket_size": d.choice((None, 10_000_000, 1 << 27)),
        "data_parallel.grad_reduce_in_fp32": d.random() < 0.5,
        "parallel.num_distributed_optimizer_instances": d.choice((1, 1, 2)),
    }  # fmt: skip


def _fsdp(d: Random) -> Fields:
    return {
        "data_parallel.engine": "megatron_fsdp",
        "data_parallel.data_parallel_sharding_strategy": d.choice(SHARDING_STRATEGIES),
        "data_parallel.grad_comm_dtype": d.choice((None, "fp32", "bf16")),
        "data_parallel.grad_reduce_in_fp32": d.random() < 0.5,
        "data_parallel.suggested_communication_unit_size": d.choice((None, 400_000_000)),
        "data_parallel.fsdp_double_buffer": d.random() < 0.4,
        "data_parallel.fsdp_db_use_persist_buf_on_alloc_fail": d.random() < 0.2,
        "data_parallel.megatron_fsdp_max_pool_double_buffer": d.random() < 0.2,
        "implementation.megatron_core": d.choice(((0, 16), (0, 17), (0, 19))),
        "implementation.gradient_accumulation_fusion": False,
    }  # fmt: skip


def _offload(d: Random) -> Fields:
    if d.random() < 0.4:
        return {"implementation.cpu_offloading_num_layers": d.choice((1, 2))}
    return {
        "implementation.offload_modules": tuple(d.sample(OFFLOAD_MODULES, 2)),
        "implementation.min_offloaded_tensor_size": d.choice((1 << 20, 0, 1 << 12)),
        "implementation.megatron_core": d.choice(((0, 16), (0, 19))),
    }  # fmt: skip


def _graphs(d: Random) -> Fields:
    return {
        "implementation.cuda_graph_impl": d.choice(("local", "transformer_engine", "full_iteration")),
        "implementation.cuda_graph_modules": d.choice(((), ("attn",), ("attn", "mlp"), ("moe_router",))),
        "implementation.megatron_core": d.choice(((0, 15), (0, 16), (0, 18), (0, 19))),
    }  # fmt: skip


def _machine(d: Random) -> Fields:
    return {
        "implementation.megatron_core": d.choice(((0, 12), (0, 14), (0, 17), (0, 19), (0, 20))),
        "implementation.transformer_engine": d.choice((None, (2, 3), (2, 20))),
        "implementation.torch": d.choice((None, (2, 8), (2, 11))),
        "implementation.gpu_arch": d.choice(("ampere", "hopper", "blackwell")),
        "implementation.expandable_segments": d.random() < 0.3, "implementation.nvte_deterministic": d.random() < 0.3,
        "implementation.cublas_workspace_bytes": d.choice((None, 0, 1 << 22)),
    }  # fmt: skip


def _kernels(d: Random) -> Fields:
    switches = (
        "gradient_accumulation_fusion", "masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion",
        "apply_rope_fusion", "cross_entropy_loss_fusion", "create_attention_mask", "calculate_per_token_loss",
        "deallocate_pipeline_outputs", "delay_wgrad_compute", "tp_comm_overlap", "use_transformer_engine_op_fuser",
        "apply_query_key_layer_scaling", "defer_embedding_wgrad_compute", "overlap_moe_expert_parallel_comm",
    )  # fmt: skip
    return {
        "implementation.transformer_impl": d.choice(("transformer_engine", "transformer_engine", "local")),
        "implementation.attention_backend": d.choice(("auto", "flash", "fused", "unfused")),
        "implementation.cross_entropy_fusion_impl": d.choice(("native", "te")),
        "precision.attention_softmax_in_fp32": d.random() < 0.5,
        **{f"implementation.{name}": d.random() < 0.5 for name in d.sample(switches, 3)},
    }  # fmt: skip


def _batch(d: Random) -> Fields:
    return {
        "batch.seq_length": d.choice((512, 1536, 2048, 12288, 32768)), "batch.micro_batch_size": d.choice((1, 2, 5)),
        "batch.global_batch_size": d.choice((None, 960, 1920)), "batch.packed_sequences": d.random() < 0.1,
    }  # fmt: skip


def _precision(d: Random) -> Fields:
    return {
        "precision.params_dtype": d.choice(("bf16", "fp16", "fp32")),
        "precision.fp32_residual_connection": d.random() < 0.3, "data_parallel.grad_reduce_in_fp32": d.random() < 0.5,
    }  # fmt: skip


def _adapters(d: Random) -> Fields:
    return {"peft.scheme": "lora", "peft.dim": d.choice((8, 16)),
            "peft.target_modules": d.choice((("linear_qkv",), ("linear_qkv", "linear_proj")))}  # fmt: skip


BUNDLES: tuple[Callable[[Random], Fields], ...] = (
    _fp8, _fp4, _dispatch, _recompute, _aware, _optimizer, _buckets, _fsdp, _offload, _graphs, _machine, _kernels,
    _batch, _precision, _adapters,
)  # fmt: skip


def _layout(d: Random, run: RunSpec) -> Fields:
    """A split of the layers that is not the even one."""
    p, n = run.parallel, run.model.num_layers
    if p.pp == 1:
        return {}
    kind = d.choice(("ends", "slots", "string"))
    if kind == "ends":
        first, last = d.choice((None, n // p.pp - 1, n // p.pp)), d.choice((None, n // p.pp + 1, n // p.pp))
        return {
            "parallel.num_layers_in_first_pipeline_stage": first, "parallel.num_layers_in_last_pipeline_stage": last
        }
    if kind == "slots":
        return {"parallel.account_for_embedding_in_pipeline_split": d.random() < 0.5,
                "parallel.account_for_loss_in_pipeline_split": True}  # fmt: skip
    chunks = p.pp * d.choice((1, 2))
    if n < chunks:
        return {}
    text = balanced_layout(n, run.model.mtp_num_layers, chunks, d.choice((0, 1)))
    return {"parallel.pipeline_model_parallel_layout": text, "parallel.virtual_pipeline_model_parallel_size": None}


def wide_run(engine: str, draw: Random, models: tuple[str, ...] = ()) -> RunSpec:
    """One random run. Raises SpecError for what contradicts itself, as most does."""
    run = freeze.built(freeze.drawn(engine, draw))
    presets = models or (tuple(list_presets()) if draw.random() < 0.4 else freeze.MODELS)
    model = resolve_model(draw.choice(presets))
    if model.mtp_num_layers and draw.random() < 0.5:
        model = replace(model, mtp_num_layers=0, mtp_layer=None)
    if draw.random() < 0.2:
        model = replace(model, hidden_dropout=draw.choice((0.0, 0.1, 0.05)), attention_dropout=draw.choice((0.0, 0.1)))
    if draw.random() < 0.3:
        model = replace(model, make_vocab_size_divisible_by=draw.choice((0, 1, 64, 128)))
    if draw.random() < 0.3 and not model.pattern_splits_pipeline:
        kept = draw.randint(1, model.num_layers)
        model = replace(model, layers=model.layers[:kept])
        if model.mtp_layer is not None and not model.hybrid:
            model = replace(model, mtp_layer=model.layers[-1])
    if draw.random() < 0.2:
        kinds = draw.choice(("none", "aux_loss", "seq_aux_loss", "sinkhorn", "aux_loss+seq_aux_loss"))
        layers = tuple(
            replace(x, ffn=replace(x.ffn, router_load_balancing_type=kinds)) if isinstance(x.ffn, MoESpec) else x
            for x in model.layers
        )
        model = replace(model, layers=layers, mtp_layer=model.mtp_layer and layers[-1])
    run = run.with_(model=model)
    if engine not in MEGATRON_ENGINES:
        return run
    given: Fields = {}
    for bundle in draw.sample(BUNDLES, draw.choice((0, 1, 1, 2, 3))):
        given |= bundle(draw)
    if given.get("data_parallel.engine") == "megatron_fsdp" or run.data_parallel.fsdp:
        given = {"data_parallel.use_distributed_optimizer": True, **given}
    if draw.random() < 0.4:
        given |= _layout(draw, run)
    groups: dict[str, Fields] = {}
    for name, value in given.items():
        group, _, field = name.partition(".")
        groups.setdefault(group, {})[field] = value
    return run.with_(**{group: replace(getattr(run, group), **values) for group, values in groups.items()})


def wide_runs(
    seed: str, *, models: tuple[str, ...] = (), engines: tuple[str, ...] = MEGATRON_ENGINES
) -> Iterator[RunSpec]:
    """Endless, always the same for a seed."""
    draw = Random(seed)
    while True:
        try:
            yield wide_run(draw.choice(engines), draw, models)
        except SpecError:
            continue


