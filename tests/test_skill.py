"""references/skill/SKILL.md: every command in it runs, and the fields that it names are in the answers."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from bridge_memory.cli import main

SKILL = Path(__file__).resolve().parents[1] / "references" / "skill" / "SKILL.md"
TEXT = SKILL.read_text()
COMMANDS = re.findall(r"^    bridge-memory (.+)$", TEXT, re.MULTILINE)
LOG = (
    "[Rank 0] (after 2 iterations) memory (MB) | allocated: 30000.0 | max allocated: 45000.0 | reserved: 47000.0 | "
    "max reserved: 47000.0\n"
)


def test_front_matter_names_and_describes() -> None:
    head = re.fullmatch(r"---\nname: ([a-z-]+)\ndescription: (.+)\n---\n.*", TEXT, re.DOTALL)
    assert head and head[1] == "bridge-memory" and 100 < len(head[2]) <= 1024
    assert len(TEXT.splitlines()) < 200


def test_ten_questions_have_a_command_each() -> None:
    sections = re.split(r"^### ", TEXT, flags=re.MULTILINE)[1:]
    assert len(sections) == 10
    assert all(re.search("^    bridge-memory ", section, re.MULTILINE) for section in sections)


@pytest.mark.parametrize("command", COMMANDS, ids=[f"{i}-{c.split()[0]}" for i, c in enumerate(COMMANDS)])
def test_a_command_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.log").write_text(LOG)
    assert main(shlex.split(command)) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert printed.strip()
    if "--json" in command:
        assert json.loads(printed)["schema"].startswith("bridge-memory/")


def test_the_fields_that_it_names_exist(capsys: pytest.CaptureFixture[str]) -> None:
    def asked(command: str) -> dict:
        assert main([*shlex.split(command), *([] if "--json" in command else ["--json"])]) == 0
        return json.loads(capsys.readouterr().out)

    by_name = {}
    for command in COMMANDS:
        by_name.setdefault(command.split()[0], command)
    answer = asked(by_name["estimate"])
    assert {"answer", "words", "evidence"} <= answer["verdict"].keys()
    assert {"peak_bytes", "static_bytes", "components", "host"} <= answer["stages"][0].keys()
    assert "headroom_bytes" in answer["fits"][0] and {"assumptions", "not_modelled"} <= answer.keys()
    (first, *_) = asked(by_name["whatif"])["changes"]
    assert {"flags", "without", "freed_bytes", "step_time_factor"} <= first.keys()
    assert "headroom_bytes" in asked(by_name["search"])["best"][0]


def test_its_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(program, str(SKILL), "exec"), {})
    assert capsys.readouterr().out.startswith("fits ")
