"""The stacks of megatron-core's own training step are attributed: its modules, its DDP buffers, Adam."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bridge_memory.comparison.snapshot import at_peak, attribute, read_snapshot


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("megatron.core")
    folder = tmp_path_factory.mktemp("snapshots")
    script = Path(__file__).with_name("record_snapshot.py")
    done = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.mark.parametrize(
    ("kind", "ffn"),
    [
        # Two layers of gated f = 1024, or of 4 experts with gated f = 512 and a router of 4 x 256.
        ("dense", 2 * (3 * 256 * 1024)),
        ("moe", 2 * (4 * 3 * 256 * 512 + 4 * 256)),
    ],
)
def test_a_real_training_step_is_attributed(recorded: Path, kind: str, ffn: int) -> None:
    """h = 256, vocabulary 1024, two tables: weights and gradients are 4 + 4 bytes a parameter, Adam 8.

    Activations of 512 tokens in fp32: fc1's output twice f and the gated product f a token and layer (or k experts),
    unfused attention keeps scores of 8 x 128 x 128 for each of 4 sequences.
    """
    result = attribute(at_peak(read_snapshot((recorded / f"{kind}.pickle").read_bytes(), kind)))
    assert result.attributed_share > 0.99
    groups = {g.group: g.measured for g in result.groups}
    parameters = 2 * 1024 * 256 + 2 * (4 * 256 * 256) + ffn + 2 * 2 * 2 * 256 + 2 * 256
    assert groups["weights and gradients"] == pytest.approx(8 * parameters, rel=0.01)
    assert groups["optimizer states"] == pytest.approx(8 * parameters, rel=0.01)
    inner = groups["MLP"] if kind == "dense" else groups["MoE experts"]
    width = 3 * 1024 if kind == "dense" else 2 * 3 * 512
    assert inner >= 2 * 512 * width * 4
    assert groups["attention"] >= 2 * 4 * 8 * 128 * 128 * 4
    assert groups["logits and loss"] >= 512 * 1024 * 4
    assert ("MoE router and dispatch" in groups) == (kind == "moe")
