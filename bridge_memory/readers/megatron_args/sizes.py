"""Orders of magnitude, in words, of the memory that each unmodelled argument adds or saves.

s tokens of a sequence on a context-parallel rank, b sequences of a micro batch, h hidden size, n heads, t
tensor-parallel ranks, V padded vocabulary.
"""

from __future__ import annotations

#: Order -> the arguments that have it.
ORDERS: dict[str, str] = {
    "as large as the hidden states that are reduced, s b h elements": """
        symmetric_ar_type
    """,
    "as large as the buffers of a communicator, some hundred MiB": """
        create_all_gather_group nccl_communicator_config_path use_sharp
    """,
    "up to the rank's weights and gradients, which are divided further, less what is gathered for a layer": """
        expert_gtp_weight_remat_size expert_tensor_parallel_num_weight_shards gtp_weight_remat_size
        tensor_parallel_num_weight_shards
    """,
    "as large as a hidden state of a microbatch, s b h elements, for each that is in flight": """
        overlap_p2p_comm_warmup_flush pipeline_model_parallel_comm_backend
    """,
    "the whole hidden state, s b h elements, for each microbatch in flight on the first stage": """
        clone_scatter_output_in_embedding
    """,
    "activations in proportion to the longest share of tokens that a rank gets": """
        dataloader_inter_document_masking hybrid_context_parallel max_seqlen_per_dp_cp_rank sft variable_seq_lengths
    """,
    "as large as one bucket of gradients": """
        ddp_num_buckets
    """,
    "at most 65536 elements of each buffer's dtype for each bucket": """
        ddp_pad_buckets_for_high_nccl_busbw
    """,
    "4 bytes for each gradient that it names": """
        ddp_param_name_patterns_for_fp32_local_accumulation
    """,
    "as large as two buckets of gradients": """
        reduce_scatter_with_fp32_accumulation
    """,
    "as large as what attention of one layer saved": """
        ep_overlap_early_attn_memory_release
    """,
    "as large as the weights of one unit": """
        fsdp_all_gather_in_start_param_sync megatron_fsdp_enable_fine_grained_param_gather
    """,
    "up to the rank's share of weights, gradients and optimizer state, by the size of the outer group": """
        enable_full_sharding_in_hsdp outer_dp_sharding_strategy
    """,
    "2 bytes for each parameter of the rank's share": """
        megatron_fsdp_main_params_dtype megatron_fsdp_use_decoupled_grad use_precision_aware_optimizer_no_fp8_or_ds_fp8
    """,
    "4 bytes for each parameter of the rank's share": """
        preserve_fp32_weights
    """,
    "as large as the gradients of two units": """
        megatron_fsdp_cuda_graph_mode
    """,
    "up to the rank's weights and gradients, gathered unit by unit": """
        use_torch_fsdp2
    """,
    "size unknown: it is the user's code, or another library's": """
        fp4_quantizer_factory fp8_quantizer_factory kitchen_attention_backend use_kitchen use_kitchen_attention
    """,
    "2 V h / t bytes, 2 s b V / t, and s b h less": """
        fp8_output_proj
    """,
    "up to 4 s b h / t bytes less in every layer": """
        fp8_multi_head_attention
    """,
    "under 1 MiB": """
        fp8_amax_history_len
    """,
    "a byte for each element that a linear saves in fp8": """
        fp8_wgrad
    """,
    "rows that fill up each local expert's tokens to a multiple of 16 to 128, in every layer": """
        moe_permute_padding_for_fp8_quantization
    """,
    "2 bytes for each element of the weights that are cast, in place for good or for each microbatch in flight": """
        disable_parameter_transpose_cache
    """,
    "a byte for each parameter of the rank, or of a unit where it is gathered": """
        keep_fp8_transpose_cache keep_fp8_transpose_cache_when_using_custom_fsdp
    """,
    "a byte less for each element of the activation's input in every layer": """
        activation_func_fp8_input_store
    """,
    "up to a factor of two in weights' copies and in what linears save, layer by layer": """
        quant_recipe te_precision_config_file
    """,
    "half of the fp32 logits, 2 s b V / t bytes": """
        fp16_lm_cross_entropy
    """,
    "2 bytes for each element of the largest weight": """
        grad_accum_wgrad_dtype
    """,
    "as large as the temporaries of the optimizer's step": """
        optimizer_cuda_graph
    """,
    "4 bytes for each element that Muon does not update, in the states of the other optimizer": """
        muon_scalar_optimizer
    """,
    "as large as t times the largest momentum of a rank": """
        muon_tp_mode
    """,
    "some 4 bytes for each parameter that the GPU updates": """
        use_torch_optimizer_for_cpu_offload
    """,
    "as large as the gradients and parameters of one bucket that goes to the host": """
        overlap_cpu_optimizer_d2h_h2d
    """,
    "up to all of the optimizer's states, 8 to 12 bytes for each parameter of the rank's share": """
        optimizer_offload_auto
    """,
    "up to the activations of all layers of the microbatches that it concerns": """
        num_microbatches_with_partial_activation_checkpoints
    """,
    "(1 - fraction) of the activations that offload_modules would take from the GPU": """
        activation_offload_fraction
    """,
    "as many bytes as it says, times the pipeline rank, and up to one module's saved inputs more": """
        delta_offload_bytes_across_pp_ranks
    """,
    "as large as what the graphed layers of one microbatch would send to the host": """
        delay_offload_until_cuda_graph
    """,
    "so many of the offloaded groups, each the saved inputs of one module in one layer": """
        fine_grained_offloading_max_inflight_offloads
    """,
    "up to the activations of the layers that are offloaded": """
        cpu_offloading_activations
    """,
    "up to the weights of the layers that are offloaded": """
        cpu_offloading_weights
    """,
    "as large as what one offloaded layer saved": """
        cpu_offloading_double_buffering
    """,
    "as large as the activation's input, 2 s b ffn / t elements where it is gated, in every layer": """
        hidden_activation_clamp use_te_activation_func
    """,
    "as large as one to three hidden states and one to three of the activation's inputs, in every layer": """
        disable_jit_fuser
    """,
    "as large as what a norm or attention saves in every layer": """
        batch_invariant_mode flash_attention_version fused_residual_rmsnorm fused_single_qkv_rope
        memory_efficient_layer_norm mla_down_proj_fusion
    """,
    "the scores of every head, b n s s / t elements in every layer": """
        use_flash_attn
    """,
    "as large as queries and keys, in every layer": """
        qk_l2_norm
    """,
    "8 b n s / t bytes, of one layer at a time": """
        log_max_attention_logit qk_clip
    """,
    "as large as the temporaries of one MLP": """
        mlp_chunks_for_training
    """,
    "as large as what a dense or shared MLP saves, in every layer that has one": """
        moe_shared_expert_glu_interleave_size use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert
    """,
    "as many times the hidden state as there are streams, in every layer": """
        enable_hyper_connections num_residual_streams
    """,
    "one more hidden state, s b h / t elements, and one more of the logits, s b V / t": """
        use_mup
    """,
    "as large as the scan's inputs and states, in every Mamba layer": """
        mamba_expand mamba_training_ssm_states_dtype
    """,
    "as large as one MTP depth: its weights with their states, and its activations": """
        mtp_detach_heads mtp_hybrid_override_pattern mtp_standalone
    """,
    "as large as the model may be: weights, their states and activations": """
        decoder_num_layers encoder_pipeline_model_parallel_size encoder_tensor_model_parallel_size
        heterogeneous_block_specs heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path
        pipeline_model_parallel_split_rank use_checkpoint_args use_mp_args_from_checkpoint_args yaml_cfg
    """,
    "the tokens of a layer once more, s b h / t elements, and their noise": """
        moe_input_jitter_eps
    """,
    "as many tokens more as the fullest rank gets": """
        moe_router_force_biased
    """,
    "as large as the experts of a rank: weights, states and what they save": """
        moe_extended_tp moe_input_feature_slicing moe_use_legacy_grouped_gemm
    """,
    "as large as the tokens by which the rank's share is less than the fullest": """
        moe_hybridep_pad_uneven_dispatch_inputs
    """,
    "as large as the dispatched tokens of one layer, in every layer": """
        moe_permute_fusion_into_hybridep overlap_dispatch_backward_with_experts_wgrad
    """,
    "as many rows as the tokens of the whole expert group, of h elements": """
        moe_ncclep_static_shape moe_ncclep_zero_copy
    """,
    "8 bytes for each of a token's experts, of every layer and microbatch": """
        moe_enable_routing_replay moe_router_replay moe_routing_trace_path
    """,
    "as large as the dense model's weights": """
        moe_use_upcycling
    """,
    "as large as the activations of evaluation's larger batch in one layer, and its logits": """
        eval_micro_batch_size
    """,
    "gradients, optimizer state and what backward passes need: all but the weights": """
        freeze_all_layers skip_train
    """,
    "some 18 bytes for each weight of the adapters, and their inputs": """
        lora_rank
    """,
    "2 bytes for each of the teacher's weights on the rank, and fp32 logits of both, 4 s b V / t bytes each": """
        export_kd_cfg export_kd_teacher_ckpt_format export_kd_teacher_load
    """,
    "some ten bytes for each of a token's kept logits": """
        logits_load_dir logits_save_dir
    """,
    "up to a second copy of the weights, a key-value cache, and a reference model's logits": """
        perform_rl perform_rl_step rl_offload_optimizer_during_inference
    """,
    "as large as a rank's checkpoint, for each rank whose copy it holds": """
        replication
    """,
    "as large as the activations, gradients or parameters of the layers that are saved": """
        save_activations_interval save_dgrads_interval save_params_interval save_wgrads_interval
    """,
    "messages of 256 MiB, sent and received, between steps": """
        gpu_sniff_test_interval
    """,
}  # fmt: skip
#: Argument -> its order.
ORDER_OF = {name: order for order, names in ORDERS.items() for name in names.split()}
