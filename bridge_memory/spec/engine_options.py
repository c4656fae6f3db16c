"""Options of the engines outside of megatron-core, one frozen group a family, under the engines' own names.

What all of them share is elsewhere: the engine's name in ``DataParallelSpec``, the dtype of the model's parameters in
``PrecisionSpec.params_dtype`` (bf16 is what DeepSpeed's ``bf16.enabled`` and a model loaded in bf16 mean), the steps of
accumulation in ``BatchSpec.global_batch_size``, optimizer and clipping in ``OptimizerSpec``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from bridge_memory.spec.fields import Checked, choice, count, flag, fraction, number, positive

#: How torch's optimizers update (``torch/optim/adamw.py: adamw``: ``foreach``, ``fused``, neither).
TORCH_IMPLEMENTATIONS = ("foreach", "fused", "for-loop")
#: ``torch.distributed.fsdp.ShardingStrategy``.
FSDP1_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
#: ``torch.distributed.fsdp.BackwardPrefetch``, and None under a name.
BACKWARD_PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
#: Which modules are FSDP units of their own beside the root: every layer; also the embedding, and final norm and
#: output layer together (torchtitan ``models/llama3/parallelize.py: apply_fsdp``); none.
WRAP_POLICIES = ("TRANSFORMER_BASED_WRAP", "torchtitan", "NO_WRAP")
#: ``deepspeed/runtime/zero/offload_config.py: OffloadDeviceEnum``.
OFFLOAD_DEVICES = ("none", "cpu", "nvme")


@dataclass(frozen=True, slots=True, kw_only=True)
class DDPOptions(Checked):
    """Arguments of ``torch.nn.parallel.DistributedDataParallel`` (engine ddp).

    Example:
        >>> from bridge_memory import DataParallelSpec, DDPOptions, ParallelSpec, RunSpec, explain
        >>> run = RunSpec(
        ...     model="meta-llama/Llama-3.2-1B",
        ...     parallel=ParallelSpec(world_size=8),
        ...     data_parallel=DataParallelSpec(engine="ddp"),
        ... )
        >>> viewed = run.with_(ddp=DDPOptions(gradient_as_bucket_view=True))
        >>> explain(viewed, 0).static_bytes < explain(run, 0).static_bytes  # gradients share the buckets
        True
    """

    _prefix: ClassVar[str] = "ddp_"

    #: MiB.
    bucket_cap_mb: float = number(25)
    gradient_as_bucket_view: bool = flag(False)
    static_graph: bool = flag(False)
    find_unused_parameters: bool = flag(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class FSDPOptions(Checked):
    """Arguments of ``fully_shard`` (engine fsdp2) and ``FullyShardedDataParallel`` (engine fsdp1).

    Where the two have other names for one thing it has accelerate's (``fsdp_offload_params``).

    Example:
        >>> from bridge_memory import DataParallelSpec, FSDPOptions, ParallelSpec, RunSpec, explain
        >>> run = RunSpec(
        ...     model="meta-llama/Llama-3.2-1B",
        ...     parallel=ParallelSpec(world_size=8),
        ...     data_parallel=DataParallelSpec(engine="fsdp2"),
        ... )
        >>> offloaded = run.with_(fsdp=FSDPOptions(offload_params=True))
        >>> explain(offloaded, 0).host_bytes > explain(run, 0).host_bytes == 0
        True
    """

    _prefix: ClassVar[str] = "fsdp_"

    #: fsdp1.
    sharding_strategy: str = choice("FULL_SHARD", *FSDP1_STRATEGIES)
    #: fsdp2. None: as torch does, every unit but the root; True: the root too.
    reshard_after_forward: bool | None = flag(None)
    auto_wrap_policy: str = choice("TRANSFORMER_BASED_WRAP", *WRAP_POLICIES)
    #: Mixed precision (``MixedPrecisionPolicy``, ``MixedPrecision``): dtype of gathered parameters and so of what
    #: layers compute in, and of reduced gradients. None: that of the parameters; for gradients, that of param_dtype.
    param_dtype: str | None = choice(None, "fp32", "bf16", "fp16")
    reduce_dtype: str | None = choice(None, "fp32", "bf16", "fp16")
    forward_prefetch: bool = flag(False)
    backward_prefetch: str = choice("BACKWARD_PRE", *BACKWARD_PREFETCH)
    #: fsdp1: no more than two all-gathers in flight.
    limit_all_gathers: bool = flag(True)
    use_orig_params: bool = flag(False)
    #: Parameters, gradients and optimizer states in host memory (``CPUOffload``, ``CPUOffloadPolicy``).
    offload_params: bool = flag(False)
    #: fsdp2: ``CPUOffloadPolicy.pin_memory``.
    pin_memory: bool = flag(True)
    #: Ranks that divide parameters, the others repeat them: hybrid strategies (torchtitan
    #: ``data_parallel_shard_degree``). None: all.
    shard_degree: int | None = positive(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedOptions(Checked):
    """DeepSpeed's ``zero_optimization`` and what stands beside it in its JSON. Sizes are elements.

    Names are those of the JSON. What the JSON nests is joined by an underscore (``offload_optimizer_device``).

    Example:
        >>> from bridge_memory import DataParallelSpec, DeepSpeedOptions, ParallelSpec, RunSpec, explain
        >>> run = RunSpec(
        ...     model="meta-llama/Llama-3.2-1B",
        ...     parallel=ParallelSpec(world_size=8),
        ...     data_parallel=DataParallelSpec(engine="zero3"),
        ... )
        >>> offloaded = run.with_(deepspeed=DeepSpeedOptions(offload_optimizer_device="cpu"))
        >>> explain(offloaded, 0).optimizer_bytes < explain(run, 0).optimizer_bytes
        True
    """

    #: Of engine megatron_deepspeed; the others say it in their names.
    stage: int = count(1)
    reduce_bucket_size: int = positive(500_000_000)
    allgather_bucket_size: int = positive(500_000_000)
    #: None: as DeepSpeed does, on with stage 3 alone (``zero/config.py: overlap_comm_valid``).
    overlap_comm: bool | None = flag(None)
    contiguous_gradients: bool = flag(True)
    reduce_scatter: bool = flag(True)
    round_robin_gradients: bool = flag(False)
    stage3_prefetch_bucket_size: int = count(50_000_000)
    stage3_param_persistence_threshold: int = count(100_000)
    #: None: no limit.
    stage3_model_persistence_threshold: int | None = positive(None)
    stage3_max_live_parameters: int = count(1_000_000_000)
    stage3_max_reuse_distance: int = count(1_000_000_000)
    sub_group_size: int = positive(1_000_000_000)
    offload_optimizer_device: str = choice("none", *OFFLOAD_DEVICES)
    offload_optimizer_pin_memory: bool = flag(True)
    #: Share of the optimizer's states that is offloaded, stage 3 alone.
    offload_optimizer_ratio: float = fraction(1.0)
    offload_param_device: str = choice("none", *OFFLOAD_DEVICES)
    offload_param_pin_memory: bool = flag(True)
    #: NVMe: parameters' buffers in host memory.
    offload_param_buffer_count: int = positive(5)
    offload_param_buffer_size: int = positive(100_000_000)
    zero_hpz_partition_size: int = positive(1)
    #: dtype of reductions; None: that of the gradients.
    communication_data_type: str | None = choice(None, "fp32", "bf16", "fp16")
    #: ``data_types.grad_accum_dtype``; None: that of the parameters (``engine.py: get_data_types``).
    grad_accum_dtype: str | None = choice(None, "fp32", "bf16", "fp16")
    #: ``bf16.bf16_master_weights_and_grads`` and ``bf16.bf16_optimizer_states``.
    bf16_master_weights_and_grads: bool = flag(False)
    bf16_optimizer_states: bool = flag(False)
    stage3_gather_16bit_weights_on_model_save: bool = flag(False)


#: What a run has of the options of engines that it does not use.
DEFAULT_DDP_OPTIONS = DDPOptions()
DEFAULT_FSDP_OPTIONS = FSDPOptions()
DEFAULT_DEEPSPEED_OPTIONS = DeepSpeedOptions()
