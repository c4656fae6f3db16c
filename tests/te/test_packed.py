"""Packed sequences (thd) under Transformer Engine: layers and chunks against the real code, two sequences a pack."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_layers import check, run_of
from test_saved_by_component import Case
from test_stages import TE, kept, peaks

from bridge_memory.rehearsal.run import rehearse_layer
from bridge_memory.rehearsal.world import installed_release
from bridge_memory.spec import RunSpec

CORE = installed_release()


def packed(run: RunSpec) -> RunSpec:
    return run.with_(
        batch=replace(run.batch, packed_sequences=True),
        implementation=replace(run.implementation, megatron_core=CORE),
    )


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", ["gqa", "mha", "qk norm", "output gate", "fine experts"])
def test_a_layer(model: str, tp: int) -> None:
    check(packed(run_of(model, tp=tp)))


@pytest.mark.parametrize("recompute", ["", "core_attn"])
@pytest.mark.parametrize("model", ["gqa", "mla"])
def test_rotation_sequence_by_sequence(model: str, recompute: str) -> None:
    """Unfused it splits the tokens: cosines and sines of every sequence are as many as of one."""
    check(packed(run_of(model, tp=2, recompute=recompute, apply_rope_fusion=False)))


@pytest.mark.parametrize("recompute", ["", "core_attn", "mla_up_proj", "core_attn,mla_up_proj"])
@pytest.mark.parametrize("tp", [1, 2])
def test_values_of_latent_attention_are_as_wide_as_keys(tp: int, recompute: str) -> None:
    """From megatron-core 0.18 on."""
    check(packed(run_of("mla", tp=tp, recompute=recompute)), saved=1e-4, peaks=1e-4)


@pytest.mark.parametrize("cp", [2, 4])
def test_a_ring_of_context_parallelism(cp: int) -> None:
    """Halves of sequences are copies, where whole sequences take views: what attention keeps is the same."""
    check(packed(run_of("gqa", cp=cp)))


def test_sequences_of_a_micro_batch_are_one_row_of_tokens() -> None:
    """Two sequences of 4096 tokens are kept as one of 8192."""
    joined = packed(run_of("gqa", tp=2, batch=2))
    long = packed(run_of("gqa", tp=2))
    long = long.with_(batch=replace(long.batch, seq_length=8192))
    check(joined)
    assert rehearse_layer(joined, 1).saved_bytes == rehearse_layer(long, 1).saved_bytes


@pytest.mark.parametrize(
    "more", [{"model": "llama"}, {"model": "llama", "batch": 2}, {"model": "deepseek"}, {"model": "moe", "batch": 2}]
)
@pytest.mark.parametrize("stage", [0, 1])
def test_a_chunk(more: dict[str, Any], stage: int) -> None:
    run = packed(Case(stage=stage, pp=2, tp=2, implementation=TE, **more).run())
    kept(run, stage, 0)
    peaks(run, stage, 0)
