"""R"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import zip_longest
from typing import Any

import torch

from bridge_memory.rehearsal.patches.replace import META, module_or_empty, replaced


class _NoFp8:
    """Transformer Engine's state of a process that never uses fp8."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        return None


@contextmanager
def recomputation_without_te() -> Iterator[None]:
    """``CheckpointWithoutOutput`` asks Transformer Engine about fp8 unless told None (0.14 to 0.16.1).

    ``transformer_layer.py`` does not tell it for layer norms, so that recomputing them fails without TE.
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
    """Before 0.16 ``CheckpointWithoutOutputFunction.backward`` reads gradients of what autograd saved. What went
    through hooks, by which saved tensors are seen here, comes back as another object without one: read those of the
    leaves. A pass without gradients, as of a checkpoint around it, saves nothing."""
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
        made: list[Any] = []  # of this pass alone: whole layers' checkpoints detach too

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
    """``share_storage`` of ``tensor_parallel/random.py`` (0.17), which is compiled C++: the storage of ``output`` has
    the size of the recomputed one, and keeps it alive. A storage without data takes no bytes of its own."""
    storage, source = output.untyped_storage(), recomputed.untyped_storage()
    _RESIZE(storage, source.nbytes())
    weakref.finalize(storage, _keep_alive, source)


@contextmanager
def storage_shared_without_extension(device: str) -> Iterator[None]:
    """On the meta device recomputed outputs share storages without the extension that megatron-core would compile."""
    random = module_or_empty("megatron.core.tensor_parallel.random")
    if device != META:
        yield
        return
    with replaced(random, "_get_share_storage", lambda: _shared):
        yield
