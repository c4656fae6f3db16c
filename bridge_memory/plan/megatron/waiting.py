"""How long stages wait for each other in Megatron's interleaved schedule, beside its bubble.

The step time has the slowest stage and the bubble. Stages whose chunks take unequal times wait in addition: a stage of
1, 2 and 4 layers beside others of 2, 2 and 2 is the slower one during one chunk, and the faster one during another.
"""

from __future__ import annotations

from bridge_memory.schedule.events import num_warmup, schedule_table
from bridge_memory.spec import RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.speed.constants import DEFAULT, Constants
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.megatron.step_time import Step

#: Groups of as many microbatches as there are stages that are followed; those after them wait as these do.
GROUPS = 8


def waiting(run: RunSpec, hardware: Hardware, c: Constants = DEFAULT) -> float:
    """Seconds of a step in which the slowest stage waits for others, filling and draining aside; messages take none."""
    p = run.parallel
    pp, v, number = p.pp, p.vpp, min(run.num_microbatches, GROUPS * p.pp)
    if pp == 1 or v == 1:
        return 0.0
    chunk, shapes = Step(run, hardware, c).passes.chunk, layout(run.model, p).shapes(run.model)
    times = [[(x.forward_total, x.backward_total) for x in map(chunk, stage)] for stage in shapes]
    totals = [sum(map(sum, stage)) for stage in times]
    slowest = max(totals)
    usual = number * slowest + (sum(totals) - slowest) / v
    return max(0.0, schedule_seconds(times, number) - usual) * run.num_microbatches / number


def schedule_seconds(times: list[list[tuple[float, float]]], number: int) -> float:
    """Until the last pass has ended: each begins when its stage is free and its input is there. ``times``: of every
    stage's chunks, forward and backward."""
    pp, v = len(times), len(times[0])
    order = schedule_table(number, v, pp)
    # (backward, microbatch, chunk of the model) of every stage, the next one last.
    todo = []
    for rank in range(pp):
        there = [(False, m, c * pp + rank) for m, c in order]
        back = [(True, m, (v - 1 - c) * pp + rank) for m, c in order]
        warm = num_warmup(pp, rank, number, v, pp)
        both = [one for pair in zip(there[warm:], back, strict=False) for one in pair]
        todo.append([*there[:warm], *both, *back[len(order) - warm :]][::-1])
    free = [0.0] * pp
    done: dict[tuple[bool, int, int], float] = {}
    while any(todo):
        for rank in range(pp):
            while todo[rank]:
                backward, m, chunk = todo[rank][-1]
                ends = chunk == pp * v - 1 if backward else chunk == 0
                before = (not backward, m, chunk) if ends else (backward, m, chunk + 1 if backward else chunk - 1)
                if before not in done and (backward or not ends):
                    break
                free[rank] = max(free[rank], done.get(before, 0.0)) + times[rank][chunk // pp][backward]
                done[todo[rank].pop()] = free[rank]
    return max(free)
