"""``bridge-memory accuracy``: corpora of speed and of memory, told apart by their fields."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bridge_memory.cli import main
from bridge_memory.report.page.one_file import MOST_BYTES

DATA = Path(__file__).parents[1] / "data"
SPEED, MEMORY = DATA / "throughput" / "runs.jsonl", DATA / "measurements" / "runs.jsonl"


@pytest.mark.slow
def test_a_corpus_of_speed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["accuracy", str(SPEED), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    groups = {g["group"]: g for g in found["groups"]}
    assert groups["aa|13B|8192|128"]["layouts"] == 54 and not groups["aa|13B|8192|128"]["fitted"]
    fits = found["out_of_memory"]
    assert 0 < fits["predicted_and_measured"] <= min(fits["predicted"], fits["measured"]) <= fits["rows"]
    assert main(["accuracy", str(SPEED), "--summary"]) == 0
    text = capsys.readouterr().out
    assert "aa|13B|8192|128" in text and "median Spearman" in text and "precision" in text and "recall" in text


def test_a_corpus_of_memory_is_told_by_its_fields(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    some = tmp_path / "runs.jsonl"
    some.write_text("\n".join(MEMORY.read_text().splitlines()[100:104]) + "\n")
    assert main(["accuracy", str(some), "--by", "gpu"]) == 0
    assert "max_allocated, %" in capsys.readouterr().out


def test_validate_of_measured_runs_answers_with_the_new_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    some = tmp_path / "runs.jsonl"
    some.write_text("\n".join(MEMORY.read_text().splitlines()[100:104]) + "\n")
    assert main(["validate", str(some)]) == 2
    assert "bridge-memory accuracy" in capsys.readouterr().err


def test_rows_that_cannot_be_read_are_counted_by_reason(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    some = tmp_path / "runs.jsonl"
    rows = SPEED.read_text().splitlines()[:8]
    strange = {**json.loads(rows[0]), "gpu": "TPU v5"}
    some.write_text("\n".join([*rows, json.dumps(strange)]))
    assert main(["accuracy", str(some), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unread"] == {"no figures of the GPU TPU v5": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    ((["--folds", "1"], "--folds is 1, and"), (["--json", "x.json"], "--json FILE is for records")),
)
def test_what_is_no_question_of_speed_is_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["accuracy", str(SPEED), *flags]) == 2
    assert words in capsys.readouterr().err


def test_no_corpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text(SPEED.read_text().splitlines()[0] + "\n[1, 2]\n")
    for arguments, words in (
        (["accuracy"], "RUNS.jsonl is missing"), (["accuracy", str(tmp_path / "no.jsonl")], "no.jsonl"),
        (["accuracy", str(bad)], "line 2 is not a JSON object"),
    ):  # fmt: skip
        assert main(arguments) == 2
        assert words in capsys.readouterr().err


def test_a_corpus_may_come_through_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """It is read once: what tells speed from memory does not take it away."""
    some = "\n".join(SPEED.read_text().splitlines()[:40])
    done = subprocess.run(
        [sys.executable, "-m", "bridge_memory", "accuracy", "/dev/stdin"], input=some, text=True, capture_output=True
    )
    assert done.returncode == 0 and "40 rows are runs" in done.stdout, done.stderr


@pytest.mark.parametrize(
    "change", ({"tp": "x"}, {"gpus": None, "tp": []}, {"model_facts": 3, "model": "GPT 1B"}, {"vp": [3]})
)
def test_malformed_rows_are_not_read(
    change: dict[str, object], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    some = tmp_path / "runs.jsonl"
    rows = SPEED.read_text().splitlines()[:5]
    some.write_text("\n".join([*rows, json.dumps({**json.loads(rows[0]), **change})]))
    assert main(["accuracy", str(some), "--json"]) == 0
    assert sum(json.loads(capsys.readouterr().out)["unread"].values()) == 1


@pytest.mark.parametrize("kind", ["memory", "engines", "speed"])
def test_a_page_has_predicted_over_measured(tmp_path: Path, kind: str) -> None:
    """A point for each record: where both are measured and counted, the very figures of the file's."""
    source = {"memory": MEMORY, "engines": DATA / "engines" / "runs.jsonl", "speed": SPEED}[kind]
    lines = source.read_text().splitlines()
    some = tmp_path / "runs.jsonl"
    some.write_text("\n".join(lines[100:104] if kind == "memory" else lines[:300]) + "\n")
    target = tmp_path / "page.html"
    assert main(["accuracy", str(some), "--output", str(target)]) in (0, 1)  # 1: half of the engines' rows are unread
    text = target.read_text()
    held = re.search(r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL)
    assert held and len(text.encode()) <= MOST_BYTES
    (chart,) = json.loads(held[1])
    points = [point for series in chart["data"]["series"] for point in series["points"]]
    assert chart["kind"] == "plot" and chart["data"]["diagonal"] and points
    if kind != "memory":
        return
    document = tmp_path / "page.json"
    assert main(["accuracy", str(some), "--output", str(document)]) == 0
    figures = {
        (r["measured_max_allocated_bytes"] / 2**30, r["predicted_max_allocated_bytes"] / 2**30)
        for r in json.loads(document.read_text())["records"] if r["measured_max_allocated_bytes"]
    }  # fmt: skip
    assert {(x, y) for x, y, _ in points} <= figures
