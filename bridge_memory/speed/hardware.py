"""What a GPU and its network can do at most, from the makers' data sheets.

Peak rates are dense (without sparsity). Bandwidths are bytes/s in one direction. What a run reaches of them is in
``constants``.
"""

from __future__ import annotations

from typing import NamedTuple

from bridge_memory.spec import SpecError
from bridge_memory.spec.gpu_names import gpu_of_name

_TERA = 1e12
_GIGA = 1e9


class Hardware(NamedTuple):
    """One kind of GPU, as it usually stands in a cluster."""

    name: str
    #: Floating-point operations a second of 16-bit matrix products, and of 8-bit ones (0 where there are none).
    flops: float
    fp8_flops: float
    #: Bytes a second from its own memory.
    memory: float
    #: Bytes a second to another GPU of the domain, each way.
    nvlink: float
    #: GPUs that reach each other by it.
    domain: int
    #: Bytes a second of one GPU's share of the network, each way.
    network: float
    #: Streaming multiprocessors (AMD: compute units), each of which works on one tile of a product at a time.
    processors: int
    source: str

    @property
    def generation(self) -> str:
        """``gpu_names.GENERATIONS``, or AMD's name for it."""
        known = gpu_of_name(self.name)
        return (known.generation if known else None) or "cdna3"


#: The makers' architecture whitepapers: "SMs per GPU" as sold (AMD: compute units of the MI300X).
_PROCESSORS = {
    "V100": 80, "A100-40GB": 108, "A100-80GB": 108, "A800": 108, "H100": 132, "H200": 132, "B200": 148, "GB200": 148,
    "B300": 160, "GB300": 160, "MI300X": 304,
}  # fmt: skip


def _of(
    name: str, bf16: float, fp8: float, memory: float, nvlink: float, domain: int, network: float, source: str
) -> Hardware:
    return Hardware(
        name, bf16 * _TERA, fp8 * _TERA, memory * _GIGA, nvlink * _GIGA, domain, network * _GIGA, _PROCESSORS[name],
        source,
    )


#: Bytes a second on the wire: 400 Gbit/s a GPU in DGX and HGX systems since H100, 200 in those of A100.
_NDR, _HDR = 50.0, 25.0

#: TFLOP/s, TFLOP/s, GB/s, GB/s, GPUs, GB/s.
HARDWARE = {
    h.name: h
    for h in (
        _of("V100", 125, 0, 900, 150, 8, 12.5, "NVIDIA V100 datasheet (SXM2); DGX-1: four of 100 Gbit/s"),
        _of("A100-40GB", 312, 0, 1555, 300, 8, _HDR, "NVIDIA A100 datasheet (SXM4); DGX A100: eight of 200 Gbit/s"),
        _of("A100-80GB", 312, 0, 2039, 300, 8, _HDR, "NVIDIA A100 datasheet (SXM4); DGX A100: eight of 200 Gbit/s"),
        _of("A800", 312, 0, 2039, 200, 8, _HDR, "NVIDIA A800: A100 with NVLink of 400 GB/s"),
        _of("H100", 989.4, 1978.9, 3350, 450, 8, _NDR, "NVIDIA H100 datasheet (SXM5); DGX H100: eight of 400 Gbit/s"),
        _of("H200", 989.4, 1978.9, 4800, 450, 8, _NDR, "NVIDIA H200 datasheet (SXM5)"),
        _of("B200", 2250, 4500, 7700, 900, 8, _NDR, "NVIDIA HGX B200 datasheet, an eighth of it"),
        _of("GB200", 2500, 5000, 8000, 900, 72, _NDR, "NVIDIA GB200 NVL72 datasheet, a 72nd of it"),
        _of("B300", 2250, 4500, 7700, 900, 8, 2 * _NDR, "NVIDIA HGX B300 datasheet, an eighth of it; 800 Gbit/s a GPU"),
        _of("GB300", 2500, 5000, 8000, 900, 72, 2 * _NDR, "NVIDIA GB300 NVL72 datasheet, a 72nd; 800 Gbit/s a GPU"),
        _of("MI300X", 1307.4, 2614.9, 5300, 448, 8, _NDR, "AMD Instinct MI300X datasheet; seven links of 64 GB/s"),
    )
}  # fmt: skip


def hardware_of(name: str) -> Hardware:
    """The hardware called ``name``. Raises SpecError."""
    found = HARDWARE.get(name)
    if found is None:
        raise SpecError(f"hardware ({name}) has no figures here; give one of {', '.join(HARDWARE)}")
    return found
