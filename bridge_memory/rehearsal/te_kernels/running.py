"""What Transformer Engine reads of torch.cuda while a rank runs, and the caches that it keeps for the process."""

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
    """Let Transformer Engine run as on a GPU of generation ``arch``; its workspaces and caches are cleared afterwards.

    ``fp8_parameters``: modules quantize parameters when they are constructed (``module/base.py: reset_parameters``).
    ``flash``: flash-attn is installed as well as cuDNN.
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
            # Called with a gradient and 1.0, of different shapes (``triton/cross_entropy.py: cross_entropy_backward``).
            (torch, "equal", lambda a, b: a.shape == b.shape),
            # Also for tensors on the host: counts of tokens, which are known there in a rehearsal.
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
            # The signs of the Hadamard transform are values, and meta tensors have none.
            stack.enter_context(replaced(nvfp4, "get_random_sign_mask_for_rht", lambda *a, **k: 1))
            stack.enter_context(replaced(nvfp4, "get_rht_matrix", lambda *a, **k: HADAMARD))
        _clear_caches()
        try:
            yield
        finally:
            _clear_caches()


@contextmanager
def _parameters_not_deferred() -> Iterator[None]:
    """Let modules create their parameters at once on the meta device.

    Given the string "meta" as device a module defers its parameters; given ``torch.device("meta")`` it does not, except
    grouped linears from 2.20 on, which compare the device's type (``module/grouped_linear.py``). The copies of
    parameters that modules keep on the host until the optimizer is built stay on the meta device.
    """
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


#: (module, function) of functions that cache properties of the device or allocations on it.
_CACHED_FUNCTIONS = (
    ("cpp_extensions.gemm", "get_cublas_workspace"), ("utils", "_get_device_compute_capability"),
    ("utils", "is_non_tn_fp8_gemm_supported"), ("utils", "get_sm_count"),
    *(("quantization", f"check_{kind}_support") for kind in ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling")),
)  # fmt: skip
#: Variables in which later releases cache what the GPU supports (``quantization.py: check_fp8_support``).
_SUPPORT_FLAGS = ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_NVFP4_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT")


def _clear_caches() -> None:
    """Clear workspaces (a set per process), dummy weight gradients (one per shape), sequence lengths, GPU
    properties."""
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
    # The last attention backend, cached by its parameters but not by which backends are allowed.
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
