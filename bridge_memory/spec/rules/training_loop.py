"""The training loop around transformers', torchtitan's or torchtune's modules: losses, checkpoints, offloading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bridge_memory.spec.errors import SpecError
from bridge_memory.spec.transformers import family_of

if TYPE_CHECKING:
    from bridge_memory.spec.run import RunSpec


def check_loop(run: RunSpec) -> None:
    """Raise SpecError for options of the training loop that contradict each other or are not modelled together."""
    spec, engine = run.transformers, run.data_parallel.engine
    if spec.num_output_chunks and not run.implementation.torchtune:
        raise SpecError(
            f"num_output_chunks ({spec.num_output_chunks}) is torchtune's loss in chunks; set transformer_impl to "
            "torchtune, or use liger_kernel fused_linear_cross_entropy"
        )
    if spec.num_output_chunks > run.batch.seq_length:
        raise SpecError(
            f"num_output_chunks ({spec.num_output_chunks}) is more than seq_length ({run.batch.seq_length}); "
            "torchtune's default is 8"
        )
    if spec.checkpoint_submodules:
        if spec.gradient_checkpointing or spec.selective_ac_option is not None:
            raise SpecError("checkpoint_submodules (True) and checkpoints of whole layers: drop one")
        if family_of(run.model.model_type, spec).layer != "llama" or run.peft.freezes or spec.autocast is not None:
            raise SpecError(
                "checkpoint_submodules (True) is counted for layers like Llama's without adapters and autocast; use "
                "gradient_checkpointing"
            )
        if spec.torch_compile:
            raise SpecError("checkpoint_submodules (True) is not counted with torch_compile; drop one")
    if spec.cut_cross_entropy:
        other = "num_output_chunks" if spec.num_output_chunks else "" if not spec.liger_kernel else next(
            (name for name in spec.liger_kernel if "cross_entropy" in name), ""
        )
        if other:
            raise SpecError(f"cut_cross_entropy (True) and {other}: each is the loss; drop one")
        if spec.autocast is not None and run.implementation.policy_loss != "trl":
            raise SpecError("cut_cross_entropy (True) is not counted with autocast; drop one")
        if spec.torch_compile:
            raise SpecError("cut_cross_entropy (True) is not counted with torch_compile; drop one")
    if spec.compile_loss is not None and not run.implementation.own_layers:
        raise SpecError(
            f"compile_loss ({spec.compile_loss}) is for transformer_impl torchtitan or torchtune; transformers' loss "
            "is a part of the model that torch_compile compiles; drop it"
        )
    if spec.optimizer_in_bwd and engine != "single":
        raise SpecError(f"optimizer_in_bwd (True) is counted with engine single alone, not {engine}; drop it")
    if spec.optimizer_in_bwd and run.num_microbatches > 1:
        raise SpecError(
            f"optimizer_in_bwd (True) steps after one microbatch, and a step has {run.num_microbatches}; set "
            "global_batch_size to micro_batch_size, or drop it"
        )
    if not spec.enable_activation_offloading:
        return
    if not spec.gradient_checkpointing:
        raise SpecError(
            "enable_activation_offloading (True) needs gradient_checkpointing, whose inputs it sends to host memory; "
            "set gradient_checkpointing to True, or drop it"
        )
    if spec.reentrant:
        raise SpecError(
            "enable_activation_offloading (True) takes what autograd saves, and reentrant checkpoints are counted "
            "without it; set use_reentrant to False"
        )
    if engine not in ("single", "fsdp2"):
        raise SpecError(
            f"enable_activation_offloading (True) is counted with engine single or fsdp2, not {engine}; drop it"
        )
