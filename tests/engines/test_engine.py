"""Every engine that a run can name is a module of the room, and answers as one that was never asked before."""

from __future__ import annotations

import time

import pytest

from bridge_memory import DataParallelSpec, ImplementationSpec, ParallelSpec, RunSpec, estimate
from bridge_memory.cli import main
from bridge_memory.engines.by_name import engine_of
from bridge_memory.inventory.stack import chunk_units
from bridge_memory.spec.layout import layout
from bridge_memory.spec.parts import ENGINES, OptimizerSpec
from bridge_memory.tapes.context import context_of
from bridge_memory.verdict import fits


def run_under(name: str) -> RunSpec:
    """Stages of 7 and of 9 layers on three ranks each, which divide no size: buckets have padding. Engines without
    pipelines: all layers on three ranks, or on the one that there is."""
    if name not in ("megatron_ddp", "megatron_fsdp", "megatron_deepspeed"):
        parallel = ParallelSpec(world_size=1 if name == "single" else 3)
        return RunSpec(
            model="meta-llama/Llama-3.2-1B", parallel=parallel, data_parallel=DataParallelSpec(engine=name),
            implementation=ImplementationSpec(transformer_impl="transformers"),
        )
    strategy = "optim_grads_params" if name == "megatron_fsdp" else None
    parallel = ParallelSpec(world_size=6, pipeline_model_parallel_size=2, num_layers_in_first_pipeline_stage=7)
    run = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=parallel)
    overlapped = {} if name == "megatron_deepspeed" else {"overlap_grad_reduce": True, "bucket_size": 1_000_000}
    return run.with_fields(engine=name, data_parallel_sharding_strategy=strategy, **overlapped)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_that_can_be_named_is_there(name: str) -> None:
    run = run_under(name)
    shared = {"zero1": "zero_1_and_2", "zero2": "zero_1_and_2", "megatron_deepspeed": "zero_1_and_2"}
    assert type(engine_of(run)).__module__ == f"bridge_memory.engines.{shared.get(name, name)}"


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_answers_as_one_that_was_never_asked(name: str) -> None:
    """Of a list as the first chunk of its stage, and as the second, which is not cut into buckets; of lists that are
    gone when the next is made, in its place."""
    run = run_under(name)
    ctx = context_of(run)
    first, *others = (
        chunk_units(run.model, shapes[0], ctx) for shapes in layout(run.model, run.parallel).shapes(run.model)
    )
    stages = [(first,), *(s for last in others for s in ((last,), (first, last), (last, first)))]
    expected = [engine_of(run).stage(chunks) for chunks in stages]
    asked, by_copies = engine_of(run), engine_of(run)
    for _ in range(3):
        assert [asked.stage(chunks) for chunks in stages] == expected
        for chunks, answer in zip(stages * 8, expected * 8, strict=True):
            assert by_copies.stage(tuple(map(list, chunks))) == answer


def test_an_engine_for_hugging_face_models_runs_their_layers_unless_told() -> None:
    """In Python as on the command line: what nobody chose follows the engine, what somebody chose stays."""
    sharded = DataParallelSpec(engine="fsdp2")
    run = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=8), data_parallel=sharded)
    assert run.implementation.torch_layers
    assert any("since engine is fsdp2" in note for note in run.assumptions)
    chosen = run.with_(implementation=ImplementationSpec())
    assert not chosen.implementation.torch_layers
    plain = RunSpec(model="meta-llama/Llama-3.2-1B", parallel=ParallelSpec(world_size=8))
    assert plain.with_fields(engine="fsdp2").implementation == run.implementation


def test_zero3_follows_its_parameters_once_for_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which are whole when depends on no tokens, but on its own options; the first step is another than later ones."""
    from dataclasses import replace

    from bridge_memory import BatchSpec, clear_caches
    from bridge_memory.engines.zero3 import ZeRO3

    run, followed = run_under("zero3"), []
    live = ZeRO3._live
    monkeypatch.setattr(ZeRO3, "_live", lambda *args: followed.append(1) or live(*args))
    clear_caches()
    many = [
        replace(run, batch=BatchSpec(micro_batch_size=n, global_batch_size=3 * n), deepspeed=options)
        for options in (run.deepspeed, replace(run.deepspeed, stage3_prefetch_bucket_size=0)) for n in (1, 2, 4)
    ]
    together = [estimate(one).peak_stage.peak_bytes for one in many]
    assert len(followed) == 2 * 2
    apart = []
    for one in many:
        clear_caches()
        apart.append(estimate(one).peak_stage.peak_bytes)
    assert together == apart


def test_zero3_of_many_experts_takes_no_time() -> None:
    """18,867 parameters of their own; a replay that adds up what lives at every step took half a minute."""
    run = RunSpec(model="Qwen/Qwen3-30B-A3B", parallel=ParallelSpec(world_size=8)).with_fields(engine="zero3")
    begun = time.process_time()
    estimate(run)
    assert time.process_time() - begun < 5


def test_a_family_that_is_not_recorded_is_refused_with_a_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["estimate", "nvidia/Llama-3_3-Nemotron-Super-49B-v1", "--engine", "ddp", "--num-gpus", "8"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert "more characters" not in error and error.endswith("; use --transformer-impl transformer_engine\n")
    assert main([*command, "--transformer-impl", "transformer_engine"]) == 0


def test_experts_of_transformers_need_no_workspace_of_transformer_engine() -> None:
    run = RunSpec(model="Qwen/Qwen3-30B-A3B", parallel=ParallelSpec(world_size=8)).with_fields(engine="fsdp2")
    names = {c.name for c in estimate(run).stages[0].components}
    assert not {name for name in names if "Transformer Engine" in name}


def test_adapters_beside_layers_of_transformers_go_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    """megatron-core's names, the default for its layers, are beside none of them: there it is every linear."""
    command = ["estimate", "Qwen/Qwen3-0.6B", "--engine", "fsdp2", "--num-gpus", "8", "--peft", "lora"]
    assert main([*command, "--lora-target-modules", "foo"]) == 2
    assert "--lora-target-modules" in capsys.readouterr().err
    assert main([*command, "--lora-dim", "8", "-v"]) == 0
    unset = capsys.readouterr().out
    assert "adapters on every linear but the output layer" in " ".join(unset.split())
    peaks = []
    for targets in ("all-linear", "q_proj,v_proj"):
        assert main([*command, "--lora-dim", "8", "--lora-target-modules", targets]) == 0
        peaks.append(capsys.readouterr().out.splitlines()[0])
    assert unset.splitlines()[0] == peaks[0] != peaks[1]
    assert main([*command, "--lora-target-modules", "q_proj,foo", "-v"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "(foo) names no linear" in shown and "(q_proj) names" not in shown
    assert main([*command, "--lora-target-modules", "*_proj"]) == 0


def test_gradients_are_contiguous_where_the_optimizer_is_on_the_host() -> None:
    """DeepSpeed's ``DeepSpeedZeroOptimizer.__init__``: ``contiguous_gradients or self.cpu_offload``."""

    def peak(run: RunSpec) -> int:
        return estimate(run).stages[0].peak_bytes

    run = RunSpec(model="Qwen/Qwen2.5-0.5B", parallel=ParallelSpec(world_size=2)).with_fields(
        engine="zero2", params_dtype="bf16", offload_optimizer_device="cpu", contiguous_gradients=False,
        seq_length=128,
    )
    assert peak(run) == peak(run.with_fields(contiguous_gradients=True))
    on_the_gpu = run.with_fields(offload_optimizer_device="none")
    assert peak(on_the_gpu) != peak(on_the_gpu.with_fields(contiguous_gradients=True))


def test_a_paged_optimizer_is_never_why_a_run_does_not_fit() -> None:
    """bitsandbytes' ``get_paged``: managed memory, which the driver moves to the host where the GPU is full."""
    run = RunSpec(model="meta-llama/Llama-3.1-8B").with_fields(
        engine="single", params_dtype="bf16", gradient_checkpointing=True, transformer_impl="transformers",
    )
    answers = {}
    for paged in (False, True):
        found = estimate(run.with_(optimizer=OptimizerSpec(optimizer="adamw_8bit", paged=paged)))
        answers[paged] = [fit.verdict.value for fit in fits(found, ["A100-40GB", "H100"])]
    assert answers == {False: ["does not fit", "fits"], True: ["unknown", "fits"]}
