"""Layers as torch.compile runs them: what AOTAutograd keeps for backward, and what its kernels make.

What is kept is the min-cut partitioner's choice (torch ``_functorch/partitioners.py:
min_cut_rematerialization_partition``), which the tests ask it for at full sizes: operations beside matrix products are
fused, what they can be recomputed from is kept. A norm keeps its input and one number a row (the input to the second
norm stands for the attention's projection, from which it is made again); rotary embedding and the copies of keys and
values keep nothing of their own; the gated product is kept as the down projection's input, beside gate and up.

Not known here: buffers that Inductor makes between kernels that it could not fuse, such as partial sums of the norms'
weights, and what it writes over buffers that are of no more use. Both are small beside a product's output.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.torch.ops import FP32, Array, Torch
from bridge_memory.tapes.tape import Tensor


def rotated(t: Torch, query: Array, key: Array) -> tuple[Array, Array]:
    """One kernel each; tables are the model's. Complex numbers Inductor leaves to torch (``_inductor/lowering.py:
    warn_complex``): fp32 copies and products of them are made, and the layer keeps the conjugate of the table."""
    if t.hf.family.rotary != "complex":
        return _turned(t, "query", query), _turned(t, "key", key)
    conjugate = t.constant("conjugate of the rotary table", t.r.ctx.seq * t.r.ctx.rotary_dim, FP32)
    kept = (conjugate.tensor,)
    return _turned(t, "query", query, kept, 2 * FP32), _turned(t, "key", key, kept, 2 * FP32)


def _turned(t: Torch, name: str, x: Array, kept: tuple[Tensor, ...] = (), scratch: int = 0) -> Array:
    """``scratch``: bytes an element, in both passes."""
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
