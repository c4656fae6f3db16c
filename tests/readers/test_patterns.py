"""Megatron's layer patterns, as a number, a list or an expression; held to megatron-core's own readings."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory.readers.patterns import layer_pattern
from bridge_memory.spec import SpecError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, "111111"), (2, "101010"), (4, "100010"), ("3", "100100"), ([0, 0, 1, 1, 1, 1], "001111"),
        ((False, True) * 3, "010101"), ("[0]*2+[1]*4", "001111"), ("([0]*1+[1]*5)", "011111"), ("3*[0,1]", "010101"),
        ("'[0]*6'", "000000"), ("[[0]*3,[1]*3]", "000111"), ("([1]+[0]*2)*2", "100100"),
    ],
)  # fmt: skip
def test_every_way_to_write_a_pattern(value: Any, expected: str) -> None:
    assert layer_pattern(value, 6, "moe_layer_freq") == tuple(x == "1" for x in expected)


@pytest.mark.parametrize("value", [1, 2, 3, 6, [1, 1, 0, 1, 1, 0]])
def test_sparse_patterns_are_megatron_cores(value: Any) -> None:
    pytest.importorskip("megatron.core")
    variants = pytest.importorskip("megatron.core.models.gpt.experimental_attention_variant_module_specs")
    from megatron.core.transformer.utils import is_layer_window_attention

    ours = list(layer_pattern(value, 6, "freq", sparse=True))
    config = SimpleNamespace(num_layers=6, linear_attention_freq=value)
    assert ours == [bool(x) for x in variants.get_linear_attention_pattern(config)]
    assert ours == [bool(is_layer_window_attention((128, 0), value, i + 1)) for i in range(6)]


@pytest.mark.parametrize(
    "value",
    [0, -1, [1, 0], [2] * 6, "[0]*2+[1]*3", "open('x')", "[0]*10**9", "", 1.5, "1+[1]", True, None, "[1]*[0]", "1.5"],
)
def test_a_wrong_pattern_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(SpecError, match=r"^moe_layer_freq ") as error:
        layer_pattern(value, 6, "moe_layer_freq")
    assert "\n" not in str(error.value)
