"""The cards, one row each, oldest generation first.

To add a card, add one row here and one line in ``tests/test_cards.py``. Figures are from the makers' data sheets and
whitepapers, in their units and without sparsity. Figures that they do not state are assumed, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping

from bridge_memory.cards.generations import AMD, NVIDIA
from bridge_memory.cards.gpu import Gpu, Rates

# ---- sources shared by several cards ----

#: The "total capacity" in torch's out-of-memory messages, which is cudaGetDeviceProperties.totalGlobalMem (also with
#: ROCm): the lowest value in public reports of the card. It is 0.5 to 1 % below nvidia-smi's figure, since it excludes
#: memory that the driver reserves (H200: 143771 MiB in nvidia-smi, 139.7 GiB in torch). Drivers and ECC settings change
#: it by up to 0.3 GiB.
_TORCH = {"capacity": "torch's total_memory, the lowest in public reports of the card"}
_SMI = {"capacity": "assumed: nvidia-smi's figure less 1 %, no report of torch's being at hand"}
_SOLD = {"capacity": "assumed: the maker's figure, less what torch reports below it on the same maker's other cards"}

_CHIP = "bf16 fp32 memory multiprocessors"
_EIGHT = "bf16 fp8 fp32 memory multiprocessors"
_FOUR = "bf16 fp8 fp4 fp32 memory multiprocessors"

_ETHERNET = "assumed: 100 Gbit/s per GPU, the maker's systems do not say"
#: Cards without NVLink, or without their optional NVLink bridge, in servers of eight.
_PCIE4 = {
    "link host_link": "PCIe 4, sixteen lanes, without an NVLink bridge", "domain": "assumed: servers of eight",
    "network": _ETHERNET, "host_memory": "assumed: as in a DGX A100, DDR4-3200 of both processors over eight GPUs",
}  # fmt: skip
_PCIE5 = {
    "link host_link": "PCIe 5, sixteen lanes, without an NVLink bridge", "domain": "assumed: servers of eight",
    "network": _ETHERNET, "host_memory": "assumed: as in a DGX H100, DDR5-4800 of both processors over eight GPUs",
}  # fmt: skip
_DGX_1 = {
    "domain host_link": "NVIDIA DGX-1, eight V100 on PCIe 3",
    "network": "assumed: 400 Gbit/s as for later cards with NVLink; a DGX-1 has four adapters of 100 for eight GPUs",
    "host_memory": "NVIDIA DGX-1, DDR4-2400 of both processors over eight GPUs",
}  # fmt: skip
_DGX_A100 = {
    "domain network host_link": "NVIDIA DGX A100: eight GPUs, PCIe 4, eight adapters of 200 Gbit/s",
    "host_memory": "NVIDIA DGX A100, DDR4-3200 of both processors over eight GPUs",
}  # fmt: skip
_DGX_H100 = {
    "domain network host_link": "NVIDIA DGX H100: eight GPUs, PCIe 5, eight adapters of 400 Gbit/s",
    "host_memory": "NVIDIA DGX H100, DDR5-4800 of both processors over eight GPUs",
}  # fmt: skip
_AS_DGX_H100 = {
    "domain network host_link": "assumed: HGX systems of eight with eight adapters of 400 Gbit/s, as DGX H100",
    "host_memory": "assumed: as in a DGX H100, DDR5-4800 of both processors over eight GPUs",
}  # fmt: skip
_GRACE_HOPPER = {
    "link": "NVIDIA GH200 data sheet, NVLink 4", "host_link": "NVIDIA GH200 data sheet, NVLink-C2C, half of 900 GB/s",
    "domain": "assumed: nodes of four superchips, each linked to each (NVIDIA Quad GH200)",
    "network": "assumed: one adapter of 400 Gbit/s a superchip", "host_memory": "NVIDIA GH200 data sheet, LPDDR5X",
}  # fmt: skip
_HGX_BLACKWELL = {
    "domain network": "NVIDIA DGX B200: eight GPUs, eight adapters of 400 Gbit/s", "host_link": "PCIe 5, sixteen lanes",
    "host_memory": "NVIDIA DGX B200, DDR5-5600 of both processors over eight GPUs",
}  # fmt: skip
_GRACE_BLACKWELL = {
    "host_link": "half of a Grace's NVLink-C2C of 900 GB/s, each way",
    "host_memory": "half of a Grace's LPDDR5X of 512 GB/s",
}  # fmt: skip
_MI300 = {
    "domain": "AMD Instinct platform of eight", "host_link": "PCIe 5, sixteen lanes",
    "network": "assumed: an adapter of 400 Gbit/s per GPU, the data sheet does not say",
    "host_memory": "assumed: two EPYC 9004, DDR5-4800 of both over eight GPUs",
}  # fmt: skip


def _sheet(figures: str, source: str, *others: Mapping[str, str]) -> dict[str, str]:
    """Sources of a row: ``source`` for ``figures``, and the entries of ``others``."""
    return {figures: source, **{names: text for other in others for names, text in other.items()}}


def _gib(size: float) -> int:
    return int(size * (1 << 30))


# ---- the cards ----

_CARDS = (
    Gpu(
        "V100-16GB", "NVIDIA V100 16GB", NVIDIA, (7, 0), _gib(15.77), 80,
        Rates(bf16=125, fp32=15.7, memory=900, link=150, domain=8, network=50, host_link=16, host_memory=19),
        aliases=("V100 SXM2 16GB", "V100 PCIe 16GB"),
        sources=_sheet(f"{_CHIP} link", "NVIDIA V100 data sheet (SXM2)", _TORCH, _DGX_1),
    ),
    Gpu(
        "V100-32GB", "NVIDIA V100 32GB", NVIDIA, (7, 0), _gib(31.73), 80,
        Rates(bf16=125, fp32=15.7, memory=900, link=150, domain=8, network=50, host_link=16, host_memory=19),
        aliases=("V100 SXM2 32GB", "V100 SXM3 32GB", "V100 PCIe 32GB"), typical=True,
        sources=_sheet(f"{_CHIP} link", "NVIDIA V100 data sheet (SXM2)", _TORCH, _DGX_1),
    ),
    Gpu(
        "T4", "NVIDIA T4 16GB", NVIDIA, (7, 5), _gib(14.56), 40,
        Rates(bf16=65, fp32=8.1, memory=320, link=16, domain=8, network=12.5, host_link=16, host_memory=19),
        typical=True, sources=_sheet(_CHIP, "NVIDIA T4 data sheet", _TORCH, {
            "link host_link": "NVIDIA T4 data sheet, PCIe 3, sixteen lanes", "domain": "assumed: servers of eight",
            "network": _ETHERNET, "host_memory": "assumed: as in a DGX-1, DDR4-2400 of both processors over eight GPUs",
        }),
    ),
    Gpu(
        "A10", "NVIDIA A10 24GB", NVIDIA, (8, 6), _gib(22.06), 72,
        Rates(bf16=125, fp32=31.2, memory=600, link=32, domain=8, network=12.5, host_link=32, host_memory=51),
        sources=_sheet(_CHIP, "NVIDIA A10 data sheet", _TORCH, _PCIE4),
    ),
    Gpu(
        "A30", "NVIDIA A30 24GB", NVIDIA, (8, 0), _gib(23.50), 56,
        Rates(bf16=165, fp32=10.3, memory=933, link=32, domain=8, network=12.5, host_link=32, host_memory=51),
        sources=_sheet(_CHIP, "NVIDIA A30 data sheet", _TORCH, _PCIE4),
    ),
    Gpu(
        "A40", "NVIDIA A40 48GB", NVIDIA, (8, 6), _gib(44.34), 84,
        Rates(bf16=149.7, fp32=37.4, memory=696, link=32, domain=8, network=12.5, host_link=32, host_memory=51),
        sources=_sheet(_CHIP, "NVIDIA A40 data sheet", _TORCH, _PCIE4),
    ),
    Gpu(
        "A6000", "NVIDIA RTX A6000 48GB", NVIDIA, (8, 6), _gib(47.40), 84,
        Rates(bf16=154.8, fp32=38.7, memory=768, link=32, domain=8, network=12.5, host_link=32, host_memory=51),
        aliases=("RTX A6000", "A6000 48GB"), sources=_sheet(_CHIP, "NVIDIA RTX A6000 data sheet", _TORCH, _PCIE4),
    ),
    Gpu(
        "A100-40GB", "NVIDIA A100 40GB (SXM, PCIe)", NVIDIA, (8, 0), _gib(39.39), 108,
        Rates(bf16=312, fp32=19.5, memory=1555, link=300, domain=8, network=25, host_link=32, host_memory=51),
        aliases=("A100 SXM 40GB", "A100 SXM4 40GB", "A100 PCIe 40GB"), common=True,
        sources=_sheet(f"{_CHIP} link", "NVIDIA A100 data sheet (SXM4)", _TORCH, _DGX_A100),
    ),
    Gpu(
        "A100-80GB", "NVIDIA A100 80GB (SXM, PCIe)", NVIDIA, (8, 0), _gib(79.15), 108,
        Rates(bf16=312, fp32=19.5, memory=2039, link=300, domain=8, network=25, host_link=32, host_memory=51),
        aliases=("A100 SXM 80GB", "A100 SXM4 80GB", "A100 PCIe 80GB", "A100 80GB PCIe"), common=True, typical=True,
        sources=_sheet(f"{_CHIP} link", "NVIDIA A100 data sheet (SXM4)", _TORCH, _DGX_A100),
    ),
    Gpu(
        "A800", "NVIDIA A800 80GB", NVIDIA, (8, 0), _gib(79.15), 108,
        Rates(bf16=312, fp32=19.5, memory=2039, link=200, domain=8, network=25, host_link=32, host_memory=51),
        aliases=("A800 80GB", "A800 SXM4 80GB", "A800 80GB PCIe"),
        sources=_sheet(f"{_CHIP} link", "NVIDIA A800: A100 with NVLink of 400 GB/s", _TORCH, _DGX_A100),
    ),
    Gpu(
        "RTX-3090", "NVIDIA GeForce RTX 3090 24GB", NVIDIA, (8, 6), _gib(23.68), 82,
        Rates(bf16=71, fp32=35.6, memory=936, link=32, domain=8, network=12.5, host_link=32, host_memory=51),
        aliases=("3090",), sources=_sheet(_CHIP, "NVIDIA Ampere GA102 whitepaper", _TORCH, _PCIE4),
    ),
    Gpu(
        "RTX-4090", "NVIDIA GeForce RTX 4090 24GB", NVIDIA, (8, 9), _gib(23.52), 128,
        Rates(
            bf16=165.2, fp8=330.3, fp32=82.6, memory=1008, link=32, domain=8, network=12.5, host_link=32, host_memory=51
        ),
        aliases=("4090",), sources=_sheet(_EIGHT, "NVIDIA Ada whitepaper", _TORCH, _PCIE4),
    ),
    Gpu(
        "L4", "NVIDIA L4 24GB", NVIDIA, (8, 9), _gib(22.03), 58,
        Rates(
            bf16=121, fp8=242.5, fp32=30.3, memory=300, link=32, domain=8, network=12.5, host_link=32, host_memory=51
        ),
        aliases=("L4 24GB",), sources=_sheet(_EIGHT, "NVIDIA L4 data sheet", _TORCH, _PCIE4),
    ),
    Gpu(
        "L40", "NVIDIA L40 48GB", NVIDIA, (8, 9), _gib(44.32), 142,
        Rates(bf16=181, fp8=362, fp32=90.5, memory=864, link=32, domain=8, network=12.5, host_link=32, host_memory=51),
        aliases=("L40 48GB",), sources=_sheet(_EIGHT, "NVIDIA L40 data sheet", _TORCH, _PCIE4),
    ),
    Gpu(
        "L40S", "NVIDIA L40S 48GB", NVIDIA, (8, 9), _gib(44.39), 142,
        Rates(bf16=362, fp8=733, fp32=91.6, memory=864, link=32, domain=8, network=12.5, host_link=32, host_memory=51),
        aliases=("L40S 48GB",), typical=True, sources=_sheet(_EIGHT, "NVIDIA L40S data sheet", _TORCH, _PCIE4),
    ),
    Gpu(
        "H100", "NVIDIA H100 80GB (SXM, PCIe)", NVIDIA, (9, 0), _gib(79.10), 132,
        Rates(
            bf16=989.4, fp8=1978.9, fp32=67, memory=3350, link=450, domain=8, network=50, host_link=64, host_memory=77
        ),
        aliases=("H100 80GB", "H100 80GB HBM3", "H100 SXM", "H100 SXM5", "H100 PCIe"), common=True, typical=True,
        sources=_sheet(f"{_EIGHT} link", "NVIDIA H100 data sheet (SXM5)", _TORCH, _DGX_H100),
    ),
    Gpu(
        "H100-96GB", "NVIDIA H100 96GB (SXM)", NVIDIA, (9, 0), _gib(94.50), 132,
        Rates(
            bf16=989.4, fp8=1978.9, fp32=67, memory=3350, link=450, domain=8, network=50, host_link=64, host_memory=77
        ),
        sources=_sheet(f"{_EIGHT} link", "assumed: as the H100 of 80 GB, it has no data sheet", _SMI, _AS_DGX_H100),
    ),
    Gpu(
        "H100-NVL", "NVIDIA H100 NVL 94GB", NVIDIA, (9, 0), _gib(93.01), 132,
        Rates(
            bf16=835, fp8=1670.5, fp32=60, memory=3900, link=64, domain=8, network=12.5, host_link=64, host_memory=77
        ),
        aliases=("H100 94GB",), sources=_sheet(_EIGHT, "NVIDIA H100 NVL data sheet", _TORCH, _PCIE5),
    ),
    Gpu(
        "H800", "NVIDIA H800 80GB", NVIDIA, (9, 0), _gib(79.10), 132,
        Rates(
            bf16=989.4, fp8=1978.9, fp32=67, memory=3350, link=200, domain=8, network=50, host_link=64, host_memory=77
        ),
        aliases=("H800 80GB",),
        sources=_sheet(f"{_EIGHT} link", "NVIDIA H800: H100 with NVLink of 400 GB/s", _TORCH, _AS_DGX_H100),
    ),
    Gpu(
        "H20", "NVIDIA H20 96GB", NVIDIA, (9, 0), _gib(95.00), 78,
        Rates(bf16=148, fp8=296, fp32=44, memory=4000, link=450, domain=8, network=50, host_link=64, host_memory=77),
        aliases=("H20 96GB",), sources=_sheet(f"{_EIGHT} link", "NVIDIA H20 data sheet", _TORCH, _AS_DGX_H100),
    ),
    Gpu(
        "H20-141GB", "NVIDIA H20 141GB", NVIDIA, (9, 0), _gib(139.71), 78,
        Rates(bf16=148, fp8=296, fp32=44, memory=4800, link=450, domain=8, network=50, host_link=64, host_memory=77),
        sources=_sheet("bf16 fp8 fp32 multiprocessors link", "NVIDIA H20 data sheet", _AS_DGX_H100, {
            "capacity memory": "assumed: the H200's memory, of the same size and kind; this H20 has no data sheet",
        }),
    ),
    Gpu(
        "H200", "NVIDIA H200 141GB (SXM, NVL)", NVIDIA, (9, 0), _gib(139.71), 132,
        Rates(
            bf16=989.4, fp8=1978.9, fp32=67, memory=4800, link=450, domain=8, network=50, host_link=64, host_memory=77
        ),
        aliases=("H200 141GB", "H200 SXM", "H200 NVL"), common=True,
        sources=_sheet(f"{_EIGHT} link", "NVIDIA H200 data sheet (SXM5)", _TORCH, _DGX_H100),
    ),
    Gpu(
        "GH200-96GB", "NVIDIA GH200 96GB", NVIDIA, (9, 0), _gib(94.50), 132,
        Rates(
            bf16=989.4, fp8=1978.9, fp32=67, memory=4000, link=450, domain=4, network=50, host_link=450, host_memory=512
        ),
        aliases=("GH200 95GB",), sources=_sheet(_EIGHT, "NVIDIA GH200 data sheet (HBM3)", _TORCH, _GRACE_HOPPER),
    ),
    Gpu(
        "GH200-144GB", "NVIDIA GH200 144GB", NVIDIA, (9, 0), _gib(139.00), 132,
        Rates(
            bf16=989.4, fp8=1978.9, fp32=67, memory=4900, link=450, domain=4, network=50, host_link=450, host_memory=512
        ),
        sources=_sheet(_EIGHT, "NVIDIA GH200 data sheet (HBM3e)", _SMI, _GRACE_HOPPER),
    ),
    Gpu(
        "RTX-5090", "NVIDIA GeForce RTX 5090 32GB", NVIDIA, (12, 0), _gib(31.34), 170,
        Rates(
            bf16=209.5, fp8=419, fp4=1676, fp32=104.8, memory=1792, link=64, domain=8, network=12.5, host_link=64,
            host_memory=77,
        ),
        aliases=("5090",), sources=_sheet(_FOUR, "NVIDIA RTX Blackwell whitepaper", _TORCH, _PCIE5),
    ),
    Gpu(
        "RTX-PRO-6000", "NVIDIA RTX PRO 6000 Blackwell 96GB", NVIDIA, (12, 0), _gib(94.90), 188,
        Rates(
            bf16=503.8, fp8=1007.6, fp4=2015.2, fp32=125, memory=1792, link=64, domain=8, network=12.5, host_link=64,
            host_memory=77,
        ),
        aliases=(
            "RTX PRO 6000 Blackwell", "RTX PRO 6000 Blackwell Server Edition",
            "RTX PRO 6000 Blackwell Workstation Edition",
        ),
        sources=_sheet(_FOUR, "NVIDIA RTX Blackwell PRO whitepaper (Workstation Edition)", _TORCH, _PCIE5),
    ),
    Gpu(
        "B200", "NVIDIA B200 180GB", NVIDIA, (10, 0), _gib(178.35), 148,
        Rates(
            bf16=2250, fp8=4500, fp4=9000, fp32=75, memory=7700, link=900, domain=8, network=50, host_link=64,
            host_memory=90,
        ),
        aliases=("B200 180GB", "B200 192GB"), common=True, typical=True,
        sources=_sheet(f"{_FOUR} link", "NVIDIA HGX B200 data sheet, an eighth of it", _TORCH, _HGX_BLACKWELL),
    ),
    Gpu(
        "GB200", "NVIDIA GB200, one GPU of 186GB", NVIDIA, (10, 0), _gib(184.29), 148,
        Rates(
            bf16=2500, fp8=5000, fp4=10000, fp32=80, memory=8000, link=900, domain=72, network=50, host_link=225,
            host_memory=256,
        ),
        aliases=("GB200 186GB", "GB200 192GB"), common=True,
        sources=_sheet(
            f"{_FOUR} link domain", "NVIDIA GB200 NVL72 data sheet, a 72nd of it", _TORCH, _GRACE_BLACKWELL,
            {"network": "NVIDIA GB200 NVL72: 400 Gbit/s per GPU"},
        ),
    ),
    Gpu(
        "B300", "NVIDIA B300 288GB", NVIDIA, (10, 3), _gib(267.60), 160,
        Rates(
            bf16=2250, fp8=4500, fp4=13500, fp32=75, memory=7700, link=900, domain=8, network=100, host_link=64,
            host_memory=90,
        ),
        aliases=("B300 288GB", "B300 SXM6 AC"), common=True,
        sources=_sheet(f"{_FOUR} link domain", "NVIDIA HGX B300 data sheet, an eighth of it", _TORCH, {
            "network": "NVIDIA HGX B300 data sheet, 800 Gbit/s per GPU",
            "host_link": "assumed: PCIe 5 of the processors of DGX B300",
            "host_memory": "assumed: as in a DGX B200, DDR5-5600 of both processors over eight GPUs",
        }),
    ),
    Gpu(
        "GB300", "NVIDIA GB300, one GPU of 288GB", NVIDIA, (10, 3), _gib(274.80), 160,
        Rates(
            bf16=2500, fp8=5000, fp4=15000, fp32=80, memory=8000, link=900, domain=72, network=100, host_link=225,
            host_memory=256,
        ),
        aliases=("GB300 288GB",),
        sources=_sheet(
            f"{_FOUR} link domain", "NVIDIA GB300 NVL72 data sheet, a 72nd of it", _SMI, _GRACE_BLACKWELL,
            {"network": "NVIDIA GB300 NVL72: 800 Gbit/s per GPU"},
        ),
    ),
    Gpu(
        "MI250X", "AMD MI250X, one GCD of 64GB", AMD, (9, 0), _gib(63.98), 110,
        Rates(
            bf16=191.5, fp32=47.85, memory=1638.4, link=200, domain=8, network=12.5, host_link=32, host_memory=25.6
        ),
        aliases=("MI250",),
        sources=_sheet(_CHIP, "AMD Instinct MI250X data sheet, half of it (fp32: matrix)", _TORCH, {
            "link": "AMD Instinct MI250X data sheet: eight links of 50 GB/s for both GCDs",
            "host_link": "AMD Instinct MI250X data sheet, PCIe 4, sixteen lanes",
            "domain": "assumed: nodes of four cards, as in Frontier",
            "network": "assumed: four adapters of 200 Gbit/s for eight GCDs, as in Frontier",
            "host_memory": "assumed: one EPYC of eight channels of DDR4-3200 for eight GCDs, as in Frontier",
        }),
    ),
    Gpu(
        "MI300X", "AMD MI300X 192GB", AMD, (9, 4), _gib(191.69), 304,
        Rates(
            bf16=1307.4, fp8=2614.9, fp32=163.4, memory=5300, link=448, domain=8, network=50, host_link=64,
            host_memory=115,
        ),
        aliases=("MI300X 192GB",),
        sources=_sheet(f"{_EIGHT} link", "AMD Instinct MI300X data sheet; seven links of 64 GB/s", _TORCH, _MI300),
    ),
    Gpu(
        "MI325X", "AMD MI325X 256GB", AMD, (9, 4), _gib(255.69), 304,
        Rates(
            bf16=1307.4, fp8=2614.9, fp32=163.4, memory=6000, link=448, domain=8, network=50, host_link=64,
            host_memory=115,
        ),
        aliases=("MI325X 256GB",),
        sources=_sheet(f"{_EIGHT} link", "AMD Instinct MI325X data sheet; seven links of 64 GB/s", _TORCH, _MI300),
    ),
    Gpu(
        "MI355X", "AMD MI355X 288GB", AMD, (9, 5), _gib(287.69), 256,
        Rates(
            bf16=2516.6, fp8=5033.2, fp4=10066.3, fp32=157.3, memory=8000, link=537.6, domain=8, network=50,
            host_link=64, host_memory=115,
        ),
        aliases=("MI355X 288GB",),
        sources=_sheet(f"{_FOUR} link", "AMD Instinct MI355X data sheet; seven links of 76.8 GB/s", _SOLD, _MI300),
    ),
)  # fmt: skip

#: Name -> card, oldest generation first.
GPUS = {card.name: card for card in _CARDS}

#: NVIDIA generation -> streaming multiprocessors of its typical card.
MULTIPROCESSORS = {card.generation: card.multiprocessors for card in _CARDS if card.typical}


def common_gpus() -> tuple[Gpu, ...]:
    """The cards that most training clusters have, smallest first."""
    return tuple(sorted((gpu for gpu in _CARDS if gpu.common), key=lambda gpu: gpu.capacity_bytes))
