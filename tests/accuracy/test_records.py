"""Records of measured runs: what can be read, what is refused, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridge_memory import releases
from bridge_memory.accuracy.predictions import predict
from bridge_memory.accuracy.records import load_runs
from bridge_memory.accuracy.runs import run_of
from bridge_memory.estimation import clear_caches
from bridge_memory.spec import SpecError


@pytest.fixture
def changed(corpus: Path, tmp_path: Path):
    """The outcomes of a record of the corpus with other fields."""
    base = json.loads(corpus.read_text().splitlines()[100])

    def outcomes(**changes):
        path = tmp_path / "runs.jsonl"
        path.write_text(json.dumps({**base, **{k: v(base) if callable(v) else v for k, v in changes.items()}}) + "\n")
        return predict(load_runs(path)[0])

    return outcomes


def test_a_run_with_an_unknown_argument_is_predicted_and_marked(changed) -> None:
    def config(base):
        return {**base["config"], "args": {**base["config"]["args"], "--brand-new": True}}

    (o,) = changed(config=config)
    assert o.status == "not_modelled" and "--brand-new" in o.reason
    assert o.predicted_allocated_bytes


def test_a_contradiction_is_reported_not_raised(changed) -> None:
    (o,) = changed(world_size=3)
    assert o.status == "not_modelled" and "world_size" in o.reason


def test_a_record_in_words_names_the_script_that_reads_words(changed) -> None:
    (o,) = changed(config={"kind": "described", "args": {"hf_model": "org/name"}})
    assert (o.status, o.predicted_max_allocated_bytes) == ("not_modelled", None)
    assert o.reason.startswith("skipped: ") and "scripts/maintain/convert_described.py" in o.reason
    assert o.measured_max_allocated_bytes


def test_an_unknown_kind_of_record_says_which_can_be_read(changed) -> None:
    (o,) = changed(config={"kind": "brand new"})
    assert o.status == "not_modelled" and "'brand new'" in o.reason and "megatron_args" in o.reason


def test_what_is_not_a_run_says_what_it_is(changed) -> None:
    (o,) = changed(config={"kind": "not_a_run", "reason": "one layer"})
    assert (o.status, o.reason) == ("not_a_run", "skipped: one layer")


def test_a_record_without_measurements_is_not_compared(changed) -> None:
    (o,) = changed(measured=[])
    assert (o.status, o.reason, o.rank) == ("not_modelled", "skipped: nothing was measured", None)


def test_a_log_that_contradicts_the_arguments_is_not_compared(records) -> None:
    web = next(r for r in records if r.id.startswith("web/"))
    assert run_of(web).parallel.pp == 4
    assert {o.status for o in predict(web)} == {"not_modelled"}
    assert "its own log counts 2.079e+09" in predict(web)[0].reason


@pytest.mark.parametrize("text", ["not json", "[1]", '{"id": "x"}', '{"id": "x", "world_size": "a", "config": {}}'])
def test_a_broken_corpus_names_its_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text("\n" + text + "\n")
    with pytest.raises(SpecError, match="line 2"):
        load_runs(path)


def test_a_missing_corpus_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="nowhere"):
        load_runs(tmp_path / "nowhere.jsonl")


def test_a_gap_that_torch_did_not_measure_or_that_is_bounded_leaves_a_record_comparable(changed) -> None:
    def with_option(name: str):
        return lambda base: {**base["config"], "args": {**base["config"]["args"], name: True}}

    (o,) = changed(config=with_option("--dist-ckpt-optim-fully-reshardable"))
    assert o.status == "ok"
    (o,) = changed(config=with_option("--overlap-p2p-comm-warmup-flush"))
    assert o.status == "ok"
    (o,) = changed(config=with_option("--fp8-output-proj"))
    assert o.status == "not_modelled" and "fp8-output-proj" in o.reason


@pytest.mark.slow
def test_no_measured_run_depends_on_the_defaults_for_plans(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran does not change when the stack that plans assume does."""
    before = [outcome.as_json() for record in load_runs(corpus) for outcome in predict(record)]
    for name, release in (("MEGATRON_CORE", (0, 17)), ("TRANSFORMER_ENGINE", (2, 1)), ("TORCH", (2, 15))):
        monkeypatch.setattr(releases, f"DEFAULT_{name}", release)
    clear_caches()
    try:
        assert [outcome.as_json() for record in load_runs(corpus) for outcome in predict(record)] == before
    finally:
        clear_caches()
