"""Import megatron-core as the rehearsal does, before tests do, so that 0.18 and later import too."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec

from installed_core import unset_is_installed

__all__ = ["unset_is_installed"]

if find_spec("torch") is not None:
    from bridge_memory.rehearsal.imports import import_megatron_core
    from bridge_memory.rehearsal.world import quiet

    with suppress(ImportError), quiet():
        import_megatron_core()
