"""torch's operations on a tape: what each allocates, saves for backward, and allocates in backward.

Source: torch ``tools/autograd/derivatives.yaml`` and ``torch/csrc/autograd/FunctionsManual.cpp``; temporaries of the
C++ expressions of a backward formula are alive until it returns. Sizes are bytes; an ``Array`` has its number of
elements and their width. A view (``view``, ``transpose``, ``expand``) is the same array: its gradient is a view too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from bridge_memory.inventory.torch import quantized
from bridge_memory.spec import DTYPE_BYTES
from bridge_memory.spec.adapters import in_any_layer, is_target
from bridge_memory.tapes.context import TorchLayers
from bridge_memory.tapes.parameters import Use
from bridge_memory.tapes.recorder import Recorder
from bridge_memory.tapes.tape import Tensor

FP32 = 4


class Array(NamedTuple):
    """A tensor of torch: its storage on the tape, its number of elements, and bytes per element."""

    tensor: Tensor
    elements: Any
    width: int

    @property
    def bytes(self) -> Any:
        return self.elements * self.width

    @property
    def differentiable(self) -> bool:
        """``requires_grad``."""
        return self.tensor.has_gradient


def _where(*kept: tuple[Array, bool]) -> tuple[Tensor, ...]:
    return tuple(dict.fromkeys(array.tensor for array, keep in kept if keep))


def _gradient(of: Array, nbytes: Any) -> Any:
    """Bytes of a gradient: none if no gradient flows to the array."""
    return nbytes if of.differentiable else 0


class Torch:
    """Operations for the recorder of one block."""

    def __init__(self, r: Recorder, layers: TorchLayers | None = None) -> None:
        """``layers``: how transformers runs the block, where the run's layers are Megatron's."""
        self.r = r
        self.tape = r.tape
        found = r.ctx.torch_layers if layers is None else layers
        assert found is not None
        self.hf = found
        #: Bytes per element of parameters, and of outputs of linears.
        self.parameter_width = r.ctx.act
        self.compute_width = self.hf.compute_width
        #: Whether this block is compiled: layers, and the final norm if the whole model is compiled.
        self.compiled = self.hf.compiled
        #: The last operation that saves anything: a non-reentrant checkpoint stops its recomputation there.
        self.last_saver = ""
        #: Variables that live until the layer returns: what attention returns in addition to its output.
        self.returned: list[Array] = []
        #: Variables that live until the recorded function returns.
        self.variables: list[Array] = []
        self._products = 0
        self._cast_weights: dict[tuple[str, int], Array] = {}

    # ---- arrays ----

    def input(self, name: str, elements: Any, width: int, *, grad: bool = True, counted: bool = True) -> Array:
        """An argument of the block; not ``counted`` if another block, or the batch, counts it."""
        nbytes = elements * width
        t = self.tape.input(name, nbytes if counted else 0, requires_grad=grad)
        t.grad_bytes = nbytes if grad else 0
        return Array(t, elements, width)

    def make(
        self, name: str, inputs: Sequence[Array], elements: Any, width: int, *, saves: Sequence[Tensor] = (),
        save_output: bool = False, workspace: Any = 0, backward_workspace: Any = 0, alias: bool = False,
        also: Sequence[Tensor] = (), grad: bool | None = None, trains: bool = False, in_place: int = 0,
    ) -> Array:  # fmt: skip
        """One operation. Its output is differentiable if an input is, or if it has a weight that ``trains``.
        ``in_place``: how many of the tensors that it saves are overwritten by gradients of its inputs."""
        differentiable = (trains or any(a.differentiable for a in inputs)) if grad is None else grad
        if self.last_saver == name:
            self.tape.landmark(f"{name}, the last to keep anything")
        out = self.tape.tensor(name, elements * width, grad=differentiable)
        kept = (*saves, out) if save_output else tuple(saves)
        self.tape.op(
            name, [a.tensor for a in inputs], (out, *also), saves=kept if differentiable else (), workspace=workspace,
            backward_workspace=backward_workspace, alias=alias, trains=trains,
            in_place=in_place if differentiable else 0,
        )
        return Array(out, elements, width)

    def keep_alive(self, *arrays: Array | None) -> None:
        """Variables still hold these arrays at this point."""
        self.tape.keep_alive(*(a.tensor for a in arrays if a is not None))

    def precise(self, name: str, x: Array) -> Array:
        """The input of an operation that autocast runs in fp32 (``aten/src/ATen/autocast_mode.h: AT_FORALL_FP32``)."""
        return self.cast(name, x, FP32) if self.hf.autocast else x

    def constant(self, name: str, elements: Any, width: int) -> Array:
        """A new tensor without a gradient."""
        return self.make(name, (), elements, width, grad=False)

    # ---- elementwise ----

    def cast(self, name: str, x: Array, width: int) -> Array:
        """``x.to(dtype)``: x itself if it has that width already."""
        return x if x.width == width else self.make(name, (x,), x.elements, width)

    def widened(self, x: Array, width: int) -> Array:
        """An operand that a kernel converts to a wider dtype as it reads; its gradient is cast back in a new tensor."""
        if x.width == width:
            return x
        view = self.tape.tensor(f"{x.tensor.name}, as it is read", 0, grad_bytes=_gradient(x, x.elements * width))
        view.whole = x.tensor.whole or x.tensor
        self.tape.op(f"{x.tensor.name}: gradient in its own dtype", x.tensor, view)
        return Array(view, x.elements, width)

    def _narrowed(self, x: Array, width: int) -> Any:
        """Bytes of a widened operand's gradient in the operand's dtype, made while the wide gradients are alive
        (``validate_outputs``)."""
        return x.bytes if x.differentiable and x.width != width else 0

    def add(self, name: str, a: Array, b: Array) -> Array:
        """a + b. Saves nothing; the gradient of each is the output's gradient."""
        width = max(a.width, b.width)
        a, b = self.widened(a, width), self.widened(b, width)
        return self.make(name, (a, b), a.elements, width, alias=True)

    def subtract(self, name: str, a: Array, b: Array, *, broadcast: bool = False) -> Array:
        """a - b. Saves nothing; the gradient of b is the output's gradient negated. If b is ``broadcast`` that has the
        output's size before it is summed."""
        view = self.tape.tensor(f"{b.tensor.name}, taken off", 0, grad_bytes=_gradient(b, a.bytes))
        view.whole = b.tensor.whole or b.tensor
        spread = a.bytes if broadcast and b.differentiable else 0
        self.tape.op(f"{name}: gradient negated", b.tensor, view, backward_workspace=spread)
        return self.make(name, (a, Array(view, a.elements, a.width)), a.elements, max(a.width, b.width), alias=True)

    def scale(self, name: str, x: Array) -> Array:
        """x times a Python number: saves nothing."""
        return self.make(name, (x,), x.elements, x.width)

    def mul(self, name: str, a: Array, b: Array, *, broadcast: bool = False, sole: bool = False) -> Array:
        """a * b. Saves each factor for the other's gradient. If b is ``broadcast``, its gradient first has the
        product's size (``torch/csrc/autograd/engine.cpp: validate_outputs`` sums it afterwards). ``sole``: nothing else
        saves a; if a non-reentrant checkpoint recomputed it, it is freed before gradients are cast back
        (``torch/utils/checkpoint.py: _checkpoint_hook``)."""
        elements, width = a.elements, max(a.width, b.width)
        freed = sole and self.hf.spec.gradient_checkpointing and not self.hf.spec.reentrant
        narrowed = (0 if freed else self._narrowed(a, width)) + self._narrowed(b, width)
        a, b = self.widened(a, width), self.widened(b, width)
        whole = elements * width
        return self.make(
            name, (a, b), elements, width, saves=_where((a, b.differentiable), (b, a.differentiable)),
            backward_workspace=narrowed + (whole - b.bytes if broadcast and b.differentiable else 0),
        )

    def mul_spread(self, name: str, a: Array, b: Array, elements: Any) -> Array:
        """A product that broadcasts both factors: their gradients first have the product's size, and both are alive
        while the first is summed. A factor ``a`` that a non-reentrant checkpoint recomputed is freed by then (as in
        ``mul``).
        """
        width = max(a.width, b.width)
        freed = a.bytes if self.hf.spec.gradient_checkpointing and not self.hf.spec.reentrant else 0
        return self.make(
            name, (a, b), elements, width, saves=_where((a, b.differentiable), (b, a.differentiable)),
            backward_workspace=2 * elements * width - b.bytes - freed,
        )

    def mul_weight(
        self, name: str, x: Array, weight: str, *, width: int | None = None, also_keeps: tuple[Tensor, ...] = (),
    ) -> Array:  # fmt: skip
        """x times a parameter with one value per feature, whose gradient first has the product's size. ``width``: bytes
        per element of the parameter when it is multiplied."""
        weight_width = self.parameter_width if width is None else width
        out_width = max(x.width, weight_width)
        narrowed = self._narrowed(x, out_width)
        x = self.widened(x, out_width)
        trains = self.trains(weight)
        nbytes = x.elements * out_width
        return self.make(
            name, (x,), x.elements, out_width, saves=(x.tensor, *also_keeps) if trains else also_keeps,
            trains=trains, backward_workspace=narrowed + (nbytes if trains else 0),
        )

    def square(self, name: str, x: Array) -> Array:
        """``x.pow(2)`` saves x; backward makes x to the first power and twice that (``FunctionsManual.cpp:
        pow_backward``)."""
        return self.make(name, (x,), x.elements, x.width, saves=(x.tensor,), backward_workspace=2 * x.bytes)

    def mean(self, name: str, x: Array, rows: Any) -> Array:
        """Over the last dimension, with keepdim: one element per row."""
        return self.make(name, (x,), rows, x.width)

    def rsqrt(self, name: str, x: Array) -> Array:
        return self.make(name, (x,), x.elements, x.width, save_output=True, backward_workspace=2 * x.bytes)

    def activation(self, name: str, x: Array) -> Array:
        """One kernel that saves its input (silu, gelu)."""
        return self.make(name, (x,), x.elements, x.width, saves=(x.tensor,))

    def saves_output(self, name: str, x: Array) -> Array:
        """One kernel that saves its output (tanh, sigmoid, softmax, exp, relu)."""
        return self.make(name, (x,), x.elements, x.width, save_output=True)

    def summed(self, name: str, x: Array, rows: Any) -> Array:
        """``sum`` over a dimension: x's gradient is an expanded view of the sum's gradient."""
        if x.differentiable:
            x.tensor.grad_bytes = rows * x.width
        return self.make(name, (x,), rows, x.width, alias=True)

    def spread(self, name: str, x: Array, elements: Any) -> Array:
        """x, which the next operation broadcasts: its gradient first has the result's size, then is summed."""
        view = self.tape.tensor(name, 0, grad_bytes=_gradient(x, elements * x.width))
        view.whole = x.tensor.whole or x.tensor
        self.tape.op(name, x.tensor, view)
        return Array(view, elements, x.width)

    def cumulated(self, name: str, x: Array) -> Array:
        """``cumsum``: backward flips the gradient, sums it up and flips it back (``FunctionsManual.cpp:
        cumsum_backward``)."""
        return self.make(name, (x,), x.elements, x.width, backward_workspace=x.bytes)

    def repeat(self, name: str, x: Array, times: int) -> Array:
        """``repeat_interleave``: a copy of an expanded view."""
        return self.make(name, (x,), x.elements * times, x.width)

    def in_place(self, name: str, x: Array) -> Array:
        """An operation in place on x, whose gradient is a new tensor."""
        view = self.tape.tensor(name, 0, grad_bytes=_gradient(x, x.bytes))
        view.whole = x.tensor.whole or x.tensor
        self.tape.op(name, x.tensor, view)
        return Array(view, x.elements, x.width)

    def written(self, name: str, whole: Array, part: Array) -> Array:
        """``whole[...] = part``: backward copies the gradient of the whole and that of the part, and writes zeros in
        the place of the part (``torch/csrc/autograd/functions/tensor.cpp: CopySlices::apply``)."""
        view = self.tape.tensor(name, 0, grad_bytes=_gradient(part, whole.bytes))
        view.whole = whole.tensor.whole or whole.tensor
        copied = 0 if whole.differentiable else whole.bytes
        self.tape.op(name, (whole.tensor, part.tensor), view, backward_workspace=part.bytes + copied)
        return Array(view, whole.elements, whole.width)

    def scaled_product(self, name: str, a: Array, b: Array, elements: Any, inner: int) -> Array:
        """``a @ b`` in batches. Each factor is saved for the other's gradient; under autocast both are cast first."""
        if self.hf.autocast:
            a, b = (self.cast(f"{name}: {x.tensor.name}, cast", x, self.compute_width) for x in (a, b))
        return self.matmul(name, a, b, elements)

    def slice(self, name: str, x: Array, elements: Any) -> Array:
        """A slice of ``x``: its gradient is copied into zeros of the size of x."""
        view = self.tape.tensor(name, 0, grad_bytes=_gradient(x, elements * x.width))
        view.whole = x.tensor.whole or x.tensor
        self.tape.op(name, x.tensor, view)
        return Array(view, elements, x.width)

    def split(self, name: str, x: Array, *parts: Any) -> tuple[Array, ...]:
        """``split`` or ``chunk``: views, whose gradients are concatenated in one tensor."""
        views = self.tape.views(
            name, x.tensor, *((f"{name} {i}", _gradient(x, n * x.width)) for i, n in enumerate(parts))
        )
        return tuple(Array(view, n, x.width) for view, n in zip(views, parts, strict=True))

    def cat(self, name: str, *parts: Array) -> Array:
        """``cat``: a copy, whose gradients are views of the output's gradient."""
        elements: Any = 0
        for part in parts:
            elements = elements + part.elements
        return self.make(name, parts, elements, max(p.width for p in parts), alias=True)

    def copy(self, name: str, x: Array, times: Any = 1) -> Array:
        """``contiguous`` or ``reshape`` where strides require a copy. ``times``: how often the array is expanded."""
        return self.make(name, (x,), x.elements * times, x.width)

    def dropout(self, name: str, x: Array, p: float) -> Array:
        """x itself at p = 0 (``aten/src/ATen/native/Dropout.cpp``); else saves a mask of one byte per element."""
        if not p:
            return x
        mask = self.tape.tensor(f"{name} mask", x.elements, grad=False)
        return self.make(name, (x,), x.elements, x.width, saves=(mask,), also=(mask,))

    # ---- products ----

    def trains(self, weight: str) -> bool:
        """Whether a weight has a gradient."""
        return not self.r.frozen

    def linear(
        self, module: str, x: Array, rows: Any, in_features: Any, out_features: Any, *, bias: bool = False,
        expert: bool = False, use: Use = Use.LAYER, declare: bool = True, label: str | None = None, number: int = 0,
        transposed: bool = False,
    ) -> Array:  # fmt: skip
        """``nn.Linear``: [rows, in] -> [rows, out]; saves its input for the weight's gradient. ``number``: which of
        several modules with this name. ``transposed``: a ``Conv1D`` (``pytorch_utils.py``), whose weight is [in, out].
        """
        r = self.r
        if declare:
            shape = (in_features, out_features) if transposed else (out_features, in_features)
            r.parameter(f"{module}.weight", shape, expert=expert, use=use)
            if bias:
                r.parameter(f"{module}.bias", (out_features,), expert=expert)
        before = x
        if self.quantizes(use):
            out = quantized.product(self, module, x, rows, in_features, out_features)
            return self._adapted(module, x, out, rows, in_features, out_features) if self.adapts(module) else out
        x, weight = self.cast_operands(f"{module}.weight", x, in_features * out_features, number)
        trains = self.trains(f"{module}.weight")
        inputs = (x,) if weight is None else (x, weight)
        own = in_features * out_features * self.parameter_width if trains and weight is None else 0
        if trains and weight is None and self.hf.gradients_stay:
            inputs, own = (x, self.waiting(f"{module}.weight", in_features * out_features)), 0
        saved = [x.tensor] if trains else []
        if weight is not None and x.differentiable:
            saved.append(weight.tensor)
        out = self.make(
            label or f"{module} output", inputs, rows * out_features, self.compute_width, saves=saved,
            backward_workspace=own, trains=trains,
        )
        # torchtitan's selective checkpointing of operations saves every second matrix product, the first included.
        self._products += 1
        if self._products % 2:
            self.tape.kept_by_checkpoint.append(out.tensor)
        if self.r.frozen and self.adapts(module):
            return self._adapted(module, before, out, rows, in_features, out_features)
        return out

    def quantizes(self, use: Use) -> bool:
        """Whether a linear's weight is in 4 or 8 bits (``quantized.is_quantized``)."""
        return self.hf.spec.quantized and (use is Use.LAYER or (use is Use.ROUTER and not self.hf.fused_experts))

    @property
    def parameter_width_of_weights(self) -> int:
        """Bytes per element of a weight before it was quantized."""
        return DTYPE_BYTES[self.r.ctx.params_dtype]

    def adapts(self, module: str) -> bool:
        """Whether a linear has a LoRA adapter."""
        adapters = self.r.ctx.adapters
        name = f"model.layers.0.{module}"
        return adapters is not None and is_target(in_any_layer(adapters), module.rpartition(".")[2], name)

    def _adapted(self, module: str, x: Array, base: Array, rows: Any, in_features: Any, out_features: Any) -> Array:
        """A linear's output with that of its LoRA adapter, which is in fp32 unless ``autocast_adapter_dtype`` is off:
        its input is cast, and its output and the sum are in fp32 too (peft ``tuners/lora/layer.py: Linear.forward``,
        ``tuners/tuners_utils.py: cast_adapter_dtype``)."""
        rank, spec = self.r.rank, self.hf.spec
        width = self.hf.adapter_width
        if spec.load_in_4bit:  # ``tuners/lora/bnb.py: Linear4bit.forward``: ``result.clone()``
            base = self.copy(f"{module} output, cloned", base)
        given, x = x, x if spec.quantized and spec.autocast else self.cast(f"{module} LoRA input", x, width)
        entering = self.dropout(f"{module} LoRA dropout", x, spec.lora_dropout)
        if self.r.ctx.adapters is not None and self.r.ctx.adapters.use_dora:
            return self._with_magnitudes(module, given, entering, base, rows, in_features, out_features)
        low = self._adapter(f"{module}.lora_A", entering, rows, in_features, rank, width)
        wide = self._adapter(f"{module}.lora_B", low, rows, rank, out_features, width)
        self.keep_alive(low)
        scaled = self.scale(f"{module} LoRA output, scaled", wide)
        if spec.quantized:
            narrow = self.cast(f"{module} LoRA output in the base's dtype", scaled, base.width)
            out = self.add(f"{module} output with LoRA", base, narrow)
            self.keep_alive(given, x, base, narrow)
            return out
        summed = self.add(f"{module} output + LoRA", base, scaled)
        self.keep_alive(base, scaled)
        out = self.cast(f"{module} output with LoRA", summed, base.width)
        self.keep_alive(given, x, summed)
        return out

    def _with_magnitudes(
        self, module: str, given: Array, x: Array, base: Array, rows: Any, in_features: Any, out_features: Any
    ) -> Array:
        """DoRA: (m / n - 1) base + m / n (LoRA's output), with trained magnitudes m and the row norms n of weight plus
        adapter. For the norms, weight and adapter product are made unsharded in the adapter's dtype, the product from
        an identity matrix of the input's features. With dropout the base output is computed again, from that copy of
        the weight, which is saved (peft ``tuners/lora/dora.py: DoraLinearLayer.forward``, ``variants.py:
        DoraLinearVariant.forward``)."""
        rank, spec, width = self.r.rank, self.hf.spec, self.hf.adapter_width
        n = in_features * out_features
        identity = self.constant(f"{module} DoRA identity", in_features * in_features, width)
        low = self.constant(f"{module} DoRA identity by lora_A", in_features * rank, width)
        whole = self.constant(f"{module} DoRA weight of the adapter", n, width)
        own = self.parameter_width_of_weights if spec.load_in_4bit else FP32 if spec.quantized else self.parameter_width
        made = self.constant(f"{module} DoRA weight, dequantised", n, own) if spec.quantized else None
        weight = made
        if own != width:
            weight = self.make(f"{module} DoRA weight", () if made is None else (made,), n, width, grad=False)
        scaled = self.make(f"{module} DoRA weight of the adapter, scaled", (whole,), n, width, grad=False)
        summed = self.make(f"{module} DoRA weight and adapter", (scaled,), n, width, grad=False)
        norms = self.make(f"{module} DoRA norms", (summed,), out_features, width, grad=False)
        scale = self.make(
            f"{module} magnitudes over norms", (), out_features, width, saves=(norms.tensor,), trains=True
        )
        entering = x
        down = self._adapter(f"{module}.lora_A", entering, rows, in_features, rank, width)
        wide = self._adapter(f"{module}.lora_B", down, rows, rank, out_features, width)
        self.keep_alive(down)
        result = base
        if spec.lora_dropout:
            kept = () if weight is None or not entering.differentiable else (weight.tensor,)
            result = self.make(f"{module} DoRA base output", (entering,), rows * out_features, width, saves=kept)
        less = self.scale(f"{module} magnitudes over norms, less one", scale)
        straight = self.mul(f"{module} output times magnitudes", result, less, broadcast=True)
        turned = self.mul(f"{module} LoRA output times magnitudes", wide, scale, broadcast=True)
        added = self.scale(f"{module} LoRA output, scaled", turned)
        dora = self.add(f"{module} DoRA", straight, added)
        self.keep_alive(identity, low, whole, weight, norms, scale, wide, result)
        out = self.add(f"{module} output + DoRA", base, dora)
        self.keep_alive(base, entering)
        done = self.cast(f"{module} output with DoRA", out, base.width)
        self.keep_alive(given, x, out)
        return done

    def _adapter(self, module: str, x: Array, rows: Any, in_features: Any, out_features: Any, width: int) -> Array:
        """One of an adapter's two linears."""
        own = in_features * out_features
        if not self.hf.autocast:
            return self.make(
                f"{module} output", (x,), rows * out_features, width, saves=(x.tensor,), trains=True,
                backward_workspace=own * width,
            )
        x = self.cast(f"{module} input, cast", x, self.compute_width)
        weight = self.make(f"{module} in the compute dtype", (), own, self.compute_width, trains=True)
        return self.make(
            f"{module} output", (x, weight), rows * out_features, self.compute_width, trains=True,
            saves=(x.tensor, *((weight.tensor,) if x.differentiable else ())),
        )

    def waiting(self, weight: str, elements: Any) -> Array:
        """A parameter whose gradient stays until the block's backward pass is over, as that of an input does."""
        parameter = self.tape.input(weight, 0)
        parameter.grad_bytes = elements * self.parameter_width
        return Array(parameter, elements, self.parameter_width)

    def cast_operands(self, weight: str, x: Array, elements: Any, number: int = 0) -> tuple[Array, Array | None]:
        """(the input, None), or under autocast (the input, the weight), both in the compute dtype."""
        if not self.hf.autocast:
            return x, None
        x = self.cast(f"{weight.rpartition('.')[0]} input, cast", x, self.compute_width)
        return x, self.cast_weight(weight, elements, number)

    def cast_weight(self, weight: str, elements: Any, number: int = 0) -> Array:
        """A parameter's copy in the compute dtype, made once in an autocast region (``aten/src/ATen/autocast_mode.cpp:
        cached_cast``); its gradient is cast back to the parameter's dtype."""
        known = self._cast_weights.get((weight, number))
        if known is None:
            trains = self.trains(weight)
            if trains and self.hf.gradients_stay:
                parameter = self.waiting(weight, elements)
            else:
                view = self.tape.tensor(weight, 0, grad_bytes=elements * self.parameter_width * trains)
                self.tape.op(f"{weight} in the compute dtype", (), view, trains=trains)
                parameter = Array(view, elements, self.parameter_width)
            known = self._cast_weights[weight, number] = self.make(
                f"{weight} in the compute dtype", (parameter,), elements, self.compute_width, trains=trains,
            )
        return known

    def keep_cast_weights(self) -> None:
        """Weights' copies stay until the end of the autocast region, and so of the block."""
        self.keep_alive(*self._cast_weights.values())

    def matmul(self, name: str, a: Array, b: Array, elements: Any) -> Array:
        """``bmm`` of two arrays: each is saved for the other's gradient."""
        return self.make(
            name, (a, b), elements, max(a.width, b.width), saves=_where((a, b.differentiable), (b, a.differentiable)),
        )
