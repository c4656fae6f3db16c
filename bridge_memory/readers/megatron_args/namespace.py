"""Megatron-LM's parsed arguments (``megatron.training.get_args()``) as a container that the reader knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def is_megatron_lm(config: Any) -> bool:
    """A Namespace of Megatron-LM rather than a ConfigContainer of Megatron Bridge."""
    return not hasattr(config, "model") and hasattr(config, "hidden_size")


def container(config: Any) -> Any:
    """``config`` itself, or the container that says what Megatron-LM's arguments say.

    Names that differ are those of ``megatron/training/arguments.py``; the others are TransformerConfig's own
    (``core_transformer_config_from_args`` copies them by name).
    """
    if not is_megatron_lm(config):
        return config
    args = config

    def get(key: str, default: Any = None) -> Any:
        value = getattr(args, key, None)
        return default if value is None else value

    activation, gated = "gelu", False
    if get("swiglu", False):
        activation, gated = "silu", True
    elif get("quick_geglu", False):
        activation, gated = "quick_gelu", True
    elif get("squared_relu", False):
        activation = "squared_relu"
    renamed = {
        "num_moe_experts": get("num_experts"),
        "gated_linear_unit": gated,
        "activation_func": activation,
        "share_embeddings_and_output_weights": not get("untie_embeddings_and_output_weights", False),
        "num_layers_in_first_pipeline_stage": get("decoder_first_pipeline_num_layers"),
        "num_layers_in_last_pipeline_stage": get("decoder_last_pipeline_num_layers"),
        "num_query_groups": get("num_query_groups") if get("group_query_attention", False) else None,
        "microbatch_group_size_per_vp_stage": get("microbatch_group_size_per_vp_stage"),
        # The padded size is final; before padding the tokenizer's is padded as Megatron-LM does.
        "vocab_size": get("padded_vocab_size", get("vocab_size")),
        "should_pad_vocab": get("padded_vocab_size") is None,
        "bias_activation_fusion": get("bias_swiglu_fusion" if gated else "bias_gelu_fusion", True),
        "attention_softmax_in_fp32": get("attention_softmax_in_fp32", False),
        "moe_router_topk": get("moe_router_topk", 2),
        "mtp_num_layers": get("mtp_num_layers"),
    }
    values = {**vars(args), **renamed}
    ddp = {
        "grad_reduce_in_fp32": get("accumulate_allreduce_grads_in_fp32", False),
        "overlap_grad_reduce": get("overlap_grad_reduce", False),
        "overlap_param_gather": get("overlap_param_gather", False),
        "use_distributed_optimizer": get("use_distributed_optimizer", False),
        "bucket_size": get("ddp_bucket_size"),
        "num_distributed_optimizer_instances": get("num_distributed_optimizer_instances", 1),
        "use_megatron_fsdp": get("use_megatron_fsdp", False) or get("use_custom_fsdp", False),
        "data_parallel_sharding_strategy": get("data_parallel_sharding_strategy", "no_shard"),
        "fp8_param_gather": get("fp8_param_gather", False),
    }
    return SimpleNamespace(
        model=SimpleNamespace(**values),
        train=SimpleNamespace(
            micro_batch_size=get("micro_batch_size"), global_batch_size=get("global_batch_size")
        ),
        optimizer=args,
        ddp=SimpleNamespace(**ddp),
        logger=SimpleNamespace(
            log_params_norm=get("log_params_norm", False), log_interval=get("log_interval", 100)
        ),
        dataset=SimpleNamespace(
            skip_getting_attention_mask_from_dataset=not get("create_attention_mask_in_dataloader", True)
        ),
        dist=SimpleNamespace(use_torch_fsdp2=get("use_torch_fsdp2", False)),
        world_size=get("world_size"),
        data_parallel_size=get("data_parallel_size"),
    )
