"""The JSON report: valid by the schema that ships with the package, and adding up."""

from __future__ import annotations

import json
from typing import Any

import pytest
from report_runs import NAMES, result

from bridge_memory.estimation import estimate
from bridge_memory.readers import list_presets, resolve_model
from bridge_memory.report.details import stage_details
from bridge_memory.report.json import SCHEMA_PATH, estimate_to_json
from bridge_memory.spec import BatchSpec, ParallelSpec, RunSpec
from bridge_memory.verdict import fits

jsonschema = pytest.importorskip("jsonschema")

with open(SCHEMA_PATH, encoding="ascii") as _file:
    SCHEMA = json.load(_file)
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def document(name: str) -> dict[str, Any]:
    """What a reader of the printed JSON gets."""
    return json.loads(json.dumps(estimate_to_json(result(name), fits(result(name)))))


def adds_up(doc: dict[str, Any]) -> None:
    for stage in doc["stages"]:
        static = sum(stage[f"{kind}_bytes"] for kind in ("weights", "gradients", "optimizer", "buffers"))
        assert sum(c["bytes"] for c in stage["components"]) == stage["peak_bytes"]
        assert static + stage["activation_bytes"] + stage["transient_bytes"] == stage["peak_bytes"]
        assert static + sum(c["bytes"] for c in stage["carried_over"]) == stage["static_bytes"]
        assert len(stage["layers"]) == stage["num_layers"]
    assert doc["peak"]["bytes"] == max(stage["peak_bytes"] for stage in doc["stages"])
    assert doc["stages"][doc["peak"]["stage"]]["peak_bytes"] == doc["peak"]["bytes"]
    for fit in doc["fits"]:
        assert fit["peak_bytes"] + fit["margin_bytes"] + fit["headroom_bytes"] == fit["capacity_bytes"]
        if fit["gpu_arch"] == doc["training"]["implementation"]["gpu_arch"]:
            assert (fit["peak_bytes"], fit["peak_stage"]) == (doc["peak"]["bytes"], doc["peak"]["stage"])


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"


@pytest.mark.parametrize("name", NAMES)
def test_an_estimate_is_valid_and_adds_up(name: str) -> None:
    doc = document(name)
    VALIDATOR.validate(doc)
    adds_up(doc)


@pytest.mark.parametrize("preset", list_presets())
def test_every_preset_is_valid_and_adds_up(preset: str) -> None:
    run = RunSpec(
        model=resolve_model(preset), parallel=ParallelSpec(world_size=8), batch=BatchSpec(seq_length=1024)
    )
    doc = estimate_to_json(estimate(run), fits(estimate(run)))
    VALIDATOR.validate(doc)
    adds_up(doc)


@pytest.mark.parametrize("name", NAMES)
def test_the_stages_hold_every_layer_once(name: str) -> None:
    doc = document(name)
    held = sorted(i for stage in doc["stages"] for i in stage["layers"])
    assert held == list(range(doc["model"]["num_layers"]))


def test_sizes_that_follow_from_others_are_filled_in() -> None:
    """DeepSeek-V3 on 128 GPUs, TP 4 x PP 4: DP 8; EP 8 x ETP 1: 128 / (4 x 8) = 4 replicas of an expert."""
    sizes = document("uneven")["parallelism"]
    assert (sizes["data_parallel_size"], sizes["expert_data_parallel_size"]) == (8, 4)
    assert sizes["sequence_parallel"] is True
    assert document("four stages")["parallelism"]["expert_tensor_parallel_size"] == 2


def test_the_default_global_batch_is_stated() -> None:
    """One microbatch of one sequence a stage, on each of 8 replicas."""
    training = document("uneven")["training"]
    assert (training["num_microbatches"], training["global_batch_size"]) == (4, 32)


def test_one_stage_alone_keeps_the_peak_of_the_run() -> None:
    whole = document("uneven")
    part = estimate_to_json(result("uneven"), fits(result("uneven")), stage=2)
    VALIDATOR.validate(json.loads(json.dumps(part)))
    assert part["stages"] == [whole["stages"][2]]
    assert (part["peak"], part["fits"]) == (whole["peak"], whole["fits"])


def test_tensors_are_kept_and_parameters_add_up() -> None:
    """What --verbose prints is there: the parameters of a rank in bf16 are two bytes each."""
    answer = result("four stages")
    whole = estimate_to_json(answer, (), details={i: stage_details(answer, i) for i in range(4)})
    VALIDATOR.validate(json.loads(json.dumps(whole)))
    for stage in whole["stages"]:
        kept = [row for row in stage["tensors"] if row["section"] == "parameters"]
        assert sum(row["bytes"] * row["count"] for row in kept) == 2 * stage["parameters"]
        assert any(row["section"] == "saved for backward" for row in stage["tensors"])
    part = estimate_to_json(answer, (), stage=2, details={2: stage_details(answer, 2)})
    assert part["stages"] == [whole["stages"][2]]
    assert "tensors" not in estimate_to_json(answer, ())["stages"][0]


GONE: Any = object()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        *((path, GONE) for path in (
            "schema", "model.parameters", "parallelism.world_size", "training.num_microbatches", "stages.0.layers",
            "stages.0.components.0.provenance", "stages.0.static_bytes", "peak.stage", "fits.0.headroom_bytes",
            "assumptions", "not_modelled",
        )),
        ("stages.1.peak_bytes", 1.5), ("stages.1.components.0.provenance", "guessed"),
    ],
    ids=lambda value: "gone" if value is GONE else str(value),
)  # fmt: skip
def test_the_schema_refuses(path: str, value: Any) -> None:
    """A field that is missing, a fraction of a byte, an unknown provenance."""
    doc = document("uneven")
    *steps, last = path.split(".")
    at: Any = doc
    for step in steps:
        at = at[int(step) if step.isdigit() else step]
    assert last in at
    if value is GONE:
        del at[last]
    else:
        at[last] = value
    assert not VALIDATOR.is_valid(doc)
