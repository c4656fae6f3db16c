"""What-if: every figure against ``estimate`` of the run that is changed by hand."""

from __future__ import annotations

import json
from random import Random

import pytest
from tiers import few_fast

from bridge_memory import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    ParallelSpec,
    PeftSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
    estimate,
    find_gpu,
    fits,
    peaks,
)
from bridge_memory.cli import main
from bridge_memory.emit.fixes import changed_flags
from bridge_memory.plan import changes as all_changes
from bridge_memory.plan.changes import Change, Effect, WhatIf, changes
from bridge_memory.spec.transformers import TransformersSpec
from bridge_memory.speed.hardware import HARDWARE, hardware_of
from bridge_memory.speed.megatron.step_time import not_timed, step_time
from bridge_memory.verdict import headroom

RUN = RunSpec(
    model="Qwen/Qwen3-30B-A3B",
    parallel=ParallelSpec(
        world_size=32, tensor_model_parallel_size=2, pipeline_model_parallel_size=4, expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
    ),
    batch=BatchSpec(seq_length=8192, micro_batch_size=2, global_batch_size=256),
)  # fmt: skip
H100 = hardware_of("H100")
RUN_FIELDS = {"world_size": 16, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}


def peak(run: RunSpec) -> int:
    return estimate(run).peak_stage.peak_bytes


def test_singles_and_pairs_are_what_estimate_says() -> None:
    tried = WhatIf(RUN, H100)
    singles, pairs = tried.singles, tried.pairs(most=6)
    assert len(singles) > 8 and len(pairs) > 5
    before, seconds = peak(RUN), step_time(RUN, H100).seconds
    for effect in (*singles, *pairs):
        fields = {name: value for change in effect.changes for name, value in change.fields}
        if len(effect.changes) == 2 and all("recompute_modules" in dict(c.fields) for c in effect.changes):
            one, other = (dict(c.fields)["recompute_modules"] for c in effect.changes)
            fields["recompute_modules"] = (*one, *other)
        changed = RUN.with_fields(**fields)
        assert effect.peak == peak(changed) and effect.freed == before - effect.peak > 0, effect.words
        if effect.slowdown is not None:
            assert effect.slowdown == pytest.approx(step_time(changed, H100).seconds / seconds)
    assert [e.freed for e in singles] == sorted((e.freed for e in singles), reverse=True)


def test_nothing_legal_is_left_out() -> None:
    """Every change tried by hand: those that free something are shown, the others and the refused are not."""
    shown = {e.changes[0] for e in WhatIf(RUN).singles}
    before = peak(RUN)
    for change in changes(RUN):
        try:
            frees = peak(RUN.with_fields(**dict(change.fields))) < before
        except SpecError:
            frees = False
        assert (change in shown) == frees, change.words
    kinds = {change.kind for change in changes(RUN)}
    assert {"TP", "PP", "EP", "CP", "micro batch", "split", "optimizer dtypes", "gradient dtype", "dispatcher"} <= kinds


def test_what_is_done_already_is_not_offered() -> None:
    done = RUN.with_fields(
        recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1), grad_reduce_in_fp32=False,
        micro_batch_size=1, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te",
    )  # fmt: skip
    kinds = {change.kind for change in changes(done)}
    assert not kinds & {"full recompute", "gradient dtype", "micro batch", "loss fusion"}
    assert not any(kind.startswith("recompute") for kind in kinds)


def test_the_cheapest_set_is_the_cheapest_of_all_sets() -> None:
    """Against every set of up to two of all single changes, tried by hand."""
    target = peak(RUN) * 7 // 10
    tried = WhatIf(RUN, H100)
    found = tried.cheapest(target, largest=2)
    assert found is not None and found.peak == peak(found.run) <= target and found.slowdown is not None
    singles = [e.changes[0] for e in tried.singles]
    base = step_time(RUN, H100).seconds
    for i, one in enumerate(singles):
        for other in (None, *singles[i + 1 :]):
            if other and other.kind == one.kind:
                continue
            both = [one] + ([other] if other else [])
            fields: dict[str, object] = {}
            for change in both:
                if any(fields.get(name, value) != value for name, value in change.fields):
                    break
                fields |= dict(change.fields)
            else:
                try:
                    changed = RUN.with_fields(**fields)
                except SpecError:
                    continue
                if peak(changed) <= target:
                    assert step_time(changed, H100).seconds / base >= found.slowdown * (1 - 1e-9), (one, other)
    assert tried.cheapest(1 << 30, largest=1) is None


CARDS = ("A100-40GB", "H100", "RTX-4090", "B200")


@pytest.mark.parametrize("seed", few_fast(range(12), 3))
def test_changes_are_tried_by_their_time_and_no_more_are_estimated_than_asked_for(seed: int) -> None:
    """All changes that fit, by estimates of each, in the same order; the first asks for fewer peaks."""
    draw = Random(seed)
    gpu = find_gpu(CARDS[seed % len(CARDS)])
    engines = ({"engine": "fsdp2", "world_size": 8}, {"engine": "zero2", "world_size": 8}, RUN_FIELDS)
    model = draw.choice(("Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-4B"))
    fields = draw.choice(engines)
    run = RunSpec(model=model).with_fields(
        **fields, seq_length=draw.choice((2048, 8192, 32768)), micro_batch_size=draw.choice((1, 2)), gpu_arch=gpu.arch
    )
    tried = WhatIf(run, HARDWARE[gpu.name])
    fitting = [
        e for e in tried.singles
        if headroom(gpu, e.peak, e.run) >= 0 and fits(estimate(e.run), [gpu])[0].fits
    ]
    fitting.sort(key=lambda e: (e.slowdown is None, e.changes[0].kind == "fp8", e.slowdown or 0.0, e.peak))
    lazily = WhatIf(run, HARDWARE[gpu.name])
    assert [e.changes for e in lazily.to_try(gpu)] == [e.changes for e in fitting]
    asked: list[RunSpec] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(all_changes, "peaks", lambda run: (asked.append(run), peaks(run))[1])
        first = next(WhatIf(run, HARDWARE[gpu.name]).to_try(gpu), None)
    if fitting and fitting[0].slowdown is not None:
        assert first is not None and first.changes == fitting[0].changes
        slower = {e.run for e in tried.singles if (e.slowdown or 9e9) > first.slowdown}
        assert not slower & {*asked}


def test_without_a_global_batch_time_is_a_sequences() -> None:
    """Twice the CP halves the replicas and with them the sequences of a step; a sequence takes no less time for it."""
    run = RUN.with_(batch=BatchSpec(seq_length=8192))
    found = {e.changes[0].fields: e for e in WhatIf(run, H100).singles}
    assert found[(("context_parallel_size", 2),)].slowdown > 0.95


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--tp 2 --num-gpus 8 --gpu H100 --global-batch-size 32"
    arguments = ["whatif", "meta-llama/Llama-3.1-8B", *flags.split()]
    assert main([*arguments, "--json", "--pairs", "--target-gib", "40"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["target"]["peak_bytes"] <= 40 << 30 and len(shown["changes"]) > 3 and shown["pairs"]
    first = shown["changes"][0]
    assert first["peak_bytes"] + first["freed_bytes"] == shown["peak_bytes"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "One change to meta-llama/Llama-3.1-8B" in text and "Two changes" not in text
    assert main([*arguments, "--target-gib", "1"]) == 1
    assert "no three changes reach it" in capsys.readouterr().out
    for wrong, words in ((["--target-gib", "-3"], "--target-gib (-3.0) is no size"), (["--top", "0"], "--top (0)")):
        assert main([*arguments, *wrong]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("flags", few_fast((
    "meta-llama/Llama-3.1-70B --tp 8 --pp 4 --num-gpus 64 --num-layers-in-first-pipeline-stage 17 "
    "--num-layers-in-last-pipeline-stage 19",
    "Qwen/Qwen3-30B-A3B --num-gpus 16 --ep 8 --global-batch-size 64 --micro-batch-size 2",
    "meta-llama/Llama-3.1-8B --engine fsdp1 --num-gpus 8 --global-batch-size 64 --micro-batch-size 2",
    "meta-llama/Llama-3.1-8B --engine zero1 --num-gpus 8",
), 1), ids=lambda flags: flags.partition(" ")[0].rpartition("/")[2] + "-" + flags.split()[2])  # fmt: skip
def test_flags_that_are_named_make_the_change(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``estimate`` with the flags of each change has its peak; a flag that has to go is named, and not forgotten."""
    arguments = [*flags.split(), "--gpu", "H100", "--json"]
    assert main(["whatif", *arguments, "--top", "100", "--target-gib", "40"]) == 0
    shown = json.loads(capsys.readouterr().out)
    dropped = 0
    for record in (*shown["changes"], shown["target"]):
        words = [*arguments, *record["flags"]]
        for flag in record["without"]:
            dropped += 1
            at = words.index(flag)
            del words[at : at + 2]
        assert main(["estimate", *words]) in (0, 1), record
        estimated = json.loads(capsys.readouterr().out)
        assert max(stage["peak_bytes"] for stage in estimated["stages"]) == record["peak_bytes"], record
    assert bool(dropped) == ("--pp 4" in flags)


def test_every_change_has_flags() -> None:
    """A field without a flag could not be asked for."""
    some = (RUN, *map(outside, ("ddp", "fsdp1", "fsdp2", "zero2", "zero3")))
    for run in some:
        for change in changes(run):
            changed_flags(Effect((change,), run, 0, 0, None), run)


def test_a_megatron_command_line_is_answered_in_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    theirs = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --micro-batch-size 1 --bf16"
    theirs += " --max-position-embeddings 4096 --tensor-model-parallel-size 2 --vocab-size 32000"
    assert main(["whatif", f"--megatron-args={theirs}", "--num-gpus", "8", "--gpu", "H100"]) == 0
    assert "--tensor-model-parallel-size 4 " in capsys.readouterr().out


def test_more_stages_take_a_split_that_they_can_have() -> None:
    """17 + 2 x 22 + 19 layers over 4 stages: on 8 stages the ends that were given leave no even middle."""
    run = RunSpec(model="meta-llama/Llama-3.1-70B", parallel=ParallelSpec(
        world_size=64, tensor_model_parallel_size=8, pipeline_model_parallel_size=4,
        num_layers_in_first_pipeline_stage=17, num_layers_in_last_pipeline_stage=19,
    ))  # fmt: skip
    assert any(dict(e.changes[0].fields).get("pipeline_model_parallel_size") == 8 for e in WhatIf(run).singles)


def test_fp8_is_offered_but_is_no_first_fix() -> None:
    """It changes what is computed: it is among the changes, and in a set only where nothing else reaches the target."""
    tried = WhatIf(RUN, H100)
    fp8 = [e for e in tried.singles if e.changes[0].kind == "fp8"]
    # Its products are faster, and the host launches a cast for each: the experts' are too many to hide.
    products = step_time(RUN, H100).passes.products  # type: ignore[union-attr]
    assert fp8 and all(e.slowdown is not None for e in fp8)
    assert all(step_time(e.run, H100).passes.products < 0.8 * products for e in fp8)  # type: ignore[union-attr]
    found = tried.cheapest(tried.before - 1)
    assert found is not None and all(change.kind != "fp8" for change in found.changes)
    assert not any(c.kind == "fp8" for c in changes(RUN.with_fields(gpu_arch="ampere")))


def test_offloaded_states_and_dtypes_are_no_pair() -> None:
    """An offloaded optimizer keeps fp32 states, whatever dtypes are asked for."""
    for effect in WhatIf(RUN, H100).pairs():
        fields = {name for change in effect.changes for name, _ in change.fields}
        assert not {"optimizer_cpu_offload", "exp_avg_dtype"} <= fields


def test_words_are_megatrons() -> None:
    assert Change("x", (("recompute_modules", ("moe", "mlp")), ("tensor_model_parallel_size", 2))).words == (
        "recompute_modules=moe,mlp, tensor_model_parallel_size=2"
    )


def test_no_time_is_said_where_the_model_has_none() -> None:
    """Muon has no optimizer on the host; what frozen weights do is known, and what offloading does."""
    muon = RUN.with_fields(**{"optimizer.optimizer": "muon"}, use_distributed_optimizer=False)
    for base in (RUN, muon):
        for effect in WhatIf(base, H100).singles:
            unknown = effect.run.optimizer.optimizer == "muon" and effect.run.optimizer.optimizer_cpu_offload
            assert (effect.slowdown is None) == unknown, effect.words
    frozen = RUN.with_(peft=PeftSpec(scheme="lora", dim=16))
    assert not_timed(frozen) == () and step_time(frozen, H100).seconds < step_time(RUN, H100).seconds


def outside(engine: str, **fields: object) -> RunSpec:
    run = RunSpec(
        model="meta-llama/Llama-3.1-8B", parallel=ParallelSpec(world_size=8),
        data_parallel=DataParallelSpec(engine=engine),
        implementation=ImplementationSpec(transformer_impl="transformers"),
    )  # fmt: skip
    return run.with_fields(**fields)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero1", "zero2", "zero3"])
def test_engines_outside_of_megatron_have_changes_of_their_own(engine: str) -> None:
    """What each frees is what estimates of both runs differ by."""
    what_if = WhatIf(outside(engine), H100)
    assert what_if.singles
    for e in what_if.singles:
        assert e.freed == what_if.before - peak(e.run) > 0
        assert e.slowdown is not None and 0.5 < e.slowdown < 3
    kinds = {e.changes[0].kind for e in what_if.singles}
    assert kinds & {"gradient checkpointing", "engine"}


def test_checkpoints_under_ddp_free_most_with_a_fused_step() -> None:
    """8.03 B parameters in bf16, twice their gradients and two moments: 75 GiB. A foreach step adds a copy, 15 GiB."""
    checkpoints = outside("ddp", gradient_checkpointing=True)
    step = 8_030_261_248 * 2
    fused = WhatIf(checkpoints).effect((Change("optimizer kernels", (("torch_implementation", "fused"),)),))
    assert fused is not None and 0.5 * step < fused.freed < 1.05 * step


@pytest.mark.parametrize(("release", "offered"), [((4, 57), False), ((5, 12), True)])
def test_flash_attention_is_not_offered_where_it_leaves_sinks_out(release: tuple[int, int], offered: bool) -> None:
    """gpt-oss: FlashAttention 2 has no sinks; transformers 5 takes another kernel in its place, 4 runs without them."""
    run = RunSpec(
        model="openai/gpt-oss-20b", implementation=ImplementationSpec(transformer_impl="transformers"),
        data_parallel=DataParallelSpec(engine="single"), transformers=TransformersSpec(transformers_version=release),
    )
    found = {value for change in changes(run) for name, value in change.fields if name == "attn_implementation"}
    assert ("flash_attention_2" in found) is offered and "sdpa" not in found


def test_the_pair_to_try_first_fits_where_no_single_change_does(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["meta-llama/Llama-3.1-8B", "--engine", "single", "--peft", "lora", "--num-gpus", "1", "--gpu", "RTX-4090"]
    assert main(["whatif", *run, "--pairs"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    flags = said.split("no single option makes it fit try first, both: ")[1].split(" (")[0]
    assert main(["estimate", *run, *flags.split(), "--brief"]) == 0
    assert "FITS RTX-4090" in capsys.readouterr().out
