"""Transformer Engine without a GPU: its real Python over kernels that only make their outputs.

Which tensors Transformer Engine allocates, saves and frees is decided by its Python (autograd functions of
``pytorch/module``, ``pytorch/attention``, ``pytorch/permutation.py``); its compiled half,
``transformer_engine_torch``, computes. Here that half is replaced by functions that allocate what the kernels
return and compute nothing; the Triton kernels, whose outputs are made in Python, are launched into nothing.

It takes the pure Python wheel alone (``INSTALL``). megatron-core looks for Transformer Engine once, when it is
imported, so a process takes Transformer Engine with ``load`` before that, or not at all (``leave``).

Outputs follow ``transformer_engine/pytorch/csrc/extensions`` of Transformer Engine 2.11; the tests pass with 2.11 to
2.20. What a kernel makes and drops inside is not seen, but for the sums of attention's backward.
"""

from __future__ import annotations

import enum
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import prod
from typing import Any

import torch

from bridge_memory.cards.generations import GENERATIONS
from bridge_memory.cards.rows import GPUS
from bridge_memory.rehearsal import imports
from bridge_memory.rehearsal.patches import META, _Done, coalesced, replaced
from bridge_memory.rehearsal.world import RehearsalUnavailable
from bridge_memory.releases import release_in, release_words

PACKAGE = "transformer_engine"
COMPILED = "transformer_engine_torch"
#: Releases whose calls of its compiled half are known, as tests/te passed with them.
OLDEST, NEWEST = (2, 10), (2, 20)
#: From here on attention in fp8 keeps one statistic of the softmax as any other does.
_ONE_STATISTIC = (2, 15)
#: From here on the kernels' choice is told whether they must be deterministic.
_TOLD_DETERMINISM = (2, 12)
#: From here on there is no kernel of its own for attention over 512 tokens and fewer.
_NO_SHORT_ATTENTION = (2, 16)
#: How to get its Python alone; pydantic is what its recipes are written with.
INSTALL = 'pip install --no-deps "transformer_engine==2.20.2" && pip install pydantic packaging'
#: What Transformer Engine chooses its paths by: the GPU, and the versions of its libraries.
COMPUTE_CAPABILITY = GENERATIONS
CUDNN_VERSION = 92100
CUBLAS_VERSION = 130000
CUDA_VERSION = "13.0"
#: ``common/util/multi_stream.cpp``: streams that grouped GEMMs are spread over.
CUBLAS_STREAMS = 4
#: Modules of megatron-core (0.13 to 0.19) with Triton kernels of their own, launched into nothing likewise.
MEGATRON_TRITON = (
    "fusions.fused_indices_converter", "fusions.fused_mla_yarn_rope_apply", "fusions.fused_pad_routing_map",
    "ssm.mamba_mixer",
)  # fmt: skip


def why_not() -> str:
    """Why Transformer Engine cannot be rehearsed here, in words that follow its name; empty where it can."""
    if loaded():
        return ""
    if importlib.util.find_spec(PACKAGE) is None:
        return "its Python is not installed"
    try:
        here = version()
    except importlib.metadata.PackageNotFoundError:
        return "its release is not known"
    if not OLDEST <= (release_in(here) or (0, 0)) <= NEWEST:
        known = f"{release_words(OLDEST)} to {release_words(NEWEST)}"
        return f"its release here ({here}) is none of {known}"
    return next(
        (f"{name} is not installed" for name in ("pydantic", "packaging") if importlib.util.find_spec(name) is None), ""
    )


def loaded() -> bool:
    """Whether this process runs Transformer Engine over these kernels."""
    return isinstance(sys.modules.get(COMPILED), _Kernels)


def load() -> None:
    """Import Transformer Engine over kernels that compute nothing, for the life of this process.

    Raises RehearsalUnavailable when it cannot be rehearsed, or when megatron-core was imported without it.
    """
    if loaded():
        return
    if why := why_not():
        raise RehearsalUnavailable(
            f"transformer_impl (transformer_engine) cannot be rehearsed: {why}; install it with: {INSTALL}"
        )
    if "megatron.core" in sys.modules or PACKAGE in sys.modules:
        raise RehearsalUnavailable(
            "megatron-core or Transformer Engine is already imported in this process; "
            "run the rehearsal with transformer_impl transformer_engine in a process of its own"
        )
    if (release_in(version()) or NEWEST) < _NO_SHORT_ATTENTION:
        ENUMS["NVTE_Fused_Attn_Backend"] = _enum(
            "NVTE_Fused_Attn_Backend", _nvte("F16_max512_seqlen F16_arbitrary_seqlen FP8 No_Backend")
        )
    sys.modules[COMPILED] = _Kernels()
    with ExitStack() as stack:
        stack.enter_context(imports.stand_ins("triton", *imports.missing("onnxscript", "onnx")))
        # Keeps ``transformer_engine/common`` from loading the shared libraries.
        stack.enter_context(_environment("NVTE_PROJECT_BUILDING", "1"))
        stack.enter_context(replaced(torch.version, "cuda", CUDA_VERSION))
        stack.enter_context(_gpu("hopper"))
        _package_alone()
        common = importlib.import_module(f"{PACKAGE}.common")
        vars(common)["load_framework_extension"] = lambda framework: None
        importlib.import_module(f"{PACKAGE}.pytorch")
        with suppress(ImportError):
            imports.import_megatron_core()
        for name in MEGATRON_TRITON:
            with suppress(ImportError):
                importlib.import_module(f"megatron.core.{name}")


def leave() -> None:
    """Let megatron-core find no Transformer Engine, for the life of this process."""
    if PACKAGE not in sys.modules:
        sys.modules[PACKAGE] = None  # type: ignore[assignment]


def version() -> str:
    """The release of Transformer Engine that is installed."""
    return importlib.metadata.version(PACKAGE)


def _package_alone() -> None:
    """Make the package importable bit by bit: its ``__init__`` imports everything at once."""
    found = importlib.util.find_spec(PACKAGE)
    assert found is not None
    package = types.ModuleType(PACKAGE)
    package.__path__ = list(found.submodule_search_locations or ())
    package.__spec__ = found
    package.__version__ = version()  # type: ignore[attr-defined]
    sys.modules[PACKAGE] = package


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# ---- the GPU that it asks for ----------------------------------------------------------------------


class _Device:
    """Properties of the GPU that the rehearsal stands on."""

    multi_processor_count = GPUS["H200"].multiprocessors
    total_memory = GPUS["H200"].capacity_bytes
    name = "rehearsal"

    def __init__(self, arch: str) -> None:
        self.major, self.minor = COMPUTE_CAPABILITY[arch]


@contextmanager
def _gpu(arch: str) -> Iterator[None]:
    device = _Device(arch)
    with ExitStack() as stack:
        for name, value in (
            ("get_device_properties", lambda *a: device),
            ("get_device_capability", lambda *a: (device.major, device.minor)),
        ):
            stack.enter_context(replaced(torch.cuda, name, value))
        yield


# ---- enumerations ---------------------------------------------------------------------------------


def _enum(name: str, members: str) -> Any:
    return enum.IntEnum(name, members.split(), start=0)


_QKV_LAYOUTS = (
    "SB3HD SBH3D SBHD_SB2HD SBHD_SBH2D SBHD_SBHD_SBHD BS3HD BSH3D BSHD_BS2HD BSHD_BSH2D BSHD_BSHD_BSHD "
    "T3HD TH3D THD_T2HD THD_TH2D THD_THD_THD SBHD_BSHD_BSHD BSHD_SBHD_SBHD THD_BSHD_BSHD THD_SBHD_SBHD "
    "Paged_KV_BSHD_BSHD_BSHD Paged_KV_BSHD_SBHD_SBHD Paged_KV_SBHD_BSHD_BSHD Paged_KV_SBHD_SBHD_SBHD "
    "Paged_KV_THD_BSHD_BSHD Paged_KV_THD_SBHD_SBHD BHSD_BHSD_BHSD QKV_Layout_NOT_SET"
)


def _nvte(members: str) -> str:
    return " ".join(f"NVTE_{m}" for m in members.split())


ENUMS = {
    # The members that the bindings export, with the values of ``transformer_engine.h``.
    "DType": enum.IntEnum(
        "DType",
        {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7,
         "kFloat8E5M2": 8, "kFloat4E2M1": 10},
    ),
    "FP8FwdTensors": _enum(
        "FP8FwdTensors",
        "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
        "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
    ),
    "FP8BwdTensors": _enum(
        "FP8BwdTensors", "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3"
    ),
    "Float8BlockScaleTensorFormat": _enum("Float8BlockScaleTensorFormat", "GEMM_READY COMPACT INVALID"),
    "CommOverlapType": _enum("CommOverlapType", "RS AG"),
    "CommOverlapAlgo": _enum("CommOverlapAlgo", "NONE"),
    "NVTE_QKV_Layout": _enum("NVTE_QKV_Layout", _nvte(_QKV_LAYOUTS)),
    "NVTE_QKV_Format": _enum(
        "NVTE_QKV_Format", _nvte("SBHD BSHD THD BSHD_2SBHD SBHD_2BSHD THD_2BSHD THD_2SBHD BHSD QKV_Format_NOT_SET")
    ),
    "NVTE_Bias_Type": _enum("NVTE_Bias_Type", _nvte("NO_BIAS PRE_SCALE_BIAS POST_SCALE_BIAS ALIBI")),
    "NVTE_Mask_Type": _enum(
        "NVTE_Mask_Type",
        _nvte(
            "NO_MASK PADDING_MASK CAUSAL_MASK PADDING_CAUSAL_MASK CAUSAL_BOTTOM_RIGHT_MASK "
            "PADDING_CAUSAL_BOTTOM_RIGHT_MASK"
        ),
    ),
    "NVTE_Softmax_Type": _enum(
        "NVTE_Softmax_Type", _nvte("VANILLA_SOFTMAX OFF_BY_ONE_SOFTMAX LEARNABLE_SOFTMAX")
    ),
    "NVTERoutingMapFormat": _enum("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8"),
    "NVTEQBHistogramMode": _enum("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC"),
    "NVTEScalingMode": _enum(
        "NVTEScalingMode",
        _nvte("DELAYED_TENSOR_SCALING MXFP8_1D_SCALING BLOCK_SCALING_1D BLOCK_SCALING_2D NVFP4_1D_SCALING"),
    ),
    # Python names them all, and compares (``cpp_extensions/fused_attn.py: FusedAttnBackend``).
    "NVTE_Fused_Attn_Backend": _enum("NVTE_Fused_Attn_Backend", _nvte("F16_arbitrary_seqlen FP8 No_Backend")),
}

_TORCH = {
    "kByte": torch.uint8, "kInt32": torch.int32, "kFloat32": torch.float32,
    "kFloat16": torch.float16, "kBFloat16": torch.bfloat16, "kFloat8E4M3": torch.float8_e4m3fn,
    "kFloat8E5M2": torch.float8_e5m2,
}  # fmt: skip


def _dtype(value: Any) -> torch.dtype:
    return value if isinstance(value, torch.dtype) else _TORCH[value.name]


# ---- kernels --------------------------------------------------------------------------------------


def _empty(shape: Sequence[int], dtype: Any) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=_dtype(dtype), device=META)


#: The matrix of NVFP4's Hadamard transform, one for the process.
_HADAMARD = torch.empty((16, 16), dtype=torch.bfloat16, device=META)


def _quantized(tensor: torch.Tensor, quantizer: Any, shape: Any = None) -> Any:
    """A tensor of this shape as the quantizer lays it out: its own Python makes the buffers.

    Where the GPU multiplies either layout, data scaled as a whole is made in one (``quantizer.cpp: Float8Quantizer``).
    """
    if type(quantizer).__name__.startswith(("Float8Quantizer", "Float8CurrentScaling")) and _any_layout():
        quantizer = quantizer.copy()
        quantizer.set_usage(rowwise=True, columnwise=False)
    made = quantizer.make_empty(tuple(shape or tensor.shape), dtype=tensor.dtype, device=torch.device("cuda"))
    if quantizer.internal:
        return _storage_of(made)
    return made


def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: Any, pinned: bool = False
) -> Any:
    """``quantizer.cpp: create_tensor``, which makes what ``make_empty`` of each quantizer made before 2.16."""
    shape = tuple(shape)
    kinds = {c.__name__ for c in type(quantizer).__mro__}
    if kinds & {"Float8Quantizer", "Float8CurrentScalingQuantizer"}:
        rows = quantizer.rowwise_usage or _any_layout()
        columns = quantizer.columnwise_usage and not _any_layout()
        return _module("tensor.float8_tensor").Float8Tensor(
            shape=shape, dtype=dtype, fp8_dtype=quantizer.dtype, quantizer=quantizer, device=torch.device(META),
            data=_empty(shape, torch.uint8) if rows else None,
            data_transpose=_empty([shape[-1], *shape[:-1]], torch.uint8) if columns else None,
            fp8_scale_inv=_empty([1], torch.float32),
        )  # fmt: skip
    if "NVFP4Quantizer" in kinds:
        return _nvfp4_tensor(quantizer, shape, dtype)
    blockwise = "Float8BlockQuantizer" in kinds
    if not blockwise and "MXFP8Quantizer" not in kinds:
        raise RehearsalUnavailable(f"Transformer Engine's {type(quantizer).__name__} is not known to the rehearsal")
    parts: dict[str, Any] = {}
    for columnwise, used in ((False, quantizer.rowwise_usage), (True, quantizer.columnwise_usage)):
        data, scales = None, None
        if used:
            data = _empty(quantizer.get_columnwise_shape(shape) if columnwise else shape, torch.uint8)
            scales = _empty(quantizer.get_scale_shape(shape, columnwise), torch.float32 if blockwise else torch.uint8)
        kind = "columnwise" if columnwise else "rowwise"
        parts |= {f"{kind}_data": data, f"{kind}_scale_inv": scales}
    if blockwise:
        return _module("tensor.float8_blockwise_tensor").Float8BlockwiseQTensor(
            shape=shape, dtype=dtype, fp8_dtype=quantizer.dtype, quantizer=quantizer,
            is_2D_scaled=quantizer.block_scaling_dim == 2, **parts,
        )  # fmt: skip
    return _module("tensor.mxfp8_tensor").MXFP8Tensor(
        shape=shape, dtype=dtype, fp8_dtype=quantizer.dtype, quantizer=quantizer, with_gemm_swizzled_scales=False,
        **parts,
    )  # fmt: skip


def _nvfp4_tensor(quantizer: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Two values a byte, a scale of one for each 16, and the largest of all, in either layout."""
    parts: dict[str, Any] = {}
    flat = (prod(shape[:-1]), shape[-1])
    for kind, used, laid_out in (
        ("rowwise", quantizer.rowwise_usage, shape),
        ("columnwise", quantizer.columnwise_usage, quantizer.get_columnwise_shape(flat)),
    ):
        scales = quantizer.get_scale_shape(shape, kind == "columnwise") if used else ()
        parts |= {
            f"{kind}_data": _empty([*laid_out[:-1], laid_out[-1] // 2], torch.uint8) if used else None,
            f"{kind}_scale_inv": _empty(scales, torch.uint8) if used else None,
            f"amax_{kind}": _empty([1], torch.float32) if used else None,
        }
    return _module("tensor.nvfp4_tensor").NVFP4Tensor(
        shape=shape, dtype=dtype, fp4_dtype=quantizer.dtype, quantizer=quantizer, with_gemm_swizzled_scales=False,
        **parts,
    )  # fmt: skip


def _any_layout() -> bool:
    return bool(_module("utils").is_non_tn_fp8_gemm_supported())


def _storage_of(tensor: Any) -> Any:
    """The bare storage that kernels return where the quantizer is internal to a module."""
    metadata = tensor.get_metadata()
    base = next(c for c in type(tensor).__mro__ if c.__name__.endswith("TensorStorage"))
    try:
        return base(**metadata)
    except TypeError:
        return base(**{k: v for k, v in metadata.items() if k != "dtype"})


def _is_quantized(tensor: Any) -> bool:
    return any(c.__name__ in ("QuantizedTensorStorage", "QuantizedTensorBase") for c in type(tensor).__mro__)


def _shape(tensor: Any) -> tuple[int, ...]:
    """As the kernels see it: of fp8 data that is there in its transposed layout alone, the last dimension is the first
    of that (``quantizer.cpp: Float8Quantizer::create_tensor``). TE's own ``size()`` is so for matrices only."""
    if getattr(tensor, "_data", tensor) is None and getattr(tensor, "_transpose", None) is not None:
        last, *rows = tensor._transpose.size()
        return (*rows, last)
    return tuple(tensor.size())


def generic_gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Any, quantizer: Any, out_dtype: Any, bias: Any,
    bias_dtype: Any, gelu: bool, gelu_in: Any, grad: bool, *rest: Any, extra_output: Any = None, **_: Any,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """``gemm.cpp: gemm``: the product unless ``out`` is given, and the bias gradient in backward."""
    a_shape, b_shape = _shape(a), _shape(b)
    if out is None:
        rows = [b_shape[-1]] if transb else list(b_shape[:-1])
        columns = prod(a_shape[:-1]) if transa else a_shape[-1]
        dtype = out_dtype if out_dtype is not None else a.dtype
        out = _empty([*rows, columns], dtype)
        if quantizer is not None:
            out = _quantized(out, quantizer)
    bias_grad = _empty([b_shape[-1]], bias_dtype) if grad and bias is not None else None
    return out, bias_grad, None, extra_output


def te_general_grouped_gemm(*args: Any) -> Any:
    """``gemm.cpp: te_general_grouped_gemm``: writes into the outputs that Python made."""
    return args[7]


def _normalized(x: torch.Tensor, out: Any, quantizer: Any, otype: Any) -> Any:
    if out is not None:
        return out
    if quantizer is None:
        return _empty(x.shape, otype)
    return _quantized(torch.empty((), dtype=_dtype(otype), device=META), quantizer, x.shape)


def rmsnorm_fwd(x: Any, weight: Any, eps: float, out: Any, quantizer: Any, otype: Any, *rest: Any) -> list[Any]:
    """``normalization.cpp``: the output and one fp32 reciprocal a row."""
    return [_normalized(x, out, quantizer, otype), None, _empty([prod(x.shape[:-1])], torch.float32)]


def rmsnorm_bwd(dz: Any, x: Any, rsigma: Any, gamma: Any, *rest: Any) -> list[torch.Tensor]:
    return [_empty(x.shape, x.dtype), _empty(gamma.shape, gamma.dtype)]


def layernorm_fwd(
    x: Any, weight: Any, bias: Any, eps: float, out: Any, quantizer: Any, otype: Any, *rest: Any
) -> list[Any]:
    """``normalization.cpp``: the output, a mean and a reciprocal a row, in fp32."""
    rows = [prod(x.shape[:-1])]
    made = _normalized(x, out, quantizer, otype)
    return [made, _empty(rows, torch.float32), _empty(rows, torch.float32)]


def layernorm_bwd(dz: Any, x: Any, mu: Any, rsigma: Any, gamma: Any, *rest: Any) -> list[torch.Tensor]:
    return [_empty(x.shape, x.dtype), _empty(gamma.shape, gamma.dtype), _empty(gamma.shape, gamma.dtype)]


def _heads(args: Sequence[Any]) -> list[Any]:
    """Query, key and value: the first arguments with heads, whatever the release puts before them."""
    return [a for a in args if (isinstance(a, torch.Tensor) or _is_quantized(a)) and len(_shape(a)) >= 3][:3]


def _enum_among(args: Sequence[Any], kind: str) -> Any:
    return next(a for a in args if isinstance(a, ENUMS[kind]))


def fused_attn_fwd(*args: Any) -> list[Any]:
    """``attention.cpp``: the output, fp32 statistics of the softmax a query and head, the random state.

    fp8 keeps two statistics (maximum and reciprocal sum) before 2.15, and quantizes its output where it has a
    quantizer.
    """
    layout = _enum_among(args, "NVTE_QKV_Layout").name
    query, _, value = _heads(args)
    shape = _shape(query)
    fake = next(a for a in args if isinstance(a, torch.dtype))
    out: Any = _empty([*shape[:-1], _shape(value)[-1]], fake)
    fp8 = _is_quantized(query)
    if fp8:
        quantizers = [a for a in args if hasattr(a, "make_empty")]
        output = quantizers[-1]
        if type(output).__name__ == "Float8Quantizer":
            out = _quantized(out, output)
    query_layout = layout.removeprefix("NVTE_").removeprefix("Paged_KV_").split("_")[0].replace("3", "")
    if query_layout.startswith("T"):
        rows = [shape[0], shape[1], 1]
    elif query_layout.startswith("SB"):
        rows = [shape[1], shape[2], shape[0], 1]
    else:
        rows = [shape[0], shape[2], shape[1], 1]
    two = fp8 and (release_in(version()) or NEWEST) < _ONE_STATISTIC
    statistics = [_empty(rows, torch.float32) for _ in range(1 + two)]
    random = _empty([2], torch.int64)
    offset = []
    if _enum_among(args, "NVTE_Softmax_Type").name != "NVTE_VANILLA_SOFTMAX":
        offset = [a for a in args[20:] if isinstance(a, torch.Tensor) and a.dim() == 4 and a.shape[0] == 1][-1:]
    return [out, *statistics, random, *offset]


def fused_attn_bwd(*args: Any) -> list[Any]:
    """``attention.cpp``: gradients of query, key and value; of a learnable softmax offset too.

    The kernel sums the query's gradient in fp32 and takes one fp32 sum a row; cuDNN's own, which this takes for
    what FlashAttention documents.
    """
    query, key, value = _heads(args)
    gradient_of = [a for a in args if isinstance(a, torch.dtype)]
    dtype = gradient_of[0] if gradient_of else query.dtype
    made: list[Any] = [_empty(_shape(t), dtype) for t in (query, key, value)]
    _empty([4 * (prod(_shape(query)) + prod(_shape(query)[:-1]))], torch.uint8)
    learnable = _enum_among(args, "NVTE_Softmax_Type").name == "NVTE_LEARNABLE_SOFTMAX"
    heads = _shape(query)[-2]
    return [*made, None, _empty([1, heads, 1, 1], torch.float32) if learnable else None]


class _FlashAttention(torch.autograd.Function):
    """flash-attn 2.8 ``flash_attn_interface.py: FlashAttnFunc``, ``csrc/flash_attn/flash_api.cpp: mha_fwd, mha_bwd``:
    the output, fp32 log-sum-exps [b, a, s], the random state. Backward sums the query's gradient in fp32, takes one
    fp32 sum a row, and has gradients of keys and values for every head of the queries before it sums those of a group.
    """

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = _empty(query.shape, query.dtype)
        rows = _empty([*query.shape[:-3], query.shape[-2], query.shape[-3]], torch.float32)
        ctx.save_for_backward(query, key, value, out, rows, _empty([2], torch.int64))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, ...]:
        query, key, value, *_ = ctx.saved_tensors
        made = tuple(_empty(t.shape, t.dtype) for t in (query, key, value))
        held = [_empty([4 * (prod(query.shape) + prod(query.shape[:-1]))], torch.uint8)]
        if key.shape[-2] != query.shape[-2]:
            held += [_empty(query.shape, query.dtype) for _ in (key, value)]
        return made


def fa_prepare_fwd(mixed: torch.Tensor) -> torch.Tensor:
    """``attention.cpp``: query, key and value of [s, b, a, 3 d] as [3, b, s, a, d]."""
    s, b, heads, width = mixed.shape
    return _empty([3, b, s, heads, width], mixed.dtype)


def fa_prepare_bwd(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``attention.cpp``: their gradients, each [b, s, a, d], as [s, b, a, 3 d]."""
    b, s, heads, width = query.shape
    return _empty([s, b, heads, 3 * width], query.dtype)


def flash_attn_func(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """FlashAttention 2, of sequences of one length or packed ones."""
    out: torch.Tensor = _FlashAttention.apply(query, key, value)
    return out


#: Of flash-attn; every release of Transformer Engine that is known here takes it.
FLASH_ATTENTION = "2.8.3"


@contextmanager
def flash_attention() -> Iterator[None]:
    """flash-attn as Transformer Engine finds it (``backends.py``, ``utils.py: FlashAttentionUtils``)."""
    backends = _module("attention.dot_product_attention.backends")
    utils = getattr(_module("attention.dot_product_attention.utils"), "FlashAttentionUtils", None)
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


def get_fused_attn_backend(asked: Any, *rest: Any) -> Any:
    """cuDNN's attention for any length; in fp8 where query, key and value are.

    Before 2.12 Python says that none is deterministic on Blackwell; from then on this is told, and measured runs with
    2.17 and 2.18 go on without. From 2.20 on it is asked of one object, and the answer comes with why not.
    """
    backend, together = ENUMS["NVTE_Fused_Attn_Backend"], not rest
    dtype = asked.qkv_dtype if together else rest[0]
    told = (release_in(version()) or NEWEST) >= _TOLD_DETERMINISM
    deterministic = asked.deterministic if together else told and rest[-1]
    found = backend.NVTE_FP8 if dtype.name.startswith("kFloat8") else backend.NVTE_F16_arbitrary_seqlen
    if deterministic and torch.cuda.get_device_capability() >= COMPUTE_CAPABILITY["blackwell"]:
        found = backend.NVTE_No_Backend
    return (found, "") if together else found


def _rotated(x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """``apply_rope.cpp``: the same shape, contiguous."""
    return _empty(x.shape, x.dtype)


def _softmax(scores: torch.Tensor, *rest: Any) -> torch.Tensor:
    """``softmax.cpp``: probabilities in a tensor of their own."""
    return _empty(scores.shape, scores.dtype)


def _softmax_backward(gradient: torch.Tensor, *rest: Any) -> torch.Tensor:
    """``softmax.cpp``: "produce gradients in place"."""
    return gradient


def fused_qkv_rope_forward(qkv: torch.Tensor, q: Any, k: Any, start: Any, split: Any, *rest: Any) -> list[Any]:
    """``apply_rope.cpp``: query, key and value apart; ``split`` in elements a group."""
    width = sum(split)
    lead = tuple(qkv.shape[:2])
    groups = prod(qkv.shape[2:]) // width
    head = split[1]
    return [_empty([*lead, groups * n // head, head], qkv.dtype) for n in split]


def fused_qkv_rope_backward(dq: Any, dk: Any, dv: Any, q: Any, k: Any, split: Any, *rest: Any) -> torch.Tensor:
    heads = dq.shape[2] + dk.shape[2] + dv.shape[2]
    return _empty([dq.shape[0], dq.shape[1], dk.shape[2], heads // dk.shape[2] * dk.shape[3]], dq.dtype)


def fused_topk_with_score_function_fwd(logits: torch.Tensor, *rest: Any, **named: Any) -> list[torch.Tensor]:
    """``router.cpp``: probabilities, the routing map, and the scores that backward reads."""
    return [_empty(logits.shape, logits.dtype), _empty(logits.shape, torch.bool), _empty(logits.shape, logits.dtype)]


def fused_topk_with_score_function_bwd(*args: Any) -> torch.Tensor | None:
    """The gradient of the logits, [tokens, experts], which later releases make in Python and hand in last."""
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    if isinstance(args[0], torch.Tensor):
        return None
    return _empty(args[:2], tensors[-1].dtype)


def fused_moe_aux_loss_fwd(probs: torch.Tensor, *rest: Any, **named: Any) -> list[torch.Tensor]:
    """``router.cpp``: the loss and one coefficient."""
    return [_empty([], probs.dtype), _empty([], torch.float32)]


def fused_score_for_moe_aux_loss_bwd(
    *, intermediate_output: Any, grad_logits: Any = None, **rest: Any
) -> torch.Tensor | None:
    """The gradient of the logits, which later releases make in Python and hand in."""
    return None if grad_logits is not None else _empty(intermediate_output.shape, intermediate_output.dtype)


def fused_moe_aux_loss_bwd(*, num_rows: int, num_cols: int, grad_aux_loss: Any, **rest: Any) -> torch.Tensor:
    """``router.cpp``: the gradient of the probabilities."""
    return _empty([num_rows, num_cols], grad_aux_loss.dtype)


def quantize(tensor: Any, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """``cast.cpp: quantize``: into ``output``, or into what the quantizer makes."""
    return _quantized(tensor, quantizer) if output is None else output


def split_quantize(tensor: torch.Tensor, sections: Sequence[int], quantizers: Sequence[Any], **rest: Any) -> list[Any]:
    """``cast.cpp: split_quantize``: every part on its own."""
    return [_quantized(p, q) for p, q in zip(torch.split(tensor, list(sections)), quantizers, strict=True)]


def bgrad_quantize(tensor: torch.Tensor, quantizer: Any) -> list[Any]:
    """``bias.cpp``: the sum over rows, and the quantized tensor."""
    return [_empty([tensor.shape[-1]], tensor.dtype), _quantized(tensor, quantizer)]


def dequantize(tensor: Any, dtype: Any) -> torch.Tensor:
    return _empty(_shape(tensor), dtype)


def fp8_transpose(data: torch.Tensor, dtype: Any, *, out: Any = None) -> torch.Tensor:
    """``transpose.cpp``: last dimension first."""
    return _empty([data.shape[-1], *data.shape[:-1]], data.dtype) if out is None else out


def swap_first_dims(tensor: torch.Tensor, *, out: Any = None) -> torch.Tensor:
    return _empty([tensor.shape[1], tensor.shape[0], *tensor.shape[2:]], tensor.dtype) if out is None else out


def multi_tensor_transpose_to_bhsd(tensors: Any, original_format: str, outputs: Any = None) -> list[Any]:
    """``multi_tensor/``: [b, heads, s, d] of each, in ``outputs`` where they are given."""
    order = (1, 2, 0, 3) if original_format == "sbhd" else (0, 2, 1, 3)
    given = outputs or [None] * len(tensors)
    return [
        out if out is not None or t is None else _empty([t.shape[i] for i in order], t.dtype)
        for t, out in zip(tensors, given, strict=True)
    ]


def multi_tensor_l2norm(chunk: int, noop: Any, lists: Any, per_tensor: Any = False, *rest: Any) -> tuple[Any, Any]:
    count = len(lists[0]) if per_tensor else 0
    return _empty([1], torch.float32), _empty([count], torch.float32)


def thd_read_half_tensor(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
    """``attention.cpp``: one half of every sequence's tokens, a copy."""
    shape = list(tensor.shape)
    tokens = 0 if tensor.dim() == 3 else 1
    shape[tokens] //= 2
    return _empty(shape, tensor.dtype)


def thd_read_second_half_lse(statistics: torch.Tensor, ends: Any, packed: bool, tokens: int) -> torch.Tensor:
    """``attention.cpp``: [heads, half of all tokens], or [b, heads, half of the longest sequence]."""
    shape = (statistics.shape[0], tokens) if packed else (*statistics.shape[:2], tokens)
    return _empty(shape, statistics.dtype)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _Kernels(types.ModuleType):
    """``transformer_engine_torch``. A kernel that is not here is refused by name, when it is called."""

    def __init__(self) -> None:
        super().__init__(COMPILED)
        self.__spec__ = importlib.machinery.ModuleSpec(COMPILED, None)
        self.__all__: list[str] = []
        known: dict[str, Any] = dict(ENUMS)
        known.update(
            (f.__name__, f)
            for f in (
                generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd, layernorm_bwd,
                fused_attn_fwd, fused_attn_bwd, fa_prepare_fwd, fa_prepare_bwd, get_fused_attn_backend,
                fused_qkv_rope_forward,
                fused_qkv_rope_backward, fused_topk_with_score_function_fwd, fused_topk_with_score_function_bwd,
                fused_score_for_moe_aux_loss_bwd, fused_moe_aux_loss_fwd, fused_moe_aux_loss_bwd, quantize,
                split_quantize, bgrad_quantize, thd_read_half_tensor, thd_read_second_half_lse, dequantize,
                fp8_transpose, multi_tensor_transpose_to_bhsd,
                swap_first_dims, multi_tensor_l2norm, create_empty_quantized_tensor,
            )
        )  # fmt: skip
        known.update(
            fused_rope_forward=_rotated,
            fused_rope_backward=_rotated,
            fused_score_for_moe_aux_loss_fwd=fused_topk_with_score_function_fwd,
            multi_tensor_unscale_l2norm=multi_tensor_l2norm,
            get_cudnn_version=lambda: CUDNN_VERSION,
            get_cublasLt_version=lambda: CUBLAS_VERSION,
            get_num_cublas_streams=lambda: CUBLAS_STREAMS,
            get_stream_priority_range=lambda *a: (-5, 0),
            device_supports_multicast=lambda *a: False,
            ubuf_built_with_mpi=lambda: False,
        )
        for kind in ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked"):
            known |= {f"{kind}_softmax_forward": _softmax, f"{kind}_softmax_backward": _softmax_backward}
        for name in (
            "multi_tensor_scale", "multi_tensor_adam", "multi_tensor_adam_fp8", "multi_tensor_adam_capturable",
            "multi_tensor_adam_capturable_master", "multi_tensor_adam_param_remainder", "multi_tensor_sgd",
            "multi_tensor_compute_scale_and_scale_inv", "multi_tensor_compute_scale_inv_e8m0",
            "fused_amax_and_scale_update_after_reduction", "compute_amax", "fused_multi_row_padding",
            "fused_multi_row_unpadding",
            "multi_tensor_swizzle_scales_for_gemm_unchecked_",
            "thd_out_correction", "thd_grad_correction", "thd_second_half_lse_correction",
        ):  # fmt: skip
            known[name] = _nothing
        for name, value in known.items():
            setattr(self, name, value)
        self.__all__ = sorted(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        class Unknown:
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                raise RehearsalUnavailable(f"Transformer Engine's kernel {name} is not known to the rehearsal")

        Unknown.__name__ = name
        setattr(self, name, Unknown)
        return Unknown


# ---- while a rank runs ----------------------------------------------------------------------------


def _module(name: str) -> Any:
    return sys.modules.get(f"{PACKAGE}.pytorch.{name}") or types.ModuleType(name)


@contextmanager
def running(arch: str = "hopper", *, fp8_parameters: bool = False, flash: bool = False) -> Iterator[None]:
    """What Transformer Engine asks of torch.cuda, answered; its workspaces and caches gone afterwards.

    ``fp8_parameters``: modules quantize their parameters as they are built (``module/base.py: reset_parameters``).
    ``flash``: flash-attn is there beside cuDNN.
    """
    gemm = _module("cpp_extensions.gemm")
    with ExitStack() as stack:
        stack.enter_context(_gpu(arch))
        if flash:
            stack.enter_context(flash_attention())
        if fp8_parameters:
            stack.enter_context(_parameters_made_at_once())
        for owner, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (torch.version, "cuda", CUDA_VERSION),
            # The ring of context parallelism (``context_parallel.py: flash_attn_p2p_communicate``).
            (torch.distributed, "batch_isend_irecv", lambda operations: [_Done() for _ in operations]),
            # Data and scales of a quantized tensor are gathered together (``distributed.py``).
            (_module("distributed"), "_get_cuda_rng_state", lambda *a, **k: torch.zeros(16, dtype=torch.uint8)),
            (_module("distributed"), "_set_cuda_rng_state", lambda *a, **k: None),
            (torch.distributed, "_coalescing_manager", coalesced),
            # Asked of a gradient and 1.0, which differ in shape (``triton/cross_entropy.py: cross_entropy_backward``).
            (torch, "equal", lambda a, b: a.shape == b.shape),
            # True of tensors on the host too: counts of tokens, which the rehearsal knows from the start.
            (torch.Tensor, "is_cuda", property(lambda tensor: True)),
            (torch.Tensor, "record_stream", lambda *a: None),
            (gemm, "get_tensor_device", lambda tensor: torch.cuda.current_device()),
        ):
            stack.enter_context(replaced(owner, name, value))
        for name, module in list(sys.modules.items()):
            if name.startswith(f"{PACKAGE}.") and "canonicalize_device" in vars(module):
                stack.enter_context(replaced(module, "canonicalize_device", lambda device: torch.device(META)))
        nvfp4 = _module("tensor.nvfp4_tensor")
        if hasattr(nvfp4, "get_rht_matrix"):
            # Signs of the Hadamard transform are numbers, of which the rehearsal has none.
            stack.enter_context(replaced(nvfp4, "get_random_sign_mask_for_rht", lambda *a, **k: 1))
            stack.enter_context(replaced(nvfp4, "get_rht_matrix", lambda *a, **k: _HADAMARD))
        _forget()
        try:
            yield
        finally:
            _forget()


@contextmanager
def _parameters_made_at_once() -> Iterator[None]:
    """A module that is told the device "meta", by this word, puts its parameters off; of the device itself it makes
    them, but for grouped linears from 2.20 on, which look at its type (``module/grouped_linear.py``). What it keeps of
    them on the host, until the optimizer is built, has no data either."""
    grouped: Any = getattr(_module("module.grouped_linear"), "GroupedLinear", None)
    to_host = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if tensor.is_meta else to_host(tensor, *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(replaced(torch.cuda, "current_device", lambda: torch.device(META)))
        stack.enter_context(replaced(torch.Tensor, "cpu", cpu))
        if grouped is not None:
            reset = grouped.reset_parameters
            stack.enter_context(replaced(grouped, "reset_parameters", lambda self, defer_init=False: reset(self)))
        yield


#: Functions that remember the device or what they allocated on it, by module.
_CACHED = (
    ("cpp_extensions.gemm", "get_cublas_workspace"), ("utils", "_get_device_compute_capability"),
    ("utils", "is_non_tn_fp8_gemm_supported"), ("utils", "get_sm_count"),
    *(("quantization", f"check_{kind}_support") for kind in ("fp8", "mxfp8", "nvfp4", "fp8_block_scaling")),
)  # fmt: skip


#: What later releases remember of the GPU in variables (``quantization.py: check_fp8_support``).
_ANSWERS = ("_FP8_SUPPORT", "_MXFP8_SUPPORT", "_NVFP4_SUPPORT", "_FP8_BLOCK_SCALING_SUPPORT")


def _forget() -> None:
    """Workspaces (one set a process), dummy weight gradients (one a shape), lengths of sequences, the GPU."""
    for module, name in _CACHED:
        function = getattr(_module(module), name, None)
        clear = getattr(function, "cache_clear", None)
        if clear is not None:
            clear()
    attention = "attention.dot_product_attention.utils"
    for module, name in (("module.base", "_dummy_wgrads"), (attention, "_cu_seqlens_cache")):
        kept = getattr(_module(module), name, None)
        if isinstance(kept, dict):
            kept.clear()
    # The backend that was chosen last, for as long as its parameters are asked for again, whatever is allowed by then.
    backends = getattr(_module("attention.dot_product_attention.dot_product_attention"), "_attention_backends", None)
    if isinstance(backends, dict):
        backends["attention_params"] = None
    quantization = _module("quantization")
    for name in _ANSWERS:
        if hasattr(quantization, name):
            setattr(quantization, name, None)
    fp8 = getattr(quantization, "FP8GlobalStateManager", None)
    if fp8 is not None:
        fp8.reset()
