"""vLLM's KV cache: blocks of one size, shared by groups of layers.

Source: vLLM ``v1/core/kv_cache_planning.py`` (``get_kv_cache_groups``, ``get_kv_cache_configs``) and
``v1/kv_cache_interface.py``, with the layer-outermost layout that FLASH_ATTN, FLASHINFER and the MLA backends prefer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from bridge_memory.cards.gpu import Gpu
from bridge_memory.rollout.inference import defaults, rules
from bridge_memory.rollout.inference.layer_cache import Kind, LayerCache, layer_caches, layers_of_stage, sparse
from bridge_memory.rollout.inference.spec import InferenceSpec

#: Tokens of a block if no backend asks for another (``config/cache.py: DEFAULT_BLOCK_SIZE``).
DEFAULT_BLOCK = 16
#: Sparse attention and its indexer (``v1/attention/backends/mla/indexer.py``).
SPARSE_BLOCK = 64
#: Hybrids of MLA and recurrent layers: a multiple of this (``platforms/interface.py: _align_hybrid_block_size``).
MLA_HYBRID_BLOCK = 128


class Group(NamedTuple):
    """Layers with one block table."""

    kind: Kind
    #: Tokens of a block.
    block_size: int
    #: Indices of its layers, and the bytes of a block of each.
    layers: tuple[tuple[int, int], ...]
    window: int = 0

    def blocks_of(self, length: int, in_flight: int, aligned: bool) -> int:
        """Blocks that a sequence of ``length`` tokens holds at most.

        Args:
            length: Tokens.
            in_flight: Tokens that are scheduled and not yet settled (``config/vllm.py: max_in_flight_tokens``).
            aligned: A recurrent layer also keeps states at block boundaries (``mamba_cache_mode`` "align").
        """
        if self.kind is Kind.STATE:
            return 2 if aligned else 1
        if self.kind is Kind.SLIDING:
            held = min(self.window - 1 + in_flight, length)
            return -(-held // self.block_size) + 1
        return -(-length // self.block_size)


class Plan(NamedTuple):
    """The cache of one rank of a stage."""

    groups: tuple[Group, ...]
    #: Bytes of a block: those of the largest group.
    block_bytes: int


class _Layer(NamedTuple):
    place: int
    cache: LayerCache
    block_size: int
    page: int


@lru_cache(maxsize=512)
def default_block_size(spec: InferenceSpec, gpu: Gpu) -> int:
    """Tokens of a block before alignment: 16 unless the attention backend takes none of 16 (``platforms/cuda.py:
    _get_backend_priorities`` and ``get_supported_kernel_block_sizes`` of the backends)."""
    if spec.block_size:
        return spec.block_size
    caches = _whole(spec)
    if sparse(spec) is not None:
        return SPARSE_BLOCK
    if any(one.kind is Kind.LATENT for one in caches) and gpu.capability[0] == 10:
        return 32  # FLASHINFER_MLA: 32 or 64
    if any(one.kind is Kind.LATENT for one in caches) and gpu.capability[0] == 9 and spec.kv_cache_dtype != "auto":
        return 64  # FLASHMLA: 64; FLASH_ATTN_MLA holds no fp8
    return DEFAULT_BLOCK


@lru_cache(maxsize=512)
def block_size(spec: InferenceSpec, gpu: Gpu) -> int:
    """Tokens of a block of attention. With recurrent layers it grows until a block is as large as a state
    (``platforms/interface.py: _align_hybrid_block_size``)."""
    base = default_block_size(spec, gpu)
    caches = _whole(spec)
    states = [one.nbytes for one in caches if one.kind is Kind.STATE]
    tokens = [one for one in caches if one.kind is not Kind.STATE]
    if not states or not tokens:
        return base
    multiple = DEFAULT_BLOCK
    align = max(multiple, base)
    if tokens[0].kind is Kind.LATENT:
        align = max(align, MLA_HYBRID_BLOCK)
    size = align * -(-max(states) // (align * tokens[0].nbytes))
    return max(base, lcm(multiple, 1) * -(-size // multiple))


def aligned_states(spec: InferenceSpec) -> bool:
    """Recurrent layers keep states at block boundaries for prefix caching (``models/config.py: MambaModelConfig``)."""
    return spec.enable_prefix_caching


@lru_cache(maxsize=512)
def plan(spec: InferenceSpec, gpu: Gpu, stage: int) -> Plan:
    """Groups of the layers of a stage, and the bytes of a block. Groups are made of all stages' layers and then
    projected (``_project_kv_cache_groups_to_worker``)."""
    whole = _groups(spec, gpu)
    here = layers_of_stage(spec, stage)
    groups = tuple(
        group._replace(layers=tuple(one for one in group.layers if one[0] in here)) for group in whole
    )  # fmt: skip
    return Plan(groups, max((sum(page for _, page in group.layers) for group in groups), default=0))


def in_flight_tokens(spec: InferenceSpec, gpu: Gpu) -> int:
    """Tokens of all batches that run at once (``config/vllm.py: max_concurrent_batches``)."""
    batches = spec.pipeline_parallel_size
    if spec.async_scheduling and (rules.SECOND_RUNNER(spec.release_numbers) or batches == 1):
        batches += 1
    return batches * defaults.max_num_batched_tokens(spec, gpu)


@lru_cache(maxsize=4096)
def blocks_of(spec: InferenceSpec, gpu: Gpu, length: int) -> int:
    """Blocks that a sequence of ``length`` tokens holds at most, over all groups."""
    groups = _groups(spec, gpu)
    tokens, aligned = in_flight_tokens(spec, gpu), aligned_states(spec)
    return sum(group.blocks_of(length, tokens, aligned) for group in groups)


def reported_tokens(spec: InferenceSpec, gpu: Gpu, blocks: int) -> int:
    """Tokens that vLLM reports: sequences of max_model_len that fit, times that (``get_kv_cache_capacity``)."""
    needed = blocks_of(spec, gpu, spec.length)
    return int(blocks / needed * spec.length) if needed else 0


@lru_cache(maxsize=512)
def _groups(spec: InferenceSpec, gpu: Gpu) -> tuple[Group, ...]:
    return groups_of(_layers(spec, gpu))


def _whole(spec: InferenceSpec) -> list[LayerCache]:
    return layer_caches(spec, range(spec.model.num_layers))


def _layers(spec: InferenceSpec, gpu: Gpu) -> list[_Layer]:
    tokens = block_size(spec, gpu)
    found: list[_Layer] = []
    for index in range(spec.model.num_layers):
        for cache in layer_caches(spec, range(index, index + 1)):
            if cache.kind is Kind.STATE:
                found.append(_Layer(index, cache, 0, cache.nbytes))
            else:
                found.append(_Layer(index, cache, tokens, cache.nbytes * tokens))
    padded = max((one.page for one in found if one.cache.kind is not Kind.STATE), default=0)
    return [
        one._replace(page=max(one.page, padded)) if one.cache.kind is Kind.STATE else one for one in found
    ]  # fmt: skip


def groups_of(layers: Sequence[_Layer]) -> tuple[Group, ...]:
    """``get_kv_cache_groups``: one group where all layers keep tokens alike, else groups of equally many layers."""
    if not layers:
        return ()
    first = layers[0]
    alike = all(_alike(first, one) for one in layers)
    if alike:
        return (_group(layers),)
    unified = _unified(layers)
    buckets: dict[tuple[Kind, int, int, int], list[_Layer]] = {}
    for one in unified:
        kind = Kind.FULL if one.cache.kind is Kind.LATENT else one.cache.kind
        own = 0 if kind is Kind.STATE else one.cache.nbytes
        buckets.setdefault((kind, one.cache.window, one.block_size, own), []).append(one)
    fewest, most = min(map(len, buckets.values())), max(map(len, buckets.values()))
    size = most if most < fewest * 1.5 else fewest
    found: list[Group] = []
    for bucket in buckets.values():
        number = -(-len(bucket) // size)
        found += [_group(bucket[place::number]) for place in range(number)]
    return tuple(found)


def _alike(first: _Layer, other: _Layer) -> bool:
    """``UniformTypeKVCacheSpecs.is_uniform_type``: layers that always need equally many blocks."""
    mine, its = first.cache, other.cache
    if mine.kind is Kind.SLIDING or its.kind is Kind.SLIDING:
        return mine.kind is its.kind and mine.window == its.window and first.block_size == other.block_size
    if mine.kind is Kind.STATE or its.kind is Kind.STATE:
        return mine.kind is its.kind and first.page == other.page
    return first.block_size == other.block_size


def _unified(layers: Sequence[_Layer]) -> list[_Layer]:
    """``unify_kv_cache_spec_page_size``: smaller pages take more tokens, or are padded where they do not divide."""
    most = max(one.page for one in layers)
    found: list[_Layer] = []
    for one in layers:
        if one.page < most and one.cache.kind is not Kind.STATE and most % one.page == 0:
            one = one._replace(block_size=one.block_size * (most // one.page))
        found.append(one._replace(page=most))
    return found


def _group(layers: Sequence[_Layer]) -> Group:
    first = layers[0]
    return Group(first.cache.kind, first.block_size, tuple((one.place, one.page) for one in layers), first.cache.window)
