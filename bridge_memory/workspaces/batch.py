"""The input tensors of one microbatch."""

from __future__ import annotations

from collections.abc import Sequence

from bridge_memory.spec import RunSpec
from bridge_memory.spec.layout import ChunkShape


def batch_bytes(run: RunSpec, shapes: Sequence[ChunkShape]) -> int:
    """Bytes of one microbatch's input on the first or last stage of the pipeline; the stages between get none.

    int64 tokens, labels and positions, an fp32 loss mask, and the boolean mask [b, 1, s, s] of the data loader,
    all divided by CP. Source: ``megatron/training/utils.py: get_batch_on_this_tp_rank``,
    ``megatron/core/utils.py: get_batch_on_this_cp_rank``.
    """
    if not any(shape.embedding or shape.output for shape in shapes):
        return 0
    b, s = run.batch.micro_batch_size, run.batch.seq_length
    mask = s * s if run.implementation.create_attention_mask else 0
    return b * (s * (8 + 8 + 8 + 4) + mask) // run.parallel.cp
