"""CUDA devices, streams, random states and reads of tensor values on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bridge_memory.rehearsal.patches.replace import META, module_or_empty, replaced


class _Stream:
    """A CUDA stream or event without any effect."""

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
    """Redirects ``device="cuda"`` and ``.cuda()``, which megatron-core's code contains, to ``device``."""

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
            # ``moe/router.py`` creates its weight on the host and moves it.
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
    """``torch.autograd.backward`` for recomputation. torch's own would disable the active torch function modes."""
    ends = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    grads = (grad_tensors,) if not isinstance(grad_tensors, (list, tuple)) else tuple(grad_tensors)
    torch.autograd.graph._engine_run_backward(
        ends, tuple(torch.ones_like(e) if g is None else g for e, g in zip(ends, grads, strict=True)),
        False, False, (), allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


@contextmanager
def no_gpu(device: str = META) -> Iterator[None]:
    """Replace CUDA's device by ``device``, and its streams, events and random states by objects without effect.

    megatron-core calls ``torch.cuda.current_device()`` at each allocation, forks a CUDA random state around dropout and
    initialisation (``tensor_parallel/random.py``), and orders copies with streams (``moe/token_dispatcher.py``).
    """
    random = module_or_empty("megatron.core.tensor_parallel.random")
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
        # When the compiler logs its results it imports Triton, which reads the GPU's properties.
        stack.enter_context(replaced(module_or_empty("torch._dynamo.utils"), "has_triton", lambda: False))
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


@contextmanager
def tensors_call_themselves_cuda() -> Iterator[None]:
    """``tensor.type()`` returns torch.cuda's types, the only ones that megatron-core's optimizers accept."""
    kind = torch.Tensor.type

    def cuda_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = kind(tensor, *args, **kwargs)
        return f"torch.cuda.{name.split('.')[-1]}" if isinstance(name, str) else name

    with replaced(torch.Tensor, "type", cuda_type):
        yield


def _do_nothing(*_: object, **__: object) -> None:
    pass


def _true_without_data(self: torch.Tensor) -> bool:
    """``bool(tensor)``; True for a tensor without data, as for ``num_tokens > 0``."""
    return True if self.is_meta else _BOOL(self)


_BOOL = torch.Tensor.__bool__


@contextmanager
def value_checks_skipped() -> Iterator[None]:
    """Answer or skip checks that read tensor values.

    From 0.17 on the loss of an MTP depth is logged if ``num_tokens > 0`` (``multi_token_prediction.py:
    process_mtp_loss``). Sparse attention compares its sequence length with other ranks' (``dsa.py:
    _validate_nonpacked_cp_uniform_length``).
    """
    dsa = module_or_empty("megatron.core.transformer.experimental_attention_variant.dsa")
    with (
        replaced(torch.Tensor, "__bool__", _true_without_data),
        replaced(dsa, "_validate_nonpacked_cp_uniform_length", _do_nothing),
    ):
        yield
