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
    #: Its softmax is plain torch's too: the scores are copied and masked by kernels of their own.
    plain_softmax: bool = False
    #: A hidden state goes to the next stage in as many parts as there are tensor-parallel ranks, one from each, and is
    #: gathered there (DeepSpeed's ``PipelineEngine``: ``pipe_partitioned`` and ``grad_partitioned``).
    pipeline_in_parts: bool = False
    #: Between stages every message is a call of its own that waits, four a microbatch in the middle of a pipeline
    #: (DeepSpeed's ``TrainSchedule``), and not two in which one is sent while another is received (Megatron's
    #: ``send_forward_recv_backward``).
    separate_sends: bool = False
    #: The host waits for every kernel that it launches (``CUDA_LAUNCH_BLOCKING=1``).
    blocking_launches: bool = False
    #: All experts' products of a linear are one kernel (``torch._grouped_mm``).
    grouped_experts: bool = False
    #: Between nodes is Amazon's EFA, over which libraries send without the network adapter's help for GPUs (no IBGDA).
    efa: bool = False
    #: Tensor parallelism's gathers and reductions run beside the products that need them (``tp_comm_overlap``).
    tensor_parallel_overlap: bool = False


def kernels_of(run: RunSpec) -> Kernels:
    """Those that the run's fields mean."""
    impl = run.implementation
    return Kernels(
        fused_norm=impl.te, unfused_attention=impl.attention_kernel == "unfused",
        tensor_parallel_overlap=impl.tp_comm_overlap,
    )
