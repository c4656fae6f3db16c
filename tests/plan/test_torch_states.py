"""Configurations that share what their engine keeps have the peaks that they have alone."""

from __future__ import annotations

import pytest

from bridge_memory import BatchSpec, ModelSpec, ParallelSpec, RunSpec, peaks, resolve_model
from bridge_memory.estimation import peaks_with
from bridge_memory.plan.found import Refused
from bridge_memory.plan.torch.space import Space, configurations
from bridge_memory.plan.torch.states import SHARING, States


@pytest.mark.parametrize("engine", sorted(SHARING))
@pytest.mark.parametrize("more", ({}, {"peft.scheme": "lora", "peft.dim": 8}, {"gradient_checkpointing": True}))
def test_shared_states_change_no_peak(engine: str, more: dict[str, object]) -> None:
    model: ModelSpec = resolve_model("meta-llama/Llama-3.2-1B")
    ranks = 1 if engine == "single" else 16
    base = RunSpec(
        model=model, parallel=ParallelSpec(world_size=ranks),
        batch=BatchSpec(seq_length=512, global_batch_size=ranks * 12),
    ).with_fields(**{"data_parallel.engine": engine, **more})  # fmt: skip
    fixed = frozenset({"offload", "attention"}) if more else frozenset({"liger", "attention"})
    space = Space({engine: base}, 8, fixed, (1, 4))
    states, looked, shared = States(), 0, 0
    for alike in configurations(space, Refused()):
        for run in alike:
            of_engine = states.engine(run)
            assert of_engine is not None
            before = len(states._known)
            assert peaks_with(run, of_engine) == peaks(run), run
            shared += len(states._known) == before
            looked += 1
    assert shared >= looked // 2
