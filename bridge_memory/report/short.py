"""An estimate on one screen: the answer, the stages as bars, the largest components of the stage with the highest peak.

One screen (``screen``); ``table`` has the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from bridge_memory.components import Role
from bridge_memory.decisive import decisive
from bridge_memory.report.answer import answer_of, phase_words
from bridge_memory.report.decided import MOST, TITLE, sentences
from bridge_memory.report.document import Block, Bullets, Column, Grid, Pairs, Words
from bridge_memory.report.screen import first_that_fits
from bridge_memory.report.summary import configuration
from bridge_memory.report.table import ALL_MODELLED, Cells, alike, components_grid, head, stage_span
from bridge_memory.report.units import check_unit, format_bytes, format_ticks, ticks
from bridge_memory.result import Estimate, StageEstimate
from bridge_memory.spec import DataParallelSpec, SpecError
from bridge_memory.verdict import Fit

if TYPE_CHECKING:
    from bridge_memory.job.job import Job

#: Subjects of the run that are shown: all, and those that remain where lines are short.
_ALL = ("model", "parallelism", "batch", "precision", "optimizer", "recompute", "releases", "host memory")
_MOST = ("parallelism", "batch", "precision", "optimizer", "releases", "host memory")
_FEW = ("precision", "optimizer", "releases", "host memory")  # the others were typed


class Shown(NamedTuple):
    """What a screen has room for: ``components`` of the explained stage, ``rows`` of stages, ``sentences`` of what
    decides the peak, ``subjects`` of the run."""

    components: int
    rows: int
    sentences: int
    subjects: tuple[str, ...]


#: What is left out line by line. Stages and five components are what people come for: they go last, and only where more
#: is printed below on the same screen.
SHOWN = (
    Shown(10, 8, MOST, _ALL), Shown(8, 8, MOST, _ALL), Shown(6, 8, MOST, _ALL), Shown(5, 8, MOST, _ALL),
    Shown(5, 8, 2, _ALL), Shown(5, 8, 1, _ALL), Shown(5, 8, 1, _MOST), Shown(5, 8, 0, _MOST), Shown(5, 8, 0, _FEW),
    Shown(5, 8, 0, ()), Shown(3, 8, 0, ()), Shown(3, 3, 0, ()), Shown(1, 3, 0, ()), Shown(0, 3, 0, ()),
    Shown(0, 1, 0, ()), Shown(0, 0, 0, ()),
)  # fmt: skip
#: Of more stages than there are rows: the first, the one with the highest peak and the last.
_ENDS = 3
#: Characters of a bar.
BAR = 28
#: The letter of a role in a bar.
LETTERS = {
    Role.WEIGHTS: "W", Role.GRADIENTS: "G", Role.OPTIMIZER: "O", Role.BUFFERS: "B", Role.ACTIVATION: "A",
    Role.TRANSIENT: "T",
}  # fmt: skip
_TITLES = {Role.ACTIVATION: "activations", Role.TRANSIENT: "temporaries"}
#: A GPU's capacity is marked in the bars where it is at most so many times the highest peak.
_NEAR = 1.6


def short_blocks(
    result: Estimate, fits: Sequence[Fit], *, unit: str = "GiB", stage: int | None = None, fix: str = "",
    more: str = "", jobs: Sequence[Job] = (), phases: bool = False, after: Sequence[Block] = (),
) -> list[Block]:  # fmt: skip
    """The blocks of the default text.

    ``stage``: explained instead of the stage with the highest peak; ``fix``: a change that makes the run fit, in words;
    ``more``: how to get the rest, for the last line; ``jobs``: the whole job on GPUs of ``fits``, that on a
    single one with its ``phases`` by verdict; ``after``: what is printed below on the same screen. Raises SpecError
    for an unknown unit or stage.
    """
    unit = check_unit(unit)
    if stage is not None and not 0 <= stage < len(result.stages):
        raise SpecError(f"--stage is {stage}; the stages of this run are 0 to {len(result.stages) - 1}")
    explained = result.peak_stage if stage is None else result.stages[stage]
    shown = result.stages if stage is None else (explained,)
    answer = answer_of(result, fits, unit=unit, fix=fix, jobs=jobs)
    first: list[Block] = [head(result, answer, unit)]
    job: list[Block] = []
    if len(fits) == 1 and jobs and phases:
        from bridge_memory.report.phases import by_verdict

        job.append(by_verdict(jobs[0], unit, stage))
    decides = decisive(result)

    def versions() -> Iterator[list[Block]]:
        for has in SHOWN:
            some = decides[: has.sentences]
            yield [
                *first, *([_stages(result, shown, fits, unit, has.rows)] if has.rows else []), *job,
                *_largest(result, explained, unit, has.components), *_run(result, has.subjects),
                *_last(result, sentences(some, unit), len(decides) - len(some), more),
            ]  # fmt: skip

    return first_that_fits(versions(), after)


def _run(result: Estimate, subjects: Sequence[str]) -> list[Block]:
    other = result.run.data_parallel.engine != DataParallelSpec().engine or result.run.peft.freezes
    pairs = [
        (name, words) for name, words in configuration(result)
        if name in subjects and (name != "optimizer" or other)
    ]
    return [Pairs("The run", tuple(pairs))] if pairs else []


def _largest(result: Estimate, stage: StageEstimate, unit: str, number: int) -> list[Block]:
    of = f" of stage {stage.stage}" if len(result.stages) > 1 else ""
    moment = f"{phase_words(stage)}: {stage.peak_operation}".removesuffix(": ")
    title = f"Largest components{of} at the peak of {format_bytes(stage.peak_bytes, unit)} ({moment})"
    grid = components_grid(stage, unit, number, title)
    return [grid._replace(rows=grid.rows[:-1], emphasis=None)] if number else []  # the title has their sum


def _last(result: Estimate, decides: Sequence[str], undecided: int, more: str) -> list[Block]:
    """What decides the peak; how much is not on this screen, and how to see it."""
    assumed = len(dict.fromkeys(result.assumptions))
    number = len(result.unmodelled)
    left_out = f"{number} feature{'s' * (number != 1)} not modelled" if number else ALL_MODELLED
    words = f"{left_out}; {assumed} assumption{'s' * (assumed != 1)}"
    if undecided:
        words += f"; {undecided} more that decide{'s' * (undecided == 1)} the peak"
    words += f"; {more}" * bool(more)
    if len(decides) > 1:
        return [Bullets(TITLE, tuple(decides)), Words("", (words,))]
    return [Words("", (*(f"{TITLE}: {sentence}" for sentence in decides), words))]


def _stages(result: Estimate, stages: Sequence[StageEstimate], fits: Sequence[Fit], unit: str, most_rows: int) -> Grid:
    every = alike(stages)
    worst = result.peak_stage
    shown = _kept(every, worst, most_rows)
    card = fits[0] if len(fits) == 1 else None
    most = worst.peak_bytes
    if card is not None and most <= card.capacity_bytes <= _NEAR * most:
        most = card.capacity_bytes
    limit = card.capacity_bytes if card is not None and card.capacity_bytes <= most else None
    rows = tuple(
        (
            stage_span(group) + " *" * (worst in group and len(result.stages) > 1), str(len(group[0].layers)),
            format_ticks(Cells(group[0], unit).static, unit), bar(group[0], most, limit),
            format_ticks(ticks(group[0].peak_bytes, unit), unit), phase_words(group[0]),
        )
        for group in shown
    )  # fmt: skip
    columns = (
        Column("stage", words=True), Column("layers"), Column("static"), Column("peak by role", words=True, bars=True),
        Column("peak"), Column("in", words=True),
    )
    title = f"Memory of one rank, {unit}"
    hidden = [group for group in every if group not in shown]
    if hidden:
        number = sum(map(len, hidden))
        highest = format_bytes(max(group[0].peak_bytes for group in hidden), unit)
        title += f" ({number} more stage{'s' * (number > 1)}, at most {highest})"
    used = [role for role in Role if any(group[0].bytes_of(role) for group in shown)]
    letters = [f"{LETTERS[role]} {_TITLES.get(role, role)}" for role in used]
    if limit is not None and card is not None:
        letters.append(f"| capacity of {card.gpu}")
    emphasis = next((i for i, group in enumerate(shown) if worst in group), None) if len(result.stages) > 1 else None
    return Grid(title, columns, rows, emphasis, (", ".join(letters),))


def _kept(
    every: Sequence[tuple[StageEstimate, ...]], worst: StageEstimate, most: int
) -> list[tuple[StageEstimate, ...]]:
    """All, if they are at most ``most``; else the one with the highest peak, the first and the last."""
    if len(every) <= most:
        return list(every)
    ends = (every[0], every[-1])
    first = sorted(every, key=lambda group: (worst not in group, group not in ends))
    return sorted(first[: min(most, _ENDS)], key=lambda group: group[0].stage)


def bar(stage: StageEstimate, most: int, limit: int | None = None, width: int = BAR) -> str:
    """The peak in letters; ``width`` characters are ``most`` bytes, and "|" marks ``limit`` bytes."""
    ends = [round(width * nbytes / most) for nbytes in accumulate(stage.bytes_of(role) for role in Role)]
    text, at = "", 0
    for role, end in zip(Role, ends, strict=True):
        text += LETTERS[role] * (end - at)
        at = end
    if limit is None:
        return text or "."
    place = round(width * limit / most) - 1
    text = text.ljust(width, ".")
    return text[:place] + "|" + text[place + 1 :]
