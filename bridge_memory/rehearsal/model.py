"""RunSpec -> megatron-core: the TransformerConfig, the layer specs and the model chunks of one rank.

Nothing here counts anything: shapes, names and splits are megatron-core's own. What its configuration cannot
say (a hidden size that differs by layer, norms after attention, ...) is refused by name.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import fields, replace
from io import StringIO
from typing import Any

import torch
import torch.nn.functional as F

from bridge_memory.rehearsal import patches
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


def _only(kind: str, values: Iterable[Any]) -> Any:
    """The one value all layers share; None where there is none."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) > 1:
        raise NotBuildable(
            f"the layers have {len(distinct)} kinds of {kind}; megatron-core's TransformerConfig holds one"
        )
    return distinct[0] if distinct else None


def _layers(run: RunSpec) -> list[LayerSpec]:
    model = run.model
    return [*model.layers, *([model.mtp_layer] if model.mtp_num_layers and model.mtp_layer else [])]


def _activation(name: str) -> Any:
    known = {
        "silu": F.silu, "swiglu": F.silu, "gelu": F.gelu, "gelu_tanh": F.gelu, "gelu_pytorch_tanh": F.gelu,
        "gelu_new": F.gelu, "relu": F.relu, "relu2": _squared_relu(), "squared_relu": _squared_relu(),
        "quick_gelu": _quick_gelu(),
    }  # fmt: skip
    if name not in known:
        raise NotBuildable(f"activation ({name!r}) is none of megatron-core's: {', '.join(sorted(known))}")
    return known[name]


def _squared_relu() -> Any:
    try:
        from megatron.core.activations import squared_relu
    except ImportError:  # 0.13; Megatron-LM then brought the same function itself (``training/activations.py``)
        return patches.jit_fused(_relu_then_square)
    return squared_relu


def _relu_then_square(x: torch.Tensor) -> torch.Tensor:
    return torch.pow(F.relu(x), 2)


def _quick_gelu() -> Any:
    fused = _fused_quick_gelu()
    if fused is not None:
        return fused
    try:
        from megatron.core.activations import quick_gelu
    except ImportError:  # 0.13, as above
        return patches.jit_fused(_sigmoid_of_1_702)
    return quick_gelu


def _sigmoid_of_1_702(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _fused_quick_gelu() -> Any:
    """The one that TransformerConfig takes for fusible; None before 0.15."""
    from megatron.core.fusions import fused_bias_geglu

    return getattr(fused_bias_geglu, "quick_gelu", None)


#: TransformerConfig fields that say what the model is; all others say how it is run.
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


#: Fields that older releases lack: the value which says the same as no field, the first release that has it, and
#: what it brings. (``moe_shared_expert_gate`` came with 0.16; before, the layer spec says so, see ``_gated``.)
_SINCE: dict[str, tuple[Any, str, str]] = {
    "moe_router_fusion": (False, "0.14", "a fused router"),
    "softmax_type": ("vanilla", "0.15", "a learnable softmax sink"),
    "window_attn_skip_freq": ([], "0.15", "sliding windows in some of the layers"),
    "attention_output_gate": (False, "0.16", "a gate on attention's output"),
    "experimental_attention_variant": (None, "0.16", "the gated delta net"),
    "moe_latent_size": (0, "0.16", "experts in a latent space"),
}


def _installed() -> str:
    return ".".join(map(str, installed_release() or ()))


def transformer_config(run: RunSpec, *, initialize: bool = False, architecture: Any = None) -> Any:
    """megatron-core's TransformerConfig (or MLATransformerConfig) of ``run``. Raises NotBuildable.

    ``initialize``: give parameters values, as training does; without, they are whatever memory holds.
    ``architecture``: a TransformerConfig whose ARCHITECTURE fields are taken in place of the spec's.
    """
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    model, parallel, impl = run.model, run.parallel, run.implementation
    layers = _layers(run)
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
    mla = _only("MLA", (replace(x.mixer, indexer=None) for x in layers if isinstance(x.mixer, MLASpec)))
    mamba = _only("Mamba mixer", (x.mixer for x in layers if isinstance(x.mixer, MambaSpec)))
    delta = _only("gated delta net", (x.mixer for x in layers if isinstance(x.mixer, GatedDeltaNetSpec)))
    mlp = _only("MLP", (x.ffn for x in layers if isinstance(x.ffn, MLPSpec)))
    moe = _only("MoE block", (x.ffn for x in layers if isinstance(x.ffn, MoESpec)))
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
        "activation_func": _activation(ffn.activation) if ffn else F.gelu,
        "add_bias_linear": add_bias,
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
        # Only Transformer Engine has the kernel; local modules rotate unfused whatever is asked.
        "apply_rope_fusion": impl.apply_rope_fusion and impl.te and model.position_embedding_type == "rope",
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
    # Of layers without attention, any that TP divides: its ranks ask for a whole number of heads each.
    config.setdefault("num_attention_heads", parallel.tp)
    if moe:
        config.update(_moe_fields(run, moe))
    if architecture is not None:
        config.update({name: getattr(architecture, name) for name in ARCHITECTURE if hasattr(architecture, name)})
        if isinstance(config.get("moe_layer_freq"), list):  # of the whole model; the run may train fewer layers
            config["moe_layer_freq"] = config["moe_layer_freq"][: model.num_layers]
    if config["bias_activation_fusion"] and not _bias_activation_fusion_allowed(config):
        config["bias_activation_fusion"] = False
    cls: Any = MLATransformerConfig if mla else TransformerConfig
    known = {f.name for f in fields(cls)}
    for name, (absent, since, what) in _SINCE.items():
        if name not in known and config.get(name, absent) not in (absent, None):
            raise NotBuildable(f"{what} ({name}) needs megatron-core {since} or later, not {_installed()}")
    config = {k: v for k, v in config.items() if k in known}
    try:
        # 0.13 prints how it understood a layout string, on standard output.
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            return cls(**config)
    except (ValueError, AssertionError, NotImplementedError) as refusal:
        raise StackRefusal(f"megatron-core refuses this run: {_one_line(refusal)}") from refusal


def _sparse_fields(run: RunSpec, sparse: SparseSpec) -> dict[str, Any]:
    """Which layers take over another's choice of keys is a rule of two numbers (``dsa.py: is_dsa_skip_topk_layer``)."""
    if not run.implementation.te:
        raise NotBuildable("sparse attention (DeepSeek-V3.2, GLM-5) needs Transformer Engine in megatron-core")
    if sparse.kernels != "none":
        raise NotBuildable(f"dsa_kernel_backend ({sparse.kernels}): its kernels are not rehearsed")
    if (installed_release() or (0, 0)) < (0, 19):
        raise NotBuildable(f"sparse attention is rehearsed with megatron-core 0.19 or later, not {_installed()}")
    mixers = [x.mixer for x in run.model.layers if isinstance(x.mixer, MLASpec)]
    chooses = [mixer.indexer is not None for mixer in mixers]
    indexer = _only("indexer", (mixer.indexer for mixer in mixers if mixer.indexer is not None))
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


def _one_line(refusal: Exception) -> str:
    return " ".join(str(refusal).split()) or type(refusal).__name__


def _bias_activation_fusion_allowed(config: dict[str, Any]) -> bool:
    """The combinations TransformerConfig accepts (``__post_init__``); it refuses the others."""
    func, gated = config["activation_func"], config["gated_linear_unit"]
    if func is F.gelu:
        return gated or config["add_bias_linear"]
    if func is F.silu:
        return True
    return bool(gated) and func is _fused_quick_gelu()


def _attention_fields(run: RunSpec, attentions: list[AttentionSpec], add_bias: bool) -> dict[str, Any]:
    if not attentions:
        return {}
    # The window is the one thing that may differ by layer; megatron-core's skip list says where it is off.
    one = _only("attention", (replace(a, window_size=None, rotary=True) for a in attentions))
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
        # MTP depths count on after the decoder layers, and look themselves up too (``utils.py:
        # is_layer_window_attention``).
        depths = (run.model.mtp_layer,) * run.model.mtp_num_layers if run.model.mtp_layer is not None else ()
        here = [
            int(isinstance(x.mixer, AttentionSpec) and x.mixer.window_size is not None)
            for x in (*run.model.layers, *depths)
        ]
        if not all(here):
            out["window_attn_skip_freq"] = here
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
        # Without Transformer Engine, grouped GEMM needs a package of its own; `local` has SequentialMLP.
        "moe_grouped_gemm": impl.moe_grouped_gemm and impl.te,
    }


# ---- layer specs ---------------------------------------------------------------------------------


def _gpt_block_spec(run: RunSpec, config: Any, vp_stage: int | None) -> tuple[Any, Any]:
    """(TransformerBlockSubmodules of this chunk, spec of the layer that MTP repeats)."""
    from megatron.core.models.gpt import gpt_layer_specs

    te = run.implementation.te
    delta = any(isinstance(x.mixer, GatedDeltaNetSpec) for x in run.model.layers)
    if delta and te:
        return _experimental_block_spec(config, vp_stage)
    if getattr(config, "experimental_attention_variant", None) == "dsa":
        from megatron.core.models.gpt import experimental_attention_variant_module_specs as experimental

        block = experimental.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
        # Megatron-LM gpt_builders.py: MTP depths are as the last layer.
        return block, experimental.get_transformer_layer_with_experimental_attention_variant_spec(config)[-1]
    if delta:
        # 0.18 and later make these specs for layers with attention only.
        config = copy.copy(config)
        config.experimental_attention_variant = None
    block = gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=te, normalization=config.normalization, vp_stage=vp_stage
    )
    if delta:
        return _with_gated_delta_nets(run, config, block, vp_stage)
    last = _decoder_layer_specs(config, te)[-1]
    if any(isinstance(x.ffn, MoESpec) and x.ffn.shared_expert_gate for x in _layers(run)):
        for layer in (*block.layer_specs, last):
            _gated(layer)
    return block, last


def _decoder_layer_specs(config: Any, te: bool) -> list[Any]:
    """The spec of every decoder layer, whatever stage it is on."""
    from megatron.core.models.gpt import gpt_layer_specs

    every = getattr(gpt_layer_specs, "get_gpt_decoder_layer_specs", None)
    if every is not None:
        specs: list[Any] = every(config, use_transformer_engine=te, normalization=config.normalization)
        return specs
    # Before 0.16 there is only a chunk's share: let it be of everything.
    whole = copy.copy(config)
    whole.pipeline_model_parallel_layout = None
    with (
        patches.replaced(gpt_layer_specs, "get_num_layers_to_build", lambda *a, **k: config.num_layers),
        patches.replaced(gpt_layer_specs, "get_transformer_layer_offset", lambda *a, **k: 0),
    ):
        block = gpt_layer_specs.get_gpt_decoder_block_spec(
            whole, use_transformer_engine=te, normalization=config.normalization
        )
    return list(block.layer_specs)


def _gated(layer: Any) -> None:
    """Give the shared experts their gate. Until 0.15 the layer spec says so (``moe_module_specs.py``); from 0.16
    the config does, and the spec's word is not read."""
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
    """As ``experimental_attention_variant_module_specs.py`` does, with local modules in place of TE's."""
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
    """0-based decoder layers of this rank's chunk, by megatron-core's own rule."""
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
    """``hybrid_override_pattern``: M (Mamba), * (attention), - (MLP), E (MoE), one letter a layer."""
    letters = []
    for layer in run.model.layers:
        if isinstance(layer.mixer, MambaSpec) and layer.ffn is None:
            letters.append("M")
        elif isinstance(layer.mixer, AttentionSpec) and layer.ffn is None:
            letters.append("*")
        elif layer.mixer is None and isinstance(layer.ffn, MLPSpec):
            letters.append("-")
        elif layer.mixer is None and isinstance(layer.ffn, MoESpec):
            letters.append("E")
        else:
            raise NotBuildable("a layer of a hybrid model is a mixer or a feed-forward block, not both")
    return "".join(letters)


def _hybrid_te_spec() -> Any:
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

    return mamba_stack_spec


def _hybrid_spec(config: Any, mamba: MambaSpec | None) -> Any:
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

    experts = (
        {"moe_layer": half(layer(config.num_moe_experts), TransformerLayer, False)} if config.num_moe_experts else {}
    )
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
            **experts,
        ),
    )  # fmt: skip


# ---- the model -----------------------------------------------------------------------------------


def build_chunks(
    run: RunSpec, *, initialize: bool = False, architecture: Any = None
) -> list[torch.nn.Module]:
    """The model chunks (virtual stages, in order) of the rank that parallel_state says this process is.

    Call inside ``fake_world`` and, without a GPU, inside ``patches.building``. Raises NotBuildable.
    """
    from megatron.core import parallel_state

    config = transformer_config(run, initialize=initialize, architecture=architecture)
    # A layout string may bring its own virtual stages.
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
                raise StackRefusal(f"megatron-core refuses this rank: {_one_line(refusal)}") from refusal
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

    block, mtp_layer = _gpt_block_spec(run, config, vp_stage)
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
        raise NotBuildable(f"a hybrid (Mamba) model with experts needs megatron-core 0.16 or later, not {_installed()}")
    mamba = _only("Mamba mixer", (x.mixer for x in run.model.layers if isinstance(x.mixer, MambaSpec)))
    spec = _hybrid_te_spec() if run.implementation.te else _hybrid_spec(config, mamba)
    return MambaModel(
        config=config, mamba_stack_spec=spec, hybrid_override_pattern=hybrid_pattern(run),
        **_common(run, first, last),
    )  # fmt: skip


def parameter_shapes(chunks: list[torch.nn.Module]) -> list[dict[str, tuple[int, ...]]]:
    """{name: local shape} of each chunk, as ``named_parameters`` lists them (a shared weight once)."""
    return [{name: tuple(p.shape) for name, p in chunk.named_parameters()} for chunk in chunks]
