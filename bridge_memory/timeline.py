"""A pipeline stage over one training step: what is alive at every operation that can be told apart.

Passes come in the order of the schedule (``schedule.events.walk``), and inside a pass the links of its chunk one after
the other (``inventory.chain.peaks_by_link``). The highest of all points is the peak that ``estimate`` gives, to the
byte. The order is real; how long anything takes is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import mul
from typing import NamedTuple

from bridge_memory.components import Role
from bridge_memory.estimation import StageParts, stage_parts
from bridge_memory.result import OPTIMIZER_STEP
from bridge_memory.schedule.events import ChunkCost, overlapped, schedule_table, walk
from bridge_memory.schedule.peak import few_microbatches
from bridge_memory.spec import RunSpec
from bridge_memory.tapes.chain import ChunkInventory, Label, peaks_by_link

#: (microbatch, chunk) passes in one direction up to which a step is followed whole.
MOST_PASSES = 128


class Step(NamedTuple):
    """One link of a chunk (a layer, the embedding, the loss) while it runs, in bytes of one microbatch.

    ``keeps``: saved for backward by it; ``before``: by the links before it. ``forward`` and ``backward``: all that is
    alive in the chunk at its own peaks, which is made by the operations of these names.
    """

    label: Label
    #: Decoder layers that it is.
    layers: tuple[int, ...]
    before: int
    keeps: int
    forward: int
    backward: int
    forward_operation: str
    backward_operation: str


class Chunk(NamedTuple):
    """One virtual stage: its links, what one microbatch keeps in all of them, and what earlier backward passes of the
    others left behind beside it."""

    steps: tuple[Step, ...]
    saved: int
    beside: int


class Pass(NamedTuple):
    """One pass: ``phase`` as ``schedule.events.Moment`` has it. Under "overlapped" ``chunk`` and ``microbatch`` run
    backward while the other two run forward, and ``peak`` is the most that the two have, in bytes."""

    phase: str
    microbatch: int
    chunk: int
    #: Hidden states that the schedule holds meanwhile.
    hidden: int
    #: Microbatches of each chunk whose saved tensors are there, those that run included.
    alive: tuple[int, ...]
    forward_microbatch: int = -1
    forward_chunk: int = -1
    peak: int = 0


class Point(NamedTuple):
    """What is alive at one moment, in bytes; ``pass_number`` -1 is before the first pass, the number of passes after
    the last; ``step`` is the link that runs, -1 between links."""

    pass_number: int
    step: int
    #: Saved for backward: by finished passes, and by the links of this one up to here.
    activations: int
    #: Hidden states that the schedule holds.
    pipeline: int
    #: What is there until the link, or the optimizer's step, is done, the batch among it.
    transient: int
    #: What the last step leaves until the first forward pass.
    carried_over: int
    total: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """One stage over one step. ``points`` are worked out anew from what is kept here."""

    stage: int
    #: Bytes of weights, gradients, optimizer state and buffers, which are there all the time.
    persistent: dict[Role, int]
    carried_over: int
    #: The batch, and parameters gathered for all passes.
    always: int
    #: Made for the optimizer's step.
    in_step: int
    hidden_state: int
    #: Microbatches of the step, and those that are followed: what is left out is like the rounds before it.
    microbatches: int
    followed: int
    chunks: tuple[Chunk, ...]
    passes: tuple[Pass, ...]

    def points(self) -> Iterator[Point]:
        """From the start of the step to its end."""
        floor = sum(self.persistent.values())
        saved = [chunk.saved for chunk in self.chunks]
        yield Point(-1, -1, 0, 0, 0, self.carried_over, floor + self.carried_over)

        def point(number: int, step: int, kept: int, held: int, transient: int) -> Point:
            return Point(number, step, kept, held, transient, 0, floor + kept + held + transient)

        for number, one in enumerate(self.passes):
            held = one.hidden * self.hidden_state
            alive = sum(map(mul, one.alive, saved))
            chunk = self.chunks[one.chunk]
            if one.phase == "overlapped":
                both = saved[one.chunk] + saved[one.forward_chunk]
                counted = alive - min(saved[one.chunk], saved[one.forward_chunk])
                yield point(number, 0, counted, held, alive - both + one.peak - counted + self.always)
                continue
            others, beside = alive - chunk.saved, chunk.beside + self.always
            backward = one.phase == "backward"
            if backward:
                yield point(number, -1, alive, held, beside)
            order = range(len(chunk.steps))
            for i in reversed(order) if backward else order:
                step = chunk.steps[i]
                kept = step.before + step.keeps
                high = step.backward if backward else step.forward
                yield point(number, i, others + kept, held, high - kept + beside)
            if not backward:
                yield point(number, -1, alive, held, beside)
        end = len(self.passes)
        yield Point(end, -1, 0, 0, 0, 0, floor)
        yield Point(end, 0, 0, 0, self.in_step, self.carried_over, floor + self.carried_over + self.in_step)

    def peak(self) -> Point:
        """The highest point, the first of equals. At the start of the step is what the optimizer's step has too."""
        points = self.points()
        next(points)
        return max(points, key=lambda point: point.total)

    def operation(self, point: Point) -> str:
        """What makes it, for people."""
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
    persistent = {role: sum(c.bytes for c in parts.persistent if c.role is role) for role in Role}
    total = run.num_microbatches
    followed = _followed(run, len(parts.costs), total)
    return Timeline(
        stage=stage,
        persistent={role: nbytes for role, nbytes in persistent.items() if nbytes},
        carried_over=sum(c.bytes for c in parts.between_steps),
        always=parts.batch + parts.gathered + parts.deferred,
        in_step=parts.in_step,
        hidden_state=parts.hidden_state,
        microbatches=total,
        followed=followed,
        chunks=tuple(_chunks(parts)),
        passes=tuple(_passes(run, stage, followed, parts.costs)),
    )


def _followed(run: RunSpec, v: int, total: int) -> int:
    """So many microbatches show all that ``total`` do, as ``schedule.peak.dynamic_peak`` has it: every round between
    warm-up and cool-down is like the last."""
    if total * v <= MOST_PASSES:
        return total
    pp = run.parallel.pp
    return few_microbatches(pp, total, v, run.parallel.microbatch_group_size_per_vp_stage or pp)


def _chunks(parts: StageParts) -> Iterator[Chunk]:
    carried_over = sum(inventory.carried_over for inventory in parts.inventories)
    for layers, inventory in zip(parts.layers, parts.inventories, strict=True):
        yield Chunk(tuple(_steps(inventory, layers)), inventory.retained, carried_over - inventory.carried_over)


_OF_LAYERS = (Label.LAYER, Label.RECOMPUTED, Label.OFFLOADED)


def _steps(inventory: ChunkInventory, layers: tuple[int, ...]) -> Iterator[Step]:
    at = 0
    names: dict[int, tuple[str, str]] = {}
    for link, before, forward, backward in peaks_by_link(inventory):
        number = link.layers if link.label in _OF_LAYERS else 0
        if id(link) not in names:
            names[id(link)] = link.forward_name(), link.backward_name()
        yield Step(
            link.label, layers[at : at + number], before, link.retained, forward, backward, *names[id(link)]
        )
        at += number


def _passes(run: RunSpec, stage: int, followed: int, costs: tuple[ChunkCost, ...]) -> Iterator[Pass]:
    p, v = run.parallel, len(costs)
    group = p.microbatch_group_size_per_vp_stage
    table = [microbatch for microbatch, _ in schedule_table(followed, v, group or p.pp)]
    forward, backward = iter(table), iter(table)
    extra = run.implementation.overlap_moe_expert_parallel_comm
    for phase, chunk, alive, hidden, forward_chunk in walk(p.pp, stage, followed, v, group, extra):
        if phase == "forward":
            yield Pass(phase, next(forward), chunk, hidden, alive)
        elif phase == "backward":
            yield Pass(phase, next(backward), chunk, hidden, alive)
        else:
            peak = overlapped(costs[forward_chunk], costs[chunk])
            yield Pass(phase, next(backward), chunk, hidden, alive, next(forward), forward_chunk, peak)
