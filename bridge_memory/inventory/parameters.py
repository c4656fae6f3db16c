"""Parameters: names and shapes of what one rank owns, as megatron-core's ``named_parameters`` gives them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


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

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def under(self, prefix: str) -> Parameter:
        """The same parameter inside a parent module."""
        return Parameter(prefix + self.name, self.shape, self.expert, self.sharded)
