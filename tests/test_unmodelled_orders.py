"""Every gap that can be listed says how large it is and where it moves the peak, in words that say something."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import bridge_memory
from bridge_memory.readers.container_registry import OTHER_LAYER_SPECS
from bridge_memory.readers.container_registry import UNMODELLED as CONTAINER_UNMODELLED
from bridge_memory.readers.engines.deepspeed import _ZERO_UNMODELLED, UNMODELLED
from bridge_memory.readers.megatron_args.sizes import ORDERS
from bridge_memory.readers.megatron_args.unmodelled import UNMODELLED as UNMODELLED_ARGUMENTS
from bridge_memory.readers.megatron_args.unmodelled import Feature
from bridge_memory.spec.unmodelled import UNKNOWN_SIZE, Effect, as_feature

ROOT = Path(bridge_memory.__file__).parent
#: What is listed with an order of its own, and what hands that on.
MAKERS = {"Unmodelled", "feature", "unmodelled"}
#: An order names a quantity, a bound or something that is as large; or says that its size is unknown.
SAYS = re.compile(
    r"bytes?\b|\b[KMG]iB\b|elements|as large|as many|as much|up to|at most|rows|unknown|tokens|"
    r"weights|gradients|activations|saves?\b|states|logits|numbers|none|half|inputs|copies|copy|depth|queries|scores"
)


def calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            # ``diagnostics.feature`` has an effect among its arguments; other functions of that name do not.
            effect = any("effect" in ast.unparse(a).lower() for a in node.args)
            if name in MAKERS and (name == "Unmodelled" or effect):
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


@pytest.mark.slow
def test_every_gap_is_made_with_an_order() -> None:
    found = list(calls())
    assert len(found) > 80
    orders = {where: [word.value for word in call.keywords if word.arg == "order"] for where, call in found}
    assert not [where for where, said in orders.items() if not said]
    plain = {where: said[0].value for where, said in orders.items() if isinstance(said[0], ast.Constant)}
    assert not {where: order for where, order in plain.items() if not SAYS.search(str(order))}


def listed() -> dict[str, tuple[Effect, str]]:
    found: dict[str, tuple[Effect, str]] = {}
    tables: dict[str, dict[str, Feature]] = {"arguments": UNMODELLED_ARGUMENTS, **CONTAINER_UNMODELLED}
    for table, entries in tables.items():
        found |= {f"{table}.{name}": (entry.effect, entry.order) for name, entry in entries.items()}
    found |= {name: (effect, order) for name, (effect, _, order) in OTHER_LAYER_SPECS.items()}
    found |= {name: (effect, order) for name, (effect, _, _, order) in UNMODELLED.items()}
    found |= {name: (effect, order) for name, (_, effect, _, order) in _ZERO_UNMODELLED.items()}
    return found


@pytest.mark.parametrize(("name", "entry"), listed().items())
def test_every_entry_of_a_registry_has_an_order(name: str, entry: tuple[Effect, str]) -> None:
    effect, order = entry
    assert isinstance(effect, Effect)
    assert SAYS.search(order), order


def test_an_argument_has_one_order() -> None:
    names = [name for words in ORDERS.values() for name in words.split()]
    assert sorted(names) == sorted(UNMODELLED_ARGUMENTS)


def test_lists_of_what_is_not_modelled_are_given_gaps() -> None:
    """A plain sentence has neither direction nor order; readers append none."""
    plain = []
    for path in sorted((ROOT / "readers").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append"
                and re.search(r"(not_modelled|unmodelled)$", ast.unparse(node.func.value))
                and isinstance(node.args[0], (ast.Constant, ast.JoinedStr))
            ):  # fmt: skip
                plain.append(f"{path.name}:{node.lineno}")
    assert not plain


def test_a_sentence_of_somebody_elses_is_of_no_known_size() -> None:
    assert as_feature("z").order == UNKNOWN_SIZE
