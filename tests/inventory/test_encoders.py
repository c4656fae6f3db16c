"""Encoders of transformers beside Megatron's layers: by hand, in pipelines, in searches and frozen."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory import BatchSpec, EncoderSpec, EncoderStructure, RunSpec, SpecError, estimate, search
from bridge_memory.components import Part
from bridge_memory.estimation import peaks
from bridge_memory.inventory.encoders.chain import encoder_parameters
from bridge_memory.readers import resolve_model
from bridge_memory.readers.encoders import encoder_of
from bridge_memory.readers.nemotron_provider import encoders_of_nemotron
from bridge_memory.reserved import replayed, why_not
from bridge_memory.spec.encoders import items_of
from bridge_memory.speed.hardware import hardware_of
from bridge_memory.speed.megatron.step_time import step_time
from bridge_memory.tapes.context import context_of

H, F, LAYERS, HEADS = 256, 512, 3, 4
STRUCTURE = EncoderStructure(
    kind="glm4v", hidden_size=H, ffn_hidden_size=F, num_layers=LAYERS, num_heads=HEADS, out_size=2048, patch_size=14,
    temporal_patch_size=2, merge_size=2, merger_size=1024, positions=576, qkv_bias=False,
)
BASE = resolve_model("meta-llama/Llama-3.2-1B")


def run(frozen: tuple[str, ...] = (), *, batch: BatchSpec | None = None, **fields: object) -> RunSpec:
    plain = RunSpec(model=BASE)
    ctx = context_of(replace(plain, model=replace(BASE, encoders=(EncoderSpec("visual", 1, structure=STRUCTURE),))))
    count = sum(p.numel * times for few, times in encoder_parameters(ctx, ctx.encoders[0], 0) for p in few)
    encoder = EncoderSpec("visual", count, structure=STRUCTURE, frozen=frozen)
    whole = replace(plain, model=replace(BASE, encoders=(encoder,)), batch=batch or BatchSpec(patches_per_image=400))
    return whole.with_fields(**fields)


def of_encoder(one: RunSpec) -> int:
    return sum(c.bytes for c in estimate(one).stages[0].components if c.part is Part.ENCODER)


def test_a_layer_by_hand() -> None:
    """A patch keeps in a layer: two norms 2 x (4 h + 2 h + 2 h + 4), queries, keys and values 6 h, queries and keys
    rotated 4 h, two tables in fp32 8 d, the scores' sums 4 a, attention's output twice 4 h, and four arrays of the MLP
    8 f: of 400 patches, and as much for each microbatch in flight."""
    layer = 2 * (8 * H + 4) + 6 * H + 4 * H + 8 * (H // HEADS) + 4 * HEADS + 4 * H + 8 * F
    one = of_encoder(run())
    deeper = replace(STRUCTURE, num_layers=LAYERS + 1)
    whole = run()
    more = replace(whole, model=replace(whole.model, encoders=(EncoderSpec("visual", 1, structure=deeper),)))
    assert of_encoder(more) - one == 400 * layer


@pytest.mark.parametrize(("kind", "tables"), [("qwen3_vl", 4), ("radio", 0)])
def test_a_layer_of_megatrons_blocks_by_hand(kind: str, tables: int) -> None:
    """A row keeps: two norms 2 x (2 h + 2 h + 8), queries, keys and values 6 h, attention's output 2 h, the sums of its
    scores 4 a, two arrays of the MLP 4 f; and tables of the rotation in fp32, 4 d each. All is the encoder's part."""
    layer = 8 * H + 16 + 6 * H + 2 * H + 4 * HEADS + 4 * F + tables * 4 * (H // HEADS)
    structure = replace(STRUCTURE, kind=kind, num_layers=LAYERS)

    def of(layers: int) -> int:
        encoder = EncoderSpec("visual", 1, structure=replace(structure, num_layers=layers))
        return of_encoder(RunSpec(model=replace(BASE, encoders=(encoder,)), batch=BatchSpec(patches_per_image=400)))

    assert of(LAYERS + 1) - of(LAYERS) == 400 * layer


def test_it_is_held_once_a_microbatch_in_flight_on_the_first_stage() -> None:
    sizes = {"world_size": 4, "pipeline_model_parallel_size": 4, "global_batch_size": 8}
    alone, piped = of_encoder(run()), run(**sizes)
    stages = estimate(piped).stages
    assert sum(c.bytes for c in stages[0].components if c.part is Part.ENCODER) == 4 * alone
    assert not any(c.part is Part.ENCODER for stage in stages[1:] for c in stage.components)


def test_tensor_parallel_ranks_have_it_whole() -> None:
    sizes = {"world_size": 2, "tensor_model_parallel_size": 2}
    assert of_encoder(run(**sizes, sequence_parallel=False)) == of_encoder(run())


def test_sequence_parallel_ranks_keep_the_embeddings_whole() -> None:
    """The first layer's input is a view of them: it keeps the storage of all tokens, whose own part it counts."""
    sizes = {"world_size": 4, "tensor_model_parallel_size": 4}
    batch = BatchSpec(seq_length=2048, patches_per_image=400)
    without = of_encoder(run(batch=batch, **sizes, sequence_parallel=False))
    assert of_encoder(run(batch=batch, **sizes)) == without + 2048 * 3 // 4 * BASE.hidden_size * 2
    assert of_encoder(run(batch=replace(batch, patches_per_image=None, images_per_sample=0), **sizes)) == (
        2048 * 3 // 4 * BASE.hidden_size * 2
    )


def test_packed_samples_have_their_images() -> None:
    """Two samples of a microbatch, as two rows or as one packed row."""
    two = BatchSpec(patches_per_image=400, micro_batch_size=2, seq_length=2048)
    assert of_encoder(run(batch=two)) == of_encoder(run(batch=replace(two, packed_sequences=True)))


@pytest.mark.parametrize(("packed", "image"), [
    (False, {"patches_per_image": 800}), (True, {"patches_per_image": 800}), (False, {"images_per_sample": 0}),
])  # fmt: skip
def test_a_search_finds_the_peaks_of_estimates(packed: bool, image: dict[str, int]) -> None:
    base = run(batch=BatchSpec(seq_length=1024, global_batch_size=32, packed_sequences=packed, **image))
    rows = search(base, gpu="H100", num_gpus=4).rows
    assert len({row.run.batch.micro_batch_size for row in rows}) > 1
    for row in rows[::7]:
        assert row.peak == max(stage.peak_bytes for stage in peaks(row.run))


@pytest.mark.parametrize("fields", [{}, {"dynamic_resolution": True}])
def test_a_search_divides_megatrons_encoders(fields: dict[str, Any]) -> None:
    (encoder,) = encoders_of_nemotron(SimpleNamespace(hidden_size=2048, vision_model_type="radio", **fields))
    batch = BatchSpec(seq_length=1024, global_batch_size=32, images_per_sample=2, image_size="512x512")
    base = RunSpec(model=replace(BASE, encoders=(encoder,)), batch=batch)
    rows = search(base, gpu="H100", num_gpus=4).rows
    assert len({row.run.parallel.tp for row in rows}) > 1
    for row in rows[::9]:
        assert row.peak == max(stage.peak_bytes for stage in peaks(row.run))


@pytest.mark.parametrize(("images", "share"), [(4, 2), (3, 2), (1, 1)])
def test_images_that_are_dealt_to_context_parallel_ranks(images: int, share: int) -> None:
    """``vision_dp_when_cp``: a rank's layers keep what they keep of its own images, the largest share; the embeddings
    among which the features of all are put are the same."""

    def of(number: int, *, dealt: bool, layers: int) -> int:
        structure = replace(STRUCTURE, kind="qwen3_vl", num_layers=layers, dealt=dealt)
        plain = RunSpec(model=replace(BASE, encoders=(EncoderSpec("visual", 1, structure=structure),)))
        batch = BatchSpec(seq_length=2048, images_per_sample=number, patches_per_image=400)
        return of_encoder(plain.with_(batch=batch).with_fields(world_size=2, context_parallel_size=2))

    def layer(number: int, *, dealt: bool) -> int:
        return of(number, dealt=dealt, layers=5) - of(number, dealt=dealt, layers=4)

    assert layer(images, dealt=True) == layer(share, dealt=False)


def test_only_qwen3_vl_deals_images() -> None:
    with pytest.raises(SpecError, match="dealt of an encoder"):
        replace(STRUCTURE, dealt=True)


def test_radio_in_fp8_is_listed() -> None:
    """Its config is a copy of the language model's; the other Megatron encoders' configs are made anew, in bf16."""
    (encoder,) = encoders_of_nemotron(nemotron())
    one = RunSpec(model=replace(BASE, encoders=(encoder,)), batch=BatchSpec(patches_per_image=1024))
    assert not estimate(one).not_modelled
    (said,) = estimate(one.with_fields(fp8="hybrid")).not_modelled
    assert said.startswith(f"{encoder.name}: linears in fp8")


def test_tiles_have_a_size() -> None:
    with pytest.raises(SpecError, match="image_size"):
        replace(STRUCTURE, kind="radio", tiles=12)


def test_frozen_encoders_keep_their_weights() -> None:
    """Two bytes of each frozen parameter stay; without gradients (4) and Adam's states (12)."""
    def state(one: RunSpec) -> dict[str, int]:
        found: dict[str, int] = {}
        for c in estimate(one).stages[0].components:
            found[c.role.value] = found.get(c.role.value, 0) + c.bytes
        return found

    plain = state(RunSpec(model=BASE, batch=BatchSpec()))
    trained, frozen = state(run()), state(run(("",)))
    count = run().model.encoders[0].parameters
    for role, wanted in {"weights": 2, "gradients": 4, "optimizer": 12}.items():
        assert trained[role] - plain[role] == pytest.approx(wanted * count, rel=1e-3)
        left = wanted * count if role == "weights" else 0
        assert frozen[role] - plain[role] == pytest.approx(left, rel=1e-2, abs=4096)
    assert of_encoder(run(("",))) == of_mask(4096)


def of_mask(tokens: int) -> int:
    """The placeholders' mask, a byte a token: ``masked_scatter`` needs it for the token embeddings' gradient."""
    return tokens


def test_adapters_freeze_it() -> None:
    one = run(**{"peft.scheme": "lora", "peft.dim": 16})
    assert of_encoder(one) == 0
    assert estimate(one).stages[0].optimizer_bytes == pytest.approx(
        estimate(RunSpec(model=BASE).with_fields(**{"peft.scheme": "lora", "peft.dim": 16})).stages[0].optimizer_bytes
    )


def test_a_frozen_language_model_trains_its_projector() -> None:
    """Gradients (4 bytes) and states (12) of the merger's parameters alone; the language model's layers all run
    backward, for the gradient of the features."""
    frozen = ("patch_embed", "post_conv_layernorm", "embeddings", "blocks", "post_layernorm", "downsample")
    one = run(frozen, **{"peft.scheme": "frozen"})
    (stage,) = estimate(one).stages
    out, inner = STRUCTURE.out_size, STRUCTURE.merger_size
    merger = out * out + 2 * out + 3 * out * inner
    assert sum(c.bytes for c in stage.components if c.role.value == "gradients") == pytest.approx(4 * merger, rel=1e-3)
    assert stage.optimizer_bytes == pytest.approx(12 * merger, rel=1e-3)
    adapted = estimate(run(**{"peft.scheme": "lora", "peft.dim": 1})).stages[0]
    assert stage.activation_bytes > adapted.activation_bytes / 3


def test_what_is_stated_must_fit_the_sequence() -> None:
    with pytest.raises(SpecError, match=r"seq_length \(512\) is less than the 1280 visual tokens of a sample"):
        run(batch=BatchSpec(seq_length=512, image_size="1120x896"))
    assert items_of(STRUCTURE, BatchSpec(seq_length=512))[0].patches // 4 <= 512


@pytest.mark.parametrize("size", ["", "x", "10", "0x4", "-1x4", "1e3x4", "4x4x4", "9999999x4", "\u0664x4"])
def test_a_size_that_is_none(size: str) -> None:
    with pytest.raises(SpecError, match="image_size"):
        BatchSpec(image_size=size)


def test_two_sizes_of_one_image() -> None:
    with pytest.raises(SpecError, match="both say"):
        BatchSpec(image_size="4x4", patches_per_image=4)


def test_a_frozen_language_model_without_anything_that_trains() -> None:
    with pytest.raises(SpecError, match="nothing would train"):
        RunSpec(model=BASE).with_fields(**{"peft.scheme": "frozen"})


TEXT = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "vocab_size": 32000}  # fmt: skip
VISION = {"hidden_size": 192, "intermediate_size": 344, "num_hidden_layers": 3, "num_attention_heads": 6,
          "image_size": 224, "patch_size": 14}  # fmt: skip
WRAPPERS = {
    "qwen2_5_vl": {"vision_config": {
        "depth": 3, "hidden_size": 128, "intermediate_size": 344, "num_heads": 4, "out_hidden_size": 512,
        "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3, "window_size": 112,
        "fullatt_block_indexes": [1]}},
    "exaone4_5": {"vision_config": {
        "depth": 3, "hidden_size": 128, "intermediate_size": 344, "num_heads": 4, "num_key_value_heads": 2,
        "out_hidden_size": 512, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3,
        "window_size": 112, "fullatt_block_indexes": [1]}},
    "glm4v_moe": {"vision_config": {
        "depth": 3, "hidden_size": 128, "intermediate_size": 344, "num_heads": 4, "out_hidden_size": 512,
        "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3, "image_size": 224,
        "attention_bias": True}},
    "gemma3": {"vision_config": VISION, "mm_tokens_per_image": 16},
    "mistral3": {"vision_config": {**VISION, "head_dim": 32}, "spatial_merge_size": 2, "vision_feature_layer": -1},
    "qwen2_audio": {"audio_config": {
        "d_model": 128, "encoder_ffn_dim": 344, "encoder_layers": 3, "encoder_attention_heads": 4,
        "max_source_positions": 1500, "num_mel_bins": 128}},
    "kimi_k25": {"vision_config": {
        "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 3, "num_attention_heads": 4,
        "patch_size": 14, "pos_emb_height": 16, "pos_emb_width": 16}},
    "step3p7": {"vision_config": {
        "width": 128, "layers": 3, "heads": 4, "image_size": 224, "patch_size": 14, "hidden_act": "quick_gelu",
        "use_ln_pre": True, "use_ln_post": False, "ls_init_value": 0.1}},
    "qwen3_omni_moe_vision_encoder": {"vision_config": {
        "depth": 3, "hidden_size": 128, "intermediate_size": 344, "num_heads": 4, "out_hidden_size": 512,
        "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 576,
        "deepstack_visual_indexes": [1]}},
    "qwen3_omni_moe_audio_encoder": {"audio_config": {
        "d_model": 128, "encoder_ffn_dim": 344, "encoder_layers": 3, "encoder_attention_heads": 4, "output_dim": 512,
        "downsample_hidden_size": 48, "num_mel_bins": 80, "n_window": 50, "n_window_infer": 800}},
}  # fmt: skip


@pytest.mark.parametrize("kind", WRAPPERS)
def test_what_is_recorded_has_the_parameters_that_are_counted(kind: str) -> None:
    """The count is the reader's, which test_huggingface_siblings.py compares with transformers."""
    encoder = encoder_of({"model_type": kind, "text_config": TEXT, **WRAPPERS[kind]}, "encoder")
    assert encoder is not None and encoder.structure is not None
    one = RunSpec(model=replace(BASE, encoders=(encoder,)))
    ctx = context_of(one)
    (recorded,) = ctx.encoders
    assert sum(p.numel * n for few, n in encoder_parameters(ctx, recorded, 0) for p in few) == encoder.parameters


def nemotron(**fields: object) -> SimpleNamespace:
    return SimpleNamespace(hidden_size=512, vision_model_type="radio", **fields)


@pytest.mark.parametrize("fields", [
    {}, {"add_bias_linear": True, "normalization": "LayerNorm"},
    {"radio_force_eval_mode": True, "use_vision_backbone_fp8_arch": False, "vision_class_token_len": 10,
     "vision_proj_ffn_hidden_size": 1024, "dynamic_resolution": True, "temporal_patch_dim": 2,
     "separate_video_embedder": True},
])  # fmt: skip
def test_radio_has_the_parameters_that_are_counted(fields: dict[str, object]) -> None:
    """Those of the provider's code; bridge_vision.py compares the recorded ones with megatron-core's modules."""
    (encoder,) = encoders_of_nemotron(nemotron(**fields))
    kept = {"normalization": fields.get("normalization", "RMSNorm")}
    one = RunSpec(model=replace(BASE, encoders=(encoder,), **kept))
    ctx = context_of(one)
    rows = encoder_parameters(ctx, ctx.encoders[0], 0)
    assert sum(p.numel * n for few, n in rows for p in few) == encoder.parameters
    divided = context_of(one.with_fields(world_size=4, tensor_model_parallel_size=4))
    rows = encoder_parameters(divided, divided.encoders[0], 0)
    on_rank = encoder.parameters - encoder.sharded + encoder.sharded // 4
    assert sum(p.numel * n for few, n in rows for p in few) == on_rank


@pytest.mark.parametrize(("given", "tiles"), [
    ({}, 13), ({"seq_length": 2048}, 8), ({"image_size": "512x512"}, 1), ({"image_size": "1024x1024"}, 5),
    ({"image_size": "2000x500"}, 5), ({"image_size": "1500x1000"}, 7), ({"patches_per_image": 3000}, 3),
    ({"image_size": "4000x3000"}, 13),
])  # fmt: skip
def test_an_image_is_cut_into_tiles(given: dict[str, Any], tiles: int) -> None:
    """The grid of at most 12 tiles whose ratio is nearest, and a thumbnail; 256 tokens each. 2000 x 500 is as wide as 4
    tiles in a row, 1500 x 1000 as 3 x 2, since 6 tiles are no more than twice its pixels; 4000 x 3000 as 4 x 3."""
    (encoder,) = encoders_of_nemotron(nemotron())
    assert encoder.structure is not None
    (item,) = items_of(encoder.structure, BatchSpec(**{"seq_length": 4096, **given}))
    assert item == (tiles, 1, 32, 32)


def test_a_published_config_has_its_text_fields_beside_the_encoders_or_leaves_defaults_out() -> None:
    """Qwen2.5-VL's config.json has no text_config; Qwen2-Audio's omits sizes at their defaults (hidden_size 4096)."""
    vision = WRAPPERS["qwen2_5_vl"]
    nested = encoder_of({"model_type": "qwen2_5_vl", "text_config": TEXT, **vision}, "encoder")
    channels = {key: value for key, value in vision["vision_config"].items() if key != "in_channels"}
    flat = encoder_of({"model_type": "qwen2_5_vl", **TEXT, "vision_config": channels}, "encoder")
    assert nested is not None and nested.structure is not None and flat == nested
    text = {"model_type": "qwen2", "vocab_size": 156032, "intermediate_size": 11008}
    audio = [
        encoder_of({"model_type": "qwen2_audio", "text_config": {**text, **width}, **WRAPPERS["qwen2_audio"]}, "audio")
        for width in ({}, {"hidden_size": 4096})
    ]
    assert audio[0] is not None and audio[0].structure is not None and audio[0] == audio[1]


@pytest.mark.parametrize("layers", [["x"], [None], [1.5], [[1]]])
def test_layers_that_are_no_numbers_leave_the_structure_unknown(layers: list[object]) -> None:
    """As any other size of an encoder that cannot be read: it is counted without activations, which is said."""
    vision = {**WRAPPERS["qwen2_5_vl"]["vision_config"], "fullatt_block_indexes": layers}
    encoder = encoder_of({"model_type": "qwen2_5_vl", "text_config": TEXT, "vision_config": vision}, "encoder")
    assert encoder is not None and encoder.parameters and encoder.structure is None


@pytest.mark.parametrize("kind", [*WRAPPERS, "radio"])
def test_every_encoder_has_a_time_a_replay_and_may_get_nothing(kind: str) -> None:
    """Blocks are recorded with plain sizes for both. Without images and sounds its parameters stay, and no activations
    are counted but the embeddings that stay whole."""
    if kind == "radio":
        encoder: EncoderSpec | None = encoders_of_nemotron(nemotron())[0]
    else:
        encoder = encoder_of({"model_type": kind, "text_config": TEXT, **WRAPPERS[kind]}, "encoder")
    assert encoder is not None and encoder.structure is not None
    wide = replace(encoder, structure=replace(encoder.structure, out_size=BASE.hidden_size, deepstack_layers=()))
    one = RunSpec(model=replace(BASE, encoders=(wide,)), batch=BatchSpec(global_batch_size=1))
    nothing = one.with_fields(images_per_sample=0, audio_seconds=0.0)
    h100 = hardware_of("H100")
    assert step_time(one, h100).seconds > step_time(RunSpec(model=BASE, batch=one.batch), h100).seconds
    assert why_not(one) is None and replayed(one).allocated > replayed(nothing).allocated
    most = BASE.hidden_size * 4096 * 2
    (stage,), (plain,) = estimate(nothing).stages, estimate(one).stages
    assert stage.static_bytes == plain.static_bytes
    if kind != "qwen2_audio":  # which pads sounds to 30 s
        assert 0 <= stage.activation_bytes - estimate(RunSpec(model=BASE)).stages[0].activation_bytes <= most


@pytest.mark.parametrize(("field", "value"), [
    ("temporal_patch_dim", ["a"]), ("vision_class_token_len", -1), ("vision_proj_ffn_hidden_size", "x"),
])  # fmt: skip
def test_a_provider_that_says_no_numbers(field: str, value: object) -> None:
    with pytest.raises(SpecError, match=field):
        encoders_of_nemotron(nemotron(**{field: value}))
