"""What a whole model chunk keeps for backward, by component: the inventory against megatron-core's own model.

First, middle and last stages; embedding, decoder layers, final norm, MTP depths, output layer with its loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from chunk_comparison import COMPONENTS, compare_chunk

from bridge_memory.inventory.stack import stage_inventories
from bridge_memory.rehearsal.model import NotBuildable
from bridge_memory.rehearsal.run import PassRecord, rehearse
from bridge_memory.rehearsal.summary import rows
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    ImplementationSpec,
    LayerSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    ParallelSpec,
    RecomputeSpec,
    RunSpec,
)
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.chain import ChunkInventory
from bridge_memory.tapes.context import context_of

NONE = RecomputeSpec()
LOCAL = ImplementationSpec(transformer_impl="local", moe_grouped_gemm=False)
COMPILED_LOSS = replace(LOCAL, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="native")
GQA = LayerSpec(AttentionSpec(32, 8, 128), MLPSpec(11008, gated=True))
BIASED = LayerSpec(
    AttentionSpec(32, 32, 128, add_qkv_bias=True, add_output_bias=True),
    MLPSpec(16384, gated=False, activation="gelu", add_bias=True),
)
EXPERTS = LayerSpec(AttentionSpec(32, 8, 128), MoESpec(8, 2, 8192))
LATENT = LayerSpec(
    MLASpec(32, 1536, 512, 128, 64, 128),
    MoESpec(32, 4, 2048, shared_expert_intermediate_size=2048, router_score_function="sigmoid"),
)  # fmt: skip


def model(layer: LayerSpec, **more: Any) -> ModelSpec:
    return ModelSpec(
        name="eight layers", model_type="test", hidden_size=4096, vocab_size=64000, layers=(layer,) * 8, **more
    )


#: "gpt": learned positions, dropout after the embedding, LayerNorm. "2k": the vocabulary.
MODELS = {
    "llama": model(GQA),
    "tied": model(GQA, share_embeddings_and_output_weights=True),
    "gpt": model(
        BIASED, normalization="LayerNorm", hidden_dropout=0.1, attention_dropout=0.1,
        position_embedding_type="learned_absolute", max_position_embeddings=8192,
    ),
    "moe": model(EXPERTS),
    "deepseek": model(LATENT),
    **{f"{name} 2k": replace(model(layer), vocab_size=2048)
       for name, layer in (("llama", GQA), ("moe", EXPERTS), ("deepseek", LATENT))},
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    model: str
    stage: int
    pp: int = 4
    tp: int = 1
    sp: bool | None = None
    vpp: int | None = None
    chunk: int = 0
    implementation: ImplementationSpec = LOCAL
    recompute: RecomputeSpec = NONE
    mtp: int = 0
    batch: int = 1

    def run(self) -> RunSpec:
        spec = MODELS[self.model]
        if self.mtp:
            spec = replace(spec, mtp_num_layers=self.mtp, mtp_layer=spec.layers[0])
        return RunSpec(
            model=spec,
            parallel=ParallelSpec(
                world_size=64, tensor_model_parallel_size=self.tp, sequence_parallel=self.sp,
                pipeline_model_parallel_size=self.pp, virtual_pipeline_model_parallel_size=self.vpp,
            ),
            batch=BatchSpec(seq_length=4096, micro_batch_size=self.batch),
            implementation=self.implementation,
            recompute=self.recompute,
        )  # fmt: skip

    def __str__(self) -> str:
        words = [self.model, f"pp{self.pp} stage{self.stage}", f"tp{self.tp}" if self.tp > 1 else ""]
        words += ["no sp" if self.sp is False else "", f"b{self.batch}" if self.batch > 1 else ""]
        words += [f"vpp{self.vpp} chunk{self.chunk}" if self.vpp else "", f"mtp{self.mtp}" if self.mtp else ""]
        words += ["compiled loss" if self.implementation is COMPILED_LOSS else ""]
        r = self.recompute
        words += [f"{r.method or 'selective'} {r.num_layers or '+'.join(r.modules)}" if r.granularity else ""]
        words += ["distributed" if r.distribute_saved_activations else ""]
        return " ".join(w for w in words if w)


def full(method: str, layers: int, *, distribute: bool = False) -> RecomputeSpec:
    return RecomputeSpec(
        granularity="full", method=method, num_layers=layers, distribute_saved_activations=distribute
    )


@cache
def rehearsed(case: Case) -> PassRecord:
    return rehearse(case.run(), case.stage).chunks[case.chunk].passes


SHARDINGS = ({"tp": 1}, {"tp": 2}, {"tp": 2, "sp": False}, {"tp": 8}, {"tp": 8, "sp": False})
CASES = [
    *(Case(m, stage, **sharding) for m in ("llama", "gpt") for stage in (0, 1, 3) for sharding in SHARDINGS),
    *(Case("llama", 3, implementation=COMPILED_LOSS, **sharding) for sharding in SHARDINGS),
    *(Case(m, stage, tp=2, batch=2) for m in ("llama", "gpt") for stage in (0, 3)),
    *(Case("tied", stage, pp=pp, tp=tp) for tp in (1, 2) for pp, stage in ((2, 0), (2, 1), (1, 0))),
    *(Case(m, 1, pp=2, tp=tp, mtp=1) for m in ("llama", "moe", "deepseek", "tied") for tp in (1, 2, 8)),
    Case("llama", 1, pp=2, tp=2, sp=False, mtp=1),
    *(Case("llama", 1, pp=2, tp=tp, mtp=2, implementation=COMPILED_LOSS) for tp in (1, 2)),
    Case("tied", 0, pp=1, tp=2, mtp=1),
    *(Case("llama", stage, pp=2, vpp=2, chunk=chunk, tp=2) for stage in (0, 1) for chunk in (0, 1)),
    *(Case(m, stage, pp=2, tp=tp, recompute=r) for m in ("llama", "gpt", "moe") for stage in (0, 1)
      for tp in (1, 2) for r in (full("uniform", 1), full("uniform", 2), full("block", 1))),
    *(Case("llama", 1, pp=2, tp=tp, mtp=1, recompute=r) for tp in (1, 2)
      for r in (full("uniform", 1), full("block", 2))),
    *(Case("llama", stage, pp=2, tp=4, sp=False, recompute=full(method, n, distribute=True))
      for stage in (0, 1) for method, n in (("uniform", 2), ("block", 3))),
    # The embeddings of one sequence, and those of more or after dropout, which the decoder takes as they are.
    *(Case(m, 0, pp=pp, tp=2, sp=False, batch=batch, recompute=full("uniform", 1, distribute=True))
      for m, pp, batch in (("llama", 1, 1), ("llama", 8, 1), ("llama", 2, 2), ("gpt", 2, 1))),
    *(Case(m, 1, tp=2, recompute=RecomputeSpec(granularity="selective", modules=(module,)))
      for m, module in (("llama", "core_attn"), ("llama", "layernorm"), ("llama", "mlp"), ("moe", "moe"))),
    # Weights with several uses on one stage, whose gradients wait for each other and make the backward peak.
    *(Case(m, 0, pp=1, tp=tp, mtp=mtp, recompute=full("uniform", 1))
      for m, mtps in (("tied", (0, 1, 2)), ("llama", (1, 2))) for mtp in mtps for tp in (1, 2)),
    # With a small vocabulary MTP makes both peaks.
    *(Case(f"{m} 2k", 1, pp=2, tp=tp, mtp=mtp, recompute=r) for m in ("llama", "moe", "deepseek") for tp in (1, 2)
      for mtp, r in ((1, NONE), (1, full("uniform", 1)), (2, full("uniform", 1)))),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_chunk_keeps_what_the_inventory_says(case: Case) -> None:
    """Half a per cent of every component, with every unmatched tensor in the message."""
    compared = compare_chunk(case.run(), case.stage, case.chunk, rehearsed(case).saved)
    found = {c.name: c for c in compared}
    report = "\n".join(line for c in found.values() for line in c.lines())
    for component in found.values():
        assert abs(component.error) <= 0.005, report
    first, last = case.stage == 0 and case.chunk == 0, case.stage == case.pp - 1
    last = last and case.chunk == (case.vpp or 1) - 1
    there = {"embedding": first, "layers": True, "final norm": last, "MTP": bool(case.mtp) and last}
    assert {n for n, here in {**there, COMPONENTS[-1]: last}.items() if here} == set(found)


def assert_peaks(ours: ChunkInventory, passes: PassRecord) -> None:
    """A fifth of a per cent of either pass."""
    for predicted, found, peak in (
        (ours.forward_peak, passes.forward_bytes, passes.forward_peak),
        (ours.backward_peak, passes.backward_bytes, passes.backward_peak),
    ):
        where = f"{peak.module}: {peak.operation}; {predicted:,} predicted, {found:,} found"
        assert predicted == pytest.approx(found, rel=0.002), where


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_chunk_peaks_where_the_inventory_says(case: Case) -> None:
    run = case.run()
    passes = rehearsed(case)
    shapes = layout(run.model, run.parallel).shapes(run.model)[case.stage]
    ours = stage_inventories(run.model, shapes, context_of(run))[case.chunk]
    assert_peaks(ours, passes)


MOE = RecomputeSpec(granularity="selective", modules=("moe",))


@pytest.mark.parametrize("name", ["moe", "deepseek"])
@pytest.mark.parametrize(
    "recompute", [NONE, full("uniform", 1), full("block", 1), MOE], ids=["none", "uniform", "block", "moe"]
)
@pytest.mark.parametrize("mtp", [0, 1])
def test_what_dispatchers_hold(name: str, recompute: RecomputeSpec, mtp: int) -> None:
    """To the byte: backward keeps the order of tokens, unless it makes it again; then the dispatcher alone has it."""
    table = rows(rehearse(Case(name, 1, pp=2, tp=2, mtp=mtp, recompute=recompute).run(), 1))
    assert [row.difference for row in table if row.name == "kept by MoE dispatchers"] == [0]


def test_the_loss_by_hand() -> None:
    """TP2 with SP, T = 4096, h = 4096, V = 64000: the output layer keeps its normed input, 2 T h / 2; the loss the
    softmax in fp32, 4 T V / 2, the int64 ids and the bool mask of the targets; the norm its input and 4 T / 2."""
    t, h, v = 4096, 4096, 64000
    found = {c.name: c.found for c in compare_chunk(Case("llama", 3, tp=2).run(), 3)}
    assert found["output layer and loss"] == t * h + 2 * t * v + 9 * t
    assert found["final norm"] == t * h + 2 * t


def test_a_layer_after_the_mtp_projection_keeps_the_tokens_of_all_ranks() -> None:
    """Its input is a view of the gathered projection, 2 T h bytes; under TP 8 seven eighths are of other ranks."""
    run = Case("llama", 1, pp=2, tp=8, mtp=1).run()
    records = [r for r in rehearse(run, 1).chunks[0].passes.saved if r.part == "mtp"]
    inputs = [r for r in records if r.module.endswith("transformer_layer.input_layernorm") and "cat" in r.made_by]
    assert [(r.shape, r.bytes) for r in inputs] == [((512, 1, 4096), 2 * 4096 * 4096)]


@pytest.mark.parametrize("kind", ["linear", "te"])
def test_a_loss_that_is_not_there_is_refused_in_one_line(kind: str) -> None:
    """megatron-core 0.16.1 knows no linear cross entropy; Transformer Engine's needs Transformer Engine."""
    loss = replace(LOCAL, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl=kind)
    with pytest.raises(NotBuildable, match="cross_entropy_fusion_impl") as refusal:
        rehearse(Case("llama", 3, implementation=loss).run(), 3)
    assert "\n" not in str(refusal.value)
