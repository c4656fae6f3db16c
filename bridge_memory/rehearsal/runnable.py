"""A run as it can be rehearsed here without a GPU: with Transformer Engine's Python where it is installed."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec

from bridge_memory.spec import MoESpec, RunSpec, SpecError


def _with_the_release_here(spec: RunSpec) -> RunSpec:
    """By the rules of the Transformer Engine that runs."""
    from bridge_memory.rehearsal import te_kernels
    from bridge_memory.releases import release_in, release_words

    here, asked = release_in(te_kernels.version()), spec.implementation.transformer_engine
    if asked is not None and here is not None and asked != here:
        raise SpecError(
            f"transformer_engine ({release_words(asked)}) is not the release installed here ({release_words(here)}), "
            "which is the one that would run; drop --transformer-engine"
        )
    return spec.with_(implementation=replace(spec.implementation, transformer_engine=here))


def experts_one_by_one(spec: RunSpec, notes: list[str]) -> RunSpec:
    """Without Transformer Engine megatron-core is given experts one by one, see ``rehearsal.model``."""
    impl = spec.implementation
    if impl.te or not impl.moe_grouped_gemm or not any(isinstance(x.ffn, MoESpec) for x in spec.model.layers):
        return spec
    notes.append(
        "experts run one by one (--no-moe-grouped-gemm), since grouped GEMM without Transformer Engine needs a package "
        "of its own"
    )
    return spec.with_(implementation=replace(impl, moe_grouped_gemm=False))


def take_transformer_engine() -> str:
    """Its Python, over kernels that compute nothing; megatron-core looks for it only once. Returns why it cannot be."""
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
    """``spec`` as it can run on meta tensors here, with ``notes`` on what differs. Raises SpecError.

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
        spec = _with_the_release_here(spec)
    return experts_one_by_one(spec, notes)
