"""Megatron Bridge's vision encoders of megatron-core's modules, run without data, beside the inventory.

A process of its own (``python tests/bridge_vision.py CASE ...``), as ``bridge_rehearsal.py`` is. Prints one JSON line a
case: parameters that differ, and bytes, [inventory, rehearsal], of what the encoder saves and of its peaks.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import Any

import torch
from bridge_child import pairs, print_answers
from bridge_rehearsal import start

#: Case -> (sizes of the encoder, TP, recompute_granularity, frames, height and width in patches).
SIZES = {
    "depth": 3, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
    "temporal_patch_size": 2, "in_channels": 3, "spatial_merge_size": 2, "num_position_embeddings": 2304,
    "out_hidden_size": 4096, "deepstack_visual_indexes": [],
}  # fmt: skip
#: What ``freeze_vision_model`` freezes, with projections that train (``Qwen3VLModel.freeze``).
FROZEN = ("patch_embed", "pos_embed", "decoder.layers")
CASES: dict[str, tuple[dict[str, Any], int, str | None, tuple[int, int, int]]] = {
    "Qwen3.5-VL": ({}, 1, None, (1, 32, 48)),
    "Qwen3.5-VL, TP 4": ({}, 4, None, (1, 32, 48)),
    "Qwen3-VL": ({"deepstack_visual_indexes": [0, 1]}, 1, None, (1, 32, 48)),
    "Qwen3-VL, TP 2": ({"deepstack_visual_indexes": [0, 1]}, 2, None, (1, 16, 48)),
    "another width": (
        {"hidden_size": 768, "intermediate_size": 3072, "num_heads": 12, "out_hidden_size": 2048,
         "deepstack_visual_indexes": [1]}, 2, None, (1, 64, 32),
    ),
    "Qwen3.5-VL, recomputed": ({}, 2, "full", (1, 32, 48)),
    "Qwen3-VL, attention recomputed": ({"deepstack_visual_indexes": [1]}, 2, "selective", (1, 32, 48)),
    "Qwen3-VL, mergers alone train": ({"deepstack_visual_indexes": [1], "frozen": FROZEN}, 2, None, (1, 32, 48)),
    "Qwen3-VL, recomputed": ({"deepstack_visual_indexes": [0, 1], "depth": 4}, 2, "full", (1, 32, 48)),
}


def vision_model(sizes: dict[str, Any], run: Any, recompute: str | None) -> Any:
    """``Qwen3VLModel.__init__``: the vision model of a provider."""
    from types import SimpleNamespace

    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention import Qwen3VLSelfAttention
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.transformer_config import get_vision_model_config
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.utils import PatchMergerSubmodules
    from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.vision_model import Qwen3VLVisionModel
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_transformer_engine_spec
    from megatron.core.process_groups_config import ProcessGroupCollection

    from bridge_memory.rehearsal.megatron_config import transformer_config

    language = transformer_config(run, initialize=False)
    language.recompute_granularity = recompute
    language.recompute_method, language.recompute_num_layers = ("uniform", 1) if recompute == "full" else (None, None)
    for name in ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_use_single_mempool",
                 "cuda_graph_retain_backward_graph", "cuda_graph_warmup_steps"):
        if not hasattr(language, name):
            setattr(language, name, 0)
    config = get_vision_model_config(SimpleNamespace(**sizes), language)
    config.perform_initialization = False
    config.params_dtype, config.bf16 = torch.bfloat16, True
    spec = get_vit_layer_with_transformer_engine_spec()
    spec.submodules.self_attention.module = Qwen3VLSelfAttention
    merger = PatchMergerSubmodules(
        patch_norm=TENorm, linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = Qwen3VLVisionModel(config, spec, merger, pre_process=True, post_process=True, pg_collection=groups)
    return model.to(torch.bfloat16).to("meta").train()


def run_of(tp: int, recompute: str | None = None, **more: Any) -> Any:
    from bridge_memory import (
        AttentionSpec,
        BatchSpec,
        ImplementationSpec,
        LayerSpec,
        MLPSpec,
        ModelSpec,
        ParallelSpec,
        RecomputeSpec,
        RunSpec,
    )

    layer = LayerSpec(
        mixer=AttentionSpec(num_attention_heads=16, num_query_groups=8, kv_channels=64),
        ffn=MLPSpec(ffn_hidden_size=2048, gated=True),
    )
    model = ModelSpec(
        name="text", model_type="qwen3", hidden_size=1024, vocab_size=4096, layers=(layer,) * 2, **more
    )
    recomputed = {
        None: RecomputeSpec(), "full": RecomputeSpec(granularity="full", method="uniform", num_layers=1),
        "selective": RecomputeSpec(granularity="selective", modules=("mlp",)),
    }[recompute]
    return RunSpec(
        model=model, parallel=ParallelSpec(world_size=tp, tensor_model_parallel_size=tp, sequence_parallel=tp > 1),
        batch=BatchSpec(seq_length=4096), recompute=recomputed,
        implementation=ImplementationSpec(attention_backend="fused"),
    )


class Join(torch.autograd.Function):
    """The features, and those of the deep stack, which the language model keeps; the gradients of all come back."""

    @staticmethod
    def forward(ctx: Any, out: Any, *deep: Any) -> Any:
        ctx.shapes = [x.shape for x in deep]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad, *(torch.empty(shape, dtype=grad.dtype, device=grad.device) for shape in ctx.shapes)


def measured(name: str) -> Any:
    from bridge_memory.rehearsal.passes import Leave, measured_passes
    from bridge_memory.rehearsal.rank import on_rank
    from bridge_memory.rehearsal.tracker import Tracker

    sizes, tp, recompute, (frames, height, width) = CASES[name]
    sizes = SIZES | sizes
    run = run_of(tp)
    with on_rank(run, 0):
        frozen = sizes.pop("frozen", ())
        model = vision_model(sizes, run, recompute)
        for parameter, p in model.named_parameters():
            p.requires_grad = not parameter.startswith(frozen) if frozen else True
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        for p in model.parameters():
            p.main_grad = torch.empty(p.shape, dtype=torch.float32, device="meta")
            p.grad_added_to_main_grad = False
        grid = torch.tensor([[frames, height, width]])
        pixels = torch.empty(
            frames * height * width, sizes["in_channels"] * sizes["temporal_patch_size"] * sizes["patch_size"] ** 2,
            device="meta",
        )
        tracker = Tracker([pixels, *(p.main_grad for p in model.parameters()), *model.parameters(), *model.buffers()])
        held: list[Any] = []
        with tracker.watching(model):

            def forward() -> torch.Tensor:
                out, deep = model(pixels, grid)
                held.append(deep)
                end: torch.Tensor = Leave.apply(Join.apply(out, *deep))
                del out
                return end

            record = measured_passes(tracker, forward)
    return shapes, record


def predicted(name: str) -> Any:
    from bridge_memory.inventory.encoders.chain import encoder_chain
    from bridge_memory.readers.encoders import encoder_of
    from bridge_memory.spec import BatchSpec
    from bridge_memory.tapes.chain import compose
    from bridge_memory.tapes.context import context_of

    sizes, tp, recompute, (_, height, width) = CASES[name]
    sizes = SIZES | sizes
    encoder = encoder_of(
        {"model_type": "qwen3_vl", "vision_config": sizes, "text_config": {"hidden_size": 1024}}, "vision_config"
    )
    frozen = sizes.pop("frozen", ())
    encoder = replace(encoder, frozen=frozen)
    pixels = f"{width * sizes['patch_size']}x{height * sizes['patch_size']}"
    run = run_of(tp, recompute, encoders=(encoder,)).with_(batch=BatchSpec(seq_length=4096, image_size=pixels))
    ctx = context_of(run)
    return compose(encoder_chain(ctx, ctx.encoders[0], 0)), run


def answer(name: str) -> dict[str, Any]:
    from bridge_memory.inventory.encoders.chain import encoder_parameters
    from bridge_memory.tapes.context import context_of

    shapes, record = measured(name)
    ours, run = predicted(name)
    ctx = context_of(run)
    rows = encoder_parameters(ctx, ctx.encoders[0], 0)
    counted = sum(sum(p.numel for p in row.parameters) * row.times for row in rows)
    if os.environ.get("VERBOSE"):
        for t in record.saved:
            print(t)
        print(record.forward_peak, record.backward_peak, sep="\n")
    return {
        "parameters": [counted, sum(torch.Size(shape).numel() for shape in shapes.values())],
        **pairs(ours, record),
    }


def main(names: list[str]) -> None:
    start()
    print_answers(names or CASES, answer)


if __name__ == "__main__":
    main(sys.argv[1:])
