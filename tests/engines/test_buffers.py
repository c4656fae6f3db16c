"""The buffers of megatron-core's DDP, made by megatron-core itself, and those of the estimate: to the byte.

Experts lie among dense parameters or apart, embeddings that stages share lie apart, buckets end where they do.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from bridge_memory.estimation import estimate, explain
from bridge_memory.rehearsal.run import rehearse
from bridge_memory.rehearsal.world import installed_release
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    ParallelSpec,
    RunSpec,
)

LOCAL = ImplementationSpec(
    transformer_impl="local", moe_grouped_gemm=False, megatron_core=installed_release() or (0, 16)
)
ATTENTION = AttentionSpec(8, 4, 24)
EXPERTS = LayerSpec(ATTENTION, MoESpec(8, 2, 152))
MODEL = ModelSpec(
    name="small", model_type="test", hidden_size=200, vocab_size=1000,
    layers=(LayerSpec(ATTENTION, MLPSpec(344, gated=True)), EXPERTS, EXPERTS, EXPERTS),
)  # fmt: skip


def run(
    world: int, tp: int = 1, pp: int = 1, *, ep: int = 1, etp: int | None = None, vpp: int | None = None,
    bucket: int | None = None, model: ModelSpec = MODEL,
) -> RunSpec:  # fmt: skip
    return RunSpec(
        model=model,
        parallel=ParallelSpec(
            world_size=world, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
            virtual_pipeline_model_parallel_size=vpp,
        ),
        batch=BatchSpec(seq_length=64),
        data_parallel=DataParallelSpec(overlap_grad_reduce=bucket is not None, bucket_size=bucket),
        implementation=LOCAL,
    )  # fmt: skip


TIED = replace(MODEL, share_embeddings_and_output_weights=True)
MTP = replace(MODEL, mtp_num_layers=1, mtp_layer=EXPERTS)

CASES: dict[str, RunSpec] = {
    # With EP 1 experts are divided over DP x CP like everything, whatever ETP makes of their own ranks.
    "EP 1, ETP less than TP": run(8, 2, etp=1),
    "EP 1, ETP more than TP": run(8, 1, etp=2),
    "EP 1, buckets": run(6, 2, etp=1, bucket=100_000),
    "EP 1, large buckets": run(6, 1, bucket=700_000),
    "EP 2, ETP less than TP": run(8, 2, ep=2, etp=1),
    "EP 2, buckets": run(6, 1, ep=2, bucket=100_000),
    # Only the first stage's first chunk is cut into buckets.
    "later stages": run(12, 1, 2, bucket=100_000),
    "virtual stages": run(12, 1, 2, vpp=2, bucket=100_000),
    # The weight that stages share has a bucket of its own.
    "tied": run(14, 1, 2, model=TIED),
    "tied, buckets": run(14, 1, 2, model=TIED, bucket=100_000),
    "tied, one stage": run(7, 1, 1, model=TIED, bucket=100_000),
    "tied, virtual stages": run(14, 1, 2, vpp=2, model=TIED, bucket=100_000),
    "tied, learned positions": run(
        14, 1, 2, model=replace(TIED, position_embedding_type="learned_absolute", max_position_embeddings=72),
        bucket=100_000,
    ),
    "MTP": run(14, 1, 2, model=MTP, bucket=100_000),
    "MTP, tied": run(14, 1, 2, model=replace(MTP, share_embeddings_and_output_weights=True)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_buffers_are_those_of_megatron_core(name: str) -> None:
    case = CASES[name]
    for stage, ours in enumerate(estimate(case).stages):
        theirs = rehearse(case, stage)
        found = (ours.parameters, ours.weights_bytes, ours.gradients_bytes)
        assert found == (theirs.parameters, theirs.weights_bytes, theirs.gradients_bytes)
        # Padding has no state: this rank has less than the fullest where it is in its shards.
        assert explain(case, stage, rank=theirs.rank).optimizer_bytes == theirs.optimizer_bytes
        assert ours.optimizer_bytes >= theirs.optimizer_bytes


def test_experts_and_the_rest_of_one_buffer_are_said_apart() -> None:
    """TP 1, ETP 2, EP 1 on 8 ranks: the 3 x 8 weights of 152 x 200 and of 200 x 76 (238 x 64 with its padding) are
    divided over all 8 ranks though 4 hold the same ones: 12 / 8 bytes an element."""
    stage = estimate(CASES["EP 1, ETP more than TP"]).stages[0]
    lines = [c for c in stage.components if c.experts and c.role.value == "optimizer"]
    elements = 3 * 8 * (152 * 200 + 238 * 64)
    assert sum(c.bytes for c in lines) == elements * 12 // 8
    assert {c.shard for c in lines} == {"etp x dp"}


def test_newer_releases_divide_experts_over_their_own_ranks_where_etp_differs() -> None:
    """From megatron-core 0.19 on ``use_expert_pgs`` holds without EP too: 12 bytes over 8 / 2 ranks."""
    newer = replace(CASES["EP 1, ETP more than TP"], implementation=replace(LOCAL, megatron_core=(0, 19)))
    lines = [c for c in estimate(newer).stages[0].components if c.experts and c.role.value == "optimizer"]
    elements = 3 * 8 * (152 * 200 + 238 * 64)
    assert sum(c.bytes for c in lines) == elements * 12 // 4
