"""The decoder layers of a chunk as links of its chain: unchanged, recomputed, or offloaded to host memory.

Full recomputation divides layers into groups that save only their input and run forward again in backward.

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
    """Whether ``recompute_granularity`` full has no effect: earlier releases run hybrid models' layers one by one in
    any case (selective recomputation works inside them)."""
    return model.hybrid and not HYBRID_LAYERS_RECOMPUTED(ctx.impl)


def fully_recomputed(layers: int, ctx: BlockContext, *, ignored: bool = False) -> tuple[int, int]:
    """(how many of a chunk's ``layers`` are recomputed as a whole, from the first on; layers per group)."""
    found: tuple[int, int] = (0, 1) if ignored else ctx.common_recompute(lambda rc: _fully(rc, layers))
    return found


def recomputed_layers(layers: int, ctx: BlockContext, *, ignored: bool = False) -> Any:
    """How many layers are fully recomputed; an array for many runs, which ``fully_recomputed`` would divide."""
    return 0 if ignored else ctx.by_recompute(lambda rc: _fully(rc, layers)[0])


def _fully(rc: RecomputeSpec, layers: int) -> tuple[int, int]:
    if rc.granularity != "full":
        return 0, 1
    if rc.method == "block":
        return min(rc.num_layers or 0, layers), 1
    return layers, rc.num_layers or 1


def offloaded_layers(model: ModelSpec, ctx: BlockContext) -> int:
    """How many of the first layers offload their saved tensors to host memory: none in hybrid models, whose stack
    ignores ``cpu_offloading_num_layers`` (only ``transformer_block.py: TransformerBlock.__init__`` reads it)."""
    return 0 if model.hybrid else ctx.impl.cpu_offloading_num_layers


def reached(model: ModelSpec, shape: ChunkShape, ctx: BlockContext) -> bool:
    """Whether the input of a chunk's first layer has a gradient.

    The output of a frozen embedding has none, except under full recomputation, where Megatron Bridge sets
    ``requires_grad`` (``peft/recompute.py: maybe_enable_recompute_inputs_grad``).
    """
    beside = ctx.adapters is not None and ctx.adapters.scheme == "frozen"  # something trains, whose features enter
    if ctx.adapters is None or not shape.embedding or beside:
        return True
    full: bool = ctx.common_recompute(lambda rc: rc.granularity == "full")
    return full and not ignores_full_recompute(model, ctx)


def layer_links(model: ModelSpec, shape: ChunkShape, ctx: BlockContext) -> list[tuple[Link, int]]:
    """The decoder layers of one chunk of ``model``, in order, as (link, how many equal ones in a row)."""
    layers, has_gradient = shape.layers, reached(model, shape, ctx)
    links: list[tuple[Link, int]] = []
    number = sum(count for _, count in layers)
    recomputed, size = fully_recomputed(number, ctx, ignored=ignores_full_recompute(model, ctx))
    for group, count in _groups(layers, recomputed, size):
        _append(links, _checkpointed(group, ctx), count)
    offloaded = offloaded_layers(model, ctx)
    at = 0
    for kind, count in layers:
        first, beyond = max(at, recomputed), at + count
        while not has_gradient and first < beyond:
            # Layers before the first adapter save nothing and do not run backward.
            found = layer_block(kind, ctx, reached=False)
            _append(links, plain_link(found, Label.LAYER), 1)
            has_gradient, first = found.cost.output_reached, first + 1
        sent = max(0, min(beyond, offloaded) - first)
        if sent:
            _append(links, _offloaded(layer_link(kind, ctx)), sent)
        if beyond - first - sent > 0:
            _append(links, layer_link(kind, ctx), beyond - first - sent)
        at = beyond
    if links and (cost := links[0][0].cost) is not None and cost.input_discarded:
        link, count = links[0]  # its input is not the output of a checkpoint
        links[0:1] = [(link.keeping(cost.input_bytes, Part.LAYER_INPUT), 1)] + [(link, count - 1)] * (count > 1)
    return links


Group = tuple[tuple[LayerSpec, int], ...]


def _groups(layers: Sequence[tuple[LayerSpec, int]], recomputed: int, size: int) -> Iterator[tuple[Group, int]]:
    """The first ``recomputed`` layers in groups of ``size``, as (the group's kinds of layers, how many equal groups in
    a row)."""
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
    known: Link | None = ctx.evaluated.get(("recomputed", group))
    if known is None:
        costs = [(layer_block(kind, ctx).cost, dispatches(kind), count) for kind, count in group]
        known = ctx.evaluated["recomputed", group] = recomputed_together(costs, ctx)
    return known


def recomputed_together(costs: Sequence[tuple[BlockCost, bool, int]], ctx: BlockContext) -> Link:
    """Layers recomputed together: (cost of one, whether it routes tokens, how many equal ones in a row). Alive
    throughout backward: the saved input, and the recomputed output with its gradient (``random.py:
    CheckpointFunction.backward`` holds both)."""
    first, last = costs[0][0], costs[-1][0]
    entry = first.input_bytes
    shards = ctx.tp if ctx.recompute.distribute_saved_activations else 1
    kept = entry // shards
    # The first layer's saved tensors include the input, unless only a shard of it was saved or the layer does not save
    # it.
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
                continue  # of equal layers in a row only those at the ends can be the highest
            # Bytes carried over are freed when the last of the group's routers has run.
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
    return Link(
        Label.RECOMPUTED, kept, forward, best + concurrent, best + concurrent, _recomputed_layers, name,
        more=(((Part.RECOMPUTED_INPUT, Provenance.FORMULA), kept),), carried_over=carried_over,
        carried_over_gradient=carried_over // 2, layers=number,
    )


def _recomputed_layers() -> str:
    return "recomputed layers"


def _recomputed_name(cost: BlockCost) -> str:
    return f"{cost.forward_name()} (recomputed)"


def _nothing() -> str:
    return ""


def layer_link(layer: LayerSpec, ctx: BlockContext) -> Link:
    """A layer without full recomputation.

    If a recomputed region includes the router, its input and that input's gradient are carried over to the next
    forward: the dispatcher's probabilities are an attribute, and their graph leads back to the checkpoint's input
    (``token_dispatcher.py: self.probs``, ``random.py: CheckpointFunction.backward``). The next forward replaces them.
    """
    known: Link | None = ctx.evaluated.get(("link", layer))
    if known is not None:
        return known
    found = layer_block(layer, ctx)
    link = plain_link(found, Label.LAYER)
    if dispatches(layer) and ctx.recomputes("moe"):
        link = with_carried_over(link, found.cost, 2 * ctx.tokens_sp * ctx.hidden_size * ctx.act)
    ctx.evaluated["link", layer] = link
    return link


def with_carried_over(link: Link, cost: BlockCost, carried_over: int) -> Link:
    """The link with ``carried_over`` bytes of its last backward, alive until its router has run, and as many left by
    its next backward."""
    forward, backward, held, _ = (peak + carried_over for peak in cost.before_landmark)
    return link._replace(
        carried_over=carried_over, forward_peak=largest(link.forward_peak, forward),
        backward_peak=largest(link.backward_peak, backward),
        backward_peak_held=largest(link.backward_peak_held, held), routed_peak=0,
    )


def dispatches(layer: LayerSpec) -> bool:
    return isinstance(layer.ffn, MoESpec)


def _offloaded(link: Link) -> Link:
    """A layer whose saved tensors are offloaded to host memory (TE ``cpu_offload.py``)."""
    return link._replace(label=Label.OFFLOADED, retained=0, cost=None, more=(), offloaded=0)


def _append(links: list[tuple[Link, int]], link: Link, count: int) -> None:
    if links and links[-1][0] is link:
        links[-1] = (link, links[-1][1] + count)
    else:
        links.append((link, count))
