"""How a search's table is printed: what rows share above it, in a line's width, and briefly."""

from __future__ import annotations

import csv
import io

import pytest

from bridge_memory.cli import main

MOE = [
    "search", "Qwen/Qwen3-30B-A3B", "--num-gpus", "16", "--gpu", "H100", "--global-batch-size", "64",
    "--vary", "tp,pp,ep,mbs,recompute",
]  # fmt: skip


def printed(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main([*MOE, *words]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("width", [80, 100])
def test_a_table_fits_a_line(width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    lines = printed([], capsys).splitlines()
    assert max(map(len, lines)) <= width
    # One heading a table: the fastest, and the Pareto front.
    assert len([line for line in lines if line.split()[:1] == ["#"]]) <= 2


def test_what_rows_share_is_said_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = printed(["--top", "8"], capsys)
    rows = list(csv.DictReader(io.StringIO(printed(["--top", "8", "--format", "csv"], capsys))))
    lines = text.splitlines()
    at = next(n for n, line in enumerate(lines) if line.split()[:1] == ["#"])
    for axis in ("tp", "pp", "mbs"):
        values = {row[axis] for row in rows}
        assert (axis in lines[at].split()) == (len(values) > 1)
        if len(values) == 1:
            assert f"{axis} {values.pop()}" in "\n".join(lines[:at]).split("All rows: ")[1]


def test_brief_is_the_answer_and_its_first_rows(capsys: pytest.CaptureFixture[str]) -> None:
    text, brief = printed([], capsys), printed(["--brief"], capsys)
    assert brief.splitlines()[0] == text.splitlines()[0]
    assert "Pareto" not in brief and "evaluated" not in brief
    table = brief.splitlines()[next(n for n, line in enumerate(brief.splitlines()) if line.startswith("- ")) + 1 :]
    assert [line.split()[0] for line in table if line[:1].isdecimal()] == ["1", "2", "3", "4", "5"]


def test_ctrl_c_prints_what_is_known(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge_memory.cli.progress import Progress

    calls = []

    def second(self: Progress, looked_at: int, fitting: int) -> None:
        calls.append(fitting)
        if len(calls) > 1 and fitting:
            raise KeyboardInterrupt

    monkeypatch.setattr(Progress, "__call__", second)
    assert main(MOE) == 130
    text = capsys.readouterr().out
    assert text.startswith("Fastest layout: ") and f"{calls[-1]:,} fit H100" in text and "stopped early" in text
