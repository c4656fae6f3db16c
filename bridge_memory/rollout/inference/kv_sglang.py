"""SGLang's KV cache: one pool of tokens; with sliding windows two; with recurrent layers one more of states.

Source: SGLang ``model_executor/pool_configurator.py`` and ``mem_cache/kv_cache_configurator.py``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import GIB
from bridge_memory.rollout.inference import defaults
from bridge_memory.rollout.inference.layer_cache import Kind, layer_caches, layers_of_stage, sparse
from bridge_memory.rollout.inference.spec import InferenceSpec

#: ``arg_groups/fields/schedule.py``: swa_full_tokens_ratio, mamba_full_memory_ratio.
SWA_FULL_TOKENS_RATIO = 0.8
MAMBA_FULL_MEMORY_RATIO = 0.9
#: Model types whose sliding windows have a pool of their own (``configs/model_config.py: is_hybrid_swa_model``);
#: others, Gemma 3 among them, keep all tokens of all layers.
HYBRID_WINDOWS = ("gpt_oss", "mimo_v2", "gemma4", "llama4", "step3p5")
#: Recurrent states of a sequence with a radix cache: the running one, two kept with the tree, and two that are written
#: in turn while batches overlap (``MAMBA_CACHE_SIZE_MAX_RUNNING_REQUESTS_RATIO``, ``get_mamba_tracking_slots``).
STATES_A_SEQUENCE, STATES_WHILE_OVERLAPPING = 3, 2
#: Decoded tokens after which tokens before the window are freed (``environ.py: SGLANG_SWA_EVICTION_INTERVAL``).
EVICTION_INTERVAL = 128


class Pools(NamedTuple):
    """Pools of one rank of a stage, in bytes of a slot."""

    #: A token in all layers of full or latent attention.
    full: int
    #: A token in all layers with a window.
    sliding: int
    #: A sequence in all recurrent layers.
    state: int
    #: What the budget is charged for a sequence: the recurrent layers of the stage with the most.
    charged: int
    #: Tokens of the window; 0: none.
    window: int


class Sizes(NamedTuple):
    """Slots of the pools."""

    tokens: int
    sliding_tokens: int
    states: int


def page_size(spec: InferenceSpec, gpu: Gpu) -> int:
    """Tokens of a page: 1, but 64 for sparse attention and for the TRT-LLM backends of Blackwell (``overrides.py:
    _page_size_default`` and the rules of the backends above it)."""
    if spec.block_size:
        return spec.block_size
    return 64 if gpu.capability[0] == 10 or sparse(spec) is not None else 1


@lru_cache(maxsize=512)
def pools(spec: InferenceSpec, stage: int) -> Pools:
    """Bytes of a token and of a state. Without a pool for windows all layers of attention keep all tokens."""
    windows = spec.model.model_type.startswith(HYBRID_WINDOWS)
    caches = layer_caches(spec, layers_of_stage(spec, stage))
    sliding = [one for one in caches if one.kind is Kind.SLIDING and windows]
    return Pools(
        full=sum(one.nbytes for one in caches if one.kind is not Kind.STATE and one not in sliding),
        sliding=sum(one.nbytes for one in sliding),
        state=sum(one.nbytes for one in caches if one.kind is Kind.STATE),
        charged=_charged(spec),
        window=max((one.window for one in sliding), default=0),
    )


def _charged(spec: InferenceSpec) -> int:
    """``_handle_max_mamba_cache``: all layers' bytes times the largest share of a stage, in floats as there."""
    stages = range(spec.pipeline_parallel_size)
    states = [
        [one.nbytes for one in layer_caches(spec, layers_of_stage(spec, stage)) if one.kind is Kind.STATE]
        for stage in stages
    ]
    layers = sum(map(len, states))
    return int(sum(map(sum, states)) * (max(map(len, states)) / layers)) if layers else 0


def sizes(spec: InferenceSpec, gpu: Gpu, found: Pools, available: int, page: int) -> Sizes:
    """Slots for ``available`` bytes: ``_handle_max_mamba_cache`` first, then ``calculate_pool_sizes``.

    Bytes pass through floats of GiB as they do there, so that the last token agrees.
    """
    states = 0
    if found.charged:
        rest = available / GIB
        ratio = spec.mamba_full_memory_ratio or MAMBA_FULL_MEMORY_RATIO
        if not spec.enable_prefix_caching and spec.max_num_seqs is not None:
            states = max(1, spec.max_num_seqs // _attention_dp(spec))
        else:
            budget = rest * ratio / (1 + ratio) * GIB
            states = max(0, int((budget - found.charged) // found.charged))
        available = int((rest - (states + 1) * found.charged / GIB) * GIB)
    most = spec.length if spec.max_total_tokens is None else spec.max_total_tokens
    if found.full and found.sliding and _capped(spec):
        fixed = _up(_cap(spec, gpu, found.window, page), page)
        tokens = _paged(int(max(0, available - fixed * found.sliding) // found.full), page)
        if spec.max_total_tokens is not None:
            tokens = min(tokens, _paged(spec.max_total_tokens, page))
        return Sizes(tokens, fixed, states)
    share = spec.swa_full_tokens_ratio or SWA_FULL_TOKENS_RATIO
    cell: float = found.full + share * found.sliding if found.full else found.sliding
    tokens = _paged(int(max(0, available) // cell), page) if cell else most
    if spec.max_total_tokens is not None:
        tokens = min(tokens, _paged(spec.max_total_tokens, page))
    return Sizes(tokens, sliding_tokens(spec, found, tokens, page), states)


def sliding_tokens(spec: InferenceSpec, found: Pools, tokens: int, page: int) -> int:
    """Tokens of the pool for windows beside ``tokens`` of full attention."""
    if not found.sliding:
        return 0
    share = spec.swa_full_tokens_ratio or SWA_FULL_TOKENS_RATIO
    return _paged(int(tokens * share), page) if found.full else tokens


def shrunk(spec: InferenceSpec, found: Pools, slots: Sizes, tokens: int, page: int) -> Sizes:
    """``slots`` with the ``tokens`` that all stages agree on (``_apply_token_constraints``)."""
    if tokens == slots.tokens:
        return slots
    if found.full and found.sliding and _capped(spec):
        return slots._replace(tokens=tokens, sliding_tokens=min(slots.sliding_tokens, tokens))
    return slots._replace(tokens=tokens, sliding_tokens=sliding_tokens(spec, found, tokens, page))


def most_requests(spec: InferenceSpec, found: Pools, slots: Sizes) -> int:
    """Sequences that run at once at most (``resolve_max_num_reqs``): max_running_requests, or 512 for each context's
    worth of tokens, 2048 to 4096; one for two tokens; and as many as the recurrent states serve."""
    if spec.max_num_seqs is not None:
        most = max(1, spec.max_num_seqs // _attention_dp(spec))
    else:
        most = max(min(int(slots.tokens / spec.length * 512), 4096), 2048)
    most = min(most, slots.tokens // 2)
    if found.charged:
        each = 1
        if spec.enable_prefix_caching:
            each = STATES_A_SEQUENCE + (STATES_WHILE_OVERLAPPING if spec.async_scheduling else 1)
        most = min(most, slots.states // each)
    return most


def _attention_dp(spec: InferenceSpec) -> int:
    return spec.data_parallel_size if spec.dp_attention else 1


def _capped(spec: InferenceSpec) -> bool:
    """Without a radix cache the pool for windows holds what max_running_requests can use
    (``SWARequestCapPoolConfigurator.is_applicable``)."""
    return spec.max_num_seqs is not None and not spec.enable_prefix_caching


def _cap(spec: InferenceSpec, gpu: Gpu, window: int, page: int) -> int:
    """``compute_swa_request_cap``: for each sequence the window, what is not evicted yet and two pages; and the chunks
    of a prefill that are in flight."""
    sequences = max(1, (spec.max_num_seqs or 1) // _attention_dp(spec))
    chunks = 2 if spec.async_scheduling else 1
    prefill = chunks * defaults.max_num_batched_tokens(spec, gpu)
    return (window + EVICTION_INTERVAL + 2 * page) * sequences + prefill + page


def bytes_of(found: Pools, slots: Sizes, page: int) -> int:
    """Bytes of the pools, with the page or state that each has for padding (``mem_cache/memory_pool.py``)."""
    full = slots.tokens if found.full else 0
    nbytes = (full + page) * found.full + (slots.sliding_tokens + page) * found.sliding
    return nbytes + ((slots.states + 1) * found.state if found.state else 0)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _paged(tokens: int, page: int) -> int:
    return tokens // page * page
