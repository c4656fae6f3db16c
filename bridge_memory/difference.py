"""What differs between runs, and which bytes follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from bridge_memory.components import Role
from bridge_memory.emit.left import left_out
from bridge_memory.estimation import Estimate, estimate, peaks
from bridge_memory.job.job import fits_of_jobs
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.fields import called
from bridge_memory.spec.run import GROUPS
from bridge_memory.verdict import Fit

SCHEMA = "bridge-memory/diff/1"


class Configuration(NamedTuple):
    """One of the runs that are compared. ``fit``: on the card that was named, with the verdict of the whole job; None
    without one.

    Example:
        >>> from bridge_memory import RunSpec, diff
        >>> found = diff([RunSpec(model="meta-llama/Llama-3.2-1B"), RunSpec(model="meta-llama/Llama-3.2-3B")])
        >>> found.configurations[1].peak > found.configurations[0].peak
        True
    """

    name: str
    result: Estimate
    fit: Fit | None

    @property
    def run(self) -> RunSpec:
        return self.result.run

    @property
    def peak(self) -> int:
        """Of the highest stage, bytes."""
        return self.result.peak_stage.peak_bytes


class ChangedField(NamedTuple):
    """A field with its values, or fields of a group that go together, with a tuple of values. ``alone``: bytes by which
    the peak of the first run changes with these alone; None where the first run cannot have them alone.

    Example:
        >>> from bridge_memory import RunSpec, diff
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B")
        >>> field = diff([run, run.with_fields(grad_reduce_in_fp32=False)]).fields(1)[0]
        >>> field.before, field.after, field.alone < 0
        (True, False, True)
    """

    name: str
    before: Any
    after: Any
    alone: int | None


class ChangedComponent(NamedTuple):
    """A part of memory at the peak of each run, bytes.

    Example:
        >>> from bridge_memory import RunSpec, diff
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B")
        >>> part = diff([run, run.with_fields(grad_reduce_in_fp32=False)]).components(1)[0]
        >>> part.name, part.more == part.after - part.before
        ('gradients', True)
    """

    name: str
    role: Role
    before: int
    after: int

    @property
    def more(self) -> int:
        return self.after - self.before


class Difference(NamedTuple):
    """The first run beside each of the others.

    Example:
        >>> from bridge_memory import RunSpec, diff
        >>> run = RunSpec(model="meta-llama/Llama-3.2-1B")
        >>> found = diff([run, run.with_fields(grad_reduce_in_fp32=False)])
        >>> [field.name for field in found.fields(1)]
        ['grad_reduce_in_fp32']
        >>> sum(part.more for part in found.components(1)) == found.more(1)
        True
    """

    configurations: tuple[Configuration, ...]

    def more(self, other: int) -> int:
        """Bytes by which the peak of configuration ``other`` is above that of the first."""
        return self.configurations[other].peak - self.configurations[0].peak

    def fields(self, other: int) -> tuple[ChangedField, ...]:
        """What configuration ``other`` has otherwise than the first, the most bytes first; without what has no effect.
        Fields of the model count as one."""
        first, then = self.configurations[0].run, self.configurations[other].run
        names = list(dict.fromkeys((*left_out(first, then), *left_out(then, first))))
        of_model = [name for name in names if name.startswith("model.")]
        found = list(_of_groups(first, then, [name for name in names if name not in of_model]))
        if of_model:
            found.append(ChangedField("model", _shape(first), _shape(then), _alone(first, model=then.model)))
        return tuple(sorted(found, key=lambda field: -abs(field.alone or 0)))

    def components(self, other: int) -> tuple[ChangedComponent, ...]:
        """The parts of both at their peaks, the largest change first; their differences add up to ``more``."""
        sides = [self.configurations[i].result.peak_stage.components for i in (0, other)]
        sums: dict[tuple[str, Role], list[int]] = {}
        for side, components in enumerate(sides):
            for component in components:
                sums.setdefault((component.name, component.role), [0, 0])[side] += component.bytes
        found = [ChangedComponent(name, role, *both) for (name, role), both in sums.items()]
        return tuple(sorted(found, key=lambda part: (-abs(part.more), -part.before, part.name)))

    def as_json(self) -> dict[str, Any]:
        """By the schema ``SCHEMA``; bytes."""
        return {
            "schema": SCHEMA,
            "configurations": [
                {
                    "name": c.name, "model": c.run.model.name, "gpus": c.run.parallel.world_size, "peak_bytes": c.peak,
                    "stage": c.result.peak_stage.stage, "static_bytes": c.result.peak_stage.static_bytes,
                    "activation_bytes": c.result.peak_stage.bytes_of(Role.ACTIVATION),
                    "gpu": c.fit and c.fit.gpu, "verdict": c.fit and str(c.fit.verdict),
                    "headroom_bytes": c.fit and c.fit.headroom_bytes,
                }
                for c in self.configurations
            ],
            "differences": [
                {
                    "to": self.configurations[i].name, "more_bytes": self.more(i),
                    "fields": [
                        {"field": f.name, "before": _plain(f.before), "after": _plain(f.after), "alone_bytes": f.alone}
                        for f in self.fields(i)
                    ],
                    "components": [
                        {"component": part.name, "role": str(part.role), "before_bytes": part.before,
                         "after_bytes": part.after}
                        for part in self.components(i)
                    ],
                }
                for i in range(1, len(self.configurations))
            ],
        }  # fmt: skip


def difference(runs: Sequence[tuple[str, RunSpec]], gpu: str | None = None) -> Difference:
    """Estimate ``runs``, (name, run) each. Raises SpecError for fewer than two, or a GPU that is not known."""
    if len(runs) < 2:
        raise SpecError(f"configurations ({len(runs)}) are too few to compare; give two or more")
    found = []
    for name, run in runs:
        result = estimate(run)
        found.append(Configuration(name, result, None if gpu is None else fits_of_jobs(result, [gpu])[0]))
    return Difference(tuple(found))


def _of_groups(first: RunSpec, then: RunSpec, names: Sequence[str]) -> Iterator[ChangedField]:
    """The fields one by one; those of a group that the first run cannot have alone, with the group's others."""
    of_group: dict[str, list[str]] = {}
    for name in names:
        of_group.setdefault(name.partition(".")[0], []).append(name)
    for group, members in of_group.items():
        every = [(name, _field(first, then, name)) for name in members]
        # Unset on both sides is one value, though it stands for two: of the batch of a step, say.
        found = [(name, field) for name, field in every if field.before != field.after]
        if len(found) > 1 and any(field.alone is None for _, field in found):
            after = {name: getattr(getattr(then, group), name.partition(".")[2]) for name, _ in found}
            fields = [field for _, field in found]
            before, later = tuple(field.before for field in fields), tuple(field.after for field in fields)
            yield ChangedField(", ".join(field.name for field in fields), before, later, _alone(first, **after))
        else:
            yield from (field for _, field in found)


def _field(first: RunSpec, then: RunSpec, name: str) -> ChangedField:
    if name == "teacher":
        before, after = ("none" if run.teacher is None else run.teacher.model.name for run in (first, then))
        return ChangedField(name, before, after, _alone(first, teacher=then.teacher))
    group, _, member = name.partition(".")
    before, after = (getattr(getattr(run, group), member) for run in (first, then))
    return ChangedField(called(GROUPS[group], member), before, after, _alone(first, **{name: after}))


def _alone(run: RunSpec, **fields: Any) -> int | None:
    try:
        changed = run.with_fields(**fields)
        return max(s.peak_bytes for s in peaks(changed)) - max(s.peak_bytes for s in peaks(run))
    except SpecError:
        return None


def _shape(run: RunSpec) -> str:
    model = run.model
    return f"{model.name} ({model.num_layers} layers of {model.hidden_size})"


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
