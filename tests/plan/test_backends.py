"""A search spread over processes that joblib reaches finds what it finds alone."""

from __future__ import annotations

import pickle
import sys
from functools import partial
from typing import Any

import pytest

from bridge_memory import BatchSpec, RunSpec, SpecError
from bridge_memory.outside.context import outside_bytes_of
from bridge_memory.plan.found import Found, Limit
from bridge_memory.plan.jobs import spread
from bridge_memory.plan.megatron.search import search
from bridge_memory.plan.megatron.space import Space
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.speed.hardware import hardware_of


def found(**how: Any) -> Found:
    base = RunSpec(model="meta-llama/Llama-3.2-1B", batch=BatchSpec(seq_length=4096, global_batch_size=64))
    space = Space(base, 4, 8, frozenset({"cp", "vpp"}), global_batch_size=64)
    return search(
        space, hardware_of("A100-40GB"), capacity=find_gpu("A100-40GB").capacity_bytes,
        outside=partial(outside_bytes_of, gpu=find_gpu("A100-40GB")), **how,
    )  # fmt: skip


@pytest.mark.parametrize("batched", (True, False))
def test_processes_of_joblib_find_the_same(batched: bool) -> None:
    pytest.importorskip("joblib")
    alone, spread_out = found(batched=batched), found(batched=batched, backend="loky", jobs=2)
    assert list(alone.rows) == list(spread_out.rows) and len(alone.rows) > 9
    assert alone == spread_out._replace(rows=alone.rows)


def test_a_local_dask_finds_the_same() -> None:
    pytest.importorskip("joblib")
    distributed = pytest.importorskip("distributed")
    alone = found()
    with distributed.Client(n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None):
        spread_out = found(backend="dask", jobs=-1)
    assert list(alone.rows) == list(spread_out.rows) and alone == spread_out._replace(rows=alone.rows)


def test_a_backend_that_is_not_there_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "joblib", None)
    with pytest.raises(SpecError, match=r"^--backend \('loky'\) needs joblib, which is not installed"):
        list(spread(2, abs, [1], "loky"))


def test_a_backend_that_joblib_does_not_know_is_refused_in_one_line() -> None:
    pytest.importorskip("joblib")
    with pytest.raises(SpecError, match=r"^--backend \('telepathy'\) is not to be had"):
        list(spread(2, abs, [1], "telepathy"))


def test_what_is_sent_can_be_sent() -> None:
    """Without joblib too: a sweep's parts are pickled."""
    from bridge_memory.plan.megatron.many import _Elsewhere
    from bridge_memory.speed.constants import DEFAULT

    base = RunSpec(model="meta-llama/Llama-3.2-1B", batch=BatchSpec(seq_length=4096, global_batch_size=64))
    space = Space(base, 4, 8, frozenset({"cp", "vpp", "recompute"}), global_batch_size=64)
    card = Limit(find_gpu("H100").capacity_bytes, partial(outside_bytes_of, gpu=find_gpu("H100")))
    sent = pickle.loads(pickle.dumps(_Elsewhere("sweep", space, hardware_of("H100"), DEFAULT, card)))
    some = sent(0)
    assert some.looked_at > 0 and len(some.peaks) and some.peaks.max() < card.capacity
