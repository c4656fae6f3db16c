"""A block's numbers for one run: recorded where nothing like it was recorded before, else worked out from what was.

``block(ctx, key, record)`` is the one way to them. What it keeps belongs to the context's library.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from bridge_memory.inventory.alive import Atoms, BlockCost, Structure
from bridge_memory.inventory.context import BlockContext
from bridge_memory.inventory.parameters import Parameter, ParameterList, Repeated
from bridge_memory.inventory.recorder import Recorder, Scratch
from bridge_memory.inventory.sizes import DIMENSIONS, Notes, Recordings, Size

#: Lists of parameters of one kind that are kept.
MOST_LISTS = 1024


class _ParameterTemplate:
    """Parameters of a block but for their sizes, and the lists made of it so far."""

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
                        Parameter(p.name, tuple(next(values) for _ in p.shape), p.expert, p.sharded, p.use)
                        for p in parameters
                    ),
                    next(values),
                )
                for parameters, _ in self.rows
            ]
            found = self._lists[sizes] = ParameterList(rows)
        return found


class _Recording(NamedTuple):
    """What a tape and a list of parameters are, but for the sizes."""

    structure: Structure
    atoms: int
    parameters: _ParameterTemplate
    parameter_sizes: int
    #: Kinds of lasting scratch with the number of dimensions of their shapes.
    lasting: tuple[tuple[Scratch, int], ...]


class Block:
    """Everything one block contributes to a rank."""

    __slots__ = ("_lasting", "_parameters", "_recording", "_sizes", "cost")

    def __init__(self, recording: _Recording, sizes: list[int]) -> None:
        self._recording = recording
        self._sizes = sizes
        self._parameters: ParameterList | None = None
        self._lasting: dict[tuple[Scratch, tuple[int, ...]], int] | None = None
        self.cost = BlockCost(recording.structure, sizes[: recording.atoms])

    @property
    def parameters(self) -> ParameterList:
        found = self._parameters
        if found is None:
            r = self._recording
            sizes = tuple(self._sizes[r.atoms : r.atoms + r.parameter_sizes])
            found = self._parameters = r.parameters.filled(sizes)
        return found

    @property
    def lasting(self) -> dict[tuple[Scratch, tuple[int, ...]], int]:
        """Bytes of lasting scratch by kind and shape."""
        if self._lasting is not None:
            return self._lasting
        out: dict[tuple[Scratch, tuple[int, ...]], int] = {}
        at = self._recording.atoms + self._recording.parameter_sizes
        for kind, dimensions in self._recording.lasting:
            shape, nbytes = tuple(self._sizes[at : at + dimensions]), self._sizes[at + dimensions]
            out[kind, shape] = max(nbytes, out.get((kind, shape), 0))
            at += dimensions + 1
        self._lasting = out
        return out


def block(ctx: BlockContext, key: Hashable, record: Callable[[Recorder], None]) -> Block:
    """The block that ``record`` describes. ``key`` names it among all blocks of a run."""
    known = ctx.blocks.get(key)
    if known is not None:
        return known
    if ctx.many is not None:
        known = ctx.blocks[key] = ctx.many.block(key, record)
        return known
    recordings = ctx.shelf.recordings(key)
    made = recordings.kept(ctx.dimensions)
    if made is None:
        made = Block(*recorded(ctx, key, recordings, record))
        recordings.keep(ctx.dimensions, made)
    ctx.blocks[key] = made
    return made


def recorded(
    ctx: BlockContext, key: Hashable, recordings: Recordings, record: Callable[[Recorder], None]
) -> tuple[_Recording, list[int]]:
    """The recording that serves the run, made where there is none, and its sizes."""
    found = recordings.find(ctx.dimensions)
    if found is None:
        with ctx.shelf.library.lock:
            found = recordings.find(ctx.dimensions)
            if found is None:
                add_recording(ctx, recordings, record)
                found = recordings.find(ctx.dimensions)
                assert found is not None, f"{key}: a recording does not answer its own questions"
    return found


def add_recording(ctx: BlockContext, recordings: Recordings, record: Callable[[Recorder], None]) -> None:
    """Record the block of one run. The library's lock is held."""
    notes = Notes(ctx.dimensions)
    r = Recorder(BlockContext(ctx.shelf, notes.sizes[: len(DIMENSIONS)]))
    record(r)
    atoms = Atoms()
    structure = Structure(r.tape, atoms, without_gradients=r.without_gradients)
    sizes = list(atoms.sizes)
    for parameters, count in r.rows:
        sizes += [n for p in parameters for n in p.shape]
        sizes.append(count)
    of_parameters = len(sizes) - len(atoms.sizes)
    # The same request, of the same sizes, is one.
    requests = list(
        {(kind, *[n.register if type(n) is Size else n for n in (*shape, nbytes)]): (kind, shape, nbytes)
         for kind, shape, nbytes in r.lasting}.values()
    )  # fmt: skip
    for _, shape, nbytes in requests:
        sizes += [*shape, nbytes]
    library = ctx.shelf.library
    template_key = tuple(
        tuple((p.name, len(p.shape), p.expert, p.sharded, p.use) for p in parameters) for parameters, _ in r.rows
    )
    template = library.parameter_lists.get(template_key)
    if template is None:
        named = [Repeated(tuple(_unsized(p) for p in parameters)) for parameters, _ in r.rows]
        template = library.parameter_lists[template_key] = _ParameterTemplate(named)
    recording = _Recording(
        structure, len(atoms.sizes), template, of_parameters,
        tuple((kind, len(shape)) for kind, shape, _ in requests),
    )
    recordings.add(notes, recording, [n if type(n) is Size else notes.constant(n) for n in sizes])
    notes.let_go()
    library.count_recording()


def _unsized(p: Parameter) -> Parameter:
    return Parameter(p.name, (0,) * len(p.shape), p.expert, p.sharded, p.use)
