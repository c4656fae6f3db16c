"""GPUs and what fits on them: usable memory, the margin a run needs beyond its peak, the headroom left.

The peak of an ``Estimate`` is what torch's allocator hands out. A card must hold more than that: the driver's
context and NCCL's buffers lie outside the allocator, and the allocator itself reserves more than it hands out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

from bridge_memory.evidence import evidence_of
from bridge_memory.report.units import format_bytes
from bridge_memory.result import StagePeak
from bridge_memory.spec import PrecisionSpec, RunSpec, SpecError
from bridge_memory.spec.errors import show
from bridge_memory.spec.gpu_names import AMD, gpu_of_name, taken_as_nvidia
from bridge_memory.spec.unmodelled import Bounds, bounds
from bridge_memory.workspaces.driver import driver_buffers, driver_bytes

if TYPE_CHECKING:
    from bridge_memory.estimation import Estimate

GIB = 1 << 30

#: CUDA context with the kernels of torch, cuBLAS, cuDNN and Transformer Engine loaded, bytes. Assumed: nvidia-smi
#: shows 0.5 to 0.6 GiB for a process that has run such kernels on A100 and H100.
CONTEXT_BYTES = 600 << 20
#: NCCL's buffers, bytes; nothing on one GPU. Assumed: a channel holds some 10 MiB (NCCL's default buffers: 4 MiB of
#: the Simple protocol, and those of LL and LL128), a communicator up to 32 channels, and a Megatron job has a
#: handful of them (tensor, pipeline, context, expert, data parallel), most with few channels.
NCCL_BYTES = 1434 << 20
#: max_reserved over max_allocated, minus one: the 90th percentile of the 80 ranks in 10 runs on B200 (SimuMax's
#: published measurements, tests/data/measurements/runs.jsonl; median 3.8 %, worst 9.3 %).
FRAGMENTATION = 0.073


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of card. ``capacity_bytes`` is what torch reports as total_memory; see ``_CARDS``."""

    name: str
    description: str
    capacity_bytes: int
    #: ``gpu_names.NVIDIA`` or ``AMD``.
    vendor: str
    #: Whose workspace rules apply, a value of ``ImplementationSpec.gpu_arch``; None for AMD's, which have none here.
    arch: str | None
    #: What ``torch.cuda.get_device_capability`` reports.
    capability: tuple[int, int]
    #: Shown with an estimate when no GPU is asked for.
    common: bool = False


class Verdict(str, Enum):
    """Whether a run fits a card. Unknown where something that is not modelled decides it; tight where it fits by less
    than predictions of measured runs of its kind were off (``evidence.Evidence.band``)."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does not fit"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Fit:
    """How one GPU takes a run: capacity = peak + margin + headroom, exactly. Bytes.

    ``peak_bytes`` is the highest peak, that of ``peak_stage``, with the workspaces, attention kernels and fp8 layouts
    of ``gpu_arch``, the card's own generation. ``fits``: the verdict is that it does, if tightly. What is not
    modelled is in the verdict and not in the headroom.
    """

    gpu: str
    gpu_arch: str
    capacity_bytes: int
    peak_stage: int
    peak_bytes: int
    margin_bytes: int
    headroom_bytes: int
    fits: bool
    #: What the run needs and the card has not, such as "mxfp8"; then it never fits, and its numbers are those of the
    #: estimate's generation.
    lacks: str = ""
    verdict: Verdict = Verdict.UNKNOWN


def _gpu(name: str, description: str, gib: float, common: bool = False) -> Gpu:
    known = gpu_of_name(name)
    assert known is not None, name
    return Gpu(name, description, int(gib * GIB), known.vendor, known.generation, known.capability, common)


# Usable memory in GiB: the "total capacity" of torch's own out-of-memory messages, that is
# cudaGetDeviceProperties.totalGlobalMem (ROCm: the same), the lowest value seen in public reports of the card.
# It is 0.5 to 1 % below what nvidia-smi shows, which leaves out what the driver keeps for itself (H200: 143771 MiB
# in nvidia-smi, 139.7 GiB in torch). Drivers and ECC settings move it by up to 0.3 GiB. "(*)": no such report
# at hand, nvidia-smi's or the vendor's figure less 1 %.
_CARDS = (
    _gpu("V100-16GB", "NVIDIA V100 16GB", 15.77),
    _gpu("V100-32GB", "NVIDIA V100 32GB", 31.73),
    _gpu("T4", "NVIDIA T4 16GB", 14.56),
    _gpu("A10", "NVIDIA A10 24GB", 22.06),
    _gpu("A30", "NVIDIA A30 24GB", 23.50),
    _gpu("A40", "NVIDIA A40 48GB", 44.34),
    _gpu("A6000", "NVIDIA RTX A6000 48GB", 47.40),
    _gpu("A100-40GB", "NVIDIA A100 40GB (SXM, PCIe)", 39.39, True),
    _gpu("A100-80GB", "NVIDIA A100 80GB (SXM, PCIe)", 79.15, True),
    _gpu("A800", "NVIDIA A800 80GB", 79.15),
    _gpu("RTX-3090", "NVIDIA GeForce RTX 3090 24GB", 23.68),
    _gpu("RTX-4090", "NVIDIA GeForce RTX 4090 24GB", 23.52),
    _gpu("L4", "NVIDIA L4 24GB", 22.03),
    _gpu("L40", "NVIDIA L40 48GB", 44.32),
    _gpu("L40S", "NVIDIA L40S 48GB", 44.39),
    _gpu("H100", "NVIDIA H100 80GB (SXM, PCIe)", 79.10, True),
    _gpu("H100-96GB", "NVIDIA H100 96GB (SXM)", 94.50),  # (*) 96 GB HBM3 parts: 97871 MiB
    _gpu("H100-NVL", "NVIDIA H100 NVL 94GB", 93.01),
    _gpu("H800", "NVIDIA H800 80GB", 79.10),
    _gpu("H20", "NVIDIA H20 96GB", 95.00),
    _gpu("H20-141GB", "NVIDIA H20 141GB", 139.71),  # (*) the H200's memory
    _gpu("H200", "NVIDIA H200 141GB (SXM, NVL)", 139.71, True),
    _gpu("GH200-96GB", "NVIDIA GH200 96GB", 94.50),
    _gpu("GH200-144GB", "NVIDIA GH200 144GB", 139.00),  # (*)
    _gpu("RTX-5090", "NVIDIA GeForce RTX 5090 32GB", 31.34),
    _gpu("RTX-PRO-6000", "NVIDIA RTX PRO 6000 Blackwell 96GB", 94.90),
    _gpu("B200", "NVIDIA B200 180GB", 178.35, True),
    _gpu("GB200", "NVIDIA GB200, one GPU of 186GB", 184.29, True),
    _gpu("B300", "NVIDIA B300 288GB", 267.60, True),
    _gpu("GB300", "NVIDIA GB300, one GPU of 288GB", 274.80),  # (*) 284208 MiB
    _gpu("MI250X", "AMD MI250X, one GCD of 64GB", 63.98),
    _gpu("MI300X", "AMD MI300X 192GB", 191.69),
    _gpu("MI325X", "AMD MI325X 256GB", 255.69),
    _gpu("MI355X", "AMD MI355X 288GB", 287.69),  # (*)
)

#: Other names for a card, in normal form (see ``_key``).
_ALIASES = {
    "h10080": "H100", "h100sxm": "H100", "h100sxm5": "H100", "h100pcie": "H100", "h10094": "H100-NVL",
    "h80080": "H800", "h2096": "H20", "h200141": "H200", "h200sxm": "H200", "h200nvl": "H200",
    "a100sxm80": "A100-80GB", "a100sxm480": "A100-80GB", "a100pcie80": "A100-80GB",
    "a100sxm40": "A100-40GB", "a100sxm440": "A100-40GB", "a100pcie40": "A100-40GB", "a80080": "A800",
    "rtxa6000": "A6000", "a600048": "A6000", "l40s48": "L40S", "l4048": "L40", "l424": "L4", "3090": "RTX-3090",
    "4090": "RTX-4090", "5090": "RTX-5090", "b200180": "B200", "b200192": "B200", "b300288": "B300",
    "gb200186": "GB200", "gb200192": "GB200", "gb300288": "GB300", "mi250": "MI250X",
    "mi300x192": "MI300X", "mi325x256": "MI325X", "mi355x288": "MI355X", "rtxpro6000blackwell": "RTX-PRO-6000",
}  # fmt: skip


#: Name -> card, oldest family first.
GPUS = {card.name: card for card in _CARDS}


def common_gpus() -> tuple[Gpu, ...]:
    """The cards that most training clusters have, smallest first."""
    return tuple(sorted((g for g in _CARDS if g.common), key=lambda g: g.capacity_bytes))


def _key(name: str) -> str:
    """Case, spaces and punctuation dropped, and the vendor's name, and "GB"."""
    key = "".join(c for c in name.casefold() if c.isalnum())
    for vendor in ("nvidia", "amd", "instinct", "geforce"):
        key = key.replace(vendor, "")
    for unit in ("gib", "gb"):
        key = key.removesuffix(unit)
    return key


def find_gpu(name: str) -> Gpu:
    """The card called ``name`` ("H100", "a100-80gb", "NVIDIA H100 80GB"). Raises SpecError with close matches."""
    if not isinstance(name, str):
        raise SpecError(f"gpu ({show(name)}) is no name; `bridge-memory gpus` lists them")
    key = _key(name)
    by_key = {_key(g.name): g for g in _CARDS}
    if key in by_key:
        return by_key[key]
    if key in _ALIASES:
        return GPUS[_ALIASES[key]]
    close = [g.name for k, g in by_key.items() if key and k.startswith(key)]
    if not close:
        import difflib

        close = [by_key[k].name for k in difflib.get_close_matches(key, by_key, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(close)}?" if close else "`bridge-memory gpus` lists them"
    raise SpecError(f"gpu ({name!r}) is not one that is known here; {hint}")


#: fp8 recipe -> (lowest compute capability, the first that is too new again or None). Source: TE
#: ``quantization.py: check_fp8_support, check_fp8_block_scaling_support, check_mxfp8_support`` (2.11 and 2.20).
_FP8_NVIDIA: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "delayed": ((8, 9), None), "tensorwise": ((8, 9), None), "blockwise": ((9, 0), None), "mxfp8": ((10, 0), (12, 0)),
    "nvfp4": ((10, 0), None),
}  # fmt: skip
#: The same for AMD: fp8 came with CDNA 3 (gfx942), the MX formats with CDNA 4 (gfx950), by AMD's ISA manuals.
_FP8_AMD: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = {
    "delayed": ((9, 4), None), "tensorwise": ((9, 4), None), "blockwise": ((9, 4), None), "mxfp8": ((9, 5), None),
    "nvfp4": ((99, 0), None),
}  # fmt: skip


def lacks(gpu: Gpu, precision: PrecisionSpec) -> str:
    """What ``precision`` computes in and ``gpu`` cannot: "fp8", "blockwise fp8", "mxfp8"; "" where it can."""
    if not precision.quantizes:
        return ""
    known = _FP8_AMD if gpu.vendor == AMD else _FP8_NVIDIA
    if gpu.capability < known["delayed"][0]:
        return "fp8"
    lowest, beyond = known[precision.recipe]
    if gpu.capability < lowest or (beyond is not None and gpu.capability >= beyond):
        return precision.recipe if precision.recipe in ("mxfp8", "nvfp4") else f"{precision.recipe} fp8"
    return ""


def check_computes(gpu: Gpu, precision: PrecisionSpec) -> None:
    """Raise SpecError where ``gpu`` cannot compute in ``precision``, naming the cards that can."""
    missing = lacks(gpu, precision)
    if not missing:
        return
    field = f"fp8 ({precision.fp8})" if missing == "fp8" else f"fp8_recipe ({precision.fp8_recipe})"
    if precision.fp4 is not None:
        field = f"fp4 ({precision.fp4})"
    able = [card.name for card in common_gpus() if not lacks(card, precision)]
    other = "drop fp8" if missing == "fp8" else "use another recipe"
    raise SpecError(
        f"{field} does not run on --gpu {gpu.name}, of compute capability {capability_words(gpu)}; {other}, or name a "
        f"GPU that has {missing}, such as {', '.join(able)}"
    )


def supposed_on(gpu: Gpu, run: RunSpec) -> list[str]:
    """What is supposed of ``run`` on ``gpu``, a sentence each: where it is not what was counted for."""
    if gpu.vendor == AMD:
        return [taken_as_nvidia(gpu.name, run.implementation.gpu_arch)]
    # TE ``utils.py: is_non_tn_fp8_gemm_supported``: 10.x alone multiplies fp8 of any layout.
    per_tensor = run.precision.fp8 is not None and run.precision.fp8_recipe in ("delayed", "tensorwise")
    if per_tensor and gpu.arch == "blackwell" and gpu.capability >= (12, 0):
        return [
            f"{gpu.name}, of compute capability {capability_words(gpu)}, keeps fp8 weights and activations in a second "
            "layout, which is not counted: fp8 is laid out as on compute capability 10.0"
        ]
    return []


def capability_words(gpu: Gpu) -> str:
    """Compute capability as people write it: "9.0"."""
    return f"{gpu.capability[0]}.{gpu.capability[1]}"


def outside_bytes(world_size: int, driver: int = 0) -> int:
    """What lies outside torch's allocator: the context, NCCL's buffers where there is more than one GPU, and
    ``driver``, what libraries of the run allocate themselves (``spec.driver.driver_bytes``)."""
    return CONTEXT_BYTES + (NCCL_BYTES if world_size > 1 else 0) + driver


def margin_bytes(peak_bytes: int, world_size: int, driver: int = 0) -> int:
    """What a card must hold beyond a peak: memory outside the allocator, and fragmentation inside it."""
    return outside_bytes(world_size, driver) + int(peak_bytes * FRAGMENTATION)


def largest_peak(gpu: Gpu, world_size: int, driver: int = 0) -> int:
    """Bytes: the highest peak that ``gpu`` holds with its margin."""
    peak = int((gpu.capacity_bytes - outside_bytes(world_size, driver)) / (1 + FRAGMENTATION))
    while peak + margin_bytes(peak, world_size, driver) > gpu.capacity_bytes:
        peak -= 1
    return peak


def margin_words(run: RunSpec, unit: str = "GiB") -> str:
    """How the margin is made, for people."""
    nccl = f" + {format_bytes(NCCL_BYTES, unit)} NCCL" if run.parallel.world_size > 1 else ""
    more = "".join(f" + {format_bytes(found.nbytes, unit)} {found.name}" for found in driver_buffers(run))
    return (
        f"margin = {format_bytes(CONTEXT_BYTES, unit)} CUDA context{nccl} (assumed){more} + {FRAGMENTATION:.1%} of the "
        "peak for fragmentation (measured: 90th percentile of reserved over allocated, 80 ranks on B200)"
    )


def fits(result: Estimate, gpus: Sequence[Gpu | str] = ()) -> list[Fit]:
    """Whether the worst stage of a run fits with the margin on each of ``gpus``, cards or their names (none: the
    common ones). Raises SpecError for a name that is not known.

    A card of another generation than that of ``result`` is judged by the peaks of the same run on its own. One that
    cannot compute the run fits nothing, whatever its memory.
    """
    from bridge_memory.result import Estimate

    if not isinstance(result, Estimate):
        raise SpecError(f"result ({show(result)}) is not an Estimate; give estimate(run)")
    if isinstance(gpus, (str, Gpu)):
        raise SpecError(f"gpus ({show(gpus)}) is one GPU; give a list of them")
    world_size, driver = result.run.parallel.world_size, driver_bytes(result.run)
    by_arch: dict[str, StagePeak | None] = {result.run.implementation.gpu_arch: _worst(result)}
    out = []
    for gpu in [gpu if isinstance(gpu, Gpu) else find_gpu(gpu) for gpu in gpus] or common_gpus():
        missing, arch = lacks(gpu, result.run.precision), gpu.arch or result.run.implementation.gpu_arch
        if not missing and arch not in by_arch:
            by_arch[arch] = _worst_on(arch, result)
        worst = _worst(result) if missing else by_arch[arch]
        if worst is None:
            missing, worst = "attention kernel", _worst(result)
        assert worst is not None
        capacity, margin = gpu.capacity_bytes, margin_bytes(worst.peak_bytes, world_size, driver)
        within = bounds(worst.peak_bytes, result.not_modelled)
        verdict = Verdict.DOES_NOT_FIT
        if not missing:
            band = evidence_of(result.run, arch).band
            verdict = verdict_of(within, capacity, world_size, band or 0.0, driver)
        out.append(
            Fit(
                gpu.name, result.run.implementation.gpu_arch if missing else arch, capacity, worst.stage,
                worst.peak_bytes, margin, capacity - worst.peak_bytes - margin,
                verdict in (Verdict.FITS, Verdict.TIGHT), missing, verdict,
            )
        )  # fmt: skip
    return out


def _worst(result: Estimate) -> StagePeak:
    stage = result.peak_stage
    return StagePeak(stage.stage, stage.static_bytes, stage.peak_bytes)


def _worst_on(arch: str, result: Estimate) -> StagePeak | None:
    """The highest peak of the run on another generation; None where its attention has no kernel there."""
    from bridge_memory.estimation import peaks

    implementation = result.run.implementation
    try:
        run = result.run.with_(implementation=replace(implementation, gpu_arch=arch))
    except SpecError:
        return None
    return max(peaks(run), key=lambda stage: stage.peak_bytes)


def verdict_of(
    peak: Bounds, capacity_bytes: int, world_size: int, band: float = 0.0, driver: int = 0
) -> Verdict:
    """Whether a card takes a peak that lies within ``peak``, with the margin. ``band``: the share of a peak by which
    predictions of such runs are off."""

    def room_for(nbytes: int) -> bool:
        return nbytes + margin_bytes(nbytes, world_size, driver) <= capacity_bytes

    if peak.most is not None and room_for(peak.most):
        return Verdict.FITS if room_for(peak.most + int(peak.most * band)) else Verdict.TIGHT
    if peak.least is not None and not room_for(peak.least):
        return Verdict.DOES_NOT_FIT
    return Verdict.UNKNOWN


def answer(fits: Sequence[Fit]) -> str | None:
    """One word for all of ``fits``: their verdict where they share it, "unknown" where it is that of any, "tight" where
    it is tight on some and fits the others, else "fits on some"; None for no card."""
    verdicts = {fit.verdict for fit in fits}
    if Verdict.UNKNOWN in verdicts:
        return str(Verdict.UNKNOWN)
    if verdicts == {Verdict.FITS, Verdict.TIGHT}:
        return str(Verdict.TIGHT)
    return str(*verdicts) if len(verdicts) == 1 else "fits on some" if verdicts else None
