"""State and traffic of an engine, worked out once for configurations that differ in what runs again in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from bridge_memory.engines.by_name import engine_of
from bridge_memory.spec.run import GROUPS
from bridge_memory.spec.transformers import TransformersSpec

if TYPE_CHECKING:
    from bridge_memory.engines.engine import Engine, StageState
    from bridge_memory.inventory.stack import Unit
    from bridge_memory.spec import RunSpec

#: Engines that do not ask what runs again in backward (a test compares with ``peaks``).
SHARING = frozenset({"single", "ddp", "fsdp1", "fsdp2", "zero1", "zero2"})
_AGAIN = frozenset({"gradient_checkpointing", "use_reentrant", "selective_ac_option", "checkpoint_submodules"})
_OTHERS = tuple(f.name for f in fields(TransformersSpec) if f.name not in _AGAIN)
_GROUPS = tuple(group for group in GROUPS if group not in ("transformers", "recompute", "batch"))
#: Engines whose state does not ask how large a layer's output is.
_WITHOUT_SIZES = frozenset({"single", "ddp", "fsdp1"})
#: From so many microbatches on, more change no state: the first, the last, and one between them.
_MICROBATCHES = 3
#: States that are kept; a search goes on with the last ones.
MOST = 256


class States:
    """Of a search."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], StageState] = {}

    def engine(self, run: RunSpec) -> Engine | None:
        """The engine of ``run`` with states that others share; None where it does not share any."""
        if run.data_parallel.engine not in SHARING:
            return None
        own = tuple([getattr(run.transformers, name) for name in _OTHERS])
        rows = None if run.data_parallel.engine in _WITHOUT_SIZES else run.batch.rows
        number = min(run.num_microbatches, _MICROBATCHES)
        key = (run.model, own, rows, number, *[getattr(run, group) for group in _GROUPS])
        return _Shared(engine_of(run), key, self._known)


class _Shared:
    def __init__(self, engine: Engine, key: tuple[Any, ...], known: dict[tuple[Any, ...], StageState]) -> None:
        self._engine, self._key, self._known = engine, key, known

    def stage(self, chunks: Sequence[Sequence[Unit]]) -> StageState:
        """As the engine's."""
        units = tuple((unit.label, unit.prefix, unit.times, unit.parameters) for chunk in chunks for unit in chunk)
        key = (self._key, len(chunks), units)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= MOST:
                self._known.clear()
            found = self._known[key] = self._engine.stage(chunks)
        return found
