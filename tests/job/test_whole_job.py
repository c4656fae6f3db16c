"""The phases of a whole job: sums, order, the words and the JSON of one job, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest
from drawn_runs import ENGINES, a_run

from bridge_memory import RunSpec, SpecError, estimate, find_gpu, whole_job
from bridge_memory.cli import main
from bridge_memory.components import GIB
from bridge_memory.job.amount import total
from bridge_memory.job.job import Job
from bridge_memory.job.phase import Phase
from bridge_memory.report.phases import job_words
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
        of_stages = [phases[number] for phases in job.stages]
        assert worst in of_stages and worst.driver.most == max(phase.driver.most for phase in of_stages)
    fits = {p.verdict(job.gpu.capacity_bytes) for p in job.phases}
    assert (job.verdict is Verdict.FITS) == (fits == {Verdict.FITS})
    assert (job.verdict is Verdict.DOES_NOT_FIT) == (Verdict.DOES_NOT_FIT in fits)


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
        (["--phases", "--gpu", "H100", "--brief"], "--phases is shown as text, md, json and html"),
    ],
)  # fmt: skip
def test_what_phases_are_not_about_is_refused(words: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "Qwen/Qwen3-8B", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and why in err and len(err.splitlines()) == 1


def test_a_job_that_dies_at_its_resume_is_no_fit(capsys: pytest.CaptureFixture[str]) -> None:
    """The step fits a card that a resume does not: the exit code is that of the whole job."""
    words = ["estimate", "meta-llama/Llama-3.1-8B", "--num-gpus", "2", "--tp", "2", "--require-fit", "--gpu", "H100"]
    small = ["--seq-length", "1024", "--recompute-granularity", "full", "--recompute-method", "uniform"]
    assert main([*words, *small, "--recompute-num-layers", "1"]) == 0
    assert "FITS H100" in capsys.readouterr().out
    assert main([*words, *small, "--recompute-num-layers", "1", "--phases"]) == 3
    assert "resume has the highest driver peak" in " ".join(capsys.readouterr().out.split())


def test_host_memory_is_judged_where_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """8B with its optimizer in host memory: 16 bytes a parameter over all ranks of the node, beside the processes."""
    words = ["estimate", "meta-llama/Llama-3.1-8B", "--num-gpus", "8", "--tp", "8", "--optimizer-cpu-offload", "--gpu"]
    for node, verdict, code in ((2000, "fits", 0), (100, "does not fit", 3)):
        assert main([*words, "H100", "--phases", "--require-fit", "--host-memory", str(node)]) == code
        said = " ".join(capsys.readouterr().out.split())
        assert f"of {node:,}.0: {verdict}" in said, said
    with pytest.raises(SpecError, match="host_bytes"):
        whole_job(QWEN, "H100", host_bytes=0)


def test_a_run_that_is_no_run_is_refused() -> None:
    with pytest.raises(SpecError, match="is not a RunSpec"):
        whole_job("Qwen/Qwen3-8B", "H100")  # type: ignore[arg-type]
