"""Bytes of library workspaces that depend on the GPU's generation alone, and where the rules are from."""

from __future__ import annotations

from bridge_memory.cards.generations import GENERATIONS, since_hopper
from bridge_memory.workspaces.allocator import MIB

#: Transformer Engine's cuBLAS workspace: 32 MiB from compute capability 9.0 on, 4 MiB before. The 1 KiB that 2.11
#: adds to the former for scales of NVFP4 is not counted.
#: Source: TE ``pytorch/cpp_extensions/gemm.py: get_cublas_workspace_size_bytes`` (``module/base.py`` in older ones).
TE_WORKSPACE = {name: (32 if since_hopper(name) else 4) * MIB for name in GENERATIONS}

#: :4096:2:16:8, sizes in KiB.
_SMALL = (2 * 4096 + 8 * 16) * 1024
#: :4096:8
_LARGE = 8 * 4096 * 1024
#: torch's cuBLAS workspace where CUBLAS_WORKSPACE_CONFIG is unset: the large one on compute capability 9.0, the small
#: one elsewhere; from 2.12 on on Blackwell too (``releases.LARGE_CUBLAS_WORKSPACE_ON_BLACKWELL``).
#: Source: torch ``aten/src/ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize``, as pull request 91564 made it
#: for 2.0 (and 175344 for 2.12).
TORCH_CUBLAS_WORKSPACE = {name: _LARGE if first == (9, 0) else _SMALL for name, first in GENERATIONS.items()}
