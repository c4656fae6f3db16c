"""Modality encoders: their structure, and what a sample gives them.

``EncoderStructure`` has what a recorder of ``inventory/encoders`` needs; ``items_of`` says how many patches or frames a
sample has, from the fields of a BatchSpec and the defaults below.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import isqrt
from typing import TYPE_CHECKING, Any, NamedTuple

from bridge_memory.spec.errors import SpecError, show

if TYPE_CHECKING:
    from bridge_memory.spec.parts import BatchSpec

#: Kind -> the class of transformers that it is.
ENCODER_KINDS = {
    "qwen2_5_vl": "Qwen2_5_VisionTransformerPretrainedModel",
    "glm4v": "Glm4vVisionModel",
    "siglip": "SiglipVisionModel with Gemma 3's projector",
    "pixtral": "PixtralVisionModel with Mistral 3's projector",
    "qwen3_vl": "Qwen3VLVisionModel of Megatron Bridge, of megatron-core's modules",
    "exaone4_5": "Exaone45VisionModel of Megatron Bridge, of megatron-core's modules",
    "radio": "RADIOViTModel of megatron-core with LLaVAModel's projector",
    "moonvit": "MoonViT3dPretrainedModel of Kimi-K2.5's repository with its projector",
    "step3p7": "Step37VisionModel of Megatron Bridge with its projector",
    "qwen3_omni_vision": "Qwen3OmniMoeVisionEncoder",
    "qwen3_omni_audio": "Qwen3OmniMoeAudioEncoder",
    "qwen2_audio": "Qwen2AudioEncoder with its projector",
}
AUDIO_KINDS = ("qwen2_audio", "qwen3_omni_audio")
#: Encoders of megatron-core's modules, which tensor parallelism divides; those that recompute as the language model.
MEGATRON_KINDS = ("qwen3_vl", "exaone4_5", "radio")
RECOMPUTED_KINDS = ("qwen3_vl", "exaone4_5")
#: Kind -> (width and height in pixels of the largest image that reaches it where the run states no size, who bounds
#: it).
LARGEST_IMAGES = {
    "qwen2_5_vl": ((1120, 896), "the 1,003,520 pixels of Megatron Bridge's data/builders/energon.py"),
    "qwen3_omni_vision": ((1120, 896), "the 1,003,520 pixels of Megatron Bridge's data/builders/energon.py"),
    "qwen3_vl": ((1120, 896), "the 1,003,520 pixels of Megatron Bridge's data/builders/energon.py"),
    "exaone4_5": ((1120, 896), "the 1,003,520 pixels of Megatron Bridge's data/builders/energon.py"),
    "glm4v": ((2436, 2408), "the 28 x 28 x 15,000 pixels of two frames in transformers' Glm4vImageProcessor"),
    "radio": ((2048, 2048), "RADIO's table of positions, for 2,048 x 2,048 pixels,"),
    "moonvit": ((1792, 1792), "the 16,384 patches of Kimi-K2.5's image processor"),
    "pixtral": ((1036, 1036), "the longest edge of transformers' PixtralImageProcessor, 1,024 pixels"),
}
#: Seconds of audio of a sample, to which Qwen2-Audio's processor pads.
DEFAULT_SECONDS = 30.0
#: Columns of a mel spectrogram in a second (``feature_extraction_whisper.py``: 16,000 samples, a column for 160).
MEL_FRAMES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderStructure:
    """Sizes of an encoder of transformers with its projector, by which its activations are recorded.

    Example:
        >>> from bridge_memory import EncoderStructure
        >>> EncoderStructure(
        ...     kind="siglip", hidden_size=1152, ffn_hidden_size=4304, num_layers=27, num_heads=16, out_size=2560,
        ...     patch_size=14, image_size=896, merge_size=4, positions=4096,
        ... ).head_dim
        72
    """

    #: One of ENCODER_KINDS.
    kind: str
    hidden_size: int
    ffn_hidden_size: int
    num_layers: int
    num_heads: int
    #: Width of the features that the language model gets.
    out_size: int
    #: Heads of keys and values; 0: as many as of queries.
    num_query_groups: int = 0
    #: Pixels of a patch's side, and frames of a patch.
    patch_size: int = 0
    temporal_patch_size: int = 1
    channels: int = 3
    #: Patches along each side that the projector joins to one feature.
    merge_size: int = 1
    #: Inner width of the projector, where it is neither of the others.
    merger_size: int = 0
    #: Rows of a learned table of positions; 0: none.
    positions: int = 0
    #: Side of every image, in pixels; 0: images have any size.
    image_size: int = 0
    #: Tiles of that size into which the largest image is cut; 0: images are whole.
    tiles: int = 0
    #: Tokens before the patches of each image or tile, which the projector does not get.
    class_tokens: int = 0
    #: Side of an attention window in pixels (0: none), and the layers that attend to the whole image.
    window_size: int = 0
    full_layers: tuple[int, ...] = ()
    #: Layers after which a merger makes features of their own (``deepstack_visual_indexes``).
    deepstack_layers: tuple[int, ...] = ()
    #: Whether each context-parallel rank encodes a part of a microbatch's images, and gathers the features of all
    #: (Megatron Bridge's ``vision_dp_when_cp``); else every one encodes all of them.
    dealt: bool = False
    #: Whether a pooling head runs whose output is dropped (``SiglipVisionConfig.vision_use_head``, on by default).
    pooling_head: bool = False
    #: Whether the projection of queries, keys and values has biases; likewise the projector.
    qkv_bias: bool = True
    projector_bias: bool = True
    #: Rows of a mel spectrogram, whose convolutions have ``channels``; columns of one chunk of it, and chunks to which
    #: attention reaches.
    mel_bins: int = 0
    chunk_frames: int = 0
    chunks_attended: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ENCODER_KINDS:
            raise SpecError(f"kind of an encoder ({show(self.kind)}) is unknown; use {', '.join(ENCODER_KINDS)}")
        for f in fields(self):
            value: Any = getattr(self, f.name)
            known = {"int": int, "bool": bool, "str": str}.get(str(f.type), tuple)
            if type(value) is not known:
                raise SpecError(f"{f.name} of an encoder ({show(value)}) is not {f.type}; give one")
            if isinstance(value, int) and value < 0:
                raise SpecError(f"{f.name} of an encoder ({value}) is below 0; give 0 or more")
        for name in ("hidden_size", "ffn_hidden_size", "num_heads", "out_size", "merge_size", "temporal_patch_size"):
            if not getattr(self, name):
                raise SpecError(f"{name} of an encoder (0) is below 1; give 1 or more")
        if self.dealt and self.kind != "qwen3_vl":
            raise SpecError(f"dealt of an encoder (True) is an option of qwen3_vl alone, not of {self.kind}; set False")
        if self.tiles and not self.image_size:
            raise SpecError(f"tiles of an encoder ({self.tiles}) have no size; give image_size, the side of one")
        if not self.audio and not self.patch_size:
            raise SpecError("patch_size of a vision encoder (0) is below 1; give 1 or more")

    @property
    def audio(self) -> bool:
        return self.kind in AUDIO_KINDS

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class Item(NamedTuple):
    """Equal images, videos or sounds of one sample.

    Of images and videos ``frames`` steps of ``height`` x ``width`` patches; of sounds ``frames`` columns of a mel
    spectrogram, with a height and width of 1.
    """

    number: int
    frames: int
    height: int
    width: int

    @property
    def patches(self) -> int:
        """Of all of them."""
        return self.number * self.frames * self.height * self.width


def image_pixels(size: str) -> tuple[int, int]:
    """(width, height) of "WIDTHxHEIGHT". Raises SpecError."""
    parts = size.lower().split("x")
    if len(parts) != 2 or not all(part.isascii() and part.isdecimal() and 0 < int(part) < 2**17 for part in parts):
        raise SpecError(f"image_size ({show(size)}) is no WIDTHxHEIGHT in pixels; give one such as 1120x896")
    return int(parts[0]), int(parts[1])


def items_of(structure: EncoderStructure, batch: BatchSpec) -> tuple[Item, ...]:
    """What one sample gives the encoder. Raises SpecError where what is stated does not fit the sequence."""
    if structure.audio:
        return _sounds(structure, batch)
    count = 1 if batch.images_per_sample is None else batch.images_per_sample
    height, width = _grid(structure, batch)
    if structure.tiles:
        count *= _tiles(structure, batch)
    items = [Item(count, 1, height, width)] if count else []
    if batch.video_frames:
        items.append(Item(1, -(-batch.video_frames // structure.temporal_patch_size), height, width))
    found = features(structure, items)
    stated = (batch.images_per_sample, batch.image_size, batch.patches_per_image, batch.video_frames or None)
    if found > batch.seq_length and any(value is not None for value in stated):
        fix = "lower images_per_sample or image_size, or raise seq_length"
        raise SpecError(f"seq_length ({batch.seq_length}) is less than the {found} visual tokens of a sample; {fix}")
    return tuple(items)


def _tiles(structure: EncoderStructure, batch: BatchSpec) -> int:
    """Tiles of an image: of the grids of at most ``tiles`` the one whose sides have the image's ratio, of equals the
    largest that is no more than twice the image; and the whole image as one more (``NemotronNanoVLV2ImageProcessor``,
    InternVL's ``dynamic_preprocess``). Without a stated size as many as the sequence has room for."""
    most, side = structure.tiles, structure.image_size
    if batch.image_size is not None:
        width, height = image_pixels(batch.image_size)
        best = (1, 1)
        grids = sorted(((x, y) for x in range(1, most + 1) for y in range(1, most // x + 1)), key=lambda g: g[0] * g[1])
        for x, y in grids:
            nearer = abs(width / height - x / y) - abs(width / height - best[0] / best[1])
            if nearer < 0 or (nearer == 0 and 2 * width * height > side * side * x * y):
                best = x, y
        found = best[0] * best[1]
    elif batch.patches_per_image is not None:
        return max(1, -(-batch.patches_per_image // (side // structure.patch_size) ** 2))
    else:
        each = (side // structure.patch_size // structure.merge_size) ** 2
        room = batch.seq_length // each // max(1, batch.images_per_sample or 1)
        found = min(most, max(1, room - 1))
    return found + (found > 1)


def _grid(structure: EncoderStructure, batch: BatchSpec) -> tuple[int, int]:
    """Height and width of an image, in patches; both are multiples of ``merge_size``."""
    merge, unit = structure.merge_size, structure.patch_size * structure.merge_size
    if structure.image_size:
        side = structure.image_size // structure.patch_size
        return side, side
    if batch.patches_per_image is not None:
        merged = max(1, batch.patches_per_image // merge**2)
        rows = next(n for n in range(isqrt(merged), 0, -1) if merged % n == 0)
        return rows * merge, merged // rows * merge
    stated = None if batch.image_size is None else image_pixels(batch.image_size)
    width, height = stated or LARGEST_IMAGES[structure.kind][0]
    rows, columns = max(1, round(height / unit)), max(1, round(width / unit))
    if stated is None and rows * columns > batch.seq_length:
        rows = columns = isqrt(batch.seq_length)
    return rows * merge, columns * merge


def _sounds(structure: EncoderStructure, batch: BatchSpec) -> tuple[Item, ...]:
    seconds = DEFAULT_SECONDS if batch.audio_seconds is None else batch.audio_seconds
    if not seconds:
        return ()
    if structure.kind == "qwen2_audio":  # sounds are padded to the positions of the encoder, longer ones are cut
        return (Item(1, 2 * structure.positions, 1, 1),)
    return (Item(1, max(1, round(seconds * MEL_FRAMES)), 1, 1),)


def features(structure: EncoderStructure, items: tuple[Item, ...] | list[Item]) -> int:
    """Features that the language model gets of a sample: tokens of its sequence."""
    if structure.kind == "qwen2_audio":
        return sum(item.number * (item.frames // 4) for item in items)
    if structure.kind == "qwen3_omni_audio":
        return sum(item.number * sum(audio_chunks(structure, item)) for item in items)
    return sum(item.patches for item in items) // structure.merge_size**2


def pixels_of(structure: EncoderStructure, items: tuple[Item, ...]) -> int:
    """Numbers of a sample's pixels or spectrograms as the encoder gets them."""
    if structure.audio:
        return structure.mel_bins * sum(item.patches for item in items)
    depth = structure.temporal_patch_size
    if structure.kind != "radio":  # which embeds images and pairs of frames each with a linear of its own
        return sum(item.patches for item in items) * structure.channels * depth * structure.patch_size**2
    frames = sum(item.patches * (depth if item.frames > 1 else 1) for item in items)
    return frames * structure.channels * structure.patch_size**2


def audio_chunks(structure: EncoderStructure, item: Item) -> tuple[int, ...]:
    """Features of each chunk of one sound, after three convolutions with stride 2."""
    chunk = structure.chunk_frames or item.frames
    whole, left = divmod(item.frames, chunk)
    return tuple(after_convolutions(n) for n in [chunk] * whole + [left] * bool(left))


def longest_window(structure: EncoderStructure, items: tuple[Item, ...]) -> int:
    """Features of the longest window to which attention reaches: ``chunks_attended`` whole chunks
    (``modeling_qwen3_omni_moe.py: get_audio_cu_seqlens``)."""
    return max((max(audio_windows(structure, item)) for item in items), default=0)


def audio_windows(structure: EncoderStructure, item: Item) -> tuple[int, ...]:
    """Features of each window of one sound."""
    chunks = audio_chunks(structure, item)
    whole, left = divmod(sum(chunks), size := max(chunks) * max(1, structure.chunks_attended))
    return (size,) * whole + (left,) * bool(left)


def padded_chunk(structure: EncoderStructure, items: tuple[Item, ...]) -> int:
    """Columns to which every chunk of a spectrogram is padded: those of the longest."""
    longest = max((item.frames for item in items), default=0)
    return min(structure.chunk_frames, longest) if structure.chunk_frames else longest


def after_convolutions(frames: int, number: int = 3) -> int:
    """Columns, or rows, after ``number`` convolutions with stride 2."""
    for _ in range(number):
        frames = (frames - 1) // 2 + 1
    return frames


def default_words(structure: EncoderStructure, batch: BatchSpec) -> str:
    """What was supposed of a sample's images or sounds, and how to state it; "" where the run states it."""
    if structure.audio:
        supposed = batch.audio_seconds is None and structure.kind != "qwen2_audio"
        return f"{DEFAULT_SECONDS:g} seconds of audio per sample (--audio-seconds)" if supposed else ""
    number = "one image per sample (--images-per-sample)" if batch.images_per_sample is None else ""
    stated = batch.image_size is not None or batch.patches_per_image is not None
    if structure.tiles and not stated:
        size = f"images of {structure.tiles} tiles and a thumbnail, or as many as the sequence allows (--image-size)"
        return " and ".join(filter(None, (number, size)))
    if stated or structure.image_size:
        return number
    bound = LARGEST_IMAGES[structure.kind][1]
    size = f"images as large as {bound} and the sequence allow (--image-size)"
    return " and ".join(filter(None, (number, size)))


def media_words(structure: EncoderStructure, items: tuple[Item, ...]) -> str:
    """What a sample gives, in words: "1 image of 64 x 80 patches (1280 tokens)"."""
    out = []
    for item in items:
        if structure.audio:
            out.append(f"{item.frames / MEL_FRAMES:g} s of audio")
        elif item.frames > 1:
            out.append(f"a video of {item.frames} x {item.height} x {item.width} patches")
        else:
            what = "tile" if structure.tiles else "image"
            out.append(f"{item.number} {what}{'' if item.number == 1 else 's'} of {item.height} x {item.width} patches")
    return f"{' and '.join(out) or 'no images'} ({features(structure, items)} tokens of the sequence)"


def recorded(torch_layers: bool, structure: EncoderStructure) -> bool:
    """Whether an encoder's activations are recorded: in a model of transformers not where Megatron Bridge has a module
    of its own (Qwen3-VL), or loads one from the model's repository (Kimi-K2.5)."""
    return not (torch_layers and structure.kind in (*MEGATRON_KINDS, "moonvit", "step3p7"))
