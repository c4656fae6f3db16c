"""Bytes of Megatron Bridge's own import of small checkpoints, beside those that are predicted.

It runs in a process of its own, with Transformer Engine's Python in front of Megatron Bridge 0.6 on the path.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from bridge_memory.releases import release_in

SCRIPT = Path(__file__).resolve().parent / "bridge_import.py"


def test_an_import_holds_what_is_predicted() -> None:
    for package in ("torch", "transformer_engine", "megatron.bridge"):
        if find_spec(package.partition(".")[0]) is None or find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if (release_in(importlib.metadata.version("megatron-bridge")) or (0, 0)) < (0, 6):
        pytest.skip("the checkpoints are those that Megatron Bridge 0.6 reads")
    done = subprocess.run([sys.executable, "-W", "ignore", str(SCRIPT)], capture_output=True, text=True, check=False)
    answers = [json.loads(line[2:]) for line in done.stdout.splitlines() if line.startswith("= ")]
    assert len(answers) >= 11, done.stderr[-2000:]
    assert {a["case"]: a["error"] for a in answers if "error" in a} == {}
    # Router biases and scales are in no amount.
    wrong = {a["case"]: a["bytes"] for a in answers if abs(a["bytes"][0] - a["bytes"][1]) > 0.001 * a["bytes"][1]}
    assert wrong == {}
