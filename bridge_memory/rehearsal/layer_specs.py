"""megatron-core's layer specs of a RunSpec, with local modules or Transformer Engine's."""

from __future__ import annotations

import copy
from typing import Any

from bridge_memory.rehearsal.megatron_config import layers_of
from bridge_memory.rehearsal.patches.replace import replaced
from bridge_memory.rehearsal.world import NotBuildable
from bridge_memory.spec import AttentionSpec, GatedDeltaNetSpec, LayerSpec, MambaSpec, MLPSpec, MoESpec, RunSpec


def gpt_block_spec(run: RunSpec, config: Any, vp_stage: int | None) -> tuple[Any, Any]:
    """(TransformerBlockSubmodules of this chunk, spec of the layer that MTP repeats)."""
    from megatron.core.models.gpt import gpt_layer_specs

    te = run.implementation.te
    delta = any(isinstance(x.mixer, GatedDeltaNetSpec) for x in run.model.layers)
    if delta and te:
        return _experimental_block_spec(config, vp_stage)
    if getattr(config, "experimental_attention_variant", None) == "dsa":
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as experimental

        block = experimental.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
        # Megatron-LM gpt_builders.py: MTP depths use the spec of the last layer.
        return block, experimental.get_transformer_layer_with_experimental_attention_variant_spec(config)[-1]
    if delta:
        # From 0.18 on these specs are for layers with attention only.
        config = copy.copy(config)
        config.experimental_attention_variant = None
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=te, normalization=config.normalization, vp_stage=vp_stage
    )
    if delta:
        return _with_gated_delta_nets(run, config, block, vp_stage)
    last = _decoder_layer_specs(config, te)[-1]
    if any(isinstance(x.ffn, MoESpec) and x.ffn.shared_expert_gate for x in layers_of(run)):
        for layer in (*block.layer_specs, last):
            _gated(layer)
    return block, last


def _decoder_layer_specs(config: Any, te: bool) -> list[Any]:
    """The specs of all decoder layers, of every stage."""
    from megatron.core.models.gpt import gpt_layer_specs

    every = getattr(gpt_layer_specs, "get_gpt_decoder_layer_specs", None)
    if every is not None:
        specs: list[Any] = every(config, use_transformer_engine=te, normalization=config.normalization)
        return specs
    # Before 0.16 there is only the spec of a chunk: let the chunk be the whole model.
    whole = copy.copy(config)
    whole.pipeline_model_parallel_layout = None
    with (
        replaced(gpt_layer_specs, "get_num_layers_to_build", lambda *a, **k: config.num_layers),
        replaced(gpt_layer_specs, "get_transformer_layer_offset", lambda *a, **k: 0),
    ):
        block = gpt_layer_specs.get_gpt_decoder_block_spec(
            whole, use_transformer_engine=te, normalization=config.normalization
        )
    return list(block.layer_specs)


def _gated(layer: Any) -> None:
    """Give shared experts their gate. Before 0.16 the layer spec sets it (``moe_module_specs.py``); from then on the
    config does, and the spec's value is not read."""
    shared = getattr(getattr(layer.submodules.mlp, "submodules", None), "shared_experts", None)
    params = getattr(shared, "params", {})  # from 0.17 it is a ``functools.partial``
    if "gate" in params:
        params["gate"] = True


def _experimental_block_spec(config: Any, vp_stage: int | None) -> tuple[Any, Any]:
    """Qwen3-Next's stack as megatron-core 0.16 builds it (needs Transformer Engine)."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as experimental
    from megatron.core.models.gpt import gpt_layer_specs

    block = experimental.get_transformer_block_with_experimental_attention_variant_spec(
        config, vp_stage=vp_stage
    )
    last = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    return block, last


def _with_gated_delta_nets(run: RunSpec, config: Any, block: Any, vp_stage: int | None) -> tuple[Any, Any]:
    """As ``experimental_attention_variant_module_specs.py``, with local modules in place of TE's."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    backend = LocalSpecProvider()
    norm = backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=False)
    attention = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=backend.column_parallel_linear(), out_norm=norm, out_proj=backend.row_parallel_linear()
        ),
    )
    specs = _decoder_layer_specs(config, te=False)
    for i, layer in enumerate(run.model.layers):
        if isinstance(layer.mixer, GatedDeltaNetSpec):
            specs[i] = copy.deepcopy(specs[i])
            specs[i].submodules.self_attention = attention
    block.layer_specs = [specs[i] for i in _local_layers(config, vp_stage)]
    return block, specs[-1]


def _local_layers(config: Any, vp_stage: int | None) -> list[int]:
    """0-based decoder layers of this rank's chunk, by megatron-core's functions."""
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    if config.pipeline_model_parallel_layout is not None:
        return list(
            config.pipeline_model_parallel_layout.get_layer_id_list(
                layer_type=LayerType.decoder, vp_stage=vp_stage
            )
        )
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    return list(range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage)))


def hybrid_pattern(run: RunSpec) -> str:
    """``hybrid_override_pattern``: M (Mamba), * (attention), - (MLP), E (MoE), one letter per layer; from 0.17 on
    followed by "/" and the letters of every MTP depth."""
    patterns = [run.model.layers]
    if run.model.mtp_layer is not None:
        depth = run.model.mtp_layer
        parts = [LayerSpec(depth.mixer, None), LayerSpec(None, depth.ffn)]
        patterns += [tuple(x for x in parts if x.mixer or x.ffn)] * run.model.mtp_num_layers
    return "/".join("".join(map(_letter, layers)) for layers in patterns)


def _letter(layer: LayerSpec) -> str:
    if isinstance(layer.mixer, MambaSpec) and layer.mixer.recompute_scan:
        raise NotBuildable("recompute_scan (True) is no option of megatron-core; leave it at False")
    if isinstance(layer.mixer, MambaSpec) and layer.ffn is None:
        return "M"
    if isinstance(layer.mixer, AttentionSpec) and layer.ffn is None:
        return "*"
    if layer.mixer is None and isinstance(layer.ffn, MLPSpec):
        return "-"
    if layer.mixer is None and isinstance(layer.ffn, MoESpec):
        return "E"
    raise NotBuildable("a layer of a hybrid model is a mixer or a feed-forward block, not both")


def hybrid_te_spec() -> Any:
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

    return mamba_stack_spec


def _local_mtp_spec(norm: Any, linear: Any) -> Any:
    """``hybrid_layer_specs.py: _hybrid_mtp_block_spec`` with local modules."""
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec

    depth = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=linear, mtp_model_layer=None, layer_norm=norm
    )
    return ModuleSpec(
        module=mtp.MultiTokenPredictionBlock,
        submodules=mtp.MultiTokenPredictionBlockSubmodules(
            layer_specs=[ModuleSpec(module=mtp.MultiTokenPredictionLayer, submodules=depth)]
        ),
    )


def hybrid_spec(config: Any, mamba: MambaSpec | None) -> Any:
    """``models/mamba/mamba_layer_specs.py`` with local modules in place of Transformer Engine's."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    backend = LocalSpecProvider()
    norm = backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=False)

    def half(layer: Any, module: type, mixer: bool) -> Any:
        sub = layer.submodules
        kept: dict[str, Any] = (
            {"input_layernorm": sub.input_layernorm, "self_attention": sub.self_attention,
             "self_attn_bda": sub.self_attn_bda}
            if mixer
            else {"pre_mlp_layernorm": sub.pre_mlp_layernorm, "mlp": sub.mlp, "mlp_bda": sub.mlp_bda}
        )  # fmt: skip
        return ModuleSpec(module=module, submodules=TransformerLayerSubmodules(**kept))

    def layer(experts: int | None) -> Any:
        return gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
        )

    more: dict[str, Any] = {}
    if config.num_moe_experts:
        more["moe_layer"] = half(layer(config.num_moe_experts), TransformerLayer, False)
    if config.mtp_num_layers:
        more["mtp_block_spec"] = _local_mtp_spec(norm, backend.column_parallel_linear())
    return ModuleSpec(
        module=MambaStack,
        submodules=MambaStackSubmodules(
            mamba_layer=ModuleSpec(
                module=MambaLayer,
                submodules=MambaLayerSubmodules(
                    norm=norm,
                    mixer=ModuleSpec(
                        module=MambaMixer,
                        params={
                            "expand": 2,
                            **({"d_conv": mamba.conv_kernel, "chunk_size": mamba.chunk_size,
                                "rmsnorm": mamba.rmsnorm, "bias": mamba.proj_bias,
                                "conv_bias": mamba.conv_bias} if mamba else {}),
                        },
                        submodules=MambaMixerSubmodules(
                            in_proj=backend.column_parallel_linear(), out_proj=backend.row_parallel_linear()
                        ),
                    ),
                    mamba_bda=get_bias_dropout_add,
                ),
            ),
            attention_layer=half(layer(None), TransformerLayer, True),
            mlp_layer=half(layer(None), MLPLayer, False),
            **more,
        ),
    )  # fmt: skip
