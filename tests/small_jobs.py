"""Small runs as training jobs have them: Megatron Bridge's ConfigContainer, Megatron-LM's parsed arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def small_container(**model: Any) -> SimpleNamespace:
    """A Llama of 8 layers on TP1 PP4 DP1: four ranks, one a stage."""

    def silu() -> None: ...

    fields: dict[str, Any] = dict(
        num_layers=8, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=16, num_query_groups=8,
        gated_linear_unit=True, activation_func=silu, add_bias_linear=False, normalization="RMSNorm",
        position_embedding_type="rope", seq_length=4096, vocab_size=32000, bf16=True, hidden_dropout=0.0,
        attention_dropout=0.0, share_embeddings_and_output_weights=False, tensor_model_parallel_size=1,
        pipeline_model_parallel_size=4, context_parallel_size=1, sequence_parallel=False,
        recompute_granularity=None, transformer_impl="transformer_engine", cross_entropy_loss_fusion=False,
    )  # fmt: skip
    return SimpleNamespace(
        model=SimpleNamespace(**{**fields, **model}),
        train=SimpleNamespace(micro_batch_size=2, global_batch_size=16),
        optimizer=SimpleNamespace(use_distributed_optimizer=False, optimizer="adam"),
        ddp=SimpleNamespace(grad_reduce_in_fp32=True),
        logger=SimpleNamespace(log_interval=4),
        data_parallel_size=1,
    )


def megatron_lm_args(**changes: Any) -> SimpleNamespace:
    """``get_args()`` of a run on TP2 PP2 DP2, as on the command line in live/test_patch.py."""
    values: dict[str, Any] = dict(
        num_layers=8, hidden_size=2048, ffn_hidden_size=8192, num_attention_heads=16, num_query_groups=8,
        group_query_attention=True, kv_channels=128, swiglu=True, add_bias_linear=False, normalization="RMSNorm",
        position_embedding_type="rope", rotary_percent=1.0, untie_embeddings_and_output_weights=True,
        seq_length=4096, max_position_embeddings=4096, vocab_size=32000, padded_vocab_size=32000,
        make_vocab_size_divisible_by=128, bf16=True, fp16=False, hidden_dropout=0.0, attention_dropout=0.0,
        micro_batch_size=1, global_batch_size=16, tensor_model_parallel_size=2, pipeline_model_parallel_size=2,
        context_parallel_size=1, expert_model_parallel_size=1, sequence_parallel=True, world_size=8,
        data_parallel_size=2, use_distributed_optimizer=True, accumulate_allreduce_grads_in_fp32=True,
        optimizer="adam", recompute_granularity="selective", recompute_modules=["core_attn"],
        transformer_impl="transformer_engine", attention_softmax_in_fp32=False, gradient_accumulation_fusion=True,
        masked_softmax_fusion=True, bias_swiglu_fusion=True, bias_dropout_fusion=True, apply_rope_fusion=True,
        persist_layer_norm=True, create_attention_mask_in_dataloader=True, log_interval=2, num_experts=None,
        moe_token_dispatcher_type="allgather", cross_entropy_loss_fusion=False, clip_grad=1.0,
    )  # fmt: skip
    return SimpleNamespace(**{**values, **changes})
