"""What a run reaches of the hardware's rates: the constants of the time model, each with its meaning.

Fitted by ``scripts/maintain/fit_speed.py`` on the groups of layouts that ``FITTED_ON`` names.
"""

from __future__ import annotations

from typing import NamedTuple

from bridge_memory.cards.generations import AMD_GENERATIONS


class Constants(NamedTuple):
    """Shares are of the hardware's peak rate; dimensions in elements; times in seconds."""

    #: Share of the peak rate that a matrix product of large dimensions reaches: V100 and A100, H100 and H200, later.
    gemm_ampere: float = 0.8
    gemm_hopper: float = 0.7
    gemm_blackwell: float = 0.6
    #: What eight-bit products reach of that share of their own peak rate, casts included.
    gemm_fp8: float = 0.8
    #: The same of four-bit products, Hadamard transforms included.
    gemm_fp4: float = 0.5
    #: A product whose sums have n terms reaches n / (n + this) of it: a tile's beginning and end cost as much as these.
    gemm_half_inner: float = 200.0
    #: Fused attention reaches this of that share.
    attention: float = 0.55
    #: Share of the memory's bandwidth that elementwise kernels reach.
    memory: float = 0.7
    #: Host time of one layer's pass beyond what its kernels take, half of it for what is recomputed of a layer.
    layer: float = 5e-5
    #: The same where the host waits for each kernel, so that none of its time is hidden.
    layer_blocking: float = 1.5e-3
    #: Share of NVLink's bandwidth, and seconds of one collective.
    nvlink: float = 0.7
    nvlink_latency: float = 2e-5
    #: Share of tensor parallelism's collectives that ``tp_comm_overlap`` does not hide.
    tensor_parallel_exposed: float = 0.4
    #: Share of the exchanges with experts that ``overlap_moe_expert_parallel_comm`` does not hide.
    expert_parallel_exposed: float = 0.4
    #: Share of the network's bandwidth, and seconds of one collective or message.
    network: float = 0.6
    network_latency: float = 5e-5

    def gemm(self, generation: str) -> float:
        """``gemm_*`` of a generation; AMD's, of which no step was fitted, as the lowest."""
        if generation == "hopper":
            return self.gemm_hopper
        return self.gemm_blackwell if generation in ("blackwell", *AMD_GENERATIONS) else self.gemm_ampere


#: Where the fit starts, and what it is pulled to: judgement, not measurement, of what kernels and NCCL usually reach.
STARTING_POINT = Constants()
#: Keys of ``layout_group`` in the corpus of measured throughput.
FITTED_ON: tuple[str, ...] = (
    "aa|65B|2048|64", "aa|13B|8192|64", "bs|prequel|181B|14336x72|384|2048", "mlperf|llama31_405b|DGXH100",
    "simumax|llama3-70b|12|4096|tokens-per-s (gbs differs between layouts)",
    "mb|26.04.01 NeMo Container|LLAMA3_70B|DGX-H100|64|256|8192|FP8|pretrain",
    "mb|26.04.01 NeMo Container|LLAMA3_70B|DGX-GB200|64|256|8192|MXFP8|pretrain",
    "mb|26.04.01 NeMo Container|LLAMA3.1_405B|DGX-H100|1024|1536|8192|FP8|pretrain",
    "mb|26.04.01 NeMo Container|Qwen3_30B_a3B|DGX-GB200|8|512|4096|MXFP8|pretrain",
    "mb|26.04.01 NeMo Container|Qwen3_30B_a3B|DGX-H100|16|1024|4096|FP8|pretrain",
    "mb|26.04.01 NeMo Container|Qwen3_235B_a22B|DGX-H100|256|8192|4096|FP8|pretrain",
    "mb|26.04.01 NeMo Container|Qwen3_235B_a22B|DGX-B200|256|8192|4096|MXFP8|pretrain",
)
#: As the fit left them; ``network`` near the bound that shares of a rate have there, 0.95.
DEFAULT = Constants(
    gemm_ampere=0.781,
    gemm_hopper=0.822,
    gemm_blackwell=0.552,
    gemm_fp8=0.926,
    gemm_fp4=0.5,
    gemm_half_inner=210,
    attention=0.606,
    memory=0.74,
    layer=5.47e-05,
    layer_blocking=0.00146,
    nvlink=0.392,
    nvlink_latency=2.23e-05,
    tensor_parallel_exposed=0.389,
    expert_parallel_exposed=0.4,
    network=0.912,
    network_latency=4.23e-05,
)
