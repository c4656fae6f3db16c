"""The rooms of the package and what each may import, as references/generated/rooms.md lists them."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import rooms

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "bridge_memory"
PAGE = ROOT / "references" / "generated" / "rooms.md"

#: Modules that import modules of this package by their names in strings, and why. What they name counts as imported.
BY_STRING = {
    "__init__": "public names that an estimate does not need are imported when they are asked for",
    "cli": "one module a command, imported when that command is given",
    "engines.by_name": "the module of the one engine that a run names",
}
#: A subject a module: lines of one in spec/rules.
MOST_LINES_OF_RULES = 250


def rooms_of_the_page() -> dict[str, tuple[str, ...]]:
    """Room -> rooms it may import, from the page's table, in its order."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and (room := re.fullmatch(r"`(\w+)`", cells[0])):
            assert room[1] not in found, f"{room[1]} stands twice in the table"
            found[room[1]] = tuple(re.findall(r"`(\w+)`", cells[2]))
    return found


ROOMS = rooms_of_the_page()
SOURCES = rooms.sources_of(PACKAGE)


@cache
def statements() -> tuple[rooms.Import, ...]:
    return tuple(rooms.imports(SOURCES))


@cache
def imports() -> tuple[rooms.Import, ...]:
    """By strings too."""
    return (*statements(), *(i for module in BY_STRING for i in rooms.imports_by_string(module, SOURCES)))


def test_the_page_draws_every_room_and_no_other() -> None:
    assert set(ROOMS) == {rooms.room_of(module) for module in SOURCES}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_the_page_says(room: str) -> None:
    """No more; and no less, so that the page shows what is, and an arrow that is gone is not drawn."""
    arrows = {
        (rooms.room_of(i.imported), i.module) for i in imports()
        if rooms.room_of(i.module) == room != rooms.room_of(i.imported)
    }  # fmt: skip
    assert {(imported, by) for imported, by in arrows if imported not in ROOMS[room]} == set()
    assert set(ROOMS[room]) == {imported for imported, _ in arrows}


def test_data_goes_forward_only() -> None:
    """Every room stands below what it imports."""
    above: set[str] = set()
    for room, imported in ROOMS.items():
        assert set(imported) <= above, f"{room} stands above {set(imported) - above}"
        above.add(room)


@pytest.mark.parametrize("room", ROOMS)
def test_no_circle_inside_a_room(room: str) -> None:
    """Whichever module is imported first, and whichever function is called first. The table of commands is no import
    of them: the one that writes shell completions reads that table."""
    assert rooms.circle_of_modules(statements(), room) is None


def test_no_circle_of_rooms() -> None:
    assert rooms.circle_of_rooms(imports()) is None


def test_modules_are_imported_by_statements() -> None:
    found = {module: list(rooms.names_of_modules(module, source)) for module, source in SOURCES.items()}
    assert [one for module, names in found.items() if module not in BY_STRING for one in names] == []
    assert [module for module in BY_STRING if not found[module]] == [], "needs its exemption no more"


def test_private_names_stay_in_their_room() -> None:
    assert [found for module in SOURCES for found in rooms.private_names(module, SOURCES[module])] == []


def test_a_module_of_rules_holds_one_subject() -> None:
    lines = {module: source.count("\n") for module, source in SOURCES.items() if module.startswith("spec.rules")}
    assert len(lines) > 10
    assert {module: n for module, n in lines.items() if n > MOST_LINES_OF_RULES} == {}


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by that name alone: of two the second is an error, in environments where both are run."""
    names = [path.name for path in Path(__file__).parent.rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


# ---- the checks themselves: what each must not let pass ----


@pytest.mark.parametrize("source", [
    'import importlib\nimportlib.import_module("bridge_memory.plan.whatif")',
    'from importlib import import_module as get\nname = "bridge_memory.plan"\nget(name)',
    '__import__("bridge_memory")',
    'from importlib import import_module\nimport_module(".whatif", "bridge_memory")',
    'from importlib import import_module\nimport_module(f"bridge_memory.{room}")',
    'from importlib import import_module\nimport_module(f"{__package__}.{name}")',
    'from importlib import import_module\nimport_module("." + name, __package__)',
    'from importlib import import_module\nimport_module(__name__ + ".whatif")',
    'import bridge_memory.spec as spec\nNAME = spec.__package__',
    'LAZY = {"whatif": "bridge_memory.plan.whatif"}',
    'LAZY = {"whatif": ("bridge_memory" + ".plan", 1)}',
    'def f():\n    import sys\n    return sys.modules["bridge_memory.plan"]',
])  # fmt: skip
def test_a_module_named_by_a_string_is_found(source: str) -> None:
    assert list(rooms.names_of_modules("spec.run", source))


@pytest.mark.parametrize("source", [
    '"""Names ``bridge_memory.plan`` in words."""',
    'def f():\n    """bridge_memory.plan is above."""',
    'from importlib import import_module\nimport_module("megatron.core")',
    'from importlib import import_module\nimport_module(f"transformers.models.{kind}")',
    'if __name__ == "__main__":\n    main()',
    'raise AttributeError(f"module {__name__!r} has no attribute")',
    'VERSIONS = {"bridge_memory": "0.2.0"}',
])  # fmt: skip
def test_what_is_no_import_by_string_is_not(source: str) -> None:
    assert list(rooms.names_of_modules("spec.run", source)) == []


def test_what_strings_name_counts_as_imported() -> None:
    sources = {"cli": 'COMMANDS = {"serve": ("bridge_memory.web.serve", "a page")}', "web.serve": ""}
    assert list(rooms.imports_by_string("cli", sources)) == [rooms.Import("cli", "web.serve")]


@pytest.mark.parametrize("source", [
    "from bridge_memory.tapes.alive import _passes",
    "def f():\n    from bridge_memory.tapes.alive import cost_of, _passes as passes",
    "from bridge_memory.tapes import alive\nalive._passes()",
    "from bridge_memory.tapes import alive as a\nx = [a._passes(y) for y in z]",
    "import bridge_memory.tapes.alive\nbridge_memory.tapes.alive._passes()",
    "import bridge_memory.tapes.alive as alive\nalive._passes = None",
    "from bridge_memory.tapes import alive\ngetattr(alive, '_passes')",
    "from bridge_memory.tapes.alive import BlockCost\nBlockCost._of(1)",
    "from bridge_memory.tapes._alive import cost_of",
])  # fmt: skip
def test_a_private_name_of_another_room_is_found(source: str) -> None:
    assert list(rooms.private_names("engines.fsdp2", source))


@pytest.mark.parametrize("source", [
    "from bridge_memory.engines.ddp import _bucket",
    "from bridge_memory.engines import ddp\nddp._bucket()",
    "from bridge_memory.tapes.alive import Moment\nMoment._fields",
    "from bridge_memory.tapes.alive import cost_of as _cost\n_cost(1)",
    "from bridge_memory import __version__",
    "from torch._dynamo import _x\nself._x = 1",
])  # fmt: skip
def test_a_private_name_of_the_same_room_is_fine(source: str) -> None:
    assert list(rooms.private_names("engines.fsdp2", source)) == []


IN_A_ROOM = {"tapes.a": "from bridge_memory.tapes.b import x", "tapes.b": "def f():\n    import bridge_memory.tapes.a"}
FOR_TYPES = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from bridge_memory.tapes.a import y"


def test_a_circle_inside_a_room_is_found() -> None:
    assert rooms.circle_of_modules(rooms.imports(IN_A_ROOM), "tapes") in (
        "tapes.a -> tapes.b -> tapes.a", "tapes.b -> tapes.a -> tapes.b"
    )  # fmt: skip
    assert rooms.circle_of_modules(rooms.imports({**IN_A_ROOM, "tapes.b": FOR_TYPES}), "tapes") is None


def test_a_circle_of_rooms_is_found_though_its_modules_make_none() -> None:
    sources = {
        "a.one": "from bridge_memory.b.one import x", "b.one": "",
        "b.two": "from bridge_memory.a.two import y", "a.two": "",
    }  # fmt: skip
    found = tuple(rooms.imports(sources))
    assert rooms.circle_of_rooms(found) in ("a -> b -> a", "b -> a -> b")
    assert rooms.circle((i.module, i.imported) for i in found) is None


#: Heads of other packages' names, and of JSON keys and fields, that are rooms or modules here too.
NOT_OURS = ("torch", "megatron", "model", "accelerate", "deepspeed", "json", "report", "result.estimate",
            "result.clone", "engine.type", "verdict.words", "verdict.evidence", "attention.cpp")  # fmt: skip


def names_in(source: str) -> set[str]:
    """Every name that a module defines, imports or has as a field."""
    found: set[str] = set()
    for node in rooms.nodes(source):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


def test_what_a_docstring_names_is_there() -> None:
    """``room.module.name`` and ``room/module.py`` in double backquotes, wherever they stand in the package."""
    tails: dict[str, list[str]] = {}
    for module in SOURCES:
        parts = module.split(".")
        for start in range(len(parts)):
            tails.setdefault(".".join(parts[start:]), []).append(module)
    known = {module: names_in(source) for module, source in SOURCES.items()}
    missing = []
    for module, source in SOURCES.items():
        for words in re.findall(r"``([a-z_]\w*(?:\.\w+)+)(?:\(\))?``", source):
            if words.endswith((".py", ".json", ".jsonl")):
                continue  # a file, most often of another package
            parts = words.removeprefix("bridge_memory.").split(".")
            if parts[0] in NOT_OURS or words in NOT_OURS or words.removeprefix("bridge_memory.") in tails:
                continue
            heads = [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
            head = next((head for head in heads if head in tails), None)
            name = parts[head.count(".") + 1] if head else parts[0]
            if not any(name in known[one] for one in tails.get(head or "", ())) and (head or parts[0] in ROOMS):
                missing.append((module, words))
        for path in re.findall(r"``((?:bridge_memory/)?([a-z_0-9]+)/[\w/]+(?:\.py)?)``", source):
            file = PACKAGE / path[0].removeprefix("bridge_memory/")
            if (PACKAGE / path[1]).is_dir() and not (file.exists() or file.with_suffix(".py").exists()):
                missing.append((module, path[0]))
    assert missing == []
