"""Whatever is emitted of a run reads back as that run, or says by name what it leaves out: random runs of both engines
of Megatron, as Megatron-LM's arguments and as assignments to a container of Megatron Bridge."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from wide_runs import wide_runs

from bridge_memory import ModelSpec, ParallelSpec, RunSpec, SpecError, peaks
from bridge_memory.emit.architecture import architecture
from bridge_memory.emit.bridge import bridge_overrides
from bridge_memory.emit.commands import Emitted
from bridge_memory.emit.megatron_args import megatron_arguments, read_arguments_of
from bridge_memory.outside.communicators import communicators
from bridge_memory.readers.config_container import run_of_container
from bridge_memory.readers.megatron_args import container, run_from_megatron_args
from bridge_memory.releases import Running
from bridge_memory.spec.canonical import canonical
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.spec.run import GROUPS

DRAWN, DEEP = 90, 400
#: What no text of Megatron's says: the machine, the releases, the environment, a distillation's loss, the routing.
BESIDE = {
    f"implementation.{name}"
    for name in ("megatron_core", "transformer_engine", "torch", "gpu_arch", "expandable_segments", "moe_imbalance",
                 "cublas_workspace_bytes", "nvte_deterministic", "moe_hybridep_ranks_per_nvlink_domain",
                 "distillation", "policy_loss")
}  # fmt: skip
#: Format -> what it may leave out, each because its target has no word for it.
MAY_LEAVE = {
    "megatron-args": BESIDE | {
        "batch.packed_sequences",  # of a data set
        "peft.scheme", "peft.dim", "peft.target_modules",  # Megatron-LM has no adapters
        "checkpoint.adopt_optim_states",  # it copies them
        # Fields of its configs without an option in the parser of 0.19.2.
        "optimizer.store_param_remainders", "precision.fp8_dot_product_attention",
        "optimizer.use_layer_wise_distributed_optimizer", "implementation.deallocate_pipeline_outputs",
        "implementation.use_legacy_models", "implementation.cross_entropy_fusion_impl",
        # One argument sets both, or sets another too.
        "optimizer.fp8_recipe", "data_parallel.grad_comm_dtype",
        "data_parallel.use_distributed_optimizer",  # muon with it is the layer-wise one
        "model",
    },
    "bridge": BESIDE | {
        "batch.packed_sequences", "implementation.use_legacy_models",
        "peft.scheme",  # adapters of an unknown rank
        "optimizer.fp8_recipe",  # MixedPrecisionConfig sets that of the model and the optimizer's
        "checkpoint.stream_ckpt_dequant",  # Bridge always streams
        "checkpoint.distrib_optim_fully_reshardable_mem_efficient",  # which Bridge refuses
    },
}  # fmt: skip


@cache
def drawn(seed: str, number: int) -> tuple[RunSpec, ...]:
    return tuple(itertools.islice(wide_runs(seed), number))


def different(one: RunSpec, other: RunSpec) -> set[str]:
    """"group.field" of what has an effect and differs."""
    ours, theirs = canonical(one), canonical(other)
    return {
        f"{group}.{f.name}"
        for group, cls in {"model": ModelSpec, **GROUPS}.items() for f in fields(cls)
        if f.compare and getattr(getattr(ours, group), f.name) != getattr(getattr(theirs, group), f.name)
    }  # fmt: skip


def with_left(read: RunSpec, left: Mapping[str, Any]) -> RunSpec:
    groups: dict[str, dict[str, Any]] = {}
    for name, value in left.items():
        group, dot, field = name.partition(".")
        if dot:
            groups.setdefault(group, {})[field] = value
    return read.with_(**{group: replace(getattr(read, group), **values) for group, values in groups.items()})


def check(how: str, run: RunSpec, emitted: Emitted, read: RunSpec) -> None:
    """``read`` was made without what stands beside the text but the releases, which decide what defaults mean."""
    left = set(emitted.left)
    assert left <= MAY_LEAVE[how], (emitted.left, run)
    releases = {f"implementation.{name}" for name in ("megatron_core", "transformer_engine", "torch", "gpu_arch")}
    assert different(run, read) == left - releases - {"model"}, run
    for name in left - {"model"}:
        assert not (name.startswith("implementation.") and not emitted.note), emitted
    complete = with_left(read, emitted.left)
    assert not different(run, complete)
    assert list(peaks(complete)) == list(peaks(run))


def running(run: RunSpec, left: Mapping[str, Any]) -> dict[str, Any]:
    """The releases that stand beside a text; those that do not are the ones that a reader supposes."""
    names = ("megatron_core", "transformer_engine", "torch")
    return {name: left[key] for name in names if (key := f"implementation.{name}") in left}


def read_arguments_back(run: RunSpec, emitted: Emitted) -> RunSpec:
    read = run_from_megatron_args(
        emitted.commented, world_size=run.parallel.world_size, model=run.model if "model" in emitted.left else None,
        **running(run, emitted.left),
    )  # fmt: skip
    arch = emitted.left.get("implementation.gpu_arch", read.implementation.gpu_arch)
    return replace(read, implementation=replace(read.implementation, gpu_arch=arch))


def megatron_args_reads_back(run: RunSpec) -> bool:
    try:
        emitted = megatron_arguments(run)
    except SpecError as error:
        assert said_otherwise(run), error
        return False
    check("megatron-args", run, emitted, read_arguments_back(run, emitted))
    return True


def said_otherwise(run: RunSpec) -> bool:
    """What is refused: a run of another trainer, and one that is valid only because its sequences are packed."""
    if run.implementation.torch_layers or run.data_parallel.engine == "megatron_deepspeed":
        return True
    if not run.batch.packed_sequences:
        return False
    try:
        run.with_fields(packed_sequences=False)
    except SpecError:
        return True
    return False


# ---- Megatron Bridge ----


class LoRA(SimpleNamespace):
    """Bridge's, as far as it is read."""


def mixed_precision_config(**given: Any) -> SimpleNamespace:
    """``MixedPrecisionConfig`` with its defaults (``megatron/bridge/training/mixed_precision.py`` of 0.6.2)."""
    off = ("fp32", "fp16", "bf16", "first_last_layers_bf16", "fp8_dot_product_attention", "fp8_multi_head_attention",
           "fp8_param_gather", "fp4_param_gather", "reuse_grad_buf_for_mxfp8_param_ag")  # fmt: skip
    unset = ("params_dtype", "pipeline_dtype", "fp8", "fp8_param", "fp4", "fp4_param")
    return SimpleNamespace(**{
        **dict.fromkeys(off, False), **dict.fromkeys(unset), "grad_reduce_in_fp32": True, "fp8_recipe": "tensorwise",
        "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0, **given,
    })  # fmt: skip


def bridges_modules() -> dict[str, ModuleType]:
    """What the assignments import, in the names that they import it by."""
    def module(name: str, **members: Any) -> ModuleType:
        made = ModuleType(name)
        vars(made).update(members)
        return made

    dtypes = {name: f"torch.{name}" for name in ("float32", "float16", "bfloat16", "uint8")}
    kinds = ("auto", "flash", "fused", "unfused", "local")
    backends = SimpleNamespace(**{name: SimpleNamespace(name=name) for name in kinds})
    return {
        "torch": module("torch", **dtypes),
        "megatron.core.transformer.enums": module("enums", AttnBackend=backends),
        "megatron.bridge.peft.lora": module("lora", LoRA=LoRA),
        "megatron.bridge.training.mixed_precision": module("precision", MixedPrecisionConfig=mixed_precision_config),
    }


#: Settings that a recipe may have, none of which may stay.
HOSTILE: dict[str, dict[str, Any]] = {
    "model": {
        "tensor_model_parallel_size": 16, "virtual_pipeline_model_parallel_size": 5, "sequence_parallel": True,
        "num_layers_in_first_pipeline_stage": 3, "pipeline_model_parallel_layout": "Et|tL", "context_parallel_size": 4,
        "account_for_loss_in_pipeline_split": True, "recompute_granularity": "full", "recompute_method": "uniform",
        "recompute_num_layers": 1, "distribute_saved_activations": True, "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te", "cp_comm_type": "a2a", "tp_comm_overlap": True, "fp8": "hybrid",
        "fp8_recipe": "mxfp8", "fp8_param": True, "fp4": "e2m1", "fp4_param": True, "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 4, "num_layers_at_end_in_bf16": 4, "fp32_residual_connection": True,
        "calculate_per_token_loss": True, "deallocate_pipeline_outputs": False, "delay_wgrad_compute": True,
        "cuda_graph_impl": "local", "cuda_graph_scope": ["attn"], "cpu_offloading": True, "fp8_param_gather": True,
        "cpu_offloading_num_layers": 1, "fine_grained_activation_offloading": True, "offload_modules": ["core_attn"],
        "attention_backend": "unfused", "expert_model_parallel_size": 32, "expert_tensor_parallel_size": 4,
        "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep", "moe_enable_deepep": True,
        "moe_permute_fusion": True, "moe_router_fusion": True, "moe_router_dtype": "fp32", "bias_dropout_fusion": False,
        "moe_expert_capacity_factor": 2.0, "moe_pad_expert_input_to_capacity": True, "moe_hybridep_num_sms": 16,
        "moe_router_padding_for_fp8": True, "moe_shared_expert_overlap": True, "moe_grouped_gemm": False,
        "gradient_accumulation_fusion": False, "masked_softmax_fusion": False, "bias_activation_fusion": False,
        "apply_rope_fusion": False, "use_transformer_engine_op_fuser": True, "moe_z_loss_coeff": 0.1,
        "overlap_moe_expert_parallel_comm": True, "microbatch_group_size_per_vp_stage": 7, "seq_length": 256,
        "fp8_dot_product_attention": True, "bf16": False, "fp16": True, "params_dtype": "torch.float32",
        "hidden_dropout": 0.3, "attention_dropout": 0.3, "vocab_size": 17, "should_pad_vocab": False,
        "defer_embedding_wgrad_compute": True, "transformer_impl": "local", "moe_apply_probs_on_input": True,
        "apply_query_key_layer_scaling": True, "deterministic_mode": True, "moe_paged_stash": True,
    },
    "train": {"micro_batch_size": 9, "global_batch_size": 999},
    "dataset": {"seq_length": 128, "skip_getting_attention_mask_from_dataset": False},
    "logger": {"log_params_norm": True},
    "dist": {"use_megatron_fsdp": True},
    "checkpoint": {
        "ckpt_format": "torch_dcp", "dist_ckpt_optim_fully_reshardable": True,
        "distrib_optim_fully_reshardable_mem_efficient": True, "fully_parallel_save": False, "finetune": True,
        "fully_parallel_load": True, "async_save": True, "use_persistent_ckpt_worker": False, "load_optim": False,
        "save_optim": False, "stream_ckpt_dequant": False,
    },
    "ddp": {
        "use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 99,
        "num_distributed_optimizer_instances": 4, "use_megatron_fsdp": True, "grad_reduce_in_fp32": False,
        "data_parallel_sharding_strategy": "no_shard", "fp8_param_gather": True, "fp4_param_gather": True,
        "fsdp_double_buffer": True, "nccl_ub": True, "megatron_fsdp_main_grads_dtype": "torch.float32",
        "megatron_fsdp_grad_comm_dtype": "torch.float32", "reuse_grad_buf_for_mxfp8_param_ag": True,
    },
    "optimizer": {
        "optimizer": "sgd", "use_distributed_optimizer": True, "use_precision_aware_optimizer": True,
        "main_grads_dtype": "torch.bfloat16", "main_params_dtype": "torch.float16", "exp_avg_dtype": "torch.uint8",
        "exp_avg_sq_dtype": "torch.uint8", "store_param_remainders": False, "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.1, "overlap_param_gather": True, "fp8_recipe": "mxfp8", "bf16": False,
        "use_layer_wise_distributed_optimizer": True, "clip_grad": 0.0,
    },
}  # fmt: skip


def recipe(run: RunSpec, *, own: bool) -> Any:
    """A container with the architecture of ``run``, its sizes at least, and hostile settings. ``own``: arguments cannot
    describe it."""
    sizes = {name: value for name, value in architecture(run).items() if value is not None}
    if own:
        sizes |= {"position_embedding_type": "rope", "mtp_num_layers": 0}
    said = SimpleNamespace(seq_length=1, micro_batch_size=1, **sizes)
    made = container(said, Running(run.implementation.megatron_core))
    hostile = {
        name: value for name, value in HOSTILE["model"].items()
        if run.model.has_experts or not name.startswith(("moe_", "expert_"))  # a dense recipe has none of these
    }  # fmt: skip
    if own:
        hostile = {name: hostile[name] for name in hostile.keys() - {"vocab_size", "should_pad_vocab"}}
    model = SimpleNamespace(**{**vars(made.model), **hostile})
    parts = {part: SimpleNamespace(**values) for part, values in HOSTILE.items() if part != "model"}
    overlap = SimpleNamespace(data_parallel_size=None, overlap_grad_reduce=True, bucket_size=77, tp_comm_overlap=True)
    return SimpleNamespace(
        model=model, **parts, comm_overlap=overlap, mixed_precision="fp16_with_fp8_delayed_scaling_mixed",
        peft=LoRA(dim=5, target_modules=["linear_qkv"]),
        rerun_state_machine=SimpleNamespace(check_for_nan_in_loss=True),
        env_vars={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"},
    )  # fmt: skip


def with_model(read: RunSpec, run: RunSpec) -> RunSpec:
    """``read`` of the model of ``run``, without what a reader says of another."""
    return RunSpec(**{f.name: getattr(read, f.name) for f in fields(read)} | {"model": run.model})


def bridge_reads_back(run: RunSpec, monkeypatch: pytest.MonkeyPatch) -> bool:
    try:
        emitted = bridge_overrides(run)
    except SpecError as error:
        assert said_otherwise(run), error
        return False
    own = "are the recipe's" in emitted.note
    config = recipe(run, own=own)
    with monkeypatch.context() as patched:
        for name, module in bridges_modules().items():
            patched.setitem(sys.modules, name, module)
        exec(emitted.commented, {"cfg": config})
    defaults: dict[str, Any] = {"megatron_core": None, "transformer_engine": None, "torch": None}
    released = {**defaults, **running(run, emitted.left)}
    read = run_of_container(
        config, Running(**released), world_size=run.parallel.world_size, bridge=(0, 6),
        gpu_arch=emitted.left.get("implementation.gpu_arch", "hopper"),
    )  # fmt: skip
    if own:  # A recipe's own model, which its provider builds.
        read = with_model(read, run)
    check("bridge", run, emitted, read)
    return True


@pytest.mark.parametrize("how", ["megatron-args", "bridge"])
def test_what_is_emitted_reads_back_as_the_run(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = drawn("read back", DRAWN)
    said = [megatron_args_reads_back(x) if how == "megatron-args" else bridge_reads_back(x, monkeypatch) for x in runs]
    assert sum(said) >= 0.95 * DRAWN


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_whatever_the_run_what_is_emitted_reads_back(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in itertools.islice(wide_runs(f"{os.environ.get('SEED', 'deep')} {part}"), DEEP // 4):
        megatron_args_reads_back(run)
        bridge_reads_back(run, monkeypatch)


def test_without_clipping_no_norm_has_a_communicator() -> None:
    """``MegatronOptimizer.step`` asks for the norm where clip_grad is above 0."""
    run = RunSpec(model="Qwen/Qwen2.5-0.5B", parallel=ParallelSpec(world_size=4)).with_fields(clip_grad=0.0)
    read = read_arguments_of(megatron_arguments(run).text, run)
    clipped = run.with_fields(clip_grad=0.5)
    assert canonical(read).optimizer == canonical(run).optimizer != canonical(clipped).optimizer
    without, with_norm = ({c.name for c in communicators(one, find_gpu("H100"), 0)} for one in (read, clipped))
    assert with_norm - without == {"INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE"}
