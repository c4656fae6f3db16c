"""Import the real megatron-bridge on a CPU: one finder stands in for the CUDA-only packages it imports.

Everything of ``megatron.bridge`` and ``megatron.core`` stays real. What is faked are packages that need a CUDA
toolkit to install; their classes accept anything and subclass ``torch.nn.Module``.
"""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

import pytest

from bridge_memory.rehearsal.imports import supply_typing_override

STUBBED = (
    "transformer_engine", "transformer_engine_torch", "mamba_ssm", "causal_conv1d", "fla", "nvidia_resiliency_ext",
    "modelopt", "wandb", "mlflow", "qwen_vl_utils", "timm", "open_clip", "webdataset", "comet_ml", "flash_mla",
    "megatron.energon", "nvidia_modelopt", "multistorageclient", "flashinfer", "decord", "peft", "accelerate",
)  # fmt: skip

#: The release that the stubs say they are.
TRANSFORMER_ENGINE = "2.20.2"


class _StubLoader(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def _anything(name: str, module: str) -> type:
    """A torch module class that takes any argument and whose own attributes are such classes again."""
    import torch

    class Meta(abc.ABCMeta):  # some of Bridge's classes are abstract as well
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

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # a decorator that was made with arguments
        return args[0] if args else self

    return Meta(name, (torch.nn.Module,), {"__init__": init, "__call__": call, "__module__": module})


class _StubModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return TRANSFORMER_ENGINE
        if name.startswith("__"):
            raise AttributeError(name)
        made = _anything(name, self.__name__)
        setattr(self, name, made)
        return made


class _FusedAdam:
    def __init__(
        self, params: Any = None, exp_avg_dtype: Any = None, exp_avg_sq_dtype: Any = None,
        master_weight_dtype: Any = None, use_decoupled_grad: bool = False, store_param_remainders: bool = False,
    ) -> None: ...  # fmt: skip


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
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return sys.modules["megatron.bridge"]
    for name in ("megatron", "megatron.core", "megatron.bridge"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    if "megatron.core" in sys.modules:
        pytest.skip("megatron.core was imported without Transformer Engine; run these tests in their own process")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")
    supply_typing_override()
    missing = tuple(n for n in STUBBED if "." in n or importlib.util.find_spec(n) is None)
    sys.meta_path.append(_Finder(missing))
    import megatron.bridge
    import megatron.core.utils
    from packaging.version import Version

    # megatron-core asks the package's metadata, which a stub has not.
    megatron.core.utils._te_version = Version(TRANSFORMER_ENGINE)
    # OptimizerConfig looks for these words in its signature before it allows the precision-aware optimizer.
    import transformer_engine.pytorch.optimizers as optimizers

    optimizers.FusedAdam = _FusedAdam
    return megatron.bridge
