"""P"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import torch

from bridge_memory.rehearsal.megatron_config import TORCH_DTYPES
from bridge_memory.rehearsal.patches.replace import META
from bridge_memory.rehearsal.results import PassRecord
from bridge_memory.rehearsal.tracker import SavedRecord, Tracker
from bridge_memory.spec import RunSpec


class Enter(torch.autograd.Function):
    """Makes the input of a block inside the graph, so that nothing but the block keeps it alive."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, shape: Any, dtype: Any) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None, None]:
        return None, None, None


class Leave(torch.autograd.Function):
    """Takes the output of a block away, as the next block does, and hands its gradient back."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        ctx.made = (output.shape, output.dtype)
        return output.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> torch.Tensor:
        shape, dtype = ctx.made
        return torch.empty(shape, dtype=dtype, device=META)


def run_backward(end: Any, gradient: torch.Tensor) -> None:
    """``end.backward(gradient)`` with the function modes left on, which recomputation inside needs."""
    torch.autograd.graph._engine_run_backward(
        (end,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def end_of_pass(out: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """The end of a pass: where backward begins, and the gradient that the schedule holds meanwhile.

    An output that goes to another stage is freed once sent (``schedules.py: deallocate_output_tensor``).
    """
    return torch.autograd.graph.get_gradient_edge(out), torch.empty_like(out)


#: What another stage sent, by name.
_RECEIVED_INPUT = "received input"
_RECEIVED = (_RECEIVED_INPUT, "empty")


def measured_passes(tracker: Tracker, forward: Any) -> PassRecord:
    """Run ``forward``, which returns what to call backward on, twice; measure the second time."""
    run_backward(*end_of_pass(forward()))
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
        saved += tuple(SavedRecord("", _RECEIVED_INPUT, (), "bytes", a.bytes) for a in received)
        tracker.in_backward = True
        tracker.reset_peak()
        run_backward(edge, torch.empty(made[0], dtype=made[1], device=META))
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


def run_chunk(run: RunSpec, chunk: Any, ddp: Any) -> PassRecord:
    """One microbatch through one chunk, from the embedding or received input to the loss or sent output."""
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
                    # A leaf's gradient would be checked against its data, which is shared out meanwhile.
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
            return output

        return measured_passes(tracker, forward)


def _states_received(chunk: Any) -> int:
    """Hidden states that come together: those of every MTP depth too where the depths are on a stage before
    (``p2p_communication.py``: config.mtp_standalone)."""
    inner = getattr(chunk, "module", chunk)
    depths = getattr(chunk.config, "mtp_num_layers", None) or 0
    return 1 + depths if chunk.post_process and not getattr(inner, "mtp_process", True) else 1


def _fp8(config: Any, layer: Any) -> Any:
    """What ``transformer_block.py: TransformerBlock.forward`` runs a layer in."""
    if getattr(config, "fp4", None):
        from megatron.core.fp4_utils import get_fp4_context

        return get_fp4_context(config, layer.layer_number - 1)
    if not config.fp8:
        return nullcontext()
    from megatron.core.fp8_utils import get_fp8_context

    return get_fp8_context(config, layer.layer_number - 1)


def _hook_delayed_weight_gradients(run: RunSpec, layer: Any, x: torch.Tensor) -> None:
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
