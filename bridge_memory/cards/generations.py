"""Compute capabilities and generations: whose GPU it is, and whose rules it goes by.

Library workspaces, attention kernels and fp8 layouts go by generation (``ImplementationSpec.gpu_arch``).
"""

from __future__ import annotations

#: What ``torch.cuda.get_device_capability`` reports.
Capability = tuple[int, int]

NVIDIA, AMD = "NVIDIA", "AMD"

#: NVIDIA's generations, oldest first, and the compute capability with which each begins.
GENERATIONS: dict[str, Capability] = {
    "volta": (7, 0), "turing": (7, 5), "ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0), "blackwell": (10, 0),
}  # fmt: skip
#: The generation whose rules are taken where nobody says which runs.
DEFAULT_GENERATION = "hopper"

#: AMD's, by the capability that torch's ROCm builds report: those of gfx90a, gfx942 and gfx950.
AMD_GENERATIONS: dict[str, Capability] = {"cdna2": (9, 0), "cdna3": (9, 4), "cdna4": (9, 5)}


def since_hopper(generation: str) -> bool:
    """Whether one of ``GENERATIONS`` is Hopper or newer: compute capability 9.0 on."""
    return GENERATIONS[generation] >= GENERATIONS["hopper"]


def generation_of(capability: Capability, vendor: str = NVIDIA) -> str | None:
    """The generation of a vendor's GPUs of this compute capability; None for those older than are known here."""
    known = AMD_GENERATIONS if vendor == AMD else GENERATIONS
    return next((name for name, first in reversed(known.items()) if capability >= first), None)
