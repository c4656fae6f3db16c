"""Tensors that MoE dispatchers hold as attributes from one microbatch to the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bridge_memory.components import Component, Lifetime, Part
from bridge_memory.inventory.layer_links import fully_recomputed, ignores_full_recompute
from bridge_memory.inventory.megatron.moe import held_order_bytes, held_routing_bytes, routed_gradients
from bridge_memory.releases import OVERLAPPED_LAYERS_FREED
from bridge_memory.spec import ModelSpec, MoESpec
from bridge_memory.spec.layout import ChunkShape
from bridge_memory.tapes.context import BlockContext
from bridge_memory.workspaces.libraries import buffer


class ExpertLayers(NamedTuple):
    """MoE layers of one kind on a stage; ``recomputed``: they dispatch again in backward."""

    ffn: MoESpec
    recomputed: bool
    number: int


def expert_layers(model: ModelSpec, shape: ChunkShape, ctx: BlockContext) -> list[ExpertLayers]:
    """All MoE layers of a chunk, including those of MTP depths."""
    if not model.has_experts and (model.mtp_layer is None or not isinstance(model.mtp_layer.ffn, MoESpec)):
        return []
    again = ctx.recomputes("moe")
    found: list[ExpertLayers] = []
    recomputed, _ = fully_recomputed(shape.num_layers, ctx, ignored=ignores_full_recompute(model, ctx))
    for kind, count in shape.layers:
        if isinstance(kind.ffn, MoESpec):
            first = count if again else max(0, min(count, recomputed))
            if first:
                found.append(ExpertLayers(kind.ffn, True, first))
            if count > first:
                found.append(ExpertLayers(kind.ffn, False, count - first))
        recomputed -= count
    if shape.num_depths and model.mtp_layer is not None and isinstance(model.mtp_layer.ffn, MoESpec):
        found.append(ExpertLayers(model.mtp_layer.ffn, again or ctx.mtp_recomputed, shape.num_depths))
    return found


def held_by_dispatchers(layers: Sequence[ExpertLayers], ctx: BlockContext, carried_over: int) -> Iterator[Component]:
    """``carried_over``: bytes that recomputed MoE layers carry over from backward (``ChunkInventory.carried_over``)."""
    if carried_over:
        # token_dispatcher.py: the graph of self.probs leads to them until the next forward
        yield buffer(
            "inputs of recomputed MoE layers and their gradients", carried_over, Part.DISPATCHER, Lifetime.BETWEEN_STEPS
        )
    impl = ctx.impl
    if impl.overlap_moe_expert_parallel_comm and impl.moe_token_dispatcher_type == "alltoall":
        # The input of the schedule's node that ends with the router is a leaf, to which the graph of self.probs leads
        # (pipeline_parallel/utils.py: ScheduleNode._forward, token_dispatcher.py: dispatch_preprocess).
        # If that input is offloaded, only its gradient stays (transformer_layer.py: _forward_attention, group_offload).
        each = ctx.hidden_bytes * (1 if "attn_norm" in impl.offload_modules else 2)
        nbytes = each * sum(kind.number for kind in layers)
        yield buffer(
            "inputs of every MoE layer's last microbatch and their gradients", nbytes, Part.DISPATCHER,
            Lifetime.BETWEEN_STEPS,
        )  # fmt: skip
    routing = sum(n * held_routing_bytes(ctx, ffn) for ffn, _, n in layers)
    if routing:
        # token_dispatcher.py: probs and routing_map stay attributes of the dispatcher
        yield buffer("routing of every MoE layer's last microbatch", routing, Part.DISPATCHER)
    again = sum(n * held_order_bytes(ctx, ffn) for ffn, recomputed, n in layers if recomputed)
    if again:
        # token_dispatcher.py: reversed_local_input_permutation_mapping stays an attribute of the dispatcher
        yield buffer("order of every recomputed MoE layer's last microbatch", again, Part.DISPATCHER)
    once = sum(n * held_order_bytes(ctx, ffn) for ffn, recomputed, n in layers if not recomputed)
    if once:
        # the same mapping, which is saved for backward until that has run
        yield buffer("order of every MoE layer's last microbatch", once, Part.DISPATCHER, Lifetime.BETWEEN_STEPS)


def held_by_nodes(layers: Sequence[ExpertLayers], ctx: BlockContext) -> int:
    """Bytes that schedule nodes of layers that have run backward hold until the chunk is done, with overlapped expert
    communication; 0 in releases that free the nodes layer by layer.

    A layer's nodes are attention, router, dispatch, experts and combine, each with its input and the input's gradient.
    The inputs of the last three are freed when they have run. The inputs of the first two, [s, b, h], stay, and the
    gradients of all five, of which those of the last three are [R, w] (``models/gpt/fine_grained_callables.py:
    TransformerLayerNode._release_state``, which replaces that of ``ScheduleNode``).
    """
    if OVERLAPPED_LAYERS_FREED(ctx.impl):
        return 0
    return sum(n * (4 * ctx.hidden_bytes + routed_gradients(ctx, ffn)) for ffn, _, n in layers)
