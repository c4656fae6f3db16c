"""Parameters: names and shapes of what one rank owns, as megatron-core's ``named_parameters`` gives them, and the sums
over them that engines ask for.

Experts are alike, so a list of parameters says once what is there many times over (``Repeated``), and sums over a list
are kept by the sizes in it: they change with nothing but the sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import Any, NamedTuple

#: Stands in a name for the number of an expert.
EXPERT_NUMBER = "*"
#: Elements: start of every parameter in a distributed-optimizer buffer (128-byte alignment of 16-bit values;
#: ``distributed/param_and_grad_buffer.py: _ParamAndGradBuffer.__init__``).
PARAM_ALIGNMENT = 64
#: Bytes: smallest block of torch's caching allocator (``c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize``).
ALLOCATION_UNIT = 512


class Use(str, Enum):
    """What a parameter is to optimizers and fp8, where that depends on more than its shape."""

    LAYER = "layer"
    EMBEDDING = "embedding"
    OUTPUT = "output layer"
    #: A matrix whose product is never one of Transformer Engine's GEMMs in fp8.
    ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One local parameter shard.

    ``expert``: routed-expert weights, which live in buffers of their own (``allreduce=False`` in
    megatron-core: ``distributed/distributed_data_parallel.py``). ``sharded``: whether TP (or ETP) divides it.
    """

    name: str
    shape: tuple[int, ...]
    expert: bool = False
    sharded: bool = False
    use: Use = Use.LAYER

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
        return self.is_matrix and self.use is not Use.ROUTER

    def under(self, prefix: str) -> Parameter:
        """The same parameter inside a parent module."""
        return replace(self, name=prefix + self.name)

    def numbered(self, number: int) -> Parameter:
        """That of one expert."""
        return replace(self, name=self.name.replace(EXPERT_NUMBER, str(number)))


class Repeated(NamedTuple):
    """Parameters that are there ``count`` times in a row, each time with another number in their names."""

    parameters: tuple[Parameter, ...]
    count: Any = 1


class Counted(NamedTuple):
    """Sums over dense or over expert parameters, in elements."""

    numel: int = 0
    count: int = 0
    #: With every parameter rounded up to PARAM_ALIGNMENT.
    aligned: int = 0
    gemm: int = 0
    #: In all matrices but embedding and output layer (what Muon updates), the router's included.
    matrices: int = 0

    def times(self, n: int) -> Counted:
        return self if n == 1 else Counted(*(n * x for x in self))

    def plus(self, other: Counted) -> Counted:
        return Counted(*(a + b for a, b in zip(self, other, strict=True)))


class ParameterList:
    """The parameters of one block on one rank."""

    __slots__ = ("_sums", "counted", "rows")

    def __init__(self, rows: Sequence[Repeated]) -> None:
        self.rows = tuple(rows)
        self.counted = (self._counted(False), self._counted(True))
        self._sums: dict[Any, tuple[int, int]] = {}

    def _counted(self, expert: bool) -> Counted:
        total = Counted()
        for parameters, count in self.rows:
            for p in parameters:
                if p.expert is not expert:
                    continue
                n, matrix = p.numel, p.is_matrix
                one = Counted(n, 1, pad(n, PARAM_ALIGNMENT), n if p.is_gemm else 0, n if matrix else 0)
                total = total.plus(one.times(count))
        return total

    def sums(self, of: Callable[[Parameter, Any], int], by: Any) -> tuple[int, int]:
        """``of(parameter, by)`` summed over dense parameters, and over those of experts; kept by both."""
        found = self._sums.get((of, by))
        if found is None:
            sums = [0, 0]
            for parameters, count in self.rows:
                for p in parameters:
                    sums[p.expert] += count * of(p, by)
            found = self._sums[of, by] = (sums[0], sums[1])
        return found

    def runs(self, expert: bool) -> Iterator[tuple[tuple[Parameter, ...], int]]:
        """Dense parameters, or those of experts, in order: (a few in a row, how often)."""
        for parameters, count in self.rows:
            chosen = tuple(p for p in parameters if p.expert is expert)
            if chosen:
                yield chosen, count

    def expanded(self, prefix: str = "") -> Iterator[Parameter]:
        """Every parameter by itself, as ``named_parameters`` lists them."""
        for parameters, count in self.rows:
            for number in range(count):
                for p in parameters:
                    p = p.numbered(number) if EXPERT_NUMBER in p.name else p
                    yield p.under(prefix) if prefix else p


def rounded_bytes(parameter: Parameter, width: int) -> int:
    """Bytes of a tensor of its own in torch's allocator, ``width`` bytes an element."""
    return pad(parameter.numel * width, ALLOCATION_UNIT)


def pad(n: int, to: int) -> int:
    return -(-n // to) * to
