"""Loading into a built Megatron-FSDP job on one rank, and the host memory of its save.

A checkpoint fills the shards where they are (torch ``distributed/checkpoint/default_planner.py``). Resuming has two
moments (megatron-core ``optimizer/distrib_optimizer.py``; TE ``optimizers/fused_adam.py``):

1. ``_init_optimizer_states_with_dummy_values`` steps with zeros for gradients, which makes the moments. ``zero_grad``
   frees the zeros, but not of an optimizer that reads ``decoupled_grad``, as a precision-aware one does.
2. ``FusedAdam.load_state_dict`` makes the moments again, while the state dict refers to those that were filled. Moments
   in fewer bits become fp32 before, all of them (``torch.optim.Optimizer.load_state_dict``).
"""

from __future__ import annotations

from bridge_memory.components import Provenance, Role, State
from bridge_memory.engines.fsdp_buckets import Sharding
from bridge_memory.engines.megatron_fsdp import fsdp_states, has_main_buffers
from bridge_memory.engines.optimizer_states import copied_states
from bridge_memory.estimation import stage_parts
from bridge_memory.job.megatron.building_fsdp import buckets_of, built
from bridge_memory.outside.amount import Amount, exactly, total
from bridge_memory.releases import FUSED_ADAM_KNOWS_DTENSORS, FUSED_ADAM_MAKES_WHOLE_STATES
from bridge_memory.spec import DTYPE_BYTES, RunSpec

_DUMMY = "distrib_optimizer.py: _init_optimizer_states_with_dummy_values"
_ADAM = "TE fused_adam.py: FusedAdam.load_state_dict"
_STREAMED = "torch distributed/checkpoint/filesystem.py: _OverlappingCpuLoader"
_MOMENTS = (State.EXP_AVG, State.EXP_AVG_SQ)
#: Bytes that torch copies ahead of what it writes (``FileSystemWriter``: per_thread_copy_ahead).
_COPIED_AHEAD = 10_000_000


def why_not_resumed(run: RunSpec) -> str | None:
    """Why a resume is not modelled; None where it is."""
    o = run.optimizer
    if not run.checkpoint.resumes_optimizer:
        return None
    if o.optimizer != "adam" or o.optimizer_cpu_offload:
        return "engine megatron_fsdp: resume is modelled for Adam on the GPU only"
    if FUSED_ADAM_MAKES_WHOLE_STATES(run.implementation) and not FUSED_ADAM_KNOWS_DTENSORS(run.implementation):
        return (
            "engine megatron_fsdp: resume is not modelled with Transformer Engine 2.10 and 2.11, whose FusedAdam makes "
            "states of whole parameters"
        )
    if o.use_precision_aware_optimizer and "fp8" in (o.exp_avg_dtype, o.exp_avg_sq_dtype):
        return "engine megatron_fsdp: resume of moments in fp8 is not modelled"
    return None


def refusal(run: RunSpec) -> str | None:
    """Why Transformer Engine cannot load the moments of this run, and what to change; None where it can.

    It scales moments of fp16 by their largest value (``fused_adam.py: FusedAdam._apply_scale``), which those have not
    whose parameter has nothing on this rank.
    """
    o = run.optimizer
    scaled = o.use_precision_aware_optimizer and "fp16" in (o.exp_avg_dtype, o.exp_avg_sq_dtype)
    if not (scaled and run.checkpoint.resumes_optimizer and o.optimizer == "adam"):
        return None
    return (
        "resume of fp16 moments fails in Transformer Engine under Megatron-FSDP (the largest value of an empty shard); "
        "set exp_avg_dtype and exp_avg_sq_dtype to bf16 or fp32"
    )


def resuming(run: RunSpec, stage: int) -> tuple[Amount, ...] | None:
    """What is alive at the highest moment of a resume; None if it is not modelled. Raises SpecError."""
    ready = built(run, stage)
    if ready is None or why_not_resumed(run) is not None or refusal(run) is not None:
        return None
    if not run.checkpoint.resumes_optimizer:
        return ready
    elements = _elements(run, stage)
    moments = [(s.state, s.width) for s in fsdp_states(run) if s.state in _MOMENTS]
    states = elements * sum(_held_widths(run))
    parameters = 4 if has_main_buffers(run) else DTYPE_BYTES[run.precision.params_dtype]
    zeros = exactly("zeros for gradients", parameters * elements, Provenance.FORMULA, _DUMMY)
    stepped = 4 * elements * sum(state in copied_states(run) for state, _ in moments)
    first = (
        exactly("states of optimizers", states, Provenance.FORMULA, _DUMMY), zeros,
        exactly("fp32 copies of states in the step", stepped, Provenance.FORMULA, "TE fused_adam.py: FusedAdam.step"),
    )
    cast = parameters * elements * sum(width != parameters for width in _held_widths(run))
    # Of one parameter also its new moments, and an fp32 copy.
    narrow = any(width != 4 for _, width in moments)
    one = _largest(run, stage) * (4 + sum(width for _, width in moments)) if narrow else 0
    least = max(states, cast)
    again = Amount("states made again, or cast to fp32", least, least + one, Provenance.FORMULA, _ADAM)
    then = (
        exactly("states that the state dict refers to", states, Provenance.FORMULA, _ADAM), again,
        *([zeros] if run.optimizer.use_precision_aware_optimizer else []),
    )
    highest = max((first, then), key=lambda amounts: total(amounts).most)
    return (*ready, *(a for a in highest if a.most))


def _held_widths(run: RunSpec) -> list[int]:
    """Bytes of an element of each state that FusedAdam holds."""
    own = (*_MOMENTS, State.SECOND_MAIN_PARAMETERS if has_main_buffers(run) else State.MAIN_PARAMETERS)
    return [s.width for s in fsdp_states(run) if s.state in own]


def _elements(run: RunSpec, stage: int) -> int:
    """Elements of main parameters on a rank."""
    width = next((s.width for s in fsdp_states(run) if s.state is State.MAIN_PARAMETERS), 1)
    lines = (c for c in stage_parts(run, stage).persistent if c.state is State.MAIN_PARAMETERS)
    return sum(c.bytes for c in lines if c.role is Role.OPTIMIZER) // width


def _largest(run: RunSpec, stage: int) -> int:
    """Elements of a rank's largest part of one parameter, at most: of a bucket's."""
    sharding = Sharding(run)
    return max((b.size // sharding.ranks("optim", b.experts) for b in buckets_of(run, stage)), default=0)


def host_of_saving(run: RunSpec, stage: int) -> tuple[Amount, ...] | None:
    """Bytes in the host memory of one rank while it saves: all that it writes if another process does
    (``FileSystemWriterAsync``), else one tensor and what is copied ahead of it. Raises SpecError."""
    if built(run, stage) is None or why_not_resumed(run) is not None:
        return None
    elements, moments = _elements(run, stage), sum(_held_widths(run))
    parameters = 4 if has_main_buffers(run) else DTYPE_BYTES[run.precision.params_dtype]
    if run.checkpoint.async_save:
        return (
            exactly("main parameters", parameters * elements, Provenance.FORMULA,
                    "filesystem_async.py: preload_tensors"),
            exactly("optimizer states", moments * elements * run.checkpoint.save_optim, Provenance.FORMULA,
                    "filesystem_async.py: preload_tensors"),
        )  # fmt: skip
    most = 4 * _largest(run, stage) + _COPIED_AHEAD
    return (Amount("one tensor, and what is copied ahead", min(most, _COPIED_AHEAD), most, Provenance.FORMULA,
                   _STREAMED),)  # fmt: skip
