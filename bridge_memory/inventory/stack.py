"""A chunk (virtual stage) of the pipeline: embedding, decoder layers and what follows them, composed of blocks.

Source: megatron-core ``models/gpt/gpt_model.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bridge_memory.components import Part, Provenance
from bridge_memory.inventory.deferred import bytes_per_call, calls
from bridge_memory.inventory.encoders.chain import (
    encoder_layers,
    encoder_links,
    encoder_parameters,
    held_by_the_model,
    parameters_beside_layers,
    pixel_bytes,
)
from bridge_memory.inventory.layer import embedding_block, final_norm_block, layer_block, mtp_block, output_block
from bridge_memory.inventory.layer_links import layer_links, reached
from bridge_memory.inventory.megatron.embedding import learned_positions
from bridge_memory.inventory.megatron.ssm import sequence_numbers
from bridge_memory.inventory.megatron.wan import held_by_the_step, text_gradient
from bridge_memory.inventory.shared_weights import NOTHING_WAITS, pending_gradients, shares_weights, with_pending
from bridge_memory.inventory.tail import (
    final_norm_name,
    has_own_output_weight,
    holds_final_norm,
    received_states,
    tail_blocks,
    tail_links,
)
from bridge_memory.inventory.torch.chain import torch_chunk
from bridge_memory.releases import SEQUENCES_NUMBERED_ONCE
from bridge_memory.spec import DiffusionSpec, EncoderSpec, LayerSpec, MambaSpec, ModelSpec, SideBySideSpec
from bridge_memory.spec.layout import ChunkShape, StageShape
from bridge_memory.tapes.chain import (
    ChunkInventory,
    EngineBytes,
    Label,
    Link,
    change_last_of,
    compose,
    plain_link,
    with_engine,
)
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.parameters import Parameter, ParameterList, Repeated, Use
from bridge_memory.tapes.recorder import Scratch
from bridge_memory.tapes.symbolic import largest


def stage_inventories(
    model: ModelSpec, shapes: StageShape, ctx: BlockContext, concurrent: Sequence[EngineBytes] = ()
) -> list[ChunkInventory]:
    """Every chunk of a stage; ``concurrent``: bytes that a data-parallel engine holds during the links of each."""
    last = chunk_before_its_backward(shapes)
    return [
        chunk_inventory(model, shape, ctx, i == last, concurrent[i] if concurrent else None)
        for i, shape in enumerate(shapes)
    ]


def chunk_before_its_backward(shapes: StageShape) -> int:
    """The chunk whose backward follows its own forward: on the last stage the last with layers or MTP; else -1."""
    if not shapes[-1].output:
        return -1
    return max((i for i, c in enumerate(shapes) if c.layers or c.num_depths), default=0)


def chunk_inventory(
    model: ModelSpec, shape: ChunkShape, ctx: BlockContext, backward_next: bool = False,
    concurrent: EngineBytes | None = None,
) -> ChunkInventory:  # fmt: skip
    """Retained bytes and peaks of one chunk for one microbatch.

    ``backward_next``: no other chunk of the rank runs between its forward and its backward. ``concurrent``: bytes that
    a data-parallel engine holds during each link.
    """
    if ctx.torch_layers is not None:
        return torch_chunk(model, shape, ctx, concurrent)
    links: list[tuple[Link, int]] = []
    if shape.embedding:
        links.append((plain_link(embedding_block(model, ctx), Label.EMBEDDING), 1))
    links += layer_links(model, shape, ctx)
    if model.per_layer_vocab_size:
        # The gradient of all layers' embeddings, to which each layer adds.
        summed = model.layers[0].all_layers_width * ctx.tokens_sp * ctx.act
        links = [(link if link.label is Label.EMBEDDING else link.with_gradients(summed), n) for link, n in links]
    tied = model.share_embeddings_and_output_weights and (shape.embedding or bool(shape.num_depths))
    tail = tail_blocks(model, shape, ctx)
    labels = [link.label for link, _ in links] + [label for _, label in tail]
    if ctx.adapters is None and shares_weights(labels, ctx, tied=tied):
        pending = pending_gradients(labels, ctx, tied=tied, positions=learned_positions(model))
        links = [(with_pending(link, found), count) for (link, count), found in zip(links, pending, strict=False)]
        links += tail_links(tail, model, shape, ctx, pending[len(links) :])
    elif tail:
        links += tail_links(tail, model, shape, ctx, [NOTHING_WAITS] * len(tail))
    keeps_output = not ctx.impl.deallocate_pipeline_outputs
    if not links:
        return compose([(_passed_on(ctx.hidden_bytes), 1)], ctx.hidden_bytes, kept=keeps_output * ctx.hidden_bytes)
    alone = not (shape.layers or shape.embedding or model.hybrid)
    if alone and not holds_final_norm(model, shape, ctx):
        # Depths and losses get a copy of what was received.
        links.insert(0, (_passed_on(received_states(model, shape) * ctx.hidden_bytes), 1))
    if not reached(model, shape, ctx):
        links = _with_held_input(links, ctx)
    if shape.output and ctx.impl.distillation != "none":
        # The teacher has run: its logits stay until the loss, which counts them itself.
        theirs = ctx.tokens * (ctx.padded_vocab // ctx.tp) * ctx.act
        links = [
            (link._replace(forward_peak=link.forward_peak + theirs), count) for link, count in links[:-1]
        ] + links[-1:]
    if shape.output and ctx.impl.defer_embedding_wgrad_compute and not ctx.impl.wgrad_deferral_limit:
        # Deferred weight gradients of this microbatch, once its losses have run backward.
        waiting = calls(model) * bytes_per_call(ctx)
        links = [
            (link if link.label is Label.LOSS else link.with_gradients(waiting), count) for link, count in links
        ]
    if shape.embedding:
        links = _with_first_input(links, ctx)
    else:
        _with_last_input(links, ctx)
    if shape.embedding and ctx.encoders:
        links = _with_encoder_links(links, ctx)
    if ctx.packed and SEQUENCES_NUMBERED_ONCE(ctx.impl) and any(_scans(layer) for layer, _ in shape.layers):
        links = _with_sequence_numbers(links, ctx)
    if ctx.diffusion is not None:
        links = _with_latents(links, ctx.diffusion, ctx)
    if backward_next:
        # The last offloading group of each name stays on the GPU (``should_bulk_offload``).
        last = max((i for i, (link, _) in enumerate(links) if link.offloaded), default=None)
        if last is not None:
            change_last_of(links, last, links[last][0].kept_on_gpu())
    if concurrent is not None:
        links = with_engine(links, concurrent)
    sent = 0 if shape.output else (1 + shape.num_depths) * ctx.hidden_bytes
    return compose(links, sent, kept=keeps_output * sent)


def _scans(layer: LayerSpec) -> bool:
    """Whether a layer's mixer is Mamba's, alone or beside attention."""
    return isinstance(layer.mixer, (MambaSpec, SideBySideSpec))


def _with_sequence_numbers(links: list[tuple[Link, int]], ctx: BlockContext) -> list[tuple[Link, int]]:
    """The number of each token's sequence is there from the beginning, and every scan saves it."""
    (first, count), *others = links
    kept = first.with_kept(sequence_numbers(ctx), Part.MAMBA)
    return [(kept, 1), *([(first, count - 1)] if count > 1 else []), *others]


def _with_encoder_links(links: list[tuple[Link, int]], ctx: BlockContext) -> list[tuple[Link, int]]:
    """Encoders run between the embedding and the layers; the step holds their pixels during the chunk's forward, and
    the model their features during that of its layers."""
    embedding, *layers = links
    pixels, held = pixel_bytes(ctx), held_by_the_model(ctx)
    before = [(link, count, pixels) for link, count in (embedding, *encoder_links(ctx))]
    after = [(link, count, pixels + held) for link, count in layers]
    return [(link._replace(forward_peak=link.forward_peak + more), count) for link, count, more in (*before, *after)]


def _with_latents(links: list[tuple[Link, int]], spec: DiffusionSpec, ctx: BlockContext) -> list[tuple[Link, int]]:
    """The step holds latents and noise during forward; gradients of the text are summed from layer to layer."""
    held, text = held_by_the_step(spec, ctx), text_gradient(spec, ctx)
    last = max(i for i, (link, _) in enumerate(links) if link.label is not Label.LOSS)
    found = []
    for i, (link, count) in enumerate(links):
        link = link._replace(forward_peak=link.forward_peak + held)
        layer = link.label not in (Label.LOSS, Label.EMBEDDING)
        # The last layer is the first in backward, and has nothing to add to; a checkpoint gets zeros for the text that
        # it returns and nobody uses.
        if layer and i == last and link.label is not Label.RECOMPUTED:
            found += [(link.with_gradients(text), count - 1)] * (count > 1)
            count = 1
        elif layer:
            link = link.with_gradients(text)
        found.append((link, count))
    return found


def _passed_on(hidden_bytes: int) -> Link:
    """A chunk without layers: it sends a copy of its input (``transformer_block.py: TransformerBlock.forward``), and
    the schedule keeps the input (``schedules.py``: input_tensors). The received gradient is copied for the input; both
    inputs and the last one's gradient are alive when the next is received."""
    return Link(
        Label.PASSED_ON, hidden_bytes, 3 * hidden_bytes, 2 * hidden_bytes, 3 * hidden_bytes,
        lambda: "copy of what was received", lambda: "gradient of what was received",
        more=(((Part.LAYER_INPUT, Provenance.FORMULA), hidden_bytes),),
    )


def _with_held_input(links: list[tuple[Link, int]], ctx: BlockContext) -> list[tuple[Link, int]]:
    """``gpt_model.py: GPTModel.forward`` holds decoder_input until the end, also where no layer saves it. The first
    layer, whose input it is, counts it itself."""
    after = [(link._replace(forward_peak=link.forward_peak + ctx.hidden_bytes), n) for link, n in links]
    first = next((i for i, (link, _) in enumerate(links) if link.label is not Label.EMBEDDING), len(links))
    kept = links[:first]
    if first < len(links):
        link, count = links[first]
        kept += [(link, 1), *([(after[first][0], count - 1)] if count > 1 else [])]
    return kept + after[first + 1 :]


def _with_first_input(links: list[tuple[Link, int]], ctx: BlockContext) -> list[tuple[Link, int]]:
    """``gpt_model.py: GPTModel.forward`` holds decoder_input. With ``distribute_saved_activations`` the first
    recomputed layers save only a shard of it, so that it is additional during everything after them.

    If decoder_input is a view (the transposed embeddings of one sequence), the decoder's input is another tensor with
    the same storage (``core/utils.py: make_viewless_tensor``). Else it is the tensor whose storage is replaced by the
    shard (``tensor_parallel/random.py: CheckpointFunction.forward``).
    """
    shared_out = len(links) > 1 and links[1][0].label is Label.RECOMPUTED
    if not (ctx.recompute.distribute_saved_activations and shared_out):
        return links
    is_view = ctx.batch == 1 and not ctx.hidden_dropout and ctx.residual == ctx.act
    if not is_view:
        return links
    embedding, (first, count), *others = links
    after = [(first, count - 1)] * (count > 1) + others
    held = [(link._replace(forward_peak=link.forward_peak + ctx.hidden_bytes), n) for link, n in after]
    return [embedding, (first, 1), *held]


def _with_last_input(links: list[tuple[Link, int]], ctx: BlockContext) -> None:
    """The last received input and its gradient stay until the last router has run: the graph of the dispatcher's
    probabilities ends in the node that accumulates the gradient (``token_dispatcher.py: self.probs``)."""
    last = max((i for i, (link, _) in enumerate(links) if link.routed_peak), default=None)
    if last is not None:
        link, _ = links[last]
        peak = largest(link.forward_peak, link.routed_peak + 2 * ctx.hidden_bytes)
        change_last_of(links, last, link._replace(forward_peak=peak))


# ---- parameters ----


class Unit(NamedTuple):
    """Equal blocks of a chunk, of which an engine lays out, and may gather, the parameters together."""

    label: Label
    #: Prefix of the names; ``{}`` stands for the number of the layer or depth.
    prefix: str
    parameters: ParameterList
    times: int = 1
    layer: LayerSpec | None = None


def chunk_units(model: ModelSpec, shape: ChunkShape, ctx: BlockContext) -> list[Unit]:
    """The parameters of a chunk by block, in model order."""
    units: list[Unit] = []
    prefix = "decoder.layers.{}."
    if ctx.torch_layers is not None:
        family = ctx.torch_layers.family
        prefix = f"{family.prefix}{family.layers}.{{}}."
    if shape.embedding or shape.num_depths:
        parameters = embedding_block(model, ctx).parameters
        if shape.embedding and model.encoders:
            parameters = _with_encoders(parameters, model, ctx)
        units.append(Unit(Label.EMBEDDING, "", parameters))
        if ctx.torch_layers is not None:  # layers of transformers' encoders, which engines wrap as others
            units += [Unit(Label.LAYER, *each) for each in encoder_layers(ctx)]
    for kind, count in shape.layers:
        units.append(Unit(Label.LAYER, prefix, layer_block(kind, ctx).parameters, count, kind))
    if holds_final_norm(model, shape, ctx):
        units.append(Unit(Label.FINAL_NORM, "", final_norm_block(final_norm_name(model), ctx).parameters))
    if shape.num_depths:
        assert model.mtp_layer is not None
        depths = 1 if model.mtp_use_repeated_layer else shape.num_depths
        depth = mtp_block(model.mtp_layer, ctx).parameters
        units.append(Unit(Label.MTP, "mtp.layers.{}.", depth, depths, model.mtp_layer))
    if shape.output:
        own = has_own_output_weight(model, shape)
        output = output_block(model.output_bias, own, ctx, softcapped=model.softcapped_logits)
        units.append(Unit(Label.LOSS, "", output.parameters))
    return units


def _with_encoders(embedding: ParameterList, model: ModelSpec, ctx: BlockContext) -> ParameterList:
    """The embedding's parameters and those of modality encoders, one parameter for an encoder of unknown structure:
    they are on the first stage, as the embedding is, and are not quantized (Megatron Bridge
    ``models/*_vl/modeling_*.py``: pre_process)."""
    key = ("encoders", embedding, model.encoders)
    known: ParameterList | None = ctx.evaluated.get(key)
    if known is None:
        recorded = {run.spec: (i, run) for i, run in enumerate(ctx.encoders)}
        rows = list(embedding.rows)
        for encoder in model.encoders:
            if encoder in recorded and ctx.torch_layers is not None:
                continue
            if encoder in recorded:
                i, run = recorded[encoder]
                rows += [
                    Repeated(tuple(p.under(f"{encoder.name}.") for p in parameters), times)
                    for parameters, times in encoder_parameters(ctx, run, i)
                ]
                continue
            rows += [Repeated((p,)) for p in _of_unknown_structure(encoder, ctx)]
        if ctx.torch_layers is not None:
            rows += parameters_beside_layers(ctx)
        known = ctx.evaluated[key] = ParameterList(rows)
    return known


def _of_unknown_structure(encoder: EncoderSpec, ctx: BlockContext) -> Iterator[Parameter]:
    """One parameter for an encoder, and one for its projector where its size is known. Adapters freeze both."""
    lora = ctx.adapters is not None and ctx.adapters.scheme == "lora"
    parts = (
        ("encoder", encoder.parameters - encoder.projector, encoder.sharded - encoder.projector_sharded),
        ("projector", encoder.projector, encoder.projector_sharded),
    )
    for part, elements, sharded in parts:
        trains = not lora and not any(part.startswith(name) for name in encoder.frozen)
        if elements:
            yield Parameter(
                encoder.name if part == "encoder" else f"{encoder.name}: projector",
                (elements - sharded + sharded // ctx.tp,), use=Use.ROUTER,
                trains=trains if trains is (ctx.adapters is not None) else None,
            )


def named_parameters(units: Sequence[Unit]) -> Iterator[Parameter]:
    """Every parameter of one chunk on one rank, with its name in megatron-core's ``named_parameters``."""
    named: dict[str, int] = {}
    for unit in units:
        first = named.get(unit.prefix, 0) if unit.label is Label.LAYER else 0
        for number in range(first, first + unit.times):
            yield from unit.parameters.expanded(unit.prefix.format(number))
        named[unit.prefix] = first + unit.times


def chunk_scratch(
    model: ModelSpec, shape: ChunkShape, ctx: BlockContext
) -> dict[tuple[Scratch, tuple[int, ...]], int]:
    """Persistent scratch of a chunk: bytes by kind and shape. Cached for chunks with the same kinds of layers and the
    same blocks before and after them."""
    kinds = tuple([kind for kind, _ in shape.layers])
    key = ("scratch", kinds, shape.output, shape.embedding, shape.num_depths, shape.last_layer)
    known: Any = ctx.evaluated.get(key)
    if known is None:
        blocks = [layer_block(kind, ctx) for kind in kinds] + [tail for tail, _ in tail_blocks(model, shape, ctx)]
        lists = [block.persistent for block in dict.fromkeys(blocks)]
        known = ctx.evaluated[key] = _largest(lists) if ctx.many is None else merged(lists)
    found: dict[tuple[Scratch, tuple[int, ...]], int] = known
    return found


def merged(lists: Sequence[Any]) -> tuple[Any, ...]:
    """All requests of many runs, each once; which of them have equal shapes may differ between runs."""
    return tuple(dict.fromkeys(request for requests in lists for request in requests))


def _largest(
    lists: Sequence[dict[tuple[Scratch, tuple[int, ...]], int]]
) -> dict[tuple[Scratch, tuple[int, ...]], int]:
    """The largest of every request in ``lists``."""
    if len(lists) == 1:
        return lists[0]
    out: dict[tuple[Scratch, tuple[int, ...]], int] = {}
    for requests in lists:
        for request, nbytes in requests.items():
            if nbytes > out.get(request, -1):
                out[request] = nbytes
    return out


def stage_scratch(
    chunks: Sequence[dict[tuple[Scratch, tuple[int, ...]], int]], ctx: BlockContext
) -> dict[Scratch, int]:
    """Persistent scratch of a stage: bytes by kind. Of requests with one kind and shape only the largest counts."""
    distinct = {id(chunk): chunk for chunk in chunks}
    key = ("stage scratch", *distinct)
    known = ctx.evaluated.get(key)
    if known is None and ctx.many is not None:
        known = ctx.evaluated[key] = ctx.many.largest_scratch(merged(list(distinct.values())))
    if known is None:
        known = {}
        for (kind, _), nbytes in _largest(list(distinct.values())).items():
            known[kind] = known.get(kind, 0) + nbytes
        ctx.evaluated[key] = known
    return known
