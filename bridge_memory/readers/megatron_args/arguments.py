"""What each Megatron-LM argument is to memory: read, harmless, or a gap that is reported by name.

Source of the names: ``megatron/training/arguments.py`` of core 0.11 to 0.20 and the fields of
TransformerConfig, OptimizerConfig and DistributedDataParallelConfig, from which newer releases make
arguments.
"""

from __future__ import annotations

from collections.abc import Callable

from bridge_memory.readers.megatron_args.parsing import RawArguments, Value
from bridge_memory.spec import SpecError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Arguments that the reader turns into fields of the RunSpec.
READ = _names(
    """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    accumulate_allreduce_grads_in_fp32 add_qkv_bias apply_query_key_layer_scaling
    apply_residual_connection_post_layernorm attention_backend attention_dropout attention_output_gate
    attention_softmax_in_fp32 bf16 calculate_per_token_loss context_parallel_size cp_comm_type
    cpu_offloading_num_layers create_attention_mask_in_dataloader cross_entropy_fusion_impl
    cross_entropy_loss_fusion cuda_graph_impl cuda_graph_modules cuda_graph_scope
    data_parallel_sharding_strategy ddp_bucket_size decoder_first_pipeline_num_layers
    decoder_last_pipeline_num_layers decoder_seq_length defer_embedding_wgrad_compute delay_wgrad_compute
    deterministic_mode disable_bias_linear distribute_saved_activations enable_cuda_graph
    encoder_num_layers encoder_seq_length exp_avg_dtype exp_avg_sq_dtype expert_model_parallel_size
    expert_tensor_parallel_size external_cuda_graph ffn_hidden_size fine_grained_activation_offloading
    first_last_layers_bf16 fp16 fp32_residual_connection fp8 fp8_format fp8_param fp8_param_gather
    fp8_recipe global_batch_size grad_reduce_in_bf16 group_query_attention hidden_dropout hidden_size
    hybrid_attention_ratio hybrid_layer_pattern hybrid_mlp_ratio hybrid_override_pattern is_hybrid_model
    kv_channels kv_lora_rank legacy_tokenizer log_params_norm main_grads_dtype
    main_params_dtype make_vocab_size_divisible_by mamba_head_dim mamba_num_groups mamba_num_heads
    mamba_state_dim masked_softmax_fusion max_position_embeddings micro_batch_size
    microbatch_group_size_per_virtual_pipeline_stage microbatch_group_size_per_vp_stage
    moe_apply_probs_on_input moe_enable_deepep moe_expert_capacity_factor moe_ffn_hidden_size
    moe_flex_dispatcher_backend moe_grouped_gemm moe_latent_size moe_layer_freq moe_layer_recompute
    moe_pad_expert_input_to_capacity moe_permute_fusion moe_router_dtype moe_router_enable_expert_bias
    moe_router_fusion moe_router_group_topk moe_router_load_balancing_type moe_router_num_groups
    moe_router_score_function moe_router_topk moe_shared_expert_gate moe_shared_expert_intermediate_size
    moe_shared_expert_overlap moe_token_dispatcher_type mtp_num_layers mtp_use_repeated_layer
    multi_latent_attention no_bias_dropout_fusion no_bias_gelu_fusion no_bias_swiglu_fusion
    no_create_attention_mask_in_dataloader no_gradient_accumulation_fusion no_masked_softmax_fusion
    no_position_embedding no_rope_fusion normalization num_attention_heads
    num_distributed_optimizer_instances num_experts num_layers num_layers_at_end_in_bf16
    num_layers_at_start_in_bf16 num_layers_per_virtual_pipeline_stage num_moe_experts num_query_groups
    num_virtual_stages_per_pipeline_rank offload_modules optimizer optimizer_cpu_offload
    optimizer_offload_fraction overlap_grad_reduce overlap_moe_expert_parallel_comm overlap_param_gather
    padded_vocab_size pipeline_model_parallel_layout pipeline_model_parallel_size position_embedding_type
    q_lora_rank qk_head_dim qk_layernorm qk_pos_emb_head_dim quick_geglu recompute_activations
    recompute_granularity recompute_method recompute_modules recompute_num_layers rotary_percent
    seq_length sequence_parallel sgd_momentum softmax_type spec squared_relu swiglu
    tensor_model_parallel_size tokenizer_type transformer_impl untie_embeddings_and_output_weights
    use_custom_fsdp use_distributed_optimizer use_flash_attn use_fused_weighted_squared_relu
    use_layer_wise_distributed_optimizer use_legacy_models use_mcore_models use_megatron_fsdp
    use_precision_aware_optimizer use_rotary_position_embeddings use_torch_optimizer_for_cpu_offload
    use_tp_pp_dp_mapping use_transformer_engine_op_fuser v_head_dim virtual_pipeline_model_parallel_size
    vocab_size window_size world_size
    """
)

#: Arguments that change no byte of what a training step allocates on the GPU.
HARMLESS = _names(
    """
    activation_func_clamp_value adam_beta1 adam_beta2 adam_eps adaptive_layernorm_epsilon adlr_autoresume
    adlr_autoresume_interval align_grad_reduce align_param_gather app_tag_run_name app_tag_run_version
    apply_layernorm_1p apply_wd_to_qk_layernorm async_ckpt_use_cached_metadata async_ckpt_use_cpu_shm
    async_save async_strategy async_tensor_model_parallel_allreduce auto_detect_ckpt_format
    average_in_collective barrier_with_L1_time batch_invariant_mode batch_p2p_comm batch_p2p_communication
    batch_p2p_sync batch_size beta_fast beta_slow cache_mla_latents cache_mla_latents_for_training
    calc_ft_timeouts check_for_large_grads check_for_nan_in_grad check_for_nan_in_loss_and_grad
    check_for_spiky_loss check_weight_hash_across_dp_replicas_interval checkpoint_activations
    ckpt_assume_constant_structure ckpt_convert_format ckpt_convert_save
    ckpt_convert_update_legacy_dist_opt_format ckpt_format ckpt_fully_parallel_load
    ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_save ckpt_load_validate_sharding_integrity clip_grad
    ckpt_step classes_fraction clone_scatter_output_in_embedding config_logger_dir consumed_train_samples
    create_all_gather_group cross_attention cuda_graph_retain_backward_graph cuda_graph_use_single_mempool
    cuda_graph_warmup_steps curr_iteration data_args_path data_cache_path data_parallel_random_init
    data_path data_per_class_fraction data_sharding dataloader_fast_cache_load dataloader_prefetch_factor
    dataloader_save dataloader_type ddp_average_in_collective ddp_num_buckets
    ddp_pad_buckets_for_high_nccl_busbw decoupled_lr decoupled_min_lr decoupled_weight_decay
    decrease_batch_size_if_needed dino_bottleneck_size disable_bf16_reduced_precision_matmul
    disable_gloo_process_groups disable_jit_fuser disable_mamba_mem_eff_path_in_eval
    disable_straggler_on_startup disable_symmetric_registration disable_tp_comm_bulk_dgrad
    disable_tp_comm_bulk_wgrad disable_tp_comm_overlap_ag disable_tp_comm_overlap_rs
    disable_tp_comm_split_ag disable_tp_comm_split_rs dist_ckpt_format dist_ckpt_optim_fully_reshardable
    dist_ckpt_save_pre_mcore_014 dist_ckpt_strictness distrib_optim_fully_reshardable_mem_efficient
    distributed_backend distributed_init_method distributed_timeout_minutes
    distributed_timeout_seconds_after_init dsa_indexer_loss_coeff embedding_init_method_std
    empty_unused_memory_level enable_experimental enable_ft_package enable_gloo_process_groups
    enable_one_logger end_weight_decay eod_mask_loss error_injection_rate error_injection_type
    eval_global_batch_size eval_interval eval_iters eval_micro_batch_size exit_duration_in_mins
    exit_interval exit_on_missing_checkpoint exit_signal exit_signal_handler
    exit_signal_handler_for_dataloader export_te_mcore_model fim_data fim_eod_token fim_fragment_rate
    fim_middle_token fim_no_prefix fim_pad_token fim_prefix_token fim_rate fim_split_sample fim_spm_rate
    fim_suffix_token finetune flash_decode fp16_lm_cross_entropy_scale fp8_amax_compute_algo
    fp8_dot_product_attention_scaling fp8_interval fp8_margin fp8_wgrad fsdp_manual_registration
    ft_num_warmup_iters full_validation global_retriever glu_linear_offset grad_accum_wgrad_dtype
    gradient_reduce_div_fusion head_lr_mult hetereogenous_dist_checkpoint hidden_activation_clamp
    hierarchical_context_parallel_sizes high_priority_a2a_comm_stream high_priority_stream_groups
    hysteresis ignore_forward_method inference_batch_times_seqlen_threshold inference_dynamic_batching
    inference_fuse_tp_communication inference_max_requests inference_max_seq_length inference_rng_tracker
    inference_sampling_seed init_method_std init_method_xavier_uniform init_model_with_meta_device
    initial_loss_scale inprocess_restart iterations iters_to_accumulate k_seed keep_last label_smoothing
    layernorm_epsilon layernorm_zero_centered_gamma lazy_mpu_init legacy_muon load
    load_main_params_from_ckpt load_model_opt_format local_rank log_device_memory_used log_energy
    log_interval log_l2_norm_grad_to_tensorboard log_learning_rate_to_tensorboard
    log_loss_scale_to_tensorboard log_max_attention_logit log_memory_interval log_memory_to_tensorboard
    log_num_zeros_in_grad
    log_progress log_straggler log_throughput log_timers_to_tensorboard log_validation_ppl_to_tensorboard
    log_world_size_to_tensorboard logging_level logging_module_filter logging_rank loss_scale
    loss_scale_window lr lr_decay_iters lr_decay_samples lr_decay_style lr_warmup_fraction lr_warmup_init
    lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style
    main_logging manual_gc manual_gc_eval manual_gc_interval mask_factor mask_prob mask_type
    max_tokens_to_oom memory_snapshot_path merge_file min_loss_scale min_lr mlp_chunks_for_prefill
    mmap_bin_files mock_data model_name moe_aux_loss_coeff moe_deepep_num_sms moe_flex_dispatcher_num_sms
    moe_hybridep_num_sms moe_input_feature_slicing moe_input_jitter_eps moe_per_layer_logging
    moe_permute_padding_for_fp8_quantization moe_router_bias_update_rate moe_router_force_biased
    moe_router_force_load_balancing moe_router_padding_for_fp8 moe_router_padding_for_quantization
    moe_router_pre_softmax moe_router_topk_limited_devices moe_router_topk_scaling_factor
    moe_token_drop_policy moe_token_dropping moe_upcycling_granularity moe_use_legacy_grouped_gemm
    moe_use_upcycling moe_z_loss_coeff mrope_section mscale mscale_all_dim mtp_loss_scaling_factor
    muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec muon_momentum muon_num_ns_steps
    muon_scalar_optimizer muon_scale_mode muon_split_qkv muon_tp_mode muon_use_nesterov
    nccl_communicator_config_path no_async_tensor_model_parallel_allreduce no_barrier_with_level_1_timing
    no_batch_p2p_comm no_check_for_nan_in_loss_and_grad no_check_for_spiky_loss
    no_ckpt_fully_parallel_save no_data_sharding no_dist_ckpt_validation no_initialization no_load_optim
    no_load_rng no_log_learnig_rate_to_tensorboard no_log_loss_scale_to_tensorboard no_mmap_bin_files
    no_one_logger no_overlap_p2p_communication no_persist_layer_norm no_rope_freq no_save_optim no_save_rng
    no_scatter_gather_tensors_in_pipeline no_use_layer_wise_param_layout
    no_use_tokenizer_from_checkpoint_args no_use_tokenizer_model_from_checkpoint_args
    no_weight_decay_cond_type non_persistent_ckpt_type non_persistent_global_ckpt_dir
    non_persistent_local_ckpt_algo non_persistent_local_ckpt_dir non_persistent_save_interval norm_epsilon
    null_tokenizer num_dataset_builder_threads num_workers one_logger_async one_logger_project
    one_logger_run_name optimizer_offload_auto original_max_position_embeddings output_bert_embeddings
    overlap_cpu_optimizer_d2h_h2d overlap_p2p_comm overlap_p2p_comm_warmup_flush
    overlap_p2p_communication_warmup_flush overlap_param_gather_with_optimizer_step
    override_opt_param_scheduler pad_buckets_for_high_nccl_busbw per_dataset_sequences_path
    per_split_data_args_path perform_initialization perform_rl_step phase_transition_iterations
    pin_cpu_grads pin_cpu_params prefix pretrained_checkpoint pretrained_checkpoint_format profile
    profile_ranks profile_step_end profile_step_start qk_clip qk_clip_alpha qk_clip_threshold
    query_in_block_prob rampup_batch_size rank record_memory_history replication replication_factor
    replication_jump rerun_mode reset_attention_mask reset_position_ids result_rejected_tracker_filename
    retro_add_retriever rope_scaling rope_scaling_factor rope_type rotary_base rotary_interleaved
    rotary_scaling rotary_scaling_factor rotary_seq_len_interpolation_factor run_workload_inspector_server
    safe_mode sample_rate save save_interval save_retain_interval seed sft_tokenizer_prompt_format
    sharp_enabled_group skip_samples skip_train softmax_scale spiky_loss_factor split split_spec
    start_weight_decay step_batch_size_schedule straggler_ctrlr_port straggler_minmax_count
    strict_fsdp_dtensor_load suggested_communication_unit_size swin_backbone_type symmetric_ar_type
    te_rng_tracker tensorboard_dir tensorboard_log_interval tensorboard_queue_size test_data_path
    test_mode tiktoken_num_special_tokens tiktoken_pattern tiktoken_special_tokens timing_log_level
    timing_log_option titles_data_path tokenizer_hf_include_special_tokens tokenizer_hf_use_fast
    tokenizer_metadata tokenizer_model tokenizer_prompt_format tokenizer_sentencepiece_legacy
    tokenizer_special_tokens tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend
    tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_cfg
    tp_comm_overlap_disable_fc1 tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad
    tp_comm_split_ag tp_comm_split_rs tp_only_amax_red train_data_path train_iters train_samples
    train_sync_interval trust_remote_code use_checkpoint_args use_checkpoint_opt_param_scheduler
    use_cpu_initialization use_dist_ckpt use_dist_ckpt_deprecated use_inference_optimized_layers
    use_legacy_static_engine use_mamba_mem_eff_path use_mp_args_from_checkpoint_args use_mup
    use_nccl_communicator use_one_sent_docs use_persistent_ckpt_worker use_pytorch_profiler
    use_ring_exchange_p2p use_rope_scaling use_sharp use_te_activation_func use_te_rng_tracker
    use_tokenizer_model_from_checkpoint_args valid_data_path verify_integrity vision_pretraining
    vocab_extra_ids vocab_file wandb_entity wandb_exp_name wandb_project wandb_save_dir warmup
    weight_decay weight_decay_incr_style wgrad_deferral_limit yaml_cfg
    yarn_original_max_position_embeddings
    """
)


def _on(value: Value) -> bool:
    return value not in (False, 0, "0", "none", "None")


def _not(*harmless: str) -> Callable[[Value], bool]:
    return lambda value: str(value) not in harmless


#: Arguments that change memory in a way the estimate does not count: when it applies, and what it would
#: change.
GAPS: dict[str, tuple[Callable[[Value], bool], str]] = {
    "use_torch_fsdp2": (_on, "PyTorch FSDP2 shards and gathers parameters its own way"),
    "tp_comm_overlap": (_on, "user buffers of tensor-parallel overlap are allocated by Transformer Engine"),
    "use_nccl_ub": (_on, "gradient and parameter buffers come from NCCL's own memory pool"),
    "nccl_ub": (_on, "gradient and parameter buffers come from NCCL's own memory pool"),
    "fsdp_double_buffer": (_on, "Megatron-FSDP keeps two persistent communication buffers"),
    "outer_dp_sharding_strategy": (_not("no_shard"), "hybrid sharding over an outer data-parallel group"),
    "megatron_fsdp_grad_comm_dtype": (_not("fp32", "auto"), "gradient communication of another dtype"),
    "megatron_fsdp_main_grads_dtype": (_not("fp32", "auto"), "main gradients of another dtype"),
    "megatron_fsdp_main_params_dtype": (_not("fp32", "auto"), "main parameters of another dtype"),
    "export_kd_teacher_load": (_on, "knowledge distillation holds a second (teacher) model"),
    "export_kd_cfg": (_on, "knowledge distillation holds a second (teacher) model and its loss"),
    "export_kd_teacher_ckpt_format": (_on, "knowledge distillation holds a second (teacher) model"),
    "fp4_format": (_on, "fp4 activations and weights"),
    "fp4": (_on, "fp4 activations and weights"),
    "fp4_param_gather": (_on, "fp4 parameters"),
    "fp8_amax_history_len": (_not("1024", "1"), "the amax history of delayed scaling, under 1 MiB"),
    "pipeline_model_parallel_split_rank": (_on, "an encoder-decoder split"),
    "encoder_pipeline_model_parallel_size": (_not("0"), "an encoder-decoder split"),
    "encoder_tensor_model_parallel_size": (_not("0"), "an encoder-decoder split"),
    "decoder_num_layers": (_on, "an encoder-decoder model"),
    "hybrid_context_parallel": (_on, "sequences of different context-parallel sizes"),
    "max_seqlen_per_dp_cp_rank": (_on, "packed sequences of varying length"),
    "sft": (_on, "packed sequences of varying length"),
    "variable_seq_lengths": (_on, "sequences of varying length"),
    "use_precision_aware_optimizer_no_fp8_or_ds_fp8": (_on, "decoupled gradients of another dtype"),
    "experimental_attention_variant": (_on, "another attention (sparse or linear)"),
    "linear_attention_type": (_on, "linear attention layers"),
    "linear_attention_freq": (_on, "linear attention layers"),
    "heterogeneous_layers_config_path": (_on, "layers of different shapes, read from a file"),
    "heterogeneous_layers_config_encoded_json": (_on, "layers of different shapes"),
    "moe_extended_tp": (_on, "the removed extended-TP sharding of experts"),
    "moe_router_replay": (_on, "the recorded routing of every microbatch"),
    "enable_hyper_connections": (_on, "several residual streams (hyper-connections)"),
    "num_residual_streams": (_not("1"), "several residual streams (hyper-connections)"),
    "cpu_offloading": (_on, "layer activations in host memory"),
    "cpu_offloading_activations": (_not("True", "true"), "which tensors go to host memory"),
    "cpu_offloading_weights": (_on, "weights in host memory"),
    "cpu_offloading_double_buffering": (_on, "a second buffer for what comes back from host memory"),
    "min_offloaded_tensor_size": (_on, "which tensors go to host memory"),
    "num_microbatches_with_partial_activation_checkpoints": (_on, "recomputation of some microbatches only"),
    "memory_efficient_layer_norm": (_on, "norms that keep their output instead of their input"),
    "activation_func_fp8_input_store": (_on, "activation inputs kept in fp8"),
    "disable_parameter_transpose_cache": (_on, "no cached transposes of fp8 weights"),
    "keep_fp8_transpose_cache": (_on, "cached transposes of fp8 weights under FSDP"),
    "keep_fp8_transpose_cache_when_using_custom_fsdp": (_on, "cached transposes of fp8 weights under FSDP"),
    "preserve_fp32_weights": (_not("True", "true"), "no fp32 main parameters under FSDP"),
    "reduce_scatter_with_fp32_accumulation": (_on, "another gradient reduction with buffers of its own"),
    "reuse_grad_buf_for_mxfp8_param_ag": (_on, "parameters gathered in the gradient buffer"),
    "fp4_recipe": (_on, "fp4 activations and weights"),
    "fp4_param": (_on, "fp4 parameters"),
    "use_kitchen": (_on, "another quantisation library"),
    "use_kitchen_attention": (_on, "another attention"),
    "kitchen_attention_backend": (_not("sdpa"), "another attention"),
    "qk_l2_norm": (_on, "a weightless norm of queries and keys"),
    "quant_recipe": (_on, "quantisation layer by layer"),
    "mtp_standalone": (_on, "MTP on a pipeline stage of its own"),
    "heterogeneous_block_specs": (_on, "layers of different shapes"),
    "moe_enable_routing_replay": (_on, "the recorded routing of every microbatch"),
    "fused_single_qkv_rope": (_on, "queries, keys and values rotated in one tensor"),
    "dsa_indexer_n_heads": (_on, "sparse attention's indexer"),
    "dsa_indexer_head_dim": (_on, "sparse attention's indexer"),
    "dsa_indexer_topk": (_on, "sparse attention's indexer"),
    "dsa_indexer_use_sparse_loss": (_on, "sparse attention's indexer"),
    "linear_conv_kernel_dim": (_not("4"), "linear attention layers"),
    "linear_key_head_dim": (_not("128"), "linear attention layers"),
    "linear_value_head_dim": (_not("128"), "linear attention layers"),
    "linear_num_key_heads": (_not("16"), "linear attention layers"),
    "linear_num_value_heads": (_not("32"), "linear attention layers"),
    "deallocate_pipeline_outputs": (_not("True", "true"), "pipeline outputs that are kept"),
    "ep_overlap_early_attn_memory_release": (_on, "earlier release of attention activations"),
    "fp16_lm_cross_entropy": (_on, "half-precision cross entropy"),
    "fp8_dot_product_attention": (_on, "attention in fp8"),
    "fp8_multi_head_attention": (_on, "attention in fp8"),
    "lora_rank": (_on, "LoRA adapters"),
    "perform_rl": (_on, "reinforcement learning with inference in between"),
    "pipeline_model_parallel_comm_backend": (_not("nccl"), "pipeline buffers of another backend"),
    "mamba_expand": (_not("2"), "another Mamba expansion factor"),
    "rl_offload_optimizer_during_inference": (_on, "reinforcement learning with inference in between"),
    "window_attn_skip_freq": (_on, "a mix of full and sliding-window layers (nothing changes under flash)"),
}


class Arguments:
    """Typed access to the arguments; asking for a name outside ``READ`` is a programming error."""

    def __init__(self, raw: RawArguments) -> None:
        self._values = raw.values
        self.env = raw.env

    def has(self, name: str) -> bool:
        assert name in READ, name
        return name in self._values

    def raw(self, name: str) -> Value | None:
        assert name in READ, name
        return self._values.get(name)

    def flag(self, name: str) -> bool:
        value = self.raw(name)
        return value is not None and str(value).lower() not in ("false", "0", "none", "null", "no")

    def text(self, name: str, default: str) -> str:
        value = self.raw(name)
        return default if value is None else " ".join(value) if isinstance(value, list) else str(value)

    def integer(self, name: str, default: int) -> int:
        number = self.optional_integer(name)
        return default if number is None else number

    def optional_integer(self, name: str) -> int | None:
        value = self.raw(name)
        if value is None or str(value).lower() in ("none", "null"):
            return None
        try:
            number = float(str(value))
            if number == int(number):
                return int(number)
        except (ValueError, OverflowError):
            pass
        raise SpecError(f"--{name.replace('_', '-')} is {value!r}, not a whole number; give one")

    def number(self, name: str, default: float) -> float:
        value = self.raw(name)
        if value is None:
            return default
        try:
            return float(str(value))
        except ValueError:
            raise SpecError(f"--{name.replace('_', '-')} is {value!r}, not a number; give one") from None

    def required(self, name: str) -> int:
        number = self.optional_integer(name)
        if number is None:
            raise SpecError(f"--{name.replace('_', '-')} is missing from the Megatron arguments; add it")
        return number

    def choice(self, name: str, default: str, allowed: tuple[str, ...]) -> str:
        value = self.text(name, default)
        if value not in allowed:
            raise SpecError(f"--{name.replace('_', '-')} is {value!r}; use one of {', '.join(allowed)}")
        return value

    def not_modelled(self) -> tuple[str, ...]:
        """One line for every argument that changes memory and is not counted, or that nobody here knows."""
        lines = []
        for name, value in self._values.items():
            option = "--" + name.replace("_", "-")
            if name in GAPS:
                applies, why = GAPS[name]
                if why and applies(value):
                    lines.append(f"{option} {'' if value is True else value}".rstrip() + f": {why}")
            elif name not in READ and name not in HARMLESS:
                lines.append(f"{option}: not an argument this reader knows")
        return tuple(lines)
