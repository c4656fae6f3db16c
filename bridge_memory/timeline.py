"""A pipeline stage over one training step: what is alive at every operation that the estimate distinguishes.

Passes are in the order of the schedule (``schedule.events.walk``), and within a pass the links of its chunk in their
order (``tapes.chain.peaks_by_link``). The highest of all points is the peak that ``estimate`` gives, to the byte. The
order is real; durations are not modelled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import mul
from typing import NamedTuple

from bridge_memory.components import Lifetime, Part, Role
from bridge_memory.estimation import Estimate, StageParts, stage_parts
from bridge_memory.result import OPTIMIZER_STEP
from bridge_memory.schedule.events import ChunkCost, overlapped, schedule_table, walk
from bridge_memory.schedule.peak import few_microbatches
from bridge_memory.spec import RunSpec
from bridge_memory.tapes.chain import ChunkInventory, Label, peaks_by_link

#: Up to so many (microbatch, chunk) passes in one direction all microbatches of a step are followed.
MOST_PASSES = 128


class Step(NamedTuple):
    """One link of a chunk (a layer, the embedding, the loss), in bytes of one microbatch.

    ``keeps``: saved for backward by it; ``discards``: of these, what has no storage between the chunk's passes
    (``chain.Link.discarded``); ``before``: saved by the links before it. ``forward`` and ``backward``: everything alive
    in the chunk at the link's peaks, which are at ``forward_operation`` and ``backward_operation``.
    """

    label: Label
    #: Numbers of its decoder layers.
    layers: tuple[int, ...]
    before: int
    keeps: int
    discards: int
    forward: int
    backward: int
    forward_operation: str
    backward_operation: str
    #: Of ``backward``: gradients that earlier links made and that stay until the optimizer's step, as far as they are
    #: more than the unsharded gradients of earlier microbatches that are freed by then.
    gradients: int


class Chunk(NamedTuple):
    """One virtual stage: its links, and the bytes that one microbatch saves in it. ``sent``: of these, the output that
    stays after it was sent."""

    steps: tuple[Step, ...]
    saved: int
    sent: int


class Pass(NamedTuple):
    """One pass; ``phase`` as in ``schedule.events.Moment``. In phase "overlapped" ``microbatch`` of ``chunk`` runs
    backward while ``forward_microbatch`` of ``forward_chunk`` runs forward; ``peak``: the most bytes of both."""

    phase: str
    microbatch: int
    chunk: int
    #: Number of hidden states that the schedule holds during the pass.
    hidden: int
    #: Bytes that virtual stages that do not run carry over from their last backward pass.
    carried_over: int
    #: Number of microbatches of each chunk whose saved tensors are alive, the running ones included.
    alive: tuple[int, ...]
    forward_microbatch: int = -1
    forward_chunk: int = -1
    peak: int = 0


class Point(NamedTuple):
    """What is alive at one moment, in bytes. ``pass_number``: -1 before the first pass, the number of passes after the
    last. ``step``: the running link, -1 between links."""

    pass_number: int
    step: int
    #: Saved for backward: by finished passes, and by the links of this pass so far.
    activations: int
    #: Hidden states that the schedule holds.
    pipeline: int
    #: Made by this step's backward passes so far, for the optimizer.
    gradients: int
    #: Temporaries of the running link or of the optimizer's step, and the batch.
    transient: int
    #: Carried over from the last step until the first forward pass.
    carried_over: int
    total: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """One stage over one step; ``points`` computes what is alive. Sizes are bytes."""

    stage: int
    #: By role: weights, gradients, optimizer state and buffers, which are alive throughout; without ``fresh``.
    persistent: dict[Role, int]
    #: Gradients that do not exist before backward makes them.
    fresh: int
    carried_over: int
    #: The batch, parameters gathered for all passes, and unsharded gradients of earlier microbatches.
    always: int
    #: Allocated for the optimizer's step.
    in_step: int
    #: One hidden state.
    hidden_state: int
    #: Microbatches of the step, and how many of them are followed: the others repeat the rounds before them.
    microbatches: int
    followed: int
    chunks: tuple[Chunk, ...]
    passes: tuple[Pass, ...]

    def points(self) -> Iterator[Point]:
        """All points from the start of the step to its end."""
        floor = sum(self.persistent.values())
        saved = [chunk.saved for chunk in self.chunks]
        yield Point(-1, -1, 0, 0, 0, 0, self.carried_over, floor + self.carried_over)

        def point(number: int, step: int, kept: int, held: int, transient: int, made: int = 0) -> Point:
            return Point(number, step, kept, held, made, transient, 0, floor + kept + held + made + transient)

        for number, one in enumerate(self.passes):
            held = one.hidden * self.hidden_state
            alive = sum(map(mul, one.alive, saved))
            chunk = self.chunks[one.chunk]
            if one.phase == "overlapped":
                both = saved[one.chunk] + saved[one.forward_chunk]
                counted = alive - min(saved[one.chunk], saved[one.forward_chunk])
                beside = one.carried_over + self.always
                yield point(number, 0, counted, held, alive - both + one.peak - counted + beside)
                continue
            others, more = alive - chunk.saved, one.carried_over + self.always
            backward = one.phase == "backward"
            if backward:
                yield point(number, -1, alive, held, more)
            order = range(len(chunk.steps))
            for i in reversed(order) if backward else order:
                step = chunk.steps[i]
                kept = step.before + step.keeps + (chunk.sent if backward else 0)
                high = step.backward if backward else step.forward
                # An engine that offloads gradients leaves none: what backward holds of them is temporary.
                made = step.gradients if backward and self.fresh else 0
                yield point(number, i, others + kept, held, high - kept - made + more, made)
            if not backward:
                yield point(number, -1, alive, held, more)
        end = len(self.passes)
        yield Point(end, -1, 0, 0, self.fresh, 0, 0, floor + self.fresh)
        total = floor + self.fresh + self.carried_over + self.in_step
        yield Point(end, 0, 0, 0, self.fresh, self.in_step, self.carried_over, total)

    def peak(self) -> Point:
        """The highest point, the first of equals. The start of the step is skipped: the optimizer's step has the same
        and more."""
        points = self.points()
        next(points)
        return max(points, key=lambda point: point.total)

    def operation(self, point: Point) -> str:
        """The operation at a point, for people."""
        if point.pass_number < 0:
            return "start of the step"
        if point.pass_number == len(self.passes):
            return OPTIMIZER_STEP if point.step >= 0 else "end of the passes"
        one = self.passes[point.pass_number]
        if one.phase == "overlapped":
            return "forward and backward, layer by layer"
        if point.step < 0:
            return "between layers"
        step = self.chunks[one.chunk].steps[point.step]
        return step.backward_operation if one.phase == "backward" else step.forward_operation


def step_timeline(run: RunSpec, stage: int) -> Timeline:
    """Follow one stage of ``run`` through a training step, the second or a later one. Raises SpecError."""
    parts = stage_parts(run, stage)
    made = [c for c in parts.persistent if c.lifetime is Lifetime.BACKWARD]
    there = [c for c in parts.persistent if c.lifetime is not Lifetime.BACKWARD]
    persistent = {role: sum(c.bytes for c in there if c.role is role) for role in Role}
    total = run.num_microbatches
    followed = _followed(run, len(parts.costs), total)
    return Timeline(
        stage=stage,
        persistent={role: nbytes for role, nbytes in persistent.items() if nbytes},
        fresh=sum(c.bytes for c in made),
        carried_over=sum(c.bytes for c in parts.between_steps),
        always=parts.batch + parts.gathered + parts.accumulated + parts.deferred,
        in_step=parts.in_step,
        hidden_state=parts.hidden_state,
        microbatches=total,
        followed=followed,
        chunks=tuple(_chunks(parts)),
        passes=tuple(_passes(run, stage, followed, parts.costs)),
    )


def timeline_of(result: Estimate, stage: int) -> Timeline:
    """``step_timeline`` of the estimate's run, with the residual that a calibration added to this stage."""
    timeline = step_timeline(result.run, stage)
    measured = sum(c.bytes for c in result.stages[stage].components if c.part is Part.CALIBRATION)
    return replace(timeline, always=timeline.always + measured, in_step=timeline.in_step + measured)


def _followed(run: RunSpec, v: int, total: int) -> int:
    """The number of microbatches to follow, which have the same moments as ``total`` (``few_microbatches``): every
    round between warm-up and cool-down is like the last."""
    if total * v <= MOST_PASSES:
        return total
    pp = run.parallel.pp
    return few_microbatches(pp, total, v, run.parallel.microbatch_group_size_per_vp_stage or pp)


def _chunks(parts: StageParts) -> Iterator[Chunk]:
    for layers, inventory in zip(parts.layers, parts.inventories, strict=True):
        yield Chunk(tuple(_steps(inventory, layers)), inventory.retained, inventory.kept)


_OF_LAYERS = (Label.LAYER, Label.RECOMPUTED, Label.OFFLOADED)


def _steps(inventory: ChunkInventory, layers: tuple[int, ...]) -> Iterator[Step]:
    at = 0
    names: dict[int, tuple[str, str]] = {}
    for link, before, forward, backward in peaks_by_link(inventory):
        number = link.layers if link.label in _OF_LAYERS else 0
        if id(link) not in names:
            names[id(link)] = link.forward_name(), link.backward_name()
        yield Step(
            link.label, layers[at : at + number], before, link.retained + link.discarded, link.discarded, forward,
            backward, *names[id(link)], max(0, link.gradients - link.freed),
        )  # fmt: skip
        at += number


def _passes(run: RunSpec, stage: int, followed: int, costs: tuple[ChunkCost, ...]) -> Iterator[Pass]:
    p, v = run.parallel, len(costs)
    group = p.microbatch_group_size_per_vp_stage
    table = [microbatch for microbatch, _ in schedule_table(followed, v, group or p.pp)]
    forward, backward = iter(table), iter(table)
    extra = run.implementation.overlap_moe_expert_parallel_comm
    keeps = not run.implementation.deallocate_pipeline_outputs
    moments = walk(p.pp, stage, followed, v, group, extra, keeps_outputs=keeps)
    for phase, chunk, alive, hidden, forward_chunk, carrying in moments:
        beside = sum([cost.carried_over for cost, carries in zip(costs, carrying, strict=True) if carries])
        if phase == "forward":
            yield Pass(phase, next(forward), chunk, hidden, beside, alive)
        elif phase == "backward":
            yield Pass(phase, next(backward), chunk, hidden, beside, alive)
        else:
            peak = overlapped(costs[forward_chunk], costs[chunk])
            yield Pass(phase, next(backward), chunk, hidden, beside, alive, next(forward), forward_chunk, peak)
