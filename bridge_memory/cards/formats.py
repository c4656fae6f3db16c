"""What a card can compute in."""

from __future__ import annotations

from bridge_memory.cards.generations import AMD, Capability
from bridge_memory.cards.gpu import Gpu

#: fp8 recipe -> (lowest compute capability, the first that is too new again or None). Source: TE
#: ``quantization.py: check_fp8_support, check_fp8_block_scaling_support, check_mxfp8_support`` (2.11 and 2.20).
_FP8_NVIDIA: dict[str, tuple[Capability, Capability | None]] = {
    "delayed": ((8, 9), None), "tensorwise": ((8, 9), None), "blockwise": ((9, 0), None), "mxfp8": ((10, 0), (12, 0)),
    "nvfp4": ((10, 0), None),
}  # fmt: skip
#: The same for AMD: fp8 came with CDNA 3 (gfx942), the MX formats with CDNA 4 (gfx950), by AMD's ISA manuals.
_FP8_AMD: dict[str, tuple[Capability, Capability | None]] = {
    "delayed": ((9, 4), None), "tensorwise": ((9, 4), None), "blockwise": ((9, 4), None), "mxfp8": ((9, 5), None),
    "nvfp4": ((99, 0), None),
}  # fmt: skip


def lacking(gpu: Gpu, recipe: str) -> str:
    """What a recipe of fp8 or fp4 computes in and ``gpu`` cannot: "fp8", "blockwise fp8"; "" where it can."""
    known = _FP8_AMD if gpu.vendor == AMD else _FP8_NVIDIA
    if gpu.capability < known["delayed"][0]:
        return "fp8"
    lowest, beyond = known[recipe]
    if gpu.capability < lowest or (beyond is not None and gpu.capability >= beyond):
        return recipe if recipe in ("mxfp8", "nvfp4") else f"{recipe} fp8"
    return ""


def multiplies_one_layout(gpu: Gpu) -> bool:
    """Whether products of fp8 take operands of any layout, so that no second one is kept. Source: TE ``utils.py:
    is_non_tn_fp8_gemm_supported``: compute capability 10.x alone."""
    return (10, 0) <= gpu.capability < (12, 0)
