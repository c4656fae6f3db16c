"""Collectives without communication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from bridge_memory.rehearsal.patches.replace import module_or_empty, replaced


class Done:
    """The handle of a collective that has finished."""

    def wait(self, *args: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def objects_of_peers() -> Iterator[None]:
    """``all_gather_object`` returns this rank's object for every rank.

    Called by ``optimizer/__init__.py: _get_param_groups``.
    """

    def same(gathered: list[Any], own: Any, group: Any = None) -> None:
        gathered[:] = [own] * len(gathered)

    with replaced(torch.distributed, "all_gather_object", same):
        yield


@contextmanager
def coalesced(*_: object, **__: object) -> Iterator[Done]:
    """``torch.distributed._coalescing_manager``, which launches collectives together; here it launches none."""
    yield Done()


@contextmanager
def collectives_move_nothing() -> Iterator[None]:
    """Collectives of meta tensors do nothing. torch's fake backend covers CPU and CUDA tensors only."""
    group = torch.distributed.ProcessGroup
    names = (
        "allreduce", "allreduce_coalesced", "_allgather_base", "allgather", "allgather_into_tensor_coalesced",
        "_reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor_coalesced", "alltoall_base",
        "alltoall", "broadcast", "reduce", "gather", "scatter", "send", "recv", "barrier",
    )  # fmt: skip
    # The name in DDP, which gathers the parameters of several buckets together (``--overlap-param-gather``).
    buffers = module_or_empty("megatron.core.distributed.param_and_grad_buffer")
    with ExitStack() as stack:
        stack.enter_context(objects_of_peers())
        for name in names:
            stack.enter_context(replaced(group, name, lambda *a, **k: Done()))
        stack.enter_context(replaced(buffers, "_coalescing_manager", coalesced))
        yield
