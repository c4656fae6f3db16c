"""Tensor by tensor: what a stage's totals are made of, for ``--verbose`` and for explanations.

Rows are derived from the same inventories as the estimate; nothing is computed a second way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from bridge_memory.estimate import Estimate
from bridge_memory.inventory.context import BlockContext, context_of
from bridge_memory.inventory.layer import embedding_inventory, layer_inventory
from bridge_memory.inventory.recorder import BlockInventory
from bridge_memory.inventory.stack import parameter_groups
from bridge_memory.inventory.tail import tail_inventories
from bridge_memory.spec import LayerSpec, ModelSpec, RunSpec
from bridge_memory.spec.layout import Chunk, layout

#: Experts are alike: local_experts.<i> and weight<i> are counted, not listed.
_EXPERT = re.compile(r"(\.local_experts\.|\.experts\.linear_fc[12]\.(?:weight|bias))\d+")


@dataclass(frozen=True, slots=True)
class DetailRow:
    """One tensor (or parameter) of a block and how often the stage has it.

    ``section``: "parameters" or "saved for backward"; ``block``: the layers or the end of the model it belongs
    to; ``bytes`` of one instance; ``count`` instances a microbatch on this rank.
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
    """Every parameter and every saved tensor of one pipeline stage, equal layers counted together.

    Parameter bytes are in the parameter dtype; saved tensors are those of one microbatch, without full
    recomputation (which keeps layer inputs in their place: see the stage's components).
    """
    run = result.run
    ctx = context_of(run)
    rows: list[DetailRow] = []
    for chunk in layout(run.model, run.parallel).stages[stage]:
        rows += _parameters(run, chunk, ctx)
        rows += _saved(run.model, chunk, ctx)
    return tuple(rows)


def _parameters(run: RunSpec, chunk: Chunk, ctx: BlockContext) -> Iterator[DetailRow]:
    counted: dict[tuple[str, str, tuple[int, ...]], int] = {}
    for prefix, parameters in parameter_groups(run.model, chunk, ctx):
        block = "every decoder layer of its kind" if prefix.startswith("decoder.layers.") else prefix.rstrip(".")
        for p in parameters:
            key = (block or "ends of the model", _EXPERT.sub(r"\1*", p.name), p.shape)
            counted[key] = counted.get(key, 0) + 1
    for (block, name, shape), count in counted.items():
        nbytes = ctx.act
        for n in shape:
            nbytes *= n
        yield DetailRow("parameters", block, name, nbytes, count, " x ".join(map(str, shape)))


def _saved(model: ModelSpec, chunk: Chunk, ctx: BlockContext) -> Iterator[DetailRow]:
    kinds: dict[LayerSpec, int] = {}
    for i in chunk.layers:
        kinds[model.layers[i]] = kinds.get(model.layers[i], 0) + 1
    blocks: list[tuple[str, BlockInventory, int]] = []
    if chunk.embedding:
        blocks.append(("embedding", embedding_inventory(model, ctx), 1))
    for kind, count in kinds.items():
        blocks.append((layer_name(kind), layer_inventory(kind, ctx), count))
    blocks += [(label, inventory, 1) for inventory, label in tail_inventories(model, chunk, ctx)]
    for label, inventory, count in blocks:
        for t in inventory.cost.saved_tensors:
            yield DetailRow("saved for backward", label, t.name, t.bytes, count, t.module)


def layer_name(layer: LayerSpec) -> str:
    """"attention + MLP" and the like."""
    short = {
        "AttentionSpec": "attention", "MLASpec": "MLA", "MambaSpec": "Mamba", "GatedDeltaNetSpec": "gated delta net",
        "MLPSpec": "MLP", "MoESpec": "MoE",
    }
    parts = [short[type(part).__name__] for part in (layer.mixer, layer.ffn) if part is not None]
    return " + ".join(parts) + " layer" if parts else "empty layer"
