"""States of the optimizers of torch, bitsandbytes and transformers, per parameter, and temporaries of their step.

Every state is a separate tensor. Source: torch ``optim/adam.py: Adam._init_group, _multi_tensor_adam``,
``optim/sgd.py``; bitsandbytes ``optim/optimizer.py: Optimizer2State.init_state, Optimizer1State.init_state``;
transformers ``optimization.py: Adafactor``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple

from bridge_memory.components import State
from bridge_memory.spec import RunSpec
from bridge_memory.tapes.parameters import ALLOCATION_UNIT, pad

#: bitsandbytes: elements per scale, and the size in elements below which a parameter's states stay in fp32
#: (``Optimizer2State.init_state``: blocksize 256; ``min_8bit_size``).
BLOCK_8BIT, LEAST_8BIT = 256, 4096

#: (shape of a parameter or of a rank's shard of it, bytes per element, whether it is an embedding) -> bytes of its
#: state.
Sized = Callable[[tuple[int, ...], int, bool], int]


class TorchState(NamedTuple):
    """One state of an optimizer."""

    state: State
    nbytes: Sized


def _as_parameter(shape: tuple[int, ...], width: int, embedding: bool) -> int:
    """``torch.zeros_like(p)``."""
    return _rounded(prod(shape) * width)


def _as_parameter_and_step(shape: tuple[int, ...], width: int, embedding: bool) -> int:
    """As ``_as_parameter``, plus the step count, which fused kernels read on the GPU (``_init_group``:
    ``state["step"]``)."""
    return _as_parameter(shape, width, embedding) + ALLOCATION_UNIT


def _fp32(shape: tuple[int, ...], width: int, embedding: bool) -> int:
    return _rounded(prod(shape) * 4)


def _in_8_bits(shape: tuple[int, ...], width: int, embedding: bool) -> int:
    """One byte per element and an fp32 scale per block. The Trainer keeps states of embeddings in fp32 (transformers
    ``trainer.py: create_optimizer``: ``register_module_override(module, "weight", {"optim_bits": 32})``)."""
    n = prod(shape)
    if n < LEAST_8BIT or embedding:
        return _rounded(4 * n)
    return _rounded(n) + _rounded(4 * -(-n // BLOCK_8BIT))


def _factored(shape: tuple[int, ...], width: int, embedding: bool) -> int:
    """Adafactor: fp32 means of the squared gradients over rows and over columns; for vectors the squares themselves."""
    if len(shape) < 2:
        return _rounded(4 * prod(shape))
    return _rounded(4 * prod(shape[:-1])) + _rounded(4 * prod(shape[:-2]) * shape[-1])


def _rounded(nbytes: int) -> int:
    return pad(nbytes, ALLOCATION_UNIT)


def torch_states(run: RunSpec) -> tuple[TorchState, ...]:
    """The states of the run's optimizer, outside of megatron-core and DeepSpeed."""
    o = run.optimizer
    if o.optimizer == "sgd":
        return (TorchState(State.MOMENTUM, _as_parameter),) if o.sgd_momentum else ()
    if o.optimizer == "adafactor":
        return (TorchState(State.EXP_AVG_SQ, _factored),)
    if o.optimizer in ("lion", "lion_8bit"):
        return (TorchState(State.EXP_AVG, _in_8_bits if o.optimizer == "lion_8bit" else _fp32),)
    # paged: bitsandbytes' AdamW, whose states are fp32 whatever the parameters are.
    sized: Sized = _in_8_bits if o.optimizer == "adamw_8bit" else _fp32 if o.paged else _as_parameter
    first = _as_parameter_and_step if sized is _as_parameter and o.torch_implementation == "fused" else sized
    return TorchState(State.EXP_AVG, first), TorchState(State.EXP_AVG_SQ, sized)


class StepBytes(NamedTuple):
    """Temporaries of an optimizer's step: for all parameters that it updates together, and for one at a time."""

    name: str
    #: Multiples of the bytes of exp_avg_sq of all parameters, and of that of the largest parameter.
    together: int = 0
    largest: int = 0
    #: Number of fp32 tensors of the size of the largest parameter.
    fp32: int = 0


def step_bytes(run: RunSpec) -> StepBytes:
    """torch's foreach Adam makes the roots of all second moments together; the for-loop has two tensors of one
    parameter (the root, and the root over its bias correction); fused kernels and those of bitsandbytes have none."""
    o = run.optimizer
    if o.optimizer == "adafactor":
        # ``Adafactor.step``: gradient and parameter cast to fp32, the update, and a temporary.
        return StepBytes("Adafactor's update of the largest parameter", fp32=4)
    if o.optimizer in ("adam", "adamw") and not o.paged:
        if o.torch_implementation == "foreach":
            return StepBytes("square roots of second moments (foreach)", together=1)
        if o.torch_implementation == "for-loop":
            return StepBytes("the update of the largest parameter (for-loop)", largest=2)
    return StepBytes("optimizer step")
