"""What must hold between two runs that differ in one thing, whatever the model."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parameters_of import stage_parameters
from spec_groups import groups_of

from bridge_memory.estimation import Estimate, estimate, stage_parts
from bridge_memory.readers import resolve_model
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    ImplementationSpec,
    ModelSpec,
    ParallelSpec,
    PrecisionSpec,
    RecomputeSpec,
    RunSpec,
    SpecError,
)

DENSE = ("meta-llama/Llama-3.2-1B", "google/gemma-2-2b", "openai-community/gpt2", "bigscience/bloom")
EXPERTS = (
    "deepseek-ai/DeepSeek-V2-Lite", "openai/gpt-oss-20b", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "zai-org/GLM-4.5-Air", "allenai/OLMoE-1B-7B-0924",
)  # fmt: skip
HYBRID = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"


def first_layers(name: str, count: int = 6) -> ModelSpec:
    model = resolve_model(name)
    return replace(model, layers=model.layers[:count])


MODELS = st.sampled_from([first_layers(name) for name in (*DENSE, *EXPERTS, HYBRID)])
PIPELINE_MODELS = st.sampled_from([first_layers(name) for name in (*DENSE, *EXPERTS)])
IMPLEMENTATIONS = st.builds(
    ImplementationSpec,
    attention_backend=st.sampled_from(["auto", "flash", "unfused"]),
    bias_activation_fusion=st.booleans(), apply_rope_fusion=st.booleans(), moe_permute_fusion=st.booleans(),
    moe_router_dtype=st.sampled_from([None, "fp32"]), moe_shared_expert_overlap=st.booleans(),
    gpu_arch=st.sampled_from(["ampere", "hopper", "blackwell"]),
)  # fmt: skip
PRECISIONS = st.sampled_from(
    [PrecisionSpec(), PrecisionSpec(params_dtype="fp16"), PrecisionSpec(fp8="e4m3", fp8_recipe="mxfp8")]
)
#: Without core_attn: flash attention keeps no scores to save, and its checkpoint keeps the whole mixed q, k and v.
MODULES = st.sampled_from(["moe_act", "layernorm", "mlp", "moe", "shared_experts"])


def run(model: ModelSpec, *, sequences: int = 1, parallel: ParallelSpec | None = None, **more: object) -> Estimate:
    batch = BatchSpec(seq_length=1024, micro_batch_size=sequences)
    try:
        return estimate(RunSpec(model=model, batch=batch, parallel=parallel or ParallelSpec(), **more))
    except SpecError:
        assume(False)
        raise


def saved(found: Estimate) -> int:
    """What one microbatch keeps on the first stage between its passes, whenever the peak is."""
    return sum(chunk.retained for chunk in stage_parts(found.run, 0).inventories)


@settings(max_examples=60, deadline=None)
@given(MODELS, IMPLEMENTATIONS, PRECISIONS)
def test_twice_the_sequences_save_twice_the_bytes(model, implementation, precision) -> None:
    """All that a layer saves is a multiple of its tokens; the rotary angles of an unfused rope alone serve them all,
    and the mask of an unfused softmax, such as one with sinks.
    From two on: FlashAttention copies its tensors into [b, s] order, which for one sequence is theirs already. In fp8
    the rows of experts are rounded up."""
    assume(implementation.apply_rope_fusion and not model.yarn)
    mixers = {layer.mixer for layer in model.layers}
    sinks = any(isinstance(mixer, AttentionSpec) and mixer.learnable_softmax_sink for mixer in mixers)
    assume(implementation.attention_backend != "unfused" or not sinks)
    assume(precision.fp8 is None or not model.has_experts)
    one, two = (run(model, sequences=b, implementation=implementation, precision=precision) for b in (2, 4))
    assert saved(two) == 2 * saved(one)


@settings(max_examples=60, deadline=None)
@given(PIPELINE_MODELS, IMPLEMENTATIONS, PRECISIONS, st.sets(MODULES, min_size=1, max_size=2))
def test_recomputing_more_saves_less(model, implementation, precision, modules) -> None:
    def kept(recompute: RecomputeSpec) -> int:
        return saved(run(model, implementation=implementation, precision=precision, recompute=recompute))

    selective = kept(RecomputeSpec(granularity="selective", modules=tuple(sorted(modules))))
    full = kept(RecomputeSpec(granularity="full", method="uniform", num_layers=1))
    assert full < selective <= kept(RecomputeSpec())


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([first_layers(name) for name in DENSE]), IMPLEMENTATIONS, st.sampled_from([2, 4]))
def test_sequence_parallelism_only_divides(model, implementation, tp) -> None:
    """On an even pipeline stage it takes a share of every replicated tensor and adds none that is saved."""
    on, off = (
        run(model, implementation=implementation, parallel=ParallelSpec(
            world_size=tp, tensor_model_parallel_size=tp, sequence_parallel=flag))
        for flag in (True, False)
    )  # fmt: skip
    assert saved(on) < saved(off)
    assert on.stages[0].parameters == off.stages[0].parameters


@settings(max_examples=40, deadline=None)
@given(MODELS, st.sampled_from([1, 2, 3, 4]), st.booleans(), st.sampled_from(["adam", "sgd"]))
def test_more_replicas_never_hold_more_of_the_optimizer(model, replicas, distributed, optimizer) -> None:
    """Beyond the padding of a bucket's end to the shards, 128 elements x 12 bytes."""

    def held(world: int) -> int:
        groups = groups_of(use_distributed_optimizer=distributed, optimizer=optimizer)
        return run(model, parallel=ParallelSpec(world_size=world), **groups).stages[0].optimizer_bytes

    more, fewer = held(2 * replicas), held(replicas)
    if not distributed:
        assert more == fewer
    else:
        assert abs(2 * more - fewer) <= 4 * 128 * 12 * 2


@settings(max_examples=40, deadline=None)
@given(MODELS, st.sampled_from([1, 2]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_shards_add_up_to_the_whole(model, tp, ep, etp) -> None:
    """Divided parameters times their ranks, and replicated ones once, make the unsharded model. Left out: OLMoE, whose
    norm over all heads is as wide as a rank's heads without being a divided parameter of Megatron's."""
    assume(model.has_experts or ep == etp == 1)
    assume("OLMoE" not in model.name)

    def total(tp: int, ep: int, etp: int) -> int:
        padded = replace(model, make_vocab_size_divisible_by=512 // tp)
        spec = RunSpec(model=padded, parallel=ParallelSpec(
            world_size=tp * ep * etp, tensor_model_parallel_size=tp, expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp))  # fmt: skip
        return sum(
            p.numel * (ep * (etp if p.sharded else 1) if p.expert else tp if p.sharded else 1)
            for chunk in stage_parameters(spec, 0) for p in chunk
        )

    try:
        assert total(tp, ep, etp) == total(1, 1, 1)
    except SpecError:
        assume(False)


@settings(max_examples=30, deadline=None)
@given(PIPELINE_MODELS, IMPLEMENTATIONS)
def test_equal_stages_differ_only_by_the_microbatches_in_flight(model, implementation) -> None:
    """Twelve equal layers over four stages: the two in the middle hold the same state, and what one microbatch saves
    times 3 and 2."""
    model = replace(model, layers=(model.layers[-1],) * 12)
    parallel = ParallelSpec(world_size=4, pipeline_model_parallel_size=4)
    _, second, third, _ = run(model, implementation=implementation, parallel=parallel).stages
    assert second.weights_bytes == third.weights_bytes and second.optimizer_bytes == third.optimizer_bytes
    assert second.static_bytes == third.static_bytes
    assert 2 * second.activation_bytes == 3 * third.activation_bytes
