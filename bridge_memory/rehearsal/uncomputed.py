"""Tensors on the CPU that are allocated and never written: a real engine then runs a model of any size in seconds.

Pages of a fresh allocation take no memory until somebody writes to them. What has many elements is made by its shape
alone and nothing is computed on it; small tensors and whole numbers are computed as they are, so that engines find the
norms, flags and indices that they read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

#: Elements above which nothing is computed.
LARGE = 4096
#: Operations that change which storage a tensor has, or how large, or give the storage that they got: they are done.
_STORAGE = ("set_", "resize_", "resize_as_", "_unsafe_view", "_reshape_alias", "lift_fresh")
#: Bytes from which the C library gives each block fresh pages of its own, all zeros; and
#: ``mallopt``'s number of that threshold (glibc ``malloc.h: M_MMAP_THRESHOLD``).
FRESH = 1 << 16
_M_MMAP_THRESHOLD = -3


def _all_gather_copy_in(
    inputs: Any, output: Any, sizes: Any, numel: int, rank: int, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return output.narrow(0, numel * rank, numel), output


#: FSDP2's own operations (``_fsdp_collectives.py``): those that copy into what is given, or make a view of it.
_COPIES: dict[str, Callable[..., Any]] = {
    "all_gather_copy_in": _all_gather_copy_in, "split_with_sizes_copy": lambda *a, **k: None,
    "chunk_cat": lambda *a, **k: None,
}  # fmt: skip


class Uncomputed(TorchDispatchMode):
    """Within it operations on large floating tensors give tensors of the right shape, whatever is in them.

    ``topk`` of large scores gives every index as often as any other, as a router that is balanced does.
    """

    def __enter__(self) -> Any:
        with suppress(OSError, AttributeError):  # Elsewhere large tensors hold whatever was there before.
            ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, FRESH)
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # A DTensor asks again for the tensors that it is made of.
        space, _, name = func._schema.name.partition("::")
        if space == "fsdp" and name in _COPIES and _large((args, kwargs)):
            return _COPIES[name](*args, **kwargs)
        if space != "aten" or func.is_view or name in _STORAGE or not _large((args, kwargs)):
            return func(*args, **kwargs)
        asked = enumerate(func._schema.arguments)
        written = [i for i, a in asked if a.alias_info is not None and a.alias_info.is_write]
        if written:
            return _written(func, args, kwargs, written)
        out = func(*tree_map(_shape, args), **tree_map(_shape, kwargs))
        out = tree_map(_made, out)
        if name == "topk":
            values, indices = out
            experts = args[0].shape[-1]
            return values, (torch.arange(indices.numel()) % experts).view(indices.shape)
        return out


def _large(given: Any) -> bool:
    """Whether floating numbers on the CPU, and many, are read, written or made."""
    leaves = list(tree_iter(given))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if any(isinstance(x, torch.device) and x.type != "cpu" for x in leaves):
        return False
    if any(x.device.type != "cpu" or isinstance(x, FakeTensor) for x in tensors):
        return False  # DTensors ask for shapes on other devices.
    return any(x.numel() > LARGE and x.is_floating_point() for x in tensors)


def _shape(x: Any) -> Any:
    """A tensor of the meta device in its place."""
    if isinstance(x, torch.device):
        return torch.device("meta")
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _made(x: Any) -> Any:
    """A tensor of zeros on the CPU in its place, whose pages are not there before they are written to."""
    if not isinstance(x, torch.Tensor):
        return x
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    return made.zero_() if x.nbytes < FRESH else made


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], positions: list[int]) -> Any:
    """What the operation returns of its arguments, on which it has done nothing."""
    names = [a.name for a in func._schema.arguments]
    given = [args[i] if i < len(args) else kwargs.get(names[i]) for i in positions]
    returned = func._schema.returns
    if not returned:
        return None
    return given[0] if len(returned) == 1 else tuple(given[: len(returned)])
