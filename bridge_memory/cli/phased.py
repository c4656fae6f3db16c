"""``--phases`` of ``search`` and ``whatif``: the whole job of what is shown, from build to resume."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from bridge_memory.components import GIB
from bridge_memory.spec import RunSpec
from bridge_memory.verdict import Verdict

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu
    from bridge_memory.job.job import Job

#: Rows of a search whose job is looked at.
FIRST = 5


def add_phases_argument(group: argparse._ArgumentGroup, of: str) -> None:
    """``of``: what is looked at: "every change"."""
    group.add_argument("--phases", action="store_true",
                       help=f"also the whole job of {of}, from build to resume, as the driver counts it (slower)")


def jobs(runs: Iterable[RunSpec], gpu: Gpu) -> list[Job]:
    """The whole job of each run, as ``estimate`` gives it."""
    from bridge_memory.estimation import estimate
    from bridge_memory.job.job import job_of

    return [job_of(estimate(run), gpu) for run in runs]


def job_notes(runs: Iterable[RunSpec], gpu: Gpu, top: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """(a sentence, a record) of the job of each of the first rows, of which ``top`` are shown."""
    from bridge_memory.report.phases import job_words

    for number, job in enumerate(jobs(islice(runs, min(top, FIRST)), gpu), 1):
        yield f"row {number}: {job_words(job)}", {"row": number, **job_record(job)}


def job_record(job: Job) -> dict[str, Any]:
    """The phase that decides a job, for programs."""
    worst = job.tightest
    return {
        "phase": str(worst.phase), "stage": worst.stage, "driver_bytes": list(worst.driver),
        "verdict": str(job.verdict),
    }  # fmt: skip


#: Heading of ``job_cell``.
HEADING = "job GiB"


def job_cell(job: Job) -> str:
    """"83.1 resume, does not fit": the highest driver peak, at most, and its phase."""
    worst = job.tightest
    said = f"{worst.driver.most / GIB:.1f} {worst.phase}"
    return said if job.verdict is Verdict.FITS else f"{said}, {job.verdict}"
