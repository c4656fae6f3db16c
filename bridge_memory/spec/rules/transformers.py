"""What a run with Hugging Face's modules refuses: one line each, as in ``validation``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge_memory.spec.adapters import OF_TRANSFORMERS
from bridge_memory.spec.errors import SpecError, listed, show
from bridge_memory.spec.model import GatedDeltaNetSpec, MambaSpec
from bridge_memory.spec.parts import ALL_LINEAR
from bridge_memory.spec.transformers import (
    DEFAULT_TRANSFORMERS_SPEC,
    FAMILIES,
    KNOWN_TRANSFORMERS,
    OF_TORCHTITAN,
    OF_TORCHTUNE,
    REMOTE_CODE,
    family_of,
)

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec

_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size",
)  # fmt: skip


def check_transformers(run: RunSpec) -> None:
    """Raise SpecError where transformers has no such model, or cannot do what another field asks for."""
    spec = run.transformers
    if not run.implementation.torch_layers:
        if run.peft.use_dora:
            raise SpecError(
                "peft.use_dora (True) is counted for transformers' layers alone; set transformer_impl to transformers"
            )
        if spec is not DEFAULT_TRANSFORMERS_SPEC and spec != DEFAULT_TRANSFORMERS_SPEC:
            name = next(f for f in spec.__slots__ if getattr(spec, f) != getattr(DEFAULT_TRANSFORMERS_SPEC, f))
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
    _check_loop(run)
    if run.implementation.own_layers:
        _check_own_layers(run)
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
    first, last = KNOWN_TRANSFORMERS
    if not first <= spec.transformers_version <= last:
        raise SpecError(
            f"transformers_version ({'.'.join(map(str, spec.transformers_version))}) is not one of the "
            f"releases that were read; use {'.'.join(map(str, first))} to {'.'.join(map(str, last))}"
        )
    family = family_of(kind, spec)
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
    if spec.mixer_kernels and not mixers & {GatedDeltaNetSpec, MambaSpec}:
        raise SpecError(
            f"mixer_kernels (True) does nothing: {kind} has no gated delta net and no Mamba layer; drop it"
        )
    _check_quantized(run)
    if {"cross_entropy", "fused_linear_cross_entropy"} <= set(spec.liger_kernel):
        raise SpecError(
            "liger_kernel (cross_entropy and fused_linear_cross_entropy): Liger takes one of them; drop cross_entropy"
        )
    if run.peft.use_dora and not run.peft.trains_adapters:
        raise SpecError("peft.use_dora (True) needs adapters; set peft.scheme to lora and peft.dim to their rank")
    if run.peft.use_dora and spec.autocast is not None:
        raise SpecError("peft.use_dora (True) is not counted with autocast; drop autocast and set params_dtype to bf16")
    targets = run.peft.target_modules
    known = (*OF_TRANSFORMERS, ALL_LINEAR)
    if run.peft.trains_adapters and all("*" not in t and "." not in t and t not in known for t in targets):
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


def _check_quantized(run: RunSpec) -> None:
    """bitsandbytes' linears are frozen, and in one piece."""
    spec = run.transformers
    name = "load_in_8bit" if spec.load_in_8bit else "load_in_4bit"
    if not spec.quantized:
        for field in ("bnb_4bit_use_double_quant", "prepare_model_for_kbit_training"):
            if getattr(spec, field):
                needs = f"load_in_4bit{_OR_8[field]}"
                raise SpecError(f"{field} (True) does nothing without {needs}; set it, or drop {field}")
        return
    if spec.load_in_4bit and spec.load_in_8bit:
        raise SpecError("load_in_4bit and load_in_8bit: a model is in one of them; drop load_in_8bit")
    if spec.load_in_8bit and spec.bnb_4bit_use_double_quant:
        raise SpecError("bnb_4bit_use_double_quant (True) is for load_in_4bit, not load_in_8bit; drop it")
    if not run.peft.freezes:
        raise SpecError(
            f"{name} (True): quantised weights have no gradient, so that nothing would train; set peft.scheme to lora, "
            f"or drop {name}"
        )
    engine = run.data_parallel.engine
    if engine not in _KEEP_QUANTIZED:
        raise SpecError(
            f"{name} (True) is not supported with engine {engine}, which divides or flattens weights in one dtype; use "
            f"{listed(_KEEP_QUANTIZED)}"
        )


#: Engines that leave frozen weights as they are.
_KEEP_QUANTIZED = ("single", "ddp")
_OR_8 = {"bnb_4bit_use_double_quant": "", "prepare_model_for_kbit_training": " or load_in_8bit"}


def _check_loop(run: RunSpec) -> None:
    """What the loop around the modules does."""
    spec, engine = run.transformers, run.data_parallel.engine
    if spec.num_output_chunks and not run.implementation.torchtune:
        raise SpecError(
            f"num_output_chunks ({spec.num_output_chunks}) is torchtune's loss in chunks; set transformer_impl to "
            "torchtune, or use liger_kernel fused_linear_cross_entropy"
        )
    if spec.num_output_chunks > run.batch.seq_length:
        raise SpecError(
            f"num_output_chunks ({spec.num_output_chunks}) is more than seq_length ({run.batch.seq_length}); "
            "torchtune's default is 8"
        )
    if spec.checkpoint_submodules:
        if spec.gradient_checkpointing or spec.selective_ac_option is not None:
            raise SpecError("checkpoint_submodules (True) and checkpoints of whole layers: drop one")
        if family_of(run.model.model_type, spec).layer != "llama" or run.peft.freezes or spec.autocast is not None:
            raise SpecError(
                "checkpoint_submodules (True) is counted for layers like Llama's without adapters and autocast; use "
                "gradient_checkpointing"
            )
        if spec.torch_compile:
            raise SpecError("checkpoint_submodules (True) is not counted with torch_compile; drop one")
    if spec.cut_cross_entropy:
        other = "num_output_chunks" if spec.num_output_chunks else "" if not spec.liger_kernel else next(
            (name for name in spec.liger_kernel if "cross_entropy" in name), ""
        )
        if other:
            raise SpecError(f"cut_cross_entropy (True) and {other}: each is the loss; drop one")
        if spec.autocast is not None:
            raise SpecError("cut_cross_entropy (True) is not counted with autocast; drop one")
        if spec.torch_compile:
            raise SpecError("cut_cross_entropy (True) is not counted with torch_compile; drop one")
    if spec.compile_loss is not None and not run.implementation.own_layers:
        raise SpecError(
            f"compile_loss ({spec.compile_loss}) is for transformer_impl torchtitan or torchtune; transformers' loss "
            "is a part of the model that torch_compile compiles; drop it"
        )
    if spec.optimizer_in_bwd and engine != "single":
        raise SpecError(f"optimizer_in_bwd (True) is counted with engine single alone, not {engine}; drop it")
    if spec.optimizer_in_bwd and run.num_microbatches > 1:
        raise SpecError(
            f"optimizer_in_bwd (True) steps after one microbatch, and a step has {run.num_microbatches}; set "
            "global_batch_size to micro_batch_size, or drop it"
        )
    if not spec.enable_activation_offloading:
        return
    if not spec.gradient_checkpointing:
        raise SpecError(
            "enable_activation_offloading (True) needs gradient_checkpointing, whose inputs it sends to host memory; "
            "set gradient_checkpointing to True, or drop it"
        )
    if spec.reentrant:
        raise SpecError(
            "enable_activation_offloading (True) takes what autograd saves, and reentrant checkpoints are counted "
            "without it; set use_reentrant to False"
        )
    if engine not in ("single", "fsdp2"):
        raise SpecError(
            f"enable_activation_offloading (True) is counted with engine single or fsdp2, not {engine}; drop it"
        )


#: Of trainers that bring layers of their own: families, what they count for attention, options that are transformers'.
_OWN_LAYERS = {
    "torchtune": (
        OF_TORCHTUNE, "flex attention",
        ("liger_kernel", "use_cache", "keeps_outputs", "load_in_4bit", "load_in_8bit", "autocast"),
    ),
    "torchtitan": (
        OF_TORCHTITAN, "sdpa", ("liger_kernel", "use_cache", "keeps_outputs", "load_in_4bit", "load_in_8bit"),
    ),
}  # fmt: skip


def _check_own_layers(run: RunSpec) -> None:
    """Layers of Llama as torchtune or torchtitan has them."""
    spec, trainer = run.transformers, run.implementation.transformer_impl
    families, attention, of_transformers = _OWN_LAYERS[trainer]
    if run.model.model_type not in families:
        raise SpecError(
            f"model_type ({run.model.model_type}) is none whose layers in {trainer} are recorded ({listed(families)}); "
            "use transformer_impl transformers"
        )
    if run.implementation.torchtitan and spec.selective_ac_option is not None and spec.gradient_checkpointing:
        raise SpecError(
            f"selective_ac_option ({spec.selective_ac_option}) is for activation_checkpoint.mode selective, and "
            "gradient_checkpointing is its mode full; drop one"
        )
    if spec.attn_implementation != "sdpa":
        raise SpecError(
            f"attn_implementation ({spec.attn_implementation}) is not {trainer}'s; drop it (its {attention} is counted)"
        )
    if run.implementation.torchtune and spec.gradient_checkpointing and spec.reentrant:
        raise SpecError("use_reentrant (True): torchtune's checkpoints are not reentrant; drop it")
    for name in of_transformers:
        if getattr(spec, name):
            raise SpecError(f"{name} is for transformer_impl transformers, not {trainer}; drop it")
    if run.peft.freezes:
        raise SpecError(f"peft.scheme (lora) is not counted with transformer_impl {trainer}; set it to none")
