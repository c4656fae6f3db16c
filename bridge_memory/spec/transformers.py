"""How Hugging Face transformers runs a model: ``TransformersSpec``, and the model families that are supported.

A family is a ``model_type`` of transformers. ``Family`` lists where its class differs from Llama's;
``inventory/torch`` records the tensors. Families not listed in ``FAMILIES`` are refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from bridge_memory.releases import (
    CHECKPOINTS_NOT_REENTRANT,
    FAMILIES_OF_5,
    GEMMA_2_WITHOUT_SDPA,
    OLMO_IN_FP32,
    SHARED_MASKS,
    SHARED_MASKS_OF_GPT2,
)
from bridge_memory.spec.fields import Checked, choice, choices, count, flag, fraction, positive, release
from bridge_memory.spec.model import ModelSpec

#: The default release of transformers.
DEFAULT_TRANSFORMERS = (4, 57)
#: First and last supported release: those whose sources were read.
KNOWN_TRANSFORMERS = ((4, 51), (5, 24))
#: ``liger_kernel/transformers/monkey_patch.py: apply_liger_kernel_to_*``; Gemma's gated kernel is geglu.
LIGER_KERNELS = ("rope", "rms_norm", "swiglu", "geglu", "cross_entropy", "fused_linear_cross_entropy")
_LIGER = ("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy")
_LIGER_GEMMA = ("rope", "rms_norm", "geglu", "cross_entropy", "fused_linear_cross_entropy")
_LIGER_WITHOUT_ROPE = _LIGER[1:]
#: Without cross_entropy: Liger patches a name that Mistral's class does not use.
_LIGER_OF_MISTRAL = ("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSpec(Checked):
    """How Hugging Face transformers, torchtitan or torchtune runs a model. Other implementations ignore it.

    Example:
        >>> from bridge_memory import DataParallelSpec, ParallelSpec, RunSpec, TransformersSpec, explain
        >>> run = RunSpec(
        ...     model="meta-llama/Llama-3.2-1B",
        ...     parallel=ParallelSpec(world_size=8),
        ...     data_parallel=DataParallelSpec(engine="fsdp2"),
        ... )
        >>> checkpointed = run.with_(transformers=TransformersSpec(gradient_checkpointing=True))
        >>> explain(checkpointed, 0).activation_bytes < explain(run, 0).activation_bytes
        True
    """

    #: Release of transformers, as (major, minor).
    transformers_version: tuple[int, int] = release(DEFAULT_TRANSFORMERS)
    #: ``from_pretrained(attn_implementation=)``.
    attn_implementation: str = choice("sdpa", "eager", "sdpa", "flash_attention_2")
    #: The kernel of torch's scaled_dot_product_attention; None: flash without a mask, else memory-efficient.
    sdpa_kernel: str | None = choice(None, "flash", "efficient", "math")
    #: ``model.gradient_checkpointing_enable()``: every decoder layer is one checkpoint, recomputed in backward.
    gradient_checkpointing: bool = flag(False)
    #: NeMo Automodel ``components/distributed/parallelizer.py``: norms, attention and MLP of a layer are separate
    #: checkpoints; instead of ``gradient_checkpointing``.
    checkpoint_submodules: bool = flag(False)
    #: ``torch.utils.checkpoint(use_reentrant=)``; None: the release's default.
    use_reentrant: bool | None = flag(None)
    #: Compute dtype of torch.autocast around the forward pass; None: no autocast. Parameters are in ``params_dtype``.
    autocast: str | None = choice(None, "bf16", "fp16")
    #: ``attention_mask`` of the batch: all ones, with padding, or none.
    attention_mask: str = choice("ones", "ones", "padded", "none")
    #: ``use_cache``: keys and values are copied into a DynamicCache in training too.
    use_cache: bool = flag(False)
    #: The training loop holds the model's outputs, including the logits, until backward ends.
    keeps_outputs: bool = flag(False)
    #: Kernels of liger-kernel that replace those of the class.
    liger_kernel: tuple[str, ...] = choices((), *LIGER_KERNELS)
    #: LoRA adapters are in fp32 although the weights are in bf16 or fp16 (peft
    #: ``get_peft_model(autocast_adapter_dtype=)``).
    autocast_adapter_dtype: bool = flag(True)
    #: ``LoraConfig.lora_dropout``.
    lora_dropout: float = fraction(0.0, below_one=True)
    #: ``BitsAndBytesConfig``: frozen linears in NF4 (or FP4, of the same size), or in int8; quantised scales; the
    #: dtype of 4-bit matrix products.
    load_in_4bit: bool = flag(False)
    load_in_8bit: bool = flag(False)
    bnb_4bit_use_double_quant: bool = flag(False)
    bnb_4bit_compute_dtype: str = choice("fp32", "fp32", "bf16", "fp16")
    #: peft's function of this name was called: parameters that are not quantised are in fp32.
    prepare_model_for_kbit_training: bool = flag(False)
    #: torchtitan ``activation_checkpoint.mode`` selective, with its option: "op" keeps attention's output and every
    #: second matrix product; n checkpoints every n-th layer (torchtitan's default is 2).
    selective_ac_option: str | None = choice(None, "op", *map(str, range(1, 17)))
    #: Gated delta nets and Mamba use kernels of causal_conv1d and flash-linear-attention or mamba_ssm, as transformers
    #: does if they are installed; otherwise torch operations.
    mixer_kernels: bool = flag(False)
    #: ``torch.compile``: of the whole model with its loss; with torchtitan and torchtune of each layer and of the loss.
    torch_compile: bool = flag(False)
    #: Whether torchtitan or torchtune compiles the loss. None: if it compiles the layers, but with torchtune only the
    #: chunked loss (its full recipes discard what ``training.compile_loss`` returns for another loss).
    compile_loss: bool | None = flag(None)
    #: torchtune ``CEWithChunkedOutputLoss(num_output_chunks=)``: logits in this many chunks of tokens, cast to fp32 one
    #: by one; 0: not chunked.
    num_output_chunks: int = count(0)
    #: cut-cross-entropy's ``linear_cross_entropy`` instead of output layer and loss: logits are never materialized.
    cut_cross_entropy: bool = flag(False)
    #: torchtune: one optimizer per parameter, which steps as soon as backward has produced its gradient.
    optimizer_in_bwd: bool = flag(False)
    #: torchtune ``OffloadActivations``: inputs of checkpoints are in pinned host memory between forward and backward.
    enable_activation_offloading: bool = flag(False)
    #: How experts are computed, from transformers 5 on ("eager": a loop); None: the release's default.
    experts_implementation: str | None = choice(None, "eager", "batched_mm", "grouped_mm")
    #: Sequences per GPU and batch in evaluation between steps; None: no more than in training.
    eval_micro_batch_size: int | None = positive(None, below=2**20)

    @property
    def quantized(self) -> bool:
        return self.load_in_4bit or self.load_in_8bit

    @property
    def reentrant(self) -> bool:
        """Whether checkpoints are reentrant (``modeling_utils.py: PreTrainedModel.gradient_checkpointing_enable``)."""
        return not CHECKPOINTS_NOT_REENTRANT(self) if self.use_reentrant is None else self.use_reentrant


class Family(NamedTuple):
    """Properties of the class of a ``model_type``; the defaults are Llama's (``models/llama/modeling_llama.py``)."""

    #: "llama": weight times the normalised input, in the input's dtype; "gemma": (1 + weight) times it, in fp32;
    #: "olmo2": weight times it, in fp32; "olmo": ``F.layer_norm`` in fp32 without weights; "layernorm":
    #: ``nn.LayerNorm``; "fused": ``nn.RMSNorm``.
    norm: str = "llama"
    #: Names of the norms before and after attention, before and after the feed-forward block; "": no norm there.
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    #: q, k and v are one linear, qkv_proj; gate and up are one, gate_up_proj, with up as the first operand of their
    #: product.
    fused_qkv: bool = False
    fused_gate_up: bool = False
    #: How queries and keys are rotated. "halves": ``rotate_half``; "half tables": cos and sin as wide as one half
    #: (gpt-oss); "interleaved": pairs, with cos and sin repeated in every layer (GLM); "joined": halves
    #: concatenated with the rest of a head, even if there is none (Bamba); "gathered":
    #: every layer picks cos and sin of the positions (Phi-3.5-MoE before 5); "polar": as complex numbers
    #: (DeepSeek-V2); "torchtune": pairs in fp32.
    rotary: str = "halves"
    #: 3: cos and sin are made for time, height and width of every sequence (Qwen2.5-VL); "gathered": layers gather
    #: theirs, else the model does once.
    rotary_axes: int = 1
    #: The share of ``rotary_dim`` that cos and sin have.
    rotary_share: float = 1.0
    #: cos and sin are in fp32, and so are rotated queries and keys until they are cast back (OLMo 2).
    rotary_in_fp32: bool = False
    #: When queries and keys are normed: "each": after its projection; "all": after all projections; "rotated": after
    #: the rotary embedding. Names of the two norms.
    qk_norm: str = "each"
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    #: The gate of attention's output has a separate linear, gate_proj, which runs after v_proj.
    separate_gate: bool = False
    #: Queries of multi-latent attention are multiplied by a factor of their position (Mistral 4).
    scaled_queries: bool = False
    #: Multi-latent attention. "": rotated parts are concatenated with the others; "unrotated": none is rotated, and
    #: keys are written into a new tensor (Kimi-Linear).
    latent: str = ""
    #: Queries and the latent of keys and values are multiplied before they are used (LongCat-Flash).
    scaled_latents: bool = False
    #: Rotated queries and keys are cast back, whatever the dtype of cos and sin.
    rotary_cast_back: bool = False
    #: Sliding layers have separate cos and sin (Gemma 3).
    local_rotary: bool = False
    #: A mask is created for every batch, and sliding layers derive another from it.
    always_masked: bool = False
    #: The model creates masks for full and for sliding layers, even if it has only one kind.
    both_masks: bool = False
    #: Where the input embeddings are scaled: "": nowhere; "embedding": in the embedding module; "model": in the model,
    #: where a variable still holds the unscaled ones.
    scaled_embeddings: str = ""
    #: Outputs of attention and MLP are multiplied before the residual addition, and logits divided (Granite).
    scaled_residuals: bool = False
    #: Logits are returned in fp32.
    wide_logits: bool = False
    #: A tanh over the scores of eager attention and over the logits (Gemma 2).
    softcapped: bool = False
    #: Masks are in the model's dtype, and positions alone create none (``_update_causal_mask``); sdpa gets keys and
    #: values repeated for every query head.
    own_masks: bool = False
    #: Masks of padded batches are made by the class, in the model's dtype (``_update_causal_mask``).
    typed_masks: bool = False
    #: The class has a separate attention function per implementation, whose variables keep keys and values of every
    #: head, and probabilities, alive until it returns.
    own_attention: bool = False
    #: The model creates another boolean mask [b, 1, s, s] that no layer uses.
    idle_mask: bool = False
    #: No mask is created for any batch.
    never_masked: bool = False
    #: The MoE block. "mixtral", "qwen": a loop over experts, with the module names of Mixtral or Qwen; "deepseek": sums
    #: in fp32, sigmoid scores; "gpt_oss": biases and clamped gates (``gpt_oss.py``); "minimax": sigmoid scores;
    #: "phimoe": Mixtral's with sparsemixer as router; "hunyuan": an fp32 router weight, the shared expert first;
    #: "jamba": Qwen's, in feed_forward; "lfm2": sigmoid scores in the model's dtype; "afmoe": sigmoid scores, the
    #: shared experts before the routed ones, and the router's bias a frozen parameter; "mistral4": softmax in the
    #: model's dtype; "granite": tokens sorted by expert, one product for each; "longcat": softmax scores in fp32, and
    #: experts that return their input.
    moe: str = "qwen"
    #: Experts run one by one in every release.
    looped_experts: bool = False
    #: The routing weights of a token sum to one.
    normalized_router: bool = True
    #: Names of the feed-forward module and of its linears (gate, up, down; or joined, down), of the linear after
    #: attention, and of a Mamba mixer.
    mlp: str = "mlp"
    linears: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    output: str = "o_proj"
    mamba: str = "mamba"
    #: Prefix of the names of decoder layers and embeddings; the names of layers, embedding and final norm after it.
    prefix: str = "model."
    layers: str = "layers"
    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    #: The decoder layer: Llama's, with the differences above, or one recorded in a separate module.
    layer: str = "llama"
    #: Eager attention. "llama"; "gpt2": softmax in the dtype of the scores, and before 5 a different mask; "sinks": an
    #: additional logit per row (gpt-oss).
    eager: str = "llama"
    #: Supported values of ``attn_implementation``. A class without sdpa uses eager attention by default.
    attention: tuple[str, ...] = ("eager", "sdpa", "flash_attention_2")
    #: The first release that has the class.
    since: tuple[int, int] = (4, 51)
    #: The last release whose class was read.
    until: tuple[int, int] = KNOWN_TRANSFORMERS[1]
    #: Kernels that Liger 0.8.5 has for the class (``MODEL_TYPE_TO_APPLY_LIGER_FN``), and whether its norm writes the
    #: gradient of the input over that of the output.
    liger: tuple[str, ...] = ()
    liger_norm_in_place: bool = True


_SANDWICH = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)
_NORM_AFTER = ("", "post_attention_layernorm", "", "post_feedforward_layernorm")
#: ``model_type`` -> its family.
FAMILIES: dict[str, Family] = {
    "llama": Family(liger=_LIGER),
    "mistral": Family(liger=_LIGER_OF_MISTRAL),
    "qwen2": Family(liger=_LIGER),
    "qwen3": Family(liger=_LIGER),
    "smollm3": Family(liger=_LIGER, since=(4, 53)),
    "mixtral": Family(moe="mixtral", liger=_LIGER),
    "qwen2_moe": Family(normalized_router=False, own_masks=True, own_attention=True),
    "qwen3_moe": Family(liger=_LIGER),
    "olmoe": Family(norm="llama", normalized_router=False, own_masks=True, own_attention=True),
    "deepseek_v3": Family(moe="deepseek", rotary="deepseek"),
    "glm4_moe": Family(moe="deepseek", since=(4, 54)),
    "gemma": Family(norm="gemma", scaled_embeddings="model", liger=_LIGER_GEMMA),
    "gemma2": Family(
        norm="gemma", norms=_SANDWICH, scaled_embeddings="model", softcapped=True, both_masks=True, liger=_LIGER_GEMMA,
        liger_norm_in_place=False,
    ),
    "gemma3_text": Family(
        norm="gemma", norms=_SANDWICH, scaled_embeddings="embedding", local_rotary=True, both_masks=True,
        qk_norm="all", liger=_LIGER_GEMMA, liger_norm_in_place=False,
    ),
    "phi3": Family(fused_qkv=True, fused_gate_up=True, liger=_LIGER),
    "granite": Family(scaled_embeddings="embedding", scaled_residuals=True, liger=_LIGER[:-1]),
    "olmo": Family(norm="olmo", rotary_in_fp32=True),
    "olmo2": Family(
        norm="olmo2", norms=_NORM_AFTER, rotary_in_fp32=True, liger=_LIGER, liger_norm_in_place=False
    ),
    "olmo3": Family(
        norm="olmo2", norms=_NORM_AFTER, rotary_in_fp32=True, local_rotary=True, both_masks=True,
        liger=_LIGER, liger_norm_in_place=False, since=(4, 57),
    ),
    "flex_olmo": Family(
        norm="olmo2", norms=_NORM_AFTER, rotary_in_fp32=True, normalized_router=False, since=(4, 57)
    ),
    "glm": Family(fused_gate_up=True, rotary="interleaved"),
    "glm4": Family(
        fused_gate_up=True, rotary="interleaved",
        norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
        liger=_LIGER_WITHOUT_ROPE, liger_norm_in_place=False,
    ),
}
FAMILIES["gpt2"] = Family(
    norm="layernorm", prefix="transformer.", layers="h", embedding="wte", final_norm="ln_f", layer="gpt2",
    eager="gpt2",
)
FAMILIES["gpt_oss"] = Family(
    norm="olmo2", rotary="half tables", eager="sinks", moe="gpt_oss", both_masks=True,
    attention=("eager", "flash_attention_2"), since=(4, 55),
)
FAMILIES["bloom"] = Family(
    norm="layernorm", prefix="transformer.", layers="h", embedding="word_embeddings", final_norm="ln_f", layer="bloom",
    attention=("eager",),
)
#: Its class is remote code, which was not read; its shapes are DeepSeek-V3's, whose class can run it.
FAMILIES["kimi_k2"] = FAMILIES["deepseek_v3"]
FAMILIES["qwen3_next"] = Family(norm="gemma", since=(4, 57), until=(5, 12))
FAMILIES["nemotron_h"] = Family(
    embedding="embeddings", final_norm="norm_f", layer="nemotron_h", moe="deepseek", mamba="mixer",
    wide_logits=True, since=(5, 3), until=(5, 14),
)
_HUNYUAN = Family(qk_norm="rotated", qk_norms=("query_layernorm", "key_layernorm"), moe="hunyuan", since=(4, 56))
FAMILIES["hunyuan_v1_dense"] = FAMILIES["hunyuan_v1_moe"] = _HUNYUAN
FAMILIES["solar_open"] = Family(moe="deepseek", since=(5, 0))
_LFM2: dict[str, Any] = dict(
    norms=("operator_norm", "", "ffn_norm", ""), final_norm="embedding_norm", mlp="feed_forward",
    linears=("w1", "w3", "w2"), output="out_proj", qk_norms=("q_layernorm", "k_layernorm"),
)
FAMILIES["lfm2"] = Family(**_LFM2, since=(4, 54), until=(5, 14))
FAMILIES["lfm2_moe"] = Family(**_LFM2, moe="lfm2", since=(5, 0), until=(5, 14))
FAMILIES["granitemoehybrid"] = Family(
    scaled_embeddings="embedding", scaled_residuals=True, moe="granite", fused_gate_up=True, mlp="shared_mlp",
    linears=("input_linear", "output_linear"), typed_masks=True, wide_logits=True, until=(5, 12),
)
FAMILIES["bamba"] = Family(
    norms=("input_layernorm", "", "pre_ff_layernorm", ""), final_norm="final_layernorm", mlp="feed_forward",
    rotary="joined", rotary_share=0.5, typed_masks=True, until=(5, 14),
)
FAMILIES["jamba"] = Family(
    norms=("input_layernorm", "", "pre_ff_layernorm", ""), final_norm="final_layernorm", mlp="feed_forward",
    moe="jamba", normalized_router=False, since=(5, 0), until=(5, 14),
)
FAMILIES["phimoe"] = Family(
    norm="layernorm", moe="phimoe", normalized_router=False, own_masks=True, own_attention=True, rotary="gathered",
)
FAMILIES["apertus"] = Family(
    qk_norm="all", norms=("attention_layernorm", "", "feedforward_layernorm", ""), since=(4, 56),
)
FAMILIES["minimax_m2"] = Family(moe="minimax", since=(5, 0))
#: From 5.23 on the router's weight and dt_bias are in fp32 in models of any dtype: 2 bytes more for each of their
#: elements, which are not counted.
FAMILIES["kimi_linear"] = Family(moe="deepseek", latent="unrotated", since=(5, 17))
FAMILIES["longcat_flash"] = Family(
    moe="longcat", rotary="deepseek", scaled_latents=True, normalized_router=False, looped_experts=True,
    layer="longcat_flash", since=(4, 57),
)
FAMILIES["afmoe"] = Family(
    norm="olmo2", qk_norm="all", separate_gate=True, both_masks=True, moe="afmoe", since=(5, 4),
    norms=("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm"),
)
FAMILIES["mistral4"] = Family(moe="mistral4", rotary="deepseek", scaled_queries=True, since=(5, 4))
FAMILIES["deepseek_v2"] = Family(moe="deepseek_v2", rotary="polar", normalized_router=False, since=(4, 54))
#: ``model_type`` whose class is remote code (``trust_remote_code``) that was not read -> its file.
REMOTE_CODE = {"nemotron-nas": "modeling_decilm.py, whose layers were searched one by one"}
#: ``model_type`` that Megatron cannot train -> what of it megatron-core does not have.
NOT_IN_MEGATRON = {
    "phimoe": "a sparsemixer router, which samples experts and has its own gradient",
    "granitemoehybrid": "layers of a Mamba mixer or attention with an MLP beside experts in each",
    "bamba": "layers that hold a Mamba mixer and an MLP",
    "lfm2": "the gated short convolution",
    "lfm2_moe": "the gated short convolution",
    "apertus": "the xIELU activation, with two trained parameters for each MLP",
    "jamba": "mixers of the first Mamba, with separate states for every channel",
    "kimi_linear": "Kimi delta attention, with a gate for every channel of a key",
    "longcat_flash": "layers of two attentions and two MLPs around experts, some of which return their input",
    "afmoe": "gated attention and experts with a norm before and after each",
    "mistral4": "multi-latent attention with queries that are scaled by their position",
}
#: torchtitan 0.2.2 ``models/llama3/model/model.py``: ``nn.RMSNorm``, queries and keys rotated as complex numbers.
TORCHTITAN = Family(norm="fused", rotary="complex", never_masked=True)
#: Model types for which torchtitan's layers are supported.
OF_TORCHTITAN = ("llama",)
#: torchtune ``modules/{attention,feed_forward,position_embeddings,rms_norm}.py``: pairs are rotated in fp32, keys and
#: values repeated for every query head; flex attention separates packed sequences, without a mask.
TORCHTUNE = Family(rotary="torchtune", never_masked=True)
#: Model types for which torchtune's layers are supported.
OF_TORCHTUNE = ("llama",)
#: Families of transformers whose compiled layers were recorded (``inventory/torch/compiled.py``).
COMPILED = ("llama", "mistral", "qwen2", "qwen3")
#: Differences of classes from transformers 5 on.
_FROM_5: dict[str, dict[str, Any]] = {
    # Gemma*ScaledWordEmbedding scales in the embedding module.
    "gemma": {"scaled_embeddings": "embedding"},
    "gemma2": {"scaled_embeddings": "embedding"},
    "olmo3": {"rotary_in_fp32": False, "rotary_cast_back": True, "local_rotary": False},
    # sliding_window is 0: a mask is created and no layer uses it.
    "qwen2_moe": {"own_masks": False, "own_attention": False, "idle_mask": True},
    "olmoe": {"own_masks": False, "own_attention": False},
    "deepseek_v3": {"liger": _LIGER_WITHOUT_ROPE},
    "granitemoehybrid": {"typed_masks": False, "wide_logits": False},
    # ``BambaRotaryEmbedding.compute_default_rope_parameters`` does not look at partial_rotary_factor.
    "bamba": {"typed_masks": False, "rotary_share": 1.0},
    "phimoe": {"own_masks": False, "own_attention": False, "rotary": "halves"},
}
#: Before 4.52 OLMo's classes rotated in the model's dtype, and OLMo 2's norm was Llama's.
_BEFORE_4_52: dict[str, dict[str, Any]] = {
    "olmo": {"rotary_in_fp32": False}, "olmo2": {"rotary_in_fp32": False, "norm": "llama"},
}
#: Before the shared mask functions, Gemma 2 and 3 always created a mask.
_BEFORE_SHARED_MASKS: dict[str, dict[str, Any]] = {
    "gemma2": {"always_masked": True, "both_masks": False}, "gemma3_text": {"always_masked": True, "both_masks": False},
}


def family_of(model_type: str, spec: TransformersSpec) -> Family:
    """The family of a supported ``model_type`` in ``transformers_version``."""
    family = FAMILIES[model_type]
    shared_masks = SHARED_MASKS_OF_GPT2 if model_type == "gpt2" else SHARED_MASKS
    if not shared_masks(spec):
        family = family._replace(own_masks=True, **_BEFORE_SHARED_MASKS.get(model_type, {}))
        return family if OLMO_IN_FP32(spec) else family._replace(**_BEFORE_4_52.get(model_type, {}))
    if model_type == "gemma2" and GEMMA_2_WITHOUT_SDPA(spec):
        family = family._replace(attention=("eager", "flash_attention_2"))
    return family._replace(**_FROM_5.get(model_type, {})) if FAMILIES_OF_5(spec) else family


def usable_attention(model_type: str, spec: TransformersSpec) -> tuple[str, ...]:
    """Attention implementations with which a class trains correctly.

    FlashAttention 2 has no attention sinks. transformers 4 silently drops them
    (``modeling_flash_attention_utils.py: _process_flash_attention_kwargs``); 5 substitutes a kernel that has them
    (``modeling_utils.py: _compatible_flash_implementations``).
    """
    family = family_of(model_type, spec)
    drops = family.eager == "sinks" and not FAMILIES_OF_5(spec)
    return tuple(name for name in family.attention if not (drops and name == "flash_attention_2"))


#: The value for runs of other implementations.
DEFAULT_TRANSFORMERS_SPEC = TransformersSpec()


def as_transformers_builds(model: ModelSpec) -> ModelSpec:
    """The model as transformers' classes build it: the vocabulary is not padded, and there are no MTP depths."""
    if not (model.make_vocab_size_divisible_by or model.mtp_num_layers):
        return model
    notes = model.assumptions
    if model.mtp_num_layers:
        notes += (f"mtp_num_layers ({model.mtp_num_layers}): transformers' {model.model_type} builds no MTP depths",)
    return replace(
        model, make_vocab_size_divisible_by=0, mtp_num_layers=0, mtp_layer=None, mtp_use_repeated_layer=False,
        assumptions=notes,
    )
