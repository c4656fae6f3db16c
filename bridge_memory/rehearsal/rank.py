"""Be one rank of the job: its process groups, environment and replacements; refusals of what is not rehearsed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from bridge_memory.garbage import existing_objects_frozen
from bridge_memory.rehearsal import patches, te_kernels
from bridge_memory.rehearsal.diffusion import import_diffusion
from bridge_memory.rehearsal.patches.modules import has_te
from bridge_memory.rehearsal.refusals import refuse_what_is_ignored
from bridge_memory.rehearsal.world import NotBuildable, RehearsalUnavailable, fake_world, quiet, refusals_named
from bridge_memory.spec import AttentionSpec, GatedDeltaNetSpec, RunSpec
from bridge_memory.spec.limits import limits_of
from bridge_memory.spec.ranks import rank_of_stage


def rank_in_stage(run: RunSpec, stage: int) -> int:
    """The rank of a stage that the estimate predicts: the last of the stage's first context-parallel ring, all of whose
    queries attend in every step of the ring. Without context parallelism, the stage's first rank."""
    return rank_of_stage(run.parallel, stage) + (run.parallel.cp - 1) * run.parallel.tp


@contextmanager
def on_rank(run: RunSpec, rank: int, supported: tuple[str, ...] = ()) -> Iterator[None]:
    """Be this rank on the meta device inside this block; everything is restored afterwards.

    ``supported``: options that other rehearsals refuse and the caller runs. Raises SpecError, RehearsalUnavailable.
    """
    refuse_what_is_ignored(run, but=supported)
    if run.implementation.te:
        te_kernels.load()
    import_diffusion(run)
    if run.precision.fp32_residual_connection and not run.implementation.te:
        raise NotBuildable(
            "fp32_residual_connection needs norms that change the dtype, of Apex or Transformer Engine"
        )
    if runs_flash(run) and run.parallel.cp > 1:
        raise RehearsalUnavailable(
            f"context_parallel_size ({run.parallel.cp}) with FlashAttention 2 is not rehearsed; attention_backend "
            "fused is, with which cuDNN's attention runs"
        )
    if run.parallel.cp > 1 and run.implementation.cp_comm_type == "a2a+p2p":
        raise RehearsalUnavailable(
            "cp_comm_type (a2a+p2p) is not rehearsed: a run does not say how its ranks are grouped "
            "(hierarchical_context_parallel_sizes); p2p is"
        )
    for option in ("moe_router_fusion", "moe_permute_fusion"):
        if getattr(run.implementation, option) and run.model.has_experts and not has_te():
            raise RehearsalUnavailable(f"{option} (True) takes its kernels from Transformer Engine; add that here")
    limits = limits_of(run.model)
    delta_nets = any(isinstance(m, GatedDeltaNetSpec) for m in limits.mixers)
    if run.batch.packed_sequences and run.parallel.cp > 1 and delta_nets:
        raise RehearsalUnavailable(
            f"packed_sequences (True) with context_parallel_size ({run.parallel.cp}) is not rehearsed in gated delta "
            "nets, which reorder tokens by the lengths of the sequences; drop one of them"
        )
    _check_loss(run)
    moe = limits.moes[0] if limits.moes else None
    with (
        quiet(), existing_objects_frozen(), _environment_of(run), _determinism(run), fake_world(run.parallel, rank),
        patches.running(*((moe.topk, moe.num_experts) if moe else ()), multiple=_multiple(run)),
        _transformer_engine(run), refusals_named(),
    ):  # fmt: skip
        yield


def _multiple(run: RunSpec) -> int:
    """Rows to which quantized experts pad; 0 for none (``fp8_utils.py: get_fp8_align_size``, ``fp4_utils.py:
    get_fp4_align_size``; TE ``grouped_linear.py`` uses 64 instead)."""
    precision = run.precision
    if not precision.quantizes:
        return 0
    if precision.fp4 is not None:
        return 64
    return 32 if precision.fp8_recipe == "mxfp8" else 16


def _check_loss(run: RunSpec) -> None:
    """Refuse a fused cross entropy that is not installed, for which megatron-core would fail with a traceback."""
    from typing import get_args

    from megatron.core.model_parallel_config import ModelParallelConfig

    impl = run.implementation
    kind = impl.cross_entropy_fusion_impl
    if not impl.cross_entropy_loss_fusion:
        return
    # Before 0.16 the field is a plain string.
    known = get_args(ModelParallelConfig.__dataclass_fields__["cross_entropy_fusion_impl"].type) or ("native", "te")
    if kind not in known:
        raise NotBuildable(
            f"cross_entropy_fusion_impl ({kind}) is not in this megatron-core, which has {', '.join(known)}"
        )
    if kind == "te" and not has_te():
        raise NotBuildable("cross_entropy_fusion_impl (te) needs Transformer Engine here; use native")


#: Variables by which megatron-core passes ``--attention-backend`` to Transformer Engine, and which it refuses to find
#: set (``extensions/transformer_engine.py: TEDotProductAttention``; ``language_module.py: _set_attention_backend``).
_ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@contextmanager
def _environment_of(run: RunSpec) -> Iterator[None]:
    """The environment of a job that starts with this run; afterwards the environment of before."""
    before = dict(os.environ)
    for name in _ATTENTION_VARIABLES:
        os.environ.pop(name, None)
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = str(int(not run.implementation.deterministic_attention))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _determinism(run: RunSpec) -> Iterator[None]:
    """torch's deterministic algorithms, as ``--deterministic-mode`` asks for (Megatron-LM ``arguments.py:
    validate_args``). Operations without a deterministic algorithm only warn: nothing is computed."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(run.implementation.deterministic_mode or before[0], warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def runs_flash(run: RunSpec) -> bool:
    """Whether FlashAttention runs: chosen, or the only kernel for windows with dropout, which cuDNN does not
    support."""
    chosen, model = run.implementation.attention_kernel, run.model
    windows = any(isinstance(m, AttentionSpec) and m.window_size is not None for m in limits_of(model).mixers)
    return chosen == "flash" or (chosen == "fused" and bool(model.attention_dropout) and windows)


def _transformer_engine(run: RunSpec) -> Any:
    if not te_kernels.loaded():
        return nullcontext()
    fp8_parameters = run.precision.quantized_param
    flash = runs_flash(run)
    return te_kernels.running(run.implementation.gpu_arch, fp8_parameters=fp8_parameters, flash=flash)
