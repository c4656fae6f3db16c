"""What an engine chooses where a field of InferenceSpec is None, by framework, release and card."""

from __future__ import annotations

from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import GIB
from bridge_memory.rollout.inference import rules
from bridge_memory.rollout.inference.spec import InferenceSpec
from bridge_memory.spec import MLASpec

MIB = 1 << 20


def gpu_memory_utilization(spec: InferenceSpec) -> float:
    """vLLM's share of the card (``config/cache.py``)."""
    if spec.gpu_memory_utilization is not None:
        return spec.gpu_memory_utilization
    return 0.92 if rules.UTILIZATION_92(spec.release_numbers) else 0.9


def max_num_batched_tokens(spec: InferenceSpec, gpu: Gpu) -> int:
    """Tokens of a step at most: vLLM ``engine/arg_utils.py: get_batch_defaults``; SGLang's chunked_prefill_size,
    ``arg_groups/memory_hook.py: handle_gpu_memory_settings``."""
    if spec.framework == "sglang":
        if spec.chunked_prefill_size is not None:
            return spec.chunked_prefill_size
        mib = gpu.capacity_bytes / MIB
        steps = ((20, 2048), (60, 4096), (160, 8192))
        return next((tokens for most, tokens in steps if mib < most * 1024), 16384)
    if spec.max_num_batched_tokens is not None:
        return spec.max_num_batched_tokens
    if gpu.capacity_bytes >= 160 * GIB and rules.LARGEST_BATCHES_BY_160_GIB(spec.release_numbers):
        tokens = 16384
    elif _large(gpu):
        tokens = 8192 if spec.served else 16384
    else:
        tokens = 2048 if spec.served else 8192
    return min(tokens, max_num_seqs(spec, gpu, bounded=False) * spec.length)


def max_num_seqs(spec: InferenceSpec, gpu: Gpu, *, bounded: bool = True) -> int:
    """Sequences of a step at most. SGLang has no bound but its cache; then the sequences of its largest graph."""
    if spec.max_num_seqs is not None:
        return spec.max_num_seqs
    if spec.framework == "sglang":
        return cuda_graph_most(spec, gpu)
    found = 1024 if _large(gpu) else 256
    return min(found, max_num_batched_tokens(spec, gpu)) if bounded else found


def _large(gpu: Gpu) -> bool:
    """70 GiB and more, except A100s and the GB10."""
    return gpu.capacity_bytes >= 70 * GIB and gpu.capability not in ((8, 0), (12, 1))


def cuda_graph_most(spec: InferenceSpec, gpu: Gpu) -> int:
    """SGLang: sequences of the largest decode graph (``arg_groups/memory_hook.py: handle_gpu_memory_settings``)."""
    if spec.cuda_graph_sizes:
        return max(spec.cuda_graph_sizes)
    mib, few = gpu.capacity_bytes / MIB, spec.tensor_parallel_size < 4
    if mib < 20 * 1024:
        found = 8
    elif mib < 35 * 1024:
        found = 48 if few else 160
    elif mib < 60 * 1024:
        found = 32 if few else 160
    elif mib < 160 * 1024:
        found = 256 if few else 512
    else:
        found = 512
    return min(found, spec.max_num_seqs) if spec.max_num_seqs is not None else found


def decode_graph_sizes(spec: InferenceSpec, gpu: Gpu) -> tuple[int, ...]:
    """Sequences of the graphs of decoding, in ascending order; none with enforce_eager.

    vLLM ``config/vllm.py: _set_cudagraph_sizes``, of which those up to max_num_seqs are captured whole; SGLang
    ``arg_groups/cuda_graph_hook.py: generate_decode_cuda_graph_batch_sizes``.
    """
    if spec.enforce_eager:
        return ()
    if spec.framework == "vllm":
        return tuple(one for one in piecewise_graph_sizes(spec, gpu) if one <= max_num_seqs(spec, gpu))
    if spec.cuda_graph_sizes:
        return tuple(sorted(set(spec.cuda_graph_sizes)))
    most = cuda_graph_most(spec, gpu)
    usual = {1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, most + 1, 32)}
    return tuple(sorted({one for one in usual if one <= most} | {most}))


def piecewise_graph_sizes(spec: InferenceSpec, gpu: Gpu) -> tuple[int, ...]:
    """Tokens of the graphs that leave attention out: vLLM's compilation in pieces, SGLang's prefill graphs."""
    if spec.enforce_eager:
        return ()
    if spec.framework == "sglang":
        return _prefill_graph_sizes(spec, gpu)
    tokens, sequences = max_num_batched_tokens(spec, gpu), max_num_seqs(spec, gpu)
    if spec.cuda_graph_sizes:
        return tuple(sorted({one for one in spec.cuda_graph_sizes if one <= tokens}))
    ceiling = 1024 if gpu.capability[0] == 10 and rules.GRAPHS_OF_1024(spec.release_numbers) else 512
    widest = min(2 * sequences, ceiling)
    most = min(tokens, widest)
    usual = {1, 2, 4, *range(8, min(most + 1, 256), 8), *range(256, most + 1, 16)}
    found = {one for one in usual if one <= most}
    if tokens <= most:
        found.add(tokens)
    if sequences <= widest and sequences <= tokens:
        found.add(sequences)
    return tuple(sorted(found))


def prefills_captured(spec: InferenceSpec) -> bool:
    """SGLang captures prefills, with attention left out, unless stages are pipelined, or graphs sleep
    (``breakable_cuda_graph_backend.py``)."""
    return not (spec.enforce_eager or spec.pipeline_parallel_size > 1 or spec.sleep_cuda_graphs)


def _prefill_graph_sizes(spec: InferenceSpec, gpu: Gpu) -> tuple[int, ...]:
    """``arg_groups/cuda_graph_hook.py: generate_prefill_cuda_graph_batch_sizes``."""
    if not prefills_captured(spec):
        return ()
    most = max_num_batched_tokens(spec, gpu)
    if latent(spec):
        most = min(most, 8192)
    if "llama-2" in spec.model.name.lower():
        most = min(most, 4096)
    sizes = (*range(4, 33, 4), *range(48, 257, 16), *range(288, 513, 32), *range(576, 1025, 64),
             *range(1280, 4097, 256), *range(4608, most + 1, 512))  # fmt: skip
    return tuple(one for one in sizes if one <= most)


def latent(spec: InferenceSpec) -> bool:
    """Whether any layer has multi-latent attention."""
    return any(isinstance(layer.mixer, MLASpec) for layer, _, _ in spec.model.layer_runs)


def mem_fraction_static(spec: InferenceSpec, gpu: Gpu) -> float:
    """SGLang's share of what is free before weights are loaded: a card less a reserve (``arg_groups/memory_hook.py``).

    In MiB: 512, 1.5 a token of a prefill, 1024 for eight ranks, 2 a sequence of the largest decode graph, 8 a prefill
    graph (1536 in all with MLA); at least 10 GiB on a card of more than 60 GiB. SGLang asks nvidia-smi for the card's
    size, which is 0.6 % more than torch's on an H100: the third decimal can differ by one.
    """
    if spec.mem_fraction_static is not None:
        return spec.mem_fraction_static
    mib = gpu.capacity_bytes / MIB
    reserve = 512 + max(max_num_batched_tokens(spec, gpu), 2048) * 1.5
    reserve += spec.tensor_parallel_size * spec.pipeline_parallel_size / 8 * 1024
    most = cuda_graph_most(spec, gpu)
    if not spec.enforce_eager:
        reserve += most * 2
    if spec.dp_attention and spec.data_parallel_size > 1:
        reserve += most * spec.data_parallel_size * (4.5 if most > 300 else 3)
    if prefills_captured(spec):
        reserve += 1536 if latent(spec) else len(_prefill_graph_sizes(spec, gpu)) * 8
    if mib > 60 * 1024:
        reserve = max(reserve, 10 * 1024)
    return round((mib - reserve) / mib, 3)
