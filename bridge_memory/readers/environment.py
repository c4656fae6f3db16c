"""What environment variables say about a run: Transformer Engine's, torch's allocator's, cuBLAS's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bridge_memory.releases import Release

#: First Transformer Engine whose containers carry a FlashAttention (2.4.1) with a deterministic backward.
_DETERMINISTIC_FLASH = (1, 6)
#: What torch's deterministic mode asks of the environment (``torch.use_deterministic_algorithms``).
_DETERMINISTIC_CONFIG = ":4096:8"
_SUPPOSED_CUBLAS = (
    f"CUBLAS_WORKSPACE_CONFIG is {_DETERMINISTIC_CONFIG}: NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 asks for determinism "
    "and the environment names none (measured so on GB200)"
)


def implementation_fields(
    env: Mapping[str, str], backend: str, gpu_arch: str, transformer_engine: Release | None
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of an ImplementationSpec that ``env`` decides, and what had to be supposed.

    ``backend``: the attention backend that the run asks for, "auto" where it asks for none. Empty and silent for an
    empty environment, of which nothing is known.
    """
    if not env:
        return {}, ()
    deterministic = env.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"
    workspace = cublas_workspace_bytes(env.get("CUBLAS_WORKSPACE_CONFIG"))
    supposed: tuple[str, ...] = ()
    if deterministic and workspace is None:
        workspace, supposed = cublas_workspace_bytes(_DETERMINISTIC_CONFIG), (_SUPPOSED_CUBLAS,)
    fields = {
        "nvte_deterministic": deterministic,
        "cublas_workspace_bytes": workspace,
        "expandable_segments": "expandable_segments:true" in env.get("PYTORCH_CUDA_ALLOC_CONF", "").lower(),
        "attention_backend": _backend_left(env, backend, gpu_arch, transformer_engine, deterministic),
    }
    return fields, supposed


def _backend_left(
    env: Mapping[str, str], backend: str, gpu_arch: str, te: Release | None, deterministic: bool
) -> str:
    """What is left of "auto" (TE ``dot_product_attention/utils.py: get_attention_backend``): NVTE_* variables, and
    determinism where a backend's backward has none."""
    if backend != "auto":
        return backend
    flash, fused = (env.get(name, "1") != "0" for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"))
    if not flash or not fused:
        return "flash" if flash else "fused" if fused else "unfused"
    if deterministic and te is not None and te < _DETERMINISTIC_FLASH and gpu_arch == "ampere":
        return "unfused"
    return backend


def cublas_workspace_bytes(config: str | None) -> int | None:
    """Bytes of ``CUBLAS_WORKSPACE_CONFIG`` (":size:count" pairs, sizes in KiB); None where unset.

    Source: torch ``aten/src/ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize``.
    """
    pairs = re.findall(r":(\d+):(\d+)", config or "")
    return sum(int(size) * int(count) * 1024 for size, count in pairs) if pairs else None
