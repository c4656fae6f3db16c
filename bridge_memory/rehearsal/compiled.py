"""A function under torch.compile: one kernel forward, one backward, and the tensors that the partitioner saves.

torch itself chooses the saved tensors: its min-cut partitioner (``torch/_functorch/partitioners.py``) cuts the joint
graph of forward and backward, in Inductor's decompositions, with the arguments of ``torch/_inductor/compile_fx.py:
partition_fn``. The choice does not depend on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten

#: A context manager to enter around operations that count as one kernel.
Kernel = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class _Graphs:
    """``forward``: tensors -> (outputs, saved); ``backward``: (saved, gradients of outputs) -> gradients of tensors.
    ``used``: of each tensor, whether the function uses it."""

    forward: Any
    backward: Any
    outputs: int
    structure: Any
    used: tuple[bool, ...]


_known: dict[Any, _Graphs] = {}


def call(function: Callable[..., Any], args: Any, kwargs: Any, kernel: Kernel) -> Any:
    """``function(*args, **kwargs)`` as one kernel, and its backward as another."""
    leaves, structure = tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if not differentiable or not all(t.is_meta for t in tensors):
        versions = [t._version for t in tensors]
        with kernel():
            out = function(*args, **kwargs)
            # The compiler makes mutations functional: a second tensor is written and copied back.
            copies = [torch.empty_like(t) for t, before in zip(tensors, versions, strict=True) if t._version != before]
        del copies
        return out
    graphs = _graphs(function, leaves, structure)
    tensors = [*_weights(leaves), *tensors]
    # The compiler's graph has no inputs but those that are used.
    given = (t if used else t.detach() for t, used in zip(tensors, graphs.used, strict=True))
    out = _OneKernel.apply(graphs, kernel, *given)
    return tree_unflatten(list(out), graphs.structure)


def _weights(leaves: list[Any]) -> list[torch.Tensor]:
    """Parameters of modules among the arguments, a method's own included: inputs of the graph."""
    return [p for x in leaves if isinstance(x, torch.nn.Module) for p in x.parameters()]


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
        # A new thread has none of the caller's modes and hooks.
        with ThreadPoolExecutor(1) as alone:
            _known[key] = alone.submit(_trace, function, leaves, structure).result()
    return _known[key]


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    if isinstance(leaf, torch.nn.Module):
        return type(leaf), *(_signature(p) for p in leaf.parameters())
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
        with ExitStack() as stack:
            for module in (x for x in leaves if isinstance(x, torch.nn.Module)):
                lifted = {name: next(given) for name, _ in module.named_parameters()}
                stack.enter_context(_reparametrize_module(module, lifted))
            args, kwargs = tree_unflatten(
                [next(given) if isinstance(x, torch.Tensor) else x for x in leaves], structure
            )
            out, found["structure"] = tree_flatten(function(*args, **kwargs))
        return out

    examples = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta").requires_grad_(x.requires_grad)
        for x in (*_weights(leaves), *leaves)
        if isinstance(x, torch.Tensor)
    ]
    out = aot_function(
        flat, keep("forward"), keep("backward"), cut, decompositions=select_decomp_table()
    )(*examples)  # fmt: skip
    # The backward graph is compiled when it first runs.
    torch.autograd.backward([x for x in out if x.requires_grad], [torch.empty_like(x) for x in out if x.requires_grad])
    used = tuple(bool(node.users) for node in found["forward"].graph.nodes if node.op == "placeholder")
    return _Graphs(found["forward"], found["backward"], len(out), found["structure"], used)
