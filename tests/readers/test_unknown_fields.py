"""Fields that nobody reads, of a model_type that nobody knows: each that could build something is named."""

from __future__ import annotations

from typing import Any

import pytest

from bridge_memory import SpecError
from bridge_memory.readers.huggingface import model_from_hf_config

#: A decoder as transformers saves one, with what every config has.
CONFIG: dict[str, Any] = {
    "model_type": "never_seen", "architectures": ["NeverSeenForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 1000, "tie_word_embeddings": False,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "torch_dtype": "bfloat16", "transformers_version": "4.57.1",
    "use_cache": True, "bos_token_id": 1, "eos_token_id": [2, 3], "max_position_embeddings": 4096,
    "rope_theta": 10000.0, "initializer_range": 0.02, "return_dict": True, "id2label": {"0": "LABEL_0"},
}  # fmt: skip


def read(**more: Any) -> None:
    model_from_hf_config({**CONFIG, **more}, "here")


def test_a_plain_config_is_read() -> None:
    read()


@pytest.mark.parametrize("value", [True, 64, [1, 2], {"a": 1}])
@pytest.mark.parametrize("key", ["my_new_gate", "num_memory_tokens", "slots"])
def test_a_field_that_could_build_something_is_named(key: str, value: Any) -> None:
    with pytest.raises(SpecError, match=rf"not understood for model_type 'never_seen' .*{key}="):
        read(**{key: value})


@pytest.mark.parametrize("value", [False, None, 0, [], 0.1])
def test_a_field_that_is_off_or_a_factor_is_not(value: Any) -> None:
    read(my_new_gate=value)
