"""What torch's caching allocator would reserve for the allocations of a real engine, in their order and on its streams.

The CPU has no streams, but torch's engines use its stream API as on a GPU (``torch/cpu/__init__.py: Stream``) and
allocate inside of streams. Simulated allocators (``workspaces.caching_allocator``) follow while the engine runs.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bridge_memory.rehearsal.tracker import Tracker
from bridge_memory.residual import REHEARSED_PERCENT, percent, relative
from bridge_memory.spec import RunSpec
from bridge_memory.workspaces.caching_allocator import CachingAllocator, Reserved, reserved_by

#: Engines that allocate on known streams only, and whose blocks wait for no other stream (no record_stream).
FOLLOWED = ("single", "ddp", "fsdp2")
_WHY_NOT = {
    "fsdp1": "reserved memory is not replayed: FSDP1's record_stream keeps blocks until other streams are done, which "
    "takes time, and none passes here",
}
_STREAMS_UNSEEN = "reserved memory is not replayed: DeepSpeed has streams of its own on a GPU alone"
#: Attributes of ``_fsdp_param_group.py: FSDPCommContext``.
_OF_FSDP2 = {
    "all_gather_copy_in_stream": "all-gather", "all_gather_stream": "all-gather (collective)",
    "reduce_scatter_stream": "reduce-scatter", "all_reduce_stream": "all-reduce",
}


def why_not(run: RunSpec) -> str | None:
    """Why an engine's allocations cannot be replayed, in one line; None where they can."""
    engine = run.data_parallel.engine
    return None if engine in FOLLOWED else _WHY_NOT.get(engine, _STREAMS_UNSEEN)


@dataclass
class Follower:
    """Two allocators, without and with expandable segments, that replay a tracker's allocations from now on.

    Storages that exist already are allocated first, the oldest first: the shards of a model that was built on the meta
    device and gets its memory once it is sharded.
    """

    tracker: Tracker

    def __post_init__(self) -> None:
        self._plain, self._expandable = CachingAllocator(), CachingAllocator(expandable_segments=True)
        for serial, nbytes in self.tracker.present():
            self._heard(serial, nbytes)
        self.tracker.heard = self._heard

    def _heard(self, serial: int, nbytes: int | None) -> None:
        stream = None if nbytes is None else _current_stream()
        for allocator in (self._plain, self._expandable):
            if nbytes is not None:
                allocator.allocate(serial, nbytes, stream)
            elif allocator.holds(serial):  # a storage of size zero has no block
                allocator.free(serial)

    def done(self, model: Any) -> Reserved:
        """Stop following; what was reserved. ``model``: the model that the engine wraps, for its streams."""
        self.tracker.heard = None
        names = _stream_names(model)
        return reserved_by(self._plain, self._expandable, lambda stream: names.get(stream, "another stream"))


def _current_stream() -> Hashable:
    import torch

    return torch.cpu.current_stream()


def _stream_names(model: Any) -> dict[Hashable, str]:
    context = getattr(getattr(model, "_get_fsdp_state", lambda: None)(), "_comm_ctx", None)
    found = {_current_stream(): "compute"}
    for attribute, name in _OF_FSDP2.items():
        stream = getattr(context, attribute, None)
        if stream is not None:
            found[stream] = name
    return found


def lines(found: Reserved, segments: int | None, expandable: int | None) -> Sequence[str]:
    """Lines of text, with the predictions ``segments`` and ``expandable`` where the estimate has them, in bytes."""
    table = [Line("reserved, replayed", segments, found.segments),
             Line("with expandable_segments", expandable, found.expandable)]
    return ["", *(str(line) for line in table),
            *(f"  {name:26}{'':>18}{nbytes:>18,}" for name, nbytes in found.expandable_of)]  # fmt: skip


class Line(NamedTuple):
    """One row: predicted by replaying the estimate's storages, found by replaying the real engine's."""

    name: str
    predicted: int | None
    found: int

    def __str__(self) -> str:
        if self.predicted is None:
            return f"{self.name:28}{'-':>18}{self.found:>18,}"
        share = percent(relative(self.found, self.predicted), 2)
        off = self.found - self.predicted
        return f"{self.name:28}{self.predicted:>18,}{self.found:>18,}{off:>23,}  {share:>{len(REHEARSED_PERCENT)}}"
