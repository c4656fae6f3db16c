"""A distillation: the teacher's weights beside the student's, and modelopt's loss of the logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from found_rules import rules_of

from bridge_memory.accuracy.records import load_runs
from bridge_memory.accuracy.runs import run_of
from bridge_memory.estimation import estimate, peaks
from bridge_memory.inventory.layer import output_block
from bridge_memory.outside.amount import Range
from bridge_memory.plan.megatron.search import search
from bridge_memory.plan.megatron.space import Space
from bridge_memory.readers import resolve_model
from bridge_memory.readers.config_container import run_from_config_container
from bridge_memory.spec import BatchSpec, ParallelSpec, RunSpec, SpecError
from bridge_memory.speed.hardware import hardware_of
from bridge_memory.tapes.context import context_of

CORPUS = Path(__file__).parent / "data" / "measurements" / "runs.jsonl"
STUDENT, TEACHER = map(resolve_model, ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B"))


def distilled(pp: int = 1, tp: int = 1, **fields: object) -> tuple[RunSpec, RunSpec]:
    """Without the teacher and with it, on 8 GPUs."""
    parallel = ParallelSpec(world_size=8, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    plain = RunSpec(model=STUDENT, parallel=parallel, batch=BatchSpec(seq_length=2048)).with_fields(**fields)
    return plain, replace(plain, teacher=replace(plain, model=TEACHER)).with_fields(distillation="logits")


def named(run: RunSpec, stage: int, name: str) -> int:
    return sum(c.bytes for c in estimate(run).stages[stage].components if c.name == name)


def test_the_teachers_weights_are_there_in_bf16_and_nothing_else_of_it() -> None:
    """Llama-3.1-8B: 8,030,261,248 parameters; no gradients, no optimizer state."""
    plain, whole = map(estimate, distilled())
    assert named(distilled()[1], 0, "the teacher's weights") == pytest.approx(2 * 8_030_261_248, rel=1e-5)
    more = whole.stages[0].static_bytes - plain.stages[0].static_bytes
    assert more == named(distilled()[1], 0, "the teacher's weights")


def test_stages_hold_their_own_layers_of_it() -> None:
    """16 of 32 layers each with 218,112,000 parameters, and the ends: 128,256 x 4096 twice, on TP 2."""
    _, run = distilled(pp=2, tp=2)
    layers, end = 16 * 218_103_808 / 2 + 16 * 8192, 128_256 * 4096 / 2
    found = [named(run, stage, "the teacher's weights") for stage in range(2)]
    assert found[0] == pytest.approx(2 * (layers + end), rel=1e-5)
    assert found[1] == pytest.approx(2 * (layers + end + 4096), rel=1e-5)
    assert [p.peak_bytes for p in peaks(run)] == [s.peak_bytes for s in estimate(run).stages]


def test_a_dense_teacher_has_no_experts_to_divide() -> None:
    """Qwen3-8B, 8,190,735,360 parameters, beside a mixture over 8 ranks: whole on each."""
    mixture, dense = map(resolve_model, ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B"))
    run = RunSpec(model=mixture, parallel=ParallelSpec(world_size=8, expert_model_parallel_size=8))
    run = replace(run, teacher=RunSpec(model=dense, parallel=ParallelSpec(world_size=8)))
    assert named(run, 0, "the teacher's weights") == pytest.approx(2 * 8_190_735_360, rel=1e-5)


@pytest.mark.parametrize(("tp", "peak", "kept"), [(1, 32, 8), (2, 36, 8)])
def test_the_loss_by_hand(tp: int, peak: int, kept: int) -> None:
    """``LogitsKLLoss.forward``, bytes a logit. Both logits in bf16, 4; both in fp32 over the temperature, 8; both log
    probabilities, 8; the teacher's probabilities, the difference and the product, 12: 32. Over tensor-parallel ranks
    the student's exponentials too. Backward keeps the student's log probabilities or exponentials, and the teacher's
    probabilities."""
    _, run = distilled(tp=tp)
    cost = output_block(False, True, context_of(run), distilled=True).cost
    logits = 2048 * 128_256 // tp
    hidden = 2 * 2048 * 2048 // tp
    assert cost.forward_peak == pytest.approx(peak * logits + hidden, rel=1e-3)
    assert cost.retained == pytest.approx(kept * logits + hidden, rel=1e-3)


def test_a_measured_run_needs_what_this_loss_needs() -> None:
    """Beyond what is allocated after a step; the teacher's own sizes are not in the record."""
    (record,) = [r for r in load_runs(CORPUS) if "modelopt_distill" in r.id]
    stage = estimate(run_of(record).with_fields(distillation="logits")).stages[0]
    (measured,) = record.measured
    assert measured.max_allocated_bytes is not None
    passes = measured.max_allocated_bytes - measured.allocated_bytes
    assert stage.peak_bytes - stage.static_bytes == pytest.approx(passes, rel=0.005)


SIZES = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128, "vocab_size": 512,
    "seq_length": 128, "gated_linear_unit": True, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1, "should_pad_vocab": False, "normalization": "RMSNorm", "add_bias_linear": False,
    "position_embedding_type": "rope", "share_embeddings_and_output_weights": False, "num_query_groups": 4,
    "kv_channels": 16, "bf16": True,
}  # fmt: skip


def container(**kd: object) -> SimpleNamespace:
    teacher = SimpleNamespace(**{**SIZES, "num_layers": 6})
    model = SimpleNamespace(**SIZES, teacher=teacher, kd_config=SimpleNamespace(**kd) if kd else None)
    return SimpleNamespace(model=model, train=SimpleNamespace(micro_batch_size=1, global_batch_size=8))


def test_a_container_with_a_teacher_is_read() -> None:
    run = run_from_config_container(container(), world_size=1)
    assert run.teacher is not None
    assert (run.model.num_layers, run.teacher.model.num_layers) == (2, 6)
    assert run.implementation.distillation == "logits"
    assert not [feature for feature in run.not_modelled if feature.startswith(("model.teacher", "model.kd_config"))]
    assert [
        feature for feature in estimate(run).unmodelled if feature.startswith("teacher (") and "forward pass" in feature
    ]


@pytest.mark.parametrize(
    ("kd", "loss", "listed"),
    [
        ({"skip_lm_loss": False}, "logits and lm", False),
        ({"logit_kl_topk": 8}, "none", True),
        ({"skip_lm_loss": True, "intermediate_layer_pairs": [("a", "b")]}, "logits", True),
    ],
    ids=["beside", "topk", "pairs"],
)
def test_other_losses(kd: dict[str, object], loss: str, listed: bool) -> None:
    run = run_from_config_container(container(**kd), world_size=1)
    assert run.implementation.distillation == loss
    assert bool([feature for feature in run.not_modelled if feature.startswith("model.kd_config")]) == listed


def test_what_cannot_teach_is_refused_in_one_line() -> None:
    plain, whole = distilled()
    with pytest.raises(SpecError, match=r"teacher .* is not a RunSpec"):
        replace(plain, teacher=TEACHER)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="teacher of its own"):
        replace(plain, teacher=whole)
    with pytest.raises(SpecError, match="logits where the student has"):
        replace(whole, teacher=replace(plain, model=resolve_model("Qwen/Qwen3-0.6B")))
    with pytest.raises(SpecError, match="virtual_pipeline"):
        distilled(pp=2)[1].with_fields(virtual_pipeline_model_parallel_size=2)
    bad = container()
    bad.model.teacher.num_attention_heads = 0
    with pytest.raises(SpecError, match=r"model\.teacher: "):
        run_from_config_container(bad, world_size=1)


@pytest.mark.slow
def test_a_search_counts_it() -> None:
    """As arrays as one by one; and layouts of pipelines that the teacher's layers do not go onto are refused."""
    _, run = distilled()
    thirty_one = replace(TEACHER, layers=TEACHER.layers[:31])
    with pytest.raises(SpecError, match="teacher: num_layers"):
        replace(run, parallel=ParallelSpec(world_size=2, pipeline_model_parallel_size=2),
                teacher=replace(run.teacher, model=thirty_one))  # fmt: skip
    for teacher, pipelines in ((TEACHER, {1, 2, 4, 8}), (thirty_one, {1})):
        base = replace(run, teacher=replace(run.teacher, model=teacher))
        space = Space(base, 8, 8, frozenset({"split"}), {"mbs": (1, 2)}, global_batch_size=16)
        outside = lambda run: Range(0, 2 << 30)  # noqa: E731
        ours, theirs = (
            search(space, hardware_of("H200"), capacity=140 << 30, outside=outside, batched=batched)
            for batched in (True, False)
        )  # fmt: skip
        assert list(ours.rows) == list(theirs.rows) and ours.refused == theirs.refused
        assert ours._replace(rows=theirs.rows, one_by_one=theirs.one_by_one, **rules_of(theirs)) == theirs
        assert {row.run.parallel.pp for row in ours.rows} == pipelines
