"""The installed Transformer Engine: release, supported releases, modules."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
from typing import Any

PACKAGE = "transformer_engine"
COMPILED = "transformer_engine_torch"
#: Oldest and newest release for which tests/te passed.
OLDEST, NEWEST = (2, 10), (2, 20)
#: Installs its Python without the compiled half; its recipes need pydantic.
INSTALL = 'pip install --no-deps "transformer_engine==2.20.2" && pip install pydantic packaging'


def version() -> str:
    """The installed release of Transformer Engine."""
    return importlib.metadata.version(PACKAGE)


def te_module(name: str) -> Any:
    """The imported module ``transformer_engine.pytorch.NAME``; an empty one where it is not imported."""
    return sys.modules.get(f"{PACKAGE}.pytorch.{name}") or types.ModuleType(name)
