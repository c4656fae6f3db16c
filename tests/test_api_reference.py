"""What the documents of the Python interface show is what it does: every example runs, and the page is current."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
from scripts_of import load_script

import bridge_memory

#: Of what an example needs beside this package.
TRAINER = ("torch", "transformers", "accelerate")
NEEDS = {
    "MemoryReportCallback": ("transformers",), "rehearse": ("torch", "megatron.core"),
    "RehearsalResult": ("torch", "megatron.core"), "run_of_trainer": TRAINER, "run_of_accelerator": TRAINER,
    "run_of_deepspeed": ("torch", "transformers"),
}  # fmt: skip


def test_the_page_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert load_script("api_reference").main(["--check"]) == 0, capsys.readouterr().out


def test_every_public_name_is_on_the_page_once() -> None:
    named = [name for names in load_script("api_reference").SECTIONS.values() for name in names]
    assert sorted(named) == bridge_memory.__all__


def _missing(packages: tuple[str, ...]) -> list[str]:
    found = []
    for package in packages:
        try:
            if importlib.util.find_spec(package) is None:
                found.append(package)
        except ModuleNotFoundError:  # the parent of a package inside another
            found.append(package)
    return found


#: Described where they are made; their examples stand with them.
ELSEWHERE = ()


@pytest.mark.parametrize("name", [name for name in bridge_memory.__all__ if name not in ELSEWHERE])
def test_the_example_of_a_name_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every name has one, and it shows what it says. Files that it writes are in the current folder."""
    thing: Any = getattr(bridge_memory, name)
    (test,) = doctest.DocTestFinder(recurse=False).find(thing, name, module=False, globs={})
    assert test.examples
    if missing := _missing(NEEDS.get(name, ())):
        pytest.skip(f"needs {', '.join(missing)}")
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    said: list[str] = []
    outcome = doctest.DocTestRunner().run(test, out=said.append)
    assert outcome.failed == 0, "".join(said)


@pytest.mark.parametrize("name", [name for name in bridge_memory.__all__ if name not in ELSEWHERE])
def test_a_function_says_its_arguments_and_its_errors(name: str) -> None:
    """Every argument by name; and what it raises, where it takes any."""
    thing: Any = getattr(bridge_memory, name)
    if isinstance(thing, type):
        return
    taken = thing.__code__.co_varnames[: thing.__code__.co_argcount + thing.__code__.co_kwonlyargcount]
    described = inspect.cleandoc(thing.__doc__).partition("Args:")[2].partition("Example:")[0]
    assert [argument for argument in taken if f"\n    {argument}: " not in described] == []


def test_the_package_itself_shows_what_it_does() -> None:
    outcome = doctest.testmod(bridge_memory)
    assert outcome.attempted >= 4 and outcome.failed == 0
