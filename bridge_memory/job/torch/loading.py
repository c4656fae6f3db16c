"""Loading into a built job of torch's engines or DeepSpeed's on one rank: weights, or a whole resume.

Hugging Face checkpoints are read into host memory before anything is built, except under ZeRO-3, which fills modules
one by one (transformers ``integrations/deepspeed.py: _load_state_dict_into_zero3_model``).

A resume gives the optimizer its states (transformers ``trainer.py: _load_optimizer_and_scheduler``):

- One GPU reads them into host memory; DDP reads them onto the GPU, where they become the optimizer's.
- FSDP2 makes states first, by a step with gradients of zeros (torch ``checkpoint/state_dict.py: _init_optim_state``). A
  sharded checkpoint goes through host memory, from which new states are made beside these (accelerate ``utils/
  fsdp_utils.py: load_fsdp_optimizer``, whose ``offload_to_cpu`` is on); torchtitan fills them in place; of a full one
  each tensor comes whole.
- FSDP1 gets all states of a unit whole from the first rank, flattens them, and keeps its shard (``fsdp/_optim_utils.py:
  _flatten_optim_state_dict``).
- DeepSpeed reads this rank's file into host memory (``engine.py: _load_zero_checkpoint``).
"""

from __future__ import annotations

from collections.abc import Iterator

from bridge_memory.components import Lifetime, Provenance
from bridge_memory.engines.by_name import engine_of
from bridge_memory.engines.fsdp1 import FSDP1
from bridge_memory.engines.fsdp2 import FSDP2
from bridge_memory.engines.torch_modules import parameter_width, rounded
from bridge_memory.engines.torch_optimizers import torch_states
from bridge_memory.engines.zero3 import ZeRO3
from bridge_memory.job.megatron.loading import How
from bridge_memory.job.torch.building import Rank, building, built, highest, on_gpu, parameters, rank_of
from bridge_memory.outside.amount import Amount, exactly
from bridge_memory.spec import RunSpec

_INITIALIZED = "checkpoint/state_dict.py: _init_optim_state"


def loading(run: RunSpec, stage: int, how: How) -> tuple[Amount, ...]:
    """What is alive at the highest moment of loading. Raises SpecError: there is no such stage."""
    rank = rank_of(run, stage)
    if how is How.RESUME:
        return highest([building(run, stage), *_resuming(rank)])
    engine = engine_of(run)
    if how is How.HUGGING_FACE and isinstance(engine, ZeRO3):
        every, width = engine.weights(rank.model), parameter_width(run)
        modules: dict[int, int] = {}
        for w in every:
            modules[w.module] = modules.get(w.module, 0) + rounded(w.numel * width)
        partitions = 0 if engine.offloads_parameters else sum(rounded(w.part * width) for w in every)
        return (
            exactly("weights", partitions, Provenance.EXACT, "partition_parameters.py: Init"),
            exactly("the module that is filled", max(modules.values(), default=0),
                    source="integrations/deepspeed.py: _load_state_dict_into_zero3_model"),
        )  # fmt: skip
    return tuple(built(rank))


def _resuming(rank: Rank) -> Iterator[tuple[Amount, ...]]:
    """The moments of a resume."""
    run, engine = rank.run, engine_of(rank.run)
    states = sum(n for _, n in rank.kept(lifetime=Lifetime.FIRST_STEP))
    if isinstance(engine, FSDP1):
        yield (*built(rank), *_flattened(rank, engine))
    elif isinstance(engine, FSDP2):
        yield from _refilled(rank, engine, states)
    elif run.data_parallel.of_deepspeed or run.optimizer.optimizer in ("adam", "adamw", "sgd"):
        yield tuple(on_gpu(rank))
    else:
        # Those of bitsandbytes copy what they get, torch casts what is not of the parameters' dtype.
        copied = "optim/optimizer.py: load_state_dict"
        yield (*on_gpu(rank), Amount("states as they were read", 0, states, Provenance.FORMULA, copied))


def _refilled(rank: Rank, engine: FSDP2, states: int) -> Iterator[tuple[Amount, ...]]:
    """FSDP2: the step that makes states, then what is read beside them."""
    gradients = 0 if rank.run.fsdp.offload_params else sum(p.shard for p in parameters(rank, engine.ranks) if p.trains)
    yield (
        *on_gpu(rank),
        exactly("gradients of zeros", gradients, Provenance.FORMULA, _INITIALIZED),
        exactly(rank.state.step_name, rank.state.in_step, Provenance.FORMULA, _INITIALIZED),
    )
    if rank.run.implementation.torchtitan:
        return
    whole = max((rounded(p.whole) for p in parameters(rank) if p.trains), default=0)
    own = 0 if rank.run.fsdp.offload_params else states
    source = "load_fsdp_optimizer: FULL_STATE_DICT, SHARDED_STATE_DICT"
    read = Amount("one state whole, or all new states", min(own, whole), max(own, whole), Provenance.FORMULA, source)
    yield (*on_gpu(rank), read)


def _flattened(rank: Rank, engine: FSDP1) -> tuple[Amount, ...]:
    """FSDP1: states of the units so far, and all of one unit twice, whole: by parameter and flat. The root is first."""
    states = torch_states(rank.run)
    groups = engine.groups(rank.model)
    of_groups = engine.of_groups(rank.model, groups)
    kept = most = 0
    for modules in [*of_groups[-1:], *of_groups[:-1]] if groups and groups[-1].root else of_groups:
        for flat in engine.units(modules):
            if not flat.trains:
                continue
            part = [s.nbytes((flat.shard,), flat.width, False) for s in states]
            whole = [s.nbytes((flat.shard * engine.ranks,), flat.width, False) for s in states]
            most = max(most, kept + (2 * sum(whole) if engine.ranks > 1 else 0) + max(part, default=0))
            kept += 0 if rank.run.fsdp.offload_params else sum(part)
    name, source = "states, and those of the unit that is flattened", "_optim_utils.py: _flatten_optim_state_dict"
    return (exactly(name, max(most, kept), Provenance.FORMULA, source),)
