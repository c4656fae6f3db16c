"""What torch.compile makes of a function: a kernel forward, a kernel backward, and what its partitioner keeps.

Which tensors are kept is torch's own choice: the joint graph of forward and backward, in Inductor's
decompositions, is cut by its min-cut partitioner (``torch/_functorch/partitioners.py``), as
``torch/_inductor/compile_fx.py: partition_fn`` asks it to. No device takes part in that choice.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

#: Enter it around what runs as one kernel.
Kernel = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class _Graphs:
    """``forward``: tensors -> (outputs, kept); ``backward``: (kept, gradients of outputs) -> gradients of tensors."""

    forward: Any
    backward: Any
    outputs: int
    structure: Any


_known: dict[Any, _Graphs] = {}


def call(function: Callable[..., Any], args: Any, kwargs: Any, kernel: Kernel) -> Any:
    """``function(*args, **kwargs)`` as one kernel, and in backward another."""
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if not differentiable or not all(t.is_meta for t in tensors):
        versions = [t._version for t in tensors]
        with kernel():
            out = function(*args, **kwargs)
            # The compiler writes in place through a second tensor: it makes mutations functional and copies back.
            copies = [torch.empty_like(t) for t, before in zip(tensors, versions, strict=True) if t._version != before]
        del copies
        return out
    graphs = _graphs(function, leaves, structure)
    out = _OneKernel.apply(graphs, kernel, *tensors)
    return tree_unflatten(list(out), graphs.structure)


class _OneKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, kernel: Kernel, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.graphs, ctx.kernel = graphs, kernel
        with kernel():
            made = graphs.forward(*tensors)
        ctx.save_for_backward(*made[graphs.outputs :])
        return tuple(made[: graphs.outputs])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with ctx.kernel():
            return None, None, *ctx.graphs.backward(*ctx.saved_tensors, *grads)


def _graphs(function: Callable[..., Any], leaves: list[Any], structure: Any) -> _Graphs:
    key = (function, structure, tuple(map(_signature, leaves)))
    if key not in _known:
        # A thread of its own has no modes and no hooks of the caller.
        with ThreadPoolExecutor(1) as alone:
            _known[key] = alone.submit(_trace, function, leaves, structure).result()
    return _known[key]


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, (int, float, bool, str, type(None), torch.dtype)) else type(leaf)


def _trace(function: Callable[..., Any], leaves: list[Any], structure: Any) -> _Graphs:
    from torch._functorch.aot_autograd import aot_function
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found: dict[str, Any] = {}

    def keep(name: str) -> Callable[..., Any]:
        def compiler(graph: Any, inputs: Any) -> Any:
            found[name] = graph
            return graph

        return compiler

    def cut(graph: Any, inputs: Any, **more: Any) -> Any:
        return min_cut_rematerialization_partition(graph, inputs, compiler="inductor", **more)

    def flat(*tensors: torch.Tensor) -> list[Any]:
        given = iter(tensors)
        args, kwargs = tree_unflatten(
            [next(given) if isinstance(x, torch.Tensor) else x for x in leaves], structure
        )
        out, found["structure"] = tree_flatten(function(*args, **kwargs))
        return out

    examples = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta").requires_grad_(x.requires_grad)
        for x in leaves
        if isinstance(x, torch.Tensor)
    ]
    out = aot_function(
        flat, keep("forward"), keep("backward"), cut, decompositions=select_decomp_table()
    )(*examples)  # fmt: skip
    # The backward graph is handed to its compiler when it first runs.
    torch.autograd.backward([x for x in out if x.requires_grad], [torch.empty_like(x) for x in out if x.requires_grad])
    return _Graphs(found["forward"], found["backward"], len(out), found["structure"])
