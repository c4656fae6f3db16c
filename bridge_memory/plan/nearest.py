"""Where nothing fits: a change of the run, or more GPUs, with which something does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from bridge_memory.plan.found import Found, Row
from bridge_memory.spec import SpecError

SpaceT = TypeVar("SpaceT")
#: GPUs to try, times those of the search.
TIMES = (2, 4, 8, 16)


class Nearest(NamedTuple):
    """Fields of a RunSpec ("group.field" -> value) to change, the GPUs, and the layout or configuration that then
    fits."""

    fields: Mapping[str, Any]
    num_gpus: int
    row: Row[Any]


def surest_of(searched: Callable[[SpaceT], Found], space: SpaceT) -> Row[Any] | None:
    """``Found.surest`` of what ``searched`` finds; None where it refuses the space."""
    try:
        return searched(space).surest()
    except SpecError:
        return None
