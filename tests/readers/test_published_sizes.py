"""Sizes that were written down for recipes of Megatron Bridge: transformers' own modules of them have as many
parameters as the model's card says (``scripts/published_sizes.py``)."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from scripts_of import load_script
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

PUBLISHED_SIZES = load_script("published_sizes").PUBLISHED_SIZES
#: Part of a hub name, written as recipes write it.
COUNTED = {part: found for part, found in PUBLISHED_SIZES.items() if found.billions is not None}
CHEAP = ("gemma-3-4b", "Qwen2.5-VL-3B", "EXAONE-4.0-1.2B")


def parameters(part: str) -> int:
    """Parameters of the class on the meta device, tied weights once."""
    recipes = load_script("bridge_recipes")
    kind = recipes.model_type_of(part + "-")
    if kind is None or kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {kind}")
    config = recipes.stand_in(part + "-", kind)
    if "Qwen3-VL" in part and version("transformers").startswith("4."):
        pytest.skip("the class of transformers 4 wants rope_scaling, which the written-down sizes do not say")
    build: Any = AutoModelForCausalLM.from_config
    if hasattr(config, "audio_config"):
        from transformers import Qwen2AudioForConditionalGeneration as build
    elif hasattr(config, "vision_config"):
        from transformers import AutoModelForImageTextToText

        build = AutoModelForImageTextToText.from_config
    with torch.device("meta"):
        return sum(p.numel() for p in build(config).parameters())


@pytest.mark.parametrize("part", [
    pytest.param(part, marks=() if part in CHEAP else pytest.mark.slow) for part in COUNTED
])
def test_a_model_has_the_parameters_of_its_card(part: str) -> None:
    found, said = parameters(part), COUNTED[part].billions
    assert said is not None
    assert found / 1e9 == pytest.approx(said, rel=0.02)
