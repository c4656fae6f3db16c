"""An Estimate as JSON, schema ``bridge-memory/estimate/3`` (``estimate.schema.json`` beside this file).

The schemas of other commands are in the same folder. A version may gain keys; renaming or removing one makes a new
version. Bytes are ints on one rank; parameters are elements.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from bridge_memory.decisive import decisive
from bridge_memory.report.decided import as_json
from bridge_memory.report.summary import configuration
from bridge_memory.result import SCHEMA, Estimate

if TYPE_CHECKING:
    from bridge_memory.job.job import Job
    from bridge_memory.report.details import DetailRow
    from bridge_memory.verdict import Fit

#: The JSON Schema (draft 2020-12) of what ``estimate_to_json`` returns.
SCHEMA_PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "estimate.schema.json")

__all__ = ["SCHEMA", "SCHEMA_PATH", "estimate_to_json"]


def estimate_to_json(
    result: Estimate,
    fits: Sequence[Fit],
    *,
    stage: int | None = None,
    details: Mapping[int, Sequence[DetailRow]] | None = None,
    fix: str = "",
    jobs: Sequence[Job] = (),
) -> dict[str, Any]:
    """``result.to_dict()`` with the GPUs of ``fits`` and the verdict.

    ``stage``: keep only this one of ``stages``; ``details``: stage -> rows of ``details.stage_details``, which become
    its ``tensors``; ``fix``: a change that makes it fit, in words; ``jobs``: the whole job on GPUs of ``fits``.
    """
    out = result.to_dict(stage=stage)
    for shown in out["stages"]:
        if shown["stage"] in (details or {}):
            shown["tensors"] = [asdict(row) for row in (details or {})[shown["stage"]]]
    return {
        "schema": out.pop("schema"),
        "verdict": _verdict(result, fits, fix, jobs),
        "run": dict(configuration(result)),
        "decisive": as_json(decisive(result)),
        **{k: v for k, v in out.items() if k not in _LAST},
        "fits": [fit.step_json() for fit in fits],
        **{k: out[k] for k in _LAST},
        **({"job": jobs[0].as_json()} if len(fits) == 1 and jobs else {}),
    }


def _verdict(result: Estimate, fits: Sequence[Fit], fix: str, jobs: Sequence[Job]) -> dict[str, Any]:
    from bridge_memory.report.answer import answer_of
    from bridge_memory.verdict import Verdict

    found = answer_of(result, fits, fix=fix, jobs=jobs)
    worse: dict[str, Job] = {}
    if jobs:
        from bridge_memory.job.job import worse_jobs

        worse = {job.gpu.name: job for job in worse_jobs(jobs, fits)}

    def of(verdict: Verdict) -> list[str]:
        return [fit.gpu for fit in fits if (worse.get(fit.gpu) or fit).verdict is verdict]

    return {
        "answer": found.verdict,
        "peak_at_least_bytes": result.peak_bounds.least,
        "peak_at_most_bytes": result.peak_bounds.most,
        "words": found.words,
        "evidence": found.evidence,
        "band": None if found.band is None else asdict(found.band),
        "band_words": found.band_words,
        "fits": of(Verdict.FITS),
        "tight": of(Verdict.TIGHT),
        "does_not_fit": of(Verdict.DOES_NOT_FIT),
        "unknown": of(Verdict.UNKNOWN),
    }


_LAST = ("assumptions", "not_modelled", "unmodelled")
