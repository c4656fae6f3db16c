"""Fields of a spec's groups, and how they are declared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from bridge_memory.spec import fields as declarations
from bridge_memory.spec.fields import Checked, flag, rules_of


@dataclass(frozen=True)
class Bare(Checked):
    sound: bool = flag(False)
    fuses_everything: bool = False


@dataclass(frozen=True)
class OtherMetadata(Checked):
    fuses_everything: bool = field(default=False, metadata={"help": "words"})


@pytest.mark.parametrize("cls", [Bare, OtherMetadata])
def test_a_field_without_a_rule_is_named_with_what_to_use(cls: Any) -> None:
    """Where the flags are declared, and where one is built: whichever comes first."""
    for use in (cls, lambda: rules_of(cls)):
        with pytest.raises(TypeError) as error:
            use()
        said = str(error.value)
        assert said.startswith(f"{cls.__name__}.fuses_everything is declared without a rule; give ")
        assert "flag(...)" in said and "\n" not in said


def test_what_to_use_is_all_that_declares() -> None:
    made = {
        name for name, one in vars(declarations).items()
        if getattr(one, "__annotations__", {}).get("return") == "Any" and not name.startswith("_")
    }  # fmt: skip
    with pytest.raises(TypeError) as error:
        rules_of(Bare)
    assert made == {word.partition("(")[0] for word in str(error.value).split() if "(...)" in word}
