"""Gradients of a weight that one chunk uses more than once.

The embedding's weight is used by the embedding, every MTP depth and, if tied, the output layer; an untied output
layer's weight by the main loss and the losses of MTP depths; a table of learned positions by the embedding and every
depth. Autograd accumulates the gradient of a weight when all uses have contributed. Until then the partial sum stays:
with tied embeddings on one stage, throughout the backward pass.

Source: PyTorch ``torch/csrc/autograd/input_buffer.cpp: accumulate`` (in place if the first has no other reference),
megatron-core ``tensor_parallel/layers.py: LinearWithGradAccumulationAndAsyncCommunication.backward``,
``models/gpt/gpt_model.py: shared_embedding_or_output_weight``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bridge_memory.inventory.megatron.embedding import position_rows
from bridge_memory.spec import divide
from bridge_memory.tapes.chain import Label, Link
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.symbolic import largest


class PendingGradients(NamedTuple):
    """Gradients of shared weights during the backward of one block, in bytes."""

    #: Partial sums that wait for other uses.
    before: int = 0
    #: The gradient that this use makes.
    own: int = 0
    #: The sum, if it is a third tensor.
    total: int = 0
    #: At the embedding, of learned positions: the partial sum, this use's gradient, and the gradient of the embeddings.
    positions: int = 0

    @property
    def at_the_sum(self) -> int:
        return self.before + self.own + self.total


#: For a block that shares no weight with another block of its chunk.
NOTHING_WAITS = PendingGradients()


def pending_gradients(
    blocks: Sequence[Label], ctx: BlockContext, *, tied: bool, positions: int | None = 0
) -> list[PendingGradients]:
    """The pending gradients of each of ``blocks``, given by label in forward order.

    ``tied``: output layers use the embedding's weight. The gradients of embedding and output layer are dense, [V / t,
    h]. If the GEMM adds into the main gradient, the output layer's is a dummy gradient that Transformer Engine keeps
    for good (``Recorder.weight_grad``), so that a sum needs another tensor. ``positions``: rows of a table of learned
    positions (``embedding.learned_positions``), whose gradient is dense too.
    """
    shape = (divide(ctx.padded_vocab, ctx.tp, "padded vocab_size", "tensor_model_parallel_size"), ctx.hidden_size)
    dense = shape[0] * shape[1] * ctx.act
    of_output = Recorder(ctx).weight_grad(shape, te=False)
    weights = [_weight(label, ctx, tied=tied) for label in blocks]
    uses = {name: weights.count(name) for name in ("embedding", "output")}
    waiting: dict[str, int] = {}
    of_positions = position_rows(ctx, positions) * ctx.hidden_size * ctx.act
    uses_of_positions, positions_wait = sum(_embeds(label, ctx) for label in blocks), 0
    out: list[PendingGradients] = []
    for label, name in zip(reversed(blocks), reversed(weights), strict=True):
        before, at_positions = sum(waiting.values()) + positions_wait, 0
        if _embeds(label, ctx):
            uses_of_positions -= 1
            if label is Label.EMBEDDING and positions_wait:
                # Both gradients of positions are summed and accumulated before the words' gradient is made.
                before -= positions_wait
                at_positions = before + 2 * positions_wait + ctx.tokens * ctx.hidden_size * ctx.act
            positions_wait = of_positions if uses_of_positions else 0
        if not name:
            out.append(PendingGradients(before))
            continue
        own = of_output if label is Label.LOSS else dense
        total = dense if waiting.get(name) == 0 else 0
        uses[name] -= 1
        if not uses[name]:
            waiting.pop(name, None)
        elif name in waiting:
            waiting[name] = dense
        else:
            waiting[name] = own
        out.append(PendingGradients(before, own, total, at_positions))
    return out[::-1]


def shares_weights(blocks: Sequence[Label], ctx: BlockContext, *, tied: bool) -> bool:
    """Whether two of ``blocks`` use the same weight; else no gradient waits. ``tied`` as in ``pending_gradients``."""
    weights = [name for label in blocks if (name := _weight(label, ctx, tied=tied))]
    return len(set(weights)) < len(weights)


def with_pending(link: Link, pending: PendingGradients) -> Link:
    """The link with partial sums alive during its backward; the embedding adds its gradient to them at its end."""
    if not pending.before and not pending.total and not pending.positions:
        return link
    summed = largest(pending.at_the_sum, pending.positions) if link.label is Label.EMBEDDING else 0
    return link.with_concurrent(pending.before, summed)


def _embeds(label: Label, ctx: BlockContext) -> bool:
    """Whether the block looks up words (and learned positions, if any) and its backward makes their gradients; a depth
    without a backward makes none."""
    return label is Label.EMBEDDING or (label is Label.MTP and not ctx.mtp_without_gradients)


def _weight(label: Label, ctx: BlockContext, *, tied: bool) -> str:
    """The shared weight of which the block's backward makes a gradient; "" if none."""
    if _embeds(label, ctx) or (label is Label.LOSS and tied):
        return "embedding"
    return "output" if label is Label.LOSS else ""
