"""Pipeline schedules followed event by event: what the closed form of their peak is tested against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bridge_memory.schedule.events import ChunkCost, PeakMoment, highest, num_warmup, schedule_table, walk


class Event(NamedTuple):
    """One pass of one microbatch through one chunk. ``phase`` is "forward" or "backward"."""

    phase: str
    microbatch: int
    chunk: int


def in_flight(
    pp: int, rank: int, num_microbatches: int, v: int = 1, group: int | None = None, extra: bool = False
) -> int:
    """The most (microbatch, chunk) pairs alive at once on a rank: min(p - r, m) under 1F1B."""
    return min(num_warmup(pp, rank, num_microbatches, v, group, extra) + 1, num_microbatches * v)


def schedule_events(
    pp: int, rank: int, num_microbatches: int, v: int = 1, group: int | None = None, extra: bool = False
) -> list[Event]:
    """Every pass of one rank in order: warm-up, one forward and one backward in turn, cool-down."""
    table = schedule_table(num_microbatches, v, group or pp)
    warmup = num_warmup(pp, rank, num_microbatches, v, group, extra)
    forward = [Event("forward", m, c) for m, c in table]
    # Backward passes take chunks in reverse; within a chunk, microbatches come in order (a queue).
    backward = [Event("backward", m, v - 1 - c) for m, c in table]
    events = forward[:warmup]
    for f, b in zip(forward[warmup:], backward, strict=False):
        events += (f, b)
    return events + backward[len(forward) - warmup :]


def walked_peak(
    pp: int,
    rank: int,
    num_microbatches: int,
    chunks: Sequence[ChunkCost],
    group_size: int | None = None,
    *,
    hidden_bytes: int = 0,
    overlap_moe_expert_parallel_comm: bool = False,
    overlap_p2p_comm: bool = True,
    keeps_outputs: bool = False,
) -> PeakMoment:
    """``dynamic_peak`` by the walk over every event: slow, and the truth that the closed form is held to."""
    moments = walk(
        pp,
        rank,
        num_microbatches,
        len(chunks),
        group_size,
        overlap_moe_expert_parallel_comm,
        overlap_p2p_comm,
        keeps_outputs,
    )
    return highest(moments, chunks, hidden_bytes)
