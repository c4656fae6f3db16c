"""Quantized tensors: buffers that quantizers allocate, and the kernels that cast and transpose."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from bridge_memory.rehearsal.patches.replace import META
from bridge_memory.rehearsal.te_kernels.enums import torch_dtype
from bridge_memory.rehearsal.te_kernels.package import te_module
from bridge_memory.rehearsal.world import RehearsalUnavailable


def empty(shape: Sequence[int], dtype: Any) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=torch_dtype(dtype), device=META)


#: The matrix of NVFP4's Hadamard transform, one per process.
HADAMARD = torch.empty((16, 16), dtype=torch.bfloat16, device=META)


def quantized(tensor: torch.Tensor, quantizer: Any, shape: Any = None) -> Any:
    """A quantized tensor of this shape, with the buffers that the quantizer's Python allocates.

    Where the GPU's GEMM takes either layout, data with one scale per tensor has the rowwise layout only
    (``quantizer.cpp: Float8Quantizer``).
    """
    if type(quantizer).__name__.startswith(("Float8Quantizer", "Float8CurrentScaling")) and any_layout():
        quantizer = quantizer.copy()
        quantizer.set_usage(rowwise=True, columnwise=False)
    made = quantizer.make_empty(tuple(shape or tensor.shape), dtype=tensor.dtype, device=torch.device("cuda"))
    if quantizer.internal:
        return _storage_of(made)
    return made


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pinned: bool = False
) -> Any:
    """``quantizer.cpp: create_tensor``; before 2.16 each quantizer's ``make_empty`` allocated the same in Python."""
    shape = tuple(shape)
    kinds = {c.__name__ for c in type(quantizer).__mro__}
    if kinds & {"Float8Quantizer", "Float8CurrentScalingQuantizer"}:
        rows = quantizer.rowwise_usage or any_layout()
        columns = quantizer.columnwise_usage and not any_layout()
        return te_module("tensor.float8_tensor").Float8Tensor(
            shape=shape, dtype=dtype, fp8_dtype=quantizer.dtype, quantizer=quantizer, device=torch.device(META),
            data=empty(shape, torch.uint8) if rows else None,
            data_transpose=empty([shape[-1], *shape[:-1]], torch.uint8) if columns else None,
            fp8_scale_inv=empty([1], torch.float32),
        )  # fmt: skip
    if "NVFP4Quantizer" in kinds:
        return _nvfp4_tensor(quantizer, shape, dtype)
    blockwise = "Float8BlockQuantizer" in kinds
    if not blockwise and "MXFP8Quantizer" not in kinds:
        raise RehearsalUnavailable(f"Transformer Engine's {type(quantizer).__name__} is not known to the rehearsal")
    parts: dict[str, Any] = {}
    for columnwise, used in ((False, quantizer.rowwise_usage), (True, quantizer.columnwise_usage)):
        data, scales = None, None
        if used:
            data = empty(quantizer.get_columnwise_shape(shape) if columnwise else shape, torch.uint8)
            scales = empty(quantizer.get_scale_shape(shape, columnwise), torch.float32 if blockwise else torch.uint8)
        kind = "columnwise" if columnwise else "rowwise"
        parts |= {f"{kind}_data": data, f"{kind}_scale_inv": scales}
    if blockwise:
        return te_module("tensor.float8_blockwise_tensor").Float8BlockwiseQTensor(
            shape=shape, dtype=dtype, fp8_dtype=quantizer.dtype, quantizer=quantizer,
            is_2D_scaled=quantizer.block_scaling_dim == 2, **parts,
        )  # fmt: skip
    return te_module("tensor.mxfp8_tensor").MXFP8Tensor(
        shape=shape, dtype=dtype, fp8_dtype=quantizer.dtype, quantizer=quantizer, with_gemm_swizzled_scales=False,
        **parts,
    )  # fmt: skip


def _nvfp4_tensor(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Per layout: two values per byte, a one-byte scale per 16 values, and the maximum of the tensor (amax)."""
    parts: dict[str, Any] = {}
    flat = (prod(shape[:-1]), shape[-1])
    for kind, used, laid_out in (
        ("rowwise", quantizer.rowwise_usage, shape),
        ("columnwise", quantizer.columnwise_usage, quantizer.get_columnwise_shape(flat)),
    ):
        scales = quantizer.get_scale_shape(shape, kind == "columnwise") if used else ()
        parts |= {
            f"{kind}_data": empty([*laid_out[:-1], laid_out[-1] // 2], torch.uint8) if used else None,
            f"{kind}_scale_inv": empty(scales, torch.uint8) if used else None,
            f"amax_{kind}": empty([1], torch.float32) if used else None,
        }
    return te_module("tensor.nvfp4_tensor").NVFP4Tensor(
        shape=shape, dtype=dtype, fp4_dtype=quantizer.dtype, quantizer=quantizer, with_gemm_swizzled_scales=False,
        **parts,
    )  # fmt: skip


def any_layout() -> bool:
    return bool(te_module("utils").is_non_tn_fp8_gemm_supported())


def _storage_of(tensor: Any) -> Any:
    """The storage class without autograd, which kernels return where a quantizer is internal to a module."""
    metadata = tensor.get_metadata()
    base = next(c for c in type(tensor).__mro__ if c.__name__.endswith("TensorStorage"))
    try:
        return base(**metadata)
    except TypeError:
        return base(**{k: v for k, v in metadata.items() if k != "dtype"})


def is_quantized(tensor: Any) -> bool:
    return any(c.__name__ in ("QuantizedTensorStorage", "QuantizedTensorBase") for c in type(tensor).__mro__)


def shape_of(tensor: Any) -> tuple[int, ...]:
    """The logical shape. Of fp8 data that exists in the transposed layout only, the last dimension is the first of that
    layout (``quantizer.cpp: Float8Quantizer::create_tensor``); TE's ``size()`` reverses it for matrices only."""
    if getattr(tensor, "_data", tensor) is None and getattr(tensor, "_transpose", None) is not None:
        last, *rows = tensor._transpose.size()
        return (*rows, last)
    return tuple(tensor.size())


def quantize(tensor: Any, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """``cast.cpp: quantize``: into ``output``, or into a new tensor of the quantizer."""
    return quantized(tensor, quantizer) if output is None else output


def split_quantize(tensor: torch.Tensor, sections: Sequence[int], quantizers: Sequence[Any], **rest: Any) -> list[Any]:
    """``cast.cpp: split_quantize``: a separate tensor per section."""
    return [quantized(p, q) for p, q in zip(torch.split(tensor, list(sections)), quantizers, strict=True)]


def bgrad_quantize(tensor: torch.Tensor, quantizer: Any) -> list[Any]:
    """``bias.cpp``: the sum over rows, and the quantized tensor."""
    return [empty([tensor.shape[-1]], tensor.dtype), quantized(tensor, quantizer)]


def dequantize(tensor: Any, dtype: Any) -> torch.Tensor:
    return empty(shape_of(tensor), dtype)


def fp8_transpose(data: torch.Tensor, dtype: Any, *, out: Any = None) -> torch.Tensor:
    """``transpose.cpp``: last dimension first."""
    return empty([data.shape[-1], *data.shape[:-1]], data.dtype) if out is None else out


def swap_first_dims(tensor: torch.Tensor, *, out: Any = None) -> torch.Tensor:
    return empty([tensor.shape[1], tensor.shape[0], *tensor.shape[2:]], tensor.dtype) if out is None else out
