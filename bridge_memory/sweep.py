"""A fleet's question: of every model, card, number of GPUs, sequence length and engine the best layout, and its time.

Each cell is one search; cells are answered one after the other or spread over processes, and written as they are found,
so that a sweep that was killed goes on where it stopped.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from bridge_memory.api.planning import search
from bridge_memory.emit.megatron import recompute_words, split_words
from bridge_memory.emit.torch_words import (
    checkpointing_words,
    liger_words,
    offload_words,
    overlap_words,
    sharded_words,
)
from bridge_memory.files import Unparsed, parse_yaml, read_text
from bridge_memory.job.job import whole_fit
from bridge_memory.plan.jobs import spread
from bridge_memory.plan.megatron.settings import PRECISIONS, shown_word
from bridge_memory.plan.reserve import reserve_words
from bridge_memory.readers.resolve import resolve_model
from bridge_memory.spec import BatchSpec, RunSpec, SpecError, show
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.spec.parts import WITH_TRANSFORMERS

#: Column of a question -> its name in YAML, where it has several values.
AXES = {
    "model": "models", "gpu": "gpus", "num_gpus": "num_gpus", "seq_length": "seq_lengths", "engine": "engines",
    "precision": "precisions",
}  # fmt: skip
_NUMBERS = ("num_gpus", "seq_length", "global_batch_size", "tokens")
_NEEDED = ("model", "gpu", "num_gpus", "seq_length")
_DEFAULTS: dict[str, Any] = {"engine": "megatron_ddp", "precision": "bf16"}
#: Cells of one sweep, at most.
MOST_CELLS = 1_000_000


class Cell(NamedTuple):
    """One question. ``global_batch_size``: sequences of a step; ``tokens``: what is trained on in all; 0: not asked."""

    model: str
    gpu: str
    num_gpus: int
    seq_length: int
    engine: str
    precision: str
    global_batch_size: int
    tokens: int = 0


#: Of a cell that was answered: the verdict of ``estimate`` on the layout, by the whole job, or "refused"; why it is
#: not "fits", and whether the layout keeps a search's reserve; the layout and its figures, empty where none.
ANSWER = (
    "verdict", "reason", "layout", "peak_gib", "free_gib", "step_seconds", "tokens_per_second_per_gpu", "gpu_hours",
    "days", "looked_at", "fitting",
)  # fmt: skip
COLUMNS = (*Cell._fields, *ANSWER)


def cells_of(path: str) -> list[Cell]:
    """The cells that a file asks for: of YAML every combination of its lists, of CSV one a line, each once. Raises
    SpecError, which names the field and the line."""
    text = read_text(path, "give a YAML or CSV file of what to sweep")
    asked = _of_csv(text, path) if path.lower().endswith(".csv") else _of_yaml(text, path)
    found = list(dict.fromkeys(asked))
    if not found:
        raise SpecError(f"{show(path)} asks for nothing; give at least one model, gpu, num_gpus and seq_length")
    return found


def _of_yaml(text: str, path: str) -> Iterator[Cell]:
    try:
        document = parse_yaml(text)
    except Unparsed as error:
        raise SpecError(f"{show(path)} is no YAML: {error}; write lists such as `models: [Qwen/Qwen3-8B]`") from None
    if not isinstance(document, dict):
        raise SpecError(f"{show(path)} is no mapping; write lists such as `models: [Qwen/Qwen3-8B]`")
    known = {*AXES.values(), "global_batch_size", "tokens"}
    for name in document:
        if name not in known:
            raise SpecError(f"{show(str(name))} in {show(path)} is unknown; use some of {', '.join(sorted(known))}")
    lists = {}
    for axis, name in AXES.items():
        values = document.get(name, [_DEFAULTS[axis]] if axis in _DEFAULTS else [])
        lists[axis] = values if isinstance(values, list) else [values]
        if not lists[axis]:
            raise SpecError(f"{name} is missing in {show(path)}; give a list")
    if (number := len(lists["model"]) * len(lists["gpu"])) * len(lists["num_gpus"]) > MOST_CELLS:
        raise SpecError(f"{show(path)} asks for more than {MOST_CELLS:,} cells ({number:,} models x cards); split it")
    for combination in product(*lists.values()):
        row = dict(zip(lists, combination, strict=True))
        yield _cell({**row, **{n: document[n] for n in ("global_batch_size", "tokens") if n in document}}, show(path))


def _of_csv(text: str, path: str) -> Iterator[Cell]:
    rows = csv.DictReader(io.StringIO(text))
    unknown = set(rows.fieldnames or ()) - set(Cell._fields)
    if unknown:
        raise SpecError(
            f"column {show(sorted(map(str, unknown))[0])} of {show(path)} is unknown; use some of "
            f"{', '.join(Cell._fields)}"
        )
    for row in rows:
        if None in row:
            raise SpecError(f"line {rows.line_num} of {show(path)} has more cells than there are columns; drop them")
        yield _cell({k: v.strip() for k, v in row.items() if v and v.strip()}, f"line {rows.line_num} of {show(path)}")


def _cell(row: Mapping[str, Any], where: str) -> Cell:
    values = {**_DEFAULTS, **row}
    for name in (*_NEEDED, "global_batch_size"):
        if name not in values:
            raise SpecError(f"{name} is missing in {where}; give it")
    for name in _NUMBERS:
        if name in values:
            values[name] = _number(name, values[name], where)
    for name in ("model", "gpu", "engine", "precision"):
        if not isinstance(values[name], str):
            raise SpecError(f"{name} ({show(values[name])}) in {where} is no text; give a name")
    if values["precision"] not in PRECISIONS:
        raise SpecError(f"precision ({show(values['precision'])}) in {where} is unknown; use {', '.join(PRECISIONS)}")
    return Cell(**values)


def _number(name: str, value: Any, where: str) -> int:
    """YAML reads 15e12 as text, and 1_000 too."""
    try:
        number = float(value) if not isinstance(value, bool) else -1.0
    except (TypeError, ValueError):
        number = -1.0
    if not 1 <= number < 1e18 or number != int(number):
        raise SpecError(f"{name} ({show(value)}) in {where} is no whole number of 1 or more; mend it")
    return int(number)


@dataclass(frozen=True)
class Answering:
    """A cell's row of the table, as text: what ``spread`` sends to processes. It raises nothing of ours."""

    def __call__(self, cell: Cell) -> dict[str, str]:
        try:
            answer = _answer(cell)
        except SpecError as error:
            answer = {"verdict": "refused", "reason": str(error)}
        return {name: str(value) for name, value in {**cell._asdict(), **answer}.items()}


def _answer(cell: Cell) -> dict[str, Any]:
    model = resolve_model(cell.model)
    run = RunSpec(model=model, batch=BatchSpec(seq_length=cell.seq_length)).with_fields(**PRECISIONS[cell.precision])
    found = search(
        run, gpu=cell.gpu, num_gpus=cell.num_gpus, global_batch_size=cell.global_batch_size, engine=cell.engine
    )
    counted = {"looked_at": found.looked_at, "fitting": len(found.rows)}
    if not found.rows:
        alone = found.without_activations == found.looked_at and found.looked_at > 0
        why = "weights, gradients and optimizer states alone are more" if alone else "none of the layouts fits"
        if not found.looked_at:
            why = "no layout: " + ", ".join(f"{name} refuses {number:,}" for name, number in found.refused.items())
        return {"verdict": "does not fit", "reason": why, **counted}
    (best,), keeping, _ = found.ranked(1)
    fit = whole_fit(best.run, find_gpu(cell.gpu))
    speed, experts = best.tokens_per_second_per_gpu, best.run.model.has_experts
    cost = {}
    if cell.tokens:
        hours = cell.tokens / speed / 3600
        cost = {"gpu_hours": f"{hours:.1f}", "days": f"{hours / cell.num_gpus / 24:.3f}"}
    return {
        "verdict": str(fit.verdict), "layout": layout_words(best.run),
        "reason": "; ".join(filter(None, (fit.decided_by, "" if keeping else f"without {reserve_words(experts)}"))),
        "peak_gib": f"{fit.peak_bytes / 2**30:.3f}", "free_gib": f"{fit.headroom_bytes / 2**30:.3f}",
        "step_seconds": f"{best.time.seconds:.4f}",
        "tokens_per_second_per_gpu": f"{speed:.1f}", **cost, **counted,
    }  # fmt: skip


def layout_words(run: RunSpec) -> str:
    """"tp2 pp4 ep8 mbs1 dispatcher=HybridEP recompute=moe_act", with sizes of one left out, and what is not set."""
    p = run.parallel
    sizes = {"tp": p.tp, "pp": p.pp, "vpp": p.vpp, "cp": p.cp, "ep": p.ep,
             "etp": p.etp if run.model.has_experts else 1, "mbs": run.batch.micro_batch_size}
    words = [f"{name}{size}" for name, size in sizes.items() if size > 1 or name == "mbs"]
    engine = run.data_parallel.engine
    words += [engine] * (engine != "megatron_ddp")
    if engine in WITH_TRANSFORMERS:
        named = {
            "checkpointing": checkpointing_words(run), "sharded": sharded_words(run), "options": overlap_words(run),
            "offload": offload_words(run), "liger": liger_words(run),
        }  # fmt: skip
    else:
        named = {
            "split": split_words(p), "dispatcher": shown_word("dispatcher", run) if p.ep * p.etp > 1 else "",
            "offload": shown_word("offload", run), "optimizer_offload": shown_word("optimizer_offload", run),
            "recompute": recompute_words(run.recompute),
        }  # fmt: skip
    words += [f"{name}={_joined(text)}" for name, text in named.items() if text not in ("", "even", "none", "0")]
    return " ".join(words)


def _joined(text: str) -> str:
    """Words without spaces: "first 7, last 9" as "first_7+last_9"."""
    return text.replace(", ", "+").replace(",", "+").replace(" ", "_")


# ---- the table ----


def answered(path: str) -> list[dict[str, str]]:
    """The rows of a table that a sweep has begun; a last line that was half written is taken off the file. Raises
    SpecError for a file that is no such table."""
    if not os.path.exists(path):
        return []
    text = read_text(path, "give another --table")
    whole = text[: text.rfind("\n") + 1]
    rows = list(csv.DictReader(io.StringIO(whole)))
    if whole and tuple(next(csv.reader(io.StringIO(whole)))) != COLUMNS:
        raise SpecError(f"--table ({show(path)}) is a file that is no table of a sweep; give another")
    if text and not whole:
        raise SpecError(f"--table ({show(path)}) is a file that is no table of a sweep; give another")
    if whole != text:
        os.truncate(path, len(whole.encode()))
    return rows


def key_of(row: Mapping[str, str]) -> tuple[str, ...]:
    """What a row is the answer to."""
    return tuple([row[name] for name in Cell._fields])


def left_to_do(cells: Iterable[Cell], rows: Iterable[Mapping[str, str]]) -> list[Cell]:
    """The cells without an answer among ``rows``."""
    known = {key_of(row) for row in rows}
    return [cell for cell in cells if tuple(map(str, cell)) not in known]


def sweep(
    cells: Sequence[Cell], path: str, *, jobs: int = 1, backend: str | None = None
) -> Iterator[dict[str, str]]:
    """Answers, each written to the table at ``path`` before it is yielded; a new table where there is none."""
    new = not os.path.exists(path) or not os.path.getsize(path)
    try:
        with open(path, "a", encoding="utf-8", newline="") as table:
            writer = csv.DictWriter(table, COLUMNS, restval="", lineterminator="\n")
            if new:
                writer.writeheader()
                table.flush()
            for row in spread(jobs, Answering(), cells, backend):
                writer.writerow(row)
                table.flush()
                yield {name: row.get(name, "") for name in COLUMNS}
    except OSError as error:
        raise SpecError(f"--table ({show(path)}) cannot be written: {error.strerror}; give another file") from None


def write_parquet(rows: Sequence[Mapping[str, str]], path: str) -> None:
    """The same table by column types. Raises SpecError where pyarrow is not installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise SpecError(f"--table ({show(path)}) needs pyarrow; `pip install pyarrow`, or give a .csv file") from None
    words = {"model", "gpu", "engine", "precision", "verdict", "reason", "layout"}
    whole = {"num_gpus", "seq_length", "global_batch_size", "tokens", "looked_at", "fitting"}
    columns: dict[str, list[Any]] = {}
    for name in COLUMNS:
        read: Any = str if name in words else int if name in whole else float
        columns[name] = [read(row[name]) if row[name] else None for row in rows]
    parquet.write_table(pyarrow.table(columns), path)
