"""Thousands of random runs: an estimate that adds up, or one line that names a field. Nothing else."""

from __future__ import annotations

import re
from dataclasses import fields

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_groups import groups_of

from bridge_memory.components import Provenance, Role
from bridge_memory.estimate import estimate
from bridge_memory.readers import list_presets, resolve_model
from bridge_memory.readers.huggingface import model_from_hf_config
from bridge_memory.readers.resolve import resolve_config
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    GatedDeltaNetSpec,
    ImplementationSpec,
    LayerSpec,
    MambaSpec,
    MLASpec,
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

SIZES = st.sampled_from([1, 1, 1, 2, 2, 4, 8, 3, 16])
MODELS = [
    "meta-llama/Llama-3.2-1B", "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V2-Lite", "openai/gpt-oss-20b",
    "google/gemma-2-2b", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct", "openai-community/gpt2",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "zai-org/GLM-4.5-Air", "bigscience/bloom",
]
#: Every name a refusal may blame: the fields of the spec, and the flags and keys that stand for them.
FIELDS = {
    f.name
    for cls in (
        ModelSpec, LayerSpec, AttentionSpec, MLASpec, MambaSpec, GatedDeltaNetSpec, MLPSpec, MoESpec, RunSpec,
        ParallelSpec, BatchSpec, PrecisionSpec, OptimizerSpec, RecomputeSpec, ImplementationSpec,
    )
    for f in fields(cls)
} | {
    "recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules", "num_layers",
    "num_moe_experts", "data_parallel_size", "moe_router_topk",
}


def maybe(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | values


PARALLEL = st.fixed_dictionaries(
    {
        "world_size": st.sampled_from([1, 2, 4, 8, 16, 64, 96, 128]),
        "tensor_model_parallel_size": SIZES,
        "pipeline_model_parallel_size": SIZES,
        "virtual_pipeline_model_parallel_size": maybe(st.sampled_from([1, 2, 3, 4])),
        "context_parallel_size": st.sampled_from([1, 1, 2, 4]),
        "expert_model_parallel_size": st.sampled_from([1, 1, 2, 8]),
        "expert_tensor_parallel_size": maybe(st.sampled_from([1, 2])),
        "sequence_parallel": maybe(st.booleans()),
        "num_layers_in_first_pipeline_stage": maybe(st.integers(0, 20)),
        "num_layers_in_last_pipeline_stage": maybe(st.integers(0, 20)),
        "account_for_embedding_in_pipeline_split": st.booleans(),
        "account_for_loss_in_pipeline_split": st.booleans(),
        "microbatch_group_size_per_vp_stage": maybe(st.integers(1, 8)),
    }
)
BATCH = st.fixed_dictionaries(
    {
        "seq_length": st.sampled_from([128, 1000, 4096, 8192]),
        "micro_batch_size": st.sampled_from([1, 2, 3]),
        "global_batch_size": maybe(st.sampled_from([1, 8, 64, 96, 512])),
    }
)
PRECISION = st.fixed_dictionaries(
    {
        "params_dtype": st.sampled_from(["bf16", "bf16", "fp16", "fp32"]),
        "fp8": maybe(st.sampled_from(["hybrid", "e4m3"])),
        "fp8_recipe": st.sampled_from(["delayed", "tensorwise", "blockwise", "mxfp8"]),
        "fp8_param": st.booleans(),
    }
)
OPTIMIZER = st.fixed_dictionaries(
    {
        "optimizer": st.sampled_from(["adam", "sgd", "muon"]),
        "use_distributed_optimizer": st.booleans(),
        "grad_reduce_in_fp32": st.booleans(),
        "overlap_grad_reduce": st.booleans(),
        "use_precision_aware_optimizer": st.booleans(),
        "exp_avg_dtype": st.sampled_from(["fp32", "bf16", "fp8"]),
        "optimizer_cpu_offload": st.booleans(),
        "optimizer_offload_fraction": st.sampled_from([0.0, 0.5, 1.0]),
    }
)
RECOMPUTE = st.fixed_dictionaries(
    {
        "granularity": maybe(st.sampled_from(["full", "selective"])),
        "method": maybe(st.sampled_from(["uniform", "block"])),
        "num_layers": maybe(st.integers(0, 5)),
        "modules": st.lists(
            st.sampled_from(["core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"]),
            unique=True,
        ).map(tuple),
    }
)
IMPLEMENTATION = st.fixed_dictionaries(
    {
        "transformer_impl": st.sampled_from(["transformer_engine", "local"]),
        "attention_backend": st.sampled_from(["auto", "flash", "fused", "unfused"]),
        "bias_activation_fusion": st.booleans(),
        "bias_dropout_fusion": st.booleans(),
        "gradient_accumulation_fusion": st.booleans(),
        "cross_entropy_loss_fusion": st.booleans(),
        "cross_entropy_fusion_impl": st.sampled_from(["native", "te", "linear"]),
        "moe_token_dispatcher_type": st.sampled_from(["alltoall", "allgather", "flex"]),
        "moe_grouped_gemm": st.booleans(),
        "moe_permute_fusion": st.booleans(),
        "moe_imbalance": st.sampled_from([1.0, 1.5]),
        "moe_shared_expert_overlap": st.booleans(),
    }
)


def check_adds_up(run: RunSpec) -> None:
    result = estimate(run)
    assert len(result.stages) == run.parallel.pp
    assert sorted(i for s in result.stages for i in s.layers) == list(range(run.model.num_layers))
    for stage in result.stages:
        assert all(type(c.role) is Role and type(c.provenance) is Provenance for c in stage.components)
        assert all(c.bytes >= 0 and isinstance(c.bytes, int) for c in stage.components)
        parts = (
            stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes + stage.buffers_bytes
            + stage.activation_bytes + stage.transient_bytes
        )
        assert stage.peak_bytes == parts == sum(c.bytes for c in stage.components)
        assert stage.static_bytes <= stage.peak_bytes
        assert stage.parameters >= 0
    assert result.peak_stage.peak_bytes == max(s.peak_bytes for s in result.stages)


def check_refusal(error: SpecError) -> None:
    text = str(error)
    assert text and "\n" not in text
    named = set(re.findall(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)+|[a-z0-9]+", text))
    assert named & FIELDS, f"names no field: {text}"


@settings(max_examples=2500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(MODELS), PARALLEL, BATCH, PRECISION, OPTIMIZER, RECOMPUTE, IMPLEMENTATION, st.data()
)
def test_a_random_run_adds_up_or_is_refused(name, parallel, batch, precision, optimizer, recompute, impl, data) -> None:
    # Most combinations of everything contradict themselves; vary a few groups at a time.
    use = data.draw(st.sets(st.sampled_from(["batch", "precision", "optimizer", "recompute", "impl"]), max_size=2))
    if data.draw(st.integers(0, 3)):
        keep = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"}
        keep.add(data.draw(st.sampled_from(sorted(parallel))))
        if resolve_model(name).has_experts:
            keep.add("expert_model_parallel_size")
        world = parallel["world_size"]
        parallel = {k: v for k, v in parallel.items() if k in keep}
        if parallel["pipeline_model_parallel_size"] == 1:
            del parallel["virtual_pipeline_model_parallel_size"]
        for size in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
            world *= parallel.get(size, 1)
        parallel["world_size"] = world
    try:
        run = RunSpec(
            model=resolve_model(name),
            parallel=ParallelSpec(**parallel),
            batch=BatchSpec(**batch) if "batch" in use else BatchSpec(),
            precision=PrecisionSpec(**precision) if "precision" in use else PrecisionSpec(),
            **groups_of(**(optimizer if "optimizer" in use else {})),
            recompute=RecomputeSpec(**recompute) if "recompute" in use else RecomputeSpec(),
            implementation=ImplementationSpec(**impl) if "impl" in use else ImplementationSpec(),
        )
        check_adds_up(run)
    except SpecError as error:
        check_refusal(error)


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 1 << 50), st.floats(allow_nan=True), st.text(max_size=8),
    st.lists(st.integers(-2, 5), max_size=3), st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@settings(max_examples=800, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list_presets()), st.data())
def test_a_damaged_config_estimates_or_is_refused(name: str, data: st.DataObject) -> None:
    """One or two keys of a real config removed or replaced by junk."""
    config = dict(resolve_config(name)[1])
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=2, unique=True)):
        if data.draw(st.booleans()):
            del config[key]
        else:
            config[key] = data.draw(JUNK)
    try:
        model = model_from_hf_config(config, name)
        if model.num_layers <= 512:
            check_adds_up(RunSpec(model=model))
    except SpecError as error:
        assert str(error) and "\n" not in str(error)
