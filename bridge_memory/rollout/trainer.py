"""What a trainer holds on one rank, apart: parameters, gradients, optimizer states, what always stays, and the passes.

The training step is the estimate's. Passes without a backward are those of room ``job``'s evaluation, with the
framework's log-probabilities in place of the loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from bridge_memory.components import Component, Lifetime, Provenance, Role
from bridge_memory.estimation import explain, stage_parts
from bridge_memory.job.megatron import evaluation as megatron_evaluation
from bridge_memory.job.megatron.exporting import exported
from bridge_memory.job.torch import ENGINES as OF_TORCH
from bridge_memory.outside.amount import Amount, exactly
from bridge_memory.rollout.setup import PostTraining
from bridge_memory.spec import RunSpec
from bridge_memory.spec.layout import layout

#: What an estimate of the update of a post-training job says of the rest.
UPDATE_ALONE = (
    "the update of the policy alone; rollout, log-probabilities and a critic take their turns on the same GPUs"
)


class States(NamedTuple):
    """Lasting memory of a rank of a stage."""

    parameters: tuple[Amount, ...]
    #: Empty where the engine frees them with every step.
    gradients: tuple[Amount, ...]
    optimizer: tuple[Amount, ...]
    #: Workspaces, tables, and what is carried over from step to step.
    lasting: tuple[Amount, ...]
    #: Names of what is there from the first pass or step on.
    later: frozenset[str]


def states(run: RunSpec, stage: int, of: str = "") -> States:
    """What persists between the steps of ``run``; ``of``: whose, put before each name. Raises SpecError."""
    parts = stage_parts(run, stage)
    freed = run.data_parallel.engine in OF_TORCH
    by_role: dict[Role, list[Amount]] = {role: [] for role in Role}
    kept = (*parts.persistent, *parts.between_steps)
    for c in kept:
        by_role[c.role].append(_amount(c, of))
    later = frozenset(f"{of}{c.name}" for c in kept if c.lifetime is not Lifetime.MODEL)
    return States(
        tuple(by_role[Role.WEIGHTS]), () if freed else tuple(by_role[Role.GRADIENTS]),
        tuple(by_role[Role.OPTIMIZER]), tuple(a for role in (Role.BUFFERS, Role.ACTIVATION, Role.TRANSIENT)
                                              for a in by_role[role]),
        later,
    )  # fmt: skip


def _amount(c: Component, of: str) -> Amount:
    return exactly(f"{of}{c.name}", c.bytes, c.provenance)


def update(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """The peak of a training step, by component. Raises SpecError."""
    return tuple(exactly(c.name, c.bytes, c.provenance) for c in explain(run, stage).components)


def update_bytes(run: RunSpec, stage: int) -> int:
    """The peak of a training step. Raises SpecError."""
    return explain(run, stage).peak_bytes


def why_no_passes(run: RunSpec) -> str | None:
    """Why passes without a backward are not modelled for ``run``; None where they are."""
    return None if run.data_parallel.engine in OF_TORCH else megatron_evaluation.why_not(run)


@lru_cache(maxsize=1 << 10)
def forward(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """What a pass without a backward holds beside ``states``. Raises SpecError."""
    if run.data_parallel.engine in OF_TORCH:
        from bridge_memory.job.torch.evaluation import forward_only

        return forward_only(run, stage, may_cache=False)
    return megatron_evaluation.forward_only(run, stage)


def streamed(run: RunSpec) -> RunSpec:
    """A frozen model whose parameters are in host memory (verl ``fsdp/transformer_impl.py``: CPUOffload of whoever
    runs forward passes alone)."""
    return run.with_(fsdp=replace(run.fsdp, offload_params=True))


def of_reference(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """Weights of a model that does not train, in the dtype in which it is built."""
    return states(run, stage, "reference: ").parameters


def export(run: RunSpec, stage: int) -> tuple[Amount, ...]:
    """Temporaries of turning one parameter after another into full tensors for the engine. Raises SpecError."""
    if run.data_parallel.engine in OF_TORCH:
        from bridge_memory.job.torch.building import rank_of

        whole = rank_of(run, stage).state.saving or 0
        return (Amount("one parameter, whole", whole, 2 * whole, Provenance.FORMULA, "DTensor.full_tensor"),) * bool(
            whole
        )
    return exported(run)


def parameters_of(run: RunSpec, stage: int) -> int:
    """Elements of a rank's parameters."""
    return explain(run, stage).parameters


def stages_of(setup: PostTraining) -> range:
    """The pipeline stages of the trainer."""
    return range(setup.trainer.parallel.pp)


def check(runs: Iterable[RunSpec]) -> None:
    """Raise SpecError where a pass cannot be laid out."""
    for run in runs:
        if not run.implementation.torch_layers:
            layout(run.model, run.parallel)


def host(run: RunSpec, stage: int) -> tuple[tuple[str, int], ...]:
    """What the training step itself keeps in host memory: name and bytes."""
    from bridge_memory.job.host import offloaded

    return tuple((a.name, a.least) for a in offloaded(run, stage))
