"""A small run as a training job has it: a Megatron Bridge ConfigContainer's fields."""

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
