"""Figures of a whole job, by phases: what the driver counts, memory outside torch, pools of CUDA graphs, a load."""

from __future__ import annotations

from collections.abc import Sequence

from bridge_memory.accuracy.described.figures import Figure, Meaning
from bridge_memory.job.job import Job, PhaseMemory
from bridge_memory.outside.amount import Range, total
from bridge_memory.outside.phase import Phase
from bridge_memory.spec import RunSpec, SpecError

#: What every job goes through; whether it also evaluated, saved or loaded is seldom said.
_SURE = (Phase.BUILD, Phase.FIRST_STEP, Phase.TRAINING)
_LOADS = (Phase.LOAD, Phase.RESUME)
#: Steps before a capture, unless ``cuda_graph_warmup_steps`` says otherwise (megatron-core
#: ``transformer_config.py``; ``full_cuda_graph.py: FullCudaGraphWrapper.__call__``; Bridge ``training/train.py``).
_WARMUP_STEPS = 3
#: Of a figure that was read earlier.
BEFORE_CAPTURE = f"CUDA graphs are captured after {_WARMUP_STEPS} steps, as by default: not in what was read before"


def captured(run: RunSpec, after: int) -> bool:
    """Whether the run has CUDA graphs by the end of step ``after``; 0: of a later one. Local graphs are captured at the
    end of the first."""
    impl = run.implementation.cuda_graph_impl
    return impl != "none" and (after == 0 or impl == "local" or after > _WARMUP_STEPS)


def predicted(job: Job, figure: Figure, stage: int | None) -> Range:
    """Bytes of a figure, between a least and a most, on ``stage``; None: on the one with the most.

    Raises:
        SpecError: The phases that it needs are not modelled.
    """
    phases = {p.phase: p for p in (job.phases if stage is None else job.stages[stage])}
    if figure.meaning is Meaning.OUTSIDE:
        return total(phases[Phase.TRAINING].outside)
    if figure.meaning is Meaning.RESERVED:
        return phases[Phase.TRAINING].reserved
    loads = [phases[phase] for phase in _LOADS if phase in phases]
    if (figure.meaning is Meaning.LOAD or figure.load) and not loads:
        raise SpecError(f"the load of a checkpoint is not modelled: {'; '.join(job.not_modelled)}")
    if figure.meaning is Meaning.LOAD:
        return _of_load(phases[Phase.BUILD], loads)
    return _of_driver([p for p in phases.values() if _may_be_in(p.phase, figure)], loads if figure.load else [])


def _may_be_in(phase: Phase, figure: Figure) -> bool:
    """Whether a peak of the driver may be that of a phase; a load of which nothing is said is that of a start."""
    return phase not in _LOADS or bool(figure.load) or (figure.load is None and phase is Phase.LOAD)


def _of_driver(phases: Sequence[PhaseMemory], loads: Sequence[PhaseMemory]) -> Range:
    """At least that of the phases that were sure to run, and of one of ``loads``; at most that of all."""
    least = max(p.driver.least for p in phases if p.phase in _SURE)
    return Range(max(least, min((p.driver.least for p in loads), default=0)), max(p.driver.most for p in phases))


def _of_load(build: PhaseMemory, loads: Sequence[PhaseMemory]) -> Range:
    """Until weights are loaded: from what is allocated to what the driver counts."""
    least = max(total(build.allocated).least, min(total(p.allocated).least for p in loads))
    return Range(least, max(p.driver.most for p in (build, *loads)))
