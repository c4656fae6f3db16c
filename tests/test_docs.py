"""The documents show what the tool prints today, and what they name is there."""

from __future__ import annotations

import argparse
import importlib
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bridge_memory.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
REFERENCES = ROOT / "references"
#: Written as they were when they were true, and not since.
FROZEN = REFERENCES / "generated" / "history_of_predictions.md"
#: What people write. The rest of references/ is written by scripts.
PAGES = (
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(REFERENCES.glob("*.md")),
)
DOCUMENTS = (*PAGES, *(page for page in sorted((REFERENCES / "generated").glob("*.md")) if page != FROZEN))
#: Stands for something in a command of the documents.
PLACEHOLDER = re.compile(r"[\[\]<]|\.\.\.")


def script(name: str) -> dict[str, object]:
    return runpy.run_path(str(ROOT / "scripts" / name))


def checked(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = script(name)["main"](["--check"])  # type: ignore[operator]
    said = capsys.readouterr()
    assert code == 0, f"{said.out}{said.err}run scripts/{name}"


@pytest.mark.slow
def test_every_output_in_the_documents_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    checked("refresh_docs.py", capsys)


def test_a_block_that_is_no_command_of_ours_is_refused() -> None:
    refreshed = script("refresh_docs.py")["refreshed"]
    with pytest.raises(SystemExit, match="a console block begins with"):
        refreshed("```console\n$ nvidia-smi\n47 MiB\n```\n")  # type: ignore[operator]


def test_the_table_of_options_has_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    checked("configuration_table.py", capsys)


def test_the_table_of_kernels_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    checked("kernels_table.py", capsys)


def test_a_flag_without_a_row_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge_memory.arguments.flags import Flag

    names = script("configuration_table.py")
    table = names["table"]
    new = Flag("--brand-new", "parallel.world_size_of_tomorrow", "a flag that nobody described")
    monkeypatch.setitem(table.__globals__, "FLAGS", (*names["FLAGS"], new))  # type: ignore[attr-defined, misc]
    with pytest.raises(SystemExit, match="no row for --brand-new; add one"):
        table()  # type: ignore[operator]


def test_models_and_releases_of_the_matrix_are_those_of_the_registries() -> None:
    names = script("supported.py")
    page = (REFERENCES / "generated" / "supported.md").read_text()
    for part in ("models", "of_releases"):
        assert names[part]() in page, "run scripts/supported.py"  # type: ignore[operator]


@pytest.mark.slow
def test_the_matrix_of_engines_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """Some 700 estimates and searches."""
    checked("supported.py", capsys)


def test_links_between_documents_lead_somewhere() -> None:
    for path in DOCUMENTS:
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name} -> {target}"


def named_files(path: Path) -> Iterator[Path]:
    """Paths in backticks that begin with a folder of the repository or a room of the package, `a.py: function` too."""
    text = path.read_text().partition("## Worked examples")[0]  # of files that were tried on a branch
    rooms = "|".join(room.name for room in (ROOT / "bridge_memory").iterdir() if room.is_dir())
    for name in re.findall(r"`((?:bridge_memory|scripts|tests|examples|benchmarks|references)/[\w./-]+)", text):
        yield ROOT / name.rstrip("/.")
    for name in re.findall(rf"`((?:{rooms})/[\w/]+\.py)", text):
        yield ROOT / "bridge_memory" / name


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name)
def test_files_that_documents_name_are_there(page: Path) -> None:
    assert not [str(file.relative_to(ROOT)) for file in named_files(page) if not file.exists()]


def commands() -> Iterator[tuple[str, str]]:
    """(document, command line) of every `bridge-memory COMMAND ...` in a block, indented or in backticks."""
    for path in PAGES:
        text = path.read_text().replace("\\\n", " ")
        for line in re.findall(r"^(?:\$ |    )bridge-memory ([a-z].*)$", text, re.MULTILINE):
            yield path.name, line
        for line in re.findall(r"`bridge-memory ([a-z][^`]*)`", re.sub(r"```.*?```", "", text, flags=re.S)):
            yield path.name, re.sub(r"\s*\n\s*", " ", line)


@pytest.mark.parametrize(("document", "line"), sorted(set(commands())))
def test_a_command_in_the_documents_takes_its_flags(document: str, line: str) -> None:
    name, *arguments = shlex.split(line, comments=True)
    assert name in COMMANDS, document
    parser = argparse.ArgumentParser()
    importlib.import_module(COMMANDS[name][0]).add_arguments(parser)
    for argument in arguments:
        if argument.startswith("--") and not PLACEHOLDER.search(argument):
            assert argument.partition("=")[0] in parser._option_string_actions, f"{document}: {line}"


def test_the_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert max(map(len, lines)) <= 120


def test_people_have_no_more_to_read_than_they_can() -> None:
    """README.md, references/*.md and what a coding assistant reads."""
    apart = ("CONTRIBUTING.md", "CHANGELOG.md")
    pages = [*(page for page in PAGES if page.name not in apart), *(REFERENCES / "skill").glob("*.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= 25_000


def test_words_that_are_ours_alone_are_not_in_the_documents() -> None:
    """What the field has a word for; the glossary is the project's."""
    ours = r"\b(in passing|known as|cheapest fix|toys?|towers?|lasting buffers?|stand-in weight|unsplit|nobody here)\b"
    for path in PAGES:
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.S)  # outputs have their own tests
        found = re.findall(ours, text) if path.name != "CHANGELOG.md" else []
        assert not found, f"{path.name}: {found}"


def test_the_site_builds_from_the_same_files(tmp_path: Path) -> None:
    """A page that no entry of the site leads to, a link or an anchor that leads nowhere ends it."""
    pytest.importorskip("mkdocs")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, env={"PATH": "", "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "How much GPU memory" in (tmp_path / "index.html").read_text()
