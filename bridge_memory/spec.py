"""RunSpec: what is trained, and how. Frozen, validated once, with Megatron's own field names.

A reader (``bridge_memory.readers``) produces a ``ModelSpec``; a command line, a ConfigContainer or a
Megatron-LM argument list produces the rest. Everything to the right of this file takes a ``RunSpec`` and
never looks at the source it came from.

Every refusal is a ``SpecError`` (a ``ValueError``) of one line that names the field, its value and the fix.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

DTYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "uint8": 1}


class SpecError(ValueError):
    """A user's input that cannot be estimated. One line: the field, the value, the fix."""


def divide(numerator: int, denominator: int, what: str, by: str, fix: str = "") -> int:
    """Exact division; nothing is ever rounded in silence. Raises SpecError naming both fields."""
    if numerator % denominator:
        hint = f"; {fix}" if fix else ""
        raise SpecError(f"{what} ({numerator}) is not divisible by {by} ({denominator}){hint}")
    return numerator // denominator


# --------------------------------------------------------------------------------------------------
# The model: what a layer is made of. Global sizes, before any sharding.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Softmax attention with a, g, d as in ``megatron.core.transformer.attention.SelfAttention``."""

    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    add_qkv_bias: bool = False
    add_output_bias: bool = False
    #: None; "head": one norm weight of kv_channels (Qwen3); "full": one of all the heads (OLMoE, MiniMax).
    qk_layernorm: str | None = None
    #: Sliding-window length in tokens, None for full attention. Changes no saved tensor under flash.
    window_size: int | None = None
    #: gpt-oss: one learnt logit a head (``softmax_offset``).
    learnable_softmax_sink: bool = False
    #: Qwen3-Next: linear_qkv also makes a sigmoid gate of the size of q.
    attention_output_gate: bool = False
    rotary: bool = True


@dataclass(frozen=True, slots=True)
class MLASpec:
    """Multi-latent attention (``megatron.core.transformer.multi_latent_attention.MLASelfAttention``)."""

    num_attention_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_head_dim: int
    qk_pos_emb_head_dim: int
    v_head_dim: int
    qk_layernorm: bool = True


@dataclass(frozen=True, slots=True)
class MambaSpec:
    """Mamba-2 mixer (``megatron.core.ssm.mamba_mixer.MambaMixer``)."""

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


@dataclass(frozen=True, slots=True)
class GatedDeltaNetSpec:
    """Gated delta net (``megatron.core.ssm.gated_delta_net.GatedDeltaNet``, Qwen3-Next)."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int = 4


@dataclass(frozen=True, slots=True)
class MLPSpec:
    """A dense feed-forward block of inner width f (``megatron.core.transformer.mlp.MLP``)."""

    ffn_hidden_size: int
    gated: bool
    activation: str = "silu"
    add_bias: bool = False


@dataclass(frozen=True, slots=True)
class MoESpec:
    """A mixture-of-experts block (``megatron.core.transformer.moe.moe_layer.MoELayer``)."""

    num_experts: int
    topk: int
    moe_ffn_hidden_size: int
    gated: bool = True
    activation: str = "silu"
    add_bias: bool = False
    #: Total inner width of the shared experts, 0 without.
    shared_expert_intermediate_size: int = 0
    shared_expert_gate: bool = False
    #: Aux-loss-free balancing: an fp32 buffer of E values and one of token counts (not parameters).
    router_enable_expert_bias: bool = False
    #: The model's published parameter count has that bias in it (MiniMax-M2, Nemotron-3); Megatron's never has.
    expert_bias_in_published_count: bool = False
    #: A bias on the router's linear (gpt-oss).
    add_router_bias: bool = False
    router_score_function: str = "softmax"
    #: Aux-loss kind: "none", "aux_loss", "seq_aux_loss", "sinkhorn", ...
    router_load_balancing_type: str = "aux_loss"
    #: Group-limited routing: a token's experts come from ``group_topk`` of ``num_groups`` groups of experts.
    router_num_groups: int | None = None
    router_group_topk: int | None = None
    #: Latent MoE: experts work in this width instead of h (Nemotron-3).
    latent_size: int | None = None


Mixer = AttentionSpec | MLASpec | MambaSpec | GatedDeltaNetSpec
FeedForward = MLPSpec | MoESpec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One entry of the layer stack: a mixer, a feed-forward block, or both (None where absent)."""

    mixer: Mixer | None
    ffn: FeedForward | None
    #: Gemma 2 and 3: a second norm after attention and one after the feed-forward block.
    post_layernorms: bool = False

@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The architecture. ``layers`` lists the decoder layers in order (MTP depths apart)."""

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
    #: Fraction of the head dimension that is rotated, and the rope width in all for the lasting table.
    rotary_dim: int = 0
    mtp_num_layers: int = 0
    #: The layer inside one MTP depth (None: no MTP).
    mtp_layer: LayerSpec | None = None
    #: Every MTP depth uses the one MTP layer's weights (``mtp_use_repeated_layer``).
    mtp_use_repeated_layer: bool = False
    #: Mamba/hybrid models are built by MambaModel, whose parameter names and splits differ from GPTModel's.
    hybrid: bool = False
    #: A hybrid whose layer pattern itself splits the pipeline ("M-M*|M-M-", newer Megatron-LM): chunks come from
    #: ``pipeline_model_parallel_layout`` and may be virtual.
    pattern_splits_pipeline: bool = False
    #: What the reader had to suppose, one sentence each; shown with the estimate.
    assumptions: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()

    #: Hash of the fields, taken once: caches keyed by a model are looked up for every stage of every estimate.
    _hash: int = field(default=0, init=False, repr=False, compare=False)
    #: Whether any layer routes tokens to experts.
    has_experts: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kinds = tuple(dict.fromkeys(self.layers))
        object.__setattr__(self, "has_experts", any(isinstance(kind.ffn, MoESpec) for kind in kinds))
        object.__setattr__(
            self, "_hash", hash((self.name, self.hidden_size, self.vocab_size, len(self.layers), kinds))
        )

    def __hash__(self) -> int:
        return self._hash

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


# --------------------------------------------------------------------------------------------------
# The run: how it is sharded and trained.
# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec:
    """Megatron's parallel sizes; the data-parallel size follows from ``world_size``."""

    world_size: int = 1
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    #: None: Megatron's default, the tensor parallel size.
    expert_tensor_parallel_size: int | None = None
    #: None: on when tensor_model_parallel_size > 1.
    sequence_parallel: bool | None = None
    num_layers_in_first_pipeline_stage: int | None = None
    num_layers_in_last_pipeline_stage: int | None = None
    account_for_embedding_in_pipeline_split: bool = False
    account_for_loss_in_pipeline_split: bool = False
    #: Megatron's layout string ("Et*3|(tt|)*29,m|L") with E, t, m, L.
    pipeline_model_parallel_layout: str | None = None
    microbatch_group_size_per_vp_stage: int | None = None
    num_distributed_optimizer_instances: int = 1

    # Short words used by formulas.
    @property
    def tp(self) -> int:
        return self.tensor_model_parallel_size

    @property
    def pp(self) -> int:
        return self.pipeline_model_parallel_size

    @property
    def vpp(self) -> int:
        return self.virtual_pipeline_model_parallel_size or 1

    @property
    def cp(self) -> int:
        return self.context_parallel_size

    @property
    def ep(self) -> int:
        return self.expert_model_parallel_size

    @property
    def etp(self) -> int:
        return self.tp if self.expert_tensor_parallel_size is None else self.expert_tensor_parallel_size

    @property
    def sp(self) -> bool:
        return self.tp > 1 if self.sequence_parallel is None else self.sequence_parallel

    @property
    def data_parallel_size(self) -> int:
        return self.world_size // (self.tp * self.pp * self.cp)

    @property
    def expert_data_parallel_size(self) -> int:
        return self.world_size // (self.etp * self.ep * self.pp)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """Sequences and tokens of a step. ``seq_length`` is s before CP."""

    seq_length: int = 4096
    micro_batch_size: int = 1
    #: None: one microbatch a pipeline rank and data-parallel replica, see ``RunSpec.num_microbatches``.
    global_batch_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSpec:
    """Compute and parameter formats."""

    #: "bf16", "fp16" or "fp32": the dtype of parameters and activations.
    params_dtype: str = "bf16"
    #: None, "hybrid" or "e4m3".
    fp8: str | None = None
    #: "delayed", "tensorwise", "blockwise", "mxfp8"
    fp8_recipe: str = "delayed"
    #: Parameters themselves are kept in fp8 (``fp8_param_gather`` / ``--fp8-param-gather``).
    fp8_param: bool = False
    #: ``first_last_layers_bf16``: this many layers at either end stay in bf16 under fp8.
    num_layers_at_start_in_bf16: int = 0
    num_layers_at_end_in_bf16: int = 0
    fp32_residual_connection: bool = False
    attention_softmax_in_fp32: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """Optimizer, gradient buffers and their dtypes (OptimizerConfig + DistributedDataParallelConfig)."""

    #: "adam", "sgd" or "muon"
    optimizer: str = "adam"
    sgd_momentum: float = 0.9
    use_distributed_optimizer: bool = True
    #: fp32 main gradients; False keeps them in params_dtype.
    grad_reduce_in_fp32: bool = True
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    #: None: Megatron's default, max(40e6, 1e6 * data-parallel size) elements when gradients overlap.
    ddp_bucket_size: int | None = None
    use_precision_aware_optimizer: bool = False
    main_grads_dtype: str = "fp32"
    main_params_dtype: str = "fp32"
    exp_avg_dtype: str = "fp32"
    exp_avg_sq_dtype: str = "fp32"
    store_param_remainders: bool = True
    #: ``OptimizerConfig.fp8_recipe``: any but "delayed" (None: unset) keeps fp32 main parameters and gradients in
    #: megatron-core under a precision-aware optimizer, fp8 or not. Bridge's MixedPrecisionConfig sets "tensorwise".
    fp8_recipe: str | None = None
    optimizer_cpu_offload: bool = False
    optimizer_offload_fraction: float = 1.0
    #: FusedAdam of Transformer Engine or Apex (True) or torch's (False).
    fused_optimizer: bool = True
    clip_grad: float = 1.0
    #: ``log_params_norm``: fp32 copies of half-precision parameters in the step that logs (``calc_params_l2_norm``).
    log_params_norm: bool = False
    #: ``log_num_zeros_in_grad``: a comparison mask of one gradient at a time (``count_zeros_fp32``).
    log_num_zeros_in_grad: bool = False
    #: Muon's layer-wise optimizer ("dist_muon"): whole parameters are dealt out over data-parallel ranks.
    use_layer_wise_distributed_optimizer: bool = False
    #: Megatron-FSDP: None, or "no_shard", "optim", "optim_grads", "optim_grads_params".
    data_parallel_sharding_strategy: str | None = None
    #: Parameters that get no gradient: "none", or "lora" (only adapters train).
    peft: str = "none"
    #: LoRA's rank, 0 where unknown, and the linears it stands beside (``peft.dim``, ``peft.target_modules``).
    lora_dim: int = 0
    lora_target_modules: tuple[str, ...] = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")

    @property
    def fused_main_parameters(self) -> bool:
        """Whether Transformer Engine's FusedAdam keeps the main parameters and reads gradients as they are.

        Source: ``OptimizerConfig.__post_init__: use_precision_aware_optimizer_no_fp8_or_ds_fp8``. Otherwise a
        precision-aware optimizer saves on the moments only.
        """
        return self.use_precision_aware_optimizer and (
            self.main_params_dtype != "fp32"
            or self.fp8_recipe in (None, "delayed")
            or self.optimizer_cpu_offload
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSpec:
    """Activation recomputation, as in TransformerConfig."""

    granularity: str | None = None
    method: str | None = None
    num_layers: int | None = None
    modules: tuple[str, ...] = ("core_attn",)
    distribute_saved_activations: bool = False

    def selects(self, module: str) -> bool:
        """Whether selective recomputation covers this module name."""
        return self.granularity == "selective" and module in self.modules


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplementationSpec:
    """Which code runs: the same mathematics saves different tensors in different implementations."""

    #: "transformer_engine" or "local"
    transformer_impl: str = "transformer_engine"
    #: megatron-core release whose rules apply, as (major, minor).
    megatron_core: tuple[int, int] = (0, 16)
    #: "auto", "flash", "fused", "unfused", "local"
    attention_backend: str = "auto"
    gradient_accumulation_fusion: bool = True
    masked_softmax_fusion: bool = True
    bias_activation_fusion: bool = True
    #: Squared ReLU times the routing probability in one kernel (``use_fused_weighted_squared_relu``).
    use_fused_weighted_squared_relu: bool = False
    bias_dropout_fusion: bool = True
    apply_rope_fusion: bool = True
    persist_layer_norm: bool = True
    cross_entropy_loss_fusion: bool = False
    #: "native", "te" or "linear"
    cross_entropy_fusion_impl: str = "native"
    create_attention_mask: bool = False
    calculate_per_token_loss: bool = False
    deterministic_mode: bool = False
    defer_embedding_wgrad_compute: bool = False
    #: Weight gradients run after the data gradients of a layer: their inputs live longer.
    delay_wgrad_compute: bool = False
    #: ``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0``: cuDNN's fused attention backward is not eligible everywhere.
    nvte_deterministic: bool = False
    #: Megatron's removed legacy GPTModel (``--use-legacy-models``), a local implementation.
    use_legacy_models: bool = False
    #: Scores divided by the layer number, softmax in fp32 (``--apply-query-key-layer-scaling``).
    apply_query_key_layer_scaling: bool = False
    #: How context parallelism exchanges keys and values: "p2p", "a2a", "all_gather", "a2a+p2p".
    cp_comm_type: str = "p2p"
    #: "none", "local", "transformer_engine" or "full_iteration"; graphs keep their buffers in a private pool.
    cuda_graph_impl: str = "none"
    #: Transformer Engine's operation fuser for the MLP (``use_transformer_engine_op_fuser``).
    use_transformer_engine_op_fuser: bool = False
    moe_token_dispatcher_type: str = "alltoall"
    #: Backend of the "flex" dispatcher: "deepep" or "hybridep".
    moe_flex_dispatcher_backend: str = "deepep"
    moe_grouped_gemm: bool = True
    moe_permute_fusion: bool = False
    moe_router_fusion: bool = False
    moe_router_dtype: str | None = None
    moe_expert_capacity_factor: float | None = None
    moe_pad_expert_input_to_capacity: bool = False
    moe_shared_expert_overlap: bool = False
    moe_apply_probs_on_input: bool = False
    #: The most loaded rank's tokens over the balanced number; multiplies routed-expert activations.
    moe_imbalance: float = 1.0
    overlap_moe_expert_parallel_comm: bool = False
    #: Whole layers whose saved activations go to host memory (TE's cpu_offloading).
    cpu_offloading_num_layers: int = 0
    #: Fine-grained offloading (``offload_modules``), by module name.
    offload_modules: tuple[str, ...] = ()
    #: GPU generation for workspace sizes: "ampere", "hopper", "blackwell".
    gpu_arch: str = "hopper"
    #: Transformer Engine release, as (major, minor); None where unknown.
    transformer_engine: tuple[int, int] | None = None
    #: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the allocator splits blocks exactly.
    expandable_segments: bool = False
    #: torch's cuBLAS workspace in bytes; None: torch's default for the architecture.
    cublas_workspace_bytes: int | None = None

    @property
    def te(self) -> bool:
        return self.transformer_impl == "transformer_engine"

    @property
    def te_grouped_gemm(self) -> bool:
        """Whether grouped experts are Transformer Engine's (``TEGroupedMLP``, from TE 1.9) and not the legacy
        ``GroupedMLP`` (``extensions/transformer_engine.py: TEColumnParallelGroupedLinear``)."""
        recent = self.transformer_engine is None or self.transformer_engine >= (1, 9)
        return self.te and self.moe_grouped_gemm and recent

    @property
    def attention_kernel(self) -> str:
        """The attention that runs: "flash" (FlashAttention 2), "fused" (cuDNN) or "unfused".

        What "auto" means is Transformer Engine's choice (``dot_product_attention/utils.py:
        get_attention_backend``): cuDNN from Hopper on, FlashAttention before it and, with determinism asked for,
        on Blackwell, where cuDNN's backward is not deterministic.
        """
        if not self.te or self.attention_backend in ("unfused", "local"):
            return "unfused"
        if self.attention_backend in ("flash", "fused"):
            return self.attention_backend
        needs_flash = self.gpu_arch == "ampere" or (self.gpu_arch == "blackwell" and self.nvte_deterministic)
        return "flash" if needs_flash else "fused"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One training run. Building it checks everything that can be checked without laying out layers."""

    model: ModelSpec
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    batch: BatchSpec = field(default_factory=BatchSpec)
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    recompute: RecomputeSpec = field(default_factory=RecomputeSpec)
    implementation: ImplementationSpec = field(default_factory=ImplementationSpec)
    #: Assumptions and gaps that the source of the run added (on top of the model's own).
    assumptions: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        from bridge_memory.validation import validate

        validate(self)

    @property
    def num_microbatches(self) -> int:
        """Microbatches a step on one data-parallel replica (``num_microbatches_calculator``)."""
        p, b = self.parallel, self.batch
        if b.global_batch_size is None:
            return p.pp * p.vpp
        return b.global_batch_size // (b.micro_batch_size * p.data_parallel_size)

    def with_(self, **groups: object) -> RunSpec:
        """A copy with whole groups replaced, validated again."""
        return replace(self, **groups)  # type: ignore[arg-type]
