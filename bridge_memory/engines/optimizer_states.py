"""The states of megatron-core's optimizers: which exist, for which parameters, and their bytes per element.

The only table of them: engines, the allocator's remainders and the first step all use it.

Source: megatron-core ``optimizer/{optimizer,distrib_optimizer,muon}.py``, ``optimizer/cpu_offloading/
hybrid_optimizer.py``; TE ``optimizers/fused_adam.py``.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from bridge_memory.components import Provenance, State
from bridge_memory.engines.engine import Line
from bridge_memory.releases import BF16_MOMENTS_UPDATED_IN_PLACE
from bridge_memory.spec import DTYPE_BYTES, RunSpec
from bridge_memory.tapes.symbolic import largest


class Over(Enum):
    """The parameters that have a state."""

    ALL = "all"
    #: Matrices except embedding and output layer; REST: all others (``muon.py: get_megatron_muon_optimizer``).
    MATRICES = "matrices"
    REST = "rest"


class OptimizerState(NamedTuple):
    """One optimizer state: one tensor per parameter (or per shard of a parameter)."""

    state: State
    #: Bytes per element.
    width: int
    over: Over = Over.ALL
    #: Fraction of it that stays on the GPU.
    on_gpu: float = 1.0

    @property
    def name(self) -> str:
        return "Muon momentum" if self.over is Over.MATRICES else self.state.value

    @property
    def provenance(self) -> Provenance:
        """Exact, except for a partly offloaded optimizer.

        ``HybridDeviceOptimizer._get_sub_optimizer_param_groups`` offloads whole parameters (a rank's shards of them),
        in the order of the buffers, until their elements reach the fraction. So at most (1 - fraction) of the shard
        stays on every rank, which is counted here, and at least that less the largest parameter's shard; which it is
        depends on the parameters that a data-parallel rank owns.
        """
        return Provenance.FORMULA if 0 < self.on_gpu < 1 else Provenance.EXACT


def gradient_width(run: RunSpec) -> int:
    """Bytes of one element of a gradient buffer."""
    width = DTYPE_BYTES[run.precision.params_dtype]
    return 4 if run.data_parallel.grad_reduce_in_fp32 or width != 2 else width


def optimizer_states(run: RunSpec) -> tuple[OptimizerState, ...]:
    """The states of ``run``'s optimizer, main parameters first."""
    o = run.optimizer
    half = DTYPE_BYTES[run.precision.params_dtype] == 2
    on_gpu = 1.0 - o.optimizer_offload_fraction if o.optimizer_cpu_offload else 1.0
    out = []
    # FusedAdam copies fp32 parameters too (``FusedAdam.initialize_state``); Megatron itself copies only 16-bit ones.
    if half or (o.fused_main_parameters and not o.optimizer_cpu_offload):
        # ``HybridDeviceOptimizer`` gets Megatron's main parameters, which it copies to the host and back, so that they
        # stay on the GPU; only with a precision-aware optimizer it gets the bf16 weights (``distrib_optimizer.py:
        # _build_model_and_main_param_groups``).
        stays = 1.0 if not o.fused_main_parameters else on_gpu
        out.append(OptimizerState(State.MAIN_PARAMETERS, _main_width(run), on_gpu=stays))
    # The part of a HybridDeviceOptimizer that stays on the GPU uses an Adam with default dtypes.
    chosen = o.use_precision_aware_optimizer and not o.optimizer_cpu_offload
    first = DTYPE_BYTES[o.exp_avg_dtype] if chosen else 4
    second = DTYPE_BYTES[o.exp_avg_sq_dtype] if chosen else 4
    over = Over.ALL
    if o.optimizer == "sgd":
        if o.sgd_momentum:
            out.append(OptimizerState(State.MOMENTUM, 4, on_gpu=on_gpu))
        return tuple(out)
    if o.optimizer == "muon":
        out.append(OptimizerState(State.MOMENTUM, 4, Over.MATRICES, on_gpu))
        over, first, second = Over.REST, 4, 4
    out += [
        OptimizerState(State.EXP_AVG, first, over, on_gpu), OptimizerState(State.EXP_AVG_SQ, second, over, on_gpu),
    ]
    if half and o.optimizer_cpu_offload and o.fused_main_parameters and gradient_width(run) == 2:
        # Its fp32 parameters on the GPU are no parameters that ``zero_grad`` knows: their gradients stay
        # (``hybrid_optimizer.py: HybridDeviceOptimizer._set_sub_optimizer_grads``). Of fp32 buffers they are views.
        out.append(OptimizerState(State.FP32_GRADIENTS, 4, on_gpu=on_gpu))
    return tuple(out)


def _main_width(run: RunSpec) -> int:
    """Bytes per element of the optimizer's main parameters."""
    o = run.optimizer
    # The part of a HybridDeviceOptimizer that stays on the GPU has fp32 copies.
    if not o.fused_main_parameters or o.optimizer_cpu_offload:
        return 4
    # The bf16 weight is the upper half of the fp32 main parameter; only the lower 16 bits are kept.
    if o.store_param_remainders and o.main_params_dtype == "fp32" and run.precision.params_dtype == "bf16":
        return 2
    return DTYPE_BYTES[o.main_params_dtype]


def keeps_fp32_gradient_copies(run: RunSpec) -> bool:
    """Whether half-precision gradient buffers are cast to fp32 for the optimizer; these copies outlive the step.

    Source: ``optimizer/optimizer.py: Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads`` and
    ``distrib_optimizer.py`` (the same name); a fused precision-aware optimizer reads the buffers directly.
    """
    return gradient_width(run) == 2 and not run.optimizer.fused_main_parameters and not run.peft.freezes


def copied_states(run: RunSpec) -> frozenset[State]:
    """The states that a step copies to fp32, for all parameters that it updates together.

    Source: TE ``optimizers/fused_adam.py: FusedAdam.step, get_unscaled_state``; main parameters that are stored as the
    lower halves of fp32 ones are not copied.
    """
    o = run.optimizer
    if not o.use_precision_aware_optimizer or o.optimizer_cpu_offload or o.optimizer != "adam":
        return frozenset()
    found = set()
    if o.fused_main_parameters and o.main_params_dtype != "fp32":
        found.add(State.MAIN_PARAMETERS)
    moments = (o.exp_avg_dtype, o.exp_avg_sq_dtype)
    if not (moments == ("bf16", "bf16") and BF16_MOMENTS_UPDATED_IN_PLACE(run.implementation)):
        found |= {s for s, dtype in zip((State.EXP_AVG, State.EXP_AVG_SQ), moments, strict=True) if dtype != "fp32"}
    return frozenset(found)


def copies_in_step(
    run: RunSpec, states: Iterable[OptimizerState], kept: Iterable[tuple[Line, int]]
) -> int:
    """Bytes of those copies on one rank; ``kept``: the lines of the stage's ``states`` and their bytes. Experts have a
    separate optimizer, which steps after the other one (``optimizer/__init__.py: get_megatron_optimizer``)."""
    copied = copied_states(run)
    widths = {s.state: s.width for s in states if s.state in copied}
    of_kind = {False: 0, True: 0}
    for line, nbytes in kept:
        if line.state in widths:
            of_kind[line.experts] += 4 * (nbytes // widths[line.state])
    most: int = largest(*of_kind.values())
    return most
