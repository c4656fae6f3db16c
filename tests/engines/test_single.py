"""One GPU: four tensors of two bytes an element for each of the 1,235,814,400 parameters of Llama-3.2-1B, which the
Hub counts. Tensors are whole blocks of 512 bytes, and every one of that model's is.
"""

from __future__ import annotations

import pytest

from bridge_memory import BatchSpec, DataParallelSpec, ParallelSpec, RunSpec, SpecError, explain
from bridge_memory.components import State

PARAMETERS = 1_235_814_400


def run(gpus: int = 1) -> RunSpec:
    return RunSpec(
        model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=gpus),
        batch=BatchSpec(global_batch_size=4 * gpus), data_parallel=DataParallelSpec(engine="single"),
    )  # fmt: skip


def test_every_copy_of_the_parameters_takes_two_bytes_an_element() -> None:
    """Four microbatches, so that gradients of the last step are there at the peak."""
    stage = explain(run(), 0)
    assert stage.parameters == PARAMETERS
    of_state = {c.state: c.bytes for c in stage.components if c.state}
    assert of_state == dict.fromkeys(
        (State.PARAMETERS, State.GRADIENTS, State.EXP_AVG, State.EXP_AVG_SQ), 2 * PARAMETERS
    )


def test_more_than_one_data_parallel_rank_is_refused() -> None:
    with pytest.raises(SpecError, match="single"):
        run(2)
