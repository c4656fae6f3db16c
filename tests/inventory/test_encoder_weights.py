"""Towers of other modalities: their parameters on the first stage, through every engine of Megatron."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bridge_memory.estimation import estimate, peaks
from bridge_memory.readers import resolve_model
from bridge_memory.spec import EncoderSpec, ImplementationSpec, ParallelSpec, RunSpec, SpecError

MODEL = resolve_model("meta-llama/Llama-3.2-1B")
#: Ten million elements whole on every rank, and four million that two ranks share out.
ENCODER = EncoderSpec("vision_config", 14_000_000, 4_000_000)
ON_A_RANK = 12_000_000


def runs(**fields: object) -> tuple[RunSpec, RunSpec]:
    """Without the tower and with it, on 8 GPUs with TP 2."""
    parallel = ParallelSpec(world_size=8, tensor_model_parallel_size=2)
    plain = RunSpec(model=MODEL, parallel=parallel).with_fields(**fields)
    return plain, replace(plain, model=replace(plain.model, encoders=(ENCODER,)))


def model_state(run: RunSpec, stage: int = 0) -> dict[str, int]:
    out: dict[str, int] = {}
    for c in estimate(run).stages[stage].components:
        if c.role.value in ("weights", "gradients", "optimizer"):
            out[c.role.value] = out.get(c.role.value, 0) + c.bytes
    return out


def test_it_trains_beside_the_language_model() -> None:
    """A rank has 12,000,000 of its parameters: 2 bytes of weights and 4 of gradients, 12 of Adam's over 4 ranks."""
    plain, whole = map(model_state, runs())
    more = {key: whole[key] - plain[key] for key in whole}
    for key, wanted in {"weights": 2, "gradients": 4, "optimizer": 12 / 4}.items():
        assert more[key] == pytest.approx(wanted * ON_A_RANK, rel=1e-4), key


def test_only_the_first_stage_has_it() -> None:
    plain, whole = runs(pipeline_model_parallel_size=2)
    found = [
        [stage.parameters for stage in estimate(run).stages] for run in (plain, whole)
    ]
    assert [b - a for a, b in zip(*found, strict=True)] == [ON_A_RANK, 0]


@pytest.mark.parametrize(
    "fields",
    [
        {"engine": "megatron_fsdp", "data_parallel_sharding_strategy": "optim_grads_params"},
        {"use_distributed_optimizer": False},
        {"optimizer.optimizer": "muon", "use_distributed_optimizer": False},
        {"overlap_grad_reduce": True, "overlap_param_gather": True},
        {"fp8": "hybrid"},
        {"peft.scheme": "lora"},
    ],
    ids=["fsdp", "undivided", "muon", "overlap", "fp8", "lora"],
)
def test_every_engine_holds_it(fields: dict[str, object]) -> None:
    plain, whole = map(estimate, runs(**fields))
    assert whole.stages[0].parameters - plain.stages[0].parameters == ON_A_RANK
    assert whole.peak_stage.peak_bytes > plain.peak_stage.peak_bytes
    if fields.get("peft.scheme") == "lora":
        # Frozen: weights alone.
        more = whole.stages[0].static_bytes - plain.stages[0].static_bytes
        assert more == pytest.approx(2 * ON_A_RANK, rel=1e-4)


def test_both_ways_into_an_estimate_agree() -> None:
    _, whole = runs(pipeline_model_parallel_size=2)
    assert [p.peak_bytes for p in peaks(whole)] == [stage.peak_bytes for stage in estimate(whole).stages]


def test_its_activations_are_listed_whoever_trains_it() -> None:
    plain, whole = runs()
    said = set(estimate(whole).unmodelled) - set(estimate(plain).unmodelled)
    assert [feature for feature in said if feature.startswith("vision_config: activations")]
    hugging = RunSpec(
        model=replace(MODEL, encoders=(ENCODER,)), parallel=ParallelSpec(world_size=1),
    ).with_fields(engine="ddp", implementation=ImplementationSpec(transformer_impl="transformers"))
    (feature,) = (found for found in estimate(hugging).unmodelled if found.startswith("vision_config: "))
    assert "activations" in feature
    alone = replace(hugging, model=replace(MODEL, encoders=()))
    assert estimate(hugging).stages[0].parameters - estimate(alone).stages[0].parameters == 14_000_000


@pytest.mark.parametrize(("given", "said"), [((10, 11), "sharded"), ((10, -1), "sharded"), (("x", 0), "parameters")])
def test_what_is_no_encoder_is_refused(given: tuple[object, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        EncoderSpec("vision", *given)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="encoders"):
        replace(MODEL, encoders=[ENCODER])  # type: ignore[arg-type]
