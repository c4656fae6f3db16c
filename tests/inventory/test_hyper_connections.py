"""DeepSeek-V4 on a pipeline stage: what its hyper-connections hold, by hand from Megatron-LM's source."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ways import by_replay

from bridge_memory import (
    BatchSpec,
    CompressedAttentionSpec,
    ImplementationSpec,
    IndexerSpec,
    LayerSpec,
    ModelSpec,
    MoESpec,
    ParallelSpec,
    RecomputeSpec,
    RunSpec,
    estimate,
    explain,
)
from bridge_memory import reserved as replay
from bridge_memory.inventory.layer import layer_block
from bridge_memory.spec import SpecError
from bridge_memory.tapes.context import context_of
from bridge_memory.timeline import step_timeline

S, H, N, LAYERS, WORDS, K = 4096, 4096, 4, 12, 129280, 6
ATTENTION = CompressedAttentionSpec(64, 512, 64, 1024, 8, 1024, 128, 128, fused=True)
EXPERTS = MoESpec(256, K, 2048, router_score_function="sqrtsoftplus", router_load_balancing_type="none")
LAYER = LayerSpec(ATTENTION, EXPERTS)


def run(*modules: str, layer: LayerSpec = LAYER) -> RunSpec:
    return RunSpec(
        model=ModelSpec("V4", "deepseek_v4", H, WORDS, (layer,) * LAYERS, residual_streams=N),
        batch=BatchSpec(seq_length=S, global_batch_size=8),
        parallel=ParallelSpec(world_size=8, pipeline_model_parallel_size=4, expert_model_parallel_size=2),
        recompute=RecomputeSpec(granularity="selective", modules=modules or ("moe_act",)),
    )


def test_recomputed_streams_are_gone_for_all_but_the_running_microbatch() -> None:
    """Four microbatches are in flight on stage 0, of which one runs. Each of its three layers discards the streams that
    enter both of its blocks, n h wide, and two aggregated streams with their norms, h wide, in bf16; but the first
    layer's input is no checkpoint's output."""
    of_a_stage = 3 * 2 * S * (2 * N * H + 4 * H) - 2 * S * N * H

    def gained(stage: int) -> int:
        kept, discarded = (explain(run("moe_act", *more), stage) for more in ((), ("mhc",)))
        assert sum(component.bytes for component in discarded.components) == discarded.peak_bytes
        return kept.peak_bytes - discarded.peak_bytes

    assert gained(0) == 3 * of_a_stage
    assert gained(2) == of_a_stage
    # The last stage is highest in its loss, when its only microbatch has left the layers.
    assert gained(3) == of_a_stage


@pytest.mark.parametrize("stage", [0, 3])
def test_the_timeline_is_as_high_as_the_estimate(stage: int) -> None:
    job = run("moe_act", "mhc")
    points = list(step_timeline(job, stage).points())
    assert max(point.total for point in points) == explain(job, stage).peak_bytes
    assert min(point.transient for point in points) >= 0
    said = by_replay(answer := estimate(job), [])
    assert all(here.peak == answer.stages[number].peak_bytes for number, here in said.items())


def test_the_norms_are_recomputed_once_where_both_modules_name_them() -> None:
    assert explain(run("mhc", "layernorm"), 0).peak_bytes == explain(run("mhc"), 0).peak_bytes


@pytest.mark.parametrize(
    ("modules", "options", "words"),
    [(("mhc", "mlp"), {}, "does not go with mlp"), (("mhc",), {"offload_modules": ("moe_act",)}, "offload_modules")],
)
def test_what_megatron_lm_refuses_beside_it(modules: tuple[str, ...], options: dict[str, object], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        estimate(run(*modules).with_(implementation=ImplementationSpec(**options)))  # type: ignore[arg-type]


@pytest.mark.parametrize("chunks", [None, 3])
@pytest.mark.parametrize("modules", [("moe_act",), ("moe_act", "mhc")], ids=["kept", "recomputed"])
def test_a_replay_allocates_what_is_estimated(modules: tuple[str, ...], chunks: int | None) -> None:
    """Two ways to one figure."""
    job = run(*modules).with_fields(virtual_pipeline_model_parallel_size=chunks)
    for stage in estimate(job).stages:
        found = replay.replayed(job, stage.stage)
        assert found.expandable >= found.allocated
        assert found.allocated == pytest.approx(stage.peak_bytes, rel=0.01)


def test_recomputed_streams_beside_overlapped_exchanges_are_not_replayed() -> None:
    job = run("mhc").with_fields(virtual_pipeline_model_parallel_size=3, overlap_moe_expert_parallel_comm=True)
    assert "recomputed hyper-connections" in (replay.why_not(job) or "")


def test_it_needs_streams() -> None:
    plain = run("mhc")
    with pytest.raises(SpecError, match="needs a model with hyper-connections"):
        estimate(plain.with_(model=replace(plain.model, residual_streams=1)))


def test_tables_of_experts_by_token_are_on_the_stages_of_their_layers() -> None:
    """int32 [vocabulary, k], once a layer."""
    by_token = LayerSpec(ATTENTION, replace(EXPERTS, experts_by_token=True))
    plain = run()
    first = plain.with_(model=replace(plain.model, layers=(by_token,) * 3 + plain.model.layers[3:]))

    def tables(stage: int) -> list[int]:
        found = explain(first, stage).components
        return [component.bytes for component in found if component.name == "tables of experts by token"]

    assert tables(0) == [3 * 4 * WORDS * K]
    assert tables(1) == []


def test_fused_kernels_save_the_indexers_gradients_in_place_of_its_scores() -> None:
    """``FusedIndexerSparseAttnFunc``: bf16 of i heads of width d, of s / 4 keys of width d, and fp32 weights."""
    heads, width = 64, 128
    chooses = replace(ATTENTION, compress_ratio=4, indexer=IndexerSpec(heads, width, 512))
    layer = LayerSpec(chooses, EXPERTS)
    of_kernels = {tensor.name: tensor.bytes for tensor in layer_block(layer, context_of(run(layer=layer))).cost.tensors}
    assert of_kernels["gradient of the indexer query"] == 2 * S * heads * width
    assert of_kernels["gradient of the indexer keys"] == 2 * (S // 4) * width
    assert of_kernels["gradient of the indexer weights"] == 4 * S * heads
    assert not {"rotated indexer query", "gathered keys in fp32", "chosen compressed keys"} & {*of_kernels}
