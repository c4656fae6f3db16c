"""Megatron Bridge's Wan, rehearsed, against the recorded one: parameters exact and in order, saved bytes and both peaks
within 0.3 %.

It runs in a process of its own, with Transformer Engine's Python in front of Megatron Bridge 0.6 on the path.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bridge_memory.releases import release_in

SCRIPT = Path(__file__).resolve().parent / "bridge_diffusion.py"


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    for package in ("torch", "transformer_engine", "megatron.bridge", "diffusers"):
        if find_spec(package.partition(".")[0]) is None or find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if (release_in(importlib.metadata.version("megatron-bridge")) or (0, 0)) < (0, 6):
        pytest.skip("Megatron Bridge before 0.6 has no such models")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)], capture_output=True, text=True, check=False
    )  # fmt: skip
    answers = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("= ")]
    assert answers, done.stderr[-2000:]
    return {answer.pop("case"): answer for answer in answers}


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
