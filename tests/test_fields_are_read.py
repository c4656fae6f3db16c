"""No option does nothing in silence: every field of a RunSpec is read where memory is counted, or is spoken of."""

from __future__ import annotations

import ast
from dataclasses import fields, replace
from functools import cache
from pathlib import Path

import pytest

from bridge_memory import estimate, spec
from bridge_memory.spec import BatchSpec, DataParallelSpec, ImplementationSpec, ModelSpec, RunSpec, SpecError
from bridge_memory.spec.run import GROUPS
from bridge_memory.spec.unmodelled import NoEffect

PACKAGE = Path(spec.__file__).parents[1]
#: Where memory is counted; of ``spec``, how layers are laid out, what a sample gives encoders, and what it says of
#: itself (properties).
COUNTING = ("engines/*.py", "inventory/**/*.py", "tapes/*.py", "schedule/*.py", "workspaces/*.py",
            "estimation.py", "spec/layout.py", "spec/encoders.py", "releases.py", "job/**/*.py")  # fmt: skip
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


def other_values(name: str) -> list[object]:
    """Values of a field of ImplementationSpec that are not its default."""
    found = {f.name: f for f in fields(ImplementationSpec)}[name]
    rule, default = found.metadata["rule"], found.default
    if rule.release:
        return [(0, 13)]
    if tuple in rule.types:
        return [(one,) for one in rule.names]
    if rule.names:
        return [one for one in rule.names if one != default]
    return [not default] if bool in rule.types else [4, 100_000]


@pytest.mark.parametrize("model", ["meta-llama/Llama-3.2-1B", "Qwen/Qwen3-30B-A3B"])
@pytest.mark.parametrize("name", [f.name for f in fields(ImplementationSpec) if f.name != "transformer_impl"])
def test_options_of_other_layers_do_nothing_and_say_so(name: str, model: str) -> None:
    """In runs of transformers' layers: megatron-core's options are refused or noted, and a noted one moves no byte."""
    plain = RunSpec(model=model, data_parallel=DataParallelSpec(engine="single"), batch=BatchSpec(seq_length=512))
    plain = plain.with_(model=replace(plain.model, layers=plain.model.layers[:2]))
    base = estimate(plain)
    spoken = False
    for value in other_values(name):
        try:
            run = plain.with_(implementation=replace(plain.implementation, **{name: value}))
        except SpecError:
            spoken = True
            continue
        found = estimate(run)
        idle = [s for s in found.assumptions if isinstance(s, NoEffect) and s.startswith(f"{name} (")]
        moved = found.stages != base.stages
        assert not (idle and moved), idle
        spoken = spoken or moved or found.assumptions != base.assumptions or found.not_modelled != base.not_modelled
    # Without experts their balance is the command line's to speak of (arguments/silent.py: drop_idle).
    assert spoken or name in ("expandable_segments", "moe_imbalance")
