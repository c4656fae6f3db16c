"""Megatron Bridge's vision encoders of megatron-core's modules, run without data, beside the inventory.

A process of its own (``python tests/bridge_vision.py CASE ...``), as ``bridge_rehearsal.py`` is. Prints one JSON line a
case: parameters that differ, and bytes, [inventory, rehearsal], of what the encoder saves and of its peaks.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

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

#: Sizes of EXAONE 4.5's encoder, and its cases, as above.
EXAONE = {
    "depth": 3, "hidden_size": 1024, "intermediate_size": 2736, "num_heads": 16, "num_key_value_heads": 4,
    "patch_size": 14, "temporal_patch_size": 2, "in_channels": 3, "spatial_merge_size": 2, "out_hidden_size": 2048,
    "fullatt_block_indexes": [1], "window_size": 112,
}  # fmt: skip
EXAONE_CASES: dict[str, tuple[dict[str, Any], int, str | None, tuple[int, int, int]]] = {
    "EXAONE 4.5": ({}, 1, None, (1, 32, 48)),
    "EXAONE 4.5, TP 4": ({"depth": 2}, 4, None, (1, 40, 40)),
    "EXAONE 4.5, another width": (
        {"hidden_size": 1280, "intermediate_size": 3420, "num_key_value_heads": 8, "out_hidden_size": 5120}, 2, None,
        (1, 24, 56),
    ),
    "EXAONE 4.5, recomputed": ({}, 2, "full", (1, 32, 48)),
}
#: Case -> (sizes of RADIO, TP, whether as Nemotron-Omni runs it, images or tiles, frozen modules).
RADIO: dict[str, tuple[dict[str, Any], int, bool, int, tuple[str, ...]]] = {
    "tiles": ({"num_layers": 2}, 1, False, 3, ()),
    "tiles, TP 4": ({"num_layers": 3}, 4, False, 13, ()),
    "tiles, another width": (
        {"num_layers": 2, "hidden_size": 1024, "ffn_hidden_size": 4096, "kv_channels": 64}, 2, False, 5, (),
    ),
    "images": ({"num_layers": 2}, 2, True, 2, ()),
    "images, another width": (
        {"num_layers": 3, "hidden_size": 768, "ffn_hidden_size": 3072, "num_attention_heads": 12,
         "num_query_groups": 12, "kv_channels": 64}, 1, True, 1, (),
    ),
    "images, projector alone trains": ({"num_layers": 3}, 2, True, 2, ("vision_model",)),
    "many images, projector alone trains": ({"num_layers": 3}, 1, True, 5, ("vision_model",)),
    "tiles, adapters": ({"num_layers": 3}, 2, False, 4, ("",)),
    "video": ({"num_layers": 2}, 2, True, 8, ()),
    "video, frozen but for the projector": ({"num_layers": 2}, 4, True, 8, ("vision_model",)),
}  # fmt: skip
#: Height and width of an image in patches; the projector's widths.
GRID, PROJECTED = (32, 48), (20480, 2048)
#: Targets of Nemotron's recipes with LoRA.
ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
#: Fields of a provider whose videos are embedded in pairs of frames.
VIDEO = {"temporal_patch_dim": 2, "separate_video_embedder": True}


def llava(sizes: dict[str, Any], tp: int, omni: bool, video: bool) -> Any:
    """What Megatron Bridge's provider makes, of RADIO with these sizes and without a language model."""
    from megatron.bridge.models.nemotron_omni import nemotron_omni_provider as omni_module
    from megatron.bridge.models.nemotron_vl import nemotron_vl_provider as vl_module

    module = omni_module if omni else vl_module
    real = module.LLaVAModel

    def encoder_alone(**given: Any) -> Any:
        for name, value in sizes.items():
            setattr(given["vision_transformer_config"], name, value)
        return real(**{**given, "add_decoder": False})

    common = {
        "hidden_size": PROJECTED[1], "ffn_hidden_size": 4096, "num_attention_heads": 16, "num_query_groups": 8,
        "kv_channels": 128, "hybrid_layer_pattern": "M-", "vocab_size": 4096, "tensor_model_parallel_size": tp,
        "seq_length": 4096, "perform_initialization": False, "bf16": True, "params_dtype": torch.bfloat16,
        "gradient_accumulation_fusion": False,
    }  # fmt: skip
    if omni:  # as ``nemotron_omni_bridge.py: provider_bridge`` sets them
        provider = omni_module.NemotronOmniModelProvider(
            **common, image_token_index=18, vision_class_token_len=10, use_vision_backbone_fp8_arch=False,
            radio_interpolate_only_cpe=False, **(VIDEO if video else {}),
        )
    else:
        provider = vl_module.NemotronVLModelProvider(**common, activation_func=vl_module.squared_relu)
    provider.finalize()
    with mock.patch.object(module, "LLaVAModel", encoder_alone):
        return provider.provide().llava_model.to(torch.bfloat16).to("meta").train()


def measured_radio(name: str) -> Any:
    from megatron.bridge.training.nemotron_omni_step import _build_vision_packed_seq_params

    sizes, tp, omni, number, frozen = RADIO[name]
    video = name.startswith("video")
    (height, width), more = (32, 32) if video else GRID, {}
    if omni:
        pixels = torch.empty(1, number * height * width, 768, dtype=torch.bfloat16, device="meta")
        images = torch.tensor([[16 * height, 16 * width]] * number)
        more = {"imgs_sizes": images, "vision_packed_seq_params": _build_vision_packed_seq_params(images)}
        if video:
            more["num_frames"] = [number]
    else:
        pixels = torch.empty(number, 3, 512, 512, dtype=torch.bfloat16, device="meta")
    silence = torch.empty(0, device="meta")

    def encoded(model: Any) -> Any:
        return model(pixels, None, None, None, sound_clips=silence, **more)[0]

    def build() -> Any:
        model = llava(sizes, tp, omni, video)
        if "adapters" not in name:
            return model
        from megatron.bridge.peft.lora import LoRA

        return LoRA(target_modules=list(ADAPTED), dim=16)(model, training=True).to(torch.bfloat16).to("meta")

    return passes_of(build, run_of(tp), () if "adapters" in name else frozen, pixels, encoded)


def passes_of(build: Any, run: Any, frozen: tuple[str, ...], pixels: Any, encoded: Any) -> Any:
    """Shapes of the parameters, and a record of both passes."""
    from bridge_memory.rehearsal.passes import Leave, measured_passes
    from bridge_memory.rehearsal.rank import on_rank
    from bridge_memory.rehearsal.tracker import Tracker

    with on_rank(run, 0):
        model = build()
        for parameter, p in model.named_parameters():
            p.requires_grad &= not parameter.startswith(frozen) if frozen else True
        shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
        for p in model.parameters():
            p.main_grad = torch.empty(p.shape, dtype=torch.float32, device="meta")
            p.grad_added_to_main_grad = False
        tracker = Tracker([pixels, *(p.main_grad for p in model.parameters()), *model.parameters(), *model.buffers()])
        with tracker.watching(model):

            def forward() -> torch.Tensor:
                end: torch.Tensor = Leave.apply(encoded(model))
                return end

            record = measured_passes(tracker, forward)
    return shapes, record


def predicted_radio(name: str) -> Any:
    from bridge_memory.inventory.encoders.chain import encoder_chain
    from bridge_memory.spec import BatchSpec, EncoderSpec, EncoderStructure, PeftSpec
    from bridge_memory.tapes.chain import compose
    from bridge_memory.tapes.context import context_of

    sizes, tp, omni, number, frozen = RADIO[name]
    video = name.startswith("video")
    (height, width), hidden = (32, 32) if video else GRID, sizes.get("hidden_size", 1280)
    structure = EncoderStructure(
        kind="radio", hidden_size=hidden, ffn_hidden_size=sizes.get("ffn_hidden_size", 5120),
        num_layers=sizes["num_layers"], num_heads=sizes.get("num_attention_heads", 16), out_size=PROJECTED[1],
        merger_size=PROJECTED[0], patch_size=16, merge_size=2, positions=128 * 128, class_tokens=10 if omni else 16,
        image_size=0 if omni else 512, tiles=0 if omni else 12, projector_bias=False,
        temporal_patch_size=2 if video else 1,
    )
    batch = BatchSpec(seq_length=4096, images_per_sample=number, image_size=f"{16 * width}x{16 * height}")
    if video:
        batch = replace(batch, images_per_sample=0, video_frames=number)
    if not omni:
        batch = BatchSpec(seq_length=4096, patches_per_image=1024 * number)
    adapted = "adapters" in name
    encoder = EncoderSpec("vision", 1, structure=structure, frozen=() if adapted else frozen)
    run = run_of(tp, encoders=(encoder,), normalization="RMSNorm").with_(batch=batch)
    run = run.with_(implementation=replace(run.implementation, gradient_accumulation_fusion=False))
    if adapted:
        run = run.with_(peft=PeftSpec(scheme="lora", dim=16, target_modules=ADAPTED))
    ctx = context_of(run)
    return compose(encoder_chain(ctx, ctx.encoders[0], 0)), run


def language_config(run: Any, recompute: str | None) -> Any:
    """The language model's, of which the encoder's takes some fields."""
    from bridge_memory.rehearsal.megatron_config import transformer_config

    language = transformer_config(run, initialize=False)
    language.recompute_granularity = recompute
    language.recompute_method, language.recompute_num_layers = ("uniform", 1) if recompute == "full" else (None, None)
    for name in ("enable_cuda_graph", "external_cuda_graph", "cuda_graph_use_single_mempool",
                 "cuda_graph_retain_backward_graph", "cuda_graph_warmup_steps", "cuda_graph_scope"):
        if not hasattr(language, name):
            setattr(language, name, 0)
    return language


#: Case -> (TP, samples of a microbatch, recompute_granularity) of a first stage into whose embeddings features are put.
JOINS: dict[str, tuple[int, int, str | None]] = {
    "features among embeddings": (1, 1, None), "features among embeddings, sequence parallel": (4, 2, None),
    "features among embeddings, recomputed": (2, 1, "full"),
}
FEATURES = 1024


def run_of_join(name: str) -> Any:
    from bridge_memory import EncoderSpec, EncoderStructure

    tp, samples, recompute = JOINS[name]
    structure = EncoderStructure(
        kind="qwen2_5_vl", hidden_size=64, ffn_hidden_size=128, num_layers=1, num_heads=2, out_size=1024, patch_size=14,
        temporal_patch_size=2, merge_size=2, window_size=112,
    )
    run = run_of(tp, recompute, encoders=(EncoderSpec("vision", 1, structure=structure),))
    batch = replace(run.batch, micro_batch_size=samples, patches_per_image=4 * FEATURES)
    return run.with_(
        batch=batch, parallel=replace(run.parallel, world_size=2 * tp, pipeline_model_parallel_size=2),
        model=replace(run.model, layers=run.model.layers * 2),
    )


def measured_join(name: str) -> Any:
    """``GLM45VModel.forward`` without its encoder, around the first stage of megatron-core's GPTModel."""
    from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region

    from bridge_memory.rehearsal.model import build_chunks
    from bridge_memory.rehearsal.passes import Enter, Leave, measured_passes
    from bridge_memory.rehearsal.rank import on_rank
    from bridge_memory.rehearsal.tracker import Tracker

    tp, samples, _ = JOINS[name]
    run = run_of_join(name)
    with on_rank(run, 0):
        (chunk,) = build_chunks(run)
        chunk.embedding.scatter_to_sequence_parallel = chunk.embedding.reduce_scatter_embeddings = False
        chunk.embedding.word_embeddings.reduce_scatter_embeddings = False
        for p in chunk.parameters():
            p.main_grad = torch.empty(p.shape, dtype=torch.float32, device="meta")
            p.grad_added_to_main_grad = False
        ids = torch.empty(samples, 4096, dtype=torch.int64, device="meta")
        anchor = torch.empty((), device="meta", requires_grad=True)
        given = [ids, anchor, *(p.main_grad for p in chunk.parameters()), *chunk.parameters(), *chunk.buffers()]
        tracker = Tracker(given)
        with tracker.watching(chunk):

            def forward() -> torch.Tensor:
                found = chunk.embedding(input_ids=ids, position_ids=None).transpose(1, 0).contiguous()
                images = torch.cat([Enter.apply(anchor, (samples * FEATURES, 1024), torch.bfloat16)])
                mask = (ids == 5).unsqueeze(-1).expand_as(found)
                found = found.masked_scatter(mask, images)
                found = found.transpose(1, 0).contiguous()
                if tp > 1:
                    found = scatter_to_sequence_parallel_region(found)
                out = chunk(input_ids=None, position_ids=None, attention_mask=None, decoder_input=found)
                end: torch.Tensor = Leave.apply(out)
                del out, images, mask, found
                return end

            record = measured_passes(tracker, forward)
    return {}, record


def predicted_join(name: str) -> Any:
    from bridge_memory.inventory import stack
    from bridge_memory.inventory.encoders import chain
    from bridge_memory.spec.layout import layout
    from bridge_memory.tapes.context import context_of

    run = run_of_join(name)
    without = mock.patch.object(chain, "encoder_chain", lambda *_: [])
    with without, mock.patch.object(stack, "pixel_bytes", lambda _: 0):
        shape = layout(run.model, run.parallel).shapes(run.model)[0][0]
        return stack.chunk_inventory(run.model, shape, context_of(run), True), run


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

    config = get_vision_model_config(SimpleNamespace(**sizes), language_config(run, recompute))
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


def exaone_model(sizes: dict[str, Any], run: Any, recompute: str | None) -> Any:
    """``Exaone45Model.__init__``: the vision model of a provider."""
    from types import SimpleNamespace

    from megatron.bridge.models.exaone.exaone45.modelling_exaone45 import vision_model
    from megatron.bridge.models.exaone.exaone45.modelling_exaone45.transformer_config import get_vision_model_config
    from megatron.bridge.models.exaone.exaone45.modelling_exaone45.utils import PatchMergerSubmodules
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm, TERowParallelLinear
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_transformer_engine_spec
    from megatron.core.process_groups_config import ProcessGroupCollection

    config = get_vision_model_config(SimpleNamespace(**sizes), language_config(run, recompute))
    config.perform_initialization = False
    config.params_dtype, config.bf16 = torch.bfloat16, True
    merger = PatchMergerSubmodules(
        patch_norm=TENorm, linear_fc1=TEColumnParallelLinear, linear_fc2=TERowParallelLinear
    )
    model = vision_model.Exaone45VisionModel(
        config, get_vit_layer_with_transformer_engine_spec(), merger, pre_process=True, post_process=True,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    return model.to(torch.bfloat16).to("meta").train()


def packed(rows: int) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    ends = torch.tensor([0, rows], dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=rows, max_seqlen_kv=rows
    )


def measured(name: str) -> Any:
    exaone = name in EXAONE_CASES
    sizes, tp, recompute, (frames, height, width) = (EXAONE_CASES if exaone else CASES)[name]
    sizes = (EXAONE if exaone else SIZES) | sizes
    frozen, run = sizes.pop("frozen", ()), run_of(tp)
    grid = torch.tensor([[frames, height, width]])
    pixels = torch.empty(
        frames * height * width, sizes["in_channels"] * sizes["temporal_patch_size"] * sizes["patch_size"] ** 2,
        device="meta",
    )
    held: list[Any] = []

    def encoded(model: Any) -> Any:
        if exaone:  # ends of windows without values; no size depends on them
            model.get_packed_seq_params = lambda *_: packed(frames * height * width)
            with mock.patch.object(torch, "unique_consecutive", lambda ends: ends):
                return model(pixels, grid)
        out, deep = model(pixels, grid)
        held.append(deep)
        return Join.apply(out, *deep)

    make = exaone_model if exaone else vision_model
    return passes_of(lambda: make(sizes, run, recompute), run, frozen, pixels, encoded)


def predicted(name: str) -> Any:
    from bridge_memory.inventory.encoders.chain import encoder_chain
    from bridge_memory.readers.encoders import encoder_of
    from bridge_memory.spec import BatchSpec
    from bridge_memory.tapes.chain import compose
    from bridge_memory.tapes.context import context_of

    exaone = name in EXAONE_CASES
    sizes, tp, recompute, (_, height, width) = (EXAONE_CASES if exaone else CASES)[name]
    sizes = (EXAONE if exaone else SIZES) | sizes
    encoder = encoder_of(
        {"model_type": "exaone4_5" if exaone else "qwen3_vl", "vision_config": sizes,
         "text_config": {"hidden_size": 1024}}, "vision_config",
    )
    frozen = sizes.pop("frozen", ())
    encoder = replace(encoder, frozen=frozen)
    pixels = f"{width * sizes['patch_size']}x{height * sizes['patch_size']}"
    run = run_of(tp, recompute, encoders=(encoder,)).with_(batch=BatchSpec(seq_length=4096, image_size=pixels))
    ctx = context_of(run)
    return compose(encoder_chain(ctx, ctx.encoders[0], 0)), run


#: Case -> (width, layers, heads, patches along a side, images, frozen modules) of Step-3.7's encoder.
STEP: dict[str, tuple[int, int, int, int, int, tuple[str, ...]]] = {
    "Step-3.7": (192, 3, 4, 16, 2, ()),
    "Step-3.7, another width": (320, 2, 4, 24, 3, ()),
    "Step-3.7, one image": (256, 4, 8, 20, 1, ()),
    "Step-3.7, projector alone trains": (
        192, 3, 4, 16, 2, ("conv1", "ln_pre", "positional_embedding", "transformer", "vit_downsampler"),
    ),
}


def answer_step(name: str) -> dict[str, Any]:
    """With real tensors on the CPU, as encoders of transformers are compared (``hugging_face/encoder_oracle.py``)."""
    from types import SimpleNamespace

    from megatron.bridge.models.stepfun.modelling_step37.vision_model import Step37VisionModel

    sys.path.insert(0, str(Path(__file__).parent / "hugging_face"))
    from encoder_oracle import measured as measured_on_cpu
    from encoder_oracle import recorded

    from bridge_memory.readers.encoders import encoder_of
    from bridge_memory.spec.encoders import Item

    width, layers, heads, side, number, frozen = STEP[name]
    sizes = {
        "width": width, "layers": layers, "heads": heads, "num_channels": 3, "image_size": 14 * side, "patch_size": 14,
        "mlp_ratio": 8960 / 1536, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "use_cls_token": False,
        "use_ln_pre": True, "use_ln_post": False, "use_abs_posemb": True, "use_rope2d": True, "ls_init_value": 0.1,
    }  # fmt: skip
    model = Step37VisionModel(SimpleNamespace(**sizes))
    model.align_projector = torch.nn.Linear(4 * width, 384, bias=False)

    def call(m: Any) -> Any:
        pixels = torch.zeros(number, 3, 14 * side, 14 * side, dtype=torch.bfloat16)
        return (m.align_projector(m(pixels)),)

    real = measured_on_cpu(model, call, frozen)
    spec = encoder_of({"model_type": "step3p7", "text_config": {"hidden_size": 384}, "vision_config": sizes}, "vision")
    ours = recorded(spec.structure, [Item(number, 1, side, side)], frozen, release=(5, 12))
    found = {
        "parameters": [spec.parameters, sum(p.numel() for p in model.parameters())],
        "saved": [ours.retained, real.saved], "forward": [ours.forward_peak, real.forward],
    }
    # Of a linear alone the gradient of the output, which is not measured, would be most of the difference.
    return found if frozen else {**found, "backward": [ours.backward_peak, real.backward]}


def answer(name: str) -> dict[str, Any]:
    if name in STEP:
        return answer_step(name)
    from bridge_memory.engines.peft import lora_parameters
    from bridge_memory.inventory.encoders.chain import encoder_parameters
    from bridge_memory.tapes.context import context_of

    if name in JOINS:
        (ours, _), (_, record) = predicted_join(name), measured_join(name)
        found = {"parameters": [0, 0], **pairs(ours, record)}
        if os.environ.get("VERBOSE"):
            print(*record.saved, record.forward_peak, record.backward_peak, sep="\n")
        return found
    shapes, record = (measured_radio if name in RADIO else measured)(name)
    ours, run = (predicted_radio if name in RADIO else predicted)(name)
    ctx = context_of(run)
    rows = list(encoder_parameters(ctx, ctx.encoders[0], 0))
    counted = sum(sum(p.numel for p in row.parameters) * row.times for row in rows)
    if ctx.adapters is not None:
        make = partial(lora_parameters, peft=run.peft, parallel=run.parallel)
        counted += sum(sum(p.numel for p in make(row.parameters)) * row.times for row in rows)
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
    print_answers(names or [*CASES, *EXAONE_CASES, *RADIO, *JOINS, *STEP], answer)


if __name__ == "__main__":
    main(sys.argv[1:])
