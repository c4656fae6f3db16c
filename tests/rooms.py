"""What modules of the package import of each other, and by which names. Read from their sources; none is imported.

``sources`` are texts by the module's dotted name without the package's: ``engines.fsdp2``; of the package itself
``__init__``. A room is what stands before the first dot.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

PACKAGE = "bridge_memory"
Sources = Mapping[str, str]


class Import(NamedTuple):
    """``module`` imports ``imported``, both without the package's name."""

    module: str
    imported: str
    #: Read by type checkers only.
    for_types: bool = False


class Found(NamedTuple):
    """Something in line ``line`` of ``module``, as it is written there."""

    module: str
    line: int
    text: str


def sources_of(folder: Path) -> dict[str, str]:
    """The sources of the package in ``folder``."""
    return {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
        for path in sorted(folder.rglob("*.py"))
    }


def room_of(module: str) -> str:
    return module.partition(".")[0]


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """All of a source's syntax tree, its root first. Kept: to parse the package takes seconds."""
    return tuple(ast.walk(ast.parse(source)))


def imports(sources: Sources) -> Iterator[Import]:
    """Every import of one module of the package by another, inside of functions too."""
    for module, source in sources.items():
        for_types = {id(inner) for node in nodes(source) if _asks_for_types(node) for inner in ast.walk(node)}
        for node in nodes(source):
            for name in _imported(node, sources):
                yield Import(module, name, id(node) in for_types)


def _asks_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _imported(node: ast.AST, known: Iterable[str]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom):
        assert not node.level, "imports are absolute"
        package, _, module = (node.module or "").partition(".")
        if package != PACKAGE:
            return
        names = {f"{module}.{alias.name}".lstrip(".") for alias in node.names}
        yield from sorted(names & set(known))  # Modules by name; else what is imported is inside ``module``.
        if module and names - set(known):
            yield module
        assert module or names <= {*known, "__version__"}, f"{names}: ask the room that has it"
    elif isinstance(node, ast.Import):
        yield from (a.name.partition(".")[2] for a in node.names if a.name.startswith(f"{PACKAGE}."))


# ---- imports by string ----


def names_of_modules(module: str, source: str) -> Iterator[Found]:
    """Strings that name a module of this package, which an import statement would show: texts that begin with
    ``bridge_memory.`` wherever they stand, ``__package__``, and ``bridge_memory`` or ``__name__`` where a name is put
    together or imported. A docstring may say what it likes."""
    docstrings = {id(node.value) for node in nodes(source) if isinstance(node, ast.Expr)}
    begins = {id(first) for node in nodes(source) for first in _beginnings(node)}
    for node in nodes(source):
        found = False
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            found = node.value.startswith(f"{PACKAGE}.") or (node.value == PACKAGE and id(node) in begins)
        elif isinstance(node, ast.Name):
            found = node.id == "__package__" or (node.id == "__name__" and id(node) in begins)
        elif isinstance(node, ast.Attribute):
            found = node.attr == "__package__"
        if found:
            yield Found(module, node.lineno, ast.unparse(node))


def _beginnings(node: ast.AST) -> Iterator[ast.AST]:
    """What a string begins with that ``node`` puts together, or imports."""
    if isinstance(node, ast.JoinedStr) and node.values:
        first = node.values[0]
        yield first.value if isinstance(first, ast.FormattedValue) else first
    elif isinstance(node, ast.BinOp):
        yield node.left
    elif isinstance(node, ast.Call) and _called(node) in _IMPORTERS:
        yield from node.args


_IMPORTERS = ("import_module", "__import__", "find_spec", "run_module")


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def imports_by_string(module: str, sources: Sources) -> Iterator[Import]:
    """The modules that ``module`` names in strings, as imports."""
    for found in names_of_modules(module, sources[module]):
        name = found.text.strip("'\"")
        if re.fullmatch(r"\w+(\.\w+)+", name) and name.startswith(f"{PACKAGE}."):
            yield Import(module, name.partition(".")[2])


# ---- private names ----

#: Public though they begin with an underscore: methods of named tuples, whose fields may have any name.
_PUBLIC = ("_asdict", "_fields", "_make", "_replace")


def private_names(module: str, source: str) -> Iterator[Found]:
    """Names with an underscore in front of another room: imported, or asked of what is imported."""
    foreign = {}
    for node in nodes(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            path = (node.module or "").split(".")[1:]
            for alias in node.names:
                if room_of(module) == (*path, alias.name)[0]:
                    continue
                foreign[alias.asname or alias.name] = ".".join((*path, alias.name))
                if any(_private(part) for part in (*path, alias.name)):
                    yield Found(module, node.lineno, f"from {node.module} import {alias.name}")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                path = alias.name.split(".")
                if path[0] == PACKAGE and len(path) > 1 and path[1] != room_of(module):
                    foreign[alias.asname or alias.name] = ".".join(path[1:])
                    if any(map(_private, path[1:])):
                        yield Found(module, node.lineno, f"import {alias.name}")
    for node in nodes(source):
        if isinstance(node, ast.Attribute) and _private(node.attr) and ast.unparse(node.value) in foreign:
            yield Found(module, node.lineno, ast.unparse(node))
        elif isinstance(node, ast.Call) and _called(node) == "getattr" and ast.unparse(node.args[0]) in foreign:
            name = node.args[1]
            if isinstance(name, ast.Constant) and _private(str(name.value)):
                yield Found(module, node.lineno, ast.unparse(node))


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in _PUBLIC


# ---- circles ----


def circle(arrows: Iterable[tuple[str, str]]) -> str | None:
    """One circle of ``arrows``, (from, to), if there is one: "a -> b -> a"."""
    graph: dict[str, set[str]] = {}
    for one, other in arrows:
        if one != other:
            graph.setdefault(one, set()).add(other)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " -> ".join(reversed(error.args[1]))
    return None


def circle_of_modules(found: Iterable[Import], room: str) -> str | None:
    """A circle of modules inside of ``room``; a module that imports itself is none."""
    return circle(
        (i.module, i.imported) for i in found
        if room_of(i.module) == room_of(i.imported) == room and not i.for_types
    )  # fmt: skip


def circle_of_rooms(found: Iterable[Import]) -> str | None:
    """A circle of rooms; what type checkers alone read counts too."""
    return circle((room_of(i.module), room_of(i.imported)) for i in found)
