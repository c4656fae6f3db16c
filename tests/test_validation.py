"""What cannot run is refused, in one line that names the field and a fix; what ran is not."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from bridge_memory.estimation import estimate, explain, peaks
from bridge_memory.readers import list_presets, resolve_model
from bridge_memory.releases import release_in
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    ParallelSpec,
    RunSpec,
    SpecError,
)
from bridge_memory.spec.run import GROUPS

ATTENTION = AttentionSpec(num_attention_heads=32, num_query_groups=8, kv_channels=128)
MLA = MLASpec(32, 1536, 512, 128, 64, 128)
MAMBA = MambaSpec(num_heads=64, head_dim=64, state_dim=128, num_groups=8)
DELTA = GatedDeltaNetSpec(16, 32, 128, 128)
DENSE = MLPSpec(14336, gated=True)
MOE = MoESpec(num_experts=64, topk=8, moe_ffn_hidden_size=1408, shared_expert_intermediate_size=2816)


def model(mixer: object = ATTENTION, ffn: object = DENSE, num_layers: int = 32, **more: object) -> ModelSpec:
    layers = (LayerSpec(mixer, ffn),) * num_layers  # type: ignore[arg-type]
    return ModelSpec(
        name="m", model_type="llama", hidden_size=4096, vocab_size=128256, layers=layers, **more  # type: ignore[arg-type]
    )  # fmt: skip


MODELS = {
    "dense": model(),
    "moe": model(ffn=MOE),
    "mla": model(MLA, MOE),
    "mamba": model(MAMBA, None, hybrid=True),
    "delta": model(DELTA, MOE),
}


def run(of: str | ModelSpec = "dense", **fields: object) -> RunSpec:
    """A run with fields named as in their specs, whichever spec has them (recompute_x for RecomputeSpec's x)."""
    groups: dict[str, dict[str, object]] = {}
    for name, value in fields.items():
        bare = name.removeprefix("recompute_")
        for group, cls in GROUPS.items():
            known = cls.__dataclass_fields__
            if (group == "recompute") == (bare != name or name == "distribute_saved_activations") and bare in known:
                groups.setdefault(group, {})[bare] = value
                break
        else:
            raise KeyError(name)
    built = {group: GROUPS[group](**values) for group, values in groups.items()}
    return RunSpec(model=MODELS[of] if isinstance(of, str) else of, **built)  # type: ignore[arg-type]


TP2 = {"world_size": 2, "tensor_model_parallel_size": 2}
PP2 = {"world_size": 2, "pipeline_model_parallel_size": 2}
CP2 = {"world_size": 2, "context_parallel_size": 2}
EP2 = {"world_size": 2, "expert_model_parallel_size": 2}
VPP = {"world_size": 4, "pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective"}
OVERLAP = {**EP2, "overlap_moe_expert_parallel_comm": True}

#: (model, fields, what the one line says). The words after the semicolon are the fix.
REFUSED = [
    # Parallel sizes
    ("dense", {"world_size": 12, "tensor_model_parallel_size": 8}, r"world_size \(12\).*tensor.*; use a multiple of 8"),
    ("dense", {"world_size": 0}, r"world_size \(0\) is below 1"),
    ("dense", {"world_size": True}, r"world_size \(True\) is not a positive integer"),
    ("dense", {"tensor_model_parallel_size": 1.0}, r"tensor_model_parallel_size \(1.0\)"),
    ("dense", {"world_size": 2**41}, "world_size .* absurdly large"),
    ("dense", {"world_size": 2**24}, "world_size .* below 2\\*\\*24"),
    ("dense", {"world_size": 64, "pipeline_model_parallel_size": 64},
     r"^pipeline_model_parallel_size \(64\) is larger than num_layers \(32\); use at most 32"),
    ("dense", {"pipeline_model_parallel_size": 10**9}, r"^pipeline_model_parallel_size \(1000000000\) .*num_layers"),
    ("dense", {**PP2, "virtual_pipeline_model_parallel_size": 10**9},
     r"^virtual_pipeline_model_parallel_size \(1000000000\) .*; use a virtual size of at most 16"),
    ("dense", {"world_size": 8, "pipeline_model_parallel_size": 8, "pipeline_model_parallel_layout": "Et*16|t*16L"},
     r"^pipeline_model_parallel_size \(8\) is larger than the number of stages \(2\)"),
    ("moe", {"world_size": 8, "expert_model_parallel_size": 16},
     r"world_size \(8\).*expert_model_parallel_size \(16\).*; use a multiple of 16 GPUs"),
    ("moe", {"world_size": 4, "tensor_model_parallel_size": 4, "expert_model_parallel_size": 4},
     r"expert_tensor_parallel_size \(4\) x expert_model_parallel_size \(4\)"),
    ("dense", EP2, r"expert_model_parallel_size \(2\) needs a model with experts; set it to 1"),
    ("moe", {"world_size": 3, "expert_model_parallel_size": 3}, r"num_moe_experts \(64\).*; use 4 or 2 or 1"),
    ("moe", {"moe_router_fusion": True, "moe_router_dtype": "fp64"}, "moe_router_fusion .* fp64.*; use fp32"),
    ("dense", {"sequence_parallel": True}, "sequence_parallel .*tensor_model_parallel_size.*; drop it"),
    ("dense", {"sequence_parallel": "no"}, "sequence_parallel .* give True, False or None"),
    ("dense", {"virtual_pipeline_model_parallel_size": 2}, "virtual_pipeline.* needs pipeline"),
    ("dense", {"world_size": 8, "num_distributed_optimizer_instances": 3}, "num_distributed_optimizer_instances"),
    ("dense", {"pipeline_model_parallel_layout": [["embedding"]]}, "pipeline_model_parallel_layout .*layout_string"),
    ("dense", {"world_size": 4, "pipeline_model_parallel_size": 4, "megatron_core": (0, 12),
               "pipeline_model_parallel_layout": "Et*8|t*8|t*8|t*8L"}, "megatron-core 0.13 or later"),
    ("dense", {"world_size": 4, "pipeline_model_parallel_size": 4, "megatron_core": (0, 15),
               "pipeline_model_parallel_layout": "Et*8|t*8|t*16m|L"}, "put it into the last stage"),
    # Attention of older releases
    (resolve_model("Qwen/Qwen3-Next-80B-A3B-Instruct"),
     {"world_size": 4, "tensor_model_parallel_size": 4, "megatron_core": (0, 16)},
     r"tensor_model_parallel_size \(4\) is more than num_query_groups \(2\), .* 0.17 or later .*; use 2 or 1"),
    (resolve_model("google/gemma-2-2b"), {"transformer_impl": "local", "megatron_core": (0, 14)},
     r"transformer_impl \(local\) takes the sliding windows of this model from megatron-core 0.15 on"),
    (resolve_model("moonshotai/Kimi-K2-Instruct"), {"micro_batch_size": 2, "megatron_core": (0, 13)},
     r"apply_rope_fusion \(True\) with multi-latent attention and micro_batch_size \(2\) needs megatron-core 0.14"),
    (resolve_model("deepseek-ai/DeepSeek-V3"), {"packed_sequences": True, "megatron_core": (0, 15)},
     r"packed_sequences \(True\) with mtp_num_layers \(1\) needs megatron-core 0.16 or later, not 0.15"),
    (resolve_model("Qwen/Qwen3-Next-80B-A3B-Instruct"), {"packed_sequences": True, "megatron_core": (0, 17)},
     r"packed_sequences \(True\) with gated delta nets needs megatron-core 0.18 or later, not 0.17"),
    ("mamba", {**PP2, "num_layers_in_last_pipeline_stage": 8, "megatron_core": (0, 15)}, "ignored for hybrid"),
    # The model over ranks; sizes that no number of GPUs makes right are blamed before the number of GPUs
    ("dense", {"world_size": 8, "tensor_model_parallel_size": 3}, r"^num_attention_heads .*_size \(3\); use 4 or 2"),
    ("moe", {"world_size": 8, "expert_model_parallel_size": 65}, r"^num_moe_experts \(64\) .*; use 64 or 32"),
    ("dense", {"world_size": 8, "context_parallel_size": 4096}, r"^context_parallel_size \(4096\) .*; use .* 2048"),
    ("dense", {"world_size": 64, "tensor_model_parallel_size": 64}, r"num_attention_heads \(32\).*; use 32 or 16 or 8"),
    ("dense", {"world_size": 32, "tensor_model_parallel_size": 32, "megatron_core": (0, 15)},
     r"num_query_groups \(8\).*0\.15; use 8 or 4 or 2, or megatron-core 0\.16"),
    (model(ffn=MLPSpec(14335, gated=True)), TP2, r"ffn_hidden_size \(14335\)"),
    (model(ffn=replace(MOE, moe_ffn_hidden_size=1407)), TP2, r"moe_ffn_hidden_size \(1407\).*expert_tensor"),
    (replace(model(make_vocab_size_divisible_by=0), vocab_size=50257), TP2, r"vocab_size \(not padded\) \(50257\)"),
    ("moe", {**TP2, "sequence_parallel": False}, "sequence_parallel .*experts; set sequence_parallel to True"),
    (model(ffn=replace(MOE, add_bias=True)), TP2, "; set expert_tensor_parallel_size to 1"),
    (model(ffn=replace(MOE, add_bias=True)), {"megatron_core": (0, 14)}, "use 0.15 or later"),
    ("delta", {**CP2, "megatron_core": (0, 17)}, r"context_parallel_size \(2\).*gated delta net"),
    ("mamba", {"world_size": 128, "context_parallel_size": 128, "seq_length": 65536}, r"mamba_num_heads \(64\)"),
    ("dense", {**CP2, "attention_backend": "unfused"}, r"attention_backend \(unfused\).*; use flash, fused or auto"),
    ("dense", {"world_size": 16, "context_parallel_size": 16, "cp_comm_type": "a2a"}, "cp_comm_type a2a"),
    ("dense", {"cp_comm_type": "allgather"}, r"cp_comm_type \('allgather'\) .*; use one of p2p, a2a, all_gather"),
    ("dense", {**CP2, "transformer_impl": "local"}, "context_parallel_size .* local; set transformer_impl to transf"),
    ("mla", {**CP2, "transformer_impl": "local"}, "context_parallel_size .* local; set transformer_impl to transf"),
    # Batch and schedule
    ("dense", {**CP2, "seq_length": 4098}, r"seq_length \(4098\).*; use a multiple of 4, such as 4100"),
    ("dense", {"world_size": 7, "context_parallel_size": 7}, r"seq_length .*, or context_parallel_size 8 or 4 or 2"),
    ("dense", {"seq_length": 2**28}, "seq_length .* absurdly large"),
    ("dense", {"micro_batch_size": 10**9}, "micro_batch_size .* absurdly large"),
    ("dense", {"global_batch_size": 10**12}, "global_batch_size .* absurdly large"),
    ("dense", {**VPP, "global_batch_size": 8, "microbatch_group_size_per_vp_stage": 9},
     r"^microbatch_group_size_per_vp_stage \(9\) is larger than the number of microbatches \(8 .*; use 4 to 8"),
    ("dense", {**TP2, "seq_length": 4097}, r"seq_length \(4097\).*sequence_parallel"),
    ("dense", {"world_size": 8, "global_batch_size": 100}, r"global_batch_size \(100\).*; use .* such as 104"),
    ("dense", {**VPP, "global_batch_size": 2}, r"microbatches \(2 .*; set global_batch_size to 4 or more"),
    ("dense", {**VPP, "global_batch_size": 6}, "last group of 2 .*; set global_batch_size to 8"),
    ("dense", {**VPP, "microbatch_group_size_per_vp_stage": 2}, r"microbatch_group_size_per_vp_stage \(2\) is smaller"),
    ("dense", {"world_size": 2, "pipeline_model_parallel_size": 2, "global_batch_size": 1,
               "pipeline_model_parallel_layout": "Et*8|t*8|t*8|t*8L"}, "set global_batch_size to 2 or more"),
    # Precision and optimizer
    ("dense", {"params_dtype": "float16"}, r"params_dtype \('float16'\) is unknown; use one of bf16"),
    ("dense", {"params_dtype": "fp16", "cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te",
               "transformer_engine": (2, 19)}, r"^cross_entropy_fusion_impl \(te\) .* Engine 2.19 .*native"),
    ("dense", {"fp8": "yes"}, r"fp8 \('yes'\)"),
    ("dense", {"fp8": "hybrid", "fp8_recipe": "custom"}, "fp8_recipe"),
    ("dense", {"fp8_param": True}, "fp8_param .* needs fp8"),
    ("dense", {"fp8": "hybrid", "seq_length": 4100}, "leaves 4100 tokens .* multiple of 8; use .* 4104"),
    ("dense", {"fp8": "e4m3", "fp8_recipe": "mxfp8", "seq_length": 4112}, "multiple of 32; use .* 4128"),
    ("dense", {"fp8": "e4m3", "fp8_recipe": "blockwise", "seq_length": 512, "world_size": 8,
               "tensor_model_parallel_size": 8}, "leaves 64 tokens .* multiple of 128; use .* 1024"),
    ("dense", {"fp32_residual_connection": True}, r"fp32_residual_connection \(True\) needs params_dtype fp32"),
    (model(position_embedding_type="learned_absolute", max_position_embeddings=1024), {}, r"seq_length \(4096\) is"),
    ("dense", {"fp8": "hybrid", "num_layers_at_end_in_bf16": 1}, "fp8_recipe delayed"),
    ("dense", {"fp8": "hybrid", "transformer_impl": "local"}, r"^fp8 \(hybrid\) does nothing .*; set transformer_impl"),
    ("dense", {"optimizer": "lamb"}, r"optimizer \('lamb'\) is unknown; use one of adam, sgd, muon"),
    ("dense", {"optimizer": "lion"}, r"optimizer \(lion\) is not one of megatron-core's, which engine megatron_ddp"),
    ("dense", {"use_precision_aware_optimizer": True, "use_distributed_optimizer": False}, "use_distributed_optimizer"),
    ("dense", {"use_precision_aware_optimizer": True, "optimizer": "sgd"}, "needs optimizer adam"),
    ("dense", {"engine": "megatron_deepspeed", "fp4": "e2m1", "fp8_recipe": "delayed"}, "fp4 .*drop it"),
    ("dense", {"engine": "megatron_ddp", "transformer_impl": "torchtitan"}, "runs megatron-core's layers"),
    ("dense", {"engine": "megatron_deepspeed", "transformer_impl": "torchtune"}, "runs megatron-core's layers"),
    ("dense", {"exp_avg_dtype": "bf16"}, "exp_avg_dtype .*; set that to True"),
    ("dense", {"optimizer": "muon", "megatron_core": (0, 16)}, "use_distributed_optimizer .*muon; set it to False"),
    ("dense", {"optimizer_offload_fraction": 1.5}, r"optimizer_offload_fraction \(1.5\) is not in \[0, 1\]"),
    ("dense", {"grad_reduce_in_fp32": "false"}, "grad_reduce_in_fp32 .* give True or False"),
    ("dense", {"overlap_param_gather": True, "use_distributed_optimizer": False}, "overlap_param_gather"),
    # Recomputation
    ("dense", {"recompute_granularity": "some"}, r"recompute_granularity \('some'\) is unknown; use one of full"),
    ("dense", {"recompute_granularity": "full"}, "recompute_method; set it to uniform or block"),
    ("dense", {"recompute_granularity": "full", "recompute_method": "block"}, "recompute_num_layers; set it to 1"),
    ("dense", {**FULL, "recompute_num_layers": 0}, r"recompute_num_layers \(0\) is below 1"),
    ("dense", {**FULL, "recompute_num_layers": 33}, r"recompute_num_layers \(33\) is larger than num_layers \(32\)"),
    ("dense", {**SELECTIVE, "recompute_num_layers": 1}, r"recompute_num_layers \(1\) does not go"),
    ("dense", {**SELECTIVE, "recompute_method": "block"}, "recompute_method .*selective"),
    ("dense", {**SELECTIVE, "recompute_modules": ("attn",)}, r"recompute_modules \('attn'\) is unknown"),
    ("dense", {**SELECTIVE, "recompute_modules": ["mlp"]}, "recompute_modules .* a tuple of names"),
    ("moe", {**SELECTIVE, "recompute_modules": ("mla_up_proj",)}, "multi-latent attention"),
    (model(ffn=replace(DENSE, add_bias=True)), {**SELECTIVE, "recompute_modules": ("mlp",)}, r"\(mlp\) .*add_bias"),
    ("moe", {**SELECTIVE, "recompute_modules": ("moe_act",), "moe_grouped_gemm": False}, "moe_grouped_gemm"),
    ("dense", {**SELECTIVE, "recompute_modules": ("moe_act",)}, "model with experts"),
    ("dense", {"attention_backend": "local"}, "no attention"),
    ("moe", {"moe_token_dispatcher_type": "alltoall_seq"}, "alltoall_seq"),
    ("moe", {**SELECTIVE, "recompute_modules": ("shared_experts",), "megatron_core": (0, 13)}, "0.14 or later"),
    ("moe", {**SELECTIVE, "recompute_modules": ("shared_experts",), "moe_shared_expert_overlap": True},
     "moe_shared_expert_overlap"),
    ("moe", {**SELECTIVE, "recompute_modules": ("layernorm",), "fp8": "e4m3"}, "fp8_recipe delayed"),
    ("dense", {**TP2, **FULL, "distribute_saved_activations": True}, "distribute_saved.*sequence_parallel"),
    # Implementation
    ("dense", {"attention_backend": "xformers"}, r"attention_backend \('xformers'\)"),
    ("dense", {"transformer_impl": "te"}, r"transformer_impl \('te'\)"),
    ("dense", {"megatron_core": "0.16"}, "megatron_core"),
    ("dense", {"defer_embedding_wgrad_compute": True}, "defer_embedding_wgrad_compute .*pipeline"),
    ("dense", {**PP2, "cpu_offloading_num_layers": 4}, "cpu_offloading_num_layers .*pipeline"),
    ("dense", {**FULL, "cpu_offloading_num_layers": 4}, "cpu_offloading_num_layers .*recompute"),
    ("dense", {"cpu_offloading_num_layers": 32}, r"below num_layers \(32\)"),
    ("dense", {"offload_modules": ("attn_proj",)}, "add core_attn"),
    ("moe", {"moe_token_dispatcher_type": "nccl"}, "moe_token_dispatcher_type"),
    ("moe", {"moe_token_dispatcher_type": "flex"}, "moe_token_dispatcher_type .*; use alltoall"),
    ("moe", {"moe_token_dispatcher_type": "allgather", "moe_shared_expert_overlap": True}, "moe_shared_expert_overlap"),
    ("moe", {"moe_pad_expert_input_to_capacity": True}, "moe_expert_capacity_factor; set it"),
    ("moe", {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 8.001},
     r"4097 tokens, more than the 4096 .* moe_router_topk \(8\), or set moe_permute_fusion"),
    ("moe", {"moe_expert_capacity_factor": -1.0}, r"moe_expert_capacity_factor \(-1.0\)"),
    (model(ffn=replace(MOE, router_load_balancing_type="sinkhorn")), {"moe_expert_capacity_factor": 1.0}, "sinkhorn"),
    ("moe", {"moe_imbalance": 0.5}, r"moe_imbalance \(0.5\)"),
    ("moe", {"moe_imbalance": float("nan")}, "moe_imbalance"),
    ("moe", {**OVERLAP, "megatron_core": (0, 13)}, "0.14 or later"),
    ("moe", {"overlap_moe_expert_parallel_comm": True}, "expert_model_parallel_size of 2 or more"),
    ("moe", {**OVERLAP, **FULL}, "use selective"),
    ("moe", {**OVERLAP, **SELECTIVE, "recompute_modules": ("moe",)}, "moe in recompute_modules"),
    ("moe", {**OVERLAP, "world_size": 4, "pipeline_model_parallel_size": 2}, "needs virtual_pipeline"),
    ("moe", {"delay_wgrad_compute": True}, "delay_wgrad_compute"),
]  # fmt: skip


@pytest.mark.parametrize(("of", "fields", "said"), REFUSED)
def test_what_megatron_core_refuses_is_refused_in_one_line(of, fields, said):
    with pytest.raises(SpecError, match=said) as error:
        run(of, **fields)
    text = str(error.value)
    assert "\n" not in text
    assert len(text) < 400
    assert "; " in text, "no fix"


class Broken:
    def __repr__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "value", [10**400, -(10**5000), Broken(), float("inf"), float("nan"), "a\nb", {"a": 1}],
    ids=["huge", "huge and negative", "broken", "inf", "nan", "lines", "dict"],
)
@pytest.mark.parametrize("field", ["micro_batch_size", "sequence_parallel", "hidden_dropout", "moe_imbalance"])
def test_whatever_is_given_is_refused_in_one_line(field, value):
    with pytest.raises(SpecError, match=f"^{field} ") as error:
        RunSpec(model=MODELS["dense"]).with_fields(**{field: value})
    assert "\n" not in str(error.value) and len(str(error.value)) < 200


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden_size": 0}, r"hidden_size \(0\)"),
        ({"hidden_size": 4096.0}, r"hidden_size \(4096.0\) is not an integer"),
        ({"vocab_size": -1}, r"vocab_size \(-1\)"),
        ({"layers": ()}, r"num_layers \(0\)"),
        ({"hidden_dropout": 1.0}, r"hidden_dropout \(1.0\) is not in \[0, 1\)"),
        ({"attention_dropout": -0.1}, "attention_dropout"),
        ({"mtp_num_layers": 1}, "mtp_num_layers"),
        ({"layers": (LayerSpec(replace(ATTENTION, num_query_groups=7), DENSE),)}, r"num_attention_heads \(32\)"),
        ({"layers": (LayerSpec(ATTENTION, replace(MOE, topk=65)),)}, r"moe_router_topk \(65\)"),
        ({"layers": (LayerSpec(ATTENTION, replace(MOE, router_enable_expert_bias=True)),)}, "sigmoid"),
        ({"layers": (LayerSpec(replace(MAMBA, num_groups=7), None),)}, r"num_heads \(64\)"),
        ({"layers": (LayerSpec(ATTENTION, MLPSpec(2**50, gated=True)),)}, "ffn_hidden_size .* absurdly large"),
        ({"layers": None}, r"layers \(None\)"),
        ({"layers": ("dense",)}, r"layers \(\('dense',\)\)"),
        ({"mtp_layer": "dense", "mtp_num_layers": 1}, r"mtp_layer \('dense'\)"),
        ({"name": ["a"]}, r"name \(\['a'\]\)"),
        ({"rotary_dim": "64"}, r"rotary_dim \('64'\)"),
        ({"output_bias": [1]}, r"output_bias \(\[1\]\) is not True or False"),
        ({"hybrid": 1}, r"hybrid \(1\) is not True or False"),
        ({"normalization": None}, r"normalization \(None\) is not a string"),
        ({"layers": (LayerSpec(ATTENTION, replace(MOE, router_num_groups=7, router_group_topk=4)),)}, "num_groups .7."),
        ({"layers": (LayerSpec(ATTENTION, replace(MOE, router_num_groups=4, router_group_topk=5)),)}, "group_topk .5."),
        ({"layers": (LayerSpec(ATTENTION, replace(MOE, router_num_groups=64, router_group_topk=2)),)}, "router_topk"),
    ],
)
def test_a_broken_model_is_refused_by_field(changed, said):
    with pytest.raises(SpecError, match=said) as error:
        RunSpec(model=replace(MODELS["dense"], **changed))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("mixer", "ffn", "said"),
    [
        ("attention", DENSE, r"mixer of a layer \('attention'\)"),
        ([1], DENSE, r"mixer of a layer \(\[1\]\)"),
        (ATTENTION, ATTENTION, "ffn of a layer"),
        (replace(ATTENTION, add_qkv_bias=[1]), None, r"add_qkv_bias \(\[1\]\) is not True or False"),
        (replace(ATTENTION, window_size=[128]), None, r"window_size \(\[128\]\) is not an integer or None"),
        (ATTENTION, replace(DENSE, gated=None), r"gated \(None\) is not True or False"),
        (ATTENTION, replace(DENSE, activation=[]), r"activation \(\[\]\) is not a string"),
        (ATTENTION, replace(MOE, router_num_groups="8", router_group_topk=4), r"router_num_groups \('8'\)"),
    ],
)
def test_a_layer_of_wrong_types_is_refused_when_it_is_built(mixer, ffn, said):
    with pytest.raises(SpecError, match=said) as error:
        LayerSpec(mixer, ffn)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("asked", [estimate, peaks, lambda given: explain(given, 0)])
@pytest.mark.parametrize("given", [None, "meta-llama/Llama-3.1-8B"])
def test_what_is_no_run_is_refused_in_one_line(asked, given):
    with pytest.raises(SpecError, match=r"^run \(.*\) is not a RunSpec; give RunSpec\(.*\)$"):
        asked(given)


@pytest.mark.parametrize("name", [name if isinstance(name, str) else name[0] for name in list_presets()])
def test_every_preset_runs_on_one_gpu_and_under_tensor_parallelism(name):
    preset = resolve_model(name)
    learned = preset.position_embedding_type == "learned_absolute" and preset.max_position_embeddings
    batch = BatchSpec(seq_length=min(4096, preset.max_position_embeddings) if learned else 4096)
    RunSpec(model=preset, batch=batch)
    etp = 1 if any(isinstance(x.ffn, MoESpec) for x in preset.layers) else None
    heads = {x.mixer.num_attention_heads for x in preset.layers if isinstance(x.mixer, AttentionSpec)}
    groups = {x.mixer.num_query_groups for x in preset.layers if isinstance(x.mixer, AttentionSpec)}
    if all(n % 2 == 0 for n in heads) and groups != {1}:
        RunSpec(
            model=preset, batch=batch,
            parallel=ParallelSpec(world_size=2, tensor_model_parallel_size=2, expert_tensor_parallel_size=etp),
        )


def test_runs_that_are_easy_to_refuse_by_mistake_pass():
    """Each was run somewhere: more TP ranks than query groups (0.16), a last group of microbatches that is not whole,
    expert parallelism wider than data parallelism, SGD without the distributed optimizer.
    """
    run("dense", world_size=32, tensor_model_parallel_size=32)
    run("dense", **VPP, global_batch_size=15, microbatch_group_size_per_vp_stage=5)
    run("dense", **VPP, global_batch_size=14, microbatch_group_size_per_vp_stage=5)
    run(
        "moe", world_size=16, tensor_model_parallel_size=4, pipeline_model_parallel_size=2,
        expert_model_parallel_size=8, expert_tensor_parallel_size=1,
    )  # fmt: skip
    run("dense", optimizer="sgd", use_distributed_optimizer=False, sgd_momentum=0.0)
    run("mla", **SELECTIVE, recompute_modules=("mla_up_proj", "moe_act", "layernorm"))
    run("moe", **OVERLAP, recompute_granularity="selective")
    run("dense", **CP2, attention_backend="fused")
    run("dense", world_size=34, pipeline_model_parallel_size=34, account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True)  # fmt: skip
    run("dense", world_size=4, pipeline_model_parallel_size=4, pipeline_model_parallel_layout="E|t*16|t*16|L")
    # Block recomputation of more layers than there are recomputes them all; tokens of fp8 may be of fp32 weights.
    run("dense", recompute_granularity="full", recompute_method="block", recompute_num_layers=33)
    run("dense", params_dtype="fp32", fp8="hybrid")
    # Rows are counted over all sequences; without sequence parallelism nothing is gathered in fp8.
    run("dense", fp8="e4m3", fp8_recipe="mxfp8", seq_length=4112, micro_batch_size=2)
    tp8 = {"world_size": 8, "tensor_model_parallel_size": 8, "sequence_parallel": False}
    run("dense", fp8="e4m3", fp8_recipe="blockwise", seq_length=512, **tp8)
    run("dense", fp32_residual_connection=True, transformer_impl="local")
    run(model(position_embedding_type="learned_absolute"), seq_length=8192)


def test_the_multiples_that_refusals_name_work():
    """World sizes, sequence lengths and batch sizes: setting what the message says leads to a run."""
    draw = random.Random(6)
    followed = 0
    for _ in range(3000):
        fields: dict[str, object] = {
            "world_size": draw.randrange(1, 65),
            "tensor_model_parallel_size": draw.choice([1, 2, 4, 8]),
            "pipeline_model_parallel_size": draw.choice([1, 2, 4]),
            "context_parallel_size": draw.choice([1, 2, 4]),
            "expert_model_parallel_size": draw.choice([1, 2, 4, 8]),
            "seq_length": draw.randrange(8, 300),
            "micro_batch_size": draw.choice([1, 2, 3]),
            "global_batch_size": draw.choice([None, draw.randrange(1, 500)]),
        }
        if fields["pipeline_model_parallel_size"] != 1 and draw.random() < 0.5:
            fields["virtual_pipeline_model_parallel_size"] = 2
        for _ in range(12):
            try:
                run("moe", **fields)
                break
            except SpecError as error:
                followed += 1
                text = str(error)
                batch = re.search(r"set global_batch_size to (\d+)", text)
                multiple = re.search(r"such as (\d+)", text)
                if batch:
                    fields["global_batch_size"] = int(batch.group(1))
                else:
                    assert multiple, text
                    fields[text.split(" ")[0]] = int(multiple.group(1))
        else:
            pytest.fail(f"still refused: {fields}")
    assert followed > 2000


def test_what_transformer_config_refuses_is_refused():
    """Random sizes and options, through megatron-core's own TransformerConfig.__post_init__."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from megatron.core import __version__
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    here = release_in(__version__)
    draw = random.Random(9)
    refused = accepted = 0
    for _ in range(2500):
        moe, mla = draw.random() < 0.6, draw.random() < 0.3
        heads, groups = draw.choice([(32, 8), (32, 4), (24, 6), (12, 12), (12, 3)])
        mixer = replace(MLA, num_attention_heads=heads) if mla else replace(
            ATTENTION, num_attention_heads=heads, num_query_groups=groups
        )  # fmt: skip
        expert = replace(
            MOE, shared_expert_intermediate_size=draw.choice([0, 2816]),
            router_load_balancing_type=draw.choice(["aux_loss", "aux_loss", "sinkhorn"]),
        )  # fmt: skip
        mtp = draw.choice([0, 0, 0, 1, 2])
        spec = model(
            mixer, expert if moe else DENSE, mtp_num_layers=mtp,
            mtp_layer=LayerSpec(mixer, expert if moe else DENSE) if mtp else None,  # type: ignore[arg-type]
        )  # fmt: skip
        tp, pp, ep = draw.choice([1, 1, 2, 3, 4, 8]), draw.choice([1, 1, 2, 4]), draw.choice([1, 1, 1, 2, 4])
        vpp = draw.choice([None, 2]) if pp > 1 else None
        sp = draw.choice([None, None, True, False])
        kind = draw.choice([None, "full", "selective", "selective", "other"])
        method = draw.choice([None, None, "uniform", "block", "both"])
        n = draw.choice([None, None, 1])
        modules = tuple(
            draw.sample(["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "no"], 2)
        )
        dispatcher = draw.choice(["alltoall", "alltoall", "allgather", "flex"])
        grouped, overlap, shared_overlap, pad = (draw.random() < x for x in (0.8, 0.15, 0.2, 0.2))
        capacity = draw.choice([None, None, 1.0])
        distribute, offload = draw.random() < 0.1, draw.choice([0, 0, 0, 0, 2])
        parallel = {
            "tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": vpp, "expert_model_parallel_size": ep,
        }  # fmt: skip
        implementation = {
            "moe_token_dispatcher_type": dispatcher, "moe_grouped_gemm": grouped,
            "overlap_moe_expert_parallel_comm": overlap, "moe_shared_expert_overlap": shared_overlap,
            "moe_pad_expert_input_to_capacity": pad, "moe_expert_capacity_factor": capacity,
        }  # fmt: skip
        recompute = {
            "recompute_granularity": kind, "recompute_method": method, "recompute_num_layers": n,
            "recompute_modules": modules, "distribute_saved_activations": distribute,
        }  # fmt: skip
        theirs = {
            **parallel, **implementation, **recompute, "recompute_modules": list(modules), "num_layers": 32,
            "hidden_size": 4096, "num_attention_heads": heads, "ffn_hidden_size": 14336, "add_bias_linear": False,
            "gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "bf16": True,
            "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16, "moe_router_topk": 8,
            "sequence_parallel": tp > 1 if sp is None else sp, "mtp_num_layers": mtp or None,
            "cpu_offloading": offload > 0, "cpu_offloading_num_layers": offload,
            "moe_flex_dispatcher_backend": "deepep", "apply_rope_fusion": False,
        }  # fmt: skip
        if not mla:
            theirs["num_query_groups"] = groups
        if moe:
            theirs |= {
                "num_moe_experts": 64, "moe_ffn_hidden_size": 1408,
                "moe_shared_expert_intermediate_size": expert.shared_expert_intermediate_size or None,
                "moe_router_load_balancing_type": expert.router_load_balancing_type,
            }  # fmt: skip
        try:
            (MLATransformerConfig if mla else TransformerConfig)(**theirs)
        except (ValueError, AssertionError):
            refused += 1
            if not moe and (pad or overlap):
                continue  # options of the experts say nothing here without experts
            with pytest.raises(SpecError):
                run(
                    spec, world_size=tp * pp * ep, sequence_parallel=sp, seq_length=4800, megatron_core=here,
                    cpu_offloading_num_layers=offload, **parallel, **implementation, **recompute,
                )  # fmt: skip
        else:
            accepted += 1
    assert refused > 500
    assert accepted > 100


@pytest.mark.parametrize(
    ("graphs", "again", "fits"),
    [
        (("attn",), {}, True), (("attn", "moe_router", "moe_preprocess"), {}, True), ((), {}, True),
        (("moe",), {}, False), (("moe", "moe_router"), {"moe_pad_expert_input_to_capacity": True}, False),
        (("moe",), {"moe_pad_expert_input_to_capacity": True}, True), (("moe_preprocess",), {}, False),
        (("attn",), {"recompute_modules": ("moe",)}, True), (("moe_router",), {"recompute_modules": ("moe",)}, False),
        (("attn",), {"recompute_method": "uniform", "recompute_num_layers": 1}, False),
    ],
)  # fmt: skip
def test_graphs_of_modules_are_refused_as_megatron_core_refuses_them(graphs, again, fits):
    torch = pytest.importorskip("torch")
    core = pytest.importorskip("megatron.core")
    from megatron.core.transformer.transformer_config import TransformerConfig

    here = release_in(core.__version__)
    kind = "full" if "recompute_method" in again else "selective" if again and "recompute_modules" in again else None
    fields = {"cuda_graph_impl": "transformer_engine", "recompute_granularity": kind, **again}
    if "moe_pad_expert_input_to_capacity" in again:
        fields["moe_expert_capacity_factor"] = 1.0
    theirs = {
        **fields, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "bf16": True,
        "params_dtype": torch.bfloat16, "num_moe_experts": 64, "moe_ffn_hidden_size": 1408, "moe_grouped_gemm": True,
        "moe_token_dispatcher_type": "alltoall", "add_bias_linear": False,
        "cuda_graph_modules" if here >= (0, 18) else "cuda_graph_scope": list(graphs),
        "recompute_modules": [*again.get("recompute_modules", ("core_attn",))],
    }  # fmt: skip
    ours = {**fields, "cuda_graph_modules": graphs, "megatron_core": here}
    if fits:
        TransformerConfig(**theirs)
        run("moe", **ours)
        return
    with pytest.raises(AssertionError, match=r"cuda.?graph|CUDA graph"):
        TransformerConfig(**theirs)
    with pytest.raises(SpecError, match="cuda_graph_"):
        run("moe", **ours)


@pytest.mark.parametrize("at_start", [True, False])
def test_no_more_layers_stay_in_bf16_than_a_stage_has(at_start):
    """32 layers over 4 stages: 8 at either end, as megatron-core's TransformerConfig says."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from megatron.core.transformer.transformer_config import TransformerConfig

    for n, fits in ((8, True), (9, False)):
        ends = {f"num_layers_at_{'start' if at_start else 'end'}_in_bf16": n}
        fields = {"fp8": "hybrid", "fp8_recipe": "blockwise", "pipeline_model_parallel_size": 4, **ends}
        theirs = {
            **fields, "first_last_layers_bf16": True, "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
            "bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16,
        }  # fmt: skip
        if fits:
            TransformerConfig(**theirs)
            run("dense", world_size=4, **fields)
            continue
        with pytest.raises(ValueError, match="number of layers per pipeline stage"):
            TransformerConfig(**theirs)
        with pytest.raises(SpecError, match=r"_in_bf16 \(9\) is larger than the 8 layers of a pipeline stage"):
            run("dense", world_size=4, **fields)


@pytest.mark.parametrize(("method", "n"), [("uniform", 1), ("uniform", 2), ("uniform", 4), ("block", 4), ("block", 9)])
def test_groups_of_recomputed_layers_that_megatron_core_cannot_make_are_refused(method, n):
    """Its own TransformerBlock, forward and backward on the meta device: six layers make no group of four."""
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from bridge_memory.rehearsal.run import rehearse

    llama = resolve_model("meta-llama/Llama-3.2-1B")

    def six(core: tuple[int, int]) -> RunSpec:
        return run(
            replace(llama, layers=llama.layers[:6]), seq_length=256, transformer_impl="local", moe_grouped_gemm=False,
            recompute_granularity="full", recompute_method=method, recompute_num_layers=n, megatron_core=core,
        )  # fmt: skip

    try:
        rehearse(six((0, 17)))  # of a release whose rule is not known, so that the installed one has the word
    except IndexError:
        with pytest.raises(SpecError, match=r"recompute_num_layers \(4\) does not divide the 6 layers .*; use 3 or 2"):
            six((0, 16))
        assert (method, n) == ("uniform", 4)
    else:
        estimate(six((0, 16)))
        assert (method, n) != ("uniform", 4)


def test_groups_of_recomputed_layers_are_counted_in_every_virtual_stage():
    """61 layers, 15 + 15 + 15 + 16: no group fits both; 2 x 8 virtual stages of four hold groups of two or four."""
    ends = {"world_size": 4, "pipeline_model_parallel_size": 4, "num_layers_in_last_pipeline_stage": 16}
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "megatron_core": (0, 16)}
    with pytest.raises(SpecError, match=r"the 15 layers of pipeline stage 0.*; use 1, or recompute_method block"):
        estimate(run(model(num_layers=61), **ends, **full, recompute_num_layers=2))
    virtual = {"world_size": 2, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 4}
    estimate(run("dense", **virtual, **full, recompute_num_layers=4))
    with pytest.raises(SpecError, match=r"the 4 layers of virtual stage 0 of stage 0.*; use 4 or 2 or 1"):
        estimate(run("dense", **virtual, **full, recompute_num_layers=8))
    # Nobody has looked at what later releases do; the last group is then smaller, and the estimate says so.
    later = estimate(run("dense", **virtual, **(full | {"megatron_core": (0, 17)}), recompute_num_layers=8))
    assert any("leaves a last group of fewer layers" in line for line in later.assumptions)


def test_a_run_whose_layers_do_not_divide_is_refused_when_it_is_built():
    """61 layers over 4 stages: as Megatron would at launch, with a split that works."""
    with pytest.raises(SpecError, match="num_layers_in_last_pipeline_stage to 16"):
        run(model(num_layers=61), world_size=4, pipeline_model_parallel_size=4)


def test_local_experts_with_biases_need_expert_parallelism():
    """Without it autograd stops the forward pass: ``mlp.py: MLP.forward`` adds in place to a view."""
    experts = MoESpec(num_experts=32, topk=4, moe_ffn_hidden_size=2880, add_bias=True)
    some = {"transformer_impl": "local", "moe_grouped_gemm": False}
    with pytest.raises(SpecError, match=r"expert_model_parallel_size \(1\) does not go with experts with biases"):
        run(model(ffn=experts), **some, world_size=8)
    assert run(model(ffn=experts), world_size=8)
    assert run(model(ffn=experts), **some, world_size=8, expert_model_parallel_size=2)
