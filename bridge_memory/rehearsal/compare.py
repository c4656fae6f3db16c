"""Prediction against rehearsal, tensor by tensor: what the inventory and megatron-core do not agree on.

Tensors are matched by size, largest first; a sum of two on one side may stand for one on the other ("repeated
key and value"). What is left unmatched is the difference, and says where to look.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from bridge_memory.inventory.layer import layer_block
from bridge_memory.rehearsal.results import PassRecord
from bridge_memory.rehearsal.run import rehearse_layer
from bridge_memory.rehearsal.tracker import SavedRecord
from bridge_memory.residual import percent, relative
from bridge_memory.spec import RunSpec
from bridge_memory.tapes.alive import BlockCost, SavedTensor
from bridge_memory.tapes.context import context_of

_EXPERT = re.compile(r"local_experts\.\d+")


@dataclass(frozen=True, slots=True)
class LayerComparison:
    """One decoder layer: the inventory's cost and the rehearsal of the same layer."""

    layer: int
    predicted: BlockCost
    found: PassRecord
    #: Saved tensors on one side only.
    only_predicted: tuple[SavedTensor, ...]
    only_found: tuple[SavedRecord, ...]

    @property
    def saved_error(self) -> float:
        """(rehearsed - predicted) / rehearsed of the bytes saved for backward."""
        return _error(self.predicted.retained, self.found.saved_bytes)

    @property
    def forward_error(self) -> float:
        return _error(self.predicted.forward_peak, self.found.forward_bytes)

    @property
    def backward_error(self) -> float:
        return _error(self.predicted.backward_peak, self.found.backward_bytes)

    def as_json(self) -> dict[str, object]:
        """Rows as in the report of a stage, and the tensors of one side only."""
        p, f = self.predicted, self.found
        rows = (
            ("saved for backward", p.retained, f.saved_bytes),
            ("forward peak", p.forward_peak, f.forward_bytes),
            ("backward peak", p.backward_peak, f.backward_bytes),
        )
        return {
            "layer": self.layer,
            "rows": [{"name": n, "predicted": a, "found": b, "difference": b - a} for n, a, b in rows],
            "only_predicted": [{"name": t.name, "bytes": t.bytes} for t in self.only_predicted],
            "only_found": [{"name": f"{t.module}: {t.made_by}", "bytes": t.bytes} for t in self.only_found],
        }

    def lines(self) -> list[str]:
        """A few lines for people."""
        p, f = self.predicted, self.found
        out = []
        for name, ours, theirs, where in (
            ("saved", p.retained, f.saved_bytes, ""),
            ("forward peak", p.forward_peak, f.forward_bytes, _where(p.forward_name(), f.forward_peak)),
            (
                "backward peak", p.backward_peak, f.backward_bytes,
                _where(p.backward_name(), f.backward_peak),
            ),
        ):  # fmt: skip
            out.append(
                f"{name:<14}{ours:>16,}{theirs:>16,}{theirs - ours:>+16,}{percent(_error(ours, theirs), 2):>9}  {where}"
            )
        out += [f"  predicted only: {t.name}, {t.bytes:,} bytes" for t in self.only_predicted]
        out += [f"  rehearsed only: {r}" for r in self.only_found]
        out += [
            f"  kept until the next microbatch, in no peak: {a.module}: {a.made_by}, {a.bytes:,} bytes"
            for a in f.held if a.bytes > 64
        ]
        return out


def _error(predicted: int, found: int) -> float:
    return relative(found, predicted) or 0.0


def _where(predicted: str, peak: object) -> str:
    from bridge_memory.rehearsal.tracker import Peak

    assert isinstance(peak, Peak)
    return f"[{predicted}] [{peak.module}: {peak.operation}]"


def compare_layer(run: RunSpec, layer: int, architecture: Any = None) -> LayerComparison:
    """Rehearse decoder layer ``layer`` (0-based) and compare it with the inventory's cost.

    ``architecture`` as for ``rehearse``.
    """
    cost = layer_block(run.model.layers[layer], context_of(run)).cost
    found = rehearse_layer(run, layer, architecture)
    mine, real = unmatched(list(cost.tensors), over_experts(found.saved))
    return LayerComparison(layer, cost, found, tuple(mine), tuple(real))


def over_experts(records: tuple[SavedRecord, ...]) -> list[SavedRecord]:
    """The same tensor of every local expert as one record."""
    summed: dict[tuple[str, str, str, str], SavedRecord] = {}
    for record in records:
        module = _EXPERT.sub("local_experts.*", record.module)
        made_by = _EXPERT.sub("local_experts.*", record.made_by)
        key = (module, made_by, record.dtype, str(record.shape[1:]) if "*" in module else str(id(record)))
        have = summed.get(key)
        total = record.bytes + (have.bytes if have else 0)
        shape = record.shape if have is None else (have.shape[0] + record.shape[0], *record.shape[1:])
        summed[key] = replace(record, module=module, made_by=made_by, shape=shape, bytes=total)
    return list(summed.values())


def unmatched(
    predicted: list[SavedTensor], found: list[SavedRecord]
) -> tuple[list[SavedTensor], list[SavedRecord]]:
    """What is left of both lists when tensors of equal size, and then pairs, are taken out."""
    left = sorted(predicted, key=lambda t: -t.bytes)
    right = sorted(found, key=lambda r: -r.bytes)
    for tensor in list(left):
        same = next((r for r in right if r.bytes == tensor.bytes), None)
        if same is not None:
            left.remove(tensor)
            right.remove(same)
    for tensor in list(left):
        pair = next((c for n in (2, 3) for c in combinations(right, n) if _sum(c) == tensor.bytes), None)
        if pair is not None:
            left.remove(tensor)
            for record in pair:
                right.remove(record)
    for record in list(right):
        many = next((c for n in (2, 3) for c in combinations(left, n) if _sum(c) == record.bytes), None)
        if many is not None:
            right.remove(record)
            for tensor in many:
                left.remove(tensor)
    return left, right


def _sum(tensors: tuple[SavedTensor, ...] | tuple[SavedRecord, ...]) -> int:
    return sum(t.bytes for t in tensors)
