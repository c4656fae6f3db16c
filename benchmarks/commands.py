"""CPU seconds of whole commands, each in a process of its own, by turns with another tree and with what a goal names.

    python benchmarks/commands.py [--rounds 3] [--base PATH] [--torch PYTHON] [CASE ...]

CPU seconds are user and system time, which other work on the machine changes least; of several rounds the least counts.
``--base``: a folder that holds another state of this repository (``git worktree add``), run in turn; ``--torch``: an
interpreter that has torch, for the goal of the first command.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
#: ru_maxrss is in KiB on Linux, in bytes on macOS.
RSS_UNIT = 1 if sys.platform == "darwin" else 1024
README = (
    "estimate deepseek-ai/DeepSeek-V3 --tp 4 --pp 4 --ep 8 --num-gpus 128 --num-layers-in-last-pipeline-stage 16 "
    "--gpu H200"
)
DENSE = "search meta-llama/Llama-3.1-70B --num-gpus 64 --global-batch-size 512 --gpu"
ENGINES = "search meta-llama/Llama-3.1-8B --num-gpus 64 --gpu H100 --global-batch-size 512 --mixed-precision bf16"
V3 = "search deepseek-ai/DeepSeek-V3 --num-gpus 2048 --global-batch-size 8192 --gpu GB200"


class Case(NamedTuple):
    """A command, and its goal: CPU seconds, or a share of another case's."""

    command: str
    goal: float
    of: str = ""
    #: Peak resident MiB.
    most_mib: int | None = None


CASES = {
    "first": Case(README, 1 / 7, "import torch", 60),
    "70B": Case(f"{DENSE} H100", 0.5),
    "70B B200": Case(f"{DENSE} B200", 0.5),
    "70B fp8 parameters": Case(f"{DENSE} H100 --fp8 hybrid --fp8-recipe tensorwise --fp8-param-gather", 1.5, "70B"),
    "70B mxfp8 parameters": Case(f"{DENSE} B200 --fp8 e4m3 --fp8-recipe mxfp8 --fp8-param-gather", 1.5, "70B B200"),
    "70B fp4 parameters": Case(f"{DENSE} B200 --fp4 e2m1 --fp4-param-gather", 1.5, "70B B200"),
    "8B fsdp2": Case(f"{ENGINES} --engine fsdp2", 0.5),
    "8B any": Case(f"{ENGINES} --engine any", 0.5),
    # 5.55 million layouts, of which 3 million may take 20 s.
    "V3": Case(f"{V3} --vary tp,pp,vpp,cp,ep,etp,mbs,split,recompute,dispatcher,precision=bf16/mxfp8", 37, "", 400),
}
TORCH = "import torch"


def measure(command: list[str], tree: Path) -> tuple[float, float]:
    """(CPU seconds, peak resident MiB) of one process, which must end with 0 or 1."""
    environment = dict(os.environ, PYTHONPATH=str(tree))
    # Writing byte code belongs to installation, not to a start.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, cwd=tree
    )  # fmt: skip
    assert process.stderr is not None
    complaint = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):
        sys.exit(f"{' '.join(command)}: {complaint.strip()}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * RSS_UNIT / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, after one warm-up (3)")
    parser.add_argument("--base", type=Path, help="a folder with another state of this repository")
    parser.add_argument("--torch", help="an interpreter that has torch")
    args = parser.parse_args()
    for name in args.cases:
        if name not in CASES:
            parser.error(f"{name} is none of {', '.join(CASES)}")
    names = list(dict.fromkeys(args.cases or CASES))
    names = [*dict.fromkeys([*(CASES[n].of for n in names if CASES[n].of in CASES), *names])]
    trees = {"here": ROOT, **({"base": args.base.resolve()} if args.base else {})}
    seconds: dict[tuple[str, str], float] = {}
    resident: dict[tuple[str, str], float] = {}
    for turn in range(args.rounds + 1):
        for name in names:
            for of, tree in trees.items():
                cpu, mib = measure([sys.executable, "-m", "bridge_memory", *CASES[name].command.split()], tree)
                if turn or not args.rounds:
                    seconds[name, of] = min(cpu, seconds.get((name, of), cpu))
                    resident[name, of] = max(mib, resident.get((name, of), mib))
        if args.torch and "first" in names:
            cpu, _ = measure([args.torch, "-c", TORCH], ROOT)
            seconds[TORCH, "here"] = min(cpu, seconds.get((TORCH, "here"), cpu))
    print(f"{'case':<22}{'CPU s':>8}{'base':>8}{'ratio':>7}{'MiB':>6}  goal")
    for name in names:
        case, here, base = CASES[name], seconds[name, "here"], seconds.get((name, "base"))
        compared = f"{base:>8.2f}{here / base:>7.2f}" if base is not None else f"{'':>15}"
        said = _goal(case, here, resident[name, "here"], seconds.get((case.of, "here")))
        print(f"{name:<22}{here:>8.2f}{compared}{resident[name, 'here']:>6.0f}  {said}")


def _goal(case: Case, here: float, mib: float, of: float | None) -> str:
    if case.of and of is None:
        return f"{case.goal:.2g} of {case.of}: not measured"
    share = here / of if of else here
    met = share <= case.goal and (case.most_mib is None or mib <= case.most_mib)
    goal = f"{case.goal:.2g} of {case.of} (is {share:.2f})" if case.of else f"{case.goal:g} s"
    more = f", {case.most_mib} MiB" if case.most_mib else ""
    return f"{goal}{more}: {'met' if met else 'missed'}"


if __name__ == "__main__":
    main()
