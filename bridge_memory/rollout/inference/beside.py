"""What an engine's process holds beside torch's allocator: CUDA context, kernels, communicators, all-reduce buffers."""

from __future__ import annotations

from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import Provenance
from bridge_memory.outside import nccl
from bridge_memory.outside.amount import Amount, total
from bridge_memory.outside.context import context
from bridge_memory.outside.nccl import Spread, Use
from bridge_memory.rollout.inference import rules
from bridge_memory.rollout.inference.spec import InferenceSpec
from bridge_memory.spec import ImplementationSpec
from bridge_memory.workspaces.libraries import cublas_workspace

MIB = 1 << 20
#: Ranks that the custom all-reduce serves.
CUSTOM_RANKS = (2, 4, 6, 8)
#: Bytes of FlashInfer's workspace.
FLASHINFER = 394 * MIB
#: For cards without rules of their own (AMD).
TYPICAL_ARCH = "hopper"


#: Bytes outside of torch of vLLM on one GPU (run 111, vLLM 0.7, an H100 or A100): context, kernels, libraries.
OF_ONE_GPU = int(1.27 * (1 << 30))
#: Of them at most what the profile run loads, after the snapshot (run 113: 0.14 GiB; twice of it).
LOADED_LATE = int(2 * 0.14 * (1 << 30))
RUN_113 = "run 113 of tests/data/rollout/runs.jsonl"


def process(gpu: Gpu) -> tuple[Amount, ...]:
    """The context and the kernels of one process, before the engine loads its model."""
    bare, kernels = context(gpu)
    most = max(kernels.most, OF_ONE_GPU - bare.least - LOADED_LATE)
    source = f"{kernels.source}; run 111 of tests/data/rollout/runs.jsonl"
    return bare, Amount("loaded kernels", kernels.least, most, Provenance.MEASURED, source)


def loaded_late() -> Amount:
    """Kernels and libraries that the first steps load; vLLM takes them out of its budget."""
    return Amount("kernels of the first steps", 0, LOADED_LATE, Provenance.MEASURED, RUN_113)


def workspaces(spec: InferenceSpec, gpu: Gpu) -> Amount:
    """torch's cuBLAS workspace, one a stream: of steps, and of graphs and of the sampler; FlashInfer's buffer (vLLM
    ``envs.py: VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE``) where that backend runs."""
    each = cublas_workspace(ImplementationSpec(
        torch=rules.torch_of(spec.framework, spec.release_numbers), gpu_arch=gpu.arch or TYPICAL_ARCH
    ))  # fmt: skip
    return Amount("workspaces", each, 3 * each + FLASHINFER, Provenance.ASSUMED, "cuBLAS a stream; FlashInfer")


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
    release = nccl.release_of_torch(rules.torch_of(spec.framework, spec.release_numbers))
    found: list[Amount] = [nccl.modules()]

    def one(name: str, size: int, use: Use, certain: bool) -> None:
        spread = Spread(size, -(-size // machine.domain))
        nbytes = total(nccl.communicator_bytes(machine, spread, use, release))
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
    most = (3 * 8 + 128) * MIB if tp in CUSTOM_RANKS else 128 * MIB
    return Amount("all-reduce buffers", 0, most, Provenance.ASSUMED,
                  "custom_all_reduce.py: 8 MiB buffers; symm_mem.py")  # fmt: skip
