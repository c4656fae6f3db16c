"""Costs of a grid's blocks as plain arrays and JSON, so that another process can load them.

The costs depend on the grid's settings, sizes and recomputation, and on this package's code. ``name`` is a digest of
the former; whoever stores them must add the version of the latter. Loading executes and unpickles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np

from bridge_memory.tapes.many import COLUMNS, FLAGS, OF_NODES, Columns, ManyParameters, Request, RunGrid
from bridge_memory.tapes.parameters import Parameter, ParameterList, Repeated, Use


def name(grid: RunGrid) -> str:
    """A digest of everything that the costs of a grid depend on, except the code."""
    digest = sha256(repr((grid.cache.settings, grid.recomputes, grid.shape)).encode())
    for values in (*grid.dimensions, *(() if grid.needed is None else (np.packbits(grid.needed),))):
        digest.update(repr((values.dtype.str, values.shape)).encode())
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def pack(grid: RunGrid) -> tuple[dict[str, np.ndarray], Any]:
    """(arrays by name, a description of them for JSON)."""
    arrays: dict[str, np.ndarray] = {}
    blocks: dict[str, Any] = {}
    for number, (block, columns) in enumerate(grid.evaluated_blocks()):
        for field, values in columns.cost.items():
            arrays[f"{number}.{field}"] = values
        for i, request in enumerate(columns.persistent):
            arrays[f"{number}.what.{i}"], arrays[f"{number}.nbytes.{i}"] = request.what, request.nbytes
        parameters = columns.parameters
        arrays[f"{number}.which"] = parameters.which
        blocks[block] = {
            "number": number, "requests": len(columns.persistent), "lists": [_plain(one) for one in parameters.lists],
        }  # fmt: skip
    return arrays, {"blocks": blocks, "shapes": [list(shape) for shape in grid.shapes]}


def _plain(parameters: ParameterList) -> Any:
    return [
        [[[p.name, list(p.shape), p.expert, p.sharded, p.use.value, p.trains] for p in few], times]
        for few, times in parameters.rows
    ]


def unpack(grid: RunGrid, arrays: Mapping[str, np.ndarray], about: Any) -> None:
    """Load into ``grid`` what ``pack`` returned for a grid of the same name. Raises KeyError, TypeError or ValueError,
    and changes nothing, if the arrays do not fit this grid."""
    found = {
        block: _columns(grid, arrays, int(of["number"]), int(of["requests"]), of["lists"])
        for block, of in about["blocks"].items()
    }
    grid.load(found, [tuple(map(int, shape)) for shape in about["shapes"]])


def _columns(grid: RunGrid, arrays: Mapping[str, np.ndarray], number: int, requests: int, lists: Any) -> Columns:
    def array(field: str, kind: str) -> np.ndarray:
        values = arrays[f"{number}.{field}"]
        fits = all(n in (1, most) for n, most in zip(values.shape, grid.shape, strict=True))
        if values.dtype.kind != kind or not fits:
            raise ValueError(f"{field} is not of this grid")
        return values

    which = array("which", "i")
    known = [ParameterList([_repeated(row) for row in rows]) for rows in lists]
    if not known or which.min() < 0 or which.max() >= len(known):
        raise ValueError("parameters are not of this grid")
    of_nodes = [field for field in OF_NODES if f"{number}.{field}" in arrays]
    return Columns(
        {field: array(field, "b" if field in FLAGS else "i") for field in (*COLUMNS, *of_nodes)},
        ManyParameters(known, which),
        tuple(Request(array(f"what.{i}", "i"), array(f"nbytes.{i}", "i")) for i in range(requests)),
    )


def _repeated(row: Any) -> Repeated:
    few, times = row
    return Repeated(
        tuple(
            Parameter(
                str(label), tuple(map(int, shape)), bool(expert), bool(sharded), Use(use),
                None if trains is None else bool(trains),
            )
            for label, shape, expert, sharded, use, trains in few
        ),
        int(times),
    )
