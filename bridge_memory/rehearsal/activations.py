"""Activation functions of megatron-core, by a RunSpec's names."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from bridge_memory.rehearsal.patches.fusion import jit_fused
from bridge_memory.rehearsal.world import NotBuildable


def activation_of(name: str) -> Any:
    known = {
        "silu": F.silu, "swiglu": F.silu, "gelu": F.gelu, "gelu_tanh": F.gelu, "gelu_pytorch_tanh": F.gelu,
        "gelu_new": F.gelu, "relu": F.relu, "relu2": _squared_relu(), "squared_relu": _squared_relu(),
        "quick_gelu": _quick_gelu(),
    }  # fmt: skip
    if name not in known:
        raise NotBuildable(f"activation ({name!r}) is none of megatron-core's: {', '.join(sorted(known))}")
    return known[name]


def _squared_relu() -> Any:
    try:
        from megatron.core.activations import squared_relu
    except ImportError:  # 0.13, where Megatron-LM defines the same function (``training/activations.py``)
        return jit_fused(_relu_then_square)
    return squared_relu


def _relu_then_square(x: torch.Tensor) -> torch.Tensor:
    return torch.pow(F.relu(x), 2)


def _quick_gelu() -> Any:
    fused = fused_quick_gelu()
    if fused is not None:
        return fused
    try:
        from megatron.core.activations import quick_gelu
    except ImportError:  # 0.13, as above
        return jit_fused(_sigmoid_of_1_702)
    return quick_gelu


def _sigmoid_of_1_702(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def fused_quick_gelu() -> Any:
    """The function that TransformerConfig accepts for fusion; None before 0.15."""
    from megatron.core.fusions import fused_bias_geglu

    return getattr(fused_bias_geglu, "quick_gelu", None)
