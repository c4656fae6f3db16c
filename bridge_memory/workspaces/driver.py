"""Buffers that libraries allocate outside torch's allocator, as far as their sizes follow from the libraries' sources.

They are not in what torch reports, nor in a predicted peak, but in the margin that a GPU must have beyond the peak.
Symbols: T tokens of a microbatch on a rank, w the width of what is sent, n ranks of the expert group (ETP x EP), r of
them in one NVLink domain, e experts of a rank.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from bridge_memory.inventory.megatron.moe import DEEPEP_PEERS
from bridge_memory.spec.dtypes import DTYPE_BYTES
from bridge_memory.spec.model import ModelSpec, MoESpec
from bridge_memory.spec.parts import DEEPEP_SMS, HYBRIDEP_DOMAIN
from bridge_memory.spec.run import RunSpec

#: Backends of the flex dispatcher, by which their buffers are named.
DISPATCHERS = ("DeepEP", "HybridEP")


class DriverBuffer(NamedTuple):
    """Bytes that a library allocates itself, on every rank."""

    name: str
    nbytes: int
    #: What its size assumes, in words.
    supposed: str = ""

    @property
    def of(self) -> str:
        """Its name in a sentence."""
        return f"{self.name}'s buffers" if self.name in DISPATCHERS else self.name


def driver_buffers(run: RunSpec) -> tuple[DriverBuffer, ...]:
    """Every buffer of a known size, on the rank with the largest."""
    return (*_user_buffers(run), *_dispatchers(run))


def _user_buffers(run: RunSpec) -> tuple[DriverBuffer, ...]:
    p, impl = run.parallel, run.implementation
    if not impl.tp_comm_overlap or not impl.te or not p.sp or p.tp == 1:
        return ()
    length, sequences = run.batch.rows
    tokens, precision = length * sequences // p.cp, run.precision
    mixed = precision.quantizes and (precision.num_layers_at_start_in_bf16 or precision.num_layers_at_end_in_bf16)
    nbytes = user_buffer_bytes(tokens, run.model.hidden_size) * (2 if mixed else 1)
    return (DriverBuffer("Transformer Engine's user buffers", nbytes, "as many as there can be"),)


def user_buffer_bytes(tokens: int, width: int) -> int:
    """Upper bound: [tokens, width] in bf16 for each of twelve GEMMs; the four that reduce have up to (2 t - 1) / t of
    that, the chunks of a ring. Layers that stay in bf16 while others are quantized have buffers of their own.

    Source: TE ``module/base.py: initialize_ub``, ``comm_gemm_overlap.cpp: CommOverlapP2PBase``, which allocate them in
    memory that the ranks of a node share.
    """
    return (8 + 4 * 2) * 2 * tokens * width


def _dispatchers(run: RunSpec) -> tuple[DriverBuffer, ...]:
    impl, spec = run.implementation, _experts(run.model)
    if spec is None or impl.torch_layers or impl.moe_token_dispatcher_type != "flex":
        return ()
    n = run.parallel.ep * run.parallel.etp
    width = spec.latent_size or run.model.hidden_size
    if impl.moe_flex_dispatcher_backend == "hybridep":
        length, sequences = run.batch.rows
        tokens = length * sequences // run.parallel.cp // (run.parallel.tp if run.parallel.sp else 1)
        domain = impl.moe_hybridep_ranks_per_nvlink_domain or HYBRIDEP_DOMAIN
        r = min(domain, n)
        supposed = "" if n <= r else f"NVLink domains of {r} ranks"
        return (DriverBuffer("HybridEP", hybridep_bytes(tokens, width, n, r, spec.num_experts // run.parallel.ep),
                             supposed),)  # fmt: skip
    nbytes = deepep_bytes(
        width * max(DTYPE_BYTES[run.precision.params_dtype], 2), n, impl.moe_flex_dispatcher_num_sms or DEEPEP_SMS
    )
    return () if nbytes is None else (DriverBuffer("DeepEP", nbytes),)


def may_have_driver_buffers(run: RunSpec) -> bool:
    """Whether a run with these options can have such buffers at any size."""
    return run.implementation.tp_comm_overlap or run.implementation.moe_token_dispatcher_type == "flex"


def driver_bytes(run: RunSpec) -> int:
    """Total bytes of ``driver_buffers``."""
    return sum(found.nbytes for found in driver_buffers(run))


@lru_cache(maxsize=64)
def _experts(model: ModelSpec) -> MoESpec | None:
    """The experts with the widest tokens; the process has one buffer for all layers."""
    kinds = [kind.ffn for kind in (*dict.fromkeys(model.layers), model.mtp_layer) if kind is not None]
    moes = [ffn for ffn in kinds if isinstance(ffn, MoESpec)]
    return max(moes, key=lambda ffn: ffn.latent_size or model.hidden_size, default=None)


# ---------------------------------------------------------------------------------------------------------------
# DeepEP
# ---------------------------------------------------------------------------------------------------------------

#: Ranks of a group -> (tokens that a channel receives over NVLink, the same over RDMA rounded up to whole messages);
#: the larger of dispatch and combine (DeepEP ``deep_ep/buffer.py: Buffer.get_dispatch_config, get_combine_config``).
DEEPEP_TOKENS: dict[int, tuple[int, int]] = {
    2: (256, 128), 4: (256, 128), 8: (256, 128), 16: (288, 140), 24: (288, 128), 32: (288, 128), 48: (288, 128),
    64: (288, 128), 96: (480, 132), 128: (560, 132), 144: (720, 132), 160: (720, 132),
}  # fmt: skip
DEEPEP_WORKSPACE = 32 << 20
#: Bytes by which NVSHMEM's heap grows (``deep_ep/buffer.py``: NVSHMEM_CUMEM_GRANULARITY).
NVSHMEM_GRANULARITY = 1 << 29
#: Bytes per token in addition to its row: up to 128 expert indices in int64 and their weights in fp32, 128 fp32 scales,
#: and where it came from (``csrc/config.hpp: kNumMaxTopK, kNumMaxScales``; ``internode.cu: SourceMeta``).
_DEEPEP_METADATA = 128 * 8 + 128 * 4 + 128 * 4 + 8


def deepep_bytes(row: int, n: int, sms: int = DEEPEP_SMS) -> int | None:
    """Bytes of DeepEP's buffers for rows of ``row`` bytes; None for a group size without a configuration in DeepEP.

    Source: megatron-core ``transformer/moe/fused_a2a.py: get_buffer``; DeepEP ``csrc/config.hpp:
    Config.get_nvl_buffer_size_hint, get_rdma_buffer_size_hint``, ``csrc/deep_ep.cpp: Buffer::Buffer``. Buffers for
    NVLink are allocated by cudaMalloc, those for RDMA in NVSHMEM's heap.
    """
    if n not in DEEPEP_TOKENS:
        return None
    over_nvlink, over_rdma = DEEPEP_TOKENS[n]
    channels, peers, nodes = sms // 2, min(n, DEEPEP_PEERS), max(1, n // DEEPEP_PEERS)
    each = row + _DEEPEP_METADATA
    nvlink = channels * peers * ((2 * nodes + 3) * 4 + over_nvlink * each)
    nbytes = _up(nvlink, 128) + DEEPEP_WORKSPACE
    if nodes > 1:
        rdma = channels * nodes * 2 * ((2 * DEEPEP_PEERS + 2) * 4 + over_rdma * (each + 16)) + (1 << 20)
        nbytes += _up(rdma, NVSHMEM_GRANULARITY)
    return nbytes


# ---------------------------------------------------------------------------------------------------------------
# HybridEP
# ---------------------------------------------------------------------------------------------------------------

#: Least number of tokens that it allocates for (``deep_ep/hybrid_ep_buffer.py: HybridEPBuffer.__init__``).
HYBRIDEP_LEAST_TOKENS = 512


def hybridep_bytes(tokens: int, width: int, n: int, r: int, experts: int) -> int:
    """Bytes of HybridEP's buffers, which have room for every token of the group.

    Rows of 2 bytes per element and fp32 probabilities for the experts of a domain, both shared by dispatch and combine;
    fp32 scales per 128 elements; the routing map of the whole group; and send and receive buffers between domains, for
    both. Source: megatron-core ``transformer/moe/fused_a2a.py: init_hybrid_ep_buffer``; DeepEP
    ``csrc/hybrid_ep/buffer/{intranode,internode}.cu: allocate_dispatch_buffers, allocate_combine_buffers``,
    ``csrc/hybrid_ep/extension/allgather.cu: allocate_ag_buffer``.
    """
    tokens = max(tokens, HYBRIDEP_LEAST_TOKENS)
    scales, probabilities = width // 128 * 4, experts * r * 4
    nbytes = tokens * n * (2 * width + probabilities + scales) + tokens * n * experts * n
    others = n // r - 1
    if others > 0:
        row = 2 * width + probabilities
        sent = tokens * (2 * width + experts * n * 4 + scales)
        nbytes += sent + tokens * others * (row + scales) + 2 * tokens * others * row
    return nbytes


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
