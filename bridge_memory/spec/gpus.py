"""A run's GPU: finding it by name, checking that it supports the run's precision, and the assumptions about it."""

from __future__ import annotations

from bridge_memory.cards.formats import lacking, multiplies_one_layout
from bridge_memory.cards.generations import AMD, GENERATIONS
from bridge_memory.cards.gpu import Gpu, capability_words
from bridge_memory.cards.names import gpu_called, near_names
from bridge_memory.cards.rows import common_gpus
from bridge_memory.spec.errors import SpecError, show
from bridge_memory.spec.parts import PrecisionSpec
from bridge_memory.spec.run import RunSpec


def find_gpu(name: str) -> Gpu:
    """Find the GPU that a name means.

    Args:
        name: Such as "H100", "a100-80gb" or "NVIDIA H100 80GB".

    Returns:
        The GPU, with its memory in bytes.

    Raises:
        SpecError: No such GPU is known; the message suggests similar names.

    Example:
        >>> from bridge_memory import find_gpu
        >>> find_gpu("NVIDIA H100 80GB").name
        'H100'
    """
    if not isinstance(name, str):
        raise SpecError(f"gpu ({show(name)}) is no name; `bridge-memory gpus` lists them")
    found = gpu_called(name)
    if found is not None:
        return found
    close = near_names(name)
    hint = f"did you mean {' or '.join(close)}?" if close else "`bridge-memory gpus` lists them"
    raise SpecError(f"gpu ({show(name)}) is not one that is known here; {hint}")


def lacks(gpu: Gpu, precision: PrecisionSpec) -> str:
    """The format of ``precision`` that ``gpu`` does not support: "fp8", "blockwise fp8", "mxfp8"; "" if none."""
    return lacking(gpu, precision.recipe) if precision.quantizes else ""


def check_computes(gpu: Gpu, precision: PrecisionSpec) -> None:
    """Raise SpecError, naming GPUs that can, if ``gpu`` cannot compute in ``precision``."""
    missing = lacks(gpu, precision)
    if not missing:
        return
    field = f"fp8 ({precision.fp8})" if missing == "fp8" else f"fp8_recipe ({precision.fp8_recipe})"
    other = "drop fp8" if missing == "fp8" else "use another recipe"
    if precision.fp4 is not None:
        field, missing, other = f"fp4 ({precision.fp4})", "nvfp4", "drop fp4"
    able = [card.name for card in common_gpus() if not lacks(card, precision)]
    raise SpecError(
        f"{field} does not run on --gpu {gpu.name}, of compute capability {capability_words(gpu)}; {other}, or name a "
        f"GPU that has {missing}, such as {', '.join(able)}"
    )


def gpu_assumptions(gpu: Gpu, run: RunSpec) -> list[str]:
    """The assumptions of an estimate of ``run`` on ``gpu``, one sentence each: where the formulas are another GPU's."""
    if gpu.vendor == AMD:
        return [amd_assumption(gpu.name, run.implementation.gpu_arch)]
    if gpu.capability < GENERATIONS["ampere"] and "bf16" in (run.params_dtype, run.compute_dtype):
        return [
            f"{gpu.name}, of compute capability {capability_words(gpu)}, has no bf16 tensor cores: torch emulates "
            "bf16, and Transformer Engine and FlashAttention 2 do not run there; fp16 takes the same bytes"
        ]
    per_tensor = run.precision.fp8 is not None and run.precision.fp8_recipe in ("delayed", "tensorwise")
    if per_tensor and gpu.arch == "blackwell" and not multiplies_one_layout(gpu):
        return [
            f"{gpu.name}, of compute capability {capability_words(gpu)}, keeps fp8 weights and activations in a second "
            "layout, which is not counted: fp8 is laid out as on compute capability 10.0"
        ]
    return []


def amd_assumption(what: str, generation: str) -> str:
    """The assumption of every estimate for ``what``, an AMD GPU or runtime."""
    return (
        f"{what} is AMD's: library workspaces, attention kernels and fp8 layouts are taken as on NVIDIA's "
        f"{generation.capitalize()} (Transformer Engine's ROCm fork is not modelled)"
    )
