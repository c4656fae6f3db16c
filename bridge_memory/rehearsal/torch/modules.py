"""transformers models as on a GPU: replacements for operations that run otherwise on the CPU and the meta device.

The replacements save and allocate the same tensors as CUDA's kernels, and compute nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
import transformers
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM

try:
    from transformers.modeling_attn_mask_utils import AttentionMaskConverter
except ImportError:  # gone from 5.24 on
    AttentionMaskConverter = None
try:
    from transformers import masking_utils
except ImportError:  # before 4.53 each class builds its masks
    masking_utils = None

#: Whether ``from_config`` takes ``dtype``, which was ``torch_dtype`` before.
TAKES_DTYPE = tuple(map(int, transformers.__version__.split(".")[:2])) >= (4, 56)
META = "meta"
#: Model types that AutoModelForCausalLM does not know in 5.12 -> their class.
NOT_MAPPED = {"mistral4": "Mistral4ForCausalLM"}
#: Class of a model that reads values of the attention mask -> its method that does.
MASK_OF = {
    "Qwen3NextModel": "_update_linear_attn_mask", "NemotronHModel": "_update_mamba_mask",
    "GraniteMoeHybridModel": "_update_mamba_mask", "BambaModel": "_update_mamba_mask",
    "JambaModel": "_update_mamba_mask",
}  # fmt: skip
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class FlashAttention(torch.autograd.Function):
    """Tensors that torch's CUDA kernels save and allocate: ``flash_attn/flash_api.cpp: mha_fwd, mha_bwd``; with a bias
    those of the memory-efficient ``mem_eff_attention``."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any) -> Any:
        b, heads, s, _ = q.shape
        out = torch.empty(b, s, heads, v.shape[-1], dtype=q.dtype, device=q.device).transpose(1, 2)
        lse = torch.empty(b, heads, s, dtype=torch.float32, device=q.device)
        seeds = torch.empty(2, dtype=torch.int64, device=q.device)
        ctx.save_for_backward(q, k, v, out, lse, seeds, bias)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        q, k, v, _out, lse, *_ = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        scratch = [torch.empty_like(lse), torch.empty(q.shape, dtype=torch.float32, device=q.device)]
        if q.shape[1] != k.shape[1]:
            scratch += [torch.empty_like(q), torch.empty_like(q)]
        del scratch
        return dq, dk, dv, None


def scaled_dot_product_attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if AutocastOnMeta.active is not None:
        query, key, value = (AutocastOnMeta.active.cast(x, AutocastOnMeta.active.dtype) for x in (query, key, value))
    if attn_mask is None:
        return FlashAttention.apply(query, key, value, None)
    if attn_mask.dtype == torch.bool:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype)
        attn_mask = bias.masked_fill_(attn_mask.logical_not(), float("-inf"))
    return FlashAttention.apply(query, key, value, attn_mask)


class Conv1d(torch.autograd.Function):
    """CUDA's convolution makes its input contiguous, forward and backward (``aten/src/ATen/native/Convolution.cpp:
    _convolution, convolution_backward``)."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, options: tuple[Any, ...]) -> Any:
        copy = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.options, ctx.biased = options, bias is not None
        out = torch.empty_like(CONV1D(x, weight, bias, *options))
        del copy
        return out

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        copy = x.contiguous()
        out = torch.empty_like(copy), torch.empty_like(weight)
        bias = torch.empty(weight.shape[0], dtype=weight.dtype, device=weight.device) if ctx.biased else None
        return *out, bias, None


CONV1D = F.conv1d


def conv1d(
    input: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Any:
    if AutocastOnMeta.active is not None:
        active = AutocastOnMeta.active
        input, weight, bias = (active.cast(x, active.dtype) for x in (input, weight, bias))
    return Conv1d.apply(input, weight, bias, (stride, padding, dilation, groups))


def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """CUDA's fused kernel (``aten/src/ATen/native/Dropout.cpp``)."""
    return torch.native_dropout(input, p, True)[0] if p and training else input


class Autocast(torch.autocast):
    """torch.autocast, with the CPU's in place of the meta device's, which the rotary embedding would disable."""

    off = 0

    def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu" if device_type == META else device_type, *args, **kwargs)

    def __enter__(self) -> Any:
        Autocast.off += not self._enabled
        return super().__enter__()

    def __exit__(self, *args: Any) -> Any:
        Autocast.off -= not self._enabled
        return super().__exit__(*args)


class Routed:
    """Balanced routing: every expert has ``rows`` tokens, whose indices are on the meta device."""

    def __init__(self, experts: int, rows: int) -> None:
        self.experts, self.rows = experts, rows

    def nonzero(self, x: torch.Tensor, *, as_tuple: bool = False) -> Any:
        return (torch.arange(self.experts),) if as_tuple else torch.arange(self.experts)[:, None]

    def where(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 1 or kwargs:
            return WHERE(*args, **kwargs)
        return torch.empty(self.rows, args[0].dim(), dtype=torch.int64, device=args[0].device).unbind(1)

    def sum(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``Tensor.sum``; for a count of tokens per expert the even share (``DeepseekV2MoE.moe``)."""
        total = SUM(x, *args, **kwargs)
        counted = x.dtype == torch.int64 and x.dim() == 2 and x.shape[1] == self.experts
        return torch.full((self.experts,), self.rows) if counted else total


ALL = torch.all
WHERE = torch.where
SUM = torch.Tensor.sum


class AutocastOnMeta(TorchFunctionMode):
    """CUDA's autocast (``aten/src/ATen/autocast_mode.cpp``) for the meta device, which has none.

    Matrix products in ``dtype``, with casts of weights cached until its end; precision-sensitive operations in fp32.
    """

    LOWER = (
        F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.addmm,
        torch.Tensor.baddbmm,
    )  # fmt: skip
    WIDER = (
        torch.pow, torch.Tensor.pow, torch.rsqrt, torch.Tensor.rsqrt, F.softmax, torch.softmax, torch.Tensor.softmax,
        torch.cumsum, torch.Tensor.cumsum, torch.sum, SUM, F.layer_norm, F.softplus, torch.exp, torch.Tensor.exp,
        torch.expm1,
    )  # fmt: skip

    active: AutocastOnMeta | None = None

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.cache: dict[int, torch.Tensor] = {}

    def __enter__(self) -> Any:
        AutocastOnMeta.active = self
        return super().__enter__()

    def __exit__(self, *args: Any) -> Any:
        AutocastOnMeta.active = None
        return super().__exit__(*args)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if Autocast.off or not (func in self.LOWER or func in self.WIDER):
            return func(*args, **kwargs)
        dtype = torch.float32 if func in self.WIDER else self.dtype
        return func(*(self.cast(a, dtype) for a in args), **{k: self.cast(a, dtype) for k, a in kwargs.items()})

    def cast(self, x: Any, dtype: torch.dtype) -> Any:
        if not isinstance(x, torch.Tensor) or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return x
        if x.dtype == dtype:
            return x
        if not (dtype == self.dtype and x.requires_grad and x.is_leaf and not x._is_view()):
            return x.to(dtype)
        if id(x) not in self.cache:
            self.cache[id(x)] = x.to(dtype)
        return self.cache[id(x)]


def in_autocast(forward: Any, dtype: torch.dtype) -> Any:
    """``forward`` under autocast: recomputation in backward enters a new one (``torch/utils/checkpoint.py``)."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if AutocastOnMeta.active else AutocastOnMeta(dtype):
            return forward(*args, **kwargs)

    return run


def layer_in_autocast(layer: Any, dtype: torch.dtype) -> None:
    """A decoder layer's forward under autocast, inside of its checkpoint if it has one."""
    checkpoint = getattr(layer, "_gradient_checkpointing_func", None)
    if checkpoint is not None and hasattr(type(layer).forward, "__wrapped__"):  # from 5.23 on: around forward
        layer._gradient_checkpointing_func = lambda forward, *args: checkpoint(in_autocast(forward, dtype), *args)
    layer.forward = in_autocast(layer.forward, dtype)


@contextmanager
def _tables_of_whole_sequences() -> Iterator[None]:
    """Phi-3.5-MoE's rotary embedding reads how long a sequence is from positions, which have no values here."""
    try:
        phimoe = import_module("transformers.models.phimoe.modeling_phimoe")
    except ImportError:
        yield
        return
    kind = phimoe.PhimoeRotaryEmbedding

    def before_5(self: Any, x: Any, seq_len: Any = None) -> Any:
        return forward(self, x, seq_len=x.shape[1])

    forward = kind.forward
    takes_positions = "position_ids" in forward.__code__.co_varnames or hasattr(forward, "__wrapped__")
    with nullcontext() if takes_positions else patch.object(kind, "forward", before_5):
        yield


def _models_with_linear_masks() -> Iterator[Any]:
    """The classes of ``MASK_OF`` that the installed transformers has."""
    kinds = ("qwen3_next", "nemotron_h", "granitemoehybrid", "bamba", "jamba")
    for kind, name in zip(kinds, MASK_OF, strict=True):
        try:
            model = getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), name)
        except ImportError:  # not in this release
            continue
        if hasattr(model, MASK_OF[name]):  # later releases have ``masking_utils.create_recurrent_attention_mask``
            yield model


@contextmanager
def as_on_cuda(routed: Routed | None = None, *, padded: bool = False) -> Iterator[None]:
    """Run models as on CUDA inside this block. ``routed``: balanced routing; ``padded``: the attention mask has
    zeros."""
    def skipped(*args: Any, **kwargs: Any) -> bool:
        given = takes.bind(*args, **kwargs).arguments  # its order changed after 5.12
        local = given.get("local_attention_size")
        return not padded and (local is None or given["kv_length"] < local)

    def skipped_by_class(*args: Any, **kwargs: Any) -> bool:
        return not padded

    def all_of(x: Any, *args: Any, **kwargs: Any) -> Any:
        return torch.tensor(not padded) if x.device.type == META else ALL(x, *args, **kwargs)

    def linear_mask(model: Any, attention_mask: Any, *args: Any) -> Any:
        return attention_mask if padded else None

    with ExitStack() as stack:
        if masking_utils is not None:
            takes = signature(masking_utils._ignore_causal_mask_sdpa)
            stack.enter_context(patch.object(masking_utils, "_ignore_causal_mask_sdpa", skipped))
        stack.enter_context(_tables_of_whole_sequences())
        for model in _models_with_linear_masks():
            stack.enter_context(patch.object(model, MASK_OF[model.__name__], linear_mask))
        for owner, name, value in (
            (F, "scaled_dot_product_attention", scaled_dot_product_attention),
            (torch, "autocast", Autocast),
            (F, "dropout", dropout),
            (F, "conv1d", conv1d),
            (torch, "all", all_of),
            (AttentionMaskConverter, "_ignore_causal_mask_sdpa", staticmethod(skipped_by_class)),
        ):
            if owner is None:
                continue
            stack.enter_context(patch.object(owner, name, value))
        if routed is not None:
            stack.enter_context(patch.object(torch.Tensor, "nonzero", lambda x, **k: routed.nonzero(x, **k)))
            stack.enter_context(patch.object(torch, "where", routed.where))
            stack.enter_context(patch.object(torch.Tensor, "sum", lambda x, *a, **k: routed.sum(x, *a, **k)))
        yield


def build(
    config: dict[str, Any], *, attention: str = "sdpa", dtype: torch.dtype = torch.bfloat16, device: str = META
) -> Any:
    """The model of a parsed config.json, in training mode, in ``dtype`` on ``device``."""
    given = dict(config)
    cfg = AutoConfig.for_model(given.pop("model_type"), **given)
    chosen = None if attention == "sdpa" else attention  # sdpa where the class supports it, else eager
    word = "dtype" if TAKES_DTYPE else "torch_dtype"
    options = {"attn_implementation": chosen, word: dtype}
    make = AutoModelForCausalLM.from_config
    if cfg.model_type in NOT_MAPPED:
        make = getattr(import_module(f"transformers.models.{cfg.model_type}"), NOT_MAPPED[cfg.model_type])._from_config
    try:
        with torch.device(device):
            model = make(cfg, **options)
    except NotImplementedError:  # a class that reads values as it is built (``XIELUActivation`` before 5)
        model = make(cfg, **options).to(device)
    return model.train()
