"""Loading into a built Megatron job on one rank: from Hugging Face, weights of a checkpoint, or a whole resume.

Resuming has three moments (megatron-core ``optimizer/distrib_optimizer.py``; TE ``optimizers/fused_adam.py``):

1. ``sharded_state_dict(is_loading=True)`` allocates empty states and gives them to ``FusedAdam.load_state_dict``, which
   allocates its own beside them; then every state that is not fp32 becomes a new fp32 tensor (``get_unscaled_state``),
   which the checkpoint fills and which stays until loading is over.
2. ``dist_checkpointing.load`` fills tensors in place. What was saved in halves (a SwiGLU's first weight) is put
   together in a new tensor, and all of these stay too (``mapping.py: apply_factory_merges``).
3. ``load_state_dict`` gives the states to ``FusedAdam.load_state_dict`` again: unscaled anew, cast to the dtype of the
   parameter, and copied into states that are new again, while the state dict refers to what it has filled.

Megatron Bridge from 0.6 has FusedAdam take fp32 moments as they are in 1 and in 3, so that there is no second copy
(``releases.BRIDGE_ADOPTS_OPTIM_STATES``); Megatron-LM does not (``CheckpointSpec.adopt_optim_states``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from bridge_memory.components import Component, Provenance, Role, State
from bridge_memory.engines.megatron_ddp import experts_apart
from bridge_memory.engines.optimizer_states import optimizer_states
from bridge_memory.estimation import stage_parts
from bridge_memory.job.host import sharded_elements
from bridge_memory.job.megatron import loading_fsdp
from bridge_memory.job.megatron.building import built, copied_one_by_one, stage_parameters
from bridge_memory.outside.amount import Amount, exactly, total
from bridge_memory.releases import WHOLE_STATES_SENT_TO_DEVICE
from bridge_memory.spec import DTYPE_BYTES, LayerSpec, MambaSpec, RunSpec
from bridge_memory.spec.canonical import adopts_optim_states
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


_SHARDED = "distrib_optimizer.py: sharded_state_dict(is_loading=True)"
_ADAM = "TE fused_adam.py: FusedAdam.load_state_dict"
_UNSCALED = "TE fused_adam.py: FusedAdam.get_unscaled_state"
_DUMMY = "hybrid_optimizer.py: HybridDeviceOptimizer.dummy_step"
_ANEW = "hybrid_optimizer.py: post_load_state_dict_hook"
_SENT = "hybrid_optimizer.py: HybridDeviceOptimizer._move_new_state_to_right_device"
_MERGED = "dist_checkpointing/mapping.py: apply_factory_merges"
_DEQUANTIZED = "dist_checkpointing/serialization.py: load, stream_ckpt_dequant"
_EXCHANGED = "dist_checkpointing/exchange_utils.py: exchange_loaded_tensors_broadcast"
_REFERRED = "states that the state dict refers to"
#: Releases without and with ``stream_ckpt_dequant``; between them it is not known.
_UPFRONT, _STREAMS = (0, 16), (0, 19)


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
    o, fused = run.optimizer, is_fused(run)
    chosen = o.use_precision_aware_optimizer and not o.optimizer_cpu_offload
    dtypes = {
        State.EXP_AVG: o.exp_avg_dtype if chosen else "fp32", State.EXP_AVG_SQ: o.exp_avg_sq_dtype if chosen else "fp32"
    }
    widths = {s.state: s.width for s in optimizer_states(run)}
    if fused:
        dtypes[State.MAIN_PARAMETERS] = "int16" if _remainders(run) else o.main_params_dtype
    lines = [c for c in stage_parts(run, stage).persistent if c.role is Role.OPTIMIZER and c.state in dtypes]
    found = []
    for experts in (False, True) if experts_apart(run) else (None,):
        own = [c for c in lines if experts is None or c.experts is experts]
        states = tuple(Tensors(s, _elements(own, s, widths), dtype) for s, dtype in dtypes.items())
        if any(s.elements for s in states):
            updated = run.precision.params_dtype if fused else "fp32"
            found.append(HeldBy(bool(experts), states, updated, fused))
    return found


def is_fused(run: RunSpec) -> bool:
    """Whether FusedAdam holds the main parameters; beside an optimizer in host memory it does not."""
    return run.optimizer.fused_main_parameters and not run.optimizer.optimizer_cpu_offload


def _elements(lines: Sequence[Component], state: State, widths: dict[State, int]) -> int:
    return sum(c.bytes for c in lines if c.state is state) // widths[state] if state in widths else 0


def why_not_resumed(run: RunSpec) -> str | None:
    """Why save and resume are not modelled, in addition to ``building.why_not``; None where it is."""
    o = run.optimizer
    if run.data_parallel.fsdp:
        return loading_fsdp.why_not_resumed(run)
    if (reason := why_not_read(run)) is not None:
        return reason
    if not run.checkpoint.resumes_optimizer:
        return None
    if o.optimizer != "adam":
        return f"optimizer {o.optimizer}: save and resume are modelled for Adam only"
    if o.optimizer_cpu_offload and not _in_place(run) and not WHOLE_STATES_SENT_TO_DEVICE(run.implementation):
        return (
            f"optimizer_cpu_offload with dist_ckpt_optim_fully_reshardable before {WHOLE_STATES_SENT_TO_DEVICE}: save "
            "and resume are not modelled"
        )
    return None


def why_not_read(run: RunSpec) -> str | None:
    """Why loading from a checkpoint is not modelled, in addition to ``building.why_not``; None where it is."""
    found = run.checkpoint.ckpt_format
    return None if found == "torch_dist" else f"ckpt_format ({found}): save and resume are modelled for torch_dist only"


def refusal(run: RunSpec) -> str | None:
    """Why megatron-core cannot resume from the checkpoints of this run, and what to change; None where it can.

    ``distrib_optimizer.py: _set_main_param_and_optimizer_states`` hands every state to TE's ``FusedAdam.
    set_scaled_state``: from 0.14 to 0.16 of dp_reshardable also ``padding``, which is no tensor; and of
    fully_reshardable main parameters in fp32, where TE asserts 16-bit remainders. In host memory: ``hybrid_optimizer.
    py: _update_fp32_params_by_new_state``.
    """
    held, c = run.optimizer, run.checkpoint
    if run.data_parallel.fsdp:
        return loading_fsdp.refusal(run)
    if held.optimizer_cpu_offload and c.resumes_optimizer and held.optimizer == "adam":
        if held.fused_main_parameters and DTYPE_BYTES[run.precision.params_dtype] == 2:
            return None
        return (
            "resume of an optimizer in host memory fails in megatron-core: it looks for fp32 copies of parameters that "
            "are fp32 themselves (KeyError); set use_precision_aware_optimizer"
        )
    if not (held.fused_main_parameters and _whole_or_buckets(run) and c.resumes_optimizer):
        return None
    if c.dist_ckpt_optim_fully_reshardable:
        if _remainders(run):
            return (
                "resume fails in megatron-core: fully reshardable states of main parameters are fp32, where "
                "store_param_remainders expects 16 bits; set store_param_remainders to False"
            )
        return None
    core = run.implementation.megatron_core
    if core is not None and (0, 14) <= core <= (0, 16):
        return (
            "resume of a precision-aware optimizer fails in megatron-core 0.14 to 0.16 (AttributeError); set "
            "dist_ckpt_optim_fully_reshardable, and store_param_remainders to False"
        )
    return None


def _whole_or_buckets(run: RunSpec) -> bool:
    """Whether the distributed optimizer's own functions load the states."""
    return run.data_parallel.use_distributed_optimizer and run.optimizer.optimizer == "adam"


def _remainders(run: RunSpec) -> bool:
    """Whether FusedAdam's main parameters are the 16 bits that bf16 weights lack."""
    o = run.optimizer
    return o.store_param_remainders and o.main_params_dtype == "fp32" and run.precision.params_dtype == "bf16"


def loading(run: RunSpec, stage: int, how: How) -> tuple[Amount, ...] | None:
    """What is alive at the highest moment of loading; None if it is not modelled, or fails (``refusal``).

    A resume is from a checkpoint that was saved with the same options. Raises SpecError: there is no such stage.
    """
    ready = built(run, stage)
    if ready is None:
        return None
    if how is How.NONE:
        return ready
    if how is How.HUGGING_FACE:
        return (*ready, *_imported(run, stage))
    if run.data_parallel.fsdp:
        return loading_fsdp.resuming(run, stage) if how is How.RESUME else ready
    if why_not_read(run) is not None:
        return None
    weights, received = _loaded_weights(run, stage), exchanged(run, stage)
    if how is How.TORCH_DIST or not run.checkpoint.resumes_optimizer:
        return (*ready, *_highest([weights, received]))
    if why_not_resumed(run) is not None or refusal(run) is not None:
        return None
    if run.optimizer.optimizer_cpu_offload:
        return (*ready, *_highest([*_resuming_on_host(run, stage, weights), (*_new_states(run, stage), *received)]))
    last = [(*weights, *moment) for moment in _resuming(run, stage)]
    return (*ready, *_highest([*last, (*_in_dict(run, stage), *received)]))


def _highest(moments: Sequence[tuple[Amount, ...]]) -> tuple[Amount, ...]:
    """The moment that can be the highest; its widest amount is at least what makes it as high as any is for certain."""
    highest = max(moments, key=lambda amounts: total(amounts).most, default=())
    lacks = max((total(amounts).least for amounts in moments), default=0) - total(highest).least
    if not lacks:
        return highest
    widest = max(highest, key=lambda amount: amount.most - amount.least)
    raised = widest._replace(least=min(widest.least + lacks, widest.most))
    return tuple(raised if amount is widest else amount for amount in highest)


def _in_place(run: RunSpec) -> bool:
    """Whether a checkpoint fills states where they are; else in host memory."""
    return not (run.data_parallel.use_distributed_optimizer and run.checkpoint.dist_ckpt_optim_fully_reshardable)


def _in_dict(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """States of optimizers while tensors are read."""
    held = optimizers(run, stage)
    unscaled = sum(h.unscaled_in_dict for h in held) if _in_place(run) else 0
    found = (
        exactly("states of optimizers", sum(h.nbytes for h in held), Provenance.FORMULA, _ADAM),
        exactly("fp32 states in the state dict", unscaled, Provenance.FORMULA, _UNSCALED),
    )
    return tuple(a for a in found if a.most)


def _resuming(run: RunSpec, stage: int) -> Iterator[tuple[Amount, ...]]:
    """The moments of a resume after all is read: what is alive beside the built model.

    Merged weights count in the first moment too, which is before they are made: the third is always higher.
    """
    held, adopts = optimizers(run, stage), adopts_optim_states(run)
    distributed, in_place = run.data_parallel.use_distributed_optimizer, _in_place(run)
    merged = 0 if distributed else sum(4 * 3 * p.numel for p in _in_parts(run, stage))
    for at, one in enumerate(held):
        others = [h for h in held if h is not one]
        unscaled = sum(h.unscaled_in_dict for h in held) if in_place else 0
        # Of optimizers before this one what is in the state dict is alive beside the new states.
        before = sum(h.own_in_dict for h in held[:at] if in_place and not adopts)
        kept = sum(h.nbytes for h in others)
        again = sum(s.unscaled for s in one.states)
        cast = sum(s.cast(one.parameters) for s in one.states)
        # In the one of the checkpoint, or in FusedAdam's own, which has fp32 copies of the rest.
        in_dict = one.own_in_dict if in_place else sum(s.nbytes for s in one.states if not s.unscaled)
        common = (
            exactly("states of optimizers", kept + before, Provenance.FORMULA, _ADAM),
            exactly("fp32 states in the state dict", unscaled, Provenance.FORMULA, _UNSCALED),
            exactly("states in the state dict, put together", merged, Provenance.FORMULA, _MERGED),
            exactly("fp32 copies of states", again, Provenance.FORMULA, _UNSCALED),
        )
        own = exactly("states", one.nbytes, Provenance.FORMULA, _ADAM)
        referred = exactly(_REFERRED, 0 if adopts else in_dict, Provenance.FORMULA, _ADAM)
        for more in (exactly("states in the dtype of parameters", cast, Provenance.FORMULA, _ADAM), referred):
            yield tuple(a for a in (*common, own, more) if a.most)


def _resuming_on_host(run: RunSpec, stage: int, weights: tuple[Amount, ...]) -> Iterator[tuple[Amount, ...]]:
    """The moments of a resume of an optimizer that is partly in host memory: a step with random gradients, which makes
    its states; and its second making anew, each of which has new fp32 parameters and keeps those before in its states.
    Gradients of the first ones stay too. Whole states then come from host memory as new tensors, main parameters too,
    while the state dict keeps the ones before."""
    width, own = DTYPE_BYTES[run.precision.params_dtype], sharded_elements(run, stage)
    states = _new_states(run, stage)
    yield (*states, exactly("random gradients", width * own, Provenance.FORMULA, _DUMMY))
    on_gpu = sum(c.bytes for c in stage_parts(run, stage).persistent if c.state is State.MAIN_PARAMETERS)
    again = exactly("main parameters of optimizers made anew", 2 * on_gpu, Provenance.FORMULA, _ANEW)
    yield tuple(a for a in (*weights, *states, again, copied_one_by_one(run, stage)) if a.most)
    if not _in_place(run):
        first = exactly("main parameters of the optimizer before", on_gpu, Provenance.FORMULA, _ANEW)
        sent = exactly("states from host memory", total(states[:1]).most + on_gpu, Provenance.FORMULA, _SENT)
        yield tuple(a for a in (*weights, *states, first, sent) if a.most)


def _new_states(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """What such a step leaves on the device."""
    moments = sum(
        c.bytes for c in stage_parts(run, stage).persistent if c.state in (State.EXP_AVG, State.EXP_AVG_SQ)
    )
    found = (
        exactly("states of optimizers", moments, Provenance.FORMULA, _ADAM),
        exactly("fp32 gradients", moments // 2, Provenance.FORMULA, _DUMMY),
    )
    return tuple(a for a in found if a.most)


#: Parameters that are saved in parts (``mlp.py: apply_swiglu_sharded_factory``, ``experts.py: TEGroupedMLP``,
#: ``ssm/utils.py: _split_tensor_factory``), and those of experts in one tensor, which are saved transposed.
_GATED = re.compile(r"(^|\.)linear_fc1\.(weight|bias)\d*$")
_MIXER = re.compile(r"(^|\.)(in_proj\.weight|conv1d\.(weight|bias))$")
#: Parameters that every tensor-parallel rank has whole: norms, routers, gates and MLA's down projections.
_REPLICATED = re.compile(
    r"norm\.(weight|bias)$|layer_norm_(weight|bias)$|router\.|gate_weight$|_down_proj\.(weight|bias)$"
)
_TRANSPOSED = re.compile(r"(^|\.)experts\.weight[12]$")


def _in_parts(run: RunSpec, stage: int) -> Iterator[Parameter]:
    """The parameters that loading puts together in new tensors."""
    gated = any(isinstance(x.ffn, (MLPSpec, MoESpec)) and x.ffn.gated for x in _layers(run))
    mixers = any(isinstance(x.mixer, (MambaSpec, GatedDeltaNetSpec)) for x in _layers(run))
    for chunk in stage_parameters(run, stage):
        for p in chunk:
            of_gated, of_mixer, _ = _kinds(p.name)
            transposed = _is_transposed(run, p)
            if (gated and of_gated) or (mixers and of_mixer) or transposed:
                yield p


def _is_transposed(run: RunSpec, p: Parameter) -> bool:
    """Whether it is a part of one tensor of a layer's experts."""
    _, _, transposed = _kinds(p.name)
    return transposed or (run.checkpoint.experts_in_one_tensor and p.expert and len(p.shape) > 1)


@lru_cache(maxsize=1 << 14)  # the names of a stage of 64 experts in each of 15 layers
def _kinds(name: str) -> tuple[bool, bool, bool]:
    return bool(_GATED.search(name)), bool(_MIXER.search(name)), bool(_TRANSPOSED.search(name))


def _layers(run: RunSpec) -> Iterator[LayerSpec]:
    yield from run.model.layers
    if run.model.mtp_layer is not None:
        yield run.model.mtp_layer


def _loaded_weights(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """What a checkpoint's weights need beside the model, in which they are otherwise filled."""
    width = DTYPE_BYTES[run.precision.params_dtype]
    of = list(_in_parts(run, stage))
    merged = sum(width * p.numel for p in of)
    transposed = sum(width * p.numel for p in of if _is_transposed(run, p))
    found = [
        exactly("weights saved in parts, put together", merged, Provenance.FORMULA, _MERGED),
        exactly("weights of experts, transposed", transposed, Provenance.FORMULA, "experts.py: GroupedMLP"),
    ]
    if run.precision.quantized_param and run.implementation.te:
        # One tensor at a time, or all of them before the first is filled.
        quantized = [p.numel for chunk in stage_parameters(run, stage) for p in chunk if p.is_gemm]
        one, whole = width * max(quantized, default=0), width * sum(quantized)
        core, streams = run.implementation.megatron_core, run.checkpoint.stream_ckpt_dequant
        tensorwise = run.precision.recipe == "tensorwise"  # Megatron-LM switches streaming off, Bridge does not
        if (core is not None and core <= _UPFRONT) or not (streams or tensorwise) or _divides_load(run):
            one = whole
        elif core is not None and core >= _STREAMS and not tensorwise:
            whole = one
        found.append(Amount("dequantized weights", one, whole, Provenance.FORMULA, _DEQUANTIZED))
    return tuple(a for a in found if a.most)


def _divides_load(run: RunSpec) -> bool:
    return run.checkpoint.ckpt_fully_parallel_load and run.parallel.data_parallel_size * run.parallel.cp > 1


def exchanged(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """What data-parallel ranks broadcast to each other that is not filled in place: tensors of other ranks' experts,
    which every rank receives and drops, one or all of them before the first has arrived; states that are read in host
    memory pass through the GPU one by one."""
    if not _divides_load(run):
        return ()
    resumes = run.checkpoint.resumes_optimizer and run.optimizer.optimizer == "adam"
    width = DTYPE_BYTES[run.precision.params_dtype]
    parameters = [p for chunk in stage_parameters(run, stage) for p in chunk]
    whole_states = resumes and not _in_place(run)
    replicated = resumes and not run.data_parallel.use_distributed_optimizer
    one = 4 * max((p.numel for p in parameters), default=0) if whole_states else 0
    experts, least = [p.numel for p in parameters if p.expert], 0
    halved = {p.name for p in _in_parts(run, stage) if _GATED.search(p.name)}  # a tensor each
    others = _others_experts(run)
    if others and experts:
        largest = max(p.numel // (1 + (p.name in halved)) for p in parameters if p.expert)
        least = max(width, 4 * (whole_states or replicated)) * largest
    dropped = others * sum(experts) * (width + 12 * (whole_states or replicated))
    found = Amount("tensors that data-parallel ranks exchange", max(one, least), one + dropped, Provenance.FORMULA,
                   _EXCHANGED)  # fmt: skip
    return (found,) if found.most else ()


def _others_experts(run: RunSpec) -> int:
    """Expert-parallel ranks beside this one in its data-parallel group, if each has a copy there (tensors that one rank
    alone needs are not exchanged)."""
    p = run.parallel
    group = p.data_parallel_size * p.cp
    kinds = {(rank % p.etp, rank // p.etp % p.ep) for rank in range(0, group * p.tp, p.tp)}
    return len(kinds) - 1 if len(kinds) < group else 0


def _imported(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """Tensor by tensor from host memory. The first tensor-parallel rank holds the shards of all ranks and its own,
    beside what it made of the tensor before; what ranks replicate is copied whole."""
    width, p = DTYPE_BYTES[run.precision.params_dtype], run.parallel
    if run.data_parallel.fsdp:  # into main parameters
        width = 4
    tied = run.model.share_embeddings_and_output_weights
    parameters = [
        (_import_key(at, one.name), one) for at, chunk in enumerate(stage_parameters(run, stage)) for one in chunk
        if not (tied and one.name.startswith("output_layer."))
    ]  # fmt: skip
    most = before = 0
    for _, one in sorted(parameters, key=lambda pair: pair[0]):
        group = p.etp if one.expert else p.tp
        ranks = group if one.sharded else 1
        # Of a group of one, what could be divided is copied from the host into the parameter.
        nbytes = width * one.numel if group > 1 or _REPLICATED.search(one.name) else 0
        most, before = max(most, before + nbytes * (ranks + (ranks > 1))), nbytes
    if not most:
        return ()
    return (
        exactly(
            "one tensor's shards for all tensor-parallel ranks, and the tensor before", most, Provenance.FORMULA,
            "Bridge param_mapping.py: MegatronParamMapping.scatter_to_tp_ranks, ReplicatedMapping",
        ),
    )


def _import_key(chunk: int, name: str) -> tuple[int, int, int, str]:
    """Bridge imports by layer, then by expert, then by name, and first what is in no layer (``utils.py:
    extract_sort_key``)."""
    layer, expert = re.search(r"layers\.(\d+)", name), re.search(r"(?:(?:bias|weight)|local_experts\.)(\d+)", name)
    if layer is None:
        return -1, -1, -1, name
    return chunk, int(layer[1]), int(expert[1]) if expert else -1, name
