"""ModelSpec and the specs of its layers. Sizes are global (before sharding), under Megatron's field names."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

from bridge_memory.spec.diffusion import DiffusionSpec
from bridge_memory.spec.encoders import EncoderStructure
from bridge_memory.spec.errors import SpecError, divide, show


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Softmax attention with a heads, g query groups and head dimension d, as in ``megatron.core.transformer.attention:
    SelfAttention``.

    Example:
        >>> from bridge_memory import AttentionSpec, resolve_model
        >>> mixer = resolve_model("meta-llama/Llama-3.1-8B").layers[0].mixer
        >>> mixer == AttentionSpec(num_attention_heads=32, num_query_groups=8, kv_channels=128)
        True
    """

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    add_qkv_bias: bool = False
    add_output_bias: bool = False
    #: None; "head": one norm weight of kv_channels (Qwen3); "full": one of all the heads (OLMoE, MiniMax).
    qk_layernorm: str | None = None
    #: Sliding-window length in tokens, None for full attention. Changes no saved tensor under flash.
    window_size: int | None = None
    #: gpt-oss: one learned logit per head (``softmax_offset``).
    learnable_softmax_sink: bool = False
    #: Qwen3-Next: linear_qkv also produces a sigmoid gate, as large as q.
    attention_output_gate: bool = False
    rotary: bool = True
    #: Queries and keys are rotated in fp32, by angles of each token (``apply_rotary_pos_emb_in_fp32`` of Qwen3-VL's
    #: vision encoder).
    rotary_in_fp32: bool = False
    #: Width of a value head if it differs from kv_channels (MiMo-V2).
    v_channels: int | None = None
    #: Gemma 4: a norm of the values, without a weight.
    value_norm: bool = False
    #: Gemma 4: the projected keys serve as values. linear_qkv still computes values, which are not used.
    keys_are_values: bool = False
    #: Gemma 4: the layer attends to keys and values of an earlier layer. linear_qkv still computes its own.
    borrows_keys: bool = False
    #: Gemma 4: later layers attend to this layer's keys and values.
    lends_keys: bool = False
    #: A module of its own between linear_qkv and linear_proj, whatever ``transformer_impl`` is. "": none; "local":
    #: megatron-core's DotProductAttention (EXAONE 4); "flex": torch's FlexAttention (Gemma 2).
    core_attention: str = ""

    @property
    def value_channels(self) -> int:
        return self.kv_channels if self.v_channels is None else self.v_channels


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """The indexer that selects the keys of sparse attention (``experimental_attention_variant/dsa.py: DSAIndexer``).

    Its parameters are replicated over tensor-parallel ranks.

    Example:
        >>> from bridge_memory import IndexerSpec
        >>> IndexerSpec(num_heads=64, head_dim=128).topk
        2048
    """

    num_heads: int
    head_dim: int
    #: Compressed keys that a query attends to. Multi-latent attention uses ``SparseSpec.topk`` instead.
    topk: int = 2048


@dataclass(frozen=True, slots=True)
class CompressedAttentionSpec:
    """DeepSeek-V4's attention over a sliding window and compressed keys (Megatron-LM ``csa.py:
    CompressedSparseAttention``).

    Example:
        >>> from bridge_memory import CompressedAttentionSpec
        >>> mixer = CompressedAttentionSpec(
        ...     num_attention_heads=64, head_dim=512, rope_dim=64, q_lora_rank=1024, output_groups=8,
        ...     output_lora_rank=1024, window_size=128, compress_ratio=4,
        ... )
        >>> mixer.fused
        False
    """

    num_attention_heads: int
    #: Width of a query head, of the single key head and of its value.
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    output_groups: int
    output_lora_rank: int
    window_size: int
    #: Tokens per compressed key; 0: sliding window only.
    compress_ratio: int = 0
    #: Selects compressed keys; None: a query attends to all of them.
    indexer: IndexerSpec | None = None
    #: Whether the fused kernels of FlashMLA and cuDNN are used (``apply_dsa_kernel_fusion``).
    fused: bool = False
    #: Whether their loss of the indexer is that of the chosen keys alone (``dsa_indexer_use_sparse_loss``).
    sparse_loss: bool = False
    add_output_bias: bool = False


#: Values of dsa_kernel_backend (``experimental_attention_variant/dsa_kernels.py``); none: unfused torch operations.
SPARSE_KERNELS = ("none", "tilelang", "cudnn")


@dataclass(frozen=True, slots=True)
class SparseSpec:
    """How DeepSeek Sparse Attention computes over the selected keys (``experimental_attention_variant/dsa.py:
    DSAttention``).

    Example:
        >>> from bridge_memory import SparseSpec
        >>> SparseSpec(topk=1024, kernels="tilelang").indexer_loss
        True
    """

    #: Keys that a token attends to.
    topk: int = 2048
    #: dsa_kernel_backend, one of ``SPARSE_KERNELS``.
    kernels: str = "none"
    #: Whether the indexer is trained (dsa_indexer_loss_coeff above 0).
    indexer_loss: bool = True
    #: Whether the indexer's loss covers the selected keys only (``dsa_indexer_use_sparse_loss``).
    sparse_loss: bool = False
    #: Whether a Hadamard transform is applied to the indexer's queries and keys.
    rotate_activation: bool = False
    scoring_relu: bool = True
    #: Whether other layers reuse this layer's selected indices, which then stay alive until the next forward pass.
    shares_choice: bool = False


@dataclass(frozen=True, slots=True)
class MLASpec:
    """Multi-latent attention (``megatron.core.transformer.multi_latent_attention: MLASelfAttention``).

    Example:
        >>> from bridge_memory import resolve_model
        >>> mixer = resolve_model("deepseek-ai/DeepSeek-V3").layers[0].mixer
        >>> mixer.q_lora_rank, mixer.kv_lora_rank
        (1536, 512)
    """

    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    qk_layernorm: bool = True
    #: Bias of linear_proj, the only linear of MLA that can have one.
    add_output_bias: bool = False
    #: None for full attention, and for a layer that reuses another layer's selected keys.
    indexer: IndexerSpec | None = None
    #: DeepSeek Sparse Attention; None for full attention.
    sparse: SparseSpec | None = None


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Mamba-2 mixer (``megatron.core.ssm.mamba_mixer: MambaMixer``).

    Example:
        >>> from bridge_memory import MambaSpec
        >>> MambaSpec(num_heads=128, head_dim=64, state_dim=128, num_groups=8).conv_kernel
        4
    """

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_kernel: int = 4
    chunk_size: int = 128
    #: Gated RMSNorm before out_proj (``ExtendedRMSNorm``).
    rmsnorm: bool = True
    conv_bias: bool = True
    proj_bias: bool = False
    #: One kernel for convolution, scan and gate, which saves its input and the scan's output alone
    #: (``use_mamba_mem_eff_path``). False: each is a kernel of its own.
    memory_efficient: bool = True
    #: The scan runs again in backward and saves its input alone. No option of megatron-core: code of a run's own.
    recompute_scan: bool = False


@dataclass(frozen=True, slots=True)
class GatedDeltaNetSpec:
    """Gated delta net of Qwen3-Next (``megatron.core.ssm.gated_delta_net: GatedDeltaNet``).

    Example:
        >>> from bridge_memory import GatedDeltaNetSpec
        >>> GatedDeltaNetSpec(num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128).conv_kernel
        4
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int = 4


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """The gated short convolution of LFM2 (transformers ``models/lfm2/modeling_lfm2.py: Lfm2ShortConv``): a linear into
    three parts of h, their first times their last through a depthwise convolution of ``kernel`` tokens, the result
    times the second part, and a linear out of it. megatron-core has no such block.

    Example:
        >>> from bridge_memory import ShortConvSpec
        >>> ShortConvSpec().kernel
        3
    """

    kernel: int = 3
    #: Biases on the convolution and on both linears.
    bias: bool = False


@dataclass(frozen=True, slots=True)
class KimiDeltaSpec:
    """Kimi delta attention (transformers ``models/kimi_linear/modeling_kimi_linear.py: KimiLinearDeltaAttention``): a
    gated delta net whose decay has a value for every channel of a key. megatron-core has no such block.

    Example:
        >>> from bridge_memory import KimiDeltaSpec
        >>> KimiDeltaSpec(num_heads=32, head_dim=128).conv_kernel
        4
    """

    num_heads: int
    #: Width of a key and of a value.
    head_dim: int
    conv_kernel: int = 4


@dataclass(frozen=True, slots=True)
class Mamba1Spec:
    """The mixer of the first Mamba (transformers ``models/jamba/modeling_jamba.py: JambaMambaMixer``): every channel
    has separate states, and time steps, B and C have norms. megatron-core has no such block.

    Example:
        >>> from bridge_memory import Mamba1Spec
        >>> Mamba1Spec(inner_size=8192, state_dim=16, dt_rank=256).conv_kernel
        4
    """

    inner_size: int
    state_dim: int
    dt_rank: int
    conv_kernel: int = 4
    conv_bias: bool = True
    proj_bias: bool = False


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """A dense feed-forward block of inner width f (``megatron.core.transformer.mlp: MLP``).

    Example:
        >>> from bridge_memory import MLPSpec, resolve_model
        >>> resolve_model("meta-llama/Llama-3.1-8B").layers[0].ffn == MLPSpec(ffn_hidden_size=14336, gated=True)
        True
    """

    ffn_hidden_size: int
    gated: bool
    activation: str = "silu"
    add_bias: bool = False
    #: Gate and linear half are clamped to it (``activation_func_clamp_value``); unfused, each in a copy.
    clamp_value: float | None = None


@dataclass(frozen=True, slots=True)
class MoESpec:
    """A mixture-of-experts block: E experts, k per token (``megatron.core.transformer.moe.moe_layer: MoELayer``).

    Example:
        >>> from bridge_memory import resolve_model
        >>> ffn = resolve_model("Qwen/Qwen3-30B-A3B").layers[0].ffn
        >>> ffn.num_experts, ffn.topk, ffn.moe_ffn_hidden_size
        (128, 8, 768)
    """

    num_experts: int
    topk: int
    moe_ffn_hidden_size: int
    gated: bool = True
    activation: str = "silu"
    add_bias: bool = False
    #: Total inner width of the shared experts; 0: none.
    shared_expert_intermediate_size: int = 0
    shared_expert_gate: bool = False
    #: Aux-loss-free balancing: an fp32 buffer of E values and one of token counts (not parameters).
    router_enable_expert_bias: bool = False
    #: Whether the published parameter count includes that bias (MiniMax-M2, Nemotron-3); Megatron's never does.
    expert_bias_in_published_count: bool = False
    #: A bias on the router's linear (gpt-oss).
    add_router_bias: bool = False
    router_score_function: str = "softmax"
    #: The router's weights are fp32, and it multiplies an fp32 copy of the tokens, which it saves (MiniMax-M3).
    router_in_fp32: bool = False
    #: Aux-loss kind: "none", "aux_loss", "seq_aux_loss", "sinkhorn", ...
    router_load_balancing_type: str = "aux_loss"
    #: Group-limited routing: a token's experts come from ``router_group_topk`` of ``router_num_groups`` groups.
    router_num_groups: int | None = None
    router_group_topk: int | None = None
    #: Latent MoE: experts work in this width instead of h (Nemotron-3).
    latent_size: int | None = None
    #: The block's input is multiplied by noise in training (Phi-3.5-MoE's input_jitter_noise).
    noisy_input: bool = False
    #: LongCat-Flash: experts that return their input, which tokens choose as they do the others.
    zero_experts: int = 0
    #: LongCat-Flash: the layer has two attentions and two MLPs of this width, and adds the experts' output at its end.
    shortcut_ffn_hidden_size: int = 0
    #: As ``MLPSpec.clamp_value``.
    clamp_value: float | None = None
    #: A fixed table has the experts of every token of the vocabulary (DeepSeek-V4's first layers).
    experts_by_token: bool = False


@dataclass(frozen=True, slots=True)
class SideBySideSpec:
    """Attention and a Mamba mixer in parallel: both read one norm's output, and their outputs are added (Falcon-H1).

    Example:
        >>> from bridge_memory import AttentionSpec, MambaSpec, SideBySideSpec
        >>> attention = AttentionSpec(num_attention_heads=8, num_query_groups=2, kv_channels=64)
        >>> mamba = MambaSpec(num_heads=24, head_dim=64, state_dim=128, num_groups=1)
        >>> SideBySideSpec(attention, mamba).scaled
        True
    """

    attention: AttentionSpec
    mamba: MambaSpec
    #: Whether any multiplier (of the mixers' inputs and outputs, keys, gates, ...) differs from 1.
    scaled: bool = True


Mixer = (
    AttentionSpec | CompressedAttentionSpec | MLASpec | MambaSpec | GatedDeltaNetSpec | ShortConvSpec | KimiDeltaSpec
    | Mamba1Spec | SideBySideSpec
)
FeedForward = MLPSpec | MoESpec
#: Field of LayerSpec -> the classes that it may hold.
KINDS: dict[str, tuple[type, ...]] = {
    "mixer": (
        AttentionSpec, CompressedAttentionSpec, MLASpec, MambaSpec, GatedDeltaNetSpec, ShortConvSpec, KimiDeltaSpec,
        Mamba1Spec, SideBySideSpec,
    ),
    "ffn": (MLPSpec, MoESpec),
}  # fmt: skip
#: The layer class: megatron-core's TransformerLayer or MambaLayer ("megatron"), or Megatron Bridge's layer for Gemma 4
#: without experts, built of local modules ("gemma4_dense"), or with experts ("gemma4"), or for Wan ("wan").
ARRANGEMENTS = ("megatron", "gemma4_dense", "gemma4", "wan")


@cache
def _types_of(cls: type) -> tuple[tuple[str, tuple[type, ...], str], ...]:
    """(field, its types, their description) of every bool, str or int field."""
    words = {"bool": ((bool,), "True or False"), "str": ((str,), "a string"), "int": ((int,), "an integer")}
    found = []
    for f in fields(cls):
        kind, _, none = str(f.type).partition(" | ")
        if f.init and kind in words:
            types, give = words[kind]
            found.append((f.name, (*types, type(None)) if none else types, f"{give} or None" if none else give))
    return tuple(found)


def _check_types(spec: Any) -> None:
    """Raise SpecError for a bool, str or int field of ``spec`` that holds another type; True is not an int."""
    cls: Any = type(spec)
    for name, types, give in _types_of(cls):
        value = getattr(spec, name)
        if type(value) not in types:
            raise SpecError(f"{name} ({show(value)}) is not {give}; give {give}")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer of the stack: a mixer, a feed-forward block, or both. None: absent.

    Example:
        >>> from bridge_memory import AttentionSpec, LayerSpec, MLPSpec
        >>> attention = AttentionSpec(num_attention_heads=32, num_query_groups=8, kv_channels=128)
        >>> LayerSpec(mixer=attention, ffn=MLPSpec(ffn_hidden_size=14336, gated=True)).post_layernorms
        False
    """

    mixer: Mixer | None
    ffn: FeedForward | None
    #: Gemma 2 and 3: a second norm after attention and one after the feed-forward block.
    post_layernorms: bool = False
    #: EXAONE 4 has none before attention and the feed-forward block.
    pre_layernorms: bool = True
    #: One of ARRANGEMENTS.
    arrangement: str = "megatron"
    #: Gemma 4: width of this layer's per-layer embedding (0: none), and of all layers' embeddings together.
    per_layer_width: int = 0
    all_layers_width: int = 0
    #: Computes in params_dtype while other layers compute in fp8 or fp4 (``first_last_layers_bf16``).
    unquantized: bool = False
    #: Hash of the fields, computed once: LayerSpecs are keys of many caches.
    _hash: int = field(default=0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, kinds in KINDS.items():
            block = getattr(self, name)
            if block is None:
                continue
            if type(block) not in kinds:
                known = ", ".join(kind.__name__ for kind in kinds)
                raise SpecError(f"{name} of a layer ({show(block)}) is of no known kind; give one of {known}, or None")
            _check_types(block)
        _check_types(self)
        if self.arrangement not in ARRANGEMENTS:
            raise SpecError(f"arrangement ({show(self.arrangement)}) is none of {', '.join(ARRANGEMENTS)}; give one")
        object.__setattr__(
            self, "_hash", hash(
                (self.mixer, self.ffn, self.post_layernorms, self.pre_layernorms, self.arrangement,
                 self.per_layer_width, self.unquantized)
            )
        )

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """A modality encoder (images or audio) with its projector.

    ``parameters``: elements in all. ``sharded``: the part of them that tensor parallelism divides. The parameters of an
    encoder made of transformers' modules are replicated over tensor-parallel ranks. ``structure``: its sizes, by which
    its activations are recorded; None: only the number of parameters is known. ``frozen``: modules of it, by the
    beginning of their names, whose parameters do not train ("": all). Without a structure its modules are "encoder" and
    "projector"; ``projector`` and ``projector_sharded`` are the projector's part of ``parameters`` and ``sharded``.

    Example:
        >>> from bridge_memory import EncoderSpec
        >>> EncoderSpec("vision encoder", parameters=600_000_000).sharded
        0
    """

    name: str
    parameters: int
    sharded: int = 0
    structure: EncoderStructure | None = None
    frozen: tuple[str, ...] = ()
    projector: int = 0
    projector_sharded: int = 0

    @property
    def trains(self) -> bool:
        """Whether any part of it may train."""
        parts = ("encoder", *(("projector",) if self.projector else ()))
        return "" not in self.frozen and (self.structure is not None or not set(parts) <= set(self.frozen))

    def __post_init__(self) -> None:
        _check_types(self)
        if self.structure is not None and type(self.structure) is not EncoderStructure:
            given = show(self.structure)
            raise SpecError(f"structure of an encoder ({given}) is no EncoderStructure; give one or None")
        if type(self.frozen) is not tuple or any(type(name) is not str for name in self.frozen):
            raise SpecError(f"frozen of an encoder ({show(self.frozen)}) is not a tuple of module names; give one")
        if not 0 <= self.sharded <= self.parameters:
            raise SpecError(
                f"sharded ({self.sharded}) is not a part of the encoder's parameters ({self.parameters}); give 0 to "
                f"{max(0, self.parameters)}"
            )
        if not 0 <= self.projector_sharded <= self.projector <= self.parameters:
            raise SpecError(
                f"projector ({self.projector}) and projector_sharded ({self.projector_sharded}) are no parts of the "
                f"encoder's parameters ({self.parameters}); give 0 to {max(0, self.parameters)}"
            )


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The architecture. ``layers`` lists the decoder layers in order, without those of multi-token prediction (MTP).

    ``resolve_model`` and ``model_from_hf_config`` read it from a config; it can also be constructed directly.

    Example:
        >>> from bridge_memory import AttentionSpec, LayerSpec, MLPSpec, ModelSpec, RunSpec, estimate
        >>> layer = LayerSpec(
        ...     mixer=AttentionSpec(num_attention_heads=16, num_query_groups=4, kv_channels=64),
        ...     ffn=MLPSpec(ffn_hidden_size=2816, gated=True),
        ... )
        >>> model = ModelSpec(
        ...     name="mine", model_type="llama", hidden_size=1024, vocab_size=32000, layers=(layer,) * 24
        ... )
        >>> attention, mlp, norms = 1024 * (16 + 2 * 4) * 64 + 16 * 64 * 1024, 3 * 1024 * 2816, 2 * 1024
        >>> estimate(RunSpec(model=model)).parameters == 2 * 32000 * 1024 + 24 * (attention + mlp + norms) + 1024
        True
    """

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    share_embeddings_and_output_weights: bool = False
    normalization: str = "RMSNorm"
    #: "rope", "learned_absolute", "alibi", "none"
    position_embedding_type: str = "rope"
    max_position_embeddings: int = 0
    #: Vocabulary rows are padded to a multiple of this times TP; 0 switches padding off (Bridge's
    #: ``should_pad_vocab=False``, Megatron-LM's ``--padded-vocab-size``).
    make_vocab_size_divisible_by: int = 128
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0
    #: BLOOM's layer norm on the word embeddings.
    embedding_layernorm: bool = False
    #: A bias on the output layer (phi-1 style heads).
    output_bias: bool = False
    #: Channels of a head that are rotated: the width of the persistent table of rotary frequencies.
    rotary_dim: int = 0
    #: Angles scaled by YaRN, outside of multi-latent attention (``position_embedding_type`` "yarn").
    yarn: bool = False
    mtp_num_layers: int = 0
    #: The layer inside one MTP depth (None: no MTP).
    mtp_layer: LayerSpec | None = None
    #: All MTP depths share the weights of one MTP layer (``mtp_use_repeated_layer``).
    mtp_use_repeated_layer: bool = False
    #: Mamba and hybrid models are built by MambaModel, whose parameter names and splits differ from GPTModel's.
    hybrid: bool = False
    #: A hybrid whose layer pattern also splits the pipeline ("M-M*|M-M-", newer Megatron-LM): chunks come from
    #: ``pipeline_model_parallel_layout`` and may be virtual.
    pattern_splits_pipeline: bool = False
    #: Hyper-connections: residual streams, each of hidden_size; and whether fused kernels mix them.
    residual_streams: int = 1
    fused_hyper_connections: bool = False
    #: Gemma 4: rows of the per-layer embedding table (its width is ``all_layers_width``); 0: none.
    per_layer_vocab_size: int = 0
    #: AFMoE's mup_enabled: the input embeddings are multiplied by a number, outside of their module.
    scaled_embeddings: bool = False
    #: Gemma 2 and 4: a tanh over the logits (``final_logit_softcapping``).
    softcapped_logits: bool = False
    #: Whether it was read by the usual names, ``model_type`` having no reader of its own: what is there beside them is
    #: not known.
    generic: bool = False
    #: What the reader had to assume, one sentence each; shown with the estimate.
    assumptions: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()
    #: Modality encoders, on the first pipeline stage.
    encoders: tuple[EncoderSpec, ...] = ()
    #: Set for a diffusion model, whose sequence is made of patches.
    diffusion: DiffusionSpec | None = None

    #: Hash of the layers, computed once: caches keyed by a model are looked up for every stage of every estimate.
    _hash: int = field(default=0, init=False, repr=False, compare=False)
    #: Whether any layer routes tokens to experts.
    has_experts: bool = field(default=False, init=False, repr=False, compare=False)
    #: Consecutive equal layers: (LayerSpec, index of the first, index after the last).
    layer_runs: tuple[tuple[LayerSpec, int, int], ...] = field(default=(), init=False, repr=False, compare=False)
    #: Cached: elements of the model and of its MTP depths (``keep_parameter_counts``).
    parameter_counts: tuple[int, int] | None = field(default=None, init=False, repr=False, compare=False)
    #: Cached: what parallel sizes must divide (``limits.limits_of``).
    limits: object = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_types(self)
        for name, layers in (("layers", self.layers), ("mtp_layer", (self.mtp_layer,) if self.mtp_layer else ())):
            if type(layers) is not tuple or not all(type(layer) is LayerSpec for layer in layers):
                raise SpecError(f"{name} ({show(getattr(self, name))}) is not made of LayerSpecs; give them in a tuple")
        if type(self.encoders) is not tuple or not all(type(encoder) is EncoderSpec for encoder in self.encoders):
            raise SpecError(f"encoders ({show(self.encoders)}) is not made of EncoderSpecs; give them in a tuple")
        if self.diffusion is not None and type(self.diffusion) is not DiffusionSpec:
            raise SpecError(f"diffusion ({show(self.diffusion)}) is no DiffusionSpec; give one or None")
        # Equal layers are one object, which is fast to compare.
        one = {layer: layer for layer in reversed(self.layers)}
        object.__setattr__(self, "layers", tuple([one[layer] for layer in self.layers]))
        kinds = tuple(dict.fromkeys(self.layers))
        runs: list[tuple[LayerSpec, int, int]] = []
        for i, layer in enumerate(self.layers):
            if runs and (runs[-1][0] is layer or runs[-1][0] == layer):
                runs[-1] = (runs[-1][0], runs[-1][1], i + 1)
            else:
                runs.append((layer, i, i + 1))
        object.__setattr__(self, "layer_runs", tuple(runs))
        object.__setattr__(self, "has_experts", any(isinstance(kind.ffn, MoESpec) for kind in kinds))
        object.__setattr__(self, "_hash", hash((len(self.layers), kinds)))

    def __hash__(self) -> int:
        return self._hash

    def with_unquantized_ends(self, start: int, end: int) -> ModelSpec:
        """The model whose first ``start`` and last ``end`` layers, and no others, are unquantized.

        MTP depths stay quantized. Returns ``self`` if nothing changes. Source: ``fp8_utils.py:
        is_first_last_bf16_layer``.
        """
        if not start and not end and not any(kind.unquantized for kind, _, _ in self.layer_runs):
            return self
        beyond = len(self.layers) - end
        wanted = [i < start or i >= beyond for i in range(len(self.layers))]
        if wanted == [layer.unquantized for layer in self.layers]:
            return self
        other = {kind: replace(kind, unquantized=not kind.unquantized) for kind in dict.fromkeys(self.layers)}
        layers = [
            layer if layer.unquantized == on else other[layer] for layer, on in zip(self.layers, wanted, strict=True)
        ]
        return replace(self, layers=tuple(layers))

    def keep_parameter_counts(self, counts: tuple[int, int]) -> None:
        object.__setattr__(self, "parameter_counts", counts)

    def keep_limits(self, limits: object) -> None:
        object.__setattr__(self, "limits", limits)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Rows of the embedding; source: Bridge ``calculate_padded_vocab_size``, Megatron-LM tokenizer."""
        if not self.make_vocab_size_divisible_by:
            return divide(
                self.vocab_size, tensor_model_parallel_size, "vocab_size", "tensor_model_parallel_size",
                "set make_vocab_size_divisible_by to pad it",
            )* tensor_model_parallel_size
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple
