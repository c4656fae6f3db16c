"""Megatron-LM's arguments: each is read here, harmless for memory (``harmless.py``), or an unmodelled feature that is
reported by name (``unmodelled.py``).

Names are argparse's destinations, as in ``get_args()``: ``--disable-bias-linear`` is ``add_bias_linear`` (False).
Source of the names and defaults: ``megatron/training/arguments.py`` of core 0.11 to 0.20 and the fields of
TransformerConfig, OptimizerConfig and DistributedDataParallelConfig, from which newer releases derive arguments.
``tests/readers/test_megatron_parser.py`` checks the lists against the parser of releases whose wheel contains it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import nan
from typing import Any

from bridge_memory.readers.megatron_args.harmless import HARMLESS
from bridge_memory.readers.megatron_args.parsing import RawArguments, Value, words_of
from bridge_memory.readers.megatron_args.unmodelled import UNMODELLED
from bridge_memory.spec import SpecError, show
from bridge_memory.spec.errors import finite
from bridge_memory.spec.unmodelled import UNKNOWN_SIZE, Effect, Unmodelled


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# ---- arguments that are read, with Megatron-LM's defaults ----

#: Switches that are off by default.
OFF = _names(
    """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split async_save
    ckpt_fully_parallel_load dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient finetune
    no_load_optim no_save_optim use_persistent_ckpt_worker
    accumulate_allreduce_grads_in_fp32 add_qkv_bias apply_query_key_layer_scaling attention_output_gate
    attention_softmax_in_fp32 bf16 calculate_per_token_loss cpu_offloading cross_entropy_loss_fusion
    defer_embedding_wgrad_compute delay_wgrad_compute deterministic_mode distribute_saved_activations
    dsa_indexer_use_sparse_loss
    enable_cuda_graph external_cuda_graph fine_grained_activation_offloading first_last_layers_bf16 fp16
    fp32_residual_connection fp4_param fp4_param_gather fp8_dot_product_attention fp8_param_gather grad_reduce_in_bf16
    group_query_attention
    fsdp_db_use_persist_buf_on_alloc_fail fsdp_double_buffer is_hybrid_model
    legacy_tokenizer log_params_norm moe_apply_probs_on_input moe_enable_deepep moe_grouped_gemm moe_paged_stash
    megatron_fsdp_max_pool_double_buffer
    moe_layer_recompute moe_pad_expert_input_to_capacity moe_permute_fusion moe_router_enable_expert_bias
    moe_router_fusion moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_shared_expert_gate
    moe_shared_expert_overlap mtp_use_repeated_layer nccl_ub
    multi_latent_attention optimizer_cpu_offload overlap_grad_reduce overlap_moe_expert_parallel_comm
    overlap_param_gather overlap_param_gather_with_optimizer_step
    qk_layernorm quick_geglu recompute_activations sequence_parallel squared_relu swiglu tp_comm_overlap
    untie_embeddings_and_output_weights use_distributed_optimizer use_fused_weighted_squared_relu
    use_layer_wise_distributed_optimizer use_legacy_models use_megatron_fsdp use_precision_aware_optimizer
    use_rotary_position_embeddings use_transformer_engine_op_fuser
    """
)
#: Switches that are on by default.
ON = _names(
    """
    add_bias_linear apply_rope_fusion bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion
    ckpt_fully_parallel_save stream_ckpt_dequant
    create_attention_mask_in_dataloader dsa_indexer_rotate_activation dsa_indexer_scoring_relu
    gradient_accumulation_fusion masked_softmax_fusion pad_vocab_size
    store_param_remainders use_mamba_mem_eff_path
    """
)
_UNSET_INTEGERS = """
    ddp_bucket_size decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers dsa_indexer_head_dim
    dsa_indexer_n_heads dsa_indexer_topk encoder_num_layers
    encoder_seq_length expert_tensor_parallel_size ffn_hidden_size global_batch_size hidden_size kv_channels
    mamba_num_heads max_position_embeddings micro_batch_size microbatch_group_size_per_vp_stage
    moe_deepep_num_sms moe_ffn_hidden_size moe_flex_dispatcher_num_sms moe_hybridep_num_sms moe_latent_size
    moe_router_group_topk moe_mlp_glu_interleave_size moe_router_num_groups
    moe_shared_expert_intermediate_size mtp_num_layers num_attention_heads num_experts num_layers
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank padded_vocab_size q_lora_rank
    recompute_num_layers seq_length suggested_communication_unit_size virtual_pipeline_model_parallel_size vocab_size
    world_size
    """
INTEGERS: dict[str, int | None] = {
    **dict.fromkeys(_UNSET_INTEGERS.split()),
    "context_parallel_size": 1, "cpu_offloading_num_layers": 0, "dsa_indexer_skip_topk_offset": 0,
    "dsa_indexer_topk_freq": 1, "expert_model_parallel_size": 1, "kv_lora_rank": 32,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "log_interval": 100,
    "make_vocab_size_divisible_by": 128, "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_state_dim": 128,
    "min_offloaded_tensor_size": 1 << 20, "wgrad_deferral_limit": 0,
    "moe_router_topk": 2, "num_distributed_optimizer_instances": 1, "num_layers_at_end_in_bf16": 1,
    "num_layers_at_start_in_bf16": 1, "num_query_groups": 1, "pipeline_model_parallel_size": 1, "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64, "tensor_model_parallel_size": 1, "v_head_dim": 128,
}  # fmt: skip
#: Integers that must not be 0: something is divided by them.
POSITIVE = _names(
    """
    context_parallel_size dsa_indexer_head_dim dsa_indexer_n_heads dsa_indexer_topk dsa_indexer_topk_freq
    encoder_num_layers encoder_seq_length expert_model_parallel_size expert_tensor_parallel_size
    hidden_size linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim log_interval
    make_vocab_size_divisible_by mamba_head_dim mamba_num_groups micro_batch_size num_attention_heads
    num_distributed_optimizer_instances num_layers num_layers_per_virtual_pipeline_stage num_query_groups
    pipeline_model_parallel_size seq_length tensor_model_parallel_size
    """
)
NUMBERS: dict[str, float | None] = {
    "activation_func_clamp_value": None, "attention_dropout": 0.1, "clip_grad": 1.0, "dsa_indexer_loss_coeff": None,
    "hidden_dropout": 0.1,
    "hybrid_attention_ratio": 0.0, "hybrid_mlp_ratio": 0.0,
    "moe_expert_capacity_factor": None, "moe_expert_rank_capacity_factor": None,
    "moe_z_loss_coeff": None,     "moe_paged_stash_buffer_size_factor_cuda": 1.1, "optimizer_offload_fraction": 1.0,
    "rotary_percent": 1.0, "sgd_momentum": 0.9,
}  # fmt: skip
WORDS: dict[str, str | None] = {
    "attention_backend": "auto", "ckpt_format": "torch_dist", "cross_entropy_fusion_impl": "native",
    "cuda_graph_impl": "none",
    "data_parallel_sharding_strategy": None, "dsa_kernel_backend": "none",
    "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32",
    "experimental_attention_variant": None, "fp4": None, "fp8": None, "fp8_recipe": "delayed",
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None, "linear_attention_type": None, "main_grads_dtype": "fp32",
    "main_params_dtype": "fp32", "megatron_fsdp_grad_comm_dtype": "auto", "megatron_fsdp_main_grads_dtype": "auto",
    "moe_flex_dispatcher_backend": "deepep", "moe_router_dtype": None,
    "moe_router_score_function": "softmax", "moe_token_dispatcher_type": "allgather", "normalization": "LayerNorm",
    "optimizer": "adam", "pipeline_model_parallel_layout": None, "position_embedding_type": "learned_absolute",
    "recompute_granularity": None, "recompute_method": None, "softmax_type": "vanilla", "spec": None,
    "tokenizer_type": None, "transformer_impl": "transformer_engine",
}  # fmt: skip
#: Lists of words. ``PATTERNS``: layer patterns, windows and coefficients, which are numbers or lists of them.
LISTS: dict[str, tuple[str, ...] | None] = {
    "cp_comm_type": ("p2p",), "cuda_graph_modules": (), "cuda_graph_scope": None, "cuda_graph_scope_deprecated": None,
    "moe_router_load_balancing_type": ("aux_loss",), "offload_modules": (),
    "recompute_modules": None,
}  # fmt: skip
PATTERNS: dict[str, Any] = {
    "linear_attention_freq": None, "moe_aux_loss_coeff": 0.0, "moe_layer_freq": 1, "no_rope_freq": None,
    "window_attn_skip_freq": None, "window_size": None,
}  # fmt: skip

#: Arguments that become fields of the RunSpec.
READ = OFF | ON | INTEGERS.keys() | NUMBERS.keys() | WORDS.keys() | LISTS.keys() | PATTERNS.keys()
#: Every argument that is read, harmless or unmodelled.
KNOWN = READ | HARMLESS.keys() | UNMODELLED.keys()

#: Options whose destination differs from their name. (``--no-x`` and ``--disable-x`` of a known x need no entry.)
DESTINATIONS = {
    "cuda_graph_scope": "cuda_graph_scope_deprecated",
    "ddp_reduce_scatter_with_fp32_accumulation": "reduce_scatter_with_fp32_accumulation",
    "fp4_format": "fp4",
    "fp8_format": "fp8",
    "fp8_param": "fp8_param_gather",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "num_moe_experts": "num_experts",
    "overlap_p2p_communication_warmup_flush": "overlap_p2p_comm_warmup_flush",
    "use_custom_fsdp": "use_megatron_fsdp",
    "use_nccl_ub": "nccl_ub",
}
#: Options that switch another destination off (``store_false``).
SWITCHED_OFF_BY = {
    "disable_bias_linear": "add_bias_linear",
    "disable_mamba_mem_eff_path": "use_mamba_mem_eff_path",
    "no_rope_fusion": "apply_rope_fusion",
}

class Arguments:
    """Typed access by destination. A name outside ``READ`` is a programming error."""

    def __init__(self, raw: RawArguments) -> None:
        self.env = raw.env
        self.parsed = raw.parsed
        self._values = _of_any_release(raw.values) if raw.parsed else by_destination(raw.values)

    def __getitem__(self, name: str) -> Any:
        """The argument's value, or Megatron-LM's default. Raises SpecError for a value of the wrong type."""
        value = self._values.get(name)
        if name in OFF or name in ON:
            return name in ON if value is None else _is_on(value)
        default, read = _READERS[name]
        # "none" is a value, not unset, if the default is a word.
        unset = ("None", "null") if isinstance(default, str | tuple) else ("None", "null", "none")
        if value is None or (isinstance(value, str) and value in unset):
            return default
        found = read(name, value)
        if name in POSITIVE and found < 1:
            raise SpecError(f"{_option(name)} is {show(value)}; give a positive whole number")
        return found

    def given(self, name: str) -> bool:
        assert name in READ, name
        return name in self._values

    def required(self, *names: str) -> Any:
        """The first of ``names`` that is set. Raises SpecError naming the last."""
        for name in names:
            if (value := self[name]) is not None:
                return value
        raise SpecError(f"{_option(names[-1])} is missing from the Megatron arguments; add it")

    def not_modelled(self) -> tuple[Unmodelled, ...]:
        """The unmodelled features, sorted by argument: arguments that change memory and are not counted, and unknown
        arguments."""
        lines = []
        for name, value in sorted(self._values.items()):
            if name in UNMODELLED:
                if UNMODELLED[name].applies(self, value):
                    option = f"{_option(name)} {'' if value is True else value}".rstrip()
                    lines.append(UNMODELLED[name].described(self, option))
            elif name not in KNOWN and not (self.parsed and not value):
                what = f"{_option(name)}: not an argument this reader knows"
                lines.append(Unmodelled(what, Effect.UNKNOWN, order=UNKNOWN_SIZE))
        return tuple(lines)


def by_destination(options: dict[str, Value]) -> dict[str, Value]:
    """Options as written -> destinations. An option with the value False is dropped, unless it is itself a destination
    that is on by default."""
    values: dict[str, Value] = {}
    for option, value in options.items():
        name = SWITCHED_OFF_BY.get(option)
        if name is None and option not in KNOWN:
            bare = re.sub("^(no|disable)_", "", option)
            name = bare if bare != option and (bare in READ or bare in UNMODELLED) else None
        if name is not None:
            if _is_on(value):
                values[name] = False
        elif value is not False or option in ON or (option in UNMODELLED and UNMODELLED[option].default is True):
            values[DESTINATIONS.get(option, option)] = value
    return values


def _of_any_release(values: dict[str, Value]) -> dict[str, Value]:
    """Destinations under their newest names (``use_custom_fsdp`` became ``use_megatron_fsdp``, which sets both)."""
    renamed = {DESTINATIONS[name]: value for name, value in values.items() if name in DESTINATIONS}
    return {**renamed, **{name: value for name, value in values.items() if name not in DESTINATIONS}}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_on(value: Value) -> bool:
    return str(value).lower() not in ("false", "0", "none", "null", "no", "")


def _whole(name: str, value: Value) -> int:
    _has_value(name, value)
    try:
        number = float(value if isinstance(value, int | float) else str(value))
        if number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise SpecError(f"{_option(name)} is {show(value)}, not a whole number; give one")


def _has_value(name: str, value: Value) -> None:
    """An option without a value is True, which Python takes for 1."""
    if value is True:
        raise SpecError(f"{_option(name)} has no value; give a number after it")


def _number(name: str, value: Value) -> float:
    _has_value(name, value)
    try:
        number = float(value if isinstance(value, int | float) else str(value))
    except (ValueError, OverflowError):
        number = nan
    if not finite(number):
        raise SpecError(f"{_option(name)} is {show(value)}, not a number; give one")
    return number


def _text(name: str, value: Value) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _words(name: str, value: Value) -> tuple[str, ...]:
    return tuple(words_of(value))


def _pattern(name: str, value: Value) -> Any:
    """Numbers and lists of numbers unchanged, expressions as text."""
    return _text(name, value) if isinstance(value, list) and any(isinstance(x, str) for x in value) else value


#: Argument -> (its default, the function that parses its value).
_READERS: dict[str, tuple[Any, Callable[[str, Value], Any]]] = {
    name: (default, read)
    for defaults, read in (
        (INTEGERS, _whole), (NUMBERS, _number), (WORDS, _text), (LISTS, _words), (PATTERNS, _pattern),
    )
    for name, default in defaults.items()
}  # fmt: skip
