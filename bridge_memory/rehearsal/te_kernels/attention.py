"""Kernels of attention: cuDNN's, flash-attn's, rotary embeddings, softmax, context parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import ceil, prod
from typing import Any

import torch

from bridge_memory.rehearsal.patches.replace import replaced
from bridge_memory.rehearsal.te_kernels.enums import ENUMS
from bridge_memory.rehearsal.te_kernels.gpu import COMPUTE_CAPABILITY
from bridge_memory.rehearsal.te_kernels.package import NEWEST, te_module, version
from bridge_memory.rehearsal.te_kernels.quantized import empty, is_quantized, quantized, shape_of
from bridge_memory.releases import release_in

#: From this release on fp8 attention saves one statistic of the softmax, as other attention does.
_ONE_STATISTIC = (2, 15)
#: From this release on backward of the softmax does not overwrite the gradient that it gets.
_SOFTMAX_MAKES_A_GRADIENT = (2, 19)
#: From this release on the backend's choice gets an argument for determinism.
_DETERMINISM_PASSED = (2, 12)


def _heads(args: Sequence[Any]) -> list[Any]:
    """Query, key and value: the first three arguments with a heads dimension, in every release."""
    return [a for a in args if (isinstance(a, torch.Tensor) or is_quantized(a)) and len(shape_of(a)) >= 3][:3]


def _enum_among(args: Sequence[Any], kind: str) -> Any:
    return next(a for a in args if isinstance(a, ENUMS[kind]))


def fused_attn_fwd(*args: Any) -> list[Any]:
    """``attention.cpp``: the output, fp32 statistics of the softmax per query and head, the random state.

    In fp8 there are two statistics (maximum and reciprocal sum) before 2.15, and the output is quantized where a
    quantizer is passed.
    """
    layout = _enum_among(args, "NVTE_QKV_Layout").name
    query, _, value = _heads(args)
    shape = shape_of(query)
    fake = next(a for a in args if isinstance(a, torch.dtype))
    out: Any = empty([*shape[:-1], shape_of(value)[-1]], fake)
    fp8 = is_quantized(query)
    if fp8:
        quantizers = [a for a in args if hasattr(a, "make_empty")]
        output = quantizers[-1]
        if type(output).__name__ == "Float8Quantizer":
            out = quantized(out, output)
    query_layout = layout.removeprefix("NVTE_").removeprefix("Paged_KV_").split("_")[0].replace("3", "")
    if query_layout.startswith("T"):
        rows = [shape[0], shape[1], 1]
    elif query_layout.startswith("SB"):
        rows = [shape[1], shape[2], shape[0], 1]
    else:
        rows = [shape[0], shape[2], shape[1], 1]
    two = fp8 and (release_in(version()) or NEWEST) < _ONE_STATISTIC
    statistics = [empty(rows, torch.float32) for _ in range(1 + two)]
    random = empty([2], torch.int64)
    offset = []
    if _enum_among(args, "NVTE_Softmax_Type").name != "NVTE_VANILLA_SOFTMAX":
        offset = [a for a in args[20:] if isinstance(a, torch.Tensor) and a.dim() == 4 and a.shape[0] == 1][-1:]
    return [out, *statistics, random, *offset]


def fused_attn_bwd(*args: Any) -> list[Any]:
    """``attention.cpp``: gradients of query, key and value, and of a learnable softmax offset.

    Inside the kernel: the query's gradient in fp32, and one fp32 sum per row. This is FlashAttention's documented
    algorithm; cuDNN's is assumed to be the same.
    """
    query, key, value = _heads(args)
    gradient_of = [a for a in args if isinstance(a, torch.dtype)]
    dtype = gradient_of[0] if gradient_of else query.dtype
    made: list[Any] = [empty(shape_of(t), dtype) for t in (query, key, value)]
    empty([4 * (prod(shape_of(query)) + prod(shape_of(query)[:-1]))], torch.uint8)
    learnable = _enum_among(args, "NVTE_Softmax_Type").name == "NVTE_LEARNABLE_SOFTMAX"
    heads = shape_of(query)[-2]
    return [*made, None, empty([1, heads, 1, 1], torch.float32) if learnable else None]


class _FlashAttention(torch.autograd.Function):
    """flash-attn 2.8 ``flash_attn_interface.py: FlashAttnFunc``, ``csrc/flash_attn/flash_api.cpp: mha_fwd, mha_bwd``:
    the output, fp32 log-sum-exps [b, a, s], the random state. Backward allocates the query's gradient in fp32 (heads
    padded to a multiple of 32, above 128 of 64; deterministic, once for each part of the keys), one fp32 sum per row,
    and gradients of keys and values for every query head before it sums those of a group.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, deterministic: bool
    ) -> torch.Tensor:
        out = empty(query.shape, query.dtype)
        ctx.deterministic = deterministic
        rows = empty([*query.shape[:-3], query.shape[-2], query.shape[-3]], torch.float32)
        ctx.save_for_backward(query, key, value, out, rows, empty([2], torch.int64))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        made = tuple(empty(t.shape, t.dtype) for t in (query, key, value))
        *rows, heads, width = query.shape
        multiple, parts = 32 if width <= 128 else 64, 1
        if ctx.deterministic:
            sequences = rows[0] if len(rows) == 2 else 1
            parts = ceil(torch.cuda.get_device_properties().multi_processor_count / (sequences * heads))
        padded = ceil(width / multiple) * multiple
        temporaries = [empty([prod(rows), heads, parts * padded + 1], torch.float32)]
        if key.shape[-2] != query.shape[-2]:
            temporaries += [empty(query.shape, query.dtype) for _ in (key, value)]
        return (*made, None)


def fa_prepare_fwd(mixed: torch.Tensor) -> torch.Tensor:
    """``attention.cpp``: query, key and value of [s, b, a, 3 d] as [3, b, s, a, d]."""
    s, b, heads, width = mixed.shape
    return empty([3, b, s, heads, width], mixed.dtype)


def fa_prepare_bwd(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``attention.cpp``: their gradients, each [b, s, a, d], as [s, b, a, 3 d]."""
    b, s, heads, width = query.shape
    return empty([s, b, heads, 3 * width], query.dtype)


def flash_attn_func(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, deterministic: bool = False, **__: Any
) -> torch.Tensor:
    """FlashAttention 2, for sequences of equal length and for packed ones."""
    out: torch.Tensor = _FlashAttention.apply(query, key, value, deterministic)
    return out


#: The release of flash-attn; every supported Transformer Engine accepts it.
FLASH_ATTENTION = "2.8.3"


@contextmanager
def flash_attention() -> Iterator[None]:
    """Install flash-attn where Transformer Engine looks for it (``backends.py``, ``utils.py: FlashAttentionUtils``)."""
    backends = te_module("attention.dot_product_attention.backends")
    utils = getattr(te_module("attention.dot_product_attention.utils"), "FlashAttentionUtils", None)
    with ExitStack() as stack:
        if utils is not None:
            before = {name: value for name, value in vars(utils).items() if isinstance(value, bool)}
            for name, value in {**before, "version": utils.version}.items():
                stack.enter_context(replaced(utils, name, value))
            utils.version = type(utils.max_version)(FLASH_ATTENTION)
            utils.set_flash_attention_version()
        for name in ("flash_attn_func", "flash_attn_varlen_func"):
            stack.enter_context(replaced(backends, name, flash_attn_func))
        yield


def get_fused_attn_backend(first: Any, *rest: Any) -> Any:
    """cuDNN's attention for any sequence length; its fp8 backend where query, key and value are in fp8.

    On Blackwell none is deterministic. Before 2.12 Python decides that; later releases pass the requirement to this
    function, and measured runs with 2.17 and 2.18 continued without cuDNN. From 2.20 on the arguments are one object,
    and the result includes a reason.
    """
    backend, one_object = ENUMS["NVTE_Fused_Attn_Backend"], not rest
    dtype = first.qkv_dtype if one_object else rest[0]
    passed = (release_in(version()) or NEWEST) >= _DETERMINISM_PASSED
    deterministic = first.deterministic if one_object else passed and rest[-1]
    found = backend.NVTE_FP8 if dtype.name.startswith("kFloat8") else backend.NVTE_F16_arbitrary_seqlen
    if deterministic and torch.cuda.get_device_capability() >= COMPUTE_CAPABILITY["blackwell"]:
        found = backend.NVTE_No_Backend
    return (found, "") if one_object else found


def _rotated(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """``apply_rope.cpp``: the same shape, contiguous."""
    return empty(x.shape, x.dtype)


def _softmax(scores: torch.Tensor, *rest: Any) -> torch.Tensor:
    """``softmax.cpp``: probabilities in a new tensor."""
    return empty(scores.shape, scores.dtype)


def _softmax_backward(gradient: torch.Tensor, *rest: Any) -> torch.Tensor:
    """``softmax.cpp``: a new gradient; before 2.19, over the one that it gets."""
    in_place = (release_in(version()) or NEWEST) < _SOFTMAX_MAKES_A_GRADIENT
    return gradient if in_place else empty(gradient.shape, gradient.dtype)


def fused_qkv_rope_forward(qkv: torch.Tensor, q: Any, k: Any, start: Any, split: Any, *rest: Any) -> list[Any]:
    """``apply_rope.cpp``: separate query, key and value; ``split``: elements per group."""
    width = sum(split)
    lead = tuple(qkv.shape[:2])
    groups = prod(qkv.shape[2:]) // width
    head = split[1]
    return [empty([*lead, groups * n // head, head], qkv.dtype) for n in split]


def fused_qkv_rope_backward(dq: Any, dk: Any, dv: Any, q: Any, k: Any, split: Any, *rest: Any) -> torch.Tensor:
    heads = dq.shape[2] + dk.shape[2] + dv.shape[2]
    return empty([dq.shape[0], dq.shape[1], dk.shape[2], heads // dk.shape[2] * dk.shape[3]], dq.dtype)


def multi_tensor_transpose_to_bhsd(tensors: Any, original_format: str, outputs: Any = None) -> list[Any]:
    """``multi_tensor/``: [b, heads, s, d] of each, in ``outputs`` where they are given."""
    order = (1, 2, 0, 3) if original_format == "sbhd" else (0, 2, 1, 3)
    given = outputs or [None] * len(tensors)
    return [
        out if out is not None or t is None else empty([t.shape[i] for i in order], t.dtype)
        for t, out in zip(tensors, given, strict=True)
    ]


def thd_read_half_tensor(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
    """``attention.cpp``: a copy of one half of every sequence's tokens."""
    shape = list(tensor.shape)
    tokens = 0 if tensor.dim() == 3 else 1
    shape[tokens] //= 2
    return empty(shape, tensor.dtype)


def thd_read_second_half_lse(statistics: torch.Tensor, ends: Any, packed: bool, tokens: int) -> torch.Tensor:
    """``attention.cpp``: [heads, half of all tokens], or [b, heads, half of the longest sequence]."""
    shape = (statistics.shape[0], tokens) if packed else (*statistics.shape[:2], tokens)
    return empty(shape, statistics.dtype)
