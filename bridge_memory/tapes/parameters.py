"""Parameters of one rank, with the names and local shapes of megatron-core's ``named_parameters``, and the sums over
them that engines need.

Parameters of equal experts are listed once, with their number (``Repeated``). Sums are cached with the list: runs with
the same sharding share both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any, NamedTuple

from bridge_memory.components import ALLOCATION_UNIT as ALLOCATION_UNIT

#: Placeholder in a name for the number of an expert.
EXPERT_NUMBER = "*"
#: Elements: start of every parameter in a distributed-optimizer buffer (128-byte alignment of 16-bit values;
#: ``distributed/param_and_grad_buffer.py: _ParamAndGradBuffer.__init__``).
PARAM_ALIGNMENT = 64


class Use(str, Enum):
    """The role of a parameter, where optimizers or fp8 treat it by more than its shape."""

    LAYER = "layer"
    EMBEDDING = "embedding"
    OUTPUT = "output layer"
    #: A matrix that is never multiplied by Transformer Engine's fp8 GEMMs.
    ROUTER = "router"
    #: In a layer that stays in the parameter dtype while others compute in fp8.
    UNQUANTIZED = "unquantized"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One local parameter shard.

    ``expert``: a weight of routed experts, which engines may keep in separate buffers. ``sharded``: TP (or ETP) divides
    it. ``trains``: whether it trains where the run's other weights are frozen (True), or is frozen where they train
    (False).
    """

    name: str
    shape: tuple[int, ...]
    expert: bool = False
    sharded: bool = False
    use: Use = Use.LAYER
    trains: bool | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """``muon.py: get_megatron_muon_optimizer``: two dimensions, and neither embedding nor output layer."""
        return len(self.shape) == 2 and self.use not in (Use.EMBEDDING, Use.OUTPUT)

    @property
    def is_gemm(self) -> bool:
        """A weight of Transformer Engine's GEMMs, which fp8 copies."""
        return self.is_matrix and self.use not in (Use.ROUTER, Use.UNQUANTIZED)

    def named(self, name: str) -> Parameter:
        """The same parameter by another name; a third of the time of ``dataclasses.replace``."""
        return Parameter(name, self.shape, self.expert, self.sharded, self.use, self.trains)

    def under(self, prefix: str) -> Parameter:
        """The same parameter inside a parent module."""
        return self.named(prefix + self.name)

    def numbered(self, number: int) -> Parameter:
        """The parameter of one expert."""
        return self.named(self.name.replace(EXPERT_NUMBER, str(number)))


class Repeated(NamedTuple):
    """Parameters that exist ``times`` in a row, each time with another number in their names."""

    parameters: tuple[Parameter, ...]
    times: Any = 1


class Alike(NamedTuple):
    """Parameters of one size that follow each other when sorted by size, ``times`` of them."""

    is_matrix: bool
    expert: bool
    times: int


def add_alike(rows: list[Alike], more: Sequence[Alike], times: int) -> None:
    """Add ``more`` to ``rows``, as often as ``times`` says; what differs in nothing is counted together."""
    if len(more) == 1:
        more, times = [more[0]._replace(times=more[0].times * times)], 1
    for _ in range(times):
        for row in more:
            if rows and rows[-1][:2] == row[:2]:
                rows[-1] = rows[-1]._replace(times=rows[-1].times + row.times)
            else:
                rows.append(row)


#: (function, width): a column of sums adds up ``function(parameter, width)``; width is usually bytes per element.
Column = tuple[Callable[[Parameter, int], int], int]


class ParameterList:
    """The parameters of one block on one rank."""

    __slots__ = ("_by_size", "_sums", "numel", "rows")

    def __init__(self, rows: Sequence[Repeated]) -> None:
        self.rows = tuple(rows)
        self._sums: dict[tuple[Column, ...], tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._by_size: dict[tuple[bool, ...], tuple[tuple[int, tuple[Alike, ...]], ...]] = {}
        #: Elements of all parameters.
        self.numel: int = sum(times * p.numel for parameters, times in self.rows for p in parameters)

    def sums(self, columns: tuple[Column, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(one sum per column over dense parameters, the same over parameters of experts); cached by ``columns``."""
        found = self._sums.get(columns)
        if found is None:
            sums = [0] * len(columns), [0] * len(columns)
            for parameters, times in self.rows:
                for p in parameters:
                    of = sums[p.expert]
                    for i, (what, width) in enumerate(columns):
                        of[i] += times * what(p, width)
            found = self._sums[columns] = (tuple(sums[0]), tuple(sums[1]))
        return found

    def by_size(self, *experts: bool) -> tuple[tuple[int, tuple[Alike, ...]], ...]:
        """(elements, the parameters with as many in order) of those whose ``expert`` is among ``experts``; cached."""
        found = self._by_size.get(experts)
        if found is None:
            of_size: dict[int, list[Alike]] = {}
            for few, times in self.runs(*experts):
                sizes: dict[int, list[Alike]] = {}
                for p in few:
                    add_alike(sizes.setdefault(p.numel, []), [Alike(p.is_matrix, p.expert, 1)], 1)
                for numel, alike in sizes.items():
                    add_alike(of_size.setdefault(numel, []), alike, times)
            found = self._by_size[experts] = tuple([(numel, tuple(rows)) for numel, rows in of_size.items()])
        return found

    def runs(self, *experts: bool) -> Iterator[tuple[tuple[Parameter, ...], int]]:
        """Parameters in order, as (some in a row, how many times); only those whose ``expert`` is among ``experts``."""
        for parameters, times in self.rows:
            chosen = tuple(p for p in parameters if p.expert in experts)
            if chosen:
                yield chosen, times

    def expanded(self, prefix: str = "") -> Iterator[Parameter]:
        """Every parameter separately, as ``named_parameters`` lists them."""
        for parameters, times in self.rows:
            for number in range(times):
                for p in parameters:
                    name = p.name.replace(EXPERT_NUMBER, str(number)) if EXPERT_NUMBER in p.name else p.name
                    yield p.named(prefix + name)


#: Type of lists or numbers of many runs -> ``in_each_run`` of these.
of_many_runs: dict[type, Callable[..., tuple[Any, ...]]] = {}


def in_each_run(
    function: Callable[[Sequence[ParameterList], Sequence[int]], tuple[int, ...]], lists: Sequence[Any],
    numbers: Sequence[Any],
) -> tuple[Any, ...]:  # fmt: skip
    """``function(lists, numbers)``, for what goes through parameters one by one. Where lists or numbers are those of
    many runs it is called once for every combination that any run has, and gives arrays."""
    for given in (*lists, *numbers):
        of_many = of_many_runs.get(type(given))
        if of_many is not None:
            return of_many(function, lists, numbers)
    return function(lists, numbers)


# ---- columns ----


def elements(parameter: Parameter, _: int) -> int:
    return parameter.numel


def aligned_elements(parameter: Parameter, to: int) -> int:
    """Elements up to the start of the next parameter, which is a multiple of ``to``."""
    return pad(parameter.numel, to)


def gemm_elements(parameter: Parameter, _: int) -> int:
    return parameter.numel if parameter.is_gemm else 0


def aligned_gemm_elements(parameter: Parameter, to: int) -> int:
    """As ``aligned_elements``, of weights of fp8 GEMMs; 0 for others."""
    return aligned_elements(parameter, to) if parameter.is_gemm else 0


def gemm_tensors(parameter: Parameter, _: int) -> int:
    return 1 if parameter.is_gemm else 0


def scales_of_rows(parameter: Parameter, block: int) -> int:
    """Bytes of the scales of both layouts: 1 per ``block`` elements of a row or a column, padded as cuBLAS needs them
    (TE ``tensor/{mxfp8,nvfp4}_tensor.py: get_scale_shape``)."""
    if not parameter.is_gemm:
        return 0
    rows, columns = parameter.shape
    return pad(rows, 128) * pad(-(-columns // block), 4) + pad(-(-rows // block), 4) * pad(columns, 128)


def square_scales(parameter: Parameter, block: int) -> int:
    """Bytes of the fp32 scales of both layouts: one per square of ``block`` rows and columns, rows padded to multiples
    of 4 (TE ``tensor/float8_blockwise_tensor.py: Float8BlockQuantizer.get_scale_shape``)."""
    if not parameter.is_gemm:
        return 0
    rows, columns = (-(-n // block) for n in parameter.shape)
    return 4 * (rows * pad(columns, 4) + columns * pad(rows, 4))


def no_scales(parameter: Parameter, _: int) -> int:
    return 0


def matrix_elements(parameter: Parameter, _: int) -> int:
    return parameter.numel if parameter.is_matrix else 0


def rounded_bytes(parameter: Parameter, width: int) -> int:
    """Bytes that torch's allocator takes for the parameter as a separate tensor of ``width`` bytes per element."""
    return pad(parameter.numel * width, ALLOCATION_UNIT)


def rounded_bytes_of_others(parameter: Parameter, width: int) -> int:
    """As ``rounded_bytes``, of parameters that are not weights of fp8 GEMMs; 0 for those."""
    return 0 if parameter.is_gemm else rounded_bytes(parameter, width)


def pad(n: int, to: int) -> int:
    return -(-n // to) * to
