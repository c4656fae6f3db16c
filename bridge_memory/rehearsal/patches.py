"""Everything megatron-core needs in order to run a rank without that rank's GPUs, in one place.

Seen to run with torch 2.13.0 (for CPU, and its CUDA build without a GPU) and megatron-core 0.13.1, 0.14.0, 0.15.3,
0.16.0, 0.16.1, 0.17.1, 0.18.0 and 0.19.2 (``tests/rehearsal/test_releases.py``): dense, experts, multi-latent
attention, Mamba, MTP, virtual stages, layout strings, recomputation, local and with Transformer Engine's Python. A name
that a release does not have is skipped; what a release cannot do is refused in one line that says which one can
(``model.py``). Not with every release: softmax sinks and windows in some of the layers from 0.15; gates on attention's
output, the gated delta net and hybrids with experts from 0.16. Each helper is a context manager that leaves no trace.

Tensors live on torch's meta device: they have shapes, dtypes, storages and an autograd graph, and no bytes.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import zip_longest
from math import gcd
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge_memory.rehearsal import compiled, imports, scan_kernels

META = "meta"
_ABSENT = object()


@contextmanager
def replaced(owner: object, name: str, value: object, *, add: bool = False) -> Iterator[None]:
    """Set ``owner.name`` for this block; without ``add``, skipped where the release has no such name, or not
    the owner either (None)."""
    own = _ABSENT if owner is None else vars(owner).get(name, _ABSENT)
    if own is _ABSENT and not add and not hasattr(owner, name):
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _module(name: str) -> Any:
    """The module, or an empty one in a release that does not have it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return types.ModuleType(name)


# ---- the device ----------------------------------------------------------------------------------


class _Stream:
    """A CUDA stream or event that orders nothing."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def record_event(self, *args: object) -> _Stream:
        return self

    def _nothing(self, *args: object, **kwargs: object) -> None:
        return None

    wait_stream = wait_event = wait = synchronize = record = _nothing


def _is_cuda(device: object) -> bool:
    if isinstance(device, int):
        return True
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _CudaIs(TorchFunctionMode):
    """``device="cuda"`` and ``.cuda()`` are written out in megatron-core; they mean another device here."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": self._device}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.empty and "device" not in kwargs:
            # ``moe/router.py`` makes its weight on the host and moves it.
            kwargs = {**kwargs, "device": self._device}
        name = getattr(func, "__name__", "")
        if name == "cuda" and args and isinstance(args[0], torch.Tensor):
            return args[0].to(self._device)
        if name == "to" and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], self._device, *args[2:])
        if name == "record_stream":
            return None
        return func(*args, **kwargs)


def _backward(tensors: Any, grad_tensors: Any = None, *_: object, **__: object) -> None:
    """``torch.autograd.backward`` as recomputation calls it, which as a torch function would switch modes off."""
    ends = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    grads = (grad_tensors,) if not isinstance(grad_tensors, (list, tuple)) else tuple(grad_tensors)
    torch.autograd.graph._engine_run_backward(
        ends, tuple(torch.ones_like(e) if g is None else g for e, g in zip(ends, grads, strict=True)),
        False, False, (), allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


@contextmanager
def no_gpu(device: str = META) -> Iterator[None]:
    """CUDA device, streams, events and random states of a machine that has none: ``device`` takes its place.

    megatron-core asks for ``torch.cuda.current_device()`` wherever it allocates, forks a CUDA random state
    around dropout and initialisation (``tensor_parallel/random.py``), and orders copies with streams
    (``moe/token_dispatcher.py``).
    """
    random = _module("megatron.core.tensor_parallel.random")
    with ExitStack() as stack:
        stream = _Stream()
        for name, value in (
            ("current_device", lambda: device),
            ("current_stream", lambda *a, **k: stream),
            ("default_stream", lambda *a, **k: stream),
            ("stream", lambda *a, **k: stream),
            ("Stream", _Stream),
            ("Event", _Stream),
            ("synchronize", lambda *a, **k: None),
            ("set_rng_state", lambda *a, **k: None),
            ("get_rng_state", lambda *a, **k: torch.zeros(16, dtype=torch.uint8, device="cpu")),
        ):
            stack.enter_context(replaced(torch.cuda, name, value))
        # The compiler asks for Triton, and Triton for the GPU's properties, when it reports what it did.
        stack.enter_context(replaced(_module("torch._dynamo.utils"), "has_triton", lambda: False))
        stack.enter_context(replaced(torch.autograd, "backward", _backward))
        stack.enter_context(replaced(torch.cuda.nvtx, "range_push", lambda *a, **k: None))
        stack.enter_context(replaced(torch.cuda.nvtx, "range_pop", lambda *a, **k: None))
        tracker = getattr(random, "CudaRNGStatesTracker", None)
        if tracker is not None:
            stack.enter_context(replaced(tracker, "fork", lambda self, name=None: nullcontext()))
            stack.enter_context(replaced(tracker, "get_states", lambda self: {}))
            stack.enter_context(replaced(tracker, "set_states", lambda self, states: None))
        stack.enter_context(replaced(random, "_set_cuda_rng_state", lambda *a, **k: None))
        stack.enter_context(
            replaced(random, "_get_cuda_rng_state", lambda *a, **k: torch.zeros(16, dtype=torch.uint8))
        )
        stack.enter_context(_CudaIs(device))
        yield


# ---- modules that refuse or need a kernel library ------------------------------------------------


def _torch_norm(
    cls: type,
    config: Any,
    hidden_size: int,
    eps: float = 1e-5,
    persist_layer_norm: bool = False,
    zero_centered_gamma: bool = False,
    normalization: str = "LayerNorm",
) -> torch.nn.Module:
    """torch's norm, as ``transformer/torch_norm.py: WrappedTorchNorm`` builds it."""
    kinds: dict[str, Any] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    norm = kinds[config.normalization](
        normalized_shape=hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device()
    )
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


@contextmanager
def norms_without_apex() -> Iterator[None]:
    """``WrappedTorchNorm`` refuses sequence parallelism, persist_layer_norm and zero-centred weights.

    None of them changes a shape: under sequence parallelism the norms of Apex and Transformer Engine hold the
    same weights and only mark them for an all-reduce. The weights are made in params_dtype, as by fused norms
    (bare torch makes fp32 ones, which ``Float16Module`` then converts).
    """
    torch_norm = _module("megatron.core.transformer.torch_norm")
    with replaced(torch_norm.WrappedTorchNorm, "__new__", _torch_norm):
        yield


def has_te() -> bool:
    """Whether megatron-core found Transformer Engine; without, its wrappers are mock objects."""
    return bool(getattr(_module("megatron.core.extensions.transformer_engine"), "HAVE_TE", False))


class _Duplicated(torch.nn.Module):
    """Transformer Engine's Linear with ``parallel_mode="duplicated"``: whole on every rank."""

    def __init__(self, inputs: int, outputs: int, *, config: Any, bias: bool = False, **_: object) -> None:
        super().__init__()
        where: Any = {"device": torch.cuda.current_device(), "dtype": config.params_dtype}
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, **where))
        self.bias = torch.nn.Parameter(torch.empty(outputs, **where)) if bias else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.nn.functional.linear(x, self.weight, self.bias), None


@contextmanager
def kernel_libraries_for_building() -> Iterator[None]:
    """Constructors of state-space mixers ask for mamba_ssm and fla; their kernels are those of ``scan_kernels``."""
    with imports.stand_ins(*imports.missing("triton")):
        mixer = _module("megatron.core.ssm.mamba_mixer")
        context_parallel = _module("megatron.core.ssm.mamba_context_parallel")
        # The second of each pair is where 0.18 and 0.19 have them.
        blocks = [_module(f"megatron.core.{name}") for name in ("ssm.mamba_block", "models.hybrid.hybrid_block")]
        deltas = [_module(f"megatron.core.ssm.gated_delta_net{name}") for name in ("", ".common", ".gdn")]
    torch_norm = _module("megatron.core.transformer.torch_norm")
    with ExitStack() as stack:
        for owner, name in (
            (mixer, "HAVE_MAMBA_SSM"), (mixer, "HAVE_EINOPS"), (context_parallel, "HAVE_EINOPS"),
            *((delta, "HAVE_FLA") for delta in deltas),
        ):  # fmt: skip
            stack.enter_context(replaced(owner, name, True))
        for owner, names in (
            (mixer, ("ExtendedRMSNorm", "mamba_split_conv1d_scan_combined")),
            *((delta, ("causal_conv1d_fn", "causal_conv1d", "l2norm", "chunk_gated_delta_rule")) for delta in deltas),
        ):
            for name in names:
                stack.enter_context(replaced(owner, name, getattr(scan_kernels, name), add=True))
        if not has_te():
            # The final norm is hard-wired to TE's.
            for block in blocks:
                stack.enter_context(replaced(block, "TENorm", torch_norm.WrappedTorchNorm))
            moe = _module("megatron.core.transformer.moe.moe_layer")
            # The projections of latent MoE are made from Transformer Engine's Linear only.
            stack.enter_context(replaced(moe, "TELinear", _Duplicated, add=True))
            stack.enter_context(replaced(moe, "HAVE_TE", True))
        yield


@contextmanager
def local_core_attention() -> Iterator[None]:
    """Context parallelism and MLA, both of which the local ``DotProductAttention`` refuses (0.13 to 0.16.1).

    Under context parallelism it is let to attend within the rank's own part of the sequence, which is right
    for parameters and for everything outside the core attention.

    ``transformer/multi_latent_attention.py`` builds its core attention with them, and the local
    ``DotProductAttention`` refuses: MLA runs with Transformer Engine only. Accepting them, and giving the
    output v_channels a head, is all it takes to see MLA's other tensors here.
    """
    module = _module("megatron.core.transformer.dot_product_attention")
    original = module.DotProductAttention.__init__

    def init(
        self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        config = kwargs["config"] if "config" in kwargs else args[0]
        with replaced(config, "context_parallel_size", 1):
            original(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    # 0.16.1 also takes HAVE_TE for true whenever its TE wrappers import, which they do without TE.
    mla = _module("megatron.core.transformer.multi_latent_attention")
    without_te = nullcontext() if has_te() else replaced(mla, "HAVE_TE", False)
    with replaced(module.DotProductAttention, "__init__", init), without_te:
        yield


@contextmanager
def building(device: str = META) -> Iterator[None]:
    """All that is needed to construct a rank's modules on the meta device, or on another without CUDA."""
    with ExitStack() as stack:
        for helper in (
            no_gpu(device), norms_without_apex(), kernel_libraries_for_building(), local_core_attention(),
            apex_kernels()
        ):  # fmt: skip
            stack.enter_context(helper)
        yield


# ---- running -------------------------------------------------------------------------------------


class _Done:
    """The handle of a collective that finished at once."""

    def wait(self, *args: object) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


@contextmanager
def objects_of_peers() -> Iterator[None]:
    """Every rank is taken to say what this one says (``optimizer/__init__.py: _get_param_groups``)."""

    def same(gathered: list[Any], own: Any, group: Any = None) -> None:
        gathered[:] = [own] * len(gathered)

    with replaced(torch.distributed, "all_gather_object", same):
        yield


@contextmanager
def coalesced(*_: object, **__: object) -> Iterator[_Done]:
    """``torch.distributed._coalescing_manager``: collectives that are to go together, of which none goes."""
    yield _Done()


@contextmanager
def collectives_move_nothing() -> Iterator[None]:
    """torch's fake backend serves CPU and CUDA tensors; with meta tensors, too, there is nothing to move."""
    group = torch.distributed.ProcessGroup
    names = (
        "allreduce", "allreduce_coalesced", "_allgather_base", "allgather", "allgather_into_tensor_coalesced",
        "_reduce_scatter_base", "reduce_scatter", "reduce_scatter_tensor_coalesced", "alltoall_base",
        "alltoall", "broadcast", "reduce", "gather", "scatter", "send", "recv", "barrier",
    )  # fmt: skip
    # Its name in DDP, which gathers parameters of several buckets at once (``--overlap-param-gather``).
    buffers = _module("megatron.core.distributed.param_and_grad_buffer")
    with ExitStack() as stack:
        stack.enter_context(objects_of_peers())
        for name in names:
            stack.enter_context(replaced(group, name, lambda *a, **k: _Done()))
        stack.enter_context(replaced(buffers, "_coalescing_manager", coalesced))
        yield


class _RMSNorm(torch.autograd.Function):
    """What ``torch.rms_norm`` keeps on CUDA since 2.9: its input, its weight and one fp32 a row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rstd = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rstd)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)


def _rms_norm(x: torch.Tensor, shape: Any, weight: Any = None, eps: Any = None) -> torch.Tensor:
    out: torch.Tensor = _RMSNorm.apply(x, weight)
    return out


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    if not training or p == 0:
        return x
    return torch.ops.aten.native_dropout(x, p, True)[0]


@contextmanager
def tensors_call_themselves_cuda() -> Iterator[None]:
    """The optimizers know parameters by ``tensor.type()``, of which they accept torch.cuda's only."""
    kind = torch.Tensor.type

    def cuda_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = kind(tensor, *args, **kwargs)
        return f"torch.cuda.{name.split('.')[-1]}" if isinstance(name, str) else name

    with replaced(torch.Tensor, "type", cuda_type):
        yield


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Where torch's autograd does otherwise on CUDA than elsewhere.

    Dropout is one kernel with a bool mask (elsewhere a mask of the input's dtype and a product), RMSNorm one
    kernel (elsewhere a composition in fp32). Seen in torch 2.13: ``aten/src/ATen/native/Dropout.cpp``,
    ``layer_norm.cpp``.
    """
    functional = torch.nn.functional
    with ExitStack() as stack:
        stack.enter_context(replaced(functional, "rms_norm", _rms_norm))
        stack.enter_context(replaced(functional, "dropout", _dropout))
        yield


def _softmax_kernels() -> dict[str, types.ModuleType]:
    """megatron's fused softmax kernels: the scores' shape out; backward overwrites the gradient it gets."""
    made = {}
    for name in (
        "scaled_upper_triang_masked_softmax_cuda", "scaled_masked_softmax_cuda", "scaled_softmax_cuda"
    ):  # fmt: skip
        module = types.ModuleType(name)
        module.forward = lambda scores, *a: torch.empty_like(scores)  # type: ignore[attr-defined]
        module.backward = lambda grad, *a: grad  # type: ignore[attr-defined]
        made[name] = module
    made["scaled_masked_softmax_cuda"].get_batch_per_block = lambda *a: 1  # type: ignore[attr-defined]
    return made


@contextmanager
def apex_kernels() -> Iterator[None]:
    """The weight-gradient GEMM that adds into the main gradient, and the fused softmax.

    ``tensor_parallel/layers.py`` and ``fusions/fused_softmax.py`` import them from Apex.
    """
    layers = _module("megatron.core.tensor_parallel.layers")
    kernels = types.ModuleType("fused_weight_gradient_mlp_cuda")
    kernels.wgrad_gemm_accum_fp32 = lambda *a: None  # type: ignore[attr-defined]
    kernels.wgrad_gemm_accum_fp16 = lambda *a: None  # type: ignore[attr-defined]
    stubs = _softmax_kernels()
    with ExitStack() as stack:
        stack.enter_context(replaced(layers, "_grad_accum_fusion_available", True))
        stack.enter_context(replaced(layers, "fused_weight_gradient_mlp_cuda", kernels, add=True))
        for name, module in stubs.items():
            if importlib.util.find_spec(name) is None:
                sys.modules[name] = module
                stack.callback(sys.modules.pop, name, None)
        yield


class _NoFp8:
    """Transformer Engine's state of a process that never uses fp8."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        return None


@contextmanager
def recomputation_without_te() -> Iterator[None]:
    """``CheckpointWithoutOutput`` asks Transformer Engine about fp8 unless told None (0.14 to 0.16.1).

    ``transformer_layer.py`` does not tell it for layer norms, so that recomputing them fails without TE.
    """
    random = _module("megatron.core.tensor_parallel.random")
    if hasattr(random, "FP8GlobalStateManager"):
        yield
        return
    with ExitStack() as stack:
        for name, value in (
            ("FP8GlobalStateManager", _NoFp8),
            ("activation_recompute_forward", lambda *a, **k: nullcontext()),
            ("fp8_autocast", lambda *a, **k: nullcontext()),
        ):
            stack.enter_context(replaced(random, name, value, add=True))
        yield


@contextmanager
def gradients_of_checkpoints() -> Iterator[None]:
    """Before 0.16 ``CheckpointWithoutOutputFunction.backward`` reads gradients of what autograd saved. What went
    through hooks, by which saved tensors are seen here, comes back as another object without one: read those of the
    leaves. A pass without gradients, as of a checkpoint around it, saves nothing."""
    random = _module("megatron.core.tensor_parallel.random")
    function, detach = random.CheckpointWithoutOutputFunction, random.detach_variable
    forward, backward, checkpoint = function.forward, function.backward, random.CheckpointWithoutOutput.checkpoint
    saves: list[bool] = []

    def noticing_gradients(*args: Any, **kwargs: Any) -> Any:
        saves.append(torch.is_grad_enabled())
        try:
            return checkpoint(*args, **kwargs)
        finally:
            saves.pop()

    def with_leaves(ctx: Any, *args: Any) -> Any:
        made: list[Any] = []  # of this pass alone: whole layers' checkpoints detach too

        def detached(inputs: Any) -> Any:
            made.append(detach(inputs))
            return made[-1]

        with replaced(random, "detach_variable", detached):
            outputs = forward(ctx, *args)
        ctx.leaves = made[-1] if made and saves[-1] else ()
        return outputs

    def of_leaves(ctx: Any, *args: Any) -> Any:
        leaves, ctx.leaves = ctx.leaves, ()
        first, second, *found = backward(ctx, *args)
        given = (
            leaf.grad if gradient is None and isinstance(leaf, torch.Tensor) else gradient
            for leaf, gradient in zip_longest(leaves, found)
        )
        return first, second, *given

    with ExitStack() as stack:
        stack.enter_context(replaced(function, "forward", staticmethod(with_leaves)))
        stack.enter_context(replaced(function, "backward", staticmethod(of_leaves)))
        stack.enter_context(replaced(random.CheckpointWithoutOutput, "checkpoint", noticing_gradients))
        yield


class _Kernel:
    """How deep we are inside functions that run as one kernel, and who wants to know when the last one ends."""

    depth = 0
    ended: Callable[[], None] | None = None
    #: Whether compiled functions run as written and count as one kernel, see compiled_functions_are_kernels.
    counted = False


def inside_a_kernel() -> bool:
    """Whether a function that torch.compile fuses is running: what it makes on the way is never allocated."""
    return _Kernel.depth > 0


@contextmanager
def after_each_kernel(call: Callable[[], None]) -> Iterator[None]:
    """Call ``call`` whenever such a function ends."""
    with replaced(_Kernel, "ended", call):
        yield


@contextmanager
def _as_a_kernel() -> Iterator[None]:
    _Kernel.depth += 1
    try:
        yield
    finally:
        _Kernel.depth -= 1
        if not _Kernel.depth and _Kernel.ended is not None:
            _Kernel.ended()


@functools.cache
def _one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return compiled.call(function, args, kwargs, _as_a_kernel)

    return run


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.core.jit import jit_fuser

    fused: Callable[..., Any] = jit_fuser(function)
    return fused


def jit_fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as megatron-core's own ``jit_fuser`` would have it here."""
    return _one_kernel(function) if _Kernel.counted else _compiled(function)


def _gate(y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return (y * torch.nn.functional.silu(gate.float())).to(y.dtype)


def _norm_then_gate(self: Any, x: torch.Tensor, gate: torch.Tensor) -> Any:
    """``GatedDeltaNet._apply_gated_norm``: torch.compile leaves Transformer Engine's norm out, and fuses the rest."""
    normed = self.out_norm(x.reshape(-1, x.shape[-1]))
    return _one_kernel(_gate)(normed, gate.reshape(-1, gate.shape[-1]))


def _rms_and_gate(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _gate(torch.rms_norm(x, weight.shape, weight), gate)


def _norm_and_gate(self: Any, x: torch.Tensor, gate: torch.Tensor) -> Any:
    """``GatedDeltaNet._apply_gated_norm``: torch.compile takes torch's RMSNorm in, and its weight as an input."""
    weight = self.out_norm.weight
    return _one_kernel(_rms_and_gate)(x.reshape(-1, x.shape[-1]), gate.reshape(-1, gate.shape[-1]), weight)


#: Of 0.18 and of 0.19. torch.compile leaves the l2 norm's Triton kernel out; what it fuses around it are copies alone.
_AROUND_L2NORM = ("_prepare_qkv_for_gated_delta_rule", "_prepare_input_for_gated_delta_rule")


def _as_written(owner: type, name: str) -> Any:
    compiled_function = getattr(owner, name, None)
    return getattr(compiled_function, "_torchdynamo_orig_callable", getattr(compiled_function, "__wrapped__", None))


@contextmanager
def compiled_functions_are_kernels() -> Iterator[None]:
    """``jit_fuser`` (``jit.py``) is torch.compile: SwiGLU, bias-dropout-add and their like run as one kernel.

    What they make and drop on the way does not count, and autograd keeps what torch's partitioner chooses.
    """
    for name in ("models.gpt.gpt_layer_specs", "fusions.fused_bias_dropout", "fusions.fused_cross_entropy"):
        _module(f"megatron.core.{name}")
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(replaced(_Kernel, "counted", True))
        for name, module in list(sys.modules.items()):
            if not name.startswith("megatron.core") or module is None:
                continue
            for owner in (module, *(v for v in vars(module).values() if isinstance(v, type))):
                if getattr(owner, "__module__", name) != name:
                    continue
                for attribute, value in list(vars(owner).items()):
                    function = getattr(value, "_torchdynamo_orig_callable", None)
                    if function is not None and isinstance(value, types.FunctionType):
                        stack.enter_context(replaced(owner, attribute, _one_kernel(function)))
        delta = getattr(_module("megatron.core.ssm.gated_delta_net"), "GatedDeltaNet", None)
        if delta is not None:
            fused = _norm_then_gate if has_te() else _norm_and_gate
            stack.enter_context(replaced(delta, "_apply_gated_norm", fused))
            for name in _AROUND_L2NORM:
                stack.enter_context(replaced(delta, name, _as_written(delta, name)))
        yield


@contextmanager
def stand_in_weight_gradients(device: str) -> Iterator[None]:
    """Where gradients are added to main ones megatron-core takes its stand-ins for them from Transformer Engine
    wherever that is installed, whatever implementation runs (``tensor_parallel/layers.py``; TE ``module/base.py:
    get_dummy_wgrad``). A job that has the fused kernels is taken to have it too."""
    layers = _module("megatron.core.tensor_parallel.layers")
    if has_te():
        yield
        return
    made: dict[Any, torch.Tensor] = {}

    def stand_in(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
        key = (*shape, dtype)
        if key not in made:
            made[key] = torch.empty(shape, dtype=dtype, device=device)
        return made[key].detach()

    with replaced(layers, "get_dummy_wgrad", stand_in, add=True), replaced(layers, "HAVE_TE", True):
        yield


@contextmanager
def fresh_caches() -> Iterator[None]:
    """megatron-core caches masks and rotary tables for the process; those made here must go."""
    utils = _module("megatron.core.transformer.utils")
    rotary = _module("megatron.core.models.common.embeddings.rotary_pos_embedding")
    cached: list[Any] = [
        getattr(utils, "get_default_causal_mask", None),
        getattr(utils, "get_sliding_window_causal_mask", None),
        getattr(getattr(rotary, "RotaryEmbedding", None), "forward", None),
        getattr(getattr(rotary, "RotaryEmbedding", None), "get_cos_sin", None),
    ]

    def clear() -> None:
        for function in cached:
            if hasattr(function, "cache_clear"):
                function.cache_clear()

    clear()
    try:
        yield
    finally:
        clear()


@contextmanager
def loss_scales_put_back() -> Iterator[None]:
    """Schedules and passes leave loss scales and losses to log on classes (``moe_utils.py: MoEAuxLossAutoScaler``)."""
    moe = getattr(_module("megatron.core.transformer.moe.moe_utils"), "MoEAuxLossAutoScaler", None)
    mtp = getattr(_module("megatron.core.transformer.multi_token_prediction"), "MTPLossAutoScaler", None)
    name = "main_loss_backward_scale"
    logged = getattr(_module("megatron.core.transformer.multi_token_prediction"), "MTPLossLoggingHelper", None)
    dsa = _module("megatron.core.transformer.experimental_attention_variant.dsa")
    of_indexer = getattr(dsa, "DSAIndexerLossAutoScaler", None)
    of_indexers = getattr(dsa, "DSAIndexerLossLoggingHelper", None)
    with (
        replaced(moe, name, None), replaced(mtp, name, getattr(mtp, name, None)), replaced(logged, "tracker", {}),
        replaced(of_indexer, name, None), replaced(of_indexers, "tracker", {}),
    ):  # fmt: skip
        yield


# ---- routing -------------------------------------------------------------------------------------


def spread(total: int, parts: int, *, multiple: int = 0, together: int = 1) -> list[int]:
    """``total`` over ``parts`` as evenly as whole numbers allow, any run of them too: the experts of one rank get as
    many as those of another. ``multiple``: of which rows are padded to; so many parts ``together`` differ by as much,
    at equal distances, so that they lack half of it on average, as where routing is natural; their sum stays."""
    even = [(i + 1) * total // parts - i * total // parts for i in range(parts)]
    width = min(multiple, min(even))
    return [n + int((2 * (i % together) + 1 - together) * width / (2 * together)) for i, n in enumerate(even)]


def dealt(totals: Sequence[int], ranks: int) -> list[list[int]]:
    """Each of ``totals`` over ``ranks`` as evenly as whole numbers allow, and so the sum of any run of them: what is
    left of one goes to the ranks after those that got what was left of the one before. [rank][total]."""
    out = [[n // ranks for n in totals] for _ in range(ranks)]
    at = 0
    for i, n in enumerate(totals):
        for _ in range(n % ranks):
            out[at % ranks][i] += 1
            at += 1
    return out


def sent_to_experts(
    tokens: int, topk: int, experts: int, config: Any, *, multiple: int = 0, together: int = 1
) -> list[int]:
    """How many of a rank's ``tokens`` each expert gets: evenly, and with a capacity at most that many, or just as many
    where inputs are padded to it (``moe_utils.py: apply_router_token_dropping``). Others as for ``spread``."""
    even = spread(tokens * topk, experts, multiple=multiple, together=together)
    factor = config.moe_expert_capacity_factor
    if factor is None:
        return even
    of_expert = _module("megatron.core.transformer.moe.moe_utils").get_capacity
    capacity = min(of_expert(tokens * topk, experts, factor), tokens)
    return [capacity if config.moe_pad_expert_input_to_capacity else min(n, capacity) for n in even]


class _BalancedMap:
    """A routing map of which only the size and the column sums are known."""

    def __init__(self, tokens: int, sums: list[int]) -> None:
        self._tokens = tokens
        self._sums = torch.tensor(sums, device="cpu")

    def size(self, dim: int) -> int:
        return self._tokens

    def sum(self, dim: int = 0) -> torch.Tensor:
        return self._sums


def _balance(routing_map: torch.Tensor, topk: int) -> None:
    """Send each token to the next ``topk`` experts in turn, in place and without a temporary.

    Through ``.data``, since autograd may have the map among what it saved.
    """
    experts = routing_map.shape[1]
    period = experts // gcd(experts, topk)
    routing_map.data.zero_()
    for token in range(period):
        first = token * topk % experts
        routing_map.data[token::period, first : first + topk] = True
        routing_map.data[token::period, : max(0, first + topk - experts)] = True


class _MaskedSelect(torch.autograd.Function):
    """``masked_select`` with a known count: autograd keeps the source and the mask (``derivatives.yaml``)."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(source, mask)
        return source.new_empty((count,))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor, None, None]:
        source, _ = ctx.saved_tensors
        return torch.zeros_like(source, memory_format=torch.contiguous_format), None, None


@contextmanager
def balanced_routing(topk: int, experts: int, multiple: int = 0) -> Iterator[None]:
    """Every expert gets the same number of tokens, so that shapes are known without values.

    ``moe/token_dispatcher.py`` counts tokens a rank on the GPU and copies the counts to the host; on the meta
    device the same code counts a balanced map on the host. Real tensors get their router's map overwritten.
    ``multiple``: of rows, which the experts' quantized GEMMs want: they are padded as where routing is natural
    (``spread``).
    """
    module = _module("megatron.core.transformer.moe.token_dispatcher")
    counts: list[list[int]] = []
    #: What a map of so many elements sends in all.
    sent: dict[int, int] = {}
    masked_select, cpu = torch.Tensor.masked_select, torch.Tensor.cpu
    all_to_all = module.MoEAlltoAllTokenDispatcher
    all_gather = module.MoEAllGatherTokenDispatcher
    preprocess = all_to_all.preprocess
    postprocess = all_gather.dispatch_postprocess
    to_cpu: Any = getattr(module, "maybe_move_tensor_to_cpu", None)
    router = _module("megatron.core.transformer.moe.router").TopKRouter
    forward = router.forward

    def counted(self: Any, routing_map: torch.Tensor) -> Any:
        if self.drop_and_pad:
            return preprocess(self, routing_map)
        tokens, columns = routing_map.shape
        known: Any = routing_map
        if routing_map.is_meta:
            # Of several ranks' tokens the sum is what is spread, below; but for those that capacity leaves of each.
            own = self.ep_size * self.tp_size == 1 or self.config.moe_expert_capacity_factor is not None
            sums = sent_to_experts(
                tokens, topk, columns, self.config, multiple=multiple if own else 0, together=self.num_local_experts
            )
            known, sent[tokens * columns] = _BalancedMap(tokens, sums), sum(sums)

        def of_all_ranks(sums: torch.Tensor, group: Any = None, **_: object) -> torch.Tensor:
            ranks = group.size()
            gathered = sums.repeat(ranks)
            if routing_map.is_meta and ranks > 1 and self.config.moe_expert_capacity_factor is None:
                # What this rank sends more or less than its share the others make up for, in whole.
                table = gathered.view(ranks, -1)
                others = [rank for rank in range(ranks) if rank != group.rank()]
                everywhere = spread(
                    ranks * tokens * topk, columns, multiple=multiple, together=self.num_local_experts
                )
                rest = [whole - n for whole, n in zip(everywhere, sums.tolist(), strict=True)]
                table[others] = torch.tensor(dealt(rest, ranks - 1), device="cpu")
            return gathered

        with replaced(module, "gather_from_sequence_parallel_region", of_all_ranks):
            return preprocess(self, known)

    def gathered(self: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        if not self.routing_map.is_meta and self.config.moe_expert_capacity_factor is None:
            _balance(self.routing_map, topk)
        first, last = self.local_expert_indices[0], self.local_expert_indices[-1]
        ranks = self.tp_size * self.ep_size
        of_a_rank = sent_to_experts(hidden_states.shape[0] // ranks, topk, experts, self.config)
        everywhere = [ranks * n for n in of_a_rank]
        if self.config.moe_expert_capacity_factor is None:
            everywhere = spread(
                hidden_states.shape[0] * topk, experts, multiple=multiple, together=last - first + 1
            )
        counts.append(everywhere[first : last + 1])
        try:
            return postprocess(self, hidden_states, probs)
        finally:
            counts.pop()

    def selected(source: torch.Tensor, mask: torch.Tensor) -> Any:
        """topk a token, evenly over experts: how many ones a routing map has in these columns."""
        if not source.is_meta:
            return masked_select(source, mask)
        evenly = mask.numel() * topk // experts
        return _MaskedSelect.apply(source, mask, sum(counts[-1]) if counts else sent.get(mask.numel(), evenly))

    def to_host(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if tensor.is_meta and counts:
            return torch.tensor(counts[-1], device="cpu")
        return cpu(tensor, *args, **kwargs)

    def routed(self: Any, *args: Any, **kwargs: Any) -> Any:
        probs, routing_map = forward(self, *args, **kwargs)
        if not routing_map.is_meta and self.config.moe_expert_capacity_factor is None:
            _balance(routing_map, topk)
        return probs, routing_map

    def on_host(tensor: Any, as_numpy: bool = False, **more: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            return to_cpu(tensor, as_numpy, **more)
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    utils = _module("megatron.core.transformer.moe.moe_utils")
    with ExitStack() as stack:
        if not hasattr(utils, "te_general_gemm"):
            # The router's linear looks for TE's GEMM by a name that is not there without TE (0.16.1).
            stack.enter_context(replaced(utils, "te_general_gemm", None, add=True))
        stack.enter_context(replaced(router, "forward", routed))
        stack.enter_context(replaced(all_to_all, "preprocess", counted))
        stack.enter_context(replaced(all_gather, "dispatch_postprocess", gathered))
        stack.enter_context(replaced(module, "maybe_move_tensor_to_cpu", on_host))
        stack.enter_context(replaced(torch.Tensor, "masked_select", selected))
        stack.enter_context(replaced(torch.Tensor, "cpu", to_host))
        yield


_RESIZE = torch.UntypedStorage.resize_


def _shared(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """``share_storage`` of ``tensor_parallel/random.py`` (0.17), which is compiled C++: the storage of ``output`` has
    the size of the recomputed one, and keeps it alive. A storage without data takes no bytes of its own."""
    storage, source = output.untyped_storage(), recomputed.untyped_storage()
    _RESIZE(storage, source.nbytes())
    weakref.finalize(storage, _nothing_to_do, source)


def _nothing_to_do(*_: object, **__: object) -> None:
    pass


@contextmanager
def storage_shared_without_a_compiler(device: str) -> Iterator[None]:
    """On the meta device recomputed outputs share storages without the extension that megatron-core would compile."""
    random = _module("megatron.core.tensor_parallel.random")
    if device != META:
        yield
        return
    with replaced(random, "_get_share_storage", lambda: _shared):
        yield


def _true_without_data(self: torch.Tensor) -> bool:
    """Whether there are tokens, asked of a count without data: there are."""
    return True if self.is_meta else _BOOL(self)


_BOOL = torch.Tensor.__bool__


@contextmanager
def questions_answered() -> Iterator[None]:
    """0.17 and later log the loss of an MTP depth where ``num_tokens > 0`` (``multi_token_prediction.py:
    process_mtp_loss``). Sparse attention asks how long the sequences of other ranks are (``dsa.py:
    _validate_nonpacked_cp_uniform_length``)."""
    dsa = _module("megatron.core.transformer.experimental_attention_variant.dsa")
    with (
        replaced(torch.Tensor, "__bool__", _true_without_data),
        replaced(dsa, "_validate_nonpacked_cp_uniform_length", _nothing_to_do),
    ):
        yield


@contextmanager
def experiments_allowed() -> Iterator[None]:
    """MLA's fused rotation is marked experimental in 0.13 and 0.14 and runs with ``--enable-experimental`` only.

    Who asks for a fusion is taken to have given that flag too. The decorators look at it at each call
    (``utils.py: experimental_fn``).
    """
    with replaced(_module("megatron.core.config"), "ENABLE_EXPERIMENTAL", True):
        yield


@contextmanager
def running(topk: int = 1, experts: int = 1, device: str = META, *, multiple: int = 0) -> Iterator[None]:
    """All that is needed to run a rank's forward and backward without CUDA, on the meta device as a rule."""
    with ExitStack() as stack:
        for helper in (
            building(device), collectives_move_nothing(), cuda_kernels(), compiled_functions_are_kernels(),
            recomputation_without_te(), gradients_of_checkpoints(), fresh_caches(), loss_scales_put_back(),
            balanced_routing(topk, experts, multiple),
            experiments_allowed(), questions_answered(), storage_shared_without_a_compiler(device),
            stand_in_weight_gradients(device),
        ):  # fmt: skip
            stack.enter_context(helper)
        yield
