"""Ru"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from bridge_memory.rehearsal.patches.collectives import Done, coalesced
from bridge_memory.rehearsal.patches.replace import META, replaced
from bridge_memory.rehearsal.te_kernels.attention import flash_attention
from bridge_memory.rehearsal.te_kernels.gpu import CUDA_VERSION, gpu_properties
from bridge_memory.rehearsal.te_kernels.package import PACKAGE, te_module
from bridge_memory.rehearsal.te_kernels.quantized import HADAMARD


@contextmanager
def running(arch: str = "hopper", *, fp8_parameters: bool = False, flash: bool = False) -> Iterator[None]:
    """What Transformer Engine asks of torch.cuda, answered; its workspaces and caches gone afterwards.

    ``fp8_parameters``: modules quantize their parameters as they are built (``module/base.py: reset_parameters``).
    ``flash``: flash-attn is there beside cuDNN.
    """
    gemm = te_module("cpp_extensions.gemm")
    with ExitStack() as stack:
        stack.enter_context(gpu_properties(arch))
        if flash:
            stack.enter_context(flash_attention())
        if fp8_parameters:
            stack.enter_context(_parameters_not_deferred())
        for owner, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.version, "cuda", CUDA_VERSION),
            # The ring of context parallelism (``context_parallel.py: flash_attn_p2p_communicate``).
            (torch.distributed, "batch_isend_irecv", lambda operations: [Done() for _ in operations]),
            # Data and scales of a quantized tensor are gathered together (``distributed.py``).
            (te_module("distributed"), "_get_cuda_rng_state", lambda *a, **k: torch.zeros(16, dtype=torch.uint8)),
            (te_module("distributed"), "_set_cuda_rng_state", lambda *a, **k: None),
            (torch.distributed, "_coalescing_manager", coalesced),
            # Asked of a gradient and 1.0, which differ in shape (``triton/cross_entropy.py: cross_entropy_backward``).
            (torch, "equal", lambda a, b: a.shape == b.shape),
            # True of tensors on the host too: counts of tokens, which the rehearsal knows from the start.
            (torch.Tensor, "is_cuda", property(lambda tensor: True)),
            (torch.Tensor, "record_stream", lambda *a: None),
            (gemm, "get_tensor_device", lambda tensor: torch.cuda.current_device()),
        ):
            stack.enter_context(replaced(owner, name, value))
        for name, module in list(sys.modules.items()):
            if name.startswith(f"{PACKAGE}.") and "canonicalize_device" in vars(module):
                stack.enter_context(replaced(module, "canonicalize_device", lambda device: torch.device(META)))
        nvfp4 = te_module("tensor.nvfp4_tensor")
        if hasattr(nvfp4, "get_rht_matrix"):
            # Signs of the Hadamard transform are numbers, of which the rehearsal has none.
            stack.enter_context(replaced(nvfp4, "get_random_sign_mask_for_rht", lambda *a, **k: 1))
            stack.enter_context(replaced(nvfp4, "get_rht_matrix", lambda *a, **k: HADAMARD))
        _clear_caches()
        try:
            yield
        finally:
            _clear_caches()


@contextmanager
def _parameters_not_deferred() -> Iterator[None]:
    """A module that is told the device "meta", by this word, puts its parameters off; of the device itself it makes
    them, but for grouped linears from 2.20 on, which look at its type (``module/grouped_linear.py``). What it keeps of
    them on the host, until the optimizer is built, has no data either."""
    grouped: Any = getattr(te_module("module.grouped_linear"), "GroupedLinear", None)
    to_host = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if tensor.is_meta else to_host(tensor, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(torch.cuda, "current_device", lambda: torch.device(META)))
        stack.enter_context(replaced(torch.Tensor, "cpu", cpu))
        if grouped is not None:
            reset = grouped.reset_parameters
            stack.enter_context(replaced(grouped, "reset_parameters", lambda self, defer_init=False: reset(self)))
        yield


#: Functions that remember the device or what they allocated on it, by module.
_CACHED_FUNCTIONS = (
    ("cpp_extensions.gemm", "get_cublas_workspace"), ("utils", "_get_device_compute_capability"),
    ("utils", "is_non_tn_fp8_gemm_supported"), ("utils", "get_sm_count"),
    *(("quantization", f"check_{kind}_support") for kind in ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling")),
)  # fmt: skip
#: What later releases remember of the GPU in variables (``quantization.py: check_fp8_support``).
_SUPPORT_FLAGS = ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_NVFP4_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT")


def _clear_caches() -> None:
    """Workspaces (one set a process), stand-in weight gradients (one a shape), lengths of sequences, the GPU."""
    for module, name in _CACHED_FUNCTIONS:
        function = getattr(te_module(module), name, None)
        clear = getattr(function, "cache_clear", None)
        if clear is not None:
            clear()
    attention = "attention.dot_product_attention.utils"
    for module, name in (("module.base", "_dummy_wgrads"), (attention, "_cu_seqlens_cache")):
        kept = getattr(te_module(module), name, None)
        if isinstance(kept, dict):
            kept.clear()
    # The backend that was chosen last, for as long as its parameters are asked for again, whatever is allowed by then.
    backends = getattr(te_module("attention.dot_product_attention.dot_product_attention"), "_attention_backends", None)
    if isinstance(backends, dict):
        backends["attention_params"] = None
    quantization = te_module("quantization")
    for name in _SUPPORT_FLAGS:
        if hasattr(quantization, name):
            setattr(quantization, name, None)
    fp8 = getattr(quantization, "FP8GlobalStateManager", None)
    if fp8 is not None:
        fp8.reset()
