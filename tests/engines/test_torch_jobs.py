"""Phases of a job beside the step, beside torch's real engines and the real DeepSpeed on CPU, as the Trainer and
accelerate run them. Where deepspeed or accelerate is not installed these are skipped."""

from __future__ import annotations

import json
from typing import Any

import forked
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch_job_oracle as oracle  # noqa: E402
from real_engines import LAYERS, run_of  # noqa: E402

from bridge_memory.engines.by_name import engine_of  # noqa: E402
from bridge_memory.engines.torch_modules import BROADCAST_BUCKET, broadcast_buffers  # noqa: E402
from bridge_memory.job.megatron.loading import How  # noqa: E402
from bridge_memory.job.torch.building import building, made, rank_of  # noqa: E402
from bridge_memory.job.torch.evaluation import evaluation  # noqa: E402
from bridge_memory.job.torch.loading import loading  # noqa: E402
from bridge_memory.job.torch.saving import saving  # noqa: E402
from bridge_memory.outside.amount import Amount, Range, total  # noqa: E402
from bridge_memory.spec import DeepSpeedOptions, FSDPOptions  # noqa: E402

#: What is no copy of parameters: the number of steps of each parameter, which is on the CPU, the rotary frequencies.
BESIDE = (3 + 9 * LAYERS) * 512 + 2048


def near(found: Range, real: int, *, within: float = 0.003) -> bool:
    return found.least * (1 - within) <= real <= found.most * (1 + within) + BESIDE


def without_cache(amounts: tuple[Amount, ...]) -> Range:
    return total(a for a in amounts if not a.name.startswith("keys and values"))


def check(run: Any, real: oracle.Found) -> None:
    for name, amounts in {
        "build": building(run, 0), "resume": loading(run, 0, How.RESUME), "save": saving(run, 0),
    }.items():  # fmt: skip
        if name in real:
            assert near(total(amounts), real[name]), (name, total(amounts), real[name])
    (least, most) = without_cache(evaluation(run, 0))
    assert least == most == pytest.approx(real["evaluation"], rel=0.01)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ddp(dtype: str) -> None:
    check(run_of("ddp", dtype={"float32": "fp32", "bfloat16": "bf16"}[dtype]), oracle.ddp(dtype))


def test_ddp_sends_frozen_weights_in_flat_tensors() -> None:
    """More than all buckets of what trains: here of none but the last norm."""
    found = oracle.ddp_of_frozen()
    whole = 4 * sum(p.numel() for p in oracle.a_model("float32").parameters())
    assert found["build"] == pytest.approx(2 * whole, rel=0.001)
    sizes = [4 * p.numel() for p in oracle.a_model("float32").parameters()]
    assert broadcast_buffers(sizes) == pytest.approx(whole, rel=0.001)
    assert broadcast_buffers([BROADCAST_BUCKET] * 3) == 0  # each is its own flat tensor
    assert broadcast_buffers([BROADCAST_BUCKET // 2] * 8) == 2 * BROADCAST_BUCKET


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_fsdp2(tied: bool) -> None:
    """A range between accelerate's two ways; the one by parameters loads a tied table twice."""
    pytest.importorskip("accelerate")
    config = {"tie_word_embeddings": tied}
    run = run_of("fsdp2", ranks=2, config=config)
    ways = [oracle.fsdp2(2, efficient=efficient, config=config) for efficient in (False, True)]
    for real in ways:
        check(run, real)
        # By a step on gradients of zeros, and then by new states beside those.
        resumed = total(loading(run, 0, How.RESUME)).most
        assert resumed == pytest.approx(max(real["states"], real["resume"]), rel=0.001)
    assert total(building(run, 0)) == pytest.approx(sorted(real["build"] for real in ways), rel=0.001)


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "float32"), (4, "bfloat16")])
def test_fsdp1(ranks: int, dtype: str) -> None:
    run = run_of("fsdp1", ranks=ranks, dtype={"float32": "fp32", "bfloat16": "bf16"}[dtype])
    real = oracle.fsdp1(ranks, dtype=dtype)
    check(run, real | {"save": max(real["save"], real["save optimizer"])})


def test_fsdp1_with_original_parameters() -> None:
    real = oracle.fsdp1(2, original=True)
    assert near(total(building(run_of("fsdp1", ranks=2, fsdp=FSDPOptions(use_orig_params=True)), 0)), real["build"])


def zero(stage: int, **given: Any) -> oracle.Found:
    pytest.importorskip("deepspeed")
    program = (
        "import warnings, json; warnings.simplefilter('ignore')\n"
        "import sys; sys.path.insert(0, 'tests/engines')\n"
        "from torch_job_oracle import zero\n"
        f"print('MEASURED', json.dumps(zero({stage}, **{given!r})))\n"
    )
    done = forked.run(program, "torch", "transformers", "deepspeed")
    line = next((line for line in done.stdout.splitlines() if line.startswith("MEASURED")), None)
    assert line is not None, done.stderr[-2000:]
    found: oracle.Found = json.loads(line.removeprefix("MEASURED"))
    return found


def of_zero(stage: int, **options: Any) -> Any:
    deepspeed = DeepSpeedOptions(reduce_bucket_size=oracle.BUCKET, **options)
    return run_of(f"zero{stage}", ranks=2, dtype="bf16", deepspeed=deepspeed)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2(stage: int) -> None:
    check(of_zero(stage), zero(stage, rank=stage - 1))


def test_the_bf16_optimizer_of_zero1() -> None:
    check(of_zero(1, grad_accum_dtype="fp32"), zero(1, extra={"data_types": {"grad_accum_dtype": "fp32"}}))


def test_zero3_partitions_parameters_as_they_are_made() -> None:
    """Of transformers without a dtype each is made in fp32; ``load`` gathers one module after the other."""
    near_ones = {"stage3_prefetch_bucket_size": 200_000, "stage3_param_persistence_threshold": 1000,
                 "stage3_max_live_parameters": 1_000_000, "stage3_max_reuse_distance": 1_000_000}  # fmt: skip
    run, real = of_zero(3, **near_ones), zero(3, **near_ones)
    check(run, real)
    every = engine_of(run).weights(rank_of(run, 0).model)
    assert made(every, 2, 4) == pytest.approx(real["init"], rel=0.001) and made(every, 2, 0) < real["init"]
    assert total(loading(run, 0, How.HUGGING_FACE)).most == pytest.approx(real["load"], rel=0.001)
