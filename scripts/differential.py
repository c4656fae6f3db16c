"""Test the estimate of random layouts against rehearsals with megatron-core and Transformer Engine.

    python scripts/differential.py --cases 200 --seed 1
    python scripts/differential.py --cases 600 --seed 2 --workers 2 --jsonl found.jsonl \
        --transformer-engine te-2.11 --megatron-core core-0.13 --megatron-core core-0.16 --megatron-core core-0.19

Needs torch and megatron-core. Prints outcomes, errors by quantity and minimal reproductions of failures; writes only
``--jsonl FILE``. Exit code 0: no failure, 1: failures, 2: wrong input.

A case is a command line of ``bridge-memory rehearse``: a model, parallel sizes and options drawn at random
(``differential_cases.py``). It runs in a child process, which runs many cases and is replaced if one kills it or takes
too long. A folder of ``--megatron-core`` (filled by ``pip install --target``) comes first on the path of its processes;
without one, the installed release runs. ``--transformer-engine`` is a folder with Transformer Engine's Python: every
release then runs local modules and Transformer Engine's in turn; without it local modules only. LoRA is rehearsed where
``PYTHONPATH`` has a Megatron Bridge. Equal seeds and folders give equal cases and lines, whatever the number of
processes.

With ``--jsonl FILE`` each case is written when it is done, and ``--resume`` continues such a file: a campaign that was
stopped loses only the case in progress. A case has ``--timeout`` seconds and ``--memory`` GiB; cases that take longer
are counted separately and are no failures.

A failing case is made smaller: options are dropped and numbers lowered as long as it fails alike. Failures are: model
state that is not exact; saved bytes or a peak off by more than BOUND; an error that the real stack did not raise; a run
that the estimate accepts and the real stack refuses, or the reverse. The reverse is only a hint: training loops refuse
more than megatron-core, and kernels that compute nothing refuse nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import subprocess
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from differential_cases import Case, Parser, Stack, cases_of, models_of, parse  # noqa: E402

from bridge_memory.cli import rehearse as command  # noqa: E402
from bridge_memory.files import write_whole  # noqa: E402
from bridge_memory.rehearsal.runnable import on_meta, take_transformer_engine  # noqa: E402
from bridge_memory.rehearsal.world import RehearsalUnavailable  # noqa: E402
from bridge_memory.residual import relative  # noqa: E402
from bridge_memory.spec import SpecError  # noqa: E402

#: Accepted relative error of saved bytes and peaks; model state must be exact.
BOUND = 0.005
#: Cases per child process.
CASES_A_PROCESS = 20

# ---- one case, in a child process ------------------------------------------------------------------


#: Outcomes of a case.
COMPARED, STACK_REFUSES, BOTH_REFUSE, WE_REFUSE, NOT_TRIED, NOT_REHEARSED, CRASH, LATE = (
    "compared", "accepted by the estimate, refused by the real stack", "refused by both",
    "refused by the estimate, run by the real stack", "refused by the estimate, not tried", "not rehearsed", "crash",
    "not done in time",
)  # fmt: skip


@contextmanager
def _nothing_validated() -> Iterator[None]:
    from bridge_memory.spec import run

    names = vars(run)
    before = names["validate"]
    names["validate"] = lambda spec: None
    try:
        yield
    finally:
        names["validate"] = before


def judge(case: Case) -> dict[str, Any]:
    """Run a case in this process. Returns its outcome and the reason or the rows."""
    from bridge_memory.rehearsal.world import StackRefusal, quiet, require_megatron

    try:
        with quiet():
            why_not = take_transformer_engine()
            require_megatron()
            try:
                args = parse(case)
                spec = on_meta(command.described(args), why_not, [])
            except RehearsalUnavailable as error:
                return {"outcome": NOT_REHEARSED, "why": str(error)}
            except SpecError as error:
                return {"outcome": _without_validation(case, why_not), "why": str(error)}
            try:
                return {"outcome": COMPARED, "rows": _rows(spec, args)}
            except StackRefusal as error:
                return {"outcome": STACK_REFUSES, "why": str(error)}
            except RehearsalUnavailable as error:
                return {"outcome": NOT_REHEARSED, "why": str(error)}
            except SpecError as error:
                return {"outcome": NOT_TRIED, "why": str(error)}
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}: {last.name}"
        return {"outcome": CRASH, "why": f"{type(error).__name__} in {where}: {' '.join(str(error).split())[:300]}"}


def _rows(spec: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    from bridge_memory.rehearsal.run import rehearse
    from bridge_memory.rehearsal.summary import rows

    table = [row for row in rows(rehearse(spec, args.stage, rank=args.rank)) if row.found is not None]
    return [
        {"quantity": r.quantity.name, "chunk": r.chunk, "predicted": r.predicted, "rehearsed": r.found} for r in table
    ]


def _without_validation(case: Case, why_not: str) -> str:
    """Whether the real stack refuses what a RunSpec's validation refuses; other refusals are not tried."""
    from bridge_memory.rehearsal.run import rehearse
    from bridge_memory.rehearsal.world import StackRefusal

    try:
        with _nothing_validated():
            args = parse(case)
            rehearse(on_meta(command.described(args), why_not, []), args.stage, rank=args.rank)
    except StackRefusal:
        return BOTH_REFUSE
    except Exception:  # An invalid run may fail in any way.
        return NOT_TRIED
    return WE_REFUSE


def work() -> int:
    """A child process: a case per line on standard input, its result per line on standard output."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    gib = float(os.environ.get(MEMORY, "0"))
    if gib:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30),) * 2)
    for line in sys.stdin:
        given = json.loads(line)
        found = judge(Case(given["model"], tuple((flag, value) for flag, value in given["options"])))
        out.write(json.dumps(found) + "\n")
        out.flush()
    return 0


#: Environment variable with the memory limit of a child process in GiB.
MEMORY = "DIFFERENTIAL_MEMORY_GIB"
WORK = (sys.executable, str(Path(__file__).resolve()), "--work")


class Worker:
    """A child process with a stack on its path. Use ``with``."""

    def __init__(self, stack: Stack, seconds: float, command: Sequence[str] = WORK, memory: float = 0.0) -> None:
        self._stack, self._seconds, self._command, self._memory = stack, seconds, command, memory
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def judge(self, case: Case) -> dict[str, Any]:
        """The result of the case; a process that dies or takes too long is replaced."""
        if self._process is None:
            self._process = subprocess.Popen(
                self._command, env={**self._stack.environment(), MEMORY: f"{self._memory:g}"}, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8",
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        late = threading.Timer(self._seconds, process.kill)
        late.start()
        try:
            process.stdin.write(json.dumps({"model": case.model, "options": case.options}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            ran_out = not late.is_alive()
            late.cancel()
        if line:
            found: dict[str, Any] = json.loads(line)
            return found
        self.stop()
        if ran_out:
            return {"outcome": LATE, "why": f"the process took more than {self._seconds:g} seconds"}
        return {"outcome": CRASH, "why": "the process died"}


# ---- failures --------------------------------------------------------------------------------------

STATE = ("PARAMETERS", "WEIGHTS", "FP8_COPIES", "GRADIENTS", "OPTIMIZER")
#: Compared within BOUND. Other rows of the rehearsal are part of these, or equal in both columns by construction.
BOUNDED = ("SAVED", "FORWARD", "BACKWARD", "PEAK")


def relative_error(predicted: int, rehearsed: int) -> float:
    """(rehearsed - predicted) / rehearsed; infinite where nothing was rehearsed."""
    found = relative(rehearsed, predicted)
    return found if found is not None else -float("inf") if predicted else 0.0


def error_of(row: dict[str, Any]) -> float:
    """The relative error of a row."""
    return relative_error(row["predicted"], row["rehearsed"])


def is_off(row: dict[str, Any]) -> bool:
    if row["quantity"] in STATE:
        return bool(row["predicted"] != row["rehearsed"])
    return row["quantity"] in BOUNDED and abs(error_of(row)) > BOUND


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a case: quantities that are off, or an outcome and its message without numbers."""

    outcome: str
    words: str = ""
    quantities: frozenset[str] = frozenset()

    def stays_in(self, other: Failure | None) -> bool:
        """Whether ``other``, of a smaller case, is the same failure."""
        if other is None or other.outcome != self.outcome:
            return False
        return bool(self.quantities & other.quantities) if self.quantities else self.words == other.words

    def text(self) -> str:
        return f"off: {', '.join(sorted(self.quantities))}" if self.quantities else f"{self.outcome}: {self.words}"


def failure_of(found: dict[str, Any]) -> Failure | None:
    """None for a case that is right, refused by both sides, not rehearsed, or not done in time."""
    if found["outcome"] == COMPARED:
        off = frozenset(row["quantity"] for row in found["rows"] if is_off(row))
        return Failure(COMPARED, quantities=off) if off else None
    if found["outcome"] in (BOTH_REFUSE, NOT_TRIED, NOT_REHEARSED, LATE):
        return None
    return Failure(found["outcome"], re.sub(r"\d+", "N", found["why"]))


def smaller(case: Case) -> Iterator[Case]:
    """Cases of the preset in place of an odd config; with half of the options, three quarters, ..., one option less, or
    one lower number."""
    if case.model.startswith("{"):
        yield replace(case, model=json.loads(case.model)["_name_or_path"])
    size = len(case.options) // 2
    while size:
        for i in range(0, len(case.options), size):
            yield replace(case, options=case.options[:i] + case.options[i + size :])
        size //= 2
    for i, (flag, value) in enumerate(case.options):
        shorter = [",".join(v for v in value.split(",") if v != left_out) for left_out in value.split(",")]
        if value.isdecimal() and flag != "--num-gpus":
            n = int(value)
            shorter = [str(v) for v in dict.fromkeys((1, n // 2, n - 1)) if 0 < v < n or (flag == "--stage" and v < n)]
        elif "," not in value:
            continue
        for v in shorter:
            yield replace(case, options=(*case.options[:i], (flag, v), *case.options[i + 1 :]))


def shrunk(case: Case, failure: Failure, judged: Callable[[Case], dict[str, Any]]) -> Case:
    """The smallest case found with the same failure."""
    tried: set[Case] = set()
    again = True
    while again:
        again = False
        for candidate in smaller(case):
            if candidate in tried:
                continue
            tried.add(candidate)
            if failure.stays_in(failure_of(judged(candidate))):
                case, again = candidate, True
                break
    return case


# ---- a campaign ------------------------------------------------------------------------------------


@dataclass
class Found:
    """The result of one case of a campaign."""

    number: int
    stack: Stack
    case: Case
    result: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {
            "case": self.number, "stack": self.stack.title(), "command": self.case.text(), **self.result,
        }  # fmt: skip


@dataclass
class Reproduction:
    """The smallest case of a failure, and the numbers of the cases with that failure."""

    failure: Failure
    stack: Stack
    case: Case
    numbers: list[int]
    result: dict[str, Any]
    #: Fails only after other cases in the same process: a rehearsal leaks state.
    leaked: bool = False

    def as_json(self) -> dict[str, Any]:
        return {
            "reproduction": self.case.text(), "stack": self.stack.title(), "failure": self.failure.text(),
            "cases": self.numbers, "state leak": self.leaked, **self.result,
        }  # fmt: skip

    def explains(self, failure: Failure, found: Found) -> bool:
        """Whether a failing case has the options of this one, so that it need not be made smaller."""
        sizes = {flag: value for flag, value in found.case.options}
        here = all(sizes.get(flag) == value for flag, value in self.case.options)
        return not self.leaked and here and found.stack == self.stack and self.failure.stays_in(failure) and (
            self.case.model == found.case.model or bool(self.case.options)
        )


@dataclass
class Campaign:
    """Runs cases in a pool of child processes."""

    workers: int = 1
    seconds: float = 300.0
    command: Sequence[str] = WORK
    write: Callable[[dict[str, Any]], None] = field(default=lambda line: None)
    memory: float = 0.0

    def run(
        self, cases: Sequence[tuple[Stack, Case]], done: Mapping[int, dict[str, Any]] = MappingProxyType({})
    ) -> list[Found]:
        """Judge every case that is not in ``done``, and write each result at once. Which cases of a stack share a
        process does not depend on the number of workers."""
        by_stack: dict[Stack, list[int]] = {}
        for i, (stack, _) in enumerate(cases):
            by_stack.setdefault(stack, []).append(i)
        tasks = sorted(
            numbers[i : i + CASES_A_PROCESS]
            for numbers in by_stack.values()
            for i in range(0, len(numbers), CASES_A_PROCESS)
        )
        results: dict[int, dict[str, Any]] = dict(done)
        lock = threading.Lock()

        def one(numbers: list[int]) -> None:
            with self._worker(cases[numbers[0]][0]) as worker:
                for i in numbers:
                    if i in done:
                        continue
                    found = worker.judge(cases[i][1])
                    with lock:
                        results[i] = found
                        self.write(Found(i, *cases[i], found).as_json())

        self._spread(tasks, one)
        return [Found(i, *cases[i], results[i]) for i in range(len(cases))]

    def reproduce(self, found: Iterable[Found], most: int) -> list[Reproduction]:
        """Make at most ``most`` failures small; a failure that an earlier one explains is added to it."""
        out: list[Reproduction] = []
        waiting = [(f, failure) for f in found if (failure := failure_of(f.result)) is not None]
        while waiting:
            at, failure = waiting.pop(0)
            known = next((r for r in out if r.explains(failure, at)), None)
            if known is not None:
                known.numbers.append(at.number)
                continue
            if len(out) >= most:
                continue
            made = self._small(at, failure)
            same = next((r for r in out if (r.case, r.stack, r.leaked) == (made.case, made.stack, made.leaked)), None)
            if same is not None:
                same.numbers.append(at.number)
            else:
                out.append(made)
                print(f"{made.failure.text()[:150]}: {made.case.text()}", file=sys.stderr, flush=True)
        return out

    def _worker(self, stack: Stack) -> Worker:
        return Worker(stack, self.seconds, self.command, self.memory)

    def _small(self, at: Found, failure: Failure) -> Reproduction:
        with self._worker(at.stack) as worker:
            alone = worker.judge(at.case)
            if not failure.stays_in(failure_of(alone)):
                return Reproduction(failure, at.stack, at.case, [at.number], at.result, leaked=True)
            case = shrunk(at.case, failure, worker.judge)
        with self._worker(at.stack) as worker:
            return Reproduction(failure, at.stack, case, [at.number], worker.judge(case))

    def _spread(self, tasks: Sequence[list[int]], one: Callable[[list[int]], None]) -> None:
        left: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
        for task in tasks:
            left.put(task)

        def take() -> None:
            while True:
                try:
                    task = left.get_nowait()
                except queue.Empty:
                    return
                one(task)

        threads = [threading.Thread(target=take) for _ in range(self.workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


# ---- the report ------------------------------------------------------------------------------------

_STEPS = (0.0, 0.0001, 0.001, BOUND)


def table(found: Sequence[Found]) -> list[str]:
    """Lines of text: outcomes, and errors by quantity."""
    outcomes = Counter(f.result["outcome"] for f in found)
    out = [f"{outcome:<52}{n:>6}" for outcome, n in outcomes.most_common()]
    rows: dict[str, list[tuple[float, int]]] = {}
    for f in found:
        worst: dict[str, float] = {}
        for row in f.result.get("rows", ()):
            worst[row["quantity"]] = max(worst.get(row["quantity"], 0.0), error_of(row), key=abs)
        for quantity, error in worst.items():
            rows.setdefault(quantity, []).append((error, f.number))
    head = "".join(f"{'exact' if not step else f'<={step:.2%}':>9}" for step in _STEPS)
    out += ["", f"{'quantity':<14}{'cases':>7}{head}{'beyond':>9}   worst"]
    for quantity, errors in rows.items():
        counts = [
            sum(below < abs(e) <= step for e, _ in errors)
            for below, step in zip((-1.0, *_STEPS[:-1]), _STEPS, strict=True)
        ]
        beyond = len(errors) - sum(counts)
        error, number = max(errors, key=lambda pair: abs(pair[0]))
        last = f"{error:+.3%} in case {number}" if error else ""
        cells = "".join(f"{n:>9}" for n in (*counts, beyond))
        out.append(f"{quantity.lower():<14}{len(errors):>7}{cells}   {last}")
    return out


def report(found: Sequence[Found], reproductions: Sequence[Reproduction]) -> list[str]:
    """The whole text."""
    out = [f"{title}: {n} cases" for title, n in Counter(f.stack.title() for f in found).items()]
    out += ["", *table(found)]
    for outcome in (CRASH, LATE, STACK_REFUSES, WE_REFUSE, NOT_REHEARSED):
        words: dict[str, list[int]] = {}
        for f in found:
            if f.result["outcome"] == outcome:
                words.setdefault(re.sub(r"\d+", "N", f.result["why"])[:150], []).append(f.number)
        if words:
            out += ["", f"{outcome}:"]
            out += [f"{len(n):>4}  {why}  [{_some(n)}]" for why, n in sorted(words.items(), key=lambda w: -len(w[1]))]
    if reproductions:
        out += ["", "minimal reproductions:"]
    for r in sorted(reproductions, key=lambda r: -len(r.numbers)):
        off = {row["quantity"]: error_of(row) for row in r.result.get("rows", ()) if is_off(row)}
        errors = "; ".join(f"{quantity.lower()} {error:+.2%}" for quantity, error in off.items())
        leak = "only after other cases in its process (a state leak): " if r.leaked else ""
        out += [f"{len(r.numbers):>4}  {leak}{errors or r.failure.text()[:200]}  [{_some(r.numbers)}]",
                f"      {r.case.text()}  ({r.stack.title()})"]  # fmt: skip
    return out


def _some(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:5])) + (", ..." if len(numbers) > 5 else "")


# ---- the command -----------------------------------------------------------------------------------


def _stacks(args: argparse.Namespace) -> list[Stack]:
    for flag, package, folders in (
        ("megatron-core", "megatron/core", args.megatron_core), ("transformer-engine", "transformer_engine", args.te)
    ):  # fmt: skip
        for folder in folders:
            if not (Path(folder) / package).is_dir():
                raise SpecError(
                    f"{flag} ({folder}) holds no {package}; give a folder that pip install --target filled"
                )
    cores: list[str | None] = [str(Path(f).resolve()) for f in args.megatron_core]
    te: list[str | None] = [None, *(str(Path(f).resolve()) for f in args.te)]
    chosen = [t for t in te if args.only is None or (t is None) == (args.only == "local")]
    if not chosen:
        raise SpecError("only (transformer_engine) needs --transformer-engine FOLDER")
    return [Stack(core, t) for core in cores or [None] for t in chosen]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description="Random layouts through bridge-memory rehearse: errors, refusals, crashes.")
    parser.add_argument("--cases", type=int, default=200, metavar="N", help="layouts to draw (default 200)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="equal seeds draw equal layouts (default 1)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="concurrent child processes (default 1)")
    parser.add_argument("--megatron-core", action="append", default=[], metavar="FOLDER",
                        help="a release to run; may be repeated (default: the installed one)")
    parser.add_argument("--transformer-engine", action="append", default=[], dest="te", metavar="FOLDER",
                        help="its Python; without it only local modules run")
    parser.add_argument("--only", choices=("local", "transformer_engine"), help="only modules of this kind")
    parser.add_argument("--models", metavar="A,B", help="these presets (default: all)")
    parser.add_argument("--shrink", type=int, default=30, metavar="N", help="most failures to make small (default 30)")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds for a case (default 300)")
    parser.add_argument("--memory", type=float, default=0.0, metavar="GIB",
                        help="memory limit of a process, whose case fails above it (default: none)")
    parser.add_argument("--jsonl", metavar="FILE",
                        help="write a JSON line per case when it is done; at the end sorted, with reproductions")
    parser.add_argument("--resume", action="store_true", help="run the cases that --jsonl FILE does not hold yet")
    args = parser.parse_args(argv)
    for name, lowest in (("cases", 1), ("workers", 1), ("shrink", 0), ("timeout", 1), ("memory", 0)):
        if not getattr(args, name) >= lowest:
            raise SpecError(f"{name} ({getattr(args, name)}) must be at least {lowest}")
    if args.resume and not args.jsonl:
        raise SpecError("resume goes on with a file; name it with --jsonl FILE")
    return args


def _already_done(path: Path, cases: Sequence[tuple[Stack, Case]]) -> dict[int, dict[str, Any]]:
    """Results of an earlier call by case number; a truncated last line is left out. Raises SpecError where the file is
    of other cases."""
    out: dict[int, dict[str, Any]] = {}
    for n, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else ()):
        try:
            held = json.loads(line)
        except ValueError:
            continue
        if not isinstance(held, dict) or "case" not in held:
            continue
        i = held.pop("case")
        same = isinstance(i, int) and 0 <= i < len(cases)
        if not same or (held.pop("stack", None), held.pop("command", None)) != _heads(*cases[i]):
            raise SpecError(f"jsonl ({path}), line {n + 1}, is of another campaign; give the same --seed and folders")
        out[i] = held
    return out


def _heads(stack: Stack, case: Case) -> tuple[str, str]:
    return stack.title(), case.text()


def append_line(path: str, line: dict[str, Any]) -> None:
    """Append an object to a file of JSON lines."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(_lines([line]))


def _lines(objects: Iterable[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in objects)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 for a campaign without failures, 1 for one with some, 2 for wrong input."""
    try:
        args = _arguments(argv)
        cases = cases_of(args.seed, args.cases, _stacks(args), models_of(args.models))
        done = _already_done(Path(args.jsonl), cases) if args.resume else {}
        if args.jsonl:
            write_whole(Path(args.jsonl), _lines(Found(i, *cases[i], done[i]).as_json() for i in sorted(done)))
    except (SpecError, OSError) as error:
        print(f"differential.py: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2

    def write(line: dict[str, Any]) -> None:
        if args.jsonl:
            append_line(args.jsonl, line)

    campaign = Campaign(args.workers, args.timeout, write=write, memory=args.memory)
    found = campaign.run(cases, done)
    reproductions = campaign.reproduce(found, args.shrink)
    if args.jsonl:
        write_whole(Path(args.jsonl), _lines([f.as_json() for f in found] + [r.as_json() for r in reproductions]))
    print(f"seed {args.seed}, {len(found)} cases")
    print("\n".join(report(found, reproductions)))
    return int(any(failure_of(f.result) is not None for f in found))


if __name__ == "__main__":
    sys.exit(work() if sys.argv[1:] == ["--work"] else main())
