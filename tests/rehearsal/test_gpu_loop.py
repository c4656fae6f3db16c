"""The loop of ``rehearse --device cuda``, driven without a GPU: real tensors in host memory, tiny models.

megatron-core's own parameters, DDP, schedules and optimizer run with values, over torch's fake process group. In
place of torch.cuda's statistics stands a count of the bytes alive. What the loop finds is held against the
rehearsal on the meta device, which runs one microbatch a chunk and replays the schedule with our own timeline.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch

from bridge_memory.accuracy.predictions import predict_all
from bridge_memory.accuracy.records import load_runs
from bridge_memory.cli import main
from bridge_memory.estimation import estimate
from bridge_memory.rehearsal import gpu, patches
from bridge_memory.rehearsal.run import rehearse
from bridge_memory.rehearsal.summary import rows
from bridge_memory.rehearsal.tracker import Tracker
from bridge_memory.rehearsal.world import RehearsalUnavailable
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    LayerSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    OptimizerSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
)

LOCAL = ImplementationSpec(transformer_impl="local", moe_grouped_gemm=False)
ALLGATHER = ImplementationSpec(
    transformer_impl="local", moe_grouped_gemm=False, moe_token_dispatcher_type="allgather"
)
HEADS, SEQ = 4, 128
EXPERTS = MoESpec(8, 2, 32, shared_expert_intermediate_size=64)


def tiny(ffn: Any = None, layers: int = 4) -> ModelSpec:
    """h = 64, four heads of 16, two query groups, f = 128, V = 512: some 200,000 parameters."""
    layer = LayerSpec(AttentionSpec(HEADS, 2, 16), ffn or MLPSpec(128, gated=True))
    return ModelSpec(name="tiny", model_type="test", hidden_size=64, vocab_size=512, layers=(layer,) * layers)


def run_of(model: ModelSpec, implementation: ImplementationSpec = LOCAL, **parallel: Any) -> RunSpec:
    return RunSpec(
        model=model, parallel=ParallelSpec(world_size=8, **parallel), batch=BatchSpec(seq_length=SEQ),
        implementation=implementation,
    )  # fmt: skip


@contextmanager
def a_gpu_made_of_host_memory(run: RunSpec) -> Iterator[None]:
    """torch.cuda says what a tracker counts on the CPU; Apex's kernels are stand-ins of the right shapes."""
    tracker = Tracker(device="cpu")
    moe = next((x.ffn for x in run.model.layers if isinstance(x.ffn, MoESpec)), None)
    routing = (moe.topk, moe.num_experts) if moe else ()
    with ExitStack() as stack:
        for name, value in (
            ("is_available", lambda: True),
            ("get_device_name", lambda: "NVIDIA H200"),
            ("memory_allocated", lambda: tracker.live_bytes),
            ("max_memory_allocated", lambda: tracker.peak(0).bytes),
            ("memory_reserved", lambda: tracker.live_bytes),
            ("mem_get_info", lambda: (2**40 - tracker.live_bytes, 2**40)),
            ("reset_peak_memory_stats", tracker.reset_peak),
        ):
            stack.enter_context(patches.replaced(torch.cuda, name, value))
        for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
            # Adam asks a CUDA build of PyTorch for its stream.
            stack.enter_context(patches.replaced(torch.optim.Optimizer, name, lambda self: None))
        helped = patches.running(*routing, device="cpu")
        stack.enter_context(patches.replaced(gpu, "_helped", lambda run: helped))
        stack.enter_context(patches.replaced(gpu, "missing_kernels", lambda: {}))
        stack.enter_context(patches.tensors_call_themselves_cuda())
        stack.enter_context(tracker.watching(torch.nn.Module()))
        yield


def measure(run: RunSpec, stage: int = 0, steps: int = 2) -> gpu.Measured:
    with a_gpu_made_of_host_memory(run):
        return gpu.rehearse_on_gpu(run, stage, steps=steps)


def stand_ins(run: RunSpec, stage: int) -> int:
    """Stand-in weight gradients in bf16, one a shape: of qkv, proj, both halves of fc1, fc2, the output layer."""
    t, e = run.parallel.tp, run.parallel.etp
    shapes = {(128 // t, 64), (64, 64 // t)}
    if run.model.has_experts:
        shapes |= {(64 // e, 64), (64, 32 // e), (128 // t, 64), (64, 64 // t)}
    else:
        shapes |= {(256 // t, 64), (64, 128 // t)}
    if stage == run.parallel.pp - 1:
        shapes |= {(512 // t, 64)}
    return 2 * sum(rows * columns for rows, columns in shapes)


def persistent(run: RunSpec, stage: int) -> int:
    """What a step leaves behind that the meta rehearsal leaves out, by hand.

    The batch: token ids, labels and positions of 8 bytes, a loss mask of 4; the rotary table in fp32; the scores
    buffer of the local attention in bf16 (``DotProductAttention``'s "mpu" buffer); stand-in gradients.
    """
    heads = HEADS // run.parallel.tp
    return SEQ * (3 * 8 + 4) + 4 * SEQ * 16 + 2 * heads * SEQ * SEQ + stand_ins(run, stage)


CASES = {
    "one stage": (run_of(tiny()), 0),
    "first of four": (run_of(tiny(), pipeline_model_parallel_size=4), 0),
    "middle of four": (run_of(tiny(), pipeline_model_parallel_size=4), 1),
    "last of four": (run_of(tiny(), pipeline_model_parallel_size=4), 3),
    "tensor parallel, last": (run_of(tiny(), tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 1),
    "interleaved, first": (
        run_of(tiny(), pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), 0
    ),
    "interleaved, last": (
        run_of(tiny(), pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2), 1
    ),
    "experts": (run_of(tiny(EXPERTS), expert_model_parallel_size=4), 0),
    "experts, allgather": (
        run_of(tiny(EXPERTS), ALLGATHER, expert_model_parallel_size=4, tensor_model_parallel_size=2), 0
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_real_loop_peaks_where_the_replayed_schedule_does(name: str) -> None:
    """Half a per cent of the peak of step 2: real 1F1B with its sends and receives against the timeline."""
    run, stage = CASES[name]
    found = measure(run, stage)
    table = {r.name: r.found for r in rows(rehearse(found.run, stage))}
    # What both columns of the rehearsal take from the estimate is no part of this.
    expected = table["peak"] - table["buffers, counted in both columns"] + persistent(run, stage)
    assert found.peak == pytest.approx(expected, rel=0.005)


@pytest.mark.parametrize(
    ("name", "received"),
    [("first of four", 0), ("middle of four", 1), ("last of four", 1), ("tensor parallel, last", 1),
     ("interleaved, first", 1), ("interleaved, last", 2)],
)  # fmt: skip
def test_a_step_leaves_the_last_received_tensor_and_its_gradient(name: str, received: int) -> None:
    """``TransformerBlock.input_tensor`` is what ``schedules.py`` received last, a leaf whose ``.grad`` was sent on:
    two tensors [s, b, h] in bf16 a chunk that does not embed. Nothing else is left, but each chunk's rotary table."""
    run, stage = CASES[name]
    found = measure(run, stage)
    table = {r.name: r.found for r in rows(rehearse(found.run, stage))}
    left = found.allocated - sum(table[part] for part in ("weights", "gradients", "optimizer state"))
    left -= persistent(run, stage) + 4 * SEQ * 16 * (run.parallel.vpp - 1)
    shard = run.parallel.tp if run.parallel.sp else 1
    assert left == pytest.approx(received * 2 * 2 * SEQ * 64 // shard, abs=1024)
    carried_over = {c.name: c.bytes for c in estimate(found.run).stages[stage].carried_over}
    assert sum(carried_over.values()) == received * 2 * 2 * SEQ * 64 // shard


@pytest.mark.parametrize("name", ["one stage", "middle of four", "experts"])
def test_the_phases_show_the_optimizer_state_appear_in_the_first_step(name: str) -> None:
    """Weights, gradients and masters are there when the model is built; two fp32 moments come with the step."""
    run, stage = CASES[name]
    found = measure(run, stage)
    assert [p.name for p in found.phases] == [
        "model built", "first forward", "first backward", "first optimizer step", "second step"
    ]  # fmt: skip
    built, forward, backward, optimizer, second = found.phases
    table = {r.name: r.found for r in rows(rehearse(found.run, stage))}
    masters, moments = table["optimizer state"] / 3, table["optimizer state"] * 2 / 3
    assert built.allocated == pytest.approx(table["weights"] + table["gradients"] + masters, rel=0.001)
    assert optimizer.allocated - backward.allocated == pytest.approx(moments, rel=0.001)
    assert second.allocated == optimizer.allocated
    # The saved activations of the microbatches in flight; gone after backward.
    assert forward.allocated > backward.allocated + 0.5 * table["schedule peak above static memory"]
    assert second.max_allocated > backward.max_allocated > backward.allocated


def test_without_the_distributed_optimizer_the_whole_state_is_here() -> None:
    run = CASES["one stage"][0].with_(data_parallel=DataParallelSpec(use_distributed_optimizer=False))
    sharded, whole = measure(CASES["one stage"][0]), measure(run)
    parameters = 213_568  # 512 x 64 twice, four layers of 4 x 64 x (32 + 16) / 2 ..., norms
    assert whole.allocated - sharded.allocated == pytest.approx(12 * parameters * 7 / 8, rel=0.001)


def test_recomputation_takes_less_and_more_steps_take_no_more() -> None:
    run = CASES["one stage"][0]
    full = run.with_(recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1))
    plain, saved = measure(run), measure(full)
    assert saved.peak < plain.peak - 0.4 * (plain.peak - plain.allocated)
    third = measure(run, steps=3)
    assert third.phases[-1].name == "step 3"
    for phase in third.phases:
        assert phase.seconds is not None and phase.seconds > 0
        assert phase.driver_used == phase.allocated
    assert third.peak == plain.peak


def test_the_loop_leaves_no_trace() -> None:
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    measure(*CASES["experts"])
    assert not torch.distributed.is_initialized()
    assert MoEAuxLossAutoScaler.main_loss_backward_scale is None
    assert torch.cuda.current_device.__module__ == "torch.cuda"


def test_the_record_of_a_loop_is_read_by_validate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The exact run comes back, and the rank that was measured is the one that is predicted."""
    run = CASES["last of four"][0]
    path = tmp_path / "records.jsonl"
    with a_gpu_made_of_host_memory(run):
        found = gpu.rehearse_on_gpu(run, rank=7)
    path.write_text(json.dumps(found.as_record()) + "\n")
    (record,) = load_runs(path)
    (outcome,) = predict_all([record])
    assert outcome.status == "ok", outcome.reason
    assert outcome.stage is not None and outcome.stage.stage == 3
    assert outcome.measured_max_allocated_bytes == found.peak
    assert record.framework["torch"] and record.framework["megatron_core"]
    assert main(["accuracy", str(path), "--summary"]) == 0
    assert "every record was predicted" in capsys.readouterr().out
    text = "\n".join(found.lines())
    assert "peak of step 2" in text and "meaningless" in text


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"precision": PrecisionSpec(params_dtype="fp16")}, "fp16"),
        ({"implementation": ImplementationSpec()}, "transformer_impl"),
        ({"implementation": ImplementationSpec(transformer_impl="local", moe_grouped_gemm=False,
                                               create_attention_mask=True)}, "create_attention_mask"),
        ({"optimizer": OptimizerSpec(log_params_norm=True)}, "log_params_norm"),
        ({"implementation": ImplementationSpec(transformer_impl="local", moe_grouped_gemm=False,
                                               cuda_graph_impl="full_iteration")}, "full_iteration"),
    ],
)  # fmt: skip
def test_what_the_loop_would_not_do_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    run = CASES["one stage"][0].with_(**change)
    with pytest.raises(SpecError, match=named) as refusal:
        measure(run)
    assert "\n" not in str(refusal.value)


def test_fusions_of_apex_are_refused_where_it_is_missing() -> None:
    import importlib.util

    if importlib.util.find_spec("fused_weight_gradient_mlp_cuda"):
        pytest.skip("Apex is here")
    with pytest.raises(RehearsalUnavailable, match="--no-gradient-accumulation-fusion"):
        gpu.refuse_what_is_not_rehearsed(CASES["one stage"][0])
