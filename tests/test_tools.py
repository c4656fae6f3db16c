"""Every script and benchmark runs from a clone without installation, and its docstring names its own path."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("scripts", "scripts/maintain", "benchmarks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))


def test_docstrings_name_the_command() -> None:
    for path in FILES:
        words = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        assert f"python {path.relative_to(ROOT).as_posix()}" in words, path


@pytest.mark.slow
def test_help_without_installation(tmp_path: Path) -> None:
    """In another folder, with installed packages on the path but, as ``-S`` reads no .pth file, no editable clone."""
    environment = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["purelib"]}
    wrong = []
    for path in FILES:
        command = [sys.executable, "-S", str(path), "--help"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        if done.returncode or not done.stdout.startswith("usage: "):
            wrong.append(f"{path.relative_to(ROOT)}: {done.stderr.strip()[-200:] or done.stdout[:200]}")
    assert FILES and not wrong, "\n".join(wrong)
