"""Saving from one rank of torch's engines or DeepSpeed's, after a training step, on the GPU.

Tensors go to the host one by one as they are written. FSDP2's full state dict gathers one parameter or state at a time
(torch ``checkpoint/state_dict.py: get_model_state_dict, get_optimizer_state_dict``), its sharded one, which accelerate
takes unless told otherwise, nothing. FSDP1 gathers a unit's parameters (``_state_dict_utils.py:
_full_pre_state_dict_hook``), and then its states, all of them (``_optim_utils.py: _communicate_optim_state``), or, with
``use_orig_params``, one after the other (``_allgather_orig_param_states``). DeepSpeed saves partitions, and ZeRO-3 with
``stage3_gather_16bit_weights_on_model_save`` gathers weights module by module.
"""

from __future__ import annotations

from bridge_memory.components import Component, Provenance
from bridge_memory.engines.by_name import engine_of
from bridge_memory.engines.fsdp1 import FSDP1
from bridge_memory.engines.fsdp2 import FSDP2
from bridge_memory.engines.torch_modules import rounded
from bridge_memory.engines.torch_optimizers import torch_states
from bridge_memory.estimation import stage_parts
from bridge_memory.job.torch.building import Rank, rank_of
from bridge_memory.outside.amount import Amount, exactly
from bridge_memory.spec import RunSpec


def saving(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """What is alive at the highest moment of a save. Raises SpecError: there is no such stage."""
    rank = rank_of(run, stage)
    return tuple(a for a in (*between_steps(rank, stage), _gathered(rank)) if a.most)


def between_steps(rank: Rank, stage: int) -> list[Amount]:
    """What is alive after a step, without the gradients that it frees."""
    parts = stage_parts(rank.run, stage)
    lines = [line for line, _ in rank.state.amounts]
    freed = [line.fresh or line.zeroed for line in lines]
    kept: list[Component] = [c for c, goes in zip(parts.persistent, freed, strict=False) if not goes]
    kept += parts.persistent[len(lines) :]
    return [exactly(c.name, c.bytes, c.provenance) for c in (*kept, *parts.between_steps) if c.bytes]


def _gathered(rank: Rank) -> Amount:
    engine = engine_of(rank.run)
    weights = rank.state.saving or 0
    if isinstance(engine, FSDP1):
        found = max(weights, _states(rank, engine))
        return exactly("one unit's parameters or states, whole", found, source="_optim_utils.py: _optim_state_dict")
    if isinstance(engine, FSDP2):
        name = "one parameter, whole (FULL_STATE_DICT), or nothing (SHARDED_STATE_DICT)"
        return Amount(name, 0, weights, Provenance.FORMULA, "fsdp_utils.py: save_fsdp_model")
    name = "one parameter, whole"
    return exactly(name, weights, source="engine.py: _zero3_consolidated_16bit_state_dict")


def _states(rank: Rank, engine: FSDP1) -> int:
    """Bytes of the largest unit's states, gathered."""
    if engine.ranks == 1:
        return 0
    states, original = torch_states(rank.run), rank.run.fsdp.use_orig_params
    most = 0
    for modules in engine.of_groups(rank.model, engine.groups(rank.model)):
        for flat in engine.units(modules):
            if flat.trains:
                whole = [s.nbytes((flat.shard * engine.ranks,), flat.width, False) for s in states]
                own = rounded(flat.shard * flat.width)
                most = max(most, (max(whole, default=0) + own) if original else sum(whole))
    return most
