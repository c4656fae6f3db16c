"""One table a stage: what the inventory predicts, what the rehearsal found, and the difference."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from bridge_memory.components import Component, Lifetime, Part, Role, State
from bridge_memory.estimation import estimate, explain, stage_costs
from bridge_memory.inventory.stack import chunk_inventory
from bridge_memory.rehearsal.results import Rehearsal
from bridge_memory.result import OPTIMIZER_STEP
from bridge_memory.schedule.events import ChunkCost
from bridge_memory.schedule.peak import dynamic_peak
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.context import context_of


class Quantity(str, Enum):
    """What a row is about."""

    PARAMETERS = "parameters (elements)"
    WEIGHTS = "weights"
    FP8_COPIES = "fp8 weight copies"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    DISPATCHERS = "held by MoE dispatchers"
    SAVED = "saved for backward, a microbatch"
    FORWARD = "forward peak"
    BACKWARD = "backward peak"
    SCHEDULE = "schedule peak above static memory"
    SHARED = "buffers, the same in both"
    PEAK = "peak"


@dataclass(frozen=True, slots=True)
class Row:
    """``found`` is None where the rehearsal cannot see it. Bytes, or elements for parameters."""

    quantity: Quantity
    predicted: int
    found: int | None
    #: Of which model chunk, where the stage has several.
    chunk: int | None = None

    @property
    def name(self) -> str:
        return self.quantity.value if self.chunk is None else f"chunk {self.chunk}: {self.quantity.value}"

    @property
    def difference(self) -> int | None:
        return None if self.found is None else self.predicted - self.found

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name, "predicted": self.predicted, "found": self.found, "difference": self.difference
        }  # fmt: skip


def rows(rehearsal: Rehearsal) -> list[Row]:
    """Component by component; the last row is the peak of the stage, predicted as ``estimate`` has it.

    The rehearsed peak takes from the estimate what the rehearsal does not see, see ``shared``.

    What dispatchers hold is replaced, not added to, by the next microbatch: it is a row of its own, and no part of a
    pass's peaks.
    """
    run, stage = rehearsal.run, rehearsal.stage
    predicted = estimate(run).stages[stage]
    # Its shards; the fullest rank's, which the peak is of, may have less padding in them.
    state = explain(run, stage, rank=rehearsal.rank).optimizer_bytes
    copies = sum(c.bytes for c in predicted.components if c.state is State.FP8_COPIES)
    out = [
        Row(Quantity.PARAMETERS, predicted.parameters, rehearsal.parameters),
        Row(Quantity.WEIGHTS, predicted.weights_bytes - copies, rehearsal.weights_bytes),
        *([Row(Quantity.FP8_COPIES, copies, rehearsal.fp8_copies_bytes)] if run.precision.quantizes else []),
        Row(Quantity.GRADIENTS, predicted.gradients_bytes, rehearsal.gradients_bytes),
        Row(Quantity.OPTIMIZER, state, rehearsal.optimizer_bytes),
    ]
    routing = sum(c.bytes for c in predicted.components if _held_by_dispatchers(c))
    held = sum(c.passes.held_bytes for c in rehearsal.chunks)
    if routing or held:
        out.append(Row(Quantity.DISPATCHERS, routing, held))
    ctx = context_of(run)
    shapes = layout(run.model, run.parallel).shapes(run.model)[stage]
    inventories = [chunk_inventory(run.model, shape, ctx) for shape in shapes]
    for record, ours in zip(rehearsal.chunks, inventories, strict=True):
        chunk = record.chunk if len(inventories) > 1 else None
        passes = record.passes
        out += [
            Row(Quantity.SAVED, ours.retained, passes.saved_bytes, chunk),
            Row(Quantity.FORWARD, ours.forward_peak, passes.forward_bytes, chunk),
            Row(Quantity.BACKWARD, ours.backward_peak, passes.backward_bytes, chunk),
        ]
    found = [
        ChunkCost(passes.saved_bytes, passes.forward_bytes, passes.backward_bytes)
        for passes in (chunk.passes for chunk in rehearsal.chunks)
    ]
    peaks = [
        dynamic_peak(
            run.parallel.pp, stage, run.num_microbatches, costs,
            group_size=run.parallel.microbatch_group_size_per_vp_stage, hidden_bytes=ctx.hidden_bytes,
        ).bytes
        for costs in (stage_costs(inventories), found)
    ]  # fmt: skip
    out.append(Row(Quantity.SCHEDULE, peaks[0], peaks[1]))
    if rehearsal.optimizer_bytes is not None:
        static = (
            predicted.weights_bytes + predicted.gradients_bytes + predicted.optimizer_bytes + routing,
            rehearsal.weights_bytes + rehearsal.gradients_bytes + rehearsal.fp8_copies_bytes + held
            + rehearsal.optimizer_bytes,
        )  # fmt: skip
        if predicted.peak_phase == OPTIMIZER_STEP:
            peaks = [0, 0]
        shared = predicted.peak_bytes - static[0] - peaks[0]
        out.append(Row(Quantity.SHARED, shared, shared))
        out.append(Row(Quantity.PEAK, predicted.peak_bytes, static[1] + peaks[1] + shared))
    return out


#: What the difference of the last rows says nothing about.
SHARED = (
    "both columns take from the estimate when microbatches are alive (the schedule) and {buffers}: of these the "
    "rehearsal proves nothing",
    "written by hand for both columns, after the same sources: what attention's backward needs inside its kernel, and "
    "the shapes of what Transformer Engine's kernels return",
)


def _held_by_dispatchers(component: Component) -> bool:
    """At all times; what is there between steps alone is in no peak of a pass."""
    return component.part is Part.DISPATCHER and component.lifetime is not Lifetime.BETWEEN_STEPS


def shared(rehearsal: Rehearsal) -> list[str]:
    """What the two columns have in common, in sentences."""
    stage = estimate(rehearsal.run).stages[rehearsal.stage]
    here = (Role.WEIGHTS, Role.GRADIENTS, Role.OPTIMIZER, Role.ACTIVATION)
    names = [
        c.name
        for c in sorted((*stage.components, *stage.carried_over), key=lambda c: -c.bytes)
        if c.bytes and c.role not in here and c.part is not Part.RUNNING and not _held_by_dispatchers(c)
    ]
    return [text.format(buffers=", ".join(dict.fromkeys(names)) or "no buffers") for text in SHARED]


def lines(table: list[Row], unit: int = 1 << 30) -> list[str]:
    """The table as text, in GiB; elements stay elements."""
    width = max(len(r.name) for r in table)
    out = [f"{'':<{width}}  {'predicted':>15}  {'rehearsed':>15}  {'difference':>15}"]
    for r in table:
        cells = [_cell(r.quantity, v, unit) for v in (r.predicted, r.found, r.difference)]
        share = f"{r.predicted / r.found - 1:+8.2%}" if r.found else ""
        out.append(f"{r.name:<{width}}  {cells[0]:>15}  {cells[1]:>15}  {cells[2]:>15}  {share}".rstrip())
    return out


def _cell(quantity: Quantity, value: int | None, unit: int) -> str:
    if value is None:
        return "not seen"
    return f"{value:,}" if quantity is Quantity.PARAMETERS else f"{value / unit:,.4f} GiB"
