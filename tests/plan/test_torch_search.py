"""Search under DDP, FSDP and ZeRO: against brute force with ``estimate``, and what it writes read back, by this
package's readers and by the classes of the tools that the files are for."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from tiers import few_fast

import bridge_memory
from bridge_memory import (
    BatchSpec,
    DataParallelSpec,
    OptimizerSpec,
    ParallelSpec,
    RunSpec,
    SpecError,
    estimate,
    resolve_model,
)
from bridge_memory.cli import main
from bridge_memory.emit.torch import config_file, left_to_the_script, read_back
from bridge_memory.outside.amount import Range
from bridge_memory.outside.context import outside_bytes_of
from bridge_memory.plan.changes import WhatIf, changes
from bridge_memory.plan.found import Found
from bridge_memory.plan.torch.search import search
from bridge_memory.plan.torch.space import AXES, ON_DEMAND, Space, engines_of
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.spec.parts import ENGINES
from bridge_memory.spec.run import GROUPS
from bridge_memory.speed.hardware import hardware_of
from bridge_memory.speed.torch.step_time import TIMED, step_time
from bridge_memory.verdict import headroom

LLAMA = "meta-llama/Llama-3.2-1B"
GPU = "A100-40GB"
HARDWARE, CARD = hardware_of(GPU), find_gpu(GPU)
SIZES = (1, 2, 4, 8, 16)
#: gradient checkpointing, and whether reentrant
CHECKPOINTS: tuple[tuple[bool, bool | None], ...] = ((False, None), (True, True), (True, False))
#: What the user of each engine on 16 GPUs, eight a node, can say of it.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "ddp": [{"ddp_gradient_as_bucket_view": v} for v in (False, True)],
    "fsdp2": [
        {"fsdp_reshard_after_forward": r, "fsdp_shard_degree": n, "sync_each_batch": each}
        for r, n, each in product((None, False), (None, 8), (False, True))
    ],
    "fsdp1": [
        {"fsdp_sharding_strategy": name, "fsdp_shard_degree": n, "sync_each_batch": each}
        for each in (False, True)
        for name, n in (("FULL_SHARD", None), ("SHARD_GRAD_OP", None), ("HYBRID_SHARD", 8), ("_HYBRID_SHARD_ZERO2", 8))
    ],
    "zero1": [{"overlap_comm": v} for v in (None, True)],
    "zero2": [{"overlap_comm": v} for v in (None, True)],
    "zero3": [{"overlap_comm": v, "zero_hpz_partition_size": n} for v, n in product((None, False), (1, 8))],
}


def base(engine: str, gpus: int = 16, **more: Any) -> RunSpec:
    run = RunSpec(
        model=LLAMA, parallel=ParallelSpec(world_size=gpus), data_parallel=DataParallelSpec(engine=engine),
        batch=BatchSpec(seq_length=2048, global_batch_size=256),
    )  # fmt: skip
    return run.with_fields(**more) if more else run


def found(space: Space) -> Found:
    return search(space, HARDWARE, capacity=CARD.capacity_bytes, outside=partial(outside_bytes_of, gpu=CARD))


def key(run: RunSpec) -> RunSpec:
    return replace(run, assumptions=())


@pytest.mark.parametrize("engine", OPTIONS)
def test_search_is_brute_force_with_estimate(engine: str) -> None:
    """Every combination built by hand: the same ones fit, with the same peaks, ordered by time."""
    result = found(Space({engine: base(engine)}, 8))
    by_hand = {}
    for options, mbs, (on, kind) in product(OPTIONS[engine], SIZES, CHECKPOINTS):
        run = base(engine, micro_batch_size=mbs, gradient_checkpointing=on, use_reentrant=kind, **options)
        peak = estimate(run).peak_stage.peak_bytes
        if headroom(CARD, peak, run) >= 0:
            by_hand[key(run)] = peak, step_time(run, HARDWARE).seconds
    assert {key(row.run): (row.peak, row.time.seconds) for row in result.rows} == by_hand
    assert result.looked_at == len(OPTIONS[engine]) * len(SIZES) * 3 > len(by_hand) > 3
    assert [row.time.seconds for row in result.rows] == sorted(seconds for _, seconds in by_hand.values())
    # Micro batches of 32 and 64 leave no whole number of microbatches.
    assert result.refused == {"global_batch_size": 2 * len(OPTIONS[engine]) * 3}
    front = result.front()
    for row in result.rows:
        assert any(f.peak <= row.peak and f.time.seconds <= row.time.seconds for f in front)


def test_one_gpu_and_what_varies_on_demand() -> None:
    """Attention, Liger's kernels and offloading, each beside the others."""
    one = base("single", 1, seq_length=1024, global_batch_size=8)
    result = found(Space({"single": one}, 8, frozenset({"checkpointing"})))
    shown = {(r.run.batch.micro_batch_size, r.run.transformers.attn_implementation, r.run.transformers.liger_kernel)
             for r in result.rows}  # fmt: skip
    usual = ("rope", "rms_norm", "swiglu", "fused_linear_cross_entropy")
    kernels: tuple[tuple[str, ...], ...] = ((), ("fused_linear_cross_entropy",), usual)
    tried = set(product((1, 2, 4, 8), ("eager", "sdpa", "flash_attention_2"), kernels))
    fits = set()
    for mbs, attention, names in tried:
        run = one.with_fields(micro_batch_size=mbs, attn_implementation=attention, liger_kernel=names)
        peak = estimate(run).peak_stage.peak_bytes
        if headroom(CARD, peak, run) >= 0:
            fits.add((mbs, attention, names))
    assert shown == fits and result.looked_at == len(tried) > len(fits)
    zero = found(Space({"zero3": base("zero3")}, 8, frozenset(AXES.keys() - {"offload"})))
    devices = {(r.run.deepspeed.offload_optimizer_device, r.run.deepspeed.offload_param_device) for r in zero.rows}
    assert devices == {("none", "none"), ("cpu", "none"), ("cpu", "cpu")}


def test_torchtitan_has_its_own_checkpoints() -> None:
    run = base("fsdp2", 8, transformer_impl="torchtitan")
    result = found(Space({"fsdp2": run}, 8, frozenset(AXES.keys() - {"checkpointing"})))
    modes = {(r.run.transformers.gradient_checkpointing, r.run.transformers.selective_ac_option) for r in result.rows}
    assert modes == {(False, None), (True, None), (False, "op"), (False, "2")}


def test_what_words_mean() -> None:
    assert engines_of(["any"], 8) == ("ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3")
    assert "ddp" not in engines_of(["any"], 1) and "single" in engines_of(["any"], 1)
    assert engines_of(["zero", "zero2", "fsdp2"], 8) == ("zero1", "zero2", "zero3", "fsdp2")


def test_an_engine_without_a_step_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new engine is estimated before its time is known; a search has nothing to rank it by."""
    monkeypatch.setitem(ENGINES, "new", "a new engine")
    for words in (["new"], ["fsdp2", "new"]):
        with pytest.raises(SpecError, match=r"^engine \(new\) has no step time to rank by; use single, ddp"):
            engines_of(words, 8)


# ---- the command ----

SMALL = ["search", LLAMA, "--num-gpus", "8", "--gpu", GPU, "--global-batch-size", "64", "--seq-length", "2048"]
MIXED = [*SMALL, "--mixed-precision", "bf16"]


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main([*arguments, "--json", "--top", "999"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows: list[dict[str, Any]] = document["best"]
    return rows


@pytest.mark.parametrize("engine", few_fast((*OPTIONS, "any")))
def test_the_estimate_command_shows_the_same_peak(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    everything = ["--vary", "all", "--clip-grad", "0.5", "--micro-batch-size", "4..4"]
    for flags in ([*SMALL, "--engine", engine], [*MIXED, "--engine", engine, *everything]):
        rows = rows_of(capsys, *flags)
        for number in range(1, len(rows), max(1, len(rows) // 3)):
            assert main([*flags, "--emit", "estimate", "--row", str(number)]) == 0
            line = shlex.split(capsys.readouterr().out)
            assert main([*line[1:], "--json"]) == 0
            (stage,) = json.loads(capsys.readouterr().out)["stages"]
            assert stage["peak_bytes"] == rows[number - 1]["peak_bytes"], line


def test_given_flags_stay(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, *SMALL, "--engine", "fsdp2", "--micro-batch-size", "2", "--no-reshard-after-forward")
    assert {r["mbs"] for r in rows} == {2} and {r["sharded"] for r in rows} == {"all, no reshard"}
    rows = rows_of(capsys, *SMALL, "--engine", "zero2", "--vary", "mbs")
    assert len({r["mbs"] for r in rows}) > 2 and {r["checkpointing"] for r in rows} == {"none"}
    two = ["--engine", "fsdp2,zero3", "--micro-batch-size", "2..4", "--reduce-bucket-size", "1000"]
    rows = rows_of(capsys, *SMALL, *two)
    assert {r["mbs"] for r in rows} == {2, 4} and {r["engine"] for r in rows} == {"fsdp2", "zero3"}
    rows = rows_of(capsys, *SMALL, "--vary", "engine,mbs")
    assert {r["engine"] for r in rows} == set(OPTIONS)


def test_a_file_says_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    zero = {"stage": 2, "reduce_bucket_size": 1000}
    path.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero,
                                "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}))
    rows = rows_of(capsys, *SMALL, "--deepspeed", str(path))
    assert {(r["engine"], r["mbs"]) for r in rows} == {("zero2", 4)} and len(rows) == 2
    rows = rows_of(capsys, *SMALL, "--deepspeed", str(path), "--vary", "mbs,overlap")
    assert len({r["mbs"] for r in rows}) > 2 and {r["options"] for r in rows} == {"", "overlap_comm"}
    flags = [*SMALL, "--deepspeed", str(path), "--vary", "mbs,overlap"]
    assert main([*flags, "--emit", "estimate", "--row", "3"]) == 0
    line = shlex.split(capsys.readouterr().out)
    assert main([*line[1:], "--json"]) == 0
    (stage,) = json.loads(capsys.readouterr().out)["stages"]
    assert stage["peak_bytes"] == rows[2]["peak_bytes"]
    for flags, words in (
        (["--engine", "fsdp2"], "is not what the file says"), (["--engine", "zero"], "does not go with --deepspeed"),
        (["--mixed-precision", "bf16"], "does not go with --deepspeed"),
    ):  # fmt: skip
        assert main([*SMALL, "--deepspeed", str(path), *flags]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1


def test_every_format_says_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    shown = {}
    for kind in ("text", "json", "csv", "md", "html"):
        assert main([*MIXED, "--engine", "any", "--top", "3", "--format", kind]) == 0
        shown[kind] = capsys.readouterr().out
    document = json.loads(shown["json"])
    gib = [f"{r['peak_bytes'] / 2**30:.2f}" for r in document["best"]]
    assert [int(r["peak_bytes"]) for r in csv.DictReader(io.StringIO(shown["csv"]))] == [
        r["peak_bytes"] for r in document["best"]
    ]
    assert all(n in shown["md"] and n in shown["text"] and n in shown["html"] for n in gib)
    assert "fitted on Megatron's runs" in shown["text"] and "configurations evaluated" in shown["text"]
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((Path(bridge_memory.__file__).parent / "report" / "torch_search.schema.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    for name in document:
        assert not jsonschema.Draft202012Validator(schema).is_valid({k: v for k, v in document.items() if k != name})


def test_ctrl_c_shows_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import bridge_memory.plan.torch.search as module

    real, calls = module.peaks, []

    def interrupted(run: RunSpec) -> Any:
        calls.append(run)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return real(run)

    monkeypatch.setattr(module, "peaks", interrupted)
    assert main([*SMALL, "--engine", "zero3"]) == 130
    assert "5 configurations evaluated" in (shown := capsys.readouterr().out) and "stopped early" in shown


def test_processes_find_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert rows_of(capsys, *SMALL, "--engine", "zero3", "--jobs", "2") == rows_of(capsys, *SMALL, "--engine", "zero3")


def test_nothing_fits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says by how much, of what, and what to change; the command with the change then has a first row."""
    monkeypatch.setenv("COLUMNS", "1000")
    model = "search meta-llama/Llama-3.1-70B --gpu H100 --engine fsdp2"
    flags = f"{model} --global-batch-size 256 --seq-length 2048".split()
    assert main([*flags, "--num-gpus", "8", "--micro-batch-size", "1"]) == 1
    shown = capsys.readouterr().out
    (lacks,) = re.findall(r"the smallest lacks [\d.]+ GiB, .*: a peak of ([\d.]+) GiB, of that (.*)", shown)
    assert sum(map(float, re.findall(r"[\d.]+", lacks[1]))) == pytest.approx(float(lacks[0]), abs=0.25)
    tried = re.findall(r"try: (.*?); fsdp2, .*? with a peak of ([\d.]+) GiB", shown)
    assert [words.split()[0] for words, _ in tried] == ["--fsdp-offload-params", "--num-gpus"]
    assert main([*flags, "--num-gpus", "8", "--micro-batch-size", "1", "--gradient-checkpointing", tried[0][0]]) == 0
    assert f"FITS H100: peak {tried[0][1]}" in capsys.readouterr().out


def test_a_row_in_front_keeps_the_reserve() -> None:
    """On a card that the fastest row just fills, its band of predictions does not fit: another row is first."""
    space = Space({"fsdp2": base("fsdp2", 8)}, 8, frozenset({*ON_DEMAND, "mbs", "shard"}))
    fastest = found(space).rows[0]
    filled = CARD.capacity_bytes - fastest.headroom
    less = search(space, HARDWARE, capacity=filled, outside=partial(outside_bytes_of, gpu=CARD))
    rows, keeping, _ = less.ranked(100)
    assert less.rows[0].run == fastest.run and rows[0].run != fastest.run
    assert fastest.run in [row.run for row in rows[keeping:]]


def test_a_measured_step_moves_all_times_and_no_rank(capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, *SMALL, "--engine", "fsdp2,zero3")
    named = ("fsdp2", 2, "none", "all")
    row = next(r for r in rows if (r["engine"], r["mbs"], r["checkpointing"], r["sharded"]) == named)
    step = f"fsdp2,mbs2,checkpointing:none={1.5 * row['step_seconds']}"
    again = rows_of(capsys, *SMALL, "--engine", "fsdp2,zero3", "--measured-step-time", step)
    assert [r["step_seconds"] for r in again] == pytest.approx([1.5 * r["step_seconds"] for r in rows])
    assert [r["peak_bytes"] for r in again] == [r["peak_bytes"] for r in rows]


def test_one_gpu_divides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-gpus 1 --gpu RTX-4090 --global-batch-size 16 --seq-length 1024 --engine single --peft lora"
    assert main(["search", LLAMA, *flags.split()]) == 0
    shown = capsys.readouterr().out
    assert "RTX-4090" in shown and "reshard" not in shown


def test_fsdp1_is_not_shown_where_its_successor_takes_no_more() -> None:
    one = found(Space({"fsdp1": base("fsdp1")}, 8))
    both = found(Space({engine: base(engine) for engine in ("fsdp1", "fsdp2")}, 8))
    of_two = [row for row in both.rows if row.run.data_parallel.engine == "fsdp2"]
    assert one.ranked(50).rows and not one.ranked(50).refused
    for row in both.ranked(50).rows:
        if row.run.data_parallel.engine == "fsdp1":
            fast = (two for two in of_two if two.time.seconds <= 1.05 * row.time.seconds and both.keeps(two))
            assert not any(two.peak <= row.peak for two in fast)
    assert any("its successor" in reason for reason in both.ranked(50).refused)


def test_dtypes_that_differ_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--engine", "any"]) == 0
    assert "--mixed-precision bf16 sets all of them up" in " ".join(capsys.readouterr().out.split())
    assert main([*MIXED, "--engine", "any"]) == 0
    assert "sets all of them up" not in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        ([*SMALL, "--engine", "deepspeed"], "'deepspeed' is unknown; use some of"),
        ([*SMALL, "--engine", "fsdp2,megatron_ddp"], "does not stand beside others"),
        ([*SMALL, "--engine", "fsdp2", "--tp", "2"], "--tp (2) is not supported with --engine fsdp2"),
        ([*SMALL, "--engine", "fsdp2", "--tp", "1..2"], "--tp takes no range here"),
        ([*SMALL, "--engine", "fsdp2", "--reduce-bucket-size", "100"], "--reduce-bucket-size is no option of"),
        ([*SMALL, "--engine", "fsdp2", "--vary", "tp"], "--vary tp is none of engine, mbs"),
        ([*SMALL, "--engine", "fsdp2", "--vary", "engine"], "--vary engine does not go with --engine fsdp2"),
        ([*SMALL, "--engine", "fsdp2", "--vary", "mbs", "--micro-batch-size", "2"], "--vary mbs does not go"),
        ([*SMALL, "--engine", "single"], "leaves 8 data-parallel ranks"),
        ([*SMALL, "--engine", "fsdp2", "--emit", "deepspeed"], "--emit deepspeed is for --engine zero1"),
        ([*SMALL, "--engine", "fsdp2", "--emit", "bridge"], "--emit bridge is for layouts of megatron-core"),
        ([*SMALL, "--emit", "accelerate"], "--emit accelerate is for engines outside of megatron-core"),
        ([*SMALL, "--engine", "fsdp2", "--emit", "accelerate"], "has no word for"),
        ([*MIXED, "--engine", "fsdp2", "--emit", "trainer"], "cannot ask for FSDP2; use --transformers-version 5.0"),
        ([*MIXED, "--engine", "fsdp2", "--bf16"], "is set by --mixed-precision bf16 too"),
        ([*MIXED], "--mixed-precision is for engines outside of megatron-core"),
        ([*SMALL, "--engine", "zero3", "--emit", "deepspeed", "--row", "9999"], "--row 9999 does not exist"),
        ([*SMALL, "--engine", "ddp", "--cache", "x"], "--cache is for layouts of megatron-core"),
        ([*SMALL, "--engine", "ddp", "--measured-step-time", "mbs2"], "does not end in = and the seconds"),
        ([*SMALL, "--engine", "ddp", "--measured-step-time", "tp2=3"], "which says nothing here; write it like"),
        ([*SMALL, "--engine", "ddp", "--measured-step-time", "mbs2=900"], "times the"),
        ([*SMALL, "--engine", "any", "--measured-step-time", "mbs2=3"], "names no engine, or several"),
        ([*SMALL, "--engine", "ddp", "--measured-step-time", "mbs3=3"], "--global-batch-size (64)"),
        ([*SMALL[:2], "--gpu", GPU, "--engine", "ddp", "--global-batch-size", "8"], "--num-gpus is missing"),
        ([*SMALL[:4], "--gpu", GPU, "--engine", "ddp"], "--global-batch-size is missing"),
        (["search", LLAMA, "--num-gpus", "8", "--gpu", GPU, "--engine", "ddp", "--global-batch-size", "9"],
         "--global-batch-size (9)"),
        (["search", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", *SMALL[2:], "--engine", "any"], "give 5.3 or later"),
        (["balance", LLAMA, "--num-gpus", "8", "--gpu", GPU, "--engine", "zero3"], "has no pipeline stages"),
        (["balance", LLAMA, "--num-gpus", "8", "--gpu", GPU, "--engine", "fsdp2", "--pp", "2"], "--pp (2)"),
    ),
)  # fmt: skip
def test_refusals_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out


# ---- files ----


def mixed(engine: str) -> RunSpec:
    """As accelerate sets the engine up in bf16."""
    run = base(engine, optimizer=OptimizerSpec(optimizer="adamw"))
    if engine.startswith("zero"):
        return run
    run = run.with_fields(params_dtype="fp32")
    if engine == "ddp":
        return run.with_fields(autocast="bf16")
    own = {"fsdp_auto_wrap_policy": "torchtitan"} if engine == "fsdp2" else {"fsdp_use_orig_params": True}
    return run.with_fields(fsdp_param_dtype="bf16", fsdp_reduce_dtype="bf16", **own)


def every_way(engine: str) -> Iterator[RunSpec]:
    """With a fifth of the micro batches, and offloading and Liger's kernels varied."""
    space = Space({engine: mixed(engine)}, 8, frozenset({"attention"}), (2, 2))
    result = search(space, HARDWARE, capacity=1 << 50, outside=lambda run: Range(0, 0))
    return (row.run for row in result.rows)


def said(how: str, run: RunSpec) -> tuple[str, RunSpec] | None:
    """A file, and the run that it and the flags beside it describe; None where it has no words for the run."""
    import argparse

    from bridge_memory.arguments.flags import FLAG_OF, MODEL_FLAGS, PACKAGES

    names = (*MODEL_FLAGS, *FLAG_OF, *(flag.removeprefix("--").replace("-", "_") for flag in PACKAGES), "custom_config")
    flags = argparse.Namespace(model=LLAMA, mapping="builtin", **dict.fromkeys(names))
    try:
        text, _ = config_file(how, run, flags, GPU)
    except SpecError as error:
        assert "\n" not in str(error)
        return None
    read, beside = read_back(how, text, run), left_to_the_script(how, text, run)
    return text, read.with_fields(**beside) if beside else read


@pytest.mark.parametrize("how", ("deepspeed", "accelerate", "trainer"))
@pytest.mark.parametrize("engine", OPTIONS)
def test_what_is_emitted_reads_back_as_the_same_run(how: str, engine: str) -> None:
    pytest.importorskip("yaml")
    if how == "deepspeed" and not engine.startswith("zero"):
        assert said(how, mixed(engine)) is None
        return
    runs = [on_5(run) for run in every_way(engine)] if how == "trainer" else list(every_way(engine))
    again = {key(run): said(how, run) for run in runs}
    assert len(runs) > 5 and sum(found is not None for found in again.values()) >= len(runs) / 5
    for run, found in again.items():
        if found is not None:
            for group in GROUPS:
                assert getattr(found[1], group) == getattr(run, group), (group, found[0])


def test_the_flags_beside_a_file_are_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    for how, engine, suffix in (
        ("deepspeed", "zero2", ".json"), ("accelerate", "zero3", ".yaml"), ("accelerate", "fsdp2", ".yaml"),
        ("accelerate", "fsdp1", ".yaml"), ("accelerate", "ddp", ".yaml"), ("trainer", "fsdp1", ".json"),
        ("trainer", "ddp", ".json"), ("trainer", "zero3", ".json"),
    ):  # fmt: skip
        flags = [*MIXED, "--engine", engine, "--vary", "mbs,checkpointing,attention"]
        row = rows_of(capsys, *flags)[1]
        assert main([*flags, "--emit", how, "--row", "2"]) == 0
        captured = capsys.readouterr()
        path = tmp_path / f"{how}-{engine}{suffix}"
        path.write_text(captured.out)
        _, _, command = captured.err.partition("for FILE: ")
        line = [str(path) if word == "FILE" else word for word in shlex.split(command)]
        assert main([*line[1:], "--json"]) == 0
        (stage,) = json.loads(capsys.readouterr().out)["stages"]
        assert stage["peak_bytes"] == row["peak_bytes"], line


def test_deepspeed_takes_its_config() -> None:
    """By its own class, which refuses keys that it does not know and batch sizes that do not agree."""
    runtime = pytest.importorskip("deepspeed.runtime.config")
    for engine in ("zero1", "zero2", "zero3"):
        for run in every_way(engine):
            found = said("deepspeed", run)
            assert found is not None
            config = runtime.DeepSpeedConfig(json.loads(found[0]))
            zero = config.zero_config
            assert zero.stage == int(engine[-1]) and config.bfloat16_config.enabled
            assert config.train_micro_batch_size_per_gpu == run.batch.micro_batch_size
            assert getattr(zero.offload_optimizer, "device", "none") == run.deepspeed.offload_optimizer_device
            assert getattr(zero.offload_param, "device", "none") == run.deepspeed.offload_param_device
            if run.deepspeed.overlap_comm is not None:
                assert zero.overlap_comm == run.deepspeed.overlap_comm
            assert zero.zero_hpz_partition_size == run.deepspeed.zero_hpz_partition_size


def test_accelerate_takes_its_yaml(tmp_path: Path) -> None:
    """By the class that ``accelerate launch`` reads it with."""
    pytest.importorskip("yaml")
    config_args = pytest.importorskip("accelerate.commands.config.config_args")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    for engine in OPTIONS:
        run = mixed(engine)
        found = said("accelerate", run)
        assert found is not None
        path = tmp_path / f"{engine}.yaml"
        path.write_text(found[0])
        config = config_args.ClusterConfig.from_yaml_file(str(path))
        kind = {"ddp": "MULTI_GPU"}.get(engine, "FSDP" if engine.startswith("fsdp") else "DEEPSPEED")
        assert config.distributed_type == kind and config.mixed_precision == "bf16" and config.num_processes == 16
        if kind == "FSDP":
            assert config.fsdp_config["fsdp_version"] == int(engine[-1])
        # The launcher's own parser, and its check of the file.
        typed = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        args, _, _ = _validate_launch_command(typed)
        assert args.num_processes == 16 and args.mixed_precision == "bf16"
        asked = args.use_fsdp, args.use_deepspeed, args.multi_gpu
        assert asked == (kind == "FSDP", kind == "DEEPSPEED", kind == "MULTI_GPU")
        if kind == "DEEPSPEED":
            assert args.zero_stage == int(engine[-1]) and args.gradient_accumulation_steps == run.num_microbatches
        elif kind == "FSDP":
            assert args.fsdp_offload_params in (False, "false") and int(args.fsdp_version) == int(engine[-1])


@pytest.mark.parametrize("engine", ("fsdp1", "fsdp2"))
@pytest.mark.parametrize("offload", (False, True))
def test_accelerate_starts_fsdp_as_the_row_has_it(
    engine: str, offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plugin of a process that ``accelerate launch`` started by the file."""
    pytest.importorskip("yaml")
    utils = pytest.importorskip("accelerate.utils")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    for options in OPTIONS[engine]:
        run = mixed(engine).with_fields(**options, fsdp_offload_params=offload, gradient_checkpointing=True,
                                        use_reentrant=False)  # fmt: skip
        found = said("accelerate", run)
        assert found is not None
        path = tmp_path / "accelerate.yaml"
        path.write_text(found[0])
        args, _, _ = _validate_launch_command(
            launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        )
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("FSDP_")]:
                patch.delenv(name)
            for name, value in prepare_multi_gpu_env(args).items():
                if name.startswith("FSDP_") and name not in (
                    "FSDP_SYNC_MODULE_STATES", "FSDP_CPU_RAM_EFFICIENT_LOADING"
                ):
                    patch.setenv(name, value)  # those two look for a GPU
            theirs = utils.FullyShardedDataParallelPlugin()
        assert theirs.fsdp_version == int(engine[-1]) and theirs.activation_checkpointing
        if engine == "fsdp1":
            assert theirs.sharding_strategy.name == run.fsdp.sharding_strategy
            assert theirs.use_orig_params and theirs.backward_prefetch.name == "BACKWARD_PRE"
            assert theirs.cpu_offload.offload_params == offload
        else:
            assert theirs.reshard_after_forward == (run.fsdp.reshard_after_forward is not False)
            assert type(theirs.cpu_offload).__name__ == ("CPUOffloadPolicy" if offload else "OffloadPolicy")
            sizes = [args.parallelism_config_dp_replicate_size, args.parallelism_config_dp_shard_size]
            degree = run.fsdp.shard_degree
            assert [int(n) for n in sizes] == ([16 // degree, degree] if degree else [1, 1])


def test_the_trainer_takes_its_arguments() -> None:
    """Every key is a field of TrainingArguments, every optimizer one of theirs."""
    transformers = pytest.importorskip("transformers")
    known = {f.name for f in fields(transformers.TrainingArguments)}
    for engine in OPTIONS:
        found = said("trainer", on_5(mixed(engine)))
        assert found is not None
        table = json.loads(found[0])
        assert set(table) <= known and table["optim"] in set(transformers.training_args.OptimizerNames), engine


def on_5(run: RunSpec) -> RunSpec:
    return run.with_fields(transformers_version=(5, 0)) if run.data_parallel.engine == "fsdp2" else run


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("offload", (False, True))
def test_the_trainer_hands_fsdp1_over_as_the_row_has_it(
    number: int, offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TrainingArguments of transformers 4 made of the file, and accelerate's plugin of the environment they set."""
    utils = pytest.importorskip("accelerate.utils")
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) >= 5:
        pytest.skip("transformers 5 hands a table over")
    run = mixed("fsdp1").with_fields(**OPTIONS["fsdp1"][number], fsdp_offload_params=offload)
    found = said("trainer", run)
    assert found is not None
    table = {k: v for k, v in json.loads(found[0]).items() if k != "bf16"} | {"output_dir": str(tmp_path)}
    before = set(os.environ)
    for name in [name for name in os.environ if name.startswith("FSDP_")]:
        monkeypatch.delenv(name)
    try:
        transformers.TrainingArguments(use_cpu=True, report_to=[], **table)
        os.environ["FSDP_SYNC_MODULE_STATES"] = "false"  # true looks for a GPU
        theirs = utils.FullyShardedDataParallelPlugin()
    finally:
        for name in set(os.environ) - before:
            del os.environ[name]
        from accelerate.state import AcceleratorState, PartialState

        AcceleratorState._reset_state()
        PartialState._reset_state()
    assert run.fsdp.sharding_strategy == theirs.sharding_strategy.name
    assert run.fsdp.use_orig_params == theirs.use_orig_params and theirs.cpu_offload.offload_params == offload
    assert theirs.backward_prefetch.name == run.fsdp.backward_prefetch and theirs.auto_wrap_policy is not None


# ---- what to change ----


@pytest.mark.parametrize("engine", TIMED)
def test_whatif_is_estimate_of_the_changed_run(engine: str) -> None:
    run = base(engine, 1 if engine == "single" else 8, micro_batch_size=2)
    tried = WhatIf(run, HARDWARE)
    peak, seconds = estimate(run).peak_stage.peak_bytes, step_time(run, HARDWARE).seconds
    assert len(tried.singles) > 4
    for effect in tried.singles:
        changed = run.with_fields(**dict(effect.changes[0].fields))
        assert effect.freed == peak - estimate(changed).peak_stage.peak_bytes > 0
        assert effect.slowdown == pytest.approx(step_time(changed, HARDWARE).seconds / seconds)
    for change in changes(run):
        try:
            run.with_fields(**dict(change.fields))
        except SpecError as error:
            assert "is no field" not in str(error)
    kinds = {change.kind for change in changes(run)}
    assert {"gradient checkpointing", "micro batch", "attention", "Liger kernels", "optimizer dtypes"} <= kinds
    assert ("offload" in kinds) == (engine not in ("single", "ddp"))


def test_whatif_reaches_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--num-gpus 8 --gpu A100-40GB --global-batch-size 64 --engine zero1 --micro-batch-size 4"
    assert main(["whatif", LLAMA, *flags.split(), "--target-gib", "12", "--json"]) == 0
    target = json.loads(capsys.readouterr().out)["target"]
    assert target["peak_bytes"] <= 12 * 2**30 and target["step_time_factor"] is not None
    assert main(["whatif", LLAMA, *flags.split(), "--target-gib", "0.1"]) == 1


def test_estimate_that_does_not_fit_names_a_change(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["estimate", LLAMA, "--gpu", GPU, "--num-gpus", "8", "--engine", "ddp", "--micro-batch-size", "4"]
    assert main(arguments) == 0
    line = " ".join(capsys.readouterr().out.split())
    assert "try first: --" in line
    fix = line.partition("try first: ")[2].partition(" (")[0]
    assert main([*arguments, *shlex.split(fix), "--require-fit"]) == 0


def test_on_demand_axes_are_axes() -> None:
    assert set(ON_DEMAND) < set(AXES)
    model = resolve_model(LLAMA)
    assert Space({"ddp": replace(base("ddp"), model=model)}, 8).rule().startswith("mbs in powers of two")
