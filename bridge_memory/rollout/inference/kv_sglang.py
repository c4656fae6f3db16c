"""SGLang's KV cache: one pool of tokens; with sliding windows two; with recurrent layers one more of states.

Source: SGLang ``model_executor/pool_configurator.py`` and ``mem_cache/kv_cache_configurator.py``.
"""

from __future__ import annotations

from typing import NamedTuple

from bridge_memory.cards.gpu import Gpu
from bridge_memory.components import GIB
from bridge_memory.rollout.inference.layer_cache import Kind, layer_caches, layers_of_stage
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


class Pools(NamedTuple):
    """Pools of one rank of a stage, in bytes of a slot."""

    #: A token in all layers of full or latent attention.
    full: int
    #: A token in all layers with a window.
    sliding: int
    #: A sequence in all recurrent layers.
    state: int
    #: Tokens of the window; 0: none.
    window: int


class Sizes(NamedTuple):
    """Slots of the pools."""

    tokens: int
    sliding_tokens: int
    states: int


def page_size(spec: InferenceSpec, gpu: Gpu) -> int:
    """Tokens of a page: 1, but 64 for the TRT-LLM backends that Blackwell takes (``arg_groups/overrides.py:
    _page_size_default`` and the rules of the backends above it)."""
    if spec.block_size:
        return spec.block_size
    return 64 if gpu.capability[0] == 10 else 1


def pools(spec: InferenceSpec, stage: int) -> Pools:
    """Bytes of a token and of a state. Without a pool for windows all layers of attention keep all tokens."""
    windows = spec.model.model_type.startswith(HYBRID_WINDOWS)
    caches = layer_caches(spec, layers_of_stage(spec, stage))
    sliding = [one for one in caches if one.kind is Kind.SLIDING and windows]
    states = [one for one in caches if one.kind is Kind.STATE]
    return Pools(
        full=sum(one.nbytes for one in caches if one.kind is not Kind.STATE and one not in sliding),
        sliding=sum(one.nbytes for one in sliding),
        state=sum(one.nbytes for one in states),
        window=max((one.window for one in sliding), default=0),
    )


def sizes(spec: InferenceSpec, found: Pools, available: int, page: int) -> Sizes:
    """Slots for ``available`` bytes: ``_handle_max_mamba_cache`` first, then ``calculate_pool_sizes``.

    Bytes pass through floats of GiB as they do there, so that the last token agrees.
    """
    states = 0
    if found.state:
        rest = available / GIB
        ratio = spec.mamba_full_memory_ratio or MAMBA_FULL_MEMORY_RATIO
        if not spec.enable_prefix_caching and spec.max_num_seqs is not None:
            states = max(1, spec.max_num_seqs // (spec.data_parallel_size if spec.dp_attention else 1))
        else:
            budget = rest * ratio / (1 + ratio) * GIB
            states = max(0, int((budget - found.state) // found.state))
        available = int((rest - (states + 1) * found.state / GIB) * GIB)
    share = spec.swa_full_tokens_ratio or SWA_FULL_TOKENS_RATIO
    cell: float = found.full + share * found.sliding if found.full else found.sliding
    tokens = _paged(int(max(0, available) // cell), page) if cell else spec.length
    if spec.max_total_tokens is not None:
        tokens = min(tokens, _paged(spec.max_total_tokens, page))
    sliding = (_paged(int(tokens * share), page) if found.full else tokens) if found.sliding else 0
    return Sizes(tokens, sliding, states)


def bytes_of(found: Pools, slots: Sizes, page: int) -> int:
    """Bytes of the pools, with the page or state that each has for padding (``mem_cache/memory_pool.py``)."""
    full = slots.tokens if found.full else 0
    nbytes = (full + page) * found.full + (slots.sliding_tokens + page) * found.sliding
    return nbytes + ((slots.states + 1) * found.state if found.state else 0)


def _paged(tokens: int, page: int) -> int:
    return tokens // page * page
