"""State-space mixers, bytes a token and layer hand-counted from mamba_ssm, flash-linear-attention and megatron-core."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bridge_memory.inventory.layer import layer_block
from bridge_memory.inventory.stack import chunk_inventory
from bridge_memory.readers import resolve_model
from bridge_memory.spec import BatchSpec, GatedDeltaNetSpec, ImplementationSpec, LayerSpec, MambaSpec, RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.context import context_of


def saved_per_token(name: str, mixer: type, *, batch: int, **impl: Any) -> float:
    """Of the mixer alone; statistics of norms and the layer's input included."""
    model = resolve_model(name)
    kind = next(layer.mixer for layer in model.layers if isinstance(layer.mixer, mixer))
    run = RunSpec(
        model=model, batch=BatchSpec(seq_length=2048, micro_batch_size=batch), implementation=ImplementationSpec(**impl)
    )
    return layer_block(LayerSpec(kind, None), context_of(run)).cost.retained / (2048 * batch)


@pytest.mark.parametrize("batch", [1, 2])
def test_mamba_keeps_the_scan_before_and_after_its_gate(batch: int) -> None:
    """Nemotron-H-56B: h 8192, 256 heads of 64 (d_inner 16384), 8 groups of state 256. bf16: the norm's input and
    output 4 h, zxBCdt 2 (2 x 16384 + 2 x 2048 + 256), the scan before its gate (MambaSplitConv1dScanCombinedFn:
    out_x), after it (input of the gated norm's module) and normed (input of out_proj) 6 x 16384; fp32: one deviation
    a row of the norm and eight of the grouped one. Measured runs with 2 and 4 sequences a microbatch agree."""
    count = 4 * 8192 + 2 * (2 * 16384 + 2 * 2048 + 256) + 6 * 16384 + 4 * (1 + 8)
    assert saved_per_token("nvidia/Nemotron-H-56B-Base-8K", MambaSpec, batch=batch) == count


def test_a_recomputed_scan_is_without_its_output_before_the_gate() -> None:
    """As above but for ``out_x``, 2 x 16384; backward makes it again, beside what the scan's backward needs."""
    model = resolve_model("nvidia/Nemotron-H-56B-Base-8K")
    mixer = next(layer.mixer for layer in model.layers if isinstance(layer.mixer, MambaSpec))
    run = RunSpec(model=model, batch=BatchSpec(seq_length=2048, micro_batch_size=1))
    stock, again = (
        layer_block(LayerSpec(kind, None), context_of(run)).cost
        for kind in (mixer, replace(mixer, recompute_scan=True))
    )
    assert stock.retained - again.retained == 2048 * 2 * 16384
    assert again.retained + again.backward_peak >= stock.retained + stock.backward_peak


@pytest.mark.parametrize(("release", "times"), [((0, 19), 1), ((0, 16), 3)])
def test_the_numbers_of_a_packs_sequences_are_kept(release: tuple[int, int], times: int) -> None:
    """int32, of all tokens of a pack: once for all layers since 0.17 (``PackedSeqParams.__post_init__``), before in
    each of three layers (``MambaMixer._create_packed_seq_idx``)."""
    model = resolve_model("nvidia/Nemotron-H-56B-Base-8K")
    mamba = next(layer for layer in model.layers if isinstance(layer.mixer, MambaSpec))
    run = RunSpec(
        model=replace(model, layers=(mamba,) * 3), batch=BatchSpec(seq_length=2048),
        implementation=ImplementationSpec(megatron_core=release),
    )
    packed = run.with_(batch=replace(run.batch, packed_sequences=True))
    shape = layout(run.model, run.parallel).shapes(run.model)[0][0]
    alone, found = (chunk_inventory(one.model, shape, context_of(one)) for one in (run, packed))
    assert found.retained - alone.retained == 4 * 2048 * times


def test_gated_delta_net_keeps_unit_vectors_and_not_the_convolution() -> None:
    """Qwen3-Next with megatron-core 0.16.

    h 2048, 16 key and 32 value heads of 128 (q, k 2048, v 4096). bf16: norm input and output 4 h;
    convolution input 2 x 8192; q, k of unit length 2 x 4096 (L2NormFunction keeps its output), both again for 32
    heads 2 x 8192, v 2 x 4096; A [heads, 64] 2 x 2048; rule output, its norm, gate and their product 2 x 4 x 4096;
    beta 2 x 32. fp32: softplus in and out and g 12 x 32, deviations 4 x (1 + 16 + 16 + 32)."""
    count = 4 * 2048 + 2 * (8192 + 4096 + 8192 + 4096 + 2048 + 4 * 4096 + 32) + 12 * 32 + 4 * (1 + 16 + 16 + 32)
    name = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    assert saved_per_token(name, GatedDeltaNetSpec, batch=1, megatron_core=(0, 16)) == count
