"""Sizes that a text_config inside a wrapper may leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: The sizes, in the order of the defaults.
NESTED_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
#: Their defaults in transformers' config classes. A text_config inside a wrapper stores only differences from
#: them; a separate config.json names every size.
NESTED_DEFAULTS = {
    "llama": (32000, 4096, 11008, 32, 32, None),
    "mistral": (32000, 4096, 14336, 32, 32, 8),
    "qwen2": (151936, 4096, 22016, 32, 32, 32),
    "gemma": (256000, 3072, 24576, 28, 16, 16),
    "gemma2": (256000, 2304, 9216, 26, 8, 4),
    "gemma3_text": (262208, 2304, 9216, 26, 8, 4),
    "gemma4_text": (262144, 2304, 9216, 30, 8, 4),
    "phi3": (32064, 3072, 8192, 32, 32, None),
}


def nested_width(text: Mapping[str, Any]) -> Mapping[str, Any]:
    """``text`` with the default of hidden_size, where it says none and its class has one."""
    known = NESTED_DEFAULTS.get(str(text.get("model_type")))
    return text if text.get("hidden_size") is not None or known is None else {**text, "hidden_size": known[1]}
