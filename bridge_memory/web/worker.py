"""The process of one job: reads a question from the first line of stdin, writes one JSON object per line to stdout.

    {"progress": {...}} ... then {"result": {...}} or {"refused": {field, message, fix, changes}}
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bridge_memory.processes import end_with_stdin
from bridge_memory.spec import SpecError

#: Layouts of the Pareto front that are reported, at most.
_FRONT = 60
#: Memory of a comparison, bytes: without a file, and for each byte of it. A snapshot's make 12 to 16.
_MORE_MEMORY, _PER_BYTE = 1 << 30, 24
#: Seconds between two lines of progress.
_EVERY = 0.2


def main() -> None:
    """Answer the question. SIGINT cancels it, also where a shell started the server in the background and so ignores
    the signal."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Other output (a library's warning) must not mix with the lines.
    out, sys.stdout = sys.stdout, sys.stderr

    def say(document: Mapping[str, Any]) -> None:
        print(json.dumps(document), file=out, flush=True)

    from bridge_memory.web.api import Refused

    asked = json.loads(sys.stdin.readline())
    end_with_stdin()
    try:
        say({"result": _JOBS[asked["job"]](asked, say)})
    except Refused as refused:
        say({"refused": refused.document})
    except SpecError as error:
        from bridge_memory.web.fixes import refusal, untried

        say({"refused": refusal(error, asked.get("question") or {}, untried)})
    except MemoryError:
        from bridge_memory.web.api import plain_refusal

        say({"refused": plain_refusal("there is not enough memory for it; give less")})
    except KeyboardInterrupt:
        pass


def _search(asked: Mapping[str, Any], say: Any) -> dict[str, Any]:
    """Layouts that fit, or configurations of an engine outside of megatron-core, fastest first."""
    from bridge_memory.plan.found import front_with, ties
    from bridge_memory.report.said import names_of
    from bridge_memory.speed.torch.step_time import TIMED
    from bridge_memory.web import torch_search
    from bridge_memory.web.options import arguments, search_axes

    args, gpu = arguments(asked["question"], hub=asked.get("hub", False))
    if args.model is None and args.custom_config is None and args.megatron_args is None:
        raise SpecError("config says its own layout; choose the model in the list to search others")
    of_torch = getattr(args, "data_parallel.engine", None) in TIMED
    axes, usual = search_axes()["torch" if of_torch else "megatron"]
    vary = {axis for axis in asked["vary"] or usual if axis in axes}
    if not vary:
        raise SpecError(f"vary has none of {', '.join(axes)}; name some of these")
    of = torch_search.search if of_torch else _layouts
    found, sequences, given = of(args, gpu, vary, _progress(say))
    found = found.on(gpu)
    best = found.best(asked["top"]) if found.stopped else found.ranked(asked["top"]).rows
    as_row = partial(torch_search.row, given=asked["question"].get("options") or {}) if of_torch else _row
    return {
        "looked_at": found.looked_at, "fit": len(found.rows), "too_large": found.too_large,
        "tight": found.tight, "stopped": found.stopped,
        "refused": dict(found.refused.most_common(6)), "global_batch_size": sequences,
        "global_batch_size_given": given, "ties": ties(best),
        "not_timed": list(_not_timed(best[0].run, of_torch)) if best else [],
        "not_modelled": names_of(_decisive(best[0], gpu)) if best else [], "rows": [as_row(row) for row in best],
        "front": [as_row(row) for row in front_with(found, best)[:_FRONT]],
    }  # fmt: skip


def _progress(say: Any) -> Callable[[int, int], None]:
    """Says how far a search is, now and then."""
    reported = 0.0

    def progress(looked_at: int, fitting: int) -> None:
        nonlocal reported
        if time.monotonic() - reported > _EVERY:
            reported = time.monotonic()
            say({"progress": {"looked_at": looked_at, "fit": fitting}})

    return progress


def _not_timed(run: Any, of_torch: bool) -> tuple[str, ...]:
    """Features of a run that the time model does not know."""
    if of_torch:
        from bridge_memory.speed.torch.step_time import not_timed

        return tuple(not_timed(run))
    from bridge_memory.speed.megatron.step_time import not_timed as of_megatron

    return tuple(of_megatron(run))


def _layouts(args: Any, gpu: Any, vary: set[str], progress: Any) -> tuple[Any, int, bool]:
    """(megatron-core's layouts that fit, the sequences of a step, whether they were given)."""
    from bridge_memory.arguments.template import template
    from bridge_memory.outside.context import outside_bytes_of
    from bridge_memory.plan.megatron.asked import Asked, asked_space
    from bridge_memory.plan.megatron.search import search
    from bridge_memory.plan.megatron.settings import FIELDS
    from bridge_memory.plan.megatron.space import AXES
    from bridge_memory.speed.hardware import hardware_of
    from bridge_memory.web.api import hardware_for

    hardware = hardware_of(gpu.name)
    for axis in vary:
        for field in (AXES | FIELDS)[axis]:
            vars(args).pop(field, None)
    if "split" not in vary and "pp" in vary:
        raise SpecError("vary (pp) needs split (how layers are split over stages); vary both")
    given, run = template(args, gpu, ("parallel.world_size", "batch.global_batch_size"))
    if hardware_for(run, gpu) is None:
        raise SpecError(
            f"engine ({run.data_parallel.engine}) is not searched on the page; use `bridge-memory search --engine "
            f"{run.data_parallel.engine}`, or megatron_ddp here"
        )
    gpus, sequences = given.get("parallel.world_size"), given.get("batch.global_batch_size")
    if gpus is None:
        raise SpecError("--num-gpus is missing; say on how many GPUs the layout has to run")
    if sequences is None:
        sequences = 8 * gpus
    space, _ = asked_space(
        run, gpu, gpus, hardware.domain, sequences, fixed=frozenset(AXES.keys() - vary), ranges={}, exhaustive=False,
        asked=Asked(None, {}, {}), given=frozenset({"dispatcher"} - vary),
    )  # fmt: skip
    found = search(space, hardware, capacity=gpu.capacity_bytes, outside=partial(outside_bytes_of, gpu=gpu),
                   progress=progress)  # fmt: skip
    return found, sequences, "batch.global_batch_size" in given


def _decisive(row: Any, gpu: Any) -> tuple[str, ...]:
    """What is not modelled of a row, where it can change whether the row fits."""
    from bridge_memory.estimation import estimate
    from bridge_memory.spec.unmodelled import bounds
    from bridge_memory.verdict import headroom

    features = estimate(row.run).unmodelled
    most = bounds(row.peak, features).most
    return features if most is None or headroom(gpu, most, row.run) < 0 else ()


def _row(row: Any) -> dict[str, Any]:
    from bridge_memory.emit.megatron import layout_fields, recompute_words
    from bridge_memory.plan.megatron.settings import shown_word
    from bridge_memory.plan.megatron.space import AXES, DISPATCHER
    from bridge_memory.web.options import options

    run, p = row.run, row.run.parallel
    names = {option.field: option.name for option in options().values()}
    varied = [field for fields in (*AXES.values(), DISPATCHER) for field in fields]
    chosen: dict[str, Any] = {names[field]: None for field in varied if field in names}
    for field, value in layout_fields(run).items():
        chosen[names[field]] = list(value) if isinstance(value, tuple) else value
    chosen |= {"num-gpus": p.world_size, "global-batch-size": run.batch.global_batch_size}
    return {
        "options": chosen, "tp": p.tp, "pp": p.pp, "vpp": p.vpp, "cp": p.cp, "ep": p.ep, "etp": p.etp,
        "mbs": run.batch.micro_batch_size, "recompute": recompute_words(run.recompute),
        "dispatcher": shown_word("dispatcher", run), "peak_bytes": row.peak, "stage": row.stage,
        "headroom_bytes": row.headroom, "step_seconds": row.time.seconds,
        "tokens_per_second_per_gpu": row.tokens_per_second_per_gpu,
    }  # fmt: skip


def _fit(asked: Mapping[str, Any], say: Any) -> dict[str, Any]:
    """What to recompute and offload so that the run fits as it is laid out, in the least time: options to set, or why
    nothing does."""
    from bridge_memory.components import GIB
    from bridge_memory.emit.fixes import state_alone
    from bridge_memory.outside.context import outside_bytes_of
    from bridge_memory.plan.megatron.fit import changed_fields, fit
    from bridge_memory.spec.parts import MEGATRON_ENGINES
    from bridge_memory.speed.hardware import hardware_of
    from bridge_memory.web.options import asked as parsed
    from bridge_memory.web.options import options

    run, gpu, _ = parsed(asked["question"], hub=asked.get("hub", False))
    engine = run.data_parallel.engine
    if engine not in MEGATRON_ENGINES or run.implementation.torch_layers:
        raise SpecError(f"engine ({engine}) is not fitted on the page; use `bridge-memory fit`, or a suggested change")
    found = fit(run, hardware_of(gpu.name), capacity=gpu.capacity_bytes, outside=partial(outside_bytes_of, gpu=gpu),
                progress=_progress(say)).on(gpu)  # fmt: skip
    rows = found.ranked(1).rows
    if not rows:
        least = state_alone(found.lowest.run, gpu) or f"the lowest peak is {found.lowest.peak / GIB:.1f} GiB"
        words = f"no recomputation or offloading makes it fit: {least}"
        return {"looked_at": found.looked_at, "fit": 0, "options": None, "words": words}
    names = {option.field: option for option in options().values()}
    changed = {names[field].name: names[field].plain(value)
               for field, value in changed_fields(run, rows[0].run).items() if field in names}  # fmt: skip
    changed = {name: None if value == [] else value for name, value in changed.items()}
    return {"looked_at": found.looked_at, "fit": len(found.rows), "options": changed, "words": ""}


def _compare(asked: Mapping[str, Any], say: Any) -> dict[str, Any]:
    """Compare a log, a journal or a snapshot with the prediction."""
    from bridge_memory.comparison.compare import SCHEMA, SnapshotComparison, compare
    from bridge_memory.web.options import asked as parsed

    question = asked["question"]
    one = None if question is None else parsed(question, hub=asked.get("hub", False))
    _bound_memory(_MORE_MEMORY + _PER_BYTE * os.path.getsize(asked["path"]))
    why = _why(asked["path"], None if one is None else one.run)
    lines = None if question is None else _lines(asked["path"], question)
    if lines is not None:
        return {"schema": SCHEMA, "measured": asked["name"], "stages": [], "tolerance": None, "beyond": [], "why": why,
                "log": lines}  # fmt: skip
    try:
        found = compare(asked["path"], None if one is None else one.run, stage=asked.get("stage", 0))
        if isinstance(found, SnapshotComparison):
            return {**found.as_json(asked["name"]), "why": why}
        phases = found.phases()  # on the card that the journal names, else on the page's
        if phases is not None and phases.gpu is None and one is not None:
            phases = found.phases(one.gpu)
        return {**found.as_json(asked["name"], phases=phases), "why": why}
    except SpecError as error:  # The file has the name that it came with.
        if why is not None:
            return {"schema": SCHEMA, "measured": asked["name"], "stages": [], "tolerance": None, "beyond": [],
                    "why": why}  # fmt: skip
        raise SpecError(str(error).replace(asked["path"], asked["name"])) from None


def _lines(path: str, question: Mapping[str, Any]) -> dict[str, Any] | None:
    """Memory lines of the log of a post-training job beside its phases; None for another job, and without such lines.
    """
    from bridge_memory.report.rollout import log_table
    from bridge_memory.rollout.answer import answer
    from bridge_memory.rollout.log import compare, readings
    from bridge_memory.web.options import post_training_of

    job = post_training_of(question)
    if job is None:
        return None
    try:
        found = readings(path)
    except SpecError:
        return None
    rows, pool = compare(answer(*job), found)
    table = log_table(rows, pool)
    return {
        "lines": [row.as_json() for row in rows], "pool_bytes": pool, "title": table.title,
        "columns": [column.title for column in table.columns], "rows": [list(row) for row in table.rows],
        "notes": list(table.notes),
    }  # fmt: skip


def _why(path: str, run: Any) -> dict[str, Any] | None:
    """Why the job of a file failed, which may say what ran; None where it did not fail."""
    from bridge_memory.failure.why import why_file

    try:
        found = why_file(path)
        if found.run is None and run is not None:
            found = why_file(path, run)
    except SpecError:
        return None
    return found.as_json()


def _bound_memory(more: int) -> None:
    """Bytes beyond those that this process has; more is a MemoryError. Linux alone says how many it has."""
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + more
    except (ImportError, OSError):
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


_JOBS = {"search": _search, "fit": _fit, "compare": _compare}
