"""Megatron Bridge's Wan provider and the batches of its datasets -> ModelSpec. Does not import megatron.

Source: megatron-bridge 0.6.2 ``diffusion/models/wan/wan_provider.py``, ``diffusion/data/wan/*.py``.
"""

from __future__ import annotations

from typing import Any

from bridge_memory.readers.container_fields import positive_size
from bridge_memory.spec import AttentionSpec, DiffusionSpec, LayerSpec, MLPSpec, ModelSpec, SpecError, show

WAN = "WanModelProvider"


def is_diffusion(provider: str) -> bool:
    return provider == WAN


def wan_model(model: Any, dataset: Any, name: str) -> ModelSpec:
    """The model that ``WanModelProvider.provide`` builds. Raises SpecError."""
    heads, h = positive_size(model, "num_attention_heads"), positive_size(model, "hidden_size")
    d = positive_size(model, "kv_channels", h // heads)
    for field, value in (("qk_layernorm", True), ("add_bias_linear", True), ("layernorm_across_heads", True),
                         ("gated_linear_unit", False), ("qkv_format", "thd")):  # fmt: skip
        found = getattr(model, field, value)
        if found != value:
            raise SpecError(f"model.{field} ({show(found)}) is not what Wan is recorded with; set it to {value}")
    layer = LayerSpec(
        AttentionSpec(heads, heads, d, add_qkv_bias=True, add_output_bias=True, qk_layernorm="full"),
        MLPSpec(positive_size(model, "ffn_hidden_size", 4 * h), gated=False, activation="gelu", add_bias=True),
        arrangement="wan",
    )
    samples, text = _samples(dataset), positive_size(dataset, "context_seq_len", 512, part="dataset")
    sizes = {
        key: positive_size(model, key, default)
        for key, default in (
            ("in_channels", 16), ("out_channels", 16), ("patch_temporal", 1), ("patch_spatial", 2), ("freq_dim", 256),
            ("text_dim", 4096),
        )
    }
    assumptions = [] if _mock(dataset) else [
        f"every micro batch is one pack of dataset.seq_length patches, with a text of {samples * text} tokens"
    ]
    return ModelSpec(
        name=name, model_type="wan", hidden_size=h, vocab_size=1, make_vocab_size_divisible_by=1,
        layers=(layer,) * positive_size(model, "num_layers"), rotary_dim=d, assumptions=tuple(assumptions),
        diffusion=DiffusionSpec(
            text_width=positive_size(model, "crossattn_emb_size", h), head_dim=d, text_tokens=samples * text, **sizes
        ),
    )  # fmt: skip


def patches_of(model: Any, dataset: Any) -> int:
    """Patches of a micro batch: those of mock data, else as many as a pack has. Raises SpecError."""
    if not _mock(dataset):
        return positive_size(dataset, "seq_length", part="dataset")
    frames, height, width = (
        positive_size(dataset, name, default, part="dataset")
        for name, default in (("F_latents", 24), ("H_latents", 104), ("W_latents", 60))
    )
    along, across = positive_size(model, "patch_temporal", 1), positive_size(model, "patch_spatial", 2)
    return _samples(dataset) * (frames // along) * (height // across) * (width // across)


def _mock(dataset: Any) -> bool:
    """Whether data are made up: no path is given (``wan_energon_datamodule.py: WanDatasetConfig.build_datasets``)."""
    return not getattr(dataset, "path", None)


def _samples(dataset: Any) -> int:
    return positive_size(dataset, "number_packed_samples", 1, part="dataset") if _mock(dataset) else 1
