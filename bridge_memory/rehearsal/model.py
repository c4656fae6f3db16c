"""The model chunks of one rank, built by megatron-core from a RunSpec.

Shapes, names and splits are megatron-core's own. A model that its configuration cannot express (a hidden size that
differs by layer, norms after attention, ...) is refused by name.
"""

from __future__ import annotations

import warnings
from dataclasses import fields
from typing import Any

import torch

from bridge_memory.rehearsal.diffusion import wan_model
from bridge_memory.rehearsal.layer_specs import gpt_block_spec, hybrid_pattern, hybrid_spec, hybrid_te_spec
from bridge_memory.rehearsal.megatron_config import installed_words, one_line, only, transformer_config
from bridge_memory.rehearsal.world import NotBuildable, StackRefusal
from bridge_memory.spec import AttentionSpec, MambaSpec, RunSpec


def build_chunks(
    run: RunSpec, *, initialize: bool = False, architecture: Any = None
) -> list[torch.nn.Module]:
    """The model chunks (virtual stages, in order) of this process's rank in parallel_state.

    Call inside ``fake_world`` and, without a GPU, inside ``patches.building``. Raises NotBuildable.
    """
    from megatron.core import parallel_state

    if run.model.diffusion is not None:
        return [wan_model(run)]
    config = transformer_config(run, initialize=initialize, architecture=architecture)
    # A layout string sets the number of virtual stages.
    vpp = config.virtual_pipeline_model_parallel_size
    chunks = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for chunk in range(vpp or 1):
            vp_stage = chunk if vpp else None
            first = parallel_state.is_pipeline_first_stage(ignore_virtual=vpp is None, vp_stage=vp_stage)
            last = parallel_state.is_pipeline_last_stage(ignore_virtual=vpp is None, vp_stage=vp_stage)
            build = _mamba_model if run.model.hybrid else _gpt_model
            try:
                chunks.append(build(run, config, first, last, vp_stage))
            except NotBuildable:
                raise
            except (ValueError, AssertionError, NotImplementedError) as refusal:
                raise StackRefusal(f"megatron-core refuses this rank: {one_line(refusal)}") from refusal
    return chunks


def _common(run: RunSpec, first: bool, last: bool) -> dict[str, Any]:
    model = run.model
    position = model.position_embedding_type
    return {
        "vocab_size": model.padded_vocab_size(run.parallel.tp),
        "max_sequence_length": model.max_position_embeddings or run.batch.seq_length,
        "pre_process": first,
        "post_process": last,
        "share_embeddings_and_output_weights": model.share_embeddings_and_output_weights,
        "position_embedding_type": position if position in ("rope", "learned_absolute") else "none",
    }


def _gpt_model(run: RunSpec, config: Any, first: bool, last: bool, vp_stage: int | None) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    block, mtp_layer = gpt_block_spec(run, config, vp_stage)
    mtp = None
    if config.mtp_num_layers:
        mtp = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, mtp_layer, use_transformer_engine=run.implementation.te, vp_stage=vp_stage
        )
    return GPTModel(
        config=config, transformer_layer_spec=block, mtp_block_spec=mtp, vp_stage=vp_stage,
        rotary_percent=_rotary_percent(run), **_common(run, first, last),
    )  # fmt: skip


def _rotary_percent(run: RunSpec) -> float:
    for layer in run.model.layers:
        if isinstance(layer.mixer, AttentionSpec) and run.model.rotary_dim:
            return min(1.0, run.model.rotary_dim / layer.mixer.kv_channels)
    return 1.0


def _mamba_model(run: RunSpec, config: Any, first: bool, last: bool, vp_stage: int | None) -> torch.nn.Module:
    from megatron.core.models.mamba import MambaModel
    from megatron.core.ssm.mamba_block import MambaStackSubmodules

    if config.num_moe_experts and "moe_layer" not in {f.name for f in fields(MambaStackSubmodules)}:
        raise NotBuildable(
            f"a hybrid (Mamba) model with experts needs megatron-core 0.16 or later, not {installed_words()}"
        )
    mamba = only("Mamba mixer", (x.mixer for x in run.model.layers if isinstance(x.mixer, MambaSpec)))
    spec = hybrid_te_spec() if run.implementation.te else hybrid_spec(config, mamba)
    return MambaModel(
        config=config, mamba_stack_spec=spec, hybrid_override_pattern=hybrid_pattern(run),
        **_common(run, first, last),
    )  # fmt: skip


def parameter_shapes(chunks: list[torch.nn.Module]) -> list[dict[str, tuple[int, ...]]]:
    """{name: local shape} of each chunk, as ``named_parameters`` lists them (a shared weight once)."""
    return [{name: tuple(p.shape) for name, p in chunk.named_parameters()} for chunk in chunks]
