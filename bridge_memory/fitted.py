"""Every constant of the estimate that was fitted on measured runs instead of read in a source.

Each has a name, a unit, the runs behind it and the values it was chosen from: ``bridge-memory accuracy --folds K``
chooses again with whole families left out and predicts those. Sizes of libraries are in ``workspaces``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from bridge_memory.spec import RunSpec


@dataclass(frozen=True, slots=True)
class Fitted:
    """One constant: its name here, the values it was chosen from (the last one means "no such tensor").

    ``moves``: whether the estimate of a run can depend on it; False only where it cannot.
    """

    name: str
    candidates: tuple[object, ...]
    runs: str
    moves: Callable[[RunSpec], bool]


#: None: what the last one stood for is in the sources (``releases.ROWS_ADDED_DETERMINISTICALLY``).
FITTED: tuple[Fitted, ...] = ()


@contextmanager
def replaced(values: Mapping[str, object]) -> Iterator[None]:
    """Other values of constants, by name, inside a with-block; estimates inside take them (``inventory.context``)."""
    before = {name: globals()[name] for name in values}
    try:
        globals().update(values)
        yield
    finally:
        globals().update(before)
