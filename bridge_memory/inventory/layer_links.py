"""The decoder layers of a chunk as links of its chain: as they are, recomputed, or sent to host memory.

Full recomputation puts layers into groups that keep only their input and run forward again in backward.

Source: megatron-core ``transformer/transformer_block.py: _checkpointed_forward``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from bridge_memory.components import Part, Provenance
from bridge_memory.inventory.layer import layer_block
from bridge_memory.releases import HYBRID_LAYERS_RECOMPUTED
from bridge_memory.spec import LayerSpec, ModelSpec, MoESpec, RecomputeSpec
from bridge_memory.spec.layout import ChunkShape
from bridge_memory.tapes.alive import BlockCost
from bridge_memory.tapes.chain import Label, Link, higher, plain_link
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.symbolic import largest


def ignores_full_recompute(model: ModelSpec, ctx: BlockContext) -> bool:
    """Whether the model's stack knows no full recomputation: hybrids' runs its layers one by one, whatever
    ``recompute_granularity`` full asks for (selective recomputation works inside them)."""
    return model.hybrid and not HYBRID_LAYERS_RECOMPUTED(ctx.impl)


def fully_recomputed(layers: int, ctx: BlockContext, *, ignored: bool = False) -> tuple[int, int]:
    """How many of a chunk's ``layers`` are recomputed as a whole, from the first on, and how many together."""
    found: tuple[int, int] = (0, 1) if ignored else ctx.common_recompute(lambda rc: _fully(rc, layers))
    return found


def recomputed_layers(layers: int, ctx: BlockContext, *, ignored: bool = False) -> Any:
    """Of these how many; of many runs an array, where ``fully_recomputed`` asks."""
    return 0 if ignored else ctx.by_recompute(lambda rc: _fully(rc, layers)[0])


def _fully(rc: RecomputeSpec, layers: int) -> tuple[int, int]:
    if rc.granularity != "full":
        return 0, 1
    if rc.method == "block":
        return min(rc.num_layers or 0, layers), 1
    return layers, rc.num_layers or 1


def offloaded_layers(model: ModelSpec, ctx: BlockContext) -> int:
    """How many of the first layers send what they keep to host memory: none of a hybrid's, whose stack does not ask for
    ``cpu_offloading_num_layers`` (``transformer_block.py: TransformerBlock.__init__`` alone does)."""
    return 0 if model.hybrid else ctx.impl.cpu_offloading_num_layers


def reached(model: ModelSpec, shape: ChunkShape, ctx: BlockContext) -> bool:
    """Whether the input of a chunk's first layer has a gradient.

    That of a frozen embedding has none; but under full recomputation Megatron Bridge gives it one (``peft/recompute.py:
    maybe_enable_recompute_inputs_grad``).
    """
    if ctx.adapters is None or not shape.embedding:
        return True
    full: bool = ctx.common_recompute(lambda rc: rc.granularity == "full")
    return full and not ignores_full_recompute(model, ctx)


def layer_links(model: ModelSpec, shape: ChunkShape, ctx: BlockContext) -> list[tuple[Link, int]]:
    """The decoder layers of one chunk of ``model``, kinds in a row, as (link, how many in a row)."""
    layers, has_gradient = shape.layers, reached(model, shape, ctx)
    links: list[tuple[Link, int]] = []
    number = sum(count for _, count in layers)
    recomputed, size = fully_recomputed(number, ctx, ignored=ignores_full_recompute(model, ctx))
    for group, count in _groups(layers, recomputed, size):
        _append(links, _checkpointed(group, ctx), count)
    away = offloaded_layers(model, ctx)
    at = 0
    for kind, count in layers:
        first, beyond = max(at, recomputed), at + count
        while not has_gradient and first < beyond:
            # Nothing before the first adapter is kept, nor is it run backward.
            found = layer_block(kind, ctx, reached=False)
            _append(links, plain_link(found, Label.LAYER), 1)
            has_gradient, first = found.cost.output_reached, first + 1
        sent = max(0, min(beyond, away) - first)
        if sent:
            _append(links, _sent_to_host(layer_link(kind, ctx)), sent)
        if beyond - first - sent > 0:
            _append(links, layer_link(kind, ctx), beyond - first - sent)
        at = beyond
    return links


Group = tuple[tuple[LayerSpec, int], ...]


def _groups(layers: Sequence[tuple[LayerSpec, int]], recomputed: int, size: int) -> Iterator[tuple[Group, int]]:
    """The first ``recomputed`` layers in groups of ``size``, (kinds in a row, how many such groups in a row)."""
    group: list[tuple[LayerSpec, int]] = []
    filled = 0
    for kind, count in layers:
        count = min(count, recomputed)
        recomputed -= count
        while count:
            if not filled and count >= size:
                yield ((kind, size),), count // size
                count %= size
                continue
            taken = min(count, size - filled)
            group.append((kind, taken))
            filled, count = filled + taken, count - taken
            if filled == size:
                yield tuple(group), 1
                group, filled = [], 0
    if group:
        yield tuple(group), 1


def _checkpointed(group: Group, ctx: BlockContext) -> Link:
    """Layers recomputed together. Alive throughout backward: the kept input, and the recomputed output with its
    gradient (``random.py: CheckpointFunction.backward`` holds both)."""
    known = ctx.evaluated.get(("recomputed", group))
    if known is not None:
        return known
    costs = [(layer_block(kind, ctx).cost, dispatches(kind), count) for kind, count in group]
    first, last = costs[0][0], costs[-1][0]
    entry = first.input_bytes
    shards = ctx.tp if ctx.recompute.distribute_saved_activations else 1
    kept = entry // shards
    # The first layer's saved tensors include the input unless it was sharded away or is not saved at all.
    concurrent = 0 if first.input_retained and shards == 1 else kept
    carried_over = 2 * entry if any(routes for _, routes, _ in costs) else 0
    routers = sum(count for _, routes, count in costs if routes)
    forward = earlier = 0
    number = sum(count for _, _, count in costs)
    out = last.output_bytes
    best, name, before, at = 0, _nothing, 0, 0
    for c, routes, count in costs:
        for k in range(count):
            if k not in (0, 1, count - 2, count - 1):
                continue  # In a row of one kind only the ends can be the highest.
            # What was left goes when the last of the group's routers has run.
            base = earlier + k * c.no_grad_retained + (entry if at + k else 0)
            later = routers - (k + 1 if routes else 0)
            forward = largest(forward, base + c.no_grad_peak + (carried_over if later else 0))
            if routes:
                forward = largest(forward, base + c.before_landmark[3] + carried_over)
            back = c.backward_peak_held if at + k + 1 == number else c.backward_peak + out
            behind = before + k * c.retained
            for peak, what in (
                (behind + c.forward_peak + out, partial(_recomputed_name, c)),
                (behind + back + out, c.backward_name),
            ):
                best, name = higher(best, name, peak, what)
        earlier += count * c.no_grad_retained
        before += count * c.retained
        at += count
        routers -= count if routes else 0
    link = ctx.evaluated["recomputed", group] = Link(
        Label.RECOMPUTED, kept, forward, best + concurrent, best + concurrent, _recomputed_layers, name,
        more=(((Part.RECOMPUTED_INPUT, Provenance.FORMULA), kept),), carried_over=carried_over,
        carried_over_gradient=carried_over // 2, layers=number,
    )
    return link


def _recomputed_layers() -> str:
    return "recomputed layers"


def _recomputed_name(cost: BlockCost) -> str:
    return f"{cost.forward_name()} (recomputed)"


def _nothing() -> str:
    return ""


def layer_link(layer: LayerSpec, ctx: BlockContext) -> Link:
    """A layer as it is, or with parts of it recomputed.

    What is recomputed before a router stays when it is done: the dispatcher's probabilities are an attribute, and
    their graph leads back to the checkpoint's input, which has its gradient (``token_dispatcher.py: self.probs``,
    ``random.py: CheckpointFunction.backward``). The next forward replaces them.
    """
    known = ctx.evaluated.get(("link", layer))
    if known is not None:
        return known
    found = layer_block(layer, ctx)
    link = plain_link(found, Label.LAYER)
    if dispatches(layer) and ctx.recomputes("moe"):
        link = with_carried_over(link, found.cost, 2 * ctx.tokens_sp * ctx.hidden_size * ctx.act)
    ctx.evaluated["link", layer] = link
    return link


def with_carried_over(link: Link, cost: BlockCost, carried_over: int) -> Link:
    """A link that finds ``carried_over`` bytes of its last backward where its router has not run yet, and leaves as
    many."""
    forward, backward, held, _ = (peak + carried_over for peak in cost.before_landmark)
    return link._replace(
        carried_over=carried_over, forward_peak=largest(link.forward_peak, forward),
        backward_peak=largest(link.backward_peak, backward),
        backward_peak_held=largest(link.backward_peak_held, held), routed_peak=0,
    )


def dispatches(layer: LayerSpec) -> bool:
    return isinstance(layer.ffn, MoESpec)


def _sent_to_host(link: Link) -> Link:
    """A layer whose saved tensors are in host memory between its passes (TE ``cpu_offload.py``)."""
    return link._replace(label=Label.OFFLOADED, retained=0, cost=None, more=(), offloaded=0)


def _append(links: list[tuple[Link, int]], link: Link, count: int) -> None:
    if links and links[-1][0] is link:
        links[-1] = (link, links[-1][1] + count)
    else:
        links.append((link, count))
