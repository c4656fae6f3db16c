"""The same run, however it is told: Megatron-LM's arguments, a ConfigContainer, a Hugging Face config with flags, a
TransformerConfig. Each telling is written out by hand, in the words of its source.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory import RunSpec
from bridge_memory.arguments.flags import add_run_arguments
from bridge_memory.arguments.run import run_from_arguments
from bridge_memory.estimation import estimate
from bridge_memory.readers.config_container import run_of_container
from bridge_memory.readers.megatron_args import run_from_megatron_args
from bridge_memory.readers.transformer_config import model_from_transformer_config
from bridge_memory.releases import DEFAULT_MEGATRON_CORE, Running
from bridge_memory.spec.canonical import canonical


@dataclass(frozen=True)
class Case:
    """One run. ``arguments``: Megatron-LM's, "" where it has none for this model. ``flags``: the model and flags of the
    command line. ``provider``: a Bridge provider's attributes; ``ddp``, ``optimizer``: other parts of its container."""

    arguments: str
    flags: str
    provider: dict[str, Any]
    world_size: int = 8
    global_batch_size: int = 64
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    #: The megatron-core that runs, where the default one does not build the model.
    core: tuple[int, int] = DEFAULT_MEGATRON_CORE


#: What a Bridge pretraining recipe says of every model here; the words of Megatron-LM for the same.
RECIPE = "--bf16 --micro-batch-size 1 --use-distributed-optimizer --no-create-attention-mask-in-dataloader "
PROVIDER: dict[str, Any] = {
    "bf16": True, "add_bias_linear": False, "normalization": "RMSNorm", "position_embedding_type": "rope",
    "share_embeddings_and_output_weights": False, "hidden_dropout": 0.0, "attention_dropout": 0.0,
    "gradient_accumulation_fusion": True, "masked_softmax_fusion": True, "bias_activation_fusion": True,
    "bias_dropout_fusion": True, "apply_rope_fusion": True, "should_pad_vocab": False,
}  # fmt: skip
PLAIN = (
    RECIPE + "--normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --tokenizer-type HuggingFaceTokenizer --make-vocab-size-divisible-by 1 "
)

LLAMA_8B = (
    PLAIN + "--disable-bias-linear --swiglu --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
    "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192 "
    "--max-position-embeddings 8192 --vocab-size 128256 --global-batch-size 64 "
)
LLAMA_8B_PROVIDER = {
    "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_query_groups": 8,
    "gated_linear_unit": True, "activation_func": "silu", "seq_length": 8192, "vocab_size": 128256,
}  # fmt: skip
LLAMA_70B = (
    PLAIN + "--disable-bias-linear --swiglu --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 "
    "--num-attention-heads 64 --group-query-attention --num-query-groups 8 --seq-length 8192 "
    "--max-position-embeddings 131072 --vocab-size 128256 --tensor-model-parallel-size 4 --sequence-parallel "
)
LLAMA_70B_PROVIDER = {
    **LLAMA_8B_PROVIDER, "num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64,
    "tensor_model_parallel_size": 4, "sequence_parallel": True,
}  # fmt: skip
LLAMA_8B_FLAGS = "meta-llama/Meta-Llama-3-8B --seq-length 8192 --global-batch-size 64 --num-gpus 8"
LLAMA_70B_FLAGS = "meta-llama/Llama-3.1-70B --seq-length 8192 --global-batch-size 64 --tp 4 --num-gpus 32"

CASES: dict[str, Case] = {
    "Llama-3-8B": Case(
        LLAMA_8B + "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2",
        LLAMA_8B_FLAGS + " --tp 2 --cp 2",
        {**LLAMA_8B_PROVIDER, "tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2},
    ),
    "Llama-3.1-70B, an uneven pipeline": Case(
        LLAMA_70B + "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 18 "
        "--decoder-last-pipeline-num-layers 18 --global-batch-size 64",
        LLAMA_70B_FLAGS
        + " --pp 4 --num-layers-in-first-pipeline-stage 18 --num-layers-in-last-pipeline-stage 18",
        {**LLAMA_70B_PROVIDER, "pipeline_model_parallel_size": 4, "num_layers_in_first_pipeline_stage": 18,
         "num_layers_in_last_pipeline_stage": 18},
        world_size=32,
    ),
    "Llama-3.1-70B, virtual stages": Case(
        LLAMA_70B + "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5 "
        "--overlap-grad-reduce --overlap-param-gather --global-batch-size 64",
        LLAMA_70B_FLAGS + " --pp 4 --vpp 4 --overlap-grad-reduce --overlap-param-gather",
        {**LLAMA_70B_PROVIDER, "pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 4},
        world_size=32,
        ddp={"overlap_grad_reduce": True, "overlap_param_gather": True},
    ),
    "Llama-3-8B, selective recomputation": Case(
        LLAMA_8B + "--recompute-granularity selective --recompute-modules core_attn mlp",
        LLAMA_8B_FLAGS + " --recompute-granularity selective --recompute-modules mlp,core_attn",
        {**LLAMA_8B_PROVIDER, "recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    ),
    "Llama-3-8B, full recomputation": Case(
        LLAMA_8B + "--recompute-granularity full --recompute-method block --recompute-num-layers 7",
        LLAMA_8B_FLAGS + " --recompute-granularity full --recompute-method block --recompute-num-layers 7",
        {**LLAMA_8B_PROVIDER, "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 7},
    ),
    "Llama-3-8B in fp8": Case(
        LLAMA_8B + "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather",
        LLAMA_8B_FLAGS + " --fp8 hybrid --fp8-recipe tensorwise --fp8-param-gather",
        {**LLAMA_8B_PROVIDER, "fp8": "hybrid", "fp8_recipe": "tensorwise", "fp8_param": True},
        ddp={"fp8_param_gather": True},
    ),
    "Llama-3-8B, a precision-aware optimizer": Case(
        LLAMA_8B + "--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype fp8",
        LLAMA_8B_FLAGS + " --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 "
        "--exp-avg-sq-dtype fp8",
        LLAMA_8B_PROVIDER,
        ddp={"grad_reduce_in_fp32": False},
        optimizer={
            "use_precision_aware_optimizer": True, "main_grads_dtype": "torch.bfloat16",
            "exp_avg_dtype": "torch.bfloat16", "exp_avg_sq_dtype": "torch.uint8",
        },
    ),
    "Mixtral-8x7B": Case(
        PLAIN + "--disable-bias-linear --swiglu --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
        "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 4096 "
        "--max-position-embeddings 32768 --vocab-size 32000 --num-experts 8 --moe-router-topk 2 "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm "
        "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 4 --tensor-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --sequence-parallel --global-batch-size 64",
        "mistralai/Mixtral-8x7B-v0.1 --seq-length 4096 --global-batch-size 64 --tp 2 --ep 4 --etp 1 --num-gpus 8",
        {**LLAMA_8B_PROVIDER, "seq_length": 4096, "vocab_size": 32000, "num_moe_experts": 8, "moe_router_topk": 2,
         "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2, "moe_grouped_gemm": True,
         "moe_token_dispatcher_type": "alltoall", "expert_model_parallel_size": 4, "tensor_model_parallel_size": 2,
         "expert_tensor_parallel_size": 1, "sequence_parallel": True},
    ),
    "Qwen3-30B-A3B": Case(
        PLAIN + "--disable-bias-linear --swiglu --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 "
        "--num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm "
        "--seq-length 4096 --max-position-embeddings 40960 --vocab-size 151936 --num-experts 128 "
        "--moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-aux-loss-coeff 1e-3 --moe-grouped-gemm "
        "--moe-permute-fusion --moe-router-dtype fp32 --moe-token-dispatcher-type flex "
        "--moe-flex-dispatcher-backend deepep --expert-model-parallel-size 8 --global-batch-size 64 "
        "--recompute-granularity selective --recompute-modules moe_act layernorm",
        "Qwen/Qwen3-30B-A3B --seq-length 4096 --global-batch-size 64 --ep 8 --num-gpus 8 --moe-permute-fusion "
        "--moe-router-dtype fp32 --moe-token-dispatcher-type flex --recompute-granularity selective "
        "--recompute-modules moe_act,layernorm",
        {"num_layers": 48, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_attention_heads": 32,
         "num_query_groups": 4, "kv_channels": 128, "qk_layernorm": True, "gated_linear_unit": True,
         "activation_func": "silu", "seq_length": 4096, "vocab_size": 151936, "num_moe_experts": 128,
         "moe_router_topk": 8, "moe_ffn_hidden_size": 768, "moe_aux_loss_coeff": 1e-3,
         "moe_router_load_balancing_type": "aux_loss", "moe_grouped_gemm": True, "moe_permute_fusion": True,
         "moe_router_dtype": "fp32", "moe_token_dispatcher_type": "flex", "moe_enable_deepep": True,
         "expert_model_parallel_size": 8, "recompute_granularity": "selective",
         "recompute_modules": ["layernorm", "moe_act"]},
    ),
    "DeepSeek-V3, a layout with MTP": Case(
        PLAIN + "--disable-bias-linear --swiglu --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 "
        "--num-attention-heads 128 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
        "--qk-pos-emb-head-dim 64 --v-head-dim 128 --qk-layernorm --seq-length 4096 "
        "--max-position-embeddings 4096 --vocab-size 129280 --num-experts 256 --moe-router-topk 8 "
        "--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-num-groups 8 "
        "--moe-router-group-topk 4 --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 "
        "--moe-router-dtype fp32 --moe-grouped-gemm --moe-token-dispatcher-type flex --mtp-num-layers 1 "
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 64 "
        "--expert-tensor-parallel-size 1 --pipeline-model-parallel-size 16 "
        "--pipeline-model-parallel-layout Et*3|(tt|)*29,m|L --global-batch-size 8192",
        "deepseek-ai/DeepSeek-V3 --seq-length 4096 --global-batch-size 8192 --tp 2 --pp 16 --ep 64 --etp 1 "
        "--num-gpus 2048 --pipeline-model-parallel-layout Et*3|(tt|)*29,m|L --moe-router-dtype fp32 "
        "--moe-token-dispatcher-type flex",
        {"num_layers": 61, "hidden_size": 7168, "ffn_hidden_size": 18432, "num_attention_heads": 128,
         "multi_latent_attention": True, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_head_dim": 128,
         "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "qk_layernorm": True, "gated_linear_unit": True,
         "activation_func": "silu", "seq_length": 4096, "vocab_size": 129280, "num_moe_experts": 256,
         "moe_router_topk": 8, "moe_ffn_hidden_size": 2048, "moe_shared_expert_intermediate_size": 2048,
         "moe_layer_freq": [0] * 3 + [1] * 58, "moe_router_score_function": "sigmoid",
         "moe_router_enable_expert_bias": True, "moe_router_num_groups": 8, "moe_router_group_topk": 4,
         "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 1e-4, "moe_router_dtype": "fp32",
         "moe_grouped_gemm": True, "moe_token_dispatcher_type": "flex", "mtp_num_layers": 1,
         "tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 64,
         "expert_tensor_parallel_size": 1, "pipeline_model_parallel_size": 16,
         "virtual_pipeline_model_parallel_size": 2,
         "pipeline_model_parallel_layout": [
             ["embedding", "decoder", "decoder", "decoder"], *[["decoder", "decoder"]] * 29, ["mtp"], ["loss"],
         ]},
        world_size=2048,
        global_batch_size=8192,
    ),
    "gpt-oss-20b": Case(
        PLAIN.replace("rope ", "yarn ") + "--quick-geglu --num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880 "
        "--activation-func-clamp-value 7.0 "
        "--num-attention-heads 64 --group-query-attention --num-query-groups 8 --kv-channels 64 "
        "--seq-length 4096 --max-position-embeddings 131072 --vocab-size 201088 --num-experts 32 "
        "--moe-router-topk 4 --moe-router-load-balancing-type none --moe-grouped-gemm --moe-permute-fusion "
        "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 4 --softmax-type learnable "
        "--window-size (128,0) --window-attn-skip-freq 2 --no-bias-dropout-fusion --global-batch-size 64",
        "openai/gpt-oss-20b --seq-length 4096 --global-batch-size 64 --ep 4 --num-gpus 8 --moe-permute-fusion "
        "--no-bias-dropout-fusion --no-apply-rope-fusion",
        {"num_layers": 24, "hidden_size": 2880, "ffn_hidden_size": 2880, "num_attention_heads": 64,
         "num_query_groups": 8, "kv_channels": 64, "add_bias_linear": True, "gated_linear_unit": True,
         "activation_func": "quick_gelu", "activation_func_clamp_value": 7.0, "position_embedding_type": "yarn",
         "apply_rope_fusion": False,
         "bias_dropout_fusion": False, "seq_length": 4096, "vocab_size": 201088, "num_moe_experts": 32,
         "moe_router_topk": 4, "moe_ffn_hidden_size": 2880, "moe_router_load_balancing_type": "none",
         "moe_grouped_gemm": True, "moe_permute_fusion": True, "moe_token_dispatcher_type": "alltoall",
         "expert_model_parallel_size": 4, "softmax_type": "learnable", "window_size": (128, 0),
         "window_attn_skip_freq": 2},
    ),
    "Nemotron-H-56B": Case(
        PLAIN.replace("rope ", "none ") + "--disable-bias-linear --squared-relu --num-layers 118 "
        "--hidden-size 8192 --ffn-hidden-size 32768 --num-attention-heads 64 --group-query-attention "
        "--num-query-groups 8 --kv-channels 128 --seq-length 8192 --max-position-embeddings 8192 "
        "--vocab-size 131072 --mamba-num-heads 256 --mamba-head-dim 64 --mamba-state-dim 256 --mamba-num-groups 8 "
        "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec --hybrid-override-pattern "
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*"
        "-M-M-M-M-M*-M-M-M-M-M- --tensor-model-parallel-size 8 --sequence-parallel --global-batch-size 64",
        "nvidia/Nemotron-H-56B-Base-8K --seq-length 8192 --global-batch-size 64 --tp 8 --num-gpus 16",
        {"num_layers": 118, "hidden_size": 8192, "ffn_hidden_size": 32768, "num_attention_heads": 64,
         "num_query_groups": 8, "kv_channels": 128, "gated_linear_unit": False, "activation_func": "squared_relu",
         "position_embedding_type": "none", "seq_length": 8192, "vocab_size": 131072, "is_hybrid_model": True,
         "hybrid_override_pattern": "M-M-M-M*-" + "M-M-M-M-M*-" * 9 + "M-M-M-M-M-", "mamba_num_heads": 256,
         "mamba_head_dim": 64, "mamba_state_dim": 256, "mamba_num_groups": 8, "tensor_model_parallel_size": 8,
         "sequence_parallel": True},
        world_size=16,
    ),
    "a small Nemotron with MTP": Case(
        PLAIN.replace("rope ", "none ") + "--disable-bias-linear --squared-relu --hidden-size 1024 "
        "--ffn-hidden-size 2048 --num-attention-heads 16 --group-query-attention --num-query-groups 2 "
        "--kv-channels 128 --seq-length 4096 --max-position-embeddings 8192 --vocab-size 131072 --num-experts 16 "
        "--moe-router-topk 2 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 2048 "
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-aux-loss-coeff 1e-4 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-grouped-gemm --moe-token-dispatcher-type alltoall "
        "--mamba-num-heads 32 --mamba-head-dim 64 --mamba-state-dim 128 --mamba-num-groups 8 "
        "--hybrid-layer-pattern MEM*EME/*E --expert-model-parallel-size 8 --global-batch-size 64",
        "--custom-config " + json.dumps({
            "model_type": "nemotron_h", "hidden_size": 1024, "hybrid_override_pattern": "MEM*EME",
            "num_hidden_layers": 7, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2,
            "head_dim": 128, "vocab_size": 131072, "max_position_embeddings": 8192, "n_routed_experts": 16,
            "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "moe_shared_expert_intermediate_size": 2048,
            "mamba_num_heads": 32, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8,
            "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E",
        }, separators=(",", ":")) + " --seq-length 4096 --global-batch-size 64 --ep 8 --num-gpus 8",
        {"num_layers": 7, "hidden_size": 1024, "ffn_hidden_size": 2048, "num_attention_heads": 16,
         "num_query_groups": 2, "kv_channels": 128, "gated_linear_unit": False, "activation_func": "squared_relu",
         "position_embedding_type": "none", "seq_length": 4096, "vocab_size": 131072, "num_moe_experts": 16,
         "moe_router_topk": 2, "moe_ffn_hidden_size": 1024, "moe_shared_expert_intermediate_size": 2048,
         "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_aux_loss_coeff": 1e-4,
         "moe_router_load_balancing_type": "seq_aux_loss", "moe_grouped_gemm": True,
         "moe_token_dispatcher_type": "alltoall", "mamba_num_heads": 32, "mamba_head_dim": 64,
         "mamba_state_dim": 128, "mamba_num_groups": 8, "hybrid_layer_pattern": "MEM*EME/*E",
         "expert_model_parallel_size": 8},
        core=(0, 17),
    ),
    "GPT-2, its own dropouts": Case(
        RECIPE + "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 "
        "--max-position-embeddings 1024 --vocab-size 50257 --make-vocab-size-divisible-by 1 --global-batch-size 64 ",
        "openai-community/gpt2 --seq-length 1024 --global-batch-size 64 --num-gpus 8 --hidden-dropout 0.1 "
        "--attention-dropout 0.1",
        {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "add_bias_linear": True,
         "normalization": "LayerNorm", "position_embedding_type": "learned_absolute", "hidden_dropout": 0.1,
         "attention_dropout": 0.1, "share_embeddings_and_output_weights": True, "seq_length": 1024,
         "vocab_size": 50257},
    ),
    # Megatron-LM has no flag for a gated tanh GELU.
    "Gemma": Case(
        "",
        "--custom-config " + json.dumps({
            "model_type": "gemma", "hidden_size": 2048, "num_hidden_layers": 18, "intermediate_size": 16384,
            "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 256000,
            "max_position_embeddings": 8192, "hidden_activation": "gelu_pytorch_tanh",
        }, separators=(",", ":")) + " --seq-length 4096 --global-batch-size 64 --tp 2 --num-gpus 8",
        {"num_layers": 18, "hidden_size": 2048, "ffn_hidden_size": 16384, "num_attention_heads": 8,
         "num_query_groups": 1, "kv_channels": 256, "gated_linear_unit": True, "activation_func": "fast_gelu",
         "share_embeddings_and_output_weights": True, "seq_length": 4096, "vocab_size": 256000,
         "tensor_model_parallel_size": 2, "sequence_parallel": True},
    ),
}  # fmt: skip


def from_arguments(case: Case) -> RunSpec:
    return run_from_megatron_args(case.arguments, world_size=case.world_size, megatron_core=case.core)


def from_flags(case: Case) -> RunSpec:
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    release = ".".join(map(str, case.core))
    return run_from_arguments(parser.parse_args([*case.flags.split(" "), "--megatron-core", release]))


def from_container(case: Case) -> RunSpec:
    shards = {"use_distributed_optimizer": True}
    config = SimpleNamespace(
        model=SimpleNamespace(**PROVIDER | case.provider),
        train=SimpleNamespace(micro_batch_size=1, global_batch_size=case.global_batch_size),
        optimizer=SimpleNamespace(optimizer="adam", **shards, **case.optimizer),
        ddp=SimpleNamespace(**{"grad_reduce_in_fp32": True} | shards | case.ddp),
    )
    return run_of_container(config, Running(megatron_core=case.core), world_size=case.world_size)


def same(one: RunSpec, other: RunSpec) -> None:
    """But for who trains, which arguments and containers say and flags leave open."""
    one, other = (canonical(run.with_fields(adopt_optim_states=False)) for run in (one, other))
    for group in fields(RunSpec):
        if group.name == "model":
            # Layers by kind: a failure that names the field, not a page of layers.
            for ours, theirs in dict.fromkeys(zip(one.model.layers, other.model.layers, strict=True)):
                assert ours == theirs
        assert getattr(one, group.name) == getattr(other, group.name), group.name
    assert one == other


@pytest.mark.parametrize("name", CASES)
def test_a_container_says_what_the_flags_say(name: str) -> None:
    same(from_container(CASES[name]), from_flags(CASES[name]))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.arguments])
def test_megatrons_arguments_say_what_the_flags_say(name: str) -> None:
    same(from_arguments(CASES[name]), from_flags(CASES[name]))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.arguments])
def test_one_run_has_one_estimate(name: str) -> None:
    told = [estimate(tell(CASES[name])) for tell in (from_arguments, from_flags, from_container)]
    components = [[s.components for s in answer.stages] for answer in told]
    assert components[0] == components[1] == components[2]


#: Attributes of a provider that are no field of TransformerConfig.
OF_THE_MODEL = {"position_embedding_type", "share_embeddings_and_output_weights", "seq_length", "vocab_size"}


@pytest.mark.parametrize("name", CASES)
def test_a_transformer_config_is_the_model_of_the_flags(name: str) -> None:
    """megatron-core's own class, ``__post_init__`` and all, where it knows the fields."""
    pytest.importorskip("megatron.core")
    import torch
    import torch.nn.functional as F
    from megatron.core import activations
    from megatron.core.fusions import fused_bias_geglu
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    case = CASES[name]
    given = PROVIDER | case.provider
    cls = MLATransformerConfig if given.get("multi_latent_attention") else TransformerConfig
    known = {f.name for f in dataclasses.fields(cls)}
    functions = {"silu": F.silu, "squared_relu": activations.squared_relu, "fast_gelu": activations.fast_gelu,
                 "quick_gelu": fused_bias_geglu.quick_gelu}
    own = {key: value for key, value in given.items() if key in known}
    own["activation_func"] = functions.get(str(given.get("activation_func")), F.gelu)
    # How it is run: some of it cannot be named without Transformer Engine, and a model has none of it.
    for key in ("gradient_accumulation_fusion", "apply_rope_fusion", "bias_activation_fusion", "masked_softmax_fusion",
                "moe_permute_fusion", "sequence_parallel", "tensor_model_parallel_size", "fp8", "fp8_recipe",
                "fp8_param"):  # fmt: skip
        own.pop(key, None)
    own["pipeline_dtype"] = own["params_dtype"] = torch.bfloat16
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = cls(**own)
    for key in given.keys() - known - OF_THE_MODEL:
        setattr(config, key, given[key])  # a MambaModel's pattern is its provider's
    model = model_from_transformer_config(
        config, vocab_size=given["vocab_size"], make_vocab_size_divisible_by=0,
        position_embedding_type=given["position_embedding_type"], max_sequence_length=given["seq_length"],
        share_embeddings_and_output_weights=given["share_embeddings_and_output_weights"],
    )  # fmt: skip
    run = from_flags(case)
    same(run.with_(model=model), run)
