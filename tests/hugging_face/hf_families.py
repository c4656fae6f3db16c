"""A small config of every family that is recorded, one for each way in which its class differs."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 640, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **TINY},
}
