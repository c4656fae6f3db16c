"""A small config of every family that is recorded, one for each way in which its class differs."""

from __future__ import annotations

from typing import Any

TINY: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 640, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **TINY},
    "llama, biases": {"model_type": "llama", **TINY, "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", **TINY, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **TINY},
    "qwen3": {"model_type": "qwen3", **TINY, "head_dim": 64},
    "smollm3": {"model_type": "smollm3", **TINY, "pad_token_id": 0},
    "mixtral": {"model_type": "mixtral", **TINY, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", **TINY, "num_experts": 8, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 96, "shared_expert_intermediate_size": 384},
    "qwen3_moe": {"model_type": "qwen3_moe", **TINY, "num_experts": 8, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 96, "head_dim": 64, "norm_topk_prob": True},
    "qwen3_next": {
        "model_type": "qwen3_next", **TINY, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 96, "shared_expert_intermediate_size": 384, "head_dim": 64, "norm_topk_prob": True,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
        "linear_value_head_dim": 48, "partial_rotary_factor": 0.25,
    },
    "nemotron_h": {
        "model_type": "nemotron_h", "hidden_size": 256, "intermediate_size": 688, "vocab_size": 640,
        "hybrid_override_pattern": "M-M*ME", "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 32, "max_position_embeddings": 2048, "mamba_num_heads": 8, "mamba_head_dim": 48,
        "ssm_state_size": 24, "n_groups": 2, "chunk_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 192, "n_group": 1, "topk_group": 1,
        "use_mamba_kernels": True, "tie_word_embeddings": False, "mlp_hidden_act": "relu2",
    },
    "olmoe": {"model_type": "olmoe", **TINY, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 96},
    "glm4_moe": {"model_type": "glm4_moe", **TINY, "n_routed_experts": 8, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 96, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 32,
                 "n_group": 1, "topk_group": 1},
    "deepseek_v3": {
        "model_type": "deepseek_v3", **TINY, "num_key_value_heads": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 96, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2", **TINY, "num_key_value_heads": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 96, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2,
        "topk_method": "group_limited_greedy", "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 16,
    },
    "deepseek_v2 lite": {
        "model_type": "deepseek_v2", **TINY, "num_key_value_heads": 8, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 96, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "topk_method": "greedy", "q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 16,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 256, "n_layer": 3, "n_head": 8, "vocab_size": 640,
              "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "bloom without dropout": {"model_type": "bloom", "hidden_size": 256, "n_layer": 3, "n_head": 8, "vocab_size": 640},
    "minimax_m2": {"model_type": "minimax_m2", **TINY, "num_local_experts": 8, "num_experts_per_tok": 2,
                   "intermediate_size": 96, "head_dim": 32, "partial_rotary_factor": 0.5,
                   "bos_token_id": 1, "eos_token_id": 2},
    "gpt_oss": {"model_type": "gpt_oss", **TINY, "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
                "intermediate_size": 96, "attention_bias": True, "num_hidden_layers": 4, "sliding_window": 4096,
                "rope_theta": 10000.0, "rope_scaling": None, "pad_token_id": 0,
                "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt2": {"model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 8, "vocab_size": 640, "n_positions": 512},
    "gpt2 without dropout": {
        "model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 8, "vocab_size": 640, "n_positions": 512,
        "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    "gemma": {"model_type": "gemma", **TINY, "head_dim": 64, "tie_word_embeddings": True},
    "gemma2": {"model_type": "gemma2", **TINY, "head_dim": 64, "tie_word_embeddings": True, "sliding_window": 4096},
    "gemma3": {
        "model_type": "gemma3_text", **TINY, "head_dim": 64, "tie_word_embeddings": True, "sliding_window": 4096,
        "num_hidden_layers": 6,
    },
    "phi3": {"model_type": "phi3", **TINY, "sliding_window": None, "pad_token_id": 0,
             "bos_token_id": 1, "eos_token_id": 2},
    "granite": {"model_type": "granite", **TINY, "attention_multiplier": 0.1, "embedding_multiplier": 12.0,
                "logits_scaling": 8.0, "residual_multiplier": 0.2},
    "olmo": {"model_type": "olmo", **TINY},
    "olmo2": {"model_type": "olmo2", **TINY},
    "olmo3": {"model_type": "olmo3", **TINY, "sliding_window": 4096, "num_hidden_layers": 4},
    "glm": {"model_type": "glm", **TINY, "head_dim": 32, "pad_token_id": 0, "attention_bias": True},
    "glm4": {"model_type": "glm4", **TINY, "head_dim": 32, "pad_token_id": 0, "attention_bias": True},
}
