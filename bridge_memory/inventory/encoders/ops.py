"""Operations that the encoders of transformers share: convolutions, attention over segments, rotary embedding in fp32.

Shapes: n patches (or frames) of a microbatch, h the encoder's width, a heads, d per head. Source: transformers
``models/<kind>/modeling_<kind>.py``, ``integrations/{sdpa_attention,flash_attention}.py``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bridge_memory.inventory.torch.attention import rotate_halves
from bridge_memory.inventory.torch.norms import layer_norm, norm
from bridge_memory.inventory.torch.ops import FP32, Array, Torch
from bridge_memory.spec.encoders import EncoderStructure
from bridge_memory.tapes.context import BlockContext, EncoderRun
from bridge_memory.tapes.parameters import Repeated, Use
from bridge_memory.tapes.recorder import Recorder

#: Bytes of an index.
INT64 = 8


def encoder_trains(ctx: BlockContext, run: EncoderRun, module: str) -> bool:
    """Whether a module, or a weight of it, trains. LoRA freezes the whole encoder (Megatron Bridge ``peft/base.py:
    PEFT.freeze_model``)."""
    if ctx.adapters is not None and ctx.adapters.scheme == "lora":
        return False
    return not any(module.startswith(name) for name in run.spec.frozen)


class EncoderOps(Torch):
    """Operations of one block of an encoder."""

    def __init__(self, r: Recorder, run: EncoderRun) -> None:
        super().__init__(r, run.layers)
        self.run = run
        self.s: EncoderStructure = run.structure
        ctx = r.ctx
        #: Sequences of the microbatch.
        self.samples: Any = ctx.seq * ctx.cp // run.seq_length if ctx.packed else ctx.batch
        #: Patches of the microbatch; or columns of spectrograms.
        self.per_sample = sum(item.patches for item in run.items)
        self.patches: Any = self.samples * self.per_sample
        #: Whether context-parallel ranks encode a part of the images each.
        self.dealt = self.s.dealt and ctx.cp > 1
        if self.dealt:
            self.patches = self._largest_share(ctx.cp)
        #: Whether any gradient reaches the layers.
        self.layers_reached = True
        #: Whether layers of megatron-core run attention again in backward.
        self.attention_again = False

    def _largest_share(self, cp: Any) -> Any:
        """Patches of the rank with the most images, frames of videos one by one, as many as the largest has (Megatron
        Bridge ``modelling_qwen3_vl/utils.py: qwen2vl_pad_and_split``)."""
        images = self.samples * sum(item.number * item.frames for item in self.run.items)
        return (images + cp - 1) // cp * max((item.height * item.width for item in self.run.items), default=0)

    def trains(self, weight: str) -> bool:
        """Whether a weight has a gradient: adapters of Megatron's linears freeze the whole encoder."""
        return encoder_trains(self.r.ctx, self.run, weight)

    def adapts(self, module: str) -> bool:
        return False

    def parameter(self, name: str, shape: tuple[Any, ...]) -> None:
        """One parameter, whole on every rank and never in fp8."""
        self.r.parameter(name, shape, use=Use.ROUTER, trains=self._exception(name))

    def _exception(self, name: str) -> bool | None:
        """``Parameter.trains``: None where it is as with the run's other weights."""
        trains = self.trains(name)
        return trains if trains is (self.r.ctx.adapters is not None) else None

    def dense(self, module: str, x: Array, rows: Any, inputs: int, outputs: int, *, bias: bool = True) -> Array:
        """``nn.Linear``."""
        self.parameter(f"{module}.weight", (outputs, inputs))
        if bias:
            self.parameter(f"{module}.bias", (outputs,))
        return self.linear(module, x, rows, inputs, outputs, bias=bias, declare=False)

    def convolution(
        self, module: str, x: Array, outputs: Any, kernel: tuple[int, ...], *, bias: bool = True
    ) -> Array:
        """``nn.ConvNd`` with a weight of shape ``kernel``; ``outputs``: elements. Saves its input; backward makes the
        gradients of weight and bias (``aten/src/ATen/native/Convolution.cpp``). cuDNN's workspace is not counted."""
        self.parameter(f"{module}.weight", kernel)
        elements = 1
        for n in kernel:
            elements *= n
        if bias:
            self.parameter(f"{module}.bias", (kernel[0],))
            elements += kernel[0]
        trains = self.trains(f"{module}.weight")
        return self.make(
            f"{module} output", (x,), outputs, self.compute_width, saves=(x.tensor,) if trains else (), trains=trains,
            backward_workspace=elements * self.parameter_width if trains else 0,
        )

    def rms_norm(self, name: str, x: Array, rows: Any, width: int) -> Array:
        """``LlamaRMSNorm`` under its names in encoders."""
        first = len(self.r.rows)
        out = norm(self, name, x, rows, width)
        self._mark(first)
        return out

    def layer_norm(self, name: str, x: Array, rows: Any, width: int) -> Array:
        first = len(self.r.rows)
        out = layer_norm(self, name, x, rows, width)
        self._mark(first)
        return out

    def _mark(self, first: int) -> None:
        """Parameters from the ``first`` row on, declared by recorders of other layers, train as the encoder's do."""
        self.r.rows[first:] = [
            Repeated(tuple(replace(p, trains=self._exception(p.name)) for p in parameters), times)
            for parameters, times in self.r.rows[first:]
        ]

    def unravelled(self, name: str, x: Array) -> Array:
        """A view by permuted strides, whose gradient is copied into the layout of x."""
        return self.in_place(name, x)

    def heads_of_qkv(self, joined: Array, n: Any) -> tuple[Array, Array, Array]:
        """``qkv.reshape(n, 3, a, d).permute(1, 0, 2, 3).unbind(0)``: views; their gradients are stacked, and the stack
        is copied into the order of the linear's output."""
        h = self.s.hidden_size
        permuted = self.unravelled("queries, keys and values, permuted", joined)
        query, key, value = self.split("queries, keys and values", permuted, n * h, n * h, n * h)
        return query, key, value

    def rotated_in_fp32(self, query: Array, key: Array, cos: Array, sin: Array) -> tuple[Array, Array]:
        """``apply_rotary_pos_emb_vision``: queries, keys and tables in fp32; all are variables until it returns."""
        given = query, key
        q, k = self.cast("query in fp32", query, FP32), self.cast("key in fp32", key, FP32)
        tables = self.cast("rotary table in fp32: cos", cos, FP32), self.cast("rotary table in fp32: sin", sin, FP32)
        turned = rotate_halves(self, "query", q, *tables, share=1), rotate_halves(self, "key", k, *tables, share=1)
        out = self.cast("rotated queries", turned[0], query.width), self.cast("rotated keys", turned[1], key.width)
        self.keep_alive(*given, q, k, *tables, *turned)
        return out

    def attend(
        self, query: Array, key: Array, value: Array, n: Any, *, segment: int, split: bool, heads: int = 0
    ) -> Array:
        """Attention without a mask inside of segments, the longest of ``segment`` patches. With sdpa segments run one
        by one if ``split``: their outputs are concatenated. FlashAttention 2 takes all at once.

        Source: torch ``flash_attn/flash_api.cpp: mha_fwd, mha_bwd``, whose backward sums the query's gradient in fp32.
        """
        heads = heads or self.s.num_heads
        width = self.s.hidden_size
        given = query, key, value
        split = split and self.hf.attention != "flash_attention_2"
        lse = self.tape.tensor("log-sum-exp of the scores", FP32 * n * heads, grad=False)
        if split:
            query, key, value = (self.slice(f"{a.tensor.name} by segment", a, n * width) for a in given)
        whole = n if not split else segment
        out = self.make(
            "attention output by segment" if split else "attention output", (query, key, value), n * width, query.width,
            saves=(query.tensor, key.tensor, value.tensor, lse), also=(lse,), save_output=True,
            backward_workspace=FP32 * whole * (width + heads),
        )
        if split:
            joined = self.copy("attention output", out)
            self.keep_alive(*given, out)
            return joined
        self.keep_alive(*given)
        return out

    def attend_whole(
        self, query: Array, key: Array, value: Array, n: Any, mask: Array | None, *, aligned: bool
    ) -> Array:
        """Attention of a batch. With a ``mask`` in the dtype of the model sdpa runs the memory-efficient kernel, which
        saves the mask; if its rows are not ``aligned`` to 8 elements every layer pads a copy of it (torch
        ``native/transformers/attention.cpp: preprocess_mask, pad_bias``)."""
        s = self.s
        given = query, key, value
        masks: tuple[Array, ...] = ()
        if mask is not None and self.hf.attention != "flash_attention_2":
            masks = (mask if aligned else self.make("mask, padded", (mask,), mask.elements, mask.width, grad=False),)
        lse = self.tape.tensor("log-sum-exp of the scores", FP32 * n * s.num_heads, grad=False)
        out = self.make(
            "attention output", (*given, *masks), n * s.hidden_size, query.width,
            saves=(*(a.tensor for a in (*given, *masks)), lse), also=(lse,), save_output=True,
            backward_workspace=FP32 * n * (s.hidden_size + s.num_heads),
        )
        self.keep_alive(*given)
        return out
