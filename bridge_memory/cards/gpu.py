"""What is known of one kind of GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bridge_memory.cards.generations import NVIDIA, Capability, generation_of


class Rates(NamedTuple):
    """What a GPU and its machine can do at most, in the units of data sheets. Links are counted in one direction."""

    #: TFLOP/s of dense matrix products of bf16 (V100, T4: fp16) that are summed in fp32.
    bf16: float
    #: The same of fp32 without TF32, which torch leaves off (``torch.backends.cuda.matmul.allow_tf32``).
    fp32: float
    #: GB/s from its own memory.
    memory: float
    #: GB/s to the other GPUs of its domain, by NVLink, xGMI or PCIe.
    link: float
    #: GPUs that reach each other by it.
    domain: int
    #: GB/s of one GPU's share of the network.
    network: float
    #: GB/s to host memory, and of a GPU's share of host memory.
    host_link: float
    host_memory: float
    #: TFLOP/s of dense products of fp8 and fp4; 0 where the GPU has none.
    fp8: float = 0.0
    fp4: float = 0.0


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of card.

    Example:
        >>> from bridge_memory import find_gpu
        >>> 79 * 2**30 < find_gpu("H100").capacity_bytes < 80 * 2**30
        True
    """

    name: str
    description: str
    vendor: str
    capability: Capability
    #: What torch reports as total_memory.
    capacity_bytes: int
    #: Streaming multiprocessors, AMD's compute units.
    multiprocessors: int = 0
    #: None of a card of which the memory alone is known.
    rates: Rates | None = None
    #: Other names than ``name``, as people type them.
    aliases: tuple[str, ...] = ()
    #: Shown with an estimate when no GPU is asked for.
    common: bool = False
    #: Whether it stands for its generation where no card is named: the largest of it for training.
    typical: bool = False
    #: Names of figures with spaces between -> the maker's document that states them, or "assumed: " and the reason. See
    #: ``source_of``.
    sources: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)

    @property
    def generation(self) -> str | None:
        """One of ``GENERATIONS`` or ``AMD_GENERATIONS``."""
        return generation_of(self.capability, self.vendor)

    @property
    def arch(self) -> str | None:
        """Whose workspace rules apply, a value of ``ImplementationSpec.gpu_arch``; None for those of nobody here."""
        return self.generation if self.vendor == NVIDIA else None

    def figures(self) -> dict[str, float]:
        """Every figure that is known, by name: "capacity", "multiprocessors" and the fields of ``Rates``."""
        found: dict[str, float] = {"capacity": self.capacity_bytes, "multiprocessors": self.multiprocessors}
        if self.rates is not None:
            found |= self.rates._asdict()
        return {name: value for name, value in found.items() if value}

    def source_of(self, figure: str) -> str:
        """Where ``figure`` is from; "" for one that is not known."""
        return next((text for names, text in self.sources.items() if figure in names.split()), "")


def capability_words(gpu: Gpu) -> str:
    """Compute capability as people write it: "9.0"."""
    return f"{gpu.capability[0]}.{gpu.capability[1]}"
