"""The documents on accuracy say what the estimate says today."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "accuracy_report.py"))


@pytest.mark.slow
def test_the_report_the_chart_and_the_readme_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    code = SCRIPT["main"](["--check"])
    assert code == 0, capsys.readouterr().err


def test_the_readme_has_a_place_for_its_lines() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert len(SCRIPT["README_LINES"].findall(readme)) == 1
