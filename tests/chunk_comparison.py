"""What a model chunk keeps for backward, component by component: the inventory beside the rehearsal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bridge_memory.inventory.layer import embedding_block
from bridge_memory.inventory.layer_links import layer_links
from bridge_memory.inventory.tail import tail_blocks
from bridge_memory.rehearsal.compare import over_experts, unmatched
from bridge_memory.rehearsal.run import rehearse
from bridge_memory.rehearsal.tracker import SavedRecord
from bridge_memory.spec import RunSpec
from bridge_memory.spec.layout import ChunkShape, layout
from bridge_memory.tapes.alive import SavedTensor
from bridge_memory.tapes.chain import Label
from bridge_memory.tapes.context import context_of

#: In the order in which they run.
COMPONENTS = ("embedding", "layers", "final norm", "MTP", "output layer and loss")


@dataclass(frozen=True, slots=True)
class ComponentComparison:
    """What one component of a chunk keeps for the backward pass of one microbatch."""

    name: str
    predicted: int
    found: int
    only_predicted: tuple[SavedTensor, ...]
    only_found: tuple[SavedRecord, ...]

    @property
    def error(self) -> float:
        """(predicted - found) / found."""
        return self.predicted / self.found - 1 if self.found else float(self.predicted != 0)

    def lines(self) -> list[str]:
        """A few lines for people."""
        error = f"{self.error:>+9.2%}" if self.found else ""
        out = [f"{self.name:<22}{self.predicted:>16,}{self.found:>16,}{self.predicted - self.found:>+16,}{error}"]
        out += [f"  predicted only: {t.name}, {t.bytes:,} bytes" for t in self.only_predicted]
        return out + [f"  found only: {r}" for r in self.only_found]



def compare_chunk(
    run: RunSpec, stage: int, chunk: int = 0, records: Iterable[SavedRecord] | None = None
) -> list[ComponentComparison]:
    """Rehearse one model chunk of a pipeline stage and set what it keeps beside the inventory's, by component.

    ``records``: what it was found to keep, where that is known already.
    The loss mask is left out: it is part of the batch, which is counted on its own (``workspaces.batch.batch_bytes``).
    """
    ours = _predicted(run, layout(run.model, run.parallel).shapes(run.model)[stage][chunk])
    found: dict[str, list[SavedRecord]] = {name: [] for name in COMPONENTS}
    for record in rehearse(run, stage).chunks[chunk].passes.saved if records is None else records:
        if component_of(record) != COMPONENTS[-1] or not record.made_by.startswith("batch"):
            found[component_of(record)].append(record)
    out = []
    for name in COMPONENTS:
        theirs = over_experts(tuple(found[name]))
        mine, real = unmatched(ours[name], theirs)
        total = sum(t.bytes for t in ours[name]), sum(r.bytes for r in theirs)
        if any(total):
            out.append(ComponentComparison(name, *total, tuple(mine), tuple(real)))
    return out



def component_of(record: SavedRecord) -> str:
    """The component of a chunk that a saved tensor belongs to."""
    if record.part == "decoder":
        return "final norm" if record.module.startswith("decoder.final") else "layers"
    return {"embedding": "embedding", "mtp": "MTP"}.get(record.part, "output layer and loss")



#: Of each link of a chunk.
_COMPONENT = {
    Label.EMBEDDING: "embedding", Label.FINAL_NORM: "final norm", Label.MTP: "MTP",
    Label.LOSS: "output layer and loss",
}  # fmt: skip


def _predicted(run: RunSpec, shape: ChunkShape) -> dict[str, list[SavedTensor]]:
    """The inventory's saved tensors of a chunk by component; a recomputed group of layers is one tensor."""
    model, ctx = run.model, context_of(run)
    out: dict[str, list[SavedTensor]] = {name: [] for name in COMPONENTS}
    if shape.embedding:
        out["embedding"] += embedding_block(model, ctx).cost.tensors
    for link, count in layer_links(model, shape, ctx):
        kept = link.cost.tensors if link.cost is not None else (SavedTensor(link.label.value, link.retained),)
        out["layers"] += kept * count
    for block, label in tail_blocks(model, shape, ctx):
        out[_COMPONENT[label]] += block.cost.tensors
    return out
