"""The states of every optimizer: which there are, over which parameters, and how wide.

One table for all who ask: what an engine keeps, what the allocator adds to it, what is not there before the first step.

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
    """Of which parameters a state is kept."""

    ALL = "all"
    #: Matrices but embedding and output layer, and all others (``muon.py: get_megatron_muon_optimizer``).
    MATRICES = "matrices"
    REST = "rest"


class OptimizerState(NamedTuple):
    """One tensor a parameter (or shard of one)."""

    state: State
    #: Bytes an element.
    width: int
    over: Over = Over.ALL
    #: Share of it that stays on the GPU.
    on_gpu: float = 1.0

    @property
    def name(self) -> str:
        return "Muon momentum" if self.over is Over.MATRICES else self.state.value

    @property
    def provenance(self) -> Provenance:
        """Counted, but for an optimizer of which only a part is offloaded.

        ``HybridDeviceOptimizer._get_sub_optimizer_param_groups`` sends whole parameters (a rank's shards of them), in
        the order of the buffers, until their elements make the fraction. What stays is thus at most (1 - fraction) of
        the shard on every rank, the number counted here, and above that less the largest parameter's shard: which
        parameters a data-parallel rank owns decides where between the two.
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
    # FusedAdam copies fp32 parameters too (``FusedAdam.initialize_state``); Megatron itself copies 16-bit ones alone.
    if half or (o.fused_main_parameters and not o.optimizer_cpu_offload):
        # Megatron's own main parameters are what ``HybridDeviceOptimizer`` is handed, copies to the host and copies
        # back; only a precision-aware optimizer hands it the bf16 weights (``distrib_optimizer.py:
        # _build_model_and_main_param_groups``).
        stays = 1.0 if not o.fused_main_parameters else on_gpu
        out.append(OptimizerState(State.MAIN_PARAMETERS, _main_width(run), on_gpu=stays))
    # The part of a HybridDeviceOptimizer that stays on the GPU has an Adam of default dtypes.
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
    return tuple(out)


def _main_width(run: RunSpec) -> int:
    """Bytes of one element of the optimizer's own copy of the parameters."""
    o = run.optimizer
    # The part of a HybridDeviceOptimizer that stays on the GPU has fp32 copies.
    if not o.fused_main_parameters or o.optimizer_cpu_offload:
        return 4
    # The bf16 weight is the upper half of the fp32 main parameter; only the lower 16 bits are kept.
    if o.store_param_remainders and o.main_params_dtype == "fp32" and run.precision.params_dtype == "bf16":
        return 2
    return DTYPE_BYTES[o.main_params_dtype]


def keeps_fp32_gradient_copies(run: RunSpec) -> bool:
    """Half-precision gradient buffers are cast to fp32 for the optimizer, and the copies outlive the step.

    Source: ``optimizer/optimizer.py: Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads`` and
    ``distrib_optimizer.py`` (the same name); a fused precision-aware optimizer reads the buffers themselves.
    """
    return gradient_width(run) == 2 and not run.optimizer.fused_main_parameters and not run.peft.freezes


def copied_states(run: RunSpec) -> frozenset[State]:
    """The states of which a step has fp32 copies, of all parameters that it updates together.

    Source: TE ``optimizers/fused_adam.py: FusedAdam.step, get_unscaled_state``; main parameters that are kept as the
    lower halves of fp32 ones are used as they are.
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
    """Bytes of those copies on one rank, where a stage's ``states`` are ``kept``. Experts have an optimizer of their
    own, which steps after the other one (``optimizer/__init__.py: get_megatron_optimizer``)."""
    copied = copied_states(run)
    widths = {s.state: s.width for s in states if s.state in copied}
    of_kind = {False: 0, True: 0}
    for line, nbytes in kept:
        if line.state in widths:
            of_kind[line.experts] += 4 * (nbytes // widths[line.state])
    most: int = largest(*of_kind.values())
    return most
