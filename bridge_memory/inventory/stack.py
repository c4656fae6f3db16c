"""A chunk of the pipeline: its blocks in order, with full recomputation, composed from the blocks' costs.

A chain of blocks costs what its blocks cost, one after the other: while block i runs forward or backward, the
saved tensors of the blocks before it are alive. Full recomputation puts layers into groups that keep only their
input and run forward again in backward.

Source: megatron-core ``transformer/transformer_block.py: _checkpointed_forward``, ``models/gpt/gpt_model.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from bridge_memory.inventory.context import BlockContext, context_of
from bridge_memory.inventory.layer import (
    embedding_inventory,
    final_norm_inventory,
    layer_inventory,
    mtp_inventory,
    output_inventory,
)
from bridge_memory.inventory.mtp import depth_is_recomputed
from bridge_memory.inventory.parameters import Parameter
from bridge_memory.inventory.recorder import BlockInventory
from bridge_memory.inventory.shared_weights import Waiting, waiting_gradients
from bridge_memory.inventory.tape import BlockCost
from bridge_memory.layout import Chunk, layout
from bridge_memory.spec import LayerSpec, ModelSpec, MoESpec, ParallelSpec, RunSpec


@dataclass(frozen=True, slots=True)
class Link:
    """One element of the chain: what it keeps, and its own peaks (its saved tensors included)."""

    label: str
    saved: int
    forward_peak: int
    forward_operation: str
    backward_peak: int
    backward_operation: str
    #: ``backward_peak`` where the schedule holds the gradient of its output to the end.
    backward_peak_held: int
    #: Saved bytes by module: ((module, bytes), ...).
    modules: tuple[tuple[str, int], ...]
    #: Bytes in host memory between the passes.
    offloaded: int = 0
    #: ``forward_peak`` up to its last router, where the graph of that router's probabilities reaches the chunk's input.
    routed_peak: int = 0
    #: What its backward leaves behind until its next forward, and of that the gradient of its input.
    left: int = 0
    left_gradient: int = 0

    def kept_on_gpu(self) -> Link:
        """The same element where nothing is sent away."""
        modules = (*self.modules, ("kept from offloading", self.offloaded))
        return replace(self, saved=self.saved + self.offloaded, modules=modules, offloaded=0)


@dataclass(frozen=True, slots=True)
class ChunkInventory:
    """One virtual chunk on one rank, for one microbatch."""

    saved: int
    forward_peak: int
    forward_operation: str
    backward_peak: int
    backward_operation: str
    modules: tuple[tuple[str, int], ...]
    output_bytes: int
    #: What backward leaves behind until the next forward takes its place.
    left: int = 0


@lru_cache(maxsize=8192)
def _plain(inventory: BlockInventory, label: str) -> Link:
    c = inventory.cost
    return Link(
        label, c.saved, c.forward_peak, c.forward_peak_op, c.backward_peak, c.backward_peak_op,
        c.backward_peak_held, _modules(c), c.offloaded, c.early[0],
    )


def _modules(cost: BlockCost) -> tuple[tuple[str, int], ...]:
    sums: dict[str, int] = {}
    for t in cost.saved_tensors:
        sums[t.module] = sums.get(t.module, 0) + t.bytes
    return tuple(sums.items())


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
    routers = [_dispatches(layer) for layer in layers]
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


def _dispatches(layer: LayerSpec) -> bool:
    return isinstance(layer.ffn, MoESpec)


@lru_cache(maxsize=8192)
def _layer(layer: LayerSpec, ctx: BlockContext) -> Link:
    """A layer as it is, or with parts of it recomputed.

    What is recomputed before a router stays when it is done: the dispatcher's probabilities are an attribute, and
    their graph leads back to the checkpoint's input, which has its gradient (``token_dispatcher.py: self.probs``,
    ``random.py: CheckpointFunction.backward``). The next forward replaces them.
    """
    inventory = layer_inventory(layer, ctx)
    link = _plain(inventory, "layer")
    if not (_dispatches(layer) and ctx.recompute.selects("moe")):
        return link
    left = 2 * ctx.tokens_sp * ctx.hidden_size * ctx.act
    return _leaving(link, inventory.cost, left)


def _leaving(link: Link, cost: BlockCost, left: int) -> Link:
    """A link that finds ``left`` bytes of its last backward where its router has not run yet, and leaves as many."""
    forward, backward, held, _ = (peak + left for peak in cost.early)
    return replace(
        link, left=left, forward_peak=max(link.forward_peak, forward), backward_peak=max(link.backward_peak, backward),
        backward_peak_held=max(link.backward_peak_held, held), routed_peak=0,
    )


#: Last megatron-core release whose ``ssm/mamba_block.py: MambaStack.forward`` runs its layers one by one, whatever
#: ``recompute_granularity`` full or ``cpu_offloading_num_layers`` ask for (selective recomputation works inside them).
HYBRID_RUNS_PLAIN_UNTIL = (0, 16)


def runs_plain(model: ModelSpec, ctx: BlockContext) -> bool:
    """Whether the model's stack knows neither full recomputation nor layers sent to host memory."""
    return model.hybrid and ctx.impl.megatron_core <= HYBRID_RUNS_PLAIN_UNTIL


def layer_links(layers: Sequence[LayerSpec], ctx: BlockContext, *, plain: bool = False) -> list[tuple[Link, int]]:
    """The decoder layers of one chunk as (link, how many in a row). ``plain`` as in ``runs_plain``."""
    rc = ctx.recompute
    links: list[tuple[Link, int]] = []
    recomputed = 0
    size = 1
    if rc.granularity == "full" and not plain:
        if rc.method == "uniform":
            recomputed, size = len(layers), rc.num_layers or 1
        elif rc.method == "block":
            recomputed = min(rc.num_layers or 0, len(layers))
    for start in range(0, recomputed, size):
        _append(links, _checkpointed(tuple(layers[start : min(start + size, recomputed)]), ctx))
    for i, layer in enumerate(layers[recomputed:], recomputed):
        link = _layer(layer, ctx)
        away = i < ctx.impl.cpu_offloading_num_layers and not plain
        _append(links, _sent_to_host(link) if away else link)
    return links


@lru_cache(maxsize=8192)
def _sent_to_host(link: Link) -> Link:
    """A layer whose saved tensors are in host memory between its passes (TE ``cpu_offload.py``)."""
    return replace(link, label="offloaded layer", saved=0, modules=(), offloaded=0)


def _append(links: list[tuple[Link, int]], link: Link) -> None:
    if links and links[-1][0] is link:
        links[-1] = (link, links[-1][1] + 1)
    else:
        links.append((link, 1))


def compose(links: Sequence[tuple[Link, int]], output_bytes: int = 0) -> ChunkInventory:
    """A chain's saved bytes and peaks.

    ``output_bytes``: the chunk's output travels on; the schedule holds its gradient to the end of the chunk's
    backward pass (``schedules.py: backward_step``), beside all links but the last, whose own output it is of.
    What links leave behind in backward is there while those before them run backward, and in the next forward
    pass until their own routers run.
    """
    before = 0
    forward = backward = 0
    forward_op = backward_op = ""
    modules: dict[str, int] = {}
    left = all_left = sum(count * link.left for link, count in links)
    for position, (link, count) in enumerate(links, 1):
        # The last is the highest; but the one before it where the last counts the output itself, and the first where
        # most is left behind.
        for k in {count - 1, max(0, count - 2), *((0,) if link.left else ())}:
            base, after = before + k * link.saved, left - (k + 1) * link.left
            if base + link.forward_peak + after > forward:
                forward, forward_op = base + link.forward_peak + after, link.forward_operation
            following = link if k < count - 1 else links[position][0] if position < len(links) else None
            after -= following.left_gradient if following else 0  # the gradient of this link's output
            back = base + after + link.backward_peak + output_bytes
            if output_bytes and position == len(links) and k == count - 1:
                back = base + after + link.backward_peak_held
            if back > backward:
                backward, backward_op = back, link.backward_operation
        before += count * link.saved
        left -= count * link.left
        for name, nbytes in link.modules:
            modules[name] = modules.get(name, 0) + count * nbytes
    return ChunkInventory(
        before, max(forward, before), forward_op, max(backward, before), backward_op,
        tuple(modules.items()), output_bytes, all_left,
    )


def _untied_here(model: ModelSpec, chunk: Chunk) -> bool:
    """Whether this chunk's output layer holds a weight of its own: untied, or a tied copy away from the first stage's
    embedding. There is one beside MTP's copy of the embedding too, which is used instead of it
    (``gpt_model.py: GPTModel.__init__, shared_embedding_or_output_weight``)."""
    return not (model.share_embeddings_and_output_weights and chunk.embedding)


@lru_cache(maxsize=4096)
def first_alike(model: ModelSpec, parallel: ParallelSpec) -> tuple[int, ...]:
    """For every stage, the first stage whose chunks hold the same kinds of layers and ends of the model."""
    seen: dict[tuple[object, ...], int] = {}
    out = []
    for rank, chunks in enumerate(layout(model, parallel).stages):
        kinds = tuple((tuple(model.layers[i] for i in c.layers), c.embedding, c.output, len(c.mtp)) for c in chunks)
        ends = tuple(model.num_layers - 1 in c.layers for c in chunks)
        out.append(seen.setdefault((kinds, ends), rank))
    return tuple(out)


def stage_inventories(model: ModelSpec, chunks: Sequence[Chunk], ctx: BlockContext) -> list[ChunkInventory]:
    """Every chunk of a stage. On the last stage the last chunk with layers (or MTP) goes straight into its backward."""
    last = max((i for i, c in enumerate(chunks) if c.layers or c.mtp), default=0) if chunks[-1].output else -1
    return [chunk_inventory(model, chunk, ctx, i == last) for i, chunk in enumerate(chunks)]


@lru_cache(maxsize=65536)
def chunk_inventory(
    model: ModelSpec, chunk: Chunk, ctx: BlockContext, backward_next: bool = False
) -> ChunkInventory:
    """Saved bytes and peaks of one chunk for one microbatch.

    ``backward_next``: no other chunk of the rank runs between its forward and its backward.
    """
    links: list[tuple[Link, int]] = []
    if chunk.embedding:
        links.append((_plain(embedding_inventory(model, ctx), "embedding"), 1))
    for link, count in layer_links([model.layers[i] for i in chunk.layers], ctx, plain=runs_plain(model, ctx)):
        if chunk.embedding and ctx.recompute.distribute_saved_activations:
            # ``gpt_model.py: GPTModel.forward`` holds decoder_input, of which the first layers keep a shard.
            link = replace(link, forward_peak=link.forward_peak + ctx.hidden_bytes)
        links.append((link, count))
    tail = tail_inventories(model, chunk, ctx)
    losses = of_all = sum(label == "loss" for _, label in tail)
    depths = len(chunk.mtp)
    tied = model.share_embeddings_and_output_weights and (chunk.embedding or bool(chunk.mtp))
    waiting = waiting_gradients([link.label for link, _ in links] + [label for _, label in tail], ctx, tied=tied)
    links = [(_beside(link, w), count) for (link, count), w in zip(links, waiting, strict=False)]
    for (inventory, label), w in zip(tail, waiting[len(links) :], strict=True):
        link = _plain(inventory, label)
        if label == "MTP":
            depths -= 1
            link = _leaving_of_mtp(link, inventory.cost, model, ctx)
            link = _beside_joined(link, len(chunk.mtp), ctx, last=not depths)
        elif label == "loss":
            losses -= 1
            if losses:
                link = _before_losses(link, losses, ctx, w, first=losses == of_all - 1)
        links.append((_beside(link, w), 1))
    if chunk.output and model.mtp_layer is not None and (
        mtp_loss_is_outside(ctx) and ctx.impl.megatron_core <= MTP_LOGITS_HELD_UNTIL
    ):
        loss, count = links[-1]
        held = mtp_logits_bytes(ctx)
        links[-1:] = [(loss, count - 1)] * (count > 1) + [(replace(loss, forward_peak=loss.forward_peak + held), 1)]
    if not chunk.embedding:
        _beside_last_input(links, ctx)
    if backward_next:
        # The last offloading group of each name stays (``should_bulk_offload``).
        last = max((i for i, (link, _) in enumerate(links) if link.offloaded), default=None)
        if last is not None:
            link, count = links[last]
            links[last : last + 1] = [(link, count - 1)] * (count > 1) + [(link.kept_on_gpu(), 1)]
    return compose(links, 0 if chunk.output else ctx.hidden_bytes)


def _beside_last_input(links: list[tuple[Link, int]], ctx: BlockContext) -> None:
    """The input that another stage sent last, and its gradient, are there until the last router has run: the graph of
    the dispatcher's probabilities ends in the node that accumulates the gradient (``token_dispatcher.py: self.probs``).
    """
    last = max((i for i, (link, _) in enumerate(links) if link.routed_peak), default=None)
    if last is not None:
        link, count = links[last]
        peak = max(link.forward_peak, link.routed_peak + 2 * ctx.hidden_bytes)
        links[last : last + 1] = [(link, count - 1)] * (count > 1) + [(replace(link, forward_peak=peak), 1)]


def _beside(link: Link, waiting: Waiting) -> Link:
    """A link whose backward finds gradients of weights waiting, to which the embedding adds its own at its end."""
    if not waiting.before and not waiting.total:
        return link
    summed = link.saved + waiting.at_the_sum if link.label == "embedding" else 0
    return replace(
        link, backward_peak=max(link.backward_peak + waiting.before, summed),
        backward_peak_held=max(link.backward_peak_held + waiting.before, summed),
    )


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
    return replace(
        link, backward_peak=max(link.backward_peak + gradients + kept, summed),
        backward_peak_held=max(link.backward_peak_held + gradients + kept, summed),
    )


def _leaving_of_mtp(link: Link, cost: BlockCost, model: ModelSpec, ctx: BlockContext) -> Link:
    """As ``_layer``. A recomputed depth has two inputs, the hidden states and the embedding of the next tokens; what it
    left is gone before its backward, with its own forward pass."""
    if model.mtp_layer is None or not _dispatches(model.mtp_layer):
        return link
    if depth_is_recomputed(ctx):
        left = 4 * ctx.hidden_bytes
        forward = max(link.forward_peak, cost.early[0] + left)
        return replace(link, left=left, forward_peak=forward, routed_peak=0)
    left = _layer(model.mtp_layer, ctx).left
    return _leaving(link, cost, left) if left else link


#: megatron-core release since which ``GPTModel._postprocess`` makes the losses of the MTP depths, of the hidden states
#: of all depths joined in one tensor; before, ``MultiTokenPredictionBlock.forward`` makes each after its depth.
MTP_LOSS_OUTSIDE_SINCE = (0, 14)
#: Last megatron-core release in which a variable of ``GPTModel._postprocess`` keeps an MTP depth's logits while the
#: main loss is made; later ones have a function of their own for it.
MTP_LOGITS_HELD_UNTIL = (0, 16)


def mtp_loss_is_outside(ctx: BlockContext) -> bool:
    """Whether the depths' losses follow after all depths, and keep a copy of their inputs."""
    return ctx.impl.megatron_core >= MTP_LOSS_OUTSIDE_SINCE


def mtp_logits_bytes(ctx: BlockContext) -> int:
    """Logits of one MTP depth in the compute dtype, [T, V / t], where they are not kept for backward anyway."""
    if ctx.impl.cross_entropy_loss_fusion and ctx.impl.cross_entropy_fusion_impl in ("te", "linear"):
        return 0
    return ctx.tokens * ctx.padded_vocab // ctx.tp * ctx.act


def tail_inventories(model: ModelSpec, chunk: Chunk, ctx: BlockContext) -> list[tuple[BlockInventory, str]]:
    """What follows the decoder layers: final norm, MTP depths, their losses and the main one."""
    tail: list[tuple[BlockInventory, str]] = []
    if holds_final_norm(model, chunk, ctx):
        tail.append((final_norm_inventory(final_norm_name(model), ctx), "final norm"))
    own = _untied_here(model, chunk)
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


def final_norm_name(model: ModelSpec) -> str:
    """MambaModel calls it final_norm (``ssm/mamba_block.py``)."""
    return "decoder.final_norm" if model.hybrid else "decoder.final_layernorm"


#: megatron-core release since which a model with MTP has its final norm on the stage of its last decoder layer.
FINAL_NORM_AFTER_LAST_LAYER_SINCE = (0, 16)


def holds_final_norm(model: ModelSpec, chunk: Chunk, ctx: BlockContext) -> bool:
    """Whether the final norm is here: on the last stage, with MTP after the last decoder layer
    (``transformer_block.py: has_final_layernorm_in_this_stage``)."""
    if not (model.layers and model.mtp_num_layers and ctx.impl.megatron_core >= FINAL_NORM_AFTER_LAST_LAYER_SINCE):
        return chunk.output
    return (model.num_layers - 1) in chunk.layers


def chunk_parameters(model: ModelSpec, chunk: Chunk, ctx: BlockContext) -> list[Parameter]:
    """Every parameter of one chunk on one rank, named as megatron-core's ``named_parameters`` names it."""
    out: list[Parameter] = []
    for prefix, params in parameter_groups(model, chunk, ctx):
        out += [p.under(prefix) for p in params] if prefix else list(params)
    return out


def parameter_groups(
    model: ModelSpec, chunk: Chunk, ctx: BlockContext
) -> list[tuple[str, tuple[Parameter, ...]]]:
    """(name prefix, parameters) of every block of the chunk, in model order."""
    groups: list[tuple[str, tuple[Parameter, ...]]] = []
    if chunk.embedding or chunk.mtp:
        groups.append(("", embedding_inventory(model, ctx).parameters))
    for i, layer in enumerate(chunk.layers):
        groups.append((f"decoder.layers.{i}.", layer_inventory(model.layers[layer], ctx).parameters))
    if holds_final_norm(model, chunk, ctx):
        groups.append(("", final_norm_inventory(final_norm_name(model), ctx).parameters))
    for n, _ in enumerate(chunk.mtp):
        assert model.mtp_layer is not None
        if n and model.mtp_use_repeated_layer:
            break
        groups.append((f"mtp.layers.{n}.", mtp_inventory(model.mtp_layer, ctx).parameters))
    if chunk.output:
        groups.append(("", output_inventory(model.output_bias, _untied_here(model, chunk), ctx, False).parameters))
    return groups


@lru_cache(maxsize=65536)
def chunk_lasting(model: ModelSpec, chunk: Chunk, ctx: BlockContext) -> tuple[tuple[str, int], ...]:
    """Lasting scratch of one chunk, ((name, bytes), ...); the largest request under one name wins."""
    found: dict[str, int] = {}
    inventories = [layer_inventory(layer, ctx) for layer in dict.fromkeys(model.layers[i] for i in chunk.layers)]
    inventories += [inventory for inventory, _ in tail_inventories(model, chunk, ctx)]
    for inventory in inventories:
        for name, nbytes in inventory.lasting:
            found[name] = max(nbytes, found.get(name, 0))
    return tuple(found.items())


def stage_parameters(run: RunSpec, stage: int) -> list[list[Parameter]]:
    """Parameters of every chunk of pipeline stage ``stage``, chunk by chunk."""
    ctx = context_of(run)
    return [
        chunk_parameters(run.model, chunk, ctx) for chunk in layout(run.model, run.parallel).stages[stage]
    ]
