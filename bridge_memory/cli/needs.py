"""What a change of a run that has to fit needs beside for the rest of its job, so that a step is not all that fits."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from bridge_memory.estimation import estimate
from bridge_memory.job.job import may_fit, verdict_on
from bridge_memory.job.megatron.loading import How, loading
from bridge_memory.outside.amount import total
from bridge_memory.outside.context import outside
from bridge_memory.outside.phase import Phase
from bridge_memory.plan.changes import keeps_state
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.verdict import Verdict

if TYPE_CHECKING:
    from bridge_memory.job.job import Job


class Needs:
    """Of changes of ``run``, whose job does not fit: what they need beside."""

    def __init__(self, job: Job, run: RunSpec) -> None:
        self._job, self._run = job, run
        self._stage = job.tightest.stage
        #: Whether the phase that decides is a resume of a Megatron engine, of which no pass is part.
        self._resumes = job.tightest.phase is Phase.RESUME and run.data_parallel.engine == "megatron_ddp"

    def __call__(self, run: RunSpec) -> str | None:
        """The option of checkpoints that ``run`` needs for its whole job to fit; "" where it needs none, None if it
        does not fit."""
        if self._fits(run):
            return ""
        other = self._job.to_try
        if other is None:
            return None
        changed = run.with_(checkpoint=other.run.checkpoint)
        return other.flag if self._fits(changed) else None

    def _fits(self, run: RunSpec) -> bool:
        """Whether its job may fit; what a replay would cost is saved where it is certain not to."""
        result, gpu = estimate(run), self._job.gpu
        return may_fit(result, gpu, self._stage) and verdict_on(result, gpu) is not Verdict.DOES_NOT_FIT

    def hopeless(self, run: RunSpec) -> bool:
        """Whether ``run`` cannot be resumed for certain, with that option either: then nothing makes its job fit."""
        if not self._resumes:
            return False
        try:
            resumed = self._resumed if keeps_state(self._run, run) else self._resumes_of(run)
            least = total(outside(run, self._job.gpu, self._stage, Phase.RESUME)).least
        except SpecError:
            return False
        return bool(resumed) and min(resumed) + least > self._job.gpu.capacity_bytes

    @cached_property
    def _resumed(self) -> list[int]:
        return self._resumes_of(self._run)

    def _resumes_of(self, run: RunSpec) -> list[int]:
        """Bytes of torch's allocator that a resume needs at least, without and with the option; [] if one of them is
        not modelled."""
        other = self._job.to_try
        runs = [run] if other is None else [run, run.with_(checkpoint=other.run.checkpoint)]
        if self._stage >= run.parallel.pp:
            return []
        found = []
        for each in runs:
            amounts = loading(each, self._stage, How.RESUME)
            if amounts is None:
                return []
            found.append(total(amounts).least)
        return found
