"""Phases against the kept rows of post-training runs (``tests/data/rollout/runs.jsonl``): those whose configuration is
stated. ``MISSES`` says which do not agree, and why."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bridge_memory import ParallelSpec, RunSpec, find_gpu
from bridge_memory.components import GIB
from bridge_memory.outside.amount import Range, total
from bridge_memory.outside.context import outside
from bridge_memory.outside.phase import Phase as JobPhase
from bridge_memory.rollout.answer import Rollout, answer
from bridge_memory.rollout.log import _bytes, compare, readings_of
from bridge_memory.rollout.phases import Phase
from bridge_memory.rollout.sources.verl import read_verl
from bridge_memory.rollout.trainer import of_reference, states

DATA = Path(__file__).parents[1] / "data/rollout/runs.jsonl"
ROWS: dict[int, dict[str, Any]] = {
    row["id"]: row for row in map(json.loads, DATA.read_text().splitlines())
}  # fmt: skip
#: Row -> why it is missed.
MISSES = {
    "reference of id 10": "its 16 rows a micro batch are counted at their longest, 6,400 tokens; they were shorter",
    "allocated of id 1": "an NPU: the workspaces of Transformer Engine and cuBLAS (0.29 GiB) are not what it keeps",
}
#: "allocated phases within 3 %, driver phases within 8 %".
ALLOCATED, DRIVER = 0.03, 0.08


def megatron_at_tp2(**more: str) -> list[str]:
    """The configuration of rows 0 to 10, as far as it is stated."""
    return [
        "model_engine=megatron",
        "algorithm.adv_estimator=grpo",
        "data.max_prompt_length=1280",
        "data.max_response_length=5120",
        "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.ref.megatron.param_offload=True",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.7",
    ]


@cache
def small() -> Rollout:
    card = replace(find_gpu("A100-80GB"), capacity_bytes=int(63.59 * GIB))
    return answer(read_verl("0.7", megatron_at_tp2()), card)


def within(measured: float, predicted: Range, share: float) -> bool:
    return predicted.least / GIB * (1 - share) <= measured <= predicted.most / GIB * (1 + share)


def test_rows_are_what_they_were() -> None:
    assert len(ROWS) == 95 or len(ROWS) == 99, "a row was added: pose it here, or say why it cannot be"


def test_the_reference_is_loaded_for_its_pass() -> None:
    """Rows 3 and 4: 41.76 - 41.21 GiB for the reference's bf16 weights on two ranks."""
    loaded = ROWS[4]["allocated"] - ROWS[3]["allocated"]
    found = total(of_reference(small().setup.reference_run(), 0)).most / GIB
    assert loaded == pytest.approx(found, abs=0.01)


@pytest.mark.parametrize(
    ("phase", "measured"),
    [(Phase.SLEEP, ROWS[1]["driver_used"]), (Phase.ROLLOUT, ROWS[0]["driver_used"]),
     *((phase, ROWS[10]["extra"]["pct"][name] / 100 * 63.59) for name, phase in (
         ("rollout", Phase.ROLLOUT), ("actor_log_prob", Phase.LOG_PROBS), ("training", Phase.UPDATE)))],
)  # fmt: skip
def test_what_the_driver_counted(phase: Phase, measured: float) -> None:
    """Rows 0, 1 and 10: verl 0.7, Qwen3-0.6B at TP 2 on eight cards of 63.59 GiB, nothing offloaded."""
    found = small().phase(phase)
    assert found is not None
    assert within(measured, found.driver, DRIVER), (measured, found.driver.least / GIB, found.driver.most / GIB)


def test_a_pass_at_its_longest_is_a_bound() -> None:
    """Row 10's pass of the reference, and row 9's peak of a step without the pool."""
    reference = small().phase(Phase.REFERENCE)
    assert reference is not None and "reference of id 10" in MISSES
    assert ROWS[10]["extra"]["pct"]["ref_log_prob"] / 100 * 63.59 < reference.driver.most / GIB
    assert ROWS[9]["allocated"] - 38.31 < total(reference.allocated).most / GIB


def test_a_log_gives_the_slept_pool() -> None:
    """Rows 0, 1 and 4 as verl writes them: of 41.21 GiB allocated 38.31 are the pool's, since the driver lost 40.13 and
    torch's cache 1.82; 2.90 are the trainer's."""
    text = "\n".join(
        f"{head}, memory allocated (GB): {row['allocated']}, memory reserved (GB): {row['reserved']}, "
        f"device memory used/total (GB): {row['driver_used']}/{row['driver_total']}"
        for head, row in (("Before rollout offload", ROWS[0]), ("After rollout offload", ROWS[1]),
                          ("After load ref params during compute_ref_log_prob", ROWS[4]))
    )  # fmt: skip
    lines, pool = compare(small(), readings_of(text))
    assert pool == pytest.approx(38.31 * GIB, abs=0.03 * GIB)
    by_moment = {line.moment: line for line in lines}
    asleep = by_moment["asleep"]
    assert asleep.reading.allocated is not None
    assert asleep.reading.allocated == pytest.approx(2.90 * GIB, abs=0.03 * GIB)
    assert asleep.allocated is not None and asleep.driver is not None and "allocated of id 1" in MISSES
    lasting = total(states(small().setup.update_run(), 0).lasting).most
    assert asleep.allocated.most - lasting < asleep.reading.allocated < asleep.allocated.most * 1.06
    reference = by_moment["reference"]
    assert reference.allocated is not None and reference.reading.allocated is not None
    assert reference.reading.allocated - asleep.reading.allocated == pytest.approx(
        reference.allocated.most - asleep.allocated.most, abs=0.02 * GIB
    )


def test_gradients_are_twice_the_parameters() -> None:
    """Rows 15 and 17: loading parameters took 6.85 GiB, parameters and gradients 20.56."""
    own = states(small().setup.update_run(), 0)
    ratio = (ROWS[17]["allocated"] - ROWS[16]["allocated"]) / (ROWS[15]["allocated"] - ROWS[14]["allocated"])
    found = total([*own.parameters, *own.gradients]).most / total(own.parameters).most
    assert ratio == pytest.approx(found, rel=ALLOCATED)


@pytest.mark.parametrize(
    ("row", "model", "gpus", "words"),
    [
        (25, "Qwen/Qwen3-4B", 1, "actor_rollout_ref.actor.fsdp_config.model_dtype=bf16"),
        (43, "Qwen/Qwen2.5-7B", 8, ""),
    ],
)
def test_shards_of_fsdp(row: int, model: str, gpus: int, words: str) -> None:
    """Rows 25 and 43: weights alone, once wrapped."""
    run = read_verl("0.9", f"""
        actor_rollout_ref.model.path={model} trainer.n_gpus_per_node={gpus} algorithm.adv_estimator=grpo
        actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1
        actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1
        actor_rollout_ref.rollout.tensor_model_parallel_size=1 {words}
    """.split()).update_run()  # fmt: skip
    assert ROWS[row]["allocated"] == pytest.approx(total(states(run, 0).parameters).most / GIB, rel=ALLOCATED)


@pytest.mark.parametrize(("row", "model", "ep"), [(49, "Qwen/Qwen3-8B", 1), (50, "Qwen/Qwen3-30B-A3B", 4)])
def test_communicators_of_an_idle_trainer(row: int, model: str, ep: int) -> None:
    """Rows 49 and 50: 7.0 and 9.5 GiB a rank on 8 H100 at TP 2, PP 2."""
    parallel = ParallelSpec(
        world_size=8,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=1 if ep > 1 else None,
    )
    run = RunSpec(model=model, parallel=parallel)
    found = [total(outside(run, find_gpu("H100"), stage, JobPhase.TRAINING)) for stage in (0, 1)]
    assert within(
        ROWS[row]["driver_used"], Range(min(one.least for one in found), max(one.most for one in found)), DRIVER
    )


def test_gigabytes_of_a_log_are_binary() -> None:
    assert _bytes("1.5") == 3 * GIB // 2
