"""Kernels of CUDA, of Apex and of Megatron: what they save and allocate, without computing."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from bridge_memory.rehearsal.patches.modules import has_te
from bridge_memory.rehearsal.patches.replace import module_or_empty, replaced


class _RMSNorm(torch.autograd.Function):
    """``torch.rms_norm`` on CUDA since 2.9: saves its input, its weight and one fp32 value per row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _rms_norm(x: torch.Tensor, shape: Any, weight: Any = None, eps: Any = None) -> torch.Tensor:
    out: torch.Tensor = _RMSNorm.apply(x, weight)
    return out


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return x
    return torch.ops.aten.native_dropout(x, p, True)[0]


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Operations whose autograd differs between CUDA and other devices, as on CUDA.

    Dropout is one kernel with a bool mask; elsewhere a mask of the input's dtype and a product. RMSNorm is one kernel;
    elsewhere a composition in fp32. torch 2.13: ``aten/src/ATen/native/Dropout.cpp``, ``layer_norm.cpp``.
    """
    functional = torch.nn.functional
    with ExitStack() as stack:
        stack.enter_context(replaced(functional, "rms_norm", _rms_norm))
        stack.enter_context(replaced(functional, "dropout", _dropout))
        yield


def _softmax_kernels() -> dict[str, types.ModuleType]:
    """Megatron's fused softmax kernels: the output has the scores' shape; backward overwrites the gradient it gets."""
    made = {}
    for name in (
        "scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda"
    ):  # fmt: skip
        module = types.ModuleType(name)
        module.forward = lambda scores, *a: torch.empty_like(scores)  # type: ignore[attr-defined]
        module.backward = lambda grad, *a: grad  # type: ignore[attr-defined]
        made[name] = module
    made["scaled_masked_softmax_cuda"].get_batch_per_block = lambda *a: 1  # type: ignore[attr-defined]
    return made


@contextmanager
def apex_kernels() -> Iterator[None]:
    """The weight-gradient GEMM that accumulates into the main gradient, and the fused softmax.

    ``tensor_parallel/layers.py`` and ``fusions/fused_softmax.py`` import both from Apex.
    """
    layers = module_or_empty("megatron.core.tensor_parallel.layers")
    kernels = types.ModuleType("fused_weight_gradient_mlp_cuda")
    kernels.wgrad_gemm_accum_fp32 = lambda *a: None  # type: ignore[attr-defined]
    kernels.wgrad_gemm_accum_fp16 = lambda *a: None  # type: ignore[attr-defined]
    stubs = _softmax_kernels()
    with ExitStack() as stack:
        stack.enter_context(replaced(layers, "_grad_accum_fusion_available", True))
        stack.enter_context(replaced(layers, "fused_weight_gradient_mlp_cuda", kernels, add=True))
        for name, module in stubs.items():
            if importlib.util.find_spec(name) is None:
                sys.modules[name] = module
                stack.callback(sys.modules.pop, name, None)
        yield


@contextmanager
def dummy_weight_gradients(device: str) -> Iterator[None]:
    """Dummy weight gradients of fused accumulation, one per shape and dtype, as with Transformer Engine installed.

    With ``gradient_accumulation_fusion`` megatron-core takes the dummies from Transformer Engine where it is installed,
    also for local modules (``tensor_parallel/layers.py``; TE ``module/base.py: get_dummy_wgrad``). A job with the fused
    kernels is assumed to have Transformer Engine.
    """
    layers = module_or_empty("megatron.core.tensor_parallel.layers")
    if has_te():
        yield
        return
    made: dict[Any, torch.Tensor] = {}

    def dummy(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
        key = (*shape, dtype)
        if key not in made:
            made[key] = torch.empty(shape, dtype=dtype, device=device)
        return made[key].detach()

    with replaced(layers, "get_dummy_wgrad", dummy, add=True), replaced(layers, "HAVE_TE", True):
        yield
