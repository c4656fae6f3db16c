"""Parameters -> bytes of weights, gradient buffers and optimizer state, as megatron-core lays them out.

Source: megatron-core ``distributed/param_and_grad_buffer.py`` (buckets and padding), ``distributed/
distributed_data_parallel.py`` (buffers by group), ``optimizer/{optimizer,distrib_optimizer,muon}.py``; TE
``optimizers/fused_adam.py``. Every figure is bytes on one rank.

Allocations of PyTorch's caching allocator are multiples of 512 bytes (``c10/cuda/CUDACachingAllocator.cpp:
kMinBlockSize``); parameters and states that are tensors of their own are rounded up accordingly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import lcm
from typing import NamedTuple

from bridge_memory.components import MOMENTS, Component, Lifetime, Provenance, Role, State
from bridge_memory.engines.peft import lora_parameters
from bridge_memory.inventory.context import BlockContext
from bridge_memory.inventory.parameters import Parameter
from bridge_memory.inventory.stack import chunk_parameters
from bridge_memory.spec import (
    DTYPE_BYTES,
    DataParallelSpec,
    ModelSpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
)
from bridge_memory.spec.layout import Chunk, layout, shard_worlds

#: Bytes: smallest block of the caching allocator.
ALLOCATION_UNIT = 512
#: Elements: start of every parameter in a distributed-optimizer buffer (128-byte alignment of 16-bit values).
PARAM_ALIGNMENT = 64
#: Elements: end of every bucket, together with the data-parallel size.
BUCKET_ALIGNMENT = 128
#: Elements: Megatron's smallest bucket when gradients overlap, and its growth a data-parallel rank.
BUCKET_MINIMUM, BUCKET_PER_RANK = 40_000_000, 1_000_000


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """The parameters of one buffer kind (dense or routed experts) of one chunk."""

    numel: int
    count: int
    #: Elements after Megatron's padding, summed over buckets (distributed optimizer), else numel.
    padded: int
    #: Elements in weights of Transformer Engine's GEMMs (what fp8 copies), without embedding and output layer.
    gemm: int
    #: Elements in all matrices but those two (what Muon updates), the router's included.
    matrices: int
    #: Parameters counted one by one, rounded to the allocation unit, for element sizes 1, 2 and 4.
    rounded: dict[int, int]
    #: (elements, elements in matrices) that the layer-wise optimizer deals to the fullest rank.
    fullest_share: tuple[int, int]


def _pad(n: int, to: int) -> int:
    return -(-n // to) * to


def _is_matrix(p: Parameter) -> bool:
    """``muon.py: get_megatron_muon_optimizer``: two dimensions, and neither embedding nor output layer."""
    return len(p.shape) == 2 and not p.name.startswith(("embedding.", "output_layer."))


def _is_gemm(p: Parameter) -> bool:
    return _is_matrix(p) and not p.name.endswith(("router.weight", "gate_weight"))


def group_parameters(
    params: Sequence[Parameter], shard_world: int, bucket_size: int | None, distributed: bool
) -> ParameterGroup:
    """Lay parameters out in a buffer, last first, as ``_ParamAndGradBuffer.__init__`` does."""
    end = total = start_of_bucket = gemm = matrices = 0
    unit = lcm(shard_world, BUCKET_ALIGNMENT)
    rounded = {size: 0 for size in (1, 2, 4)}
    for p in reversed(params):
        n = p.numel
        total += n
        if _is_gemm(p):
            gemm += n
        if _is_matrix(p):
            matrices += n
        for size in rounded:
            rounded[size] += _pad(n * size, ALLOCATION_UNIT)
        if not distributed:
            end += n
            continue
        end = _pad(end, PARAM_ALIGNMENT) + n
        if bucket_size is not None and end - start_of_bucket >= bucket_size:
            end = start_of_bucket = _pad(end, unit)
    return ParameterGroup(
        total, len(params), _pad(end, unit) if distributed else end, gemm, matrices, rounded,
        (total, matrices) if distributed else _fullest_share(params, shard_world),
    )


def _fullest_share(params: Sequence[Parameter], world: int) -> tuple[int, int]:
    """Whole parameters, smallest first, dealt to ranks to and fro; the share of most optimizer state.

    Source: ``layer_wise_optimizer.py: LayerWiseDistributedOptimizer.shard_params``. A GEMM's weight has a main
    copy and a momentum (8 bytes an element), any other Adam's three (12).
    """
    if world == 1:
        return sum(p.numel for p in params), sum(p.numel for p in params if _is_matrix(p))
    shares = [[0, 0] for _ in range(world)]
    for i, p in enumerate(sorted(params, key=lambda p: p.numel)):
        turn = i % (2 * world)
        share = shares[turn if turn < world else 2 * world - 1 - turn]
        share[0] += p.numel
        share[1] += p.numel if _is_matrix(p) else 0
    total, matrices = max(shares, key=lambda s: 12 * s[0] - 4 * s[1])
    return total, matrices


@lru_cache(maxsize=65536)
def chunk_groups(
    model: ModelSpec,
    chunk: Chunk,
    ctx: BlockContext,
    shards: tuple[int, int],
    bucket_size: int | None,
    distributed: bool,
) -> tuple[ParameterGroup, ParameterGroup]:
    """(dense, experts) of one chunk; ``shards`` are their data-parallel worlds."""
    params = chunk_parameters(model, chunk, ctx)
    dense = [p for p in params if not p.expert]
    experts = [p for p in params if p.expert]
    return (
        group_parameters(dense, shards[0], bucket_size, distributed),
        group_parameters(experts, shards[1], bucket_size, distributed),
    )


def bucket_elements(d: DataParallelSpec, parallel: ParallelSpec, chunk_index: int) -> int | None:
    """Bucket size in elements, None for one bucket (``DistributedDataParallel.__init__``)."""
    if not d.overlap_grad_reduce or chunk_index > 0:
        return None
    if d.bucket_size is not None:
        return d.bucket_size
    return max(BUCKET_MINIMUM, BUCKET_PER_RANK * parallel.data_parallel_size * parallel.cp)


def model_states(run: RunSpec, ctx: BlockContext) -> tuple[tuple[int, tuple[Component, ...]], ...]:
    """(parameters on a rank, state lines) of every stage. Batch and recomputation change none of it."""
    return tuple(_stage_state(run, chunks, ctx) for chunks in layout(run.model, run.parallel).stages)


def _stage_state(run: RunSpec, chunks: Sequence[Chunk], ctx: BlockContext) -> tuple[int, tuple[Component, ...]]:
    worlds = shard_worlds(run.parallel)
    precision, optimizer, d = run.precision, run.optimizer, run.data_parallel
    distributed = d.use_distributed_optimizer
    if precision.fp8 and not ctx.te:
        precision = replace(precision, fp8=None)  # Only Transformer Engine's modules compute in fp8.
    parameters = 0
    sums: dict[tuple[_Line, str, bool, bool], int] = {}
    for index, chunk in enumerate(chunks):
        groups = chunk_groups(run.model, chunk, ctx, worlds, bucket_elements(d, run.parallel, index), distributed)
        for expert, (group, world) in enumerate(zip(groups, worlds, strict=True)):
            parameters += group.numel
            if group.numel:
                for line, nbytes in _group_state(
                    precision, optimizer, d, group, world, ctx.impl.gpu_arch, frozen=run.peft.freezes
                ):
                    key = (line, _shard(line, bool(expert), distributed, world), bool(expert), False)
                    sums[key] = sums.get(key, 0) + nbytes
        for line, shard, of_experts, nbytes in _adapters(run, chunk, ctx, worlds, precision):
            sums[line, shard, of_experts, True] = sums.get((line, shard, of_experts, True), 0) + nbytes
    return parameters, tuple(
        Component(
            _label(line, of_experts, adapters), nbytes, line.role, _provenance(line, optimizer, adapters), shard,
            lifetime=Lifetime.FIRST_STEP if line.state in MOMENTS else Lifetime.MODEL, state=line.state,
            experts=of_experts, adapters=adapters,
        )
        for (line, shard, of_experts, adapters), nbytes in sums.items() if nbytes
    )


class _Line(NamedTuple):
    """One line of model state: its role, which copy of the parameters it is, and what people call it."""

    role: Role
    state: State
    name: str


def _adapters(
    run: RunSpec, chunk: Chunk, ctx: BlockContext, worlds: tuple[int, int], precision: PrecisionSpec
) -> list[tuple[_Line, str, bool, int]]:
    """(line, shard, whether of experts, bytes) of a chunk's LoRA adapters, which train like any parameter."""
    if run.peft.scheme != "lora" or not run.peft.dim:
        return []
    adapters = lora_parameters(
        chunk_parameters(run.model, chunk, ctx),
        dim=run.peft.dim,
        target_modules=run.peft.target_modules,
        tp=run.parallel.tp,
        etp=run.parallel.etp,
    )
    plain, d = replace(precision, fp8=None), run.data_parallel
    distributed = d.use_distributed_optimizer
    out = []
    for expert, world in enumerate(worlds):
        params = [p for p in adapters if p.expert == bool(expert)]
        group = group_parameters(params, world, bucket_elements(d, run.parallel, 0), distributed)
        states = (
            _group_state(plain, run.optimizer, d, group, world, ctx.impl.gpu_arch, frozen=False) if params else []
        )
        for line, nbytes in states:
            out.append((line, _shard(line, bool(expert), distributed, world), bool(expert), nbytes))
    return out


def _label(line: _Line, experts: bool, adapters: bool) -> str:
    name = f"LoRA {line.name}" if adapters else line.name
    return f"{name} (routed experts)" if experts else name


def _shard(line: _Line, expert: bool, distributed: bool, world: int) -> str:
    base = "etp x ep" if expert else "tp"
    if distributed and world > 1 and line.role is Role.OPTIMIZER:
        return f"{base} x {'edp' if expert else 'dp x cp'}"
    return base


def _group_state(
    precision: PrecisionSpec, o: OptimizerSpec, d: DataParallelSpec, g: ParameterGroup, world: int, gpu_arch: str, *,
    frozen: bool,
) -> list[tuple[_Line, int]]:
    """(line, bytes) for one buffer kind. ``world`` shards optimizer states."""
    width = DTYPE_BYTES[precision.params_dtype]
    half = width == 2
    distributed = d.use_distributed_optimizer
    strategy = d.data_parallel_sharding_strategy
    out: list[tuple[_Line, int]] = []

    # Weights: views of one buffer under the distributed optimizer, else tensors of their own.
    # Frozen weights are in no buffer (DistributedDataParallel takes what requires a gradient).
    in_buffer = distributed and not frozen
    weight_bytes = g.padded * width if in_buffer else g.rounded[width]
    if precision.fp8 and precision.fp8_param:
        weight_bytes -= g.gemm * (width - 1)
    if strategy == "optim_grads_params":
        weight_bytes = -(-weight_bytes // world)
    out.append((_Line(Role.WEIGHTS, State.PARAMETERS, "weights"), weight_bytes))
    if precision.fp8:
        out.append((_Line(Role.WEIGHTS, State.FP8_COPIES, "fp8 weight copies"), _fp8_copies(precision, g, gpu_arch)))
    if frozen:
        return out

    # Gradients: one contiguous buffer (main_grad views).
    grad_width = 4 if d.grad_reduce_in_fp32 or not half else width
    grad_bytes = g.padded * grad_width
    if strategy in ("optim_grads", "optim_grads_params"):
        grad_bytes = -(-grad_bytes // world)
    out.append((_Line(Role.GRADIENTS, State.GRADIENTS, "gradients"), grad_bytes))

    # Optimizer state.
    sharded = distributed or strategy in ("optim", "optim_grads", "optim_grads_params")
    shards = world if sharded else 1
    if o.use_layer_wise_distributed_optimizer:
        elements, matrices = g.fullest_share
        g = replace(g, numel=elements, padded=elements, matrices=matrices, rounded={})

    def states(elements: int, bytes_each: int) -> int:
        if elements == g.numel and not sharded and shards == 1:
            return g.rounded[bytes_each] if bytes_each in g.rounded else elements * bytes_each
        whole = g.padded if elements == g.numel else elements
        return -(-whole // shards) * bytes_each

    for line, elements, bytes_each in _state_widths(precision, o, g):
        nbytes = states(elements, bytes_each)
        if o.optimizer_cpu_offload and not (line.state is State.MAIN_PARAMETERS and stays_beside_offloaded(o)):
            nbytes = round(nbytes * (1.0 - o.optimizer_offload_fraction))
        out.append((line, nbytes))
    return out


def _provenance(line: _Line, o: OptimizerSpec, adapters: bool) -> Provenance:
    """How a state line is known: counted, but for an optimizer of which only a part is offloaded.

    ``cpu_offloading/hybrid_optimizer.py: HybridDeviceOptimizer._get_sub_optimizer_param_groups`` sends whole
    parameters (a rank's shards of them), in the order of the buffers, until their elements make the fraction. What
    stays is thus at most (1 - fraction) of the shard on every rank, the number counted here, and above that less
    the largest parameter's shard: which parameters a data-parallel rank owns decides where between the two.
    """
    partly = o.optimizer_cpu_offload and 0 < o.optimizer_offload_fraction < 1
    main = line.state is State.MAIN_PARAMETERS and not adapters
    if not partly or line.role is not Role.OPTIMIZER or (main and stays_beside_offloaded(o)):
        return Provenance.EXACT
    return Provenance.FORMULA


def stays_beside_offloaded(o: OptimizerSpec) -> bool:
    """Whether the fp32 main parameters stay on the GPU although the optimizer's states go to the host.

    Megatron's own main parameters are what ``HybridDeviceOptimizer`` is handed, copies to the host and copies back;
    only a precision-aware optimizer hands it the bf16 weights (``distrib_optimizer.py:
    _build_model_and_main_param_groups``, ``cpu_offloading/hybrid_optimizer.py: _get_sub_optimizer_param_groups``).
    """
    return not o.fused_main_parameters


def _state_widths(
    precision: PrecisionSpec, o: OptimizerSpec, g: ParameterGroup
) -> list[tuple[_Line, int, int]]:
    """(state, elements before sharding, bytes an element)."""
    half = DTYPE_BYTES[precision.params_dtype] == 2
    out: list[tuple[_Line, int, int]] = []

    def add(state: State, elements: int, width: int, name: str = "") -> None:
        out.append((_Line(Role.OPTIMIZER, state, name or state.value), elements, width))

    if half:
        master = 4
        # The part of a HybridDeviceOptimizer that stays on the GPU has fp32 copies and an Adam of default dtypes.
        if o.fused_main_parameters and not o.optimizer_cpu_offload:
            master = DTYPE_BYTES[o.main_params_dtype]
            # The bf16 weight is the upper half of the fp32 master; only the lower 16 bits are kept.
            if o.store_param_remainders and o.main_params_dtype == "fp32" and precision.params_dtype == "bf16":
                master = 2
        add(State.MAIN_PARAMETERS, g.numel, master)
    chosen = o.use_precision_aware_optimizer and not o.optimizer_cpu_offload
    first = DTYPE_BYTES[o.exp_avg_dtype] if chosen else 4
    second = DTYPE_BYTES[o.exp_avg_sq_dtype] if chosen else 4
    if o.optimizer == "adam":
        add(State.EXP_AVG, g.numel, first)
        add(State.EXP_AVG_SQ, g.numel, second)
    elif o.optimizer == "sgd":
        if o.sgd_momentum:
            add(State.MOMENTUM, g.numel, 4)
    else:
        rest = g.numel - g.matrices
        add(State.MOMENTUM, g.matrices, 4, "Muon momentum")
        add(State.EXP_AVG, rest, 4)
        add(State.EXP_AVG_SQ, rest, 4)
    return out


def _fp8_copies(precision: PrecisionSpec, g: ParameterGroup, gpu_arch: str) -> int:
    """fp8 data beside the weights: the row-wise copy (unless it is the parameter itself), the column-wise one
    that backward needs, and block scales. Blackwell multiplies per-tensor fp8 in any layout and keeps no
    column-wise copy (``utils.py: is_non_tn_fp8_gemm_supported``).
    Source: TE ``tensor/{float8,float8_blockwise,mxfp8}_tensor.py``."""
    transposed = not (gpu_arch == "blackwell" and precision.fp8_recipe in ("delayed", "tensorwise"))
    copies = transposed + (not precision.fp8_param)
    # Weights have one fp32 scale a block of 128 x 128 (``common/recipe: Float8BlockScaling.w_block_scaling_dim``).
    scales = {"mxfp8": 2 / 32, "blockwise": 2 * 4 / 128**2}.get(precision.fp8_recipe, 0.0)
    return round(g.gemm * (copies + scales))
