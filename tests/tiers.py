"""Which examples of a test belong to the fast tier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def few_fast(examples: Iterable[Any], fast: int = 2) -> list[Any]:
    """``examples`` for ``parametrize``; all but the first ``fast`` are marked slow."""
    out = []
    for at, example in enumerate(examples):
        values = example if isinstance(example, tuple) else (example,)
        out.append(example if at < fast else pytest.param(*values, marks=pytest.mark.slow))
    return out
