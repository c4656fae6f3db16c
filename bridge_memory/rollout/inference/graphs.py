"""CUDA graphs of an engine: how many, and what they hold.

A graph holds its kernels' parameters, in memory of the driver, and a pool of tensors that all graphs share. Both are
measured, not derived: bytes a layer and graph in two public logs.
"""

from __future__ import annotations

from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import Provenance
from bridge_memory.outside import nccl
from bridge_memory.outside.amount import Amount, exactly
from bridge_memory.rollout.inference import defaults
from bridge_memory.rollout.inference.beside import CUSTOM_RANKS
from bridge_memory.rollout.inference.layer_cache import layers_of_stage
from bridge_memory.rollout.inference.spec import InferenceSpec

MIB = 1 << 20
#: Bytes a layer and graph. Row 115 (vLLM, Qwen3-8B on one GPU): 0.52 GiB for 51 + 35 graphs of 36 layers. The range is
#: half to twice of it, since one row says nothing of other models.
ONE_RANK = (0.52 * (1 << 30)) / ((51 + 35) * 36)
#: The same of graphs with NCCL's collectives, which keep plans and buffers for each. Row 114 (vLLM 0.5.4, Yi-1.5-34B on
#: four RTX 4090, whose all-reduces are NCCL's for want of peer access): 2464 MiB for 35 graphs of 60 layers.
WITH_NCCL = 2464 * MIB / (35 * 60)
#: Bytes of an all-reduce above which NCCL takes it over from the custom kernel, which is a node as any other
#: (``custom_all_reduce.py: max_size``).
CUSTOM_MOST = 8 * MIB
#: vLLM counts 1 MiB for a graph at least (``v1/worker/gpu_model_runner.py: profile_cudagraph_memory``).
LEAST_A_GRAPH = MIB
INT32 = 4


def number_of_graphs(spec: InferenceSpec, gpu: Gpu) -> int:
    """Graphs of pieces and of whole decoding steps."""
    return len(defaults.piecewise_graph_sizes(spec, gpu)) + len(defaults.decode_graph_sizes(spec, gpu))


def graph_amount(spec: InferenceSpec, gpu: Gpu, stage: int) -> Amount:
    """What graphs hold on a rank of a stage."""
    number = number_of_graphs(spec, gpu)
    if not number:
        return exactly("CUDA graphs", 0)
    layers = len(layers_of_stage(spec, stage))
    sizes = (*defaults.piecewise_graph_sizes(spec, gpu), *defaults.decode_graph_sizes(spec, gpu))
    least = max(number * LEAST_A_GRAPH, int(number * layers * ONE_RANK / 2))
    most = sum(layers * (WITH_NCCL if _has_nccl(spec, gpu, size) else 2 * ONE_RANK) for size in sizes)
    source = f"{number} graphs of {layers} layers; runs 114 and 115 of tests/data/rollout/runs.jsonl"
    return Amount("CUDA graphs", least, max(least, int(most)), Provenance.MEASURED, source)


def _has_nccl(spec: InferenceSpec, gpu: Gpu, tokens: int) -> bool:
    """Whether a graph of ``tokens`` tokens holds NCCL's collectives."""
    if spec.data_parallel_size > 1 and spec.expert_ranks > spec.tensor_parallel_size:
        return True
    if spec.tensor_parallel_size == 1:
        return False
    message = tokens * spec.model.hidden_size * spec.element_bytes
    custom = spec.tensor_parallel_size in CUSTOM_RANKS and nccl.machine_of(gpu).nvlink
    return not custom or message > CUSTOM_MOST


def graph_tables(spec: InferenceSpec, gpu: Gpu, page: int) -> Amount:
    """SGLang: the page table that decode graphs read, of the longest sequence for each of the largest graph (``layers/
    attention/flashattention_backend.py: init_cuda_graph_state``); two where windows have their own."""
    if spec.framework != "sglang" or spec.enforce_eager:
        return exactly("graph tables", 0)
    table = defaults.cuda_graph_most(spec, gpu) * -(-spec.length // page) * INT32
    return Amount("graph tables", table, 2 * table, Provenance.FORMULA,
                  "layers/attention/flashattention_backend.py: init_cuda_graph_state")  # fmt: skip
