"""Measured runs of engines outside of megatron-core: what is read of a row, what counts, and how far off it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bridge_memory
from bridge_memory.accuracy.corpus import RecordLine, read_corpus
from bridge_memory.accuracy.torch import records as engine_records
from bridge_memory.accuracy.torch.records import Outcome, outcomes, read, totals
from bridge_memory.cli import main
from bridge_memory.estimation import estimate

RUNS = Path(__file__).parents[1] / "data" / "engines" / "runs.jsonl"
ROWS = {row.data["id"]: row for row in read_corpus(RUNS)}
GIB = 1 << 30


def changed(number: int, **fields: Any) -> list[Outcome]:
    return outcomes([RecordLine("here", {**ROWS[number].data, **fields})])


def test_every_figure_of_grade_a_that_counts_is_within_three_per_cent() -> None:
    found = [o for o in outcomes([row for row in ROWS.values() if row.data["grade"] == "A"]) if o.status == "counted"]
    assert {o.id for o in found} == {*map(str, range(65, 71)), "95", "96", "100"}
    for o in found:
        assert o.error == pytest.approx(0, abs=0.03), (o.id, o.meaning)


def test_zero3_without_fp32_main_parameters_keeps_ten_bytes_a_parameter_instead_of_sixteen() -> None:
    """Rows 95 and 96, 6.856e9 parameters over 4 ranks: 2 + 2 bytes of weights and gradients, three times 4 or 2."""
    first, second = (outcomes([ROWS[number]])[0] for number in (95, 96))
    assert first.predicted_bytes is not None and second.predicted_bytes is not None
    assert first.predicted_bytes - second.predicted_bytes == pytest.approx(6 * 6.856e9 / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("number", "fields", "reason"),
    (
        (65, {"mbs": None}, "mbs not stated"), (65, {"seq": None, "mbs": None}, "mbs and seq not stated"),
        (65, {"model": "Llama 9"}, "sizes of the model Llama 9"), (92, {"gpus": None}, "gpus not stated"),
        (65, {"source": "somewhere"}, "source somewhere is not read"), (65, {"technique": "LoRA"}, "rank and targets"),
        (7, {"parallel": None}, "malformed (AttributeError)"), (96, {"model": "GPT 1B"}, "sizes of the model GPT 1B"),
        (65, {"measured": {"gib": float("nan")}}, "is not positive"), (65, {"measured": {"gb": 0}}, "is not positive"),
        (65, {"measured": {}}, "malformed (KeyError)"), (65, {"measured": 3}, "malformed (TypeError)"),
        (3, {"parallel": {"fsdp": 1, "cp": 8}}, "context_parallel_size (8) is not supported"),
    ),
)  # fmt: skip
def test_a_row_that_is_not_read_says_why(number: int, fields: dict[str, Any], reason: str) -> None:
    (found,) = changed(number, **fields)
    assert found.status == "unread" and reason in found.reason and found.error is None


@pytest.mark.parametrize("number", [0, 7])
def test_reserved_memory_is_held_against_reserved_memory(number: int) -> None:
    """torchtitan's figure: 8 and 128 GPUs, nothing compiled, all in bf16. What is allocated is 14 % and more below."""
    (found,) = outcomes([ROWS[number]])
    assert found.status == "counted" and found.error == pytest.approx(0, abs=0.08)
    assert found.predicted_bytes is not None
    allocated = estimate(read(ROWS[number].data).run).stages[0].peak_bytes
    assert allocated < 0.87 * found.predicted_bytes
    assert any("expandable_segments" in line for line in found.assumptions)


def test_what_is_not_replayed_or_not_modelled_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    (unknown,) = outcomes([ROWS[18]])
    assert unknown.status == "unmodelled" and "whether it is compiled is not stated" in unknown.reason
    monkeypatch.setattr(engine_records, "why_not", lambda run: "reserved memory of this is not replayed")
    (reserved,) = outcomes([ROWS[7]])
    assert reserved.status == "unmodelled"
    assert reserved.reason == (
        "reserved memory of this is not replayed: the estimate is of allocated memory, which is a lower bound"
    )
    assert totals([reserved, unknown]) == []


def test_gb_are_decimal_unless_the_script_divides_by_two_to_the_thirtieth() -> None:
    """``train_qwen3_zero3.py`` divides by 1e9, ``bf16_master_weight/train.py`` and Automodel's recipe by 1024 ** 3."""
    assert read(ROWS[100].data).figures[0].nbytes == 96_450_000_000
    assert read(ROWS[91].data).figures[0].nbytes == round(47.59 * GIB)
    assert [f.nbytes for f in read(ROWS[95].data).figures] == [round(25.74 * GIB), round(31.38 * GIB)]


def test_errors_are_averaged_over_source_and_model_first() -> None:
    """Two rows of 10 % of one model and one of 2 % of another: (10 + 2) / 2, and not the 7.3 % of rows."""

    def one(number: str, model: str, predicted: int) -> Outcome:
        return Outcome(number, "s", model, "", "A", "counted", "", "peak", 100, predicted)

    (total,) = totals([one("1", "a", 110), one("2", "a", 90), one("3", "b", 102)])
    assert total.mean == pytest.approx(0.06) and total.worst == pytest.approx(0.10)
    assert (total.rows, total.groups, total.figures, total.within) == (3, 2, 3, 1)


def test_the_command_knows_the_corpus_by_its_fields(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    some = tmp_path / "runs.jsonl"
    coarse = next(n for n, row in ROWS.items() if row.data["grade"] == "C")
    some.write_text("\n".join(json.dumps(dict(ROWS[n].data)) for n in (65, 66, 64, coarse)) + "\n")
    assert main(["accuracy", str(some)]) == 0
    text = capsys.readouterr().out
    assert "2 of 2 figures within 3%" in text and "64: samples are not packed" in text
    assert "1 rows of other grades are not scored" in text
    assert main(["accuracy", str(some), "--by", "gpu"]) == 2
    assert "--by is for records of Megatron's memory" in capsys.readouterr().err


def test_its_json_is_valid_by_its_schema(capsys: pytest.CaptureFixture[str]) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(bridge_memory.__file__).parent / "report" / "accuracy_torch.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    assert main(["accuracy", str(RUNS), "--json"]) == 1  # more than half cannot be read
    document = json.loads(capsys.readouterr().out)
    jsonschema.Draft202012Validator(schema).validate(document)
    scored = {o["id"] for o in document["figures"]} | {o["id"] for o in document["unread"]}
    assert len(scored) + document["not_scored"] == len(ROWS) == 227
