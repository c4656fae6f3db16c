"""Megatron Bridge's Wan, rehearsed, against the recorded one: parameters exact and in order, saved bytes and both peaks
within 0.3 %.

It runs in a separate process, with Transformer Engine's Python in front of Megatron Bridge 0.6 on the path.
"""

from __future__ import annotations

from typing import Any

import pytest
from bridge_child import answers_of


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    return answers_of("bridge_diffusion.py", "diffusers")


def test_every_case_ran(found: dict[str, dict[str, Any]]) -> None:
    assert {name: answer["error"] for name, answer in found.items() if "error" in answer} == {}
    assert len(found) >= 7


def test_parameters_are_those_that_are_built(found: dict[str, dict[str, Any]]) -> None:
    assert {name: answer["wrong"] for name, answer in found.items() if answer["wrong"]} == {}
    assert all(answer["order"] for answer in found.values())


def test_bytes_are_those_of_the_rehearsal(found: dict[str, dict[str, Any]]) -> None:
    """At both published widths, over tensor- and context-parallel ranks, recomputed or not; nothing was fitted."""
    for name, answer in found.items():
        for what in ("saved", "forward", "backward"):
            ours, real = answer[what]
            assert abs(ours - real) <= 0.003 * real, (name, what, ours, real)
