"""Dense feed-forward blocks of transformers' classes, unfused: gate, up, activated gate and product are saved.

Source: ``models/llama/modeling_llama.py: LlamaMLP``, ``models/phi3/modeling_phi3.py: Phi3MLP``.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.inventory.torch import compiled, liger
from bridge_memory.inventory.torch.ops import Array, Torch
from bridge_memory.spec import MLPSpec


def record_mlp(t: Torch, spec: MLPSpec, x: Array) -> Array:
    """[T, h] -> [T, h]."""
    h = t.r.ctx.hidden_size
    if t.hf.family.fused_gate_up:
        return joined_mlp(t, x, spec.ffn_hidden_size, bias=spec.add_bias)
    if not spec.gated:
        return plain_mlp(t, t.hf.family.mlp, x, spec.ffn_hidden_size, bias=spec.add_bias, activation=spec.activation)
    return gated_mlp(t, t.hf.family.mlp, x, t.r.ctx.tokens, h, spec.ffn_hidden_size, bias=spec.add_bias)


def gated_mlp(
    t: Torch, module: str, x: Array, rows: Any, width: Any, f: Any, *, bias: bool = False, expert: bool = False
) -> Array:
    """``LlamaMLP.forward``: down(act(gate(x)) up(x)) in one expression."""
    if t.compiled:
        return compiled.gated_mlp(t, module, x, rows, width, f, bias=bias)
    names = t.hf.family.linears if len(t.hf.family.linears) == 3 else ("gate_proj", "up_proj", "down_proj")
    gate = t.linear(f"{module}.{names[0]}", x, rows, width, f, bias=bias, expert=expert)
    fused = t.hf.liger(*liger.GATED)
    act = gate if fused else t.activation(f"{module} activation of the gate", gate)
    up = t.linear(f"{module}.{names[1]}", x, rows, width, f, bias=bias, expert=expert)
    product = liger.gated_product(t, f"{module} product", gate, up) if fused else t.mul(f"{module} product", act, up)
    down = t.linear(f"{module}.{names[2]}", product, rows, f, width, bias=bias, expert=expert)
    t.keep_alive(x)
    return down


def plain_mlp(
    t: Torch, module: str, x: Array, f: Any, *, bias: bool = False, expert: bool = False,
    activation: str = "squared_relu",
) -> Array:  # fmt: skip
    """``NemotronHMLP.forward``: down(relu(up(x)) squared); ``ApertusMLP.forward``: with xIELU."""
    rows, width = t.r.ctx.tokens, t.r.ctx.hidden_size
    up = t.linear(f"{module}.up_proj", x, rows, width, f, bias=bias, expert=expert)
    function = xielu if activation == "xielu" else relu_squared
    product = function(t, f"{module} activation", up)
    down = t.linear(f"{module}.down_proj", product, rows, f, width, bias=bias, expert=expert)
    t.keep_alive(x)
    return down


def relu_squared(t: Torch, name: str, x: Array) -> Array:
    """``activations.py: ReLUSquaredActivation``: relu, which saves its output, then the square, in fp32 under autocast.
    """
    relu = t.saves_output(f"{name}: relu", x)
    out = t.square(name, t.precise(f"{name}: relu in fp32", relu))
    t.keep_alive(relu)
    return out


def xielu(t: Torch, name: str, x: Array) -> Array:
    """``activations.py: XIELUActivation._xielu_python``: a p x^2 + b x above zero, (expm1(min(x, eps)) - x) a n + b x
    below, with trained a p and a n of one element. Without the wheel of CUDA-fused xIELU."""
    for parameter in ("alpha_p", "alpha_n"):
        t.r.parameter(f"mlp.act_fn.{parameter}", (1,))
    trains, width = t.trains("alpha_p"), t.parameter_width
    above, below = (t.make(f"{name}: {which}", (), 1, width, trains=trains) for which in ("alpha p", "alpha n"))
    beta = t.constant(f"{name}: beta", 1, x.width)  # a scalar, which widens nothing
    condition = t.constant(f"{name}: where positive", x.elements, 1)
    scaled = t.mul(f"{name}: alpha p x", x, above, broadcast=True)
    squared = t.mul(f"{name}: alpha p x x", scaled, x)
    positive = t.add(f"{name}: positive part", squared, t.mul(f"{name}: beta x", x, beta))
    # ``minimum`` saves x; backward makes two masks of one byte an element.
    least = t.make(f"{name}: min", (x,), x.elements, x.width, saves=(x.tensor,), backward_workspace=2 * x.elements)
    wide = t.precise(f"{name}: min in fp32", least)
    grown = t.make(f"{name}: expm1", (wide,), x.elements, wide.width, save_output=True, backward_workspace=wide.bytes)
    less = t.subtract(f"{name}: expm1 less x", grown, x)
    turned = t.mul(f"{name}: alpha n", less, below, broadcast=True)
    negative = t.add(f"{name}: negative part", turned, t.mul(f"{name}: beta x below", x, beta))
    out = t.make(f"{name} output", (positive, negative), x.elements, x.width, saves=(condition.tensor,))
    t.keep_alive(x, condition)
    return out


def joined_mlp(t: Torch, x: Array, f: Any, *, bias: bool = False) -> Array:
    """``Phi3MLP.forward``, ``GraniteMoeHybridMLP.forward``: gate and up are views of one output, which a variable
    holds; the first multiplies up by the activated gate, the second the other way round."""
    ctx, module = t.r.ctx, t.hf.family.mlp
    names = t.hf.family.linears if len(t.hf.family.linears) == 2 else ("gate_up_proj", "down_proj")
    h, rows = ctx.hidden_size, ctx.tokens
    both = t.linear(f"{module}.{names[0]}", x, rows, h, 2 * f, bias=bias)
    gate, up = t.split(f"{module} gate and up", both, rows * f, rows * f)
    if t.hf.liger(*liger.GATED):
        product = liger.gated_product(t, f"{module} product", gate, up, halves=True)
    elif module == "mlp":
        product = t.mul(f"{module} product", up, t.activation(f"{module} activation of the gate", gate))
    else:
        product = t.mul(f"{module} product", t.activation(f"{module} activation of the gate", gate), up)
    down = t.linear(f"{module}.{names[1]}", product, rows, f, h, bias=bias)
    t.keep_alive(x, both, product)
    return down
