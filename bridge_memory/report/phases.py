"""The phases of a whole job as a table: what torch and the driver count in each, and whether that fits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bridge_memory.job.job import COPIED_FLAG, Job, PhaseMemory, worse_jobs
from bridge_memory.outside.amount import Range, total
from bridge_memory.outside.phase import Phase
from bridge_memory.report.document import Block, Column, Grid, Pairs, Words
from bridge_memory.report.said import VERDICT_WORDS, names_of
from bridge_memory.report.units import DECIMALS, format_ticks, ticks
from bridge_memory.verdict import BEST_FIRST, FRAGMENTATION, Fit, Verdict

#: Parts of a phase that a page names.
_SHOWN = 6
_JOB = {
    Verdict.FITS: "fits", Verdict.TIGHT: "is tight", Verdict.UNKNOWN: "is unknown", Verdict.DOES_NOT_FIT: "does not fit"
}  # fmt: skip
_TONES = {Verdict.FITS: "good", Verdict.TIGHT: "open", Verdict.UNKNOWN: "open", Verdict.DOES_NOT_FIT: "bad"}


def job_words(job: Job, unit: str = "GiB") -> str:
    """"Whole job: FITS H100: resume has the highest driver peak, 46.2-53.8 of 79.1 GiB, 25.3 free"."""
    worst, capacity = job.tightest, job.gpu.capacity_bytes
    peak = f"{_short(worst.driver, unit)} of {_number(capacity, unit)} {unit}"
    there = {phase.phase for phase in job.phases}
    missing = [str(phase) for phase in Phase if phase not in there]
    without = f" without {', '.join(missing)} (not modelled)" if missing else ""
    start = f"Whole job{without}: {VERDICT_WORDS[job.verdict]} {job.gpu.name}"
    # What decides has the upper end of the peak's band added; without it another phase may be higher.
    band = " with its 90% band" if worst.driver.most < max(phase.driver.most for phase in job.phases) else ""
    words = f"{start}: {worst.phase} has the highest driver peak{band}, {peak}, {_room(worst, capacity, unit)}"
    if job.verdict is not Verdict.UNKNOWN:
        return words
    return f"{words}; not modelled: {', '.join(names_of(job.unmodelled))}"


def worse_than_step(job: Job, unit: str = "GiB", fix: str = "") -> str:
    """"DOES NOT FIT H100: resume, driver peak 80.0-83.1 (stage 1) of 79.1 GiB, over by 0.9 to 4.0; try first: ..."."""
    words = f"{VERDICT_WORDS[job.verdict]} {job.gpu.name}: {tightest_words(job, unit)}"
    if job.verdict is Verdict.UNKNOWN:
        return f"{words}; not modelled: {', '.join(names_of(job.unmodelled))}"
    if not fix and job.to_try is not None and job.enough:
        fix = f"try first: {job.to_try.flag}"
    return f"{words}; {fix}" if fix else words


def tightest_words(job: Job, unit: str = "GiB") -> str:
    """"resume, driver peak 80.0-83.1 (stage 1) of 79.1 GiB, over by 0.9 to 4.0"."""
    worst, capacity = job.tightest, job.gpu.capacity_bytes
    of = f" (stage {worst.stage})" if len(job.stages) > 1 else ""
    peak = f"{_short(worst.driver, unit)}{of} of {_number(capacity, unit)} {unit}"
    return f"{worst.phase}, driver peak {peak}, {_room(worst, capacity, unit)}"


def whole_answer(job: Job, fits: Sequence[Fit], unit: str = "GiB") -> dict[str, str] | None:
    """{verdict, brief, words} of a job that is worse than its step, which ``fits`` judges; else None."""
    if not worse_jobs([job], fits):
        return None
    brief = f"{job.tightest.phase} {_room(job.tightest, job.gpu.capacity_bytes, unit)}"
    return {"verdict": str(job.verdict), "brief": brief, "words": worse_than_step(job, unit)}


def by_verdict(job: Job, unit: str = "GiB", stage: int | None = None) -> Pairs:
    """The driver peak of every phase at most, and of tight ones as a range, a line for each verdict, worst first, with
    the stage of its highest.

    ``stage``: as for ``job_blocks``.
    """
    phases = job.phases if stage is None else job.stages[stage]
    capacity, several = job.gpu.capacity_bytes, len(job.stages) > 1 and stage is None
    pairs = []
    for verdict in reversed(BEST_FIRST):
        alike: dict[str, list[str]] = {}
        found = sorted((p for p in phases if p.verdict(capacity) is verdict), key=lambda phase: -phase.driver.most)
        for phase in found:
            peak = phase.driver if verdict is Verdict.TIGHT else Range(phase.driver.most, phase.driver.most)
            alike.setdefault(_short(peak, unit), []).append(str(phase.phase))
        peaks = [f"{', '.join(names)} {peak}" for peak, names in alike.items()]
        if peaks and several:
            peaks[0] += f" (stage {found[0].stage})"
        if peaks:
            pairs.append((str(verdict), "; ".join(peaks)))
    if job.copied is not None and _worse(job, phases):
        pairs.append(("resume", f"{_copied(job, unit)}, in Megatron-LM ({COPIED_FLAG})"))
    if (words := _routing(job)) is not None:
        pairs.append(("routing", words))
    if job.not_modelled:
        pairs.append(("not modelled", "; ".join(job.not_modelled)))
    of = f"{_number(capacity, unit)} {unit} ({job.gpu.name})"
    title = f"The whole job {_JOB[job.verdict]}: driver peak, at most or from-to, of {of}"
    return Pairs(title, tuple(pairs))


def job_blocks(job: Job, unit: str = "GiB", stage: int | None = None, step: Verdict | None = None) -> list[Block]:
    """The line of the whole job, and the table of its phases; ``stage``: on that one, not each on its fullest;
    ``step``: the verdict of the estimate, which is explained where it differs."""
    return [job_line(job, unit), job_table(job, unit, stage, step)]


def job_line(job: Job, unit: str = "GiB") -> Words:
    """``job_words`` in the tone of the verdict."""
    return Words("", (job_words(job, unit),), _TONES[job.verdict])


def job_table(job: Job, unit: str = "GiB", stage: int | None = None, step: Verdict | None = None) -> Grid:
    """The phases; the deciding one emphasised. ``stage``, ``step``: as for ``job_blocks``."""
    phases = job.phases if stage is None else job.stages[stage]
    capacity, several = job.gpu.capacity_bytes, len(job.stages) > 1
    columns = (
        Column("phase", words=True), *((Column("stage"),) if several else ()), Column("allocated"), Column("reserved"),
        Column("outside"), Column("driver peak"), Column(f"of {_number(capacity, unit)}", words=True),
    )  # fmt: skip
    rows = tuple(
        (
            str(phase.phase), *((str(phase.stage),) if several else ()),
            *(_short(n, unit) for n in (total(phase.allocated), phase.reserved, total(phase.outside), phase.driver)),
            _fits(phase, capacity, unit),
        )
        for phase in phases
    )  # fmt: skip
    differs: tuple[str, ...] = ()
    if step is not None and step is not job.verdict:
        differs = (
            f"the step alone {step}, the whole job {job.verdict}: it counts every phase",
        )
    emphasis = next((i for i, phase in enumerate(phases) if phase is job.tightest), None)
    return Grid(f"The whole job, phase by phase, {unit}", columns, rows, emphasis, (*differs, *_notes(job, unit)))


def phases_data(job: Job, fits: Sequence[Fit], unit: str = "GiB") -> dict[str, Any]:
    """What a page draws of a job, by ``$defs/job`` of ``page.schema.json``: bytes, and the texts of ``job_blocks``;
    ``fits``: of the step."""
    table, capacity = job_table(job, unit, step=fits[0].verdict), job.gpu.capacity_bytes
    assert table.emphasis is not None
    return {
        "gpu": job.gpu.name, "capacity_bytes": capacity, "capacity": f"{_number(capacity, unit)} {unit}",
        "verdict": str(job.verdict), "words": job_words(job, unit), "decides": table.emphasis,
        "title": table.title, "columns": [column.title for column in table.columns], "notes": list(table.notes),
        "phases": [
            {
                "name": str(phase.phase), "stage": phase.stage, "allocated_bytes": list(total(phase.allocated)),
                "reserved_bytes": list(phase.reserved), "outside_bytes": list(total(phase.outside)),
                "driver_bytes": list(phase.driver), "verdict": str(phase.verdict(capacity)),
                "room": _room(phase, capacity, unit), "cells": list(cells), "largest": list(_largest(phase, unit)),
            }
            for phase, cells in zip(job.phases, table.rows, strict=True)
        ],
    }  # fmt: skip


def _largest(phase: PhaseMemory, unit: str) -> Iterator[str]:
    """"main_grad 14.2": parts of a phase, largest first, of those that show."""
    for part in sorted((*phase.allocated, *phase.outside), key=lambda part: -part.most)[:_SHOWN]:
        if part.most:
            yield f"{part.name} {_short(Range(part.least, part.most), unit)} {unit}"


def _notes(job: Job, unit: str) -> list[str]:
    how = "replayed"
    if job.not_replayed:
        how = f"up to {FRAGMENTATION:.1%} above allocated, as measured elsewhere ({job.not_replayed})"
    if job.retries:
        how += ", at least with retries of the allocator, which take time"
    if job.uneven is not None:
        how += f", at most with {job.uneven:.2f} times the balanced tokens in some layers"
    notes = [f"reserved: of training {how}; outside: CUDA context, NCCL's communicators, buffers of libraries"]
    if (words := _routing(job)) is not None:
        notes.append(f"routing: {words}")
    host, of = job.host, "" if job.host_bytes is None else f" of {_number(job.host_bytes, unit)}"
    judged = "" if job.host_verdict is None else f": {job.host_verdict}"
    while_it = {Phase.SAVE: ", while it saves", Phase.LOAD: ", while it loads"}.get(host.phase, "")
    notes.append(f"host memory of a node of {host.ranks}{while_it}: {_short(host.node, unit)}{of} {unit}{judged}")
    if job.copied is not None and _worse(job, job.phases):
        notes.append(f"resume {_copied(job, unit)}, in Megatron-LM ({COPIED_FLAG})")
    if job.to_try is not None:
        notes.append(f"resume: try first: {job.to_try.flag} ({_number(job.to_try.less, unit)} {unit} less)")
    notes += [f"not modelled: {reason}" for reason in job.not_modelled]
    return notes


def _routing(job: Job) -> str | None:
    """How uneven the tokens of experts may be; None where nothing routes, or no routing fits."""
    from bridge_memory.job.overload import FROM_SCRATCH

    found = job.overload
    if found is None or (found.factor is None and not found.any):
        return None
    if found.any:
        return "fits however tokens are routed"
    return (
        f"fits up to an overload factor of {found.factor:.2f} (stage {found.stage}); "
        f"from scratch, first steps saw {FROM_SCRATCH.least:g} to {FROM_SCRATCH.most:g}"
    )


def _copied(job: Job, unit: str) -> str:
    """"167.0-182.5, does not fit"."""
    assert job.copied is not None
    return f"{_short(job.copied.driver, unit)}, {job.copied.verdict(job.gpu.capacity_bytes)}"


def _worse(job: Job, phases: Sequence[PhaseMemory]) -> bool:
    """Whether a resume that copies moments has a worse verdict than one of ``phases``."""
    capacity = job.gpu.capacity_bytes
    resume = next((phase.verdict(capacity) for phase in phases if phase.phase is Phase.RESUME), None)
    return resume is not None and job.copied is not None and job.copied.verdict(capacity) is not resume


def _fits(phase: PhaseMemory, capacity: int, unit: str) -> str:
    return f"{phase.verdict(capacity)}, {_room(phase, capacity, unit)}"


def _room(phase: PhaseMemory, capacity: int, unit: str) -> str:
    verdict, left = phase.verdict(capacity), capacity - phase.driver.most
    if verdict is Verdict.FITS:
        return f"{_number(left, unit)} free"
    if verdict is Verdict.TIGHT and left >= 0:
        return f"{_number(left, unit)} free, over by up to {_number(phase.above - left, unit)} in the 90% band"
    if verdict is Verdict.TIGHT:
        return f"over by up to {_number(-left, unit)}"
    return f"over by {_short(Range(phase.driver.least - capacity, phase.driver.most - capacity), unit, ' to ')}"


def _short(found: Range, unit: str, to: str = "-") -> str:
    """"6.8", or "6.8-7.1": a digit less than elsewhere, which ranges do not have."""
    least, most = _number(found.least, unit), _number(found.most, unit)
    return least if least == most else f"{least}{to}{most}"


def _number(nbytes: int, unit: str) -> str:
    decimals = max(0, DECIMALS[unit] - 1)
    return format_ticks(ticks(nbytes, unit, decimals), unit, decimals)
