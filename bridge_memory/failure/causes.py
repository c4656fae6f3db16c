"""What a failure proves: its causes, the surest and largest first, each with its evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from statistics import median
from typing import NamedTuple

from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import GIB
from bridge_memory.failure.steps import ALLOCATED, HOST, Growth
from bridge_memory.failure.texts import OF_HOST, PINNING, Event, Failures, Kind
from bridge_memory.job.job import Job, PhaseMemory
from bridge_memory.outside.amount import total
from bridge_memory.outside.context import context
from bridge_memory.outside.phase import Phase
from bridge_memory.verdict import FRAGMENTATION

#: Share of a card that, held outside of torch, is named first where no prediction says what should be there.
MUCH = 0.1
MIB = 1 << 20


class Cause(str, Enum):
    """Why memory ran out."""

    TOO_LARGE = "too large"
    FRAGMENTED = "fragmented"
    OUTSIDE = "outside of PyTorch"
    OTHER_PROCESS = "another process"
    IMBALANCE = "imbalance"
    LEAK = "a leak by step"
    LIMIT = "a limit that was set"
    REQUEST = "one impossible tensor"
    NO_ROOM = "no room beside torch's cache"
    ROLLOUT = "the inference engine's share"
    HOST = "host memory"
    NOT_MEMORY = "not memory"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


class Finding(NamedTuple):
    """A cause with its evidence. ``sure``: the text or the figures prove it.

    Example:
        >>> from bridge_memory import why
        >>> why("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0.\\n").findings[0].words
        'memory of the host, not of a GPU'
    """

    cause: Cause
    sure: bool
    words: str


class Known(NamedTuple):
    """All that causes are told by.

    ``peaks``: the highest allocated memory of other ranks in the text, by rank; ``job``: of the run on its card, and
    ``phase``: that of it in which it failed, on the rank's stage; ``above``: the share by which measured peaks of such
    runs may be higher.
    """

    failures: Failures
    event: Event
    growth: Growth | None
    peaks: Mapping[int, int]
    gpu: Gpu | None
    job: Job | None
    phase: PhaseMemory | None
    above: float = 0.0

    @property
    def most(self) -> int | None:
        """Bytes of torch that are predicted at most for the phase; None: not known."""
        return None if self.phase is None else total(self.phase.allocated).most


def gib(nbytes: float) -> str:
    """"1.25 GiB", "12 MiB"."""
    return f"{nbytes / GIB:.2f} GiB" if abs(nbytes) >= GIB / 10 else f"{nbytes / MIB:.0f} MiB"


def findings(known: Known) -> tuple[Finding, ...]:
    """The causes, the deciding one first."""
    event = known.event
    if event.kind is Kind.OTHER:
        found = [Finding(Cause.NOT_MEMORY, True, _not_memory(event.line))]
    elif event.kind in (*OF_HOST, Kind.SIGKILL):
        found = list(_of_host(known))
    elif event.kind is Kind.INFERENCE:
        found = [Finding(Cause.ROLLOUT, True, _of_engine(event.line))]
    elif event.kind is Kind.TORCH:
        found = list(_of_torch(known))
    else:
        found = list(_beside_torch(known))
    if known.growth is not None and event.kind is not Kind.OTHER:
        found = _with_growth(known, known.growth, found)
    return tuple(found or [Finding(Cause.UNKNOWN, False, "the text has no figures that tell causes apart")])


def _of_torch(known: Known) -> Iterator[Finding]:
    f = known.event.figures
    if f.absurd or (f.tried is not None and f.total is not None and f.tried > f.total):
        size = "more than an exabyte" if f.absurd else gib(f.tried or 0)
        yield Finding(
            Cause.REQUEST, True, f"one allocation asked for {size}, more than the whole card: a wrong size, or logits "
            "or attention scores of a whole batch at once"
        )
    if f.tried is None or f.free is None or f.total is None:
        return
    missing = f.missing or 0
    if f.allowed is not None and f.needed is not None and f.needed > f.allowed >= f.allocated:  # type: ignore[operator]
        yield Finding(
            Cause.LIMIT, True, f"set_per_process_memory_fraction allows {gib(f.allowed)} of {gib(f.total)}, and "
            f"{gib(f.needed)} were needed"
        )
    if f.of_others and f.of_others >= missing:
        yield Finding(Cause.OTHER_PROCESS, True, _others(f.others, missing))
    unallocated = f.unallocated or 0
    fragmented = unallocated + f.free >= f.tried
    beyond = f.allocated is not None and unallocated > FRAGMENTATION * f.allocated
    if fragmented and beyond:
        yield Finding(
            Cause.FRAGMENTED, True, f"{gib(unallocated)} were free inside of torch's segments and {gib(f.free)} on the "
            f"card, no piece of them as large as {gib(f.tried)}"
        )
    out = _outside(known, missing)
    if out is not None:
        yield out
    uneven = _imbalance(known, missing)
    if uneven is not None:
        yield uneven
    if f.needed is not None:
        yield Finding(Cause.TOO_LARGE, _as_predicted(known), _too_large(known))
    if fragmented and not beyond:
        yield Finding(
            Cause.FRAGMENTED, False, f"{gib(unallocated)} reserved but unallocated is what a run usually has "
            f"({FRAGMENTATION:.1%} of what is allocated, or less); without it this allocation would have fitted"
        )


def _others(others: Sequence[tuple[int, int]], missing: int) -> str:
    whole = sum(nbytes for _, nbytes in others)
    sizes = [nbytes for _, nbytes in others]
    if len(others) > 1 and max(sizes) < 1.5 * min(sizes) and max(sizes) < 2 * GIB:
        return (
            f"{len(others)} other processes hold {gib(min(sizes))} to {gib(max(sizes))} each on this GPU, {gib(whole)} "
            "in all: as other ranks of the job do whose context is on the wrong GPU"
        )
    named = ", ".join(f"{pid} ({gib(nbytes)})" for pid, nbytes in others[:3])
    return f"process{'es' * (len(others) > 1)} {named} on the same GPU; {gib(missing)} were missing"


def _outside(known: Known, missing: int) -> Finding | None:
    """More outside of torch than should be, and enough that the allocation would have fitted without it."""
    f = known.event.figures
    if f.outside is None or not f.total:
        return None
    if known.phase is not None:
        most = total(known.phase.outside).most
        if f.outside - most >= missing and f.outside > most:
            return Finding(
                Cause.OUTSIDE, True, f"{gib(f.outside)} outside of PyTorch, and at most {gib(most)} are predicted for "
                f"this run in {known.phase.phase}"
            )
        return None
    usual = total(context(known.gpu)).most if known.gpu is not None else 0
    if f.outside - usual >= missing and f.outside >= MUCH * f.total:
        beside = f"; CUDA's context and kernels take {gib(usual)} at most" if usual else ""
        return Finding(Cause.OUTSIDE, False, f"{gib(f.outside)} outside of PyTorch{beside}")
    return None


def _imbalance(known: Known, missing: int) -> Finding | None:
    """Whether the rank would have lived with what other ranks hold."""
    event = known.event
    needed = event.figures.needed
    others = [peak for rank, peak in known.peaks.items() if rank != event.rank]
    if needed is None or event.rank is None or not others:
        return None
    usual = round(median(others))
    if needed - usual < missing or needed <= usual * (1 + FRAGMENTATION):
        return None
    whose = f"{len(others)} other rank{'s' * (len(others) > 1)}"
    return Finding(
        Cause.IMBALANCE, True, f"rank {event.rank} needed {gib(needed)}, and the median of {whose} in the text is "
        f"{gib(usual)}"
    )


def _as_predicted(known: Known) -> bool:
    needed = known.event.figures.needed
    return known.most is not None and needed is not None and needed <= known.most * (1 + known.above)


def _too_large(known: Known) -> str:
    f = known.event.figures
    assert f.needed is not None and f.missing is not None and f.total is not None
    rest = f.total - f.needed - (f.outside or 0) - f.of_others
    words = f"{gib(f.needed)} allocated at the least"
    if f.outside is not None:
        words += f", and {gib(f.outside)} outside of PyTorch"
    words += f", of {gib(f.total)}"
    words += f": {gib(-rest)} too much" if rest < 0 else f"; {gib(f.missing)} were missing"
    most = known.most
    if known.phase is None or most is None:
        return words
    if not _as_predicted(known):
        return (
            f"{words}; {gib(most)} are predicted for {known.phase.phase}, {gib(f.needed - most)} less: something is "
            "larger than in this configuration, or is not counted"
        )
    return f"{words}; {gib(most)} are predicted for {known.phase.phase}"


def _of_engine(line: str) -> str:
    if "Try to lower your batch size" in line:
        return "the KV cache has no room for the tokens of the requests that run at once"
    if "warming up" in line:
        return "beside weights and KV cache no room is left for a batch of the most requests"
    return "the engine found less memory for its KV cache than it was told to take"


def _beside_torch(known: Known) -> Iterator[Finding]:
    event = known.event
    if event.kind is Kind.DRIVER and event.place == PINNING:
        words = "pinned host memory could not be had: the host is full, or its limit of locked memory (ulimit -l)"
        yield Finding(Cause.HOST, False, words)
        return
    who = {Kind.NCCL: "NCCL", Kind.LIBRARY: "cuBLAS or cuDNN"}.get(event.kind, "the driver")
    asked = f" asking for {gib(event.figures.tried)}" if event.figures.tried else ""
    if "NOT_INITIALIZED" in event.line:
        words = "cuBLAS could not start, most often because no memory was left for its handle"
        yield Finding(Cause.NO_ROOM, False, words)
        return
    words = (
        f"{who} found no memory{asked}: what torch's allocator has reserved it gives back only for its own allocations"
    )
    yield Finding(Cause.NO_ROOM, True, words)
    if known.job is not None and known.phase is not None:
        driver, card = known.phase.driver, known.job.gpu
        if driver.most > card.capacity_bytes:
            yield Finding(
                Cause.TOO_LARGE, driver.least > card.capacity_bytes, f"{gib(driver.most)} are predicted at most for "
                f"{known.phase.phase}, reserved and outside of PyTorch, of {gib(card.capacity_bytes)}"
            )


def _of_host(known: Known) -> Iterator[Finding]:
    event, job = known.event, known.job
    if event.kind is Kind.SHARED:
        words = "/dev/shm is full: workers of the data loader pass batches through it, and NCCL data within a node"
        yield Finding(Cause.HOST, True, words)
        return
    asked = f": it asked for {gib(event.figures.tried)}" if event.figures.tried else ""
    if event.kind is Kind.SIGKILL:
        words = "signal 9 says not who sent it: the kernel or the container where host memory ran out, or a scheduler"
        yield Finding(Cause.HOST, False, words)
    else:
        yield Finding(Cause.HOST, True, f"memory of the host, not of a GPU{asked}")
    if job is not None:
        least, most = job.host.node
        span = f"{least / GIB:.0f} to {most / GIB:.0f} GiB"
        yield Finding(Cause.HOST, False, f"predicted host memory of a node of {job.host.ranks} ranks: {span}")


def _with_growth(known: Known, growth: Growth, found: list[Finding]) -> list[Finding]:
    """A leak decides where, without what grew, the allocation would have fitted."""
    series, event = growth.series, known.event
    of_host = event.kind in (*OF_HOST, Kind.SIGKILL)
    if (series.figure == HOST) != of_host:
        return found
    exact = series.figure in (ALLOCATED, HOST)
    what = "which should be the same after every step" if exact else "which longer sequences or routing can raise too"
    words = (
        f"{series.figure} of rank {series.rank} grew by {gib(growth.total)} over {growth.steps} steps, "
        f"{growth.slope / MIB:.1f} MiB a step, {what}"
    )
    leak = Finding(Cause.LEAK, exact, words)
    missing = event.figures.missing
    decides = exact and (of_host or missing is None or growth.total >= missing)
    return [leak, *found] if decides else [*found, leak]


def _not_memory(line: str) -> str:
    if "shared memory" in line:
        return "a Triton kernel asked for more shared memory than a multiprocessor has: smaller blocks, not less memory"
    if "timeout" in line:
        return "a collective timed out: another rank stopped or failed before; look at the first failure of every rank"
    if "Cuda failure" in line:
        return "NCCL passes on a CUDA error that is not about memory"
    return "a kernel reached outside of its data, or an index was out of range: no lack of memory"


def place_of(event: Event, from_the_start: bool) -> Phase:
    """The phase of a job in which it failed. ``from_the_start``: whether the text would show steps before it."""
    if event.phase is not None:
        return event.phase
    if event.step is None:
        return Phase.FIRST_STEP if from_the_start and event.place else Phase.TRAINING
    return Phase.TRAINING if event.step else Phase.FIRST_STEP
