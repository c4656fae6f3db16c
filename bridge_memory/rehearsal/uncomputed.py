"""Allocate large CPU tensors without computing them: a real engine then runs a model of any size in seconds.

Pages of a new allocation take no memory until they are written. Operations on large floating tensors only allocate
their outputs; small tensors and integers are computed, so that engines read real norms, flags and indices.
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
#: Operations that change a tensor's storage or its size, or return their input's storage: they do run.
_STORAGE = ("set_", "resize_", "resize_as_", "_unsafe_view", "_reshape_alias", "lift_fresh")
#: Bytes from which the C library maps new zero pages for each block, and ``mallopt``'s parameter for that threshold
#: (glibc ``malloc.h: M_MMAP_THRESHOLD``).
FRESH = 1 << 16
_M_MMAP_THRESHOLD = -3


def _all_gather_copy_in(
    inputs: Any, output: Any, sizes: Any, numel: int, rank: int, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return output.narrow(0, numel * rank, numel), output


#: FSDP2's operations (``_fsdp_collectives.py``) that copy into an argument or return a view of it.
_COPIES: dict[str, Callable[..., Any]] = {
    "all_gather_copy_in": _all_gather_copy_in, "split_with_sizes_copy": lambda *a, **k: None,
    "chunk_cat": lambda *a, **k: None,
}  # fmt: skip


class Uncomputed(TorchDispatchMode):
    """Operations on large floating tensors return tensors of the right shape with arbitrary values.

    ``topk`` of large scores returns every index equally often, as a balanced router does.
    """

    def __enter__(self) -> Any:
        with suppress(OSError, AttributeError):  # Without it large tensors hold arbitrary values.
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
    """Whether an argument is a large floating tensor on the CPU."""
    leaves = list(tree_iter(given))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    if any(isinstance(x, torch.device) and x.type != "cpu" for x in leaves):
        return False
    if any(x.device.type != "cpu" or isinstance(x, FakeTensor) for x in tensors):
        return False  # DTensor computes shapes on other devices.
    return any(x.numel() > LARGE and x.is_floating_point() for x in tensors)


def _shape(x: Any) -> Any:
    """The same with tensors and devices replaced by those of the meta device."""
    if isinstance(x, torch.device):
        return torch.device("meta")
    if not isinstance(x, torch.Tensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _made(x: Any) -> Any:
    """The same with tensors replaced by zeros on the CPU; pages of large ones are not mapped until they are written."""
    if not isinstance(x, torch.Tensor):
        return x
    made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    return made.zero_() if x.nbytes < FRESH else made


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], positions: list[int]) -> Any:
    """The arguments that an in-place operation returns, unchanged."""
    names = [a.name for a in func._schema.arguments]
    given = [args[i] if i < len(args) else kwargs.get(names[i]) for i in positions]
    returned = func._schema.returns
    if not returned:
        return None
    return given[0] if len(returned) == 1 else tuple(given[: len(returned)])
