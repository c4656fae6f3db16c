"""The JSON of every command is valid by the schema that ships with it, and the schema refuses what lacks a key."""

from __future__ import annotations

import copy
import json
import pickle
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import bridge_memory
from bridge_memory.cli import COMMANDS, main

jsonschema = pytest.importorskip("jsonschema")

SCHEMAS = Path(bridge_memory.__file__).parent / "report"
SPEEDS = Path(__file__).parents[1] / "data" / "throughput" / "runs.jsonl"
EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = Path(__file__).parents[1] / "data" / "measurements" / "runs.jsonl"
FAILURE = (
    "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. GPU 1 has a total capacity of "
    "79.10 GiB of which 1.20 GiB is free. Process 7 has 2.00 GiB memory in use. Including non-PyTorch memory, this "
    "process has 75.90 GiB memory in use. Of the allocated memory 70.12 GiB is allocated by PyTorch, and 4.35 GiB is "
    "reserved by PyTorch but unallocated.\n"
)
LOG = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1000.0 | max allocated: 2000.0 | reserved: 2100.0"


def printed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> Any:
    assert main([*argv, "--format", "json"]) == code
    return json.loads(capsys.readouterr().out)


def of_every_kind(capsys: pytest.CaptureFixture[str], command: str, tmp_path: Path) -> list[Any]:
    model = ["Llama-3.2-1B", "--num-gpus", "2", "--tp", "2"]
    if command == "compare":
        log = tmp_path / "train.log"
        log.write_text(LOG + "\n")
        snapshot = tmp_path / "snapshot.pickle"
        block = {"address": 0, "size": 1 << 20, "requested_size": 1 << 20, "state": "active_allocated", "frames": []}
        segment = {"device": 0, "address": 0, "total_size": 1 << 20, "blocks": [block]}
        snapshot.write_bytes(pickle.dumps({"segments": [segment], "device_traces": []}, protocol=4))
        return [
            printed(capsys, command, str(log), *model), printed(capsys, command, str(log), *model, "--tolerance=9999"),
            printed(capsys, command, str(snapshot)), printed(capsys, command, str(snapshot), *model),
        ]
    if command == "why":
        log, other = tmp_path / "failed.log", tmp_path / "killed.log"
        log.write_text(FAILURE)
        other.write_text("Out of memory: Killed process 12 (python)\n")
        more = [*model, "--gpu", "H100"]
        return [printed(capsys, command, str(log)), printed(capsys, command, str(log), *more),
                printed(capsys, command, str(other), *more)]
    if command == "rollout":
        small = ["--seq-length", "2048", "--gpu", "H100", "--max-tokens-per-gpu", "4096"]
        log = tmp_path / "verl.log"
        log.write_text(
            "After rollout offload, memory allocated (GB): 3.00, memory reserved (GB): 3.50, device memory used/total "
            "(GB): 9.00/79.11\n"
        )
        return [
            printed(capsys, command, *model, *small, "--rollout-tp", "2", "--log", str(log)),
            printed(capsys, command, *model, *small, "--rollout", "sglang", "--no-limits", "--critic"),
            printed(capsys, command, "Llama-3.1-70B", "--num-gpus", "2", "--tp", "2", *small),
        ]
    if command == "diff":
        sides = ["Llama-3.2-1B --tp 2", "Llama-3.2-1B", "--num-gpus", "2"]
        return [printed(capsys, command, *sides), printed(capsys, command, *sides, "--gpu", "H100")]
    if command == "record":
        log = tmp_path / "train.log"
        log.write_text(LOG + "\n")
        return [printed(capsys, command, str(log), *model, "--gpu", "H100")]
    if command == "validate":
        good, bad = tmp_path / "good.json", tmp_path / "bad.json"
        good.write_text('{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}')
        bad.write_text('{"zero_optimization": {"stage": 7}, "steps_per_prnt": 3}')
        return [printed(capsys, command, str(good)), printed(capsys, command, str(bad), code=2)]
    if command == "calculate":
        return [printed(capsys, command, "--config", str(EXAMPLES / "megatron_lm.json"))]
    if command == "quick":
        engine = [command, "--engine", "megatron_lm", "--gpus"]
        return [printed(capsys, *engine, "2", "1"), printed(capsys, *engine, "64", "70")]
    if command == "rehearse":
        pytest.importorskip("megatron.core")
        local = [command, *model, "--transformer-impl", "local"]
        return [printed(capsys, *local), printed(capsys, *local, "--layer", "0")]
    if command == "accuracy":
        some = tmp_path / "runs.jsonl"
        some.write_text("\n".join(SPEEDS.read_text().splitlines()[:300]) + "\n")
        return [printed(capsys, command, str(some))]
    if command == "serve":
        return [printed(capsys, command, "--port", "0", "--check")]
    if command == "mcp":
        pytest.importorskip("mcp.server.mcpserver", reason="mcp 2 is not installed")
        return [printed(capsys, command)]
    if command == "sweep":
        question = tmp_path / "fleet.csv"
        question.write_text("model,gpu,num_gpus,seq_length,global_batch_size\nLlama-3.2-1B,H100,2,4096,8\nx,H100,1,1,1\n")
        return [printed(capsys, command, str(question))]
    if command in ("search", "fit", "whatif", "balance"):
        flags = ["--gpu", "H100", "--global-batch-size", "8", "--num-gpus", "2"]
        more = {"search": [], "fit": [], "whatif": ["--pairs", "--target-gib", "20"], "balance": ["--pp", "2"]}[command]
        found = [printed(capsys, command, "Llama-3.2-1B", *flags, *more)]
        if command == "fit" and find_spec("scipy"):
            found.append(printed(capsys, command, "Llama-3.2-1B", *flags, "--engine", "fsdp2"))
            found.append(printed(capsys, command, "Llama-3.1-70B", *flags, "--engine", "fsdp2", code=1))
        return found
    return {
        "estimate": [printed(capsys, "estimate", *model, "--verbose")], "models": [printed(capsys, "models")],
        "gpus": [printed(capsys, "gpus")], "completion": [printed(capsys, "completion", "bash")],
    }[command] if command in ("estimate", "models", "gpus", "completion") else []  # fmt: skip


def keys(document: Any) -> list[str]:
    return list(document[0] if isinstance(document, list) else document)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_prints_is_valid_by_its_schema(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str
) -> None:
    schema = json.loads((SCHEMAS / f"{command}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    documents = of_every_kind(capsys, command, tmp_path)
    assert documents
    for document in documents:
        validator.validate(document)
        required = [key for key in keys(document) if key not in ("by", "offer", "shared", "target", "log", "layouts")]
        for key in required:
            damaged = copy.deepcopy(document)
            del (damaged[0] if isinstance(damaged, list) else damaged)[key]
            assert not validator.is_valid(damaged), key
