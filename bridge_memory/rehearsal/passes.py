"""Forward and backward passes of a chunk or a layer on the meta device, tracked."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import torch

from bridge_memory.rehearsal.diffusion import batch_of, no_values, step_of
from bridge_memory.rehearsal.megatron_config import TORCH_DTYPES
from bridge_memory.rehearsal.patches.replace import META
from bridge_memory.rehearsal.results import PassRecord
from bridge_memory.rehearsal.tracker import Alive, SavedRecord, Tracker
from bridge_memory.rehearsal.world import RehearsalUnavailable
from bridge_memory.spec import RunSpec


class Enter(torch.autograd.Function):
    """Creates the input of a block inside the graph, so that only the block keeps it alive."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, shape: Any, dtype: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None]:
        return None, None, None


class Leave(torch.autograd.Function):
    """Frees the output of a block, as the next block does, and returns its gradient."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.made = (output.shape, output.dtype)
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        shape, dtype = ctx.made
        return torch.empty(shape, dtype=dtype, device=META)


def run_backward(end: Any, gradient: torch.Tensor) -> None:
    """``end.backward(gradient)`` under the active function modes, which recomputation needs."""
    torch.autograd.graph._engine_run_backward(
        (end,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def end_of_pass(out: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """(gradient edge of the output, gradient), which the schedule keeps; the output itself is freed.

    An output is freed once it is sent to the next stage (``schedules.py: deallocate_output_tensor``).
    """
    return torch.autograd.graph.get_gradient_edge(out), torch.empty_like(out)


#: The names of tensors that the schedule refers to between the passes: what another stage sent, and what is sent on.
_RECEIVED_INPUT, _SENT_OUTPUT = "received input", "sent output"


def _the_schedules(alive: Alive) -> bool:
    return (alive.module, alive.made_by) == (_RECEIVED_INPUT, "empty") or alive.module == _SENT_OUTPUT


def measured_passes(tracker: Tracker, forward: Any, *, keeps_output: bool = False) -> PassRecord:
    """Run ``forward``, which returns the loss or the output, and its backward twice; measure the second time.

    ``keeps_output``: the output stays until backward is over (no ``deallocate_pipeline_outputs``).
    """
    run_backward(*end_of_pass(forward()))
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()  # memory that reference cycles keep alive counts
    try:
        before = tracker.keys()
        tracker.reset_peak()
        end = forward()
        forward_peak = tracker.peak()
        edge = torch.autograd.graph.get_gradient_edge(end)
        made = (end.shape, end.dtype)
        kept = end.detach() if keeps_output else None
        if kept is not None:
            tracker.name(kept, _SENT_OUTPUT)
        del end
        persistent = before & tracker.keys()
        saved = tuple(tracker.saved(persistent))
        held = tuple(tracker.held(persistent))
        # An input that no layer saves, as in a chunk without layers, is kept by the schedule (``schedules.py``:
        # input_tensors), and so is an output that it does not free (output_tensors).
        saved += tuple(SavedRecord("", a.module, (), "bytes", a.bytes) for a in held if _the_schedules(a))
        held = tuple(a for a in held if not _the_schedules(a))
        tracker.in_backward = True
        tracker.reset_peak()
        run_backward(edge, torch.empty(made[0], dtype=made[1], device=META))
        del edge
        backward_peak = tracker.peak()
        del kept
        tracker.in_backward = False
        left = tuple(tracker.alive(tracker.keys() - persistent))
        forward_peak, backward_peak = tracker.without(persistent, forward_peak, backward_peak)
        return PassRecord(saved, held, tuple(tracker.alive(persistent)), forward_peak, backward_peak, left)
    finally:
        if collecting:
            gc.enable()


def _packed(run: RunSpec) -> dict[str, Any]:
    """The extra arguments of a forward pass over packed sequences: two sequences of equal length; one where attention
    is unfused, which pads to the longest sequence and is estimated for the longest possible one."""
    if not run.batch.packed_sequences:
        return {}
    from megatron.core.packed_seq_params import PackedSeqParams

    unfused = run.implementation.attention_kernel == "unfused" or run.precision.params_dtype == "fp32"
    number = 1 if unfused else 2
    longest = run.batch.rows[0] // number
    # The unfused rotary embedding splits the tokens by these values, so that they are on the host.
    ends = torch.tensor([longest * i for i in range(number + 1)], dtype=torch.int32)
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
    )
    return {"packed_seq_params": params}


def _static(chunk: torch.nn.Module) -> list[torch.Tensor]:
    tensors = [*chunk.parameters(), *chunk.buffers()]
    tensors += [p.main_grad for p in chunk.parameters() if hasattr(p, "main_grad")]
    return tensors


def _run_diffusion(run: RunSpec, chunk: Any, ddp: Any) -> PassRecord:
    tensors = batch_of(run)
    tracker = Tracker([*_static(chunk), *tensors.values()])
    with tracker.watching(chunk), ddp.no_sync(), no_values():
        step = step_of(run, chunk, tensors)

        def forward() -> torch.Tensor:
            end: torch.Tensor = Leave.apply(step())
            return end

        return measured_passes(tracker, forward)


def run_chunk(run: RunSpec, chunk: Any, ddp: Any) -> PassRecord:
    """One microbatch through one chunk, from the embedding or received input to the loss or sent output."""
    if run.model.diffusion is not None:
        return _run_diffusion(run, chunk, ddp)
    batch, parallel = run.batch, run.parallel
    length, b = batch.rows
    s = length // parallel.cp
    tracker = Tracker(_static(chunk))
    with tracker.watching(chunk), ddp.no_sync():
        ids = torch.empty((b, s), dtype=torch.int64, device=META)
        labels = torch.empty_like(ids)
        positions = torch.empty_like(ids)
        mask = torch.empty((b, s), dtype=torch.float32, device=META)
        causal = None
        if run.implementation.create_attention_mask and (chunk.pre_process or chunk.post_process):
            causal = torch.empty((b, 1, s, length), dtype=torch.bool, device=META)
        more = _packed(run)
        tracker.name_alive("batch")
        anchor = torch.empty((), device=META, requires_grad=True)
        tracker.ignore(anchor)
        residual = "fp32" if run.precision.fp32_residual_connection else run.precision.params_dtype
        rows = s // parallel.tp if parallel.sp else s

        def forward() -> torch.Tensor:
            if not chunk.pre_process:
                shape = (rows * _states_received(chunk), b, run.model.hidden_size)
                if run.recompute.distribute_saved_activations:
                    # Autograd would compare a leaf's gradient with its data, which is split over TP ranks by then.
                    received = Enter.apply(anchor, shape, TORCH_DTYPES[residual])
                    received.retain_grad()
                else:
                    received = torch.empty(
                        shape, dtype=TORCH_DTYPES[residual], device=META, requires_grad=True
                    )
                tracker.name_alive(_RECEIVED_INPUT)
                chunk.set_input_tensor(received)
            out = ddp(ids, positions, causal, labels=labels if chunk.post_process else None, **more)
            if chunk.post_process:
                losses = out.view(-1).float()
                return torch.sum(losses * mask.view(-1))
            output: torch.Tensor = out
            if not output.requires_grad:
                raise RehearsalUnavailable(
                    "a chunk without an adapter before or in it has no backward pass, which the schedule runs all the "
                    "same (torch refuses it); give the first chunk a layer with an adapter"
                )
            return output

        keeps_output = not (run.implementation.deallocate_pipeline_outputs or chunk.post_process)
        return measured_passes(tracker, forward, keeps_output=keeps_output)


def _states_received(chunk: Any) -> int:
    """How many hidden states a stage receives: also those of every MTP depth where an earlier stage has the depths
    (``p2p_communication.py``: config.mtp_standalone)."""
    inner = getattr(chunk, "module", chunk)
    depths = getattr(chunk.config, "mtp_num_layers", None) or 0
    return 1 + depths if chunk.post_process and not getattr(inner, "mtp_process", True) else 1


def _fp8(config: Any, layer: Any) -> Any:
    """The fp8 or fp4 context of a layer in ``transformer_block.py: TransformerBlock.forward``."""
    if getattr(config, "fp4", None):
        from megatron.core.fp4_utils import get_fp4_context

        return get_fp4_context(config, layer.layer_number - 1)
    if not config.fp8:
        return nullcontext()
    from megatron.core.fp8_utils import get_fp8_context

    return get_fp8_context(config, layer.layer_number - 1)


def _hook_delayed_weight_gradients(run: RunSpec, layer: Any, x: torch.Tensor) -> None:
    """Compute a layer's delayed weight gradients where the schedule does.

    Those of experts, or of an MLP, follow the backward of their node; all others follow the gradient of the layer's
    input ``x`` (``models/common/model_chunk_schedule_plan.py: TransformerLayerSchedulePlan.run``). The schedule runs
    the backward of each node separately; here it is one pass, in which a hook on the node's first tensor marks the end
    of its backward.
    """
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


def run_layer(run: RunSpec, chunk: Any, module: Any, ddp: Any) -> PassRecord:
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
        anchor = torch.empty((), device=META, requires_grad=True)
        tracker.ignore(anchor)

        def forward() -> torch.Tensor:
            x = Enter.apply(anchor, shape, dtype)
            _hook_delayed_weight_gradients(run, module, x)
            with _fp8(chunk.config, module):
                out = module(hidden_states=x, attention_mask=None, **more)
            del x
            end: torch.Tensor = Leave.apply(out[0] if isinstance(out, tuple) else out)
            return end

        return measured_passes(tracker, forward)
