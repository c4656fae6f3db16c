"""Vision encoders that Megatron Bridge builds of megatron-core's modules, against the recorded ones: parameters exact,
saved bytes and both peaks within half a per cent.

They run in a process of their own, with Transformer Engine's Python in front of Megatron Bridge 0.6 on the path.
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

SCRIPT = Path(__file__).resolve().parent / "bridge_vision.py"


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    for package in ("torch", "transformer_engine", "megatron.bridge"):
        if find_spec(package.partition(".")[0]) is None or find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if (release_in(importlib.metadata.version("megatron-bridge")) or (0, 0)) < (0, 6):
        pytest.skip("Megatron Bridge before 0.6 builds another encoder")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT)], capture_output=True, text=True, check=False
    )  # fmt: skip
    answers = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("= ")]
    assert answers, done.stderr[-2000:]
    return {answer.pop("case"): answer for answer in answers}


def test_every_case_ran(found: dict[str, dict[str, Any]]) -> None:
    assert {name: answer["error"] for name, answer in found.items() if "error" in answer} == {}
    assert len(found) >= 8


def test_encoders_of_megatron_core_are_as_recorded(found: dict[str, dict[str, Any]]) -> None:
    """At several widths, depths, tensor-parallel sizes and images; nothing was fitted to any of them."""
    for name, answer in found.items():
        ours, real = answer.pop("parameters")
        assert ours == real, (name, ours, real)
        for what, (ours, real) in answer.items():
            assert abs(ours - real) <= 0.005 * real, (name, what, ours, real)
