"""The phases of a whole job: sums, order, the words and the JSON of one job, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest
from drawn_runs import ENGINES, a_run

from bridge_memory import RunSpec, SpecError, estimate, find_gpu, fits, whole_job
from bridge_memory.cli import main
from bridge_memory.components import GIB, Component, Part, Provenance, Role
from bridge_memory.job.job import Job, job_of
from bridge_memory.outside.amount import Range, total
from bridge_memory.outside.phase import Phase
from bridge_memory.report.phases import by_verdict, job_blocks, job_table, job_words
from bridge_memory.spec.unmodelled import Effect, Unmodelled
from bridge_memory.verdict import Verdict

ORDER = [Phase.BUILD, Phase.LOAD, Phase.FIRST_STEP, Phase.TRAINING, Phase.EVALUATION, Phase.SAVE, Phase.RESUME]
QWEN = RunSpec(model="Qwen/Qwen3-30B-A3B").with_fields(
    world_size=16, pipeline_model_parallel_size=2, expert_model_parallel_size=8, global_batch_size=32
)


def check(job: Job, run: RunSpec) -> None:
    """What holds for every job."""
    assert [p.phase for p in job.phases] == [p for p in ORDER if p in {q.phase for q in job.phases}]
    assert {Phase.FIRST_STEP, Phase.TRAINING} <= {p.phase for p in job.phases}
    assert bool(job.not_modelled) == (len(job.phases) < len(ORDER))
    peaks = [stage.peak_bytes for stage in estimate(run).stages]
    for stage, phases in enumerate(job.stages):
        kept = 0
        for phase in phases:
            allocated, outside = total(phase.allocated), total(phase.outside)
            assert 0 <= allocated.least <= allocated.most and 0 <= outside.least <= outside.most
            assert phase.driver == (phase.reserved.least + outside.least, phase.reserved.most + outside.most)
            if phase.phase is Phase.TRAINING:
                assert allocated == (peaks[stage], peaks[stage])
            if phase.phase not in (Phase.TRAINING, Phase.RESUME):
                assert phase.reserved.most >= allocated.most
            if phase.phase is not Phase.RESUME:  # another start
                assert phase.reserved.least >= kept
                kept = phase.reserved.least
    for number, worst in enumerate(job.phases):
        of = [phases[number] for phases in job.stages]
        assert worst in of and worst.driver.most == max(p.driver.most for p in of)
    known = replace(job, unmodelled=())
    of_phases = {p.verdict(job.gpu.capacity_bytes) for p in job.phases}
    assert (known.verdict is Verdict.FITS) == (of_phases == {Verdict.FITS})
    assert (known.verdict is Verdict.DOES_NOT_FIT) == (Verdict.DOES_NOT_FIT in of_phases)
    assert job.verdict in (known.verdict, Verdict.UNKNOWN)
    missing = [p for p in ORDER if p not in {q.phase for q in job.phases}]
    assert all(str(p) in job_words(job).partition(": ")[0] for p in missing)


@pytest.mark.parametrize("engine", ENGINES)
def test_jobs_of_random_runs(engine: str) -> None:
    draw, arch = Random(f"job {engine}"), find_gpu("B300").arch
    for _ in range(2):
        run = a_run(engine, draw)
        check(whole_job(run, "B300"), run.with_(implementation=replace(run.implementation, gpu_arch=arch)))


def test_what_the_driver_counts_grows_with_what_opens_communicators() -> None:
    """0.8 GiB lay outside on one H100 alone (a public log); 16 of an MoE open communicators of experts and pipelines
    in the first step."""
    alone = whole_job(RunSpec(model="meta-llama/Llama-3.2-1B"), "H100")
    assert all(total(p.outside).least < 0.8 * GIB < total(p.outside).most for p in alone.phases)
    outside = {p.phase: total(p.outside) for p in whole_job(QWEN, "H100").phases}
    assert outside[Phase.BUILD].most < outside[Phase.TRAINING].least


def test_the_verdict_is_that_of_the_phase_which_decides() -> None:
    job = whole_job(QWEN, "H100")
    assert job.verdict is Verdict.FITS
    resume = next(p for p in job.phases if p.phase is Phase.RESUME)
    inside = replace(job.gpu, capacity_bytes=(resume.driver.least + resume.driver.most) // 2)
    tight = replace(job, gpu=inside, phases=(resume,))
    assert tight.verdict is Verdict.TIGHT and "TIGHT on" in job_words(tight) and "over by up to" in job_words(tight)
    small = replace(tight, gpu=replace(job.gpu, capacity_bytes=resume.driver.least - 1))
    assert small.verdict is Verdict.DOES_NOT_FIT and "DOES NOT FIT" in job_words(small)
    # A phase that may need more, and may fit, does not decide.
    build = job.phases[0]._replace(phase=Phase.BUILD, reserved=Range(100 * GIB, 101 * GIB))
    wide = build._replace(phase=Phase.SAVE, reserved=Range(1, 200 * GIB))
    mixed = replace(job, phases=(build, wide))
    assert mixed.tightest is build and mixed.verdict is Verdict.DOES_NOT_FIT


def test_a_save_after_training_is_not_blamed_for_what_training_reserved() -> None:
    job = whole_job(RunSpec(model="Qwen/Qwen3-8B").with_fields(
        world_size=16, tensor_model_parallel_size=2, pipeline_model_parallel_size=4), "H100")  # fmt: skip
    by = {p.phase: p for p in job.phases}
    assert total(by[Phase.SAVE].allocated).most < total(by[Phase.TRAINING].allocated).most
    assert by[Phase.SAVE].driver.most == by[Phase.TRAINING].driver.most and job.tightest is by[Phase.TRAINING]


def test_a_phase_that_decides_by_its_band_is_not_called_the_highest_without_it() -> None:
    job = whole_job(RunSpec(model="meta-llama/Llama-3.1-70B").with_fields(
        world_size=64, tensor_model_parallel_size=8, pipeline_model_parallel_size=4,
        adopt_optim_states=False), "H100")  # fmt: skip
    by = {p.phase: p for p in job.phases}
    assert job.tightest is by[Phase.TRAINING] and by[Phase.RESUME].driver.most > by[Phase.TRAINING].driver.most
    assert "training has the highest driver peak with its 90% band" in job_words(job)


@pytest.mark.parametrize("capacity", [1 << 50, 1], ids=["large", "small"])
@pytest.mark.parametrize("effect", ["up", "down", "either"])
def test_what_is_not_modelled_leaves_open_what_it_can_change(effect: str, capacity: int) -> None:
    job = whole_job(RunSpec(model="meta-llama/Llama-3.2-1B"), "H100")
    feature = Unmodelled("some_option: some tensors", Effect(effect), order="unknown")
    found = replace(job, gpu=replace(job.gpu, capacity_bytes=capacity), unmodelled=(feature,))
    certain = {("down", 1 << 50): Verdict.FITS, ("up", 1): Verdict.DOES_NOT_FIT}
    assert found.verdict is certain.get((effect, capacity), Verdict.UNKNOWN)
    assert (found.verdict is Verdict.UNKNOWN) == ("some_option" in job_words(found))


def test_the_whole_job_is_not_said_to_fit_where_the_estimate_says_unknown() -> None:
    run = RunSpec(model="Qwen/Qwen3-30B-A3B").with_fields(
        world_size=16, expert_model_parallel_size=16, moe_apply_probs_on_input=True
    )
    (fit,) = fits(estimate(run), ["B300"])
    assert fit.verdict is Verdict.UNKNOWN and whole_job(run, "B300").verdict is Verdict.UNKNOWN
    graphs = RunSpec(model="meta-llama/Llama-3.2-1B").with_fields(cuda_graph_impl="local")
    assert whole_job(graphs, "B300").verdict is Verdict.FITS  # the whole job models these


def test_a_card_that_cannot_compute_the_run_is_refused() -> None:
    run = RunSpec(model="meta-llama/Llama-3.2-1B").with_fields(fp8="hybrid")
    with pytest.raises(SpecError, match="fp8"):
        whole_job(run, "A100-80GB")


def test_one_stage_alone_has_its_own_phases(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["Qwen/Qwen3-8B", "--num-gpus", "8", "--tp", "2", "--pp", "4", "--gpu", "H100", "--phases"]
    assert main(["estimate", *model, "--stage", "2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.split("Whole job")[1].splitlines()]
    assert [row[1] for row in rows if row and row[0] in ("build", "load", "training", "save", "resume")] == ["2"] * 5


def test_text_and_json_have_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["Qwen/Qwen3-30B-A3B", "--num-gpus", "16", "--pp", "2", "--ep", "8"]
    words = ["estimate", *model, "--gpu", "H100", "--phases"]
    assert main([*words, "--global-batch-size", "32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["job"]
    assert found == json.loads(json.dumps(whole_job(QWEN, "H100").as_json()))
    assert main([*words, "--global-batch-size", "32", "--unit", "bytes"]) == 0
    text = capsys.readouterr().out
    for phase in found["phases"]:
        for name in ("allocated_bytes", "reserved_bytes", "driver_bytes"):
            least, most = phase[name]
            assert (f"{least:,}" if least == most else f"{least:,}-{most:,}") in text, (phase["name"], name)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--phases"], "--phases is about one GPU, not none; give --gpu NAME once"),
        (["--phases", "--gpu", "H100,B200"], "--phases is about one GPU, not 2; give --gpu NAME once"),
        (["--gpu", "H100", "--host-memory", "1000"], "--host-memory does nothing without --phases"),
        (["--gpu", "H100", "--phases", "--host-memory", "-1"], "--host-memory (-1) is no amount of memory"),
        (["--gpu", "H100", "--phases", "--host-memory", "1e-300"], "--host-memory (1e-300) is no amount of memory"),
        (["--gpu", "H100", "--phases", "--host-memory", "inf"], "--host-memory (inf) is no amount of memory"),
        (["--gpu", "H100", "--phases", "--host-memory", "1e300"], "--host-memory (1e+300) is no amount of memory"),
    ],
)  # fmt: skip
def test_what_phases_are_not_about_is_refused(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "Qwen/Qwen3-8B", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and why in err and len(err.splitlines()) == 1


def test_a_job_that_dies_at_its_resume_is_no_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """The step fits a card that a resume does not: the exit code is that of the whole job."""
    words = ["estimate", "meta-llama/Llama-3.1-8B", "--num-gpus", "2", "--tp", "2", "--require-fit", "--gpu", "H100",
             "--megatron-core", "0.18"]  # fmt: skip
    small = ["--seq-length", "1024", "--recompute-granularity", "full", "--recompute-method", "uniform"]
    assert main([*words, *small, "--recompute-num-layers", "1", "--no-phases"]) == 0
    assert "\nFITS H100" in capsys.readouterr().out
    for more in ([], ["--phases"]):
        assert main([*words, *small, "--recompute-num-layers", "1", *more]) == 3
        said = " ".join(capsys.readouterr().out.split())
        assert "DOES NOT FIT H100: resume, driver peak" in said and "the step alone: FITS H100: peak" in said
    assert "resume has the highest driver peak" in said and "the step alone fits, the whole job does not fit" in said


def test_host_memory_is_judged_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """8B with its optimizer in host memory: 16 bytes a parameter over all ranks of the node, beside the processes."""
    words = ["estimate", "meta-llama/Llama-3.1-8B", "--num-gpus", "8", "--tp", "8", "--optimizer-cpu-offload", "--gpu"]
    for node, verdict, code in ((2000, "fits", 0), (100, "does not fit", 3)):
        assert main([*words, "H100", "--phases", "--require-fit", "--host-memory", str(node)]) == code
        said = " ".join(capsys.readouterr().out.split())
        assert f"of {node:,}.0 GiB: {verdict}" in said, said
    with pytest.raises(SpecError, match="host_bytes"):
        whole_job(QWEN, "H100", host_bytes=0)


def test_a_run_that_is_no_run_is_refused() -> None:
    with pytest.raises(SpecError, match="is not a RunSpec"):
        whole_job("Qwen/Qwen3-8B", "H100")  # type: ignore[arg-type]


def test_more_optimizer_instances_than_ranks_share_experts() -> None:
    """A dense model may have them: expert tensor parallelism leaves one rank to a group that is divided by two."""
    run = RunSpec(model="Qwen/Qwen3-0.6B").with_fields(
        world_size=2, expert_tensor_parallel_size=2, num_distributed_optimizer_instances=2
    )
    assert whole_job(run, "H100").verdict is Verdict.FITS


def test_a_shared_embedding_in_two_units_is_not_replayed() -> None:
    run = RunSpec(model="Qwen/Qwen2.5-1.5B").with_fields(
        world_size=2, engine="fsdp2", transformer_impl="transformers", fsdp_auto_wrap_policy="torchtitan"
    )
    assert whole_job(run, "H100").not_replayed


def test_a_calibrated_peak_is_reserved_too() -> None:
    """A replay does not know what was measured beyond the prediction."""
    result = estimate(RunSpec(model="meta-llama/Llama-3.2-1B"))
    beyond = Component("residual", 9 * GIB, Role.TRANSIENT, Provenance.MEASURED, part=Part.CALIBRATION)
    (stage,) = result.stages
    more = replace(result, stages=(replace(stage, components=(*stage.components, beyond)),))
    plain, calibrated = (
        next(p for p in job_of(r, find_gpu("H100")).phases if p.phase is Phase.TRAINING) for r in (result, more)
    )
    assert calibrated.reserved.least == plain.reserved.least + 9 * GIB


def test_who_trains_decides_a_resume_and_is_named_where_the_run_leaves_it_open() -> None:
    """Adam's moments of 1.24 B parameters, 8 bytes each, are there once in Megatron Bridge and twice in Megatron-LM."""
    run = RunSpec(model="meta-llama/Llama-3.2-1B")
    job, told = whole_job(run, "H100"), whole_job(run.with_fields(adopt_optim_states=False), "H100")
    assert job.copied is not None and job.copied.driver == told.phases[-1].driver and told.copied is None
    assert whole_job(run.with_fields(adopt_optim_states=True), "H100").copied is None
    more = total(job.copied.allocated).most - total(job.phases[-1].allocated).most
    assert more == pytest.approx(8 * 1.236e9, rel=0.001)
    between = (job.phases[-1].driver.most + job.copied.driver.least) // 2
    small = replace(job, gpu=replace(job.gpu, capacity_bytes=between))
    assert "--no-adopt-optim-states" in str(by_verdict(small).pairs)
    assert "--no-adopt-optim-states" not in str(by_verdict(job).pairs)  # it fits either way
    assert "--no-adopt-optim-states" in " ".join(job_table(small).notes)
    assert job.as_json()["resume_copied"]["phase"]["name"] == "resume"


def test_a_resume_that_does_not_fit_names_the_option_that_lowers_it() -> None:
    """Moments of bf16 are loaded as fp32; fully reshardable states are gathered in host memory, one by one."""
    fields = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    narrow = RunSpec(model="Qwen/Qwen3-30B-A3B").with_fields(
        world_size=16, expert_model_parallel_size=8, store_param_remainders=False, **fields
    )
    job = whole_job(narrow, "H100")
    assert job.to_try is not None and job.to_try.flag == "--dist-ckpt-optim-fully-reshardable"
    resumes = [
        next(p for p in whole_job(run, "H100").phases if p.phase is Phase.RESUME) for run in (narrow, job.to_try.run)
    ]
    before, after = (total(phase.allocated).most for phase in resumes)
    assert before - after == job.to_try.less > 10 * GIB
    words = f"resume: try first: {job.to_try.flag} ({job.to_try.less / GIB:.1f} GiB less)"
    assert words in [note for block in job_blocks(job) for note in getattr(block, "notes", ())]
    assert whole_job(narrow, "B300").to_try is None  # it fits


@pytest.mark.parametrize("free", [0, 1])
def test_balanced_routing_fits_where_training_does(free: int) -> None:
    """The overload factor and the phases are of one margin, replayed or not, with graphs or without; to a MiB."""
    for fields in ({}, {"cuda_graph_impl": "transformer_engine"}, {"offload_modules": ("moe_act",)}):
        run = RunSpec(model="Qwen/Qwen3-30B-A3B").with_fields(world_size=16, expert_model_parallel_size=8, **fields)
        card = find_gpu("H200")
        training = next(p for p in whole_job(run, card).phases if p.phase is Phase.TRAINING)
        tight = replace(card, capacity_bytes=training.driver.most + (1 << 20) * (2 * free - 1))
        found = whole_job(run, tight).overload
        assert found is not None and (found.factor is not None) is bool(free)
