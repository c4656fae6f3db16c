"""Enumerations of the compiled half, and torch's dtype for each of its ``DType``s."""

from __future__ import annotations

import enum
from typing import Any

import torch


def _enum(name: str, members: str) -> Any:
    return enum.IntEnum(name, members.split(), start=0)


_QKV_LAYOUTS = (
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD "
    "T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD "
    "Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD "
    "Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD QKV_Layout_NOT_SET"
)


def _nvte(members: str) -> str:
    return " ".join(f"NVTE_{m}" for m in members.split())


ENUMS = {
    # The exported members, with the values of ``transformer_engine.h``.
    "DType": enum.IntEnum(
        "DType",
        {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7,
         "kFloat8E5M2": 8, "kFloat4E2M1": 10},
    ),
    "FP8FwdTensors": _enum(
        "FP8FwdTensors",
        "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
        "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    ),
    "FP8BwdTensors": _enum(
        "FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3"
    ),
    "Float8BlockScaleTensorFormat": _enum("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID"),
    "CommOverlapType": _enum("CommOverlapType", "RS AG"),
    "CommOverlapAlgo": _enum("CommOverlapAlgo", "NONE"),
    "NVTE_QKV_Layout": _enum("NVTE_QKV_Layout", _nvte(_QKV_LAYOUTS)),
    "NVTE_QKV_Format": _enum(
        "NVTE_QKV_Format", _nvte("SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD BHSD QKV_Format_NOT_SET")
    ),
    "NVTE_Bias_Type": _enum("NVTE_Bias_Type", _nvte("NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI")),
    "NVTE_Mask_Type": _enum(
        "NVTE_Mask_Type",
        _nvte(
            "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK "
            "PADDING_CAUSAL_BOTTOM_RIGHT_MASK"
        ),
    ),
    "NVTE_Softmax_Type": _enum(
        "NVTE_Softmax_Type", _nvte("VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX")
    ),
    "NVTERoutingMapFormat": _enum("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8"),
    "NVTEQBHistogramMode": _enum("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC"),
    "NVTEScalingMode": _enum(
        "NVTEScalingMode",
        _nvte("DELAYED_TENSOR_SCALING MXFP8_1D_SCALING BLOCK_SCALING_1D BLOCK_SCALING_2D NVFP4_1D_SCALING"),
    ),
    # Python checks that it knows every member (``cpp_extensions/fused_attn.py: FusedAttnBackend``).
    "NVTE_Fused_Attn_Backend": _enum("NVTE_Fused_Attn_Backend", _nvte("F16_arbitrary_seqlen FP8 No_Backend")),
}
_TORCH = {
    "kByte": torch.uint8, "kInt32": torch.int32, "kFloat32": torch.float32,
    "kFloat16": torch.float16, "kBFloat16": torch.bfloat16, "kFloat8E4M3": torch.float8_e4m3fn,
    "kFloat8E5M2": torch.float8_e5m2,
}  # fmt: skip


def torch_dtype(value: Any) -> torch.dtype:
    return value if isinstance(value, torch.dtype) else _TORCH[value.name]
