"""One rank of the four-process job of test_job.py: gloo, no GPU, readings made up by stage."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from conftest import small_container

from bridge_memory.live import MemoryReport
from bridge_memory.live.cuda import Reading

GIB = 1 << 30


class Broken:
    """A logger that fails."""

    def log(self, *args: object) -> None:
        raise RuntimeError("no connection")


class Kept:
    def __init__(self, path: Path) -> None:
        self.path = path

    def add_scalar(self, name: str, value: float, step: int) -> None:
        with open(self.path, "a") as file:
            file.write(f"{step} {name} {value}\n")


def main() -> None:
    folder = Path(sys.argv[1])
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    step = 0

    def read(rank: int, stage: int) -> Reading:
        if rank == 2 and step == 1:
            raise RuntimeError("CUDA error: the reading failed")
        if rank == 3 and step == 2:
            time.sleep(3.0)  # a rank that is slow: longer than the deadline of 1 s
        return Reading(
            rank, stage, allocated=(10 + stage) * GIB, max_allocated=(20 + stage) * GIB, reserved=(22 + stage) * GIB,
            max_reserved=(24 + stage) * GIB, device_total=80 * GIB, device_used=(23 + stage) * GIB,
        )  # fmt: skip

    report = MemoryReport(folder / "report.jsonl", deadline=1.0, read=read)
    logger = Kept(folder / "scalars.txt") if rank == 3 else None
    state = SimpleNamespace(
        cfg=small_container(), train_state=SimpleNamespace(step=0), tensorboard_logger=logger,
        wandb_logger=Broken() if rank == 3 else None,
    )  # fmt: skip
    context = SimpleNamespace(state=state, skipped_iter=False)
    report.on_train_start(context)
    for _ in range(5):
        step += 1
        torch.distributed.all_reduce(torch.ones(1))  # training goes on
        if rank == 1 and step == 3:
            context = SimpleNamespace(state=None)  # a broken context on one rank
        report.on_train_step_end(context)
        context = SimpleNamespace(state=state, skipped_iter=False)
        state.train_state.step += 1
    report.on_train_end(context)
    torch.distributed.barrier()
    if rank == 0:
        (folder / "done").write_text("yes")
    torch.distributed.destroy_process_group()


main()
