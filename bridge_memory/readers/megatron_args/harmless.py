"""Arguments of Megatron-LM that do not change what a training step allocates on the GPU, grouped by reason.

Names are argparse's destinations, and also options of releases up to 0.16, whose wheels do not contain the parser.
"""

from __future__ import annotations

#: Reason -> the arguments that are harmless for this reason.
REASONS: dict[str, str] = {
    "the details of an option that is read, or reported if it is set": """
        cpu_offloading_retain_pinned_cpu_buffers cuda_graph_retain_backward_graph
        cuda_graph_use_single_mempool cuda_graph_warmup_steps
        decode_only_cuda_graphs disable_symmetric_registration disable_tp_comm_bulk_dgrad disable_tp_comm_bulk_wgrad
        disable_tp_comm_overlap_ag disable_tp_comm_overlap_rs disable_tp_comm_split_ag disable_tp_comm_split_rs
        dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32
        dsa_indexer_rope_interleaved fp4_recipe
        fp8_dot_product_attention_scaling fsdp_manual_registration hierarchical_context_parallel_sizes
        logits_load_decode_threads logits_load_ignore_errors logits_load_kd_loss_alpha
        logits_load_msc_prefetch_depth logits_load_prefetch_factor logits_save_dtype logits_save_top_k
        logits_save_top_p logits_save_top_p_min_k
        moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_num_sms_preprocessing moe_paged_stash_buffer_size_factor_cpu
        moe_paged_stash_page_size moe_routing_trace_capture_hidden_states
        moe_routing_trace_capture_logits moe_routing_trace_dump_weights moe_routing_trace_max_training_iters
        moe_upcycling_granularity mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult
        mup_output_mult mup_width_mult no_pin_cpu_grads
        no_pin_cpu_params no_tp_comm_bulk_dgrad no_tp_comm_bulk_wgrad no_tp_comm_overlap_ag no_tp_comm_overlap_rs
        no_tp_comm_split_ag no_tp_comm_split_rs pin_cpu_grads pin_cpu_params qk_clip_alpha qk_clip_threshold
        replication_factor replication_jump sharp_enabled_group torch_fsdp2_no_reshard_after_forward
        torch_fsdp2_reshard_after_forward tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend
        tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_cfg tp_comm_overlap_disable_fc1
        tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs
    """,
    "reinforcement learning, with --perform-rl-step, which is reported": """
        grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_entropy_term_weight grpo_filter_groups_with_same_reward
        grpo_group_size grpo_iterations grpo_kl_beta grpo_prompts_per_step langrl_env_config
        no_rl_inference_logprobs_is_correction no_rl_offload_inference_model_weights_when_idle
        no_rl_partial_rollouts no_rl_persist_cuda_graphs no_rl_skip_bos_token no_rl_training_cuda_graphs
        no_rl_use_sequence_packing no_rl_verify_model_weights_swap refit_method rl_consumption_granularity
        rl_default_temperature rl_default_top_k rl_default_top_p rl_generation_batch_size rl_generation_lag
        rl_importance_sampling_truncation_coef rl_inference_expert_model_parallel_size
        rl_inference_expert_tensor_model_parallel_size rl_inference_logprobs_is_correction
        rl_inference_model_unified_memory_level rl_inference_parsers rl_inference_pipeline_model_parallel_size
        rl_inference_tensor_model_parallel_size rl_kv_cache_management_mode rl_num_parallel_generation_batches
        rl_num_parallel_generations rl_offload_inference_model_weights_when_idle rl_parallel_generation_tasks
        rl_partial_rollouts rl_persist_cuda_graphs rl_profile rl_profile_dir rl_prompts_per_eval
        rl_sequence_packing_algo rl_sequence_packing_max_sequences_per_bin rl_skip_bos_token
        rl_submission_granularity rl_training_cuda_graphs rl_use_sequence_packing rl_verify_model_weights_swap
    """,
    "inference, which training steps do not do": """
        cache_mla_latents cache_mla_latents_for_training disable_mamba_mem_eff_path_in_eval enable_chunked_prefill
        flash_decode inference_batch_times_seqlen_threshold inference_coordinator_port
        inference_cuda_graph_all_prefills inference_cuda_graph_max_tokens inference_cuda_graph_scope
        inference_disable_ep_consensus inference_disable_triton_nvls_kernels inference_dynamic_batching
        inference_dynamic_batching_async_sched_mode inference_dynamic_batching_block_size
        inference_dynamic_batching_buffer_size_gb inference_dynamic_batching_cuda_graph_max_tokens
        inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution inference_dynamic_batching_enable_prefix_caching
        inference_dynamic_batching_logprobs_mode inference_dynamic_batching_mamba_memory_ratio
        inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens
        inference_dynamic_batching_num_cuda_graphs inference_dynamic_batching_paused_buffer_size_gb
        inference_dynamic_batching_prefix_caching inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_eviction_policy inference_dynamic_batching_prefix_caching_mamba_gb
        inference_dynamic_batching_prefix_caching_routing_alpha inference_dynamic_batching_sampling_backend
        inference_dynamic_batching_track_generated_token_events
        inference_dynamic_batching_track_paused_request_events inference_dynamic_batching_unified_memory_level
        inference_fuse_tp_communication inference_grouped_gemm_backend inference_logging_step_interval
        inference_max_requests inference_max_seq_length inference_moe_disable_fused_quant_kernels
        inference_moe_token_dispatcher_type inference_rng_tracker inference_sampling_seed inference_shards
        inference_text_gen_server_logging inference_use_synchronous_zmq_collectives inference_wandb_logging
        mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype max_tokens_to_oom mlp_chunks_for_prefill
        moe_pad_experts_for_cuda_graph_inference nccl_all_reduce_for_prefill no_inference_disable_ep_consensus
        no_inference_dynamic_batching_prefix_caching no_inference_text_gen_server_logging
        no_inference_use_synchronous_zmq_collectives no_inference_wandb_logging num_speculative_tokens
        offset_sampling_seed_by_dp_rank use_inference_optimized_layers use_legacy_static_engine
        use_same_sampling_seed_across_dp_ranks
    """,
    "checkpoints: what is read and written between training steps": """
        async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cached_metadata async_ckpt_use_cpu_shm
        async_strategy auto_detect_ckpt_format ckpt_assume_constant_structure ckpt_convert_format ckpt_convert_save
        ckpt_convert_update_legacy_dist_opt_format ckpt_fully_parallel_load_exchange_algo
        ckpt_fully_parallel_load_process_group ckpt_fully_parallel_save_deprecated
        ckpt_fully_parallel_save_process_group ckpt_load_validate_sharding_integrity ckpt_step
        disable_ckpt_load_validate_sharding_integrity disable_strict_fsdp_dtensor_load dist_ckpt_format
        dist_ckpt_format_deprecated dist_ckpt_save_pre_mcore_014 dist_ckpt_strictness dist_ckpt_workers
        exit_on_missing_checkpoint hetereogenous_dist_checkpoint keep_last load load_main_params_from_ckpt
        load_model_opt_format no_ckpt_load_validate_sharding_integrity no_dist_ckpt_validation no_load_rng no_save_rng
        no_strict_fsdp_dtensor_load non_persistent_ckpt_type non_persistent_global_ckpt_dir
        non_persistent_local_ckpt_algo non_persistent_local_ckpt_dir non_persistent_save_interval
        override_ckpt_iteration override_opt_param_scheduler persistent_save_interval pretrained_checkpoint
        pretrained_checkpoint_format safe_mode save save_interval save_retain_interval save_tokens_per_expert_interval
        strict_fsdp_dtensor_load use_checkpoint_opt_param_scheduler use_dist_ckpt use_dist_ckpt_deprecated
        verify_integrity
    """,
    "tokenizers: the size of the vocabulary is read": """
        allow_ambiguous_pad_tokens chat_template disable_tokenizer_sentencepiece_ignore_extra_whitespaces
        disable_use_tokenizer_model_from_checkpoint_args merge_file metadata_path
        no_tokenizer_sentencepiece_ignore_extra_whitespaces no_use_tokenizer_from_checkpoint_args
        no_use_tokenizer_model_from_checkpoint_args null_tokenizer null_tokenizer_eod_id null_tokenizer_pad_id
        sft_tokenizer_prompt_format special_tokens tiktoken_num_special_tokens tiktoken_pattern
        tiktoken_special_tokens tokenizer_hf_include_special_tokens tokenizer_hf_no_include_special_tokens
        tokenizer_hf_no_use_fast tokenizer_hf_use_fast tokenizer_metadata tokenizer_model tokenizer_prompt_format
        tokenizer_sentencepiece_ignore_extra_whitespaces tokenizer_sentencepiece_legacy tokenizer_special_tokens
        trust_remote_code use_tokenizer_model_from_checkpoint_args vocab_extra_ids vocab_file
    """,
    "other programs than pretrain_gpt and pretrain_hybrid: BERT, T5, ICT, RETRO, vision": """
        bert_binary_head bert_embedder_type bert_load bert_no_binary_head biencoder_projection_dim
        biencoder_shared_query_context_model block_data_path classes_fraction cross_attention
        data_per_class_fraction decoder_seq_length dino_bottleneck_size dino_freeze_last_layer dino_head_hidden_size
        dino_local_crops_number dino_local_img_size dino_norm_last_layer dino_teacher_temp dino_warmup_teacher_temp
        dino_warmup_teacher_temp_epochs embedding_path evidence_data_path global_retriever head_lr_mult
        ict_head_size ict_load img_h img_w indexer_batch_size indexer_log_interval iter_per_epoch mask_factor
        mask_prob mask_type mrope_section num_channels num_classes output_bert_embeddings patch_dim
        query_in_block_prob relative_attention_max_distance relative_attention_num_buckets
        retriever_report_topk_accuracies retriever_score_scaling retro_add_retriever sample_rate short_seq_prob
        swin_backbone_type titles_data_path use_one_sent_docs vision_backbone_type vision_pretraining
        vision_pretraining_type
    """,
    "data: where tokens come from, on the host": """
        data_args_path data_cache_path data_path data_sharding dataloader_defer_npy_index_mmap
        dataloader_fast_cache_load dataloader_prefetch_factor dataloader_save dataloader_type disable_msc
        disable_msc_deprecated enable_msc eod_mask_loss fim_data fim_eod_token fim_fragment_rate fim_middle_token
        fim_no_prefix fim_pad_token fim_prefix_token fim_rate fim_split_sample fim_spm_rate fim_suffix_token
        full_validation mid_level_dataset_surplus mmap_bin_files mock_data multiple_validation_sets no_data_sharding
        no_mmap_bin_files num_dataset_builder_threads num_workers object_storage_cache_path
        per_dataset_sequences_path per_split_data_args_path phase_transition_iterations prefix reset_attention_mask
        reset_position_ids result_rejected_tracker_filename split split_spec test_data_path train_data_path
        valid_data_path validation_set_names
    """,
    "logs, timers and profiles": """
        app_tag_run_name app_tag_run_version barrier_with_L1_time check_for_large_grads check_for_nan_in_grad
        check_for_nan_in_loss_and_grad check_for_spiky_loss check_weight_hash_across_dp_replicas_interval
        config_logger_dir disable_flight_recorder_dump_on_timeout disable_flight_recorder_extra_dump_on_exec
        disable_flight_recorder_include_only_active disable_log_loss_scale_to_tensorboard
        disable_straggler_on_startup dump_param_to_param_group_map enable_one_logger flight_recorder_dump_on_timeout
        flight_recorder_dump_path flight_recorder_extra_dump_on_exec flight_recorder_include_only_active
        flight_recorder_include_stack_trace flight_recorder_trace_buffer_size log_device_memory_used log_energy
        log_l2_norm_grad_to_tensorboard log_learning_rate_to_tensorboard log_loss_scale_to_tensorboard
        log_memory_interval log_memory_to_tensorboard log_num_zeros_in_grad log_progress log_straggler
        log_throughput log_timers_to_tensorboard log_validation_ppl_to_tensorboard log_world_size_to_tensorboard
        logging_level logging_module_filter logging_rank main_logging memory_snapshot_path moe_per_layer_logging
        no_barrier_with_level_1_timing no_check_for_nan_in_loss_and_grad no_check_for_spiky_loss
        no_flight_recorder_dump_on_timeout no_flight_recorder_extra_dump_on_exec
        no_flight_recorder_include_only_active no_log_learnig_rate_to_tensorboard no_log_loss_scale_to_tensorboard
        no_one_logger num_floating_point_operations_so_far nvtx_ranges one_logger_async one_logger_project
        one_logger_run_name profile profile_ranks profile_step_end profile_step_start
        pytorch_profiler_collect_callstack pytorch_profiler_collect_chakra pytorch_profiler_collect_shapes
        record_memory_history record_shapes run_workload_inspector_server spiky_loss_factor straggler_ctrlr_port
        straggler_minmax_count tensorboard_dir tensorboard_log_interval tensorboard_queue_size timing_log_level
        timing_log_option use_pytorch_profiler wandb_entity wandb_exp_name wandb_project wandb_save_dir
    """,
    "launch, signals, failures and restarts": """
        adlr_autoresume adlr_autoresume_interval calc_ft_timeouts disable_gloo_process_groups disable_manual_gc_eval
        distributed_backend distributed_init_method distributed_timeout_minutes
        distributed_timeout_seconds_after_init empty_unused_memory_level enable_experimental enable_ft_package
        enable_gloo_process_groups error_injection_rate error_injection_type exit_duration_in_mins exit_interval
        exit_signal exit_signal_handler exit_signal_handler_for_dataloader exit_signal_handler_for_training
        fake_process_group fault_injector_delay_start_iteration fault_injector_fault_delay
        fault_injector_fault_probabilities fault_injector_fault_types fault_injector_mtti_seconds
        fault_injector_num_ranks fault_injector_offset_seconds fault_injector_ranks fault_injector_seed
        ft_num_warmup_iters high_priority_a2a_comm_stream high_priority_stream_groups inprocess_active_world_size
        inprocess_barrier_timeout inprocess_completion_timeout inprocess_empty_cuda_cache inprocess_granularity
        inprocess_hard_timeout inprocess_heartbeat_interval inprocess_heartbeat_timeout inprocess_last_call_wait
        inprocess_max_iterations inprocess_monitor_process_interval inprocess_monitor_thread_interval
        inprocess_progress_watchdog_interval inprocess_restart inprocess_soft_timeout
        inprocess_termination_grace_time lazy_mpu_init local_rank manual_gc manual_gc_eval manual_gc_interval
        model_name no_manual_gc_eval rank rerun_mode test_mode train_sync_interval use_gloo_process_groups
        use_tp_pp_dp_mapping
    """,
    "when training starts, stops, skips and evaluates": """
        consumed_train_samples consumed_valid_samples curr_iteration decrease_batch_size_if_needed do_test do_train
        do_valid eval_global_batch_size eval_interval eval_iters iteration iterations iterations_to_skip
        iters_to_accumulate rampup_batch_size skip_samples skipped_train_samples start_eval_at_iter
        step_batch_size_schedule train_iters train_samples
    """,
    "numbers of the optimizer and its schedule": """
        adaptive_muon_beta2 adaptive_muon_eps adaptive_muon_moment2_method soap_precondition_frequency
        soap_shampoo_beta soap_use_kl_shampoo grad_norm_skip_threshold
        adam_beta1 adam_beta2 adam_eps apply_wd_to_qk_layernorm decoupled_lr decoupled_min_lr
        decoupled_weight_decay end_weight_decay hysteresis initial_loss_scale label_smoothing legacy_muon lion_beta1
        lion_beta2 loss_scale loss_scale_window lr lr_decay_iters lr_decay_samples lr_decay_style lr_warmup_fraction
        lr_warmup_init lr_warmup_iters lr_warmup_samples lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style
        min_loss_scale min_lr muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec muon_momentum
        muon_nesterov muon_no_split_qkv muon_num_ns_steps muon_scale_mode muon_split_qkv muon_use_nesterov
        no_weight_decay_cond_type start_weight_decay weight_decay weight_decay_incr_style
    """,
    "the values that weights start from": """
        data_parallel_random_init embedding_init_method_std init_method_std init_method_xavier_uniform
        init_model_with_meta_device k_seed no_initialization perform_initialization seed te_rng_tracker
        use_cpu_initialization use_te_rng_tracker
    """,
    "numbers in a kernel whose tensors are the same": """
        adaptive_layernorm_epsilon apply_layernorm_1p beta_fast beta_slow disable_bf16_reduced_precision_matmul
        fp16_lm_cross_entropy_scale fp8_amax_compute_algo fp8_interval fp8_margin glu_linear_offset
        layernorm_epsilon layernorm_zero_centered_gamma moe_router_bias_update_rate moe_router_force_load_balancing
        moe_router_pre_softmax moe_router_quantile_balancing_ema moe_router_topk_scaling_factor
        moe_token_drop_policy mscale mscale_all_dim mtp_loss_scaling_factor no_persist_layer_norm
        no_yarn_correction_range_round_to_int norm_epsilon original_max_position_embeddings rope_scaling
        rope_scaling_factor rope_type rotary_base rotary_interleaved rotary_scaling rotary_scaling_factor
        rotary_seq_len_interpolation_factor softmax_scale tp_only_amax_red use_rope_scaling yarn_beta_fast
        yarn_beta_slow yarn_correction_range_round_to_int yarn_original_max_position_embeddings
    """,
    "how and when ranks talk, in buffers that are counted": """
        align_grad_reduce align_param_gather async_tensor_model_parallel_allreduce average_in_collective
        batch_p2p_comm batch_p2p_communication batch_p2p_sync ddp_average_in_collective disable_align_grad_reduce
        gradient_reduce_div_fusion no_align_grad_reduce no_align_param_gather
        no_async_tensor_model_parallel_allreduce no_batch_p2p_comm no_gradient_reduce_div_fusion
        no_overlap_p2p_communication no_scatter_gather_tensors_in_pipeline overlap_p2p_comm
        scatter_gather_tensors_in_pipeline use_ring_exchange_p2p
    """,
    "mxfp8 parameters are gathered in the gradient buffer in any case (param_and_grad_buffer.py)": """
        reuse_grad_buf_for_mxfp8_param_ag
    """,
    "what Megatron-LM always switches on (core_transformer_config_from_args)": """
        deallocate_pipeline_outputs
    """,
    "the same weights in fewer tensors": """
        moe_single_grouped_bias moe_single_grouped_weight
    """,
    "arguments that a release refuses, ignores, or derives from others": """
        add_position_embedding apply_residual_connection_post_layernorm batch_size checkpoint_activations
        data_parallel_size deprecated_use_mcore_models export_te_mcore_model ignore_forward_method
        model_parallel_size moe_router_topk_limited_devices moe_token_dropping no_position_embedding onnx_safe
        openai_gelu params_dtype transformer_pipeline_model_parallel_size use_mcore_models warmup
    """,
    "how Muon distributes parameters: reported with the layer-wise optimizer (caveats/ignored.py)": """
        no_use_layer_wise_param_layout use_layer_wise_param_layout
    """,
}

#: Argument -> why it is harmless.
HARMLESS: dict[str, str] = {name: reason for reason, names in REASONS.items() for name in names.split()}
