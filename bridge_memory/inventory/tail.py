"""What follows the decoder layers of a chunk: final norm, MTP depths, their losses and the main one.

Source: megatron-core ``models/gpt/gpt_model.py: GPTModel.__init__, _postprocess``,
``transformer/multi_token_prediction.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

from bridge_memory.inventory.layer import final_norm_block, mtp_block, output_block
from bridge_memory.inventory.layer_links import dispatches, layer_link, with_carried_over
from bridge_memory.inventory.megatron.embedding import learned_positions
from bridge_memory.inventory.shared_weights import PendingGradients, with_pending
from bridge_memory.releases import (
    FINAL_NORM_AFTER_LAST_LAYER,
    LOSS_GRADIENT_IN_FP32,
    MTP_LOGITS_FREED,
    MTP_LOSS_OUTSIDE,
)
from bridge_memory.spec import ModelSpec
from bridge_memory.spec.layout import ChunkShape
from bridge_memory.tapes.alive import BlockCost
from bridge_memory.tapes.blocks import Block
from bridge_memory.tapes.chain import Label, Link, plain_link
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.symbolic import largest


def tail_blocks(model: ModelSpec, shape: ChunkShape, ctx: BlockContext) -> list[tuple[Block, Label]]:
    """The blocks after the decoder layers: final norm, MTP depths, their losses and the main loss."""
    tail: list[tuple[Block, Label]] = []
    if holds_final_norm(model, shape, ctx):
        tail.append((final_norm_block(final_norm_name(model), ctx), Label.FINAL_NORM))
    own, positions = has_own_output_weight(model, shape), learned_positions(model)
    outside = mtp_loss_is_outside(ctx)
    for n in range(1, shape.num_depths + 1):
        assert model.mtp_layer is not None
        waits = positions != 0 and n == shape.num_depths and (shape.embedding or n > 1)
        tail.append((mtp_block(model.mtp_layer, ctx, positions, waits=waits), Label.MTP))
        if not outside:  # its input is also the next depth's, which counts it
            counted = n < shape.num_depths
            tail.append((output_block(model.output_bias, own, ctx, counted, model.softcapped_logits), Label.LOSS))
    if shape.output:
        losses = 1 + (model.mtp_num_layers if model.mtp_layer is not None and outside else 0)
        counted = bool(shape.num_depths) and not outside
        loss = output_block(model.output_bias, own, ctx, counted, model.softcapped_logits)
        tail += [(loss, Label.LOSS)] * (losses - 1)
        if ctx.impl.distillation != "none":  # only for the main head, which is the last
            loss = output_block(model.output_bias, own, ctx, counted, model.softcapped_logits, distilled=True)
        tail.append((loss, Label.LOSS))
    return tail


def tail_links(
    tail: Sequence[tuple[Block, Label]], model: ModelSpec, shape: ChunkShape, ctx: BlockContext,
    pending: Sequence[PendingGradients],
) -> list[tuple[Link, int]]:  # fmt: skip
    """``tail_blocks`` as links of the chunk's chain; ``pending``: weight gradients that wait during the backward of
    each.
    """
    losses = of_all = sum(label is Label.LOSS for _, label in tail)
    depths = shape.num_depths
    links: list[tuple[Link, int]] = []
    for (found, label), waiting in zip(tail, pending, strict=True):
        link = plain_link(found, label)
        if label is Label.MTP:
            depths -= 1
            link = _mtp_with_carried_over(link, found.cost, model, ctx)
            if not shape.output:
                # The gradient of its output is a view of the gradient of all that is sent, which the schedule holds.
                own = hidden_states_bytes(ctx)
                link = link if depths else link._replace(backward_peak=link.backward_peak_held - own)
            elif mtp_loss_is_outside(ctx):
                number = shape.num_depths - depths
                link = _with_joined_states(link, found.cost, model, number, shape.num_depths, ctx)
        elif label is Label.LOSS:
            if ctx.adapters is not None and mtp_loss_is_outside(ctx):
                # A variable holds the concatenated hidden states of all depths; frozen output layers do not save them.
                link = link._replace(forward_peak=link.forward_peak + (of_all - 1) * hidden_states_bytes(ctx))
            losses -= 1
            if losses:
                link = _before_losses(link, losses, ctx, waiting, first=losses == of_all - 1)
        if shape.num_depths and ctx.mtp_without_gradients and label is not Label.FINAL_NORM:
            states = shape.num_depths - depths - 1 if label is Label.MTP else 1
            link = _with_held_states(link, states, ctx)
        links.append((with_pending(link, waiting), 1))
    if shape.num_depths and not shape.output:
        links.append((_joined(shape.num_depths, ctx), 1))
    if shape.output and model.mtp_layer is not None and mtp_loss_is_outside(ctx) and not MTP_LOGITS_FREED(ctx.impl):
        # A variable of ``_postprocess`` holds an MTP depth's logits while the main loss is made.
        loss, _ = links[-1]
        links[-1] = (loss._replace(forward_peak=loss.forward_peak + mtp_logits_bytes(ctx)), 1)
    return links


def _mtp_with_carried_over(link: Link, cost: BlockCost, model: ModelSpec, ctx: BlockContext) -> Link:
    """As ``layer_link``. A recomputed depth has two inputs, the hidden states and the embedding of the next tokens; the
    bytes carried over from its last backward are freed in its forward pass, before its backward."""
    if model.mtp_layer is None or not dispatches(model.mtp_layer):
        return link
    if ctx.mtp_without_gradients:
        return link
    if ctx.mtp_recomputed:
        carried_over = 4 * ctx.hidden_bytes
        forward = largest(link.forward_peak, cost.before_landmark_forward + carried_over)
        return link._replace(carried_over=carried_over, forward_peak=forward, routed_peak=0)
    carried_over = layer_link(model.mtp_layer, ctx).carried_over
    return with_carried_over(link, cost, carried_over) if carried_over else link


def _with_held_states(link: Link, states: int, ctx: BlockContext) -> Link:
    """The link with hidden states that only variables hold, since depths without a backward save none. During a depth:
    those of the decoder and of earlier depths except its own input (``MultiTokenPredictionBlock.forward``:
    ``hidden_states_list``). During a loss: the decoder's (``gpt_model.py: GPTModel.forward``)."""
    return link._replace(forward_peak=link.forward_peak + states * ctx.hidden_bytes)


def _with_joined_states(
    link: Link, cost: BlockCost, model: ModelSpec, number: int, depths: int, ctx: BlockContext
) -> Link:
    """MTP depth ``number`` of ``depths``. Its backward runs while the gradient of the concatenated hidden states,
    [(1 + depths) T_sp, h], is kept alive by a view: the gradient of the first of them. The gradient of the last depth's
    output is a view of it too. The first depth adds its input's gradient to that view, in a new tensor, before the
    embedding's gradient is made."""
    hidden, alone, until_then = hidden_states_bytes(ctx), 0, link
    if number == 1:
        alone, cost = link.backward_peak, cost.without_apart
        until_then = link._replace(backward_peak=cost.backward_peak, backward_peak_held=cost.backward_peak_held)
        until_then = _mtp_with_carried_over(until_then, cost, model, ctx)
    peak = until_then.backward_peak + (1 + depths) * hidden
    if number == depths:
        peak = until_then.backward_peak_held + depths * hidden
    peak = largest(peak, alone)
    return link._replace(backward_peak=peak, backward_peak_held=peak)


def _joined(depths: int, ctx: BlockContext) -> Link:
    """Concatenates the hidden states of the decoder and of ``depths``, to be sent to the stage with the losses
    (``multi_token_prediction.py: MultiTokenPredictionBlock.forward``); nothing else keeps the last depth's alive. In
    backward their gradients are views of the received gradient."""
    hidden = hidden_states_bytes(ctx)
    whole = (1 + depths) * hidden
    return Link(
        Label.PASSED_ON, 0, whole + hidden, whole, whole, lambda: "joined hidden states",
        lambda: "gradient of joined hidden states",
    )


def received_states(model: ModelSpec, shape: ChunkShape) -> int:
    """How many hidden states a chunk without layers receives: if it has only the losses, those of every depth too."""
    return 1 + model.mtp_num_layers if shape.output and not shape.num_depths and not shape.last_layer else 1


def _before_losses(link: Link, others: int, ctx: BlockContext, waiting: PendingGradients, *, first: bool) -> Link:
    """A loss, with what the ``others`` after it leave alive during its backward: gradients of their hidden states, and
    the tensor of all hidden states while an earlier loss holds a view of it. If each loss follows its depth, it is the
    gradient of the next depth's input, and that input itself, which the depth counts and the loss still holds."""
    hidden = hidden_states_bytes(ctx)
    joined = mtp_loss_is_outside(ctx)
    before_a_depth = others > 1 and not joined
    gradients = (others if joined else 1 + before_a_depth) * hidden
    kept = others * hidden if joined else before_a_depth * hidden
    summed = waiting.own + waiting.total + gradients + hidden
    if joined and not first:
        summed += kept + hidden
    return link.with_concurrent(gradients + kept, summed)


def hidden_states_bytes(ctx: BlockContext) -> int:
    """[T_sp, h] in the compute dtype."""
    return ctx.tokens_sp * ctx.hidden_size * ctx.act


def mtp_loss_is_outside(ctx: BlockContext) -> bool:
    """Whether the depths' losses run after all depths, and save a copy of their inputs."""
    return MTP_LOSS_OUTSIDE(ctx.impl)


def mtp_logits_bytes(ctx: BlockContext) -> int:
    """Bytes of the logits of one MTP depth in the compute dtype, [T, V / t]; 0 if they are saved for backward anyway.
    """
    kept = {"linear": True, "te": not LOSS_GRADIENT_IN_FP32(ctx.impl)}
    if ctx.impl.cross_entropy_loss_fusion and kept.get(ctx.impl.cross_entropy_fusion_impl, False):
        return 0
    if not ctx.impl.cross_entropy_loss_fusion and ctx.act == 4:  # without a cast the loss saves the logits themselves
        return 0
    return ctx.tokens * ctx.padded_vocab // ctx.tp * ctx.act


def final_norm_name(model: ModelSpec) -> str:
    """Name of the final norm; MambaModel calls it final_norm (``ssm/mamba_block.py``)."""
    return "decoder.final_norm" if model.hybrid else "decoder.final_layernorm"


def holds_final_norm(model: ModelSpec, shape: ChunkShape, ctx: BlockContext) -> bool:
    """Whether this chunk has the final norm: the last stage, or with MTP the stage of the last decoder layer
    (``transformer_block.py: has_final_layernorm_in_this_stage``). Wan has none."""
    if model.diffusion is not None:
        return False
    if not (model.layers and model.mtp_num_layers and FINAL_NORM_AFTER_LAST_LAYER(ctx.impl)):
        return shape.output
    return shape.last_layer


def has_own_output_weight(model: ModelSpec, shape: ChunkShape) -> bool:
    """Whether this chunk's output layer has a weight: untied, or a tied copy on another stage than the embedding. It
    has one even if MTP's copy of the embedding is on the same stage and used instead (``gpt_model.py:
    GPTModel.__init__, shared_embedding_or_output_weight``)."""
    return not (model.share_embeddings_and_output_weights and shape.embedding)
