"""What an engine's process holds beside torch's allocator: CUDA context, kernels, communicators, all-reduce buffers."""

from __future__ import annotations

from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import Provenance
from bridge_memory.outside import nccl
from bridge_memory.outside.amount import Amount, total
from bridge_memory.outside.context import context
from bridge_memory.outside.nccl import Spread, Use
from bridge_memory.rollout.inference.spec import InferenceSpec

MIB = 1 << 20


def process(gpu: Gpu) -> tuple[Amount, ...]:
    """The context and the kernels of one process."""
    return context(gpu)


def communicators(spec: InferenceSpec, gpu: Gpu) -> tuple[Amount, ...]:
    """NCCL's communicators of an engine on a rank; none where it has one rank.

    vLLM and SGLang make PyNccl's communicator for tensor parallelism, and torch one more at the first collective that
    goes through it: warm-up, gathered logits or weights. Expert parallelism reuses or adds one. Pipelines send to
    neighbours.
    """
    tp, pp = spec.tensor_parallel_size, spec.pipeline_parallel_size
    ranks = tp * pp * (spec.data_parallel_size if spec.framework == "vllm" else 1)
    if ranks == 1:
        return ()
    machine = nccl.machine_of(gpu)
    found: list[Amount] = [nccl.modules()]

    def one(name: str, size: int, use: Use, certain: bool) -> None:
        spread = Spread(size, -(-size // machine.domain))
        nbytes = total(nccl.communicator_bytes(machine, spread, use))
        source = f"NCCL communicator of {size} ranks (outside/nccl.py)"
        found.append(Amount(name, nbytes.least if certain else 0, nbytes.most, Provenance.ASSUMED, source))

    if tp > 1:
        one("NCCL: tensor parallel", tp, Use.ALL_REDUCE | Use.SHARDED, True)
        one("NCCL: tensor parallel, torch's", tp, Use.ALL_REDUCE | Use.SHARDED | Use.BROADCAST, False)
    if pp > 1:
        one("NCCL: pipeline", pp, Use.TWO_PEERS, True)
    if spec.expert_parallel_size > 1 or (spec.data_parallel_size > 1 and spec.framework == "vllm"):
        one("NCCL: experts", spec.expert_ranks, Use.SHARDED, False)
    if tp > 1:
        found.append(custom_all_reduce(tp))
    return tuple(found)


def custom_all_reduce(tp: int) -> Amount:
    """Buffers of 8 MiB that peers write to: signals and data, data, and addresses (vLLM ``device_communicators/
    custom_all_reduce.py: CustomAllreduce``; SGLang's is the same). Symmetric memory adds up to 128 MiB; neither where
    peers do not see each other."""
    most = 3 * 8 * MIB + 128 * MIB
    return Amount("all-reduce buffers", 0 if tp not in (2, 4, 6, 8) else 3 * 8 * MIB, most, Provenance.ASSUMED,
                  "custom_all_reduce.py: 8 MiB buffers; symm_mem.py")  # fmt: skip
