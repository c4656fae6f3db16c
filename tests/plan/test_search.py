"""Search against brute force with ``estimate``, against what megatron-core refuses, and its words read back."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from functools import partial
from itertools import product
from typing import Any

import pytest

from bridge_memory import BatchSpec, ParallelSpec, RecomputeSpec, RunSpec, SpecError, estimate, resolve_model
from bridge_memory.cli import main
from bridge_memory.emit.bridge import bridge_overrides
from bridge_memory.emit.megatron import layout_fields
from bridge_memory.emit.megatron_args import megatron_arguments
from bridge_memory.outside.context import outside_bytes_of
from bridge_memory.plan.found import SIMPLER, Found, Refused, ties
from bridge_memory.plan.megatron.search import search
from bridge_memory.plan.megatron.space import Space, dispatcher_words, layouts, parallel_sizes, useful_modules
from bridge_memory.plan.megatron.splits import balanced_layout, splits
from bridge_memory.readers.megatron_args import run_from_megatron_args
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.spec.layout_string import parse_layout_string, short_layout_string
from bridge_memory.speed.hardware import hardware_of
from bridge_memory.speed.megatron.step_time import step_time
from bridge_memory.verdict import Verdict, fits, headroom

LLAMA, QWEN = "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-30B-A3B"


def found(model: str, gpus: int, gpu: str = "A100-40GB", fixed: tuple[str, ...] = (), **fields: object) -> Found:
    base = RunSpec(model=model, batch=BatchSpec(seq_length=4096, global_batch_size=64)).with_fields(**fields)
    hardware = hardware_of(gpu)
    space = Space(base, gpus, hardware.domain, frozenset(fixed))
    card = find_gpu(gpu)
    return search(space, hardware, capacity=card.capacity_bytes, outside=partial(outside_bytes_of, gpu=card))


def test_search_is_brute_force_with_estimate() -> None:
    """All combinations of sizes tried one by one: the same layouts fit, with the same peaks and the same order."""
    result = found(LLAMA, 4, fixed=("split", "vpp", "recompute"))
    card, hardware = find_gpu("A100-40GB"), hardware_of("A100-40GB")
    by_hand = {}
    for tp, pp, cp, mbs in product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4, 8)):
        try:
            run = RunSpec(
                model=LLAMA,
                parallel=ParallelSpec(
                    world_size=4, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp,
                    context_parallel_size=cp,
                ),
                batch=BatchSpec(seq_length=4096, micro_batch_size=mbs, global_batch_size=64),
            )  # fmt: skip
        except SpecError:
            continue
        peak = estimate(run).peak_stage.peak_bytes
        if headroom(card, peak, run) >= 0:
            by_hand[tp, pp, cp, mbs] = peak, step_time(run, hardware).seconds
    ours = {
        (r.run.parallel.tp, r.run.parallel.pp, r.run.parallel.cp, r.run.batch.micro_batch_size):
        (r.peak, r.time.seconds) for r in result.rows
    }  # fmt: skip
    assert ours == by_hand and 5 < len(ours) < result.looked_at
    assert [r.time.seconds for r in result.rows] == sorted(seconds for _, seconds in by_hand.values())


def test_what_is_left_out_for_its_model_state_does_not_fit() -> None:
    result = found(QWEN, 16, "A100-80GB", fixed=("split", "vpp", "recompute", "mbs"))
    assert result.without_activations > 0
    base = RunSpec(model=QWEN, batch=BatchSpec(seq_length=4096, global_batch_size=64))
    space = Space(base, 16, 8, frozenset(("split", "vpp", "recompute", "mbs")))
    kept = {r.run.parallel for r in result.rows}
    card = find_gpu("A100-80GB")
    for alike in layouts(space, Refused()):
        for run in alike:
            peak = estimate(run).peak_stage.peak_bytes
            assert (run.parallel in kept) == (headroom(card, peak, run) >= 0), run.parallel


def test_the_front_is_not_beaten() -> None:
    result = found(LLAMA, 4, fixed=("split",))
    front = result.front()
    assert front[0] == result.rows[0] and front[-1].peak == min(r.peak for r in result.rows)
    for row in result.rows:
        assert any(f.peak <= row.peak and f.time.seconds <= row.time.seconds for f in front)
    assert ties(result.rows) >= 1


def test_splits_hold_every_layer_once() -> None:
    model = resolve_model("deepseek-ai/DeepSeek-V3")
    for pp, vpp in ((2, 1), (4, 1), (8, 2), (16, 1), (16, 2)):
        some = list(splits(model, pp, vpp))
        assert some, (pp, vpp)
        for fields in some:
            run = RunSpec(
                model=model,
                parallel=ParallelSpec(
                    world_size=pp, pipeline_model_parallel_size=pp,
                    virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None, **fields,
                ),
            )  # fmt: skip
            assert sum(len(s.layers) for s in estimate(run).stages) == 61


@pytest.mark.parametrize(("layers", "chunks", "light"), ((61, 16, 0), (61, 16, 1), (61, 32, 1), (7, 4, 1), (10, 3, 2)))
def test_balanced_layouts_are_balanced(layers: int, chunks: int, light: int) -> None:
    parsed = parse_layout_string(balanced_layout(layers, 1, chunks, light))
    sizes = [chunk.count("t") for chunk in parsed]
    assert len(parsed) == chunks and sum(sizes) == layers and parsed[0][0] == "E" and parsed[-1].endswith("mL")
    assert max(sizes[:-1]) - min(sizes[:-1]) <= 1 and sizes[-1] <= max(sizes[:-1]) - light


def test_short_layout_strings_are_read_back() -> None:
    chunks = ["Ett", *["tttt"] * 14, "tt", "", "mL"]
    assert short_layout_string(chunks) == "Ett|(t*4|)*14tt||mL"
    assert parse_layout_string(short_layout_string(chunks)) == chunks


def test_useful_modules() -> None:
    def of(model: str, **fields: object) -> tuple[str, ...]:
        return useful_modules(RunSpec(model=model).with_fields(**fields))

    assert of(LLAMA) == ("mlp",)
    assert of(LLAMA, transformer_impl="local", cp_comm_type="p2p") == ("core_attn", "layernorm", "mlp")
    assert of(QWEN) == ("moe_act", "layernorm", "moe")
    v3 = ("moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
    assert of("deepseek-ai/DeepSeek-V3") == v3


# ---- words ----

AWKWARD = RunSpec(
    model="deepseek-ai/DeepSeek-V3",
    parallel=ParallelSpec(
        world_size=1024, tensor_model_parallel_size=2, pipeline_model_parallel_size=16,
        expert_model_parallel_size=64, expert_tensor_parallel_size=1,
        pipeline_model_parallel_layout="Et*3|(t*4|)*14ttmL",
    ),
    batch=BatchSpec(seq_length=4096, global_batch_size=8192),
    recompute=RecomputeSpec(granularity="selective", modules=("mla_up_proj", "mlp")),
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "flags"),
    (
        pytest.param(
            "Qwen/Qwen3-30B-A3B", "--tp 2 --ep 8 --moe-permute-fusion --no-bias-dropout-fusion", marks=pytest.mark.slow
        ),
        ("deepseek-ai/DeepSeek-V3", "--num-layers 8 --mtp-num-layers 0 --megatron-core 0.15 --vary pp,recompute,split"),
        ("meta-llama/Llama-3.2-1B", "--hidden-dropout 0.1 --fp8 hybrid --exhaustive --vary tp,pp,recompute"),
    ),
)
def test_the_estimate_command_shows_the_same_peak(
    model: str, flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of whatever row, with every flag that was given, of the model and its releases too."""
    arguments = ["search", model, "--num-gpus", "16", "--gpu", "B200", "--global-batch-size", "64", *flags.split()]
    assert main([*arguments, "--json", "--top", "2"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    for number, row in enumerate(best, 1):
        assert main([*arguments, "--emit", "estimate", "--row", str(number)]) == 0
        line = shlex.split(capsys.readouterr().out)
        assert main([*line[1:], "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert max(s["peak_bytes"] for s in shown["stages"]) == row["peak_bytes"], line


def test_megatron_reads_its_arguments_as_the_same_layout() -> None:
    """Of whatever run: ``tests/emit/test_read_back.py``."""
    for fields in (
        dict(tensor_model_parallel_size=2, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2),
        dict(context_parallel_size=2, micro_batch_size=2, recompute_granularity="selective",
             recompute_modules=("mlp",)),
        dict(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*7|t*9L",
             recompute_granularity="full", recompute_method="block", recompute_num_layers=3),
    ):  # fmt: skip
        run = RunSpec(
            model=LLAMA, parallel=ParallelSpec(world_size=8), batch=BatchSpec(seq_length=4096, global_batch_size=64)
        ).with_fields(**fields)
        emitted = megatron_arguments(run)
        # What Megatron-LM does where Megatron Bridge is assumed.
        assert emitted.left == {"checkpoint.adopt_optim_states": True} and emitted.note == "on 8 GPUs"
        read = run_from_megatron_args(emitted.text, world_size=8)
        assert layout_fields(read) == layout_fields(run)


def test_bridge_overrides_are_python() -> None:
    text = bridge_overrides(AWKWARD).text
    compile(text, "overrides", "exec")
    for line in (
        'cfg.model.pipeline_model_parallel_layout = "Et*3|(t*4|)*14ttmL"',
        'cfg.model.recompute_modules = ["mla_up_proj", "mlp"]', "cfg.model.sequence_parallel = True",
        "cfg.model.expert_tensor_parallel_size = 1", "cfg.train.global_batch_size = 8192",
    ):  # fmt: skip
        assert line in text.splitlines()
    alike = AWKWARD.with_fields(expert_tensor_parallel_size=AWKWARD.parallel.tp, expert_model_parallel_size=8)
    assert f"expert_tensor_parallel_size = {AWKWARD.parallel.tp}\n" in bridge_overrides(alike).text
    # A recipe's own layout does not stay beside it.
    plain = RunSpec(model=LLAMA, parallel=ParallelSpec(world_size=2), batch=BatchSpec(global_batch_size=4))
    lines = bridge_overrides(plain).text.splitlines()
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        assert f"cfg.model.{name} = 1" in lines
    for name in ("recompute_granularity", "pipeline_model_parallel_layout", "virtual_pipeline_model_parallel_size"):
        assert f"cfg.model.{name} = None" in lines
    assert "cfg.model.account_for_embedding_in_pipeline_split = False" in lines


# ---- the command ----

SMALL = ["search", LLAMA, "--num-gpus", "2", "--gpu", "h100", "--global-batch-size", "16", "--seq-length", "2048"]


def test_every_format_says_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = {}
    for kind in ("text", "json", "csv", "md", "html"):
        assert main([*SMALL, "--top", "3", "--format", kind]) == 0
        shown[kind] = capsys.readouterr().out
    best = json.loads(shown["json"])["best"]
    rows = list(csv.DictReader(io.StringIO(shown["csv"])))
    assert [int(r["peak_bytes"]) for r in rows] == [r["peak_bytes"] for r in best] and len(best) == 3
    cells = [line.split("|") for line in shown["md"].splitlines()[2:]]
    gib = [f"{r['peak_bytes'] / 2**30:.2f}" for r in best]
    assert [c[11].strip() for c in cells] == gib and all(n in shown["text"] for n in gib)
    assert "Fastest layouts" in shown["text"] and "layouts evaluated" in shown["text"]
    held = re.search(r'id="charts">(.*?)</script>', shown["html"])
    assert held
    front = [(r["step_seconds"], r["peak_bytes"] / 2**30) for r in json.loads(shown["json"])["front"]]
    (chart,) = json.loads(held[1])
    others, drawn = (series["points"] for series in chart["data"]["series"])
    assert [(x, y) for x, y, _ in drawn] == front
    # No other layout of the page is both faster and smaller than one of the front.
    assert others and all(any(f <= x and g <= y for f, g in front) for x, y, _ in others)


def test_given_flags_stay(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--tp", "2", "--micro-batch-size", "2", "--json", "--top", "50"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert {(r["tp"], r["mbs"]) for r in best} == {(2, 2)}
    assert main([*SMALL, "--vary", "mbs", "--json", "--top", "50"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert {r["tp"] for r in best} == {1} and len({r["mbs"] for r in best}) > 1
    assert main([*SMALL, "--tp", "2..2", "--json"]) == 0
    assert {r["tp"] for r in json.loads(capsys.readouterr().out)["best"]} == {2}
    # A range is kept beside --vary, and goes as far as it says.
    assert main([*SMALL, "--tp", "2..2", "--vary", "mbs", "--json"]) == 0
    assert {r["tp"] for r in json.loads(capsys.readouterr().out)["best"]} == {2}
    wide = ["--micro-batch-size", "4..16", "--vary", "mbs"]
    assert main([*SMALL, *wide, "--global-batch-size", "128", "--gpu", "B200", "--json"]) == 0
    assert {r["mbs"] for r in json.loads(capsys.readouterr().out)["best"]} == {4, 8, 16}


def test_dispatchers_are_one_space() -> None:
    """The rows of every dispatcher's own space, by time, as arrays and one by one; DeepEP has no group of 6."""
    card, hardware = find_gpu("B200"), hardware_of("B200")
    parallel = ParallelSpec(world_size=2, expert_model_parallel_size=2)
    base = RunSpec(model="Qwen/Qwen1.5-MoE-A2.7B", parallel=parallel, batch=BatchSpec(seq_length=4096))
    runs = [
        base.with_fields(moe_token_dispatcher_type=kind, moe_flex_dispatcher_backend=backend)
        for kind, backend in (("alltoall", "deepep"), ("flex", "deepep"), ("flex", "hybridep"))
    ]
    fixed = frozenset({"tp", "cp", "vpp", "split", "recompute", "mbs"})
    space = Space(runs[0], 12, hardware.domain, fixed, global_batch_size=24, others=tuple(runs[1:]))
    outside = partial(outside_bytes_of, gpu=card)
    alone = [
        row for one in space.each()
        for row in search(one, hardware, capacity=card.capacity_bytes, outside=outside).rows
    ]  # fmt: skip
    expected = sorted((row.time.seconds, row.peak, repr(row.run)) for row in alone)
    for batched in (True, False):
        together = search(space, hardware, capacity=card.capacity_bytes, outside=outside, batched=batched)
        times = [row.time.seconds for row in together.rows]
        assert times == pytest.approx(sorted(times)) and len(together.best()) == len(together.rows)
        assert sorted((row.time.seconds, row.peak, repr(row.run)) for row in together.rows) == expected
    groups = {
        words: {row.run.parallel.ep for row in alone if dispatcher_words(row.run) == words}
        for words in ("alltoall", "DeepEP", "HybridEP")
    }  # fmt: skip
    assert groups == {"alltoall": {1, 2, 3, 4, 6, 12}, "DeepEP": {2, 4}, "HybridEP": {1, 2, 3, 4, 6, 12}}


@pytest.mark.parametrize(
    ("gpu", "flags", "shown"),
    (
        ("H100", "", {"alltoall", "DeepEP"}), ("H100", "--vary dispatcher,ep", {"alltoall", "DeepEP", "HybridEP"}),
        ("GB200", "", {"alltoall", "HybridEP"}), ("A100-80GB", "", {"alltoall"}), ("H100", "--vary ep", {"alltoall"}),
        ("H100", "--moe-token-dispatcher-type alltoall", {"alltoall"}),
    ),
)  # fmt: skip
def test_dispatchers_that_a_card_has(
    gpu: str, flags: str, shown: set[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["search", "Qwen/Qwen1.5-MoE-A2.7B", "--num-gpus", "8", "--gpu", gpu, "--global-batch-size", "64"]
    arguments += ["--tp", "2", "--cp", "1", "--pp", "1", "--micro-batch-size", "1", "--top", "9999", "--json"]
    arguments += flags.split()
    assert main(arguments if "--vary" in flags else [*arguments, "--recompute-granularity", "selective"]) == 0
    rows = json.loads(capsys.readouterr().out)["best"]
    assert {row["dispatcher"] for row in rows} == shown


def test_a_recipe_in_an_unusual_format_has_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    """DeepSeek-V3's own: blockwise scales, E4M3 in both passes."""
    arguments = ["search", LLAMA, "--num-gpus", "4", "--gpu", "H100", "--global-batch-size", "8"]
    assert main([*arguments, "--vary", "tp", "--fp8", "e4m3", "--fp8-recipe", "blockwise"]) == 0
    assert ", fp8-blockwise-e4m3, " in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, "--precision", "mxfp8"]) == 2
    assert "--fp8 e4m3 --fp8-recipe mxfp8" in capsys.readouterr().err


def test_fewer_virtual_stages_are_no_reason_for_a_split_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    """80 layers over 4 stages: 20 virtual stages are the fastest, 10 and 5 divide too, 7 need a layout string."""
    arguments = ["search", "meta-llama/Llama-3.1-70B", "--num-gpus", "64", "--gpu", "H100", "--seq-length", "8192"]
    arguments += ["--global-batch-size", "128", "--tp", "4", "--cp", "2", "--micro-batch-size", "1", "--json"]
    assert main([*arguments, "--vary", "vpp,split,pp=4/8"]) == 0
    first = json.loads(capsys.readouterr().out)["best"][0]
    assert (first["pp"], first["split"]) == (4, "even") and first["vpp"] in (5, 10)


@pytest.mark.slow
def test_rows_that_keep_the_reserve_come_first(capsys: pytest.CaptureFixture[str]) -> None:
    """Each row in front fits by ``fits`` (the band included) and with 1.3 times the tokens; no tight one does both."""
    card, hardware = find_gpu("H100"), hardware_of("H100")
    base = RunSpec(model=QWEN, batch=BatchSpec(seq_length=4096))
    space = Space(base, 16, 8, frozenset({"cp", "vpp", "split"}), global_batch_size=256)
    outside = partial(outside_bytes_of, gpu=card)
    found = search(space, hardware, capacity=card.capacity_bytes, outside=outside)
    rows, keeping, _ = found.ranked(40)
    seconds = [row.time.seconds for row in rows[:keeping]]
    # The first may be a simpler one, as fast within what a prediction can tell.
    assert len(rows) == 40 and seconds[1:] == sorted(seconds[1:]) and seconds[0] <= min(seconds) * (1 + SIMPLER)
    kept = []
    for row in rows:
        factors = (1.0, 1.3) if row.run.parallel.ep > 1 else (1.0,)
        even, *uneven = (fits(estimate(row.run.with_fields(moe_imbalance=factor)), [card])[0] for factor in factors)
        kept.append(even.verdict is Verdict.FITS and all(one.headroom_bytes >= 0 for one in uneven))
    assert kept == [True] * keeping + [False] * (40 - keeping)
    # Some layouts that fit, and are faster, are passed over.
    assert len(found.best(40)) == 40 and set(map(id, found.best(40))) != set(map(id, rows))
    # Where none keeps it, they are shown all the same.
    none = found._replace(keeps=lambda row: False).ranked(3)
    assert none.keeping == 0 and none.rows == found.best(3)
    arguments = ["search", QWEN, "--num-gpus", "16", "--gpu", "H100", "--global-batch-size", "256"]
    arguments += ["--vary", "tp,pp,ep,etp,mbs,recompute", "--top", "40"]
    assert main([*arguments, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert [row["tight"] for row in best] == [not one for one in kept]
    assert [row["peak_bytes"] for row in best] == [row.peak for row in rows]
    assert main(arguments) == 0
    assert "Keeps room for the upper end" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("axis", ("--tp 2", "--cp 2", "--pp 3", "--micro-batch-size 3", "--vpp 2 --pp 2"))
def test_one_size_is_a_range_of_one(axis: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also sizes that the grid leaves out, and stages that do not divide the layers."""
    shown = []
    for flags in (axis, re.sub(r"\b(\d)\b", r"\1..\1", axis)):
        arguments = [*SMALL, *flags.split(), "--num-gpus", "12", "--global-batch-size", "72", "--exhaustive"]
        assert main([*arguments, "--vary", "split,recompute", "--json"]) == 0
        shown.append(json.loads(capsys.readouterr().out))
    assert shown[0]["looked_at"] and shown[0] == shown[1]


@pytest.mark.parametrize(
    "flags",
    (
        "--moe-token-dispatcher-type flex", "--moe-token-dispatcher-type flex --ep 2..8", "--moe-imbalance 1.5",
        "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --tp 2", "--sequence-parallel",
    ),
)  # fmt: skip
def test_flags_need_not_go_with_one_gpu(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each layout goes with the flags, which the smallest one may not."""
    arguments = ["search", QWEN, "--num-gpus", "16", "--gpu", "B200", "--global-batch-size", "64", *flags.split()]
    assert main([*arguments, "--vary", "tp,ep" if "--tp" not in flags else "ep", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["best"]
    assert rows and ("moe" not in flags or all(row["ep"] > 1 or row["etp"] > 1 for row in rows))


def test_gpus_that_are_no_power_of_two_have_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    """BLOOM ran on 384 A100s with TP 4 and PP 12, 2,048 sequences a step: with powers of two alone no layout divides
    them. The grid's layouts are those of ``--exhaustive`` with powers of two where it says so."""
    flags = "--num-gpus 384 --gpu A100-80GB --global-batch-size 2048 --vary tp,pp,split,recompute --json --top 1000"
    assert main(["search", "bigscience/bloom", *flags.split()]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert (4, 12) in {(row["tp"], row["pp"]) for row in best}
    base = RunSpec(model="Qwen/Qwen1.5-MoE-A2.7B", batch=BatchSpec(global_batch_size=48))
    grid, whole = (
        set(parallel_sizes(Space(base, 24, 8, exhaustive=exhaustive, global_batch_size=48)))
        for exhaustive in (False, True)
    )
    powers = 1, 2, 4, 8, 16
    assert grid == {sizes for sizes in whole if sizes.tp in powers and sizes.cp in powers}
    assert {sizes.pp for sizes in grid} == {1, 2, 3, 4, 6, 8, 12, 24} and 12 in {sizes.ep for sizes in grid}


def test_virtual_stages_vary_without_the_split(capsys: pytest.CaptureFixture[str]) -> None:
    """16 layers over 4 stages, evenly: 1, 2 or 4 chunks each; 3 do not divide them."""
    for flags in ("--vary vpp --pp 4", "--vpp 1..8 --vary vpp --pp 4", "--vary vpp,pp --pp 4..4"):
        flags += " --num-gpus 4"
        assert main([*SMALL, *flags.split(), "--json"]) == 0
        assert {row["vpp"] for row in json.loads(capsys.readouterr().out)["best"]} == {1, 2, 4}, flags


@pytest.mark.parametrize(
    ("flags", "words"),
    (
        ("--num-gpus 8 --tp 16", "--num-gpus (8) is divided by no layout of the space; change --tp (16)"),
        ("--num-gpus 8 --pp 3..3", "is divided by no layout of the space; change --pp (3)"),
        ("--num-gpus 0", "--num-gpus (0) is no number of GPUs"),
    ),
)
def test_an_empty_space_is_said(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", LLAMA, "--gpu", "H100", "--global-batch-size", "8", *flags.split()]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    (
        (["search", LLAMA, "--gpu", "H100", "--global-batch-size", "8"], "--num-gpus is missing"),
        (["search", LLAMA, "--gpu", "H100", "--num-gpus", "8"], "--global-batch-size is missing"),
        (["search", "--megatron-args=--bf16", *SMALL[2:]], "--megatron-args says a layout of its own"),
        ([*SMALL, "--vary", "tp,xp"], "--vary xp is none of"),
        ([*SMALL, "--vary", "tp", "--tp", "2"], "--vary tp does not go with a flag that fixes it"),
        (["search", QWEN, *SMALL[2:], "--vary", "dispatcher", "--moe-token-dispatcher-type", "alltoall"],
         "--vary dispatcher does not go with a flag that fixes it"),
        ([*SMALL, "--pp", "4..2"], "is neither a size nor a range; write it like 8 or 1..8"),
        ([*SMALL, "--vary", "mbs", "--cp", "x..2"], "is neither a size nor a range"),
        ([*SMALL, "--top", "0"], "--top and --row count from 1"),
        ([*SMALL, "--headroom", "-1"], "--headroom"),
        ([*SMALL, "--emit", "bridge", "--row", "9999"], "--row 9999 does not exist"),
    ),
)  # fmt: skip
def test_refusals_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1 and not captured.out


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    model, flags = "meta-llama/Llama-3.1-70B", "--num-gpus 2 --gpu A100-40GB --global-batch-size 4"
    assert main(["search", model, *flags.split()]) == 1
    assert "Nothing fits" in capsys.readouterr().out


def test_what_to_try_where_nothing_fits_does(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line is a search that finds something; half as many GPUs are too few."""
    model, flags = "meta-llama/Llama-3.1-8B", ["--gpu", "H100", "--global-batch-size", "64"]
    assert main(["search", model, *flags, "--num-gpus", "1"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    states, gpus = (line.split(";")[0].split() for line in shown.split("- try: ")[1:])
    assert gpus[0] == "--num-gpus" and "--optimizer-cpu-offload" in states
    few = ["--vary", "tp,pp,cp,recompute", "--micro-batch-size", "1"]
    assert main(["search", model, *flags, "--num-gpus", "1", *few, *states]) == 0
    assert main(["search", model, *flags, *few, *gpus]) == 0
    capsys.readouterr()
    main(["search", model, *flags, *few, "--num-gpus", str(int(gpus[1]) // 2), "--json"])
    assert all(row["tight"] for row in json.loads(capsys.readouterr().out)["best"])


def test_ctrl_c_shows_what_was_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import bridge_memory.plan.megatron.many as many
    import bridge_memory.plan.megatron.search as module

    for where, name, as_arrays in ((many.Memory, "peaks", True), (module, "peaks", False)):
        real, calls = getattr(where, name), []

        def interrupted(*arguments: object, real: Any = real, calls: list[object] = calls) -> object:
            calls.append(arguments)
            if len(calls) > 3:
                raise KeyboardInterrupt
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(where, name, interrupted)
            if not as_arrays:
                patch.setattr(module, "find_spec", lambda _: None)
            assert main(SMALL) == 130
        said = capsys.readouterr().out
        assert "stopped early" in said and ("numpy is not installed" in " ".join(said.split())) != as_arrays


def test_what_is_not_in_the_numbers_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--optimizer", "muon", "--optimizer-cpu-offload", "--no-use-distributed-optimizer", "--tp", "1", "--pp",
             "1", "--cp", "1"]  # fmt: skip
    assert main([*SMALL, *flags]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the time model does not know optimizer_cpu_offload" in shown


@pytest.mark.parametrize("engine", ("ddp", "fsdp2", "zero3"))
def test_megatrons_layers_run_under_other_engines(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--engine", engine, "--transformer-impl", "transformer_engine", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert {row["engine"] for row in best} == {engine} and {row["checkpointing"] for row in best} == {"none", "full"}
