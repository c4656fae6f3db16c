"""scripts/measure_torch_on_gpu.py without a GPU: its models, its engines and its loop, over host memory."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from scripts_of import load_script

from bridge_memory.components import Part
from bridge_memory.estimation import estimate
from bridge_memory.readers.resolve import model_from_config
from bridge_memory.rehearsal.tracker import Tracker
from bridge_memory.tapes.parameters import ALLOCATION_UNIT


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("measure_torch_on_gpu")


CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 768,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 2048,
    "max_position_embeddings": 128, "tie_word_embeddings": False,
}  # fmt: skip


def test_models_are_built_with_the_parameters_of_the_estimate(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "predictions.jsonl"
    assert script.main(["--dry-run", "--predictions", str(path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1].split()
    total, built = int(last[0]), int(last[2])
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert total == built == len(rows) >= 30
    assert {c.engine for c in script.configurations()} >= {"single", "ddp", "fsdp2", "zero1", "zero2", "zero3"}


@pytest.mark.parametrize("engine", ["single", "ddp", "fsdp2"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_the_loop_peaks_where_the_estimate_says(
    script: ModuleType, engine: str, accumulated: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager attention, which host memory has too, and without cuBLAS's workspaces, which it has not."""
    model = model_from_config(CONFIG, name="small")
    monkeypatch.setattr(script, "resolve_config", lambda name: (name, CONFIG))
    run = script.run_of(model, engine, seq=128, batch=2, steps=accumulated, attn_implementation="eager")
    tracker = Tracker(device="cpu", unit=ALLOCATION_UNIT)
    seen: dict[str, tuple[int, int]] = {}

    def note(name: str) -> None:
        seen[name] = tracker.live_bytes, tracker.peak(0).bytes
        tracker.reset_peak()

    with script.world(run), tracker.following(torch.nn.Module()):
        script.train(run, "cpu", note, steps=3)
    peak = max(seen["step 3, before zero_grad"][1], seen["step 3"][1])
    (stage,) = estimate(run).stages
    workspaces = sum(c.bytes for c in stage.components if c.part is Part.WORKSPACE)
    assert stage.peak_bytes - workspaces == pytest.approx(peak, rel=0.01)


def test_without_a_gpu_it_says_so(script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert script.main(["--record", str(tmp_path / "r.jsonl")]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert script.main(["--predictions", str(tmp_path / "p.jsonl")]) == 2
    assert not (tmp_path / "p.jsonl").exists()
