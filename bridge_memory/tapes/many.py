"""Blocks of many runs at once: the traces that serve them, evaluated with arrays instead of numbers.

A ``RunGrid`` is all combinations of some parallel sizes, micro batches and recomputation settings of one model. Its
contexts are ``BlockContext``s with arrays for sizes; with such a context ``blocks.block`` calls the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from bridge_memory.spec import RecomputeSpec
from bridge_memory.tapes.alive import COUNT_BYTES, TURNS, Structure
from bridge_memory.tapes.batched import (
    AXES,
    Batched,
    Differs,
    Subgrid,
    along,
    batched,
    collapsed,
    numbered,
    numbered_rows,
    step,
    whole,
)
from bridge_memory.tapes.blocks import add_trace
from bridge_memory.tapes.context import BlockContext, SettingsCache
from bridge_memory.tapes.parameters import Column, Parameter, ParameterList, Repeated, of_many_runs
from bridge_memory.tapes.recorder import Scratch
from bridge_memory.tapes.symbolic import SIZES

#: A float represents every whole number up to here.
EXACT = 2**53


class TooLarge(Exception):
    """Sizes are more bytes than arrays hold exactly."""


FLAGS = ("input_discarded", "input_retained", "output_reached")
#: Peaks before the landmark, in the order of ``BlockCost.before_landmark``.
_BEFORE = ("before_forward", "before_backward", "before_held", "before_no_grad")
#: Peaks of backward -> their names without the sizes that count apart; 0 where nothing does.
_APART = {
    name: f"{name}_without_apart" for name in ("backward_peak", "backward_peak_held", "before_backward", "before_held")
}


#: Columns of every block.
COLUMNS = (
    "backward_peak", "backward_peak_held", "discarded", "forward_peak", "input_bytes", "input_discarded",
    "input_retained", "no_grad_peak", "no_grad_retained", "offloaded", "output_bytes", "output_reached", "retained",
    *_BEFORE, *_APART.values(),
)  # fmt: skip
#: And of blocks with nodes of an overlapped schedule: ``Structure.nodes``.
OF_NODES = tuple(f"node {turn}" for turn in range(2 * len(TURNS)))


class ManyCost:
    """As ``alive.BlockCost``, of many runs."""

    __slots__ = (*COLUMNS, "turns")

    def __init__(self, columns: dict[str, Any]) -> None:
        for name in COLUMNS:
            setattr(self, name, columns[name])
        found = tuple([columns[name] for name in OF_NODES if name in columns])
        self.turns = (found[: len(TURNS)], found[len(TURNS) :]) if found else None

    @property
    def before_landmark_forward(self) -> Any:
        return getattr(self, _BEFORE[0])

    @property
    def before_landmark(self) -> tuple[Any, Any, Any, Any]:
        return tuple(getattr(self, name) for name in _BEFORE)

    @property
    def without_apart(self) -> ManyCost:
        columns = {name: getattr(self, name) for name in COLUMNS}
        found = ManyCost({**columns, **{name: columns[other] for name, other in _APART.items()}})
        found.turns = self.turns
        return found

    def forward_name(self) -> str:
        """Empty: the operation at the peak is reported for single runs only."""
        return ""

    backward_name = forward_name


class ManyParameters:
    """As ``parameters.ParameterList``, of many runs: a list for each of the few that differ."""

    __slots__ = ("_rows", "_sums", "lists", "which")

    def __init__(self, lists: Sequence[ParameterList], which: np.ndarray) -> None:
        self.lists = lists
        #: Which of them each run has.
        self.which = which
        self._rows: tuple[Repeated, ...] | None = None
        self._sums: dict[tuple[Column, ...], tuple[tuple[Any, ...], tuple[Any, ...]]] = {}

    def sums(self, columns: tuple[Column, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        found = self._sums.get(columns)
        if found is None:
            of_each = [parameters.sums(columns) for parameters in self.lists]
            found = self._sums[columns] = (  # type: ignore[assignment]
                *[tuple(self._spread([sums[i][c] for sums in of_each]) for c in range(len(columns))) for i in (0, 1)],
            )
        assert found is not None
        return found

    def _spread(self, values: list[int]) -> Any:
        return values[0] if len(set(values)) == 1 else batched(np.array(values)[self.which])

    @property
    def rows(self) -> tuple[Repeated, ...]:
        """All parameters, with arrays for shapes and ``sharded`` if the lists differ in nothing else. Raises Differs if
        they do."""
        if self._rows is not None:
            return self._rows
        if len(self.lists) == 1:
            return self.lists[0].rows
        kinds: dict[Any, int] = {}
        of_lists = [kinds.setdefault(_but_sizes(one.rows), len(kinds)) for one in self.lists]
        if len(kinds) > 1:
            raise Differs(np.array(of_lists)[self.which])
        first = self.lists[0].rows
        out = []
        for i, (parameters, _) in enumerate(first):
            few = tuple(
                Parameter(
                    p.name,
                    tuple(self._spread([of.rows[i].parameters[j].shape[d] for of in self.lists])
                          for d in range(len(p.shape))),
                    p.expert, self._spread([of.rows[i].parameters[j].sharded for of in self.lists]), p.use,
                    p.trains,
                )
                for j, p in enumerate(parameters)
            )  # fmt: skip
            out.append(Repeated(few, self._spread([of.rows[i].times for of in self.lists])))
        self._rows = tuple(out)
        return self._rows

    def runs(self, *experts: bool) -> Iterator[tuple[tuple[Parameter, ...], int]]:
        if len(self.lists) > 1:
            raise Differs(self.which)
        return self.lists[0].runs(*experts)

    def of(self, part: Subgrid) -> ManyParameters:
        """The parameters of some runs."""
        which = part.take(self.which)
        kinds, back = numbered(which)
        return ManyParameters([self.lists[k] for k in kinds.tolist()], back)


def _in_each_run(function: Callable[..., tuple[int, ...]], lists: Sequence[Any], numbers: Sequence[Any]) -> Any:
    given = []
    for one in lists:
        many = isinstance(one, ManyParameters)
        given.append(one.which if many else np.zeros(1, np.int64))
        if not many:
            int(one.numel)  # raises Differs where its sizes are arrays, and not all the same
    given += [np.asarray(number) for number in numbers]
    shape = np.broadcast_shapes(*(values.shape for values in given))
    columns = np.stack([np.broadcast_to(values, shape).ravel() for values in given], axis=1)
    rows, back = numbered_rows(columns)
    found = []
    for row in rows:
        of_run = [one.lists[k] if isinstance(one, ManyParameters) else one for one, k in zip(lists, row, strict=False)]
        found.append(tuple(map(int, function(of_run, row[len(lists) :]))))
    return tuple([
        values[0] if len(set(values)) == 1 else batched(np.array(values)[back].reshape(shape))
        for values in zip(*found, strict=True)
    ])  # fmt: skip


of_many_runs[ManyParameters] = of_many_runs[Batched] = _in_each_run


def _but_sizes(rows: Sequence[Repeated]) -> Any:
    return tuple(
        tuple((p.name, len(p.shape), p.expert, p.use, p.trains) for p in parameters) for parameters, _ in rows
    )


class ManyBlock:
    """As ``blocks.Block``, of many runs."""

    __slots__ = ("cost", "parameters", "persistent")

    def __init__(
        self, columns: dict[str, Any], parameters: ManyParameters, persistent: tuple[Request, ...]
    ) -> None:
        self.cost = ManyCost({name: batched(values) for name, values in columns.items()})
        self.parameters = parameters
        self.persistent = persistent


class Request:
    """One request for persistent scratch, of many runs. ``what``: a number for the kind and shape in each run; of
    requests with equal numbers only the largest counts. ``nbytes``: bytes in each run."""

    __slots__ = ("nbytes", "what")

    def __init__(self, what: np.ndarray, nbytes: np.ndarray) -> None:
        #: (number of the shape) * len(_KINDS) + (position of the kind in ``_KINDS``).
        self.what = what
        self.nbytes = nbytes

    def of(self, part: Subgrid) -> Request:
        """The request of some runs."""
        return Request(part.take(self.what), part.take(self.nbytes))


def largest_scratch(requests: Sequence[Request]) -> dict[Scratch, Any]:
    """Bytes by kind: the sum over shapes of the largest request of each."""
    if not requests:
        return {}
    shape = np.broadcast_shapes(*(values.shape for r in requests for values in (r.what, r.nbytes)))
    what = np.array([np.broadcast_to(r.what, shape) for r in requests])
    nbytes = np.array([np.broadcast_to(r.nbytes, shape) for r in requests])
    order = np.lexsort((nbytes, what), axis=0)
    what, nbytes = np.take_along_axis(what, order, 0), np.take_along_axis(nbytes, order, 0)
    last = np.ones(what.shape, bool)
    last[:-1] = what[:-1] != what[1:]
    kinds, kept = what % len(_KINDS), np.where(last, nbytes, 0)
    out: dict[Scratch, Any] = {}
    for number, kind in enumerate(_KINDS):
        here = kinds == number
        if kind is not None and here.any():
            out[kind] = batched(np.where(here, kept, 0).sum(axis=0))
    return out


_KINDS: tuple[Scratch | None, ...] = (None, *Scratch)
#: Most dimensions of the shape of persistent scratch.
_SHAPE = 3


class Columns(NamedTuple):
    """One block over a whole grid."""

    cost: dict[str, np.ndarray]
    parameters: ManyParameters
    persistent: tuple[Request, ...]


class _OfPart:
    """Some runs of a grid: the ``ManyBlocks`` of their context."""

    def __init__(self, grid: RunGrid, part: Subgrid) -> None:
        self._grid, self._part = grid, part

    def block(self, key: Any, record: Callable[[Any], None]) -> ManyBlock:
        return self._grid.block(self._part, key, record)

    def bare(self) -> BlockContext:
        return self._grid.bare(self._part)

    def by_recompute(self, number: Callable[[RecomputeSpec], int]) -> Any:
        return along(2, [number(self._grid.recomputes[i]) for i in self._part.positions[2]])

    def common_recompute(self, value: Callable[[RecomputeSpec], Any]) -> Any:
        return one_of([value(self._grid.recomputes[i]) for i in self._part.positions[2]])

    def largest_scratch(self, requests: Sequence[Request]) -> dict[Scratch, Any]:
        return largest_scratch(requests)


_BATCH = SIZES.index("batch")


class RunGrid:
    """All combinations of parallel sizes, micro batches and recomputation settings, with their blocks."""

    def __init__(
        self, cache: SettingsCache, sizes: Sequence[Any], switches: Sequence[Any], recomputes: Sequence[RecomputeSpec]
    ) -> None:
        """``sizes`` and ``switches``: DIMENSIONS in order, arrays over the grid, the switches along the last axis."""
        self.cache = cache
        #: Which runs' costs are needed (None: all). Traces that none of these needs are not made; those costs are 0.
        self.needed: np.ndarray | None = None
        #: Shapes of persistent scratch, numbered.
        self._shapes: dict[tuple[int, ...], int] = {}
        self.recomputes = tuple(recomputes)
        self.dimensions = [np.asarray(values).reshape((1,) * AXES) if np.ndim(values) == 0 else np.asarray(values)
                           for values in (*sizes, *switches)]
        self.shape = tuple(max(values.shape[axis] for values in self.dimensions) for axis in range(AXES))
        self.all = whole(self.shape)
        self._blocks: dict[Hashable, Columns] = {}
        #: Blocks that an earlier process evaluated (``packed``), by the ``repr`` of their key.
        self._loaded: dict[str, Columns] = {}
        self._bare: RunGrid | None = None

    def context(self, part: Subgrid) -> BlockContext:
        """The context of some of its runs. Raises Differs."""
        ctx = BlockContext(
            self.cache, [batched(part.take(values)) for values in self.dimensions], self.recompute(part),
        )  # fmt: skip
        ctx.many = _OfPart(self, part)
        return ctx

    def bare(self, part: Subgrid) -> BlockContext:
        """As ``BlockContext.bare``."""
        first = np.zeros(1, np.int64)
        return self.bare_grid().context(Subgrid((part.positions[0], *[first] * (AXES - 1))))

    def bare_grid(self) -> RunGrid:
        """The same parallel sizes, with one sequence and nothing recomputed."""
        if self._bare is None:
            end = len(SIZES) + 1
            sizes = [1 if i == _BATCH else values for i, values in enumerate(self.dimensions[:end])]
            none = [False] * (len(self.dimensions) - end)
            self._bare = RunGrid(self.cache, sizes, none, [RecomputeSpec()])
            self._bare._bare = self._bare
        return self._bare

    def recompute(self, part: Subgrid) -> Any:
        """The recomputation settings of some runs, as one."""
        few = [self.recomputes[i] for i in part.positions[2]]
        return few[0] if all(r == few[0] for r in few) else Same(few)

    def block(self, part: Subgrid, key: Hashable, record: Callable[[Any], None]) -> ManyBlock:
        """One block of some of its runs."""
        found = self._blocks.get(key)
        if found is None:
            found = self._loaded.get(repr(key)) if self._loaded else None
            found = self._blocks[key] = found or self._columns(key, record)
        return ManyBlock(
            {name: part.take(values) for name, values in found.cost.items()}, found.parameters.of(part),
            tuple([request.of(part) for request in found.persistent]),
        )  # fmt: skip

    def evaluated_blocks(self) -> Iterator[tuple[str, Columns]]:
        """(``repr`` of its key, its costs) of all blocks so far."""
        named = {repr(key): columns for key, columns in self._blocks.items()}
        yield from {**self._loaded, **named}.items()

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of persistent scratch, in order of their numbers (``Request.what``)."""
        return tuple(self._shapes)

    def load(self, blocks: dict[str, Columns], shapes: Sequence[tuple[int, ...]]) -> None:
        """Use these costs of blocks, by the ``repr`` of their keys. To be called before any block is evaluated."""
        assert not self._blocks
        self._loaded = blocks
        self._shapes = {shape: i for i, shape in enumerate(shapes)}

    def _columns(self, key: Hashable, record: Callable[[Any], None]) -> Columns:
        cost = {name: np.zeros(self.shape, bool if name in FLAGS else np.int64) for name in COLUMNS}
        bare = self.bare_grid()
        # Parameters depend neither on the micro batch nor on recomputation.
        parameters = bare.block(bare.all, key, record).parameters if bare is not self else None
        lists: dict[ParameterList, int] = {}
        which = np.zeros(self.shape, np.int64)
        persistent: list[list[np.ndarray]] = []
        for part, trace, sizes in self._leaves(key, record):
            s, atoms, here = trace.structure.offloading(self.cache.offloads), trace.atoms, part.index
            for name, values in evaluated(s, sizes[:atoms]).items():
                if name not in cost:
                    cost[name] = np.zeros(self.shape, np.int64)
                cost[name][here] = values
            for name in FLAGS:
                cost[name][here] = getattr(s, name)
            end = atoms + trace.parameter_sizes
            if parameters is None:
                which[here] = _lists(trace.parameters, sizes[atoms:end], lists)
            for i, (kind, dimensions) in enumerate(trace.persistent):
                if i == len(persistent):
                    persistent.append([np.zeros(self.shape, np.int64) for _ in range(3 + _SHAPE)])
                assert dimensions <= _SHAPE
                request = persistent[i]
                request[0][here], request[1][here] = _KINDS.index(kind), dimensions
                for at, values in enumerate(sizes[end : end + dimensions]):
                    request[2 + at][here] = values
                request[-1][here] = sizes[end + dimensions]
                end += dimensions + 1
        return Columns(
            {name: collapsed(values) for name, values in cost.items()},
            parameters or ManyParameters(list(lists), collapsed(which)),
            tuple(Request(self._numbered(request[:-1]), collapsed(request[-1])) for request in persistent),
        )  # fmt: skip

    def _numbered(self, of: Sequence[np.ndarray]) -> np.ndarray:
        """``Request.what``. ``of``: the kind, the number of dimensions of the shape, and the dimensions."""
        few = [collapsed(values) for values in of]
        shape = np.broadcast_shapes(*(values.shape for values in few))
        rows = np.stack([np.broadcast_to(values, shape).reshape(-1) for values in few], axis=1)
        distinct, back = numbered_rows(rows)
        numbers = [
            self._shapes.setdefault(tuple(sizes), len(self._shapes)) * len(_KINDS) + kind
            for kind, *sizes in distinct
        ]
        what: np.ndarray = np.array(numbers)[back.reshape(shape)]
        return what

    def _leaves(self, key: Hashable, record: Callable[[Any], None]) -> Iterator[tuple[Subgrid, Any, list[Any]]]:
        """(some runs whose costs are needed, the trace that serves them, its sizes for these runs)."""
        traces = self.cache.traces(key)

        def needed(part: Subgrid) -> bool:
            return self.needed is None or bool(self.needed[part.index].any())

        def missing(part: Subgrid) -> bool:
            if not needed(part):
                return False
            with self.cache.owner.lock:
                add_trace(self._first(part), traces, record)
            return True

        for part, trace, sizes in traces.find_many(self.dimensions, self.all, step, missing):
            if needed(part):
                yield part, trace, sizes

    def _first(self, part: Subgrid) -> BlockContext:
        """The context of the first run of a part, with numbers for sizes."""
        first = Subgrid(tuple(at[:1] for at in part.positions))
        return BlockContext(
            self.cache,
            [bool(n) if i >= len(SIZES) else int(n)
             for i, n in enumerate(first.take(values).flat[0] for values in self.dimensions)],
            self.recompute(first),
        )  # fmt: skip


def _lists(template: Any, sizes: Sequence[Any], lists: dict[ParameterList, int]) -> Any:
    """For each run the number of its parameter list; lists not seen before are added to ``lists``."""
    arrays = [(i, values) for i, values in enumerate(sizes) if isinstance(values, np.ndarray)]
    few = [int(values) if not isinstance(values, np.ndarray) else 0 for values in sizes]
    if not arrays:
        found = template.filled(tuple(few))
        return lists.setdefault(found, len(lists))
    whole_shape = np.broadcast_shapes(*(values.shape for _, values in arrays))
    rows = np.stack([np.broadcast_to(values, whole_shape).reshape(-1) for _, values in arrays], axis=1)
    kinds, back = numbered_rows(rows)
    numbers = []
    for kind in kinds:
        for (i, _), value in zip(arrays, kind, strict=True):
            few[i] = value
        numbers.append(lists.setdefault(template.filled(tuple(few)), len(lists)))
    return np.array(numbers)[back.reshape(whole_shape)]


# ---- what is alive, as matrices ----


class _Matrix(NamedTuple):
    """Counts of every size: one row for each sum and for each moment of a pass."""

    counts: np.ndarray
    #: Name -> its rows.
    rows: dict[str, slice]


def evaluated(structure: Structure, sizes: Sequence[Any]) -> dict[str, np.ndarray]:
    """The properties of a ``BlockCost`` that are numbers, for arrays of ``sizes``."""
    number = len(sizes)
    shape = np.broadcast_shapes((1,) * AXES, *(values.shape for values in sizes if isinstance(values, np.ndarray)))
    table = np.empty((number, *shape))
    for i, values in enumerate(sizes):
        table[i] = values
    table = table.reshape(number, -1)
    matrix = _matrix(structure, number, every=bool(number and table.min() < 0))

    def highest(name: str) -> np.ndarray:
        totals = matrix.counts[matrix.rows[name]] @ table
        if not np.all(np.abs(totals) < EXACT):
            raise TooLarge
        found: np.ndarray = totals.max(axis=0, initial=0).astype(np.int64).reshape(shape)
        return found

    def peaks(names: Iterable[str]) -> Iterator[np.ndarray]:
        known = {row: highest(row) for row in dict.fromkeys(row for name in names for row in _ROWS[name])}
        return (reduce(np.maximum, map(known.__getitem__, _ROWS[name])) for name in names)

    out = {name: highest(name) for name in (*structure.sums(), *OF_NODES) if name in matrix.rows}
    out |= zip(_ROWS, peaks(_ROWS), strict=True)
    if structure.apart:
        table[[*structure.apart]] = 0
        out |= zip(_APART.values(), peaks(_APART), strict=True)
    return out


#: Peak -> the rows of its candidates, those before the landmark ("<") and those after it.
_ROWS: dict[str, tuple[str, ...]] = {
    **{name: ("<" + name, ">" + name)
       for name in ("forward_peak", "backward_peak", "backward_peak_held", "no_grad_peak")},
    **dict(zip(_BEFORE, (("<forward_peak",), (">backward_peak",), (">backward_peak_held",), ("<no_grad_peak",)),
               strict=True)),
}  # fmt: skip


def _matrix(structure: Structure, number: int, *, every: bool) -> _Matrix:
    """``every``: a row for each step of the walk instead of each moment, as negative sizes require."""
    pieces: list[np.ndarray] = []
    rows: dict[str, slice] = {}
    at = 0
    for name, positions in structure.sums().items():
        pieces.append(np.bincount(positions, minlength=number)[None, :] if positions else np.zeros((1, number)))
        rows[name] = slice(at, at := at + 1)
    for name, peak_candidates in structure.peak_candidates().items():
        for sign, candidates in zip("<>", peak_candidates, strict=True):
            moments = _steps(candidates.steps, number) if every else _moments(candidates.counts(), number)
            pieces.append(moments)
            rows[sign + name] = slice(at, at := at + len(moments))
    for name, candidates in zip(OF_NODES, structure.nodes, strict=False):
        moments = _steps(candidates.steps, number) if every else _moments(candidates.counts(), number)
        pieces.append(moments)
        rows[name] = slice(at, at := at + len(moments))
    return _Matrix(np.concatenate(pieces).astype(float), rows)


def _moments(counts: bytes, number: int) -> np.ndarray:
    """Counts at each moment, from ``_PeakCandidates.counts``."""
    fields = np.frombuffer(counts, np.uint8).reshape(-1, number, COUNT_BYTES)
    return fields @ (1 << 8 * np.arange(COUNT_BYTES))


def _steps(steps: Sequence[int], number: int) -> np.ndarray:
    """Counts after each step of a walk."""
    walk = np.array(steps, np.int64)
    counts = np.zeros((len(walk), number))
    counts[np.arange(len(walk)), walk % max(1, number)] = np.where(walk < number, 1, -1)
    return counts.cumsum(axis=0)


class Same:
    """Several specs as one: a field is the value that all of them have. Raises Differs if they do not agree."""

    def __init__(self, specs: Sequence[Any]) -> None:
        self._specs = specs

    def __getattr__(self, name: str) -> Any:
        return one_of([getattr(spec, name) for spec in self._specs])


def one_of(values: Sequence[Any]) -> Any:
    """The common value of runs along the last axis. Raises Differs if they do not agree."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) > 1:
        raise Differs(np.array([distinct.index(value) for value in values]).reshape((1,) * (AXES - 1) + (-1,)))
    return values[0]
