"""Emitted arguments go through Megatron-LM's own parser and its ``validate_args``, and what comes out is the run.

The parser of 0.19.2 is in the wheels of megatron-core from 0.17 on; without one on the path, the options are held
against its record.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_read_back import DRAWN as DRAWN_TO_READ
from test_read_back import different, drawn, running
from wide_runs import wide_runs

from bridge_memory import RunSpec, SpecError
from bridge_memory.emit.commands import Emitted
from bridge_memory.emit.megatron_args import megatron_arguments
from bridge_memory.readers.megatron_args import run_from_megatron_args

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "tests" / "data" / "megatron_lm_arguments.json"
DRAWN = 150
#: What every command line has beside what is copied: a tokenizer, and data.
BESIDE = "--tokenizer-type NullTokenizer --mock-data"
#: What ``validate_args`` refuses of a run that a RunSpec may be: other releases take it, or nobody asks for it.
REFUSED = (
    "Transformer Engine >= 2.7", "--main-grads-dtype can only be fp32", "optimizer cpu offload must be used",
    "--fp8-param-gather only supported", "can distribute recomputed activations", "Must use --overlap-param-gather",
    "Transformer Engine cross entropy loss fusion is disabled", "--hierarchical-context-parallel-sizes",
    "only supported with transformer_engine", "residual connection in fp32 only supported",
    "must be empty when --cuda-graph-impl=full_iteration",
)  # fmt: skip


def emitted(runs: Any) -> list[tuple[RunSpec, Emitted]]:
    """Those whose model the arguments say too."""
    found = []
    for run in runs:
        try:
            text = megatron_arguments(run)
        except SpecError:
            continue
        if "model" not in text.left:
            found.append((run, text))
    return found


def test_every_option_that_is_written_is_one_of_the_parser() -> None:
    record = json.loads(RECORDED.read_text())
    known = record["defaults"].keys() | record["options"].keys()
    for run, text in emitted(drawn("read back", DRAWN_TO_READ)):
        options = [word.removeprefix("--").replace("-", "_") for word in shlex.split(text.text) if word[:2] == "--"]
        assert not set(options) - known, run


@functools.cache
def namespaces(folder: str, scratch: Path) -> list[tuple[RunSpec, Emitted, dict[str, Any], dict[str, Any]]]:
    """(run, its arguments, what the parser makes of them, its defaults)."""
    several = emitted(itertools.islice(wide_runs("parser"), DRAWN))
    lines = {
        str(i): [f"{text.text} {BESIDE}" + " --ckpt-format fsdp_dtensor" * run.data_parallel.fsdp,
                 run.parallel.world_size]
        for i, (run, text) in enumerate(several)
    }  # fmt: skip
    (scratch / "lines.json").write_text(json.dumps(lines))
    made = subprocess.run(
        [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "maintain" / "megatron_lm_namespaces.py"),
         str(scratch / "found.json"), "--lines", str(scratch / "lines.json")],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": folder}, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    document = json.loads((scratch / "found.json").read_text())
    return [
        (run, text, document["runs"][str(i)], document["defaults"]) for i, (run, text) in enumerate(several)
    ]


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("torch")
    held = (path for path in sys.path if (Path(path or ".") / "megatron" / "training" / "arguments.py").is_file())
    folder = next(held, None)
    if folder is None:
        pytest.skip("no megatron-core with megatron/training/arguments.py is on the path")
    return namespaces(folder, tmp_path_factory.mktemp("parser"))


def test_the_parser_takes_them(parsed: Any) -> None:
    for run, text, found, _ in parsed:
        assert found.get("parsed", True), (found["refused"], text.text, run)


def test_validate_args_refuses_only_what_is_no_run_of_this_release(parsed: Any) -> None:
    refused = [found["refused"] for *_, found, _ in parsed if "refused" in found]
    assert not [words for words in refused if not any(known in words for known in REFUSED)]
    assert len(refused) < 0.4 * len(parsed)


def test_what_it_makes_of_them_is_the_run(parsed: Any) -> None:
    """The namespace after ``validate_args``, as a callback in a job reads it."""
    for run, text, found, defaults in parsed:
        if "refused" in found:
            continue
        values = {name: value for name, value in defaults.items() if name not in found["removed"]} | found["namespace"]
        read = run_from_megatron_args(
            SimpleNamespace(**values), world_size=run.parallel.world_size, **running(run, text.left)
        )
        arch = run.implementation.gpu_arch
        read = replace(read, implementation=replace(read.implementation, gpu_arch=arch))
        releases = {f"implementation.{name}" for name in ("megatron_core", "transformer_engine", "torch", "gpu_arch")}
        assert different(run, read) == set(text.left) - releases, text.text
