"""The full text of an estimate: stages, components of the peak, GPUs, assumptions, unmodelled features."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from bridge_memory.components import STATIC_ROLES, Component, Role
from bridge_memory.decisive import decisive
from bridge_memory.estimation import Estimate, StageEstimate
from bridge_memory.report.answer import Answer, answer_of, bounded_peak, fit_ticks
from bridge_memory.report.decided import TITLE, sentences
from bridge_memory.report.document import Block, Bullets, Column, Grid, Pairs, Words
from bridge_memory.report.printing import print_blocks
from bridge_memory.report.summary import configuration, host_place
from bridge_memory.report.units import (
    FINER,
    check_unit,
    format_bytes,
    format_count,
    format_ticks,
    ranges,
    share,
    ticks,
)
from bridge_memory.spec import SpecError
from bridge_memory.spec.unmodelled import Effect, Unmodelled

if TYPE_CHECKING:
    from bridge_memory.job.job import Job
    from bridge_memory.report.details import DetailRow
    from bridge_memory.verdict import Fit

#: Where the list of unmodelled features is empty.
ALL_MODELLED = "every option in use is modelled"
#: Components of the peak stage that are listed; the rest is summed in one line.
LARGEST = 10

_ROLE_TITLES = {
    "weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "buffers": "buffers",
    "activation": "activations", "transient": "temporaries",
}


def print_estimate(
    result: Estimate,
    fits: Sequence[Fit],
    *,
    unit: str = "GiB",
    stage: int | None = None,
    details: Mapping[int, Sequence[DetailRow]] | None = None,
    fix: str = "",
    stream: TextIO | None = None,
) -> None:
    """Print ``result`` to ``stream`` (default: stdout): rich tables on a terminal, plain text elsewhere.

    ``unit`` is a name of ``report.units.UNITS``; ``stage`` leaves only that stage; ``details`` maps a stage to the
    rows of ``details.stage_details``, printed tensor by tensor together with all its components. Every total is the
    sum of the numbers shown. Raises SpecError for a unit or a stage that does not exist.
    """
    print_blocks(estimate_blocks(result, fits, unit=unit, stage=stage, details=details, fix=fix), stream)


def estimate_blocks(
    result: Estimate,
    fits: Sequence[Fit],
    *,
    unit: str = "GiB",
    stage: int | None = None,
    details: Mapping[int, Sequence[DetailRow]] | None = None,
    fix: str = "",
    jobs: Sequence[Job] = (),
) -> list[Block]:
    """The blocks that ``print_estimate`` prints; ``jobs``: the whole job on GPUs of ``fits``."""
    unit = check_unit(unit)
    if stage is not None and not 0 <= stage < len(result.stages):
        raise SpecError(f"--stage is {stage}; the stages of this run are 0 to {len(result.stages) - 1}")
    worst = result.peak_stage
    shown = result.stages if stage is None else (result.stages[stage],)
    explained = worst if stage is None else shown[0]
    groups = alike(shown)
    marked = worst if len(result.stages) > 1 else None
    decides = sentences(decisive(result), unit)
    blocks: list[Block] = [
        head(result, answer_of(result, fits, unit=unit, fix=fix, jobs=jobs), unit),
        Pairs("The run", configuration(result)),
        *((Bullets(TITLE, decides),) if decides else ()),
        _stages(groups, marked, unit),
        _memory(groups, marked, unit),
    ]
    listed = {i: rows for i, rows in (details or {}).items() if stage in (None, i)}
    limit = None if explained.stage in listed else LARGEST
    blocks.append(components_grid(explained, unit, limit, _why(explained, worst, result, unit)))
    for index, rows in listed.items():
        if index != explained.stage:
            blocks.append(components_grid(result.stages[index], unit, None, f"Stage {index}: all components"))
        blocks += _tensors(index, rows, unit)
    if listed and explained.phases:
        lines = tuple(f"{name}: {format_bytes(nbytes, unit)}" for name, nbytes in explained.phases)
        blocks.append(Bullets(f"Peaks of stage {explained.stage} by phase", lines))
    if fits:
        blocks.append(_fits(fits, result, unit))
    if explained.host:
        lines = tuple(f"{name}: {format_bytes(nbytes, unit)}" for name, nbytes in explained.host)
        blocks.append(Bullets(f"{host_place(result).capitalize().replace('nvme', 'NVMe')} of one rank", lines))
    blocks.append(Bullets("Assumed", _once(result.assumptions) or ("nothing beyond the configuration",)))
    unmodelled = tuple(f"{feature} ({moves_words(feature, unit)})" for feature in result.unmodelled)
    blocks.append(Bullets("Not modelled", unmodelled or (ALL_MODELLED,)))
    return blocks


def head(result: Estimate, answer: Answer, unit: str) -> Words:
    """Title, answer, accuracy and the band of the peak, one line each."""
    title = f"Estimate of {result.run.model.name}: peak {bounded_peak(result, unit)}"
    return Words(title, (answer.words, answer.evidence, answer.band_words), _TONES.get(answer.verdict or "", ""))


_TONES = {"fits": "good", "does not fit": "bad", "tight": "open", "unknown": "open", "fits on some": "open"}


_MOVES = {
    Effect.UP: "adds memory", Effect.DOWN: "saves memory", Effect.EITHER: "may add or save memory",
    Effect.UNKNOWN: "effect unknown",
}  # fmt: skip


def moves_words(feature: Unmodelled, unit: str) -> str:
    """How the feature moves the peak, and by how much: its bounds where known, else its order of magnitude."""
    words = _MOVES[feature.effect]
    if not feature.least and not feature.most:
        words += f": {feature.order}"
    if feature.least:
        words += f", at least {format_bytes(feature.least, unit)}"
    if feature.most:
        words += f", at most {format_bytes(feature.most, FINER.get(unit, unit))}"
    return words + ", not in what torch reports of training steps" * feature.outside


def _once(sentences: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(sentences))


class Cells:
    """A stage's numbers in ticks of the unit, rounded so that every total is the sum of its parts."""

    def __init__(self, stage: StageEstimate, unit: str) -> None:
        by_role = [stage.bytes_of(role) for role in Role]
        split = len(STATIC_ROLES)
        self.peak = ticks(stage.peak_bytes, unit)
        persistent = ticks(sum(by_role[:split]), unit)
        cells = share(by_role[:split], unit, persistent) + share(by_role[split:], unit, self.peak - persistent)
        self.roles = dict(zip(Role, cells, strict=True))
        self.carried_over = ticks(sum(c.bytes for c in stage.carried_over), unit)
        self.static = persistent + self.carried_over

    def components(self, stage: StageEstimate, unit: str) -> list[tuple[int, Component]]:
        """Every component with its ticks, largest first; ticks add up to those of each role."""
        out = []
        for role in Role:
            parts = [c for c in stage.components if c.role == role]
            out += list(zip(share([c.bytes for c in parts], unit, self.roles[role]), parts, strict=True))
        return sorted(out, key=lambda pair: -pair[1].bytes)


# --------------------------------------------------------------------------------------------------
# Stage by stage
# --------------------------------------------------------------------------------------------------


def alike(stages: Sequence[StageEstimate]) -> list[tuple[StageEstimate, ...]]:
    """Groups of neighbouring stages whose numbers are all the same."""

    def numbers(s: StageEstimate) -> tuple[object, ...]:
        return (
            len(s.layers), s.parameters, s.in_flight, s.components, s.carried_over, s.peak_phase,
            s.peak_operation,
        )

    groups: list[tuple[StageEstimate, ...]] = []
    for s in stages:
        if groups and numbers(groups[-1][0]) == numbers(s):
            groups[-1] += (s,)
        else:
            groups.append((s,))
    return groups


def stage_span(group: tuple[StageEstimate, ...]) -> str:
    return ranges([stage.stage for stage in group])


def _label(group: tuple[StageEstimate, ...], worst: StageEstimate | None) -> str:
    return stage_span(group) + " *" * (worst in group)


def _marked(groups: Sequence[tuple[StageEstimate, ...]], worst: StageEstimate | None) -> int | None:
    return next((i for i, group in enumerate(groups) if worst in group), None)


def _stages(groups: Sequence[tuple[StageEstimate, ...]], worst: StageEstimate | None, unit: str) -> Grid:
    rows = []
    carried_over: dict[str, list[int]] = {}
    for group in groups:
        cells, one = Cells(group[0], unit), group[0]
        rows.append(
            (
                _label(group, worst), _layers(group), format_count(one.parameters), str(sum(one.in_flight)),
                format_ticks(cells.static, unit), _moment(one),
            )
        )
        if cells.carried_over:
            carried_over.setdefault(format_ticks(cells.carried_over, unit), []).extend(s.stage for s in group)
    columns = (
        Column("stage", words=True), Column("layers", words=True), Column("parameters"), Column("in flight"),
        Column("static"), Column("peak in", words=True),
    )
    marked = _marked(groups, worst)
    notes = []
    if marked is not None:
        notes.append(f"* the highest peak: stage{'s' * (len(groups[marked]) > 1)} {stage_span(groups[marked])}")
    if any(len(group) > 1 for group in groups):
        notes.append("Stages in one row have the same numbers throughout.")
    virtual = any(len(group[0].in_flight) > 1 for group in groups)
    notes.append(
        "parameters: in one rank's shard; in flight: microbatches whose activations are alive at the peak"
        f"{', summed over virtual stages' * virtual}; static: allocated between steps, weights + gradients "
        f"+ optimizer + buffers{_extra(carried_over, unit)}"
    )
    return Grid(f"Pipeline stages, {unit}", columns, tuple(rows), marked, tuple(notes))


def _layers(group: tuple[StageEstimate, ...]) -> str:
    number = len(group[0].layers)
    listed = ranges(sorted(i for stage in group for i in stage.layers))
    return f"{number}: {listed}" if listed else "0"


def _moment(stage: StageEstimate) -> str:
    return f"{stage.peak_phase}: {stage.peak_operation}" if stage.peak_operation else stage.peak_phase


def _memory(groups: Sequence[tuple[StageEstimate, ...]], worst: StageEstimate | None, unit: str) -> Grid:
    rows = []
    for group in groups:
        cells = Cells(group[0], unit)
        numbers = [*(cells.roles[role] for role in Role), cells.peak]
        rows.append((_label(group, worst), *(format_ticks(n, unit) for n in numbers)))
    columns = (Column("stage", words=True), *(Column(_ROLE_TITLES[role]) for role in Role), Column("= peak"))
    note = "peak: torch.cuda.max_memory_allocated from the second step on; rounded so that totals add up"
    return Grid(f"Memory of one rank at the peak, {unit}", columns, tuple(rows), _marked(groups, worst), (note,))


def _extra(carried_over: Mapping[str, Sequence[int]], unit: str) -> str:
    """Tensors carried over from one step into the next; freed before the peak, so in no column."""
    if not carried_over:
        return ""
    amounts = "; ".join(
        f"{amount} {unit} on stage{'s' * (len(stages) > 1)} {ranges(stages)}" for amount, stages in carried_over.items()
    )
    return f" + carried over from the last step ({amounts})"


# --------------------------------------------------------------------------------------------------
# Why
# --------------------------------------------------------------------------------------------------


def _why(stage: StageEstimate, worst: StageEstimate, result: Estimate, unit: str) -> str:
    which = f"Why stage {stage.stage}" if len(result.stages) > 1 else "Why it"
    rank = "" if stage is worst else f" (stage {worst.stage} has the highest, {format_bytes(worst.peak_bytes, unit)})"
    return f"{which} peaks at {format_bytes(stage.peak_bytes, unit)}, in {_moment(stage)}{rank}"


def components_grid(
    stage: StageEstimate, unit: str, limit: int | None, title: str
) -> Grid:
    cells = Cells(stage, unit)
    listed = cells.components(stage, unit)
    head = listed if limit is None or len(listed) <= limit + 1 else listed[:limit]
    rows = [
        (format_ticks(value, unit), _percent(c.bytes, stage.peak_bytes), str(c.provenance), _named(c))
        for value, c in head
    ]
    rest = listed[len(head):]
    if rest:
        value, nbytes = sum(v for v, _ in rest), sum(c.bytes for _, c in rest)
        rows.append((format_ticks(value, unit), _percent(nbytes, stage.peak_bytes), "", f"{len(rest)} smaller ones"))
    rows.append((format_ticks(cells.peak, unit), "", "", "peak"))
    columns = (Column(unit), Column("%"), Column("basis", words=True), Column("component", words=True))
    return Grid(title, columns, tuple(rows), len(rows) - 1)


def components_csv(result: Estimate, stage: int | None = None) -> str:
    """CSV with a line per component of every stage's peak, or of one stage's, in bytes."""
    import csv
    import io

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("stage", "component", "bytes", "role", "basis", "sharded over", "lifetime"))
    for s in result.stages if stage is None else (result.stages[stage],):
        for c in s.components:
            writer.writerow((s.stage, c.name, c.bytes, c.role, c.provenance, c.shard, c.lifetime))
    return text.getvalue()


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "0.0"


def _named(component: Component) -> str:
    """Its name with the groups that shard it."""
    return f"{component.name} (over {component.shard})" if component.shard else component.name


def _tensors(stage: int, rows: Sequence[DetailRow], unit: str) -> list[Block]:
    """Every tensor of a stage by block: exact bytes of one instance, totals in a finer unit."""
    finer = FINER.get(unit, unit)
    blocks: list[Block] = []
    groups: dict[tuple[str, str], list[DetailRow]] = {}
    for row in rows:
        groups.setdefault((row.section, row.block), []).append(row)
    columns = (Column(finer), Column("count"), Column("bytes each"), Column("tensor", words=True))
    for (section, block), members in groups.items():
        totals = share([row.total for row in members], finer)
        lines = [
            (format_ticks(value, finer), f"{row.count:,}", f"{row.bytes:,}", _tensor(row))
            for value, row in zip(totals, members, strict=True)
        ]
        lines.append((format_ticks(sum(totals), finer), "", "", "sum"))
        title = f"Stage {stage}, {section}{_SECTION_NOTES.get(section, '')}: {block}"
        blocks.append(Grid(title, columns, tuple(lines), len(lines) - 1))
    return blocks


#: What a section counts; see ``details.stage_details``.
_SECTION_NOTES = {
    "parameters": " (in the parameter dtype)",
    "saved for backward": " by one microbatch (without full recomputation)",
}


def _tensor(row: DetailRow) -> str:
    if not row.note:
        return row.name
    return f"{row.name} ({row.note})" if row.section == "parameters" else f"{row.name} - {row.note}"


# --------------------------------------------------------------------------------------------------
# GPUs
# --------------------------------------------------------------------------------------------------


#: ``verdict.Verdict`` -> a cell.
_FITS = {"fits": "yes", "tight": "tight", "does not fit": "no", "unknown": "unknown"}


def _fits(fits: Sequence[Fit], result: Estimate, unit: str) -> Grid:
    from functools import partial

    from bridge_memory.verdict import margin_words

    rows = []
    for fit in fits:
        rows.append(
            (
                fit.gpu,
                *(format_ticks(n, unit)
                  for n in fit_ticks(fit.capacity_bytes, fit.peak_bytes, fit.headroom_bytes, unit)),
                _FITS[fit.verdict] + f" {fit.lacks}".rstrip(),
            )
        )
    columns = (
        Column("GPU", words=True), Column("usable"), Column("- peak"), Column("- margin"), Column("= free"),
        Column("fits", words=True),
    )
    at = {fit.peak_stage for fit in fits}
    title = f"GPUs, by the highest peak{f' (stage {at.pop()})' if len(at) == 1 else ''}, {unit}"
    notes = [*margin_words(result.run, fits, partial(format_bytes, unit=unit))]
    if len({fit.peak_bytes for fit in fits}) > 1:
        notes.append("peak: with the attention kernels, workspaces and fp8 layouts of each GPU's own generation")
    if result.unmodelled:
        notes.append("unknown: features that are not modelled, and not in these numbers, can change the verdict")
    return Grid(title, columns, tuple(rows), None, tuple(notes))
