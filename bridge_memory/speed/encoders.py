"""The work of vision and audio encoders beside a language model: products, attention, and the bytes that all other
operations read and write, as ``speed/torch/work.py`` counts them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from bridge_memory.inventory.encoders.chain import blocks_of_encoder, sizes_of_encoder
from bridge_memory.inventory.encoders.ops import encoder_trains
from bridge_memory.spec import DataParallelSpec, ImplementationSpec, PrecisionSpec, RunSpec
from bridge_memory.spec.encoders import (
    MEGATRON_KINDS,
    EncoderStructure,
    Item,
    after_convolutions,
    audio_chunks,
    audio_windows,
    features,
    padded_chunk,
)
from bridge_memory.speed.megatron.work import Product
from bridge_memory.speed.torch.work import Traffic
from bridge_memory.tapes.blocks import Block, PlainTraces
from bridge_memory.tapes.context import BlockContext, EncoderRun, context_of
from bridge_memory.tapes.parameters import Parameter


class EncoderWork(NamedTuple):
    """Equal blocks of an encoder, for one sample on one rank that has them whole.

    ``operations_backward`` is 0 where no gradient reaches the block. ``trains``: whether its weights have one.
    ``layer``: whether it is one of its layers, which checkpoints can be around. ``sharded``: tensor parallelism divides
    it.
    """

    times: int
    products: tuple[Product, ...]
    #: Floating-point operations of attention forward.
    attention: float
    #: Bytes that other operations read and write, forward and backward.
    read_forward: float
    read_backward: float
    #: Operations, each at least one kernel that the host starts.
    operations: int
    operations_backward: int
    trains: bool
    layer: bool
    sharded: bool


def encoder_work(run: RunSpec) -> tuple[EncoderWork, ...]:
    """The blocks of all encoders of ``run`` whose structure is known, for one sample."""
    if not any(encoder.structure is not None for encoder in run.model.encoders):
        return ()
    batch = replace(run.batch, micro_batch_size=1, global_batch_size=None, packed_sequences=False)
    alone = RunSpec(
        model=run.model, batch=batch, peft=run.peft, transformers=run.transformers,
        precision=PrecisionSpec(params_dtype=run.precision.params_dtype),
        data_parallel=DataParallelSpec(engine=run.data_parallel.engine),
        implementation=ImplementationSpec(transformer_impl=run.implementation.transformer_impl),
    )  # fmt: skip
    return _works(alone)


@lru_cache(maxsize=16)
def _works(alone: RunSpec) -> tuple[EncoderWork, ...]:
    """Of a run with one sequence on one GPU, which layouts share."""
    ctx, tapes = context_of(alone), context_of(alone)
    tapes.many = PlainTraces(tapes)  # type: ignore[assignment]
    found = []
    for number, encoder in enumerate(ctx.encoders):
        if encoder.items:
            layers = 0
            for name, block, times in blocks_of_encoder(tapes, encoder, number):
                found.append(_of_block(name, block, times, encoder, ctx, layers))
                layers += times * (name == "layer")
    return tuple(found)


def _of_block(
    name: str, block: Block, times: int, encoder: EncoderRun, ctx: BlockContext, before: int
) -> EncoderWork:
    """``before``: layers before this one."""
    recorder: Any = block
    s, traffic = encoder.structure, Traffic(recorder.tape)
    width = encoder.layers.compute_width
    rows: Any = features(s, encoder.items)
    if name in ("stem", "layer"):
        rows = sizes_of_encoder(encoder, ctx).hidden // (width * s.hidden_size)
    parameters = [p for of, number in recorder.rows for _ in range(number) for p in of]
    products = tuple(_products(parameters, rows, s, encoder.items))
    moved = sum(p.rows * (p.inner + p.columns) for p in products) * width
    return EncoderWork(
        times, products, _attention(s, encoder.items, before) if name == "layer" else 0.0,
        max(0.0, traffic.forward - moved), max(0.0, traffic.backward - 2 * moved), traffic.operations,
        traffic.operations_backward, any(encoder_trains(ctx, encoder, p.name) for p in parameters), name == "layer",
        s.kind in MEGATRON_KINDS,
    )  # fmt: skip


def _products(
    parameters: Iterable[Parameter], rows: Any, s: EncoderStructure, items: tuple[Item, ...]
) -> Iterator[Product]:
    """Of every matrix and convolution; tables of positions are added or looked up, class tokens are put before."""
    for p in parameters:
        if len(p.shape) > 1 and not any(name in p.name for name in _NO_PRODUCTS):
            yield Product(_rows(p.name, rows, s, items), p.shape[0], prod(p.shape[1:]), quantized=False)


#: Parts of the names of matrices that are added or looked up.
_NO_PRODUCTS = ("pos_emb", "position_embedding", "positional_embedding", "class_token")


def _rows(name: str, rows: Any, s: EncoderStructure, items: tuple[Item, ...]) -> Any:
    """Rows of a product: those of its block, before Qwen3-Omni's layers those of padded chunks, and after Step-3.7's
    first convolution four times the features."""
    if name.startswith("vit_downsampler1"):
        return 4 * rows
    if s.kind != "qwen3_omni_audio" or not name.startswith("conv"):
        return rows
    chunks, columns = sum(item.number * len(audio_chunks(s, item)) for item in items), padded_chunk(s, items)
    if name.startswith("conv_out"):
        return chunks * after_convolutions(columns)
    times = int(name[len("conv2d")])
    return chunks * after_convolutions(columns, times) * after_convolutions(s.mel_bins, times)


def _attention(s: EncoderStructure, items: Iterable[Item], layer: int) -> float:
    """Two products of every patch with those that it attends to: of its frame, or of its window. A mask leaves out
    nothing (Pixtral: all images of a sample in one row, ``modeling_pixtral.py: generate_block_attention_mask``)."""
    if s.kind == "qwen3_omni_audio":
        return sum(4.0 * item.number * window**2 * s.hidden_size for item in items for window in audio_windows(s, item))
    if s.audio:
        return sum(4.0 * item.number * (item.frames // 2) ** 2 * s.hidden_size for item in items)
    if s.kind == "pixtral":
        return 4.0 * sum(item.patches for item in items) ** 2 * s.hidden_size
    whole = not s.window_size or layer in s.full_layers
    side = s.window_size // s.patch_size // s.merge_size * s.merge_size
    flops = 0.0
    for item in items:
        own = reached = item.height * item.width + s.class_tokens
        if not whole:
            reached = min(item.height, side) * min(item.width, side)
        flops += 4.0 * item.number * item.frames * own * reached * s.hidden_size
    return flops
