"""No option does nothing in silence: every field of a RunSpec is read where memory is counted, or is spoken of."""

from __future__ import annotations

import ast
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from bridge_memory import spec
from bridge_memory.spec import ModelSpec, RunSpec
from bridge_memory.spec.run import GROUPS

PACKAGE = Path(spec.__file__).parents[1]
#: Where memory is counted; of ``spec``, how layers are laid out, and what it says of itself (properties).
COUNTING = ("engines/*.py", "inventory/**/*.py", "tapes/*.py", "schedule/*.py", "workspaces/*.py",
            "estimation.py", "spec/layout.py", "releases.py")  # fmt: skip
#: Every field that is read there yields a sentence: under "not modelled", or among the assumptions.
SPEAKING = ("caveats/*.py", "spec/graphs.py")
BLOCKS = (
    spec.LayerSpec, spec.AttentionSpec, spec.MLASpec, spec.MambaSpec, spec.GatedDeltaNetSpec, spec.MLPSpec, spec.MoESpec
)
#: Field -> why neither reads it.
NEITHER = {"ModelSpec.generic": "moves no byte: there is no evidence for such a model (evidence.py)"}


@cache
def read_in(*patterns: str) -> frozenset[str]:
    found: set[str] = set()
    for pattern in patterns:
        paths = list(PACKAGE.glob(pattern))
        assert paths, pattern
        for path in paths:
            found |= _attributes(ast.parse(path.read_text()))
    return frozenset(found)


def _attributes(tree: ast.AST) -> set[str]:
    return {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}


@cache
def with_properties(names: frozenset[str]) -> frozenset[str]:
    """``names``, and what the properties and methods among them read of the spec themselves."""
    reads: dict[str, set[str]] = {}
    for path in PACKAGE.glob("spec/*.py"):
        for owner in (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)):
            for method in (n for n in owner.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")):
                reads.setdefault(method.name, set()).update(_attributes(method))
    known = names
    while more := frozenset().union(*(reads[name] for name in known & reads.keys())) - known:
        known |= more
    return known


@pytest.mark.parametrize("cls", [ModelSpec, *BLOCKS, *GROUPS.values(), RunSpec], ids=lambda cls: cls.__name__)
def test_every_field_is_read_or_spoken_of(cls: type) -> None:
    counted, said = with_properties(read_in(*COUNTING)), read_in(*SPEAKING)
    left = {f.name for f in fields(cls) if f.init} - counted - said
    assert {f"{cls.__name__}.{name}" for name in left} == {n for n in NEITHER if n.startswith(f"{cls.__name__}.")}
