"""GEMMs, norms and the router, and the module that holds every kernel."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import types
from math import prod
from typing import Any

import torch

from bridge_memory.rehearsal.patches.replace import META
from bridge_memory.rehearsal.te_kernels.attention import (
    _rotated,
    _softmax,
    _softmax_backward,
    fa_prepare_bwd,
    fa_prepare_fwd,
    fused_attn_bwd,
    fused_attn_fwd,
    fused_qkv_rope_backward,
    fused_qkv_rope_forward,
    get_fused_attn_backend,
    multi_tensor_transpose_to_bhsd,
    thd_read_half_tensor,
    thd_read_second_half_lse,
)
from bridge_memory.rehearsal.te_kernels.enums import ENUMS, torch_dtype
from bridge_memory.rehearsal.te_kernels.gpu import CUBLAS_STREAMS, CUBLAS_VERSION, CUDNN_VERSION
from bridge_memory.rehearsal.te_kernels.package import COMPILED, NEWEST, version
from bridge_memory.rehearsal.te_kernels.quantized import (
    bgrad_quantize,
    create_empty_quantized_tensor,
    dequantize,
    empty,
    fp8_transpose,
    quantize,
    quantized,
    shape_of,
    split_quantize,
    swap_first_dims,
)
from bridge_memory.rehearsal.world import RehearsalUnavailable
from bridge_memory.releases import release_in


def generic_gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Any, quantizer: Any, out_dtype: Any, bias: Any,
    bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, *rest: Any, extra_output: Any = None, **_: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """``gemm.cpp: gemm``: the product unless ``out`` is given, and the bias gradient in backward."""
    a_shape, b_shape = shape_of(a), shape_of(b)
    if out is None:
        rows = [b_shape[-1]] if transb else list(b_shape[:-1])
        columns = prod(a_shape[:-1]) if transa else a_shape[-1]
        dtype = out_dtype if out_dtype is not None else a.dtype
        out = empty([*rows, columns], dtype)
        if quantizer is not None:
            out = quantized(out, quantizer)
    bias_grad = empty([b_shape[-1]], bias_dtype) if grad and bias is not None else None
    return out, bias_grad, None, extra_output


def te_general_grouped_gemm(*args: Any) -> Any:
    """``gemm.cpp: te_general_grouped_gemm``: writes into the outputs that Python allocated."""
    return args[7]


def _normalized(x: torch.Tensor, out: Any, quantizer: Any, otype: Any) -> Any:
    if out is not None:
        return out
    if quantizer is None:
        return empty(x.shape, otype)
    return quantized(torch.empty((), dtype=torch_dtype(otype), device=META), quantizer, x.shape)


def rmsnorm_fwd(x: Any, weight: Any, eps: float, out: Any, quantizer: Any, otype: Any, *rest: Any) -> list[Any]:
    """``normalization.cpp``: the output and one fp32 reciprocal per row."""
    return [_normalized(x, out, quantizer, otype), None, empty([prod(x.shape[:-1])], torch.float32)]


def rmsnorm_bwd(dz: Any, x: Any, rsigma: Any, gamma: Any, *rest: Any) -> list[torch.Tensor]:
    return [empty(x.shape, x.dtype), empty(gamma.shape, gamma.dtype)]


def layernorm_fwd(
    x: Any, weight: Any, bias: Any, eps: float, out: Any, quantizer: Any, otype: Any, *rest: Any
) -> list[Any]:
    """``normalization.cpp``: the output, and per row a mean and a reciprocal in fp32."""
    rows = [prod(x.shape[:-1])]
    made = _normalized(x, out, quantizer, otype)
    return [made, empty(rows, torch.float32), empty(rows, torch.float32)]


def layernorm_bwd(dz: Any, x: Any, mu: Any, rsigma: Any, gamma: Any, *rest: Any) -> list[torch.Tensor]:
    return [empty(x.shape, x.dtype), empty(gamma.shape, gamma.dtype), empty(gamma.shape, gamma.dtype)]


#: From this release on the router's scores are fp32, whatever its logits are.
_FP32_SCORES = (2, 13)


def _of_scores(logits: torch.Tensor) -> torch.dtype:
    return torch.float32 if (release_in(version()) or NEWEST) >= _FP32_SCORES else logits.dtype


def fused_topk_with_score_function_fwd(logits: torch.Tensor, *rest: Any, **named: Any) -> list[torch.Tensor]:
    """``router.cpp``: probabilities, the routing map, and the scores that backward reads."""
    shape = logits.shape
    return [empty(shape, logits.dtype), empty(shape, torch.bool), empty(shape, _of_scores(logits))]


def fused_score_for_moe_aux_loss_fwd(logits: torch.Tensor, *rest: Any, **named: Any) -> list[torch.Tensor]:
    """``router.cpp``: normalized scores, the routing map, and the scores that backward reads."""
    shape, dtype = logits.shape, _of_scores(logits)
    return [empty(shape, dtype), empty(shape, torch.bool), empty(shape, dtype)]


def fused_topk_with_score_function_bwd(*args: Any) -> torch.Tensor | None:
    """The gradient of the logits, [tokens, experts]; later releases allocate it in Python and pass it last."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if isinstance(args[0], torch.Tensor):
        return None
    return empty(args[:2], tensors[-1].dtype)


def fused_moe_aux_loss_fwd(probs: torch.Tensor, *rest: Any, **named: Any) -> list[torch.Tensor]:
    """``router.cpp``: the loss and one coefficient."""
    return [empty([], probs.dtype), empty([], torch.float32)]


def fused_score_for_moe_aux_loss_bwd(
    *, intermediate_output: Any, grad_logits: Any = None, **rest: Any
) -> torch.Tensor | None:
    """The gradient of the logits; later releases allocate it in Python and pass it."""
    return None if grad_logits is not None else empty(intermediate_output.shape, intermediate_output.dtype)


def fused_moe_aux_loss_bwd(*, num_rows: int, num_cols: int, grad_aux_loss: Any, **rest: Any) -> torch.Tensor:
    """``router.cpp``: the gradient of the probabilities."""
    return empty([num_rows, num_cols], grad_aux_loss.dtype)


def multi_tensor_l2norm(chunk: int, noop: Any, lists: Any, per_tensor: Any = False, *rest: Any) -> tuple[Any, Any]:
    count = len(lists[0]) if per_tensor else 0
    return empty([1], torch.float32), empty([count], torch.float32)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    return None


class Kernels(types.ModuleType):
    """The module ``transformer_engine_torch``. A call of an unknown kernel is refused by name."""

    def __init__(self) -> None:
        super().__init__(COMPILED)
        self.__spec__ = importlib.machinery.ModuleSpec(COMPILED, None)
        self.__all__: list[str] = []
        known: dict[str, Any] = dict(ENUMS)
        known.update(
            (f.__name__, f)
            for f in (
                generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd, layernorm_bwd,
                fused_attn_fwd, fused_attn_bwd, fa_prepare_fwd, fa_prepare_bwd, get_fused_attn_backend,
                fused_qkv_rope_forward,
                fused_qkv_rope_backward, fused_topk_with_score_function_fwd, fused_topk_with_score_function_bwd,
                fused_score_for_moe_aux_loss_fwd, fused_score_for_moe_aux_loss_bwd,
                fused_moe_aux_loss_fwd, fused_moe_aux_loss_bwd, quantize,
                split_quantize, bgrad_quantize, thd_read_half_tensor, thd_read_second_half_lse, dequantize,
                fp8_transpose, multi_tensor_transpose_to_bhsd,
                swap_first_dims, multi_tensor_l2norm, create_empty_quantized_tensor,
            )
        )  # fmt: skip
        known.update(
            fused_rope_forward=_rotated,
            fused_rope_backward=_rotated,
            multi_tensor_unscale_l2norm=multi_tensor_l2norm,
            get_cudnn_version=lambda: CUDNN_VERSION,
            get_cublasLt_version=lambda: CUBLAS_VERSION,
            get_num_cublas_streams=lambda: CUBLAS_STREAMS,
            get_stream_priority_range=lambda *a: (-5, 0),
            device_supports_multicast=lambda *a: False,
            ubuf_built_with_mpi=lambda: False,
        )
        for kind in ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked"):
            known |= {f"{kind}_softmax_forward": _softmax, f"{kind}_softmax_backward": _softmax_backward}
        for name in (
            "multi_tensor_scale", "multi_tensor_adam", "multi_tensor_adam_fp8", "multi_tensor_adam_capturable",
            "multi_tensor_adam_capturable_master", "multi_tensor_adam_param_remainder", "multi_tensor_sgd",
            "multi_tensor_compute_scale_and_scale_inv", "multi_tensor_compute_scale_inv_e8m0",
            "fused_amax_and_scale_update_after_reduction", "compute_amax", "fused_multi_row_padding",
            "fused_multi_row_unpadding",
            "multi_tensor_swizzle_scales_for_gemm_unchecked_",
            "thd_out_correction", "thd_grad_correction", "thd_second_half_lse_correction",
        ):  # fmt: skip
            known[name] = _do_nothing
        for name, value in known.items():
            setattr(self, name, value)
        self.__all__ = sorted(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        class Unknown:
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                raise RehearsalUnavailable(f"Transformer Engine's kernel {name} is not known to the rehearsal")

        Unknown.__name__ = name
        setattr(self, name, Unknown)
        return Unknown
