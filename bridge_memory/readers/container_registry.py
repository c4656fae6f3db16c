"""Registry of a ConfigContainer's fields: each is read, harmless for memory, or an unmodelled feature reported by name.

Most fields have the names of Megatron-LM's arguments, which derive from the same configs of megatron-core; those are in
``megatron_args/harmless.py`` and ``megatron_args/unmodelled.py``. This module lists the fields that only containers
have. ``tests/readers/test_container_registry.py`` checks it against the installed Megatron Bridge.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.readers.megatron_args.harmless import HARMLESS as HARMLESS_ARGUMENTS
from bridge_memory.readers.megatron_args.sizes import ORDER_OF
from bridge_memory.readers.megatron_args.unmodelled import UNMODELLED as UNMODELLED_ARGUMENTS
from bridge_memory.readers.megatron_args.unmodelled import ArgumentValues, Feature
from bridge_memory.spec.unmodelled import Effect

UP, DOWN, EITHER, UNKNOWN = Effect.UP, Effect.DOWN, Effect.EITHER, Effect.UNKNOWN


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# ---------------------------------------------------------------------------------------------------------------
# Fields that are read
# ---------------------------------------------------------------------------------------------------------------

#: Part of the container -> its fields that are read.
READ: dict[str, frozenset[str]] = {
    "model": _names(
        """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split activation_func
        activation_func_clamp_value add_bias_linear
        add_qkv_bias apply_query_key_layer_scaling apply_rope_fusion attention_backend attention_dropout
        attention_output_gate attention_softmax_in_fp32 bf16 bias_activation_fusion bias_dropout_fusion
        calculate_per_token_loss context_parallel_size cp_comm_type cpu_offloading cpu_offloading_num_layers
        cross_entropy_fusion_impl cross_entropy_loss_fusion cuda_graph_impl cuda_graph_modules
        cuda_graph_scope deallocate_pipeline_outputs
        defer_embedding_wgrad_compute
        delay_wgrad_compute deterministic_mode distribute_saved_activations dsa_indexer_head_dim dsa_indexer_n_heads
        dsa_indexer_skip_topk_offset dsa_indexer_topk_freq enable_cuda_graph experimental_attention_variant
        expert_model_parallel_size expert_tensor_parallel_size external_cuda_graph ffn_hidden_size
        fine_grained_activation_offloading first_last_layers_bf16 fp16 fp32_residual_connection fp4 fp4_param fp8
        fp8_dot_product_attention fp8_param
        fp8_recipe freeze_language_model freeze_mtp_model gated_linear_unit gradient_accumulation_fusion
        heterogeneous_block_specs hidden_dropout hidden_size hybrid_attention_ratio hybrid_layer_pattern
        hybrid_mlp_ratio hybrid_override_pattern hybrid_stack_spec is_hybrid_model kv_channels kv_lora_rank
        linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
        linear_value_head_dim make_vocab_size_divisible_by mamba_chunk_size mamba_head_dim mamba_num_groups
        mamba_num_heads mamba_stack_spec mamba_state_dim masked_softmax_fusion microbatch_group_size_per_vp_stage
        moe_apply_probs_on_input moe_aux_loss_coeff moe_enable_deepep moe_expert_capacity_factor
        moe_expert_rank_capacity_factor moe_ffn_hidden_size moe_mlp_glu_interleave_size moe_paged_stash
        moe_paged_stash_buffer_size_factor_cuda
        moe_deepep_num_sms moe_hybridep_num_sms moe_flex_dispatcher_backend
        moe_flex_dispatcher_num_sms moe_grouped_gemm moe_latent_size moe_layer_freq moe_layer_recompute
        moe_pad_expert_input_to_capacity moe_permute_fusion moe_router_dtype moe_router_enable_expert_bias
        moe_router_fusion moe_router_group_topk moe_router_load_balancing_type moe_router_num_groups
        moe_router_padding_for_fp8 moe_router_padding_for_quantization
        moe_router_score_function moe_router_topk moe_shared_expert_gate moe_shared_expert_intermediate_size
        moe_shared_expert_overlap moe_token_dispatcher_type moe_z_loss_coeff mtp_hybrid_override_pattern mtp_num_layers
        mtp_use_repeated_layer multi_latent_attention no_rope_freq normalization num_attention_heads num_layers
        num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 num_layers_in_first_pipeline_stage
        num_layers_in_last_pipeline_stage num_moe_experts num_query_groups min_offloaded_tensor_size offload_modules
        overlap_moe_expert_parallel_comm params_dtype per_block_parameters pipeline_model_parallel_layout
        pipeline_model_parallel_size position_embedding_type q_lora_rank qk_head_dim qk_l2_norm qk_layernorm
        qk_pos_emb_head_dim recompute_granularity recompute_method recompute_modules recompute_num_layers
        rotary_percent seq_length sequence_parallel share_embeddings_and_output_weights should_pad_vocab softmax_type
        tensor_model_parallel_size tp_comm_overlap transformer_impl transformer_layer_spec
        use_fused_weighted_squared_relu use_kitchen use_mamba_mem_eff_path use_transformer_engine_op_fuser v_head_dim
        virtual_pipeline_model_parallel_size vocab_size
        wgrad_deferral_limit window_attn_skip_freq window_size
        apply_dsa_kernel_fusion csa_compress_ratios csa_dense_mode csa_window_size dsa_indexer_loss_coeff
        dsa_indexer_rotate_activation dsa_indexer_scoring_relu dsa_indexer_topk dsa_indexer_use_sparse_loss
        dsa_kernel_backend
        enable_hyper_connections moe_n_hash_layers num_residual_streams o_groups o_lora_rank use_fused_mhc
        chunk_size conv_bias d_conv expand falconh1_ratio key_multiplier rmsnorm ssm_multipliers use_attention use_mamba
        use_mlp
        attention_k_eq_v final_logit_softcapping global_head_dim global_kv_channels interleaved_attn_pattern
        full_attn_num_query_groups hybrid_attention_pattern layer_types num_global_key_value_heads
        num_global_query_groups num_kv_shared_layers per_layer_embed_dim sliding_attention_setting swa_num_query_groups
        per_layer_embed_vocab_size use_double_wide_mlp
        crossattn_emb_size freq_dim in_channels layernorm_across_heads out_channels patch_spatial patch_temporal
        qkv_format text_dim
        """
    ),
    "optimizer": _names(
        """
        clip_grad exp_avg_dtype exp_avg_sq_dtype fp8_recipe main_grads_dtype main_params_dtype optimizer
        optimizer_cpu_offload optimizer_offload_fraction overlap_param_gather sgd_momentum
        store_param_remainders use_distributed_optimizer use_layer_wise_distributed_optimizer
        use_precision_aware_optimizer
        """
    ),
    "ddp": _names(
        """
        bucket_size data_parallel_sharding_strategy fp4_param_gather fp8_param_gather
        fsdp_db_use_persist_buf_on_alloc_fail fsdp_double_buffer grad_reduce_in_fp32
        megatron_fsdp_grad_comm_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_max_pool_double_buffer nccl_ub
        num_distributed_optimizer_instances overlap_grad_reduce overlap_param_gather
        suggested_communication_unit_size use_custom_fsdp use_distributed_optimizer use_megatron_fsdp
        """
    ),
    "dist": _names("use_megatron_fsdp use_torch_fsdp2"),
    "train": _names("global_batch_size micro_batch_size"),
    "dataset": _names(
        """
        enable_in_batch_packing enable_offline_packing offline_packing_specs pack_sequences_in_batch
        packed_sequence_specs pad_to_max_length seq_length skip_getting_attention_mask_from_dataset
        F_latents H_latents W_latents context_seq_len number_packed_samples
        """
    ),
    "logger": _names("log_params_norm"),
    "checkpoint": _names(
        """
        also_save_hf_checkpoint async_save ckpt_format dist_ckpt_optim_fully_reshardable
        distrib_optim_fully_reshardable_mem_efficient finetune fully_parallel_load
        fully_parallel_save load_optim save_optim stream_ckpt_dequant use_persistent_ckpt_worker
        """
    ),
    "tokenizer": _names("tokenizer_type vocab_size"),
    "peft": _names("dim target_modules"),
    "mixed_precision": _names(
        """
        bf16 first_last_layers_bf16 fp16 fp32 fp4 fp4_param fp4_param_gather fp8
        fp8_dot_product_attention fp8_multi_head_attention fp8_param
        fp8_param_gather fp8_recipe grad_reduce_in_fp32 num_layers_at_end_in_bf16 num_layers_at_start_in_bf16
        params_dtype reuse_grad_buf_for_mxfp8_param_ag
        """
    ),
    "comm_overlap": _names(
        """
        bucket_size defer_embedding_wgrad_compute delay_wgrad_compute overlap_grad_reduce
        overlap_moe_expert_parallel_comm overlap_param_gather overlap_param_gather_with_optimizer_step tp_comm_overlap
        wgrad_deferral_limit
        """
    ),
}

# ---------------------------------------------------------------------------------------------------------------
# Unmodelled features, reported when they are set
# ---------------------------------------------------------------------------------------------------------------


def _apart(asked: ArgumentValues, value: object) -> bool:
    return bool(getattr(value, "use_dist_train", False))


def _divided(asked: ArgumentValues, value: object) -> bool:
    return bool(asked["sequence_parallel"])


def _tokens(asked: ArgumentValues) -> int:
    """Tokens of a microbatch on all context-parallel ranks."""
    return int((asked["seq_length"] or 0) * (asked["micro_batch_size"] or 1))


def _width(asked: ArgumentValues) -> int:
    """Bytes of an activation's element."""
    return 2 if asked["bf16"] or asked["fp16"] else 4


def _whole_embeddings(asked: ArgumentValues) -> int:
    """At a peak in a layer or the loss: the whole output, which the step holds during forward, and the same with what
    an encoder put into it; in backward their gradients."""
    return 2 * _tokens(asked) * int(asked["hidden_size"] or 0) * _width(asked)


def _not_of_packs(asked: ArgumentValues, value: object) -> bool:
    """Bridge sets it for packs of whole sequences, which are counted (``ConfigContainer.validate``); Step-3.7's recipe
    does for packs, which are counted as full ones."""
    return not (
        asked["enable_in_batch_packing"] or asked["pack_sequences_in_batch"] or asked["max_packing_seqlen"]
    )


#: Tokens, to a multiple of which HybridEP pads those of a rank (``moe/fused_a2a.py: HYBRIDEP_TOKEN_ALIGNMENT``).
HYBRIDEP_ALIGNMENT = 64


def _unaligned(asked: ArgumentValues, value: object) -> bool:
    """Whether a whole pack is padded; smaller ones are padded to the largest of the group, which is counted."""
    tokens = int(asked["seq_length"] or 0) // int(asked["context_parallel_size"] or 1)
    divided = int(asked["tensor_model_parallel_size"] or 1) if asked["sequence_parallel"] else 1
    return tokens * int(asked["micro_batch_size"] or 1) // divided % HYBRIDEP_ALIGNMENT > 0


def _biases_of_images(asked: ArgumentValues) -> int:
    """Two biases of a sequence by a sequence for each microbatch in flight, which fused attention saves once for all
    layers; their boolean masks, four at a time; and the gradient of one (TE ``csrc/extensions/attention.cpp:
    fused_attn_bwd``)."""
    scores, width = _tokens(asked) * int(asked["seq_length"] or 0), _width(asked)
    in_flight = int(asked["pipeline_model_parallel_size"] or 1)
    return scores * (2 * width * in_flight + 4 + width)


def _inner_activations(asked: ArgumentValues) -> int:
    """The bias and the GeLU of Transformer Engine's ``LayerNormMLP`` step by step, as without torch.compile: six
    tensors of the inner width in backward."""
    inner = int(asked["ffn_hidden_size"] or 4 * int(asked["hidden_size"] or 0))
    return 6 * _tokens(asked) * inner * _width(asked) // int(asked["tensor_model_parallel_size"] or 1)


def _quantizes_otherwise(asked: ArgumentValues, recipe: Any) -> bool:
    """Whether a quantisation layer by layer differs, in training, from the run's own: each of its configurations is
    compared, since layers that none covers keep the run's (``extensions/transformer_engine.py:
    _get_fp8_autocast_for_quant_recipe``; a layer outside of fp8 stays there)."""
    configs = getattr(recipe, "configs", None)
    if not isinstance(configs, dict) or asked["fp8"] is None:
        return True
    own = {"fp8_quantization_recipe": _plain(asked["fp8_recipe"]), "fp8_format": _plain(asked["fp8"])}
    for config in configs.values():
        given = config.get("training_recipe") if isinstance(config, dict) else None
        found = {key: _plain(value) for key, value in given.items()} if isinstance(given, dict) else {}
        if {"fp8_format": "e4m3", **found} != own:
            return True
    return False


def _plain(value: Any) -> str:
    """A string, or an enum's."""
    return str(getattr(value, "value", value))


def _divides_sequences(asked: ArgumentValues, value: Any) -> bool:
    return int(asked["context_parallel_size"] or 1) > 1


#: Part -> field -> its unmodelled feature. Fields with an argument's name are in ``UNMODELLED_ARGUMENTS``.
UNMODELLED: dict[str, dict[str, Feature]] = {
    "model": {
        "parallel_output": Feature(True, UP, "logits that are gathered over tensor-parallel ranks",
                                      order="s b V elements beside the s b V / t that are counted"),
        # models/gpt_full_te_layer_autocast_spec.py: it saves the same tensors (a test compares both)
        "use_transformer_engine_full_layer_spec": Feature(
            False, UP, "temporaries of Transformer Engine's whole layer", most=_inner_activations,
            order="6 s b f / t elements of one layer",
        ),
        "restore_modelopt_state": Feature(False, EITHER, "ModelOpt's quantizers",
                                             order="a copy of the largest quantized tensor, and what is clipped of it"),
        "moe_hybridep_pad_uneven_dispatch_inputs": UNMODELLED_ARGUMENTS[
            "moe_hybridep_pad_uneven_dispatch_inputs"
        ]._replace(when=_unaligned),
        "quant_recipe": UNMODELLED_ARGUMENTS["quant_recipe"]._replace(when=_quantizes_otherwise),
        # DeepSeek-V4's: ranks hold whole parts of sequences, and exchange the tokens at their ends
        "cp_partition_mode": Feature("zigzag", UP, "what neighbouring ranks exchange", _divides_sequences,
                                        order="a window and a compressed group of tokens, s b h elements at most"),
        "variable_seq_lengths": UNMODELLED_ARGUMENTS["variable_seq_lengths"]._replace(when=_not_of_packs),
        "teacher": Feature(None, UP, "the teacher of a distillation", order=ORDER_OF["export_kd_teacher_load"]),
        "kd_config": Feature(None, UP, "the losses of a distillation",
                                order="fp32 logits of teacher and student, 4 s b V / t bytes each, some three times"),
        "dense_grouped_gemm": Feature(False, EITHER, "a dense MLP through the grouped GEMM",
                                         order=ORDER_OF["use_grouped_gemm_for_dense_mlp"]),
        # models/*/modeling_*.py: the embedding's output is scattered only after image embeddings are inserted
        "scatter_embedding_sequence_parallel": Feature(
            True, UP, "the whole embedding's output beside the scattered one", _divided, most=_whole_embeddings,
            order="s b h elements, of the first stage",
        ),
        "dist_train": Feature(None, EITHER, "modality encoders on separate ranks", _apart,
                              order="as large as the encoders' weights, their states and activations"),
        **dict.fromkeys(
            ("recompute_vision", "vit_gradient_checkpointing"),
            Feature(False, DOWN, "recomputation in modality encoders, which are counted without it",
                    order="as large as the encoders' activations"),
        ),
        # MiniMax-M3: frozen weights that nothing runs (models/minimax_m3: lightning_indexer_layers)
        "lightning_indexer_layers": Feature(None, UP, "the frozen weights of an indexer that is not run",
                                               order="2 h (heads + 1) width bytes for each of these layers"),
        # models/gemma_vl/modeling_gemma3_vl.py: Gemma3VLModel._compute_attention_biases; attention stays fused
        "is_vision_language": Feature(
            False, UP, "the attention biases of images, b x s x s each", most=_biases_of_images,
            order="4 b s s bytes for each microbatch in flight",
        ),
        # models/stepfun/step35_provider.py: Step35DecoderLayer, one number a layer
        **dict.fromkeys(
            ("swiglu_limits", "swiglu_limits_shared"), UNMODELLED_ARGUMENTS["hidden_activation_clamp"]
        ),
        "attention_chunk_size": Feature(None, DOWN, "attention within chunks",
                                           order="what attention saves of the tokens beyond a chunk, in every layer"),
        "nope_layer_interval": Feature(None, DOWN, "layers without rotary embeddings",
                                           order=ORDER_OF["qk_l2_norm"]),
        "use_arbitrary_attention_mask": Feature(None, UP, "attention masks of any form",
                                                   order="b s s bytes, and the scores, b n s s / t elements a layer"),
    },
    "optimizer": {
        "overlap_param_gather_with_optimizer_step": Feature(False, EITHER, "parameters gathered during the step",
                                                               order="as large as one bucket of parameters"),
    },
    "ddp": {
        "num_buckets": UNMODELLED_ARGUMENTS["ddp_num_buckets"],
        "pad_buckets_for_high_nccl_busbw": UNMODELLED_ARGUMENTS["ddp_pad_buckets_for_high_nccl_busbw"],
        "param_name_patterns_for_fp32_local_accumulation": UNMODELLED_ARGUMENTS[
            "ddp_param_name_patterns_for_fp32_local_accumulation"
        ]._replace(also=("()",)),
        "megatron_fsdp_cuda_graph_mode": Feature(False, UP, "Megatron-FSDP's buffers under CUDA graphs",
                                                    order=ORDER_OF["megatron_fsdp_cuda_graph_mode"]),
        "preserve_fp32_weights": UNMODELLED_ARGUMENTS["preserve_fp32_weights"],
    },
    "dist": {
        "eval_context_parallel_size": Feature(None, EITHER, "evaluation with another context-parallel size",
                                                 order="as large as evaluation's activations in one layer"),
    },
    "dataset": {
        "inter_document_masking": UNMODELLED_ARGUMENTS["dataloader_inter_document_masking"],
    },
    "peft": {
        "exclude_modules": Feature(None, DOWN, "linears that get no adapter",
                                      order="some 18 bytes for each weight of those adapters, and their inputs"),
        "lora_dtype": Feature(None, EITHER, "adapters of another dtype",
                                 order="2 bytes for each weight of the adapters, and as many for their gradients"),
        "sequence_parallel_input_regather": Feature(False, EITHER, "adapter inputs that are gathered again",
                                                        order="s b h elements for each linear with an adapter"),
        "share_expert_adapters": Feature(True, UP, "adapters expert by expert",
                                             order="as many times the experts' adapters as a rank has experts"),
        "experts_shared_outer_loras": Feature(False, EITHER, "adapters that experts share",
                                                   order="half of the experts' adapters, and their states"),
        "normalize_moe_lora": Feature(False, DOWN, "adapters of experts of a lower rank",
                                         order="the experts' adapters and their states, over a token's experts"),
        "dropout": Feature(0.0, UP, "dropout of the adapters' inputs",
                              order="a byte for each element of those inputs, and a scaled copy"),
        **dict.fromkeys(
            ("freeze_vision_model", "freeze_vision_projection"),
            Feature(True, UP, "modality encoders that train beside adapters, counted as frozen",
                    order="16 bytes or less for each of their weights, and activations"),
        ),
        "freeze_language_model": Feature(True, UP, "a language model that trains beside its adapters",
                                            order="16 bytes or less for each weight that is counted as frozen"),
    },
    "profiling": {
        "use_pytorch_profiler": Feature(False, UP, "what PyTorch's profiler keeps on the GPU", outside=True,
                                           order="as large as CUPTI's buffers, which grow with the steps"),
    },
    "tensor_inspect": {"enabled": Feature(False, UP, "statistics of tensors that are inspected",
                                                order="a few numbers for each tensor, and a copy while it is read")},
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------
# Fields that are harmless
# ---------------------------------------------------------------------------------------------------------------

_CALLED = "callbacks that the training loop sets"
_ENCODER = "the modality encoder, which is reported if the model has one"
_TOKENS = "ids of tokens"
_ROTARY = "numbers in a kernel whose tensors are the same"
_SUPPLIED = "the source, or a copy, of a field that is read or reported"
_HOST = "data: where tokens come from, on the host"
_RANKS = "launch, signals, failures and restarts"

#: Part -> reason -> fields. Fields with an argument's name are in ``HARMLESS_ARGUMENTS``.
REASONS: dict[str, dict[str, str]] = {
    "model": {
        _CALLED: """
            _cpu_offloading_context _pg_collection experimental_attention_variant_loss_scale_func
            extra_checkpoint_metadata finalize_model_grads_func generation_config grad_scale_func grad_sync_func
            moe_grad_scale_func mtp_grad_scale_func no_sync_func param_sync_func post_wrap_hooks pre_wrap_hooks timers
        """,
        "the values that weights start from": "embedding_init_method init_method output_layer_init_method",
        "the dtype of autocast, which Megatron's models do not use": "autocast_dtype enable_autocast",
        "fields that neither Megatron Bridge 0.6.2 nor megatron-core 0.19.2 reads": """
            keep_mtp_spec_in_bf16 moe_a2a_overlap mtp_eval_in_bf16
        """,
        "numbers of hyper-connections and of the router": "actual_vocab_size mhc_sinkhorn_iterations norm_topk_prob",
        "numbers that Falcon-H1's weights start from, or its tensors are multiplied with": """
            A_init_dist A_init_range D_has_hdim attention_in_multiplier attention_out_multiplier conv_init d_inner
            dt_init dt_init_floor dt_max dt_min dt_scale embedding_multiplier falconh1_stack_spec lm_head_multiplier
            mlp_multipliers norm_before_gate ssm_in_multiplier ssm_out_multiplier
        """,
        "a number that Gemma 4's embeddings are multiplied with": "scale_embeddings_by_hidden_size",
        _ENCODER: """
            add_decoder add_encoder apply_rotary_pos_emb_in_fp32 audio_config bos_token_id code2wav_config
            deepstack_visual_indexes
            dynamic_resolution eos_token_id freeze_audio_model freeze_audio_projection freeze_sound_encoder
            freeze_sound_projection freeze_vision_model freeze_vision_projection has_sound hf_config hf_config_dict
            language_max_sequence_length max_vision_cuda_graph_seq_length mm_tokens_per_image
            multimodal_attn_impl multimodal_projector_bias num_position_embeddings out_hidden_size patch_size
            position_id_per_seconds projector_hidden_size radio_cpe_aspect_ratio_select radio_disable_cpe
            radio_force_cpe_eval_mode radio_force_eval_mode radio_interpolate_only_cpe return_dict
            seconds_per_chunk separate_video_embedder sound_config sound_hidden_size sound_model_type
            sound_projection_hidden_size spatial_merge_size talker_config temporal_ckpt_compat temporal_patch_dim
            temporal_patch_size text_config thinker_config token2wav_config use_hf_vision_model use_mg_vit
            use_vision_backbone_fp8_arch vision_class_token_len vision_config vision_cuda_graph_impl
            vision_cuda_graph_scope vision_dp_when_cp vision_model_type vision_proj_ffn_hidden_size
            vision_projector_config vision_recompute_granularity vision_recompute_method vision_recompute_num_layers
            vision_soft_tokens_per_image vision_transformer_config
        """,
        _TOKENS: """
            audio_end_token_id audio_start_token_id audio_token_id ignore_index image_end_token_id
            image_start_token_id image_token_id image_token_index img_end_token_id img_start_token_id
            media_placeholder_token_id pad_token_id sound_context_token_id video_end_token_id video_start_token_id
            video_token_id vision_end_token_id vision_start_token_id vision_token_id
        """,
        _ROTARY: """
            attn_logit_softcapping csa_compress_rotary_base full_attention_rope_base
            full_attention_rope_partial_factor global_rotary_percent
            persist_layer_norm query_pre_attn_scalar sliding_window_rope_base
            rotary_base_per_layer rotary_percents
            seq_len_interpolation_factor yarn_mscale yarn_mscale_all_dim yarn_rotary_scaling_factor
        """,
        _SUPPLIED: """
            attention_other_setting attention_value_scale
            bias_dropout_add_fusion decoder_sparse_step distill_submodule fp8_param_gather head_dim
            hf_model_id hf_model_path hf_model_revision hf_text_config index_head_dim index_n_heads
            head_wise_attn_gate language_model_type max_position_embeddings mlp_only_layers moe_intermediate_size
            mtp_enabled projector_bias understand_projector_stride
            pipeline_dtype pretrained_model_name text_len tokenizer_type transformer
        """,
    },
    "optimizer": {
        "numbers of the optimizer and its schedule": """
            adaptive_muon_beta2 adaptive_muon_eps adaptive_muon_moment2_method grad_norm_skip_threshold
            soap_precondition_frequency soap_shampoo_beta soap_use_kl_shampoo
        """,
        _CALLED: "timers",
        "mixed precision, which is read from the model": "bf16 fp16",
    },
    "ddp": {
        "how and when ranks talk, in buffers that are counted": """
            fsdp_all_gather_in_start_param_sync megatron_fsdp_use_decoupled_grad
        """,
        _SUPPLIED: "delay_wgrad_compute reuse_grad_buf_for_mxfp8_param_ag",
    },
    "dist": {
        _RANKS: "enable_megatron_core_experimental external_gpu_device_mapping lazy_init use_decentralized_pg",
    },
    "rerun_state_machine": {"logs, timers and profiles": "check_for_nan_in_loss"},
    "train": {
        "when training starts, stops, skips and evaluates": """
            _train_iters_from_num_epochs check_optimizer_step_success num_epochs skip_sync_grad_norm_across_mp
        """,
    },
    "scheduler": {
        "numbers of the optimizer and its schedule": """
            lr_decay_steps lr_warmup_steps max_steps wd_incr_steps wsd_decay_steps
        """,
    },
    "dataset": {
        _HOST: """
            _processor _processors _tokenizer add_extra_token_to_sequence blend blend_per_split cache_dir caption_key
            collate_impl context_parallel_size create_attention_mask data_path dataloader_load dataset_dict
            dataset_kwargs dataset_name dataset_root dataset_sampling dataset_subset defer_in_batch_packing_to_step
            defer_npy_index_mmap delete_raw do_validation download_mode drop_last
            drop_last_partial_validation_sequence encoder_patch_size encoder_seq_lengths fast_cache_load
            fixed_pack_idx global_batch_size global_data_keys hf_data_files hf_dataset hf_dataset_name hf_dataset_path
            hf_filter_lambda hf_filter_lambda_kwargs hf_kwargs hf_output_root hf_processor_path hf_rewrite
            hf_test_dataset hf_tokenizer_path hf_validation_dataset hf_validation_proportion image_end_token
            image_folder image_processor image_size image_start_token image_token image_token_count img_start_token_id
            in_batch_packing_pad_to_multiple_of maker_kwargs maker_name max_packing_seqlen max_samples_per_sequence
            max_train_samples memmap_workers micro_batch_size mock modality_columns modality_configs
            modality_presence_prob num_base_examples num_images num_val_workers oversize_policy packing_buffer_size
            pad_to_multiple_of patch_end_token patch_image_size patch_start_token patch_start_token_id
            patch_token_count path path_to_cache persistent_workers pin_memory preprocess_fn preprocessing
            process_example_fn processor_paths prompt random_seed repo_id rewrite sample_count seqlen_divisible_by
            sequence_length sequence_parallel_size sequences_per_dataset shuffle_buffer_size source special_token_ids
            split_matrix split_val_from_train task_encoder test_source test_split text_column text_prompt
            token_dtype_code tokenizer tokenizer_path train_split val_proportion valid_split validation_source
        """,
    },
    "logger": {
        "logs, timers and profiles": """
            comet_api_key comet_experiment_name comet_project comet_tags comet_workspace filter_warnings log_interval
            log_runtime_to_tensorboard log_throughput_to_tensorboard memory_keys mlflow_description mlflow_experiment
            mlflow_log_artifacts mlflow_run_name mlflow_tags mlflow_tracking_uri modules_to_filter runtime_time_unit
            save_config_filepath set_level_for_all_loggers skip_train_metrics_log throughput_window_size
        """,
    },
    "tokenizer": {
        "tokenizers: the size of the vocabulary is read": """
            chat_template_path force_system_message hf_tokenizer_kwargs image_tag_type make_vocab_size_divisible_by
            pad_vocab_size padded_vocab_size sp_tokenizer_kwargs tensor_model_parallel_size use_tokenizer_vocab_size
            legacy_tokenizer
        """,
    },
    "checkpoint": {
        "checkpoints: what is read and written between training steps": """
            async_write_results_mp_mode custom_manager_class hf_distributed_save
            hf_save_every_n_ranks hf_source_path hf_trust_remote_code load_rng most_recent_k save_rng
            save_tokenizer_assets storage_writers_per_rank
        """,
    },
    "ft": {
        _RANKS: "simulate_fault simulated_fault_base_delay simulated_fault_rank simulated_fault_type",
    },
    "straggler": {"logs, timers and profiles": "enable_straggler_on_startup"},
    "nvrx_straggler": {
        "logs, timers and profiles": """
            calc_individual_gpu_perf calc_relative_gpu_perf enable_logging enabled gpu_individual_perf_threshold
            gpu_relative_perf_threshold logger_name num_gpu_perf_scores_to_print profiling_interval
            report_time_interval stop_if_detected
        """,
    },
    "profiling": {"logs, timers and profiles": "use_nsys_profiler"},
    "peft": {
        "numbers in a kernel whose tensors are the same": """
            alpha dropout_position lora_A_init_method lora_B_init_method
        """,
        _SUPPLIED: """
            _alias_matches _alias_to_pattern _pattern_to_alias a2a_experimental canonical_mapping params_to_save
        """,
    },
    "mixed_precision": {
        "the dtype of autocast, which Megatron's models do not use": "autocast_dtype autocast_enabled",
        _SUPPLIED: "pipeline_dtype",
    },
    "tensor_inspect": {
        "details of an option that is reported if it is set": """
            _feature_dirs_from_default allow_custom_feature_dirs feature_dirs features init_training_step log_dir
        """,
    },
    "inprocess_restart": {
        _RANKS: """
            active_world_size barrier_timeout completion_timeout empty_cuda_cache enabled granularity hard_timeout
            heartbeat_interval heartbeat_timeout last_call_wait max_iterations max_rank_faults
            monitor_process_interval monitor_process_logdir monitor_thread_interval progress_watchdog_interval
            soft_timeout termination_grace_time
        """,
    },
}

#: Part -> field -> why it is harmless.
HARMLESS: dict[str, dict[str, str]] = {
    part: {name: reason for reason, names in reasons.items() for name in names.split()}
    for part, reasons in REASONS.items()
}

#: Fields that share a name with an argument and mean something else.
_NOT_THE_ARGUMENT = _names("use_checkpoint_args use_mp_args_from_checkpoint_args")


def feature_of(part: str, field: str) -> Feature | None:
    """The unmodelled feature of a field; None if the field is read, harmless or unknown."""
    if field in READ.get(part, ()) or field in HARMLESS.get(part, ()) or field in _NOT_THE_ARGUMENT:
        return None
    return UNMODELLED.get(part, {}).get(field) or UNMODELLED_ARGUMENTS.get(field)


def known(part: str, field: str) -> bool:
    """Whether a field is in the registry: read, unmodelled or harmless."""
    return (
        field in READ.get(part, ())
        or field in UNMODELLED.get(part, {})
        or field in HARMLESS.get(part, {})
        or field in UNMODELLED_ARGUMENTS
        or field in HARMLESS_ARGUMENTS
    )


# ---------------------------------------------------------------------------------------------------------------
# Model providers and layer specs
# ---------------------------------------------------------------------------------------------------------------

#: Supported providers (and Bridge's newer model configs), whose config describes their language model -> the fields
#: with the configs of modality encoders. A subclass that inherits ``provide`` counts as its base class.
PROVIDERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        _words(
            """
            DistillationProvider ExaoneMoeModelProvider GPTModelConfig GPTModelProvider GPTOSSProvider
            Gemma2ModelProvider Gemma3ModelProvider GemmaModelProvider HybridModelConfig HybridModelProvider
            LlamaNemotronHeterogeneousProvider MLAModelProvider MambaModelProvider MiniMaxM3ModelProvider
            MistralModelProvider OlMoEModelProvider SarvamMLAModelProvider SarvamMoEModelProvider
            FalconH1ModelProvider Gemma4DenseProvider Gemma4ModelProvider MiMoV2FlashModelProvider
            Step35ModelProvider WanModelProvider
            """
        ),
        (),
    ),
    **dict.fromkeys(
        _words(
            """
            Ernie45VLModelProvider Exaone45ModelProvider GLM45VModelProvider Gemma3VLModelProvider
            KimiK25VLModelProvider MiniMaxM3VLModelProvider Qwen25VLModelProvider Qwen35VLMoEModelProvider
            Qwen35VLModelProvider Qwen3VLMoEModelProvider Qwen3VLModelProvider Step37ModelProvider
            """
        ),
        ("vision_config",),
    ),
    **dict.fromkeys(_words("Gemma4DenseVLProvider Gemma4VLModelProvider"), ("vision_config", "audio_config")),
    "Ministral3ModelProvider": ("hf_config.vision_config",),
    "Qwen2AudioModelProvider": ("hf_config.audio_config",),
    "Qwen25OmniModelProvider": ("thinker_config.vision_config", "thinker_config.audio_config"),
    "Qwen3OmniModelProvider": ("thinker_config.vision_config", "thinker_config.audio_config"),
    "Qwen3ASRModelProvider": ("thinker_config.audio_config",),
    "NemotronVLModelProvider": ("vision_model_type",),
    "NemotronOmniModelProvider": ("vision_model_type", "sound_config"),
    "NemotronNano12Bv2VLModelProvider": ("vision_model_type",),
}
#: Providers of models that no block here describes -> what they are.
REFUSED: dict[str, str] = {
    "T5ModelProvider": "encoder-decoder models are not estimated, use a decoder model",
    "FluxProvider": "diffusion models are not estimated",
    "LLaDA15ModelProvider": "diffusion models of language are not estimated",
    "NemotronLabsDiffusionModelProvider": "diffusion models of language are not estimated",
    "MegatronMIMOProvider": "models of several parts, each with ranks of its own, are not estimated",
}

#: What ``finalize`` of a provider sets: the loss by token with context parallelism, ...
CP_LOSS_BY_TOKEN = _names(
    "Qwen3VLModelProvider Qwen3VLMoEModelProvider Qwen35VLModelProvider Qwen35VLMoEModelProvider"
)
#: ... sequence parallelism with tensor parallelism, ...
SEQUENCE_PARALLEL_WITH_TP = _names("Qwen3VLMoEModelProvider")
#: ... and the layers of uneven stages (models/sarvam/sarvam_provider.py: _get_sarvam_moe_pipeline_layout).
STAGE_LAYOUTS: dict[str, dict[int, str]] = {
    "SarvamMoEModelProvider": {
        2: "E" + 10 * "t" + "|" + 9 * "t" + "L",
        4: "Ettttt|ttttt|ttttt|ttttL",
        8: "Ettt|ttt|ttt|tt|tt|tt|tt|ttL",
    },
}

#: Layer specs made of megatron-core's modules.
PLAIN_LAYER_SPECS = _names(
    """
    _build_exaone_moe_layer_spec default_layer_spec get_default_hybrid_stack_spec get_default_mamba_stack_spec
    get_gpt_decoder_block_spec get_gpt_heterogeneous_layer_spec get_gpt_layer_with_transformer_engine_spec
    _gemma4_block_spec gemma4_block_spec build_step35_layer_spec get_step37_text_layer_spec
    get_transformer_block_with_experimental_attention_variant_spec heterogeneous_layer_spec
    transformer_engine_hybrid_stack_spec transformer_engine_layer_spec transformer_engine_mamba_stack_spec
    """
)
LOCAL_LAYER_SPECS = _names("local_layer_spec get_gpt_layer_local_spec")
#: With norms after the linears, beside those before them or instead of them.
POST_LAYERNORM_SPECS = _names(
    "gemma2_layer_spec gemma3_layer_spec exaone4_layer_spec exaone_45_transformer_layer_spec"
)
NO_PRE_LAYERNORM_SPECS = _names("exaone4_layer_spec exaone_45_transformer_layer_spec")
#: Layer spec -> ``AttentionSpec.core_attention`` (models/gemma/gemma2_provider.py: Gemma2FlexDotProductAttention;
#: models/exaone/exaone4/exaone4_provider.py).
CORE_ATTENTION_OF_SPECS = {
    "gemma2_layer_spec": "flex", "exaone4_layer_spec": "local", "exaone_45_transformer_layer_spec": "local",
}
FULL_QK_SPECS = _names("olmoe_layer_spec")
#: Layer specs with megatron-core's weights but other modules -> (effect, what differs, its order).
OTHER_LAYER_SPECS: dict[str, tuple[Effect, str, str]] = {
    # models/ministral3/ministral3_provider.py: MinistralTEDotProductAttention scales the queries, and attention saves
    # the scaled ones instead.
    "ministral_layer_spec": (UP, "a copy of the queries before they are scaled", "as large as one layer's queries"),
    # models/mimo_v2_flash/modeling_mimo_v2_flash.py: MiMoV2FlashTEDotProductAttention.forward
    "mimo_v2_flash_layer_spec": (
        EITHER, "scaled copies of the values, kept in place of the projected ones",
        "as large as the values, in every layer",
    ),
    # models/minimax_m3/minimax_m3_bridge.py: _promote_router_weights_to_float32
    "minimax_m3_block_spec": (
        UP, "the router's weights, counted in bf16, are fp32", "2 bytes for each weight of the routers"
    ),
}
#: Layer specs of OTHER_LAYER_SPECS whose copies are those of one layer at a time.
SCALED_QUERIES_SPECS = _names("ministral_layer_spec")
FP32_ROUTER_SPECS = _names("minimax_m3_block_spec")
#: Layer specs whose MTP depths have a dense feed-forward block although the last layer has experts.
DENSE_MTP_SPECS = _names("_build_exaone_moe_layer_spec")
