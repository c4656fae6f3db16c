"""The record of one GPU model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bridge_memory.cards.generations import NVIDIA, Capability, generation_of


class Rates(NamedTuple):
    """Peak rates of a GPU and its machine, in the units of data sheets. Links are unidirectional."""

    #: TFLOP/s of dense bf16 matrix products (V100, T4: fp16) with fp32 accumulation.
    bf16: float
    #: TFLOP/s of dense fp32 matrix products without TF32, torch's default (``torch.backends.cuda.matmul.allow_tf32``).
    fp32: float
    #: GB/s of GPU memory.
    memory: float
    #: GB/s to the other GPUs of its domain, over NVLink, xGMI or PCIe.
    link: float
    #: Number of GPUs in a domain.
    domain: int
    #: GB/s of network bandwidth per GPU.
    network: float
    #: GB/s to host memory, and GB/s of host memory bandwidth per GPU.
    host_link: float
    host_memory: float
    #: TFLOP/s of dense fp8 and fp4 matrix products; 0: not supported.
    fp8: float = 0.0
    fp4: float = 0.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU model.

    Example:
        >>> from bridge_memory import find_gpu
        >>> 79 * 2**30 < find_gpu("H100").capacity_bytes < 80 * 2**30
        True
    """

    name: str
    description: str
    vendor: str
    capability: Capability
    #: torch's total_memory (``torch.cuda.get_device_properties``).
    capacity_bytes: int
    #: Streaming multiprocessors; for AMD compute units.
    multiprocessors: int = 0
    #: None: only its memory is known.
    rates: Rates | None = None
    #: Alternative names that people type.
    aliases: tuple[str, ...] = ()
    #: Whether it is shown with an estimate for which no GPU was named.
    common: bool = False
    #: Whether it represents its generation when no card is named: the generation's largest for training.
    typical: bool = False
    #: Space-separated names of figures -> the maker's document that states them, or "assumed: " and the reason. See
    #: ``source_of``.
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def generation(self) -> str | None:
        """One of ``GENERATIONS`` or ``AMD_GENERATIONS``."""
        return generation_of(self.capability, self.vendor)

    @property
    def arch(self) -> str | None:
        """The value of ``ImplementationSpec.gpu_arch`` whose workspace rules apply; None: no such rules (AMD)."""
        return self.generation if self.vendor == NVIDIA else None

    def figures(self) -> dict[str, float]:
        """All known figures by name: "capacity" (bytes), "multiprocessors" and the fields of ``Rates``."""
        found: dict[str, float] = {"capacity": self.capacity_bytes, "multiprocessors": self.multiprocessors}
        if self.rates is not None:
            found |= self.rates._asdict()
        return {name: value for name, value in found.items() if value}

    def source_of(self, figure: str) -> str:
        """The source of ``figure``; "" if the figure is unknown."""
        return next((text for names, text in self.sources.items() if figure in names.split()), "")


def capability_words(gpu: Gpu) -> str:
    """Compute capability as text: "9.0"."""
    return f"{gpu.capability[0]}.{gpu.capability[1]}"
