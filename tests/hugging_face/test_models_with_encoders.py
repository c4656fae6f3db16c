"""A whole multimodal model of the installed transformers with real tensors on the CPU: its parameters, and what a step
keeps and peaks at with an image, under torch's engines."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from hf_oracle import Graph, as_on_cuda, passes

from bridge_memory import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
    TransformersSpec,
    estimate,
)
from bridge_memory.inventory.stack import chunk_inventory, chunk_units, named_parameters
from bridge_memory.readers.huggingface import model_from_hf_config
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.context import context_of

INSTALLED = tuple(map(int, transformers.__version__.split(".")[:2]))
SIDE, SEQ = 32, 512  # an image of 32 x 32 patches, 256 features


def config(layers: int, depth: int, width: int) -> dict[str, Any]:
    return {
        "model_type": "qwen2_5_vl", "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": layers,
        "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 1024, "max_position_embeddings": 4096,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
        "image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8,
        "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [8, 12, 12]},
        "vision_config": {
            "model_type": "qwen2_5_vl", "depth": depth, "hidden_size": width, "intermediate_size": 3 * width - 20,
            "num_heads": width // 80, "out_hidden_size": 768, "patch_size": 14, "spatial_merge_size": 2,
            "temporal_patch_size": 2, "window_size": 112, "fullatt_block_indexes": [depth - 1], "hidden_act": "silu",
            "in_channels": 3,
        },
    }  # fmt: skip


def built(fields: dict[str, Any], attention: str = "sdpa") -> Any:
    made = transformers.AutoConfig.for_model(**fields)
    made._attn_implementation = attention
    return transformers.Qwen2_5_VLForConditionalGeneration._from_config(made).to(torch.bfloat16).train()


def run_of(fields: dict[str, Any], **groups: Any) -> RunSpec:
    return RunSpec(
        model=model_from_hf_config(dict(fields), "small"), precision=PrecisionSpec(params_dtype="bf16"),
        batch=BatchSpec(seq_length=SEQ, micro_batch_size=1, patches_per_image=SIDE * SIDE),
        implementation=ImplementationSpec(transformer_impl="transformers"), **groups,
    )  # fmt: skip


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_model_with_its_vision_encoder(checkpoints: bool) -> None:
    fields = config(6, 5, 400)
    spec = TransformersSpec(transformers_version=INSTALLED, gradient_checkpointing=checkpoints)
    run = run_of(fields, transformers=spec)
    ((shape,),) = layout(run.model, run.parallel).shapes(run.model)
    ctx = context_of(run)
    model = built(fields, spec.attn_implementation)
    ours = sum(p.numel for p in named_parameters(chunk_units(run.model, shape, ctx)))
    assert ours == sum(p.numel() for p in model.parameters())
    if checkpoints:
        model.gradient_checkpointing_enable({"use_reentrant": spec.reentrant})
    ids = torch.full((1, SEQ), 9)
    ids[:, 1], ids[:, 2 : 2 + SIDE * SIDE // 4] = 7, 5
    inputs: dict[str, Any] = {
        "input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.zeros(SIDE * SIDE, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, SIDE, SIDE]]),
    }
    if INSTALLED >= (5, 0):
        inputs["mm_token_type_ids"] = (ids == 5).int()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    tracker = Graph(static=[*inputs.values(), *(p.grad for p in model.parameters())], device="cpu")
    with as_on_cuda(), tracker.watching(model):
        real = passes(tracker, lambda: model(**inputs, use_cache=False).loss)
    found = chunk_inventory(run.model, shape, ctx)
    assert found.retained == pytest.approx(real.retained, rel=0.005)
    assert found.forward_peak == pytest.approx(real.forward, rel=0.005)
    assert found.backward_peak == pytest.approx(real.backward, rel=0.015 if checkpoints else 0.005)


@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_every_rank_has_a_shard_of_the_encoder(engine: str) -> None:
    """Of four ranks: FSDP2 divides the first dimension of each parameter, ZeRO-3 its elements; 2 bytes each."""
    fields, ranks = config(2, 3, 240), 4
    with torch.device("meta"):
        shapes = [tuple(p.shape) for p in built(fields).parameters()]
    run = run_of(
        fields, parallel=ParallelSpec(world_size=ranks), data_parallel=DataParallelSpec(engine=engine),
    )  # fmt: skip
    (stage,) = estimate(run).stages
    weights = sum(c.bytes for c in stage.components if c.name == "weights")
    if engine == "fsdp2":
        theirs = sum(ceil(2 * ceil(s[0] / ranks) * prod(s[1:]) / 512) * 512 for s in shapes)
    else:
        theirs = sum(2 * ceil(prod(s) / ranks) for s in shapes)
    assert weights == pytest.approx(theirs, rel=0.01)
    assert not [feature for feature in estimate(run).not_modelled if "encoder" in feature]
