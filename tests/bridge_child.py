"""Cases of Megatron Bridge's own modules, computed in a separate process.

Stubs of CUDA-only packages must come before megatron.core is imported. A script of cases ends in ``print_answers``, and
its test asks ``answers_of``.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bridge_memory.releases import release_in

PACKAGES = ("torch", "transformer_engine", "megatron.bridge")


def answers_of(script: str, *packages: str) -> dict[str, dict[str, Any]]:
    """What ``tests/script`` prints of each case. Skips without Transformer Engine's Python, Megatron Bridge 0.6 and the
    other ``packages`` on the path."""
    for package in (*PACKAGES, *packages):
        if find_spec(package.partition(".")[0]) is None or find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if (release_in(importlib.metadata.version("megatron-bridge")) or (0, 0)) < (0, 6):
        pytest.skip("the modules are those of Megatron Bridge 0.6")
    path = Path(__file__).resolve().parent / script
    done = subprocess.run([sys.executable, "-W", "ignore", str(path)], capture_output=True, text=True, check=False)
    answers = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("= ")]
    assert answers, done.stderr[-2000:]
    return {answer.pop("case"): answer for answer in answers}


def pairs(ours: Any, record: Any) -> dict[str, list[int]]:
    """[predicted, rehearsed] bytes: saved, and the peaks of both passes."""
    return {
        "saved": [ours.retained, record.saved_bytes + record.held_bytes],
        "forward": [ours.forward_peak, record.forward_peak.bytes],
        "backward": [ours.backward_peak, record.backward_peak.bytes],
    }


def print_answers(cases: Iterable[str], answer: Callable[[str], dict[str, Any]]) -> None:
    """A JSON line for each of ``cases``; an exception is the case's ``error``, or is raised if VERBOSE is set."""
    logging.disable(logging.CRITICAL)
    for name in cases:
        try:
            with contextlib.redirect_stdout(sys.stderr):
                found = answer(name)
        except Exception as error:
            if os.environ.get("VERBOSE"):
                raise
            found = {"error": f"{type(error).__name__}: {error}"}
        print("=", json.dumps({"case": name, **found}))
