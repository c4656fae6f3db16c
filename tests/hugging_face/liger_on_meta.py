"""liger-kernel's own functions on the meta device: their Python allocates as on a GPU, their kernels do nothing.

triton is stood in for by launches without effect. Where the source asks for a CUDA device, the meta device answers.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch


class _Anything(ModuleType):
    """Whatever is asked of it; a kernel whose launch does nothing, a decorator that changes nothing."""

    __path__ = ()  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Anything(f"{self.__name__}.{name}")
        setattr(self, name, found)
        return found

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Anything(self.__name__)


def _triton() -> dict[str, ModuleType]:
    triton = _Anything("triton")
    triton.__spec__ = ModuleSpec("triton", None)
    triton.__version__ = "3.3.0"
    for name in ("autotune", "heuristics"):
        setattr(triton, name, lambda *a, **k: lambda f: f)
    triton.cdiv = lambda a, b: -(-a // b)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda n: 1 << (n - 1).bit_length()  # type: ignore[attr-defined]
    found: dict[str, ModuleType] = {"triton": triton}
    for name in ("language", "language.math", "language.extra", "language.extra.libdevice", "language.extra.cuda",
                 "language.extra.cuda.libdevice", "runtime", "runtime.driver", "testing"):
        found[f"triton.{name}"] = _Anything(f"triton.{name}")
    triton.language = found["triton.language"]  # type: ignore[attr-defined]
    return found


class _AsOnCuda(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The fused loss's source, where the meta device passes for a CUDA one."""

    NAME = "liger_kernel.ops.fused_linear_cross_entropy"

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self.NAME:
            return None
        found = PathFinder.find_spec(name, path)
        assert found is not None and found.origin is not None
        return importlib.util.spec_from_loader(name, self, origin=found.origin)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None and module.__spec__.origin is not None
        with open(module.__spec__.origin, encoding="utf-8") as file:
            source = file.read()
        for sign in ("==", "!="):
            source = source.replace(f'device.type {sign} "cuda"', f'device.type {sign} "meta"')
        exec(compile(source, module.__spec__.origin, "exec"), module.__dict__)


def available() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None


@contextmanager
def liger(model_type: str, kernels: tuple[str, ...]) -> Iterator[None]:
    """Inside, classes of ``model_type`` are built and run with these kernels."""
    finder = _AsOnCuda()
    with ExitStack() as stack:
        if "liger_kernel" not in sys.modules:
            if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
                sys.modules.update(_triton())
            sys.meta_path.insert(0, finder)
            stack.callback(sys.meta_path.remove, finder)
        if not isinstance(sys.modules.get("triton"), _Anything):
            from triton.runtime.jit import KernelInterface

            launch = lambda self, grid: lambda *args, **kwargs: None  # noqa: E731
            stack.enter_context(patch.object(KernelInterface, "__getitem__", launch))
        from liger_kernel.transformers import monkey_patch
        from transformers.loss import loss_utils

        function = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN[model_type]
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        family = model_type.removesuffix("_text")
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        before, classes = dict(vars(module)), {}
        for cls in vars(module).values():
            if isinstance(cls, type) and issubclass(cls, torch.nn.Module) and "forward" in vars(cls):
                classes[cls] = vars(cls)["forward"]
        loss = loss_utils.nn.functional.cross_entropy
        for owner, name, value in (
            (torch.Tensor, "item", lambda self: 1), (torch, "equal", lambda a, b: False),
            (torch.Tensor, "__bool__", lambda self: True),
            (torch.cuda, "get_device_capability", lambda *a: (9, 0)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        try:
            function(**{name: name in kernels for name in names if name != "model"})
            yield
        finally:
            vars(module).update(before)
            for cls, forward in classes.items():
                cls.forward = forward  # type: ignore[method-assign]
            loss_utils.nn.functional.cross_entropy = loss
