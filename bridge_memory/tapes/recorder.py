"""The recorder: a block describes its modules once, and the recorder makes both its parameters and its tape.

The module-level operations that blocks are made of (norm, column- and row-parallel linear, bias-dropout-add) are here,
for Transformer Engine and for megatron-core's local implementation.

Shapes in bytes: Tensor = tokens on this rank (s b), T_sp = T / t under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any

from bridge_memory.releases import (
    DUMMY_WEIGHT_GRADIENTS_KEPT,
    OWN_LINEARS_USE_DUMMY_WEIGHT_GRADIENTS,
    PROJ_KEEPS_ORIGINAL,
    RECOMPUTED_IN_PLACE,
)
from bridge_memory.spec.adapters import in_any_layer, is_target
from bridge_memory.tapes import frozen
from bridge_memory.tapes.context import BlockContext
from bridge_memory.tapes.parameters import Parameter, Repeated, Use
from bridge_memory.tapes.tape import Delayed, Tape, Tensor


class Scratch(str, Enum):
    """Persistent scratch buffers that blocks need. The process keeps one of each kind (and shape), of the largest
    request."""

    MPU = "global memory buffer (mpu)"
    CAUSAL_MASK = "causal mask"
    #: One a weight shape.
    WEIGHT_GRADIENT = "dummy weight gradients, one per weight shape"


class Recorder:
    """Collects one block: ``ctx`` has the local sizes, ``tape`` the allocations."""

    def __init__(self, ctx: BlockContext) -> None:
        self.ctx = ctx
        #: Whether no weight but those of adapters has a gradient.
        self.frozen = ctx.adapters is not None
        self.tape = Tape(
            refills=not RECOMPUTED_IN_PLACE(ctx.impl), frozen=self.frozen, item=ctx.act,
            least_offloaded=ctx.impl.min_offloaded_tensor_size,
        )
        #: Parameters in order; those of experts once, with the number of experts.
        self.rows: list[Repeated] = []
        #: Requests for persistent scratch: (kind, shape, bytes).
        self.persistent: list[tuple[Scratch, tuple[Any, ...], Any]] = []
        #: Whether its forward pass may run without gradients, as the first one of a recomputed layer does.
        self.without_gradients = False
        #: Whether linears stay in the dtype of the parameters where others compute in fp8 (``LayerSpec.unquantized``).
        self.unquantized = False
        #: Whether streams of hyper-connections and norms lose their storage between the chunk's passes.
        self.discards_streams = False
        #: Whether norms are written in torch (``torch_norm``).
        self.torch_norms = False
        self._repeated: list[Parameter] | None = None
        self._variables: list[Tensor] = []

    def discard_streams(self, *tensors: Tensor) -> None:
        """Tensors that recompute_modules (mhc) recomputes for the whole chunk, if it does."""
        if self.discards_streams:
            self.tape.discard_between_passes(*tensors)

    # ---- parameters and persistent buffers ----

    def parameter(
        self, name: str, shape: tuple[Any, ...], *, expert: bool = False, sharded: bool = False, use: Use = Use.LAYER,
        trains: bool | None = None,
    ) -> None:  # fmt: skip
        """One parameter of this rank: its name in ``named_parameters``, relative to the block, and its local shape."""
        if self.unquantized and use is Use.LAYER:
            use = Use.UNQUANTIZED
        parameter = Parameter(name, shape, expert, sharded, use, trains)
        if self._repeated is not None:
            self._repeated.append(parameter)
        else:
            self.rows.append(Repeated((parameter,)))

    @contextmanager
    def repeated(self, count: Any) -> Iterator[None]:
        """The parameters named inside exist ``count`` times, numbered at ``EXPERT_NUMBER`` in their names."""
        self._repeated = []
        try:
            yield
        finally:
            self.rows.append(Repeated(tuple(self._repeated), count))
            self._repeated = None

    @contextmanager
    def within(self, prefix: str) -> Iterator[None]:
        """The parameters named inside belong to a submodule."""
        first = len(self.rows)
        yield
        self.rows[first:] = [
            Repeated(tuple(p.under(prefix) for p in parameters), count) for parameters, count in self.rows[first:]
        ]

    def arrange(self, first: int, *modules: str) -> None:
        """Sort parameters from the ``first`` row on by the order in which the real module registers its ``modules``.

        DDP fills its buffers in this order, not in that in which modules run. Parameters of other modules come first.
        """

        def place(row: Repeated) -> int:
            name = row.parameters[0].name
            return next((i for i, m in enumerate(modules) if name.startswith(f"{m}.")), -1)

        self.rows[first:] = sorted(self.rows[first:], key=place)

    def keep(self, kind: Scratch, nbytes: Any, shape: tuple[Any, ...] = ()) -> None:
        """A buffer that the process keeps."""
        self.persistent.append((kind, shape, nbytes))

    def hold(self, tensor: Tensor) -> Tensor:
        """A variable of the layer's forward function keeps the tensor alive until the next residual sum is made."""
        self._variables.append(tensor)
        return tensor

    def offload(self, module: str) -> AbstractContextManager[None]:
        """Fine-grained offloading of tensors saved inside, if ``offload_modules`` names ``module``. A trace is of all
        modules; ``Structure.offloading`` asks which."""
        return self.tape.offload(bool(self.ctx.impl.offload_modules), module)

    def delays(self, node: str) -> AbstractContextManager[None]:
        """With ``delay_wgrad_compute``, weight gradients of operations inside are made when all inside has run
        backward; if nested, when all inside of the outer one has.

        Source: megatron-core ``models/common/model_chunk_schedule_plan.py: TransformerLayerSchedulePlan.run``: weight
        gradients of experts or the MLP are made when that node has run backward, those before it when attention has.
        """
        enabled = self.ctx.impl.delay_wgrad_compute and self.ctx.te
        return self.tape.delays(node, enabled=enabled and not self.tape.delaying)

    def delayed(
        self, inputs: tuple[Tensor, ...], outputs: Any, weight: Any, *, gathered: Any = 0, gradient: Any = 0
    ) -> Delayed:
        """What Transformer Engine's linear puts into its store (``module/linear.py``: ``wgrad_store.put``).

        Of its input: the saved tensors (``inputs``), or ``gathered`` bytes that backward gathered or requantized. Of
        the gradient of its output, which has ``outputs`` elements: the gradient as it arrived, or quantized, or
        gathered (``gradient`` bytes). ``weight``: bytes of the weight's gradient, from ``weight_grad``.
        """
        made = self.quantized_gradient(outputs) if self.fp8 else gradient
        as_saved, as_arrived = (type(n) is int and n == 0 for n in (gathered, made))
        return Delayed(inputs if as_saved else (), as_arrived, made + gathered, weight)

    def weight_grad(self, shape: tuple[Any, ...], *, te: bool, trains: bool = False) -> Any:
        """Scratch bytes of a weight's gradient during its backward, before DDP adds it to the main gradient.

        Without gradient accumulation fusion the GEMM writes a new gradient in the parameter dtype. With it the GEMM
        adds into the main gradient, and autograd gets a dummy gradient of the weight's shape: Transformer Engine keeps
        one per shape for good (``module/base.py: get_dummy_wgrad``), which megatron-core uses too; earlier releases
        make a new one each time (``tensor_parallel/layers.py:
        LinearWithGradAccumulationAndAsyncCommunication.backward``). A frozen weight has no gradient; that of an adapter
        has one (``trains``).
        """
        if self.frozen and not trains:
            return 0
        nbytes = self.ctx.act
        for n in shape:
            nbytes *= n
        impl = self.ctx.impl
        kept = (te or OWN_LINEARS_USE_DUMMY_WEIGHT_GRADIENTS(impl)) and DUMMY_WEIGHT_GRADIENTS_KEPT(impl)
        if impl.gradient_accumulation_fusion and kept:
            self.keep(Scratch.WEIGHT_GRADIENT, nbytes, shape)
            return 0
        return nbytes

    # ---- adapters ----

    @property
    def rank(self) -> int:
        """The rank of adapters."""
        assert self.ctx.adapters is not None
        return self.ctx.adapters.dim

    def adapts(self, name: str) -> bool:
        """Whether a linear of this block has an adapter. Targets that name single layers count for every layer."""
        assert self.ctx.adapters is not None
        module = f"decoder.layers.0.{name}"
        return is_target(in_any_layer(self.ctx.adapters), name.rpartition(".")[2], module)

    # ---- fp8 ----

    @property
    def fp8(self) -> bool:
        """Whether Transformer Engine's linears run in fp8 here."""
        return self.ctx.te and self.ctx.fp8 is not None and not self.unquantized

    def fp8_bytes(self, elements: int) -> int:
        """Bytes of one fp8 copy with its scales: 1 per element, plus 1 per block of 32 (mxfp8) or 4 per block of 128
        (blockwise); in fp4 half a byte per element, plus 1 per block of 16. Source: TE
        ``tensor/{mxfp8,float8_blockwise,nvfp4}_tensor.py``."""
        if self.ctx.fp8_recipe == "nvfp4":
            return elements // 2 + elements // 16
        scales = {"mxfp8": elements // 32, "blockwise": elements // 128 * 4}
        return elements + scales.get(self.ctx.fp8_recipe, 0)

    def linear_input(
        self, name: str, x: Tensor, elements: int, *, original: bool = False
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """(saved, made): what a linear saves of its input for the weight gradient.

        In bf16 the input itself. In fp8 a copy in the layout of that GEMM; the input is freed unless another operation
        saves it. ``original``: megatron-core has the linear save the input instead
        (``extensions/transformer_engine.py: set_save_original_input``). Source: TE ``module/linear.py``.
        """
        if not self.fp8 or original:
            return (x,), ()
        word = "fp4" if self.ctx.fp8_recipe == "nvfp4" else "fp8"
        copy = self.tape.tensor(f"{name} input in {word}", self.fp8_bytes(elements), grad=False, item=1)
        return (copy,), (copy,)

    @property
    def fp8_copies(self) -> int:
        """Number of layouts in which a tensor is quantized for its two GEMMs: row-wise and column-wise, or only one
        where the GPU multiplies either (``utils.py: is_non_tn_fp8_gemm_supported``) and the recipe scales whole
        tensors."""
        return 1 if self.ctx.impl.gpu_arch == "blackwell" and self.ctx.fp8_recipe in ("delayed", "tensorwise") else 2

    def quantized_input(self, elements: int, *, original: bool = False, gathered: bool = False) -> int:
        """Scratch bytes of a linear's forward: the fp8 layouts of its input that it does not save.

        A pass without gradients makes one layout only: with ``original`` that is this scratch, else it needs none
        (``linear.py: _Linear.forward``: ``backward_needs_input``).
        """
        if not self.fp8 or (gathered and self.gathers_rows_only):
            return 0
        return self.fp8_bytes(elements) * (1 if original else self.fp8_copies - 1)

    def requantized_input(self, elements: int, *, original: bool) -> int:
        """Scratch bytes of the backward of a linear that saved its ``original`` input: the fp8 copy for the weight
        gradient's GEMM, and the row-wise one too where column-wise data is made from it."""
        if not self.fp8 or not original:
            return 0
        return self.fp8_bytes(elements) * (self.fp8_copies if self.gathers_rows_only else 1)

    @property
    def gathers_rows_only(self) -> bool:
        """Whether the recipe scales whole tensors: these gather row-wise data, and save it too
        (``Quantizer.supports_only_rowwise_all_gather``)."""
        return self.ctx.fp8_recipe in ("delayed", "tensorwise")

    def quantized_gradient(self, elements: int) -> int:
        """Scratch bytes of a linear's backward: the gradient of its output in fp8, in every layout."""
        return self.fp8_bytes(elements) * self.fp8_copies if self.fp8 else 0

    def gathered(self, elements: int, *, backward: bool = False) -> int:
        """Bytes of a linear's input gathered under sequence parallelism, in the dtype of the GEMM.

        For the weight gradient (``backward``) the gathered data is transposed, except for mxfp8, which gathers
        column-wise data; scales of blocks are not transposed (``distributed.py: _post_process_fp8_blockwise_gather``).
        """
        if not self.fp8:
            return elements * self.ctx.act
        transposed = backward and self.ctx.fp8_recipe != "mxfp8" and self.fp8_copies > 1
        if self.ctx.fp8_recipe == "nvfp4" and backward:
            return 2 * self.fp8_bytes(elements) + elements // 2  # both layouts, and a copy to reorder one of them
        return self.fp8_bytes(elements) + (elements if transposed else 0)

    @property
    def proj_keeps_original(self) -> bool:
        """Whether linear_proj saves attention's output, which attention saves anyway, instead of an fp8 copy of it
        (``attention.py: Attention.__init__``; not for the delayed recipe)."""
        return self.ctx.fp8_recipe != "delayed" and PROJ_KEEPS_ORIGINAL(self.ctx.impl)

    # ---- modules ----

    def norm(self, name: str, x: Tensor, width: int, rows: int) -> Tensor:
        """LayerNorm or RMSNorm over ``width`` for ``rows`` rows; saves its input and fp32 row statistics.

        Source: TE ``ops/basic/{layer_norm,rmsnorm}.py``; Apex ``FusedLayerNormAffineFunction``; torch
        ``native_layer_norm`` / ``_fused_rms_norm``. [rows, width] in, the same out in the compute dtype.
        """
        self.norm_parameters(name, width)
        if self.torch_norms:
            return self.torch_norm(name, x, width, rows)
        stats = self.norm_statistics(name, rows)
        return self.tape.make(name, x, rows * width * self.ctx.act, saves=(x, *stats), also=stats)

    def torch_norm(
        self, name: str, x: Tensor, width: int, rows: int, *, scaled: bool = True, copies: int = 2
    ) -> Tensor:
        """RMSNorm in fp32, one torch operation after another.

        One fp32 copy of the input is multiplied and a second (``copies``; with 1 the same) squared. Saves the copies,
        the means before and after the power, and with a weight (``scaled``) the normed copy.

        Source: megatron-bridge ``models/gemma/modeling_gemma4.py: _gemma4_rms_norm, Gemma4DenseSelfAttention._v_norm``.
        """
        tape, wide = self.tape, 4 * rows * width
        copy = tape.make(f"{name} input in fp32", x, wide)
        squared = tape.make(f"{name} input in fp32, to be squared", x, wide) if copies > 1 else copy
        squares = tape.make(f"{name} squares", squared, wide, saves=(squared,), backward_workspace=wide)
        mean = tape.make(f"{name} mean square", squares, 4 * rows)
        mean = tape.make(f"{name} mean square + epsilon", mean, 4 * rows, alias=True)
        scale = tape.make(f"{name} scale", mean, 4 * rows, saves=(mean,))
        out = tape.make(f"{name} in fp32", (copy, scale), wide, saves=(copy, scale), backward_workspace=wide)
        tape.keep_alive(copy)
        if scaled:
            weight = tape.tensor(f"{name} weight in fp32", 4 * width, grad=False)
            out = tape.make(f"{name} scaled", out, wide, saves=(out, weight), also=(weight,), backward_workspace=wide)
        out = tape.make(name, out, rows * width * self.ctx.act)
        tape.keep_alive(x)  # whose dtype it takes
        return out

    def norm_parameters(self, name: str, width: int, style: str = ".") -> None:
        self.parameter(f"{name}{style}weight", (width,))
        if self.ctx.normalization == "LayerNorm":
            self.parameter(f"{name}{style}bias", (width,))

    def norm_statistics(self, name: str, rows: int) -> tuple[Tensor, ...]:
        """fp32 reciprocal standard deviations, and means for LayerNorm: 4 bytes a row each."""
        stats = [self.tape.tensor(f"{name} rstd", 4 * rows, grad=False, item=4)]
        if self.ctx.normalization == "LayerNorm":
            stats.append(self.tape.tensor(f"{name} mean", 4 * rows, grad=False, item=4))
        return tuple(stats)

    def column_linear(
        self,
        name: str,
        x: Tensor,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        fused_norm: bool = False,
        expert: bool = False,
        gather: bool = True,
        out_name: str | None = None,
        original: bool = False,
    ) -> Tensor:
        """Column-parallel linear, [T_sp, in] -> [T, out / t] (``out_features`` is already local).

        ``fused_norm``: Transformer Engine's LayerNormLinear, which saves the norm's input and its output.
        Under sequence parallelism the input is gathered for the forward GEMM and again for the weight gradient; the
        input gradient is made unsharded and then reduce-scattered. Without ``gather`` the input and its gradient are
        [T, in]. Source: TE ``module/{linear,layernorm_linear}.py``, megatron-core ``tensor_parallel/layers.py``.
        """
        ctx = self.ctx
        shape = (out_features, in_features)
        if fused_norm:
            self.norm_parameters(name, in_features, ".layer_norm_")
        self.parameter(f"{name}.weight", shape, expert=expert, sharded=ctx.tp > 1)
        if bias:
            self.parameter(f"{name}.bias", (out_features,), expert=expert, sharded=ctx.tp > 1)
        out_label = out_name or f"{name} output"
        if self.frozen:
            return frozen.column_linear(
                self, name, x, in_features, out_features, fused_norm=fused_norm, gather=gather, label=out_label
            )
        sp = ctx.sp and gather
        shard = ctx.tokens_sp * in_features * ctx.act
        whole = ctx.tokens * in_features * ctx.act
        wgrad = self.weight_grad(shape, te=ctx.te)
        out_bytes = ctx.tokens * out_features * ctx.act
        kept, entering = (ctx.tokens_sp if gather else ctx.tokens) * in_features, ctx.tokens * in_features
        later = self.tape.delaying
        backward = self.quantized_gradient(ctx.tokens * out_features) + (0 if later else wgrad)
        if fused_norm:
            stats = self.norm_statistics(name, ctx.tokens_sp)
            layouts = self.quantized_input(kept, gathered=sp)
            own = self.fp8_bytes(kept) if self.fp8 else kept * ctx.act
            if sp and self.fp8 and ctx.fp8_recipe == "nvfp4":
                own, layouts = own + layouts, 0  # backward gathers it again, so both layouts are saved
            normed = self.tape.tensor(f"{name} norm output", own, grad=False, item=1 if self.fp8 else None)
            return self.tape.make(
                name, x, out_bytes,
                saves=(x, normed, *stats), also=(normed, *stats),
                workspace=layouts + (self.gathered(entering) if sp else 0), for_backward=layouts,
                # With SP: the gathered norm output and the unsharded input gradient. Without: the norm's output is
                # freed (``clear_tensor_data``) before the input's gradient is made from the norm output's, which is as
                # large in bf16 and is made for an input without a gradient too. A delayed weight gradient holds the
                # norm's output.
                backward_workspace=backward
                + (self.gathered(entering, backward=True) + whole if sp else shard - (0 if later else normed.bytes))
                + (0 if sp or x.has_gradient else shard),
                label=out_label,
                delayed=self.delayed(
                    (normed,), ctx.tokens * out_features, wgrad,
                    gathered=self.gathered(entering, backward=True) if sp else 0,
                ) if later else None,
            )
        if sp and not ctx.te:
            self.keep(Scratch.MPU, whole)
        kept_input, also = self.linear_input(name, x, kept, original=original)
        backward += self.requantized_input(kept, original=original)
        if sp:
            backward += whole + (self.gathered(entering, backward=True) if ctx.te else 0)
        layouts = self.quantized_input(kept, original=original, gathered=sp)
        return self.tape.make(
            out_label, x, out_bytes, saves=kept_input, also=also,
            workspace=layouts + (self.gathered(entering) if sp and ctx.te else 0),
            for_backward=0 if original else layouts, backward_workspace=backward,
            delayed=self.delayed(
                kept_input, ctx.tokens * out_features, wgrad,
                gathered=self.gathered(entering, backward=True) if sp else self.requantized_input(
                    kept, original=original
                ),
            ) if later else None,
        )

    def row_linear(
        self,
        name: str,
        x: Tensor,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        out_name: str | None = None,
        original: bool = False,
        scatter: bool = True,
    ) -> Tensor:
        """Row-parallel linear, [T, in / t] -> [T_sp, out] (``in_features`` is already local).

        Under sequence parallelism the partial output [T, out] is reduce-scattered, and the output gradient is gathered
        in backward; without ``scatter`` the output is [T, out]. Source as ``column_linear``.
        """
        ctx, tape = self.ctx, self.tape
        shape = (out_features, in_features)
        self.parameter(f"{name}.weight", shape, sharded=ctx.tp > 1)
        if bias:
            self.parameter(f"{name}.bias", (out_features,))
        label = out_name or f"{name} output"
        if self.frozen:
            return frozen.row_linear(self, name, x, in_features, out_features, label=label)
        whole = ctx.tokens * out_features * ctx.act
        kept_input, also = self.linear_input(name, x, ctx.tokens * in_features, original=original)
        wgrad = self.weight_grad(shape, te=ctx.te)
        gradient = self.quantized_gradient(ctx.tokens * out_features)
        gradient += self.requantized_input(ctx.tokens * in_features, original=original)
        layouts = self.quantized_input(ctx.tokens * in_features, original=original)
        if ctx.sp and not (scatter and ctx.te):
            # A separate autograd node reduce-scatters; in backward the shard's gradient is freed once it is gathered.
            x = tape.make(
                f"{name} partial output", x, whole, saves=kept_input, also=also, workspace=layouts,
                for_backward=0 if original else layouts, backward_workspace=gradient + wgrad,
            )
            return tape.make(label, x, ctx.tokens_sp * out_features * ctx.act) if scatter else x
        if ctx.sp and not self.fp8:
            gradient += whole
        later = tape.delaying
        return tape.make(
            label, x, ctx.tokens_sp * out_features * ctx.act, saves=kept_input, also=also,
            workspace=layouts + (whole if ctx.sp else 0), for_backward=0 if original else layouts,
            backward_workspace=gradient + (0 if later else wgrad),
            delayed=self.delayed(
                kept_input, ctx.tokens * out_features, wgrad,
                gathered=self.requantized_input(ctx.tokens * in_features, original=original),
                gradient=whole if ctx.sp else 0,
            ) if later else None,
        )

    def plain_linear(
        self, name: str, x: Tensor, rows: int, in_features: int, out_features: int, *, original: bool = False
    ) -> Tensor:
        """A linear whose weight is replicated on every tensor-parallel rank (TE ``parallel_mode="duplicated"``)."""
        shape = (out_features, in_features)
        self.parameter(f"{name}.weight", shape)
        if self.frozen:
            return frozen.plain_linear(self, name, x, rows, in_features, out_features)
        kept_input, also = self.linear_input(name, x, rows * in_features, original=original)
        layouts = self.quantized_input(rows * in_features, original=original)
        again = self.requantized_input(rows * in_features, original=original)
        wgrad, later = self.weight_grad(shape, te=self.ctx.te), self.tape.delaying
        return self.tape.make(
            f"{name} output", x, rows * out_features * self.ctx.act, saves=kept_input, also=also,
            workspace=layouts, for_backward=0 if original else layouts,
            backward_workspace=(0 if later else wgrad) + self.quantized_gradient(rows * out_features) + again,
            delayed=self.delayed(kept_input, rows * out_features, wgrad, gathered=again) if later else None,
        )

    def bias_dropout_add(self, name: str, x: Tensor, residual: Tensor, *, bias: bool) -> Tensor:
        """out = residual + dropout(x + bias), [T_sp, h]; saves a one-byte mask if p > 0.

        The fused form (one compiled kernel) makes no intermediate tensor; the eager form makes x + bias and the dropped
        tensor. Source: megatron-core ``fusions/fused_bias_dropout.py``; torch's dropout returns its input unchanged at
        p = 0 (``aten/src/ATen/native/Dropout.cpp``).
        """
        ctx, tape = self.ctx, self.tape
        fused = ctx.impl.bias_dropout_fusion
        size = ctx.tokens_sp * ctx.hidden_size
        intermediate = [x]
        if bias and not fused:
            x = tape.make(f"{name} + bias", x, size * ctx.act, alias=True)
        if ctx.hidden_dropout:
            mask = tape.tensor(f"{name} dropout mask", size, grad=False)
            dropped = tape.tensor(f"{name} dropped", 0 if fused else size * ctx.act, grad_bytes=size * ctx.act)
            # ``TransformerLayer.bias_dropout_add_exec_handler`` is torch.enable_grad. In a pass without gradients the
            # input has none, so that only the gradient of a bias needs the mask.
            tape.op(
                f"{name} dropout", x, (dropped, mask), saves=(mask,), always_saves=bias and not self.frozen
            )
            intermediate.append(x)
            x = dropped
        out = tape.make(f"{name} output", (x, residual), ctx.hidden_bytes, alias=True)
        # Variables of ``TransformerLayer.forward`` and of the function.
        tape.keep_alive(*intermediate, *self._variables)
        self._variables.clear()
        return out
