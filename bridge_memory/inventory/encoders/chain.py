"""An encoder as links of the first chunk: what is before its layers, the layers, what is after them, and the step that
writes its features over the placeholders among the token embeddings.

Source: Megatron Bridge ``models/*_vl/modeling_*.py: forward``. The token embeddings are made first and wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

from bridge_memory.components import Part, Provenance
from bridge_memory.inventory.encoders import audio, megatron, moonvit, radio, step, vision
from bridge_memory.inventory.encoders.ops import EncoderOps, encoder_trains
from bridge_memory.inventory.layer_links import fully_recomputed, recomputed_together
from bridge_memory.inventory.torch.checkpoints import checkpointed
from bridge_memory.inventory.torch.ops import FP32, Array
from bridge_memory.releases import MODELS_RETURN_ENCODER_OUTPUTS
from bridge_memory.spec.adapters import is_target
from bridge_memory.spec.encoders import MEGATRON_KINDS, RECOMPUTED_KINDS, EncoderStructure, features, pixels_of
from bridge_memory.tapes.alive import BlockCost
from bridge_memory.tapes.blocks import Block, block
from bridge_memory.tapes.chain import Label, Link, plain_link
from bridge_memory.tapes.context import BlockContext, EncoderRun
from bridge_memory.tapes.parameters import ParameterList, Repeated
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.symbolic import largest

#: A layer of an encoder: what distinguishes it from the others.
LayerKind = tuple[tuple[str, Any], ...]


class Recorders(NamedTuple):
    """The recorders of one kind of encoder."""

    stem: Callable[[EncoderOps], Array]
    layer: Callable[..., Array]
    head: Callable[[EncoderOps, Array], Array]
    #: Modules that run before the layers, and the layers', by the beginning of their names.
    stem_modules: tuple[str, ...]
    layer_modules: tuple[str, ...] = ("blocks",)
    #: Modules after the layers.
    head_modules: tuple[str, ...] = ("merger",)
    #: What distinguishes the layers of a structure, in order.
    kinds: Callable[[EncoderStructure], list[LayerKind]] = lambda s: [()] * s.num_layers
    #: Bytes that the encoder's forward holds beside its layers.
    held: Callable[[EncoderOps], Any] = lambda t: 0
    #: Whether the head runs after that forward.
    projects: bool = False
    #: What makes features of its own from the output of ``deepstack_layers``.
    beside: Callable[[EncoderOps, Array], Array] | None = None
    #: Rows of the hidden states of layers.
    rows: Callable[[EncoderOps], Any] = lambda t: t.patches
    #: Whether the token embeddings are made before, and wait.
    after_embeddings: bool = True
    #: Whether the batch has pixels in the dtype of the weights.
    narrow_pixels: bool = False
    #: Whether the first convolution saves them as they are.
    saves_pixels: bool = False
    #: Whether the model's forward holds the features while its language model runs.
    features_wait: bool = True
    #: Whether it holds the token embeddings too, and writes them into new ones.
    embeddings_wait: bool = False
    #: How features enter the token embeddings, if not by ``masked_scatter``: of the embeddings and the features.
    inserted: Callable[[EncoderOps, Array, Array], Array] | None = None


RECORDERS: dict[str, Recorders] = {
    "qwen2_5_vl": Recorders(
        vision.qwen2_5_stem, vision.qwen2_5_layer, vision.qwen2_5_head, ("patch_embed",),
        kinds=lambda s: [(("whole", i in s.full_layers),) for i in range(s.num_layers)], held=vision.table_bytes,
    ),
    "glm4v": Recorders(
        vision.glm4v_stem, vision.glm4v_layer, vision.glm4v_head,
        ("patch_embed", "post_conv_layernorm", "embeddings.position_embedding"),
        head_modules=("post_layernorm", "downsample", "merger"), held=vision.table_bytes,
    ),
    "siglip": Recorders(
        vision.siglip_stem, vision.siglip_layer, vision.gemma3_head,
        ("embeddings.patch_embedding", "embeddings.position_embedding"), ("encoder",),
        ("post_layernorm", "multi_modal_projector"),
    ),
    "pixtral": Recorders(
        vision.pixtral_stem, vision.pixtral_layer, vision.mistral3_head, ("patch_conv", "ln_pre"), ("transformer",),
        ("multi_modal_projector",),
        held=vision.pixtral_held,
    ),
    "qwen3_vl": Recorders(
        megatron.qwen3_stem, megatron.qwen3_layer, megatron.qwen3_head, ("patch_embed", "pos_embed"),
        ("decoder.layers",), held=megatron.held, beside=megatron.deep_merger,
    ),
    "qwen3_omni_vision": Recorders(
        vision.qwen3_omni_stem, vision.qwen3_omni_layer, vision.qwen3_omni_head, ("patch_embed", "pos_embed"),
        held=vision.table_bytes, beside=vision.qwen3_deep_merger,
    ),
    "exaone4_5": Recorders(
        vision.windowed_patches, megatron.exaone_layer, megatron.exaone_head, ("patch_embed",), ("decoder.layers",),
        held=megatron.exaone_held,
    ),
    "radio": Recorders(
        radio.stem, radio.layer, radio.head, radio.STEM,
        (f"{radio.VISION}.decoder.layers",), (radio.PROJECTION,), held=radio.held, projects=True,
        rows=radio.rows, narrow_pixels=True, embeddings_wait=True,
    ),
    "moonvit": Recorders(
        moonvit.stem, moonvit.layer, moonvit.head, ("patch_embed",), ("encoder.blocks",),
        ("encoder.final_layernorm", "mm_projector"), held=moonvit.held,
    ),
    "step3p7": Recorders(
        step.stem, step.layer, step.head, step.STEM, ("transformer",), ("vit_downsampler", "align_projector"),
        held=step.held, projects=True, after_embeddings=False, narrow_pixels=True, saves_pixels=True,
        features_wait=False, inserted=step.inserted,
    ),
    "qwen2_audio": Recorders(
        audio.qwen2_audio_stem, audio.qwen2_audio_layer, audio.qwen2_audio_head, ("conv1", "conv2"), ("layers",),
        ("layer_norm", "multi_modal_projector"),
        rows=audio.frames,
    ),
    "qwen3_omni_audio": Recorders(
        audio.qwen3_omni_stem, audio.qwen3_omni_layer, audio.qwen3_omni_head, ("conv2d", "conv_out"), ("layers",),
        ("ln_post", "proj1", "proj2"), held=audio.qwen3_omni_held, rows=audio.qwen3_omni_frames,
    ),
}


def encoder_links(ctx: BlockContext) -> list[tuple[Link, int]]:
    """The links of every encoder and of the step that joins its features and the token embeddings, which run between
    the embedding and the layers."""
    links: list[tuple[Link, int]] = []
    last = last_encoder(ctx)
    for i, run in enumerate(ctx.encoders):
        if not run.items:
            continue
        waiting = _embeddings(ctx) if RECORDERS[run.structure.kind].after_embeddings else 0
        for link, count in encoder_chain(ctx, run, i):
            link = link._replace(forward_peak=link.forward_peak + waiting)
            links.append((link.with_gradients(waiting) if ctx.adapters is None else link, count))
        links.append((plain_link(joined_block(ctx, run, i, enters=i == last), Label.ENCODER), 1))
    if last is None and ctx.sp:
        links.append((plain_link(_alone(ctx), Label.ENCODER), 1))
    return links


def last_encoder(ctx: BlockContext) -> int | None:
    """The number of the last encoder that has something to encode; None: none has."""
    return max((i for i, run in enumerate(ctx.encoders) if run.items), default=None)


def torch_encoder_links(ctx: BlockContext) -> list[tuple[Link, int]]:
    """The same in a model of transformers, whose checkpoints are around the encoder's layers too
    (``modeling_layers.py: GradientCheckpointingLayer``). A layer of it has a layer's label: engines wrap it as one."""
    assert ctx.torch_layers is not None
    spec, links = ctx.torch_layers.spec, []
    waiting, pixels = ctx.hidden_bytes, pixel_bytes(ctx)
    for i, run in enumerate(ctx.encoders):
        if not run.items:
            continue
        held = sizes_of_encoder(run, ctx).held
        kept = held if spec.gradient_checkpointing else 0  # arguments of every checkpoint
        for name, found, count in blocks_of_encoder(ctx, run, i):
            if name == "layer" and spec.gradient_checkpointing:
                link = checkpointed(found.cost, 0, reentrant=spec.reentrant)
            else:
                link = plain_link(found, Label.LAYER if name == "layer" else Label.ENCODER)
            more = waiting + pixels + (held - kept if name != "stem" else 0)
            link = link._replace(forward_peak=link.forward_peak + more)
            if name == "stem":
                link = link._replace(
                    retained=link.retained + kept, more=(*link.more, ((Part.ENCODER, Provenance.FORMULA), kept)),
                )
            links.append((link.with_gradients(waiting) if ctx.adapters is None else link, count))
        links.append((plain_link(joined_block(ctx, run, i), Label.ENCODER), 1))
    return links


def returned_by_encoders(ctx: BlockContext) -> Any:
    """Bytes of the encoders' last hidden states and features, which the model returns beside its own hidden states
    (``modeling_outputs.py: MultimodalBaseModelOutputWithPast.image_outputs``)."""
    assert ctx.torch_layers is not None
    if not MODELS_RETURN_ENCODER_OUTPUTS(ctx.torch_layers.spec):
        return 0
    sizes = [sizes_of_encoder(run, ctx) for run in ctx.encoders if run.items]
    return sum(size.hidden + size.features for size in sizes)


def encoder_layers(ctx: BlockContext) -> Iterator[tuple[str, ParameterList, int]]:
    """(prefix of its names, parameters, how many) of the layers of encoders of transformers."""
    bare = ctx.bare()
    for i, run in enumerate(ctx.encoders):
        for name, found, count in blocks_of_encoder(bare, run, i):
            if name == "layer":
                yield f"{run.spec.name}.layers.{{}}.", found.parameters, count


def parameters_beside_layers(ctx: BlockContext) -> Iterator[Repeated]:
    """The other parameters of these encoders."""
    bare = ctx.bare()
    for i, run in enumerate(ctx.encoders):
        for name, found, count in blocks_of_encoder(bare, run, i):
            if name != "layer":
                for parameters, times in found.parameters.rows:
                    yield Repeated(tuple(p.under(f"{run.spec.name}.") for p in parameters), times * count)


def encoder_chain(ctx: BlockContext, run: EncoderRun, number: int) -> list[tuple[Link, int]]:
    """The links of one encoder alone, with what its forward holds. Megatron's are recomputed as the language model is:
    the first layers of all, in groups (``transformer_block.py: Qwen3VLVisionTransformerBlock._checkpointed_forward``).
    """
    links: list[tuple[Link, int]] = []
    s, sizes = run.structure, sizes_of_encoder(run, ctx)
    recomputed, size = fully_recomputed(s.num_layers, ctx) if s.kind in RECOMPUTED_KINDS else (0, 1)
    group: list[BlockCost] = []
    deep: list[BlockCost] = []
    inside = False
    done = made = 0
    held = sizes.held - (sizes.angles if recomputed else 0)  # which the stem's link counts then

    def append(link: Link, count: int, mergers: int) -> None:
        """The gradients of features that mergers made before wait in backward, until these run."""
        nonlocal made
        links.append((link.with_gradients(made * sizes.features) if made else link, count))
        made += mergers

    def close() -> None:
        if group:
            append(_recomputed(group, deep, sizes, ctx), 1, 0)
            group.clear()
            deep.clear()

    for name, found, count in blocks_of_encoder(ctx, run, number):
        again = 0
        if name == "layer":
            again = min(recomputed - done, count)
            inside = again == count
        for _ in range(again):
            if len(group) == size:
                close()
            group.append(found.cost)
            done += 1
        if name == "beside" and inside:
            deep.append(found.cost)
            continue
        if again == count:
            continue
        close()
        link = plain_link(found, Label.ENCODER)
        outside = name == "stem" or (name == "head" and RECORDERS[s.kind].projects)
        link = link._replace(forward_peak=link.forward_peak + (0 if outside else held))
        if name == "stem" and recomputed:  # an argument of every checkpoint
            angles = sizes.angles
            link = link._replace(
                retained=link.retained + angles, more=(*link.more, ((Part.ENCODER, Provenance.FORMULA), angles)),
            )
        if name == "beside":  # the next layer counts what it takes, which is alive here too
            link = link._replace(forward_peak=link.forward_peak + sizes.hidden).with_gradients(sizes.hidden)
        append(link, count - again, int(name == "beside"))
    return links


def _recomputed(group: list[BlockCost], deep: list[BlockCost], sizes: _Sizes, ctx: BlockContext) -> Link:
    """Layers that save their input and run again in backward, and the mergers beside them. Their features come out of
    the checkpoint in a list, which ``CheckpointFunction`` does not see: they have no gradient, the mergers no backward.
    """
    link = recomputed_together([(cost, False, 1) for cost in group], ctx)
    kept = len(deep) * sizes.features
    mergers = sum(cost.no_grad_peak for cost in deep)
    # What mergers save when they run again stays until the checkpoint's backward returns.
    again = link.backward_peak + sum(cost.retained for cost in deep)
    return link._replace(
        label=Label.ENCODER, retained=link.retained + kept,
        forward_peak=largest(link.forward_peak, link.retained + mergers) + sizes.held - sizes.angles,
        backward_peak=again, backward_peak_held=again, more=(*link.more, ((Part.ENCODER, Provenance.FORMULA), kept)),
    )


def held_by_the_model(ctx: BlockContext) -> Any:
    """Bytes of variables of a wrapper's forward while its language model runs: the features of all images; and the
    token embeddings in LLaVA, which writes them into new ones."""
    total: Any = 0
    for run in ctx.encoders:
        if run.items and RECORDERS[run.structure.kind].features_wait:
            total = total + sizes_of_encoder(run, ctx).features
    waits = any(RECORDERS[run.structure.kind].embeddings_wait for run in ctx.encoders)
    return total + (_embeddings(ctx) if waits else 0)


def pixel_bytes(ctx: BlockContext) -> Any:
    """Bytes of the batch's pixels and spectrograms in fp32, which the step holds during the first chunk's forward."""
    total: Any = 0
    for run in ctx.encoders:
        total = total + sizes_of_encoder(run, ctx).pixels
    return total


def encoder_parameters(ctx: BlockContext, run: EncoderRun, number: int) -> Iterator[Repeated]:
    """The parameters of an encoder on one rank; names are relative to it."""
    for _, found, count in blocks_of_encoder(ctx.bare(), run, number):
        for parameters, times in found.parameters.rows:
            yield Repeated(parameters, times * count)


class _Sizes(NamedTuple):
    held: Any
    hidden: Any
    pixels: Any
    #: Features of all images.
    features: Any
    #: The angles of Megatron's rotary embedding, [n, 1, 1, d] in fp32.
    angles: Any


class _Measure:
    """In the place of a recorder: sizes alone."""

    def __init__(self, ctx: BlockContext) -> None:
        self.ctx, self.tape, self.frozen = ctx, None, False


def sizes_of_encoder(run: EncoderRun, ctx: BlockContext) -> _Sizes:
    t = EncoderOps(_Measure(ctx), run)  # type: ignore[arg-type]
    s, recorders = run.structure, RECORDERS[run.structure.kind]
    t.layers_reached = _reached(ctx, run, (*recorders.stem_modules, *recorders.layer_modules))
    pixels = t.samples * pixels_of(s, run.items) * (t.parameter_width if recorders.narrow_pixels else FP32)
    if recorders.saves_pixels and t.trains(recorders.stem_modules[0]):
        pixels = 0
    hidden = _inputs(t) * t.compute_width
    made = t.samples * features(s, run.items) * s.out_size * t.compute_width
    angles = t.patches * s.head_dim * FP32
    return _Sizes(recorders.held(t), hidden, pixels, made, angles)


def _embeddings(ctx: BlockContext) -> Any:
    """Bytes of the token embeddings of a microbatch: whole on every tensor- and context-parallel rank until the
    features are among them (``scatter_embedding_sequence_parallel`` is off)."""
    return ctx.tokens * ctx.cp * ctx.hidden_size * ctx.act


def blocks_of_encoder(ctx: BlockContext, run: EncoderRun, number: int) -> Iterator[tuple[str, Block, int]]:
    """(what it is, the block, how often it is repeated), in order."""
    recorders = RECORDERS[run.structure.kind]
    yield "stem", _block(ctx, run, (number, "stem"), recorders.stem, None), 1
    first = _reached(ctx, run, recorders.stem_modules)
    trains = _reached(ctx, run, recorders.layer_modules) or _adapted(ctx, run)
    at = 0
    deep = run.structure.deepstack_layers if recorders.beside is not None else ()
    kinds = [(kind, i in deep) for i, kind in enumerate(recorders.kinds(run.structure))]
    for (kind, merges), some in groupby(kinds):
        for count in [1] * len(list(some)) if merges else [len(list(some))]:
            reached = first or (trains and at > 0)
            at += count
            if trains and not reached and count > 1:  # the first layer's input has no gradient
                yield "layer", _layer(ctx, run, number, kind, False), 1
                reached, count = True, count - 1
            yield "layer", _layer(ctx, run, number, kind, reached), count
            if merges:
                assert recorders.beside is not None
                given = first or trains
                yield "beside", _block(ctx, run, (number, "beside", given), recorders.beside, given), 1
    yield "head", _block(ctx, run, (number, "head", first or trains), recorders.head, first or trains), 1


def _layer(ctx: BlockContext, run: EncoderRun, number: int, kind: LayerKind, reached: bool) -> Block:
    layer = RECORDERS[run.structure.kind].layer

    def held(t: EncoderOps, x: Array) -> Array:
        """The encoder's forward holds a layer's input until the layer returns."""
        out = layer(t, x, **dict(kind))
        t.keep_alive(x)
        return out

    return _block(ctx, run, (number, "layer", kind, reached), held, reached)


def _adapted(ctx: BlockContext, run: EncoderRun) -> bool:
    """Whether layers have adapters: Megatron's do where targets name their linears (Megatron Bridge ``peft/
    module_matcher.py``)."""
    if ctx.adapters is None or run.structure.kind not in MEGATRON_KINDS:
        return False
    return any(is_target(ctx.adapters, name, f"{run.spec.name}.decoder.layers.0.{module}.{name}")
               for module, name in _LINEARS)


#: Modules of megatron-core's layers and their linears.
_LINEARS = (
    ("self_attention", "linear_qkv"), ("self_attention", "linear_proj"), ("mlp", "linear_fc1"), ("mlp", "linear_fc2"),
)


def _reached(ctx: BlockContext, run: EncoderRun, modules: tuple[str, ...]) -> bool:
    """Whether any of these modules trains."""
    return any(encoder_trains(ctx, run, module) for module in modules)


def _features_reached(ctx: BlockContext, run: EncoderRun) -> bool:
    recorders = RECORDERS[run.structure.kind]
    return _reached(ctx, run, (*recorders.stem_modules, *recorders.layer_modules, *recorders.head_modules))


def _block(
    ctx: BlockContext, run: EncoderRun, key: tuple[Any, ...], body: Callable[..., Array], reached: bool | None
) -> Block:
    """``reached``: whether its input has a gradient; None: it takes none."""

    recomputes = run.structure.kind in RECOMPUTED_KINDS
    again = recomputes and ctx.common_recompute(lambda rc: rc.granularity == "selective")

    def record(r: Recorder) -> None:
        r.tape.part = Part.ENCODER
        t = EncoderOps(r, run)
        t.attention_again = again
        r.without_gradients = recomputes and r.ctx.recomputes_fully
        recorders = RECORDERS[run.structure.kind]
        t.layers_reached = _reached(ctx, run, (*recorders.stem_modules, *recorders.layer_modules))
        if reached is None:
            r.tape.output(body(t).tensor)
            return
        # What runs beside the layers takes what the next layer counts.
        counted = key[1] != "beside" or not reached
        x = t.input("hidden states", _inputs(t), t.compute_width, grad=reached, counted=counted)
        r.tape.output(body(t, x).tensor)

    return block(ctx, ("encoder", *key, again), record)


def _inputs(t: EncoderOps) -> Any:
    """Elements of the hidden states of layers."""
    return RECORDERS[t.s.kind].rows(t) * t.s.hidden_size


def joined_block(ctx: BlockContext, run: EncoderRun, number: int, *, enters: bool = True) -> Block:
    """``inputs_embeds.masked_scatter(mask, features)``: of token embeddings copied to [b, s, h], with the features of
    all images in one copy; the result is copied to [s, b, h] (``modeling_glm_45v.py: GLM45VModel.forward``).

    Saves the mask, a byte a token. Backward makes a gradient of each (``derivatives.yaml: masked_scatter``). In a model
    of transformers embeddings are [b, s, h] before and after. ``enters``: what comes out enters the first layer.
    """
    s, reached = run.structure, _features_reached(ctx, run)
    inserted = RECORDERS[s.kind].inserted

    def record(r: Recorder) -> None:
        r.tape.part = Part.ENCODER
        t = EncoderOps(r, run)
        tokens = r.ctx.tokens * r.ctx.cp
        elements = tokens * r.ctx.hidden_size
        given = t.input("features", t.samples * features(s, run.items) * s.out_size, t.compute_width, grad=reached)
        found = t.input("token embeddings", elements, t.compute_width, grad=not r.frozen)
        if inserted is not None:
            out = inserted(t, found, given)
            r.tape.output((_entering(t, out) if enters else out).tensor)
            return
        turned = ctx.torch_layers is None
        rows = t.copy("token embeddings by sequence", found) if turned else found
        joined = t.cat("features of all images", given)
        mask = t.constant("mask of the placeholders", tokens, 1)
        t.keep_alive(found, given)
        out = t.make(
            "embeddings with features", (rows, joined, mask), elements, t.compute_width, saves=(mask.tensor,),
        )
        t.keep_alive(rows, joined, mask)
        if turned:
            out = _entering(t, t.copy("embeddings by position", out)) if enters else t.copy("embeddings joined", out)
        r.tape.output(out.tensor)

    return block(ctx, ("encoder", number, "joined", reached, enters), record)


def _alone(ctx: BlockContext) -> Block:
    """The same of samples without images."""

    def record(r: Recorder) -> None:
        r.tape.part = Part.ENCODER
        t = EncoderOps(r, ctx.encoders[0])
        elements = r.ctx.tokens * r.ctx.cp * r.ctx.hidden_size
        found = t.input("token embeddings", elements, t.compute_width, grad=not r.frozen)
        r.tape.output(_entering(t, t.copy("embeddings by position", found)).tensor)

    return block(ctx, ("encoder", "alone"), record)


def _entering(t: EncoderOps, x: Array) -> Array:
    """What the first layer gets of whole embeddings [s, b, h]: the tokens of a context-parallel rank, copied; and of
    these under sequence parallelism a view, which keeps the whole storage (``tensor_parallel/mappings.py:
    _split_along_first_dim``). The layer counts its part. Backward gathers the gradient."""
    ctx, width = t.r.ctx, t.compute_width
    own = ctx.tokens * ctx.hidden_size
    if ctx.cp > 1:
        whole = x
        x = t.make("embeddings of this context-parallel rank", (whole,), own, width)
        t.keep_alive(whole)
    if not ctx.sp:
        return x
    part = ctx.tokens_sp * ctx.hidden_size
    rest = t.tape.tensor("embeddings of other ranks' tokens", (own - part) * width, grad=False)
    return t.make(
        "scattered embeddings", (x,), part, width, saves=(rest,), also=(rest,), backward_workspace=0, alias=False,
    )
