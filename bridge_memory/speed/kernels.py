"""What of an implementation decides its speed and changes no memory, or is not part of a RunSpec."""

from __future__ import annotations

from typing import NamedTuple

from bridge_memory.spec import RunSpec


class Kernels(NamedTuple):
    """Which kernels a run has."""

    #: Norms in one kernel each, and not in the half dozen that they are in plain torch.
    fused_norm: bool = True
    #: FlashAttention 1, about half as fast as its successor; with neither the scores pass through memory.
    first_flash_attention: bool = False
    unfused_attention: bool = False
    #: Its softmax is plain torch's too: in fp32, scale and mask by themselves.
    plain_softmax: bool = False
    #: Tensor parallelism's gathers and reductions run beside the products that need them (``tp_comm_overlap``).
    tensor_parallel_overlap: bool = False


def kernels_of(run: RunSpec) -> Kernels:
    """Those that the run's fields mean."""
    impl = run.implementation
    return Kernels(fused_norm=impl.te, unfused_attention=impl.attention_kernel == "unfused")
