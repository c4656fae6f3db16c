"""Recordings of encoders beside the real modules of transformers with real tensors, storage by storage.

The widths, depths and images are ones that nothing was fitted to.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from encoder_oracle import Grids, Measured, measured, recorded, run_beside  # noqa: E402
from hf_side_by_side import INSTALLED  # noqa: E402

from bridge_memory import EncoderStructure  # noqa: E402
from bridge_memory.spec.encoders import Item  # noqa: E402
from bridge_memory.speed.encoders import encoder_work  # noqa: E402

CLOSE = 0.005
#: (layers, width, heads, inner width of the MLP, width of the features).
SIZES = {"small": (2, 128, 4, 344, 192), "uneven": (5, 240, 6, 338, 520), "wide": (3, 320, 4, 1520, 1024)}
SLOW = pytest.mark.slow
IMAGES: dict[str, Grids] = {"small": [(20, 24)], "uneven": [(14, 22), (32, 28), (18, 18)], "wide": [(48, 36), (48, 36)]}


def _class(kind: str, name: str) -> Any:
    return getattr(import_module(f"transformers.models.{kind}.modeling_{kind}"), name)


def _config(kind: str, name: str, **fields: Any) -> Any:
    config = getattr(import_module(f"transformers.models.{kind}.configuration_{kind}"), name)(**fields)
    config._attn_implementation = "sdpa"
    return config


def _patches(module: Any, grids: Grids, side: int) -> Any:
    grid = torch.tensor([(1, *one) for one in grids])
    found = module(torch.zeros(int(grid.prod(1).sum()), 3 * 2 * side * side), grid_thw=grid)
    if isinstance(found, torch.Tensor):
        return (found,)
    if isinstance(found, tuple):  # transformers 4: features, and those of the deep stack
        return (found[0], *found[1])
    return (found.pooler_output, *(getattr(found, "deepstack_features", None) or ()))


def qwen2_5_vl(size: str, frozen: tuple[str, ...] = ()) -> tuple[EncoderStructure, Measured]:
    depth, h, heads, f, out = SIZES[size]
    full = tuple(range(1, depth, 2))
    config = _config("qwen2_5_vl", "Qwen2_5_VLVisionConfig", depth=depth, hidden_size=h, intermediate_size=f,
                     num_heads=heads, out_hidden_size=out, fullatt_block_indexes=list(full))  # fmt: skip
    module = _class("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel")._from_config(config)
    structure = EncoderStructure(
        kind="qwen2_5_vl", hidden_size=h, ffn_hidden_size=f, num_layers=depth, num_heads=heads, out_size=out,
        patch_size=14, temporal_patch_size=2, merge_size=2, window_size=112, full_layers=full,
    )
    return structure, measured(module, lambda m: _patches(m, IMAGES[size], 14), frozen)


def glm4v(size: str, frozen: tuple[str, ...] = ()) -> tuple[EncoderStructure, Measured]:
    depth, h, heads, f, out = SIZES[size]
    config = _config("glm4v", "Glm4vVisionConfig", depth=depth, hidden_size=h, intermediate_size=f, num_heads=heads,
                     out_hidden_size=out, image_size=224)  # fmt: skip
    module = _class("glm4v", "Glm4vVisionModel")._from_config(config)
    structure = EncoderStructure(
        kind="glm4v", hidden_size=h, ffn_hidden_size=out, num_layers=depth, num_heads=heads, out_size=out,
        patch_size=14, temporal_patch_size=2, merge_size=2, merger_size=f, positions=256, qkv_bias=False,
    )
    return structure, measured(module, lambda m: _patches(m, IMAGES[size], 14), frozen)


def qwen3_omni_vision(size: str, frozen: tuple[str, ...] = ()) -> tuple[EncoderStructure, Measured]:
    depth, h, heads, f, out = SIZES[size]
    deep = tuple(range(0, depth - 1, 2))
    config = _config("qwen3_omni_moe", "Qwen3OmniMoeVisionEncoderConfig", depth=depth, hidden_size=h,
                     intermediate_size=f, num_heads=heads, out_hidden_size=out, deepstack_visual_indexes=list(deep),
                     num_position_embeddings=576)  # fmt: skip
    module = _class("qwen3_omni_moe", "Qwen3OmniMoeVisionEncoder")._from_config(config)
    structure = EncoderStructure(
        kind="qwen3_omni_vision", hidden_size=h, ffn_hidden_size=f, num_layers=depth, num_heads=heads, out_size=out,
        patch_size=16, temporal_patch_size=2, merge_size=2, positions=576, deepstack_layers=deep,
    )
    return structure, measured(module, lambda m: _patches(m, IMAGES[size], 16), frozen)


def _of_one_size(size: str) -> tuple[int, int]:
    """All images' size. The rows of their mask are multiples of 8: CUDA's kernel pads others in every layer, which does
    not run here."""
    rows, columns = IMAGES[size][0]
    return rows + rows % 4, columns


def pixtral(size: str, frozen: tuple[str, ...] = ()) -> tuple[EncoderStructure, Measured]:
    from transformers import Mistral3Config, Mistral3Model

    depth, h, heads, f, out = SIZES[size]
    text = {"model_type": "mistral", "hidden_size": out, "num_hidden_layers": 1, "intermediate_size": 64,
            "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64}  # fmt: skip
    vision = {"model_type": "pixtral", "hidden_size": h, "intermediate_size": f, "num_hidden_layers": depth,
              "num_attention_heads": heads, "head_dim": h // heads, "image_size": 896, "patch_size": 14}  # fmt: skip
    config = Mistral3Config(vision_config=vision, text_config=text, spatial_merge_size=2)
    config.return_dict = True

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = Mistral3Model._from_config(config)
            self.config, self.get = config, type(whole).get_image_features
            self.vision_tower, self.multi_modal_projector = whole.vision_tower, whole.multi_modal_projector

        def forward(self, pixels: Any, sizes: Any) -> Any:
            options = {} if INSTALLED >= (5, 0) else {"vision_feature_layer": -1}
            found = self.get(self, pixels.to(torch.bfloat16), image_sizes=sizes, **options)
            return (torch.cat(tuple(getattr(found, "pooler_output", found)), 0),)

    rows, columns = _of_one_size(size)
    number = len(IMAGES[size])
    sizes = torch.tensor([(rows * 14, columns * 14)] * number)
    structure = EncoderStructure(
        kind="pixtral", hidden_size=h, ffn_hidden_size=f, num_layers=depth, num_heads=heads, out_size=out,
        patch_size=14, merge_size=2, projector_bias=False,
    )
    theirs = ("vision_tower.",) if frozen == FROZEN["pixtral"] else frozen
    return structure, measured(Encoder(), lambda m: m(torch.zeros(number, 3, rows * 14, columns * 14), sizes), theirs)


def qwen2_audio(size: str, frozen: tuple[str, ...] = ()) -> tuple[EncoderStructure, Measured]:
    depth, h, heads, f, out = SIZES[size]
    positions, mels, number = {"small": (200, 64, 1), "uneven": (360, 80, 2), "wide": (328, 128, 3)}[size]
    config = _config("qwen2_audio", "Qwen2AudioEncoderConfig", d_model=h, encoder_ffn_dim=f, encoder_layers=depth,
                     encoder_attention_heads=heads, max_source_positions=positions, num_mel_bins=mels)  # fmt: skip

    class Encoder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower = _class("qwen2_audio", "Qwen2AudioEncoder")._from_config(config)
            self.linear = torch.nn.Linear(h, out)

        def forward(self, x: Any) -> Any:
            mask = torch.zeros(len(x), 1, positions, positions, dtype=torch.bfloat16)
            return (self.linear(self.tower(x, attention_mask=mask).last_hidden_state),)

    structure = EncoderStructure(
        kind="qwen2_audio", hidden_size=h, ffn_hidden_size=f, num_layers=depth, num_heads=heads, out_size=out,
        positions=positions, mel_bins=mels,
    )
    theirs = ("tower.",) if frozen == FROZEN["qwen2_audio"] else frozen
    return structure, measured(Encoder(), lambda m: m(torch.zeros(number, mels, 2 * positions)), theirs)


#: Size -> (rows of a spectrogram, columns of each sound, of a window, channels of the convolutions).
SOUNDS = {"small": (64, [330], 400, 24), "uneven": (80, [740, 740], 400, 40), "wide": (128, [1000], 800, 64)}


def qwen3_omni_audio(size: str, frozen: tuple[str, ...] = ()) -> tuple[EncoderStructure, Measured]:
    depth, h, heads, f, out = SIZES[size]
    mels, sounds, window, channels = SOUNDS[size]
    out = min(out, f)  # so that backward does not peak at the features, whose gradient the caller holds
    half = 50  # which ``_get_feat_extract_output_lengths`` takes for granted
    config = _config(
        "qwen3_omni_moe", "Qwen3OmniMoeAudioEncoderConfig", d_model=h, encoder_ffn_dim=f, encoder_layers=depth,
        encoder_attention_heads=heads, num_mel_bins=mels, output_dim=out, n_window=half, n_window_infer=window,
        downsample_hidden_size=channels,
    )  # fmt: skip
    module = _class("qwen3_omni_moe", "Qwen3OmniMoeAudioEncoder")._from_config(config)
    structure = EncoderStructure(
        kind="qwen3_omni_audio", hidden_size=h, ffn_hidden_size=f, num_layers=depth, num_heads=heads, out_size=out,
        mel_bins=mels, channels=channels, chunk_frames=2 * half, chunks_attended=window // (2 * half),
    )

    def call(m: Any) -> Any:
        given = torch.zeros(mels, sum(sounds))
        return (m(given.to(torch.bfloat16), feature_lens=torch.tensor(sounds)).last_hidden_state,)

    return structure, measured(module, call, frozen)


#: Qwen3-Omni's audio encoder attends in other pieces before transformers 5, which Megatron Bridge with it needs.
KINDS = {
    f.__name__: f for f in (qwen2_5_vl, glm4v, qwen3_omni_vision, pixtral, qwen2_audio, qwen3_omni_audio)
    if INSTALLED >= (5, 0) or f is not qwen3_omni_audio
}
#: What Megatron Bridge's ``freeze_vision_model`` or ``freeze_audio_model`` freezes.
FROZEN = {
    "qwen2_5_vl": ("patch_embed", "blocks"), "glm4v": ("patch_embed", "blocks"),
    "qwen3_omni_vision": ("patch_embed", "pos_embed", "blocks"), "pixtral": ("patch_conv", "ln_pre", "transformer"),
    "qwen2_audio": ("conv1", "conv2", "layers", "layer_norm"),
    "qwen3_omni_audio": ("conv2d", "conv_out", "layers", "ln_post", "proj"),
}  # fmt: skip


def items_of(kind: str, size: str) -> list[Item]:
    if kind == "qwen2_audio":
        positions, number = {"small": (200, 1), "uneven": (360, 2), "wide": (328, 3)}[size]
        return [Item(number, 2 * positions, 1, 1)]
    if kind == "qwen3_omni_audio":
        return [Item(1, frames, 1, 1) for frames in SOUNDS[size][1]]
    grids = IMAGES[size]
    if kind == "pixtral":
        grids = [_of_one_size(size)] * len(grids)
    return [Item(1, 1, *grid) for grid in grids]


@pytest.mark.parametrize("size", [size if size == "small" else pytest.param(size, marks=SLOW) for size in SIZES])
@pytest.mark.parametrize("kind", KINDS)
def test_what_an_encoder_keeps_and_peaks_at(kind: str, size: str) -> None:
    structure, real = KINDS[kind](size)
    ours = recorded(structure, items_of(kind, size), release=INSTALLED)
    assert ours.retained == pytest.approx(real.saved, rel=CLOSE)
    # Positions of patches and sums of biases are not recorded.
    assert ours.forward_peak == pytest.approx(real.forward, rel=0.03)
    assert ours.backward_peak == pytest.approx(real.backward, rel=0.015)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_encoder_keeps_what_its_projector_needs(kind: str) -> None:
    """GLM-4.5V's positions, norms and last convolution train even so: gradients pass through its frozen layers."""
    structure, real = KINDS[kind]("uneven", FROZEN[kind])
    ours = recorded(structure, items_of(kind, "uneven"), FROZEN[kind], release=INSTALLED)
    assert ours.retained == pytest.approx(real.saved, rel=CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_encoder_keeps_nothing(kind: str) -> None:
    structure, real = KINDS[kind]("small", ("",))
    ours = recorded(structure, items_of(kind, "small"), ("",), release=INSTALLED)
    deep = len(structure.deepstack_layers) * structure.out_size * 2 * items_of(kind, "small")[0].patches // 4
    assert ours.retained == real.saved == (deep if structure.deepstack_layers else 0)


@pytest.mark.parametrize("size", [size if size == "small" else pytest.param(size, marks=SLOW) for size in SIZES])
def test_siglip(size: str) -> None:
    """The tower; Gemma 3's projector is Megatron's and not in transformers: 256 features of an image of 4,096 patches
    keep their patches copied to an image (h), the pooled ones (h / 16), their deviations, and the normed ones (h / 16).
    """
    from transformers import SiglipVisionConfig

    depth, h, heads, f, out = SIZES[size]
    side, number = {"small": (16, 1), "uneven": (24, 3), "wide": (32, 2)}[size]
    config = SiglipVisionConfig(hidden_size=h, intermediate_size=f, num_hidden_layers=depth, num_attention_heads=heads,
                                image_size=14 * side, patch_size=14)  # fmt: skip
    config.vision_use_head = False
    config._attn_implementation = "sdpa"
    module = _class("siglip", "SiglipVisionModel")._from_config(config)
    pixels = torch.zeros(number, 3, 14 * side, 14 * side)
    real = measured(module, lambda m: (m(pixel_values=pixels).last_hidden_state,))
    structure = EncoderStructure(
        kind="siglip", hidden_size=h, ffn_hidden_size=f, num_layers=depth, num_heads=heads, out_size=out,
        patch_size=14, merge_size=4, positions=side**2, image_size=14 * side,
    )
    ours = recorded(structure, [Item(number, 1, side, side)], release=INSTALLED)
    n = number * side**2
    projector = n * h * 2 + 2 * (n // 16) * h * 2 + 4 * (n // 16)
    assert ours.retained - projector == pytest.approx(real.saved, rel=CLOSE)


@pytest.mark.parametrize("size", ["uneven", pytest.param("wide", marks=SLOW)])
def test_siglip_with_the_pooling_head_of_its_class_default(size: str) -> None:
    """The head runs, its output is dropped: weights, and a moment of forward, which without it is as high as ours."""
    from transformers import SiglipVisionConfig

    from bridge_memory.readers.encoders import encoder_of

    _, h, heads, f, out = SIZES[size]
    side, number = {"uneven": (24, 6), "wide": (32, 8)}[size]
    items, peaks = [Item(number, 1, side, side)], []
    for head in (True, False):
        config = SiglipVisionConfig(hidden_size=h, intermediate_size=f, num_hidden_layers=1, num_attention_heads=heads,
                                    image_size=14 * side, patch_size=14)  # fmt: skip
        if not head:
            config.vision_use_head = False
        config._attn_implementation = "sdpa"
        module = _class("siglip", "SiglipVisionModel")._from_config(config)
        real = measured(module, lambda m: (m(torch.zeros(number, 3, 14 * side, 14 * side)).last_hidden_state,))
        wrapper = {
            "model_type": "gemma3", "text_config": {"hidden_size": out}, "vision_config": config.to_dict(),
            "mm_tokens_per_image": (side // 4) ** 2,
        }  # fmt: skip
        spec = encoder_of(wrapper, "encoder", keeps_head=True)
        assert spec is not None and spec.structure is not None and spec.structure.pooling_head is head
        assert spec.parameters == sum(p.numel() for p in module.parameters()) + h * out + h
        peaks.append((recorded(spec.structure, items, release=INSTALLED), real))
    (ours, real), (ours_without, real_without) = peaks
    assert ours.retained == ours_without.retained and real.saved == real_without.saved
    assert ours.forward_peak == pytest.approx(real.forward, rel=0.03)


@pytest.mark.parametrize(("size", "side", "frozen"), [
    ("small", 20, False), ("small", 20, True), pytest.param("uneven", 64, False, marks=SLOW),
    pytest.param("wide", 16, False, marks=SLOW),
])
def test_moonvit_of_kimi_keeps_and_peaks_at_what_plain_torch_does(size: str, side: int, frozen: bool) -> None:
    """At sizes that nothing was fitted to. The projector runs image by image, and is recorded as if all images went
    through it at once: peaks of several images are a little off."""
    from moonvit_oracle import MoonViT

    from bridge_memory.readers.encoders import encoder_of

    depth, h, heads, f, out = SIZES[size]
    grids = [(rows, columns) for rows, columns in IMAGES[size]]
    module = MoonViT(h, f, heads, depth, side, out)
    vision = {
        "vt_hidden_size": h, "vt_intermediate_size": f, "vt_num_hidden_layers": depth, "vt_num_attention_heads": heads,
        "patch_size": 14, "init_pos_emb_height": side, "init_pos_emb_width": side, "merge_kernel_size": [2, 2],
        "text_hidden_size": out,
    }  # fmt: skip
    spec = encoder_of({"model_type": "kimi_k25", "text_config": {"hidden_size": 64}, "vision_config": vision}, "vision")
    assert spec is not None and spec.structure is not None
    assert spec.parameters == sum(p.numel() for p in module.parameters())
    n = sum(rows * columns for rows, columns in grids)
    theirs, names = (("patches", "grid", "layers", "norm"), ("patch_embed", "encoder")) if frozen else ((), ())
    real = measured(module, lambda m: (m(torch.zeros(n, 3, 14, 14), grids),), theirs)
    ours = recorded(spec.structure, [Item(1, 1, *grid) for grid in grids], names, release=INSTALLED)
    assert ours.retained == pytest.approx(real.saved, rel=CLOSE)
    close = CLOSE if len(grids) == 1 else 0.03
    assert ours.forward_peak == pytest.approx(real.forward, rel=close)
    assert ours.backward_peak == pytest.approx(real.backward, rel=close)


@pytest.mark.parametrize("sizes", [(2, 96, 4, 24, 200), (3, 160, 5, 32, 416)])
def test_gemma4s_encoder_has_the_parameters_of_its_module(sizes: tuple[int, ...]) -> None:
    """Its activations are not recorded: Megatron Bridge's recipe freezes it. The projector trains by itself."""
    pytest.importorskip("transformers.models.gemma4")
    from transformers import AutoModel

    from bridge_memory.readers.encoders import encoder_of

    layers, h, heads, d, f = sizes
    config = _config(
        "gemma4", "Gemma4VisionConfig", hidden_size=h, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=d, intermediate_size=f, position_embedding_size=640,
    )  # fmt: skip
    text = _config("gemma4", "Gemma4TextConfig", hidden_size=320)
    with torch.device("meta"):
        tower = AutoModel.from_config(config)
        projector = _class("gemma4", "Gemma4MultimodalEmbedder")(config, text)
    spec = encoder_of(
        {"model_type": "gemma4", "text_config": text.to_dict(), "vision_config": config.to_dict()}, "encoder"
    )
    theirs, own = (sum(p.numel() for p in module.parameters()) for module in (tower, projector))
    assert spec is not None and (spec.parameters, spec.projector) == (theirs + own, own)


@pytest.mark.parametrize(("h", "f", "layers", "bias"), [(96, 200, 2, True), (160, 416, 3, False)])
def test_parakeet_has_the_parameters_of_its_module(h: int, f: int, layers: int, bias: bool) -> None:
    """As Megatron Bridge's ``BridgeSoundEncoder`` makes it for Nemotron-Omni, which freezes it."""
    pytest.importorskip("transformers.models.parakeet")
    if not bias and INSTALLED < (5, 0):
        pytest.skip("transformers 4.57 gives convolutions biases whatever the config says")
    from types import SimpleNamespace

    from transformers.models.parakeet.modeling_parakeet import ParakeetEncoder

    from bridge_memory.readers.nemotron_provider import encoders_of_nemotron

    sizes = {"hidden_size": h, "num_hidden_layers": layers, "intermediate_size": f, "num_mel_bins": 80,
             "subsampling_factor": 8, "conv_kernel_size": 9}  # fmt: skip
    config = _config("parakeet", "ParakeetEncoderConfig", **sizes, num_attention_heads=4, attention_bias=bias,
                     convolution_bias=bias)  # fmt: skip
    with torch.device("meta"):
        theirs = sum(p.numel() for p in ParakeetEncoder(config).parameters())
    model = SimpleNamespace(
        hidden_size=512, vision_model_type="radio", has_sound=True, sound_hidden_size=h,
        sound_config={**sizes, "convolution_bias": bias},
    )
    _, sound = encoders_of_nemotron(model)
    assert sound.parameters - sound.projector == theirs
    assert sound.projector == h + 4096 * (h + 512)


@pytest.mark.parametrize("size", ["small", pytest.param("wide", marks=SLOW)])
@pytest.mark.parametrize("kind", KINDS)
def test_operations_of_a_forward_pass_are_those_that_torch_counts(
    kind: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrix products, convolutions and attention, with eager attention, of one image or sound."""
    from torch.utils.flop_counter import FlopCounterMode

    counted: list[int] = []

    def count(module: Any, call: Any, frozen: Any) -> Measured:
        for part in module.modules():
            if hasattr(part, "config"):
                part.config._attn_implementation = "eager"
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            call(module.to(torch.bfloat16))
        counted.append(counter.get_total_flops())
        return Measured(0, 0, 0)

    monkeypatch.setitem(KINDS[kind].__globals__, "measured", count)
    monkeypatch.setitem(IMAGES, size, IMAGES[size][:1])
    monkeypatch.setitem(SOUNDS, size, (SOUNDS[size][0], SOUNDS[size][1][:1], *SOUNDS[size][2:]))
    structure, _ = KINDS[kind](size)
    (item,) = items_of(kind, size)
    side = structure.patch_size
    pixels = f"{item.width * side}x{item.height * side}"
    seconds = {"audio_seconds": item.frames / 100} if kind == "qwen3_omni_audio" else {}
    image = seconds if structure.audio else {"images_per_sample": 1, "image_size": pixels}
    works = encoder_work(run_beside(structure, **image))
    ours = item.number**structure.audio * sum(w.times * (sum(p.flops for p in w.products) + w.attention) for w in works)
    assert ours == pytest.approx(counted[0], rel=0.01)
