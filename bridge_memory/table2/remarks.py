"""Sentences on what Megatron Bridge's closed forms leave out for a container. Its numbers are not changed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from bridge_memory.spec import SpecError
from bridge_memory.table2.closed_forms import ModelState
from bridge_memory.table2.container import activations_are_reported, counts_a_gate, is_mimo, model_state
from bridge_memory.table2.stages import stages_of

#: Smallest relative difference from Bridge's most loaded GPU at which the heaviest stage is named.
_NAMED_FROM = 0.01


def remarks(config: Any, *, include_activation: bool | None = None) -> tuple[str, ...]:
    """What the figures of ``estimate_training_memory`` leave out or assume, a sentence each.

    ``include_activation``: None: as in the report of this container. Raises SpecError as the estimate does.
    """
    if is_mimo(config):  # Bridge prints nothing for these
        return ()
    state = model_state(config)
    found = [*_of_the_model(config.model, state), *_of_the_state(config, state), *_of_the_stages(config.model, state)]
    if include_activation is None:
        include_activation = activations_are_reported(config)
    if include_activation and state.pp > 1:
        found.append("activations are the first stage's; the logits of the last stage are not counted")
    return tuple(found)


def _of_the_model(model: Any, state: ModelState) -> Iterator[str]:
    if getattr(model, "gated_linear_unit", False) and not counts_a_gate(model):
        yield "the gate of a gated unit other than SwiGLU is not counted"
    if getattr(model, "multi_latent_attention", False):
        yield "multi-latent attention is counted as grouped-query attention"
    if variant := getattr(model, "experimental_attention_variant", None):
        yield f"every layer is counted with grouped-query attention although there is {variant}"
    if getattr(model, "is_hybrid_model", False) or any(
        getattr(model, name, None) for name in ("hybrid_layer_pattern", "hybrid_override_pattern")
    ):
        yield "every layer of a hybrid model is counted as a transformer layer"
    if state.layers.moe:
        yield "routers and expert biases are not counted"
    if state.layers.mtp_depths:
        copy = ", nor the second copy of the embedding" if state.pp > 1 else ""
        yield f"an MTP depth is counted as one more layer: its projection and its extra norms are not{copy}"


def _of_the_state(config: Any, state: ModelState) -> Iterator[str]:
    optimizer, ddp = getattr(config, "optimizer", None), getattr(config, "ddp", None)
    if state.use_distributed_optimizer and getattr(config, "data_parallel_size", None) is None:
        yield "data_parallel_size is not set (the container was not validated): 1 is counted"
    if getattr(ddp, "use_distributed_optimizer", False) and not state.use_distributed_optimizer:
        yield "ddp.use_distributed_optimizer is ignored; optimizer.use_distributed_optimizer decides"
    # With expert parallelism Megatron Bridge makes an unset one 1 itself (``models/transformer_config.py:
    # _set_moe_expert_tensor_parallel_default``).
    alone = (getattr(config.model, "expert_model_parallel_size", None) or 1) == 1
    unset = getattr(config.model, "expert_tensor_parallel_size", None) is None
    if state.layers.moe and state.tp > 1 and unset and alone:
        yield f"expert_tensor_parallel_size is not set: 1 is counted, Megatron takes {state.tp} (tensor parallelism)"
    if getattr(ddp, "use_megatron_fsdp", False):
        yield "weights and gradients are counted unsharded although Megatron-FSDP may shard them"
    if (name := getattr(optimizer, "optimizer", "adam")) != "adam":
        yield f"the optimizer is counted as Adam although it is {name}"
    if getattr(optimizer, "use_precision_aware_optimizer", False):
        yield "optimizer state is counted in fp32 although the optimizer is precision-aware"
    if getattr(config, "peft", None) is not None:
        yield "every parameter is counted as trained although peft is set"


def _of_the_stages(model: Any, state: ModelState) -> Iterator[str]:
    """The heaviest stage by the same closed forms, where its layers differ from Bridge's average."""
    try:
        stages = stages_of(model, state.layers, state.pp, state.vpp)
    except SpecError as error:
        yield f"the layers of each stage are not known: {error}"
        return
    dense, routed = state.dense_bytes_per_parameter, state.routed_bytes_per_parameter
    alone = [
        dense * state.stage_dense_parameters(held) + routed * state.stage_routed_parameters(held) for held in stages
    ]
    counted = dense * state.dense_parameters_per_gpu() + routed * state.routed_parameters_per_gpu()
    heaviest = max(range(state.pp), key=alone.__getitem__)
    if abs(alone[heaviest] - counted) >= _NAMED_FROM * counted:
        yield (
            f"by the same closed forms the heaviest stage is {heaviest}, with {alone[heaviest] / 2**30:.2f} GiB of "
            f"weights and optimizer; Bridge counts {counted / 2**30:.2f} GiB for the most loaded GPU"
        )
