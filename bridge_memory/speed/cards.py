"""Cards on which people fine-tune under engines outside of megatron-core, beside those of ``hardware``; and what these
engines ask of a card that Megatron's time model does not: the rate of fp32 products, and the way to host memory.

Figures are the makers' (data sheets and whitepapers of Ampere, Ada and Blackwell): dense 16-bit products that are
summed in fp32, the memory's bandwidth, streaming multiprocessors.
"""

from __future__ import annotations

from bridge_memory.spec import SpecError
from bridge_memory.speed.hardware import HARDWARE, Hardware

#: Bytes a second each way: PCIe 4 and 5, sixteen lanes.
_GEN4, _GEN5 = 32e9, 64e9
#: Of one GPU's share of the network where the maker's systems do not say: assumed, 100 Gbit/s.
_ETHERNET = 12.5e9
_GIGA = 1e9

#: Name -> (16-bit TFLOP/s, fp32 TFLOP/s, GB/s of its memory, bytes a second to another GPU, multiprocessors, source).
_CARDS = {
    "V100-16GB": (125, 15.7, 900, 150 * _GIGA, 80, "NVIDIA V100 data sheet (SXM2)"),
    "V100-32GB": (125, 15.7, 900, 150 * _GIGA, 80, "NVIDIA V100 data sheet (SXM2)"),
    "A10": (125, 31.2, 600, _GEN4, 72, "NVIDIA A10 data sheet"),
    "A30": (165, 10.3, 933, _GEN4, 56, "NVIDIA A30 data sheet, without its NVLink bridge"),
    "A40": (149.7, 37.4, 696, _GEN4, 84, "NVIDIA A40 data sheet, without its NVLink bridge"),
    "A6000": (154.8, 38.7, 768, _GEN4, 84, "NVIDIA RTX A6000 data sheet, without its NVLink bridge"),
    "RTX-3090": (71, 35.6, 936, _GEN4, 82, "NVIDIA Ampere GA102 whitepaper"),
    "RTX-4090": (165.2, 82.6, 1008, _GEN4, 128, "NVIDIA Ada whitepaper"),
    "L4": (121, 30.3, 300, _GEN4, 58, "NVIDIA L4 data sheet"),
    "L40": (181, 90.5, 864, _GEN4, 142, "NVIDIA L40 data sheet"),
    "L40S": (362, 91.6, 864, _GEN4, 142, "NVIDIA L40S data sheet"),
    "RTX-5090": (209.5, 104.8, 1792, _GEN5, 170, "NVIDIA RTX Blackwell whitepaper"),
    "H100-96GB": (989.4, 67, 3350, 450 * _GIGA, 132, "as the H100 of 80 GB"),
    "H100-NVL": (835, 60, 3900, _GEN5, 132, "NVIDIA H100 NVL data sheet, without its NVLink bridge"),
    "H800": (989.4, 67, 3350, 200 * _GIGA, 132, "NVIDIA H800: H100 with NVLink of 400 GB/s"),
    "H20": (148, 44, 4000, 450 * _GIGA, 78, "NVIDIA H20 data sheet"),
}  # fmt: skip


def _hardware(name: str) -> Hardware:
    bf16, _, memory, neighbour, processors, source = _CARDS[name]
    network = 50e9 if neighbour > _GEN5 else _ETHERNET
    return Hardware(name, bf16 * 1e12, 0.0, memory * _GIGA, neighbour, 8, network, processors, source)


#: Cards that ``hardware.HARDWARE`` does not have, in nodes of eight.
OTHERS = {name: _hardware(name) for name in _CARDS}
#: Operations a second in fp32 without TF32, which torch leaves off (``torch.backends.cuda.matmul.allow_tf32``);
#: Blackwell's of HGX B200 and GB200 NVL72, divided.
FP32 = {
    "V100": 15.7e12, "A100-40GB": 19.5e12, "A100-80GB": 19.5e12, "A800": 19.5e12, "H100": 67e12, "H200": 67e12,
    "B200": 75e12, "GB200": 80e12, "B300": 75e12, "GB300": 80e12, "MI300X": 163.4e12,
    **{name: row[1] * 1e12 for name, row in _CARDS.items()},
}  # fmt: skip
#: (bytes a second to host memory each way, bytes a second of host memory), a GPU's share. PCIe's generation by the data
#: sheet: 3 (16 GB/s), 4 (32), 5 (64); GB200's and GB300's half of a Grace's NVLink-C2C. Host memory: channels of both
#: processors of DGX-1, DGX A100, DGX H100, DGX B200 (DDR4-2400, DDR4-3200, DDR5-4800, DDR5-5600) over eight GPUs,
#: Grace's LPDDR5X over two, two EPYC 9004 over eight; of other cards assumed as in DGX A100 or DGX H100.
HOST = {
    "V100": (16e9, 19e9), "A100-40GB": (_GEN4, 51e9), "A100-80GB": (_GEN4, 51e9), "A800": (_GEN4, 51e9),
    "H100": (_GEN5, 77e9), "H200": (_GEN5, 77e9), "B200": (_GEN5, 90e9), "GB200": (225e9, 256e9), "B300": (_GEN5, 90e9),
    "GB300": (225e9, 256e9), "MI300X": (_GEN5, 115e9), "V100-16GB": (16e9, 19e9), "V100-32GB": (16e9, 19e9),
    **{name: (_GEN5, 77e9) for name in ("H100-96GB", "H100-NVL", "H800", "H20", "RTX-5090")},
    **{name: (_GEN4, 51e9) for name in ("A10", "A30", "A40", "A6000", "RTX-3090", "RTX-4090", "L4", "L40", "L40S")},
}  # fmt: skip


def card_of(name: str) -> Hardware | None:
    """The figures of a card by its name in ``report.gpus``; None where there are none."""
    return HARDWARE.get(name) or OTHERS.get(name)


def known_card(name: str) -> Hardware:
    """The same. Raises SpecError where there are none."""
    found = card_of(name)
    if found is None:
        raise SpecError(f"hardware ({name}) has no figures here; give one of {', '.join((*HARDWARE, *OTHERS))}")
    return found
