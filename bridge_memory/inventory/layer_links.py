"""The decoder layers of a chunk as links of its chain: as they are, recomputed, or sent to host memory.

Full recomputation puts layers into groups that keep only their input and run forward again in backward.

Source: megatron-core ``transformer/transformer_block.py: _checkpointed_forward``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from bridge_memory.inventory.chain import Link, plain_link
from bridge_memory.inventory.context import BlockContext
from bridge_memory.inventory.layer import layer_inventory
from bridge_memory.inventory.tape import BlockCost
from bridge_memory.releases import HYBRID_LAYERS_RECOMPUTED
from bridge_memory.spec import LayerSpec, ModelSpec, MoESpec


def runs_plain(model: ModelSpec, ctx: BlockContext) -> bool:
    """Whether the model's stack knows neither full recomputation nor layers sent to host memory."""
    return model.hybrid and not HYBRID_LAYERS_RECOMPUTED(ctx.impl)


def fully_recomputed(layers: int, ctx: BlockContext, *, plain: bool = False) -> tuple[int, int]:
    """How many of a chunk's ``layers`` are recomputed as a whole, from the first on, and how many together."""
    rc = ctx.recompute
    if rc.granularity != "full" or plain:
        return 0, 1
    if rc.method == "block":
        return min(rc.num_layers or 0, layers), 1
    return layers, rc.num_layers or 1


def layer_links(layers: Sequence[LayerSpec], ctx: BlockContext, *, plain: bool = False) -> list[tuple[Link, int]]:
    """The decoder layers of one chunk as (link, how many in a row). ``plain`` as in ``runs_plain``."""
    links: list[tuple[Link, int]] = []
    recomputed, size = fully_recomputed(len(layers), ctx, plain=plain)
    for start in range(0, recomputed, size):
        _append(links, _checkpointed(tuple(layers[start : min(start + size, recomputed)]), ctx))
    for i, layer in enumerate(layers[recomputed:], recomputed):
        link = layer_link(layer, ctx)
        away = i < ctx.impl.cpu_offloading_num_layers and not plain
        _append(links, _sent_to_host(link) if away else link)
    return links


@lru_cache(maxsize=8192)
def _checkpointed(layers: tuple[LayerSpec, ...], ctx: BlockContext) -> Link:
    """Layers recomputed together. Alive throughout backward: the kept input, and the recomputed output with its
    gradient (``random.py: CheckpointFunction.backward`` holds both)."""
    costs = [layer_inventory(layer, ctx).cost for layer in layers]
    entry = costs[0].input_bytes
    shards = ctx.tp if ctx.recompute.distribute_saved_activations else 1
    kept = entry // shards
    # The first layer's saved tensors include the input unless it was sharded away or is not saved at all.
    beside = 0 if costs[0].input_saved and shards == 1 else kept
    routers = [dispatches(layer) for layer in layers]
    left = 2 * entry if any(routers) else 0
    forward = earlier = 0
    for i, c in enumerate(costs):
        # What was left goes when the last of the group's routers has run.
        base = earlier + (entry if i else 0)
        forward = max(forward, base + c.no_grad_peak + (left if any(routers[i + 1 :]) else 0))
        if routers[i]:
            forward = max(forward, base + c.early[3] + left)
        earlier += c.no_grad_saved
    out = costs[-1].output_bytes
    best, operation, before = 0, "", 0
    for i, c in enumerate(costs, 1):
        back = c.backward_peak_held if i == len(costs) else c.backward_peak + out
        for peak, op in (
            (before + c.forward_peak + out, f"{c.forward_peak_op} (recomputed)"),
            (before + back + out, c.backward_peak_op),
        ):
            if peak > best:
                best, operation = peak, op
        before += c.saved
    return Link(
        "recomputed layers", kept, forward, "recomputed layers", best + beside, operation, best + beside,
        (("layer input (recomputation)", kept),), left=left, left_gradient=left // 2,
    )


@lru_cache(maxsize=8192)
def layer_link(layer: LayerSpec, ctx: BlockContext) -> Link:
    """A layer as it is, or with parts of it recomputed.

    What is recomputed before a router stays when it is done: the dispatcher's probabilities are an attribute, and
    their graph leads back to the checkpoint's input, which has its gradient (``token_dispatcher.py: self.probs``,
    ``random.py: CheckpointFunction.backward``). The next forward replaces them.
    """
    inventory = layer_inventory(layer, ctx)
    link = plain_link(inventory, "layer")
    if not (dispatches(layer) and ctx.recompute.selects("moe")):
        return link
    left = 2 * ctx.tokens_sp * ctx.hidden_size * ctx.act
    return leaving(link, inventory.cost, left)


def leaving(link: Link, cost: BlockCost, left: int) -> Link:
    """A link that finds ``left`` bytes of its last backward where its router has not run yet, and leaves as many."""
    forward, backward, held, _ = (peak + left for peak in cost.early)
    return replace(
        link, left=left, forward_peak=max(link.forward_peak, forward), backward_peak=max(link.backward_peak, backward),
        backward_peak_held=max(link.backward_peak_held, held), routed_peak=0,
    )


def dispatches(layer: LayerSpec) -> bool:
    return isinstance(layer.ffn, MoESpec)


@lru_cache(maxsize=8192)
def _sent_to_host(link: Link) -> Link:
    """A layer whose saved tensors are in host memory between its passes (TE ``cpu_offload.py``)."""
    return replace(link, label="offloaded layer", saved=0, modules=(), offloaded=0)


def _append(links: list[tuple[Link, int]], link: Link) -> None:
    if links and links[-1][0] is link:
        links[-1] = (link, links[-1][1] + 1)
    else:
        links.append((link, 1))
