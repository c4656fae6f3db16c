"""A prediction below what was measured has a plus sign, in per cent of what was measured, wherever it stands."""

from __future__ import annotations

import ast
import io
import json
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from scripts_of import load_script

from bridge_memory import RunSpec, StageResidual, compare, estimate
from bridge_memory.accuracy.predictions import Outcome
from bridge_memory.api.rehearsing import RehearsalRow
from bridge_memory.calibration.records import StageRecord
from bridge_memory.cli import main
from bridge_memory.live.table import text_table
from bridge_memory.residual import SIGN, SIGN_PERCENT, percent, relative

ROOT = Path(__file__).parents[1]
MODEL = "meta-llama/Llama-3.2-1B"
GIB = 1 << 30


def test_the_sign_by_hand() -> None:
    """96 were predicted and 100 measured: +4, +4.0 % of 100."""
    assert relative(100, 96) == 0.04 and percent(0.04) == "+4.0" and percent(-0.0004) == "+0.0" and percent(None) == "-"
    assert relative(0, 96) is None and relative(None, 96) is None and relative(100, None) is None
    assert "measured - predicted" in SIGN_PERCENT and "% of measured" in SIGN_PERCENT


@pytest.fixture
def log(tmp_path: Path) -> tuple[str, int]:
    """A log of one rank whose peak is a third above the prediction: off by 25 % of what was measured."""
    peak = estimate(RunSpec(model=MODEL).with_fields(seq_length=4096)).peak_stage.peak_bytes
    measured = peak * 4 // 3
    figures = f"allocated: 1024.0 | max allocated: {measured / 2**20} | reserved: 1.0 | max reserved: 1.0"
    path = tmp_path / "train.log"
    path.write_text(f"[Rank 0] (after 2 iterations) memory (MB) | {figures}\n")
    return str(path), measured - peak


def printed(*words: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(list(words)) == 0
    return out.getvalue()


def test_a_log_by_every_way(log: tuple[str, int]) -> None:
    path, missing = log
    run = RunSpec(model=MODEL).with_fields(seq_length=4096)
    (stage,) = compare(run, path).stages
    assert stage.residual == pytest.approx(missing, abs=1) and stage.error == pytest.approx(0.25, abs=1e-6)
    assert "25.0 % too low" in str(compare(run, path))
    (row,) = json.loads(printed("compare", path, MODEL, "--num-gpus", "1", "--json"))["stages"]
    assert row["error"] == stage.error and row["residual_bytes"] == stage.residual
    for extra in ((), ("--format", "html")):
        text = printed("compare", path, MODEL, "--num-gpus", "1", *extra)
        assert "+25.0" in text and "-25.0" not in text and SIGN_PERCENT in text, extra
        assert "25.0% too low" in " ".join(text.split())


def test_a_live_report_and_its_page() -> None:
    from bridge_memory.calibration.records import ReportRecord
    from bridge_memory.report.history import _answer, _table

    record = StageRecord(stage=0, expected=96 * GIB, measured=100 * GIB, residual=4 * GIB, predicted_peak=96 * GIB)
    assert record.error == 0.04
    text = text_table([record], "memory")
    assert "+4.00" in text and "+4.0" in text and SIGN_PERCENT in text
    report = ReportRecord.__new__(ReportRecord)
    object.__setattr__(report, "stages", (record,))
    object.__setattr__(report, "notes", ())
    table = _table(report)
    assert SIGN_PERCENT in table.title and "+4.0" in table.rows[0]
    assert "4.0% too low" in _answer(report).lines[0]


def test_scores_rehearsals_and_scripts() -> None:
    outcome = Outcome(
        "id", "family", "A", "H100", 0, "ok", predicted_allocated_bytes=48, measured_allocated_bytes=50,
        predicted_max_allocated_bytes=96, measured_max_allocated_bytes=100,
    )  # fmt: skip
    assert outcome.allocated_error == 0.04 == outcome.max_allocated_error
    assert RehearsalRow("weights", predicted=96, found=100).difference == 4
    assert StageResidual(0, predicted_static=40, predicted_peak=96, ranks=1, max_allocated=100).error == 0.04
    differential = load_script("differential")
    assert differential.relative_error(96, 100) == 0.04 and differential.relative_error(1, 0) == -float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["bridge_memory", "scripts"])
def test_no_other_place_divides_what_is_predicted_by_what_is_measured(folder: str) -> None:
    """``predicted / measured - 1`` and the like: a subtraction over a quotient of the two, outside of residual.py."""
    names = ("measured", "found", "rehearsed", "max_allocated")
    wrong = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        if path.name == "residual.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.BinOp):
                continue
            text = ast.unparse(node)
            quotient = isinstance(node.op, ast.Sub) and isinstance(node.left, ast.BinOp) and isinstance(
                node.left.op, ast.Div
            ) and ast.unparse(node.right) in ("1", "1.0")  # fmt: skip
            share = isinstance(node.op, ast.Div) and isinstance(node.left, ast.BinOp) and isinstance(
                node.left.op, ast.Sub
            )  # fmt: skip
            divisor = ast.unparse(node.left if quotient else node).rpartition("/")[2]
            if (quotient or share) and "predicted" in text and any(name in divisor for name in names):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text}")
    assert not wrong
    assert SIGN == "measured - predicted"
