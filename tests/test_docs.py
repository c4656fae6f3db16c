"""The documents show what the tool prints today."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from bridge_memory.arguments.flags import FLAGS

ROOT = Path(__file__).resolve().parent.parent


def test_every_output_in_the_documents_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    code = runpy.run_path(str(ROOT / "scripts" / "refresh_docs.py"))["main"](["--check"])
    assert code == 0, capsys.readouterr().out + "run scripts/refresh_docs.py"


def test_the_guide_has_every_flag() -> None:
    guide = (ROOT / "references" / "configuration_guide.md").read_text()
    missing = [flag.names for flag in FLAGS if not any(name in guide for name in flag.names.split())]
    missing = [names for names in missing if not re.search("-dtype$", names)]  # named together in one row
    assert not missing


def test_links_between_documents_lead_somewhere() -> None:
    for path in (ROOT / "README.md", *(ROOT / "references").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} -> {target}"


def test_the_readme_is_short_and_its_commands_are_ours() -> None:
    """Every `bridge-memory COMMAND` in it is one that there is."""
    from bridge_memory.cli import COMMANDS

    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    named = set(re.findall(r"^(?:\$ |    )bridge-memory ([a-z]+)", text, re.MULTILINE))
    assert named and named <= COMMANDS.keys()
