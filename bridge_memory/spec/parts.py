"""How a run is sharded and trained: one frozen group of fields per concern. Each validates its fields on construction.

``validation`` checks fields of several groups, or of a group and the model, against each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from bridge_memory.cards.generations import DEFAULT_GENERATION, GENERATIONS, since_hopper
from bridge_memory.releases import (
    SINKS_ARE_NOT_DETERMINISTIC,
    TE_GROUPED_GEMM,
    Watch,
)
from bridge_memory.spec.encoders import image_pixels
from bridge_memory.spec.engine_options import TORCH_IMPLEMENTATIONS
from bridge_memory.spec.errors import SpecError, show
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

#: Engine of data parallelism (a module of ``bridge_memory.engines``) -> its name in reports.
ENGINES = {
    "megatron_ddp": "Megatron DDP", "megatron_fsdp": "Megatron-FSDP", "single": "one GPU, no data parallelism",
    "ddp": "PyTorch DDP", "fsdp1": "PyTorch FSDP1", "fsdp2": "PyTorch FSDP2", "zero1": "DeepSpeed ZeRO-1",
    "zero2": "DeepSpeed ZeRO-2", "zero3": "DeepSpeed ZeRO-3", "megatron_deepspeed": "Megatron with DeepSpeed ZeRO",
}  # fmt: skip
#: A framework's default engine.
ENGINE_OF_FRAMEWORK = {"megatron": "megatron_ddp"}
#: The engines of megatron-core.
MEGATRON_ENGINES = ("megatron_ddp", "megatron_fsdp")
#: Engines whose layouts are megatron-core's: tensors and layers are divided over ranks.
WITH_MEGATRON_LAYOUTS = (*MEGATRON_ENGINES, "megatron_deepspeed")
#: Engines that train Hugging Face models: ``transformer_impl`` is transformers by default.
WITH_TRANSFORMERS = tuple(engine for engine in ENGINES if engine not in WITH_MEGATRON_LAYOUTS)


def layers_by_default(engine: str | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """(default fields of ImplementationSpec with ``engine``, the assumptions that they make)."""
    if engine not in WITH_TRANSFORMERS:
        return {}, ()
    assumption = f"layers as Hugging Face transformers runs them, since engine is {engine}"
    return {"transformer_impl": "transformers"}, (assumption,)


#: Engine -> the group of RunSpec with its options.
ENGINE_OPTIONS = {
    "ddp": "ddp", "fsdp1": "fsdp", "fsdp2": "fsdp", "zero1": "deepspeed", "zero2": "deepspeed", "zero3": "deepspeed",
    "megatron_deepspeed": "deepspeed",
}  # fmt: skip
#: Megatron's optimizers; the first two are torch's too.
OPTIMIZERS = ("adam", "sgd", "muon")
#: Optimizers of engines outside megatron-core: torch.optim.AdamW (with Adam's states), bitsandbytes' 8-bit AdamW,
#: transformers' Adafactor, Lion, bitsandbytes' 8-bit Lion.
TORCH_OPTIMIZERS = ("adamw", "adamw_8bit", "adafactor", "lion", "lion_8bit")
#: What Megatron-FSDP shards over data-parallel ranks (``--data-parallel-sharding-strategy``).
SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
#: ``TransformerConfig.recompute_modules``.
RECOMPUTE_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "mhc")
#: ``TransformerConfig.offload_modules`` of fine-grained activation offloading.
OFFLOAD_MODULES = ("core_attn", "attn_proj", "expert_fc1", "moe_act", "attn_norm", "mlp_norm", "qkv_linear")
#: ``TransformerConfig.cuda_graph_modules`` (``transformer/enums.py: CudaGraphModule``).
GRAPHED_MODULES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
#: Default ranks per NVLink domain (``deep_ep/hybrid_ep_buffer.py``: default of the environment variable).
HYBRIDEP_DOMAIN = 8
#: Multiprocessors of DeepEP's kernels, megatron-core's default (``token_dispatcher.py``: set_deepep_num_sms).
DEEPEP_SMS = 20
#: GPU generations, oldest first.
GPU_ARCHITECTURES = tuple(GENERATIONS)
#: Generations for which Transformer Engine has neither FlashAttention nor cuDNN's fused attention.
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

    # Short names, for formulas.
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
        """(ranks, ranks) over which the optimizer states of dense and of expert parameters are sharded: those of one
        distributed-optimizer instance."""
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
    #: Sequences per step. None: as many microbatches as there are virtual stages, see ``RunSpec.num_microbatches``.
    global_batch_size: int | None = positive(None, below=2**32)
    #: The sequences of a micro batch run as one packed row of tokens (the thd layout).
    packed_sequences: bool = flag(False)
    #: Images of each sequence, for models with a vision encoder. None: one.
    images_per_sample: int | None = count(None, give="an integer of 0 or more")
    #: Their size in pixels, "WIDTHxHEIGHT", as the processor hands it on; or the patches of one.
    #: None: the largest that reaches the encoder (``encoders.LARGEST_IMAGES``).
    image_size: str | None = text(None, "WIDTHxHEIGHT in pixels, such as '1120x896'")
    patches_per_image: int | None = positive(None, below=2**24)
    #: Frames of one video of each sequence, of that size; 0: no video.
    video_frames: int = count(0)
    #: Seconds of audio of each sequence, for models with an audio encoder. None: 30.
    audio_seconds: float | None = number(None)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.image_size is not None:
            image_pixels(self.image_size)
            if self.patches_per_image is not None:
                raise SpecError(
                    f"patches_per_image ({self.patches_per_image}) and image_size ({show(self.image_size)}) both say "
                    "how large an image is; give one"
                )
        if self.video_frames >= 2**20:
            raise SpecError(f"video_frames ({self.video_frames}) is absurdly large; give a number below 2**20")
        if self.audio_seconds is not None and self.audio_seconds >= 2**20:
            raise SpecError(f"audio_seconds ({self.audio_seconds}) is absurdly large; give a number below 2**20")

    @property
    def rows(self) -> tuple[int, int]:
        """(s, b) of the layers' inputs, before CP divides s."""
        if self.packed_sequences:
            return self.seq_length * self.micro_batch_size, 1
        return self.seq_length, self.micro_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionSpec(Checked):
    """Dtypes of computation and of parameters.

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
    #: Parameters are stored in fp8 (``fp8_param_gather`` / ``--fp8-param-gather``).
    fp8_param: bool = flag(False)
    #: Attention computes in fp8 as well.
    fp8_dot_product_attention: bool = flag(False)
    #: "e2m1": linears compute in NVFP4 instead of fp8.
    fp4: str | None = choice(None, "e2m1")
    #: Parameters are stored in NVFP4 (``fp4_param_gather``).
    fp4_param: bool = flag(False)
    #: ``first_last_layers_bf16``: numbers of first and last layers that stay in bf16 under fp8 or fp4.
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
        """``fp8_recipe``, or "nvfp4"."""
        return self.fp8_recipe if self.fp4 is None else "nvfp4"

    @property
    def quantized_param(self) -> bool:
        """Whether the weights of linears are stored in fp8 or fp4 only."""
        return self.fp8_param or self.fp4_param


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelSpec(Checked):
    """The engine of data parallelism: it holds and shards parameters, gradients and optimizer state.

    Field names are those of ``distributed/distributed_data_parallel_config.py: DistributedDataParallelConfig``.

    Example:
        >>> from bridge_memory import DataParallelSpec, ParallelSpec, RunSpec
        >>> sizes = ParallelSpec(world_size=8)
        >>> run = RunSpec(model="Qwen/Qwen3-8B", parallel=sizes, data_parallel=DataParallelSpec(engine="fsdp2"))
        >>> run.implementation.transformer_impl  # PyTorch's engines train the modules of Hugging Face transformers
        'transformers'
    """

    #: A module of ``bridge_memory.engines``.
    engine: str = choice("megatron_ddp", *ENGINES)
    #: Optimizer state is sharded over data-parallel ranks. Megatron-FSDP requires it, and shards by its strategy.
    use_distributed_optimizer: bool = flag(True)
    #: Gradient buffers in fp32; False: in params_dtype.
    grad_reduce_in_fp32: bool = flag(True)
    overlap_grad_reduce: bool = flag(False)
    overlap_param_gather: bool = flag(False)
    #: Elements; None: Megatron's default, max(40e6, 1e6 * data-parallel size) when gradients overlap.
    bucket_size: int | None = positive(None)
    #: What Megatron-FSDP shards; None with the other engines.
    data_parallel_sharding_strategy: str | None = choice(None, *SHARDING_STRATEGIES)
    #: Megatron-FSDP: elements of gradients that may wait for their reduction; it prefetches half as many elements of
    #: parameters. None: its default.
    suggested_communication_unit_size: int | None = positive(None)
    #: Megatron-FSDP gathers and reduces in two persistent buffers of each kind, for units of identical sizes.
    fsdp_double_buffer: bool = flag(False)
    #: Units that do not fit these buffers get separate persistent buffers.
    fsdp_db_use_persist_buf_on_alloc_fail: bool = flag(False)
    #: The two buffers are as large as the largest unit and serve all units.
    megatron_fsdp_max_pool_double_buffer: bool = flag(False)
    #: Dtype in which Megatron-FSDP reduces gradients (``megatron_fsdp_grad_comm_dtype``); None: that of its buffers.
    grad_comm_dtype: str | None = choice(None, "fp32", "bf16", "fp16")
    #: DDP and FSDP reduce gradients after every microbatch, not only after the last (accelerate
    #: ``GradientAccumulationPlugin.sync_each_batch``).
    sync_each_batch: bool = flag(False)

    @property
    def of_megatron(self) -> bool:
        """Whether the engine is megatron-core's, with its buffers and optimizers."""
        return self.engine in MEGATRON_ENGINES

    @property
    def of_deepspeed(self) -> bool:
        """Whether the engine is one of DeepSpeed's."""
        return ENGINE_OPTIONS.get(self.engine) == "deepspeed"

    @property
    def engine_title(self) -> str:
        """The engine's name in reports."""
        return ENGINES[self.engine]

    @property
    def fsdp(self) -> bool:
        """Whether the engine is Megatron-FSDP."""
        return self.engine == "megatron_fsdp"

    def shards(self, what: str) -> bool:
        """Whether Megatron-FSDP shards ``what`` ("optim", "grads" or "params") over data-parallel ranks."""
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
    #: Implementation of torch's optimizers: "foreach" (torch's default on a GPU), "fused" or "for-loop".
    torch_implementation: str = choice("foreach", *TORCH_IMPLEMENTATIONS)
    #: bitsandbytes keeps states in CUDA managed memory, which is paged to host memory under pressure (``paged_adamw``).
    paged: bool = flag(False)
    #: Norm to which gradients are clipped (``--clip-grad``, ``max_grad_norm``, ``gradient_clipping``); 0: no clipping.
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
    #: Muon's layer-wise optimizer ("dist_muon"): whole parameters are distributed over data-parallel ranks.
    use_layer_wise_distributed_optimizer: bool = flag(False)

    @property
    def fused_main_parameters(self) -> bool:
        """Whether Transformer Engine's FusedAdam holds the main parameters and reads gradients without an fp32 copy.

        Otherwise a precision-aware optimizer saves memory on the moments only. Source:
        ``OptimizerConfig.__post_init__: use_precision_aware_optimizer_no_fp8_or_ds_fp8``.
        """
        return self.use_precision_aware_optimizer and (
            self.main_params_dtype != "fp32"
            or self.fp8_recipe in (None, "delayed")
            or self.optimizer_cpu_offload
        )


#: The default targets of adapters: Megatron Bridge's ``LoRA.target_modules``.
MEGATRON_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
#: Every linear except the output layer (peft ``utils/constants.py: INCLUDE_LINEAR_LAYERS_SHORTHAND``).
ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftSpec(Checked):
    """Which parameters train: all of them, or adapters of a frozen model (Megatron Bridge ``peft/``).

    Example:
        >>> from bridge_memory import PeftSpec, RunSpec, explain
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B")
        >>> adapted = run.with_(peft=PeftSpec(scheme="lora", dim=16))
        >>> explain(adapted, 0).optimizer_bytes < explain(run, 0).optimizer_bytes
        True
    """

    _prefix: ClassVar[str] = "peft."

    #: "frozen": Megatron's language model is frozen without adapters, and what trains of its encoders trains
    #: (``freeze_language_model``).
    scheme: str = choice("none", "none", "lora", "frozen")
    #: LoRA's rank; 0: unknown.
    dim: int = count(0)
    #: Linears that get an adapter: module names, or full names with ``*`` wildcards.
    target_modules: tuple[str, ...] = choices(MEGATRON_TARGETS)
    #: DoRA: one magnitude per output feature of every target (``LoraConfig.use_dora``); transformers' layers only.
    use_dora: bool = flag(False)

    @property
    def freezes(self) -> bool:
        """Whether the base model is frozen."""
        return self.scheme != "none"

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters of a known rank train."""
        return self.scheme == "lora" and self.dim > 0


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
    """Which code runs: different implementations and releases save different tensors for backward.

    Example:
        >>> from bridge_memory import ImplementationSpec, RunSpec, explain
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B")
        >>> unfused = run.with_(implementation=ImplementationSpec(attention_backend="unfused"))
        >>> explain(unfused, 0).peak_bytes > explain(run, 0).peak_bytes
        True
    """

    #: "transformer_engine" or "local": megatron-core's modules; "transformers": Hugging Face's (``TransformersSpec``);
    #: "torchtitan", "torchtune": their modules, also with the options of ``TransformersSpec``.
    transformer_impl: str = choice(
        "transformer_engine", "transformer_engine", "local", "transformers", "torchtitan", "torchtune"
    )
    #: megatron-core release whose rules apply, as (major, minor); None: unknown (``releases``).
    megatron_core: tuple[int, int] | None = release(None)
    #: "auto", "flash", "fused", "unfused", "local"
    attention_backend: str = choice("auto", "auto", "flash", "fused", "unfused", "local")
    gradient_accumulation_fusion: bool = flag(True)
    masked_softmax_fusion: bool = flag(True)
    bias_activation_fusion: bool = flag(True)
    #: Squared ReLU and the product with the routing probability in one kernel (``use_fused_weighted_squared_relu``).
    use_fused_weighted_squared_relu: bool = flag(False)
    bias_dropout_fusion: bool = flag(True)
    apply_rope_fusion: bool = flag(True)
    cross_entropy_loss_fusion: bool = flag(False)
    #: "native", "te" or "linear"
    cross_entropy_fusion_impl: str = choice("native", "native", "te", "linear")
    #: ModelOpt's distillation loss: of the logits only, or of the logits plus the language-model loss.
    distillation: str = choice("none", "none", "logits", "logits and lm")
    #: Whose functions turn logits into log-probabilities of tokens, in place of the cross entropy: those of a
    #: reinforcement-learning trainer. With their fused kernels: ``cross_entropy_fusion_impl`` "linear".
    policy_loss: str = choice("none", "none", "verl", "nemo-rl", "slime", "trl")
    #: The entropy of the logits too.
    policy_entropy: bool = flag(False)
    #: Tokens whose logits are processed at once; 0: all.
    policy_chunk_size: int = count(0)
    #: The pass has no backward (old and reference log-probabilities).
    policy_forward_only: bool = flag(False)
    #: The model returns its logits as computed, not in fp32 (NeMo-RL's defer_fp32_logits).
    policy_defers_fp32: bool = flag(False)
    #: Logits over the temperature are a tensor beside the logits (slime, at a temperature other than 1).
    policy_rescales: bool = flag(False)
    create_attention_mask: bool = flag(False)
    calculate_per_token_loss: bool = flag(False)
    deterministic_mode: bool = flag(False)
    #: Outputs are freed once sent to the next stage; otherwise they stay until their backward pass ends.
    deallocate_pipeline_outputs: bool = flag(True)
    defer_embedding_wgrad_compute: bool = flag(False)
    #: Microbatches whose weight gradient of the output layer is deferred; 0: all.
    wgrad_deferral_limit: int = count(0)
    #: A layer's weight gradients are computed after its data gradients: their inputs live longer.
    delay_wgrad_compute: bool = flag(False)
    #: ``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0``: on some GPUs it rules out cuDNN's fused attention.
    nvte_deterministic: bool = flag(False)
    #: Megatron's removed legacy GPTModel (``--use-legacy-models``), a local implementation.
    use_legacy_models: bool = flag(False)
    #: Scores divided by the layer number, softmax in fp32 (``--apply-query-key-layer-scaling``).
    apply_query_key_layer_scaling: bool = flag(False)
    #: Tensor-parallel communication overlaps with GEMMs, in Transformer Engine's user buffers.
    tp_comm_overlap: bool = flag(False)
    #: How context parallelism exchanges keys and values: "p2p", "a2a", "all_gather", "a2a+p2p".
    cp_comm_type: str = choice("p2p", "p2p", "a2a", "all_gather", "a2a+p2p")
    #: "none", "local", "transformer_engine" or "full_iteration"; graphs keep their buffers in a private memory pool.
    cuda_graph_impl: str = choice("none", "none", "local", "transformer_engine", "full_iteration")
    #: Modules that graphs cover; empty: whole layers (``cuda_graph_scope`` before megatron-core 0.18).
    cuda_graph_modules: tuple[str, ...] = choices((), *GRAPHED_MODULES)
    #: Transformer Engine's operation fuser for MLPs; from megatron-core 0.18 on for experts too.
    use_transformer_engine_op_fuser: bool = flag(False)
    moe_token_dispatcher_type: str = choice("alltoall", "alltoall", "allgather", "flex", "alltoall_seq")
    #: Backend of the "flex" dispatcher: "deepep" or "hybridep".
    moe_flex_dispatcher_backend: str = choice("deepep", "deepep", "hybridep")
    #: Multiprocessors that DeepEP communicates with; its buffers grow with them. None: megatron-core's default, 20.
    moe_flex_dispatcher_num_sms: int | None = positive(None)
    #: Ranks of HybridEP's NVLink domain (NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN); None: at most 8.
    moe_hybridep_ranks_per_nvlink_domain: int | None = positive(None)
    moe_grouped_gemm: bool = flag(True)
    moe_permute_fusion: bool = flag(False)
    moe_router_fusion: bool = flag(False)
    moe_router_dtype: str | None = choice(None, "fp32", "fp64")
    #: Coefficient of the router's z-loss; None: no z-loss.
    moe_z_loss_coeff: float | None = number(None)
    moe_expert_capacity_factor: float | None = number(None)
    moe_pad_expert_input_to_capacity: bool = flag(False)
    #: Rows that HybridEP allocates for a rank's experts, relative to balanced routing (tokens x topk); tokens beyond
    #: them are dropped.
    moe_expert_rank_capacity_factor: float | None = number(None)
    #: What experts save for backward goes to a buffer for the average number of tokens, times the factor.
    moe_paged_stash: bool = flag(False)
    moe_paged_stash_buffer_size_factor_cuda: float = number(1.1)
    #: Routers send extra tokens so that each expert's rows are a multiple that fp8 or fp4 needs; experts do not pad.
    moe_router_padding_for_quantization: bool = flag(False)
    #: Gate and value columns of experts alternate in blocks of this width.
    moe_mlp_glu_interleave_size: int | None = positive(None)
    moe_shared_expert_overlap: bool = flag(False)
    moe_apply_probs_on_input: bool = flag(False)
    #: Tokens of the most loaded rank over those of balanced routing; multiplies activations of routed experts.
    moe_imbalance: float = number(1.0)
    overlap_moe_expert_parallel_comm: bool = flag(False)
    #: Layers whose saved activations are offloaded to host memory (TE's cpu_offloading).
    cpu_offloading_num_layers: int = count(0)
    #: Fine-grained offloading (``offload_modules``), by module name.
    offload_modules: tuple[str, ...] = choices((), *OFFLOAD_MODULES)
    #: Elements; tensors with fewer stay on the GPU.
    min_offloaded_tensor_size: int = count(1 << 20)
    #: GPU generation, for workspace sizes, attention kernels and fp8 layouts (``generations.GENERATIONS``).
    gpu_arch: str = choice(DEFAULT_GENERATION, *GPU_ARCHITECTURES)
    #: Transformer Engine and PyTorch releases, as (major, minor); None: unknown (``releases``).
    transformer_engine: tuple[int, int] | None = release(None)
    torch: tuple[int, int] | None = release(None)
    #: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the allocator splits blocks exactly.
    expandable_segments: bool = flag(False)
    #: torch's cuBLAS workspace in bytes; None: torch's default for the architecture.
    cublas_workspace_bytes: int | None = count(None)

    #: Sees every rule of ``releases`` that is asked; only ``decisive`` sets one, in a subclass.
    watch: ClassVar[Watch | None] = None

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
        """Whether the layers are plain torch modules: those of Hugging Face transformers, torchtitan or torchtune."""
        return self.transformer_impl in ("transformers", "torchtitan", "torchtune")

    @property
    def torchtitan(self) -> bool:
        return self.transformer_impl == "torchtitan"

    @property
    def torchtune(self) -> bool:
        return self.transformer_impl == "torchtune"

    @property
    def own_layers(self) -> bool:
        """Whether the trainer (torchtitan, torchtune) has its own layers instead of transformers'."""
        return self.transformer_impl in ("torchtitan", "torchtune")

    @property
    def te_grouped_gemm(self) -> bool:
        """Whether grouped experts are Transformer Engine's ``TEGroupedMLP``, not the legacy ``GroupedMLP``."""
        return self.te and self.moe_grouped_gemm and TE_GROUPED_GEMM(self)

    @property
    def attention_kernel(self) -> str:
        """The attention that runs: "flash" (FlashAttention 2), "fused" (cuDNN) or "unfused".

        "auto" is resolved as Transformer Engine does (``dot_product_attention/utils.py: get_attention_backend``):
        unfused before Ampere (compute capability 8.0), FlashAttention before Hopper, cuDNN from Hopper on. On Blackwell
        with ``deterministic_attention`` it is FlashAttention, see ``cudnn_attends``.
        """
        if not self.te or self.attention_backend in ("unfused", "local"):
            return "unfused"
        if self.attention_backend in ("flash", "fused"):
            return self.attention_backend
        if self.gpu_arch in WITHOUT_ATTENTION_KERNELS:
            return "unfused"
        return "flash" if self.prefers_flash or not self.cudnn_attends() else "fused"

    def cudnn_attends(self, *, sink: bool = False) -> bool:
        """Whether cuDNN's attention is as deterministic as ``deterministic_attention`` asks (``get_attention_backend``:
        "Filter: Determinism"): in training on Hopper alone. ``sink``: with a softmax sink.

        From 2.12 on the choice for Blackwell is the compiled library's, by cuDNN's release; measured GB200 runs of 2.15
        to 2.18 took FlashAttention.
        """
        if not self.deterministic_attention:
            return True
        return self.gpu_arch == "hopper" and not (sink and SINKS_ARE_NOT_DETERMINISTIC(self))

    @property
    def deterministic_attention(self) -> bool:
        """Whether Transformer Engine may use only deterministic algorithms; ``deterministic_mode`` requires it too
        (megatron-core ``extensions/transformer_engine.py: TEDotProductAttention.__init__``)."""
        return self.nvte_deterministic or self.deterministic_mode

    @property
    def prefers_flash(self) -> bool:
        """Whether Transformer Engine prefers FlashAttention 2 to cuDNN if both are eligible: before compute capability
        9.0 (``get_attention_backend``: "FusedAttention preference on Hopper+")."""
        return not since_hopper(self.gpu_arch)
