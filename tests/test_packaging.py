"""What an installation holds, and what the check of a fresh environment runs."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bridge_memory
from bridge_memory.cli import main
from bridge_memory.releases import DEFAULT_MEGATRON_CORE, DEFAULT_TORCH, DEFAULT_TRANSFORMER_ENGINE

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(bridge_memory.__file__).parent
SCRIPTS = sorted(path for path in (ROOT / "scripts").rglob("*.py") if "def main(" in path.read_text())
#: The check, the documents and what they are made of: where a file of this project is named by its path.
NAMING = (
    ROOT / ".ci" / "run", ROOT / "README.md", ROOT / "pyproject.toml",
    *(path for path in (ROOT / "references").rglob("*.md") if "generated" not in path.parts),
)  # fmt: skip
#: Named by the worked examples of the guide, which were made on branches.
ON_BRANCHES = {"tests/plan/test_objectives.py", "tests/engines/test_single_offload.py"}
#: ``tests/te``, ``scripts/maintain/freeze.py``, ``tests/inventory/{test_moe,test_ssm}.py``
PATHS = re.compile(r"(?<![\w/.])(?:tests|scripts|examples|benchmarks|references)/[\w/.,{}*-]*\w}?")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_file_that_is_no_module_is_packaged() -> None:
    """Schemas, presets, pages: a wheel holds what these patterns match."""
    patterns = project()["tool"]["setuptools"]["package-data"]["bridge_memory"]
    packaged = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    others = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others - packaged == set()
    assert all(any(PACKAGE.glob(pattern)) for pattern in patterns)


def test_every_folder_of_modules_is_a_package() -> None:
    """A folder without ``__init__.py`` is left out of the wheel."""
    assert {path.parent for path in PACKAGE.rglob("*.py")} == {path.parent for path in PACKAGE.rglob("__init__.py")}


def test_the_version_stands_in_one_place() -> None:
    about = project()
    assert "version" not in about["project"] and about["project"]["dynamic"] == ["version"]
    assert about["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "bridge_memory.__version__"}
    assert re.fullmatch(r"\d+\.\d+\.\d+", bridge_memory.__version__)


def test_the_version_names_the_releases_that_an_answer_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"bridge-memory {bridge_memory.__version__}"
    defaults = (DEFAULT_MEGATRON_CORE, DEFAULT_TRANSFORMER_ENGINE, DEFAULT_TORCH)
    assert [tuple(map(int, release.split("."))) for release in re.findall(r"\d+\.\d+", second)] == list(defaults)
    assert all(name in second for name in ("megatron-core", "Transformer Engine", "torch"))


@pytest.mark.parametrize("path", NAMING, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    missing = []
    for found in PATHS.findall(text):
        start, brace, rest = found.partition("{")
        inner, _, end = rest.partition("}")
        for name in inner.split(",") if brace else ("",):
            if not any(ROOT.glob(f"{start}{name}{end}".rstrip("."))):
                missing.append(found)
    assert set(missing) <= ON_BRANCHES


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_what_it_does(script: Path, tmp_path: Path) -> None:
    """From any folder, without what it needs beside this package; nothing is written."""
    done = subprocess.run(
        [sys.executable, str(script), "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("usage: ") and not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_says_how_it_is_called(script: Path) -> None:
    words = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    assert f"python {script.relative_to(ROOT).as_posix()}" in words


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_check_is_a_script() -> None:
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)
