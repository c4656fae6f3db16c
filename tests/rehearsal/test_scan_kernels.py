"""Stand-ins of state-space kernels: what they keep and make, counted by hand from mamba_ssm and fla; whole ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("einops")

import torch

from bridge_memory.cli import main
from bridge_memory.rehearsal import scan_kernels
from bridge_memory.rehearsal.passes import Enter, Leave, measured_passes
from bridge_memory.rehearsal.results import PassRecord
from bridge_memory.rehearsal.tracker import Tracker

B16, F32 = 2, 4


def parameter(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def passes(function: Any, static: list[Any], *shapes: tuple[int, ...]) -> PassRecord:
    """``function`` of new bf16 tensors of these shapes, forward and backward; nothing else keeps them alive."""
    anchor = parameter()
    tracker = Tracker(static)
    with tracker.watching(torch.nn.Module()):
        tracker.ignore(anchor)

        def forward() -> Any:
            made = [Enter.apply(anchor, shape, torch.bfloat16) for shape in shapes]
            out = function(*made)
            del made
            return Leave.apply(out)

        return measured_passes(tracker, forward)


def test_the_mamba_scan_keeps_its_input_and_its_output_before_the_gate() -> None:
    """s = 4096, 32 heads of 64 (2048), one group of state 256, chunks of 128: width 2 x 2048 + 2 x 256 + 32.

    ``MambaSplitConv1dScanCombinedFn``: zxbcdt and out_x, both bf16. Its backward is fullest while dC's chunk sums are
    added up (``_state_passing_bwd``): the convolution again, dzxbcdt, dxBC, dt, dt and dA in fp32, C B^T of a chunk,
    chunk states twice in fp32 and twice in bf16, the last state, dout before the gate, one fp32 a 64 of a state and
    their sum; beside it the gradient of the output and what forward kept.
    """
    s, heads, p, n, c = 4096, 32, 64, 256, 128
    inner, conv, width = heads * p, heads * p + 2 * n, 2 * heads * p + 2 * n + heads
    weights = [parameter(conv, 4, dtype=torch.bfloat16), parameter(conv, dtype=torch.bfloat16)]
    rows = [parameter(heads), parameter(heads), parameter(heads, dtype=torch.bfloat16)]

    def scan(zxbcdt: Any) -> Any:
        return scan_kernels.mamba_split_conv1d_scan_combined(
            zxbcdt, *weights, *rows, chunk_size=c, headdim=p, ngroups=1
        )

    found = passes(scan, [*weights, *rows], (1, s, width))
    assert found.saved_bytes == B16 * s * (width + inner)
    states, chunks = s // c * inner * n, s // c
    backward = (
        B16 * s * (2 * conv + width + heads) + 2 * F32 * s * heads + F32 * s * c
        + 2 * F32 * states + 2 * B16 * states + F32 * inner * n + B16 * s * inner
        + F32 * heads * chunks * (p * n // 64 + 1)
    )  # fmt: skip
    assert abs(found.backward_peak.bytes - (backward + found.saved_bytes + B16 * s * inner)) < 1024


def test_the_delta_rule_keeps_inputs_decays_and_the_inverse_of_a_chunk() -> None:
    """s = 2048, 16 heads, k and v 128 wide. ``ChunkGatedDeltaRuleFunction``: q, k, v, beta in bf16, g summed up, and
    A [s, heads, 64]."""
    s, heads, width = 2048, 16, 128
    wide, narrow = (1, s, heads, width), (1, s, heads)
    found = passes(lambda *x: scan_kernels.chunk_gated_delta_rule(*x)[0], [], wide, wide, wide, narrow, narrow)
    assert found.saved_bytes == B16 * s * heads * (3 * width + 2 + 64)


def test_unit_vectors_keep_their_output_and_a_length_a_row() -> None:
    found = passes(scan_kernels.l2norm, [], (1, 2048, 16, 128))
    assert found.saved_bytes == 2048 * 16 * (B16 * 128 + F32)


@pytest.mark.parametrize(
    "command",
    [
        ["nvidia/Nemotron-H-56B-Base-8K", "--tp", "8", "--pp", "2", "--num-gpus", "16"],
        ["nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "--tp", "2", "--ep", "8", "--num-gpus", "16"],
        ["Qwen/Qwen3-Next-80B-A3B-Instruct", "--tp", "2", "--ep", "16", "--pp", "4", "--num-gpus", "128"],
    ],
    ids=lambda c: c[0],
)
def test_a_rank_of_a_hybrid_is_rehearsed(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", *command, "--seq-length", "1024", "--transformer-impl", "local"]) == 0
    assert "backward peak" in capsys.readouterr().out


def test_a_scan_apart_keeps_its_contiguous_parts() -> None:
    """s = 4096, 32 heads of 64, one group of state 256. ``MambaChunkScanCombinedFn``: x, output, dt, B and C, and
    the running sum of dt A in fp32."""
    s, heads, p, n, c = 4096, 32, 64, 256, 128
    rows = [parameter(heads), parameter(heads), parameter(heads)]
    shapes = (1, s, heads, p), (1, s, heads), (1, s, 1, n), (1, s, 1, n)

    def scan(x: Any, dt: Any, b: Any, c_: Any) -> Any:
        return scan_kernels.mamba_chunk_scan_combined(x, dt, rows[0], b, c_, c, D=rows[1], dt_bias=rows[2])

    assert passes(scan, rows, *shapes).saved_bytes == B16 * s * (2 * heads * p + heads + 2 * n) + F32 * s * heads


def test_without_the_memory_efficient_path_convolution_and_scan_are_rehearsed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = (
        "--num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 512 --max-position-embeddings 512 "
        "--micro-batch-size 2 --global-batch-size 4 --hybrid-override-pattern MM --is-hybrid-model "
        "--normalization RMSNorm --disable-bias-linear --position-embedding-type none --bf16 --vocab-size 128 "
        "--mamba-num-groups 2 --mamba-state-dim 64 --mamba-head-dim 64 --mamba-num-heads 8 --attention-dropout 0 "
        "--hidden-dropout 0 --transformer-impl local --disable-mamba-mem-eff-path "
        "--spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec"
    )
    assert main(["rehearse", "--megatron-args", text, "--num-gpus", "1", "--json"]) == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    for name in ("saved for backward, per microbatch", "forward peak", "backward peak"):
        assert found[name]["predicted"] == pytest.approx(found[name]["found"], rel=0.005)
