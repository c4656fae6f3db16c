"""Transformer Engine's sources and the table of kernels (scripts/kernels.yaml): what its functions save, by name and
line; and what our replacements of its compiled functions allocate, by the shapes that its C++ has.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from installed import HERE
from scripts_of import load_script

from bridge_memory.rehearsal import patches
from bridge_memory.rehearsal.te_kernels import running, version
from bridge_memory.rehearsal.te_kernels.enums import ENUMS
from bridge_memory.rehearsal.te_kernels.kernels import Kernels

table: Any = load_script("kernels_table")
KERNELS: Any = Kernels()


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    spec = importlib.util.find_spec("transformer_engine")
    assert spec is not None and spec.submodule_search_locations
    folder: dict[str, Any] = table.scan(Path(spec.submodule_search_locations[0]) / "pytorch")
    return folder


def test_every_tensor_that_a_function_saves_is_in_the_table(found: dict[str, Any]) -> None:
    assert not table.not_in_the_table("te", found)


def test_lines_and_names_are_those_of_this_release(found: dict[str, Any]) -> None:
    known = table.scanned()["te"].get(version())
    if known is None:
        pytest.skip(f"the table has no lines of Transformer Engine {version()}")
    assert found == known


def test_every_replaced_function_has_a_row() -> None:
    named = [name for row in table.rows() if row.package == "csrc" for name in row.of]
    assert len(named) == len(set(named))
    assert set(named) == set(KERNELS.__all__) - set(ENUMS)


# ---- shapes that the C++ sources allocate ----

BF16, FP32, U8 = torch.bfloat16, torch.float32, torch.uint8
S, B, A, G, D, N, E = 64, 2, 8, 4, 32, 128, 8
#: From csrc/extensions/router.cpp of 2.13 on: at::kFloat; before, the dtype of the logits.
SCORES = FP32 if HERE is None or HERE >= (2, 13) else BF16


def meta(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Call(NamedTuple):
    """A call, and what its C++ source allocates: shapes and dtypes of new tensors, in the order of its results."""

    name: str
    args: tuple[Any, ...]
    results: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]
    named: dict[str, Any] = {}  # noqa: RUF012


X, LOGITS, WEIGHT = meta(S, B, A * D), meta(N, E), meta(A * D)
Q, KV = meta(S, B, A, D), meta(S, B, G, D)
SBHD, THD = (ENUMS["NVTE_QKV_Layout"][f"NVTE_{name}"] for name in ("SBHD_SBHD_SBHD", "THD_THD_THD"))
VANILLA, LEARNABLE = (ENUMS["NVTE_Softmax_Type"][f"NVTE_{name}_SOFTMAX"] for name in ("VANILLA", "LEARNABLE"))
DTYPE = ENUMS["DType"].kBFloat16
ROWS = ((S * B,), FP32)
CALLS = (
    Call("rmsnorm_fwd", (X, WEIGHT, 1e-5, None, None, DTYPE, 0, False), (((S, B, A * D), BF16), None, ROWS)),
    Call(
        "layernorm_fwd", (X, WEIGHT, WEIGHT, 1e-5, None, None, DTYPE, 0, False), (((S, B, A * D), BF16), ROWS, ROWS)
    ),
    Call("rmsnorm_bwd", (X, X, meta(S * B, dtype=FP32), WEIGHT, 0, False), (((S, B, A * D), BF16), ((A * D,), BF16))),
    Call(
        "layernorm_bwd", (X, X, ROWS, ROWS, WEIGHT, 0, False),
        (((S, B, A * D), BF16), ((A * D,), BF16), ((A * D,), BF16)),
    ),
    Call(
        "fused_attn_fwd", (SBHD, VANILLA, Q, KV, KV, BF16),
        (((S, B, A, D), BF16), ((B, A, S, 1), FP32), ((2,), torch.int64)),
    ),
    Call(
        "fused_attn_fwd", (THD, VANILLA, meta(S, A, D), meta(S, G, D), meta(S, G, D), BF16),
        (((S, A, D), BF16), ((S, A, 1), FP32), ((2,), torch.int64)),
    ),
    Call(  # values narrower than keys, as in multi-latent attention
        "fused_attn_fwd", (SBHD, VANILLA, Q, Q, meta(S, B, A, D // 2), BF16),
        (((S, B, A, D // 2), BF16), ((B, A, S, 1), FP32), ((2,), torch.int64)),
    ),
    Call(
        "fused_attn_bwd", (SBHD, VANILLA, Q, KV, KV, BF16),
        (((S, B, A, D), BF16), ((S, B, G, D), BF16), ((S, B, G, D), BF16), None, None),
    ),
    Call(
        "fused_attn_bwd", (SBHD, LEARNABLE, Q, KV, KV, BF16),
        (((S, B, A, D), BF16), ((S, B, G, D), BF16), ((S, B, G, D), BF16), None, ((1, A, 1, 1), FP32)),
    ),
    Call("fa_prepare_fwd", (meta(S, B, A, 3 * D)[..., :D],), (((3, B, S, A, D), BF16),)),
    Call("fa_prepare_bwd", (meta(B, S, A, D),) * 3, (((S, B, A, 3 * D), BF16),)),
    Call("fused_rope_forward", (Q,), (((S, B, A, D), BF16),)),
    Call(
        "fused_topk_with_score_function_fwd", (LOGITS,), (((N, E), BF16), ((N, E), torch.bool), ((N, E), SCORES))
    ),
    Call("fused_score_for_moe_aux_loss_fwd", (LOGITS,), (((N, E), SCORES), ((N, E), torch.bool), ((N, E), SCORES))),
    Call("fused_moe_aux_loss_fwd", (LOGITS,), (((), BF16), ((), FP32))),
    Call(
        "fused_moe_aux_loss_bwd", (), (((N, E), FP32),),
        {"num_rows": N, "num_cols": E, "grad_aux_loss": meta(dtype=FP32)},
    ),
    Call(
        "generic_gemm",
        (meta(96, D), True, X.view(S, B, A, D), False, None, None, BF16, None, BF16, False, None, False),
        (((S, B, A, 96), BF16), None, None, None),
    ),
    Call(  # a weight's gradient, and the bias's
        "generic_gemm", (meta(N, D), False, meta(N, 96), True, None, None, FP32, WEIGHT, BF16, False, None, True),
        (((96, D), FP32), ((96,), BF16), None, None),
    ),
    Call("thd_read_half_tensor", (meta(S, G, D), None, 0), (((S // 2, G, D), BF16),)),
    Call("thd_read_half_tensor", (meta(2, S, G, D), None, 0), (((2, S // 2, G, D), BF16),)),
    Call("thd_read_second_half_lse", (meta(A, S, dtype=FP32), None, True, S // 2), (((A, S // 2), FP32),)),
    Call("thd_read_second_half_lse", (meta(B, A, S, dtype=FP32), None, False, S // 2), (((B, A, S // 2), FP32),)),
    Call("fp8_transpose", (meta(N, D, dtype=U8), None), (((D, N), U8),)),
    Call("swap_first_dims", (meta(2, N, D),), (((N, 2, D), BF16),)),
    Call("scaled_softmax_forward", (meta(B, A, S, S), 1.0), (((B, A, S, S), BF16),)),
    Call("multi_tensor_l2norm", (1, None, [[X, X, X]], True), (((1,), FP32), ((3,), FP32))),
)


@pytest.mark.parametrize("call", CALLS, ids=[f"{i} {call.name}" for i, call in enumerate(CALLS)])
def test_a_replaced_function_allocates_what_the_source_does(call: Call) -> None:
    made = getattr(KERNELS, call.name)(*call.args, **call.named)
    made = (made,) if isinstance(made, torch.Tensor) else tuple(made)
    assert tuple(None if t is None else (tuple(t.shape), t.dtype) for t in made) == call.results


def test_the_mixed_projection_is_rotated_into_three_tensors() -> None:
    """``apply_rope.cpp: fused_qkv_rope_forward``: [s, b, g, (a / g + 2) d] as q [s, b, a, d], k and v [s, b, g, d]."""
    split = [A // G * D, D, D]
    made = KERNELS.fused_qkv_rope_forward(meta(S, B, G, sum(split)), None, None, None, split)
    assert [tuple(t.shape) for t in made] == [(S, B, A, D), (S, B, G, D), (S, B, G, D)]
    assert KERNELS.fused_qkv_rope_backward(*made, None, None, split).shape == (S, B, G, sum(split))


def test_the_gradient_of_the_softmax() -> None:
    """``softmax.cpp`` of 2.19 on: input_grads; before, "produce gradients in place"."""
    gradient = meta(B, A, S, S)
    made = KERNELS.scaled_masked_softmax_backward(gradient, gradient, 1.0)
    assert (made is gradient) == (HERE is not None and HERE < (2, 19))
    assert made.shape == gradient.shape


def parts(tensor: Any) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Buffers of a quantized tensor, by the constructor's names."""
    given = tensor.get_metadata().items()
    return {name: (tuple(t.shape), t.dtype) for name, t in given if isinstance(t, torch.Tensor)}


M, K = 96, 160
FORMAT = ENUMS["DType"].kFloat8E4M3
#: Recipe -> (quantizer's module, class, arguments, GPU, buffers by quantizer.cpp: data of one byte, in fp4 half a byte
#: an element; scales fp32 per tensor, fp32 [blocks, rows padded to 4] per 128, bytes per 32 or 16 padded to [128, 4]).
RECIPES: dict[str, tuple[str, str, dict[str, Any], str, dict[str, tuple[tuple[int, ...], torch.dtype]]]] = {
    "tensorwise": (
        "tensor.float8_tensor", "Float8CurrentScalingQuantizer", {"device": torch.device("meta")}, "hopper",
        {"data": ((M, K), U8), "data_transpose": ((K, M), U8), "fp8_scale_inv": ((1,), FP32)},
    ),
    "tensorwise, one layout": (
        "tensor.float8_tensor", "Float8CurrentScalingQuantizer", {"device": torch.device("meta")}, "blackwell",
        {"data": ((M, K), U8), "fp8_scale_inv": ((1,), FP32)},
    ),
    "blockwise": (
        "tensor.float8_blockwise_tensor", "Float8BlockQuantizer", {"block_scaling_dim": 1}, "hopper",
        {
            "rowwise_data": ((M, K), U8), "columnwise_data": ((K, M), U8),
            "rowwise_scale_inv": ((2, 96), FP32), "columnwise_scale_inv": ((1, 160), FP32),
        },
    ),
    "mxfp8": (
        "tensor.mxfp8_tensor", "MXFP8Quantizer", {}, "blackwell",
        {
            "rowwise_data": ((M, K), U8), "columnwise_data": ((M, K), U8),
            "rowwise_scale_inv": ((128, 8), U8), "columnwise_scale_inv": ((4, 256), U8),
        },
    ),
    "nvfp4": (
        "tensor.nvfp4_tensor", "NVFP4Quantizer", {}, "blackwell",
        {
            "rowwise_data": ((M, K // 2), U8), "columnwise_data": ((K, M // 2), U8),
            "rowwise_scale_inv": ((128, 12), U8), "columnwise_scale_inv": ((256, 8), U8),
            "amax_rowwise": ((1,), FP32), "amax_columnwise": ((1,), FP32),
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("recipe", RECIPES)
def test_buffers_of_a_quantized_tensor(recipe: str) -> None:
    module, name, more, arch, buffers = RECIPES[recipe]
    made = getattr(importlib.import_module(f"transformer_engine.pytorch.{module}"), name)
    with patches.running(), running(arch):
        kind = {} if name == "NVFP4Quantizer" else {"fp8_dtype": FORMAT}
        quantizer = made(**kind, rowwise=True, columnwise=True, **more)
        assert parts(KERNELS.quantize(meta(M, K), quantizer)) == buffers
