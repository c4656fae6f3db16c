"""One GPU: weights, ``.grad`` tensors and the optimizer's states, each a separate tensor.

``zero_grad`` frees gradients (``set_to_none``, torch's default), so that each backward allocates them: a layer's are
alive while the layers before it run backward. If gradients accumulate, all are alive from the first microbatch on.

Source: torch ``optim/optimizer.py: Optimizer.zero_grad``, ``csrc/autograd/functions/accumulate_grad.h``.
"""

from __future__ import annotations

from collections.abc import Sequence

from bridge_memory.engines.engine import StageState
from bridge_memory.engines.torch_modules import (
    Kept,
    Model,
    accumulates,
    amounts_of,
    in_step,
    kept_of,
    made_gradients,
    model_of,
    offloaded_activations,
    parameter_width,
    step_of_largest,
    trained_width,
)
from bridge_memory.inventory.stack import Unit
from bridge_memory.spec import RunSpec
from bridge_memory.tapes.chain import Concurrent


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
        if run.transformers.optimizer_in_bwd:
            return self._stepping_in_backward(model, held)
        by_place = made_gradients(run, model, [k.gradients for k in held])
        step, name = in_step(run, held)
        amounts = amounts_of(run, held, fresh=not accumulates(run), shard_name="")
        return StageState(
            model.numel, tuple((line, n) for line, n in amounts if n), in_step=step, step_name=name,
            concurrent=(model.engine_bytes(by_place),), building=sum(k.weights for k in held), saving=0,
            host=offloaded_activations(run, model),
        )

    def _stepping_in_backward(self, model: Model, held: Sequence[Kept]) -> StageState:
        """One optimizer per parameter: a hook runs it and frees the gradient (torch ``csrc/autograd/functions/
        accumulate_grad.cpp``, torchtune ``training/memory.py: register_optim_in_bwd_hooks``). Counted are the largest
        gradient, or all of a compiled layer's, and the temporaries of one step."""
        run = self.run
        by_place = [Concurrent()] * model.number
        for module, kept in zip(model.modules, held, strict=True):
            largest = trained_width(run, self.width) * kept.largest
            gradients = kept.gradients if run.layers_compiled else largest
            by_place[module.place] = Concurrent(least_backward=gradients + step_of_largest(run, kept))
        without = [kept._replace(gradients=0) for kept in held]
        amounts = amounts_of(run, without, fresh=True, shard_name="")
        return StageState(
            model.numel, tuple((line, n) for line, n in amounts if n), concurrent=(model.engine_bytes(by_place),),
            building=sum(k.weights for k in held), saving=0, host=offloaded_activations(run, model),
        )


ENGINE = Single
