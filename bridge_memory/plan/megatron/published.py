"""Splits that NVIDIA wrote by hand for its recipes, to be shown beside ours.

Source: Megatron Bridge 0.6.2 ``recipes/deepseek/h100/deepseek_v3.py: set_deepseek_v3_pipeline_model_parallel_layout``,
``recipes/kimi/h100/kimi_k2.py: _get_kimi_k2_pipeline_layout``, ``recipes/moonlight/h100/moonlight_16b.py:
_get_moonlight_pipeline_layout``; those for 32 chunks ``perf_recipes/{deepseek,kimi}/h100``; Qwen3-235B's
``recipes/qwen/h100/qwen3_moe.py: qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config``. Nemotron's recipes have one stage,
but for one of Nemotron 3 Super (``nemotron_3_super_sft_16gpu_h100_bf16_32k_config``: 7 x 12 and 4 of 88 layers).
"""

from __future__ import annotations

#: Model -> chunks in all -> layers of every chunk.
PUBLISHED: dict[str, dict[int, tuple[int, ...]]] = {
    "deepseek-ai/DeepSeek-V3": {
        4: (16, 16, 16, 13), 8: (*(8,) * 7, 5), 16: (*(4,) * 15, 1), 32: (1, *(2,) * 30, 0),
    },
    "moonshotai/Kimi-K2-Instruct": {
        4: (16, 16, 16, 13), 8: (*(8,) * 7, 5), 16: (*(4,) * 15, 1), 32: (1, *(2,) * 30, 0),
    },
    # Embedding and loss as layers.
    "Qwen/Qwen3-235B-A22B": {16: (5, *(6,) * 14, 5)},
    "moonshotai/Moonlight-16B-A3B": {2: (14, 13), 4: (7, 7, 7, 6)},  # that for eight chunks has 31 layers of 27
}  # fmt: skip
