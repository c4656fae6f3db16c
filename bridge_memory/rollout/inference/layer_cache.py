"""What each layer keeps for a token (attention) or for a sequence (recurrent layers), on one rank, by either engine."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from bridge_memory.rollout.inference.spec import DTYPES, STATE_DTYPES, InferenceSpec, kv_heads, shared
from bridge_memory.spec import AttentionSpec, GatedDeltaNetSpec, MambaSpec, MLASpec, MoESpec, SideBySideSpec, SpecError


class Kind(str, Enum):
    """How long a layer keeps a token."""

    #: All tokens.
    FULL = "full attention"
    #: The last ``window`` tokens.
    SLIDING = "sliding window"
    #: All tokens, one latent for all heads.
    LATENT = "multi-latent attention"
    #: A state of fixed size for each sequence.
    STATE = "recurrent state"


class LayerCache(NamedTuple):
    """The cache of one layer on one rank."""

    kind: Kind
    #: Bytes of a token; of a STATE: of a sequence.
    nbytes: int
    #: Tokens of a window; 0: all.
    window: int = 0


#: Bytes of an element of quantised caches.
_CACHE_BYTES = {"float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_ds_mla": 1,
                "fp8_per_token_head": 1, "int8_per_token_head": 1, "int4_per_token_head": 1}  # fmt: skip
#: One fp32 scale beside each head's keys, and one beside its values (vLLM ``v1/attention/backends/triton_attn.py:
#: customize_spec``).
_HEAD_SCALES = 2 * 4


def element_bytes(spec: InferenceSpec) -> int:
    """Bytes of a cached value."""
    return spec.element_bytes if spec.kv_cache_dtype == "auto" else _CACHE_BYTES[spec.kv_cache_dtype]


def layers_of_stage(spec: InferenceSpec, stage: int) -> range:
    """Layers of a pipeline stage: equal parts, and one more layer for some stages where there is a remainder.

    vLLM gives it to the stages before the last, backwards (``distributed/utils.py: get_pp_indices``), SGLang to the
    last ones (its function of the same name).
    """
    pp = spec.pipeline_parallel_size
    each, rest = divmod(spec.model.num_layers, pp)
    last = pp if spec.framework == "sglang" or not rest else pp - 1
    sizes = [each + (last - rest <= place < last) for place in range(pp)]
    first = sum(sizes[:stage])
    return range(first, first + sizes[stage])


def layer_caches(spec: InferenceSpec, layers: range) -> list[LayerCache]:
    """The caches of the layers of one rank, in order; a layer with two mixers has two, one without a cache none."""
    found: list[LayerCache] = []
    kinds: dict[object, tuple[LayerCache, ...]] = {}
    for index in layers:
        mixer, ffn = spec.model.layers[index].mixer, spec.model.layers[index].ffn
        if isinstance(ffn, MoESpec) and ffn.shortcut_ffn_hidden_size:
            raise SpecError("layers of two attentions (LongCat-Flash) are not modelled here; choose another model")
        if mixer not in kinds:
            kinds[mixer] = tuple(_caches(spec, mixer))
        found += kinds[mixer]
    return found


def _caches(spec: InferenceSpec, mixer: object) -> list[LayerCache]:
    if mixer is None:
        return []
    if isinstance(mixer, SideBySideSpec):
        return [_state(spec, mixer.mamba), _attention(spec, mixer.attention)]
    if isinstance(mixer, AttentionSpec):
        return [] if mixer.borrows_keys else [_attention(spec, mixer)]
    if isinstance(mixer, MLASpec):
        return _latent(spec, mixer)
    if isinstance(mixer, MambaSpec | GatedDeltaNetSpec):
        return [_state(spec, mixer)]
    raise SpecError(f"the cache of {type(mixer).__name__} is not modelled; choose another model")


def _attention(spec: InferenceSpec, mixer: AttentionSpec) -> LayerCache:
    """kv heads x (head dim of keys + of values). A rank has one KV head at least: heads are copied where there are
    fewer than ranks (vLLM ``config/model.py: get_num_kv_heads``; SGLang ``configs/model_config.py``)."""
    heads = kv_heads(mixer.num_query_groups, spec.attention_tp)
    nbytes = heads * (mixer.kv_channels + mixer.value_channels) * element_bytes(spec)
    if spec.kv_cache_dtype == "int4_per_token_head":
        nbytes = heads * (mixer.kv_channels // 2 + mixer.value_channels // 2)
    if spec.kv_cache_dtype.endswith("per_token_head"):
        nbytes += heads * _HEAD_SCALES
    window = mixer.window_size or 0
    return LayerCache(Kind.SLIDING if window else Kind.FULL, nbytes, window)


def _latent(spec: InferenceSpec, mixer: MLASpec) -> list[LayerCache]:
    """The latent and the rotary key, once for all heads: every tensor-parallel rank has all of it. Sparse attention
    keeps the indexer's keys beside them, in fp8 with a scale."""
    if spec.kv_cache_dtype.endswith("per_token_head"):
        raise SpecError(
            f"kv_cache_dtype ({spec.kv_cache_dtype}) does not hold multi-latent attention; give auto or fp8"
        )
    channels = mixer.kv_lora_rank + mixer.qk_pos_emb_head_dim
    if mixer.sparse is None:
        if spec.kv_cache_dtype == "fp8_ds_mla":
            raise SpecError("kv_cache_dtype (fp8_ds_mla) is a format of sparse attention; give auto or fp8")
        return [LayerCache(Kind.LATENT, channels * element_bytes(spec))]
    allowed = {"vllm": ("auto", "bfloat16", "fp8_ds_mla"), "sglang": ("bfloat16", "fp8_e4m3")}[spec.framework]
    if spec.kv_cache_dtype not in allowed:
        raise SpecError(
            f"kv_cache_dtype ({spec.kv_cache_dtype}) of sparse attention depends on the backend; give one of "
            f"{', '.join(allowed)}"
        )
    packed = spec.kv_cache_dtype in ("fp8_ds_mla", "fp8_e4m3")
    nbytes = _packed(mixer) if packed else channels * element_bytes(spec)
    index = [] if mixer.indexer is None else [LayerCache(Kind.LATENT, _with_scales(mixer.indexer.head_dim))]
    return [LayerCache(Kind.LATENT, nbytes), *index]


def _with_scales(channels: int) -> int:
    """Bytes of fp8 values with an fp32 scale for each 128 (vLLM ``deepseek_v2.py: Indexer``; SGLang
    ``mem_cache/memory_pool.py: DSATokenToKVPool``)."""
    return channels + channels // 128 * 4


def _packed(mixer: MLASpec) -> int:
    """fp8 latents with their scales, rotary channels in bf16: 656 bytes of DeepSeek's 512 + 64 (SGLang
    ``calculate_mla_kv_cache_dim``; vLLM ``mla_attention.py: get_kv_cache_spec``)."""
    return _with_scales(mixer.kv_lora_rank) + 2 * mixer.qk_pos_emb_head_dim


def sparse(spec: InferenceSpec) -> MLASpec | None:
    """The first sparse attention of the model."""
    mixers = (layer.mixer for layer, _, _ in spec.model.layer_runs)
    return next((one for one in mixers if isinstance(one, MLASpec) and one.sparse is not None), None)


def state_dtype_bytes(spec: InferenceSpec) -> int:
    """Bytes of an element of the recurrent state; the convolution's state is of the model's dtype.

    SGLang: fp32 (``configs/mamba_utils.py: mamba2_state_dtype``). vLLM: the model's dtype, but fp32 for Nemotron-H and
    for Qwen3.5, whose config.json says so (``model_executor/models/config.py: NemotronHForCausalLMConfig,
    Qwen3_5ForConditionalGenerationConfig``).
    """
    if spec.mamba_ssm_cache_dtype != "auto":
        return STATE_DTYPES[spec.mamba_ssm_cache_dtype]
    fp32 = spec.framework == "sglang" or spec.model.model_type.startswith(("nemotron_h", "qwen3_5"))
    return DTYPES["float32"] if fp32 else spec.element_bytes


def _state(spec: InferenceSpec, mixer: MambaSpec | GatedDeltaNetSpec) -> LayerCache:
    """The last inputs of the convolution and the recurrent state of one sequence.

    Source: vLLM ``model_executor/layers/mamba/mamba_utils.py: MambaStateShapeCalculator``; SGLang
    ``configs/mamba_utils.py: Mamba2StateShape.create``, with convolutions in bf16.
    """
    tp = spec.attention_tp
    if isinstance(mixer, MambaSpec):
        groups = mixer.num_groups if mixer.num_groups % tp == 0 else tp
        channels = mixer.num_heads * mixer.head_dim + 2 * groups * mixer.state_dim
        heads = shared(mixer.num_heads, tp, "num_heads of Mamba")
        state = heads * mixer.head_dim * mixer.state_dim
    else:
        channels = 2 * mixer.num_key_heads * mixer.key_head_dim + mixer.num_value_heads * mixer.value_head_dim
        heads = shared(mixer.num_value_heads, tp, "num_value_heads")
        state = heads * mixer.value_head_dim * mixer.key_head_dim
    conv = shared(channels, tp, "channels of the convolution") * (mixer.conv_kernel - 1)
    conv_bytes = 2 if spec.framework == "sglang" else spec.element_bytes
    return LayerCache(Kind.STATE, conv * conv_bytes + state * state_dtype_bytes(spec))
