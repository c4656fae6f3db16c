"""Make the documentation's examples on one GPU: a live table, an out-of-memory report, an attributed memory snapshot.

    python scripts/maintain/demonstrate_on_gpu.py --output FOLDER        # live.txt, out_of_memory.txt, snapshot.txt
    python scripts/maintain/demonstrate_on_gpu.py --output FOLDER --only live

Needs a GPU, torch and megatron-core. Writes the three texts to FOLDER. The loop is that of ``bridge-memory rehearse
--device cuda``: megatron-core's model, DDP, optimizer and schedule, for a world of one. Exit code 1 where a part fails
or less than 95 % of the snapshot's bytes are attributed. See references/measuring.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bridge_memory.arguments.flags import add_run_arguments
from bridge_memory.arguments.run import run_from_arguments
from bridge_memory.cli import main as bridge_memory
from bridge_memory.estimation import estimate
from bridge_memory.files import write_whole
from bridge_memory.live.callback import MemoryReport
from bridge_memory.rehearsal.measuring import in_its_own_process, snapshot_to
from bridge_memory.rehearsal.record import append_record
from bridge_memory.rehearsal.world import require_megatron
from bridge_memory.spec import RunSpec, SpecError

MODEL = "meta-llama/Llama-3.2-1B"
STEPS = 3
#: Fraction of the predicted peak that a process may use which has to run out of memory.
TOO_LITTLE = 0.85
#: Fraction of a snapshot's peak that has to be attributed.
ATTRIBUTED = 0.95


def flags() -> list[str]:
    """Arguments of ``estimate`` for one GPU: Transformer Engine where it is installed, without missing fusions."""
    from bridge_memory.rehearsal.gpu import missing_kernels
    from bridge_memory.rehearsal.patches.modules import has_te

    te = has_te()
    out = [MODEL, "--num-gpus", "1", "--seq-length", "4096" if te else "2048"]
    out += ["--transformer-impl", "transformer_engine" if te else "local"]
    lacking = [name for name, missing in missing_kernels().items() if missing]
    return out + [f"--no-{name.replace('_', '-')}" for name in lacking if not (te and name == "masked_softmax_fusion")]


def run_of(given: list[str]) -> RunSpec:
    """The run of ``flags()`` with this machine's releases and GPU. Raises SpecError."""
    from bridge_memory.rehearsal.gpu import run_here

    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    return run_here(run_from_arguments(parser.parse_args(given)))


def trained(run: RunSpec, report: MemoryReport, steps: int = STEPS) -> None:
    """Train ``steps`` steps in the rehearsal's loop with the callback ``report``. torch's peaks are not reset."""
    from bridge_memory.rehearsal.gpu import train

    def note(phase: str) -> None:
        if phase == "model built":
            report.start()
        elif phase.endswith("step") or phase.startswith("step"):
            report.step()

    train(run, 0, steps, note)
    report.end()


def live(given: list[str]) -> str:
    """The output of MemoryReport after building the model and after each step."""
    said: list[str] = []
    run = run_of(given)
    trained(run, MemoryReport(None, run=run, every=1, tables=True, emit=said.append))
    return "\n\n".join(said)


def out_of_memory(given: list[str]) -> str:
    """The output of MemoryReport when the process runs out of memory."""
    import torch

    run = run_of(given)
    peak = estimate(run).stages[0].peak_bytes
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, TOO_LITTLE * peak / total))
    said: list[str] = []
    try:
        trained(run, MemoryReport(None, run=run, emit=said.append))
    except torch.OutOfMemoryError as error:
        return f"{said[-1] if said else 'nothing was said'}\n\n(torch: {str(error).splitlines()[0]})"
    raise SpecError(f"{TOO_LITTLE:.0%} of the predicted peak were enough: nothing ran out of memory")


def snapshot(given: list[str]) -> str:
    """The output of ``compare`` for a snapshot of two steps. Raises SpecError below ATTRIBUTED."""
    from bridge_memory.rehearsal.gpu import train

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "snapshot.pickle")
        with snapshot_to(path):
            train(run_of(given), 0, 2, lambda phase: None)
        share = json.loads(compared(path, given, "--json"))["snapshot"]["attributed_share"]
        text = compared(path, given)
    if share < ATTRIBUTED:
        raise SpecError(f"{share:.1%} of the snapshot's bytes are attributed\n{text}")
    return text


def compared(path: str, given: list[str], *more: str) -> str:
    """The output of ``bridge-memory compare``."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        bridge_memory(["compare", path, *given, *more])
    return out.getvalue()


PARTS: dict[str, Callable[[list[str]], str]] = {"live": live, "out_of_memory": out_of_memory, "snapshot": snapshot}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", metavar="FOLDER", help="the folder to write to")
    parser.add_argument("--only", choices=tuple(PARTS), help="only this part")
    parser.add_argument("--timeout", type=float, default=300, metavar="SECONDS", help="limit per part (300)")
    for hidden in ("--one", "--to"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        require_megatron()
        if args.one:
            append_record(args.to, {"text": PARTS[args.one](flags())})
            return 0
        if not args.output:
            raise SpecError("--output is missing; name the folder that the texts are written to")
        return demonstrated(args.output, [args.only] if args.only else list(PARTS), args.timeout)
    except SpecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def demonstrated(folder: str, parts: list[str], timeout: float) -> int:
    """Run each part in a separate process. Returns 1 where one failed."""
    import torch

    if not torch.cuda.is_available():
        raise SpecError("there is no GPU here, which all of this is about")
    Path(folder).mkdir(parents=True, exist_ok=True)
    failed = 0
    for part in parts:
        answer = in_its_own_process(__file__, part, (), timeout)
        if isinstance(answer, str):
            failed += 1
            print(f"{part}: {answer}", flush=True)
            continue
        path = Path(folder) / f"{part}.txt"
        write_whole(path, answer["text"] + "\n")
        print(f"{part}: {path}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
