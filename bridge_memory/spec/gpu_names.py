"""GPUs: what a card's name says of its vendor and compute capability, and what a capability says of its generation.

Library workspaces, attention kernels and fp8 layouts go by generation (``ImplementationSpec.gpu_arch``).
"""

from __future__ import annotations

import re
from typing import NamedTuple

Capability = tuple[int, int]

#: NVIDIA's generations, oldest first, and the compute capability with which each begins.
GENERATIONS: dict[str, Capability] = {
    "volta": (7, 0), "turing": (7, 5), "ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0), "blackwell": (10, 0),
}  # fmt: skip
#: The generation whose rules are taken where nobody says which runs.
DEFAULT_GENERATION = "hopper"

#: Streaming multiprocessors of the largest card of each for training (V100, T4, A100, L40S, H100, B200).
MULTIPROCESSORS = {"volta": 80, "turing": 40, "ampere": 108, "ada": 142, "hopper": 132, "blackwell": 148}

NVIDIA, AMD = "NVIDIA", "AMD"


class NamedGpu(NamedTuple):
    """What a name gives away. ``capability`` is what ``torch.cuda.get_device_capability`` reports."""

    vendor: str
    capability: Capability

    @property
    def generation(self) -> str | None:
        """One of GENERATIONS; None for AMD's, and for what is older than Volta."""
        return generation_of(self.capability) if self.vendor == NVIDIA else None


#: (what a name holds, whose it is, compute capability); the first that matches counts. "@": nothing alphanumeric
#: before, "#": no digit after. Sources: developer.nvidia.com/cuda-gpus; AMD's are those of gfx90a, gfx942 and gfx950
#: as torch's ROCm builds report them.
_NAMES: tuple[tuple[str, str, Capability], ...] = (
    ("MI35", AMD, (9, 5)),
    ("MI3", AMD, (9, 4)),
    ("MI2|Instinct", AMD, (9, 0)),
    ("GB10#", NVIDIA, (12, 1)),
    ("RTX.?PRO|RTX.?50[5-9]0", NVIDIA, (12, 0)),
    ("B300#", NVIDIA, (10, 3)),
    ("B[12]00#|blackwell", NVIDIA, (10, 0)),
    ("H[128]00#|@H20#|hopper", NVIDIA, (9, 0)),
    ("@L4#|@L[24]0S?#|RTX.?40[5-9]0|@ada(?![a-z])", NVIDIA, (8, 9)),
    ("A[18]00#|@A30#|ampere", NVIDIA, (8, 0)),
    ("@A10G?#|@A16#|@A40#|@A6000|RTX.?30[5-9]0|RTX.?A[2-6]", NVIDIA, (8, 6)),
    ("@T4#|Quadro.?RTX|Titan.?RTX|RTX.?20[5-9]0|turing", NVIDIA, (7, 5)),
    ("V100#|Titan.?V|volta", NVIDIA, (7, 0)),
)


def gpu_of_name(name: str) -> NamedGpu | None:
    """Whose GPU ``name`` is and what it computes: "NVIDIA H100 80GB HBM3", "dgx_a100"; None where it says nothing."""
    for words, vendor, capability in _NAMES:
        if re.search(words.replace("@", "(?<![A-Za-z0-9])").replace("#", r"(?!\d)"), name, re.IGNORECASE):
            return NamedGpu(vendor, capability)
    return None


def generation_of(capability: Capability) -> str | None:
    """The generation of NVIDIA's GPUs of this compute capability; None for those older than Volta."""
    return next((name for name, first in reversed(GENERATIONS.items()) if capability >= first), None)


def taken_as_nvidia(what: str, generation: str) -> str:
    """The assumption under which anything is said of ``what``, a GPU or a runtime of AMD's."""
    return (
        f"{what} is AMD's: library workspaces, attention kernels and fp8 layouts are taken as on NVIDIA's "
        f"{generation.capitalize()} (Transformer Engine's ROCm fork is not modelled)"
    )
