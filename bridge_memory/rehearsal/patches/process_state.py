"""State that megatron-core keeps for the process: caches, loss scales, losses to log, experimental features."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bridge_memory.rehearsal.patches.replace import module_or_empty, replaced


@contextmanager
def fresh_caches() -> Iterator[None]:
    """Clear megatron-core's caches of masks and rotary tables before and after the block."""
    utils = module_or_empty("megatron.core.transformer.utils")
    rotary = module_or_empty("megatron.core.models.common.embeddings.rotary_pos_embedding")
    cached: list[Any] = [
        getattr(utils, "get_default_causal_mask", None),
        getattr(utils, "get_sliding_window_causal_mask", None),
        getattr(getattr(rotary, "RotaryEmbedding", None), "forward", None),
        getattr(getattr(rotary, "RotaryEmbedding", None), "get_cos_sin", None),
    ]

    def clear() -> None:
        for function in cached:
            if hasattr(function, "cache_clear"):
                function.cache_clear()

    clear()
    try:
        yield
    finally:
        clear()


@contextmanager
def loss_scales_restored() -> Iterator[None]:
    """Restore loss scales and logged losses, which passes set on classes (``moe_utils.py: MoEAuxLossAutoScaler``)."""
    moe = getattr(module_or_empty("megatron.core.transformer.moe.moe_utils"), "MoEAuxLossAutoScaler", None)
    mtp = getattr(module_or_empty("megatron.core.transformer.multi_token_prediction"), "MTPLossAutoScaler", None)
    name = "main_loss_backward_scale"
    logged = getattr(module_or_empty("megatron.core.transformer.multi_token_prediction"), "MTPLossLoggingHelper", None)
    dsa = module_or_empty("megatron.core.transformer.experimental_attention_variant.dsa")
    of_indexer = getattr(dsa, "DSAIndexerLossAutoScaler", None)
    of_indexers = getattr(dsa, "DSAIndexerLossLoggingHelper", None)
    with (
        replaced(moe, name, None), replaced(mtp, name, getattr(mtp, name, None)), replaced(logged, "tracker", {}),
        replaced(of_indexer, name, None), replaced(of_indexers, "tracker", {}),
    ):  # fmt: skip
        yield


@contextmanager
def experimental_features_enabled() -> Iterator[None]:
    """Set ``--enable-experimental``, which MLA's fused rotary embedding needs in 0.13 and 0.14.

    A run that sets the fusion is assumed to set that flag too. Decorators read it at each call (``utils.py:
    experimental_fn``).
    """
    with replaced(module_or_empty("megatron.core.config"), "ENABLE_EXPERIMENTAL", True):
        yield
