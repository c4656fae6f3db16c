"""``whole_job``: a job from its start to its checkpoints, as torch and the driver count it; ``fits``: the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bridge_memory.cards.gpu import Gpu
from bridge_memory.estimation import Estimate, estimate
from bridge_memory.job.job import Job, fits_of_jobs, job_of
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.errors import show
from bridge_memory.spec.gpus import check_computes, find_gpu
from bridge_memory.verdict import Fit


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


def fits(result: Estimate, gpus: Sequence[Gpu | str] = ()) -> list[Fit]:
    """Say whether the whole job of a run fits, on each of some GPUs, as ``bridge-memory estimate`` does.

    A GPU of another generation than that of ``result`` is judged by the same run on its own. One that cannot compute
    the run fits nothing, whatever its memory.

    Args:
        result: The estimate of the run.
        gpus: GPUs, or names that ``find_gpu`` knows. None given: the common ones.

    Returns:
        One ``Fit`` a GPU: margin and headroom of training in bytes, and the verdict of all phases.

    Raises:
        SpecError: A GPU is not known.

    Example:
        >>> from bridge_memory import RunSpec, estimate, fits
        >>> result = estimate(RunSpec(model="meta-llama/Llama-3.1-8B"))
        >>> [(fit.gpu, fit.fits) for fit in fits(result, ["A100-40GB", "B300"])]
        [('A100-40GB', False), ('B300', True)]
        >>> (fit,) = fits(estimate(result.run.with_fields(adopt_optim_states=False)), ["B200"])
        >>> fit.headroom_bytes > 0, str(fit.verdict), fit.decided_by
        (True, 'does not fit', 'resume')
    """
    if not isinstance(result, Estimate):
        raise SpecError(f"result ({show(result)}) is not an Estimate; give estimate(run)")
    return fits_of_jobs(result, gpus)
