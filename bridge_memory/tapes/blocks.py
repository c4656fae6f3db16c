"""A block's numbers for one run, from a cached trace if one serves the run, else from a new trace.

``block(ctx, key, record)`` is the only entry point. Traces belong to the context's ``TraceCache``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from bridge_memory.spec import RecomputeSpec
from bridge_memory.tapes.alive import Atoms, BlockCost, Structure
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.parameters import Parameter, ParameterList, Repeated
from bridge_memory.tapes.recorder import Recorder, Scratch
from bridge_memory.tapes.symbolic import DIMENSIONS, ShapeEnv, SymInt, Traces

#: Parameter lists that are cached of one template.
MOST_LISTS = 1024


class _ParameterTemplate:
    """The parameters of a block without their sizes, and the lists made from it so far."""

    __slots__ = ("_lists", "rows")

    def __init__(self, rows: Sequence[Repeated]) -> None:
        self.rows = tuple(rows)
        self._lists: dict[tuple[int, ...], ParameterList] = {}

    def filled(self, sizes: tuple[int, ...]) -> ParameterList:
        """``sizes``: every dimension in order, and every count after its parameters."""
        found = self._lists.get(sizes)
        if found is None:
            if len(self._lists) > MOST_LISTS:
                self._lists = {}
            values = iter(sizes)
            rows = [
                Repeated(
                    tuple(
                        Parameter(
                            p.name, tuple(next(values) for _ in p.shape), p.expert, p.sharded, p.use, p.trains
                        )
                        for p in parameters
                    ),
                    next(values),
                )
                for parameters, _ in self.rows
            ]
            found = self._lists[sizes] = ParameterList(rows)
        return found


class _Trace(NamedTuple):
    """A tape and a list of parameters without their sizes."""

    structure: Structure
    atoms: int
    parameters: _ParameterTemplate
    parameter_sizes: int
    #: Persistent scratch: (kind, number of dimensions of its shape).
    persistent: tuple[tuple[Scratch, int], ...]


class Block:
    """Everything that one block contributes to a rank."""

    __slots__ = ("_offloading", "_parameters", "_persistent", "_sizes", "_trace", "cost")

    def __init__(self, trace: _Trace, sizes: list[int]) -> None:
        self._trace = trace
        self._sizes = sizes
        self._parameters: ParameterList | None = None
        self._persistent: dict[tuple[Scratch, tuple[int, ...]], int] | None = None
        self._offloading: dict[frozenset[str] | None, Block] = {}
        self.cost = BlockCost(trace.structure, sizes[: trace.atoms])

    def offloading(self, modules: frozenset[str] | None) -> Block:
        """As ``Structure.offloading``."""
        found = self._offloading.get(modules)
        if found is None:
            structure = self._trace.structure.offloading(modules)
            same = structure is self._trace.structure
            found = self if same else Block(self._trace._replace(structure=structure), self._sizes)
            self._offloading[modules] = found
        return found

    @property
    def parameters(self) -> ParameterList:
        found = self._parameters
        if found is None:
            r = self._trace
            sizes = tuple(self._sizes[r.atoms : r.atoms + r.parameter_sizes])
            found = self._parameters = r.parameters.filled(sizes)
        return found

    @property
    def persistent(self) -> dict[tuple[Scratch, tuple[int, ...]], int]:
        """Bytes of persistent scratch by kind and shape."""
        if self._persistent is not None:
            return self._persistent
        out: dict[tuple[Scratch, tuple[int, ...]], int] = {}
        at = self._trace.atoms + self._trace.parameter_sizes
        for kind, dimensions in self._trace.persistent:
            shape, nbytes = tuple(self._sizes[at : at + dimensions]), self._sizes[at + dimensions]
            out[kind, shape] = max(nbytes, out.get((kind, shape), 0))
            at += dimensions + 1
        self._persistent = out
        return out


class PlainTraces:
    """In the place of blocks of many runs (``context.ManyBlocks``): ``block`` traces anew, with the run's own sizes as
    plain integers, and gives the recorder itself."""

    def __init__(self, ctx: BlockContext) -> None:
        self._ctx = ctx

    def block(self, key: Hashable, record: Callable[[Recorder], None]) -> Recorder:
        recorder = Recorder(BlockContext(self._ctx.cache, self._ctx.dimensions))
        record(recorder)
        return recorder

    def common_recompute(self, value: Callable[[RecomputeSpec], Any]) -> Any:
        return value(self._ctx.recompute)


def block(ctx: BlockContext, key: Hashable, record: Callable[[Recorder], None]) -> Block:
    """The block that ``record`` describes. ``key`` names it among all blocks of a run."""
    known: Block | None = ctx.blocks.get(key)
    if known is not None:
        return known
    if ctx.many is not None:
        many: Block = ctx.many.block(key, record)
        ctx.blocks[key] = many
        return many
    traces = ctx.cache.traces(key)
    made: Block | None = traces.kept(ctx.dimensions)
    if made is None:
        made = Block(*traced(ctx, key, traces, record))
        traces.keep(ctx.dimensions, made)
    if ctx.cache.offloads is not None:
        made = made.offloading(ctx.cache.offloads)
    ctx.blocks[key] = made
    return made


def traced(
    ctx: BlockContext, key: Hashable, traces: Traces, record: Callable[[Recorder], None]
) -> tuple[_Trace, list[int]]:
    """The trace that serves the run, made if there is none, and its sizes."""
    found = traces.find(ctx.dimensions)
    if found is None:
        with ctx.cache.owner.lock:
            found = traces.find(ctx.dimensions)
            if found is None:
                add_trace(ctx, traces, record)
                found = traces.find(ctx.dimensions)
                assert found is not None, f"{key}: a trace does not pass its own guards"
    return found


def add_trace(ctx: BlockContext, traces: Traces, record: Callable[[Recorder], None]) -> None:
    """Trace the block of one run. The caller holds the lock of the ``TraceCache``."""
    env = ShapeEnv(ctx.dimensions)
    r = Recorder(BlockContext(ctx.cache, env.sizes[: len(DIMENSIONS)]))
    record(r)
    atoms = Atoms()
    structure = Structure(r.tape, atoms, without_gradients=r.without_gradients)
    sizes = list(atoms.sizes)
    for parameters, count in r.rows:
        sizes += [n for p in parameters for n in p.shape]
        sizes.append(count)
    of_parameters = len(sizes) - len(atoms.sizes)
    # Equal requests, with equal sizes, count once.
    requests = list(
        {(kind, *[n.register if type(n) is SymInt else n for n in (*shape, nbytes)]): (kind, shape, nbytes)
         for kind, shape, nbytes in r.persistent}.values()
    )  # fmt: skip
    for _, shape, nbytes in requests:
        sizes += [*shape, nbytes]
    owner = ctx.cache.owner
    template_key = tuple(
        tuple((p.name, len(p.shape), p.expert, p.sharded, p.use, p.trains) for p in parameters)
        for parameters, _ in r.rows
    )
    template = owner.parameter_lists.get(template_key)
    if template is None:
        named = [Repeated(tuple(_unsized(p) for p in parameters)) for parameters, _ in r.rows]
        template = owner.parameter_lists[template_key] = _ParameterTemplate(named)
    trace = _Trace(
        structure, len(atoms.sizes), template, of_parameters,
        tuple((kind, len(shape)) for kind, shape, _ in requests),
    )
    traces.add(env, trace, [n if type(n) is SymInt else env.constant(n) for n in sizes])
    env.free()
    owner.count_trace()


def _unsized(p: Parameter) -> Parameter:
    return Parameter(p.name, (0,) * len(p.shape), p.expert, p.sharded, p.use, p.trains)
