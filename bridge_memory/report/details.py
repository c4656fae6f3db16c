"""The tensors of a stage, for ``--verbose``: rows of the inventories that the estimate is made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from bridge_memory.estimation import Estimate
from bridge_memory.inventory.encoders.chain import blocks_of_encoder
from bridge_memory.inventory.layer import embedding_block, layer_block
from bridge_memory.inventory.stack import Unit, chunk_units
from bridge_memory.inventory.tail import tail_blocks
from bridge_memory.spec import LayerSpec, ModelSpec
from bridge_memory.spec.layout import ChunkShape, layout
from bridge_memory.tapes.blocks import Block
from bridge_memory.tapes.chain import Label
from bridge_memory.tapes.context import BlockContext, context_of


@dataclass(frozen=True, slots=True)
class DetailRow:
    """One tensor (or parameter) of a block and its number of instances on the stage.

    ``section``: "parameters" or "saved for backward"; ``block``: the layers, embedding or output that it
    belongs to; ``bytes`` of one instance; ``count``: instances per microbatch on this rank.
    """

    section: str
    block: str
    name: str
    bytes: int
    count: int
    note: str = ""

    @property
    def total(self) -> int:
        return self.bytes * self.count


def stage_details(result: Estimate, stage: int) -> tuple[DetailRow, ...]:
    """Every parameter and every saved tensor of one pipeline stage; equal layers are one row.

    Parameter bytes are in the parameter dtype. Saved tensors are those of one microbatch without full recomputation
    (which keeps layer inputs instead: see the stage's components).
    """
    run = result.run
    ctx = context_of(run)
    rows: list[DetailRow] = []
    for shape in layout(run.model, run.parallel).shapes(run.model)[stage]:
        rows += _parameters(chunk_units(run.model, shape, ctx), ctx.act)
        rows += _saved(run.model, shape, ctx)
    return tuple(rows)


def _parameters(units: Sequence[Unit], width: int) -> Iterator[DetailRow]:
    counted: dict[tuple[str, str, tuple[int, ...]], int] = {}
    for unit in units:
        layer = unit.label is Label.LAYER
        for number in range(1 if layer else unit.times):
            block = "all decoder layers" if layer else unit.prefix.format(number).rstrip(".")
            for parameters, count in unit.parameters.rows:
                for p in parameters:
                    key = (block or "embedding and output", p.name, p.shape)
                    counted[key] = counted.get(key, 0) + count * (unit.times if layer else 1)
    for (block, name, shape), count in counted.items():
        yield DetailRow("parameters", block, name, width * prod(shape), count, " x ".join(map(str, shape)))


def _saved(model: ModelSpec, shape: ChunkShape, ctx: BlockContext) -> Iterator[DetailRow]:
    blocks: list[tuple[str, Block, int]] = []
    if shape.embedding:
        blocks.append((Label.EMBEDDING.value, embedding_block(model, ctx), 1))
        for i, run in enumerate(ctx.encoders):
            found = blocks_of_encoder(ctx, run, i) if run.items else ()
            blocks += [(f"{Label.ENCODER.value} {run.spec.name}: {name}", each, count) for name, each, count in found]
    for kind, count in shape.kinds.items():
        blocks.append((layer_name(kind), layer_block(kind, ctx), count))
    blocks += [(label.value, block, 1) for block, label in tail_blocks(model, shape, ctx)]
    for name, block, count in blocks:
        for t in block.cost.tensors:
            yield DetailRow("saved for backward", name, t.name, t.bytes, count, t.part.value)


def layer_name(layer: LayerSpec) -> str:
    """"attention + MLP" and the like."""
    short = {
        "AttentionSpec": "attention", "CompressedAttentionSpec": "compressed attention",
        "SideBySideSpec": "attention and Mamba in parallel", "MLASpec": "MLA", "MambaSpec": "Mamba",
        "GatedDeltaNetSpec": "gated delta net", "KimiDeltaSpec": "Kimi delta attention", "Mamba1Spec": "Mamba",
        "ShortConvSpec": "short convolution",
        "MLPSpec": "MLP", "MoESpec": "MoE",
    }
    parts = [short[type(part).__name__] for part in (layer.mixer, layer.ffn) if part is not None]
    return " + ".join(parts) + " layer" if parts else "empty layer"
