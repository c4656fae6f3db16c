"""A post-training job as text: the answer first, its phases in one table, what would fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bridge_memory.outside.amount import Range, total
from bridge_memory.report.document import Bullets, Chart, Column, Drawn, Grid, Words
from bridge_memory.report.said import VERDICT_WORDS
from bridge_memory.report.units import DECIMALS, UNITS, format_ticks, ticks
from bridge_memory.rollout.answer import Limits, Rollout
from bridge_memory.rollout.layouts import Layout
from bridge_memory.rollout.log import Compared
from bridge_memory.rollout.phases import PhaseMemory
from bridge_memory.rollout.setup import FRAMEWORKS, Reference
from bridge_memory.verdict import FRAGMENTATION, Verdict

_TONES = {Verdict.FITS: "good", Verdict.TIGHT: "open", Verdict.UNKNOWN: "open", Verdict.DOES_NOT_FIT: "bad"}
#: Components that are listed with --verbose.
_SHOWN = 12
#: Of a phase in the tip of a chart.
_LARGEST = 5
#: Assumptions, and options that are not modelled, that are listed without it.
_NOTES = 4


def rollout_blocks(found: Rollout, solved: Limits | None, unit: str = "GiB", *, verbose: int = 0) -> list[Drawn]:
    """All of it, the answer first. ``verbose``: components of every phase, and every assumption."""
    blocks: list[Drawn] = [Words("", tuple(answer_words(found, solved, unit)), _TONES[found.verdict])]
    blocks.append(Chart("A step, phase by phase", "rollout", rollout_chart(found, unit)))
    blocks.append(phase_table(found, unit))
    if solved is not None:
        blocks.append(Bullets("What fits", tuple(limit_words(found, solved))))
    blocks.append(Bullets("The run, and what the numbers rest on", (job_words(found), *_notes(found, unit, verbose))))
    if verbose:
        blocks += [_components(phase, unit) for phase in found.phases]
    return blocks


def job_words(found: Rollout) -> str:
    """The job in one line: model, GPUs, framework, the trainer's layout, the engine's."""
    setup, run, engine = found.setup, found.setup.trainer, found.setup.engine
    p = run.parallel
    sizes = {"TP": p.tp, "PP": p.pp, "CP": p.cp, "EP": p.ep}
    layout = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    inference = {
        "TP": engine.tensor_parallel_size,
        "PP": engine.pipeline_parallel_size,
        "DP": engine.data_parallel_size,
    }
    served = ", ".join(f"{name} {size}" for name, size in inference.items() if size > 1) or "TP 1"
    release = f" {'.'.join(map(str, setup.release))}" if setup.release != (0, 0) else ""
    share = "" if found.share is None else f", {setup.share_name} {found.share:g}"
    return (
        f"{setup.model.name} on {p.world_size} {found.gpu.name}, {FRAMEWORKS[setup.framework]}{release}: "
        f"{run.data_parallel.engine}{' ' * bool(layout)}{layout}; {engine.framework} "
        f"{'.'.join(map(str, engine.release_numbers))} {served}{share}; {setup.longest:,} tokens a sequence"
    )


def phase_table(found: Rollout, unit: str = "GiB") -> Grid:
    """The phases; the one that binds emphasised."""
    capacity, several = found.gpu.capacity_bytes, len(found.stages) > 1
    columns = (
        Column("phase", words=True), *((Column("stage"),) if several else ()), Column("trainer"), Column("reserved"),
        Column("outside"), Column("engine"), Column("driver"), Column(f"of {_number(capacity, unit)}", words=True),
    )  # fmt: skip
    rows = tuple(
        (
            str(p.phase), *((str(p.stage),) if several else ()),
            *(_short(n, unit) for n in (total(p.allocated), p.reserved, total(p.outside), p.engine_bytes, p.driver)),
            _fits(p, capacity, unit),
        )
        for p in found.phases
    )  # fmt: skip
    emphasis = next(i for i, p in enumerate(found.phases) if p is found.binds)
    notes = (
        "trainer: allocated by its torch; reserved: with its allocator's cache; outside: its CUDA context, NCCL and "
        "buffers of libraries; engine: all of the inference engine's; driver: all of it",
    )
    return Grid(f"A step, phase by phase, {unit}", columns, rows, emphasis, notes)


def rollout_chart(found: Rollout, unit: str = "GiB") -> dict[str, Any]:
    """What ``page/rollout.js`` draws: of each phase its parts, bytes, at their least, and its range; the cells of
    ``phase_table``."""
    table, capacity = phase_table(found, unit), found.gpu.capacity_bytes
    return {
        "gpu": found.gpu.name, "capacity_bytes": capacity, "capacity": f"{_number(capacity, unit)} {unit}",
        "unit": unit, "unit_bytes": UNITS[unit], "binds": table.emphasis, "phases": [
            {
                "name": row[0], "verdict": str(p.verdict(capacity)), "room": row[-1], "driver": row[-2],
                "driver_bytes": list(p.driver), "parts": _chart_parts(found, p), "largest": _largest(p, unit),
                "cells": [[column.title, cell] for column, cell in zip(table.columns[1:-1], row[1:-1], strict=True)],
            }
            for p, row in zip(found.phases, table.rows, strict=True)
        ],
    }  # fmt: skip


def _chart_parts(found: Rollout, p: PhaseMemory) -> dict[str, int]:
    """Together the least of the driver's."""
    trainer = min(total(p.allocated).least, p.reserved.least)
    engine = found.engine
    weights, kv = (one.least if one in p.engine else 0 for one in (engine.weights, engine.kv))
    return {
        "trainer": trainer, "cache": p.reserved.least - trainer, "outside": total(p.outside).least,
        "engine": max(0, p.engine_bytes.least - weights - kv), "weights": weights, "kv": kv,
    }  # fmt: skip


def _largest(p: PhaseMemory, unit: str) -> list[str]:
    parts = sorted((*p.allocated, *p.outside, *p.engine), key=lambda a: -a.most)
    return [f"{a.name} {_short(Range(a.least, a.most), unit)}" for a in parts[:_LARGEST] if a.most]


def rollout_data(found: Rollout, solved: Limits, unit: str = "GiB") -> dict[str, Any]:
    """A job for the page of ``serve``: the document of ``--json``, what the chart draws, and the texts beside it."""
    table = phase_table(found, unit)
    words = answer_words(found, solved, unit)
    return {
        "rollout": found.as_json(solved), "chart": rollout_chart(found, unit), "words": words,
        "brief": f"{found.binds.phase} {_room(found.binds, found.gpu.capacity_bytes, unit)}",
        "table": {
            "title": table.title, "columns": [column.title for column in table.columns],
            "rows": [list(row) for row in table.rows],
            "emphasis": table.emphasis, "notes": list(table.notes),
        },
        "limits": limit_words(found, solved), "notes": [job_words(found), *_notes(found, unit, 1)],
    }  # fmt: skip


def answer_words(found: Rollout, solved: Limits | None, unit: str = "GiB") -> list[str]:
    """The answer, and the highest share."""
    binds, capacity = found.binds, found.gpu.capacity_bytes
    failing = found.first_failing
    of = f" (stage {binds.stage})" if len(found.stages) > 1 else ""
    at = "" if found.share is None else f" at {found.share:g}"
    start = f"{VERDICT_WORDS[found.verdict]} {found.gpu.name}{at}: "
    if failing is not None:
        words = f"{start}{failing.phase}{of} is the first phase that does not fit, {_room(failing, capacity, unit)}"
    else:
        words = (
            f"{start}{binds.phase}{of} has the highest driver peak, {_short(binds.driver, unit)} of "
            f"{_number(capacity, unit)} {unit}, {_room(binds, capacity, unit)}"
        )
    if found.verdict is Verdict.UNKNOWN:
        words += f"; not modelled: {', '.join(found.not_modelled[:4])}"
    if solved is None:
        return [words]
    lines = [share_words(found, solved), words]
    share = solved.share
    if share.safe is not None:
        assert share.kv_tokens is not None and share.sequences is not None
        lines.append(
            f"At {share.safe:g}: {_count(share.kv_tokens)} tokens of KV cache a replica, "
            f"{_count(share.sequences)} sequences of {found.setup.longest:,}"
        )
    if solved.first:
        lines.append(f"Try first: {solved.first}")
    return lines


def share_words(found: Rollout, solved: Limits) -> str:
    """The highest safe share, and what binds beyond it."""
    share, name = solved.share, found.setup.share_name
    if share.safe is None:
        may = f"; up to {share.possible:g} may fit, at the lower ends of the ranges" if share.possible else ""
        return f"No {name} is safe: {share.binds} binds whatever it is{may}"
    more = f"; up to {share.possible:g} may fit" if share.possible and share.possible > share.safe else ""
    return f"Highest safe {name}: {share.safe:g} ({share.binds} binds beyond it{more})"


def limit_words(found: Rollout, solved: Limits) -> list[str]:
    """Token limits and offloading."""
    setup, engine = found.setup, found.engine
    words = "tokens" if setup.dynamic else "sequences"
    out = []
    for name, most, now in (
        ("update", solved.update_tokens, setup.update_tokens),
        ("old log-probs", solved.log_prob_tokens, setup.log_prob_tokens),
    ):
        if name == "old log-probs" and not setup.log_probs:
            continue
        now = now // setup.trainer.parallel.cp if setup.dynamic else now // setup.longest
        limit = f"at most {most:,} {words} a GPU in a micro batch" if most else "no micro batch fits for sure"
        out.append(f"{name}: {limit} (now {now:,})")
    if len(solved.offloads) > 1:
        choices = []
        for choice in solved.offloads:
            what = {
                (False, False): "nothing", (False, True): "the optimizer",
                (True, True): "parameters and optimizer", (True, False): "parameters",
            }[choice.parameters, choice.optimizer]  # fmt: skip
            safe = f"up to {choice.safe:g}" if choice.safe else f"none safe ({choice.binds} binds)"
            choices.append(f"{what}: {safe}")
        out.append(f"{setup.share_name} by what is offloaded: {'; '.join(choices)}")
    if engine.may_start:
        share = f"at {found.share:g}" if found.share is not None else "as it is"
        out.append(
            f"KV cache {share}: {_count(engine.kv_tokens)} tokens a replica, "
            f"{_count(engine.concurrent_sequences(setup.longest))} sequences of {setup.longest:,} at once"
        )
    return out


def _notes(found: Rollout, unit: str, verbose: int) -> list[str]:
    setup = found.setup
    notes = [f"reserved: of the update, its allocations replayed; else allocated and up to {FRAGMENTATION:.1%} more"]
    if setup.reference is not Reference.NONE:
        notes.append(f"reference policy: {setup.reference}")
    if setup.sleep_level:
        what = {1: "weights go to the host", 2: "weights are dropped"}[setup.sleep_level]
        notes.append(f"the engine sleeps at level {setup.sleep_level}: {what}, the KV cache is dropped")
    else:
        notes.append("the engine never sleeps")
    if not setup.hard_limit and setup.dynamic:
        notes.append(
            "balancing may put up to a sequence more than the limit into a micro batch: the upper ends hold it"
        )
    if setup.rows_are_packed:
        notes.append(
            f"sequences of a micro batch: from one of {setup.longest:,} tokens, the others empty, to all of that length"
        )
    host = found.host
    notes.append(f"host memory of a node of {host.ranks}: {_short(host.node, unit)} {unit}")
    for what, names in (("", found.assumptions), ("not modelled: ", found.not_modelled)):
        shown = names if verbose else names[:_NOTES]
        notes += [f"{what}{name}" for name in shown]
        if len(names) > len(shown):
            notes.append(f"{len(names) - len(shown)} more {'not modelled' if what else 'assumptions'} (-v)")
    return notes


def _components(phase: PhaseMemory, unit: str) -> Grid:
    parts = [("trainer", a) for a in phase.allocated] + [("outside", a) for a in phase.outside]
    parts += [("engine", a) for a in phase.engine]
    largest = sorted(parts, key=lambda part: -part[1].most)
    rows = tuple(
        (who, a.name, _short(Range(a.least, a.most), unit), str(a.provenance)) for who, a in largest[:_SHOWN] if a.most
    )
    columns = Column("of", words=True), Column("component", words=True), Column(unit), Column("basis", words=True)
    left = len([1 for _, a in largest if a.most]) - len(rows)
    return Grid(f"{phase.phase}", columns, rows, None, (f"{left} smaller ones",) if left > 0 else ())


def _count(found: Range) -> str:
    return f"{found.least:,}" if found.least == found.most else f"{found.least:,}-{found.most:,}"


def _fits(p: PhaseMemory, capacity: int, unit: str) -> str:
    if p.why_not and p.driver.most <= capacity:
        return f"{p.verdict(capacity)}: may not start" if p.may_start else "does not start"
    if p.why_not and not p.may_start:
        return "does not start"
    return f"{p.verdict(capacity)}, {_room(p, capacity, unit, why=False)}"


def _room(p: PhaseMemory, capacity: int, unit: str, *, why: bool = True) -> str:
    verdict, left = p.verdict(capacity), capacity - p.driver.most
    if why and p.why_not and verdict is not Verdict.FITS and p.driver.least <= capacity:
        return p.why_not
    if verdict is Verdict.FITS:
        return f"{_number(left, unit)} free"
    if verdict is Verdict.TIGHT:
        return f"over by up to {_number(-left, unit)}"
    return f"over by {_number(p.driver.least - capacity, unit)} or more"


def _short(found: Range, unit: str) -> str:
    least, most = _number(found.least, unit), _number(found.most, unit)
    return least if least == most else f"{least}-{most}"


def _number(nbytes: int, unit: str) -> str:
    decimals = max(0, DECIMALS[unit] - 1)
    return format_ticks(ticks(nbytes, unit, decimals), unit, decimals)


def layout_table(rows: Sequence[Layout], found: Rollout, unit: str = "GiB") -> Grid:
    """The layouts of ``--search``."""
    columns = (
        Column("TP x PP x CP x EP", words=True), Column("rests on the GPU", words=True), Column("share"),
        Column("KV tokens"), Column("update"), Column("binds", words=True),
    )  # fmt: skip
    cells = tuple(
        (
            " x ".join(map(str, (row.parallel.tp, row.parallel.pp, row.parallel.cp, row.parallel.ep))),
            {(False, False): "all", (True, False): "optimizer", (False, True): "parameters", (True, True): "nothing"}[
                row.param_offload, row.optimizer_offload
            ],
            f"{row.share.safe:g}", f"{row.kv_tokens:,}", _short(row.update, unit), str(row.share.binds),
        )
        for row in rows
    )  # fmt: skip
    notes = (
        f"share: the highest safe {found.setup.share_name}; KV tokens: of a replica, for sure; update: driver peak, "
        f"{unit}",
    )
    return Grid("Layouts of the trainer that leave most for the KV cache", columns, cells, None,
                notes if rows else ("no layout fits for sure",))  # fmt: skip


def log_table(lines: Sequence[Compared], pool: int, unit: str = "GiB") -> Grid:
    """Memory lines of a log beside the phases."""
    columns = (
        Column("line of the log", words=True), Column("moment", words=True), Column("allocated"), Column("predicted"),
        Column("driver"), Column("predicted"),
    )  # fmt: skip

    def shown(nbytes: int | None) -> str:
        return "-" if nbytes is None else _number(nbytes, unit)

    def expected(found: Range | None) -> str:
        return "-" if found is None else _short(found, unit)

    rows = tuple(
        (row.reading.head, row.moment, shown(row.reading.allocated), expected(row.allocated), shown(row.reading.used),
         expected(row.driver))
        for row in lines
    )  # fmt: skip
    notes = ['"GB" of the log is GiB; of several lines of a kind the highest']
    if pool:
        notes.append(f"{_number(pool, unit)} {unit} of vLLM's pool, which torch counts in this process, are not in "
                     "allocated")  # fmt: skip
    return Grid(f"The log beside the phases, {unit}", columns, rows, None, tuple(notes))
