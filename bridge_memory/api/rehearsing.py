"""``rehearse``: run the real training stack for one rank, without a GPU, and compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from bridge_memory.rehearsal.world import INSTALL, RehearsalUnavailable
from bridge_memory.residual import residual
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.errors import show
from bridge_memory.spec.parts import WITH_TRANSFORMERS

if TYPE_CHECKING:
    from bridge_memory.rehearsal.results import Rehearsal


@dataclass(frozen=True, slots=True)
class RehearsalRow:
    """One quantity, predicted and found. Bytes; the row "parameters (elements)" counts elements.

    Example:
        >>> from bridge_memory import RehearsalRow
        >>> RehearsalRow("weights", predicted=96, found=64).difference
        -32
    """

    name: str
    #: None where the estimate does not model it.
    predicted: int | None
    #: None where it cannot be seen without a GPU.
    found: int | None

    @property
    def difference(self) -> int | None:
        """Found minus predicted; None where one of them is."""
        return residual(self.found, self.predicted)


@dataclass(frozen=True, slots=True)
class RehearsalResult:
    """One rank of a run, rehearsed.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec, rehearse
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=2))
        >>> done = rehearse(run)
        >>> str(done).splitlines()[0]
        'meta-llama/Llama-3.2-1B: rank 0 of 2, stage 0'
    """

    #: The run as it was rehearsed, by the rules of the releases that are installed.
    run: RunSpec
    rank: int
    stage: int
    rows: tuple[RehearsalRow, ...]
    #: What of the rehearsal differs from the run, a sentence each.
    notes: tuple[str, ...]
    #: Every saved tensor and peak of every model chunk; of megatron-core's engines alone.
    details: Rehearsal | None = None

    def __str__(self) -> str:
        """The rows as a table."""
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [f"{self.run.model.name}: rank {self.rank} of {self.run.parallel.world_size}, stage {self.stage}"]
        lines += [
            f"{row.name:<{width}}" + "".join(f"{'-' if n is None else format(n, ','):>20}" for n in (
                row.predicted, row.found, row.difference
            ))
            for row in self.rows
        ]  # fmt: skip
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def rehearse(
    run: RunSpec,
    *,
    stage: int | None = None,
    rank: int | None = None,
    config: Mapping[str, Any] | None = None,
) -> RehearsalResult:
    """Run the real training stack for one rank without a GPU, and compare it with the estimate.

    Under megatron-core's engines its own modules run forward and backward on the meta device. Under PyTorch's and
    DeepSpeed's engines transformers' model trains three steps whose products are not computed.

    Args:
        run: The run. The rules of the megatron-core that is installed apply, which is the one that runs.
        stage: A rank of this pipeline stage: the first, with context parallelism the last of its ring. None: 0.
        rank: This global rank, instead of ``stage``.
        config: The model's config.json as a dict, for PyTorch's and DeepSpeed's engines. None: looked up by the model's
            name.

    Returns:
        ``rows`` with what was predicted and what was found, in bytes, and ``notes`` on what differs from the run.

    Raises:
        RehearsalUnavailable: torch, megatron-core, transformers or DeepSpeed is not installed, or is a release that
            cannot be rehearsed. It is a SpecError.
        SpecError: The run cannot be built, or there is no such stage or rank.

    Example:
        >>> from bridge_memory import ParallelSpec, RunSpec, rehearse
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=2))
        >>> done = rehearse(run, stage=0)
        >>> {row.name: row.difference for row in done.rows}["weights"]
        0
    """
    if not isinstance(run, RunSpec):
        raise SpecError(f"run ({show(run)}) is not a RunSpec; give RunSpec(model=...)")
    if stage is not None and rank is not None:
        raise SpecError(f"stage ({show(stage)}) and rank ({show(rank)}) both say which rank; give one of them")
    if run.data_parallel.engine in WITH_TRANSFORMERS:
        if stage not in (None, 0):
            raise SpecError(f"stage ({show(stage)}) is not a stage of the run; engine {run.data_parallel.engine} has 0")
        return _torch(run, rank, config)
    if config is not None:
        raise SpecError("config (a dict) is for PyTorch's and DeepSpeed's engines; drop it")
    return _megatron(run, stage, rank)


def _megatron(run: RunSpec, stage: int | None, rank: int | None) -> RehearsalResult:
    from bridge_memory.rehearsal.runnable import on_meta, take_transformer_engine, with_core_here
    from bridge_memory.rehearsal.world import beyond_newest, quiet, require_megatron

    _check("stage", stage, run.parallel.pp)
    _check("rank", rank, run.parallel.world_size)
    with quiet():
        if find_spec("torch") is None:
            raise RehearsalUnavailable(
                f"rehearse runs the real megatron-core, and torch is not installed; install it: {INSTALL}"
            )
        why_not = take_transformer_engine()
        require_megatron()
        with beyond_newest() as notes:
            spec = on_meta(with_core_here(run), why_not, notes)
            from bridge_memory.rehearsal.run import rehearse as rehearsed
            from bridge_memory.rehearsal.summary import rows, shared

            done = rehearsed(spec, stage, rank=rank)
            table = tuple(RehearsalRow(row.name, row.predicted, row.found) for row in rows(done))
        return RehearsalResult(spec, done.rank, done.stage, table, (*notes, *shared(done)), done)


def _torch(run: RunSpec, rank: int | None, config: Mapping[str, Any] | None) -> RehearsalResult:
    from bridge_memory.readers import model_from_hf_config
    from bridge_memory.readers.resolve import resolve_config
    from bridge_memory.rehearsal.torch.run import as_on_cpu, differences, rehearse_engine, require, with_layers
    from bridge_memory.rehearsal.torch.summary import rows
    from bridge_memory.rehearsal.world import quiet

    spec = as_on_cpu(run)
    with quiet():
        require(spec)
        _check("rank", rank, spec.parallel.world_size)
        if config is None:
            _, config = resolve_config(spec.model.name)
        if model_from_hf_config(config, spec.model.name).num_layers != spec.model.num_layers:
            config = with_layers(config, spec.model.num_layers)
        found = rehearse_engine(spec, config, rank=rank)
        table = tuple(RehearsalRow(str(row.phase), row.predicted, row.found) for row in rows(spec, found.phases))
    return RehearsalResult(spec, found.rank, 0, table, tuple(differences(spec)))


def _check(name: str, value: object, number: int) -> None:
    if value is not None and (type(value) is not int or not 0 <= value < number):
        raise SpecError(f"{name} ({show(value)}) is not one of 0 to {number - 1}; give one of them")
