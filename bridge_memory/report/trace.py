"""A training step as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: memory of every stage as counters,
passes and their layers as slices.

Format: Trace Event Format ("M" names, "X" slices, "C" counters); times in microseconds. Durations are not
modelled: one layer is drawn as a millisecond forward and two backward.
"""

from __future__ import annotations

import json
from typing import Any

from bridge_memory.components import Role
from bridge_memory.estimation import Estimate
from bridge_memory.report.page.data import step_name
from bridge_memory.timeline import Timeline, timeline_of

#: Microseconds of one layer forward.
_LAYER = 1000


def perfetto(result: Estimate, stage: int | None = None) -> str:
    """Every stage of ``result``, or one, as JSON text."""
    events: list[dict[str, Any]] = []
    for s in result.stages if stage is None else (result.stages[stage],):
        events += _stage(timeline_of(result, s.stage))
    time = "durations are not modelled: one layer is drawn as 1 ms forward, 2 ms backward"
    other = {"model": result.run.model.name, "time": time}
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, separators=(",", ":"))


def _stage(timeline: Timeline) -> list[dict[str, Any]]:
    pid = timeline.stage
    passes, links = 1, 2
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"stage {pid}"}},
        {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": passes, "args": {"name": "passes"}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": links, "args": {"name": "layers"}},
    ]
    persistent = {str(role): nbytes for role, nbytes in timeline.persistent.items()}
    gradients = str(Role.GRADIENTS)
    begins: dict[int, int] = {}
    ends: dict[int, int] = {}
    now = 0
    for point in timeline.points():
        number = point.pass_number
        inside = 0 <= number < len(timeline.passes)
        length = 0
        if inside and point.step >= 0:
            phase = timeline.passes[number].phase
            length = _LAYER * {"forward": 1, "backward": 2, "overlapped": 3}[phase]
            if phase != "overlapped":
                step = timeline.chunks[timeline.passes[number].chunk].steps[point.step]
                events.append(
                    {"ph": "X", "name": step_name(step), "cat": phase, "pid": pid, "tid": links, "ts": now,
                     "dur": length, "args": {"operation at its peak": timeline.operation(point), "bytes": point.total}}
                )  # fmt: skip
        elif not inside:
            length = _LAYER
        if inside:
            begins.setdefault(number, now)
            ends[number] = now + length
        made = {gradients: persistent.get(gradients, 0) + point.gradients} if timeline.fresh else {}
        parts = {
            **persistent, **made, "activations": point.activations, "pipeline": point.pipeline,
            "temporaries": point.transient,
            "carried over from the last step": point.carried_over,
        }  # fmt: skip
        # The peak of an operation lies somewhere within it.
        at = now + length // 2
        events.append({"ph": "C", "name": "memory, bytes", "pid": pid, "ts": at, "args": parts})
        events.append({"ph": "C", "name": "allocated, bytes", "pid": pid, "ts": at, "args": {"total": point.total}})
        now += length
    for number, one in enumerate(timeline.passes):
        name = f"{one.phase} {one.microbatch}"
        if one.phase == "overlapped":
            name = f"forward {one.forward_microbatch}, overlapped with backward {one.microbatch}"
        if len(timeline.chunks) > 1:
            name += f", virtual stage {one.chunk}"
        events.append(
            {"ph": "X", "name": name, "cat": one.phase, "pid": pid, "tid": passes, "ts": begins.get(number, 0),
             "dur": ends.get(number, 0) - begins.get(number, 0)}
        )  # fmt: skip
    return events
