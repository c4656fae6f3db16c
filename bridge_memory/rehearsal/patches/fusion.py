"""Functions that torch.compile fuses: each counts as one kernel, and saves what torch's partitioner chooses."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from bridge_memory.rehearsal import compiled
from bridge_memory.rehearsal.patches.modules import has_te
from bridge_memory.rehearsal.patches.replace import module_or_empty, replaced


class _Kernel:
    """Nesting depth of functions that count as one kernel, and the callback for the end of the outermost."""

    depth = 0
    ended: Callable[[], None] | None = None
    #: Whether compiled functions run eagerly and count as one kernel, see ``compiled_functions_are_kernels``.
    counted = False


def inside_a_kernel() -> bool:
    """Whether a fused function is running, whose intermediate tensors a GPU would not allocate."""
    return _Kernel.depth > 0


@contextmanager
def after_each_kernel(call: Callable[[], None]) -> Iterator[None]:
    """Call ``call`` after every fused function."""
    with replaced(_Kernel, "ended", call):
        yield


@contextmanager
def as_a_kernel() -> Iterator[None]:
    _Kernel.depth += 1
    try:
        yield
    finally:
        _Kernel.depth -= 1
        if not _Kernel.depth and _Kernel.ended is not None:
            _Kernel.ended()


@functools.cache
def _one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return compiled.call(function, args, kwargs, as_a_kernel)

    return run


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.core.jit import jit_fuser

    fused: Callable[..., Any] = jit_fuser(function)
    return fused


def jit_fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as by megatron-core's ``jit_fuser``; one kernel inside ``compiled_functions_are_kernels``."""
    return _one_kernel(function) if _Kernel.counted else _compiled(function)


def _gate(y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (y * torch.nn.functional.silu(gate.float())).to(y.dtype)


def _norm_then_gate(self: Any, x: torch.Tensor, gate: torch.Tensor) -> Any:
    """``GatedDeltaNet._apply_gated_norm``: torch.compile fuses all but Transformer Engine's norm."""
    normed = self.out_norm(x.reshape(-1, x.shape[-1]))
    return _one_kernel(_gate)(normed, gate.reshape(-1, gate.shape[-1]))


def _rms_and_gate(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _gate(torch.rms_norm(x, weight.shape, weight), gate)


def _norm_and_gate(self: Any, x: torch.Tensor, gate: torch.Tensor) -> Any:
    """``GatedDeltaNet._apply_gated_norm``: torch.compile fuses torch's RMSNorm too, with its weight as an input."""
    weight = self.out_norm.weight
    return _one_kernel(_rms_and_gate)(x.reshape(-1, x.shape[-1]), gate.reshape(-1, gate.shape[-1]), weight)


#: Names of 0.18 and 0.19. torch.compile does not fuse the l2 norm's Triton kernel; around it are only copies.
_AROUND_L2NORM = ("_prepare_qkv_for_gated_delta_rule", "_prepare_input_for_gated_delta_rule")


def _as_written(owner: type, name: str) -> Any:
    compiled_function = getattr(owner, name, None)
    return getattr(compiled_function, "_torchdynamo_orig_callable", getattr(compiled_function, "__wrapped__", None))


@contextmanager
def compiled_functions_are_kernels() -> Iterator[None]:
    """Run each function under ``jit_fuser`` (``jit.py``: torch.compile) as one kernel: SwiGLU, bias-dropout-add, ...

    Intermediate tensors of the function are not counted; autograd saves what torch's partitioner chooses.
    """
    for name in ("models.gpt.gpt_layer_specs", "fusions.fused_bias_dropout", "fusions.fused_cross_entropy"):
        module_or_empty(f"megatron.core.{name}")
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(replaced(_Kernel, "counted", True))
        for name, module in list(sys.modules.items()):
            if not name.startswith(("megatron.core", "megatron.bridge")) or module is None:
                continue
            for owner in (module, *(v for v in vars(module).values() if isinstance(v, type))):
                if getattr(owner, "__module__", name) != name:
                    continue
                for attribute, value in list(vars(owner).items()):
                    if not isinstance(value, types.FunctionType):
                        continue
                    function = getattr(value, "_torchdynamo_orig_callable", None)
                    if function is not None:
                        stack.enter_context(replaced(owner, attribute, _one_kernel(function)))
        delta = getattr(module_or_empty("megatron.core.ssm.gated_delta_net"), "GatedDeltaNet", None)
        if delta is not None:
            fused = _norm_then_gate if has_te() else _norm_and_gate
            stack.enter_context(replaced(delta, "_apply_gated_norm", fused))
            for name in _AROUND_L2NORM:
                stack.enter_context(replaced(delta, name, _as_written(delta, name)))
        yield
