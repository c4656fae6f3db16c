"""One GPU: weights, ``.grad`` tensors and the optimizer's states, each a tensor of its own.

``zero_grad`` frees gradients (``set_to_none``, torch's default), so that backward makes them anew: those of a layer
are there beside the layers before it. Where gradients accumulate, all are there from the first microbatch on.

Source: torch ``optim/optimizer.py: Optimizer.zero_grad``, ``csrc/autograd/functions/accumulate_grad.h``.
"""

from __future__ import annotations

from collections.abc import Sequence

from bridge_memory.engines.engine import StageState
from bridge_memory.engines.torch_modules import (
    accumulates,
    amounts_of,
    in_step,
    kept_of,
    made_before,
    model_of,
    parameter_width,
)
from bridge_memory.inventory.chain import Concurrent
from bridge_memory.inventory.stack import Unit
from bridge_memory.spec import RunSpec


class Single:
    """See the module docstring."""

    def __init__(self, run: RunSpec, *, rank: int | None = None) -> None:
        self.run = run
        self.width = parameter_width(run)

    def stage(self, chunks: Sequence[Sequence[Unit]]) -> StageState:
        """What the GPU keeps."""
        run = self.run
        model = model_of(run, chunks[0])
        held = kept_of(run, model, self.width)
        fresh = not accumulates(run)
        made = made_before(run, model, [k.gradients if fresh else 0 for k in held])
        beside = [Concurrent(0, n, n, gradients=n) for n in made]
        step, name = in_step(run, held)
        kept = tuple((line, n) for line, n in amounts_of(run, held, fresh=fresh, shard_name="") if n)
        return StageState(
            model.numel, kept, in_step=step, step_name=name, concurrent=(model.engine_bytes(beside),),
        )


ENGINE = Single
