"""Gradients of a weight that one chunk uses more than once.

The embedding's weight serves the embedding, every MTP depth and, tied, the output layer; an untied output layer's
weight serves the main loss and those of the MTP depths. A table of learned positions serves the embedding and every
depth. Autograd hands a weight its gradient when all uses have
given theirs. Until then the sum so far waits: with tied embeddings on one stage, through the whole backward pass.

Source: PyTorch ``torch/csrc/autograd/input_buffer.cpp: accumulate`` (in place where nobody else holds the first),
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
    """Around the backward of one block, in bytes."""

    #: Gradients of weights that wait for those of other uses.
    before: int = 0
    #: This use's own gradient.
    own: int = 0
    #: The tensor of the sum, where it is neither of the two it is of.
    total: int = 0
    #: Of positions, at the embedding: what waits and its own, with the gradient of the embeddings that both are of.
    positions: int = 0

    @property
    def at_the_sum(self) -> int:
        return self.before + self.own + self.total


#: Of a block whose weights no other block of its chunk uses.
NOTHING_WAITS = PendingGradients()


def pending_gradients(
    blocks: Sequence[Label], ctx: BlockContext, *, tied: bool, positions: int | None = 0
) -> list[PendingGradients]:
    """For each of ``blocks``, by label and in forward order.

    ``tied``: their output layers use the embedding's weight. The embedding's gradient is a dense [V / t, h]. So is the
    output layer's; but where the GEMM adds into the main gradient, a stand-in that Transformer Engine keeps for good
    takes its place (``Recorder.weight_grad``), which a sum may not be written over. ``positions``: rows of a table of
    learned ones (``embedding.learned_positions``), whose gradient is dense too.
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
                # It has both before it makes the words' gradient, and then neither.
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
    """Whether two of ``blocks`` use one weight; nothing waits where none do. ``tied`` as in ``pending_gradients``."""
    weights = [name for label in blocks if (name := _weight(label, ctx, tied=tied))]
    return len(set(weights)) < len(weights)


def with_pending(link: Link, pending: PendingGradients) -> Link:
    """A link whose backward finds gradients of weights waiting, to which the embedding adds its own at its end."""
    if not pending.before and not pending.total and not pending.positions:
        return link
    summed = largest(pending.at_the_sum, pending.positions) if link.label is Label.EMBEDDING else 0
    return link.with_concurrent(pending.before, summed)


def _embeds(label: Label, ctx: BlockContext) -> bool:
    """Whether the block looks up words (and learned positions, where there are any) and its backward gives them a
    gradient; a depth without a backward gives none."""
    return label is Label.EMBEDDING or (label is Label.MTP and not ctx.mtp_without_gradients)


def _weight(label: Label, ctx: BlockContext, *, tied: bool) -> str:
    """The weight to which the block's backward gives a gradient that others may wait for."""
    if _embeds(label, ctx) or (label is Label.LOSS and tied):
        return "embedding"
    return "output" if label is Label.LOSS else ""
