"""Weights that an inference engine holds on one rank, tensor by tensor.

Shapes are those of vLLM's and SGLang's layers (``model_executor/layers/linear.py`` and the models' files): columns or
rows of a linear divided by tensor parallelism, KV heads copied where there are fewer than ranks, norms, routers and
latent down-projections whole on every rank. MTP layers are not loaded: they serve speculative decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from bridge_memory.components import Provenance
from bridge_memory.outside.amount import Amount
from bridge_memory.rollout.inference.layer_cache import layers_of_stage
from bridge_memory.rollout.inference.spec import InferenceSpec, kv_heads, shared
from bridge_memory.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    MambaSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    SideBySideSpec,
)

MIB = 1 << 20
#: The vocabulary is padded to a multiple of this (``vocab_parallel_embedding.py: DEFAULT_VOCAB_PADDING_SIZE``).
VOCAB_MULTIPLE = 64
#: Weights that share a scale in "fp8_blockwise", and in "mxfp4".
FP8_BLOCK, MXFP4_BLOCK = 128, 32
MXFP4_MULTIPLE = 256
#: torch takes allocations of 10 MiB and more from the driver by themselves, in multiples of 2 MiB, smaller ones out of
#: segments of 20 MiB (``c10/cuda/CUDACachingAllocator.cpp: get_allocation_size``).
LARGE, LARGE_MULTIPLE, SEGMENT = 10 * MIB, 2 * MIB, 20 * MIB


class Format(Enum):
    """Which weights a quantisation takes."""

    #: A linear of a layer.
    LINEAR = "linear"
    #: Experts.
    EXPERT = "expert"
    #: Norms, embeddings, the output layer, routers, convolutions: in the model's dtype.
    PLAIN = "plain"
    #: fp32 whatever the model's dtype.
    FP32 = "fp32"


class Weight(NamedTuple):
    """A tensor of one rank: ``copies`` matrices of rows x columns."""

    name: str
    rows: int
    columns: int
    format: Format = Format.PLAIN
    copies: int = 1

    @property
    def numel(self) -> int:
        return self.copies * self.rows * self.columns

    def padded(self, spec: InferenceSpec) -> Weight:
        """As kernels for mxfp4 hold experts: sizes in multiples of 128 or 256 (vLLM ``fused_moe/oracle/mxfp4.py:
        mxfp4_round_up_hidden_size_and_intermediate_size``)."""
        if spec.quantization != "mxfp4" or self.format is not Format.EXPERT:
            return self
        rows, columns = (-(-size // MXFP4_MULTIPLE) * MXFP4_MULTIPLE for size in (self.rows, self.columns))
        return self._replace(rows=rows, columns=columns)

    def nbytes(self, spec: InferenceSpec) -> int:
        """Bytes with scales."""
        if self.format is Format.FP32:
            return 4 * self.numel
        if self.format is Format.PLAIN or spec.quantization is None:
            return spec.element_bytes * self.numel
        if spec.quantization == "mxfp4":
            if self.format is not Format.EXPERT:
                return spec.element_bytes * self.numel
            return self.copies * self.rows * (self.columns // 2 + -(-self.columns // MXFP4_BLOCK))
        if spec.quantization == "fp8":
            return self.numel + 4 * self.copies
        blocks = -(-self.rows // FP8_BLOCK) * -(-self.columns // FP8_BLOCK)
        return self.numel + 4 * self.copies * blocks


def weights(spec: InferenceSpec, stage: int) -> list[Weight]:
    """All parameters of a rank of a stage."""
    model = spec.model
    first, last = stage == 0, stage == spec.pipeline_parallel_size - 1
    found: list[Weight] = []
    rows = padded_vocab(spec) // spec.tensor_parallel_size
    h = model.hidden_size
    tied = model.share_embeddings_and_output_weights
    if first or (last and tied):
        found.append(Weight("embedding", rows, h))
    if first:
        found += _first_stage(spec, rows)
    layers = layers_of_stage(spec, stage)
    for layer, start, beyond in model.layer_runs:
        times = max(0, min(beyond, layers.stop) - max(start, layers.start))
        found += [one for one in _layer(spec, layer) for _ in range(times)]
    if last:
        found.append(_norm(model, h, "final norm"))
        if not tied:
            found.append(Weight("lm_head", rows, h))
        if model.output_bias:
            found.append(Weight("lm_head bias", rows, 1))
    return found


def padded_vocab(spec: InferenceSpec) -> int:
    """Rows of the embedding and of the output layer over all ranks."""
    multiple = VOCAB_MULTIPLE
    rows = -(-spec.model.vocab_size // multiple) * multiple
    return shared(rows, spec.tensor_parallel_size, "vocab_size padded to a multiple of 64") * (
        spec.tensor_parallel_size
    )


def weight_bytes(spec: InferenceSpec, stage: int) -> int:
    """Bytes of the parameters of a rank."""
    return sum(one.nbytes(spec) for one in weights(spec, stage))


def weight_amount(spec: InferenceSpec, stage: int) -> Amount:
    """Weights as torch's allocator holds them: at most each large tensor in multiples of 2 MiB, and a segment of small
    ones that is not full. Modality encoders are whole on a rank or divided."""
    found = weights(spec, stage)
    least = most = 0
    small = False
    for one in found:
        nbytes = one.nbytes(spec)
        least += nbytes
        nbytes = one.padded(spec).nbytes(spec)
        if nbytes >= LARGE:
            nbytes = -(-nbytes // LARGE_MULTIPLE) * LARGE_MULTIPLE
        small = small or nbytes < LARGE
        most += nbytes
    if stage == 0:
        for encoder in spec.model.encoders:
            least += spec.element_bytes * -(-encoder.parameters // spec.tensor_parallel_size)
            most += spec.element_bytes * encoder.parameters
    source = "shapes of vLLM's and SGLang's layers; blocks of torch's allocator"
    return Amount("weights", least, most + (SEGMENT if small else 0), Provenance.FORMULA, source)


def _first_stage(spec: InferenceSpec, rows: int) -> Iterator[Weight]:
    model = spec.model
    if model.position_embedding_type == "learned_absolute":
        yield Weight("position embedding", model.max_position_embeddings, model.hidden_size)
    if model.embedding_layernorm:
        yield Weight("embedding norm", 2, model.hidden_size)
    width = max((layer.all_layers_width for layer in model.layers), default=0)
    if model.per_layer_vocab_size and width:
        table = -(-model.per_layer_vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        yield Weight("per-layer embedding", table // spec.tensor_parallel_size, width)
        yield Weight("per-layer projection", width, model.hidden_size, Format.LINEAR)
        yield Weight("per-layer projection norm", 1, max(layer.per_layer_width for layer in model.layers))


def _norm(model: ModelSpec, width: int, name: str) -> Weight:
    return Weight(name, 2 if model.normalization == "LayerNorm" else 1, width)


def _layer(spec: InferenceSpec, layer: LayerSpec) -> list[Weight]:
    model = spec.model
    h = model.hidden_size
    found: list[Weight] = []
    if layer.mixer is not None:
        if layer.pre_layernorms:
            found.append(_norm(model, h, "input norm"))
        found += _mixer(spec, layer.mixer)
        if layer.post_layernorms:
            found.append(_norm(model, h, "post-attention norm"))
    if layer.ffn is not None:
        if layer.pre_layernorms:
            found.append(_norm(model, h, "pre-feed-forward norm"))
        found += _ffn(spec, layer.ffn)
        if layer.post_layernorms:
            found.append(_norm(model, h, "post-feed-forward norm"))
    if layer.per_layer_width:
        found.append(Weight("per-layer input gate", layer.per_layer_width, h, Format.LINEAR))
        found.append(Weight("per-layer output", h, layer.per_layer_width, Format.LINEAR))
        found.append(_norm(model, h, "per-layer norm"))
    return found


def _mixer(spec: InferenceSpec, mixer: object) -> Iterator[Weight]:
    if isinstance(mixer, AttentionSpec):
        yield from _attention(spec, mixer)
    elif isinstance(mixer, MLASpec):
        yield from _mla(spec, mixer)
    elif isinstance(mixer, MambaSpec):
        yield from _mamba(spec, mixer)
    elif isinstance(mixer, GatedDeltaNetSpec):
        yield from _gdn(spec, mixer)
    elif isinstance(mixer, SideBySideSpec):
        yield from _attention(spec, mixer.attention)
        yield from _mamba(spec, mixer.mamba)


def _attention(spec: InferenceSpec, a: AttentionSpec) -> Iterator[Weight]:
    h, tp = spec.model.hidden_size, spec.attention_tp
    heads = shared(a.num_attention_heads, tp, "num_attention_heads")
    kv = kv_heads(a.num_query_groups, tp)
    q = heads * a.kv_channels * (2 if a.attention_output_gate else 1)
    keys = 0 if a.borrows_keys else kv * (a.kv_channels + (0 if a.keys_are_values else a.value_channels))
    yield Weight("qkv_proj", q + keys, h, Format.LINEAR)
    if a.add_qkv_bias:
        yield Weight("qkv_proj bias", q + keys, 1)
    yield Weight("o_proj", h, heads * a.value_channels, Format.LINEAR)
    if a.add_output_bias:
        yield Weight("o_proj bias", h, 1)
    if a.qk_layernorm == "head":
        yield Weight("q_norm and k_norm", 1 if a.borrows_keys else 2, a.kv_channels)
    elif a.qk_layernorm:
        yield Weight("q_norm and k_norm", 1, (heads + kv) * a.kv_channels)
    if a.learnable_softmax_sink:
        yield Weight("sinks", heads, 1)


def _mla(spec: InferenceSpec, m: MLASpec) -> Iterator[Weight]:
    h = spec.model.hidden_size
    heads = shared(m.num_attention_heads, spec.attention_tp, "num_attention_heads")
    q = heads * (m.qk_head_dim + m.qk_pos_emb_head_dim)
    latent = m.kv_lora_rank + m.qk_pos_emb_head_dim
    if m.q_lora_rank:
        yield Weight("q_a_proj", m.q_lora_rank, h, Format.LINEAR)
        yield Weight("q_a_layernorm", 1, m.q_lora_rank)
        yield Weight("q_b_proj", q, m.q_lora_rank, Format.LINEAR)
    else:
        yield Weight("q_proj", q, h, Format.LINEAR)
    yield Weight("kv_a_proj_with_mqa", latent, h, Format.LINEAR)
    yield Weight("kv_a_layernorm", 1, m.kv_lora_rank)
    yield Weight("kv_b_proj", heads * (m.qk_head_dim + m.v_head_dim), m.kv_lora_rank, Format.LINEAR)
    if spec.quantization in ("fp8", "fp8_blockwise"):
        # Decoding absorbs kv_b_proj into queries and outputs, in the model's dtype: ``mla_attention.py:
        # process_weights_after_loading`` (unquantised it is a view of the weight).
        yield Weight("W_UK and W_UV", heads * (m.qk_head_dim + m.v_head_dim), m.kv_lora_rank)
    yield Weight("o_proj", h, heads * m.v_head_dim, Format.LINEAR)
    if m.add_output_bias:
        yield Weight("o_proj bias", h, 1)
    if m.indexer is not None:
        # Whole on every rank (``deepseek_v2.py: Indexer``).
        yield Weight("indexer wq_b", m.indexer.num_heads * m.indexer.head_dim, m.q_lora_rank or h, Format.LINEAR)
        yield Weight("indexer wk and weights_proj", m.indexer.head_dim + m.indexer.num_heads, h)
        yield Weight("indexer k_norm", 2, m.indexer.head_dim, Format.FP32)


def _mamba(spec: InferenceSpec, m: MambaSpec) -> Iterator[Weight]:
    """``layers/mamba/mamba_mixer2.py: MambaMixer2``. Groups are copied where they do not divide."""
    h, tp = spec.model.hidden_size, spec.attention_tp
    heads = shared(m.num_heads, tp, "num_heads of Mamba")
    inner = heads * m.head_dim
    groups = m.num_groups // tp if m.num_groups % tp == 0 else 1
    conv = inner + 2 * groups * m.state_dim
    yield Weight("in_proj", inner + conv + heads, h, Format.LINEAR)
    if m.proj_bias:
        yield Weight("in_proj bias", inner + conv + heads, 1)
    yield Weight("conv1d", conv, m.conv_kernel + (1 if m.conv_bias else 0))
    yield Weight("A", heads, 1, Format.FP32)
    yield Weight("D and dt_bias", 2 * heads, 1)
    if m.rmsnorm:
        yield Weight("gated norm", 1, inner)
    yield Weight("out_proj", h, inner, Format.LINEAR)
    if m.proj_bias:
        yield Weight("out_proj bias", h, 1)


def _gdn(spec: InferenceSpec, g: GatedDeltaNetSpec) -> Iterator[Weight]:
    """``layers/mamba/gdn_linear_attn.py`` (Qwen3-Next)."""
    h, tp = spec.model.hidden_size, spec.attention_tp
    values = shared(g.num_value_heads, tp, "num_value_heads")
    keys = shared(g.num_key_heads, tp, "num_key_heads")
    conv = 2 * keys * g.key_head_dim + values * g.value_head_dim
    yield Weight("in_proj_qkvz", conv + values * g.value_head_dim, h, Format.LINEAR)
    yield Weight("in_proj_ba", 2 * values, h, Format.LINEAR)
    yield Weight("conv1d", conv, g.conv_kernel)
    yield Weight("A_log", values, 1, Format.FP32)
    yield Weight("dt_bias", values, 1)
    yield Weight("gated norm", 1, g.value_head_dim)
    yield Weight("out_proj", h, values * g.value_head_dim, Format.LINEAR)


def _ffn(spec: InferenceSpec, ffn: MLPSpec | MoESpec) -> Iterator[Weight]:
    h = spec.model.hidden_size
    if isinstance(ffn, MLPSpec):
        yield from _mlp(spec, ffn.ffn_hidden_size, ffn.gated, ffn.add_bias, "")
        return
    yield Weight("router", ffn.num_experts, h)
    if ffn.add_router_bias:
        yield Weight("router bias", ffn.num_experts, 1)
    if ffn.router_enable_expert_bias:
        yield Weight("expert bias", ffn.num_experts, 1, Format.FP32)
    width = ffn.latent_size or h
    if ffn.latent_size:
        yield Weight("latent projections", 2 * width, h, Format.LINEAR)
    local = -(-ffn.num_experts // spec.expert_parallel_size)
    slices = spec.expert_ranks // spec.expert_parallel_size
    inner = shared(ffn.moe_ffn_hidden_size, slices, "moe_ffn_hidden_size", "the ranks that share an expert")
    rows = 2 * inner if ffn.gated else inner
    yield Weight("experts w13", rows, width, Format.EXPERT, local)
    yield Weight("experts w2", width, inner, Format.EXPERT, local)
    if ffn.add_bias:
        yield Weight("experts bias", rows + width, 1, Format.PLAIN, local)
    if ffn.shared_expert_intermediate_size:
        yield from _mlp(spec, ffn.shared_expert_intermediate_size, ffn.gated, False, "shared expert ")
        if ffn.shared_expert_gate:
            yield Weight("shared expert gate", 1, h)


def _mlp(spec: InferenceSpec, width: int, gated: bool, bias: bool, prefix: str) -> Iterator[Weight]:
    h = spec.model.hidden_size
    inner = shared(width, spec.tensor_parallel_size, f"{prefix}ffn_hidden_size")
    rows = 2 * inner if gated else inner
    yield Weight(f"{prefix}gate_up_proj", rows, h, Format.LINEAR)
    yield Weight(f"{prefix}down_proj", h, inner, Format.LINEAR)
    if bias:
        yield Weight(f"{prefix}mlp bias", rows + h, 1)
