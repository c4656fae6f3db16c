"""The phases of a job, and what would fit: the outputs say one thing, and the limits are limits."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bridge_memory import SpecError, Verdict, find_gpu, post_training
from bridge_memory.cli import main
from bridge_memory.outside.amount import total
from bridge_memory.report.rollout import answer_words, phase_table
from bridge_memory.rollout.answer import Limits, Rollout, answer
from bridge_memory.rollout.emit import emitted
from bridge_memory.rollout.log import readings_of
from bridge_memory.rollout.phases import AWAKE, Phase
from bridge_memory.rollout.reading import read

EXAMPLE = str(Path(__file__).parents[2] / "examples/verl_qwen3_30b_a3b.yaml")


@cache
def job() -> Rollout:
    return post_training("verl", EXAMPLE, "H100")


@cache
def solved() -> Limits:
    return job().limits()


def at(**fields: Any) -> Rollout:
    return answer(job().setup.with_(**fields), job().gpu)


def fits(found: Rollout, *phases: Phase) -> bool:
    return all(
        p.verdict(found.gpu.capacity_bytes) is Verdict.FITS for p in found.phases if not phases or p.phase in phases
    )


def test_a_verl_user_gets_his_highest_safe_utilization_and_the_phase_that_binds() -> None:
    share = solved().share
    assert share.safe is not None and share.possible is not None
    safe, beyond = (answer(job().setup.with_share(s), job().gpu) for s in (share.safe, share.safe + 0.01))
    assert fits(safe) and not fits(beyond)
    first = next(p.phase for p in beyond.phases if p.verdict(beyond.gpu.capacity_bytes) is not Verdict.FITS)
    assert first is share.binds
    assert share.kv_tokens == safe.engine.kv_tokens


@pytest.mark.parametrize(
    ("phase", "field", "limit"), [(Phase.UPDATE, "update_tokens", "update_tokens"),
                                  (Phase.LOG_PROBS, "log_prob_tokens", "log_prob_tokens")],
)  # fmt: skip
def test_token_limits_are_limits(phase: Phase, field: str, limit: str) -> None:
    most = getattr(solved(), limit)
    assert fits(at(**{field: most}), phase)
    assert not fits(at(**{field: most + 1024}), phase)


def test_what_is_offloaded_is_not_there() -> None:
    own = job().setup
    both, optimizer, nothing = (
        at(param_offload=p, optimizer_offload=o).phase(Phase.ROLLOUT)
        for p, o in ((True, True), (False, True), (False, False))
    )
    assert both is not None and optimizer is not None and nothing is not None
    sizes = [total(phase.allocated).most for phase in (both, optimizer, nothing)]
    assert sizes[0] < sizes[1] <= sizes[2]
    from bridge_memory.rollout.trainer import states

    kept = states(own.update_run(), 0)
    assert sizes[1] - sizes[0] == total([*kept.parameters, *kept.gradients]).most
    assert sizes[2] - sizes[1] == total(kept.optimizer).most


def test_the_update_is_the_estimate() -> None:
    from bridge_memory import estimate

    run, update = job().setup.update_run(), job().phase(Phase.UPDATE)
    assert update is not None
    assert total(update.allocated).least == estimate(run).peak_stage.peak_bytes


def test_entropy_and_fused_kernels() -> None:
    """Of 16,384 tokens and a quarter of 151,936 logits: three fp32 tensors with entropy, one beside bf16 without."""
    logits = 16384 * 151936 // 4
    passes = {
        name: total(found.allocated).most
        for name, fields in (
            ("entropy", {}), ("none", {"log_prob_entropy": False}), ("fused", {"fused_kernels": True}),
        )
        if (found := at(**fields).phase(Phase.LOG_PROBS)) is not None
    }  # fmt: skip
    assert passes["entropy"] - passes["none"] == pytest.approx(6 * logits, rel=0.01)
    # Without logits a layer is the highest moment.
    assert passes["fused"] < passes["none"] - 4 * logits


def test_text_json_and_python_say_one_thing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rollout", "--verl", EXAMPLE, "--gpu", "H100", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document == json.loads(json.dumps(job().as_json(solved())))
    words = " ".join(answer_words(job(), solved()))
    share = document["limits"]["share"]
    assert f"Highest safe gpu_memory_utilization: {share['safe']:g} ({share['binds']} binds" in words
    assert [row[0] for row in phase_table(job()).rows] == [phase["name"] for phase in document["phases"]]
    assert document["binds"]["phase"] == str(job().binds.phase)
    for phase in document["phases"]:
        parts = sum(part["bytes"][0] for part in phase["trainer"])
        assert parts == phase["trainer_allocated_bytes"][0]
        driver = phase["trainer_reserved_bytes"][0] + phase["trainer_outside_bytes"][0] + phase["engine_bytes"][0]
        assert driver == phase["driver_bytes"][0]


def test_the_answer_comes_first_and_fits_a_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A screen of 100 columns and 40 lines; a file that is written has its answer on stderr."""
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["rollout", "--verl", EXAMPLE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Highest safe gpu_memory_utilization: ") and " binds beyond it" in lines[0]
    assert lines[1].startswith("FITS H100 at 0.6: ") and lines[4].startswith("A step")
    assert len(lines) <= 40 and max(map(len, lines)) <= 100
    target = tmp_path / "answer.md"
    assert main(["rollout", "--verl", EXAMPLE, "--output", str(target)]) == 0
    assert f"(md): {lines[0]}; {lines[1]}" in capsys.readouterr().err


def test_assumptions_of_the_engine_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """vLLM 0.99 is later than any release whose rules were read."""
    assert main(["rollout", "--verl", EXAMPLE, "--rollout-release", "0.99.0", "--no-limits", "-v"]) == 0
    assert "stand for 0.99" in " ".join(capsys.readouterr().out.split())


def test_keys_that_are_emitted_give_the_same_job() -> None:
    words = emitted(job(), solved(), "verl").split()
    again = read("verl", EXAMPLE, words)
    assert solved().share.safe == again.engine.gpu_memory_utilization
    assert (again.update_tokens, again.log_prob_tokens) == (job().setup.update_tokens, job().setup.log_prob_tokens)
    assert again.trainer.parallel == job().setup.trainer.parallel
    with pytest.raises(SpecError, match="SGLang"):
        emitted(job(), solved(), "slime")


@pytest.mark.parametrize("dynamic", [True, False])
def test_keys_of_nemo_rl_and_slime_give_the_same_job(dynamic: bool) -> None:
    """Read back over what else says the job: the same limits, layout and answer, at the safe share."""
    tokens = "--use-dynamic-batch-size --max-tokens-per-gpu 9216" if dynamic else "--micro-batch-size 2"
    words = f"{tokens} --tensor-model-parallel-size 2 --sglang-mem-fraction-static 0.5"
    rest = "--hf-checkpoint Qwen/Qwen3-4B --actor-num-gpus-per-node 8 --rollout-max-context-len 4096"
    card = find_gpu("H100")
    first = answer(read("slime", f"--colocate {rest} {words}"), card)
    told = emitted(first, first.limits(), "slime")
    same_job(first, answer(read("slime", f"{rest} {' '.join(told.split())}"), card))
    packing = f"policy.sequence_packing.enabled={str(dynamic).lower()}"
    gpus = "cluster: {gpus_per_node: 8}"
    base = f"policy: {{model_name: Qwen/Qwen3-0.6B, generation: {{}}, train_micro_batch_size: 2}}\n{gpus}"
    given = [packing, "policy.megatron_cfg.enabled=true", "policy.max_total_sequence_length=4096"]
    first = answer(read("nemo_rl", "job.yaml", given, text=base), card)
    told = emitted(first, first.limits(), "nemo-rl")
    same_job(first, answer(read("nemo_rl", "job.yaml", text=f"{told}  model_name: Qwen/Qwen3-0.6B\n{gpus}"), card))


def same_job(first: Rollout, again: Rollout) -> None:
    safe = first.limits().share.safe
    assert safe is not None and again.share == safe
    a, b = first.setup, again.setup
    assert (a.update_tokens, a.log_prob_tokens, a.dynamic) == (b.update_tokens, b.log_prob_tokens, b.dynamic)
    assert a.trainer.parallel == b.trainer.parallel
    assert again.limits().share == first.limits().share


def test_a_job_that_does_not_fit_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    """Without the optimizer on the host the update needs more than a card."""
    words = ["actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=False"]
    assert main(["rollout", "--verl", EXAMPLE, *words, "--gpu", "A100-40GB", "--require-fit"]) == 3
    text = capsys.readouterr().out
    assert "DOES NOT FIT A100-40GB at 0.6: update is the first phase that does not fit" in text
    assert text.startswith("No gpu_memory_utilization is safe: update binds") and "\nTry first: " in text


def test_a_change_to_try_first_makes_it_fit() -> None:
    found = post_training("verl", EXAMPLE, "H100", overrides=[
        "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload=False",
    ])  # fmt: skip
    assert not fits(found) and found.limits().first == "the optimizer on the host (optimizer_cpu_offload)"


def test_an_engine_awake_holds_no_less_than_asleep() -> None:
    phases = {p.phase: p.engine_bytes for p in job().phases}
    for phase in AWAKE:
        if phase in phases:
            assert phases[Phase.SLEEP].least <= phases[Phase.SYNC].least <= phases[phase].least


def test_unmodelled_options_make_the_verdict_unknown() -> None:
    found = post_training("verl", EXAMPLE, "H100", overrides=["+actor_rollout_ref.rollout.engine_kwargs.vllm.foo=1"])
    assert found.verdict is Verdict.UNKNOWN


def test_lines_of_three_frameworks() -> None:
    text = """
        GPU Memory before optimizer offload: 38.85GB allocated, 40.00GB reserved
        [Rank 3] Memory-Usage after offload model: {'gpu': '3', 'total_GB': 79.1, 'used_GB': 9.1, 'allocated_GB': 0.12}
        step:1 - perf/max_memory_allocated_gb:12.5 - perf/max_memory_reserved_gb:14.0
        step:2 - perf/max_memory_allocated_gb:13.5 - perf/max_memory_reserved_gb:13.0
    """
    found = {reading.head: reading for reading in readings_of(text)}
    gib = 1 << 30
    assert found["GPU Memory before optimizer offload"].allocated == int(38.85 * gib)
    assert found["after offload model"].used == int(9.1 * gib)
    peak = found["perf/max_memory"]
    assert peak.peak and (peak.allocated, peak.reserved) == (int(13.5 * gib), 14 * gib)


@pytest.mark.slow
def test_layouts_leave_what_they_say() -> None:
    from bridge_memory.rollout.layouts import search

    rows = search(job())
    assert rows and rows == sorted(rows, key=lambda row: -row.kv_tokens)
    assert rows[0].kv_tokens >= (solved().share.kv_tokens or (0, 0))[0]


def test_find_gpu_is_the_card_of_the_job() -> None:
    assert job().gpu == find_gpu("H100")


def test_compare_sends_a_log_of_verl_here(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "verl.log"
    log.write_text("After rollout offload, memory allocated (GB): 3.00, memory reserved (GB): 3.50, ...\n")
    assert main(["compare", str(log), "Qwen/Qwen3-8B", "--num-gpus", "8", "--tp", "2"]) == 2
    assert "bridge-memory rollout --verl CONFIG --log" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["verl", "nemo_rl", "slime", "ms_swift"])
def test_more_is_more(kind: str) -> None:
    """A larger share: no fewer KV tokens and no less on the driver; a larger micro batch: a larger update."""
    swift = "swift rlhf --rlhf_type grpo --use_vllm true --model Qwen/Qwen3-0.6B --deepspeed zero2 --sleep_level 1"
    text = {
        "verl": Path(EXAMPLE).read_text(), "ms_swift": f"{swift} --per_device_train_batch_size 2",
        "nemo_rl": "policy: {model_name: Qwen/Qwen3-0.6B, generation: {}, megatron_cfg: {enabled: true}}",
        "slime": "--colocate --hf-checkpoint Qwen/Qwen3-4B --use-dynamic-batch-size --max-tokens-per-gpu 9216 "
        "--tensor-model-parallel-size 2",
    }[kind]
    setup, card = read(kind, "the job", text=text, world_size=8), find_gpu("H100")
    least: list[int] = []
    for share in (0.4, 0.6, 0.8):
        found = answer(setup.with_share(share), card)
        rollout = found.phase(Phase.ROLLOUT)
        assert rollout is not None
        now = [*found.engine.kv_tokens, *rollout.driver]
        assert all(a <= b for a, b in zip(least, now, strict=False)) and now != least
        least = now
    sizes = []
    for factor in (1, 2, 3):
        update = answer(setup.with_(update_tokens=factor * setup.update_tokens), card).phase(Phase.UPDATE)
        assert update is not None
        sizes.append(total(update.allocated).most)
    assert sizes[0] < sizes[1] < sizes[2]
