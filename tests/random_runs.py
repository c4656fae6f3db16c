"""Random runs: any field of any group, models with every kind of layer. Most of what is asked contradicts itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from spec_groups import groups_of

from bridge_memory.readers import resolve_model
from bridge_memory.spec import RunSpec

MODELS = [
    "meta-llama/Llama-3.2-1B", "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V2-Lite", "openai/gpt-oss-20b",
    "google/gemma-2-2b", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct", "openai-community/gpt2",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "zai-org/GLM-4.5-Air", "bigscience/bloom",
]
SIZES = st.sampled_from([1, 1, 1, 2, 2, 4, 8, 3, 16])


def maybe(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | values


MODULES = st.lists(
    st.sampled_from(["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]), unique=True
).map(tuple)
PARALLEL = {
    "world_size": st.sampled_from([1, 2, 4, 8, 16, 64, 96, 128]),
    "tensor_model_parallel_size": SIZES,
    "pipeline_model_parallel_size": SIZES,
    "virtual_pipeline_model_parallel_size": maybe(st.sampled_from([1, 2, 3, 4])),
    "context_parallel_size": st.sampled_from([1, 1, 2, 4]),
    "expert_model_parallel_size": st.sampled_from([1, 1, 2, 8]),
    "expert_tensor_parallel_size": maybe(st.sampled_from([1, 2])),
    "sequence_parallel": maybe(st.booleans()),
    "num_layers_in_first_pipeline_stage": maybe(st.integers(1, 20)),
    "num_layers_in_last_pipeline_stage": maybe(st.integers(1, 20)),
    "account_for_embedding_in_pipeline_split": st.booleans(),
    "account_for_loss_in_pipeline_split": st.booleans(),
    "microbatch_group_size_per_vp_stage": maybe(st.integers(1, 8)),
}
GROUPS: dict[str, dict[str, st.SearchStrategy]] = {
    "batch": {
        "seq_length": st.sampled_from([128, 1000, 4096, 8192]),
        "micro_batch_size": st.sampled_from([1, 2, 3]),
        "global_batch_size": maybe(st.sampled_from([1, 8, 64, 96, 512])),
        "packed_sequences": st.booleans(),
    },
    "precision": {
        "params_dtype": st.sampled_from(["bf16", "bf16", "fp16", "fp32"]),
        "fp8": maybe(st.sampled_from(["hybrid", "e4m3"])),
        "fp8_recipe": st.sampled_from(["delayed", "tensorwise", "blockwise", "mxfp8"]),
        "fp8_param": st.booleans(),
        "attention_softmax_in_fp32": st.booleans(),
    },
    "optimizer": {
        "optimizer": st.sampled_from(["adam", "sgd", "muon"]),
        "use_distributed_optimizer": st.booleans(),
        "grad_reduce_in_fp32": st.booleans(),
        "overlap_grad_reduce": st.booleans(),
        "use_precision_aware_optimizer": st.booleans(),
        "exp_avg_dtype": st.sampled_from(["fp32", "bf16", "fp8"]),
        "optimizer_cpu_offload": st.booleans(),
        "optimizer_offload_fraction": st.sampled_from([0.0, 0.5, 1.0]),
    },
    "checkpoint": {
        "ckpt_format": st.sampled_from(["torch_dist", "torch_dist", "torch_dcp"]),
        "dist_ckpt_optim_fully_reshardable": st.booleans(),
        "distrib_optim_fully_reshardable_mem_efficient": st.booleans(),
        "ckpt_fully_parallel_save": st.booleans(),
        "ckpt_fully_parallel_load": st.booleans(),
        "async_save": st.booleans(),
        "stream_ckpt_dequant": st.booleans(),
        "load_optim": st.booleans(),
        "save_optim": st.booleans(),
    },
    "lora": {"peft_scheme": st.just("lora"), "peft_dim": st.sampled_from([0, 8, 32])},
    "fp8": {
        "fp8": st.sampled_from(["hybrid", "e4m3"]),
        "fp8_recipe": st.sampled_from(["delayed", "tensorwise", "blockwise", "mxfp8"]),
        "fp8_param": st.booleans(),
        "gpu_arch": st.sampled_from(["hopper", "blackwell"]),
    },
    "fsdp": {
        "engine": st.just("megatron_fsdp"),
        "data_parallel_sharding_strategy": st.sampled_from(["no_shard", "optim", "optim_grads", "optim_grads_params"]),
        "use_distributed_optimizer": st.just(True),
    },
    "full": {
        "recompute_granularity": st.just("full"),
        "recompute_method": st.sampled_from(["uniform", "block"]),
        "recompute_num_layers": st.sampled_from([1, 1, 2, 3]),
    },
    "recompute": {
        "recompute_granularity": maybe(st.sampled_from(["full", "selective"])),
        "recompute_method": maybe(st.sampled_from(["uniform", "block"])),
        "recompute_num_layers": maybe(st.integers(0, 5)),
        "recompute_modules": MODULES,
    },
    "implementation": {
        "transformer_impl": st.sampled_from(["transformer_engine", "local"]),
        "attention_backend": st.sampled_from(["auto", "flash", "fused", "unfused"]),
        "bias_activation_fusion": st.booleans(),
        "bias_dropout_fusion": st.booleans(),
        "masked_softmax_fusion": st.booleans(),
        "gradient_accumulation_fusion": st.booleans(),
        "cross_entropy_loss_fusion": st.booleans(),
        "cross_entropy_fusion_impl": st.sampled_from(["native", "te", "linear"]),
        "moe_token_dispatcher_type": st.sampled_from(["alltoall", "allgather", "flex"]),
        "moe_grouped_gemm": st.booleans(),
        "moe_permute_fusion": st.booleans(),
        "moe_imbalance": st.sampled_from([1.0, 1.5]),
        "moe_shared_expert_overlap": st.booleans(),
    },
}


@dataclass(frozen=True)
class Asked:
    """Somebody's wish, of which hypothesis can say what it is."""

    model: str
    fields: dict[str, Any]

    def run(self) -> RunSpec:
        """Raises SpecError."""
        return RunSpec(model=resolve_model(self.model), **groups_of(**self.fields))


@st.composite
def asked_runs(draw: Callable[[st.SearchStrategy], Any]) -> Asked:
    """Wishes, of which about a third can be estimated."""
    name = draw(st.sampled_from(MODELS))
    wide = draw(st.integers(0, 3)) == 0
    fields = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"}
    fields.add(draw(st.sampled_from(sorted(PARALLEL))))
    if resolve_model(name).has_experts:
        fields.add("expert_model_parallel_size")
    given = {field: draw(PARALLEL[field]) for field in sorted(PARALLEL if wide else fields)}
    if not wide:  # A world that divides, where nobody asks for another.
        if given["pipeline_model_parallel_size"] == 1:
            del given["virtual_pipeline_model_parallel_size"]
        world = given.get("world_size", 1)
        for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            world *= given.get(size, 1)
        given["world_size"] = world * given.get("expert_model_parallel_size", 1)
    # Most combinations of everything contradict themselves: a few groups at a time, of these a field or all.
    for group in sorted(draw(st.sets(st.sampled_from(sorted(GROUPS)), max_size=2))):
        options = GROUPS[group]
        names = [draw(st.sampled_from(sorted(options)))] if draw(st.booleans()) else options
        given |= {name: draw(options[name]) for name in names}
    return Asked(name, given)
