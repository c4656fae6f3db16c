"""Build, load, resume and save of a job, beside megatron-core's own with Transformer Engine's FusedAdam."""

from __future__ import annotations

from dataclasses import replace

import pytest
from job_oracle import forward_only, job

from bridge_memory import estimate
from bridge_memory.components import MADE_BY_FIRST_STEP
from bridge_memory.job.megatron.building import building, built
from bridge_memory.job.megatron.evaluation import forward_passes
from bridge_memory.job.megatron.loading import How, loading, refusal, why_not_resumed
from bridge_memory.job.megatron.saving import saving
from bridge_memory.outside.amount import Amount, total
from bridge_memory.readers import resolve_model
from bridge_memory.rehearsal.world import installed_release
from bridge_memory.spec import CheckpointSpec, DataParallelSpec, OptimizerSpec, ParallelSpec, RunSpec
from bridge_memory.spec.model import ModelSpec

#: Bytes of each chunk's rotary frequencies, and of the scales of states, which are in no amount.
SMALL = 64 * 1024


def first_layers(name: str, number: int) -> ModelSpec:
    model = resolve_model(name)
    return replace(model, layers=model.layers[:number], mtp_num_layers=0, mtp_layer=None)


LLAMA, QWEN = first_layers("meta-llama/Llama-3.2-1B", 4), first_layers("Qwen/Qwen3-30B-A3B", 2)
UNTIED = first_layers("meta-llama/Llama-3.1-8B", 4)
LOW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
RUNS = {
    "one GPU": RunSpec(model=LLAMA),
    "DP 2": RunSpec(model=LLAMA, parallel=ParallelSpec(world_size=2)),
    "TP 2, DP 4": RunSpec(model=LLAMA, parallel=ParallelSpec(world_size=8, tensor_model_parallel_size=2)),
    "no distributed optimizer": RunSpec(
        model=UNTIED, parallel=ParallelSpec(world_size=2),
        data_parallel=DataParallelSpec(use_distributed_optimizer=False),
    ),
    "buckets": RunSpec(
        model=UNTIED, parallel=ParallelSpec(world_size=4), data_parallel=DataParallelSpec(overlap_grad_reduce=True)
    ),
    "gradients in bf16": RunSpec(
        model=LLAMA, parallel=ParallelSpec(world_size=4), data_parallel=DataParallelSpec(grad_reduce_in_fp32=False)
    ),
    "virtual stages": RunSpec(
        model=UNTIED,
        parallel=ParallelSpec(
            world_size=4, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
        ),
    ),
    "experts": RunSpec(model=QWEN, parallel=ParallelSpec(world_size=4, expert_model_parallel_size=4)),
    "experts, EDP 2": RunSpec(model=QWEN, parallel=ParallelSpec(world_size=8, expert_model_parallel_size=4)),
    "experts without EP": RunSpec(
        model=replace(QWEN, layers=QWEN.layers[:1]), parallel=ParallelSpec(world_size=4)
    ),
    "precision-aware": RunSpec(
        model=LLAMA, parallel=ParallelSpec(world_size=2), optimizer=OptimizerSpec(use_precision_aware_optimizer=True)
    ),
    "bf16 moments": RunSpec(model=LLAMA, parallel=ParallelSpec(world_size=2), optimizer=OptimizerSpec(**LOW)),
    "fp16 moments, whole main parameters": RunSpec(
        model=LLAMA, parallel=ParallelSpec(world_size=2),
        optimizer=OptimizerSpec(
            use_precision_aware_optimizer=True, exp_avg_dtype="fp16", exp_avg_sq_dtype="fp16",
            store_param_remainders=False,
        ),
    ),
    "bf16 moments beside fp32 main parameters": RunSpec(
        model=LLAMA, parallel=ParallelSpec(world_size=2), optimizer=OptimizerSpec(**LOW, fp8_recipe="tensorwise")
    ),
    "optimizer in host memory": RunSpec(
        model=LLAMA, parallel=ParallelSpec(world_size=2),
        optimizer=OptimizerSpec(use_precision_aware_optimizer=True, optimizer_cpu_offload=True),
    ),
    "offload fraction 0": RunSpec(
        model=UNTIED, parallel=ParallelSpec(world_size=4),
        optimizer=OptimizerSpec(
            use_precision_aware_optimizer=True, optimizer_cpu_offload=True, optimizer_offload_fraction=0.0
        ),
    ),
    "experts, bf16 moments": RunSpec(
        model=QWEN, parallel=ParallelSpec(world_size=4, expert_model_parallel_size=4), optimizer=OptimizerSpec(**LOW)
    ),
}  # fmt: skip
STAGES = [pytest.param(run, stage, id=f"{name}, stage {stage}") for name, run in RUNS.items()
          for stage in range(run.parallel.pp)]  # fmt: skip


def within(amounts: tuple[Amount, ...] | None, measured: int) -> None:
    """``measured`` is inside the range, or 0.3 % from it."""
    assert amounts is not None
    least, most = total(amounts)
    assert least * 0.997 <= measured <= most * 1.003 + SMALL, (least, measured, most, amounts)


@pytest.mark.parametrize(("run", "stage"), STAGES)
def test_build_and_load(run: RunSpec, stage: int) -> None:
    with job(run, stage) as real:
        real.load(with_optimizer=False)
    within(building(run, stage), real.phases["build"].peak)
    within(built(run, stage), real.phases["build"].after)
    within(loading(run, stage, How.TORCH_DIST), real.phases["load"].peak)


@pytest.mark.parametrize("name", ["TP 2, DP 4", "virtual stages", "experts"])
def test_forward_passes_of_an_evaluation(name: str) -> None:
    run = RUNS[name]
    for stage in range(run.parallel.pp):
        ours = [0] * (run.parallel.vpp or 1)
        for moment in forward_passes(run, stage):
            ours[moment.chunk] = max(ours[moment.chunk], moment.nbytes)
        assert ours == [pytest.approx(peak, rel=0.01) for peak in forward_only(run, stage)]


@pytest.mark.parametrize(("run", "stage"), STAGES)
def test_resume_and_save(run: RunSpec, stage: int) -> None:
    with job(run, stage) as real:
        if refusal(released(run)) is not None:
            with pytest.raises(AttributeError):
                real.load(with_optimizer=True)
            return
        real.load(with_optimizer=True)
        real.save()
    within(loading(run.with_fields(adopt_optim_states=False), stage, How.RESUME), real.phases["resume"].peak)
    if run.optimizer.optimizer_cpu_offload:  # until its first step it also keeps the parameters that were loaded
        assert real.phases["save"].peak == real.phases["resume"].after
        return
    within(_states(saving(run, stage)), real.phases["save"].peak)


@pytest.mark.parametrize("wide", [True, False], ids=["fp32 gradients", "bf16 gradients"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_steps_of_a_partly_offloaded_optimizer_leave(wide: bool, share: float) -> None:
    """Two moments, and of bf16 gradients an fp32 copy, of the parameters that stay on the GPU: whole shards of them,
    so that up to the largest fewer are there than the share says."""
    run = RunSpec(
        model=replace(UNTIED, vocab_size=1024), parallel=ParallelSpec(world_size=2),
        data_parallel=DataParallelSpec(grad_reduce_in_fp32=wide),
        optimizer=OptimizerSpec(
            use_precision_aware_optimizer=True, optimizer_cpu_offload=True, optimizer_offload_fraction=share
        ),
    )
    with job(run) as real:
        real.steps(2)
    left = real.phases["steps"].after - real.phases["build"].after
    ours = {c.state: c.bytes for c in estimate(run).stages[0].components if c.state in MADE_BY_FIRST_STEP}
    states = 2 if wide else 3
    assert len(ours) == states
    largest = 4 * 2 * 4096 * 14336 * states if share else 0
    assert 0 <= sum(ours.values()) - left <= largest


#: megatron-core gathers in host memory here, which has data.
RESHARDABLE = CheckpointSpec(dist_ckpt_optim_fully_reshardable=True)
TINY = replace(LLAMA, layers=LLAMA.layers[:1], vocab_size=1024)
GATHERED = {
    "fp32": RunSpec(model=TINY, parallel=ParallelSpec(world_size=2), checkpoint=RESHARDABLE),
    "bf16 moments": RunSpec(
        model=TINY, parallel=ParallelSpec(world_size=2), optimizer=OptimizerSpec(**LOW, store_param_remainders=False),
        checkpoint=RESHARDABLE,
    ),
}


def released(run: RunSpec) -> RunSpec:
    return run.with_fields(megatron_core=installed_release())


def test_main_parameters_of_16_bits_do_not_come_back_from_whole_states() -> None:
    run = replace(GATHERED["bf16 moments"], optimizer=OptimizerSpec(**LOW))
    assert "store_param_remainders" in (refusal(run) or "")
    assert loading(run, 0, How.RESUME) is None
    with job(run) as real, pytest.raises(AssertionError):
        real.load(with_optimizer=True)


def test_an_optimizer_in_host_memory_without_fp32_copies_of_its_own_does_not_come_back() -> None:
    run = RunSpec(model=TINY, parallel=ParallelSpec(world_size=2), optimizer=OptimizerSpec(optimizer_cpu_offload=True))
    assert "use_precision_aware_optimizer" in (refusal(run) or "")
    assert loading(run, 0, How.RESUME) is None
    with job(run) as real, pytest.raises(KeyError):
        real.load(with_optimizer=True)
    within(building(run, 0), real.phases["build"].peak)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_whole_states_of_an_optimizer_in_host_memory(share: float) -> None:
    """Gathered on the device to be saved, wherever they are; and sent there anew when they are loaded."""
    run = released(RunSpec(
        model=replace(TINY, layers=TINY.layers * 2), parallel=ParallelSpec(world_size=2), checkpoint=RESHARDABLE,
        optimizer=OptimizerSpec(
            use_precision_aware_optimizer=True, optimizer_cpu_offload=True, optimizer_offload_fraction=share
        ),
    ))  # fmt: skip
    if why_not_resumed(run) is not None:
        pytest.skip("not modelled for this release")
    with job(run) as real:
        real.load(with_optimizer=True)
        after = real.phases["resume"].after
        real.save()
    within(loading(run, 0, How.RESUME), real.phases["resume"].peak)
    gathered = total(a for a in saving(run, 0) or () if a.name == "gathered states")
    assert gathered.most == pytest.approx(real.phases["save"].peak - after, rel=0.003)


def test_states_gathered_over_gloo_are_not_on_the_gpu() -> None:
    run = GATHERED["fp32"].with_fields(distrib_optim_fully_reshardable_mem_efficient=True)
    with job(run) as real:
        real.load(with_optimizer=True)
        real.save()
    within(_states(saving(run, 0)), real.phases["save"].peak)
    assert total(_states(saving(run, 0))).most < 0.8 * total(_states(saving(GATHERED["fp32"], 0))).most


def test_a_resume_without_the_optimizer_loads_weights() -> None:
    run = RUNS["DP 2"].with_fields(load_optim=False)
    with job(run) as real:
        real.load(with_optimizer=False)
    within(loading(run, 0, How.RESUME), real.phases["load"].peak)


@pytest.mark.parametrize("name", GATHERED)
def test_resume_from_whole_states(name: str) -> None:
    run = GATHERED[name].with_fields(adopt_optim_states=False)
    with job(run) as real:
        real.load(with_optimizer=True)
        real.save()
    within(loading(run, 0, How.RESUME), real.phases["resume"].peak)
    within(_states(saving(run, 0)), real.phases["save"].peak)


def _states(saved: tuple[Amount, ...] | None) -> tuple[Amount, ...]:
    """Without what passes have left, which did not run here."""
    assert saved is not None
    states = ("weights", "gradients", "main parameters", "exp_avg", "fp32", "gathered")
    return tuple(a for a in saved if a.name.startswith(states))
