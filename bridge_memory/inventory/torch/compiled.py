"""Layers as torch.compile runs them: what AOTAutograd saves for backward, and what its kernels allocate.

The min-cut partitioner chooses what is saved (torch ``_functorch/partitioners.py:
min_cut_rematerialization_partition``; the tests run it at full sizes). Operations other than matrix products are fused,
and the tensors from which they can be recomputed are saved. A norm saves its input and one number per row; the input of
the second norm replaces the output of the attention's projection, which is recomputed from it. Rotary embedding and
copies of keys and values save nothing. The gated product is saved as the input of the down projection, in addition to
gate and up.

Not modelled: buffers between kernels that Inductor could not fuse, such as partial sums of the norms' weight gradients,
and its reuse of buffers that are no longer needed. Both are small compared with a product's output.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.torch.ops import FP32, Array, Torch
from bridge_memory.tapes.tape import Tensor


def rotated(t: Torch, query: Array, key: Array) -> tuple[Array, Array]:
    """One kernel for each; the model makes the tables. Inductor does not generate code for complex numbers
    (``_inductor/lowering.py: warn_complex``): torch makes fp32 copies and their products, and the layer saves the
    conjugate of the table."""
    if t.hf.family.rotary != "complex":
        return _rotated_by_kernel(t, "query", query), _rotated_by_kernel(t, "key", key)
    conjugate = t.constant("conjugate of the rotary table", t.r.ctx.seq * t.r.ctx.rotary_dim, FP32)
    kept = (conjugate.tensor,)
    return _rotated_by_kernel(t, "query", query, kept, 2 * FP32), _rotated_by_kernel(t, "key", key, kept, 2 * FP32)


def _rotated_by_kernel(t: Torch, name: str, x: Array, kept: tuple[Tensor, ...] = (), scratch: int = 0) -> Array:
    """``scratch``: bytes per element, in both passes."""
    nbytes = scratch * x.elements
    return t.make(
        f"rotated {name}", (x,), x.elements, x.width, saves=kept if x.differentiable else (), workspace=nbytes,
        backward_workspace=nbytes,
    )


def gated_mlp(t: Torch, module: str, x: Array, rows: Any, width: Any, f: Any, *, bias: bool) -> Array:
    """``down(act(gate(x)) up(x))``."""
    gate = t.linear(f"{module}.gate_proj", x, rows, width, f, bias=bias)
    up = t.linear(f"{module}.up_proj", x, rows, width, f, bias=bias)
    product = t.make(
        f"{module} product", (gate, up), gate.elements, gate.width, saves=(gate.tensor, up.tensor),
    )
    return t.linear(f"{module}.down_proj", product, rows, f, width, bias=bias)
