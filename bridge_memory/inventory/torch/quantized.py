"""Frozen linears with weights of bitsandbytes in 4 or 8 bits: bytes of a weight, and what a product allocates.

Source: bitsandbytes 0.50.2 ``nn/modules.py: Linear4bit, Linear8bitLt``, ``autograd/_functions.py: MatMul4Bit,
MatMul8bitLt``, ``functional.py: quantize_4bit, dequantize_4bit``, ``backends/cuda/ops.py: _dequant_linear_fallback``;
transformers ``integrations/bitsandbytes.py: replace_with_bnb_linear`` (every ``nn.Linear`` but the output layer).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bridge_memory.releases import EXPERTS_IN_ONE_PARAMETER
from bridge_memory.spec import DTYPE_BYTES, RunSpec
from bridge_memory.spec.transformers import family_of
from bridge_memory.tapes.parameters import ALLOCATION_UNIT, Parameter, Use, pad
from bridge_memory.tapes.symbolic import largest

if TYPE_CHECKING:
    from bridge_memory.inventory.torch.ops import Array, Torch

FP32 = 4
#: Elements per scale, and scales per scale of the scales.
BLOCK_4BIT, BLOCK_OF_SCALES = 64, 256


def is_quantized(run: RunSpec, p: Parameter) -> bool:
    """Whether a parameter is the weight of a linear that bitsandbytes replaces."""
    if not run.transformers.quantized or len(p.shape) != 2:
        return False
    if p.use is Use.ROUTER:  # an ``nn.Linear`` before transformers 5, except DeepSeek's
        family = family_of(run.model.model_type, run.transformers)
        return family.moe != "deepseek" and not EXPERTS_IN_ONE_PARAMETER(run.transformers)
    return p.use is Use.LAYER


def weight_bytes(run: RunSpec, p: Parameter) -> int:
    """Bytes that a quantized weight takes in the allocator: its values, its scales, and their lookup tables."""
    n = p.numel
    if run.transformers.load_in_8bit:
        return _rounded(n) + _rounded(FP32 * p.shape[0])
    scales = -(-n // BLOCK_4BIT)
    packed, code = _rounded(-(-n // 2)), _rounded(16 * FP32)
    if not run.transformers.bnb_4bit_use_double_quant:
        return packed + code + _rounded(FP32 * scales)
    # One-byte scales, their fp32 scales with a table of 256 values, and the mean that was subtracted from them.
    of_scales = _rounded(scales) + _rounded(FP32 * -(-scales // BLOCK_OF_SCALES)) + _rounded(256 * FP32)
    return packed + code + of_scales + ALLOCATION_UNIT


def _rounded(nbytes: int) -> int:
    return pad(nbytes, ALLOCATION_UNIT)


def product(t: Torch, module: str, x: Array, rows: Any, in_features: Any, out_features: Any) -> Array:
    """[rows, in] -> [rows, out] in the input's dtype."""
    spec = t.hf.spec
    if spec.load_in_8bit:
        return _in_8_bits(t, module, x, rows, in_features, out_features)
    compute = DTYPE_BYTES[spec.bnb_4bit_compute_dtype]
    own = t.parameter_width_of_weights
    n = in_features * out_features
    scales = FP32 * n // BLOCK_4BIT if spec.bnb_4bit_use_double_quant else 0
    given = t.cast(f"{module} input, cast", x, compute)
    # Forward: the weight in the compute dtype, and its scales in fp32 before and after the mean is added. Backward
    # makes the weight in the dtype from which it was quantized, and casts it.
    again = n * compute if own == compute else largest(n * compute, n * (own + compute) - given.elements * compute)
    out = t.make(
        f"{module} output", (given,), rows * out_features, compute, workspace=n * compute + 2 * scales,
        backward_workspace=again,
    )
    done = t.cast(f"{module} output, cast", out, x.width)
    t.keep_alive(given)
    return done


def _in_8_bits(t: Torch, module: str, x: Array, rows: Any, in_features: Any, out_features: Any) -> Array:
    """Inputs are quantized to int8 by row; the product is int32, then fp16, then in the input's dtype; the input is
    saved. Backward makes the weight in the input's dtype."""
    entering, leaving = rows * in_features, rows * out_features
    # A copy in fp16, its absolute values, the mask of outliers, and the input in int8.
    looked_at = entering * (2 + 2 + 1 + 1) - leaving * x.width
    multiplied = entering + FP32 * rows + leaving * (4 + 2)
    return t.make(
        f"{module} output", (x,), leaving, x.width, saves=(x.tensor,), workspace=largest(looked_at, multiplied),
        backward_workspace=in_features * out_features * x.width,
    )
