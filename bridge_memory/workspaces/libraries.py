"""Workspaces of libraries inside torch's allocator, which no model config mentions.

All are bytes on one rank, alive from the first step to the end of training. Tested against the static memory of
Megatron-LM's functional tests: dense runs with Transformer Engine and a distributed optimizer agree to 0.1 MiB on A100,
H100 and GB200.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bridge_memory.components import Component, Lifetime, Part, Provenance, Role
from bridge_memory.releases import (
    CUBLAS_WORKSPACES_ALLOCATED,
    CUBLAS_WORKSPACES_FREED,
    LARGE_CUBLAS_WORKSPACE_ON_BLACKWELL,
    ROUTER_USES_TE_GEMM,
)
from bridge_memory.spec import ImplementationSpec, MambaSpec
from bridge_memory.spec.layout import ChunkShape
from bridge_memory.tapes.context import BlockContext
from bridge_memory.workspaces.gpu_generations import TE_WORKSPACE, TORCH_CUBLAS_WORKSPACE

#: Streams of a grouped GEMM, each with a separate workspace (``get_cublas_workspace(grouped_gemm=True)``;
#: ``transformer_engine/common/util/multi_stream.cpp: nvte_get_num_compute_streams``).
TE_GROUPED_GEMM_STREAMS = 4
#: cuBLAS handles: one for the thread that runs forward, one for autograd's thread. torch keeps a workspace for every
#: pair of handle and stream (``aten/src/ATen/cuda/CublasHandlePool.cpp: getCurrentCUDABlasHandle``).
CUBLAS_HANDLES = 2


def buffer(
    name: str, nbytes: int, part: Part = Part.WORKSPACE, lifetime: Lifetime = Lifetime.FIRST_PASS
) -> Component:
    """A persistent buffer whose size follows from an implementation."""
    return Component(name, nbytes, Role.BUFFERS, Provenance.FORMULA, lifetime=lifetime, part=part)


class LibraryUse(NamedTuple):
    """What a chunk contains that decides whether torch's own matrix products run."""

    output: bool
    layers: bool
    attention: bool


def library_use(shape: ChunkShape) -> LibraryUse:
    attention = any([kind.mixer is not None and type(kind.mixer) is not MambaSpec for kind, _ in shape.layers])
    return LibraryUse(shape.output, bool(shape.layers), attention)


def library_workspaces(ctx: BlockContext, chunks: Sequence[LibraryUse], *, experts_here: bool) -> tuple[Component, ...]:
    """Workspaces of Transformer Engine and of torch on a stage that holds ``chunks``."""
    uses = LibraryUse(*map(any, zip(*chunks, strict=True)))
    known = ctx.cache.kept.get((uses, experts_here))
    if known is None:
        known = ctx.cache.kept[uses, experts_here] = tuple(_library_workspaces(ctx, uses, experts_here))
    return known


def _library_workspaces(ctx: BlockContext, uses: LibraryUse, experts_here: bool) -> Iterator[Component]:
    impl = ctx.impl
    te = TE_WORKSPACE[impl.gpu_arch]
    if impl.te or (experts_here and not impl.torch_layers and ROUTER_USES_TE_GEMM(impl)):
        # TE get_cublas_workspace
        yield buffer("Transformer Engine's cuBLAS workspace", te)
        if experts_here and impl.te_grouped_gemm:
            # TE get_cublas_workspace(grouped_gemm=True)
            yield buffer("Transformer Engine's grouped-GEMM workspaces", te * TE_GROUPED_GEMM_STREAMS)
    size = cublas_workspace(impl)
    if size and _uses_torch_gemm(ctx, uses, experts_here):
        # torch CublasHandlePool.cpp
        yield buffer("torch's cuBLAS workspaces (forward and autograd thread)", size * CUBLAS_HANDLES)


def cublas_workspace(impl: ImplementationSpec) -> int:
    """Bytes of one of torch's cuBLAS workspaces in torch's allocator; 0 if it is freed after each product."""
    if CUBLAS_WORKSPACES_FREED(impl) or not CUBLAS_WORKSPACES_ALLOCATED(impl):
        return 0
    if impl.cublas_workspace_bytes is not None:
        return impl.cublas_workspace_bytes
    large = impl.gpu_arch == "blackwell" and LARGE_CUBLAS_WORKSPACE_ON_BLACKWELL(impl)
    return TORCH_CUBLAS_WORKSPACE["hopper" if large else impl.gpu_arch]


def _uses_torch_gemm(ctx: BlockContext, uses: LibraryUse, experts_here: bool) -> bool:
    """Whether a matrix product of torch itself runs on this stage, in forward and backward.

    The output layer is megatron-core's own ColumnParallelLinear in both implementations; local layers, older MoE
    routers (``releases.ROUTER_USES_TE_GEMM``) and unfused attention use torch's products too.
    """
    impl = ctx.impl
    if uses.output:
        return True
    if experts_here and not ROUTER_USES_TE_GEMM(impl):
        return True
    if not impl.te:
        return uses.layers
    if impl.attention_kernel != "unfused" and ctx.params_dtype != "fp32":
        return False
    return uses.attention
