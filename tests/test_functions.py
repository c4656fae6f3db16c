"""What the commands do as Python functions: the same answers as the commands, and refusals of one line."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridge_memory import (
    BatchSpec,
    DataParallelSpec,
    FSDPOptions,
    MemoryReport,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RunSpec,
    SpecError,
    balance,
    compare,
    estimate,
    find_gpu,
    fit,
    fits,
    peaks,
    rehearse,
    resolve_model,
    run_from_files,
    run_of_torchtitan,
    search,
    verdict,
    whatif,
)
from bridge_memory.cli import main
from bridge_memory.plan.found import front_with

LLAMA = "meta-llama/Llama-3.2-1B"
GIB = 1 << 30
JOB = {"gpu": "H100", "num_gpus": 8, "global_batch_size": 64}
FLAGS = ("--gpu", "H100", "--num-gpus", "8", "--global-batch-size", "64", "--json")
RUN = RunSpec(
    model=LLAMA,
    parallel=ParallelSpec(world_size=8, tensor_model_parallel_size=2),
    batch=BatchSpec(seq_length=2048, micro_batch_size=2, global_batch_size=64),
)
PIPELINE = RunSpec(model=LLAMA, parallel=ParallelSpec(world_size=4, pipeline_model_parallel_size=2))
SPLIT = PIPELINE.with_fields(pipeline_model_parallel_layout="Et*9|t*7L", global_batch_size=8)


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """The JSON that a command prints."""
    assert main([*argv]) in (0, 1), capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


# ---- search ----


@pytest.mark.parametrize("arguments, flags", [
    ({}, ()),
    ({"keep": ["tp"], "of": RUN}, ("--tp", "2", "--seq-length", "2048")),
    ({"vary": ["pp", "mbs"]}, ("--vary", "pp,mbs")),
    ({"ranges": {"tp": (2, 4)}, "exhaustive": True, "vary": ["tp"]}, ("--tp", "2..4", "--exhaustive", "--vary", "tp")),
    ({"engine": "any", "mixed_precision": "bf16"}, ("--engine", "any", "--mixed-precision", "bf16")),
    ({"engine": ["fsdp2", "zero3"], "keep": ["mbs"]}, ("--engine", "fsdp2,zero3", "--micro-batch-size", "1")),
    ({"engine": "fsdp2", "vary": ["all"]}, ("--engine", "fsdp2", "--vary", "all")),
    ({"headroom_bytes": 30 * GIB, "vary": ["tp", "pp"]}, ("--headroom", "30", "--vary", "tp,pp")),
], ids=lambda value: ",".join(value) if isinstance(value, dict) else "")  # fmt: skip
def test_a_search_finds_what_the_command_finds(
    arguments: dict[str, Any], flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    of = arguments.pop("of", LLAMA)
    found = search(of, **JOB, **arguments)
    command = printed(capsys, "search", LLAMA, *FLAGS, *flags)
    assert (found.looked_at, len(found.rows), found.too_large) == (
        command["looked_at"], command["fit"], command["too_large"]
    )  # fmt: skip
    rows = front_with(found, found.ranked(20).rows)  # those whose layers are balanced too
    front = [(row.peak, row.headroom, row.time.seconds) for row in rows]
    assert front == [(row["peak_bytes"], row["headroom_bytes"], row["step_seconds"]) for row in command["front"]]


def test_all_axes_vary_whatever_else_is_named() -> None:
    every = search(LLAMA, **JOB, vary=["all"])
    assert search(LLAMA, **JOB, vary=["all", "tp"]).looked_at == every.looked_at


def test_a_row_is_a_run_that_fits() -> None:
    """Its peak is the estimate's, and the verdict on the card is the same."""
    row = search(RUN, gpu="A100-40GB").rows[0]
    assert row.peak == max(stage.peak_bytes for stage in peaks(row.run))
    assert row.run.parallel.world_size == 8 and row.run.batch.seq_length == 2048
    (fit,) = fits(estimate(row.run), ["A100-40GB"])
    (by_share,) = verdict.fits(estimate(row.run), ["A100-40GB"])
    assert fit.peak_bytes == row.peak and by_share.headroom_bytes == row.headroom


def test_a_search_takes_a_run_a_model_and_a_path(tmp_path: Path) -> None:
    first = search(LLAMA, **JOB, vary=["tp"]).rows[0].run
    assert search(resolve_model(LLAMA), **JOB, vary=["tp"]).rows[0].run == first
    assert search(RunSpec(model=LLAMA), **JOB, vary=["tp"]).rows[0].run == first
    assert search(RunSpec(model=LLAMA), **{**JOB, "gpu": find_gpu("H100")}, vary=["tp"]).rows[0].run == first


def test_an_engine_that_cannot_be_had_is_counted_or_refused_by_name() -> None:
    """DeepSpeed does not take transformers' Adafactor: of "any" ZeRO's three stages are left out, and counted."""
    adafactor = RunSpec(
        model=LLAMA, parallel=ParallelSpec(world_size=8), batch=BatchSpec(global_batch_size=64),
        data_parallel=DataParallelSpec(engine="ddp"), optimizer=OptimizerSpec(optimizer="adafactor"),
    )  # fmt: skip
    found = search(adafactor, gpu="H100", engine="any")
    assert {row.run.data_parallel.engine for row in found.rows} == {"ddp", "fsdp1", "fsdp2"}
    assert found.refused["optimizer"] == 3
    with pytest.raises(SpecError, match=r"^optimizer \(adafactor\)"):
        search(adafactor, gpu="H100", engine=["fsdp2", "zero2"])


def test_options_of_another_engine_are_left_behind() -> None:
    offloaded = RunSpec(
        model=LLAMA, parallel=ParallelSpec(world_size=8), batch=BatchSpec(global_batch_size=64),
        data_parallel=DataParallelSpec(engine="fsdp2"), fsdp=FSDPOptions(shard_degree=4),
    )  # fmt: skip
    assert {row.run.data_parallel.engine for row in search(offloaded, gpu="H100").rows} == {"fsdp2"}
    zero = search(offloaded, gpu="H100", engine="zero").rows  # without the options of fsdp2
    assert {row.run.fsdp for row in zero} == {FSDPOptions()}


def test_a_measured_step_moves_all_times() -> None:
    row = search(LLAMA, **JOB, vary=["tp"]).rows[0]
    slower = search(LLAMA, **JOB, vary=["tp"], measured=[(row.run, 2 * row.time.seconds)]).rows[0]
    assert slower.run == row.run and slower.time.seconds == pytest.approx(2 * row.time.seconds, rel=0.01)
    row = search(LLAMA, **JOB, engine="fsdp2", vary=["mbs"]).rows[0]
    slower = search(LLAMA, **JOB, engine="fsdp2", vary=["mbs"], measured=[(row.run, 3 * row.time.seconds)]).rows[0]
    assert slower.time.seconds == pytest.approx(3 * row.time.seconds)


# ---- fit, whatif and balance ----


def test_what_fits_a_card_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--tp", "2", "--seq-length", "2048", "--gpu", "H100", "--num-gpus", "8", "--global-batch-size", "64")
    command = printed(capsys, "fit", LLAMA, *flags, "--vary", "recompute,offload", "--headroom", "60", "--json")
    run = RUN.with_(batch=replace(RUN.batch, seq_length=2048, micro_batch_size=1, global_batch_size=64))
    found = fit(run, gpu="H100", vary=["recompute", "offload"], headroom_bytes=60 * GIB)
    assert (found.looked_at, len(found.rows)) == (command["looked_at"], command["fit"])
    best = [(row.peak, row.headroom, row.time.seconds) for row in found.ranked(8).rows]
    assert best == [(row["peak_bytes"], row["headroom_bytes"], row["step_seconds"]) for row in command["best"]]


def test_changes_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    found = whatif(RUN, gpu="H100")
    command = printed(
        capsys, "whatif", LLAMA, "--tp", "2", "--micro-batch-size", "2", "--seq-length", "2048", "--top", "1000", *FLAGS
    )
    assert found.before == command["peak_bytes"]
    ours = [(effect.freed, effect.peak, effect.slowdown) for effect in found.singles]
    assert ours == [(c["freed_bytes"], c["peak_bytes"], c["step_time_factor"]) for c in command["changes"]]


def test_a_split_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    command = printed(capsys, "balance", LLAMA, "--pp", "3", "--num-gpus", "6", "--gpu", "H100", "--json")["splits"]
    run = RunSpec(model=LLAMA, parallel=ParallelSpec(world_size=6))
    lowest = balance(run, pipeline_model_parallel_size=3)  # 16 layers: no ParallelSpec with 3 stages and no split
    fastest = balance(run, pipeline_model_parallel_size=3, gpu="H100", fastest=True)
    for found, title in ((lowest, "lowest peak"), (fastest, "fastest on H100")):
        assert list(found.layers) == command[title]["layers"]
        assert list(found.peaks) == command[title]["peak_bytes"]
        assert found.peaks == tuple(stage.peak_bytes for stage in peaks(found.run))
    assert lowest.seconds == () and list(fastest.seconds) == command["fastest on H100"]["microbatch_seconds"]


# ---- compare ----


def log_of(run: RunSpec, excess: int) -> str:
    """Megatron-LM's lines of the first rank of every stage, in MiB."""
    width = run.parallel.world_size // run.parallel.pp
    return "\n".join(
        f"[Rank {stage.stage * width}] (after 2 iterations) memory (MB) | allocated: {stage.static_bytes / 2**20} | "
        f"max allocated: {(stage.peak_bytes + excess) / 2**20} | reserved: 0"
        for stage in peaks(run)
    )


def test_measured_memory_as_numbers_a_log_and_a_journal(tmp_path: Path) -> None:
    """A GiB above the prediction on both stages, however it is reported."""
    over = [stage.peak_bytes + GIB for stage in peaks(PIPELINE)]
    log = tmp_path / "train.log"
    log.write_text(log_of(PIPELINE, GIB))
    for measured in (over, dict(enumerate(over)), log, str(log)):
        for run in (PIPELINE, estimate(PIPELINE)):
            found = compare(run, measured)  # type: ignore[arg-type]
            assert [stage.residual for stage in found.stages] == [GIB, GIB]
            assert found.beyond(0.5) == () and found.beyond(0.001) == (0, 1)
            assert found.worst is found.stages[over.index(min(over))] and "too low" in str(found)
    one = compare(PIPELINE, {1: over[1]})
    assert [stage.residual for stage in one.stages] == [None, GIB] and one.worst == one.stages[1]
    journal = tmp_path / "memory_report.jsonl"
    with MemoryReport(journal, run=RunSpec(model=LLAMA), emit=lambda text: None, read=_reading) as report:
        report.step()
        report.step()
    (stage,), (predicted,) = compare(None, journal).stages, peaks(RunSpec(model=LLAMA))
    assert (stage.max_allocated, stage.predicted_peak) == (20 * GIB, predicted.peak_bytes)


def _reading(rank: int, stage: int) -> Any:
    from bridge_memory.live.cuda import Reading

    return Reading(rank, stage, 10 * GIB, 20 * GIB)


def test_a_snapshot_has_its_stage_and_its_attribution(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot.pickle"
    block = {"size": 3 * GIB, "requested_size": 3 * GIB, "address": 4096, "state": "active_allocated", "frames": []}
    segment = {"device": 0, "address": 4096, "total_size": 3 * GIB, "blocks": [block]}
    snapshot.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [[]]}))
    alone = compare(None, snapshot)
    assert alone.stages == () and alone.attribution is not None and alone.attribution.alive.peak_bytes == 3 * GIB
    (stage,) = compare(PIPELINE, snapshot, stage=1).stages
    assert (stage.stage, stage.max_allocated) == (1, 3 * GIB)
    assert stage.predicted_peak == peaks(PIPELINE)[1].peak_bytes


# ---- rehearse ----


def test_a_rehearsal_finds_what_was_predicted() -> None:
    """megatron-core's own weights and gradients, to the byte."""
    pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    model = resolve_model(LLAMA)
    run = PIPELINE.with_(model=replace(model, layers=model.layers[:4]))
    done = rehearse(run, stage=1)
    rows = {row.name: row for row in done.rows}
    assert (done.stage, done.rank) == (1, 2) and done.details is not None
    assert rows["weights"].found and rows["weights"].difference == rows["gradients"].difference == 0
    assert rehearse(run, rank=2).rows == done.rows


def test_a_rehearsal_of_pytorchs_engine() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = resolve_model(LLAMA)
    run = RunSpec(
        model=replace(model, layers=model.layers[:2]), parallel=ParallelSpec(world_size=2),
        data_parallel=DataParallelSpec(engine="fsdp2"), batch=BatchSpec(seq_length=256),
    )  # fmt: skip
    rows = {row.name: row for row in rehearse(run).rows}
    assert rows["backward"].found and rows["backward"].predicted is not None
    assert abs(rows["backward"].predicted / rows["backward"].found - 1) < 0.01


# ---- what is wrong is said in one line ----

REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: search("nobody/nothing-1B", **JOB), r"nobody/nothing-1B"),
    (lambda: search(5, **JOB), r"the model \(5\) is no name; give a preset"),  # type: ignore[arg-type]
    (lambda: search(LLAMA, **{**JOB, "gpu": "H1000"}), r"gpu \('H1000'\) is not one .*did you mean H100"),
    (lambda: search(LLAMA, gpu="H100", global_batch_size=8), "num_gpus is missing; say on how many GPUs"),
    (lambda: search(LLAMA, gpu="H100", num_gpus=8), "global_batch_size is missing; configurations are compared"),
    (lambda: search(LLAMA, **{**JOB, "num_gpus": 0}), r"num_gpus \(0\) is no number of GPUs; give 1 or more"),
    (lambda: search(LLAMA, **{**JOB, "num_gpus": True}), r"num_gpus \(True\) is no number of GPUs"),
    (lambda: search(LLAMA, **{**JOB, "global_batch_size": "64"}), r"global_batch_size \('64'\) is not a positive"),
    (lambda: search(LLAMA, **JOB, keep="tp"), r"keep \('tp'\) is no list of names; give one"),  # type: ignore[arg-type]
    (lambda: search(LLAMA, **JOB, keep=["TP"]), r"keep \('TP'\) is none of tp, pp, .*; name some of these"),
    (lambda: search(LLAMA, **JOB, keep=["tp"], vary=["tp"]), r"keep \(tp\) does not go with vary; drop one"),
    (lambda: search(LLAMA, **JOB, keep=["tp"], ranges={"tp": (1, 2)}), r"keep \(tp\) does not go with ranges"),
    (lambda: search(LLAMA, **JOB, ranges={"tp": 4}), r"ranges of tp \(4\) is no range"),  # type: ignore[dict-item]
    (lambda: search(LLAMA, **JOB, ranges={"tp": (4, 2)}), r"ranges of tp \(\(4, 2\)\) is no range; give its ends"),
    (lambda: search(LLAMA, **JOB, ranges={"tp": (16, 32)}), r"world_size \(8\) is divided by no layout"),
    (lambda: search(LLAMA, **JOB, engine="fsdp3"), r"engine \(fsdp3\) is unknown; use "),
    (lambda: search(LLAMA, **JOB, engine=5), r"engine \(5\) names none"),  # type: ignore[arg-type]
    (lambda: search(LLAMA, **JOB, engine=["fsdp2", "megatron"]), r"engine \(megatron_ddp\) does not stand beside"),
    (lambda: search(LLAMA, **JOB, engine="fsdp2", keep=["tp"]), r"keep \('tp'\) is none of engine, mbs"),
    (lambda: search(LLAMA, **JOB, engine="fsdp2", cache="costs"), r"cache \('costs'\) is for layouts of megatron-core"),
    (lambda: search(LLAMA, **JOB, engine="fsdp2", mixed_precision="int8"), r"mixed_precision \('int8'\) is unknown"),
    (lambda: search(LLAMA, **JOB, mixed_precision="bf16"), r"mixed_precision \('bf16'\) is for PyTorch's"),
    (lambda: search(LLAMA, **JOB, measured=[3]), r"measured\[0\] \(3\) is no measured step"),  # type: ignore[list-item]
    (lambda: search(LLAMA, **JOB, measured=[(RUN, 1e5)]), r"measured\[0\].*give the seconds of a whole step"),
    (lambda: search(LLAMA, **JOB, jobs=0), r"jobs \(0\) is not a number of processes; give 1 to 256"),
    (lambda: search(LLAMA, **JOB, headroom_bytes=-1), r"headroom_bytes \(-1\) is not a size; give bytes of 0 or more"),
    (lambda: search(SPLIT, gpu="H100", keep=["split"]), r"keep \(split\) keeps .* over 2 stages; keep pp too"),
    (lambda: search(SPLIT, gpu="H100", vary=["pp"]), r"keep \(split\) keeps .*; keep pp too, or let split vary"),
    (lambda: fit(LLAMA, gpu="H100"), r"run \('.*'\) is not a RunSpec"),  # type: ignore[arg-type]
    (lambda: fit(RUN, gpu="H100", vary="offload"), r"vary \('offload'\) is no list of names"),
    (lambda: fit(RUN, gpu="H100", vary=["mbs"]), r"vary \(mbs\) is none of recompute, offload, optimizer"),
    (lambda: fit(RUN, gpu="H100", headroom_bytes=-1), r"headroom_bytes \(-1\) is not a size"),
    (lambda: fit(RUN.with_fields(engine="fsdp2", tensor_model_parallel_size=1), gpu="H100"), r"engine \(fsdp2\) has"),
    (lambda: whatif(LLAMA, gpu="H100"), r"run \('.*'\) is not a RunSpec"),  # type: ignore[arg-type]
    (lambda: whatif(RUN.with_(precision=PrecisionSpec(fp8="hybrid")), gpu="A40"), r"fp8 \(hybrid\) does not run on"),
    (lambda: balance(RUN), r"pipeline_model_parallel_size \(1\) leaves nothing to balance"),
    (lambda: balance(PIPELINE, pipeline_model_parallel_size=1), r"pipeline_model_parallel_size \(1\) leaves nothing"),
    (lambda: balance(PIPELINE, pipeline_model_parallel_size=3), r"world_size \(4\) is not divisible by"),
    (lambda: balance(PIPELINE, fastest=True), r"fastest \(True\) needs gpu"),
    (lambda: compare(PIPELINE, {2: GIB}), r"measured \(2\) is not a stage of the run; give a number from 0 to 1"),
    (lambda: compare(PIPELINE, [58.4]), r"measured\[0\] \(58.4\) is no peak in bytes"),  # type: ignore[list-item]
    (lambda: compare(PIPELINE, [58]), r"measured\[0\] \(58\) is no peak in bytes; give torch.cuda.max_memory"),
    (lambda: compare(PIPELINE, 5), r"measured \(5\) is no file and no numbers"),  # type: ignore[arg-type]
    (lambda: compare(None, [GIB]), r"run \(None\) leaves numbers without a prediction"),
    (lambda: compare(LLAMA, [GIB]), r"run \('.*'\) is not a RunSpec"),  # type: ignore[arg-type]
    (lambda: compare(PIPELINE, "/nonexistent.log"), r"/nonexistent.log cannot be read"),
    (lambda: compare(PIPELINE, __file__, stage=2), r"stage \(2\) is not a stage of the run; give a number from 0 to 1"),
    (lambda: compare(PIPELINE, __file__), r"holds no memory figures"),
    (lambda: rehearse(PIPELINE, stage=2), r"stage \(2\) is not one of 0 to 1"),
    (lambda: rehearse(PIPELINE, rank=4), r"rank \(4\) is not one of 0 to 3"),
    (lambda: rehearse(PIPELINE, stage=0, rank=0), r"stage \(0\) and rank \(0\) both say which rank; give one"),
    (lambda: rehearse(PIPELINE, config={}), r"config .* is for PyTorch's and DeepSpeed's engines; drop it"),
    (lambda: run_from_files(LLAMA, deepspeed=5), r"deepspeed \(5\) is no path; give"),  # type: ignore[arg-type]
    (lambda: run_from_files(), r"the model is missing; name a preset"),
    (lambda: search(LLAMA, **JOB, engine="fsdp3", keep=["tp"]), r"engine \(fsdp3\) is unknown"),
    (lambda: search(LLAMA, **JOB, backend=3), r"backend \(3\) is no name; give loky"),  # type: ignore[arg-type]
    (lambda: search(LLAMA, **JOB, cache=3), r"cache \(3\) is no path; give a folder"),  # type: ignore[arg-type]
    (lambda: search(LLAMA, **JOB, progress=3), r"progress \(3\) is no function"),  # type: ignore[arg-type]
    (lambda: balance(PIPELINE, virtual_pipeline_model_parallel_size=True), r"virtual_.* \(True\) is not a positive"),
    (lambda: whatif(RUN, gpu="H100").cheapest(60), r"target \(60\) is no peak in bytes"),
    (lambda: whatif(RUN, gpu="H100").cheapest("60"), r"target \('60'\) is no peak"),  # type: ignore[arg-type]
    (lambda: fits(estimate(RUN), None), r"gpus \(None\) is no list of GPUs"),  # type: ignore[arg-type]
    (lambda: compare(PIPELINE, {0: GIB}).beyond("5%"), r"tolerance \('5%'\) is no share"),  # type: ignore[arg-type]
    (lambda: compare(PIPELINE, b"/etc/log"), r"measured \(b'/etc/log'\) is no file and no numbers"),
    (lambda: run_of_torchtitan(None), r"job_config \(None\) is not torchtitan's"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_is_wrong_is_refused_in_one_line(number: int) -> None:
    call, words = REFUSED[number]
    with pytest.raises(SpecError, match=words) as refusal:
        call()
    assert "\n" not in str(refusal.value)


def test_a_rehearsal_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge_memory import RehearsalUnavailable
    from bridge_memory.api import rehearsing

    monkeypatch.setattr(rehearsing, "find_spec", lambda name: None)
    with pytest.raises(RehearsalUnavailable, match=r"torch is not installed; install it: pip install '.\[megatron\]'"):
        rehearse(PIPELINE)
