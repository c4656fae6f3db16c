"""The table of kernels (scripts/kernels.yaml): every function of the scanned sources has a row that knows every tensor,
and what it says of small layers is what the inventory counts. tests/te and tests/rehearsal compare it with what is
installed.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from kernel_examples import EXAMPLES, LOSSES, SIZES, saved
from scripts_of import load_script

table: Any = load_script("kernels_table")
ROOT = Path(__file__).resolve().parents[2]
ROWS = table.rows()
SOURCES = table.scanned()
CHECKED = [(row.of[0].rpartition(": ")[2], one) for row in ROWS for one in row.checked]


@pytest.mark.parametrize("package", ["te", "core"])
def test_every_function_that_saves_has_one_row_that_knows_what(package: str) -> None:
    named = [name for row in ROWS if row.package == package for name in row.of]
    assert len(named) == len(set(named))
    assert set(named) == {name for found in SOURCES[package].values() for name in found}
    for found in SOURCES[package].values():
        assert not table.not_in_the_table(package, found)


def test_a_row_names_only_what_a_source_saves() -> None:
    for row in ROWS:
        if row.package in ("te", "core"):
            found = [f[name] for f in SOURCES[row.package].values() for name in row.of if name in f]
            assert set(row.tensors) <= {tensor for one in found for tensor in one.saves}, row.of
            assert set(row.holds) <= {name for one in found for name in one.attributes}, row.of


def test_compiled_functions_are_those_of_the_newest_release() -> None:
    newest = {name.rpartition(": ")[2] for name in SOURCES["csrc"]["2.20.2"]}
    assert {name for row in ROWS if row.package == "csrc" and row.ours for name in row.of} <= newest


def test_a_saved_tensor_that_the_table_does_not_know_is_named() -> None:
    found = {
        "router.py: FusedAuxLoss": table.Saved(1, ("Const_buf", "tokens_per_expert", "probs"), ()),
        "router.py: FusedNewLoss": table.Saved(2, ("logits",), ()),
    }
    said = table.not_in_the_table("te", found)
    assert [sentence.partition(" (")[0] for sentence in said] == ["router.py: FusedNewLoss", "router.py: FusedAuxLoss"]
    assert "saves probs" in said[1]


def test_what_is_read_of_a_source(tmp_path: Path) -> None:
    """Classes, custom operators, tensors collected first, and attributes of ``ctx``."""
    (tmp_path / "module.py").write_text(
        "class Scale(torch.autograd.Function):\n"
        "    def forward(ctx, x, y):\n"
        "        ctx.save_for_backward(x, y.detach(), *rest)\n"
        "        ctx.handle = handle\n"
        "def setup(ctx, inputs, output):\n"
        "    tensors_to_save = (a, None, b if kept else None)\n"
        "    ctx.save_for_backward(*tensors_to_save)\n"
        "def plain(x):\n"
        "    return x\n"
    )
    assert table.scan(tmp_path) == {
        "module.py: Scale": table.Saved(3, ("*rest", "x", "y"), ("handle",)),
        "module.py: setup": table.Saved(6, ("a", "b"), ()),
    }


@cache
def functions(file: str) -> set[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    inside = {
        f"{c.name}.{f.name}" for c in tree.body if isinstance(c, ast.ClassDef)
        for f in c.body if isinstance(f, ast.FunctionDef)
    }  # fmt: skip
    return inside | {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}


def test_what_is_counted_names_functions_that_exist() -> None:
    for row in ROWS:
        assert row.use in ("counted", "nothing", "other"), row.of
        assert bool(row.ours) == (row.use == "counted"), row.of
        for place in row.ours:
            file, _, function = place.partition(": ")
            assert function in functions(file), place


@pytest.mark.parametrize(
    ("one"), [one for _, one in CHECKED], ids=[f"{of}, {one['example']}: {one['tensor']}" for of, one in CHECKED]
)
def test_the_inventory_counts_what_the_source_saves(one: dict[str, str]) -> None:
    assert saved(one["example"])[one["tensor"]] == eval(one["bytes"], {}, SIZES)


def test_every_example_is_looked_at() -> None:
    assert {one["example"] for _, one in CHECKED} == set(EXAMPLES | LOSSES)
