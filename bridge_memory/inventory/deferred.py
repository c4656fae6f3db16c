"""Weight gradients of the output layer that wait for the end of the step (``defer_embedding_wgrad_compute``).

Each call of the output layer puts its input and the gradient of its logits into a list, of at most
``wgrad_deferral_limit`` calls (0: all); they stay until the pipeline has drained. Source: megatron-core
``tensor_parallel/layers.py: ColumnParallelLinear.forward, LinearWithGradAccumulationAndAsyncCommunication.backward``,
``pipeline_parallel/schedules.py: finish_embedding_wgrad_compute``, ``utils.py: drain_embedding_wgrad_compute``.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.spec import ModelSpec
from bridge_memory.tapes.context import BlockContext


def bytes_per_call(ctx: BlockContext) -> Any:
    """Bytes that one call keeps: the input, [T_sp, h], and the gradient of the logits, [T, V / t]."""
    return (ctx.tokens_sp * ctx.hidden_size + ctx.tokens * (ctx.padded_vocab // ctx.tp)) * ctx.act


def calls(model: ModelSpec) -> int:
    """Calls of the output layer for one microbatch: one, and one for every MTP depth."""
    return 1 + (model.mtp_num_layers if model.mtp_layer is not None else 0)


def deferred_bytes(model: ModelSpec, microbatches: int, ctx: BlockContext) -> Any:
    """Bytes that earlier microbatches' calls keep while the last microbatch runs; with a limit, those of all calls that
    it allows."""
    limit = ctx.impl.wgrad_deferral_limit
    number = min(calls(model) * microbatches, limit) if limit else calls(model) * (microbatches - 1)
    return number * bytes_per_call(ctx)
