"""megatron-core's sources and the table of kernels (scripts/kernels.yaml): what its functions save, by name and line;
and what our replacements of mamba_ssm's, causal_conv1d's and fla's functions save, by the shapes of their sources.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from scripts_of import load_script

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from bridge_memory.rehearsal import scan_kernels  # noqa: E402
from bridge_memory.rehearsal.te_kernels.attention import flash_attn_func  # noqa: E402

table: Any = load_script("kernels_table")
RELEASE = importlib.metadata.version("megatron-core")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.submodule_search_locations
    folder: dict[str, Any] = table.scan(Path(spec.submodule_search_locations[0]))
    return folder


@pytest.mark.skipif(tuple(map(int, RELEASE.split(".")[:2])) < (0, 16), reason="the table begins with 0.16")
def test_every_tensor_that_a_function_saves_is_in_the_table(found: dict[str, Any]) -> None:
    assert not table.not_in_the_table("core", found)


def test_lines_and_names_are_those_of_this_release(found: dict[str, Any]) -> None:
    known = table.scanned()["core"].get(RELEASE)
    if known is None:
        pytest.skip(f"the table has no lines of megatron-core {RELEASE}")
    assert found == known


# ---- functions of other libraries ----

B, S, HEADS, P, GROUPS, N, CHUNK = 2, 256, 8, 32, 2, 16, 64
BF16, FP32 = torch.bfloat16, torch.float32


def meta(*shape: int, dtype: Any = BF16) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)


def saved(call: Any) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of what a call saves for backward."""
    out: list[tuple[tuple[int, ...], Any]] = []

    def note(t: Any) -> Any:
        out.append((tuple(t.shape), t.dtype))
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        call()
    return out


def test_the_scan_saves_its_input_and_the_output_before_its_gate() -> None:
    """``ssd_combined.py: MambaSplitConv1dScanCombinedFn.forward``: zxbcdt, conv1d_weight, conv1d_bias, out_x, A, D,
    dt_bias."""
    inner = HEADS * P
    channels = inner + 2 * GROUPS * N
    width = 2 * inner + 2 * GROUPS * N + HEADS
    heads = meta(HEADS, dtype=FP32)
    assert saved(
        lambda: scan_kernels.mamba_split_conv1d_scan_combined(
            meta(B, S, width), meta(channels, 4), meta(channels), heads, heads, heads, CHUNK, headdim=P, ngroups=GROUPS
        )
    ) == [
        ((B, S, width), BF16), ((channels, 4), BF16), ((channels,), BF16), ((B, S, HEADS, P), BF16),
        ((HEADS,), FP32), ((HEADS,), FP32), ((HEADS,), FP32),
    ]  # fmt: skip


def test_the_gated_norm_saves_a_reciprocal_of_each_group() -> None:
    """``layernorm_gated.py: LayerNormFn.forward``: x, weight, rstd of [groups * rows]; no bias, mean or gate."""
    norm = scan_kernels.ExtendedRMSNorm(64, group_size=16, device="meta", dtype=BF16)
    assert saved(lambda: norm(meta(B, S, 64))) == [((B * S, 64), BF16), ((64,), BF16), ((4 * B * S,), FP32)]


@pytest.mark.parametrize("function", [scan_kernels.causal_conv1d_fn, scan_kernels.causal_conv1d])
def test_the_convolution_saves_its_input(function: Any) -> None:
    """``cpp_functions.py: CausalConv1dFn.forward``, ``causal_conv1d.py: CausalConv1dFunction.forward``."""
    shape = (B, 64, S) if function is scan_kernels.causal_conv1d_fn else (B, S, 64)
    given = meta(*shape), meta(64, 4), meta(64)
    assert saved(lambda: function(*given)) == [(shape, BF16), ((64, 4), BF16), ((64,), BF16)]


def test_the_unit_norm_saves_its_output() -> None:
    """``l2norm.py: L2NormFunction.forward``: y, rstd."""
    assert saved(lambda: scan_kernels.l2norm(meta(B, S, HEADS, P))) == [
        ((B, S, HEADS, P), BF16), ((B, S, HEADS), FP32)
    ]  # fmt: skip


def test_the_delta_rule_saves_its_inputs_and_the_inverse() -> None:
    """``gated_delta_rule/chunk.py: ChunkGatedDeltaRuleFunction.forward``: q, k, v, g, beta, A of 64 tokens a chunk."""
    of_heads, row = (B, S, HEADS, P), (B, S, HEADS)
    given = [meta(*of_heads) for _ in range(3)]
    assert saved(
        lambda: scan_kernels.chunk_gated_delta_rule(*given, meta(*row, dtype=FP32), meta(*row))
    ) == [(of_heads, BF16)] * 3 + [(row, FP32), (row, BF16), ((*row, 64), BF16)]


@pytest.mark.parametrize("lead", [(B, S), (S,)], ids=["sequences", "packed"])
def test_flash_attention_saves_a_statistic_of_each_row(lead: tuple[int, ...]) -> None:
    """flash-attn 2.8 ``FlashAttnFunc.forward``: q, k, v, out, softmax_lse [b, a, s], rng_state."""
    query, key = meta(*lead, HEADS, P), meta(*lead, GROUPS, P)
    rows = (*lead[:-1], HEADS, lead[-1])
    assert saved(lambda: flash_attn_func(query, key, key)) == [
        (tuple(query.shape), BF16), (tuple(key.shape), BF16), (tuple(key.shape), BF16), (tuple(query.shape), BF16),
        (rows, FP32), ((2,), torch.int64),
    ]  # fmt: skip
