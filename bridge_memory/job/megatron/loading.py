"""Loading into a built Megatron job on one rank: from Hugging Face, weights of a checkpoint, or a whole resume.

Resuming has three moments (megatron-core ``optimizer/distrib_optimizer.py``; TE ``optimizers/fused_adam.py``):

1. ``sharded_state_dict(is_loading=True)`` allocates empty states and gives them to ``FusedAdam.load_state_dict``, which
   allocates its own beside them; then every state that is not fp32 becomes a new fp32 tensor (``get_unscaled_state``),
   which the checkpoint fills and which stays until loading is over.
2. ``dist_checkpointing.load`` fills tensors in place. What was saved in halves (a SwiGLU's first weight) is put
   together in a new tensor, and all of these stay too (``mapping.py: apply_factory_merges``).
3. ``load_state_dict`` gives the states to ``FusedAdam.load_state_dict`` again: unscaled anew, cast to the dtype of the
   parameter, and copied into states that are new again, while the state dict refers to what it has filled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import NamedTuple

from bridge_memory.components import Component, Provenance, Role, State
from bridge_memory.engines.megatron_ddp import experts_apart
from bridge_memory.engines.optimizer_states import optimizer_states
from bridge_memory.estimation import stage_parts
from bridge_memory.job.megatron.building import built, stage_parameters
from bridge_memory.outside.amount import Amount, exactly, total
from bridge_memory.spec import DTYPE_BYTES, LayerSpec, MambaSpec, RunSpec
from bridge_memory.spec.model import GatedDeltaNetSpec, MLPSpec, MoESpec
from bridge_memory.tapes.parameters import Parameter


class How(str, Enum):
    """What is loaded."""

    #: Nothing: random weights.
    NONE = "random weights"
    #: A Hugging Face checkpoint, with Megatron Bridge.
    HUGGING_FACE = "Hugging Face"
    #: Weights of a torch_dist checkpoint (``finetune``, ``pretrained_checkpoint``, ``no_load_optim``).
    TORCH_DIST = "torch_dist weights"
    #: Weights and optimizer of a torch_dist checkpoint.
    RESUME = "resume"


class Sharding(str, Enum):
    """How a checkpoint divides the distributed optimizer's state (``distrib_optim_sharding_type``)."""

    DP_RESHARDABLE = "dp_reshardable"
    FULLY_RESHARDABLE = "fully_reshardable"


_SHARDED = "distrib_optimizer.py: sharded_state_dict(is_loading=True)"
_ADAM = "TE fused_adam.py: FusedAdam.load_state_dict"
_UNSCALED = "TE fused_adam.py: FusedAdam.get_unscaled_state"
_MERGED = "dist_checkpointing/mapping.py: apply_factory_merges"


class Tensors(NamedTuple):
    """One state of one optimizer: elements on this rank, and its dtype."""

    state: State
    elements: int
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.elements * _width(self.dtype)

    @property
    def unscaled(self) -> int:
        """Bytes of the new fp32 tensor that stands for it in a state dict; 0 if it is itself in the state dict."""
        return 0 if self.dtype in ("fp32", "int16") else 4 * self.elements

    def cast(self, dtype: str) -> int:
        """Bytes of the copy that ``torch.optim.Optimizer.load_state_dict`` makes of it, unscaled, in the parameter's
        ``dtype``."""
        return 0 if dtype == "fp32" and self.dtype != "int16" else _width(dtype) * self.elements


def _width(dtype: str) -> int:
    return {"int16": 2, **DTYPE_BYTES}[dtype] if dtype != "fp8" else 1


class HeldBy(NamedTuple):
    """The states of one of the chained optimizers, and the dtype of the parameters that it updates."""

    experts: bool
    states: tuple[Tensors, ...]
    parameters: str
    #: FusedAdam has the main parameters too, and a state dict gets its states from ``get_unscaled_state``
    #: (``distrib_optimizer.py: _get_main_param_and_optimizer_states``); else they are in the state dict as they are.
    fused: bool

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.states)

    @property
    def unscaled_in_dict(self) -> int:
        """Bytes of new fp32 tensors in a state dict."""
        return sum(s.unscaled for s in self.states) if self.fused else 0

    @property
    def own_in_dict(self) -> int:
        """Bytes of states that are in a state dict themselves."""
        return sum(s.nbytes for s in self.states if not (self.fused and s.unscaled))


def optimizers(run: RunSpec, stage: int) -> list[HeldBy]:
    """The chained optimizers of a rank, with the states that FusedAdam holds: dense parameters, then experts."""
    o = run.optimizer
    chosen = o.use_precision_aware_optimizer
    dtypes = {
        State.EXP_AVG: o.exp_avg_dtype if chosen else "fp32", State.EXP_AVG_SQ: o.exp_avg_sq_dtype if chosen else "fp32"
    }
    widths = {s.state: s.width for s in optimizer_states(run)}
    if o.fused_main_parameters:
        remainders = o.store_param_remainders and o.main_params_dtype == "fp32" and run.precision.params_dtype == "bf16"
        dtypes[State.MAIN_PARAMETERS] = "int16" if remainders else o.main_params_dtype
    lines = [c for c in stage_parts(run, stage).persistent if c.role is Role.OPTIMIZER and c.state in dtypes]
    found = []
    for experts in (False, True) if experts_apart(run) else (None,):
        own = [c for c in lines if experts is None or c.experts is experts]
        states = tuple(Tensors(s, _elements(own, s, widths), dtype) for s, dtype in dtypes.items())
        if any(s.elements for s in states):
            updated = run.precision.params_dtype if o.fused_main_parameters else "fp32"
            found.append(HeldBy(bool(experts), states, updated, o.fused_main_parameters))
    return found


def _elements(lines: Sequence[Component], state: State, widths: dict[State, int]) -> int:
    return sum(c.bytes for c in lines if c.state is state) // widths[state] if state in widths else 0


def why_not_resumed(run: RunSpec) -> str | None:
    """Why save and resume are not modelled, in addition to ``building.why_not``; None where it is."""
    o = run.optimizer
    if o.optimizer != "adam":
        return f"optimizer {o.optimizer}: save and resume are modelled for Adam only"
    if o.optimizer_cpu_offload:
        return "optimizer_cpu_offload: save and resume are not modelled"
    return None


def loading(
    run: RunSpec, stage: int, how: How, *, sharding: Sharding = Sharding.DP_RESHARDABLE
) -> tuple[Amount, ...] | None:
    """What is alive at the highest moment of loading; None if it is not modelled.

    ``sharding``: how the checkpoint was saved, of a resume with the distributed optimizer. Raises SpecError: there is
    no such stage.
    """
    ready = built(run, stage)
    if ready is None:
        return None
    if how is How.NONE:
        return ready
    if how is How.HUGGING_FACE:
        return (*ready, *_imported(run, stage))
    ready = (*ready, *_loaded_weights(run, stage))
    if how is How.TORCH_DIST:
        return ready
    if why_not_resumed(run) is not None:
        return None
    return (*ready, *max(_resuming(run, stage, sharding), key=lambda amounts: total(amounts).most, default=()))


def _resuming(run: RunSpec, stage: int, sharding: Sharding) -> Iterator[tuple[Amount, ...]]:
    """The moments of a resume that can be the highest: what is alive beside the built model.

    Merged weights count in the first moment too, which is before they are made: the third is always higher.
    """
    held = optimizers(run, stage)
    distributed = run.data_parallel.use_distributed_optimizer
    in_place = not distributed or sharding is Sharding.DP_RESHARDABLE
    merged = 0 if distributed else sum(4 * 3 * p.numel for p in _in_parts(run, stage))
    for at, one in enumerate(held):
        others = [h for h in held if h is not one]
        unscaled = sum(h.unscaled_in_dict for h in held) if in_place else 0
        # Of optimizers before this one what is in the state dict is alive beside the new states.
        kept = sum(h.own_in_dict for h in held[:at] if in_place) + sum(h.nbytes for h in others)
        again = sum(s.unscaled for s in one.states)
        cast = sum(s.cast(one.parameters) for s in one.states)
        # In the one of the checkpoint, or in FusedAdam's own, which has fp32 copies of the rest.
        in_dict = one.own_in_dict if in_place else sum(s.nbytes for s in one.states if not s.unscaled)
        common = (
            exactly("states of optimizers", kept, Provenance.FORMULA, _ADAM),
            exactly("fp32 states in the state dict", unscaled, Provenance.FORMULA, _UNSCALED),
            exactly("states in the state dict, put together", merged, Provenance.FORMULA, _MERGED),
            exactly("fp32 copies of states", again, Provenance.FORMULA, _UNSCALED),
        )
        for parts in (
            (("states", one.nbytes), ("states in the dtype of parameters", cast)),
            (("states", one.nbytes), ("states that the state dict refers to", in_dict)),
        ):
            more = (exactly(name, n, Provenance.FORMULA, _ADAM) for name, n in parts)
            yield tuple(a for a in (*common, *more) if a.most)


#: Parameters that are saved in parts (``mlp.py: apply_swiglu_sharded_factory``, ``experts.py: TEGroupedMLP``,
#: ``ssm/utils.py: _split_tensor_factory``), and those of experts in one tensor, which are saved transposed.
_GATED = re.compile(r"(^|\.)linear_fc1\.(weight|bias)\d*$")
_MIXER = re.compile(r"(^|\.)(in_proj\.weight|conv1d\.(weight|bias))$")
_TRANSPOSED = re.compile(r"(^|\.)experts\.weight[12]$")


def _in_parts(run: RunSpec, stage: int) -> Iterator[Parameter]:
    """The parameters that loading puts together in new tensors."""
    gated = any(isinstance(x.ffn, (MLPSpec, MoESpec)) and x.ffn.gated for x in _layers(run))
    mixers = any(isinstance(x.mixer, (MambaSpec, GatedDeltaNetSpec)) for x in _layers(run))
    for chunk in stage_parameters(run, stage):
        for p in chunk:
            if (gated and _GATED.search(p.name)) or (mixers and _MIXER.search(p.name)) or _TRANSPOSED.search(p.name):
                yield p


def _layers(run: RunSpec) -> Iterator[LayerSpec]:
    yield from run.model.layers
    if run.model.mtp_layer is not None:
        yield run.model.mtp_layer


def _loaded_weights(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """What a checkpoint's weights need beside the model, in which they are otherwise filled."""
    width = DTYPE_BYTES[run.precision.params_dtype]
    of = list(_in_parts(run, stage))
    merged = sum(width * p.numel for p in of)
    transposed = sum(width * p.numel for p in of if _TRANSPOSED.search(p.name))
    found = [
        exactly("weights saved in parts, put together", merged, Provenance.FORMULA, _MERGED),
        exactly("weights of experts, transposed", transposed, Provenance.FORMULA, "experts.py: GroupedMLP"),
    ]
    if run.precision.quantized_param and run.implementation.te:
        # Since streaming (0.17 or later) one tensor at a time; before, all of them before the first is filled.
        quantized = [p.numel for chunk in stage_parameters(run, stage) for p in chunk if p.is_gemm]
        found.append(Amount(
            "dequantized weights", width * max(quantized, default=0), width * sum(quantized), Provenance.FORMULA,
            "dist_checkpointing/serialization.py: load, stream_ckpt_dequant",
        ))  # fmt: skip
    return tuple(a for a in found if a.most)


def _imported(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """Tensor by tensor from host memory. The first tensor-parallel rank holds the shards of all ranks and its own."""
    width = DTYPE_BYTES[run.precision.params_dtype]
    p = run.parallel
    most = 0
    for chunk in stage_parameters(run, stage):
        for parameter in chunk:
            ranks = (p.etp if parameter.expert else p.tp) if parameter.sharded else 1
            if (p.etp if parameter.expert else p.tp) > 1:
                most = max(most, width * parameter.numel * (ranks + (ranks > 1)))
    if not most:
        return ()
    return (
        exactly(
            "one tensor's shards for all tensor-parallel ranks", most, Provenance.FORMULA,
            "Bridge param_mapping.py: MegatronParamMapping.scatter_to_tp_ranks",
        ),
    )
