"""``bridge-memory compare MEASURED ...``: predicted against measured by pipeline stage."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bridge_memory.arguments.flags import FILES, add_run_arguments
from bridge_memory.arguments.run import run_on_gpus
from bridge_memory.cli.output import add_output_arguments
from bridge_memory.comparison.compare import SCHEMA, LogComparison, SnapshotComparison, compare
from bridge_memory.comparison.phases import FIGURES, PhaseComparison
from bridge_memory.components import GIB
from bridge_memory.report.document import Block, Bullets, Chart, Column, Drawn, Grid, Pairs, Words
from bridge_memory.report.printing import print_blocks
from bridge_memory.residual import SIGN, SIGN_PERCENT, percent
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.gpus import find_gpu

if TYPE_CHECKING:
    from bridge_memory.cards.gpu import Gpu
    from bridge_memory.comparison.residuals import StageResidual
    from bridge_memory.comparison.snapshot import Attribution

EXIT_BEYOND = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "measured", metavar="MEASURED",
        help="a log of Megatron-LM or Megatron Bridge, MemoryReport's journal, or torch's memory snapshot (.pickle)",
    )  # fmt: skip
    add_run_arguments(parser)
    add_output_arguments(parser, f"by the schema {SCHEMA}", own=("html",))
    output = parser.add_argument_group("comparison")
    output.add_argument("--tolerance", type=float, metavar="PERCENT",
                        help="exit code 1 if a peak is off by more than this percentage of the measured one")
    output.add_argument("--gpu", metavar="NAME", help="the GPU that it ran on (default: any Hopper)")
    output.add_argument("--snapshot-stage", type=int, default=0, metavar="N",
                        help="pipeline stage of the snapshot's rank (default: 0)")
    output.add_argument("--snapshot-device", "--device", type=int, metavar="N",
                        help="device in the snapshot (default: the one with most memory)")
    output.add_argument("--use-tp-pp-dp-mapping", action="store_true",
                        help="ranks of the log are ordered TP, PP, DP (Megatron-LM's flag of this name)")


def run(args: argparse.Namespace) -> int:
    """Compare and print. 0, or 1 where --tolerance is exceeded."""
    if args.tolerance is not None and not 0 <= args.tolerance < float("inf"):
        raise SpecError(f"--tolerance is {args.tolerance}; give a percentage of 0 or more")
    tolerance = None if args.tolerance is None else args.tolerance / 100.0
    found = compare(
        args.measured, given_run(args), stage=args.snapshot_stage, device=args.snapshot_device,
        pp_before_dp=args.use_tp_pp_dp_mapping,
    )  # fmt: skip
    if tolerance is not None and isinstance(found, SnapshotComparison) and found.estimate is None:
        raise SpecError("--tolerance needs a prediction; name the MODEL and its flags, or give --megatron-args")
    beyond = found.beyond(tolerance)
    phases = None if isinstance(found, SnapshotComparison) else found.phases(_gpu(args))
    if isinstance(found, SnapshotComparison):
        if args.json:
            print(json.dumps(found.as_json(args.measured, tolerance), indent=2))
        else:
            _print_snapshot(args, found, bool(beyond))
    elif args.json:
        print(json.dumps(found.as_json(args.measured, tolerance, phases), indent=2))
    elif args.format == "html":
        print(_page(args, found, beyond, _phase_blocks(phases)), end="")
    else:
        table = _table(found.stages, beyond, args.tolerance)
        print_blocks([_words(found.stages, bool(beyond)), table, *_phase_blocks(phases)])
    return EXIT_BEYOND if beyond else 0


def given_run(args: argparse.Namespace) -> RunSpec | None:
    """The run of the flags; None where they name none."""
    gpu = _gpu(args)
    sources = ("model", "custom_config", "megatron_args", "container", "bridge_recipe", *FILES)
    if all(getattr(args, source) is None for source in sources):
        return None
    return run_on_gpus(args, [] if gpu is None else [gpu])


def _gpu(args: argparse.Namespace) -> Gpu | None:
    return None if args.gpu is None else find_gpu(args.gpu)


# ---- logs and JSON lines ----


def _page(args: argparse.Namespace, found: LogComparison, beyond: list[int], phases: Sequence[Drawn]) -> str:
    """The estimate with what was measured over it; of a journal also its steps, which is all there is without a run."""
    from bridge_memory.calibration import journal
    from bridge_memory.report.history import History
    from bridge_memory.report.page.one_file import Measured, blocks_page, estimate_page

    rows, result = found.stages, found.estimate
    table = _table(rows, beyond, args.tolerance)
    history = History(journal.records(found.text.splitlines()))
    if result is None:
        said = [Words("", table.notes, "bad" if beyond else "")] if table.notes else []
        return blocks_page(history.title, [*said, *history.blocks(), *phases], args.command_line, under=history.under())
    stages = {r.stage: (r.max_allocated, r.allocated) for r in rows if r.ranks}
    steps = [block for block in history.blocks() if isinstance(block, Chart) and block.kind == "plot"]
    return estimate_page(
        result, flags=args.command_line, measured=Measured(_words(rows, bool(beyond)), stages, [table, *phases, *steps])
    )


def _words(rows: Sequence[StageResidual], beyond: bool) -> Words:
    """The comparison in a sentence."""
    off = [(r.error, r) for r in rows if r.error is not None]
    if not off:
        return Words("", ("no measured peak to compare the prediction with",), "open")
    share, worst = max(off, key=lambda one: abs(one[0]))
    where = f" of stage {worst.stage}, the furthest off," if len(off) > 1 else f" of stage {worst.stage}"
    return _sentence(where, worst.predicted_peak, worst.max_allocated or 0, share, beyond)


def _sentence(where: str, predicted: int, measured: int, share: float, beyond: bool) -> Words:
    from bridge_memory.report.history import words_off

    found, said = _gib(measured), _gib(predicted)
    words = f"Measured: the peak{where} is {found} GiB; {said} GiB were predicted, {words_off(share)}"
    tone = "bad" if beyond else "good" if abs(share) <= 0.03 else "open"
    return Words("", (words,), tone)


def _gib(value: int | None, sign: str = "") -> str:
    return "-" if value is None else f"{value / GIB:{sign}.2f}"


def _table(rows: Sequence[StageResidual], beyond: list[int], tolerance: float | None) -> Grid:
    cells = tuple(
        (
            str(r.stage), _gib(r.predicted_static), _gib(r.allocated), _gib(r.static_residual, "+"),
            _gib(r.predicted_peak), _gib(r.max_allocated), _gib(r.residual, "+"),
            percent(r.error),
            "-" if r.worst_rank is None else str(r.worst_rank), _gib(r.spread) if r.ranks > 1 else "-",
        )
        for r in rows
    )  # fmt: skip
    heads = ("stage", "static", "allocated", "diff", "peak", "max alloc.", "diff", "diff %", "rank", "spread")
    notes = [
        "static, peak: predicted; allocated, max alloc.: measured on the rank with the highest peak; "
        "spread: of max alloc. over the stage's ranks"
    ]
    unmeasured = [str(r.stage) for r in rows if not r.ranks]
    if unmeasured:
        notes.append(f"no figures of stages {', '.join(unmeasured)}")
    if beyond:
        notes.append(f"beyond {tolerance:g} %: stage {', '.join(map(str, beyond))}")
    columns = tuple(Column(h) for h in heads)
    return Grid(f"Predicted and measured, GiB; diff: {SIGN_PERCENT}", columns, cells, notes=tuple(notes))


# ---- phases of a journal ----


def _phase_blocks(phases: PhaseComparison | None) -> list[Words | Grid]:
    """What a journal says of the phases of its job."""
    if phases is None:
        return []
    from bridge_memory.report.history import words_off

    rows: list[tuple[str, ...]] = []
    for row in phases.worst_of_each:
        figures = [getattr(row, name) for name in FIGURES]
        first = (row.name, str(row.record.stage))
        rows.append((*first, "measured", *(_range(figure.measured) for figure in figures)))
        if any(figure.predicted for figure in figures):
            rows.append(("", "", "predicted", *(_range(figure.predicted) for figure in figures)))
            rows.append(("", "", "diff %", *(percent(figure.error) for figure in figures)))
    words, worst = "Phases: nothing to compare them with", phases.worst
    tone = "open"
    if worst is not None:
        off, figure = worst.error or 0.0, getattr(worst, worst.decisive)
        what = "memory of the driver" if worst.decisive == "driver" else "allocated memory"
        found = f"{_range(figure.measured)} GiB measured, {_range(figure.predicted)} predicted"
        where = f"Phases on {phases.gpu}:"
        if off:
            which = f"{worst.name} (stage {worst.record.stage})"
            words = f"{where} furthest off is {which}, {words_off(off)}: {what} {found}"
            tone = "good" if abs(off) <= 0.03 else "open" if abs(off) <= 0.10 else "bad"
        else:
            words, tone = f"{where} all within their ranges", "good"
    notes = (
        *phases.notes,
        "of each phase the stage that is furthest off; allocated, reserved: torch's peaks, a range where another phase "
        "was higher, as they are never reset; driver: reserved, and outside at the end of the phase, of the whole GPU "
        "unless NVML tells its processes apart; diff: 0 where the ranges meet",
        *(("load: predicted as an import from Hugging Face",) if any("load" in r.record.phases for r in phases.rows)
          else ()),
    )  # fmt: skip
    columns = (
        Column("phase", words=True), Column("stage"), Column("", words=True), *(Column(name) for name in FIGURES)
    )  # fmt: skip
    return [Words("", (words,), tone), Grid(f"Phases, GiB; diff: {SIGN_PERCENT}", columns, tuple(rows), notes=notes)]


def _range(found: tuple[int, int | None] | None) -> str:
    if found is None:
        return "-"
    least, most = found
    if most is None:
        return f"{_gib(least)} or more"
    return _gib(least) if _gib(least) == _gib(most) else f"{_gib(least)}-{_gib(most)}"


# ---- snapshots ----


def _print_snapshot(args: argparse.Namespace, found: SnapshotComparison, beyond: bool) -> None:
    result, alive, predicted, whole = found.attribution, found.attribution.alive, found.predicted_peak, found.estimate
    blocks = _snapshot_blocks(result, predicted, beyond, args.tolerance)
    if args.format != "html":
        print_blocks(blocks)
        return
    from bridge_memory.report.page.one_file import Measured, blocks_page, estimate_page

    static = None if whole is None else whole.stages[found.stage].static_bytes
    drawn = [*_snapshot_charts(result, predicted, static), *blocks]
    if whole is None:
        page = blocks_page("A memory snapshot at its peak", drawn, args.command_line)
    else:
        assert predicted is not None
        share = found.error or 0.0
        where = f" of stage {found.stage}" if len(whole.stages) > 1 else ""
        words = _sentence(where, predicted, alive.peak_bytes, share, beyond)
        measured = Measured(words, {found.stage: (alive.peak_bytes, None)}, drawn)
        page = estimate_page(whole, flags=args.command_line, stage=found.stage, measured=measured)
    print(page, end="")


def _snapshot_charts(result: Attribution, predicted: int | None, static: int | None) -> list[Drawn]:
    """What was allocated over the events of the trace, and parts at the peak beside those predicted."""
    found: list[Drawn] = []
    curve = result.alive.curve
    if len(curve) > 1:
        series: list[dict[str, Any]] = [
            {"name": "measured", "tone": "measured", "line": "solid", "dots": False,
             "points": [[event, size / GIB] for event, size in curve]}
        ]  # fmt: skip
        levels = (("predicted peak", "predicted", predicted), ("predicted between steps", "other", static))
        for name, tone, level in levels:
            if level is not None:
                ends = (curve[0][0], curve[-1][0])
                series.append({"name": name, "tone": tone, "line": "dashed", "dots": False,
                               "points": [[event, level / GIB] for event in ends]})  # fmt: skip
        y = {"title": "allocated", "unit": "GiB", "zero": True}
        data = {"x": {"title": "allocations and frees recorded"}, "y": y, "series": series}
        found.append(Chart("Measured over the snapshot's trace", "plot", data))
    rows = [
        {"name": str(g.group), "predicted": None if predicted is None else g.predicted, "measured": g.measured}
        for g in result.groups
    ]
    found.append(Chart("At the peak", "pairs", {"rows": rows}))
    return found


def _snapshot_blocks(
    result: Attribution, predicted: int | None, beyond: bool, tolerance: float | None
) -> list[Block]:
    alive = result.alive
    facts = [
        ("peak", f"{_gib(alive.peak_bytes)} GiB allocated, {alive.events_after_peak} events before the snapshot"),
        ("end", f"{_gib(alive.end_bytes)} GiB allocated"),
        ("attributed", f"{100 * result.attributed_share:.1f} % of the peak"),
    ]
    if predicted is not None:
        difference = alive.peak_bytes - predicted
        facts.insert(1, ("predicted", f"{_gib(predicted)} GiB; {SIGN} {_gib(difference, '+')} GiB"))
    rows = tuple(
        (
            str(g.group), _gib(g.measured), "-" if predicted is None else _gib(g.predicted),
            "-" if predicted is None else _gib(g.measured - g.predicted, "+"), str(g.blocks),
        )
        for g in result.groups
    )  # fmt: skip
    heads = ("measured", "predicted", "diff", "blocks")
    columns = (Column("alive at the peak", words=True), *(Column(head) for head in heads))
    notes = (f"the peak is off by more than {tolerance:g} %",) if beyond else ()
    table = Grid(f"by component, GiB; diff: {SIGN}", columns, rows, notes=notes)
    blocks: list[Block] = [Pairs("snapshot", tuple(facts)), table]
    if result.unattributed:
        # What is too small to be seen in this table is left to --json.
        seen = [(frames, size) for frames, size in result.unattributed if size >= 0.001 * alive.peak_bytes]
        lines = tuple(f"{_gib(size)} GiB  {frames}" for frames, size in seen[:10])
        if lines:
            blocks.append(Bullets("unattributed, by frames", lines))
    return blocks
