"""Megatron Bridge's use_transformer_engine_full_layer_spec (gpt3_175b): Transformer Engine's own ``TransformerLayer``,
as ``models/gpt_full_te_layer_autocast_spec.py`` makes it, in megatron-core's block."""

from __future__ import annotations

from typing import Any

import pytest
from installed import HERE

from bridge_memory.inventory.layer import layer_block
from bridge_memory.rehearsal import model as rehearsed
from bridge_memory.rehearsal.patches.replace import replaced
from bridge_memory.rehearsal.run import rehearse_layer
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    ImplementationSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    ParallelSpec,
    RunSpec,
)
from bridge_memory.tapes.context import context_of


def whole_layers(run: RunSpec, config: Any, vp_stage: int | None) -> tuple[Any, None]:
    """A block of Transformer Engine's layers, with megatron-core's final norm."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import BaseTransformerLayer
    from transformer_engine.pytorch import TransformerLayer

    class Whole(MegatronModule, BaseTransformerLayer):
        def __init__(self, config: Any, layer_number: int = 1, **_: Any) -> None:
            super().__init__(config=config)
            self.transformer_layer = TransformerLayer(
                config.hidden_size, config.ffn_hidden_size, config.num_attention_heads, hidden_dropout=0.0,
                attention_dropout=0.0, layer_number=layer_number, self_attn_mask_type="causal",
                tp_size=config.tensor_model_parallel_size, params_dtype=config.params_dtype,
                fuse_wgrad_accumulation=config.gradient_accumulation_fusion,
                sequence_parallel=config.sequence_parallel, set_parallel_mode=config.tensor_model_parallel_size > 1,
                fuse_qkv_params=True, device="cuda",
            )
            for part in self.modules():
                if hasattr(part, "set_tensor_parallel_group"):
                    part.set_tensor_parallel_group(parallel_state.get_tensor_model_parallel_group())

        def forward(self, hidden_states: Any, **_: Any) -> tuple[Any, None]:
            with torch.autocast(device_type="cuda", dtype=torch.bfloat16):
                return self.transformer_layer(hidden_states), None

    block, _ = GIVEN(run, config, vp_stage)
    layers = [ModuleSpec(module=Whole)] * len(block.layer_specs)
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=block.layer_norm), None


GIVEN = rehearsed.gpt_block_spec


@pytest.mark.parametrize("tp", [1, 4])
def test_it_saves_what_megatron_cores_modules_save(tp: int) -> None:
    layer = LayerSpec(
        AttentionSpec(16, 16, 128, add_qkv_bias=True, add_output_bias=True),
        MLPSpec(8192, gated=False, activation="gelu", add_bias=True),
    )
    model = ModelSpec(
        "two layers", "test", 2048, 32000, (layer,) * 2, normalization="LayerNorm", hidden_dropout=0.0,
        attention_dropout=0.0, position_embedding_type="learned_absolute", max_position_embeddings=2048,
    )
    run = RunSpec(
        model=model, parallel=ParallelSpec(world_size=8, tensor_model_parallel_size=tp),
        batch=BatchSpec(seq_length=2048, micro_batch_size=2),
        implementation=ImplementationSpec(transformer_engine=HERE),
    )
    with replaced(rehearsed, "gpt_block_spec", whole_layers):
        found = rehearse_layer(run, 1)
    cost = layer_block(layer, context_of(run)).cost
    assert cost.retained == pytest.approx(found.saved_bytes, rel=1e-5)
    # The bias and the GeLU, which torch.compile fuses on a GPU and nothing fuses here: the bound that a recipe gets,
    # six tensors [s b, f / t].
    most = 1.01 * 6 * 2 * 2048 * 2 * 8192 // tp
    assert -0.01 * cost.forward_peak <= found.forward_bytes - cost.forward_peak <= most
    assert -0.01 * cost.backward_peak <= found.backward_bytes - cost.backward_peak <= most
