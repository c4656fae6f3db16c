"""megatron-core's TransformerConfig of a RunSpec."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import fields, replace
from io import StringIO
from typing import Any

import torch
import torch.nn.functional as F

from bridge_memory.rehearsal.activations import activation_of, fused_quick_gelu
from bridge_memory.rehearsal.world import NotBuildable, StackRefusal, installed_release
from bridge_memory.releases import QUERY_NORM_WITHOUT_LATENT
from bridge_memory.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    ImplementationSpec,
    LayerSpec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    MoESpec,
    RunSpec,
    SparseSpec,
)
from bridge_memory.spec.dtypes import TORCH_NAMES

#: Number format -> torch's dtype.
TORCH_DTYPES = {name: getattr(torch, words[0]) for name, words in TORCH_NAMES.items()}


def only(kind: str, values: Iterable[Any]) -> Any:
    """The value that all layers share; None where no layer has one. Raises NotBuildable where they differ."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) > 1:
        raise NotBuildable(
            f"the layers have {len(distinct)} kinds of {kind}; megatron-core's TransformerConfig holds one"
        )
    return distinct[0] if distinct else None


def layers_of(run: RunSpec) -> list[LayerSpec]:
    model = run.model
    return [*model.layers, *([model.mtp_layer] if model.mtp_num_layers and model.mtp_layer else [])]


#: TransformerConfig fields of the model's architecture; all others are settings of the run.
ARCHITECTURE = (
    "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "gated_linear_unit",
    "activation_func", "add_bias_linear", "add_qkv_bias", "normalization", "qk_layernorm", "layernorm_epsilon",
    "attention_output_gate", "softmax_type", "window_size", "window_attn_skip_freq",
    "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
    "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "moe_layer_freq",
    "moe_shared_expert_intermediate_size", "moe_shared_expert_gate", "moe_router_enable_expert_bias",
    "add_router_bias", "moe_router_score_function", "moe_router_load_balancing_type", "moe_aux_loss_coeff",
    "moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk", "moe_latent_size",
)  # fmt: skip
#: Field that older releases lack -> (the value that equals its absence, the first release with the field, the feature).
#: Not ``moe_shared_expert_gate``: before 0.16 the layer spec sets it (``layer_specs.py: _gated``).
_SINCE: dict[str, tuple[Any, str, str]] = {
    "moe_router_fusion": (False, "0.14", "a fused router"),
    "softmax_type": ("vanilla", "0.15", "a learnable softmax sink"),
    "window_attn_skip_freq": ([], "0.15", "sliding windows in some of the layers"),
    "attention_output_gate": (False, "0.16", "a gate on attention's output"),
    "experimental_attention_variant": (None, "0.16", "the gated delta net"),
    "moe_latent_size": (0, "0.16", "experts in a latent space"),
}


def installed_words() -> str:
    return ".".join(map(str, installed_release() or ()))


def transformer_config(run: RunSpec, *, initialize: bool = False, architecture: Any = None) -> Any:
    """megatron-core's TransformerConfig (or MLATransformerConfig) of ``run``. Raises NotBuildable.

    ``initialize``: initialise parameters, as training does; otherwise they are left uninitialised.
    ``architecture``: a TransformerConfig whose ARCHITECTURE fields replace the spec's.
    """
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    model, parallel, impl = run.model, run.parallel, run.implementation
    layers = layers_of(run)
    if any(layer.mixer is None and layer.ffn is None for layer in model.layers):
        raise NotBuildable("a layer without mixer and feed-forward needs a heterogeneous block spec")
    if any(layer.post_layernorms for layer in layers):
        raise NotBuildable("norms after attention and MLP (Gemma) are Megatron Bridge's own modules")
    if model.embedding_layernorm:
        raise NotBuildable("a norm on the word embeddings (BLOOM) is not in megatron-core's GPTModel")
    if model.output_bias:
        raise NotBuildable("a bias on the output layer is not in megatron-core's GPTModel")
    if any(isinstance(x.mixer, AttentionSpec) and x.mixer.v_channels for x in layers):
        raise NotBuildable("values of another width than keys (MiMo-V2) are in Megatron Bridge's own module")
    attentions = [x.mixer for x in layers if isinstance(x.mixer, AttentionSpec)]
    mla = only("MLA", (replace(x.mixer, indexer=None) for x in layers if isinstance(x.mixer, MLASpec)))
    mamba = only("Mamba mixer", (x.mixer for x in layers if isinstance(x.mixer, MambaSpec)))
    delta = only("gated delta net", (x.mixer for x in layers if isinstance(x.mixer, GatedDeltaNetSpec)))
    mlp = only("MLP", (x.ffn for x in layers if isinstance(x.ffn, MLPSpec)))
    moe = only("MoE block", (x.ffn for x in layers if isinstance(x.ffn, MoESpec)))
    ffn = mlp or moe
    if mlp and moe and (mlp.gated, mlp.activation, mlp.add_bias) != (moe.gated, moe.activation, moe.add_bias):
        raise NotBuildable("dense and expert MLPs differ in activation or bias; TransformerConfig holds one")

    add_bias = bool(ffn and ffn.add_bias)
    if mla and mla.q_lora_rank is None and mla.qk_layernorm and not impl.te and QUERY_NORM_WITHOUT_LATENT(impl):
        raise NotBuildable(
            f"q_lora_rank (None) with qk_layernorm needs Transformer Engine in megatron-core "
            f"{QUERY_NORM_WITHOUT_LATENT.number} and later, which norms in linear_q_proj"
        )
    if mla and mla.add_output_bias != add_bias:
        raise NotBuildable(f"add_output_bias ({mla.add_output_bias}) and the MLP's bias ({add_bias}) are one switch")
    config: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": mlp.ffn_hidden_size if mlp else (moe.moe_ffn_hidden_size if moe else None),
        "gated_linear_unit": bool(ffn and ffn.gated),
        "activation_func": activation_of(ffn.activation) if ffn else F.gelu,
        "add_bias_linear": add_bias,
        **({"activation_func_clamp_value": ffn.clamp_value} if ffn and ffn.clamp_value else {}),
        "normalization": model.normalization,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "tensor_model_parallel_size": parallel.tp,
        "pipeline_model_parallel_size": parallel.pp,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        "context_parallel_size": parallel.cp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.etp,
        "sequence_parallel": parallel.sp,
        "pipeline_dtype": TORCH_DTYPES[run.precision.params_dtype],
        "params_dtype": TORCH_DTYPES[run.precision.params_dtype],
        "bf16": run.precision.params_dtype == "bf16",
        "fp16": run.precision.params_dtype == "fp16",
        **_fp8_fields(run),
        "num_layers_in_first_pipeline_stage": parallel.num_layers_in_first_pipeline_stage,
        "num_layers_in_last_pipeline_stage": parallel.num_layers_in_last_pipeline_stage,
        "account_for_embedding_in_pipeline_split": parallel.account_for_embedding_in_pipeline_split,
        "account_for_loss_in_pipeline_split": parallel.account_for_loss_in_pipeline_split,
        "pipeline_model_parallel_layout": parallel.pipeline_model_parallel_layout,
        "microbatch_group_size_per_vp_stage": parallel.microbatch_group_size_per_vp_stage,
        "mtp_num_layers": model.mtp_num_layers or None,
        "mtp_loss_scaling_factor": 0.1,  # None until 0.15; Megatron-LM's own default
        "perform_initialization": initialize,
        "use_cpu_initialization": False,
        "transformer_impl": impl.transformer_impl,
        "fp32_residual_connection": run.precision.fp32_residual_connection,
        "attention_softmax_in_fp32": run.precision.attention_softmax_in_fp32,
        "gradient_accumulation_fusion": impl.gradient_accumulation_fusion,
        "masked_softmax_fusion": impl.masked_softmax_fusion,
        "persist_layer_norm": False,
        # TEGroupedMLP refuses it together with biases; Bridge's gpt-oss recipes switch it off.
        "bias_dropout_fusion": impl.bias_dropout_fusion and not (impl.te and moe and add_bias),
        "bias_activation_fusion": impl.bias_activation_fusion,
        "cross_entropy_loss_fusion": impl.cross_entropy_loss_fusion,
        "cross_entropy_fusion_impl": impl.cross_entropy_fusion_impl,
        "deterministic_mode": impl.deterministic_mode,
        "calculate_per_token_loss": impl.calculate_per_token_loss,
        "recompute_granularity": run.recompute.granularity,
        "recompute_method": run.recompute.method,
        "recompute_num_layers": run.recompute.num_layers,
        "recompute_modules": list(run.recompute.modules),
        "distribute_saved_activations": run.recompute.distribute_saved_activations,
        "is_hybrid_model": model.hybrid,
        "apply_query_key_layer_scaling": impl.apply_query_key_layer_scaling,
        # Only Transformer Engine has the kernel; local modules ignore the option.
        "apply_rope_fusion": run.fuses_rotation and impl.te and model.position_embedding_type == "rope",
        "attention_backend": _attention_backend(impl),
    }
    if parallel.cp > 1:
        config["cp_comm_type"] = impl.cp_comm_type
    if impl.cuda_graph_impl != "none":
        config["cuda_graph_impl"] = impl.cuda_graph_impl
    if impl.delay_wgrad_compute:
        config.update(delay_wgrad_compute=True, overlap_moe_expert_parallel_comm=True)
    if impl.cpu_offloading_num_layers:
        config.update(cpu_offloading=True, cpu_offloading_num_layers=impl.cpu_offloading_num_layers)
    config.update(_attention_fields(run, attentions, add_bias))
    if mla:
        config.update(
            num_attention_heads=mla.num_attention_heads,
            q_lora_rank=mla.q_lora_rank,
            kv_lora_rank=mla.kv_lora_rank,
            qk_head_dim=mla.qk_head_dim,
            qk_pos_emb_head_dim=mla.qk_pos_emb_head_dim,
            v_head_dim=mla.v_head_dim,
            qk_layernorm=mla.qk_layernorm,
            # The fused rotation of MLA exists for YaRN alone (``MLATransformerConfig.__post_init__``).
            rope_type="yarn" if config["apply_rope_fusion"] else "rope",
        )
    if mla and mla.sparse:
        config.update(_sparse_fields(run, mla.sparse))
    if mamba:
        config.update(
            mamba_state_dim=mamba.state_dim, mamba_head_dim=mamba.head_dim,
            mamba_num_groups=mamba.num_groups, mamba_num_heads=mamba.num_heads,
            use_mamba_mem_eff_path=mamba.memory_efficient,
        )  # fmt: skip
    if delta:
        config.update(
            experimental_attention_variant="gated_delta_net",
            linear_attention_freq=[int(isinstance(x.mixer, GatedDeltaNetSpec)) for x in model.layers],
            linear_conv_kernel_dim=delta.conv_kernel,
            linear_key_head_dim=delta.key_head_dim,
            linear_value_head_dim=delta.value_head_dim,
            linear_num_key_heads=delta.num_key_heads,
            linear_num_value_heads=delta.num_value_heads,
        )
    # Without attention layers any number that TP divides: megatron-core requires whole heads per rank.
    config.setdefault("num_attention_heads", parallel.tp)
    if moe:
        config.update(_moe_fields(run, moe))
    if architecture is not None:
        config.update({name: getattr(architecture, name) for name in ARCHITECTURE if hasattr(architecture, name)})
        if isinstance(config.get("moe_layer_freq"), list):  # for the whole model; the run may have fewer layers
            config["moe_layer_freq"] = config["moe_layer_freq"][: model.num_layers]
    if config["bias_activation_fusion"] and not _bias_activation_fusion_allowed(config):
        config["bias_activation_fusion"] = False
    cls: Any = MLATransformerConfig if mla else TransformerConfig
    known = {f.name for f in fields(cls)}
    for name, (absent, since, what) in _SINCE.items():
        if name not in known and config.get(name, absent) not in (absent, None):
            raise NotBuildable(f"{what} ({name}) needs megatron-core {since} or later, not {installed_words()}")
    config = {k: v for k, v in config.items() if k in known}
    try:
        # 0.13 prints the parsed layout string to standard output.
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            return cls(**config)
    except (ValueError, AssertionError, NotImplementedError) as refusal:
        raise StackRefusal(f"megatron-core refuses this run: {one_line(refusal)}") from refusal


def _sparse_fields(run: RunSpec, sparse: SparseSpec) -> dict[str, Any]:
    """Two numbers say which layers reuse the top-k keys of another layer (``dsa.py: is_dsa_skip_topk_layer``)."""
    if not run.implementation.te:
        raise NotBuildable("sparse attention (DeepSeek-V3.2, GLM-5) needs Transformer Engine in megatron-core")
    if sparse.kernels != "none":
        raise NotBuildable(f"dsa_kernel_backend ({sparse.kernels}): its kernels are not rehearsed")
    if (installed_release() or (0, 0)) < (0, 19):
        raise NotBuildable(f"sparse attention is rehearsed with megatron-core 0.19 or later, not {installed_words()}")
    mixers = [x.mixer for x in run.model.layers if isinstance(x.mixer, MLASpec)]
    chooses = [mixer.indexer is not None for mixer in mixers]
    indexer = only("indexer", (mixer.indexer for mixer in mixers if mixer.indexer is not None))
    found = next(
        ((every, offset) for every in range(1, len(mixers) + 1) for offset in range(1, len(mixers) + 1)
         if chooses == [max(i + 1 - offset, 0) % every == 0 for i in range(len(mixers))]),
        None,
    )  # fmt: skip
    if found is None or indexer is None:
        raise NotBuildable("layers choose keys, or take over a choice, by no rule of dsa_indexer_topk_freq")
    return {
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": indexer.num_heads,
        "dsa_indexer_head_dim": indexer.head_dim,
        "dsa_indexer_topk": sparse.topk,
        "dsa_indexer_topk_freq": found[0],
        "dsa_indexer_skip_topk_offset": found[1],
        "dsa_indexer_loss_coeff": 1e-3 if sparse.indexer_loss else 0.0,
        "dsa_indexer_use_sparse_loss": sparse.sparse_loss,
        "dsa_indexer_rotate_activation": sparse.rotate_activation,
        "dsa_indexer_scoring_relu": sparse.scoring_relu,
        "apply_rope_fusion": False,
        "rope_type": "rope",
    }


def _fp8_fields(run: RunSpec) -> dict[str, Any]:
    precision = run.precision
    if not precision.quantizes:
        return {}
    start, end = precision.num_layers_at_start_in_bf16, precision.num_layers_at_end_in_bf16
    if precision.fp4 is not None:
        how: dict[str, Any] = {"fp4": precision.fp4, "fp4_recipe": "nvfp4", "fp4_param": precision.fp4_param}
    else:
        how = {
            "fp8": precision.fp8, "fp8_recipe": precision.fp8_recipe, "fp8_param": precision.fp8_param,
            "fp8_dot_product_attention": precision.fp8_dot_product_attention,
        }  # fmt: skip
    return {
        **how,
        "first_last_layers_bf16": bool(start or end), "num_layers_at_start_in_bf16": start,
        "num_layers_at_end_in_bf16": end,
    }  # fmt: skip


def _attention_backend(impl: ImplementationSpec) -> Any:
    from megatron.core.transformer.enums import AttnBackend

    return AttnBackend[impl.attention_backend]


def one_line(refusal: Exception) -> str:
    return " ".join(str(refusal).split()) or type(refusal).__name__


def _bias_activation_fusion_allowed(config: dict[str, Any]) -> bool:
    """Whether TransformerConfig accepts the fusion (``__post_init__``)."""
    func, gated = config["activation_func"], config["gated_linear_unit"]
    if func is F.gelu:
        return gated or config["add_bias_linear"]
    if func is F.silu:
        return True
    return bool(gated) and func is fused_quick_gelu()


def _attention_fields(run: RunSpec, attentions: list[AttentionSpec], add_bias: bool) -> dict[str, Any]:
    if not attentions:
        return {}
    # Only windows and rotations may differ by layer: megatron-core's lists say which layers have none.
    one = only("attention", (replace(a, window_size=None, rotary=True) for a in attentions))
    if one.qk_layernorm == "full":
        raise NotBuildable("a q/k norm over all heads (OLMoE, MiniMax) is Megatron Bridge's module")
    if one.add_output_bias != add_bias:
        raise NotBuildable(
            f"add_output_bias ({one.add_output_bias}) and the MLP's bias ({add_bias}) are one Megatron switch"
        )
    if not one.add_qkv_bias and add_bias:
        raise NotBuildable("add_bias_linear puts a bias on linear_qkv too; this model has none")
    out: dict[str, Any] = {
        "num_attention_heads": one.num_attention_heads,
        "num_query_groups": one.num_query_groups,
        "kv_channels": one.kv_channels,
        "add_qkv_bias": one.add_qkv_bias,
        "qk_layernorm": one.qk_layernorm == "head",
        "attention_output_gate": one.attention_output_gate,
        "softmax_type": "learnable" if one.learnable_softmax_sink else "vanilla",
    }
    windows = {a.window_size for a in attentions if a.window_size is not None}
    if len(windows) > 1:
        raise NotBuildable(f"window_size takes {len(windows)} values; megatron-core holds one")
    if windows:
        out["window_size"] = (windows.pop() - 1, 0)
        # MTP depths are numbered after the decoder layers and are in the list too (``utils.py:
        # is_layer_window_attention``).
        depths = (run.model.mtp_layer,) * run.model.mtp_num_layers if run.model.mtp_layer is not None else ()
        here = [
            int(isinstance(x.mixer, AttentionSpec) and x.mixer.window_size is not None)
            for x in (*run.model.layers, *depths)
        ]
        if not all(here):
            out["window_attn_skip_freq"] = here
    still = [int(isinstance(x.mixer, AttentionSpec) and not x.mixer.rotary) for x in run.model.layers]
    if run.model.position_embedding_type == "rope" and any(still):
        out["no_rope_freq"] = still
    return out


def _moe_fields(run: RunSpec, moe: MoESpec) -> dict[str, Any]:
    impl = run.implementation
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.topk,
        "moe_ffn_hidden_size": moe.moe_ffn_hidden_size,
        "moe_layer_freq": [int(isinstance(x.ffn, MoESpec)) for x in run.model.layers],
        "moe_shared_expert_intermediate_size": moe.shared_expert_intermediate_size or None,
        "moe_shared_expert_gate": moe.shared_expert_gate,
        "moe_shared_expert_overlap": impl.moe_shared_expert_overlap,
        "moe_router_enable_expert_bias": moe.router_enable_expert_bias,
        "add_router_bias": moe.add_router_bias,
        "moe_router_score_function": moe.router_score_function,
        "moe_router_load_balancing_type": moe.router_load_balancing_type,
        "moe_aux_loss_coeff": 0.0 if moe.router_load_balancing_type == "none" else 1e-3,
        "moe_router_pre_softmax": moe.topk == 1 and moe.router_score_function == "softmax",
        "moe_router_dtype": impl.moe_router_dtype,
        "moe_latent_size": moe.latent_size,
        "moe_token_dispatcher_type": impl.moe_token_dispatcher_type,
        "moe_expert_capacity_factor": impl.moe_expert_capacity_factor,
        "moe_pad_expert_input_to_capacity": impl.moe_pad_expert_input_to_capacity,
        "moe_apply_probs_on_input": impl.moe_apply_probs_on_input,
        "moe_permute_fusion": impl.moe_permute_fusion,
        "moe_router_fusion": impl.moe_router_fusion,
        "moe_z_loss_coeff": impl.moe_z_loss_coeff,
        # Without Transformer Engine, grouped GEMM needs a separate package; `local` has SequentialMLP.
        "moe_grouped_gemm": impl.moe_grouped_gemm and impl.te,
    }
