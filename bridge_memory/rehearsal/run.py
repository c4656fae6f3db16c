"""Rehearse one rank without a GPU: its real model chunks run forward and backward on the meta device.

``rehearse(run, stage)`` answers what the rank owns (parameters, DDP's buffers, optimizer state), what each
chunk keeps for backward, and the peaks of its forward and backward pass. ``rehearse_layer`` does the same
for one layer on its own, which is what a block of the inventory describes.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from bridge_memory.components import allocated
from bridge_memory.rehearsal import patches, te_kernels
from bridge_memory.rehearsal.adapters import adapt
from bridge_memory.rehearsal.model import TORCH_DTYPES, build_chunks
from bridge_memory.rehearsal.refusals import refuse_what_is_ignored
from bridge_memory.rehearsal.tracker import Alive, Peak, SavedRecord, Tracker, parts_of
from bridge_memory.rehearsal.world import NotBuildable, RehearsalUnavailable, fake_world, quiet, refusals_named
from bridge_memory.spec import AttentionSpec, MoESpec, RunSpec, SpecError
from bridge_memory.spec.limits import limits_of
from bridge_memory.spec.ranks import rank_of_stage, stage_of_rank


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """One contiguous buffer of megatron-core's DDP: padded elements, and the bytes of its two halves."""

    experts: bool
    elements: int
    parameter_bytes: int
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One forward and one backward pass for one microbatch, in bytes.

    Measured on the second microbatch. ``saved`` is alive between the passes because backward needs it;
    ``held`` because a module's attribute or a caller holds it; ``persistent`` was there before and stays
    (caches, scratch buffers). The peaks count everything the passes made or were handed and what the first
    microbatch left behind, and neither ``persistent`` nor parameters, gradient buffers or neighbours.
    """

    saved: tuple[SavedRecord, ...]
    held: tuple[Alive, ...]
    persistent: tuple[Alive, ...]
    forward_peak: Peak
    backward_peak: Peak
    #: Still alive after backward, until the next forward pass takes its place.
    left: tuple[Alive, ...] = ()

    @property
    def saved_bytes(self) -> int:
        return sum(r.bytes for r in self.saved)

    @property
    def held_bytes(self) -> int:
        return sum(r.bytes for r in self.held)

    @property
    def forward_bytes(self) -> int:
        """The forward peak less what is held, of which the next microbatch's takes the place."""
        return self.forward_peak.bytes - self.held_bytes

    @property
    def backward_bytes(self) -> int:
        """The backward peak less what is held."""
        return self.backward_peak.bytes - self.held_bytes


@dataclass(frozen=True, slots=True)
class ChunkRehearsal:
    """One model chunk (virtual stage); its parameters without adapters."""

    chunk: int
    parameters: dict[str, tuple[int, ...]]
    passes: PassRecord


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One rank of the job."""

    run: RunSpec
    rank: int
    stage: int
    chunks: tuple[ChunkRehearsal, ...]
    buffers: tuple[BufferLayout, ...]
    #: Master parameters and moments; None where the optimizer needs Transformer Engine.
    optimizer_bytes: int | None
    #: What linears keep of their weights in fp8 from one microbatch to the next.
    fp8_copies_bytes: int = 0
    #: Weights without gradients, each a tensor of its own, which are in no buffer.
    frozen_bytes: int = 0

    @property
    def parameters(self) -> int:
        from math import prod

        return sum(prod(shape) for chunk in self.chunks for shape in chunk.parameters.values())

    @property
    def weights_bytes(self) -> int:
        return sum(b.parameter_bytes for b in self.buffers) + self.frozen_bytes

    @property
    def gradients_bytes(self) -> int:
        return sum(b.gradient_bytes for b in self.buffers)


def rehearse(
    run: RunSpec, stage: int | None = None, *, rank: int | None = None, architecture: Any = None
) -> Rehearsal:
    """Rehearse a rank of ``stage`` (``rank_in_stage``), or ``rank``. Raises SpecError, RehearsalUnavailable.

    ``architecture``: a TransformerConfig of the model from elsewhere, see ``model.transformer_config``.
    """
    if rank is None:
        rank = rank_in_stage(run, stage or 0)
    with on_rank(run, rank):
        chunks = build_chunks(run, architecture=architecture)
        parameters = [{n: tuple(p.shape) for n, p in chunk.named_parameters()} for chunk in chunks]
        adapt(run, chunks)
        wrapped = [distributed(run, chunk, i) for i, chunk in enumerate(chunks)]
        done = tuple(
            ChunkRehearsal(i, parameters[i], _run_chunk(run, chunk, ddp))
            for i, (chunk, ddp) in enumerate(zip(chunks, wrapped, strict=True))
        )
        buffers = tuple(b for ddp in wrapped for b in _buffers(ddp))
        copies = sum(map(_fp8_copies, chunks)) + _beside_buffers(wrapped)
        frozen = sum(allocated(p.nbytes) for c in chunks for p in c.parameters() if not p.requires_grad)
        state = _optimizer_state(run, wrapped)
    return Rehearsal(run, rank, stage_of_rank(run.parallel, rank), done, buffers, state, copies, frozen)


def rank_in_stage(run: RunSpec, stage: int) -> int:
    """The last rank of the stage's first context-parallel ring, which attends with all of its queries in every step:
    the one that the estimate is of. Without context parallelism, the stage's first rank."""
    return rank_of_stage(run.parallel, stage) + (run.parallel.cp - 1) * run.parallel.tp


@contextmanager
def on_rank(run: RunSpec, rank: int, brought: tuple[str, ...] = ()) -> Iterator[None]:
    """Be this rank, with everything needed to run on the meta device, and leave no trace. ``brought``: options that
    are refused elsewhere, which the caller brings about."""
    refuse_what_is_ignored(run, but=brought)
    if run.implementation.te:
        te_kernels.load()
    if run.precision.fp32_residual_connection and not run.implementation.te:
        raise NotBuildable(
            "fp32_residual_connection needs norms that change the dtype, of Apex or Transformer Engine"
        )
    if _runs_flash(run) and run.parallel.cp > 1:
        raise RehearsalUnavailable(
            f"context_parallel_size ({run.parallel.cp}) with FlashAttention 2 is not rehearsed; attention_backend "
            "fused is, with which cuDNN's attention runs"
        )
    if run.parallel.cp > 1 and run.implementation.cp_comm_type == "a2a+p2p":
        raise RehearsalUnavailable(
            "cp_comm_type (a2a+p2p) is not rehearsed: a run does not say how its ranks are grouped "
            "(hierarchical_context_parallel_sizes); p2p is"
        )
    if run.implementation.moe_router_fusion and run.model.has_experts and not patches.has_te():
        raise RehearsalUnavailable("moe_router_fusion (True) takes its kernels from Transformer Engine; add that here")
    _check_loss(run)
    moe = next((x.ffn for x in run.model.layers if isinstance(x.ffn, MoESpec)), None)
    with (
        quiet(), _collecting_only_what_is_new(), _environment(run), _determinism(run), fake_world(run.parallel, rank),
        patches.running(*((moe.topk, moe.num_experts) if moe else ()), multiple=_multiple(run)),
        _transformer_engine(run), refusals_named(),
    ):  # fmt: skip
        yield


def _multiple(run: RunSpec) -> int:
    """Of rows that quantized experts are padded to; 0 for none (``fp8_utils.py: get_fp8_align_size``, ``fp4_utils.py:
    get_fp4_align_size``; TE ``grouped_linear.py`` takes 64 in place of that)."""
    precision = run.precision
    if not precision.quantizes:
        return 0
    if precision.fp4 is not None:
        return 64
    return 32 if precision.fp8_recipe == "mxfp8" else 16


def _check_loss(run: RunSpec) -> None:
    """Refuse a fused cross entropy that this process does not have; megatron-core fails with a traceback."""
    from typing import get_args

    from megatron.core.model_parallel_config import ModelParallelConfig

    impl = run.implementation
    kind = impl.cross_entropy_fusion_impl
    if not impl.cross_entropy_loss_fusion:
        return
    # Before 0.16 the field is a plain string.
    known = get_args(ModelParallelConfig.__dataclass_fields__["cross_entropy_fusion_impl"].type) or ("native", "te")
    if kind not in known:
        raise NotBuildable(
            f"cross_entropy_fusion_impl ({kind}) is not in this megatron-core, which has {', '.join(known)}"
        )
    if kind == "te" and not patches.has_te():
        raise NotBuildable("cross_entropy_fusion_impl (te) needs Transformer Engine here; use native")


#: What megatron-core says to Transformer Engine of ``--attention-backend``, and refuses to find said already
#: (``extensions/transformer_engine.py: TEDotProductAttention``; ``language_module.py: _set_attention_backend``).
_ATTENTION_VARIABLES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@contextmanager
def _environment(run: RunSpec) -> Iterator[None]:
    """The variables of a job that starts with this run, and afterwards those that were there before."""
    before = dict(os.environ)
    for name in _ATTENTION_VARIABLES:
        os.environ.pop(name, None)
    allowed = not (run.implementation.deterministic_mode or run.implementation.nvte_deterministic)
    os.environ["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] = str(int(allowed))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _determinism(run: RunSpec) -> Iterator[None]:
    """torch's deterministic algorithms, as ``--deterministic-mode`` asks for (Megatron-LM ``arguments.py:
    validate_args``). What has none is let be: nothing is computed."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(run.implementation.deterministic_mode or before[0], warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _runs_flash(run: RunSpec) -> bool:
    """Whether FlashAttention has to be there: chosen, or left where cuDNN takes no windows with dropout."""
    chosen, model = run.implementation.attention_kernel, run.model
    windows = any(isinstance(m, AttentionSpec) and m.window_size is not None for m in limits_of(model).mixers)
    return chosen == "flash" or (chosen == "fused" and bool(model.attention_dropout) and windows)


def _transformer_engine(run: RunSpec) -> Any:
    if not te_kernels.loaded():
        return nullcontext()
    fp8_parameters = run.precision.quantized_param
    flash = _runs_flash(run)
    return te_kernels.running(run.implementation.gpu_arch, fp8_parameters=fp8_parameters, flash=flash)


@contextmanager
def _collecting_only_what_is_new() -> Iterator[None]:
    """Keep what lives already out of ``gc.collect``: torch and megatron-core alone take 0.2 s each time."""
    mine = not gc.get_freeze_count()
    if mine:
        gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()


# ---- gradients -----------------------------------------------------------------------------------


def distributed(run: RunSpec, chunk: torch.nn.Module, index: int) -> Any:
    """The chunk on the device, in its training dtype, in megatron-core's own DDP.

    DDP lays out the buffers and hooks the gradients. As Megatron-LM and Bridge do it: to the GPU, then
    Float16Module, then DDP (``training/training.py: get_model``).
    """
    from dataclasses import fields

    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    ddp = run.data_parallel
    wanted = {
        "grad_reduce_in_fp32": ddp.grad_reduce_in_fp32,
        "overlap_grad_reduce": ddp.overlap_grad_reduce,
        "overlap_param_gather": ddp.overlap_param_gather,
        "use_distributed_optimizer": ddp.use_distributed_optimizer,
        "bucket_size": ddp.bucket_size,
        "num_distributed_optimizer_instances": run.parallel.num_distributed_optimizer_instances,
        "fp8_param_gather": run.precision.fp8_param,
        "reuse_grad_buf_for_mxfp8_param_ag": gathers_in_gradients(run),
        "delay_wgrad_compute": run.implementation.delay_wgrad_compute,
    }
    known = {f.name for f in fields(DistributedDataParallelConfig)}
    config = DistributedDataParallelConfig(**{k: v for k, v in wanted.items() if k in known})
    model: Any = chunk.to(torch.cuda.current_device())
    if run.precision.params_dtype in ("bf16", "fp16"):
        model = Float16Module(chunk.config, model)
    return DistributedDataParallel(
        config=chunk.config, ddp_config=config, module=model, disable_bucketing=index > 0
    )


def gathers_in_gradients(run: RunSpec) -> bool:
    """Whether parameters are gathered in the buffer of gradients: mxfp8 ones can be in no buffer, and training loops
    ask for it (Megatron-LM ``arguments.py: validate_args``; Bridge ``mixed_precision.py: bf16_with_mxfp8_mixed``)."""
    p = run.precision
    return p.fp8 is not None and p.fp8_param and p.fp8_recipe == "mxfp8" and run.data_parallel.use_distributed_optimizer


def _buffers(ddp: Any) -> list[BufferLayout]:
    out = []
    for experts, group in ((False, ddp.buffers), (True, ddp.expert_parallel_buffers)):
        for buffer in group:
            weights = None if getattr(buffer, "shared_buffer", None) is not None else buffer.param_data
            storage = None if weights is None else weights.untyped_storage()._cdata
            own = sum(
                allocated(part.nbytes)
                for part in (parts_of(p)[0] for p in buffer.params)
                if part.untyped_storage()._cdata != storage
            )
            out.append(
                BufferLayout(
                    experts=experts,
                    elements=buffer.numel,
                    parameter_bytes=own + (0 if weights is None else weights.numel() * weights.element_size()),
                    gradient_bytes=buffer.grad_data.numel() * buffer.grad_data.element_size(),
                )
            )
    return out


def optimizer(run: RunSpec, wrapped: list[Any]) -> Any:
    """megatron-core's own optimizer over the chunks of a rank."""
    from dataclasses import fields

    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    opt, ddp, precision = run.optimizer, run.data_parallel, run.precision
    wanted = {
        "optimizer": opt.optimizer,
        "lr": 1e-4,
        "bf16": precision.params_dtype == "bf16",
        "fp16": precision.params_dtype == "fp16",
        "params_dtype": TORCH_DTYPES[precision.params_dtype],
        "use_distributed_optimizer": ddp.use_distributed_optimizer,
        "use_precision_aware_optimizer": opt.use_precision_aware_optimizer,
        "main_grads_dtype": TORCH_DTYPES[opt.main_grads_dtype],
        "main_params_dtype": TORCH_DTYPES[opt.main_params_dtype],
        "exp_avg_dtype": TORCH_DTYPES[opt.exp_avg_dtype],
        "exp_avg_sq_dtype": TORCH_DTYPES[opt.exp_avg_sq_dtype],
        "store_param_remainders": opt.store_param_remainders,
        # Without a word Megatron-LM's arguments say delayed; 0.13 makes no main parameters for what says nothing.
        "fp8_recipe": opt.fp8_recipe or "delayed",
        "sgd_momentum": opt.sgd_momentum,
        "overlap_param_gather": ddp.overlap_param_gather,
        "optimizer_cpu_offload": opt.optimizer_cpu_offload,
        "optimizer_offload_fraction": opt.optimizer_offload_fraction,
        "reuse_grad_buf_for_mxfp8_param_ag": gathers_in_gradients(run),
        "delay_wgrad_compute": run.implementation.delay_wgrad_compute,
    }
    known = {f.name for f in fields(OptimizerConfig)}
    config = OptimizerConfig(**{k: v for k, v in wanted.items() if k in known})
    return get_megatron_optimizer(config, wrapped, use_gloo_process_groups=False)


def _optimizer_state(run: RunSpec, wrapped: list[Any]) -> int | None:
    """Bytes of master parameters and moments after an optimizer step; None: cannot be built here.

    Without Transformer Engine and Apex the optimizer is torch's AdamW, so that precision-aware states cannot be seen;
    offloading and Muon cannot with them either.
    """
    opt = run.optimizer
    if opt.optimizer != "adam" or opt.optimizer_cpu_offload:
        return None
    if opt.use_precision_aware_optimizer and not te_kernels.loaded():
        return None
    if opt.use_precision_aware_optimizer and run.precision.fp8 is not None and run.precision.fp8_param:
        return None  # shards of fp8 parameters are None until an optimizer loads them
    weights = {p.untyped_storage()._cdata for ddp in wrapped for p in ddp.parameters()}
    if not weights:
        return 0  # a stage without layers
    found: dict[int, int] = {}
    with patches.tensors_call_themselves_cuda():
        top = optimizer(run, wrapped)
        for part in getattr(top, "chained_optimizers", [top]):
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.empty_like(parameter)
                    _count(parameter, weights, found)
            part.optimizer.step()
            for state in part.optimizer.state.values():
                for tensor in state.values():
                    _count(tensor, weights, found)
    if run.data_parallel.use_distributed_optimizer:
        return sum(found.values())  # Of shards the estimate has the sum.
    return sum(map(allocated, found.values()))


def _fp8_copies(chunk: torch.nn.Module) -> int:
    """Bytes of quantized weights that modules cache (TE ``module/base.py: get_weight_workspace``)."""
    cached = (held for module in chunk.modules() for held in getattr(module, "_fp8_workspaces", {}).values())
    return sum(part.untyped_storage().nbytes() for tensor in cached for part in parts_of(tensor))


def _beside_buffers(wrapped: list[Any]) -> int:
    """Bytes of fp8 parameters that lie in no buffer of DDP: their other layout, and scales."""
    buffers = [b for ddp in wrapped for b in (*ddp.buffers, *ddp.expert_parallel_buffers)]
    mapped = {b.param_data.untyped_storage()._cdata for b in buffers if b.param_data is not None}
    mapped |= {parts_of(p)[0].untyped_storage()._cdata for b in buffers for p in b.params}
    quantized = [p for ddp in wrapped for p in ddp.parameters() if len(parts_of(p)) > 1]
    found = {s._cdata: s.nbytes() for p in quantized for part in parts_of(p) if (s := part.untyped_storage())}
    return sum(nbytes for key, nbytes in found.items() if key not in mapped)


def _count(tensor: Any, weights: set[int], found: dict[int, int]) -> None:
    if isinstance(getattr(tensor, "_data", None), torch.Tensor):  # fp8: bytes and their scale
        tensor = tensor._data
    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            found[storage._cdata] = storage.nbytes()


# ---- passes --------------------------------------------------------------------------------------


class _Enter(torch.autograd.Function):
    """Makes the input of a block inside the graph, so that nothing but the block keeps it alive."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, shape: Any, dtype: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=patches.META)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None]:
        return None, None, None


class _Leave(torch.autograd.Function):
    """Takes the output of a block away, as the next block does, and hands its gradient back."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.made = (output.shape, output.dtype)
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        shape, dtype = ctx.made
        return torch.empty(shape, dtype=dtype, device=patches.META)


def _backward(end: Any, gradient: torch.Tensor) -> None:
    """``end.backward(gradient)`` with the function modes left on, which recomputation inside needs."""
    torch.autograd.graph._engine_run_backward(
        (end,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _sent(out: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The end of a pass: where backward begins, and the gradient that the schedule holds meanwhile.

    An output that goes to another stage is freed once sent (``schedules.py: deallocate_output_tensor``).
    """
    return torch.autograd.graph.get_gradient_edge(out), torch.empty_like(out)


#: What another stage sent, by name.
_INPUT = "received input"
_RECEIVED = (_INPUT, "empty")


def _passes(tracker: Tracker, forward: Any) -> PassRecord:
    """Run ``forward``, which returns what to call backward on, twice; measure the second time."""
    _backward(*_sent(forward()))
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()  # what a reference cycle keeps alive must be seen
    try:
        before = tracker.keys()
        tracker.reset_peak()
        end = forward()
        forward_peak = tracker.peak()
        edge = torch.autograd.graph.get_gradient_edge(end)
        made = (end.shape, end.dtype)
        del end
        persistent = before & tracker.keys()
        saved = tuple(tracker.saved(persistent))
        held = tuple(tracker.held(persistent))
        # What no layer keeps, as in a chunk without any, the schedule does (``schedules.py``: input_tensors).
        received = [a for a in held if (a.module, a.made_by) == _RECEIVED]
        held = tuple(a for a in held if a not in received)
        saved += tuple(SavedRecord("", _INPUT, (), "bytes", a.bytes) for a in received)
        tracker.in_backward = True
        tracker.reset_peak()
        _backward(edge, torch.empty(made[0], dtype=made[1], device=patches.META))
        del edge
        backward_peak = tracker.peak()
        tracker.in_backward = False
        left = tuple(tracker.alive(tracker.keys() - persistent))
        forward_peak, backward_peak = tracker.without(persistent, forward_peak, backward_peak)
        return PassRecord(saved, held, tuple(tracker.alive(persistent)), forward_peak, backward_peak, left)
    finally:
        if collecting:
            gc.enable()


def _packed(run: RunSpec) -> dict[str, Any]:
    """What a forward pass over packed sequences is given besides: here of two sequences of equal length; of one where
    attention is unfused, which pads all to the longest and is estimated for the longest that there can be."""
    if not run.batch.packed_sequences:
        return {}
    from megatron.core.packed_seq_params import PackedSeqParams

    unfused = run.implementation.attention_kernel == "unfused" or run.precision.params_dtype == "fp32"
    number = 1 if unfused else 2
    longest = run.batch.rows[0] // number
    # Unfused, the rotation splits the tokens by these numbers.
    ends = torch.tensor([longest * i for i in range(number + 1)], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    return {"packed_seq_params": params}


def _static(chunk: torch.nn.Module) -> list[torch.Tensor]:
    tensors = [*chunk.parameters(), *chunk.buffers()]
    tensors += [p.main_grad for p in chunk.parameters() if hasattr(p, "main_grad")]
    return tensors


def _run_chunk(run: RunSpec, chunk: Any, ddp: Any) -> PassRecord:
    """One microbatch through one chunk, from the embedding or received input to the loss or sent output."""
    batch, parallel = run.batch, run.parallel
    length, b = batch.rows
    s = length // parallel.cp
    tracker = Tracker(_static(chunk))
    with tracker.watching(chunk), ddp.no_sync():
        ids = torch.empty((b, s), dtype=torch.int64, device=patches.META)
        labels = torch.empty_like(ids)
        positions = torch.empty_like(ids)
        mask = torch.empty((b, s), dtype=torch.float32, device=patches.META)
        causal = None
        if run.implementation.create_attention_mask and (chunk.pre_process or chunk.post_process):
            causal = torch.empty((b, 1, s, length), dtype=torch.bool, device=patches.META)
        more = _packed(run)
        tracker.name_alive("batch")
        anchor = torch.empty((), device=patches.META, requires_grad=True)
        tracker.ignore(anchor)
        residual = "fp32" if run.precision.fp32_residual_connection else run.precision.params_dtype
        rows = s // parallel.tp if parallel.sp else s

        def forward() -> torch.Tensor:
            if not chunk.pre_process:
                shape = (rows * _states_received(chunk), b, run.model.hidden_size)
                if run.recompute.distribute_saved_activations:
                    # A leaf's gradient would be checked against its data, which is shared out meanwhile.
                    received = _Enter.apply(anchor, shape, TORCH_DTYPES[residual])
                    received.retain_grad()
                else:
                    received = torch.empty(
                        shape, dtype=TORCH_DTYPES[residual], device=patches.META, requires_grad=True
                    )
                tracker.name_alive(_INPUT)
                chunk.set_input_tensor(received)
            out = ddp(ids, positions, causal, labels=labels if chunk.post_process else None, **more)
            if chunk.post_process:
                losses = out.view(-1).float()
                return torch.sum(losses * mask.view(-1))
            sent: torch.Tensor = out
            return sent

        return _passes(tracker, forward)


def _states_received(chunk: Any) -> int:
    """Hidden states that come together: those of every MTP depth too where the depths are on a stage before
    (``p2p_communication.py``: config.mtp_standalone)."""
    inner = getattr(chunk, "module", chunk)
    depths = getattr(chunk.config, "mtp_num_layers", None) or 0
    return 1 + depths if chunk.post_process and not getattr(inner, "mtp_process", True) else 1


#: What one layer shows and a whole pass of one microbatch does not: that expert communication overlaps moves nothing
#: inside of a layer.
_OF_ONE_LAYER = ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute")


def rehearse_layer(run: RunSpec, layer: int, architecture: Any = None) -> PassRecord:
    """One decoder layer (0-based, of the whole model) on its own; selective recomputation as configured.

    ``architecture`` as for ``rehearse``.

    The layer's input is made inside the graph and its output is taken away before backward, as neighbours do.
    """
    from bridge_memory.spec.layout import layout

    where = [
        (stage, i)
        for stage, chunks in enumerate(layout(run.model, run.parallel).stages)
        for i, chunk in enumerate(chunks)
        if layer in chunk.layers
    ]
    if not where:
        raise SpecError(f"layer ({layer}) is not one of the {run.model.num_layers} decoder layers")
    stage, index = where[0]
    with on_rank(run, rank_in_stage(run, stage), _OF_ONE_LAYER):
        chunks = build_chunks(run, architecture=architecture)
        adapt(run, chunks)
        ddp = distributed(run, chunks[index], index)
        chunk: Any = chunks[index]
        local = layout(run.model, run.parallel).stages[stage][index].layers.index(layer)
        module = chunk.decoder.layers[local]
        return _run_layer(run, chunk, module, ddp)


def _fp8(config: Any, layer: Any) -> Any:
    """What ``transformer_block.py: TransformerBlock.forward`` runs a layer in."""
    if getattr(config, "fp4", None):
        from megatron.core.fp4_utils import get_fp4_context

        return get_fp4_context(config, layer.layer_number - 1)
    if not config.fp8:
        return nullcontext()
    from megatron.core.fp8_utils import get_fp8_context

    return get_fp8_context(config, layer.layer_number - 1)


def _delay_weight_gradients(run: RunSpec, layer: Any, x: torch.Tensor) -> None:
    """Have a layer's delayed weight gradients made where the schedule makes them: those of experts when their node, up
    to the exchange of tokens, has run backward, an MLP's likewise, all others when its input ``x`` has its gradient
    (``models/common/model_chunk_schedule_plan.py: TransformerLayerSchedulePlan.run``). Backward runs a layer's nodes
    one by one there; here it is one pass, and a hook of the tensor at the node's beginning stands for its end."""
    if not run.implementation.delay_wgrad_compute:
        return
    experts = hasattr(layer.mlp, "token_dispatcher")

    def of_node(tensor: torch.Tensor, *callables: Any) -> None:
        def made(_: torch.Tensor) -> None:
            for call in callables:
                call()

        tensor.register_hook(made)

    def entering(module: Any, name: str) -> None:
        original = getattr(type(module), name)

        def watched(first: torch.Tensor, *args: Any, **more: Any) -> Any:
            of_node(first, layer.mlp.backward_dw)
            return original(module, first, *args, **more)

        setattr(module, name, watched)

    if experts:
        entering(layer.mlp.token_dispatcher, "dispatch_postprocess")
        shared = [layer.mlp.shared_experts.backward_dw] if layer.mlp.use_shared_expert else []
    else:
        entering(layer, "_forward_mlp")
        shared = []
    of_node(x, *shared, layer.self_attention.backward_dw)


def _run_layer(run: RunSpec, chunk: Any, module: Any, ddp: Any) -> PassRecord:
    length, sequences = run.batch.rows
    s = length // run.parallel.cp
    rows = s // run.parallel.tp if run.parallel.sp else s
    shape = (rows, sequences, run.model.hidden_size)
    dtype = TORCH_DTYPES[run.precision.params_dtype]
    if run.precision.fp32_residual_connection:
        dtype = torch.float32
    rotary = getattr(chunk, "rotary_pos_emb", None)
    more = _packed(run)
    if rotary is not None:
        table = rotary(length)
        more["rotary_pos_emb"] = table[0] if isinstance(table, tuple) else table
    static = [*_static(chunk), *(t for t in more.values() if isinstance(t, torch.Tensor))]
    tracker = Tracker(static)
    with tracker.watching(chunk), ddp.no_sync():
        anchor = torch.empty((), device=patches.META, requires_grad=True)
        tracker.ignore(anchor)

        def forward() -> torch.Tensor:
            x = _Enter.apply(anchor, shape, dtype)
            _delay_weight_gradients(run, module, x)
            with _fp8(chunk.config, module):
                out = module(hidden_states=x, attention_mask=None, **more)
            del x
            end: torch.Tensor = _Leave.apply(out[0] if isinstance(out, tuple) else out)
            return end

        return _passes(tracker, forward)
