"""What each Megatron-LM argument is to memory: read, harmless, or a gap that is reported by name.

Names are argparse's destinations, as in ``get_args()``: ``--disable-bias-linear`` is ``add_bias_linear`` (False).
Source of the names and defaults: ``megatron/training/arguments.py`` of core 0.11 to 0.20 and the fields of
TransformerConfig, OptimizerConfig and DistributedDataParallelConfig, from which newer releases make arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from bridge_memory.readers.megatron_args.parsing import RawArguments, Value, words_of
from bridge_memory.spec import SpecError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# ---- arguments that the reader asks for, with Megatron-LM's defaults ----

#: Switches that are off unless given.
OFF = _names(
    """
    account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
    accumulate_allreduce_grads_in_fp32 add_qkv_bias apply_query_key_layer_scaling attention_output_gate
    attention_softmax_in_fp32 bf16 calculate_per_token_loss cpu_offloading cross_entropy_loss_fusion
    defer_embedding_wgrad_compute delay_wgrad_compute deterministic_mode distribute_saved_activations
    enable_cuda_graph external_cuda_graph fine_grained_activation_offloading first_last_layers_bf16 fp16
    fp32_residual_connection fp8_param_gather grad_reduce_in_bf16 group_query_attention is_hybrid_model
    legacy_tokenizer log_params_norm moe_apply_probs_on_input moe_enable_deepep moe_grouped_gemm
    moe_layer_recompute moe_pad_expert_input_to_capacity moe_permute_fusion moe_router_enable_expert_bias
    moe_router_fusion moe_shared_expert_gate moe_shared_expert_overlap mtp_use_repeated_layer
    multi_latent_attention optimizer_cpu_offload overlap_grad_reduce overlap_moe_expert_parallel_comm
    overlap_param_gather qk_layernorm quick_geglu recompute_activations sequence_parallel squared_relu swiglu
    untie_embeddings_and_output_weights use_distributed_optimizer use_fused_weighted_squared_relu
    use_layer_wise_distributed_optimizer use_legacy_models use_megatron_fsdp use_precision_aware_optimizer
    use_rotary_position_embeddings use_transformer_engine_op_fuser
    """
)
#: Switches that are on unless switched off.
ON = _names(
    """
    add_bias_linear apply_rope_fusion bias_dropout_fusion bias_gelu_fusion bias_swiglu_fusion
    create_attention_mask_in_dataloader gradient_accumulation_fusion masked_softmax_fusion pad_vocab_size
    store_param_remainders
    """
)
_UNSET_INTEGERS = """
    ddp_bucket_size decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers encoder_num_layers
    encoder_seq_length expert_tensor_parallel_size ffn_hidden_size global_batch_size hidden_size kv_channels
    mamba_num_heads max_position_embeddings micro_batch_size microbatch_group_size_per_vp_stage
    moe_ffn_hidden_size moe_latent_size moe_router_group_topk moe_router_num_groups
    moe_shared_expert_intermediate_size mtp_num_layers num_attention_heads num_experts num_layers
    num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank padded_vocab_size q_lora_rank
    recompute_num_layers seq_length suggested_communication_unit_size virtual_pipeline_model_parallel_size vocab_size
    world_size
    """
INTEGERS: dict[str, int | None] = {
    **dict.fromkeys(_UNSET_INTEGERS.split()),
    "context_parallel_size": 1, "cpu_offloading_num_layers": 0, "expert_model_parallel_size": 1, "kv_lora_rank": 32,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "log_interval": 100,
    "make_vocab_size_divisible_by": 128, "mamba_head_dim": 64, "mamba_num_groups": 8, "mamba_state_dim": 128,
    "moe_router_topk": 2, "num_distributed_optimizer_instances": 1, "num_layers_at_end_in_bf16": 1,
    "num_layers_at_start_in_bf16": 1, "num_query_groups": 1, "pipeline_model_parallel_size": 1, "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64, "tensor_model_parallel_size": 1, "v_head_dim": 128,
}  # fmt: skip
NUMBERS: dict[str, float | None] = {
    "attention_dropout": 0.1, "hidden_dropout": 0.1, "hybrid_attention_ratio": 0.0, "hybrid_mlp_ratio": 0.0,
    "moe_expert_capacity_factor": None, "optimizer_offload_fraction": 1.0, "rotary_percent": 1.0, "sgd_momentum": 0.9,
}  # fmt: skip
WORDS: dict[str, str | None] = {
    "attention_backend": "auto", "cross_entropy_fusion_impl": "native", "cuda_graph_impl": "none",
    "data_parallel_sharding_strategy": None, "exp_avg_dtype": "fp32", "exp_avg_sq_dtype": "fp32",
    "experimental_attention_variant": None, "fp8": None, "fp8_recipe": "delayed", "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None, "linear_attention_type": None, "main_grads_dtype": "fp32",
    "main_params_dtype": "fp32", "megatron_fsdp_grad_comm_dtype": "auto", "megatron_fsdp_main_grads_dtype": "auto",
    "moe_flex_dispatcher_backend": "deepep", "moe_router_dtype": None,
    "moe_router_score_function": "softmax", "moe_token_dispatcher_type": "allgather", "normalization": "LayerNorm",
    "optimizer": "adam", "pipeline_model_parallel_layout": None, "position_embedding_type": "learned_absolute",
    "recompute_granularity": None, "recompute_method": None, "softmax_type": "vanilla", "spec": None,
    "tokenizer_type": None, "transformer_impl": "transformer_engine",
}  # fmt: skip
#: Lists of words, or of numbers where they are patterns of layers, windows and coefficients.
LISTS: dict[str, tuple[str, ...] | None] = {
    "cp_comm_type": ("p2p",), "moe_router_load_balancing_type": ("aux_loss",), "offload_modules": (),
    "recompute_modules": None,
}  # fmt: skip
PATTERNS: dict[str, Any] = {
    "linear_attention_freq": None, "moe_aux_loss_coeff": 0.0, "moe_layer_freq": 1, "window_attn_skip_freq": None,
    "window_size": None,
}  # fmt: skip

#: Arguments that the reader turns into fields of the RunSpec.
READ = OFF | ON | INTEGERS.keys() | NUMBERS.keys() | WORDS.keys() | LISTS.keys() | PATTERNS.keys()

#: Options whose destination is not their name. (``--no-x`` and ``--disable-x`` of a known x need no entry.)
DESTINATIONS = {
    "ddp_reduce_scatter_with_fp32_accumulation": "reduce_scatter_with_fp32_accumulation",
    "fp4_format": "fp4",
    "fp8_format": "fp8",
    "fp8_param": "fp8_param_gather",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "num_moe_experts": "num_experts",
    "use_custom_fsdp": "use_megatron_fsdp",
    "use_nccl_ub": "nccl_ub",
}
#: Options that switch their destination off (``store_false``) and do not say so by their name.
SWITCHED_OFF_BY = {
    "disable_bias_linear": "add_bias_linear",
    "no_rope_fusion": "apply_rope_fusion",
}

#: Arguments that change no byte of what a training step allocates on the GPU.
HARMLESS = _names(
    """
    activation_func_clamp_value adam_beta1 adam_beta2 adam_eps adaptive_layernorm_epsilon
    add_position_embedding adlr_autoresume adlr_autoresume_interval align_grad_reduce align_param_gather
    allow_ambiguous_pad_tokens app_tag_run_name app_tag_run_version apply_layernorm_1p
    apply_residual_connection_post_layernorm apply_wd_to_qk_layernorm async_ckpt_cpu_priority
    async_ckpt_io_priority async_ckpt_use_cached_metadata async_ckpt_use_cpu_shm async_save async_strategy
    async_tensor_model_parallel_allreduce auto_detect_ckpt_format average_in_collective barrier_with_L1_time
    batch_invariant_mode batch_p2p_comm batch_p2p_communication batch_p2p_sync batch_size bert_binary_head
    bert_embedder_type bert_load bert_no_binary_head beta_fast beta_slow biencoder_projection_dim
    biencoder_shared_query_context_model block_data_path cache_mla_latents cache_mla_latents_for_training
    calc_ft_timeouts chat_template check_for_large_grads check_for_nan_in_grad check_for_nan_in_loss_and_grad
    check_for_spiky_loss check_weight_hash_across_dp_replicas_interval checkpoint_activations
    ckpt_assume_constant_structure ckpt_convert_format ckpt_convert_save
    ckpt_convert_update_legacy_dist_opt_format ckpt_format ckpt_fully_parallel_load
    ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_load_process_group ckpt_fully_parallel_save
    ckpt_fully_parallel_save_deprecated ckpt_fully_parallel_save_process_group
    ckpt_load_validate_sharding_integrity ckpt_step classes_fraction clip_grad
    clone_scatter_output_in_embedding config_logger_dir consumed_train_samples consumed_valid_samples
    cpu_offloading_retain_pinned_cpu_buffers create_all_gather_group cross_attention cuda_graph_modules
    cuda_graph_retain_backward_graph cuda_graph_scope cuda_graph_scope_deprecated
    cuda_graph_use_single_mempool cuda_graph_warmup_steps curr_iteration data_args_path data_cache_path
    data_parallel_random_init data_parallel_size data_path data_per_class_fraction data_sharding
    dataloader_defer_npy_index_mmap dataloader_fast_cache_load dataloader_prefetch_factor dataloader_save
    dataloader_type ddp_average_in_collective ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw
    decode_only_cuda_graphs decoder_seq_length decoupled_lr decoupled_min_lr decoupled_weight_decay
    decrease_batch_size_if_needed delay_offload_until_cuda_graph deprecated_use_mcore_models
    dino_bottleneck_size dino_freeze_last_layer dino_head_hidden_size dino_local_crops_number
    dino_local_img_size dino_norm_last_layer dino_teacher_temp dino_warmup_teacher_temp
    dino_warmup_teacher_temp_epochs disable_align_grad_reduce disable_bf16_reduced_precision_matmul
    disable_ckpt_load_validate_sharding_integrity disable_clone_scatter_output_in_embedding
    disable_dsa_indexer_rotate_activation disable_dsa_indexer_scoring_relu
    disable_flight_recorder_dump_on_timeout disable_flight_recorder_extra_dump_on_exec
    disable_flight_recorder_include_only_active disable_fp8_wgrad disable_gloo_process_groups
    disable_jit_fuser disable_log_loss_scale_to_tensorboard disable_mamba_mem_eff_path
    disable_mamba_mem_eff_path_in_eval disable_manual_gc_eval disable_msc disable_msc_deprecated
    disable_straggler_on_startup disable_stream_ckpt_dequant disable_strict_fsdp_dtensor_load
    disable_symmetric_registration disable_tokenizer_sentencepiece_ignore_extra_whitespaces
    disable_tp_comm_bulk_dgrad disable_tp_comm_bulk_wgrad disable_tp_comm_overlap_ag
    disable_tp_comm_overlap_rs disable_tp_comm_split_ag disable_tp_comm_split_rs
    disable_use_tokenizer_model_from_checkpoint_args dist_ckpt_format dist_ckpt_format_deprecated
    dist_ckpt_optim_fully_reshardable dist_ckpt_save_pre_mcore_014 dist_ckpt_strictness dist_ckpt_workers
    distrib_optim_fully_reshardable_mem_efficient distributed_backend distributed_init_method
    distributed_timeout_minutes distributed_timeout_seconds_after_init do_test do_train do_valid
    dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32 dsa_indexer_loss_coeff dsa_indexer_rope_interleaved
    dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk_freq
    dsa_kernel_backend dump_param_to_param_group_map embedding_init_method_std embedding_path
    empty_unused_memory_level enable_chunked_prefill enable_experimental enable_ft_package
    enable_gloo_process_groups enable_msc enable_one_logger end_weight_decay eod_mask_loss
    error_injection_rate error_injection_type eval_global_batch_size eval_interval eval_iters
    eval_micro_batch_size evidence_data_path exit_duration_in_mins exit_interval exit_on_missing_checkpoint
    exit_signal exit_signal_handler exit_signal_handler_for_dataloader exit_signal_handler_for_training
    export_te_mcore_model fake_process_group fault_injector_delay_start_iteration fault_injector_fault_delay
    fault_injector_fault_probabilities fault_injector_fault_types fault_injector_mtti_seconds
    fault_injector_num_ranks fault_injector_offset_seconds fault_injector_ranks fault_injector_seed fim_data
    fim_eod_token fim_fragment_rate fim_middle_token fim_no_prefix fim_pad_token fim_prefix_token fim_rate
    fim_split_sample fim_spm_rate fim_suffix_token finetune flash_attention_version flash_decode
    flight_recorder_dump_on_timeout flight_recorder_dump_path flight_recorder_extra_dump_on_exec
    flight_recorder_include_only_active flight_recorder_include_stack_trace flight_recorder_trace_buffer_size
    fp16_lm_cross_entropy_scale fp4_recipe fp8_amax_compute_algo fp8_dot_product_attention_scaling
    fp8_interval fp8_margin fp8_wgrad fsdp_manual_registration ft_num_warmup_iters full_validation
    global_retriever glu_linear_offset gpu_sniff_test_interval grad_accum_wgrad_dtype
    gradient_reduce_div_fusion grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_entropy_term_weight
    grpo_filter_groups_with_same_reward grpo_group_size grpo_iterations grpo_kl_beta grpo_prompts_per_step
    head_lr_mult hetereogenous_dist_checkpoint hidden_activation_clamp hierarchical_context_parallel_sizes
    high_priority_a2a_comm_stream high_priority_stream_groups hysteresis ict_head_size ict_load
    ignore_forward_method img_h img_w indexer_batch_size indexer_log_interval
    inference_batch_times_seqlen_threshold inference_coordinator_port inference_cuda_graph_all_prefills
    inference_cuda_graph_max_tokens inference_cuda_graph_scope inference_disable_ep_consensus
    inference_disable_triton_nvls_kernels inference_dynamic_batching
    inference_dynamic_batching_async_sched_mode inference_dynamic_batching_block_size
    inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_cuda_graph_mixed_prefill_count
    inference_dynamic_batching_cuda_graph_sizing_distribution inference_dynamic_batching_enable_prefix_caching
    inference_dynamic_batching_logprobs_mode inference_dynamic_batching_mamba_memory_ratio
    inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens
    inference_dynamic_batching_num_cuda_graphs inference_dynamic_batching_paused_buffer_size_gb
    inference_dynamic_batching_prefix_caching inference_dynamic_batching_prefix_caching_coordinator_policy
    inference_dynamic_batching_prefix_caching_eviction_policy
    inference_dynamic_batching_prefix_caching_mamba_gb inference_dynamic_batching_prefix_caching_routing_alpha
    inference_dynamic_batching_sampling_backend inference_dynamic_batching_track_generated_token_events
    inference_dynamic_batching_track_paused_request_events inference_dynamic_batching_unified_memory_level
    inference_fuse_tp_communication inference_grouped_gemm_backend inference_logging_step_interval
    inference_max_requests inference_max_seq_length inference_moe_disable_fused_quant_kernels
    inference_moe_token_dispatcher_type inference_rng_tracker inference_sampling_seed inference_shards
    inference_text_gen_server_logging inference_use_synchronous_zmq_collectives inference_wandb_logging
    init_method_std init_method_xavier_uniform init_model_with_meta_device initial_loss_scale
    inprocess_active_world_size inprocess_barrier_timeout inprocess_completion_timeout
    inprocess_empty_cuda_cache inprocess_granularity inprocess_hard_timeout inprocess_heartbeat_interval
    inprocess_heartbeat_timeout inprocess_last_call_wait inprocess_max_iterations
    inprocess_monitor_process_interval inprocess_monitor_thread_interval inprocess_progress_watchdog_interval
    inprocess_restart inprocess_soft_timeout inprocess_termination_grace_time iter_per_epoch iteration
    iterations iterations_to_skip iters_to_accumulate k_seed keep_last label_smoothing langrl_env_config
    layernorm_epsilon layernorm_zero_centered_gamma lazy_mpu_init legacy_muon lion_beta1 lion_beta2 load
    load_main_params_from_ckpt load_model_opt_format local_rank log_device_memory_used log_energy
    log_l2_norm_grad_to_tensorboard log_learning_rate_to_tensorboard log_loss_scale_to_tensorboard
    log_max_attention_logit log_memory_interval log_memory_to_tensorboard log_num_zeros_in_grad log_progress
    log_straggler log_throughput log_timers_to_tensorboard log_validation_ppl_to_tensorboard
    log_world_size_to_tensorboard logging_level logging_module_filter logging_rank logits_load_decode_threads
    logits_load_ignore_errors logits_load_kd_loss_alpha logits_load_msc_prefetch_depth
    logits_load_prefetch_factor logits_save_dir logits_save_dtype logits_save_top_k logits_save_top_p
    logits_save_top_p_min_k loss_scale loss_scale_window lr lr_decay_iters lr_decay_samples lr_decay_style
    lr_warmup_fraction lr_warmup_init lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters
    lr_wsd_decay_samples lr_wsd_decay_style main_logging mamba_inference_conv_states_dtype
    mamba_inference_ssm_states_dtype manual_gc manual_gc_eval manual_gc_interval mask_factor mask_prob
    mask_type max_tokens_to_oom memory_snapshot_path merge_file metadata_path mid_level_dataset_surplus
    min_loss_scale min_lr mlp_chunks_for_prefill mmap_bin_files mock_data model_name model_parallel_size
    moe_deepep_num_sms moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute
    moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing
    moe_input_feature_slicing moe_input_jitter_eps moe_mlp_glu_interleave_size
    moe_pad_experts_for_cuda_graph_inference moe_paged_stash_buffer_size_factor_cpu
    moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size moe_per_layer_logging
    moe_permute_padding_for_fp8_quantization moe_router_bias_update_rate moe_router_force_biased
    moe_router_force_load_balancing moe_router_padding_for_fp8 moe_router_padding_for_quantization
    moe_router_pre_softmax moe_router_quantile_balancing_ema moe_router_topk_limited_devices
    moe_router_topk_scaling_factor moe_routing_trace_capture_hidden_states moe_routing_trace_capture_logits
    moe_routing_trace_dump_weights moe_routing_trace_max_training_iters moe_routing_trace_path
    moe_shared_expert_glu_interleave_size moe_single_grouped_bias moe_single_grouped_weight
    moe_token_drop_policy moe_token_dropping moe_upcycling_granularity moe_use_legacy_grouped_gemm
    moe_use_upcycling moe_z_loss_coeff mrope_section mscale mscale_all_dim mtp_loss_scaling_factor
    multiple_validation_sets muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec muon_momentum
    muon_nesterov muon_no_split_qkv muon_num_ns_steps muon_scalar_optimizer muon_scale_mode muon_split_qkv
    muon_tp_mode muon_use_nesterov mup_attn_scale_power mup_base_head_dim mup_base_hidden_size
    mup_embedding_mult mup_output_mult mup_width_mult nccl_all_reduce_for_prefill
    nccl_communicator_config_path no_align_grad_reduce no_align_param_gather
    no_async_tensor_model_parallel_allreduce no_barrier_with_level_1_timing no_batch_p2p_comm
    no_check_for_nan_in_loss_and_grad no_check_for_spiky_loss no_ckpt_fully_parallel_save
    no_ckpt_load_validate_sharding_integrity no_clone_scatter_output_in_embedding no_data_sharding
    no_dist_ckpt_validation no_dsa_indexer_rotate_activation no_dsa_indexer_scoring_relu
    no_flight_recorder_dump_on_timeout no_flight_recorder_extra_dump_on_exec
    no_flight_recorder_include_only_active no_fp8_wgrad no_gradient_reduce_div_fusion
    no_inference_disable_ep_consensus no_inference_dynamic_batching_prefix_caching
    no_inference_text_gen_server_logging no_inference_use_synchronous_zmq_collectives
    no_inference_wandb_logging no_initialization no_load_optim no_load_rng no_log_learnig_rate_to_tensorboard
    no_log_loss_scale_to_tensorboard no_manual_gc_eval no_mmap_bin_files no_one_logger
    no_overlap_p2p_communication no_persist_layer_norm no_pin_cpu_grads no_pin_cpu_params
    no_position_embedding no_rl_inference_logprobs_is_correction
    no_rl_offload_inference_model_weights_when_idle no_rl_partial_rollouts no_rl_persist_cuda_graphs
    no_rl_skip_bos_token no_rl_training_cuda_graphs no_rl_use_sequence_packing no_rl_verify_model_weights_swap
    no_rope_freq no_save_optim no_save_rng no_scatter_gather_tensors_in_pipeline no_stream_ckpt_dequant
    no_strict_fsdp_dtensor_load no_tokenizer_sentencepiece_ignore_extra_whitespaces no_tp_comm_bulk_dgrad
    no_tp_comm_bulk_wgrad no_tp_comm_overlap_ag no_tp_comm_overlap_rs no_tp_comm_split_ag no_tp_comm_split_rs
    no_use_layer_wise_param_layout no_use_tokenizer_from_checkpoint_args
    no_use_tokenizer_model_from_checkpoint_args no_weight_decay_cond_type
    no_yarn_correction_range_round_to_int non_persistent_ckpt_type non_persistent_global_ckpt_dir
    non_persistent_local_ckpt_algo non_persistent_local_ckpt_dir non_persistent_save_interval norm_epsilon
    null_tokenizer null_tokenizer_eod_id null_tokenizer_pad_id num_channels num_classes
    num_dataset_builder_threads num_floating_point_operations_so_far num_speculative_tokens num_workers
    nvtx_ranges object_storage_cache_path offset_sampling_seed_by_dp_rank one_logger_async one_logger_project
    one_logger_run_name onnx_safe openai_gelu optimizer_offload_auto original_max_position_embeddings
    output_bert_embeddings overlap_cpu_optimizer_d2h_h2d overlap_p2p_comm overlap_p2p_comm_warmup_flush
    overlap_p2p_communication_warmup_flush overlap_param_gather_with_optimizer_step override_ckpt_iteration
    override_opt_param_scheduler pad_buckets_for_high_nccl_busbw params_dtype patch_dim
    per_dataset_sequences_path per_split_data_args_path perform_initialization persistent_save_interval
    phase_transition_iterations pin_cpu_grads pin_cpu_params prefix pretrained_checkpoint
    pretrained_checkpoint_format profile profile_ranks profile_step_end profile_step_start
    pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra pytorch_profiler_collect_shapes qk_clip
    qk_clip_alpha qk_clip_threshold query_in_block_prob rampup_batch_size rank record_memory_history
    record_shapes refit_method relative_attention_max_distance relative_attention_num_buckets replication
    replication_factor replication_jump rerun_mode reset_attention_mask reset_position_ids
    result_rejected_tracker_filename retriever_report_topk_accuracies retriever_score_scaling
    retro_add_retriever rl_consumption_granularity rl_default_temperature rl_default_top_k rl_default_top_p
    rl_generation_lag rl_importance_sampling_truncation_coef rl_inference_expert_model_parallel_size
    rl_inference_expert_tensor_model_parallel_size rl_inference_logprobs_is_correction
    rl_inference_model_unified_memory_level rl_inference_parsers rl_inference_pipeline_model_parallel_size
    rl_inference_tensor_model_parallel_size rl_kv_cache_management_mode
    rl_offload_inference_model_weights_when_idle rl_partial_rollouts rl_persist_cuda_graphs rl_profile
    rl_profile_dir rl_prompts_per_eval rl_sequence_packing_algo rl_sequence_packing_max_sequences_per_bin
    rl_skip_bos_token rl_submission_granularity rl_training_cuda_graphs rl_use_sequence_packing
    rl_verify_model_weights_swap rope_scaling rope_scaling_factor rope_type rotary_base rotary_interleaved
    rotary_scaling rotary_scaling_factor rotary_seq_len_interpolation_factor run_workload_inspector_server
    safe_mode sample_rate save save_activations_interval save_dgrads_interval save_interval
    save_params_interval save_retain_interval save_tokens_per_expert_interval save_wgrads_interval seed
    sft_tokenizer_prompt_format sharp_enabled_group short_seq_prob skip_samples skip_train
    skipped_train_samples softmax_scale special_tokens spiky_loss_factor split split_spec start_eval_at_iter
    start_weight_decay step_batch_size_schedule straggler_ctrlr_port straggler_minmax_count
    stream_ckpt_dequant strict_fsdp_dtensor_load swin_backbone_type
    symmetric_ar_type te_rng_tracker tensorboard_dir tensorboard_log_interval tensorboard_queue_size
    test_data_path test_mode tiktoken_num_special_tokens tiktoken_pattern tiktoken_special_tokens
    timing_log_level timing_log_option titles_data_path tokenizer_hf_include_special_tokens
    tokenizer_hf_no_include_special_tokens tokenizer_hf_no_use_fast tokenizer_hf_use_fast tokenizer_metadata
    tokenizer_model tokenizer_prompt_format tokenizer_sentencepiece_ignore_extra_whitespaces
    tokenizer_sentencepiece_legacy tokenizer_special_tokens torch_fsdp2_no_reshard_after_forward
    torch_fsdp2_reshard_after_forward tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend
    tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_cfg tp_comm_overlap_disable_fc1
    tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs
    tp_only_amax_red train_data_path train_iters train_samples train_sync_interval
    transformer_pipeline_model_parallel_size trust_remote_code use_checkpoint_args
    use_checkpoint_opt_param_scheduler use_cpu_initialization use_dist_ckpt use_dist_ckpt_deprecated
    use_flash_attn use_gloo_process_groups use_inference_optimized_layers use_layer_wise_param_layout
    use_legacy_static_engine use_mamba_mem_eff_path use_mcore_models use_mp_args_from_checkpoint_args use_mup
    use_nccl_communicator use_one_sent_docs use_persistent_ckpt_worker use_pytorch_profiler
    use_ring_exchange_p2p use_rope_scaling use_same_sampling_seed_across_dp_ranks use_sharp
    use_te_activation_func use_te_rng_tracker use_tokenizer_model_from_checkpoint_args
    use_torch_optimizer_for_cpu_offload use_tp_pp_dp_mapping valid_data_path validation_set_names
    verify_integrity vision_backbone_type vision_pretraining vision_pretraining_type vocab_extra_ids
    vocab_file wandb_entity wandb_exp_name wandb_project wandb_save_dir warmup weight_decay
    weight_decay_incr_style wgrad_deferral_limit yaml_cfg yarn_beta_fast yarn_beta_slow
    yarn_correction_range_round_to_int yarn_original_max_position_embeddings
    """
)


def _on(value: Value) -> bool:
    return value not in (False, 0, "0", "none", "None", [], "[]")


def _not(*harmless: str) -> Callable[[Value], bool]:
    return lambda value: str(value) not in harmless


#: Arguments that change memory in a way the estimate does not count: when it applies, and what it would
#: change.
GAPS: dict[str, tuple[Callable[[Value], bool], str]] = {
    "activation_offload_fraction": (_not("1.0", "1"), "a part of the activations in host memory"),
    "ddp_param_name_patterns_for_fp32_local_accumulation": (_on, "fp32 sums of some gradients beside bf16 buffers"),
    "dataloader_inter_document_masking": (_on, "packed sequences of varying length"),
    "delta_offload_bytes_across_pp_ranks": (_not("0"), "offloading that differs by pipeline rank"),
    "enable_full_sharding_in_hsdp": (_on, "hybrid sharding over an outer data-parallel group"),
    "expert_gtp_weight_remat_size": (_not("1"), "expert weights that are sharded further and gathered (GTP)"),
    "expert_tensor_parallel_num_weight_shards": (_on, "expert weights that are sharded further and gathered (GTP)"),
    "fine_grained_offloading_max_inflight_offloads": (_on, "offloaded tensors that wait for their copy"),
    "fp4_quantizer_factory": (_on, "quantisation of the user's own"),
    "fp8_output_proj": (_on, "the output layer in fp8"),
    "fp8_quantizer_factory": (_on, "quantisation of the user's own"),
    "freeze_all_layers": (_on, "frozen layers"),
    "fsdp_db_use_persist_buf_on_alloc_fail": (_on, "Megatron-FSDP keeps more persistent buffers"),
    "fused_residual_rmsnorm": (_on, "another norm kernel"),
    "gtp_weight_remat_size": (_not("1"), "weights that are sharded further and gathered (GTP)"),
    "logits_load_dir": (_on, "a teacher's logits"),
    "mamba_training_ssm_states_dtype": (_on, "Mamba's states between chunks of another dtype"),
    "megatron_fsdp_enable_fine_grained_param_gather": (_on, "Megatron-FSDP gathers parameters module by module"),
    "megatron_fsdp_max_pool_double_buffer": (_on, "Megatron-FSDP keeps two persistent communication buffers"),
    "mla_down_proj_fusion": (_on, "one down-projection of queries, keys and values"),
    "mlp_chunks_for_training": (_not("1"), "the MLP a piece of the sequence at a time"),
    "moe_expert_rank_capacity_factor": (_on, "a token budget a rank"),
    "moe_hybridep_pad_uneven_dispatch_inputs": (_on, "padded tokens of HybridEP"),
    "moe_ncclep_static_shape": (_on, "receive buffers of full size"),
    "moe_ncclep_zero_copy": (_on, "buffers in NCCL's symmetric memory"),
    "moe_paged_stash": (_on, "expert activations in pages"),
    "moe_permute_fusion_into_hybridep": (_on, "tokens put in order by HybridEP"),
    "mtp_detach_heads": (_on, "MTP without gradients to the main model"),
    "mtp_hybrid_override_pattern": (_on, "MTP depths with layers of their own"),
    "optimizer_cuda_graph": (_on, "the optimizer step as a CUDA graph"),
    "overlap_dispatch_backward_with_experts_wgrad": (_on, "inputs of experts that wait for their weight gradients"),
    "perform_rl_step": (_on, "reinforcement learning with inference in between"),
    "te_precision_config_file": (_on, "precision module by module"),
    "tensor_parallel_num_weight_shards": (_on, "weights that are sharded further and gathered (GTP)"),
    "use_grouped_gemm_for_dense_mlp": (_on, "a dense MLP through the grouped GEMM"),
    "use_grouped_gemm_for_shared_expert": (_on, "shared experts through the grouped GEMM"),
    "use_torch_fsdp2": (_on, "PyTorch FSDP2 shards and gathers parameters its own way"),
    "tp_comm_overlap": (_on, "user buffers of tensor-parallel overlap are allocated by Transformer Engine"),
    "nccl_ub": (_on, "gradient and parameter buffers come from NCCL's own memory pool"),
    "fsdp_double_buffer": (_on, "Megatron-FSDP keeps two persistent communication buffers"),
    "outer_dp_sharding_strategy": (_not("no_shard"), "hybrid sharding over an outer data-parallel group"),
    "megatron_fsdp_main_params_dtype": (_not("fp32", "torch.float32"), "main parameters of another dtype"),
    "export_kd_teacher_load": (_on, "knowledge distillation holds a second (teacher) model"),
    "export_kd_cfg": (_on, "knowledge distillation holds a second (teacher) model and its loss"),
    "export_kd_teacher_ckpt_format": (_on, "knowledge distillation holds a second (teacher) model"),
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
    "heterogeneous_layers_config_path": (_on, "layers of different shapes, read from a file"),
    "heterogeneous_layers_config_encoded_json": (_on, "layers of different shapes"),
    "moe_extended_tp": (_on, "the removed extended-TP sharding of experts"),
    "moe_router_replay": (_on, "the recorded routing of every microbatch"),
    "enable_hyper_connections": (_on, "several residual streams (hyper-connections)"),
    "num_residual_streams": (_not("1"), "several residual streams (hyper-connections)"),
    "cpu_offloading_activations": (_not("True", "true"), "which tensors go to host memory"),
    "cpu_offloading_weights": (_on, "weights in host memory"),
    "cpu_offloading_double_buffering": (_on, "a second buffer for what comes back from host memory"),
    "min_offloaded_tensor_size": (_not("1048576"), "which tensors go to host memory"),
    "num_microbatches_with_partial_activation_checkpoints": (_on, "recomputation of some microbatches only"),
    "memory_efficient_layer_norm": (_on, "norms that keep their output instead of their input"),
    "activation_func_fp8_input_store": (_on, "activation inputs kept in fp8"),
    "disable_parameter_transpose_cache": (_on, "no cached transposes of fp8 weights"),
    "keep_fp8_transpose_cache": (_on, "cached transposes of fp8 weights under FSDP"),
    "keep_fp8_transpose_cache_when_using_custom_fsdp": (_on, "cached transposes of fp8 weights under FSDP"),
    "preserve_fp32_weights": (_not("True", "true"), "no fp32 main parameters under FSDP"),
    "reduce_scatter_with_fp32_accumulation": (_on, "another gradient reduction with buffers of its own"),
    "reuse_grad_buf_for_mxfp8_param_ag": (_on, "parameters gathered in the gradient buffer"),
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
}


#: Set by ``validate_args`` to what they mean anyway where nobody asks for them.
_FILLED_IN = _names("tensor_parallel_num_weight_shards expert_tensor_parallel_num_weight_shards")


class Arguments:
    """Typed access by destination; asking for a name outside ``READ`` is a programming error."""

    def __init__(self, raw: RawArguments) -> None:
        self.env = raw.env
        self.parsed = raw.parsed
        self._values = _of_any_release(raw.values) if raw.parsed else by_destination(raw.values)

    def __getitem__(self, name: str) -> Any:
        """The argument's value, or Megatron-LM's default. Raises SpecError for a value of another kind."""
        value = self._values.get(name)
        if name in OFF or name in ON:
            return name in ON if value is None else _is_on(value)
        default, read = _READERS[name]
        # "none" is a value of its own where a word is the default.
        unset = ("None", "null") if isinstance(default, str | tuple) else ("None", "null", "none")
        return default if value is None or str(value) in unset else read(name, value)

    def given(self, name: str) -> bool:
        assert name in READ, name
        return name in self._values

    def required(self, *names: str) -> Any:
        """The first of ``names`` that is set. Raises SpecError naming the last."""
        for name in names:
            if (value := self[name]) is not None:
                return value
        raise SpecError(f"{_option(names[-1])} is missing from the Megatron arguments; add it")

    def not_modelled(self) -> tuple[str, ...]:
        """One line for every argument that changes memory and is not counted, or that nobody here knows."""
        lines = []
        for name, value in self._values.items():
            if name in GAPS and not (self.parsed and name in _FILLED_IN):
                applies, why = GAPS[name]
                if applies(value):
                    lines.append(f"{_option(name)} {'' if value is True else value}".rstrip() + f": {why}")
            elif name not in READ | HARMLESS | GAPS.keys() and not (self.parsed and not value):
                lines.append(f"{_option(name)}: not an argument this reader knows")
        return tuple(lines)


def by_destination(options: dict[str, Value]) -> dict[str, Value]:
    """Options as they are written -> destinations. An option that is off says nothing, except of a destination."""
    values: dict[str, Value] = {}
    for option, value in options.items():
        name = SWITCHED_OFF_BY.get(option)
        if name is None and option not in READ | HARMLESS | GAPS.keys():
            bare = re.sub("^(no|disable)_", "", option)
            name = bare if bare != option and (bare in READ or bare in GAPS) else None
        if name is not None:
            if _is_on(value):
                values[name] = False
        elif value is not False or option in ON:
            values[DESTINATIONS.get(option, option)] = value
    return values


def _of_any_release(values: dict[str, Value]) -> dict[str, Value]:
    """Destinations under their newest name (``use_custom_fsdp`` became ``use_megatron_fsdp``, which sets both)."""
    renamed = {DESTINATIONS[name]: value for name, value in values.items() if name in DESTINATIONS}
    return {**renamed, **{name: value for name, value in values.items() if name not in DESTINATIONS}}


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_on(value: Value) -> bool:
    return str(value).lower() not in ("false", "0", "none", "null", "no", "")


def _whole(name: str, value: Value) -> int:
    try:
        number = float(str(value))
        if number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise SpecError(f"{_option(name)} is {value!r}, not a whole number; give one")


def _number(name: str, value: Value) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise SpecError(f"{_option(name)} is {value!r}, not a number; give one") from None


def _text(name: str, value: Value) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _words(name: str, value: Value) -> tuple[str, ...]:
    return tuple(words_of(value))


def _pattern(name: str, value: Value) -> Any:
    """Numbers and lists of numbers as such, expressions as text."""
    return _text(name, value) if isinstance(value, list) and any(isinstance(x, str) for x in value) else value


#: Argument -> (its default, how its value is read).
_READERS: dict[str, tuple[Any, Callable[[str, Value], Any]]] = {
    name: (default, read)
    for defaults, read in (
        (INTEGERS, _whole), (NUMBERS, _number), (WORDS, _text), (LISTS, _words), (PATTERNS, _pattern),
    )
    for name, default in defaults.items()
}  # fmt: skip
