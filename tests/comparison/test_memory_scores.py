"""``bridge-memory accuracy`` of memory: what the command prints and writes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bridge_memory.cli.megatron import scores as validate
from bridge_memory.spec import SpecError

CORPUS = Path(__file__).parents[1] / "data" / "measurements" / "runs.jsonl"


def record(tmp_path: Path, **changes) -> Path:
    base = json.loads(CORPUS.read_text().splitlines()[100])
    path = tmp_path / "runs.jsonl"
    path.write_text(json.dumps({**base, **changes}) + "\n")
    return path


def run(*argv: str) -> int:
    parser = argparse.ArgumentParser()
    validate.add_arguments(parser)
    return validate.run(parser.parse_args(list(argv)))


def test_the_json_lists_every_rank_and_the_summary(tmp_path: Path, capsys) -> None:
    assert run(str(record(tmp_path)), "--json", "-") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "bridge-memory/accuracy-memory/2"
    (entry,) = document["records"]
    assert set(entry) == {
        "id", "family", "tier", "rank", "status", "reason", "predicted_allocated_bytes",
        "measured_allocated_bytes", "predicted_max_allocated_bytes", "measured_max_allocated_bytes",
    }
    assert document["summary"]["all"]["per_record"]["max_allocated"]["count"] == 1


def test_what_is_not_a_run_is_listed_and_not_counted(tmp_path: Path, capsys) -> None:
    """A corpus of one run and one layer: one of one is predicted, and the layer says what it is."""
    path = record(tmp_path)
    base = json.loads(path.read_text())
    layer = {**base, "id": "layer", "config": {"kind": "not_a_run", "reason": "one layer"}}
    path.write_text(path.read_text() + json.dumps(layer) + "\n")
    assert run(str(path), "--summary") == 0
    text = capsys.readouterr().out
    assert "1/1 runs" in text and "not_a_run: layer: skipped: one layer" in text


def test_groups_by_scale(tmp_path: Path, capsys) -> None:
    assert run(str(record(tmp_path)), "--by", "scale") == 0
    assert "small test models" in capsys.readouterr().out


def test_the_worst_misses_come_with_their_components(tmp_path: Path, capsys) -> None:
    assert run(str(record(tmp_path)), "--worst", "1") == 0
    text = capsys.readouterr().out
    assert "unexplained" in text and "MiB" in text and "options: " in text


def test_a_json_file_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text("mine")
    with pytest.raises(SpecError, match="--force"):
        run(str(record(tmp_path)), "--json", str(out))
    assert out.read_text() == "mine"
    assert run(str(record(tmp_path)), "--json", str(out), "--force") == 0
    assert json.loads(out.read_text())["schema"] == validate.SCHEMA
