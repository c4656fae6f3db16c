"""``why``: from a log, a message, a journal or a snapshot to causes, a table and what to do first."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bridge_memory.calibration import journal
from bridge_memory.calibration.records import RunRecord
from bridge_memory.cards.gpu import Gpu
from bridge_memory.cards.names import gpu_called
from bridge_memory.cards.rows import GPUS
from bridge_memory.comparison.compare import MOST_OF_A_LOG
from bridge_memory.comparison.logs import latest_of_each_rank
from bridge_memory.comparison.snapshot import (
    MOST_OF_A_SNAPSHOT,
    Attribution,
    at_peak,
    attribute,
    is_snapshot,
    read_snapshot,
)
from bridge_memory.estimation import estimate
from bridge_memory.evidence import evidence_of
from bridge_memory.failure.causes import Cause, Finding, Known, findings, gib, place_of
from bridge_memory.failure.remedies import Remedy, remedies
from bridge_memory.failure.runs import Printed, Trainer, on_generation, printed_in
from bridge_memory.failure.steps import ALLOCATED, PEAK, Growth, Series, fastest, series_of
from bridge_memory.failure.texts import Event, Failures, Figures, Kind, failures, located
from bridge_memory.files import read_bytes, text_of
from bridge_memory.job.job import Job, PhaseMemory, job_of
from bridge_memory.readers.run_spec import run_from_json
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.gpus import check_computes
from bridge_memory.spec.ranks import stage_of_rank

SCHEMA = "bridge-memory/why/1"
_GIVE = "give the text of the failure, a log, a journal of MemoryReport or a memory snapshot, or - for standard input"
#: Source of a run that no text says.
FLAGS = "the flags"
#: How far torch's total_memory of one card differs between drivers (``cards/rows.py``), as a share.
_SAME_CARD = 0.006


@dataclass(frozen=True, slots=True)
class Why:
    """What is known of a failure.

    ``findings``: causes, the deciding one first; ``remedies``: what to do first; ``job``: the whole job as predicted,
    None where nothing says what ran, which ``notes`` then explain; ``stage``: of the rank that failed.

    Example:
        >>> from bridge_memory import why
        >>> found = why("RuntimeError: CUDA error: out of memory\\n")
        >>> str(found.cause), found.job is None
        ("no room beside torch's cache", True)
    """

    event: Event
    findings: tuple[Finding, ...]
    remedies: tuple[Remedy, ...]
    trainer: Trainer
    #: Where the run is from; "" where there is none.
    source: str
    run: RunSpec | None
    gpu: Gpu | None
    job: Job | None
    stage: int
    #: The phase in which it failed, as predicted.
    phase: PhaseMemory | None
    growth: Growth | None
    #: Failures by kind, and ranks that failed.
    counts: Mapping[Kind, int]
    ranks: tuple[int, ...]
    retries: int
    #: The snapshot's blocks at its peak; of a snapshot alone.
    attribution: Attribution | None
    notes: tuple[str, ...]

    @property
    def cause(self) -> Cause:
        """The deciding one."""
        return self.findings[0].cause

    def as_json(self) -> dict[str, Any]:
        """By the schema ``SCHEMA``; bytes."""
        f, e, growth = self.event.figures, self.event, self.growth
        return {
            "schema": SCHEMA, "cause": str(self.cause), "sure": self.findings[0].sure,
            "findings": [{"cause": str(x.cause), "sure": x.sure, "words": x.words} for x in self.findings],
            "remedies": [r._asdict() for r in self.remedies],
            "failure": {
                "kind": str(e.kind), "line": e.line, "number": e.number, "rank": e.rank, "place": e.place,
                "phase": e.phase and str(e.phase), "step": e.step,
            },
            "figures": {
                "tried_bytes": f.tried, "device": f.device, "total_bytes": f.total, "free_bytes": f.free,
                "allocated_bytes": f.allocated, "private_bytes": f.private, "unallocated_bytes": f.unallocated,
                "in_use_bytes": f.in_use, "allowed_bytes": f.allowed, "outside_bytes": f.outside,
                "needed_bytes": f.needed, "missing_bytes": f.missing,
                "others": [{"pid": pid, "bytes": nbytes} for pid, nbytes in f.others],
            },
            "ranks": list(self.ranks), "counts": {str(kind): number for kind, number in self.counts.items()},
            "retries": self.retries,
            "growth": None if growth is None else {
                "figure": growth.series.figure, "rank": growth.series.rank, "bytes_per_step": growth.slope,
                "bytes": growth.total, "steps": growth.steps,
            },
            "run": {
                "trainer": str(self.trainer), "source": self.source,
                "model": None if self.run is None else self.run.model.name, "stage": self.stage,
                "gpu": None if self.gpu is None else self.gpu.name,
            },
            "phase": None if self.phase is None else str(self.phase.phase),
            "predicted": None if self.job is None or self.gpu is None else [
                phase.as_json(self.gpu.capacity_bytes) for phase in self.job.stages[self.stage]
            ],
            "notes": list(self.notes),
        }  # fmt: skip

    def __str__(self) -> str:
        """The causes, a line each, and what to do."""
        lines = [f"{found.cause}: {found.words}" for found in self.findings]
        lines += [f"{i}. {r.do} (frees {r.frees}; costs {r.costs})" for i, r in enumerate(self.remedies, 1)]
        return "\n".join(lines)


def why_file(
    path: str, run: RunSpec | None = None, gpu: Gpu | None = None, *, world_size: int | None = None
) -> Why:
    """Why the job of a file failed; "-": of standard input. ``run``, ``gpu``, ``world_size``: as for ``why_text``.
    Raises SpecError where the file holds no failure."""
    if path == "-":
        data, path = sys.stdin.buffer.read(MOST_OF_A_LOG), "standard input"
    else:
        data = read_bytes(path, _GIVE, most_after=_most)
    if is_snapshot(data):
        return _of_snapshot(data, path, run, gpu)
    return why_text(text_of(data, errors="replace"), run, gpu, world_size=world_size, name=path)


def _most(head: bytes) -> int:
    return MOST_OF_A_SNAPSHOT if is_snapshot(head) else MOST_OF_A_LOG


def why_text(
    text: str, run: RunSpec | None = None, gpu: Gpu | None = None, *, world_size: int | None = None,
    name: str = "the text",
) -> Why:  # fmt: skip
    """The same of a text. ``run``, ``gpu``: in place of what the text says ran, and on what; ``world_size``: GPUs of
    the job, where the text does not say."""
    found = failures(text)
    event = found.root
    lines = text.splitlines()
    every = series_of(lines)
    event = _of_figures(every) if event is None else located(text, event)
    if event is None:
        raise SpecError(f"{name} holds no failure of memory that is known here; {_GIVE}")
    printed = Printed(Trainer.TORCH, run, "") if run is not None else _of_journal(lines) or printed_in(text, world_size)
    if run is not None:
        printed = printed_in(text)._replace(run=run, source=FLAGS, why_not="")
    latest = {m.rank: m.max_allocated for m in latest_of_each_rank(lines) if m.max_allocated is not None}
    for one in found.events:
        if one.rank is not None and one.figures.allocated is not None:
            latest.setdefault(one.rank, one.figures.allocated)
    return _diagnosed(text, found, event, printed, gpu, every, latest)


def _diagnosed(
    text: str, found: Failures, event: Event, printed: Printed, gpu: Gpu | None, every: Sequence[Series],
    latest: Mapping[int, int], attribution: Attribution | None = None,
) -> Why:  # fmt: skip
    run, notes = printed.run, []
    if printed.why_not:
        notes.append(f"{printed.source}: not estimated: {printed.why_not}")
    if gpu is None:
        gpu, words = _card(text, event.figures.total, run)
        notes += [words] if words else []
    job, stage = None, 0
    if run is not None and gpu is not None:
        try:
            check_computes(gpu, run.precision)
            run = on_generation(run, gpu.arch)
            job = job_of(estimate(run), gpu)
            stage = stage_of_rank(run.parallel, event.rank) if event.rank is not None else job.tightest.stage
        except SpecError as error:
            notes.append(f"not estimated: {error}")
            run, job = None, None
    elif run is None and not printed.why_not:
        notes.append(
            "the text does not say what ran: add MODEL and its flags (or --megatron-args, --container, ...) for what "
            "was predicted, and what each change frees"
        )
    where = place_of(event, printed.run is not None and printed.source not in ("", FLAGS))
    phase = None
    if job is not None:
        phase = next((one for one in job.stages[stage] if one.phase is where), None)
        if event.rank is None and len(job.stages) > 1:
            notes.append(f"the text does not name the rank: compared with stage {stage}, the fullest")
    peers = {rank: peak for rank, peak in latest.items() if _same_stage(run, rank, stage)}
    growth = fastest(every)
    above = 0.0 if run is None or gpu is None else evidence_of(run, gpu).above
    known = Known(found, event, growth, peers, gpu, job, phase, above)
    causes = findings(known)
    return Why(
        event, causes, remedies(known, causes, printed.trainer, run if job is not None else None, text),
        printed.trainer, printed.source if job is not None else "", run if job is not None else None, gpu, job, stage,
        phase, growth, found.counts, tuple(sorted({e.rank for e in found.events if e.rank is not None})), found.retries,
        attribution, tuple(notes),
    )  # fmt: skip


def _same_stage(run: RunSpec | None, rank: int, stage: int) -> bool:
    """Whether ranks hold the same layers; unknown without a run, where all are compared."""
    if run is None:
        return True
    return rank < run.parallel.world_size and stage_of_rank(run.parallel, rank) == stage


#: A card's name as torch, nvidia-smi and torchtitan print it.
_NAMED = re.compile(r"(?:NVIDIA|AMD Instinct) ((?:RTX |GeForce )?[A-Z]+\d+[A-Z]*(?:[ -][\w-]+){0,3})")


def _card(text: str, capacity: int | None, run: RunSpec | None) -> tuple[Gpu | None, str]:
    """The card that the text names, else one of the memory that torch says; and what was supposed."""
    for match in _NAMED.finditer(text[: 1 << 20]):
        words = match[1].split()
        for number in range(len(words), 0, -1):
            card = gpu_called(" ".join(words[:number]))
            if card is not None and (capacity is None or abs(card.capacity_bytes / capacity - 1) <= _SAME_CARD):
                return card, ""
    if capacity is None:
        return None, "" if run is None else "the text does not name the GPU: add --gpu NAME for what was predicted"
    alike = [card for card in GPUS.values() if abs(card.capacity_bytes / capacity - 1) <= _SAME_CARD]
    if not alike:
        return None, f"no known card has {gib(capacity)}: add --gpu NAME"
    first = max(enumerate(alike), key=lambda one: (one[1].common, one[1].rates is not None, one[0]))[1]
    others = [card.name for card in alike if card is not first]
    supposed = f"taken for {first.name} by its memory (also {', '.join(others)}); --gpu says another"
    return first, supposed if others else ""


# ---- journals and snapshots ----


def _of_journal(lines: Sequence[str]) -> Printed | None:
    """The run of the last start of a journal; None where the text is none."""
    if not any(journal.SCHEMA in line for line in lines[:1000]):
        return None
    start = next((r for r in reversed(list(journal.records(lines))) if isinstance(r, RunRecord)), None)
    if start is None or not start.run:
        return None
    try:
        run = run_from_json(start.run)
    except SpecError as error:
        return Printed(Trainer.TORCH, None, "the journal", str(error))
    return Printed(Trainer.BRIDGE if run.data_parallel.of_megatron else Trainer.TORCH, run, "the journal")


def _of_figures(every: Sequence[Series]) -> Event | None:
    """A log that ends without a failure, but whose memory grows: its last figures."""
    growth = fastest(every)
    if growth is None:
        return None
    step, nbytes = growth.series.points[-1]
    figures = Figures(allocated=nbytes) if growth.series.figure in (ALLOCATED, PEAK) else Figures()
    return Event(Kind.TORCH, "", 0, growth.series.rank, figures, step=step)


def _of_snapshot(data: bytes, path: str, run: RunSpec | None, gpu: Gpu | None) -> Why:
    snapshot = read_snapshot(data, path)
    alive = at_peak(snapshot)
    reserved = sum(s["total_size"] for s in snapshot["segments"] if s.get("device", 0) == alive.device)
    traces = snapshot.get("device_traces") or []
    trace = traces[alive.device] if alive.device < len(traces) else []
    failed = next((e for e in reversed(trace) if e.get("action") == "oom"), None)
    tried = failed.get("size") if failed is not None else None
    free = failed.get("device_free") if failed is not None else None
    whole = None if gpu is None else gpu.capacity_bytes
    at_end = alive.end_bytes if failed is not None else alive.peak_bytes
    figures = Figures(
        tried=tried if isinstance(tried, int) else None, device=alive.device, total=whole,
        free=free if isinstance(free, int) else None, allocated=at_end, unallocated=max(0, reserved - at_end),
    )
    line = "" if failed is None else "the snapshot's trace ends with a failed allocation"
    event = Event(Kind.TORCH, line, 0, None, figures)
    components = () if run is None else estimate(run).peak_stage.components
    found = Failures((event,), {}, 0)
    printed = Printed(Trainer.TORCH, run, FLAGS if run is not None else "")
    result = _diagnosed("", found, event, printed, gpu, (), {}, attribute(alive, components))
    return result


def measured_driver(event: Event) -> int | None:
    """What the driver counted on the card when it failed, bytes."""
    f = event.figures
    return None if f.total is None or f.free is None else f.total - f.free
