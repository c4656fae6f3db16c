"""A training step as a memory snapshot for PyTorch's memory_viz (pytorch.org/memory_viz) and ``compare``.

Format: what ``torch.cuda.memory._dump_snapshot`` pickles (``torch/cuda/_memory_viz.py``): segments with the blocks that
are alive at the end, and a trace of allocations and frees. Names of layers and components replace stack frames. What a
microbatch saves is one block per layer, not one per tensor.
"""

from __future__ import annotations

import pickle
from typing import Any

from bridge_memory.components import STATIC_ROLES, Lifetime, allocated
from bridge_memory.estimation import Estimate
from bridge_memory.report.page.data import step_name
from bridge_memory.timeline import Point, Timeline, timeline_of

#: Microseconds between two events.
_TICK = 10


class _Allocator:
    """The trace of events, and the live allocations."""

    def __init__(self) -> None:
        self.trace: list[dict[str, Any]] = []
        self.alive: dict[object, tuple[int, int, list[dict[str, Any]]]] = {}
        self._next = 1 << 40

    def alloc(self, key: Any, nbytes: int, name: str, place: str) -> None:
        if nbytes <= 0:
            return
        frames = [{"name": name, "filename": place, "line": 0}]
        self.alive[key] = self._next, nbytes, frames
        self._event("alloc", key)
        self._next += allocated(nbytes)

    def free(self, key: Any) -> None:
        if key in self.alive:
            self._event("free_requested", key)
            self._event("free_completed", key)
            del self.alive[key]

    def _event(self, action: str, key: Any) -> None:
        address, nbytes, frames = self.alive[key]
        self.trace.append(
            {"action": action, "addr": address, "size": nbytes, "stream": 0, "frames": frames,
             "time_us": _TICK * len(self.trace)}
        )  # fmt: skip

    def once(self, nbytes: int, name: str, place: str) -> None:
        """Allocate and free."""
        self.alloc("temporary", nbytes, name, place)
        self.free("temporary")


def snapshot(result: Estimate, stage: int) -> bytes:
    """One stage of ``result`` over one step, pickled."""
    memory = _Allocator()
    for number, c in enumerate(result.stages[stage].components):
        if c.role in STATIC_ROLES and c.lifetime not in (Lifetime.BETWEEN_STEPS, Lifetime.BACKWARD):
            memory.alloc(("persistent", number), c.bytes, c.name, str(c.role))
    _follow(memory, timeline_of(result, stage))
    blocks = [
        {"address": address, "size": nbytes, "requested_size": nbytes, "state": "active_allocated", "frames": frames}
        for address, nbytes, frames in memory.alive.values()
    ]
    total = sum(nbytes for _, nbytes, _ in memory.alive.values())
    segment = {
        "device": 0, "address": 1 << 40, "total_size": total, "stream": 0,
        "segment_type": "large", "allocated_size": total, "active_size": total, "requested_size": total,
        "blocks": blocks, "segment_pool_id": (0, 0), "frames": [], "is_expandable": False,
    }  # fmt: skip
    return pickle.dumps({"segments": [segment], "device_traces": [memory.trace]}, protocol=4)


def _follow(memory: _Allocator, timeline: Timeline) -> None:
    hidden = made = 0
    memory.alloc("carried over", timeline.carried_over, "carried over from the last step", "carried over")

    def hold(count: int) -> None:
        """Keep ``count`` hidden states of the schedule alive."""
        nonlocal hidden
        while hidden > count:
            hidden -= 1
            memory.free(("hidden", hidden))
        while hidden < count:
            memory.alloc(("hidden", hidden), timeline.hidden_state, "hidden state of the schedule", "pipeline")
            hidden += 1

    def kept(chunk: int, microbatch: int, step: int, *, there: bool) -> None:
        one = timeline.chunks[chunk].steps[step]
        key = ("kept", chunk, microbatch, step)
        if there:
            name = f"{step_name(one)}, microbatch {microbatch}"
            memory.alloc(key, one.keeps - one.discards, name, "saved for backward")
            streams(chunk, microbatch, step, there=True)
        else:
            memory.free(key)
            streams(chunk, microbatch, step, there=False)

    def streams(chunk: int, microbatch: int, step: int, *, there: bool) -> None:
        """What has no storage between the passes."""
        one = timeline.chunks[chunk].steps[step]
        key = ("discarded", chunk, microbatch, step)
        if there:
            name = f"{step_name(one)}, microbatch {microbatch}, recomputed together"
            memory.alloc(key, one.discards, name, "saved for backward")
        else:
            memory.free(key)

    def together(point: Point, *, there: bool) -> None:
        """Of the running chunk's last step that discards any: before its backward all are there anew, after its forward
        none is."""
        one = timeline.passes[point.pass_number]
        steps = timeline.chunks[one.chunk].steps
        if point.step == max((i for i, step in enumerate(steps) if step.discards), default=-1):
            for step in range(point.step + 1):
                streams(one.chunk, one.microbatch, step, there=there)

    def sent(chunk: int, microbatch: int, *, there: bool) -> None:
        key = ("sent", chunk, microbatch)
        if there:
            memory.alloc(key, timeline.chunks[chunk].sent, f"output, microbatch {microbatch}", "sent to the next stage")
        else:
            memory.free(key)

    for point in timeline.points():
        number = point.pass_number
        if number < 0:
            continue
        memory.free("carried over")
        if point.gradients != made:
            memory.free("gradients")
            made = point.gradients
            memory.alloc("gradients", made, "gradients", "gradients")
        if number >= len(timeline.passes):
            hold(0)
            if point.step >= 0:
                memory.alloc("carried over", timeline.carried_over, "carried over from the last step", "carried over")
                memory.once(timeline.in_step, "fp32 copies of optimizer states", "optimizer step")
            continue
        one = timeline.passes[number]
        hold(one.hidden)
        if one.phase == "overlapped":
            # The layer-by-layer order of the two chunks is not modelled: only their sum, and what remains afterwards.
            held = sum(size for _, size, _ in memory.alive.values())
            memory.once(point.total - held, timeline.operation(point), "forward and backward at the same time")
            for step in range(len(timeline.chunks[one.chunk].steps)):
                kept(one.chunk, one.microbatch, step, there=False)
            sent(one.chunk, one.microbatch, there=False)
            for step in range(len(timeline.chunks[one.forward_chunk].steps)):
                kept(one.forward_chunk, one.forward_microbatch, step, there=True)
                streams(one.forward_chunk, one.forward_microbatch, step, there=False)
            sent(one.forward_chunk, one.forward_microbatch, there=True)
            continue
        if one.phase == "forward" and point.step < 0:
            sent(one.chunk, one.microbatch, there=True)
        if one.phase == "backward" and point.step >= 0:
            together(point, there=True)
        _pass(memory, timeline, point, kept)
        if one.phase == "forward" and point.step >= 0:
            together(point, there=False)
        if one.phase == "backward" and point.step == (0 if timeline.chunks[one.chunk].steps else -1):
            sent(one.chunk, one.microbatch, there=False)


def _pass(memory: _Allocator, timeline: Timeline, point: Point, kept: Any) -> None:
    one = timeline.passes[point.pass_number]
    if point.step < 0:
        memory.once(point.transient, timeline.operation(point), one.phase)
        return
    forward = one.phase == "forward"
    if forward:
        kept(one.chunk, one.microbatch, point.step, there=True)
    memory.once(point.transient, timeline.operation(point), one.phase)
    if not forward:
        kept(one.chunk, one.microbatch, point.step, there=False)
