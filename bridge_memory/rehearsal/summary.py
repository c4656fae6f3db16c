"""The table of a stage: predicted, rehearsed, and the difference."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from bridge_memory.components import Component, Lifetime, Part, Role, State
from bridge_memory.estimation import estimate, explain
from bridge_memory.inventory.stack import chunk_inventory
from bridge_memory.rehearsal.results import Rehearsal
from bridge_memory.residual import REHEARSED, REHEARSED_PERCENT, percent, relative, residual
from bridge_memory.result import OPTIMIZER_STEP
from bridge_memory.schedule.events import ChunkCost
from bridge_memory.schedule.peak import dynamic_peak
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.context import context_of
from bridge_memory.workspaces.chunk_costs import chunk_costs


class Quantity(str, Enum):
    """The quantity of a row."""

    PARAMETERS = "parameters (elements)"
    WEIGHTS = "weights"
    FP8_COPIES = "fp8 weight copies"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    DISPATCHERS = "kept by MoE dispatchers"
    SAVED = "saved for backward, per microbatch"
    FORWARD = "forward peak"
    BACKWARD = "backward peak"
    SCHEDULE = "schedule peak above static memory"
    SHARED = "buffers, counted in both columns"
    PEAK = "peak"


@dataclass(frozen=True, slots=True)
class ComparedQuantity:
    """``found``: None where the rehearsal does not cover it. Bytes, or elements for parameters."""

    quantity: Quantity
    predicted: int
    found: int | None
    #: The model chunk, where the stage has several.
    chunk: int | None = None

    @property
    def name(self) -> str:
        return self.quantity.value if self.chunk is None else f"chunk {self.chunk}: {self.quantity.value}"

    @property
    def difference(self) -> int | None:
        """Rehearsed minus predicted."""
        return residual(self.found, self.predicted)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name, "predicted": self.predicted, "found": self.found, "difference": self.difference
        }  # fmt: skip


def rows(rehearsal: Rehearsal) -> list[ComparedQuantity]:
    """Rows by component; the last is the peak of the stage, predicted as by ``estimate``.

    The rehearsed peak takes from the estimate what the rehearsal does not cover (``shared``). Tensors kept by
    dispatchers are replaced by the next microbatch: they have a separate row, and are in no peak of a pass.
    """
    run, stage = rehearsal.run, rehearsal.stage
    predicted = estimate(run).stages[stage]
    # This rank's shards; those of the rank with the highest peak may have less padding.
    state = explain(run, stage, rank=rehearsal.rank).optimizer_bytes
    copies = sum(c.bytes for c in predicted.components if c.state is State.FP8_COPIES)
    fp8 = ComparedQuantity(Quantity.FP8_COPIES, copies, rehearsal.fp8_copies_bytes)
    out = [
        ComparedQuantity(Quantity.PARAMETERS, predicted.parameters, rehearsal.parameters),
        ComparedQuantity(Quantity.WEIGHTS, predicted.weights_bytes - copies, rehearsal.weights_bytes),
        *([fp8] if run.precision.quantizes else []),
        ComparedQuantity(Quantity.GRADIENTS, predicted.gradients_bytes, rehearsal.gradients_bytes),
        ComparedQuantity(Quantity.OPTIMIZER, state, rehearsal.optimizer_bytes),
    ]
    routing = sum(c.bytes for c in predicted.components if _held_by_dispatchers(c))
    held = sum(c.passes.held_bytes for c in rehearsal.chunks)
    if routing or held:
        out.append(ComparedQuantity(Quantity.DISPATCHERS, routing, held))
    ctx = context_of(run)
    shapes = layout(run.model, run.parallel).shapes(run.model)[stage]
    inventories = [chunk_inventory(run.model, shape, ctx) for shape in shapes]
    for record, ours in zip(rehearsal.chunks, inventories, strict=True):
        chunk = record.chunk if len(inventories) > 1 else None
        passes = record.passes
        out += [
            ComparedQuantity(Quantity.SAVED, ours.retained, passes.saved_bytes, chunk),
            ComparedQuantity(Quantity.FORWARD, ours.forward_peak, passes.forward_bytes, chunk),
            ComparedQuantity(Quantity.BACKWARD, ours.backward_peak, passes.backward_bytes, chunk),
        ]
    costs = chunk_costs(inventories)
    found = [
        ChunkCost(p.saved_bytes, p.forward_bytes, p.backward_bytes, None, ours.carried_over)
        for p, ours in zip((chunk.passes for chunk in rehearsal.chunks), costs, strict=True)
    ]
    peaks = [
        dynamic_peak(
            run.parallel.pp, stage, run.num_microbatches, costs,
            group_size=run.parallel.microbatch_group_size_per_vp_stage, hidden_bytes=ctx.hidden_bytes,
            keeps_outputs=not run.implementation.deallocate_pipeline_outputs,
        ).bytes
        for costs in (costs, found)
    ]  # fmt: skip
    out.append(ComparedQuantity(Quantity.SCHEDULE, peaks[0], peaks[1]))
    if rehearsal.optimizer_bytes is not None:
        static = (
            predicted.weights_bytes + predicted.gradients_bytes + predicted.optimizer_bytes + routing,
            rehearsal.weights_bytes + rehearsal.gradients_bytes + rehearsal.fp8_copies_bytes + held
            + rehearsal.optimizer_bytes,
        )  # fmt: skip
        if predicted.peak_phase == OPTIMIZER_STEP:
            peaks = [0, 0]
        shared = predicted.peak_bytes - static[0] - peaks[0]
        out.append(ComparedQuantity(Quantity.SHARED, shared, shared))
        out.append(ComparedQuantity(Quantity.PEAK, predicted.peak_bytes, static[1] + peaks[1] + shared))
    return out


#: What the difference of the last rows does not test.
SHARED = (
    "both columns take the schedule (which microbatches are alive when, what other chunks carry over) and {buffers} "
    "from the estimate: the rehearsal does not test these",
    "written by hand for both columns from the same sources: temporaries inside the kernel of attention's backward, "
    "and "
    "the shapes of the outputs of Transformer Engine's kernels",
)


def _held_by_dispatchers(component: Component) -> bool:
    """Whether dispatchers keep it during passes; tensors kept only between steps are in no peak of a pass."""
    return component.part is Part.DISPATCHER and component.lifetime is not Lifetime.BETWEEN_STEPS


def shared(rehearsal: Rehearsal) -> list[str]:
    """What both columns take from the same source, in sentences."""
    stage = estimate(rehearsal.run).stages[rehearsal.stage]
    here = (Role.WEIGHTS, Role.GRADIENTS, Role.OPTIMIZER, Role.ACTIVATION)
    names = [
        c.name
        for c in sorted((*stage.components, *stage.carried_over), key=lambda c: -c.bytes)
        if c.bytes and c.role not in here and c.part is not Part.RUNNING and not _held_by_dispatchers(c)
    ]
    return [text.format(buffers=", ".join(dict.fromkeys(names)) or "no buffers") for text in SHARED]


def lines(table: list[ComparedQuantity], unit: int = 1 << 30) -> list[str]:
    """The table as text, in GiB; elements stay elements."""
    width = max(len(r.name) for r in table)
    out = [f"{'':<{width}}  {'predicted':>15}  {'rehearsed':>15}  {REHEARSED:>21}  {REHEARSED_PERCENT}"]
    for r in table:
        cells = [_cell(r.quantity, v, unit) for v in (r.predicted, r.found, r.difference)]
        share = percent(relative(r.found, r.predicted), 2) if r.found else ""
        line = f"{r.name:<{width}}  {cells[0]:>15}  {cells[1]:>15}  {cells[2]:>21}"
        out.append(f"{line}  {share:>{len(REHEARSED_PERCENT)}}".rstrip())
    return out


def _cell(quantity: Quantity, value: int | None, unit: int) -> str:
    if value is None:
        return "not covered"
    return f"{value:,}" if quantity is Quantity.PARAMETERS else f"{value / unit:,.4f} GiB"
