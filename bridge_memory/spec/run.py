"""RunSpec: what is trained, and how. Frozen, validated once, with Megatron's own field names.

A reader (``bridge_memory.readers``) produces a ``ModelSpec``; a command line, a ConfigContainer or a
Megatron-LM argument list produces the rest. Everything to the right of this room takes a ``RunSpec`` and
never looks at the source it came from.

Every refusal is a ``SpecError`` (a ``ValueError``) of one line that names the field, its value and the fix.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from bridge_memory.spec.model import ModelSpec
from bridge_memory.spec.parts import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    OptimizerSpec,
    ParallelSpec,
    PeftSpec,
    PrecisionSpec,
    RecomputeSpec,
)
from bridge_memory.spec.validation import validate


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One training run. Building it checks everything that can be checked without laying out layers."""

    model: ModelSpec
    parallel: ParallelSpec = field(default_factory=ParallelSpec)
    batch: BatchSpec = field(default_factory=BatchSpec)
    precision: PrecisionSpec = field(default_factory=PrecisionSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    data_parallel: DataParallelSpec = field(default_factory=DataParallelSpec)
    peft: PeftSpec = field(default_factory=PeftSpec)
    recompute: RecomputeSpec = field(default_factory=RecomputeSpec)
    implementation: ImplementationSpec = field(default_factory=ImplementationSpec)
    #: Assumptions and gaps that the source of the run added (on top of the model's own).
    assumptions: tuple[str, ...] = ()
    not_modelled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        validate(self)

    @property
    def num_microbatches(self) -> int:
        """Microbatches a step on one data-parallel replica (``num_microbatches_calculator``)."""
        p, b = self.parallel, self.batch
        if b.global_batch_size is None:
            return p.pp * p.vpp
        return b.global_batch_size // (b.micro_batch_size * p.data_parallel_size)

    def with_(self, **groups: object) -> RunSpec:
        """A copy with whole groups replaced, validated again."""
        return replace(self, **groups)  # type: ignore[arg-type]
