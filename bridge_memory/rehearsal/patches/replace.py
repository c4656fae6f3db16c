"""Replace names of other packages for the length of a block."""

from __future__ import annotations

import importlib
import importlib.util
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

META = "meta"
_ABSENT = object()


@contextmanager
def replaced(owner: object, name: str, value: object, *, add: bool = False) -> Iterator[None]:
    """Set ``owner.name`` for this block; without ``add``, skipped where the release has no such name, or not
    the owner either (None)."""
    own = _ABSENT if owner is None else vars(owner).get(name, _ABSENT)
    if own is _ABSENT and not add and not hasattr(owner, name):
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def module_or_empty(name: str) -> Any:
    """The module, or an empty one in a release that does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return types.ModuleType(name)
