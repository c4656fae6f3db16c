"""The file for node exporter: read back by Prometheus's parser, whole at any moment, never in training's way."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bridge_memory import MemoryReport, ParallelSpec, RunSpec, SpecError
from bridge_memory.calibration.records import PhaseRecord, ReportRecord, StageRecord
from bridge_memory.live.cuda import Reading
from bridge_memory.live.prometheus import text

GIB = 1 << 30
RUN = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=1))
REPORT = ReportRecord(
    time=1.5e9, iteration=12, world_size=2, missing_ranks=[1],
    stages=[StageRecord(stage=n, max_allocated=(n + 1) * GIB, headroom=3 * GIB, retries=2) for n in (0, 1)],
)  # fmt: skip
PHASES = [PhaseRecord(phases=["build", "load"], stage=0, allocated=(GIB, None), driver=2 * GIB)]


def read(rank: int, stage: int) -> Reading:
    return Reading(rank, stage, allocated=GIB, max_allocated=2 * GIB, reserved=3 * GIB, device_total=80 * GIB)


def test_prometheus_reads_it_back() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    families = {one.name: one for one in parser.text_string_to_metric_families(text(REPORT, PHASES))}
    samples = {tuple(s.labels.items()): s.value for s in families["bridge_memory_max_allocated_bytes"].samples}
    assert samples == {(("stage", "0"),): GIB, (("stage", "1"),): 2 * GIB}
    (phase,) = families["bridge_memory_phase_device_bytes"].samples
    assert phase.labels == {"phase": "build + load", "stage": "0"} and phase.value == 2 * GIB
    assert all(one.documentation and one.type == "gauge" for one in families.values())


def test_every_line_is_of_the_format() -> None:
    """"name{label="value"} number", or a comment (exposition format 0.0.4)."""
    sample = re.compile(r'[a-z_]+(\{([a-z]+="[^"]*",?)+\})? [0-9.e+]+')
    for line in text(REPORT, PHASES).splitlines():
        assert line.startswith(("# HELP bridge_memory_", "# TYPE bridge_memory_")) or sample.fullmatch(line), line


def test_a_report_writes_it_and_a_folder_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    target = tmp_path / "node" / "memory.prom"
    texts: list[str] = []
    with MemoryReport(run=RUN, prometheus=target, emit=texts.append, read=read, every=1) as report:
        report.step()
        report.step()
        assert "bridge_memory_iteration 2\n" in target.read_text()
        target.unlink()
        target.mkdir()
        report.step()
    assert target.is_dir() and len(texts) == 4


def test_a_file_that_node_exporter_does_not_read_is_refused() -> None:
    with pytest.raises(SpecError, match=r"does not end in \.prom"):
        MemoryReport(prometheus="memory.txt")


def test_after_the_second_step_a_report_is_one_line() -> None:
    texts: list[str] = []
    with MemoryReport(run=RUN, emit=texts.append, read=read, every=1) as report:
        for _ in range(4):
            report.step()
    built, first, steady, *later = texts
    assert all("\n" in one for one in (built, first, steady)) and len(later) == 2
    assert all("\n" not in one and "max 2.00 of 80.00 GiB" in one for one in later)
    assert "phases, GiB allocated" in steady


def test_tables_at_every_report_can_be_asked_for() -> None:
    texts: list[str] = []
    with MemoryReport(run=RUN, emit=texts.append, read=read, every=1, tables=True) as report:
        for _ in range(4):
            report.step()
    assert all("\n" in one for one in texts)


def test_headroom_is_an_overload_factor_where_experts_are() -> None:
    """80 GiB and 8 ranks: balanced routing fits, and a tenfold load does not."""
    run = RunSpec(
        model="Qwen/Qwen3-30B-A3B", parallel=ParallelSpec(world_size=8, expert_model_parallel_size=8)
    )
    texts: list[str] = []
    with MemoryReport(run=run, emit=texts.append, read=lambda r, s: read(r, s).__class__(
        r, s, allocated=GIB, max_allocated=2 * GIB, reserved=3 * GIB, device_total=140 * GIB
    )) as report:  # fmt: skip
        report.step()
        report.step()
    found = re.search(r"overload factor of (\d+\.\d\d)", texts[-1])
    assert found is not None and 1 < float(found[1]) < 10
