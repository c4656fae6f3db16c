"""The rooms of the package and what each may import, as references/architecture.md draws them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "bridge_memory"
PAGE = ROOT / "references" / "architecture.md"


class Import(NamedTuple):
    """``module`` imports ``imported``, both with dots and without the package's name."""

    module: str
    imported: str
    #: Read by type checkers only.
    for_types: bool


def rooms_of_the_page() -> dict[str, tuple[str, ...]]:
    """Room -> rooms it may import, from the page's table, in its order."""
    rooms = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and (room := re.fullmatch(r"`(\w+)`", cells[0])):
            assert room[1] not in rooms, f"{room[1]} stands twice in the table"
            rooms[room[1]] = tuple(re.findall(r"`(\w+)`", cells[2]))
    return rooms


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }


def room_of(module: str) -> str:
    return module.partition(".")[0]


def imports() -> Iterator[Import]:
    """Every import of one module of the package by another, inside of functions too."""
    known = modules()
    for module, path in known.items():
        tree = ast.parse(path.read_text())
        for_types = {id(inner) for node in ast.walk(tree) if _asks_for_types(node) for inner in ast.walk(node)}
        for node in ast.walk(tree):
            for name in _imported(node, known):
                yield Import(module, name, id(node) in for_types)


def _asks_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _imported(node: ast.AST, known: Mapping[str, Path]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom):
        assert not node.level, "imports are absolute"
        package, _, module = (node.module or "").partition(".")
        if package != PACKAGE.name:
            return
        names = {f"{module}.{alias.name}".lstrip(".") for alias in node.names}
        yield from names & set(known)  # Modules by name; else what is imported is inside ``module``.
        if module and names - set(known):
            yield module
        assert module or names <= {*known, "__version__"}, f"{names}: ask the room that has it"
    elif isinstance(node, ast.Import):
        yield from (a.name.partition(".")[2] for a in node.names if a.name.startswith(f"{PACKAGE.name}."))


ROOMS = rooms_of_the_page()
IMPORTS = tuple(imports())


def test_the_page_draws_every_room_and_no_other() -> None:
    assert set(ROOMS) == {room_of(module) for module in modules()}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_the_page_says(room: str) -> None:
    """No more; and no less, so that the page shows what is, and an arrow that is gone is not drawn."""
    arrows = {(room_of(i.imported), i.module) for i in IMPORTS if room_of(i.module) == room != room_of(i.imported)}
    assert {(there, by) for there, by in arrows if there not in ROOMS[room]} == set()
    assert set(ROOMS[room]) == {there for there, _ in arrows}


def test_data_goes_forward_only() -> None:
    """Every room stands below what it imports."""
    above: set[str] = set()
    for room, imported in ROOMS.items():
        assert set(imported) <= above, f"{room} stands above {set(imported) - above}"
        above.add(room)


#: A tape asks ``alive`` for its cost.
CIRCLES = {"inventory"}


@pytest.mark.parametrize("room", [room for room in ROOMS if room not in CIRCLES and (PACKAGE / room).is_dir()])
def test_no_circle_inside_a_room(room: str) -> None:
    """Whichever module is imported first, and whichever function is called first."""
    graph: dict[str, set[str]] = {}
    for i in IMPORTS:
        if room_of(i.module) == room_of(i.imported) == room and not i.for_types:
            graph.setdefault(i.module, set()).add(i.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by that name alone: of two the second is an error, in environments where both are run."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
