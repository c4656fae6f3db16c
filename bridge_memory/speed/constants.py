"""What a run reaches of the hardware's rates: the constants of the time model, each with its meaning.

Fitted by ``scripts/maintain/fit_speed.py`` on the groups of layouts that ``FITTED_ON`` names.
"""

from __future__ import annotations

from typing import NamedTuple

from bridge_memory.cards.generations import AMD_GENERATIONS


class Constants(NamedTuple):
    """Shares are of the hardware's peak rate; dimensions in elements; times in seconds."""

    #: Share of the peak rate that a matrix product of large dimensions reaches: V100 and A100, H100 and H200, B200 and
    #: GB200, B300 and GB300, whose data sheets state the peak of those before with 8 % more multiprocessors and up to
    #: 200 W more.
    gemm_ampere: float = 0.8
    gemm_hopper: float = 0.7
    gemm_blackwell: float = 0.55
    gemm_blackwell_ultra: float = 0.7
    #: What eight-bit products reach of that share of their own peak rate: Hopper, later. More than 1 where sixteen-bit
    #: ones are the further from their peak.
    gemm_fp8: float = 0.8
    gemm_fp8_blackwell: float = 1.0
    #: What they reach of that with a scale for every 32 elements (MXFP8).
    block_scaled: float = 0.9
    #: What four-bit products reach of the share of sixteen-bit ones, Hadamard transforms included.
    gemm_fp4: float = 0.5
    #: A product whose sums have n terms reaches n / (n + this) of it: a tile's beginning and end cost as much as these
    #: in sixteen bits, and take as long in fewer.
    gemm_half_inner: float = 200.0
    #: Fused attention reaches this of that share.
    attention: float = 0.55
    #: Mamba-2's scan, of Triton kernels in several passes, reaches this of the peak rate.
    scan: float = 0.05
    #: Share of the memory's bandwidth that elementwise kernels reach.
    memory: float = 0.7
    #: Of host memory's bandwidth, and of the link to it for copies from pinned memory. Assumed, not fitted: STREAM
    #: reaches about as much; packets of 128 bytes carry 20 to 28 of headers and checksums (PCI Express Base
    #: Specification, "Transaction Layer Packet").
    host_memory: float = 0.85
    host_link: float = 0.85
    #: Host time of one layer's pass beyond what its kernels take, half of it for what is recomputed of a layer.
    layer: float = 5e-5
    #: The same where the host waits for each kernel, so that none of its time is hidden.
    layer_blocking: float = 1.5e-3
    #: Host time of an operation (Python, autograd and the launch), and of one expert's product, which a loop in C++
    #: launches: a half of a layer takes at least what the host takes for it.
    launch: float = 2.5e-5
    launch_expert: float = 1.5e-5
    #: What the GPU takes from the end of a kernel to the beginning of the next, however they are launched, and to fill
    #: and drain its processors.
    kernel: float = 1e-6
    #: Share of NVLink's bandwidth: V100 and A100; Hopper and later, whose switches multicast and add up (NVLink SHARP).
    #: Seconds of one collective.
    nvlink: float = 0.6
    nvlink_sharp: float = 0.7
    #: The same of exchanges of all with all, not fitted but documented (DeepEP ``docs/README_Hybrid-EP.md``, kernels
    #: alone, less what a rank sends itself): HybridEP with 32 multiprocessors 0.76 on 8 ranks of a GB200 to 0.65 on 36,
    #: DeepEP 0.68 on 8 of an H800. Bytes a second that one of DeepEP's multiprocessors moves (B200 and GB200, 16 and
    #: 24 of them): on Blackwell its 20 take less than the link.
    nvlink_exchange: float = 0.7
    deepep_sm: float = 1.7e10
    nvlink_latency: float = 2e-5
    #: Seconds that a layer's exchanges with experts take forward beside those of each: ranks first tell each other how
    #: many tokens go where, and the host waits for that. Backward knows it.
    exchange_latency: float = 1e-4
    #: Share of tensor parallelism's collectives that ``tp_comm_overlap`` does not hide.
    tensor_parallel_exposed: float = 0.4
    #: Of exchanges with experts under ``overlap_moe_expert_parallel_comm``, the share that is not hidden where they are
    #: no longer than what is computed beside them: kernels of both share multiprocessors and memory.
    expert_parallel_exposed: float = 0.4
    #: Share of the network's bandwidth that rings and messages between stages reach, and exchanges of all with all, by
    #: NCCL or by DeepEP and HybridEP. Seconds of one collective or message.
    network: float = 0.6
    network_exchange: float = 0.5
    network_latency: float = 5e-5
    #: The same of exchanges over EFA, and seconds of one of them: by NCCL, and by DeepEP (over UCCL or NVSHMEM).
    efa_exchange: float = 0.3
    efa_latency: float = 1.5e-3
    efa_latency_deepep: float = 2.5e-3

    def gemm(self, generation: str, *, ultra: bool = False) -> float:
        """``gemm_*`` of a generation; AMD's, of which no step was fitted, as the lowest."""
        if generation == "hopper":
            return self.gemm_hopper
        if ultra:
            return self.gemm_blackwell_ultra
        return self.gemm_blackwell if generation in ("blackwell", *AMD_GENERATIONS) else self.gemm_ampere


#: Where the fit starts, and what it is pulled to: judgement, not measurement, of what kernels and NCCL usually reach.
STARTING_POINT = Constants()
#: Of Bridge's tables of mid 2026 what the fit uses; those of other months, of the same layouts mostly, are kept apart.
_TABLE = (
    "DeepSeekV3|DGX-GB200|256|4096|4096|MXFP8|pretrain", "DeepSeekV3|DGX-GB300|256|15360|4096|MXFP8|pretrain",
    "DeepSeekV3|DGX-GB300|256|4096|4096|MXFP8|pretrain", "Kimi_K2|DGX-GB300|256|4096|4096|MXFP8|pretrain",
    "LLAMA3.1_405B|DGX-GB200|256|1536|8192|FP8|pretrain", "LLAMA3.1_405B|DGX-GB200|256|1536|8192|MXFP8|pretrain",
    "LLAMA3.1_405B|DGX-GB200|256|1536|8192|NVFP4|pretrain", "LLAMA3.1_405B|DGX-GB300|256|1536|8192|FP8|pretrain",
    "LLAMA3.1_405B|DGX-GB300|256|1536|8192|MXFP8|pretrain", "LLAMA3.1_405B|DGX-GB300|256|1536|8192|NVFP4|pretrain",
    "LLAMA3.1_405B|DGX-H100|1024|1536|8192|FP8|pretrain", "LLAMA3_70B|DGX-GB200|32|32|4096|FP8|sft",
    "LLAMA3_70B|DGX-GB200|32|32|4096|MXFP8|sft", "LLAMA3_70B|DGX-GB200|8|32|4096|FP8|lora",
    "LLAMA3_70B|DGX-GB200|8|32|4096|MXFP8|lora", "LLAMA3_70B|DGX-GB300|32|32|4096|FP8|sft",
    "LLAMA3_70B|DGX-GB300|32|32|4096|MXFP8|sft", "LLAMA3_70B|DGX-GB300|8|32|4096|FP8|lora",
    "LLAMA3_70B|DGX-GB300|8|32|4096|MXFP8|lora", "LLAMA3_70B|DGX-H100|32|32|4096|FP8|sft",
    "LLAMA3_70B|DGX-H100|8|32|4096|FP8|lora", "Nemotron_3_Nano|DGX-B300|8|512|8192|MXFP8|pretrain",
    "Nemotron_3_Nano|DGX-GB200|8|512|8192|MXFP8|pretrain", "Nemotron_3_Nano|DGX-GB300|8|512|8192|MXFP8|pretrain",
    "Nemotron_3_Nano|DGX-H100|16|1024|8192|FP8|pretrain", "Nemotron_3_Super|DGX-B300|64|512|8192|MXFP8|pretrain",
    "Nemotron_3_Super|DGX-GB200|64|512|8192|MXFP8|pretrain", "Nemotron_3_Super|DGX-GB300|64|512|8192|MXFP8|pretrain",
    "Qwen3_235B_a22B|DGX-GB200|256|8192|4096|MXFP8|pretrain", "Qwen3_235B_a22B|DGX-GB300|256|8192|4096|MXFP8|pretrain",
    "Qwen3_30B_a3B|DGX-B300|8|512|4096|MXFP8|pretrain", "Qwen3_30B_a3B|DGX-GB200|8|512|4096|MXFP8|pretrain",
    "Qwen3_30B_a3B|DGX-GB300|8|512|4096|MXFP8|pretrain", "Qwen3_30B_a3B|DGX-H100|16|1024|4096|FP8|pretrain",
)  # fmt: skip
#: Keys of ``layout_group`` in the corpus of measured throughput.
FITTED_ON: tuple[str, ...] = (
    "aa|13B|8192|64", "aa|65B|2048|64", "aws|DeepSeek-V3|B300|256|256|4096", "aws|Qwen3-235B-A22B|B300|64|256|4096",
    "bs|prequel|181B|14336x72|384|2048", "mbpr|Qwen3-30B-A3B|H100|16|1024|4096",
    "mb|26.04.01 NeMo Container|LLAMA3.1_405B|DGX-H100|1024|1536|8192|FP8|pretrain",
    "mb|26.04.01 NeMo Container|LLAMA3_70B|DGX-GB200|64|256|8192|MXFP8|pretrain",
    "mb|26.04.01 NeMo Container|LLAMA3_70B|DGX-H100|64|256|8192|FP8|pretrain",
    "mb|26.04.01 NeMo Container|Qwen3_235B_a22B|DGX-B200|256|8192|4096|MXFP8|pretrain",
    "mb|26.04.01 NeMo Container|Qwen3_235B_a22B|DGX-H100|256|8192|4096|FP8|pretrain",
    "mb|26.04.01 NeMo Container|Qwen3_30B_a3B|DGX-GB200|8|512|4096|MXFP8|pretrain",
    "mb|26.04.01 NeMo Container|Qwen3_30B_a3B|DGX-H100|16|1024|4096|FP8|pretrain", "mlperf|llama31_405b|DGXH100",
    "mlperf|llama31_405b|GB200", "simumax|llama3-70b|12|4096|tokens-per-s (gbs differs between layouts)",
    *(f"mb|26.06 NeMo Container|{group}" for group in _TABLE),
)  # fmt: skip
#: Not fitted: what documents say, or assumed.
NOT_FITTED = ("host_memory", "host_link", "nvlink_exchange", "deepep_sm")
#: As the fit left them, but for ``nvlink_sharp``, as an earlier fit did: with it the loss is 3 % less, at 0.45, where
#: NCCL's rings are known to reach more, and groups that were not fitted are predicted no better.
DEFAULT = Constants(
    gemm_ampere=0.781,
    gemm_hopper=0.717,
    gemm_blackwell=0.537,
    gemm_blackwell_ultra=0.71,
    gemm_fp8=1.05,
    gemm_fp8_blackwell=1.1,
    block_scaled=0.901,
    gemm_fp4=0.979,
    gemm_half_inner=227.0,
    attention=0.727,
    scan=0.0212,
    memory=0.6,
    layer=6.12e-05,
    layer_blocking=0.00154,
    launch=4.09e-05,
    launch_expert=1.49e-05,
    kernel=1.08e-06,
    nvlink=0.437,
    nvlink_sharp=0.644,
    nvlink_exchange=0.7,
    deepep_sm=17000000000.0,
    nvlink_latency=2.37e-05,
    exchange_latency=0.000109,
    tensor_parallel_exposed=0.408,
    expert_parallel_exposed=0.351,
    network=0.746,
    network_exchange=0.745,
    network_latency=4.51e-05,
    efa_exchange=0.309,
    efa_latency=0.00122,
    efa_latency_deepep=0.00275,
)
#: Of an exchange between experts inside of an NVLink domain, the part of its time that it may take less: the most that
#: is documented is 0.76 of the link.
EXCHANGE_DOUBT = 1 - DEFAULT.nvlink_exchange / 0.76
