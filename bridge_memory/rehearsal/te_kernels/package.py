"""Which Transformer Engine is installed, and its modules."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from typing import Any

PACKAGE = "transformer_engine"
COMPILED = "transformer_engine_torch"
#: Releases whose calls of its compiled half are known, as tests/te passed with them.
OLDEST, NEWEST = (2, 10), (2, 20)
#: How to get its Python alone; pydantic is what its recipes are written with.
INSTALL = 'pip install --no-deps "transformer_engine==2.20.2" && pip install pydantic packaging'


def version() -> str:
    """The release of Transformer Engine that is installed."""
    return importlib.metadata.version(PACKAGE)


def te_module(name: str) -> Any:
    return sys.modules.get(f"{PACKAGE}.pytorch.{name}") or types.ModuleType(name)
