"""Balance against every split tried by hand, with ``estimate``."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from drawn_runs import run_of

from bridge_memory import (
    BatchSpec,
    EncoderSpec,
    EncoderStructure,
    ModelSpec,
    ParallelSpec,
    RunSpec,
    SpecError,
    estimate,
    resolve_model,
)
from bridge_memory import balance as public_balance
from bridge_memory.cli import main
from bridge_memory.outside.amount import Range
from bridge_memory.plan.megatron.balance import any_split, balance, default_split, described, with_sizes
from bridge_memory.plan.megatron.published import PUBLISHED
from bridge_memory.plan.megatron.search import search
from bridge_memory.plan.megatron.space import AXES, Space
from bridge_memory.spec.layout import layout
from bridge_memory.speed.hardware import hardware_of
from bridge_memory.speed.megatron.step_time import Step, step_time

H100 = hardware_of("H100")
#: NVIDIA's splits of which a search is fast.
QUICK = (("Qwen/Qwen3-235B-A22B", 16), ("moonshotai/Moonlight-16B-A3B", 4), ("deepseek-ai/DeepSeek-V3", 8))


def run(model: str, layers: int, pp: int, vpp: int | None = None, **fields: Any) -> RunSpec:
    spec = resolve_model(model)
    kept = replace(spec, layers=spec.layers[:layers])
    parallel = ParallelSpec(
        world_size=8 * pp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp, **fields
    )
    return RunSpec(model=kept, parallel=parallel, batch=BatchSpec(seq_length=4096, global_batch_size=128))


def partitions(layers: int, chunks: int) -> list[tuple[int, ...]]:
    """All ways to deal layers out: one or more a chunk, the last as few as none."""
    return [
        sizes for sizes in product(range(1, layers + 1), repeat=chunks - 1) if sum(sizes) <= layers
        for sizes in [(*sizes, layers - sum(sizes))]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "layers", "pp"),
    (("meta-llama/Llama-3.2-1B", 9, 3), ("Qwen/Qwen2.5-0.5B", 8, 4), ("deepseek-ai/DeepSeek-V2-Lite", 7, 3)),
)
def test_no_split_has_a_lower_peak(model: str, layers: int, pp: int) -> None:
    """The last chunk of Qwen2.5 holds 152k logits, the first of DeepSeek-V2-Lite the only dense layer."""
    base = run(model, layers, pp, pipeline_model_parallel_layout="E" + "|" * (pp - 1) + "t" * layers + "L")
    lowest = min(estimate(with_sizes(base, sizes)).peak_stage.peak_bytes for sizes in partitions(layers, pp))
    found = balance(base)
    assert found.peak == lowest == estimate(found.run).peak_stage.peak_bytes
    assert sum(found.layers) == layers


@pytest.mark.parametrize(("model", "layers"), (("meta-llama/Llama-3.2-1B", 8), ("deepseek-ai/DeepSeek-V2-Lite", 8)))
def test_no_split_over_virtual_stages_has_a_lower_peak(model: str, layers: int) -> None:
    base = run(model, layers, 2, 2)
    lowest = min(estimate(with_sizes(base, sizes)).peak_stage.peak_bytes for sizes in partitions(layers, 4))
    assert balance(base).peak == lowest


def kinds(model: str, pattern: str, **fields: Any) -> ModelSpec:
    """A model of two kinds of layers, the first and the last of ``model``, in this order."""
    spec = resolve_model(model)
    first, last = spec.layers[0], spec.layers[-1]
    return replace(spec, layers=tuple(last if c == "x" else first for c in pattern), **fields)


@pytest.mark.parametrize(
    ("pattern", "by_time"),
    (("oxoxoxox", False), ("xooxooxo", True), ("ooxxxooo", False), ("oxxoxxxo", True), ("xxxxxxxo", False)),
)
def test_many_kinds_over_virtual_stages_are_balanced_as_every_split_says(pattern: str, by_time: bool) -> None:
    """Dense layers and experts of DeepSeek-V2-Lite, alternating, in threes and in no order."""
    base = run("deepseek-ai/DeepSeek-V2-Lite", 8, 2, 2)
    base = base.with_(model=kinds("deepseek-ai/DeepSeek-V2-Lite", pattern))
    every = [described(with_sizes(base, sizes), H100) for sizes in partitions(8, 4)]
    if not by_time:
        assert balance(base).peak == min(b.peak for b in every)
        return
    peaks = sorted(b.peak for b in every)
    for capacity in (peaks[3], peaks[len(peaks) // 2]):
        found = balance(base, H100, capacity=capacity)
        fastest = min(max(b.seconds) for b in every if b.peak <= capacity)
        assert found.peak <= capacity and max(found.seconds) == pytest.approx(fastest)


def test_three_virtual_stages_of_two_kinds() -> None:
    """Sliding and full attention in turn."""
    base = run("openai/gpt-oss-20b", 7, 2, 3, pipeline_model_parallel_layout="Et|t|t|t|t|ttL")
    lowest = min(max(described(with_sizes(base, s), H100).seconds) for s in partitions(7, 6))
    found = balance(base, H100, capacity=1 << 50)
    assert max(found.seconds) == pytest.approx(lowest)


@pytest.mark.parametrize(
    ("model", "layers", "pp", "vpp"),
    (("nvidia/Nemotron-4-340B-Base", 48, 8, 3), ("deepseek-ai/DeepSeek-V3", 61, 8, 2), ("Qwen/Qwen3-32B", 41, 2, 6)),
)
def test_even_chunks_keep_no_stage_waiting(model: str, layers: int, pp: int, vpp: int) -> None:
    """As fast in the schedule itself as by its slowest stage, which a stage of 1, 2 and 4 layers beside others of 2, 2
    and 2 is not."""
    depths = resolve_model(model).mtp_num_layers
    some = "E" + "t|" * (pp * vpp - 1) + "t" * (layers - pp * vpp + 1) + "m" * depths + "L"
    base = run(model, layers, pp, vpp, pipeline_model_parallel_layout=some)
    found = balance(base, H100, capacity=1 << 60)
    time = step_time(found.run, H100)
    assert time.waiting < 0.01 * time.seconds


def test_of_splits_as_fast_the_evenest_is_taken() -> None:
    base = run("deepseek-ai/DeepSeek-V2-Lite", 9, 2, 2, pipeline_model_parallel_layout="Ett|tt|tt|tttL")
    step = Step(base, H100)

    def uneven(split: RunSpec) -> float:
        stages = layout(split.model, split.parallel).shapes(split.model)
        return sum(step.seconds_of([chunk]) ** 2 for stage in stages for chunk in stage)

    every = [described(with_sizes(base, sizes), H100) for sizes in partitions(9, 4)]
    least = min(max(one.seconds) for one in every)
    evenest = min(uneven(one.run) for one in every if max(one.seconds) == pytest.approx(least, rel=1e-9))
    assert uneven(balance(base, H100, capacity=1 << 60).run) == pytest.approx(evenest)


def none_is_faster_within_a_card(base: RunSpec, layers: int, chunks: int) -> list[int]:
    """Of all splits, within three capacities. Returns their peaks in order."""
    every = [described(with_sizes(base, sizes), H100) for sizes in partitions(layers, chunks)]
    peaks = sorted(b.peak for b in every)
    for capacity in (peaks[2], peaks[len(peaks) // 2], peaks[-1]):
        found = balance(base, H100, capacity=capacity)
        fastest = min(max(b.seconds) for b in every if b.peak <= capacity)
        assert found.peak <= capacity and max(found.seconds) == pytest.approx(fastest)
    return peaks


def test_within_the_card_no_split_is_faster() -> None:
    base = run("Qwen/Qwen2.5-0.5B", 10, 3, pipeline_model_parallel_layout="Et*4|t*3|t*3L")
    peaks = none_is_faster_within_a_card(base, 10, 3)
    with pytest.raises(SpecError, match="every split needs more than"):
        balance(base, H100, capacity=peaks[0] - 1)


def test_within_the_card_no_split_over_virtual_stages_is_faster() -> None:
    """Every fourth layer of the model has another attention, and where a chunk begins decides how many it has."""
    base = run("Qwen/Qwen3-Next-80B-A3B-Instruct", 8, 2, 2)
    none_is_faster_within_a_card(base, 8, 4)


def test_where_an_encoder_decides_the_peak_the_other_stages_are_split_by_time() -> None:
    """The first stage holds the encoder, and has the highest peak with a single layer too."""
    structure = EncoderStructure(
        kind="glm4v", hidden_size=1536, ffn_hidden_size=4096, num_layers=24, num_heads=12, out_size=2048,
        patch_size=14, merge_size=2, temporal_patch_size=2,
    )  # fmt: skip
    plain = run("meta-llama/Llama-3.2-1B", 12, 3)
    tower = EncoderSpec("vision_config", 700_000_000, structure=structure)
    given = replace(plain, model=replace(plain.model, encoders=(tower,)))
    found = balance(given, H100)
    splits = [described(with_sizes(given, sizes), H100) for sizes in partitions(12, 3)]
    lowest = min(split.peak for split in splits)
    assert found.peak == lowest == found.peaks[0]
    alike = [split for split in splits if split.peak == lowest]
    assert len(alike) > 1
    assert max(found.seconds) == min(max(split.seconds) for split in alike)


def test_the_usual_split_is_megatrons() -> None:
    even = default_split(run("meta-llama/Llama-3.2-1B", 8, 4))
    assert even is not None and described(even).layers == (2, 2, 2, 2)
    with_loss = default_split(run("meta-llama/Llama-3.2-1B", 7, 4, pipeline_model_parallel_layout="Ett|tt|tt|tL"))
    assert with_loss is not None and described(with_loss).layers == (2, 2, 2, 1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_splits_have_every_layer(name: str) -> None:
    for chunks, sizes in PUBLISHED[name].items():
        assert len(sizes) == chunks and sum(sizes) == resolve_model(name).num_layers


def test_what_cannot_be_balanced_is_refused() -> None:
    """Every sixth layer of Gemma 3 has another attention: 6^30 ways for 31 chunks of a stage to begin."""
    with pytest.raises(SpecError, match="ways to begin"):
        balance(run("google/gemma-3-27b-pt", 62, 2, 31))
    with pytest.raises(SpecError, match="leaves nothing to balance"):
        balance(run("meta-llama/Llama-3.2-1B", 8, 1))


@pytest.mark.parametrize("pp", (2, 4))
def test_hybrids_are_balanced_by_their_ends(pp: int) -> None:
    """52 layers: of 4 stages, every first and last that leave an even number for the two between; of 2, every first."""
    base = RunSpec(
        model="nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", batch=BatchSpec(seq_length=4096, global_batch_size=128),
        parallel=ParallelSpec(world_size=8 * pp, pipeline_model_parallel_size=pp, expert_model_parallel_size=8),
    )  # fmt: skip
    peaks = [estimate(base).peak_stage.peak_bytes]
    for first, last in product(range(1, 52), repeat=2):
        if (first + last == 52) if pp == 2 else (first + last < 52 and not (first + last) % (pp - 2)):
            if pp == 4 and not (first in (4, 10) or last in (17, 22)):
                continue
            p = replace(
                base.parallel, num_layers_in_first_pipeline_stage=first, num_layers_in_last_pipeline_stage=last
            )
            peaks.append(estimate(base.with_(parallel=p)).peak_stage.peak_bytes)
    found = balance(base)
    assert found.peak <= min(peaks) and sum(found.layers) == 52
    assert found.peak == estimate(found.run).peak_stage.peak_bytes < peaks[0]
    if pp == 2:
        assert found.peak == min(peaks)


def test_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA gives the last of 16 stages one layer; a run that is refused for want of a split is no obstacle."""
    monkeypatch.setenv("COLUMNS", "160")
    flags = "--tp 2 --pp 16 --ep 64 --etp 1 --num-gpus 1024 --global-batch-size 8192 --gpu H100"
    arguments = ["balance", "deepseek-ai/DeepSeek-V3", *flags.split()]
    assert main([*arguments, "--json"]) == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    theirs, ours = splits["NVIDIA's recipe"], splits["lowest peak"]
    assert theirs["layers"] == [*[4] * 15, 1] and max(ours["peak_bytes"]) < max(theirs["peak_bytes"])
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert ours["pipeline_model_parallel_layout"] in shown and "Megatron's own" not in shown  # 61 divides by nothing
    again = main(["estimate", *arguments[1:], "--pipeline-model-parallel-layout",
                  ours["pipeline_model_parallel_layout"], "--json"])
    assert again == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [s["peak_bytes"] for s in stages] == ours["peak_bytes"]


def test_a_given_split_is_shown_beside(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--pp 4 --num-gpus 16 --gpu H100 --num-layers-in-last-pipeline-stage 4 --global-batch-size 64"
    assert main(["balance", "meta-llama/Llama-3.2-1B", *flags.split(), "--json"]) == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert splits["as given"]["layers"] == [4, 4, 4, 4] == splits["Megatron's own"]["layers"]


@pytest.mark.parametrize(
    ("flags", "words"), (
        ("--num-gpus 8", "leaves nothing to balance"), ("--pp 64 --num-gpus 64", "is too small for"),
        ("--num-gpus 8 --engine ddp", "has no pipeline stages"),
        ("--num-gpus 8 --engine zero3", "has no pipeline stages"),
    )
)
def test_refusals_are_one_line(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["balance", "meta-llama/Llama-3.2-1B", "--gpu", "H100", *flags.split()]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        pytest.param(name, chunks, marks=() if (name, chunks) in QUICK else pytest.mark.slow)
        for name, of in PUBLISHED.items() for chunks in of
    ],
)  # fmt: skip
def test_nvidias_split_never_beats_the_first_row_of_a_search(name: str, chunks: int) -> None:
    """By the time model, with as many stages and virtual stages as it has, whatever the memory."""
    pytest.importorskip("numpy")
    model, sizes = resolve_model(name), PUBLISHED[name][chunks]
    pp = min(8, chunks)
    vpp = chunks // pp if chunks > pp else None
    some = RunSpec(model=model, batch=BatchSpec(seq_length=4096, global_batch_size=128))
    parallel = ParallelSpec(
        world_size=8 * pp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp,
        expert_model_parallel_size=8,
    )  # fmt: skip
    base = any_split(some, parallel)
    theirs = with_sizes(base, sizes)
    space = Space(base, 8 * pp, 8, frozenset(AXES.keys() - {"split"}), global_batch_size=128)
    found = search(space, H100, capacity=1 << 45, outside=lambda run: Range(0, 0))
    first = found.ranked(1).rows[0]
    assert first.time.seconds <= step_time(theirs, H100).seconds * (1 + 1e-9)
    assert first.run.parallel.pipeline_model_parallel_size == pp and first.run.parallel.vpp == (vpp or 1)


@pytest.mark.parametrize(
    ("split", "kept"), [("Et*6|t*7|t*6|t*5L", True), ("Et*6|t*6|t*7|t*5L", True), ("Et*8|t*6|t*6|t*4L", False)]
)
def test_a_given_split_that_is_as_good_is_kept(split: str, kept: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run that says everything; several splits of its 24 layers have no more than 7 in a stage."""
    flags = (
        "--num-layers 24 --hidden-size 1024 --num-attention-heads 8 --seq-length 2048 --max-position-embeddings 2048 "
        "--micro-batch-size 1 --global-batch-size 32 --pipeline-model-parallel-size 4 --bf16 --swiglu --tokenizer-type "
        "NullTokenizer --transformer-impl transformer_engine --vocab-size 65535 --pipeline-model-parallel-layout "
    )
    main(["balance", "--gpu", "H100", "--num-gpus", "4", "--json", f"--megatron-args={flags}{split}"])
    splits = json.loads(capsys.readouterr().out)["splits"]
    assert (splits["fastest on H100"]["layers"] == splits["as given"]["layers"]) == kept
    slowest = {title: max(found["microbatch_seconds"]) for title, found in splits.items()}
    assert (slowest["fastest on H100"] == pytest.approx(slowest["as given"])) == kept


@pytest.mark.parametrize(
    "flags", (
        "openai-community/gpt2 --num-gpus 16 --tp 2 --pp 2 --vpp 2",
        "meta-llama/Llama-3.2-1B --num-gpus 16 --pp 4 --num-distributed-optimizer-instances 2",
        "meta-llama/Llama-3.2-1B --num-gpus 4 --pp 2 --pipeline-model-parallel-layout Et*3|t*4|t*4|t*5L "
        "--microbatch-group-size-per-vp-stage 4",
    )
)  # fmt: skip
def test_the_command_and_the_api_agree(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Even splits are kept where they are as good; flags that need pipeline stages are read."""
    assert main(["balance", "--gpu", "H200", "--json", *flags.split()]) == 0
    splits = json.loads(capsys.readouterr().out)["splits"]
    base = run_of(flags.split(), "H200")
    for title, fastest in (("lowest peak", False), ("fastest on H200", True)):
        found = public_balance(base, gpu="H200", fastest=fastest)
        assert splits[title]["layers"] == list(found.layers)
        assert splits[title]["peak_bytes"] == list(found.peaks)
        first = splits[title]["num_layers_in_first_pipeline_stage"]
        assert first == found.run.parallel.num_layers_in_first_pipeline_stage
