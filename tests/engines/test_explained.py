"""Random runs of every engine: the components of a stage are the peak, none is less than nothing, and what is listed as
activations is no more than what the links that are alive there keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bridge_memory import estimate, peaks, resolve_model
from bridge_memory.components import Part, Role
from bridge_memory.spec import (
    BatchSpec,
    DataParallelSpec,
    DDPOptions,
    DeepSpeedOptions,
    FSDPOptions,
    ImplementationSpec,
    OptimizerSpec,
    ParallelSpec,
    PeftSpec,
    PrecisionSpec,
    RunSpec,
    SpecError,
)
from bridge_memory.spec.transformers import TransformersSpec

ENGINES = ("single", "ddp", "fsdp1", "fsdp2", "zero1", "zero2", "zero3", "megatron_deepspeed", "megatron_fsdp")
MODELS = (
    "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-30B-A3B", "google/gemma-2-2b", "meta-llama/Llama-3.1-8B",
)  # fmt: skip


def options(cls: type, **fields: st.SearchStrategy) -> st.SearchStrategy:
    return st.fixed_dictionaries({}, optional=fields).map(lambda chosen: (cls, chosen))


BOOLEAN = st.booleans()
DTYPE = st.sampled_from([None, "bf16", "fp32"])
DDP = options(DDPOptions, gradient_as_bucket_view=BOOLEAN, static_graph=BOOLEAN)
STRATEGY = st.sampled_from(["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
RESHARD = st.sampled_from([None, False, True])
OF_FSDP = dict(
    param_dtype=DTYPE, reduce_dtype=DTYPE,
    auto_wrap_policy=st.sampled_from(["TRANSFORMER_BASED_WRAP", "NO_WRAP", "torchtitan"]),
    forward_prefetch=BOOLEAN, offload_params=BOOLEAN,
)  # fmt: skip
ZERO = options(
    DeepSpeedOptions, stage=st.integers(0, 3), reduce_bucket_size=st.sampled_from([10**6, 5 * 10**7, 5 * 10**8]),
    overlap_comm=BOOLEAN, contiguous_gradients=BOOLEAN, reduce_scatter=BOOLEAN, round_robin_gradients=BOOLEAN,
    grad_accum_dtype=DTYPE, communication_data_type=DTYPE,
    stage3_prefetch_bucket_size=st.sampled_from([10**6, 10**8]),
    stage3_max_reuse_distance=st.sampled_from([0, 10**9]), stage3_max_live_parameters=st.sampled_from([10**6, 10**9]),
    offload_optimizer_device=st.sampled_from(["none", "cpu"]),
)  # fmt: skip
OF_ENGINE = {
    "ddp": DDP, "fsdp1": options(FSDPOptions, sharding_strategy=STRATEGY, **OF_FSDP),
    "fsdp2": options(FSDPOptions, reshard_after_forward=RESHARD, **OF_FSDP),
}  # fmt: skip
NAMES = {DDPOptions: "ddp", FSDPOptions: "fsdp", DeepSpeedOptions: "deepspeed"}


@st.composite
def runs(draw: Any) -> RunSpec | None:
    """A run of a small model's engine; None where what is drawn is refused."""
    engine = draw(st.sampled_from(ENGINES))
    of_megatron = engine in ("megatron_deepspeed", "megatron_fsdp")
    ranks = 1 if engine == "single" else draw(st.sampled_from([2, 8]))
    microbatches = draw(st.sampled_from([1, 1, 2, 4]))
    model = resolve_model(draw(st.sampled_from(MODELS)))
    few = draw(st.integers(1, 6))
    model = replace(model, layers=model.layers[:few])
    dtype = draw(st.sampled_from(["bf16", "fp32"]))
    groups: dict[str, Any] = {}
    if engine != "single" and engine != "megatron_fsdp":
        cls, chosen = draw(OF_ENGINE.get(engine, ZERO))
        if engine != "megatron_deepspeed":
            chosen.pop("stage", None)
        groups[NAMES[cls]] = (cls, chosen)
    lora = draw(st.integers(0, 3)) == 0
    targets = ("linear_qkv", "linear_proj") if of_megatron else ("q_proj", "v_proj")
    long = draw(st.sampled_from([256, 4096]))
    checkpoints = draw(BOOLEAN)
    sync = draw(BOOLEAN)
    how = draw(st.sampled_from(["foreach", "for-loop", "fused"]))
    try:
        made = {name: cls(**chosen) for name, (cls, chosen) in groups.items()}
        if not of_megatron:
            made["transformers"] = TransformersSpec(
                attn_implementation="eager" if draw(BOOLEAN) else "sdpa", gradient_checkpointing=checkpoints
            )
            made["implementation"] = ImplementationSpec(transformer_impl="transformers")
            made["optimizer"] = OptimizerSpec(optimizer="adamw", torch_implementation=how)
        run = RunSpec(
            model=model, parallel=ParallelSpec(world_size=ranks),
            batch=BatchSpec(seq_length=long, global_batch_size=microbatches * ranks),
            precision=PrecisionSpec(params_dtype=dtype),
            data_parallel=DataParallelSpec(
                engine=engine, sync_each_batch=sync and engine in OF_ENGINE,
                data_parallel_sharding_strategy="optim_grads_params" if engine == "megatron_fsdp" else None,
            ),
            peft=PeftSpec(scheme="lora", dim=8, target_modules=targets) if lora else PeftSpec(), **made,
        )
        peaks(run)
    except SpecError:
        return None
    return run


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(runs())
def test_components_of_any_engine_are_its_peak(run: RunSpec | None) -> None:
    if run is None:
        return
    (stage,) = estimate(run).stages
    (numbers,) = peaks(run)
    assert stage.peak_bytes == numbers.peak_bytes
    for component in (*stage.components, *stage.carried_over):
        assert component.bytes >= 0, component


def test_a_late_peak_lists_what_is_left_of_the_model() -> None:
    """ZeRO-2 holds most in a layer's backward, where logits, loss and final norm are over."""
    run = RunSpec(
        model="Qwen/Qwen3-30B-A3B", parallel=ParallelSpec(world_size=8),
        data_parallel=DataParallelSpec(engine="zero2"), precision=PrecisionSpec(params_dtype="bf16"),
        implementation=ImplementationSpec(transformer_impl="transformers"),
    )
    (stage,) = estimate(run).stages
    assert stage.peak_phase == "backward"
    listed = {c.part: c.bytes for c in stage.components if c.role is Role.ACTIVATION}
    assert Part.LOSS not in listed and Part.FINAL_NORM not in listed
    assert listed[Part.ATTENTION] > 0
