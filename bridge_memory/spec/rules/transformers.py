"""Runs whose layers are plain torch modules: transformers', torchtitan's or torchtune's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge_memory.spec.adapters import OF_TRANSFORMERS
from bridge_memory.spec.errors import SpecError, listed, show
from bridge_memory.spec.model import GatedDeltaNetSpec, KimiDeltaSpec, Mamba1Spec, MambaSpec, ShortConvSpec
from bridge_memory.spec.parts import ALL_LINEAR
from bridge_memory.spec.rules.own_layers import check_own_layers
from bridge_memory.spec.rules.quantized import check_quantized
from bridge_memory.spec.rules.training_loop import check_loop
from bridge_memory.spec.transformers import (
    DEFAULT_TRANSFORMERS_SPEC,
    FAMILIES,
    KNOWN_TRANSFORMERS,
    NOT_IN_MEGATRON,
    REMOTE_CODE,
    family_of,
)

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size",
)  # fmt: skip


#: Mixers that transformers alone has -> a ``model_type`` that has them.
_OF_TRANSFORMERS: dict[type, str] = {ShortConvSpec: "lfm2", KimiDeltaSpec: "kimi_linear", Mamba1Spec: "jamba"}
#: Fields of a TransformersSpec that matter to an encoder beside Megatron's layers.
OF_ENCODERS = ("transformers_version", "attn_implementation")


def check_transformers(run: RunSpec) -> None:
    """Raise SpecError for models and options that transformers, torchtitan or torchtune do not support."""
    spec = run.transformers
    if not run.implementation.torch_layers:
        missing = NOT_IN_MEGATRON.get(run.model.model_type)
        for layer, _, _ in run.model.layer_runs:
            if type(layer.mixer) in _OF_TRANSFORMERS:
                missing = NOT_IN_MEGATRON[_OF_TRANSFORMERS[type(layer.mixer)]]
        if missing is not None:
            raise SpecError(
                f"model_type ({run.model.model_type}): megatron-core does not have {missing}; set transformer_impl to "
                "transformers, or choose an engine that trains its layers (--engine fsdp2, zero3, ddp, ...)"
            )
        if run.peft.use_dora:
            raise SpecError(
                "peft.use_dora (True) is counted for transformers' layers alone; set transformer_impl to transformers"
            )
        if spec is not DEFAULT_TRANSFORMERS_SPEC and spec != DEFAULT_TRANSFORMERS_SPEC:
            # An encoder of transformers runs beside Megatron's layers.
            encoders = any(encoder.structure is not None for encoder in run.model.encoders)
            changed = [f for f in spec.__slots__ if getattr(spec, f) != getattr(DEFAULT_TRANSFORMERS_SPEC, f)]
            for name in [f for f in changed if not (encoders and f in OF_ENCODERS)]:
                raise SpecError(
                    f"{name} ({show(getattr(spec, name))}) is for transformer_impl transformers, not "
                    f"{run.implementation.transformer_impl}; drop it, or set transformer_impl to transformers"
                )
        return
    kind = run.model.model_type
    if kind in REMOTE_CODE:
        raise SpecError(
            f"model_type ({kind}) is no class of transformers: its checkpoint brings its own ({REMOTE_CODE[kind]}), "
            "which is not recorded; use transformer_impl transformer_engine"
        )
    if kind not in FAMILIES:
        raise SpecError(
            f"model_type ({show(kind)}) is none of those recorded as transformers runs them "
            f"({listed(sorted(FAMILIES))}); use transformer_impl transformer_engine"
        )
    check_loop(run)
    if run.implementation.own_layers:
        check_own_layers(run)
    if spec.selective_ac_option is not None and not run.implementation.torchtitan:
        raise SpecError(
            f"selective_ac_option ({spec.selective_ac_option}) is torchtitan's; set transformer_impl to torchtitan, or "
            "use gradient_checkpointing"
        )
    for name in _SIZES:
        size = getattr(run.parallel, name)
        if size != 1:
            raise SpecError(
                f"{name} ({size}) is not supported with transformer_impl transformers, whose modules are whole on "
                "every rank; set it to 1, or use transformer_impl transformer_engine"
            )
    family = family_of(kind, spec)
    first, last = KNOWN_TRANSFORMERS[0], family.until
    if not first <= spec.transformers_version <= last:
        raise SpecError(
            f"transformers_version ({'.'.join(map(str, spec.transformers_version))}) is not one of the releases whose "
            f"{kind} was read; use {'.'.join(map(str, max(first, family.since)))} to {'.'.join(map(str, last))}"
        )
    if spec.transformers_version < family.since:
        raise SpecError(
            f"transformers_version ({'.'.join(map(str, spec.transformers_version))}) has no {kind}; give "
            f"{'.'.join(map(str, family.since))} or later"
        )
    asked = spec.attn_implementation
    if asked != "sdpa" and asked not in family.attention:
        raise SpecError(
            f"attn_implementation ({asked}) is not known to the class of {kind}; use {listed(family.attention)}"
        )
    if run.recompute.granularity is not None:
        raise SpecError(
            f"recompute_granularity ({run.recompute.granularity}) is megatron-core's; with transformer_impl "
            "transformers use gradient_checkpointing"
        )
    mixers = {type(layer.mixer) for layer in run.model.layers}
    if spec.mixer_kernels and not mixers & {GatedDeltaNetSpec, MambaSpec, Mamba1Spec, ShortConvSpec, KimiDeltaSpec}:
        raise SpecError(
            f"mixer_kernels (True) does nothing: {kind} has no gated delta net, no Mamba layer, no Kimi "
            "delta attention and no short convolution; drop it"
        )
    check_quantized(run)
    if {"cross_entropy", "fused_linear_cross_entropy"} <= set(spec.liger_kernel):
        raise SpecError(
            "liger_kernel (cross_entropy and fused_linear_cross_entropy): Liger takes one of them; drop cross_entropy"
        )
    if run.peft.use_dora and not run.peft.trains_adapters:
        raise SpecError("peft.use_dora (True) needs adapters; set peft.scheme to lora and peft.dim to their rank")
    if run.peft.use_dora and spec.autocast is not None:
        raise SpecError("peft.use_dora (True) is not counted with autocast; drop autocast and set params_dtype to bf16")
    targets = run.peft.target_modules
    linears = (*OF_TRANSFORMERS, ALL_LINEAR)
    if run.peft.trains_adapters and all("*" not in t and "." not in t and t not in linears for t in targets):
        raise SpecError(
            f"peft.target_modules ({', '.join(targets)}) names no linear of transformers: nothing would train; use its "
            "names, such as q_proj and v_proj"
        )
    if spec.use_reentrant is not None and not spec.gradient_checkpointing:
        raise SpecError(
            f"use_reentrant ({spec.use_reentrant}) does nothing without gradient_checkpointing; drop it, or set "
            "gradient_checkpointing to True"
        )
    if spec.autocast is not None and run.compute_dtype != "fp32":
        raise SpecError(
            f"autocast ({spec.autocast}) is for parameters in fp32, not {run.compute_dtype}; set params_dtype to fp32, "
            "or drop autocast"
        )
