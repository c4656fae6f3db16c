"""DeepSeek Sparse Attention on megatron-core 0.19's own modules: every saved tensor, and both peaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bridge_memory.inventory.stack import chunk_inventory
from bridge_memory.rehearsal.compare import compare_layer
from bridge_memory.rehearsal.run import rehearse
from bridge_memory.rehearsal.world import installed_release, quiet
from bridge_memory.spec import (
    BatchSpec,
    ImplementationSpec,
    IndexerSpec,
    LayerSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    ParallelSpec,
    RecomputeSpec,
    RunSpec,
    SparseSpec,
)
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.context import context_of

if (installed_release() or (0, 0)) < (0, 19):
    pytest.skip("absorbed sparse attention of megatron-core 0.19", allow_module_level=True)

MLP = MLPSpec(1024, gated=True, activation="silu", add_bias=False)


PLAIN = SparseSpec(topk=128)


def run_of(
    sparse: SparseSpec = PLAIN, *, heads: int = 8, indexer: int = 4, layers: int = 1, tp: int = 1,
    cp: int = 1, seq: int = 512, batch: int = 1, again: tuple[str, ...] = (), **recompute: Any,
) -> RunSpec:  # fmt: skip
    full = MLASpec(heads, 256, 128, 64, 32, 96, True, False, IndexerSpec(indexer, 64), sparse)
    shared = replace(full, indexer=None) if sparse.shares_choice else full
    model = ModelSpec(
        "sparse", "gpt", 512, 2048, tuple(LayerSpec(m, MLP) for m in (full, *[shared] * (layers - 1))),
        rotary_dim=32, hidden_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    return RunSpec(
        model=model,
        parallel=ParallelSpec(
            world_size=tp * cp, tensor_model_parallel_size=tp, context_parallel_size=cp, sequence_parallel=tp > 1
        ),
        batch=BatchSpec(seq_length=seq, micro_batch_size=batch),
        implementation=ImplementationSpec(megatron_core=(0, 19), cp_comm_type="all_gather" if cp > 1 else "p2p"),
        recompute=RecomputeSpec(granularity="selective", modules=again) if again else RecomputeSpec(**recompute),
    )


@pytest.mark.parametrize(
    "run",
    [
        run_of(),
        run_of(batch=2),
        run_of(seq=2048),
        run_of(tp=2),
        run_of(cp=2),
        run_of(tp=2, cp=2, batch=2, seq=1024),
        # the indexer's scores are more than attention's
        run_of(heads=2, indexer=16),
        run_of(SparseSpec(topk=128, scoring_relu=False), heads=2, indexer=16),
        run_of(SparseSpec(topk=128, sparse_loss=True)),
        run_of(SparseSpec(topk=128, indexer_loss=False)),
        run_of(SparseSpec(topk=4096, indexer_loss=False)),
        run_of(again=("core_attn",)),
        run_of(again=("layernorm", "mla_up_proj", "core_attn"), tp=2),
    ],
)
def test_a_layer(run: RunSpec) -> None:
    with quiet():
        done = compare_layer(run, 0, None)
    # what is left: the scaled loss of the indexer, a number
    assert not done.only_predicted
    assert sum(record.bytes for record in done.only_found) <= 16
    for error in (done.saved_error, done.forward_error, done.backward_error):
        assert abs(error) < 0.006, done


def held_to(run: RunSpec, held: int = 0) -> None:
    """``held``: bytes that a dictionary holds and nothing saves."""
    passes = rehearse(run).chunks[0].passes
    shape = layout(run.model, run.parallel).shapes(run.model)[0][0]
    cost = chunk_inventory(run.model, shape, context_of(run))
    assert cost.retained == pytest.approx(passes.saved_bytes + held, rel=0.001)
    assert cost.forward_peak == pytest.approx(passes.forward_bytes + held, rel=0.005)
    assert cost.backward_peak == pytest.approx(passes.backward_bytes + held, rel=0.005)


@pytest.mark.parametrize("loss", [True, False])
def test_layers_that_take_a_choice_over(loss: bool) -> None:
    """Without a loss nothing but a dictionary keeps 512 x 128 indices of eight bytes."""
    run = run_of(SparseSpec(topk=128, indexer_loss=loss, shares_choice=True), layers=3)
    held_to(run, 0 if loss else 8 * 512 * 128)


def test_a_whole_model_recomputed() -> None:
    held_to(run_of(layers=2, granularity="full", method="uniform", num_layers=1))
