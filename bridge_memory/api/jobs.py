"""``whole_job``: a job from its start to its checkpoints, as torch and the driver count it."""

from __future__ import annotations

from dataclasses import replace

from bridge_memory.cards.gpu import Gpu
from bridge_memory.estimation import estimate
from bridge_memory.job.job import Job, job_of
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.errors import show
from bridge_memory.spec.gpus import check_computes, find_gpu


def whole_job(run: RunSpec, gpu: str | Gpu, *, host_bytes: int | None = None) -> Job:
    """What every phase of a job holds: build, load, first step, training, evaluation, save and resume.

    Args:
        run: The run.
        gpu: The GPU, by a name that ``find_gpu`` knows.
        host_bytes: Host memory of a node. None: not judged.

    Returns:
        ``phases`` hold allocated, reserved and outside memory of the stage with most, in bytes, between a least and a
        most. ``not_modelled`` says which phases are left out, and why.

    Raises:
        SpecError: The GPU is not known or lacks the run's precision, or ``host_bytes`` is no number of bytes.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec, whole_job
        >>> parallel = ParallelSpec(world_size=8, tensor_model_parallel_size=2)
        >>> job = whole_job(RunSpec(model="Qwen/Qwen3-8B", parallel=parallel), "H100")
        >>> [str(phase.phase) for phase in job.phases]
        ['build', 'load', 'first step', 'training', 'evaluation', 'save', 'resume']
        >>> str(job.verdict), job.tightest.driver.most <= job.gpu.capacity_bytes
        ('fits', True)
    """
    if not isinstance(run, RunSpec):
        raise SpecError(f"run ({show(run)}) is not a RunSpec; give RunSpec(model=..., parallel=ParallelSpec(...))")
    if host_bytes is not None and (type(host_bytes) is not int or host_bytes < 1):
        raise SpecError(f"host_bytes ({show(host_bytes)}) is no number of bytes; give 1 or more, or None")
    card = gpu if isinstance(gpu, Gpu) else find_gpu(gpu)
    check_computes(card, run.precision)
    arch = card.arch or run.implementation.gpu_arch
    return job_of(estimate(run.with_(implementation=replace(run.implementation, gpu_arch=arch))), card, host_bytes)
