"""Adapt a run to what can be rehearsed here without a GPU: with Transformer Engine where its Python is installed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from bridge_memory.rehearsal.world import installed_release
from bridge_memory.releases import release_in, release_words
from bridge_memory.spec import MoESpec, RunSpec, SpecError


def with_core_here(spec: RunSpec) -> RunSpec:
    """``spec`` with the release of the installed megatron-core, whose rules apply. Raises SpecError where it names
    another."""
    here, asked = installed_release(), spec.implementation.megatron_core
    if here is None or asked == here:
        return spec
    if asked is not None:
        raise SpecError(
            f"megatron_core ({release_words(asked)}) is not the release installed here ({release_words(here)}), which "
            f"is the one that would run; drop it, or install megatron-core {release_words(asked)}"
        )
    return spec.with_(implementation=replace(spec.implementation, megatron_core=here))


def _with_te_here(spec: RunSpec) -> RunSpec:
    """``spec`` with the release of the installed Transformer Engine. Raises SpecError where it names another."""
    from bridge_memory.rehearsal import te_kernels

    here, asked = release_in(te_kernels.version()), spec.implementation.transformer_engine
    if asked is not None and here is not None and asked != here:
        raise SpecError(
            f"transformer_engine ({release_words(asked)}) is not the release installed here ({release_words(here)}), "
            "which is the one that would run; drop --transformer-engine"
        )
    return spec.with_(implementation=replace(spec.implementation, transformer_engine=here))


def experts_one_by_one(spec: RunSpec, notes: list[str]) -> RunSpec:
    """Without Transformer Engine experts are not grouped (``megatron_config.py``); a note says so."""
    impl = spec.implementation
    if impl.te or not impl.moe_grouped_gemm or not any(isinstance(x.ffn, MoESpec) for x in spec.model.layers):
        return spec
    notes.append(
        "experts run one by one (--no-moe-grouped-gemm), since grouped GEMM without Transformer Engine needs a "
        "separate package"
    )
    return spec.with_(implementation=replace(impl, moe_grouped_gemm=False))


def take_transformer_engine() -> str:
    """Load Transformer Engine over kernels that compute nothing, or hide it; call before megatron-core is imported.

    Returns why it cannot be rehearsed; empty where it can.
    """
    if find_spec("torch") is None:
        return ""
    from bridge_memory.rehearsal import te_kernels

    why_not = te_kernels.why_not()
    if why_not:
        te_kernels.leave()
    else:
        te_kernels.load()
    return why_not


def on_meta(spec: RunSpec, why_not: str, notes: list[str]) -> RunSpec:
    """``spec`` as it can run on meta tensors here; differences are appended to ``notes``. Raises SpecError.

    ``why_not``: why Transformer Engine cannot be rehearsed here, or empty.
    """
    from bridge_memory.rehearsal import te_kernels
    from bridge_memory.rehearsal.refusals import refuse_what_is_ignored

    refuse_what_is_ignored(spec)
    if spec.implementation.te and why_not:
        alone = {"fp8": spec.precision.fp8, "context_parallel_size": spec.parallel.cp if spec.parallel.cp > 1 else None}
        for name, value in alone.items():
            if value is not None:
                raise SpecError(
                    f"{name} ({value}) needs Transformer Engine, and {why_not}; add it (no GPU needed) with: "
                    f"{te_kernels.INSTALL}"
                )
        notes.append(
            f"both columns are for --transformer-impl local, without Transformer Engine: {why_not}; add it (no GPU "
            f"needed) with: {te_kernels.INSTALL}"
        )
        local = replace(spec.implementation, transformer_impl="local", moe_grouped_gemm=False)
        spec = spec.with_(implementation=local)
    if spec.implementation.te:
        spec = _with_te_here(spec)
    return experts_one_by_one(spec, notes)
