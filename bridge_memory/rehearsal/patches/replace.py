"""Replace names of other packages inside a ``with`` block."""

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
    """Set ``owner.name`` inside this block. Without ``add``, does nothing where the release has no such name, or no
    owner (None)."""
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
    """The imported module, or an empty one where the release does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return types.ModuleType(name)
