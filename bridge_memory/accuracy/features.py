"""Features and scale of a run, by which errors are grouped."""

from __future__ import annotations

from dataclasses import fields

from bridge_memory.spec import MambaSpec, MLASpec, MoESpec, RunSpec

#: Hidden size up to which a model is a small test model: its memory is mostly logits, workspaces and remainders of
#: allocator blocks.
TOY_HIDDEN_SIZE = 512
#: Peak, bytes, from which a run is of the scale that people plan for.
_GIB_SCALE = 4 << 30
SCALES = ("4 GiB and above", "below 4 GiB", "small test models")


def scale_of(run: RunSpec, highest: int) -> str:
    """One of SCALES: small test models are separate; other runs go by ``highest``, bytes: the measured peak of the rank
    with the most."""
    if run.model.hidden_size <= TOY_HIDDEN_SIZE:
        return SCALES[2]
    return SCALES[0] if highest >= _GIB_SCALE else SCALES[1]


def features_of(run: RunSpec) -> tuple[str, ...]:
    """Features of a run, in words."""
    p, d, i = run.parallel, run.data_parallel, run.implementation
    layers = run.model.layers
    moe = any(isinstance(layer.ffn, MoESpec) for layer in layers)
    words = {
        i.transformer_impl: True,
        "legacy model": i.use_legacy_models,
        "distributed optimizer": d.use_distributed_optimizer,
        d.engine_title: d.fsdp,
        f"optimizer {run.optimizer.optimizer}": True,
        run.precision.params_dtype: True,
        "fp8": run.precision.fp8 is not None,
        "fp8 parameters": run.precision.fp8_param,
        "TP": p.tp > 1,
        "PP": p.pp > 1,
        "VPP": p.vpp > 1,
        "CP": p.cp > 1,
        "EP": p.ep > 1,
        "MoE": moe,
        "grouped GEMM": moe and i.moe_grouped_gemm,
        f"dispatcher {i.moe_token_dispatcher_type}": moe,
        "MLA": any(isinstance(layer.mixer, MLASpec) for layer in layers),
        "Mamba": any(isinstance(layer.mixer, MambaSpec) for layer in layers),
        "MTP": run.model.mtp_num_layers > 0,
        "recompute": run.recompute.granularity is not None,
        f"attention {i.attention_backend}": True,
        "dropout": run.model.hidden_dropout > 0,
        "untied": not run.model.share_embeddings_and_output_weights,
        "fused cross entropy": i.cross_entropy_loss_fusion,
        "per-token loss": i.calculate_per_token_loss,
        "overlap grad reduce": d.overlap_grad_reduce,
        "overlap param gather": d.overlap_param_gather,
        i.gpu_arch: True,
    }
    return tuple(word for word, used in words.items() if used)


def non_default_options(run: RunSpec) -> list[str]:
    """``field=value`` of every parallel, optimizer, data-parallel, adapter and implementation option that was set."""
    groups = (run.parallel, run.optimizer, run.data_parallel, run.peft, run.implementation)
    members = ((f, getattr(group, f.name)) for group in groups for f in fields(group))
    return [f"{f.name}={value}" for f, value in members if value != f.default]
