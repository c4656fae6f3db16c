"""How a run is sharded and trained: one frozen group of fields a concern. Each checks its own fields when it is built.

What two groups, or a group and the model, must agree on is in ``validation``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bridge_memory.cards.generations import DEFAULT_GENERATION, GENERATIONS, since_hopper
from bridge_memory.releases import DEFAULT_MEGATRON_CORE, TE_GROUPED_GEMM
from bridge_memory.spec.engine_options import TORCH_IMPLEMENTATIONS
from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.fields import (
    MOST_GPUS,
    Checked,
    check_fields,
    choice,
    choices,
    count,
    flag,
    fraction,
    number,
    positive,
    release,
    text,
)

#: Who keeps model state over data-parallel ranks, each a module of ``bridge_memory.engines``, and its name in reports.
ENGINES = {
    "megatron_ddp": "Megatron DDP", "megatron_fsdp": "Megatron-FSDP", "single": "one GPU, no data parallelism",
    "ddp": "PyTorch DDP", "fsdp1": "PyTorch FSDP1", "fsdp2": "PyTorch FSDP2", "zero1": "DeepSpeed ZeRO-1",
    "zero2": "DeepSpeed ZeRO-2", "zero3": "DeepSpeed ZeRO-3", "megatron_deepspeed": "Megatron with DeepSpeed ZeRO",
}  # fmt: skip
#: The engine that a framework uses where nobody names one.
ENGINE_OF_FRAMEWORK = {"megatron": "megatron_ddp"}
#: Those of megatron-core, whose flags and options they follow.
MEGATRON_ENGINES = ("megatron_ddp", "megatron_fsdp")
#: Those that train Hugging Face's models: layers are transformers' unless another implementation is asked for.
WITH_TRANSFORMERS = ("single", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")


def layers_by_default(engine: str | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(fields of ImplementationSpec that ``engine`` brings where no implementation is asked for, what that assumes)."""
    if engine not in WITH_TRANSFORMERS:
        return {}, ()
    said = f"layers as Hugging Face transformers runs them, since engine is {engine}"
    return {"transformer_impl": "transformers"}, (said,)


#: Engine -> the group of a RunSpec with its own options.
ENGINE_OPTIONS = {
    "ddp": "ddp", "fsdp1": "fsdp", "fsdp2": "fsdp", "zero1": "deepspeed", "zero2": "deepspeed", "zero3": "deepspeed",
    "megatron_deepspeed": "deepspeed",
}  # fmt: skip
#: Megatron's optimizers; the first two are torch's too.
OPTIMIZERS = ("adam", "sgd", "muon")
#: Optimizers of engines outside of megatron-core: torch.optim.AdamW (whose states are those of Adam), bitsandbytes'
#: 8-bit AdamW and Lion, transformers' Adafactor, Lion.
TORCH_OPTIMIZERS = ("adamw", "adamw_8bit", "adafactor", "lion", "lion_8bit")
#: What Megatron-FSDP divides over data-parallel ranks (``--data-parallel-sharding-strategy``).
SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
#: ``TransformerConfig.recompute_modules``.
RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
#: ``TransformerConfig.offload_modules`` of fine-grained activation offloading.
OFFLOAD_MODULES = ("core_attn", "attn_proj", "expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear")
#: ``TransformerConfig.cuda_graph_modules`` (``transformer/enums.py: CudaGraphModule``).
GRAPHED_MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
#: GPU generations, oldest first.
GPU_ARCHITECTURES = tuple(GENERATIONS)
#: Those for which Transformer Engine has neither FlashAttention nor cuDNN's attention.
WITHOUT_ATTENTION_KERNELS = ("volta", "turing")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSpec(Checked):
    """Megatron's parallel sizes. The data-parallel size follows from ``world_size``.

    Example:
        >>> from bridge_memory import ParallelSpec
        >>> sizes = ParallelSpec(world_size=64, tensor_model_parallel_size=8, pipeline_model_parallel_size=2)
        >>> sizes.data_parallel_size
        4
    """

    world_size: int = positive(1, below=MOST_GPUS)
    tensor_model_parallel_size: int = positive(1)
    pipeline_model_parallel_size: int = positive(1)
    virtual_pipeline_model_parallel_size: int | None = positive(None)
    context_parallel_size: int = positive(1)
    expert_model_parallel_size: int = positive(1)
    #: None: Megatron's default, the tensor parallel size.
    expert_tensor_parallel_size: int | None = positive(None)
    #: None: on when tensor_model_parallel_size > 1.
    sequence_parallel: bool | None = flag(None)
    num_layers_in_first_pipeline_stage: int | None = positive(None)
    num_layers_in_last_pipeline_stage: int | None = positive(None)
    account_for_embedding_in_pipeline_split: bool = flag(False)
    account_for_loss_in_pipeline_split: bool = flag(False)
    #: Megatron's layout string ("Et*3|(tt|)*29,m|L") with E, t, m, L.
    pipeline_model_parallel_layout: str | None = text(
        None, "a string such as 'Et*3|(tt|)*29,m|L' (layout_string makes it of the list form)"
    )
    microbatch_group_size_per_vp_stage: int | None = positive(None)
    num_distributed_optimizer_instances: int = positive(1)

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

    @property
    def shard_worlds(self) -> tuple[int, int]:
        """Ranks over which dense and expert parameters' states are sharded (one distributed-optimizer instance)."""
        instances = self.num_distributed_optimizer_instances
        dense = self.data_parallel_size * self.cp // instances
        experts = self.expert_data_parallel_size // instances
        return dense + (dense == 0), experts + (experts == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec(Checked):
    """Sequences and tokens of a step.

    ``seq_length`` is s before context parallelism divides it, ``micro_batch_size`` is b.

    Example:
        >>> from bridge_memory import BatchSpec, ParallelSpec, RunSpec
        >>> batch = BatchSpec(seq_length=8192, micro_batch_size=2, global_batch_size=64)
        >>> run = RunSpec(model="Qwen/Qwen3-8B", parallel=ParallelSpec(world_size=8), batch=batch)
        >>> run.num_microbatches
        4
    """

    seq_length: int = positive(4096, below=2**28)
    micro_batch_size: int = positive(1, below=2**20)
    #: None: one microbatch a virtual stage and data-parallel replica, see ``RunSpec.num_microbatches``.
    global_batch_size: int | None = positive(None, below=2**32)
    #: The sequences of a micro batch, and the shorter ones that each is packed of, run as one row of tokens (thd).
    packed_sequences: bool = flag(False)

    @property
    def rows(self) -> tuple[int, int]:
        """(s, b) of what layers compute on, before CP."""
        if self.packed_sequences:
            return self.seq_length * self.micro_batch_size, 1
        return self.seq_length, self.micro_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSpec(Checked):
    """Formats of computation and of parameters.

    Example:
        >>> from bridge_memory import PrecisionSpec
        >>> PrecisionSpec(fp8="hybrid", fp8_recipe="blockwise").quantizes
        True
    """

    #: "bf16", "fp16" or "fp32": the dtype of parameters and activations.
    params_dtype: str = choice("bf16", "bf16", "fp16", "fp32")
    #: None, "hybrid" or "e4m3".
    fp8: str | None = choice(None, "hybrid", "e4m3")
    #: "delayed", "tensorwise", "blockwise", "mxfp8"
    fp8_recipe: str = choice("delayed", "delayed", "tensorwise", "blockwise", "mxfp8")
    #: Parameters themselves are kept in fp8 (``fp8_param_gather`` / ``--fp8-param-gather``).
    fp8_param: bool = flag(False)
    #: Attention computes in fp8 too.
    fp8_dot_product_attention: bool = flag(False)
    #: "e2m1": linears compute in NVFP4, in place of fp8.
    fp4: str | None = choice(None, "e2m1")
    #: Parameters themselves are kept in it (``fp4_param_gather``).
    fp4_param: bool = flag(False)
    #: ``first_last_layers_bf16``: this many layers at either end stay in bf16 under fp8 or fp4.
    num_layers_at_start_in_bf16: int = count(0)
    num_layers_at_end_in_bf16: int = count(0)
    fp32_residual_connection: bool = flag(False)
    attention_softmax_in_fp32: bool = flag(True)

    @property
    def quantizes(self) -> bool:
        """Whether linears compute in fp8 or fp4."""
        return self.fp8 is not None or self.fp4 is not None

    @property
    def format_words(self) -> str:
        """For messages: "fp8 (hybrid)" or "fp4 (e2m1)"."""
        return f"fp8 ({self.fp8})" if self.fp4 is None else f"fp4 ({self.fp4})"

    @property
    def recipe(self) -> str:
        """How: ``fp8_recipe``, or "nvfp4"."""
        return self.fp8_recipe if self.fp4 is None else "nvfp4"

    @property
    def quantized_param(self) -> bool:
        """Whether the weights of linears are kept in that alone."""
        return self.fp8_param or self.fp4_param


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelSpec(Checked):
    """The engine: who keeps parameters, gradients and optimizer state over data-parallel ranks.

    Fields are those of ``distributed/distributed_data_parallel_config.py: DistributedDataParallelConfig``.

    Example:
        >>> from bridge_memory import DataParallelSpec, ParallelSpec, RunSpec
        >>> sizes = ParallelSpec(world_size=8)
        >>> run = RunSpec(model="Qwen/Qwen3-8B", parallel=sizes, data_parallel=DataParallelSpec(engine="fsdp2"))
        >>> run.implementation.transformer_impl  # PyTorch's engines train the modules of Hugging Face transformers
        'transformers'
    """

    #: A module of ``bridge_memory.engines``.
    engine: str = choice("megatron_ddp", *ENGINES)
    #: Optimizer state divided over data-parallel ranks; Megatron-FSDP needs it, and divides what its strategy says.
    use_distributed_optimizer: bool = flag(True)
    #: fp32 gradient buffers; False keeps them in params_dtype.
    grad_reduce_in_fp32: bool = flag(True)
    overlap_grad_reduce: bool = flag(False)
    overlap_param_gather: bool = flag(False)
    #: Elements; None: Megatron's default, max(40e6, 1e6 * data-parallel size) when gradients overlap.
    bucket_size: int | None = positive(None)
    #: What Megatron-FSDP shards; None with the other engines.
    data_parallel_sharding_strategy: str | None = choice(None, *SHARDING_STRATEGIES)
    #: Elements that Megatron-FSDP lets wait to be reduced, twice what it gathers ahead; None: its default.
    suggested_communication_unit_size: int | None = positive(None)
    #: Megatron-FSDP gathers and reduces in two buffers a kind, which stay, of units that are alike in all sizes.
    fsdp_double_buffer: bool = flag(False)
    #: What has no place in these has a buffer of its own that stays.
    fsdp_db_use_persist_buf_on_alloc_fail: bool = flag(False)
    #: The two are as large as the largest unit, and for all units.
    megatron_fsdp_max_pool_double_buffer: bool = flag(False)
    #: dtype in which Megatron-FSDP reduces gradients (``megatron_fsdp_grad_comm_dtype``); None: as they are kept.
    grad_comm_dtype: str | None = choice(None, "fp32", "bf16", "fp16")
    #: DDP and FSDP reduce gradients in every step of accumulation and not in the last alone (accelerate
    #: ``GradientAccumulationPlugin.sync_each_batch``).
    sync_each_batch: bool = flag(False)

    @property
    def of_megatron(self) -> bool:
        """Whether megatron-core's own data parallelism runs, with its buffers and its optimizers."""
        return self.engine in MEGATRON_ENGINES

    @property
    def engine_title(self) -> str:
        """The engine's name in reports."""
        return ENGINES[self.engine]

    @property
    def fsdp(self) -> bool:
        """Whether parameters, gradients or optimizer state are Megatron-FSDP's."""
        return self.engine == "megatron_fsdp"

    def shards(self, what: str) -> bool:
        """Whether Megatron-FSDP divides "optim", "grads" or "params" over data-parallel ranks."""
        return self.fsdp and what in (self.data_parallel_sharding_strategy or "").split("_")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec(Checked):
    """The optimizer and the dtypes of its state (``optimizer/optimizer_config.py: OptimizerConfig``).

    Example:
        >>> from bridge_memory import OptimizerSpec, RunSpec, explain
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B")
        >>> offloaded = run.with_(optimizer=OptimizerSpec(optimizer_cpu_offload=True))
        >>> explain(offloaded, 0).optimizer_bytes < explain(run, 0).optimizer_bytes
        True
    """

    optimizer: str = choice("adam", *OPTIMIZERS, *TORCH_OPTIMIZERS)
    #: How torch's own optimizers update: "foreach" (torch's default on a GPU), "fused" or "for-loop".
    torch_implementation: str = choice("foreach", *TORCH_IMPLEMENTATIONS)
    #: bitsandbytes keeps states in CUDA's managed memory, which moves to host memory under pressure (``paged_adamw``).
    paged: bool = flag(False)
    #: Gradients are clipped to this norm (``--clip-grad``, ``max_grad_norm``, ``gradient_clipping``); 0: not at all.
    clip_grad: float = number(1.0)
    sgd_momentum: float = fraction(0.9, below_one=True)
    use_precision_aware_optimizer: bool = flag(False)
    main_grads_dtype: str = choice("fp32", "fp32", "bf16")
    main_params_dtype: str = choice("fp32", "fp32", "fp16")
    exp_avg_dtype: str = choice("fp32", "fp32", "fp16", "bf16", "fp8")
    exp_avg_sq_dtype: str = choice("fp32", "fp32", "fp16", "bf16", "fp8")
    store_param_remainders: bool = flag(True)
    #: ``OptimizerConfig.fp8_recipe``: any but "delayed" (None: unset) keeps fp32 main parameters and gradients in
    #: megatron-core under a precision-aware optimizer, fp8 or not. Bridge's MixedPrecisionConfig sets "tensorwise".
    fp8_recipe: str | None = choice(None)
    optimizer_cpu_offload: bool = flag(False)
    optimizer_offload_fraction: float = fraction(1.0)
    #: The norm of all parameters is logged (``calc_params_l2_norm``).
    log_params_norm: bool = flag(False)
    #: Muon's layer-wise optimizer ("dist_muon"): whole parameters are dealt out over data-parallel ranks.
    use_layer_wise_distributed_optimizer: bool = flag(False)

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


#: The linears that get an adapter where nobody says which: Megatron Bridge's ``LoRA.target_modules``.
MEGATRON_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
#: Every linear but the output layer (peft ``utils/constants.py: INCLUDE_LINEAR_LAYERS_SHORTHAND``).
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftSpec(Checked):
    """Which parameters train: all of them, or adapters beside frozen ones (Megatron Bridge ``peft/``).

    Example:
        >>> from bridge_memory import PeftSpec, RunSpec, explain
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B")
        >>> adapted = run.with_(peft=PeftSpec(scheme="lora", dim=16))
        >>> explain(adapted, 0).optimizer_bytes < explain(run, 0).optimizer_bytes
        True
    """

    _prefix: ClassVar[str] = "peft."

    scheme: str = choice("none", "none", "lora")
    #: LoRA's rank; 0 where unknown.
    dim: int = count(0)
    #: Linears that get an adapter, by module name or full name with ``*`` wildcards.
    target_modules: tuple[str, ...] = choices(MEGATRON_TARGETS)
    #: DoRA: a magnitude a feature of every target's output (``LoraConfig.use_dora``); of transformers' layers.
    use_dora: bool = flag(False)

    @property
    def freezes(self) -> bool:
        """Whether the model's own parameters get no gradient."""
        return self.scheme != "none"

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters train whose rank is known."""
        return self.freezes and self.dim > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeSpec(Checked):
    """Activation recomputation, as in megatron-core's ``TransformerConfig``.

    Example:
        >>> from bridge_memory import RecomputeSpec, RunSpec, explain
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B")
        >>> full = run.with_(recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1))
        >>> explain(full, 0).activation_bytes < explain(run, 0).activation_bytes
        True
    """

    _prefix: ClassVar[str] = "recompute_"
    _unprefixed: ClassVar[tuple[str, ...]] = ("distribute_saved_activations",)

    granularity: str | None = choice(None, "full", "selective")
    method: str | None = choice(None, "uniform", "block")
    num_layers: int | None = positive(None)
    modules: tuple[str, ...] = choices(("core_attn",), *RECOMPUTE_MODULES)
    distribute_saved_activations: bool = flag(False)

    def selects(self, module: str) -> bool:
        """Whether selective recomputation covers this module name."""
        return self.granularity == "selective" and module in self.modules


@dataclass(frozen=True, slots=True, kw_only=True)
class ImplementationSpec(Checked):
    """Which code runs: the same mathematics saves different tensors in different implementations and releases.

    Example:
        >>> from bridge_memory import ImplementationSpec, RunSpec, explain
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B")
        >>> unfused = run.with_(implementation=ImplementationSpec(attention_backend="unfused"))
        >>> explain(unfused, 0).peak_bytes > explain(run, 0).peak_bytes
        True
    """

    #: "transformer_engine" or "local", megatron-core's; "transformers": Hugging Face's modules (``TransformersSpec``);
    #: "torchtitan", "torchtune": their own, under the same options.
    transformer_impl: str = choice(
        "transformer_engine", "transformer_engine", "local", "transformers", "torchtitan", "torchtune"
    )
    #: megatron-core release whose rules apply, as (major, minor).
    megatron_core: tuple[int, int] = release(DEFAULT_MEGATRON_CORE)
    #: "auto", "flash", "fused", "unfused", "local"
    attention_backend: str = choice("auto", "auto", "flash", "fused", "unfused", "local")
    gradient_accumulation_fusion: bool = flag(True)
    masked_softmax_fusion: bool = flag(True)
    bias_activation_fusion: bool = flag(True)
    #: Squared ReLU times the routing probability in one kernel (``use_fused_weighted_squared_relu``).
    use_fused_weighted_squared_relu: bool = flag(False)
    bias_dropout_fusion: bool = flag(True)
    apply_rope_fusion: bool = flag(True)
    cross_entropy_loss_fusion: bool = flag(False)
    #: "native", "te" or "linear"
    cross_entropy_fusion_impl: str = choice("native", "native", "te", "linear")
    #: ModelOpt's loss of a distillation: of the logits, in place of the language model's or beside it.
    distillation: str = choice("none", "none", "logits", "logits and lm")
    create_attention_mask: bool = flag(False)
    calculate_per_token_loss: bool = flag(False)
    deterministic_mode: bool = flag(False)
    #: Outputs that were sent to another stage are freed; else they stay until their backward pass is over.
    deallocate_pipeline_outputs: bool = flag(True)
    defer_embedding_wgrad_compute: bool = flag(False)
    #: How many calls of the output layer wait so; 0: all.
    wgrad_deferral_limit: int = count(0)
    #: Weight gradients run after the data gradients of a layer: their inputs live longer.
    delay_wgrad_compute: bool = flag(False)
    #: ``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0``: cuDNN's fused attention backward is not eligible everywhere.
    nvte_deterministic: bool = flag(False)
    #: Megatron's removed legacy GPTModel (``--use-legacy-models``), a local implementation.
    use_legacy_models: bool = flag(False)
    #: Scores divided by the layer number, softmax in fp32 (``--apply-query-key-layer-scaling``).
    apply_query_key_layer_scaling: bool = flag(False)
    #: Tensor-parallel communication beside GEMMs, in Transformer Engine's user buffers.
    tp_comm_overlap: bool = flag(False)
    #: How context parallelism exchanges keys and values: "p2p", "a2a", "all_gather", "a2a+p2p".
    cp_comm_type: str = choice("p2p", "p2p", "a2a", "all_gather", "a2a+p2p")
    #: "none", "local", "transformer_engine" or "full_iteration"; graphs keep their buffers in a private pool.
    cuda_graph_impl: str = choice("none", "none", "local", "transformer_engine", "full_iteration")
    #: Parts of layers that graphs cover; none: whole layers (``cuda_graph_scope`` before megatron-core 0.18).
    cuda_graph_modules: tuple[str, ...] = choices((), *GRAPHED_MODULES)
    #: Transformer Engine's operation fuser for MLPs, those of experts too from megatron-core 0.18 on.
    use_transformer_engine_op_fuser: bool = flag(False)
    moe_token_dispatcher_type: str = choice("alltoall", "alltoall", "allgather", "flex", "alltoall_seq")
    #: Backend of the "flex" dispatcher: "deepep" or "hybridep".
    moe_flex_dispatcher_backend: str = choice("deepep", "deepep", "hybridep")
    #: Multiprocessors that DeepEP sends with, by which its buffers grow; None: megatron-core's 20.
    moe_flex_dispatcher_num_sms: int | None = positive(None)
    #: Ranks of HybridEP's NVLink domain (NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN); None: 8 at most.
    moe_hybridep_ranks_per_nvlink_domain: int | None = positive(None)
    moe_grouped_gemm: bool = flag(True)
    moe_permute_fusion: bool = flag(False)
    moe_router_fusion: bool = flag(False)
    moe_router_dtype: str | None = choice(None, "fp32", "fp64")
    #: Of the router's z-loss; None: there is none.
    moe_z_loss_coeff: float | None = number(None)
    moe_expert_capacity_factor: float | None = number(None)
    moe_pad_expert_input_to_capacity: bool = flag(False)
    #: Rows that HybridEP makes for the experts of a rank, over N k of a balanced routing; what exceeds them is dropped.
    moe_expert_rank_capacity_factor: float | None = number(None)
    #: What experts keep of those rows goes to a buffer for as many as tokens come on average, times the factor.
    moe_paged_stash: bool = flag(False)
    moe_paged_stash_buffer_size_factor_cuda: float = number(1.1)
    #: Routers send more tokens, to fill each expert's rows up to what fp8 or fp4 wants; experts pad none.
    moe_router_padding_for_quantization: bool = flag(False)
    #: Gates and values of experts alternate in blocks of this width.
    moe_mlp_glu_interleave_size: int | None = positive(None)
    moe_shared_expert_overlap: bool = flag(False)
    moe_apply_probs_on_input: bool = flag(False)
    #: The most loaded rank's tokens over the balanced number; multiplies routed-expert activations.
    moe_imbalance: float = number(1.0)
    overlap_moe_expert_parallel_comm: bool = flag(False)
    #: Whole layers whose saved activations go to host memory (TE's cpu_offloading).
    cpu_offloading_num_layers: int = count(0)
    #: Fine-grained offloading (``offload_modules``), by module name.
    offload_modules: tuple[str, ...] = choices((), *OFFLOAD_MODULES)
    #: Elements; tensors with fewer stay on the GPU.
    min_offloaded_tensor_size: int = count(1 << 20)
    #: GPU generation, for workspace sizes, attention kernels and fp8 layouts (``generations.GENERATIONS``).
    gpu_arch: str = choice(DEFAULT_GENERATION, *GPU_ARCHITECTURES)
    #: Transformer Engine and PyTorch releases, as (major, minor); None where unknown (``releases``).
    transformer_engine: tuple[int, int] | None = release(None)
    torch: tuple[int, int] | None = release(None)
    #: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the allocator splits blocks exactly.
    expandable_segments: bool = flag(False)
    #: torch's cuBLAS workspace in bytes; None: torch's default for the architecture.
    cublas_workspace_bytes: int | None = count(None)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.moe_imbalance < 1:
            raise SpecError(
                f"moe_imbalance ({self.moe_imbalance}) is below 1; give the most loaded rank's tokens over the "
                "balanced number"
            )
        if self.moe_expert_capacity_factor == 0:
            raise SpecError("moe_expert_capacity_factor (0) drops every token; give a positive number, or None")
        if self.te and self.attention_backend in ("flash", "fused") and self.gpu_arch in WITHOUT_ATTENTION_KERNELS:
            raise SpecError(
                f"attention_backend ({self.attention_backend}) does not run on gpu_arch ({self.gpu_arch}): Transformer "
                "Engine has that kernel from ampere on; use auto or unfused"
            )

    @property
    def te(self) -> bool:
        return self.transformer_impl == "transformer_engine"

    @property
    def torch_layers(self) -> bool:
        """Whether the modules are plain ones of torch: those of Hugging Face transformers, torchtitan or torchtune."""
        return self.transformer_impl in ("transformers", "torchtitan", "torchtune")

    @property
    def torchtitan(self) -> bool:
        return self.transformer_impl == "torchtitan"

    @property
    def torchtune(self) -> bool:
        return self.transformer_impl == "torchtune"

    @property
    def own_layers(self) -> bool:
        """Whether a trainer brings the layers, which are not transformers'."""
        return self.transformer_impl in ("torchtitan", "torchtune")

    @property
    def te_grouped_gemm(self) -> bool:
        """Whether grouped experts are Transformer Engine's (``TEGroupedMLP``) and not the legacy ``GroupedMLP``."""
        return self.te and self.moe_grouped_gemm and TE_GROUPED_GEMM(self)

    @property
    def attention_kernel(self) -> str:
        """The attention that runs: "flash" (FlashAttention 2), "fused" (cuDNN) or "unfused".

        What "auto" means is Transformer Engine's choice (``dot_product_attention/utils.py:
        get_attention_backend``): neither kernel before Ampere (compute capability 8.0); from Hopper on cuDNN,
        before it FlashAttention, and so on Blackwell where determinism is asked for: cuDNN's backward has none there.
        """
        if not self.te or self.attention_backend in ("unfused", "local"):
            return "unfused"
        if self.attention_backend in ("flash", "fused"):
            return self.attention_backend
        if self.gpu_arch in WITHOUT_ATTENTION_KERNELS:
            return "unfused"
        needs_flash = self.prefers_flash or (self.gpu_arch == "blackwell" and self.nvte_deterministic)
        return "flash" if needs_flash else "fused"

    @property
    def prefers_flash(self) -> bool:
        """Whether Transformer Engine takes FlashAttention 2 where it and cuDNN both can: before compute capability
        9.0 (``get_attention_backend``: "FusedAttention preference on Hopper+")."""
        return not since_hopper(self.gpu_arch)
