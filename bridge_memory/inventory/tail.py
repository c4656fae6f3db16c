"""What follows the decoder layers of a chunk: final norm, MTP depths, their losses and the main one.

Source: megatron-core ``models/gpt/gpt_model.py: GPTModel.__init__, _postprocess``,
``transformer/multi_token_prediction.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bridge_memory.inventory.chain import Link, plain_link
from bridge_memory.inventory.context import BlockContext
from bridge_memory.inventory.layer import final_norm_inventory, mtp_inventory, output_inventory
from bridge_memory.inventory.layer_links import dispatches, layer_link, leaving
from bridge_memory.inventory.mtp import depth_is_recomputed
from bridge_memory.inventory.recorder import BlockInventory
from bridge_memory.inventory.shared_weights import Waiting, beside
from bridge_memory.inventory.tape import BlockCost
from bridge_memory.releases import FINAL_NORM_AFTER_LAST_LAYER, MTP_LOGITS_FREED, MTP_LOSS_OUTSIDE
from bridge_memory.spec import ModelSpec
from bridge_memory.spec.layout import Chunk


def tail_inventories(model: ModelSpec, chunk: Chunk, ctx: BlockContext) -> list[tuple[BlockInventory, str]]:
    """What follows the decoder layers: final norm, MTP depths, their losses and the main one."""
    tail: list[tuple[BlockInventory, str]] = []
    if holds_final_norm(model, chunk, ctx):
        tail.append((final_norm_inventory(final_norm_name(model), ctx), "final norm"))
    own = untied_here(model, chunk)
    outside = mtp_loss_is_outside(ctx)
    for n, _ in enumerate(chunk.mtp, 1):
        assert model.mtp_layer is not None
        tail.append((mtp_inventory(model.mtp_layer, ctx), "MTP"))
        if not outside:  # its input is the next depth's, which counts it
            tail.append((output_inventory(model.output_bias, own, ctx, n < len(chunk.mtp)), "loss"))
    if chunk.output:
        losses = 1 + (model.mtp_num_layers if model.mtp_layer is not None and outside else 0)
        loss = output_inventory(model.output_bias, own, ctx, bool(chunk.mtp) and not outside)
        tail += [(loss, "loss")] * losses
    return tail


def tail_links(
    tail: Sequence[tuple[BlockInventory, str]], model: ModelSpec, chunk: Chunk, ctx: BlockContext,
    waiting: Sequence[Waiting],
) -> list[tuple[Link, int]]:  # fmt: skip
    """``tail_inventories`` as links of the chunk's chain; ``waiting``: what the backward of each finds."""
    losses = of_all = sum(label == "loss" for _, label in tail)
    depths = len(chunk.mtp)
    links: list[tuple[Link, int]] = []
    for (inventory, label), found in zip(tail, waiting, strict=True):
        link = plain_link(inventory, label)
        if label == "MTP":
            depths -= 1
            link = _leaving_of_mtp(link, inventory.cost, model, ctx)
            link = _beside_joined(link, len(chunk.mtp), ctx, last=not depths)
        elif label == "loss":
            losses -= 1
            if losses:
                link = _before_losses(link, losses, ctx, found, first=losses == of_all - 1)
        links.append((beside(link, found), 1))
    if chunk.output and model.mtp_layer is not None and (
        mtp_loss_is_outside(ctx) and not MTP_LOGITS_FREED(ctx.impl)
    ):
        loss, _ = links[-1]
        links[-1] = (replace(loss, forward_peak=loss.forward_peak + mtp_logits_bytes(ctx)), 1)
    return links


def _leaving_of_mtp(link: Link, cost: BlockCost, model: ModelSpec, ctx: BlockContext) -> Link:
    """As ``layer_link``. A recomputed depth has two inputs, the hidden states and the embedding of the next tokens;
    what it left is gone before its backward, with its own forward pass."""
    if model.mtp_layer is None or not dispatches(model.mtp_layer):
        return link
    if depth_is_recomputed(ctx):
        left = 4 * ctx.hidden_bytes
        forward = max(link.forward_peak, cost.early[0] + left)
        return replace(link, left=left, forward_peak=forward, routed_peak=0)
    left = layer_link(model.mtp_layer, ctx).left
    return leaving(link, cost, left) if left else link


def _beside_joined(link: Link, depths: int, ctx: BlockContext, *, last: bool) -> Link:
    """An MTP depth whose backward runs while the gradient of all hidden states joined, [(1 + depths) T_sp, h], waits as
    that of the first of them, of which it is a part. So is the gradient of the ``last`` depth's output."""
    if not mtp_loss_is_outside(ctx):
        return link
    hidden = ctx.tokens_sp * ctx.hidden_size * ctx.act
    peak = link.backward_peak_held + depths * hidden if last else link.backward_peak + (1 + depths) * hidden
    return replace(link, backward_peak=peak, backward_peak_held=peak)


def _before_losses(link: Link, others: int, ctx: BlockContext, waiting: Waiting, *, first: bool) -> Link:
    """A loss whose backward finds what ``others`` after it left: gradients of their hidden states, and the tensor of
    all hidden states while a loss before it keeps a part."""
    hidden = ctx.tokens_sp * ctx.hidden_size * ctx.act
    joined = mtp_loss_is_outside(ctx)
    gradients = (others if joined else 1) * hidden
    kept = others * hidden if joined else 0
    summed = waiting.own + waiting.total + gradients + hidden
    if joined and not first:
        summed += kept + hidden
    return link.beside(gradients + kept, summed)


def mtp_loss_is_outside(ctx: BlockContext) -> bool:
    """Whether the depths' losses follow after all depths, and keep a copy of their inputs."""
    return MTP_LOSS_OUTSIDE(ctx.impl)


def mtp_logits_bytes(ctx: BlockContext) -> int:
    """Logits of one MTP depth in the compute dtype, [T, V / t], where they are not kept for backward anyway."""
    if ctx.impl.cross_entropy_loss_fusion and ctx.impl.cross_entropy_fusion_impl in ("te", "linear"):
        return 0
    return ctx.tokens * ctx.padded_vocab // ctx.tp * ctx.act


def final_norm_name(model: ModelSpec) -> str:
    """MambaModel calls it final_norm (``ssm/mamba_block.py``)."""
    return "decoder.final_norm" if model.hybrid else "decoder.final_layernorm"


def holds_final_norm(model: ModelSpec, chunk: Chunk, ctx: BlockContext) -> bool:
    """Whether the final norm is here: on the last stage, with MTP after the last decoder layer
    (``transformer_block.py: has_final_layernorm_in_this_stage``)."""
    if not (model.layers and model.mtp_num_layers and FINAL_NORM_AFTER_LAST_LAYER(ctx.impl)):
        return chunk.output
    return (model.num_layers - 1) in chunk.layers


def untied_here(model: ModelSpec, chunk: Chunk) -> bool:
    """Whether this chunk's output layer holds a weight of its own: untied, or a tied copy away from the first stage's
    embedding. There is one beside MTP's copy of the embedding too, which is used instead of it
    (``gpt_model.py: GPTModel.__init__, shared_embedding_or_output_weight``)."""
    return not (model.share_embeddings_and_output_weights and chunk.embedding)
