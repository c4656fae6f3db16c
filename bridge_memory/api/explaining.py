"""``why``: why a job ran out of memory. ``diff``: what differs between runs, and which bytes follow."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from bridge_memory.cards.gpu import Gpu
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.errors import show
from bridge_memory.spec.gpus import find_gpu

if TYPE_CHECKING:
    from bridge_memory.difference import Difference
    from bridge_memory.failure.why import Why


def why(
    failure: str | os.PathLike[str], run: RunSpec | None = None, *, gpu: str | Gpu | None = None,
    num_gpus: int | None = None,
) -> Why:  # fmt: skip
    """Explain why a job ran out of memory, and what to do first.

    Args:
        failure: The text of the failure or of a log around it; or the path of a log, a journal of MemoryReport or a
            memory snapshot. A str with a line break is a text.
        run: What ran. None: what the text says, where its trainer printed it (Megatron-LM, Megatron Bridge, torchtitan,
            verl).
        gpu: The GPU, by a name that ``find_gpu`` knows. None: by the text.
        num_gpus: GPUs of the job, where the text does not say.

    Returns:
        ``findings`` are causes, the deciding one (``cause``) first, each with its evidence. ``remedies`` are at most
        three things to do, with what each frees and costs. ``event`` has the figures of the failure in bytes, ``job``
        what was predicted for every phase.

    Raises:
        SpecError: There is no failure in it that is known, or the GPU is not known.

    Example:
        >>> from bridge_memory import why
        >>> found = why(
        ...     "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. GPU 0 has a total capacity of "
        ...     "79.10 GiB of which 1.20 GiB is free. Of the allocated memory 60.12 GiB is allocated by PyTorch, and "
        ...     "14.35 GiB is reserved by PyTorch but unallocated.\\n"
        ... )
        >>> str(found.cause), found.remedies[0].do
        ('fragmented', 'PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True in the environment')
    """
    from bridge_memory.failure.why import why_file, why_text

    if not isinstance(failure, (str, os.PathLike)):
        raise SpecError(f"failure ({show(failure)}) is no text and no path; give the error's text, or a log's path")
    if run is not None and not isinstance(run, RunSpec):
        raise SpecError(f"run ({show(run)}) is not a RunSpec; give RunSpec(model=...), or None")
    card = find_gpu(gpu) if gpu is not None and not isinstance(gpu, Gpu) else gpu
    if isinstance(failure, str) and "\n" in failure:
        return why_text(failure, run, card, world_size=num_gpus)
    return why_file(os.fspath(failure), run, card, world_size=num_gpus)


def diff(runs: Mapping[str, RunSpec] | Sequence[RunSpec], *, gpu: str | None = None) -> Difference:
    """Say what differs between runs, and which bytes follow.

    Args:
        runs: Two or more; a mapping names them. The others are compared with the first.
        gpu: A GPU to judge them by, by a name that ``find_gpu`` knows. None: without a verdict.

    Returns:
        ``configurations`` have the peaks. ``fields(i)`` are those in which run ``i`` differs from the first, each with
        the bytes by which it changes the first's peak alone; ``components(i)`` the parts of both peaks, whose
        differences add up to ``more(i)``.

    Raises:
        SpecError: There are fewer than two runs, or the GPU is not known.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec, diff
        >>> run = RunSpec(model="Qwen/Qwen3-8B", parallel=ParallelSpec(world_size=8))
        >>> found = diff({"tp 1": run, "tp 2": run.with_fields(tensor_model_parallel_size=2)})
        >>> found.more(1) < 0, [field.name for field in found.fields(1)]
        (True, ['tensor_model_parallel_size'])
    """
    from bridge_memory.difference import difference

    if not isinstance(runs, (Mapping, Sequence)) or isinstance(runs, str):
        raise SpecError(f"runs ({show(runs)}) is no list of runs; give two or more RunSpec")
    named = list(runs.items()) if isinstance(runs, Mapping) else [(f"run {i}", run) for i, run in enumerate(runs)]
    for _, run in named:
        if not isinstance(run, RunSpec):
            raise SpecError(f"runs ({show(run)}) holds something else; give RunSpec(model=...)")
    return difference([(str(name), run) for name, run in named], gpu)
