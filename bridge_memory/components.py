"""Component: one named part of a rank's memory, as engines, workspaces and estimates exchange it.

Code decides by the enums; names are for people.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

#: Bytes of a GiB.
GIB = 1 << 30
#: Bytes: smallest block of torch's caching allocator (``c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize``).
ALLOCATION_UNIT = 512


def allocated(nbytes: int) -> int:
    """Bytes that torch's allocator counts for a separate tensor: whole blocks (``CUDACachingAllocator: round_size``).
    """
    return -(-nbytes // ALLOCATION_UNIT) * ALLOCATION_UNIT


class _Word(str, Enum):
    """An enum whose members print as their values, as in JSON."""

    def __str__(self) -> str:
        return str(self.value)


class Provenance(_Word):
    """How bytes are known: counted from the config (exact), a formula of a known implementation, a constant fitted on
    measured runs, or an assumption (balanced routing)."""

    EXACT = "exact"
    FORMULA = "formula"
    MEASURED = "measured"
    ASSUMED = "assumed"


class Role(_Word):
    """What a component is in training; static = the first four."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    BUFFERS = "buffers"
    ACTIVATION = "activation"
    TRANSIENT = "transient"


STATIC_ROLES = (Role.WEIGHTS, Role.GRADIENTS, Role.OPTIMIZER, Role.BUFFERS)


class State(_Word):
    """Which copy of the parameters a component of model state is."""

    NONE = ""
    PARAMETERS = "parameters"
    FP8_COPIES = "fp8 weight copies"
    GRADIENTS = "gradients"
    MAIN_PARAMETERS = "main parameters"
    #: Of FusedAdam, beside an engine's.
    SECOND_MAIN_PARAMETERS = "main parameters of FusedAdam"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    MOMENTUM = "momentum"
    #: Of a 16-bit gradient, kept by an optimizer that is partly in host memory.
    FP32_GRADIENTS = "fp32 gradients"


#: Made by the optimizer's first step (torch.optim and TE FusedAdam: ``state`` is filled on the first ``step()``).
MADE_BY_FIRST_STEP = (
    State.EXP_AVG, State.EXP_AVG_SQ, State.MOMENTUM, State.FP32_GRADIENTS, State.SECOND_MAIN_PARAMETERS,
)  # fmt: skip


class Lifetime(_Word):
    """When it is allocated and freed."""

    #: From the construction of the model, or its wrapping in DDP, to the end of training.
    MODEL = "model"
    #: From the first forward or backward pass that needs it to the end of training.
    FIRST_PASS = "first pass"
    #: From the first optimizer step to the end of training.
    FIRST_STEP = "first step"
    #: From the backward pass that makes it to the end of the optimizer's step.
    BACKWARD = "backward"
    #: From the end of a step to some point in the next.
    BETWEEN_STEPS = "between steps"
    #: From a forward pass to its backward pass.
    RETAINED = "retained"
    #: Inside one pass.
    TRANSIENT = "transient"


class Part(_Word):
    """The part of the model or of the machine that it belongs to."""

    NONE = ""
    EMBEDDING = "embedding"
    ENCODER = "modality encoder"
    LAYER_INPUT = "layer input"
    RECOMPUTED_INPUT = "layer input (recomputation)"
    NOT_OFFLOADED = "kept from offloading"
    ATTENTION = "attention"
    MLA = "attention (MLA)"
    COMPRESSED_ATTENTION = "attention (compressed)"
    HYPER_CONNECTIONS = "hyper-connections"
    MAMBA = "Mamba mixer"
    GATED_DELTA_NET = "gated delta net"
    KIMI_DELTA = "Kimi delta attention"
    SHORT_CONVOLUTION = "short convolution"
    MLP = "MLP"
    MOE = "MoE"
    MOE_ROUTER = "MoE router and dispatch"
    MOE_EXPERTS = "MoE experts"
    MOE_SHARED_EXPERTS = "MoE shared experts"
    MTP = "MTP projection"
    FINAL_NORM = "final norm"
    LOSS = "logits and loss"
    ROTARY = "rotary embedding tables"
    WORKSPACE = "workspaces"
    DISPATCHER = "MoE dispatchers"
    ALLOCATOR = "allocator"
    PIPELINE = "pipeline sends and receives"
    BATCH = "batch"
    DATA_PARALLEL = "data parallelism"
    RUNNING = "temporaries"
    CALIBRATION = "calibration"


class Component(NamedTuple):
    """One named part of a stage's memory at its peak.

    ``bytes`` on one rank; ``shard``: the groups of ranks over which it is sharded, as in "tp x dp x cp" ("":
    replicated); ``routed``: its size depends on how evenly routers distribute tokens; ``experts``: of routed experts;
    ``adapters``: of the adapters of parameter-efficient fine-tuning.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec, explain
        >>> run = RunSpec(
        ...     model="meta-llama/Llama-3.1-8B", parallel=ParallelSpec(world_size=8, tensor_model_parallel_size=2)
        ... )
        >>> moments = next(part for part in explain(run, 0).components if part.name == "exp_avg")
        >>> str(moments.role), moments.shard, str(moments.provenance)
        ('optimizer', 'tp x dp', 'exact')
    """

    name: str
    #: On one rank.
    bytes: int
    #: What it is in training: weights, gradients, optimizer, buffers, activation or transient.
    role: Role
    #: How its bytes were found: exact (counted from the config), formula (of a known implementation), measured (a
    #: constant fitted on named runs) or assumed.
    provenance: Provenance
    #: The groups of ranks that divide it, as in "tp x dp x cp"; "" where every rank holds it whole.
    shard: str = ""
    #: From when to when it is allocated.
    lifetime: Lifetime = Lifetime.MODEL
    #: The module, or the part of the machine, that it belongs to.
    part: Part = Part.NONE
    #: Which copy of the parameters it is, of model state.
    state: State = State.NONE
    #: Whether its size depends on how evenly routers spread tokens.
    routed: bool = False
    #: Whether it is of routed experts.
    experts: bool = False
    #: Whether it is of the adapters of parameter-efficient fine-tuning.
    adapters: bool = False
