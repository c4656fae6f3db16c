"""Fixtures of every test, what every test's name must be, and which tests an earlier run of the check has done."""

import gc
import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from in_browser import browser

__all__ = ["browser"]

# How long an example takes says how busy the machine is.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Where Python is told to write no bytecode, each run would rewrite all assertions, and each command that a test starts
# compile the package anew, which takes as long as the command: it is kept for later runs, outside of the sources.
if sys.dont_write_bytecode and "PYTHONPYCACHEPREFIX" not in os.environ:
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# One thread a process, of torch's operations on the CPU and of numpy's: these are small, and as many threads as
# processors, in each of several processes, spend most of their time waiting in loops for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

#: Folders and files of tests of code that looks at what is installed: they run again where torch is.
LOOKS_AT_PACKAGES = {"live", "rehearsal", "te", "test_cold_start.py", "test_public_face.py"}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("one run after another, as in .ci/run")
    group.addoption("--passed", type=Path, metavar="FILE", help="add the names of tests that pass to FILE")
    group.addoption("--covered", type=Path, metavar="FILE", help="leave out tests whose names are in FILE")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--passed")
    if path is not None and not hasattr(config, "workerinput"):  # with pytest-xdist: once, where reports come together
        config.pluginmanager.register(_Passed(path.absolute()))


class _Passed:
    """Writes down which tests passed. Where torch is missing, only those that do not look at what is installed."""

    def __init__(self, path: Path) -> None:
        self._path, self._everywhere = path, find_spec("torch") is not None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        counts = self._everywhere or not LOOKS_AT_PACKAGES & set(Path(file).parts)
        if report.when == "call" and report.passed and counts:
            with self._path.open("a", encoding="utf-8") as out:
                out.write(f"{report.nodeid}\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests in one process of pytest-xdist: what they share is worked out once."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """An address in a name differs between the processes of pytest-xdist, which then refuses to run any test."""
    moving = [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]+", item.nodeid)]
    if moving:
        raise pytest.UsageError(f"a test's name holds an object's address; give its parameters ids: {moving[0]}")
    path = config.getoption("--covered")
    if path is not None and path.exists():
        covered = set(path.read_text(encoding="utf-8").splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in covered])
        items[:] = [item for item in items if item.nodeid not in covered]


@pytest.fixture(autouse=True, scope="module")
def _searches_for_cycles_are_short() -> None:
    """Python's searches for reference cycles look at this module's objects alone, not at thousands of tests, torch and
    what former modules left in caches: each of these would take half a second."""
    gc.collect()
    gc.freeze()
