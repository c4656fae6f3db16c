"""Vision encoders that Megatron Bridge builds of megatron-core's modules or has of its own (Step-3.7), against the
recorded ones: parameters exact, saved bytes and both peaks within half a per cent.

They run in a process of their own, with Transformer Engine's Python in front of Megatron Bridge 0.6 on the path.
"""

from __future__ import annotations

from typing import Any

import pytest
from bridge_child import answers_of


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return answers_of("bridge_vision.py")


def test_every_case_ran(found: dict[str, dict[str, Any]]) -> None:
    assert {name: answer["error"] for name, answer in found.items() if "error" in answer} == {}
    assert len(found) >= 30


def test_encoders_of_megatron_bridge_are_as_recorded(found: dict[str, dict[str, Any]]) -> None:
    """At several widths, depths, tensor-parallel sizes and images; nothing was fitted to any of them."""
    for name, answer in found.items():
        ours, real = answer.pop("parameters")
        assert ours == real, (name, ours, real)
        for what, (ours, real) in answer.items():
            assert abs(ours - real) <= 0.005 * real, (name, what, ours, real)
