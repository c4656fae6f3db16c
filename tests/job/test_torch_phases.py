"""Phases of jobs of torch's engines and DeepSpeed's, counted by hand for Llama-3.1-8B.

``tests/engines/test_torch_jobs.py`` compares them with the real engines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bridge_memory import PeftSpec, RunSpec, SpecError, TransformersSpec, estimate, whole_job
from bridge_memory.components import Role
from bridge_memory.job.job import Job
from bridge_memory.job.megatron.evaluation import evaluation as of_megatron
from bridge_memory.job.megatron.loading import How
from bridge_memory.job.megatron.loading import loading as of_loading
from bridge_memory.job.megatron.saving import host_of_saving
from bridge_memory.job.torch import ENGINES
from bridge_memory.job.torch.building import building, parameters, rank_of
from bridge_memory.job.torch.evaluation import evaluation
from bridge_memory.job.torch.loading import loading
from bridge_memory.job.torch.saving import saving
from bridge_memory.outside.amount import total
from bridge_memory.outside.phase import Phase
from bridge_memory.spec import DeepSpeedOptions
from bridge_memory.verdict import Verdict

N, TABLE = 8_030_261_248, 128_256 * 4096


def a_run(engine: str, ranks: int = 8, **fields: Any) -> RunSpec:
    given = {"transformer_impl": "transformers", "params_dtype": "bf16", **fields}
    return RunSpec(model="meta-llama/Llama-3.1-8B").with_fields(engine=engine, world_size=ranks, **given)


def about(nbytes: float) -> Any:
    return pytest.approx(nbytes, rel=0.002)


@pytest.mark.parametrize(
    ("engine", "fields", "least", "most"),
    [
        ("single", {"ranks": 1}, 2 * N, 2 * N),
        ("ddp", {}, 4 * N, 4 * N),  # and the buckets
        ("zero1", {}, 4 * N, 4 * N),  # as they came, and flat
        ("zero2", {}, 4 * N, 4 * N),
        # Shards and one table that is sharded; all of the root: both tables and their shards.
        ("fsdp2", {}, 2 * N / 8 + 2 * TABLE, 2 * N / 8 + 4 * TABLE),
        ("fsdp2", {"transformer_impl": "torchtitan"}, 2 * N / 8, 2 * N / 8),
        ("fsdp2", {"transformer_impl": "torchtune"}, 2 * N / 8 + 2 * TABLE, 2 * N / 8 + 2 * TABLE),
        # Of the layers shards; of the root the tensors, the flat tensor, and its shard.
        ("fsdp1", {}, 2 * N / 8 + 8 * TABLE, 2 * N / 8 + 8 * TABLE),
        # Partitions of weights, main parameters and gradients, and the bucket and a parameter in flight, or zeros.
        ("zero3", {}, 8 * N / 8 + 1e9 + 2 * TABLE, 10 * N / 8),
    ],
    ids=["single", "ddp", "zero1", "zero2", "fsdp2", "torchtitan", "torchtune", "fsdp1", "zero3"],
)
def test_building(engine: str, fields: dict[str, Any], least: float, most: float) -> None:
    found = total(building(a_run(engine, **fields), 0))
    if engine == "zero3":
        assert found.least == found.most == about(max(least, most))
    else:
        assert found == (about(least), about(most))


def test_resuming_makes_states_once_or_twice() -> None:
    """DDP's become what was read; FSDP2's are made by a step before what was read takes their place."""
    assert total(loading(a_run("ddp"), 0, How.RESUME)) == (about(8 * N), about(8 * N))
    shards = 2 * N / 8
    # Weights, gradients, two states, and their square roots.
    assert total(loading(a_run("fsdp2"), 0, How.RESUME)) == (about(5 * shards), about(5 * shards))
    fused = a_run("fsdp2", torch_implementation="fused")
    # Weights and two states: with gradients; with two states more, or a table.
    assert total(loading(fused, 0, How.RESUME)).most == about(5 * shards)


def test_saving_gathers_what_is_asked_for() -> None:
    def gathered(run: RunSpec) -> tuple[int, int]:
        (one,) = [a for a in saving(run, 0) if "whole" in a.name]
        return one.least, one.most

    assert gathered(a_run("fsdp2")) == (0, about(2 * TABLE))
    # Both states of the root.
    assert gathered(a_run("fsdp1")) == (about(2 * 2 * 2 * TABLE),) * 2
    whole = a_run("zero3").with_(deepspeed=DeepSpeedOptions(stage3_gather_16bit_weights_on_model_save=True))
    assert gathered(whole) == (about(2 * TABLE),) * 2
    assert not [a for a in saving(a_run("zero3"), 0) if "one parameter" in a.name]


def test_evaluation_does_not_depend_on_what_backward_needs() -> None:
    plain = a_run("ddp", seq_length=8192)
    for changed in (
        plain.with_fields(gradient_checkpointing=True),
        plain.with_fields(gradient_checkpointing=True, use_reentrant=True),
    ):  # fmt: skip
        assert total(evaluation(changed, 0)) == total(evaluation(plain, 0))
    twice = total(evaluation(plain.with_fields(eval_micro_batch_size=2), 0))
    state = total(saving(plain, 0)).most
    assert twice.most - state == pytest.approx(2 * (total(evaluation(plain, 0)).most - state), rel=0.01)
    # bf16 logits, in fp32, and one copy that the loss makes of these; and keys and values of 32 layers.
    logits = 8192 * 128_256
    assert total(evaluation(plain, 0)).most - state >= logits * (2 + 4)
    keys = next(a for a in evaluation(plain, 0) if a.name.startswith("keys"))
    assert (keys.least, keys.most) == (0, 32 * 2 * 8192 * 1024 * 2)


def test_a_batch_of_evaluation_has_the_bound_of_trainings() -> None:
    with pytest.raises(SpecError, match="eval_micro_batch_size"):
        a_run("ddp", eval_micro_batch_size=2**20)


def test_a_larger_batch_of_evaluation_is_in_the_job_and_leaves_no_verdict_open() -> None:
    """The step lists it as not modelled; of the job it is a phase."""
    run = a_run("fsdp2", eval_micro_batch_size=64)
    job, plain = whole_job(run, "H100"), whole_job(a_run("fsdp2"), "H100")
    assert [f.partition(":")[0] for f in estimate(run).unmodelled] == ["eval_strategy"] and not job.unmodelled
    more, less = (total(phases(one)[Phase.EVALUATION].allocated).most for one in (job, plain))
    # The logits of 63 more sequences of 4096 tokens, in fp32 at least.
    assert more - less > 63 * 4096 * 128_256 * 4 > job.gpu.capacity_bytes
    assert job.verdict is Verdict.DOES_NOT_FIT and plain.verdict is Verdict.FITS


def phases(job: Job) -> dict[Phase, Any]:
    return {phase.phase: phase for phase in job.phases}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_phase_is_modelled(engine: str) -> None:
    job = whole_job(a_run(engine, 1 if engine == "single" else 8), "H200")
    assert list(phases(job)) == list(Phase) and not job.not_modelled
    found = phases(job)
    assert total(found[Phase.RESUME].allocated).most >= total(found[Phase.BUILD].allocated).most


@pytest.mark.parametrize("ranks", [1, 8])
def test_quantized_weights_are_whole_one_by_one(ranks: int) -> None:
    run = a_run("ddp" if ranks > 1 else "single", ranks).with_(
        peft=PeftSpec(scheme="lora", dim=16, target_modules=("q_proj",)),
        transformers=TransformersSpec(load_in_4bit=True),
    )
    rank = rank_of(run, 0)
    kept = sum(n for line, n in rank.state.amounts if line.role is Role.WEIGHTS)
    assert sum(p.shard for p in parameters(rank)) == kept
    assert max(p.whole for p in parameters(rank) if p.quantized) == 2 * 14336 * 4096


def test_an_engine_of_megatron_beside_the_step_is_listed() -> None:
    run = RunSpec(model="meta-llama/Llama-3.1-8B").with_fields(
        engine="megatron_fsdp", world_size=8, data_parallel_sharding_strategy="optim_grads_params"
    )
    job = whole_job(replace(run), "H200")
    assert len(job.phases) == len(Phase) and job.not_modelled == ()
    job = whole_job(run.with_fields(data_parallel_sharding_strategy="no_shard"), "H200")
    assert "resume" not in [str(p.phase) for p in job.phases] and "no_shard" in job.not_modelled[0]


def test_a_resume_of_megatron_fsdp_has_moments_twice_and_its_save_stages_one_tensor() -> None:
    """8 bytes of fp32 moments a parameter on 8 ranks, twice beside what is built; all that a rank writes is 12 bytes a
    parameter, in host memory only if another process writes it."""
    run = RunSpec(model="meta-llama/Llama-3.1-8B").with_fields(
        engine="megatron_fsdp", world_size=8, data_parallel_sharding_strategy="optim_grads_params"
    )
    ready, resume = (total(of_loading(run, 0, how) or ()).most for how in (How.NONE, How.RESUME))
    numel = 8_030_261_248 / 8
    assert resume - ready == pytest.approx(16 * numel, rel=1e-3)
    sync, beside = (total(host_of_saving(run.with_fields(async_save=on), 0) or ()).most for on in (False, True))
    assert beside == pytest.approx(12 * numel, rel=1e-3) and sync < beside / 20


def test_megatron_fsdp_evaluates_with_what_it_gathers_in_training() -> None:
    """One forward pass of a model in shards: beside it a unit, the next ones, and what is in no unit; at least a unit
    and the vocabulary's two tables more than a rank's shard, and no more than twice that and two units."""
    sizes = {"engine": "megatron_fsdp", "world_size": 8, "data_parallel_sharding_strategy": "optim_grads_params"}
    sharded = RunSpec(model="meta-llama/Llama-3.1-8B").with_fields(**sizes)
    whole = RunSpec(model="meta-llama/Llama-3.1-8B").with_fields(world_size=8)
    parts = {a.name: a.most for a in of_megatron(sharded, 0) or ()}
    unit, tables = 2 * 218_112_000, 2 * 2 * 128256 * 4096
    found = parts.get("parameters gathered", 0) + parts["parameters gathered between steps"]
    assert unit + tables <= found <= 2 * (unit + tables)
    own = "forward pass without gradients: loss"
    assert parts[own] == {a.name: a.most for a in of_megatron(whole, 0) or ()}[own]
