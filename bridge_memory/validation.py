"""What a RunSpec refuses, before any layout: one line each, naming the field and the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bridge_memory.spec import RunSpec


def validate(run: RunSpec) -> None:
    """Raise SpecError on the first contradiction in ``run``."""
