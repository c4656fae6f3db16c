"""Arguments of Megatron-LM that can change memory in a way that the estimate does not count.

Each has its default, where it can move the peak, and what it would change: it is listed by name when it is set to
something else. Sources: ``megatron/training/arguments.py`` of core 0.17 to 0.19, and the configs it fills.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from bridge_memory.readers.megatron_args.sizes import ORDER_OF
from bridge_memory.spec.unmodelled import Effect, Unmodelled

UP, DOWN, EITHER, UNKNOWN = Effect.UP, Effect.DOWN, Effect.EITHER, Effect.UNKNOWN


class Asked(Protocol):
    """What a condition is told of the other arguments."""

    #: Whether they are parsed, so that what a checkpoint or a file says is among them.
    parsed: bool

    def __getitem__(self, name: str) -> Any: ...


class Listed(NamedTuple):
    """One argument. ``when``: what else must hold for it to have an effect, beside a value that is not the default;
    ``also``: values that mean what the default does; ``most``, ``outside`` and ``order`` as in ``Unmodelled``; the
    orders of arguments are in ``sizes.py``."""

    default: object
    effect: Effect
    what: str
    when: Callable[[Asked, Any], bool] | None = None
    also: tuple[str, ...] = ()
    most: Callable[[Asked], int] | None = None
    outside: bool = False
    order: str = ""

    def applies(self, args: Asked, value: object) -> bool:
        """Whether ``value`` asks for something that is not counted."""
        if same(value, self.default) or str(value) in self.also:
            return False
        return self.when is None or self.when(args, value)

    def feature(self, args: Asked, told: str) -> Unmodelled:
        """The sentence, beginning with the argument as it was ``told``."""
        most = None if self.most is None else self.most(args)
        return Unmodelled(f"{told}: {self.what}", self.effect, order=self.order, most=most, outside=self.outside)


def same(value: object, default: object) -> bool:
    """Whether two values say the same, as text or parsed: None, off, 0 and nothing are one."""
    words, known = (str(v).lower() for v in (value, default))
    nothing = ("none", "false", "no", "0", "0.0", "", "[]", "null")
    if words == known or (words in nothing and known in nothing):
        return True
    try:
        return float(words) == float(known)
    except ValueError:
        return False


def _fp8(args: Asked, value: object) -> bool:
    return args["fp8"] is not None or args["fp4"] is not None


def _casts_weights(args: Asked, value: object) -> bool:
    return _fp8(args, value) and not args["fp8_param_gather"] and not args["fp4_param_gather"]


def _unfused_activation(args: Asked, value: object) -> bool:
    """Fused ones clamp inside of their kernel (``fusions/fused_bias_swiglu.py``, ``fused_bias_geglu.py``)."""
    return not (args["bias_swiglu_fusion"] if args["swiglu"] else args["bias_gelu_fusion"] and args["add_bias_linear"])


def _offloaded(args: Asked, value: object) -> bool:
    return bool(args["optimizer_cpu_offload"])


def _told_elsewhere(args: Asked, value: object) -> bool:
    return not args.parsed


def _muon(args: Asked, value: object) -> bool:
    return "muon" in args["optimizer"]


def _larger_than_in_training(args: Asked, value: object) -> bool:
    """``validate_args`` fills in the micro batch of training."""
    try:
        return int(str(value)) > (args["micro_batch_size"] or 1)
    except ValueError:  # told as it is
        return True


def _received_ahead(args: Asked) -> int:
    """A buffer of hidden states in each direction and one more of each, in fp32 and whole on every rank: as large as
    they can be (``pipeline_parallel/schedules.py: forward_backward_pipelining_with_interleaving``)."""
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

#: Argument -> what is not counted of it, without its order.
_GAPS: dict[str, Listed] = {
    # ---- tensor, context and data parallelism ----
    "symmetric_ar_type": Listed(None, UP, "all-reduces in symmetric memory"),
    "gtp_weight_remat_size": Listed(1, EITHER, _GTP),
    "expert_gtp_weight_remat_size": Listed(1, EITHER, _GTP),
    # validate_args sets these two to what they mean anyway where nobody asks for them.
    "tensor_parallel_num_weight_shards": Listed(None, EITHER, _GTP, _told_elsewhere),
    "expert_tensor_parallel_num_weight_shards": Listed(None, EITHER, _GTP, _told_elsewhere),
    "hybrid_context_parallel": Listed(False, EITHER, "sequences of different context-parallel sizes"),
    "nccl_communicator_config_path": Listed(None, EITHER, "NCCL's buffers, by its settings", outside=True),
    "use_sharp": Listed(False, UP, "SHARP's buffers", outside=True),
    "create_all_gather_group": Listed(False, UP, "the buffers of one more communicator", outside=True),
    "ddp_num_buckets": Listed(None, EITHER, "gradient buckets of another size, and their padding"),
    # optimizer/param_layout.py: buckets end at a multiple of 65536 instead of 128 elements.
    "ddp_pad_buckets_for_high_nccl_busbw": Listed(False, UP, "padding of the gradient buckets"),
    "ddp_param_name_patterns_for_fp32_local_accumulation": Listed(
        None, UP, "fp32 sums of some gradients beside bf16 buffers"
    ),
    "reduce_scatter_with_fp32_accumulation": Listed(
        False, UP, "another gradient reduction with buffers of its own"
    ),
    "pipeline_model_parallel_comm_backend": Listed(
        None, EITHER, "pipeline buffers of another backend", also=("nccl",)
    ),
    "overlap_p2p_comm_warmup_flush": Listed(
        False, UP, "hidden states that are received ahead", most=_received_ahead
    ),
    "ep_overlap_early_attn_memory_release": Listed(False, DOWN, "earlier release of attention activations"),
    # ---- Megatron-FSDP and FSDP2 ----
    "enable_full_sharding_in_hsdp": Listed(False, EITHER, "hybrid sharding over an outer data-parallel group"),
    "outer_dp_sharding_strategy": Listed(
        "no_shard", EITHER, "hybrid sharding over an outer data-parallel group"
    ),
    "megatron_fsdp_enable_fine_grained_param_gather": Listed(
        False, EITHER, "Megatron-FSDP gathers parameters module by module"
    ),
    "megatron_fsdp_main_params_dtype": Listed(
        "fp32", EITHER, "main parameters of another dtype", also=("torch.float32",)
    ),
    "fsdp_all_gather_in_start_param_sync": Listed(True, EITHER, "Megatron-FSDP gathers its first parameters later"),
    "megatron_fsdp_cuda_graph_mode": Listed(False, UP, "gradients that Megatron-FSDP keeps for CUDA graphs"),
    "megatron_fsdp_use_decoupled_grad": Listed(False, EITHER, "decoupled gradients of another dtype"),
    "preserve_fp32_weights": Listed(True, DOWN, "no fp32 main parameters under FSDP"),
    "use_torch_fsdp2": Listed(
        False, EITHER, "PyTorch FSDP2 shards and gathers parameters its own way"
    ),
    # ---- precision ----
    "fp4_quantizer_factory": Listed(None, UNKNOWN, "quantisation of the user's own"),
    "fp8_quantizer_factory": Listed(None, UNKNOWN, "quantisation of the user's own"),
    "fp8_output_proj": Listed(
        False, EITHER,
        "the output layer in mxfp8, which on the last stage adds two bytes for each of its weights (none where "
        "parameters are in fp8) and for each logit of a microbatch, and saves one for each of its inputs",
    ),
    "fp8_multi_head_attention": Listed(
        False, DOWN, "what attention's linears hand on in fp8: up to a byte for each element of its inputs and output"
    ),
    # TransformerConfig's default is 1, that of Transformer Engine's recipe 1024.
    "fp8_amax_history_len": Listed(
        1, UP, "the amax history of delayed scaling, under 1 MiB", _fp8, also=("1024",), most=lambda _: 1 << 20
    ),
    # extensions of TE's recipes: the weight gradient's operands stay in the high precision too.
    "fp8_wgrad": Listed(True, UP, "weight gradients in bf16 beside fp8", _fp8),
    "moe_permute_padding_for_fp8_quantization": Listed(False, UP, "tokens that pad each expert's share", _fp8),
    # extensions/transformer_engine.py: is_first_microbatch is None, so that module/linear.py casts weights in every
    # forward pass and saves the copies for its backward.
    # Weights that are fp8 tensors themselves are not cast (module/base.py: quantize_weight).
    "disable_parameter_transpose_cache": Listed(
        False, EITHER, "fp8 copies of weights that live as long as a microbatch does (counted as kept for good)",
        _casts_weights,
    ),
    "keep_fp8_transpose_cache": Listed(False, UP, "cached transposes of fp8 weights under FSDP"),
    "keep_fp8_transpose_cache_when_using_custom_fsdp": Listed(
        False, UP, "cached transposes of fp8 weights under FSDP"
    ),
    "activation_func_fp8_input_store": Listed(False, DOWN, "activation inputs kept in fp8"),
    "te_precision_config_file": Listed(None, EITHER, "precision module by module"),
    "quant_recipe": Listed(None, EITHER, "quantisation layer by layer"),
    "use_kitchen": Listed(False, UNKNOWN, "another quantisation library"),
    "use_kitchen_attention": Listed(False, UNKNOWN, "another attention"),
    "kitchen_attention_backend": Listed("sdpa", UNKNOWN, "another attention"),
    "fp16_lm_cross_entropy": Listed(False, EITHER, "half-precision cross entropy"),
    "grad_accum_wgrad_dtype": Listed(None, EITHER, "weight gradients of another dtype"),
    # ---- the optimizer ----
    "optimizer_cuda_graph": Listed(False, UP, "the optimizer step as a CUDA graph"),
    "use_precision_aware_optimizer_no_fp8_or_ds_fp8": Listed(
        False, EITHER, "decoupled gradients of another dtype"
    ),
    "muon_scalar_optimizer": Listed("adam", EITHER, "another optimizer beside Muon", _muon),
    "muon_tp_mode": Listed("blockwise", UP, "momenta that are gathered over tensor-parallel ranks", _muon),
    # hybrid_optimizer.py: what stays on the GPU is torch's AdamW, which makes lists of temporaries.
    "use_torch_optimizer_for_cpu_offload": Listed(False, UP, "torch's optimizer and its temporaries", _offloaded),
    "overlap_cpu_optimizer_d2h_h2d": Listed(False, UP, "copies to and from the host in flight", _offloaded),
    "optimizer_offload_auto": Listed(False, EITHER, "a fraction that is chosen as the run starts"),
    # ---- activations: recomputed, offloaded, graphed ----
    "num_microbatches_with_partial_activation_checkpoints": Listed(
        None, EITHER, "recomputation of some microbatches only"
    ),
    "activation_offload_fraction": Listed(1.0, UP, "a part of the activations in host memory"),
    # fine_grained_activation_offload.py: post_warmup_callback, which takes groups back that would go.
    "delta_offload_bytes_across_pp_ranks": Listed(0, UP, "offloading that differs by pipeline rank"),
    "delay_offload_until_cuda_graph": Listed(False, UP, "offloading that waits for the CUDA graph"),
    "fine_grained_offloading_max_inflight_offloads": Listed(
        None, EITHER, "offloaded tensors that wait for their copy"
    ),
    "cpu_offloading_activations": Listed(True, EITHER, "which tensors go to host memory"),
    "cpu_offloading_weights": Listed(False, DOWN, "weights in host memory"),
    "cpu_offloading_double_buffering": Listed(
        False, UP, "a second buffer for what comes back from host memory"
    ),
    # ---- layers ----
    "use_te_activation_func": Listed(
        False, EITHER, "Transformer Engine's activations and what they keep (counted as the unfused ones)"
    ),
    "activation_func_clamp_value": Listed(None, UP, "clamped copies before the activation", _unfused_activation),
    "hidden_activation_clamp": Listed(None, UP, "clamped copies before the activation", _unfused_activation),
    "disable_jit_fuser": Listed(False, UP, "element-wise operations one by one, with what each keeps"),
    "batch_invariant_mode": Listed(False, EITHER, "batch-invariant kernels of norms, products and attention"),
    "flash_attention_version": Listed(None, EITHER, "another FlashAttention", also=("2",)),
    # removed with the legacy model in 0.17
    "use_flash_attn": Listed(
        False, DOWN, "FlashAttention of the legacy model", lambda a, _: bool(a["use_legacy_models"])
    ),
    "memory_efficient_layer_norm": Listed(False, EITHER, "norms that keep their output instead of their input"),
    "fused_residual_rmsnorm": Listed(False, EITHER, "another norm kernel"),
    "fused_single_qkv_rope": Listed(False, EITHER, "queries, keys and values rotated in one tensor"),
    "qk_l2_norm": Listed(False, UP, "a weightless norm of queries and keys"),
    # return_max_logit of Transformer Engine's attention, 2.9 and later
    "qk_clip": Listed(False, UP, "the largest logit of every head and row"),
    "log_max_attention_logit": Listed(False, UP, "the largest logit of every head and row"),
    "no_rope_freq": Listed(None, DOWN, "layers without rotary embeddings"),
    "mla_down_proj_fusion": Listed(False, EITHER, "one down-projection of queries, keys and values"),
    "mlp_chunks_for_training": Listed(1, EITHER, "the MLP a piece of the sequence at a time"),
    "use_grouped_gemm_for_dense_mlp": Listed(False, EITHER, "a dense MLP through the grouped GEMM"),
    "use_grouped_gemm_for_shared_expert": Listed(False, EITHER, "shared experts through the grouped GEMM"),
    "enable_hyper_connections": Listed(False, UP, "several residual streams (hyper-connections)"),
    "num_residual_streams": Listed(1, UP, "several residual streams (hyper-connections)"),
    # models/common: scaled copies of the embeddings and of the logits
    "use_mup": Listed(False, UP, "scaled copies of embeddings and logits"),
    # language_model_embedding.py: the local part is a view that keeps the whole output alive
    "clone_scatter_output_in_embedding": Listed(
        True, UP, "the whole output of the embedding, which stays alive", lambda a, _: bool(a["sequence_parallel"])
    ),
    "use_mamba_mem_eff_path": Listed(True, UP, "Mamba's convolution and scan apart, with what each keeps"),
    "mamba_training_ssm_states_dtype": Listed(None, EITHER, "Mamba's states between chunks of another dtype"),
    "mamba_expand": Listed(2, EITHER, "another Mamba expansion factor"),
    "mtp_detach_heads": Listed(False, EITHER, "MTP without gradients to the main model"),
    "mtp_hybrid_override_pattern": Listed(None, EITHER, "MTP depths with layers of their own"),
    "mtp_standalone": Listed(False, EITHER, "MTP on a pipeline stage of its own"),
    "heterogeneous_layers_config_path": Listed(None, EITHER, _OTHER_LAYERS + ", read from a file"),
    "heterogeneous_layers_config_encoded_json": Listed(None, EITHER, _OTHER_LAYERS),
    "heterogeneous_block_specs": Listed(False, EITHER, _OTHER_LAYERS),
    "decoder_num_layers": Listed(None, EITHER, "an encoder-decoder model"),
    "pipeline_model_parallel_split_rank": Listed(None, EITHER, _ENCODER),
    "encoder_pipeline_model_parallel_size": Listed(0, EITHER, _ENCODER),
    "encoder_tensor_model_parallel_size": Listed(0, EITHER, _ENCODER),
    # ---- experts ----
    # router.py: apply_input_jitter
    "moe_input_jitter_eps": Listed(None, UP, "the router's noisy copy of the tokens"),
    "moe_router_force_biased": Listed(None, UP, "routing that is made uneven"),
    "moe_extended_tp": Listed(False, EITHER, "the removed extended-TP sharding of experts"),
    "moe_input_feature_slicing": Listed(False, EITHER, "the removed sharding of experts' inputs"),
    "moe_use_legacy_grouped_gemm": Listed(False, EITHER, "the removed grouped GEMM's layers"),
    "moe_hybridep_pad_uneven_dispatch_inputs": Listed(False, UP, "padded tokens of HybridEP"),
    "moe_permute_fusion_into_hybridep": Listed(False, EITHER, "tokens put in order by HybridEP"),
    "moe_ncclep_static_shape": Listed(False, UP, "receive buffers of full size"),
    "moe_ncclep_zero_copy": Listed(False, UP, "buffers in NCCL's symmetric memory"),
    "moe_shared_expert_glu_interleave_size": Listed(
        None, UP, "copies in the shared experts' own order of gates and values"
    ),
    "moe_router_replay": Listed(False, UP, "the recorded routing of every microbatch"),
    "moe_enable_routing_replay": Listed(False, UP, "the recorded routing of every microbatch"),
    "moe_routing_trace_path": Listed(None, UP, "what is traced of every router"),
    "moe_use_upcycling": Listed(False, UP, "a dense model beside the one with experts"),
    "overlap_dispatch_backward_with_experts_wgrad": Listed(
        False, UP, "inputs of experts that wait for their weight gradients"
    ),
    # ---- other ways to train ----
    "eval_micro_batch_size": Listed(
        None, UP, "forward passes of larger batches in evaluation", _larger_than_in_training
    ),
    "skip_train": Listed(False, DOWN, "evaluation alone (counted with training steps)"),
    "freeze_all_layers": Listed(False, DOWN, "frozen layers"),
    "lora_rank": Listed(None, EITHER, "LoRA adapters"),
    "sft": Listed(False, EITHER, "packed " + _VARYING),
    "dataloader_inter_document_masking": Listed(False, EITHER, "packed " + _VARYING),
    "max_seqlen_per_dp_cp_rank": Listed(None, EITHER, "packed " + _VARYING),
    "variable_seq_lengths": Listed(False, EITHER, _VARYING),
    "export_kd_teacher_load": Listed(None, UP, _KD),
    "export_kd_cfg": Listed(None, UP, _KD + " and its loss"),
    "export_kd_teacher_ckpt_format": Listed(None, UP, _KD),
    "logits_load_dir": Listed(None, UP, "a teacher's logits"),
    "logits_save_dir": Listed(None, UP, "the largest logits of every token, which are saved"),
    "perform_rl": Listed(False, EITHER, _RL),
    "perform_rl_step": Listed(False, EITHER, _RL),
    "rl_offload_optimizer_during_inference": Listed(False, EITHER, _RL),
    "use_checkpoint_args": Listed(False, UNKNOWN, "a model that a checkpoint describes", _told_elsewhere),
    "use_mp_args_from_checkpoint_args": Listed(
        False, UNKNOWN, "parallel sizes that a checkpoint says", _told_elsewhere
    ),
    "yaml_cfg": Listed(None, UNKNOWN, "arguments in a file, which is not read", _told_elsewhere),
    # ---- now and then, between training steps ----
    # distrib_optimizer.py: sharded_param_state_fully_reshardable gathers the states of every bucket on the GPU.
    "dist_ckpt_optim_fully_reshardable": Listed(
        False, UP, "optimizer states that are gathered while a checkpoint is saved", outside=True
    ),
    "replication": Listed(False, UP, "copies of other ranks' checkpoints on their way", outside=True),
    "save_activations_interval": Listed(None, UP, "activations that are kept to be saved, in some steps"),
    "save_dgrads_interval": Listed(None, UP, "gradients that are kept to be saved, in some steps"),
    "save_wgrads_interval": Listed(None, UP, "gradients that are kept to be saved, in some steps"),
    "save_params_interval": Listed(None, UP, "parameters that are kept to be saved, in some steps"),
    "gpu_sniff_test_interval": Listed(None, UP, "the matrices of the GPU's test", outside=True),
}
#: Argument -> what is not counted of it.
GAPS: dict[str, Listed] = {name: entry._replace(order=ORDER_OF[name]) for name, entry in _GAPS.items()}
