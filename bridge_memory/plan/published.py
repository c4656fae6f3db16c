"""Splits that NVIDIA wrote by hand for its recipes, to be shown beside ours.

Source: Megatron Bridge 0.6.2 ``recipes/deepseek/h100/deepseek_v3.py: set_deepseek_v3_pipeline_model_parallel_layout``,
``recipes/kimi/h100/kimi_k2.py: _get_kimi_k2_pipeline_layout``, ``recipes/moonlight/h100/moonlight_16b.py:
_get_moonlight_pipeline_layout``.
"""

from __future__ import annotations

#: Model -> chunks in all -> layers of every chunk.
PUBLISHED: dict[str, dict[int, tuple[int, ...]]] = {
    "deepseek-ai/DeepSeek-V3": {4: (16, 16, 16, 13), 8: (*(8,) * 7, 5), 16: (*(4,) * 15, 1)},
    "moonshotai/Kimi-K2-Instruct": {4: (16, 16, 16, 13), 8: (*(8,) * 7, 5), 16: (*(4,) * 15, 1)},
    "moonshotai/Moonlight-16B-A3B": {2: (14, 13), 4: (7, 7, 7, 6)},  # that for eight chunks has 31 layers of 27
}
