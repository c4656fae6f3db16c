"""Activation recomputation: its options, its modules, and the groups of layers of the uniform method."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING

from bridge_memory.releases import (
    DELAYED_FP8_EXCLUDES_RECOMPUTED_PARTS,
    MTP_DEPTHS_RECOMPUTED,
    NVFP4_RECOMPUTED,
    SHARED_EXPERTS_RECOMPUTED,
    UNIFORM_GROUPS_MAY_END_SHORT,
    core_of,
    release_words,
)
from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.layout import Layout
from bridge_memory.spec.limits import Limits, divisors

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


def check_recompute(run: RunSpec, limits: Limits) -> None:
    """TC, and ``transformer/transformer_block.py: TransformerBlock._checkpointed_forward``."""
    r = run.recompute
    again = r.granularity == "full" or not {"mlp", "moe", "shared_experts"}.isdisjoint(r.modules)
    if again and run.precision.fp4 and not run.precision.fp4_param and not NVFP4_RECOMPUTED(run.implementation):
        raise SpecError(
            f"recompute_granularity ({r.granularity}) of linears in fp4 needs transformer_engine "
            f"{NVFP4_RECOMPUTED.number} or later; before, backward finds no column-wise weight"
        )
    if r.granularity == "full":
        if r.method is None:
            raise SpecError("recompute_granularity (full) needs recompute_method; set it to uniform or block")
        if r.num_layers is None:
            raise SpecError(f"recompute_method ({r.method}) needs recompute_num_layers; set it to 1 or more")
        if r.method == "uniform" and r.num_layers > run.model.num_layers:
            raise SpecError(
                f"recompute_num_layers ({r.num_layers}) is larger than num_layers ({run.model.num_layers}); lower it"
            )
        mtp = run.model.mtp_num_layers and MTP_DEPTHS_RECOMPUTED(run.implementation)
        if r.method == "uniform" and mtp and r.num_layers != 1:
            raise SpecError(
                f"recompute_num_layers ({r.num_layers}) is refused by megatron-core for a model with mtp_num_layers "
                "and recompute_method uniform; set it to 1"
            )
    else:
        if r.method is not None:  # MLM
            raise SpecError(
                f"recompute_method ({r.method}) does not go with recompute_granularity (selective); drop it, or "
                "set the granularity to full"
            )
        if r.num_layers is not None:
            raise SpecError(
                f"recompute_num_layers ({r.num_layers}) does not go with recompute_granularity "
                "(selective); drop it, or set the granularity to full"
            )
        _check_modules(run, limits)
    if r.distribute_saved_activations:
        p = run.parallel
        if p.sp:
            raise SpecError("distribute_saved_activations (True) does not go with sequence_parallel; drop one of them")
        if r.granularity != "full" or p.tensor_model_parallel_size == 1:  # MLM
            raise SpecError(
                "distribute_saved_activations (True) needs recompute_granularity full and "
                "tensor_model_parallel_size of 2 or more; drop it"
            )


def _check_modules(run: RunSpec, limits: Limits) -> None:
    r, i = run.recompute, run.implementation
    if r.modules == ("core_attn",):
        return
    if "shared_experts" in r.modules:
        if not SHARED_EXPERTS_RECOMPUTED(i):
            raise SpecError(
                f"recompute_modules (shared_experts) needs {SHARED_EXPERTS_RECOMPUTED} or later, not "
                f"{release_words(core_of(i))}; drop it"
            )
        if i.moe_shared_expert_overlap and limits.shared_experts:
            raise SpecError(
                "recompute_modules (shared_experts) does not go with moe_shared_expert_overlap; drop one of them"
            )
    if "moe_act" in r.modules and not i.moe_grouped_gemm:
        raise SpecError("recompute_modules (moe_act) needs moe_grouped_gemm; set that to True or drop moe_act")
    if "moe_act" in r.modules and not limits.experts:
        raise SpecError(
            "recompute_modules (moe_act) needs a model with experts: megatron-core refuses it without their grouped "
            "GEMM; drop it"
        )
    if "mlp" in r.modules and limits.dense_bias:
        # ``mlp.py: MLP.forward`` returns linear_fc2's bias, which becomes an output of the checkpoint (``random.py:
        # CheckpointFunction``, TE ``distributed.py: _CheckpointFunction``): when it is recomputed, its gradient leads
        # back to the checkpoint. Backward then recurses without end, or with fp8 raises an IndexError.
        raise SpecError(
            "recompute_modules (mlp) does not go with biases of the MLP (add_bias_linear): the backward pass of "
            "megatron-core's checkpoint calls itself without end; drop mlp, or use recompute_granularity full"
        )
    if "mhc" in r.modules:
        # Megatron-LM's main branch of 2026, TC.
        if run.model.residual_streams == 1:
            raise SpecError("recompute_modules (mhc) needs a model with hyper-connections; drop it")
        if "mlp" in r.modules:
            raise SpecError("recompute_modules (mhc) does not go with mlp; drop one of them")
        if i.offload_modules:
            raise SpecError("recompute_modules (mhc) does not go with offload_modules; drop one of them")
    if "mla_up_proj" in r.modules and not limits.mla:
        raise SpecError("recompute_modules (mla_up_proj) needs a model with multi-latent attention; drop it")
    if run.precision.fp8 and run.precision.fp8_recipe == "delayed" and DELAYED_FP8_EXCLUDES_RECOMPUTED_PARTS(i):
        for name in ("moe_act", "layernorm"):
            if name in r.modules:
                raise SpecError(
                    f"recompute_modules ({name}) does not go with fp8_recipe delayed; use another recipe or drop it"
                )


def check_layout(run: RunSpec, plan: Layout) -> None:
    """Raise SpecError if the uniform method's groups do not divide the layers of every chunk.

    ``transformer/transformer_block.py: TransformerBlock._checkpointed_forward``, 0.12 to 0.16.1, indexes the layers of
    whole groups of recompute_num_layers. ``MambaStack`` of hybrid models has no full recomputation in these releases.
    """
    r, n = run.recompute, run.recompute.num_layers
    if r.granularity != "full" or r.method != "uniform" or not n or n == 1:
        return
    if run.model.hybrid or UNIFORM_GROUPS_MAY_END_SHORT(run.implementation):
        return
    for stage, chunks in enumerate(plan.stages):
        for index, chunk in enumerate(chunks):
            size = len(chunk.layers)
            if size % n:
                where = f"virtual stage {index} of stage {stage}" if len(chunks) > 1 else f"pipeline stage {stage}"
                common = gcd(*(len(c.layers) for row in plan.stages for c in row))
                raise SpecError(
                    f"recompute_num_layers ({n}) does not divide the {size} layers of {where}, which recompute_method "
                    f"uniform needs; use {divisors(common, min(n, common), above=False)}, or recompute_method block"
                )
