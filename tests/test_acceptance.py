"""Figures that a user of Megatron would check first, each from somewhere else than this code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bridge_memory.estimation import Estimate, estimate
from bridge_memory.inventory.counts import model_parameters
from bridge_memory.readers import list_presets, resolve_model
from bridge_memory.spec import (
    BatchSpec,
    DataParallelSpec,
    ImplementationSpec,
    OptimizerSpec,
    ParallelSpec,
    RecomputeSpec,
    RunSpec,
)

GIB = 2**30
PUBLISHED = json.loads((Path(__file__).parent / "data" / "hf_parameter_counts.json").read_text())


def _estimate(model: str, **groups: object) -> Estimate:
    return estimate(RunSpec(model=resolve_model(model), **groups))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_has_its_published_parameter_count(name: str) -> None:
    """Counts by transformers on the meta device (hf_parameter_counts.json), exact to the element."""
    model = resolve_model(name)
    assert model_parameters(model)[0] == PUBLISHED[name]["parameters"]


@pytest.mark.parametrize(
    ("name", "published"),
    [("deepseek-ai/DeepSeek-V3", 11.61e9), ("zai-org/GLM-4.5", 3.99e9), ("zai-org/GLM-4.5-Air", 2.38e9)],
)
def test_mtp_adds_what_the_model_cards_say(name: str, published: float) -> None:
    assert model_parameters(resolve_model(name))[1] == pytest.approx(published, abs=0.005e9)


def test_the_deepseek_v3_recipe_on_1024_gpus_peaks_at_8_51_gib_of_state() -> None:
    """NVIDIA's recipe (TP2 PP16 EP64, bf16 gradients and moments, parameter remainders): stages 1 to 14 hold
    most, 8.51 GiB of weights, gradients and optimizer state; Bridge's own estimator says 17.05."""
    result = _estimate(
        "deepseek-ai/DeepSeek-V3",
        parallel=ParallelSpec(
            world_size=1024, tensor_model_parallel_size=2, pipeline_model_parallel_size=16,
            expert_model_parallel_size=64, expert_tensor_parallel_size=1,
            pipeline_model_parallel_layout="Etttt|(tttt|)*14tmL",
        ),
        data_parallel=DataParallelSpec(grad_reduce_in_fp32=False),
        optimizer=OptimizerSpec(
            use_precision_aware_optimizer=True, main_grads_dtype="bf16",
            exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16",
        ),
        batch=BatchSpec(seq_length=4096, global_batch_size=8192),
    )
    state = [s.weights_bytes + s.gradients_bytes + s.optimizer_bytes for s in result.stages]
    assert max(state) / GIB == pytest.approx(8.51, abs=0.005)
    assert [i for i, b in enumerate(state) if b == max(state)] == list(range(1, 15))


def test_the_last_of_four_stages_holds_the_logits() -> None:
    """Unfused cross entropy, Llama-3-8B at s 8192: bf16 logits and their fp32 softmax, 6 x 8192 x 128256 bytes
    = 5.87 GiB, and only there."""
    logits = 6 * 8192 * 128256
    assert logits / GIB == pytest.approx(5.87, abs=0.005)
    groups = {
        "parallel": ParallelSpec(world_size=4, pipeline_model_parallel_size=4),
        "batch": BatchSpec(seq_length=8192, global_batch_size=16),
    }
    unfused = _estimate("meta-llama/Meta-Llama-3-8B", **groups)
    linear = _estimate(
        "meta-llama/Meta-Llama-3-8B",
        implementation=ImplementationSpec(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="linear"),
        **groups,
    )
    saved = unfused.stages[3].activation_bytes + unfused.stages[3].transient_bytes
    without = linear.stages[3].activation_bytes + linear.stages[3].transient_bytes
    # Without any logits the peak moves into the layers, which is why the difference is no more than they were.
    assert 0.5 * logits < saved - without <= logits
    for stage in range(3):
        assert unfused.stages[stage].peak_bytes == linear.stages[stage].peak_bytes


def test_full_recomputation_keeps_two_gib_where_none_keeps_36() -> None:
    """Llama-3-8B at s 8192, one GPU: 32 layer inputs of 64 MiB against 32 layers x 139,328 bytes a token."""
    batch = BatchSpec(seq_length=8192, global_batch_size=1)
    none = _estimate("meta-llama/Meta-Llama-3-8B", batch=batch)
    full = _estimate(
        "meta-llama/Meta-Llama-3-8B", batch=batch,
        recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1),
    )
    head = next(c.bytes for c in none.stages[0].components if c.name == "activations: logits and loss")

    def in_layers(e: Estimate) -> float:
        return (e.stages[0].activation_bytes - head) / GIB

    assert in_layers(full) == pytest.approx(2.0, abs=0.1)
    assert in_layers(none) == pytest.approx(32 * 139_328 * 8192 / GIB, rel=0.01)


def test_sixty_one_layers_with_sixteen_in_the_last_stage() -> None:
    result = _estimate(
        "deepseek-ai/DeepSeek-V3",
        parallel=ParallelSpec(
            world_size=128, tensor_model_parallel_size=4, pipeline_model_parallel_size=4,
            expert_model_parallel_size=8, expert_tensor_parallel_size=1, num_layers_in_last_pipeline_stage=16,
        ),
    )
    assert [len(s.layers) for s in result.stages] == [15, 15, 15, 16]
    # The three dense layers all sit on stage 0, so it has fewer parameters than its neighbours.
    assert result.stages[0].parameters < result.stages[1].parameters == result.stages[2].parameters


def test_a_light_first_and_last_stage_moves_the_peak() -> None:
    """32 layers as 2/14/14/2: the first stage no longer is the heaviest although it has most in flight."""
    batch = BatchSpec(seq_length=8192, global_batch_size=16)
    even = ParallelSpec(world_size=4, pipeline_model_parallel_size=4)
    light = replace(even, num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=2)
    assert _estimate("meta-llama/Meta-Llama-3-8B", parallel=even, batch=batch).peak_stage.stage == 0
    assert _estimate("meta-llama/Meta-Llama-3-8B", parallel=light, batch=batch).peak_stage.stage == 1


def test_one_microbatch_and_sixty_four_differ_under_vpp() -> None:
    parallel = ParallelSpec(
        world_size=4, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2
    )
    few, many = (
        _estimate(
            "meta-llama/Meta-Llama-3-8B", parallel=parallel,
            batch=BatchSpec(seq_length=8192, global_batch_size=n),
        ).stages[0].activation_bytes
        for n in (4, 64)
    )
    assert few < many


@pytest.mark.parametrize(
    ("name", "parallel", "copies"),
    [
        # Untied: nothing twice.
        ("meta-llama/Meta-Llama-3-8B", {"pipeline_model_parallel_size": 4, "world_size": 4}, 0),
        # Tied and pipelined: the output layer is a copy of the embedding.
        ("Qwen/Qwen2.5-0.5B", {"pipeline_model_parallel_size": 2, "world_size": 2}, 1),
        # Tied on one stage: the same tensor.
        ("Qwen/Qwen2.5-0.5B", {}, 0),
        # MTP on the last of several stages: a second copy of the embedding there.
        ("zai-org/GLM-4.5-Air", {"pipeline_model_parallel_size": 2, "world_size": 2}, 1),
    ],
)
def test_stages_add_up_to_the_model_and_its_copies(name: str, parallel: dict[str, int], copies: int) -> None:
    model = replace(resolve_model(name), make_vocab_size_divisible_by=0)
    result = estimate(RunSpec(model=model, parallel=ParallelSpec(**parallel)))
    embedding = model.vocab_size * model.hidden_size
    total = sum(s.parameters for s in result.stages)
    assert total == sum(model_parameters(model)) + copies * embedding
