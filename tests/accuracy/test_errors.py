"""Statistics of errors, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bridge_memory.accuracy.errors import accuracy, by_group, errors_of, percentile
from bridge_memory.accuracy.features import SCALES, scale_of
from bridge_memory.accuracy.predictions import Outcome
from bridge_memory.accuracy.records import Measurement, Record
from bridge_memory.readers import resolve_model
from bridge_memory.spec import RunSpec


def outcome(name: str, error: float, family: str = "f", **kwargs) -> Outcome:
    return Outcome(
        name, family, 1, "A100", 0, "ok", predicted_allocated_bytes=round(1000 * (1 + error)),
        measured_allocated_bytes=1000, **kwargs,
    )


def test_percentiles_interpolate() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 1.0], 0.9) == 0.9
    assert percentile([7.0], 0.9) == 7.0


def test_bias_keeps_the_sign_that_the_median_drops() -> None:
    errors = errors_of([(0.1, 0.1), (0.1, -0.1)])
    assert (errors.median, errors.worst, errors.bias) == (0.1, 0.1, 0.0)


def test_a_family_counts_once_however_many_records_it_has() -> None:
    rows = [outcome(f"a{i}", 0.0, "a") for i in range(9)] + [outcome("b", 0.5, "b")]
    row = accuracy("all", rows)
    assert row.per_record["allocated"].median == 0.0
    assert row.per_family["allocated"].median == 0.25
    assert "max_allocated" not in row.per_record


def test_a_record_with_a_bad_rank_is_not_ok() -> None:
    rows = [outcome("a", 0.0), Outcome("a", "f", 1, "A100", 1, "not_modelled", "because")]
    row = accuracy("all", rows)
    assert (row.records, row.ok, row.per_record) == (1, 0, {})


def test_what_is_not_a_run_counts_nowhere() -> None:
    rows = [outcome("a", 0.0), Outcome("b", "layers", 1, "A100", 0, "not_a_run", "one layer")]
    assert (accuracy("all", rows).records, accuracy("all", rows).families) == (1, 1)
    assert [row.group for row in by_group(rows, "family")] == ["f"]


@pytest.mark.slow
def test_groups_by_feature_overlap(outcomes) -> None:
    rows = {row.group: row.records for row in by_group(outcomes, "feature")}
    assert rows["MoE"] < rows["bf16"] and rows["MLA"] < rows["MoE"]


def test_toys_are_apart_whatever_they_peak_at() -> None:
    """A run is as large as the highest peak of its ranks; where peaks are unknown, static memory has to do."""
    large = RunSpec(model=resolve_model("meta-llama/Meta-Llama-3-8B"))
    toy = RunSpec(model=replace(large.model, hidden_size=512))
    below, above = Measurement(0, None, (4 << 30) - 1), Measurement(1, 1, 4 << 30)
    record = Record("r", "f", 1, "H100", 2, {}, {}, ())
    for model, measured, scale in (
        (toy, [above], 2), (large, [below], 1), (large, [below, above], 0),
        (large, [Measurement(0, 5 << 30, None)], 0), (large, [], 1),
    ):  # fmt: skip
        assert scale_of(model, replace(record, measured=tuple(measured)).highest_bytes) == SCALES[scale]


def test_toys_of_the_corpus_are_functional_tests_with_a_hidden_size_of_512(records, outcomes) -> None:
    toys = {o.id for o in outcomes if o.scale == SCALES[2]}
    assert toys == {r.id for r in records if r.arguments.get("--hidden-size") in (512, "512")}
    assert len(toys) == 364
