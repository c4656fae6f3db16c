"""scripts/maintain/demonstrate_on_gpu.py without a GPU: its loop over host memory, with a small model."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch
from scripts_of import load_script
from test_gpu_loop import a_gpu_made_of_host_memory

from bridge_memory.live import oom

GIB = 1 << 30
CONFIG = json.dumps({
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
})  # fmt: skip
SMALL = ["--custom-config", CONFIG, "--num-gpus", "1", "--seq-length", "128", "--transformer-impl", "local"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("maintain/demonstrate_on_gpu")


@pytest.fixture
def statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda's own counters, from the figures that stand in for the others."""

    def stats() -> dict[str, int]:
        now, most, held = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        return {
            "allocated_bytes.all.current": now, "allocated_bytes.all.peak": most,
            "reserved_bytes.all.current": held, "reserved_bytes.all.peak": held,
        }  # fmt: skip

    monkeypatch.setattr(torch.cuda, "memory_stats", stats)


def test_the_table_is_printed_after_building_and_after_each_step(script: ModuleType, statistics: None) -> None:
    with a_gpu_made_of_host_memory(_run(script)):
        text = script.live(SMALL)
    assert [line.split("(")[1] for line in text.splitlines() if line.startswith("GPU memory by pipeline stage")] == [
        "model built, iteration 0)", "after step 1, iteration 1)", "steady, iteration 2)", "steady, iteration 3)"
    ]  # fmt: skip


def test_running_out_of_memory_is_reported(
    script: ModuleType, statistics: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third phase asks for a GiB that is not there; torch's observer, which only CUDA has, is called by hand."""
    from bridge_memory.rehearsal import gpu

    def train(run: Any, rank: int, steps: int, note: Any) -> None:
        note("model built")
        oom._report_all(GIB)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB\nmore")

    class Properties:
        total_memory = 80 * GIB

    shares: list[float] = []
    monkeypatch.setattr(gpu, "train", train)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", shares.append)
    with a_gpu_made_of_host_memory(_run(script)):
        text = script.out_of_memory(SMALL)
    assert "1.00 GiB" in text and text.endswith("(torch: CUDA out of memory. Tried to allocate 1.00 GiB)")
    assert 0 < shares[0] < 1


def test_without_a_gpu_or_a_folder_it_says_so(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert script.main([]) == 2
    assert "--output is missing" in capsys.readouterr().err
    assert script.main(["--output", str(tmp_path / "out")]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def _run(script: ModuleType) -> Any:
    from bridge_memory.rehearsal import gpu

    before, gpu.run_here = gpu.run_here, lambda run: run
    try:
        return script.run_of(SMALL)
    finally:
        gpu.run_here = before
