"""A resume under megatron-core's own Megatron-FSDP, with Transformer Engine's FusedAdam over its shards."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from bridge_memory.components import State
from bridge_memory.estimation import stage_parts
from bridge_memory.job.megatron.building import building, built
from bridge_memory.job.megatron.loading import How, loading, refusal
from bridge_memory.outside.amount import total
from bridge_memory.rehearsal.model import build_chunks
from bridge_memory.rehearsal.model_state import optimizer
from bridge_memory.rehearsal.patches.device import tensors_call_themselves_cuda
from bridge_memory.rehearsal.rank import on_rank
from bridge_memory.rehearsal.world import installed_release
from bridge_memory.releases import release_in
from bridge_memory.spec import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    LayerSpec,
    ParallelSpec,
    RunSpec,
    SpecError,
)
from bridge_memory.spec.model import AttentionSpec, MLPSpec, ModelSpec, MoESpec

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engines"))
import fsdp_on_meta

DENSE = LayerSpec(AttentionSpec(16, 8, 128), MLPSpec(5504, gated=True))
EXPERTS = LayerSpec(AttentionSpec(16, 8, 128), MoESpec(8, 2, 4096))
RUN = RunSpec(
    model=ModelSpec(name="x", model_type="test", hidden_size=2048, vocab_size=2048, layers=(DENSE,) * 8),
    parallel=ParallelSpec(world_size=8), batch=BatchSpec(seq_length=512),
    data_parallel=DataParallelSpec(engine="megatron_fsdp", data_parallel_sharding_strategy="optim_grads_params"),
    implementation=ImplementationSpec(
        transformer_impl="local", moe_grouped_gemm=False, gradient_accumulation_fusion=False, expandable_segments=True,
        megatron_core=installed_release(),
    ),
)  # fmt: skip
AWARE: dict[str, Any] = {"use_precision_aware_optimizer": True}
MIXED = replace(RUN.model, layers=(DENSE,) * 2 + (EXPERTS,) * 2)
RUNS = {
    "weights": RUN,
    "gradients": RUN.with_fields(data_parallel_sharding_strategy="optim_grads"),
    "optimizer": RUN.with_fields(data_parallel_sharding_strategy="optim"),
    "experts": RUN.with_(model=MIXED).with_fields(expert_model_parallel_size=2),
    "precision-aware": RUN.with_fields(**AWARE),
    "bf16 moments": RUN.with_fields(**AWARE, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16"),
    "one bf16 moment": RUN.with_fields(**AWARE, exp_avg_dtype="bf16"),
}


class Resumed(NamedTuple):
    """Bytes on the device: the most while it was built, once it was, and the most of the resume."""

    building: int
    built: int
    resume: int


@contextmanager
def wrapped_model(run: RunSpec) -> Iterator[tuple[Any, Any]]:
    """(what counts storages on the device, the model under Megatron-FSDP)."""
    with on_rank(replace(run, data_parallel=DataParallelSpec()), 0):
        tracker = fsdp_on_meta._Everything()
        with (
            fsdp_on_meta._no_gpu_for_fsdp(), tracker.following(torch.nn.Module()), tensors_call_themselves_cuda()
        ):  # fmt: skip
            yield tracker, fsdp_on_meta._wrapped(run, build_chunks(run)[0], 0)


def resumed(run: RunSpec) -> Resumed:
    with wrapped_model(run) as (tracker, wrapped):
        highest = tracker.peak().bytes
        held = optimizer(run, [wrapped])
        gc.collect()
        before = tracker.live_bytes
        tracker.reset_peak()
        metadata = {"distrib_optim_sharding_type": "fsdp_dtensor"}
        states = held.sharded_state_dict({}, is_loading=True, metadata=metadata)
        wrapped.load_state_dict(wrapped.state_dict_for_save_checkpoint(), strict=False)
        with torch.no_grad():
            held.load_state_dict(states)
        return Resumed(highest, before, tracker.peak().bytes)


def stepped(run: RunSpec) -> tuple[int, int]:
    """Bytes on the device after a step, and when gradients are zero again."""
    with wrapped_model(run) as (tracker, wrapped):
        held = optimizer(run, [wrapped])
        wrapped.param_and_grad_buffer.update_main_grads()
        for part in getattr(held, "chained_optimizers", [held]):
            part.optimizer.step()
        after = tracker.live_bytes
        held.zero_grad()
        gc.collect()
        return after, tracker.live_bytes


@pytest.fixture(autouse=True)
def dtensors() -> None:
    import transformer_engine

    if (release_in(transformer_engine.__version__) or (0, 0)) < (2, 12):
        pytest.skip("its FusedAdam makes states of whole parameters")


@pytest.mark.parametrize("name", RUNS)
def test_a_resume_holds_what_is_predicted(name: str) -> None:
    run = RUNS[name]
    if installed_release() < (0, 14):
        pytest.skip("no checkpoints of DTensors")
    found = resumed(run)
    assert total(building(run, 0) or ()).most == pytest.approx(found.building, rel=1e-3)
    assert total(built(run, 0) or ()).most == pytest.approx(found.built, rel=1e-3)
    least, most = total(loading(run, 0, How.RESUME) or ())
    assert least * 0.997 <= found.resume <= most * 1.003
    assert most < 1.1 * least


@pytest.mark.parametrize("name", ["weights", "precision-aware", "bf16 moments"])
@pytest.mark.parametrize("wide", [True, False], ids=["fp32 gradients", "bf16 gradients"])
def test_a_step_leaves_what_is_predicted(name: str, wide: bool) -> None:
    run = RUNS[name].with_fields(grad_reduce_in_fp32=wide)
    parts = stage_parts(run, 0)
    states = sum(c.bytes for c in parts.persistent if c.state is not State.NONE)
    copies = sum(c.bytes for c in parts.between_steps if c.name.startswith("main gradients"))
    assert (states + copies, states) == pytest.approx(stepped(run), rel=1e-3)


@pytest.mark.skipif(installed_release() < (0, 14), reason="no checkpoints of DTensors")
def test_moments_that_are_scaled_do_not_come_back() -> None:
    run = RUN.with_fields(**AWARE, exp_avg_dtype="fp16", exp_avg_sq_dtype="fp16")
    assert "fp16 moments" in (refusal(run) or "") and loading(run, 0, How.RESUME) is None
    with pytest.raises(SpecError, match="reduc"):
        resumed(run)
