"""Buffers inside torch's allocator that no model config names: library workspaces, pipeline leftovers.

Every constant of the estimate that is not a tensor of the model lives here, with its unit, its source and how it
was checked. All of them are additive bytes on one rank, alive from the first step to the end of training.

Checked on the static memory of Megatron-LM's functional tests: with these rules the dense Transformer Engine
runs with a distributed optimizer are met to 0.1 MiB on A100, H100 and GB200 alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bridge_memory.components import Part
from bridge_memory.inventory.context import BlockContext
from bridge_memory.inventory.layer_links import fully_recomputed, runs_plain
from bridge_memory.inventory.moe import held_order_bytes, held_routing_bytes
from bridge_memory.inventory.mtp import depth_is_recomputed
from bridge_memory.releases import ROUTER_USES_TE_GEMM
from bridge_memory.spec import DTYPE_BYTES, MambaSpec, ModelSpec, MoESpec, RunSpec
from bridge_memory.spec.layout import Chunk, shard_worlds

MIB = 1 << 20
#: Bytes: smallest block of torch's allocator (``CUDACachingAllocator.cpp: kMinBlockSize``).
ALLOCATION_UNIT = 512

#: Bytes of Transformer Engine's cuBLAS workspace, by architecture.
#: Source: TE ``pytorch/cpp_extensions/gemm.py: get_cublas_workspace_size_bytes``.
TE_WORKSPACE = {"ampere": 4 * MIB, "hopper": 32 * MIB, "blackwell": 32 * MIB}
#: Streams of a grouped GEMM, each with a workspace of its own (``get_cublas_workspace(grouped_gemm=True)``;
#: ``transformer_engine/common/util/multi_stream.cpp: nvte_get_num_compute_streams``).
TE_GROUPED_GEMM_STREAMS = 4
#: Bytes of torch's cuBLAS workspace where CUBLAS_WORKSPACE_CONFIG is unset.
#: Source: torch ``aten/src/ATen/cuda/CublasHandlePool.cpp: parseChosenWorkspaceSize`` (:4096:8 on compute
#: capability 9.0, :4096:2:16:8 elsewhere).
TORCH_CUBLAS_WORKSPACE = {
    "ampere": (2 * 4096 + 8 * 16) * 1024,
    "hopper": 8 * 4096 * 1024,
    "blackwell": (2 * 4096 + 8 * 16) * 1024,
}
#: One handle for the thread that runs forward, one for autograd's thread: torch keeps a workspace for every pair
#: of handle and stream (same file, ``getCurrentCUDABlasHandle``).
CUBLAS_HANDLES = 2

#: The names under which an estimate lists what MoE dispatchers hold at all times.
ROUTING = "routing of every MoE layer's last microbatch"
RECOMPUTED_ORDER = "order of every recomputed MoE layer's last microbatch"


@dataclass(frozen=True, slots=True)
class Workspace:
    """One lasting buffer of a rank: bytes, how they came about, and where the rule is from."""

    name: str
    bytes: int
    source: str
    part: Part = Part.WORKSPACE
    #: Lives from the end of a step to the start of the next: part of what is allocated between steps, not of
    #: what is alive at the peak of forward and backward.
    between_steps: bool = False


def lasting_workspaces(run: RunSpec, chunks: Sequence[Chunk], ctx: BlockContext) -> list[Workspace]:
    """Library workspaces and pipeline leftovers of one stage that holds ``chunks``."""
    impl = run.implementation
    found: list[Workspace] = []

    def add(
        name: str, nbytes: int, source: str, part: Part = Part.WORKSPACE, *, between_steps: bool = False
    ) -> None:
        if nbytes:
            found.append(Workspace(name, nbytes, source, part, between_steps))

    experts = _experts(run.model, chunks, ctx)
    experts_here = bool(experts)
    te = TE_WORKSPACE[impl.gpu_arch]
    if impl.te or (experts_here and ROUTER_USES_TE_GEMM(impl)):
        add("Transformer Engine's cuBLAS workspace", te, "TE get_cublas_workspace")
        if experts_here and impl.te_grouped_gemm:
            add(
                "Transformer Engine's grouped-GEMM workspaces", te * TE_GROUPED_GEMM_STREAMS,
                "TE get_cublas_workspace(grouped_gemm=True)",
            )
    if _uses_torch_gemm(run, chunks, experts_here):
        size = impl.cublas_workspace_bytes
        if size is None:
            size = TORCH_CUBLAS_WORKSPACE[impl.gpu_arch]
        add(
            "torch's cuBLAS workspaces (forward and autograd thread)", size * CUBLAS_HANDLES,
            "torch CublasHandlePool.cpp",
        )
    if keeps_fp32_gradient_copies(run):
        add(
            "main gradients in fp32", fp32_gradient_bytes(run, chunks, ctx),
            "optimizer.py: _copy_model_grads_to_main_grads; freed by the next zero_grad",
            Part.DATA_PARALLEL, between_steps=True,
        )
    add(
        "unsplit rests of allocator blocks", unsplit_rest_bytes(run, chunks, ctx),
        "c10/cuda/CUDACachingAllocator.cpp: should_split", Part.ALLOCATOR,
    )
    from bridge_memory.inventory.stack import stage_inventories

    add(
        "inputs of recomputed MoE layers and their gradients",
        sum(chunk.left for chunk in stage_inventories(run.model, chunks, ctx)),
        "token_dispatcher.py: the graph of self.probs leads to them until the next forward",
        Part.DISPATCHER, between_steps=True,
    )
    add(
        ROUTING, sum(held_routing_bytes(ctx, ffn) for ffn, _ in experts),
        "token_dispatcher.py: probs and routing_map stay attributes of the dispatcher", Part.DISPATCHER,
    )
    add(
        RECOMPUTED_ORDER, sum(held_order_bytes(ctx, ffn) for ffn, recomputed in experts if recomputed),
        "token_dispatcher.py: reversed_local_input_permutation_mapping stays an attribute of the dispatcher",
        Part.DISPATCHER,
    )
    add(
        "order of every MoE layer's last microbatch",
        sum(held_order_bytes(ctx, ffn) for ffn, recomputed in experts if not recomputed),
        "token_dispatcher.py: reversed_local_input_permutation_mapping, which backward keeps until it has run",
        Part.DISPATCHER, between_steps=True,
    )
    received = sum(1 for chunk in chunks if not chunk.embedding)
    add(
        "pipeline: the last microbatch's input and its gradient", 2 * received * hidden_state_bytes(run),
        "TransformerBlock.set_input_tensor keeps what schedules.py received, retain_grad keeps its gradient",
        Part.PIPELINE, between_steps=True,
    )
    return found


def _experts(model: ModelSpec, chunks: Sequence[Chunk], ctx: BlockContext) -> list[tuple[MoESpec, bool]]:
    """Every MoE layer of a stage, MTP's too, and whether it dispatches again in backward."""
    again = ctx.recompute.selects("moe")
    found: list[tuple[MoESpec, bool]] = []
    for chunk in chunks:
        recomputed, _ = fully_recomputed(len(chunk.layers), ctx, plain=runs_plain(model, ctx))
        layers = [(model.layers[i], again or n < recomputed) for n, i in enumerate(chunk.layers)]
        if model.mtp_layer is not None:
            layers += [(model.mtp_layer, again or depth_is_recomputed(ctx)) for _ in chunk.mtp]
        found += [(layer.ffn, twice) for layer, twice in layers if isinstance(layer.ffn, MoESpec)]
    return found


def batch_bytes(run: RunSpec, chunks: Sequence[Chunk]) -> int:
    """Bytes of one microbatch's input on an end stage of the pipeline; the stages between get none.

    int64 tokens, labels and positions, an fp32 loss mask, and the boolean mask [b, 1, s, s] of the data loader,
    all divided by CP. Source: ``megatron/training/utils.py: get_batch_on_this_tp_rank``,
    ``megatron/core/utils.py: get_batch_on_this_cp_rank``.
    """
    if not any(chunk.embedding or chunk.output for chunk in chunks):
        return 0
    b, s = run.batch.micro_batch_size, run.batch.seq_length
    mask = s * s if run.implementation.create_attention_mask else 0
    return b * (s * (8 + 8 + 8 + 4) + mask) // run.parallel.cp


def gathered_parameter_bytes(run: RunSpec, chunks: Sequence[Chunk], ctx: BlockContext) -> int:
    """Whole parameters that Megatron-FSDP holds while a layer runs, beyond this rank's shard, in bytes.

    What lies outside the layers (embedding, final norm, output layer) is gathered for the whole pass; of the
    layers there are two at a time, the running one and the next, which is gathered ahead.
    Source: ``megatron_fsdp/megatron_fsdp.py: _register_fsdp_hooks``, ``param_and_grad_buffer.py:
    AllGatherPipeline``. Checked on dense GPT runs: 31.2 MiB measured against 31.9.
    """
    from bridge_memory.inventory.stack import chunk_parameters

    if run.data_parallel.data_parallel_sharding_strategy != "optim_grads_params":
        return 0
    outside = 0
    layers: list[int] = []
    for chunk in chunks:
        of_layers: dict[str, int] = {}
        for p in chunk_parameters(run.model, chunk, ctx):
            owner = p.name.split(".")
            if "layers" in owner[:2]:
                layer = ".".join(owner[:3])
                of_layers[layer] = of_layers.get(layer, 0) + p.numel
            else:
                outside += p.numel
        layers += of_layers.values()
    return (outside + sum(sorted(layers)[-2:])) * DTYPE_BYTES[run.precision.params_dtype]


def keeps_fp32_gradient_copies(run: RunSpec) -> bool:
    """Half-precision gradient buffers are cast to fp32 for the optimizer, and the copies outlive the step.

    Source: ``optimizer/optimizer.py: Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads`` and
    ``distrib_optimizer.py`` (the same name); a fused precision-aware optimizer reads the buffers themselves.
    """
    o = run.optimizer
    half = DTYPE_BYTES[run.precision.params_dtype] == 2
    return half and not run.data_parallel.grad_reduce_in_fp32 and not o.fused_main_parameters and not run.peft.freezes


def fp32_gradient_bytes(run: RunSpec, chunks: Sequence[Chunk], ctx: BlockContext) -> int:
    """fp32 copies of the gradients that this rank's optimizer updates, one tensor a parameter."""
    shards = _shards(run)
    total = 0
    for chunk in chunks:
        counts = _counts(run.model, chunk, ctx)
        rests = (0, 0) if run.implementation.expandable_segments else _rests(run.model, chunk, ctx, 4)
        total += sum(-(-(4 * n + rest) // world) for n, rest, world in zip(counts, rests, shards, strict=True))
    return total


# ---- what the caching allocator adds to a block ----


def block_rest(nbytes: int) -> int:
    """Bytes that torch's allocator counts on top of a tensor of ``nbytes`` in a fresh segment.

    A block is split only if more than 1 MiB remains. Tensors of 10 MiB and above get a segment of their own in
    multiples of 2 MiB; from 1 to 10 MiB they share segments of 20 MiB, of which the last one in takes the rest
    (spread evenly here); smaller ones split exactly.
    Source: ``c10/cuda/CUDACachingAllocator.cpp: get_allocation_size, should_split``.
    """
    nbytes = -(-nbytes // ALLOCATION_UNIT) * ALLOCATION_UNIT
    if nbytes <= MIB:
        return 0
    if nbytes >= 10 * MIB:
        rest, tensors = -nbytes % (2 * MIB), 1
    else:
        tensors = 20 * MIB // nbytes
        rest = 20 * MIB - tensors * nbytes
    return rest // tensors if rest <= MIB else 0


def unsplit_rest_bytes(run: RunSpec, chunks: Sequence[Chunk], ctx: BlockContext) -> int:
    """``block_rest`` of everything that stays: parameters, gradient buffers, optimizer states; 0 with expandable
    segments, which split exactly. Megatron-FSDP's own buffers are left out."""
    d = run.data_parallel
    if run.implementation.expandable_segments or d.fsdp or run.peft.freezes:
        return 0
    width = DTYPE_BYTES[run.precision.params_dtype]
    gradient = 4 if d.grad_reduce_in_fp32 or width == 4 else width
    states = _state_sizes(run)
    shards = _shards(run)
    total = 0
    for chunk in chunks:
        for n in _counts(run.model, chunk, ctx):
            total += block_rest(n * gradient)
            if d.use_distributed_optimizer:
                total += block_rest(n * width)
        if not d.use_distributed_optimizer:
            total += sum(_rests(run.model, chunk, ctx, width))
        for size in states:
            rests = _rests(run.model, chunk, ctx, size)
            total += sum(rest // world for rest, world in zip(rests, shards, strict=True))
    return total


def _state_sizes(run: RunSpec) -> list[int]:
    """Bytes an element of the main parameters (if they are apart) and of the two moments."""
    o = run.optimizer
    if o.optimizer != "adam" or o.optimizer_cpu_offload or o.use_layer_wise_distributed_optimizer:
        return []
    sizes = []
    if DTYPE_BYTES[run.precision.params_dtype] == 2:
        sizes.append(2 if o.fused_main_parameters and o.store_param_remainders else 4)
    for dtype in (o.exp_avg_dtype, o.exp_avg_sq_dtype):
        sizes.append(DTYPE_BYTES[dtype] if o.use_precision_aware_optimizer else 4)
    return sizes


def _shards(run: RunSpec) -> tuple[int, int]:
    """Ranks that share the optimizer states of dense and of expert parameters."""

    return shard_worlds(run.parallel) if run.data_parallel.use_distributed_optimizer else (1, 1)


@lru_cache(maxsize=4096)
def _counts(model: ModelSpec, chunk: Chunk, ctx: BlockContext) -> tuple[int, int]:
    """Elements of the dense and of the expert parameters of a chunk."""
    from bridge_memory.inventory.stack import chunk_parameters

    counts = [0, 0]
    for p in chunk_parameters(model, chunk, ctx):
        counts[p.expert] += p.numel
    return counts[0], counts[1]


@lru_cache(maxsize=4096)
def _rests(model: ModelSpec, chunk: Chunk, ctx: BlockContext, size: int) -> tuple[int, int]:
    """``block_rest`` summed over the parameters of a chunk, dense and expert, at ``size`` bytes an element."""
    from bridge_memory.inventory.stack import chunk_parameters

    sums = [0, 0]
    for p in chunk_parameters(model, chunk, ctx):
        sums[p.expert] += block_rest(p.numel * size)
    return sums[0], sums[1]


def hidden_state_bytes(run: RunSpec) -> int:
    """Bytes of [s, b, h] as it travels between stages: divided by CP, and by TP under sequence parallelism."""
    p, b = run.parallel, run.batch
    width = 4 if run.precision.fp32_residual_connection else DTYPE_BYTES[run.precision.params_dtype]
    tokens = b.seq_length // p.cp // (p.tp if p.sp else 1) * b.micro_batch_size
    return tokens * run.model.hidden_size * width


def _uses_torch_gemm(run: RunSpec, chunks: Sequence[Chunk], experts_here: bool) -> bool:
    """Whether a matrix product of torch itself runs here, forward and backward.

    The output layer is megatron-core's own ColumnParallelLinear in both implementations; local layers, the MoE
    older MoE routers (``releases.ROUTER_USES_TE_GEMM``) and unfused attention use torch's products too.
    """
    impl = run.implementation
    layers = [run.model.layers[i] for chunk in chunks for i in chunk.layers]
    attention = any(
        layer.mixer is not None and not isinstance(layer.mixer, MambaSpec) for layer in layers
    )
    return (
        any(chunk.output for chunk in chunks)
        or (not impl.te and bool(layers))
        or (attention and (impl.attention_kernel == "unfused" or run.precision.params_dtype == "fp32"))
        or (experts_here and not ROUTER_USES_TE_GEMM(impl))
    )
