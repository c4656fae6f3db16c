"""Costs of blocks kept in a folder: the same search without recordings, and nothing that is not its own is believed."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge_memory import BatchSpec, RunSpec, SpecError
from bridge_memory.estimation import clear_caches
from bridge_memory.outside.amount import Range
from bridge_memory.outside.context import outside_bytes_of
from bridge_memory.plan.found import Found, Limit, Refused
from bridge_memory.plan.megatron import kept
from bridge_memory.plan.megatron.many import Sheet, fitting
from bridge_memory.plan.megatron.search import search
from bridge_memory.plan.megatron.space import Space
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.speed.constants import DEFAULT
from bridge_memory.speed.hardware import hardware_of
from bridge_memory.tapes.context import TRACE_CACHE


def space(total: int = 64) -> Space:
    base = RunSpec(model="Qwen/Qwen3-30B-A3B", batch=BatchSpec(seq_length=4096, global_batch_size=total))
    return Space(base, 8, 8, frozenset({"vpp", "cp"}), global_batch_size=total)


def found(folder: Path, of: Space | None = None) -> Found:
    clear_caches()
    return search(
        of or space(), hardware_of("H100"), capacity=find_gpu("H200").capacity_bytes,
        outside=partial(outside_bytes_of, gpu=find_gpu("H100")), batched=True, cache=str(folder),
    )  # fmt: skip


def swept(costs: Any) -> list[Any]:
    limit = Limit(1 << 38, lambda run: Range(0, 0))
    every = fitting(Sheet(space()), hardware_of("H100"), DEFAULT, limit, Refused(), costs=costs)
    return [(few.peaks.tolist(), few.seconds.tolist()) for few in every]


def test_a_second_search_records_nothing_and_finds_the_same(tmp_path: Path) -> None:
    clear_caches()
    first = swept(kept.KeptCosts(tmp_path))
    traced = TRACE_CACHE.traced
    clear_caches()
    second = swept(kept.KeptCosts(tmp_path))
    assert traced > 20 and not TRACE_CACHE.traced
    assert first == second and sum(len(peaks) for peaks, _ in first) > 99


def damage(file: Path, how: str) -> None:
    data = dict(np.load(file))
    about = json.loads(data["about"].tobytes())
    if how == "half":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        return
    if how == "empty":
        file.write_bytes(b"")
        return
    if how == "pickled":
        np.savez(file, about=np.array([{}], dtype=object))
        return
    if how == "another release":
        about["code"] = "0" * 64
    elif how == "no blocks":
        about["blocks"] = []
    elif how == "another shape":
        data["0.which"] = np.zeros((1, 2, 77), np.int64)
    elif how == "another kind":
        data["0.retained"] = data["0.retained"].astype(float)
    elif how == "no such parameters":
        data["0.which"] = data["0.which"] + 99
    data["about"] = np.frombuffer(json.dumps(about).encode(), np.uint8)
    out = io.BytesIO()
    np.savez(out, **data)
    file.write_bytes(out.getvalue())


@pytest.mark.parametrize(
    "how",
    ("half", "empty", "pickled", "another release", "no blocks", "another shape", "another kind", "no such parameters"),
)
def test_what_is_not_its_own_is_worked_out_anew(tmp_path: Path, how: str) -> None:
    first = swept(kept.KeptCosts(tmp_path))
    for file in tmp_path.iterdir():
        damage(file, how)
    clear_caches()
    assert swept(kept.KeptCosts(tmp_path)) == first and TRACE_CACHE.traced


def test_other_code_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept(kept.KeptCosts(tmp_path))
    files = set(tmp_path.iterdir())
    monkeypatch.setattr(kept, "code", lambda: "another")
    clear_caches()
    swept(kept.KeptCosts(tmp_path))
    assert TRACE_CACHE.traced and len(set(tmp_path.iterdir()) - files) == len(files)


def test_numbers_that_were_changed_are_refused_where_a_row_is_shown(tmp_path: Path) -> None:
    assert len(found(tmp_path).rows) > 9
    for file in tmp_path.iterdir():
        data = {name: values + (2**20 if name.endswith(".retained") else values.dtype.type(0))
                for name, values in np.load(file).items()}
        out = io.BytesIO()
        np.savez(out, **data)
        file.write_bytes(out.getvalue())
    with pytest.raises(SpecError, match=r"^--cache .* has costs that are not those of this model; delete it$"):
        found(tmp_path).best(3)


def test_a_folder_that_cannot_be_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SpecError, match=r"^--cache .* is no folder"):
        kept.KeptCosts(file)
    with pytest.raises(SpecError, match=r"^--cache is empty; give a folder$"):
        kept.KeptCosts("")
