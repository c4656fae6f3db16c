"""Unmodelled features of Megatron-LM: arguments that can change memory and that the estimate does not count.

Each has its default, the direction in which it can move the peak, and what it changes. An argument that differs from
its default is reported by name. Sources: ``megatron/training/arguments.py`` of core 0.17 to 0.19, and the configs that
it fills.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from bridge_memory.readers.megatron_args.sizes import ORDER_OF
from bridge_memory.spec.unmodelled import Effect, Unmodelled

UP, DOWN, EITHER, UNKNOWN = Effect.UP, Effect.DOWN, Effect.EITHER, Effect.UNKNOWN


class ArgumentValues(Protocol):
    """The other arguments, as conditions read them."""

    #: Whether they are parsed, so that they include those from a checkpoint or a file.
    parsed: bool

    def __getitem__(self, name: str) -> Any: ...


class Feature(NamedTuple):
    """One unmodelled feature: an argument that has an effect if its value differs from the default.

    ``when``: a further condition for the effect. ``also``: values equivalent to the default. ``most``, ``outside`` and
    ``order`` as in ``Unmodelled``; the orders of arguments are in ``sizes.py``.
    """

    default: object
    effect: Effect
    what: str
    when: Callable[[ArgumentValues, Any], bool] | None = None
    also: tuple[str, ...] = ()
    most: Callable[[ArgumentValues], int] | None = None
    outside: bool = False
    order: str = ""

    def applies(self, args: ArgumentValues, value: object) -> bool:
        """Whether ``value`` has an effect that is not counted."""
        if same(value, self.default) or str(value) in self.also:
            return False
        return self.when is None or self.when(args, value)

    def described(self, args: ArgumentValues, label: str) -> Unmodelled:
        """The sentence "label: what", with its effect. ``label``: the argument as the user gave it."""
        most = None if self.most is None else self.most(args)
        return Unmodelled(f"{label}: {self.what}", self.effect, order=self.order, most=most, outside=self.outside)


def same(value: object, default: object) -> bool:
    """Whether two values, as text or parsed, are equivalent: None, False, 0 and "" are."""
    words, known = (str(v).lower() for v in (value, default))
    nothing = ("none", "false", "no", "0", "0.0", "", "[]", "null")
    if words == known or (words in nothing and known in nothing):
        return True
    try:
        return float(words) == float(known)
    except ValueError:
        return False


def _fp8(args: ArgumentValues, value: object) -> bool:
    return args["fp8"] is not None or args["fp4"] is not None


def _casts_weights(args: ArgumentValues, value: object) -> bool:
    return _fp8(args, value) and not args["fp8_param_gather"] and not args["fp4_param_gather"]


def _unfused_activation(args: ArgumentValues, value: object) -> bool:
    """Fused activations clamp inside their kernel (``fusions/fused_bias_swiglu.py``, ``fused_bias_geglu.py``)."""
    return not (args["bias_swiglu_fusion"] if args["swiglu"] else args["bias_gelu_fusion"] and args["add_bias_linear"])


def _offloaded(args: ArgumentValues, value: object) -> bool:
    return bool(args["optimizer_cpu_offload"])


def _specified_elsewhere(args: ArgumentValues, value: object) -> bool:
    return not args.parsed


def _muon(args: ArgumentValues, value: object) -> bool:
    return "muon" in args["optimizer"]


def _larger_than_in_training(args: ArgumentValues, value: object) -> bool:
    """Whether evaluation's micro batch is larger than training's, which ``validate_args`` fills in by default."""
    try:
        return int(str(value)) > (args["micro_batch_size"] or 1)
    except ValueError:  # not a number: report it as given
        return True


def _received_ahead(args: ArgumentValues) -> int:
    """Upper bound, in bytes, of the hidden states received ahead: a buffer in each direction and one more hidden state
    of each, in fp32 and without sequence parallelism (``pipeline_parallel/schedules.py:
    forward_backward_pipelining_with_interleaving``)."""
    tokens = (args["seq_length"] or args["encoder_seq_length"] or 0) * (args["micro_batch_size"] or 1)
    pp = args["pipeline_model_parallel_size"]
    buffer = max(1, (args["microbatch_group_size_per_vp_stage"] or pp) - pp + 1)
    return int(2 * (buffer + 1) * 4 * tokens * (args["hidden_size"] or 0))


_GTP = "weights that are sharded further and gathered (GTP)"
_KD = "knowledge distillation holds a second (teacher) model"
_ENCODER = "an encoder-decoder split"
_OTHER_LAYERS = "layers of different shapes"
_VARYING = "sequences of varying length"
_RL = "reinforcement learning with inference in between"

#: Argument -> its unmodelled feature, without the order.
_UNMODELLED: dict[str, Feature] = {
    # ---- tensor, context and data parallelism ----
    "symmetric_ar_type": Feature(None, UP, "all-reduces in symmetric memory"),
    "gtp_weight_remat_size": Feature(1, EITHER, _GTP),
    "expert_gtp_weight_remat_size": Feature(1, EITHER, _GTP),
    # validate_args sets these two to their effective values if they are not given.
    "tensor_parallel_num_weight_shards": Feature(None, EITHER, _GTP, _specified_elsewhere),
    "expert_tensor_parallel_num_weight_shards": Feature(None, EITHER, _GTP, _specified_elsewhere),
    "hybrid_context_parallel": Feature(False, EITHER, "sequences of different context-parallel sizes"),
    "nccl_communicator_config_path": Feature(None, EITHER, "NCCL's buffers, by its settings", outside=True),
    "use_sharp": Feature(False, UP, "SHARP's buffers", outside=True),
    "create_all_gather_group": Feature(False, UP, "the buffers of one more communicator", outside=True),
    "ddp_num_buckets": Feature(None, EITHER, "gradient buckets of another size, and their padding"),
    # optimizer/param_layout.py: buckets end at a multiple of 65536 instead of 128 elements.
    "ddp_pad_buckets_for_high_nccl_busbw": Feature(False, UP, "padding of the gradient buckets"),
    "ddp_param_name_patterns_for_fp32_local_accumulation": Feature(
        None, UP, "fp32 sums of some gradients beside bf16 buffers"
    ),
    "reduce_scatter_with_fp32_accumulation": Feature(
        False, UP, "another gradient reduction with separate buffers"
    ),
    "pipeline_model_parallel_comm_backend": Feature(
        None, EITHER, "pipeline buffers of another backend", also=("nccl",)
    ),
    "overlap_p2p_comm_warmup_flush": Feature(
        False, UP, "hidden states that are received ahead", most=_received_ahead
    ),
    "ep_overlap_early_attn_memory_release": Feature(False, DOWN, "earlier release of attention activations"),
    # ---- Megatron-FSDP and FSDP2 ----
    "enable_full_sharding_in_hsdp": Feature(False, EITHER, "hybrid sharding over an outer data-parallel group"),
    "outer_dp_sharding_strategy": Feature(
        "no_shard", EITHER, "hybrid sharding over an outer data-parallel group"
    ),
    "megatron_fsdp_enable_fine_grained_param_gather": Feature(
        False, EITHER, "Megatron-FSDP gathers parameters module by module"
    ),
    "megatron_fsdp_main_params_dtype": Feature(
        "fp32", EITHER, "main parameters of another dtype", also=("torch.float32",)
    ),
    "fsdp_all_gather_in_start_param_sync": Feature(True, EITHER, "Megatron-FSDP gathers its first parameters later"),
    "megatron_fsdp_cuda_graph_mode": Feature(False, UP, "gradients that Megatron-FSDP keeps for CUDA graphs"),
    "megatron_fsdp_use_decoupled_grad": Feature(False, EITHER, "decoupled gradients of another dtype"),
    "preserve_fp32_weights": Feature(True, DOWN, "no fp32 main parameters under FSDP"),
    "use_torch_fsdp2": Feature(
        False, EITHER, "PyTorch FSDP2, which shards and gathers parameters differently"
    ),
    # ---- precision ----
    "fp4_quantizer_factory": Feature(None, UNKNOWN, "the user's own quantisation"),
    "fp8_quantizer_factory": Feature(None, UNKNOWN, "the user's own quantisation"),
    "fp8_output_proj": Feature(
        False, EITHER,
        "the output layer in mxfp8, which on the last stage adds two bytes for each of its weights (none where "
        "parameters are in fp8) and for each logit of a microbatch, and saves one for each of its inputs",
    ),
    "fp8_multi_head_attention": Feature(
        False, DOWN, "what attention's linears hand on in fp8: up to a byte for each element of its inputs and output"
    ),
    # TransformerConfig's default is 1, that of Transformer Engine's recipe 1024.
    "fp8_amax_history_len": Feature(
        1, UP, "the amax history of delayed scaling, under 1 MiB", _fp8, also=("1024",), most=lambda _: 1 << 20
    ),
    # extensions of TE's recipes: the weight gradient's operands stay in the high precision too.
    "fp8_wgrad": Feature(True, UP, "weight gradients in bf16 beside fp8", _fp8),
    "moe_permute_padding_for_fp8_quantization": Feature(False, UP, "tokens that pad each expert's share", _fp8),
    # extensions/transformer_engine.py: is_first_microbatch is None, so that module/linear.py casts weights in every
    # forward pass and saves the copies for backward. Weights stored in fp8 are not cast (module/base.py:
    # quantize_weight).
    "disable_parameter_transpose_cache": Feature(
        False, EITHER, "fp8 copies of weights that live as long as a microbatch does (counted as kept for good)",
        _casts_weights,
    ),
    "keep_fp8_transpose_cache": Feature(False, UP, "cached transposes of fp8 weights under FSDP"),
    "keep_fp8_transpose_cache_when_using_custom_fsdp": Feature(
        False, UP, "cached transposes of fp8 weights under FSDP"
    ),
    "activation_func_fp8_input_store": Feature(False, DOWN, "activation inputs kept in fp8"),
    "te_precision_config_file": Feature(None, EITHER, "precision module by module"),
    "quant_recipe": Feature(None, EITHER, "quantisation layer by layer"),
    "use_kitchen": Feature(False, UNKNOWN, "another quantisation library"),
    "use_kitchen_attention": Feature(False, UNKNOWN, "another attention"),
    "kitchen_attention_backend": Feature("sdpa", UNKNOWN, "another attention"),
    "fp16_lm_cross_entropy": Feature(False, EITHER, "half-precision cross entropy"),
    "grad_accum_wgrad_dtype": Feature(None, EITHER, "weight gradients of another dtype"),
    # ---- the optimizer ----
    "optimizer_cuda_graph": Feature(False, UP, "the optimizer step as a CUDA graph"),
    "use_precision_aware_optimizer_no_fp8_or_ds_fp8": Feature(
        False, EITHER, "decoupled gradients of another dtype"
    ),
    "muon_scalar_optimizer": Feature("adam", EITHER, "another optimizer for what Muon does not update", _muon),
    "muon_tp_mode": Feature("blockwise", UP, "momenta that are gathered over tensor-parallel ranks", _muon),
    # hybrid_optimizer.py: the part on the GPU is torch's AdamW, which allocates lists of temporaries.
    "use_torch_optimizer_for_cpu_offload": Feature(False, UP, "torch's optimizer and its temporaries", _offloaded),
    "overlap_cpu_optimizer_d2h_h2d": Feature(False, UP, "copies to and from the host in flight", _offloaded),
    "optimizer_offload_auto": Feature(False, EITHER, "a fraction that is chosen as the run starts"),
    # ---- activations: recomputed, offloaded, graphed ----
    "num_microbatches_with_partial_activation_checkpoints": Feature(
        None, EITHER, "recomputation of some microbatches only"
    ),
    "activation_offload_fraction": Feature(1.0, UP, "a part of the activations in host memory"),
    # fine_grained_activation_offload.py: post_warmup_callback, which keeps groups on the GPU that would be offloaded.
    "delta_offload_bytes_across_pp_ranks": Feature(0, UP, "offloading that differs by pipeline rank"),
    "delay_offload_until_cuda_graph": Feature(False, UP, "offloading that waits for the CUDA graph"),
    "fine_grained_offloading_max_inflight_offloads": Feature(
        None, EITHER, "offloaded tensors that wait for their copy"
    ),
    "cpu_offloading_activations": Feature(True, EITHER, "which tensors go to host memory"),
    "cpu_offloading_weights": Feature(False, DOWN, "weights in host memory"),
    "cpu_offloading_double_buffering": Feature(
        False, UP, "a second buffer for what comes back from host memory"
    ),
    # ---- layers ----
    "use_te_activation_func": Feature(
        False, EITHER, "Transformer Engine's activations and what they keep (counted as the unfused ones)"
    ),
    "hidden_activation_clamp": Feature(None, UP, "clamped copies before the activation", _unfused_activation),
    "disable_jit_fuser": Feature(False, UP, "element-wise operations one by one, with what each keeps"),
    "batch_invariant_mode": Feature(False, EITHER, "batch-invariant kernels of norms, products and attention"),
    "flash_attention_version": Feature(None, EITHER, "another FlashAttention", also=("2",)),
    # removed with the legacy model in 0.17
    "use_flash_attn": Feature(
        False, DOWN, "FlashAttention of the legacy model", lambda a, _: bool(a["use_legacy_models"])
    ),
    "memory_efficient_layer_norm": Feature(False, EITHER, "norms that keep their output instead of their input"),
    "fused_residual_rmsnorm": Feature(False, EITHER, "another norm kernel"),
    "fused_single_qkv_rope": Feature(False, EITHER, "queries, keys and values rotated in one tensor"),
    "qk_l2_norm": Feature(False, UP, "a weightless norm of queries and keys"),
    # return_max_logit of Transformer Engine's attention, 2.9 and later
    "qk_clip": Feature(False, UP, "the largest logit of every head and row"),
    "log_max_attention_logit": Feature(False, UP, "the largest logit of every head and row"),
    "mla_down_proj_fusion": Feature(False, EITHER, "one down-projection of queries, keys and values"),
    "mlp_chunks_for_training": Feature(1, EITHER, "the MLP a piece of the sequence at a time"),
    "use_grouped_gemm_for_dense_mlp": Feature(False, EITHER, "a dense MLP through the grouped GEMM"),
    "use_grouped_gemm_for_shared_expert": Feature(False, EITHER, "shared experts through the grouped GEMM"),
    "enable_hyper_connections": Feature(False, UP, "several residual streams (hyper-connections)"),
    "num_residual_streams": Feature(1, UP, "several residual streams (hyper-connections)"),
    # models/common: scaled copies of the embeddings and of the logits
    "use_mup": Feature(False, UP, "scaled copies of embeddings and logits"),
    # language_model_embedding.py: the local part is a view that keeps the whole output alive
    "clone_scatter_output_in_embedding": Feature(
        True, UP, "the whole output of the embedding, which stays alive", lambda a, _: bool(a["sequence_parallel"])
    ),
    "mamba_training_ssm_states_dtype": Feature(None, EITHER, "Mamba's states between chunks of another dtype"),
    "mamba_expand": Feature(2, EITHER, "another Mamba expansion factor"),
    "mtp_detach_heads": Feature(False, EITHER, "MTP without gradients to the main model"),
    "mtp_hybrid_override_pattern": Feature(None, EITHER, "MTP depths with other layers"),
    "mtp_standalone": Feature(False, EITHER, "MTP on a separate pipeline stage"),
    "heterogeneous_layers_config_path": Feature(None, EITHER, _OTHER_LAYERS + ", read from a file"),
    "heterogeneous_layers_config_encoded_json": Feature(None, EITHER, _OTHER_LAYERS),
    "heterogeneous_block_specs": Feature(False, EITHER, _OTHER_LAYERS),
    "decoder_num_layers": Feature(None, EITHER, "an encoder-decoder model"),
    "pipeline_model_parallel_split_rank": Feature(None, EITHER, _ENCODER),
    "encoder_pipeline_model_parallel_size": Feature(0, EITHER, _ENCODER),
    "encoder_tensor_model_parallel_size": Feature(0, EITHER, _ENCODER),
    # ---- experts ----
    # router.py: apply_input_jitter
    "moe_input_jitter_eps": Feature(None, UP, "the router's noisy copy of the tokens"),
    "moe_router_force_biased": Feature(None, UP, "routing that is made uneven"),
    "moe_extended_tp": Feature(False, EITHER, "the removed extended-TP sharding of experts"),
    "moe_input_feature_slicing": Feature(False, EITHER, "the removed sharding of experts' inputs"),
    "moe_use_legacy_grouped_gemm": Feature(False, EITHER, "the removed grouped GEMM's layers"),
    "moe_hybridep_pad_uneven_dispatch_inputs": Feature(False, UP, "padded tokens of HybridEP"),
    "moe_permute_fusion_into_hybridep": Feature(False, EITHER, "tokens permuted by HybridEP"),
    "moe_ncclep_static_shape": Feature(False, UP, "receive buffers of full size"),
    "moe_ncclep_zero_copy": Feature(False, UP, "buffers in NCCL's symmetric memory"),
    "moe_shared_expert_glu_interleave_size": Feature(
        None, UP, "copies in the shared experts' own order of gates and values"
    ),
    "moe_router_replay": Feature(False, UP, "the recorded routing of every microbatch"),
    "moe_enable_routing_replay": Feature(False, UP, "the recorded routing of every microbatch"),
    "moe_routing_trace_path": Feature(None, UP, "what is traced of every router"),
    "moe_use_upcycling": Feature(False, UP, "a dense model beside the one with experts"),
    "overlap_dispatch_backward_with_experts_wgrad": Feature(
        False, UP, "inputs of experts that wait for their weight gradients"
    ),
    # ---- other kinds of training ----
    "eval_micro_batch_size": Feature(
        None, UP, "forward passes of larger batches in evaluation", _larger_than_in_training
    ),
    "skip_train": Feature(False, DOWN, "evaluation alone (counted with training steps)"),
    "freeze_all_layers": Feature(False, DOWN, "frozen layers"),
    "lora_rank": Feature(None, EITHER, "LoRA adapters"),
    "sft": Feature(False, EITHER, "packed " + _VARYING),
    "dataloader_inter_document_masking": Feature(False, EITHER, "packed " + _VARYING),
    "max_seqlen_per_dp_cp_rank": Feature(None, EITHER, "packed " + _VARYING),
    "variable_seq_lengths": Feature(False, EITHER, _VARYING),
    "export_kd_teacher_load": Feature(None, UP, _KD),
    "export_kd_cfg": Feature(None, UP, _KD + " and its loss"),
    "export_kd_teacher_ckpt_format": Feature(None, UP, _KD),
    "logits_load_dir": Feature(None, UP, "a teacher's logits"),
    "logits_save_dir": Feature(None, UP, "the largest logits of every token, which are saved"),
    "perform_rl": Feature(False, EITHER, _RL),
    "perform_rl_step": Feature(False, EITHER, _RL),
    "rl_offload_optimizer_during_inference": Feature(False, EITHER, _RL),
    "use_checkpoint_args": Feature(False, UNKNOWN, "a model that a checkpoint describes", _specified_elsewhere),
    "use_mp_args_from_checkpoint_args": Feature(
        False, UNKNOWN, "parallel sizes that a checkpoint gives", _specified_elsewhere
    ),
    "yaml_cfg": Feature(None, UNKNOWN, "arguments in a file, which is not read", _specified_elsewhere),
    # ---- between training steps, at intervals ----
    "replication": Feature(False, UP, "copies of other ranks' checkpoints on their way", outside=True),
    "save_activations_interval": Feature(None, UP, "activations that are kept to be saved, in some steps"),
    "save_dgrads_interval": Feature(None, UP, "gradients that are kept to be saved, in some steps"),
    "save_wgrads_interval": Feature(None, UP, "gradients that are kept to be saved, in some steps"),
    "save_params_interval": Feature(None, UP, "parameters that are kept to be saved, in some steps"),
    "gpu_sniff_test_interval": Feature(None, UP, "the matrices of the GPU's test", outside=True),
}
#: Argument -> its unmodelled feature.
UNMODELLED: dict[str, Feature] = {name: entry._replace(order=ORDER_OF[name]) for name, entry in _UNMODELLED.items()}
