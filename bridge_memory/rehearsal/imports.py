"""Imports of megatron-core and Transformer Engine that fail on a machine without a GPU, or before Python 3.12.

Triton's kernels are imported with the modules that use them, but not launched in a rehearsal; ``typing.override``
exists from Python 3.12 on. Only ``import_megatron_core`` imports megatron-core.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


def import_megatron_core() -> None:
    """Import megatron.core, with placeholders for what it imports and this machine lacks. Raises its own ImportError.

    0.18 and later import Triton (``transformer/moe/paged_stash.py``), 0.19 ``typing.override``: a decorator
    without effect, which typing_extensions has for earlier Pythons.
    """
    if sys.modules.get("megatron.core") is not None:
        return
    supply_typing_override()
    with placeholder_packages(*missing("triton")):
        importlib.import_module("megatron.core")


def supply_typing_override() -> None:
    """Define ``typing.override`` before Python 3.12: megatron-core and Megatron Bridge import it."""
    if not hasattr(typing, "override"):
        with suppress(ImportError):
            from typing_extensions import override

            typing.override = override  # type: ignore[attr-defined]


def missing(*roots: str) -> tuple[str, ...]:
    """Those of the packages ``roots`` that are not installed."""
    return tuple(root for root in roots if importlib.util.find_spec(root) is None)


class _NoLaunch:
    """A Triton kernel whose ``kernel[grid](...)`` launches nothing. Its outputs are arguments, which the caller
    made."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class _Config:
    """One configuration of a kernel, of which megatron-core 0.19 reads the sizes where it is to be deterministic
    (``ssm/ops/determinism.py: autotune_configs``)."""

    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, num_stages: int = 3, **_: object) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


class _Triton(types.ModuleType):
    """``triton`` and its submodules: decorators of kernels, the arithmetic of grids, any other name."""

    __version__ = "3.4.0"
    Config = _Config

    @staticmethod
    def jit(function: Any = None, **_: object) -> Any:
        return _NoLaunch() if callable(function) else (lambda f: _NoLaunch())

    @staticmethod
    def autotune(*_: object, **__: object) -> Any:
        return lambda kernel: kernel

    heuristics = autotune

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def next_power_of_2(n: int) -> int:
        return 1 << max(0, n - 1).bit_length()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self.__name__}.{name}")


class _Name:
    """Any other name: usable in annotations and as a decorator, without effect."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __or__(self, other: object) -> Any:
        return Any

    __ror__ = __or__


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages ``roots`` and every submodule of theirs."""

    def __init__(self, roots: tuple[str, ...]) -> None:
        self._roots = roots

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.split(".")[0] in self._roots:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Triton(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


@contextmanager
def placeholder_packages(*roots: str) -> Iterator[None]:
    """Imports in this block find placeholders of these packages, installed or not; later imports do not."""
    if not roots:
        yield
        return
    for name in ("torch._inductor.compile_fx", "torch._inductor.runtime.hints", "torch._dynamo.testing"):
        # They look for Triton when they are imported, and must not find the placeholder.
        importlib.import_module(name)

    def mine() -> list[str]:
        return [name for name in sys.modules if name.split(".")[0] in roots]

    before = {name: sys.modules.pop(name) for name in mine()}
    finder = _Finder(roots)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in mine():
            del sys.modules[name]
        sys.modules.update(before)
