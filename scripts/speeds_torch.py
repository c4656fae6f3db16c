#!/usr/bin/env python3
"""Predicted over measured step times of engines outside of megatron-core, by source.

    python scripts/speeds_torch.py tests/data/engines/speeds.jsonl
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bridge_memory.accuracy.corpus import read_corpus
from bridge_memory.accuracy.ranking import spearman
from bridge_memory.accuracy.torch.speeds import Speed, Unread, speed_of
from bridge_memory.speed.torch.step_time import step_time


def main(argv: list[str] | None = None) -> int:
    """Print the table. Returns 0."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("rows", type=Path)
    parser.add_argument("--all", action="store_true", help="every row")
    args = parser.parse_args(argv)
    read = [speed_of(row.data) for row in read_corpus(args.rows)]
    kinds: dict[str, list[tuple[Speed, float]]] = {}
    for row in read:
        if isinstance(row, Speed):
            key = f"{row.kind}, {row.hardware.name}"
            kinds.setdefault(key, []).append((row, step_time(row.run, row.hardware).seconds))
    print("rows  median   10th   90th  Spearman of tokens/s x parameters  source and GPU")
    for kind, rows in kinds.items():
        ratios = sorted(predicted / row.seconds for row, predicted in rows)
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        rates = [(_rate(row, predicted), _rate(row, row.seconds)) for row, predicted in rows]
        rank = spearman([p for p, _ in rates], [m for _, m in rates])
        shown = f"{rank:34.2f}" if len(rows) > 3 else " " * 34
        print(f"{len(rows):4}  {median(ratios):6.2f} {low:6.2f} {high:6.2f}  {shown}  {kind}")
        if args.all:
            for row, predicted in rows:
                b = row.run.batch
                print(
                    f"      {predicted / row.seconds:5.2f}  {row.run.model.name}, {row.run.parallel.world_size} GPUs, "
                    f"{b.seq_length} x {b.micro_batch_size}, row {row.number}"
                )
    unread = [row.reason for row in read if isinstance(row, Unread)]
    for reason in dict.fromkeys(unread):
        print(f"not read, {unread.count(reason)}: {reason}")
    return 0


def _rate(row: Speed, seconds: float) -> float:
    """Operations of the model's products a second and GPU, but for a factor."""
    run = row.run
    tokens = (run.batch.global_batch_size or 0) * run.batch.seq_length
    return tokens / seconds / run.parallel.world_size * run.model.hidden_size**2 * run.model.num_layers


if __name__ == "__main__":
    raise SystemExit(main())
