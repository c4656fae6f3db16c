"""Data goes forward only: no module imports from a room to its right (lazy imports count too)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "bridge_memory"
#: Rooms from left to right; a module belongs to the longest prefix of its name.
ROOMS = {
    "spec": 0, "components": 0,
    "fields": 1, "limits": 1, "validation": 1,
    "readers": 1,
    "layout_string": 0,
    "layout": 1,
    "inventory": 2,
    "model_state": 3,
    "timeline": 3,
    "gaps": 3,
    "estimate": 4,
    "details": 5,
    "gpus": 5,
    "table2": 5,
    "report": 6,
    "theoretical_memory_utils": 7,
    "compare": 7, "live": 8, "rehearse": 7,
    "cli": 9,
}  # fmt: skip
#: Readers are left of everything that computes.
NEVER = {"readers": {"layout", "inventory", "model_state", "timeline", "estimate", "report", "cli"}}


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("bridge_memory."):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("bridge_memory."))


MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE or p.stem not in ("__init__", "__main__"))


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_to_the_right_is_imported(path: Path) -> None:
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for module in _imports(path):
        if (here, module) == ("spec", "bridge_memory.spec.validation"):
            continue  # A RunSpec checks itself when it is built.
        there = _room(module)
        assert ROOMS[there] <= ROOMS[here], f"{here} imports {module}"
        assert there not in NEVER.get(here, ()), f"{here} imports {module}"
