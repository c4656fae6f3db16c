"""Import Transformer Engine over the replaced kernels, or hide it from megatron-core."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import torch

from bridge_memory.rehearsal import imports
from bridge_memory.rehearsal.patches.replace import replaced
from bridge_memory.rehearsal.te_kernels.enums import ENUMS, _enum, _nvte
from bridge_memory.rehearsal.te_kernels.gpu import CUDA_VERSION, gpu_properties
from bridge_memory.rehearsal.te_kernels.kernels import Kernels
from bridge_memory.rehearsal.te_kernels.package import COMPILED, INSTALL, NEWEST, OLDEST, PACKAGE, version
from bridge_memory.rehearsal.world import RehearsalUnavailable
from bridge_memory.releases import release_in, release_words

#: From this release on there is no separate attention kernel for at most 512 tokens.
_NO_SHORT_ATTENTION = (2, 16)
#: Modules of megatron-core (0.13 to 0.19) with Triton kernels, which are not launched either.
MEGATRON_TRITON = (
    "fusions.fused_indices_converter", "fusions.fused_mla_yarn_rope_apply", "fusions.fused_pad_routing_map",
    "ssm.mamba_mixer",
)  # fmt: skip


def why_not() -> str:
    """Why Transformer Engine cannot be rehearsed here, as a clause that follows its name; empty where it can."""
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
    """Whether this process has imported Transformer Engine over the replaced kernels."""
    return isinstance(sys.modules.get(COMPILED), Kernels)


def load() -> None:
    """Import Transformer Engine over kernels that compute nothing, until the process ends.

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
            "run the rehearsal with transformer_impl transformer_engine in a separate process"
        )
    if (release_in(version()) or NEWEST) < _NO_SHORT_ATTENTION:
        ENUMS["NVTE_Fused_Attn_Backend"] = _enum(
            "NVTE_Fused_Attn_Backend", _nvte("F16_max512_seqlen F16_arbitrary_seqlen FP8 No_Backend")
        )
    sys.modules[COMPILED] = Kernels()
    with ExitStack() as stack:
        stack.enter_context(imports.placeholder_packages("triton", *imports.missing("onnxscript", "onnx")))
        # With it ``transformer_engine/common`` loads no shared libraries.
        stack.enter_context(_environment("NVTE_PROJECT_BUILDING", "1"))
        stack.enter_context(replaced(torch.version, "cuda", CUDA_VERSION))
        stack.enter_context(gpu_properties("hopper"))
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
    """Hide Transformer Engine from megatron-core until the process ends."""
    if PACKAGE not in sys.modules:
        sys.modules[PACKAGE] = None  # type: ignore[assignment]


def _package_alone() -> None:
    """Register the package without running its ``__init__``, which imports every submodule."""
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
