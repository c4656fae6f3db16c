"""Every engine that a run can name is a module of the room."""

from __future__ import annotations

import pytest

from bridge_memory import ParallelSpec, RunSpec
from bridge_memory.engines.engine import engine_of
from bridge_memory.spec.parts import ENGINES


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_can_be_named_is_there(name: str) -> None:
    strategy = "optim_grads_params" if name == "megatron_fsdp" else None
    run = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=8))
    run = run.with_fields(engine=name, data_parallel_sharding_strategy=strategy)
    assert type(engine_of(run)).__module__ == f"bridge_memory.engines.{name}"
    assert engine_of(run).stage([]).parameters == 0
