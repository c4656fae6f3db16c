"""What a run asks for that changes memory and that no formula covers: listed by name, never dropped in silence."""

from __future__ import annotations

from collections.abc import Iterator

from bridge_memory.spec import RunSpec


def gaps(run: RunSpec) -> tuple[str, ...]:
    """One sentence a gap, each beginning with the field's name."""
    return tuple(_gaps(run))


def _gaps(run: RunSpec) -> Iterator[str]:
    impl, precision, optimizer = run.implementation, run.precision, run.optimizer
    if impl.cuda_graph_impl != "none":
        yield f"cuda_graph_impl ({impl.cuda_graph_impl}): the private memory pools of CUDA graphs"
    if impl.delay_wgrad_compute:
        yield "delay_wgrad_compute: inputs and output gradients that wait for the weight gradients"
    if impl.defer_embedding_wgrad_compute:
        yield "defer_embedding_wgrad_compute: output gradients of the logits that wait for the flush"
    if impl.use_transformer_engine_op_fuser:
        yield "use_transformer_engine_op_fuser: what the fused MLP keeps (estimated as the unfused one)"
    if impl.moe_apply_probs_on_input:
        yield "moe_apply_probs_on_input: the scaled copy of the tokens"
    if precision.fp8 and (precision.num_layers_at_start_in_bf16 or precision.num_layers_at_end_in_bf16):
        yield "first_last_layers_bf16: the layers at the ends are counted in fp8 like the rest"
    if optimizer.peft != "none":
        yield f"peft ({optimizer.peft}): activations, which are counted as if every weight trained"
        if not optimizer.lora_dim:
            yield f"peft ({optimizer.peft}): adapters, their gradients and optimizer state"
    if impl.cpu_offloading_num_layers:
        yield "cpu_offloading_num_layers: the two layers in flight between GPU and host"
