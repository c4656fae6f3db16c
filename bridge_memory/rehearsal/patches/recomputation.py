"""Recomputation without Transformer Engine, without a C++ compiler and under saved-tensor hooks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import zip_longest
from typing import Any

import torch

from bridge_memory.rehearsal.patches.replace import META, module_or_empty, replaced


class _NoFp8:
    """Transformer Engine's global fp8 state in a process that does not use fp8."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        return None


@contextmanager
def recomputation_without_te() -> Iterator[None]:
    """Let ``CheckpointWithoutOutput`` run without Transformer Engine, whose fp8 state it reads (0.14 to 0.16.1).

    It does not read the state if constructed with ``fp8=None``, which ``transformer_layer.py`` omits for layer norms:
    recomputing them fails without TE.
    """
    random = module_or_empty("megatron.core.tensor_parallel.random")
    if hasattr(random, "FP8GlobalStateManager"):
        yield
        return
    with ExitStack() as stack:
        for name, value in (
            ("FP8GlobalStateManager", _NoFp8),
            ("activation_recompute_forward", lambda *a, **k: nullcontext()),
            ("fp8_autocast", lambda *a, **k: nullcontext()),
        ):
            stack.enter_context(replaced(random, name, value, add=True))
        yield


@contextmanager
def gradients_of_checkpoints() -> Iterator[None]:
    """Read gradients in ``CheckpointWithoutOutputFunction.backward`` from the leaves of its forward pass.

    Before 0.16 it reads ``.grad`` of the tensors that autograd saved. The tracker's saved-tensor hooks return other
    Python objects, which have none. A pass under ``no_grad``, as inside of an outer checkpoint, saves nothing.
    """
    random = module_or_empty("megatron.core.tensor_parallel.random")
    function, detach = random.CheckpointWithoutOutputFunction, random.detach_variable
    forward, backward, checkpoint = function.forward, function.backward, random.CheckpointWithoutOutput.checkpoint
    saves: list[bool] = []

    def noticing_gradients(*args: Any, **kwargs: Any) -> Any:
        saves.append(torch.is_grad_enabled())
        try:
            return checkpoint(*args, **kwargs)
        finally:
            saves.pop()

    def with_leaves(ctx: Any, *args: Any) -> Any:
        made: list[Any] = []  # of this pass only: checkpoints of whole layers detach as well

        def detached(inputs: Any) -> Any:
            made.append(detach(inputs))
            return made[-1]

        with replaced(random, "detach_variable", detached):
            outputs = forward(ctx, *args)
        ctx.leaves = made[-1] if made and saves[-1] else ()
        return outputs

    def of_leaves(ctx: Any, *args: Any) -> Any:
        leaves, ctx.leaves = ctx.leaves, ()
        first, second, *found = backward(ctx, *args)
        given = (
            leaf.grad if gradient is None and isinstance(leaf, torch.Tensor) else gradient
            for leaf, gradient in zip_longest(leaves, found)
        )
        return first, second, *given

    with ExitStack() as stack:
        stack.enter_context(replaced(function, "forward", staticmethod(with_leaves)))
        stack.enter_context(replaced(function, "backward", staticmethod(of_leaves)))
        stack.enter_context(replaced(random.CheckpointWithoutOutput, "checkpoint", noticing_gradients))
        yield


def _keep_alive(*_: object) -> None:
    pass


_RESIZE = torch.UntypedStorage.resize_


def _shared(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """``share_storage`` of ``tensor_parallel/random.py`` (0.17), there in C++: resizes the storage of ``output`` to
    that of ``recomputed`` and keeps the latter alive. On the meta device this allocates nothing."""
    storage, source = output.untyped_storage(), recomputed.untyped_storage()
    _RESIZE(storage, source.nbytes())
    weakref.finalize(storage, _keep_alive, source)


@contextmanager
def storage_shared_without_extension(device: str) -> Iterator[None]:
    """On the meta device, share storages of recomputed outputs without the extension that megatron-core compiles."""
    random = module_or_empty("megatron.core.tensor_parallel.random")
    if device != META:
        yield
        return
    with replaced(random, "_get_share_storage", lambda: _shared):
        yield
