"""Weight gradients of the output layer that wait for the end of the step (``defer_embedding_wgrad_compute``).

Each call of the output layer puts its input and the gradient of its logits into a list, as many as
``wgrad_deferral_limit`` says (0: all); they are there until the pipeline has drained. Source: megatron-core
``tensor_parallel/layers.py: ColumnParallelLinear.forward, LinearWithGradAccumulationAndAsyncCommunication.backward``,
``pipeline_parallel/schedules.py: finish_embedding_wgrad_compute``, ``utils.py: drain_embedding_wgrad_compute``.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.spec import ModelSpec
from bridge_memory.tapes.context import BlockContext


def of_one_call(ctx: BlockContext) -> Any:
    """Bytes: the input, [T_sp, h], and the gradient of the logits, [T, V / t]."""
    return (ctx.tokens_sp * ctx.hidden_size + ctx.tokens * (ctx.padded_vocab // ctx.tp)) * ctx.act


def calls(model: ModelSpec) -> int:
    """Of the output layer, for one microbatch: that of every MTP depth too."""
    return 1 + (model.mtp_num_layers if model.mtp_layer is not None else 0)


def of_earlier_microbatches(model: ModelSpec, microbatches: int, ctx: BlockContext) -> Any:
    """Bytes that wait while the last microbatch runs; with a limit, of all that it lets wait."""
    limit = ctx.impl.wgrad_deferral_limit
    number = min(calls(model) * microbatches, limit) if limit else calls(model) * (microbatches - 1)
    return number * of_one_call(ctx)
