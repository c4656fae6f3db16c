"""What a GPU and its machine can do at most, as the time models take it: the rates of its card, in plain units.

What a run reaches of them is in ``constants``.
"""

from __future__ import annotations

from typing import NamedTuple

from bridge_memory.cards.gpu import Gpu, Rates
from bridge_memory.cards.rows import GPUS
from bridge_memory.spec import SpecError

_TERA = 1e12
_GIGA = 1e9


class Hardware(NamedTuple):
    """One kind of GPU, as it usually stands in a cluster."""

    name: str
    #: ``generations.GENERATIONS`` or ``AMD_GENERATIONS``.
    generation: str
    #: Floating-point operations a second of 16-bit matrix products, of 8-bit and 4-bit ones (0 where there are none),
    #: and of fp32 ones without TF32.
    flops: float
    fp8_flops: float
    fp4_flops: float
    fp32_flops: float
    #: Bytes a second from its own memory.
    memory: float
    #: Bytes a second to another GPU of the domain, each way.
    nvlink: float
    #: GPUs that reach each other by it.
    domain: int
    #: Bytes a second of one GPU's share of the network, each way.
    network: float
    #: Bytes a second to host memory each way, and of a GPU's share of host memory.
    host_link: float
    host_memory: float
    #: Streaming multiprocessors (AMD: compute units), each of which works on one tile of a product at a time.
    processors: int
    #: Blackwell Ultra: B300 and GB300, of compute capability 10.3.
    ultra: bool = False


def _hardware(gpu: Gpu, r: Rates) -> Hardware:
    assert gpu.generation is not None, gpu.name
    return Hardware(
        gpu.name, gpu.generation, r.bf16 * _TERA, r.fp8 * _TERA, r.fp4 * _TERA, r.fp32 * _TERA, r.memory * _GIGA,
        r.link * _GIGA, r.domain, r.network * _GIGA, r.host_link * _GIGA, r.host_memory * _GIGA, gpu.multiprocessors,
        gpu.capability == (10, 3),
    )  # fmt: skip


#: By the names of cards.
HARDWARE = {name: _hardware(gpu, gpu.rates) for name, gpu in GPUS.items() if gpu.rates is not None}


def hardware_of(name: str) -> Hardware:
    """The hardware of the card called ``name``. Raises SpecError."""
    found = HARDWARE.get(name)
    if found is None:
        raise SpecError(f"hardware ({name}) has no figures here; give one of {', '.join(HARDWARE)}")
    return found
