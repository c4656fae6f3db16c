"""Diffusion models: what their layers are recorded with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge_memory.spec.errors import SpecError

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


def check_diffusion(run: RunSpec) -> None:
    """Raise SpecError for a diffusion model with an option that its layers ignore or are not recorded with."""
    if run.model.diffusion is None:
        return
    p, impl = run.parallel, run.implementation
    refused = (
        (impl.torch_layers or not impl.te, f"transformer_impl ({impl.transformer_impl})", "transformer_engine"),
        # Every stage has the embeddings of text and timestep, whose gradients differ.
        (p.pp > 1, f"pipeline_model_parallel_size ({p.pp})", "1"),
        (not run.batch.packed_sequences, "packed_sequences (False)", "True"),
        (run.batch.micro_batch_size > 1, f"micro_batch_size ({run.batch.micro_batch_size})", "1"),
        (run.precision.quantizes, "fp8 or fp4", "bf16"),
        (run.peft.freezes, f"peft.scheme ({run.peft.scheme})", "none"),
        (run.recompute.granularity == "selective", "recompute_granularity (selective)", "full"),
        (run.data_parallel.engine != "megatron_ddp", f"engine ({run.data_parallel.engine})", "megatron_ddp"),
        (impl.cuda_graph_impl != "none", f"cuda_graph_impl ({impl.cuda_graph_impl})", "none"),
    )
    for wrong, what, fix in refused:
        if wrong:
            raise SpecError(f"{what} is not recorded with a diffusion model ({run.model.model_type}); use {fix}")
