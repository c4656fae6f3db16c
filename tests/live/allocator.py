"""A caching allocator's account, as torch keeps it, with what torch does not keep: the true peak of every phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bridge_memory.calibration.records import PhaseRecord
from bridge_memory.live.cuda import Reading

GIB = 1 << 30
#: Outside of torch, bytes.
CONTEXT = GIB // 2


class Allocator:
    """Sizes in GiB. What is freed stays reserved until ``empty_cache``."""

    def __init__(self) -> None:
        self.allocated = self.reserved = self.max_allocated = self.max_reserved = 0
        self.allocated_ever = self.reserved_ever = 0
        self.true: dict[str, tuple[int, int]] = {}
        self.name = "before"
        self.outside = CONTEXT

    def malloc(self, nbytes: int) -> None:
        self.allocated += nbytes
        self.allocated_ever += nbytes
        grown = max(0, self.allocated - self.reserved)
        self.reserved += grown
        self.reserved_ever += grown
        self._see()

    def free(self, nbytes: int) -> None:
        self.allocated -= nbytes

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def reset(self) -> None:
        """``torch.cuda.reset_peak_memory_stats()``, of somebody else."""
        self.max_allocated, self.max_reserved = self.allocated, self.reserved

    def use(self, gib: int, keep: int = 0) -> None:
        """Allocate, and free all but ``keep``."""
        self.malloc(gib * GIB)
        self.free((gib - keep) * GIB)

    def begin(self, name: str) -> None:
        self.name = name
        self._see()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self.name
        self.begin(name)
        yield
        self.begin(before)

    def _see(self) -> None:
        self.max_allocated = max(self.max_allocated, self.allocated)
        self.max_reserved = max(self.max_reserved, self.reserved)
        allocated, reserved = self.true.get(self.name, (0, 0))
        self.true[self.name] = max(allocated, self.allocated), max(reserved, self.reserved)

    def read(self, rank: int, stage: int) -> Reading:
        return Reading(
            rank, stage, self.allocated, self.max_allocated, self.reserved, self.max_reserved, 140 * GIB,
            self.reserved + self.outside, allocated_ever=self.allocated_ever, reserved_ever=self.reserved_ever,
        )  # fmt: skip

    def holds(self, phase: PhaseRecord, name: str) -> None:
        """The journal's ranges hold the true peaks."""
        for found, true in zip((phase.allocated, phase.reserved), self.true[name], strict=True):
            assert found is not None and found[0] <= true, (name, found, true)
            assert found[1] is None or true <= found[1], (name, found, true)
