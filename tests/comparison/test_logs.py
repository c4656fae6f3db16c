"""Memory lines of Megatron-LM and Megatron Bridge, as their own code prints them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bridge_memory.comparison.logs import arguments_in, latest_of_each_rank

RUNS = Path(__file__).resolve().parents[1] / "data" / "measurements" / "runs.jsonl"


def measured_records(most: int) -> list[dict]:
    if not RUNS.exists():
        pytest.skip(f"{RUNS} is not in this tree")
    records = [json.loads(line) for line in RUNS.read_text().splitlines()]
    found = [r for r in records if r["id"].startswith("megatron-lm/") and r["measured"][0]["max_allocated_bytes"]]
    return found[:: max(1, len(found) // most)][:most]


def megatron_lm_line(rank: int, iteration: int, allocated: int, peak: int, reserved: int) -> str:
    """``megatron/training/utils.py: report_memory``: floats of bytes / 2^20."""
    mega_bytes = 1024.0 * 1024.0
    string = f"(after {iteration} iterations) memory (MB)"
    string += f" | allocated: {allocated / mega_bytes}"
    string += f" | max allocated: {peak / mega_bytes}"
    string += f" | reserved: {reserved / mega_bytes}"
    string += f" | max reserved: {reserved / mega_bytes}"
    return f"[Rank {rank}] {string}"


def test_measured_figures_round_trip_through_a_megatron_lm_log() -> None:
    for record in measured_records(20):
        m = record["measured"][0]
        allocated, peak = m["allocated_bytes"], m["max_allocated_bytes"]
        line = "3: worker-7 " + megatron_lm_line(m["rank"], m["after_step"], allocated, peak, peak)
        (found,) = latest_of_each_rank(["noise", line, ""])
        assert (found.rank, found.iteration) == (m["rank"], m["after_step"])
        assert (found.allocated, found.max_allocated, found.max_reserved) == (allocated, peak, peak)


def test_bridge_prints_decimal_gigabytes_with_five_digits() -> None:
    """18.153 GB is 18.153e9 bytes, known to half of the last digit."""
    line = (
        "[Rank 0] (after 10 iterations) memory (GB) | mem-allocated-gigabytes: 18.153 | mem-active-gigabytes: 18.2 | "
        "mem-max-allocated-gigabytes: 61.024 | mem-max-reserved-gigabytes: 70.1 | mem-alloc-retires: 0"
    )
    (found,) = latest_of_each_rank([line])
    assert (found.allocated, found.max_allocated) == (18_153_000_000, 61_024_000_000)
    assert (found.reserved, found.max_reserved) == (None, 70_100_000_000)
    assert found.resolution == 500_000


def test_the_last_figures_of_a_rank_count() -> None:
    lines = [megatron_lm_line(r, i, i * 2**30, i * 2**31, 0) for i in (2, 10) for r in (0, 8)]
    found = latest_of_each_rank(lines)
    assert [(m.rank, m.iteration, m.max_allocated) for m in found] == [(0, 10, 10 * 2**31), (8, 10, 10 * 2**31)]


def test_broken_lines_are_no_figures() -> None:
    assert latest_of_each_rank(["memory (MB) | allocated: 1", "[Rank 1] memory (MB) | allocated: ..", "[Rank x]"]) == []


def test_the_arguments_that_megatron_lm_prints_are_read_back() -> None:
    """``arguments.py: _print_args``: name, dots to column 48, str(value)."""
    values = {"hidden_size": 4096, "bf16": True, "recompute_modules": ["core_attn"], "fp8": None, "norm": "RMSNorm"}
    lines = ["------------------------ arguments ------------------------"]
    lines += [f"  {k} {'.' * (48 - len(k))} {v}" for k, v in values.items()]
    lines += ["-------------------- end of arguments ---------------------", "  late .......... 1"]
    assert vars(arguments_in(lines)) == values  # type: ignore[arg-type]
    assert arguments_in(["nothing"]) is None
