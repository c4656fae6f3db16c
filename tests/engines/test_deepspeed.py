"""Estimates beside the real deepspeed on CPU, with a small Llama of transformers: every storage of three steps.

Where deepspeed is not installed these are skipped; ``.ci/run`` installs it.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import forked
import pytest

torch = pytest.importorskip("torch")

from real_engines import (  # noqa: E402
    BATCH,
    CONFIG,
    SEQ,
    Measured,
    PlaceTracker,
    expected,
    run_of,
    transformers,
    world,
)

from bridge_memory.spec import DeepSpeedOptions  # noqa: E402

BUCKET = 500_000
#: Scalars of DeepSpeed's own, a block of the allocator each.
BESIDE = 16 * 512
RANKS = 2


def steps(stage: int, rank: int, microbatches: int, options: dict[str, Any], extra: dict[str, Any]) -> Measured:
    """Three steps on one rank of two; in a process of its own, since deepspeed keeps its groups."""
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK="0", RANK=str(rank), WORLD_SIZE=str(RANKS))
    import deepspeed

    logging.disable(logging.WARNING)
    # Its collectives in shared memory are compiled where they are asked for.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    settings = transformers.LlamaConfig(**CONFIG)
    settings._attn_implementation = "eager"
    config = {
        "train_micro_batch_size_per_gpu": BATCH, "gradient_accumulation_steps": microbatches, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET, **options},
        "zero_allow_untested_optimizer": True, "gradient_clipping": 1.0, **extra,
    }  # fmt: skip
    found = Measured()
    with world("fake", RANKS, rank):
        tracker = PlaceTracker()
        with tracker.following(torch.nn.Module()):
            model = transformers.LlamaForCausalLM(settings).bfloat16()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-9, foreach=True)
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
            tokens = torch.zeros(BATCH, SEQ, dtype=torch.long)
            for _ in range(3):
                for _ in range(microbatches):
                    tracker.reset_peak()
                    loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
                    found.forward = tracker.peak(1).bytes
                    tracker.reset_peak()
                    engine.backward(loss)
                    del loss
                    found.backward = tracker.peak(1).bytes
                    tracker.reset_peak()
                    engine.step()
                    found.step, found.after_step = tracker.peak(1).bytes, tracker.live_bytes
    return found


def real(
    stage: int, *, rank: int = 0, microbatches: int = 1, extra: dict[str, Any] | None = None, **options: Any
) -> Measured:
    pytest.importorskip("deepspeed")
    program = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from test_deepspeed import steps\n"
        f"m = steps({stage}, {rank}, {microbatches}, {options!r}, {extra or {}!r})\n"
        "print('MEASURED', m.after_step, m.forward, m.backward, m.step)\n"
    )
    done = forked.run(program, "torch", "transformers", "deepspeed")
    line = next((line for line in done.stdout.splitlines() if line.startswith("MEASURED")), None)
    assert line is not None, done.stderr[-2000:]
    after, forward, backward, step = map(int, line.split()[1:])
    return Measured(after_step=after, forward=forward, backward=backward, step=step)


def check(run: Any, found: Measured) -> None:
    """State to the byte, but for scalars; peaks within a hundredth."""
    ours = expected(run)
    assert 0 <= found.after_step - (ours["state"] - ours["fresh"]) <= BESIDE
    for phase in ("forward", "backward", "step"):
        assert ours[phase] == pytest.approx(getattr(found, phase), rel=0.01), phase


def options(**kwargs: Any) -> DeepSpeedOptions:
    return DeepSpeedOptions(reduce_bucket_size=BUCKET, **kwargs)


def test_zero1_keeps_whole_gradients_to_the_end_of_backward() -> None:
    """The rank whose partition comes first is the fullest: its gradients are copied before others are freed."""
    check(run_of("zero1", ranks=RANKS, dtype="bf16", deepspeed=options()), real(1))


def test_zero1_with_fp32_gradients_is_the_bf16_optimizer() -> None:
    found = real(1, extra={"data_types": {"grad_accum_dtype": "fp32"}})
    check(run_of("zero1", ranks=RANKS, dtype="bf16", deepspeed=options(grad_accum_dtype="fp32")), found)


def test_zero2_reduces_in_a_bucket() -> None:
    """The rank with the last partition holds its gradients from the first reduction on."""
    check(run_of("zero2", ranks=RANKS, dtype="bf16", deepspeed=options()), real(2, rank=1))


def test_zero3_gathers_ahead() -> None:
    chosen = {
        "stage3_prefetch_bucket_size": 200_000, "stage3_param_persistence_threshold": 1000,
        "stage3_max_live_parameters": 1_000_000, "stage3_max_reuse_distance": 1_000_000,
    }  # fmt: skip
    check(run_of("zero3", ranks=RANKS, dtype="bf16", deepspeed=options(**chosen)), real(3, **chosen))


@pytest.mark.parametrize("bucket", (1_500_000, 50_000_000))
def test_zero3_prefetches_from_modules_around_others(bucket: int) -> None:
    """The model itself has no parameters; its call prefetches the embedding with what fits the bucket beside it, which
    are then copied out of one buffer."""
    chosen = {
        "stage3_prefetch_bucket_size": bucket, "stage3_param_persistence_threshold": 1000,
        "stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 1000,
    }  # fmt: skip
    check(run_of("zero3", ranks=RANKS, dtype="bf16", deepspeed=options(**chosen)), real(3, **chosen))


def test_zero3_that_frees_nothing_near() -> None:
    chosen = {
        "stage3_prefetch_bucket_size": 1_000_000, "stage3_param_persistence_threshold": 1000,
        "stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9,
    }  # fmt: skip
    check(run_of("zero3", ranks=RANKS, dtype="bf16", deepspeed=options(**chosen)), real(3, **chosen))


@pytest.mark.parametrize("stage", (2, 3))
def test_main_parameters_in_bf16_need_no_fp32_gradients(stage: int) -> None:
    """Gradients are cast to the dtype of the main parameters, which they have already."""
    low = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    near = {"stage3_param_persistence_threshold": 1000, "stage3_prefetch_bucket_size": 1_000_000} if stage == 3 else {}
    found = real(stage, rank=1 if stage == 2 else 0, extra={"bf16": {"enabled": True, **low}}, **near)
    check(run_of(f"zero{stage}", ranks=RANKS, dtype="bf16", deepspeed=options(**low, **near)), found)


@pytest.mark.parametrize(("engine", "theirs", "ours"), [("zero2", 4 + 16 / 8, 2 + 12 / 8), ("zero3", 18 / 8, 16 / 8)])
def test_model_states_beside_deepspeeds_own_estimate(engine: str, theirs: float, ours: float) -> None:
    """``estimate_zero2_model_states_mem_needs``: 4 N + 16 N / d, whole gradients among it; ``estimate_zero3_...``:
    18 N / d. What is counted here between steps is below, and with the step's fp32 gradients ZeRO-3 is above."""
    from bridge_memory.estimation import _Stages

    run = run_of(engine, ranks=8, dtype="bf16", deepspeed=DeepSpeedOptions(stage3_param_persistence_threshold=0))
    state = _Stages(run)[0].state
    bucket = sum(n for line, n in state.amounts if line.name == "bucket of gradients")
    kept = sum(n for _, n in state.amounts) - bucket - state.fresh
    assert kept / state.parameters == pytest.approx(ours, rel=0.002)
    assert kept < theirs * state.parameters
    if engine == "zero3":
        assert kept + state.in_step > theirs * state.parameters


def test_zero3_with_the_optimizer_on_the_host_keeps_fp32_gradients() -> None:
    """On the CPU both are one memory: what is on the GPU and what is in host memory add up to what the real one has."""
    near = {"stage3_param_persistence_threshold": 1000, "sub_group_size": 150_000}
    found = real(3, extra={"zero_force_ds_cpu_optimizer": False}, **near,
                 offload_optimizer={"device": "cpu", "pin_memory": False})
    run = run_of("zero3", ranks=RANKS, dtype="bf16", deepspeed=options(
        **near, offload_optimizer_device="cpu", offload_optimizer_pin_memory=False))
    assert 0 <= found.after_step - expected(run)["state"] - sum(n for _, n in on_the_host(run)) <= BESIDE


@pytest.mark.parametrize(("stage", "accumulated", "overlaps", "rank"), [(1, "fp32", False, 0), (2, None, True, 1)])
def test_gradients_go_to_an_optimizer_on_the_host(
    stage: int, accumulated: str | None, overlaps: bool, rank: int
) -> None:
    """One after the other, but for an fp32 partition, into which reductions are added on the GPU. Of the rank with the
    highest peak, less what is in host memory, which on the CPU is the same."""
    extra = {"zero_force_ds_cpu_optimizer": False, "data_types": {"grad_accum_dtype": accumulated}}
    found = real(stage, rank=rank, extra=extra, overlap_comm=overlaps,
                 offload_optimizer={"device": "cpu", "pin_memory": False})
    run = run_of(f"zero{stage}", ranks=RANKS, dtype="bf16", deepspeed=options(
        overlap_comm=overlaps, grad_accum_dtype=accumulated, offload_optimizer_device="cpu",
        offload_optimizer_pin_memory=False))
    ours, host = expected(run), sum(n for _, n in on_the_host(run))
    assert 0 <= found.after_step - host - (ours["state"] - ours["fresh"]) <= BESIDE
    assert ours["forward"] == pytest.approx(found.forward - host, rel=0.01)
    assert ours["backward"] == pytest.approx(found.backward - host, rel=0.01)


def on_the_host(run: Any) -> tuple[tuple[str, int], ...]:
    from bridge_memory.estimation import _Stages

    host: tuple[tuple[str, int], ...] = _Stages(run)[0].state.host
    return host


@pytest.mark.parametrize(("ratio", "size", "stay"), [(0.3, 10**9, 0), (0.5, 10**8, 2 / 5), (0.3, 10**8, 3 / 5)])
def test_a_ratio_of_zero3s_optimizer_is_of_whole_sub_groups(ratio: float, size: int, stay: float) -> None:
    """``stage3.py: _create_fp32_partitions``: int((1 - ratio) n) of n sub-groups stay, with an fp32 gradient each
    (``initialize_optimizer_states``). One sub-group is on the host whatever the ratio."""
    from bridge_memory.spec import ParallelSpec, RunSpec

    run = RunSpec(model="meta-llama/Llama-3.1-8B", parallel=ParallelSpec(world_size=16)).with_fields(
        engine="zero3", params_dtype="bf16", offload_optimizer_device="cpu", offload_optimizer_ratio=ratio,
        sub_group_size=size,
    )
    mains = 16 * 8_030_261_248 / 16
    there = sum(n for name, n in on_the_host(run) if not name.startswith("gradients"))
    assert there == pytest.approx((1 - stay) * mains, rel=0.1 if stay else 0.001)
    here = expected(run)["state"] - expected(run.with_fields(offload_optimizer_ratio=1.0))["state"]
    assert here + there == pytest.approx(mains, rel=0.001) and bool(here) is bool(stay)
