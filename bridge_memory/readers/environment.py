"""What environment variables say of the implementation: torch's allocator and cuBLAS, Transformer Engine's choices."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from bridge_memory.cards.generations import since_hopper
from bridge_memory.releases import FLASH_IS_DETERMINISTIC, Running

#: Every variable that is read here.
VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO", "NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN",
    "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN",
)  # fmt: skip


def expandable_segments(env: Mapping[str, str]) -> bool:
    """Whether the allocator's segments grow, ``expandable_segments:True``.

    Source: torch ``c10/cuda/CUDAAllocatorConfig.h: CUDAAllocatorConfig.instance``, which takes the first variable that
    is set.
    """
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    settings = next((env[name] for name in names if name in env), "")
    return re.search(r"\bexpandable_segments\s*:\s*true\b", settings, re.IGNORECASE) is not None


def cublas_workspace_bytes(config: str | None) -> int | None:
    """Bytes of ``CUBLAS_WORKSPACE_CONFIG`` (":size:count" pairs, sizes in KiB); None where unset.

    Source: torch ``aten/src/ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize``.
    """
    pairs = re.findall(r":(\d+):(\d+)", config or "")
    return sum(int(size) * int(count) * 1024 for size, count in pairs) if pairs else None


def nvte_deterministic(env: Mapping[str, str]) -> bool:
    """Whether Transformer Engine may take deterministic algorithms only (``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0``)."""
    return env.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"


def attention_backend(env: Mapping[str, str]) -> str | None:
    """What NVTE_FLASH_ATTN and NVTE_FUSED_ATTN leave of attention_backend "auto"; None where they leave the choice.

    Source: TE ``dot_product_attention/utils.py: get_attention_backend``.
    """
    flash, fused = (env.get(name, "1") != "0" for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN"))
    if flash and fused:
        return None
    return "flash" if flash else "fused" if fused else "unfused"


#: What torch's deterministic mode asks of the environment (``torch.use_deterministic_algorithms``).
_DETERMINISTIC_CONFIG = ":4096:8"
SUPPOSED_CUBLAS = (
    f"CUBLAS_WORKSPACE_CONFIG is {_DETERMINISTIC_CONFIG}: NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 asks for determinism "
    "and the environment names none (measured so on GB200)"
)


def implementation_of(
    env: Mapping[str, str], gpu_arch: str, running: Running
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Fields of an ImplementationSpec that a run's environment decides, and what had to be supposed.

    ``attention_backend`` is among them where "auto" has no choice left, also because a backend's backward is not
    deterministic (TE ``dot_product_attention/utils.py: get_attention_backend``).
    """
    deterministic = nvte_deterministic(env)
    workspace = cublas_workspace_bytes(env.get("CUBLAS_WORKSPACE_CONFIG"))
    supposed: tuple[str, ...] = ()
    if deterministic and workspace is None:
        workspace, supposed = cublas_workspace_bytes(_DETERMINISTIC_CONFIG), (SUPPOSED_CUBLAS,)
    fields: dict[str, Any] = {
        "nvte_deterministic": deterministic,
        "cublas_workspace_bytes": workspace,
        "expandable_segments": expandable_segments(env),
    }
    domain = env.get("NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", "")
    if domain.isascii() and domain.isdecimal() and int(domain[:9]):
        fields["moe_hybridep_ranks_per_nvlink_domain"] = int(domain[:9])
    left = attention_backend(env)
    before_hopper = not since_hopper(gpu_arch)
    if left is None and deterministic and before_hopper and not FLASH_IS_DETERMINISTIC(running):
        left = "unfused"
    if left is not None:
        fields["attention_backend"] = left
    return fields, supposed
