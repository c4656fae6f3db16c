"""Building a job of torch's engines or DeepSpeed's on one rank: the weights on their way to the GPU, and what wrapping
holds beside them.

Trainer and accelerate load the model into host memory. One GPU, DDP and ZeRO-1 and 2 move it as a whole
(``accelerator.py: prepare_model``; deepspeed ``runtime/engine.py: _configure_distributed_model``), FSDP1 unit by unit;
FSDP2 gets it parameter by parameter from the first rank (``utils/fsdp_utils.py: fsdp2_load_full_state_dict``), or unit
by unit without ``cpu_ram_efficient_loading``. ZeRO-3 partitions the parameters of every module as soon as they are made
(``partition_parameters.py: Init``), which both switch on. torchtitan and torchtune make shards only, of a model on the
meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

from bridge_memory.components import Lifetime, Provenance, Role
from bridge_memory.engines.by_name import engine_of
from bridge_memory.engines.engine import Line, StageState
from bridge_memory.engines.fsdp2 import FSDP2
from bridge_memory.engines.torch_modules import (
    Model,
    broadcast_buffers,
    model_of,
    parameter_width,
    rounded,
    shard,
    trained_width,
)
from bridge_memory.engines.zero3 import WHOLE_FOR_GOOD, Weight, ZeRO3, sub_groups
from bridge_memory.engines.zero_1_and_2 import ZeRO12
from bridge_memory.estimation import stage_parts
from bridge_memory.inventory.stack import chunk_units
from bridge_memory.inventory.torch.quantized import is_quantized, weight_bytes
from bridge_memory.outside.amount import Amount, exactly, total
from bridge_memory.spec import DTYPE_BYTES, RunSpec
from bridge_memory.spec.layout import layout
from bridge_memory.tapes.context import context_of

_MOVED = "engine.py: _configure_distributed_model"
_SENT = "csrc/distributed/c10d/comm.cpp: broadcast_coalesced"
_INIT = "partition_parameters.py: Init"


class Rank(NamedTuple):
    """What an engine keeps and moves on one rank."""

    run: RunSpec
    model: Model
    state: StageState

    def kept(self, *, lifetime: Lifetime) -> list[tuple[Line, int]]:
        """Lines of model state that are on the GPU from a moment on; gradients that every step frees are none."""
        return [
            (line, n) for line, n in self.state.amounts
            if line.lifetime is lifetime and not line.zeroed and n
        ]  # fmt: skip

    def component(self, line: Line, nbytes: int) -> Amount:
        """As the estimate names it."""
        return exactly(line.component(nbytes, {}).name, nbytes, line.provenance)


@lru_cache(maxsize=1)  # asked for by every phase in turn
def rank_of(run: RunSpec, stage: int) -> Rank:
    """Raises SpecError: there is no such stage."""
    stage_parts(run, stage)
    units = chunk_units(run.model, layout(run.model, run.parallel).shapes(run.model)[0][0], context_of(run))
    return Rank(run, model_of(run, units), engine_of(run).stage([units]))


def building(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """What is alive at the highest moment of building. Raises SpecError: there is no such stage."""
    rank = rank_of(run, stage)
    return highest([*_moments(rank), tuple(built(rank))])


def highest(moments: Sequence[tuple[Amount, ...]]) -> tuple[Amount, ...]:
    """The moment that can be the highest."""
    return max(moments, key=lambda amounts: (total(amounts).most, total(amounts).least))


def built(rank: Rank) -> list[Amount]:
    """What is alive once model and optimizer are built: optimizer states are made by the first step or a resume, and
    ZeRO-3 gathers small parameters for good at the end of either."""
    found = [rank.component(line, n) for line, n in rank.kept(lifetime=Lifetime.MODEL)]
    return [a for a in found if a.name != WHOLE_FOR_GOOD]


def on_gpu(rank: Rank) -> list[Amount]:
    """What training finds: all that is built, and the optimizer's states."""
    lifetimes = (Lifetime.MODEL, Lifetime.FIRST_STEP)
    return [rank.component(line, n) for lifetime in lifetimes for line, n in rank.kept(lifetime=lifetime)]


class Whole(NamedTuple):
    """A parameter in bytes: whole (a quantized one before that), and this rank's shard."""

    whole: int
    shard: int
    quantized: bool
    trains: bool


def parameters(rank: Rank, ranks: int = 1) -> Iterator[Whole]:
    """Every parameter in the order of the model; shards are over ``ranks`` along the first dimension."""
    run, width = rank.run, parameter_width(rank.run)
    before = DTYPE_BYTES[run.precision.params_dtype]
    wide = trained_width(run, width)
    for module in rank.model.modules:
        for trains, of in ((True, module.trained), (False, module.frozen)):
            for held, times in of.rows:
                for p in held:
                    own = wide if trains else width
                    if not trains and is_quantized(run, p):
                        found = Whole(p.numel * before, weight_bytes(run, p), True, trains)
                    else:
                        found = Whole(p.numel * own, rounded(prod(shard(p.shape, ranks)) * own), False, trains)
                    yield from [found] * times


def _moments(rank: Rank) -> Iterator[tuple[Amount, ...]]:
    """The moments of building before its end."""
    engine = engine_of(rank.run)
    if isinstance(engine, FSDP2):
        yield from _sharding(rank, engine)
    elif isinstance(engine, ZeRO3):
        yield from _partitioning(rank, engine)
    elif isinstance(engine, ZeRO12):
        yield from _flattening(rank, engine)
    else:
        yield from _moving(rank)


def _moving(rank: Rank) -> Iterator[tuple[Amount, ...]]:
    """One GPU and DDP, which the first rank sends its weights."""
    own = [rank.component(line, n) for line, n in rank.kept(lifetime=Lifetime.MODEL) if line.role is Role.WEIGHTS]
    largest = max((p.whole for p in parameters(rank) if p.quantized), default=0)
    if largest:
        yield (*own, exactly("largest weight before it is quantized", largest, source="quantizer_bnb_4bit.py"))
    if rank.run.data_parallel.engine == "ddp":
        flats = broadcast_buffers([p.shard if p.quantized else p.whole for p in parameters(rank)])
        if flats:
            yield (*own, exactly("flat tensors of the first rank's weights", flats, source=_SENT))


def _sharding(rank: Rank, engine: FSDP2) -> Iterator[tuple[Amount, ...]]:
    """FSDP, all of whose moments have shards of what is wrapped, and something whole."""
    run, model = rank.run, rank.model
    if run.implementation.own_layers:
        ways = [0] if run.implementation.torchtitan else [_by_parameter(rank, engine)]
        source = "torchtune training/_distributed.py: load_from_full_model_state_dict"
    else:
        ways = [engine.wrapping(model, engine.groups(model), on_gpu=False)]
        source = "_init_utils.py: _init_param_handle_from_module"
        if run.data_parallel.engine == "fsdp2":
            ways.append(_by_parameter(rank, engine))
            source = "fsdp_utils.py: fsdp2_prepare_model, with and without cpu_ram_efficient_loading"
    if max(ways):
        name = "shards, and the parameter or unit that is sharded"
        yield (Amount(name, min(ways), max(ways), Provenance.FORMULA, source),)


def _by_parameter(rank: Rank, engine: FSDP2) -> int:
    """Peak bytes while parameters come whole, one by one; a tied table once more, until it is tied again."""
    most = shards = 0
    every = list(parameters(rank, engine.ranks))
    if rank.run.model.share_embeddings_and_output_weights:
        every.append(every[0])
    for p in every:
        most = max(most, shards + rounded(p.whole) + p.shard)
        shards += 0 if rank.run.fsdp.offload_params else p.shard
    return most


def _flattening(rank: Rank, engine: ZeRO12) -> Iterator[tuple[Amount, ...]]:
    """ZeRO-1 and 2."""
    run, state, flat = rank.run, rank.state, engine.flat(rank.model)
    if state.building is not None:
        name = "weights, beside them flat or with main parameters"
        yield (exactly(name, state.building, Provenance.FORMULA, "stage_1_and_2.py: DeepSpeedZeroOptimizer.__init__"),)
        return
    # With an offloaded optimizer weights are flattened on the GPU only if there is room.
    whole = rounded(flat.padded * parameter_width(run))
    source = "stage_1_and_2.py: flatten_on_accelerator" if engine.offloads else "bf16_optimizer.py: BF16_Optimizer"
    yield (
        exactly("weights", whole + flat.frozen_bytes, Provenance.EXACT, _MOVED),
        Amount("flat weights beside them", 0 if engine.offloads else whole, whole, Provenance.FORMULA, source),
    )


def _partitioning(rank: Rank, engine: ZeRO3) -> Iterator[tuple[Amount, ...]]:
    """ZeRO-3: parameters as they are made, the optimizer's construction, and hooks that gather each parameter."""
    width = parameter_width(rank.run)
    every = engine.weights(rank.model)
    name = "partitions, and the parameter that is made, from fp32 where no dtype is given"
    yield (Amount(name, made(every, width, 0), made(every, width, 4 if width < 4 else 0), Provenance.FORMULA, _INIT),)
    gathered = rounded(max((w.numel for w in every if w.trains and not w.stays), default=0) * width)
    yield (*built(rank), exactly("the parameter that is gathered", gathered, source=(
        "stage3.py: create_reduce_and_remove_grad_hooks")))  # fmt: skip
    if rank.state.building is not None:
        groups = sub_groups([w.part for w in every if w.trains], engine.z.sub_group_size)
        divided = sum(rounded(w.part * width) for w in every)
        yield (
            exactly("weights", divided, Provenance.EXACT, _INIT),
            exactly("main parameters", sum(rounded(n * engine.main_width) for n in groups), Provenance.EXACT),
            exactly("gradients of the largest sub-group", rounded(max(groups, default=0) * engine.main_width),
                    source="stage3.py: initialize_optimizer_states"),
        )  # fmt: skip


def made(every: Sequence[Weight], width: int, first: int) -> int:
    """Peak bytes while parameters are made and partitioned one by one; ``first``: bytes per element in which each is
    made before it is cast."""
    most = partitions = 0
    for w in every:
        whole, part = rounded(w.numel * width), rounded(w.part * width)
        most = max(most, partitions + whole + max(part, rounded(w.numel * first)))
        partitions += part
    return most
