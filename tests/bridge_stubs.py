"""Import the real megatron-bridge on a CPU: one finder stands in for the CUDA-only packages it imports.

Everything of ``megatron.bridge`` and ``megatron.core`` stays real. What is faked are packages that need a CUDA
toolkit to install; their classes accept anything and subclass ``torch.nn.Module``.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

import pytest

STUBBED = (
    "transformer_engine", "transformer_engine_torch", "mamba_ssm", "causal_conv1d", "fla", "nvidia_resiliency_ext",
    "modelopt", "wandb", "mlflow", "qwen_vl_utils", "timm", "open_clip", "webdataset", "comet_ml", "flash_mla",
    "megatron.energon", "nvidia_modelopt", "multistorageclient", "flashinfer", "decord", "peft", "accelerate",
)  # fmt: skip


class _StubLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def _anything(name: str, module: str) -> type:
    """A torch module class that takes any argument and whose own attributes are such classes again."""
    import torch

    class Meta(type):
        def __getattr__(cls, attribute: str) -> Any:
            if attribute.startswith("__"):
                raise AttributeError(attribute)
            made = _anything(attribute, module)
            setattr(cls, attribute, made)
            return made

        def __getitem__(cls, parameters: object) -> type:
            return cls

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        torch.nn.Module.__init__(self)

    return Meta(name, (torch.nn.Module,), {"__init__": init, "__module__": module})


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "2.11.0"
        if name.startswith("__"):
            raise AttributeError(name)
        made = _anything(name, self.__name__)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, stubs: tuple[str, ...]) -> None:
        self.stubs = stubs

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if not any(name == stub or name.startswith(stub + ".") for stub in self.stubs):
            return None
        return importlib.machinery.ModuleSpec(name, _StubLoader(), is_package=True)


def require_bridge() -> types.ModuleType:
    """``megatron.bridge``, imported for real; skips the test where it is not installed."""
    pytest.importorskip("torch")
    if "megatron.bridge" in sys.modules:
        return sys.modules["megatron.bridge"]
    pytest.importorskip("megatron.core")
    import megatron

    if importlib.util.find_spec("megatron.bridge") is None:
        pytest.skip(f"megatron-bridge is not installed beside {list(megatron.__path__)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    missing = tuple(n for n in STUBBED if "." in n or importlib.util.find_spec(n) is None)
    sys.meta_path.append(_Finder(missing))
    import megatron.bridge

    return megatron.bridge
