"""What full recomputation and layers sent to the host leave on the GPU, hand-counted from megatron-core's sources."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bridge_memory.estimation import StageEstimate, estimate
from bridge_memory.inventory.layer import layer_block
from bridge_memory.readers import resolve_model
from bridge_memory.spec import BatchSpec, ImplementationSpec, ParallelSpec, RecomputeSpec, RunSpec, SpecError
from bridge_memory.spec.parts import OFFLOAD_MODULES
from bridge_memory.tapes.context import context_of

MIB = 1 << 20
NONE = RecomputeSpec()
UNIFORM = RecomputeSpec(granularity="full", method="uniform", num_layers=1)
BLOCK = RecomputeSpec(granularity="full", method="block", num_layers=1)
LLAMA = resolve_model("meta-llama/Llama-3.2-1B")
#: h 7168, 8 of DeepSeek-V3's layers and one MTP depth.
DEEPSEEK = replace(
    resolve_model("deepseek-ai/DeepSeek-V3"), layers=resolve_model("deepseek-ai/DeepSeek-V3").layers[:8]
)


def stage(model, recompute: RecomputeSpec = NONE, *, pp: int = 1, vpp: int | None = None, **impl):
    run = RunSpec(
        model=model,
        parallel=ParallelSpec(
            world_size=pp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp
        ),
        batch=BatchSpec(seq_length=4096), recompute=recompute, implementation=ImplementationSpec(**impl),
    )
    return estimate(run).stages[0]


def saved(found: StageEstimate, *names: str) -> int:
    return sum(c.bytes for c in found.components if c.role == "activation" and any(n in c.name for n in names))


def test_uniform_recomputation_keeps_one_input_a_group() -> None:
    """16 layers of Llama-3.2-1B (h 2048, 4096 tokens: 16 MiB an input): 16 inputs, 8 in pairs, 4 in fours."""
    for size, groups in ((1, 16), (2, 8), (4, 4)):
        found = stage(LLAMA, RecomputeSpec(granularity="full", method="uniform", num_layers=size))
        assert saved(found, "layer input (recomputation)") == groups * 16 * MIB


def test_block_recomputation_counts_in_every_virtual_chunk() -> None:
    """Two of the four layers of each chunk: on stage 0 of pp 2, vpp 2 chunks 0 and 1 keep two inputs a microbatch.
    With 4 microbatches the warm-up is 2 + 2 chunks, one more forward follows: 5 chunks are in flight (3 of chunk 0)."""
    found = stage(LLAMA, RecomputeSpec(granularity="full", method="block", num_layers=2), pp=2, vpp=2)
    assert saved(found, "layer input (recomputation)") == 5 * 2 * 16 * MIB


def test_an_mtp_depth_is_recomputed_with_the_uniform_method() -> None:
    """Its checkpoint keeps the hidden states and the next token's embedding, 2 x 4096 x 7168 x 2 bytes
    (multi_token_prediction.py: _checkpointed_forward), and the embedding, outside of it, the 4096 int64 ids it looked
    up; its layer's own tensors go. In 0.16 the last stage peaks in its losses, when all of that is there."""
    core = {"megatron_core": (0, 16)}
    plain, recomputed = stage(DEEPSEEK, **core), stage(DEEPSEEK, UNIFORM, **core)
    assert saved(plain, "MTP projection") > 5 * 56 * MIB
    assert saved(recomputed, "MTP projection") == 2 * 56 * MIB + 8 * 4096
    assert not saved(recomputed, "MoE", "MLP", "attention")


def test_the_block_method_leaves_mtp_depths_alone() -> None:
    found = stage(DEEPSEEK, RecomputeSpec(granularity="full", method="block", num_layers=8))
    assert saved(found, "MTP projection") == saved(stage(DEEPSEEK), "MTP projection")
    assert saved(found, "MoE experts") == saved(stage(DEEPSEEK), "MoE experts") // 6  # 5 MoE layers gone, MTP's left


def test_the_first_release_with_mtp_recomputed_no_depth() -> None:
    old = {"megatron_core": (0, 13)}
    assert saved(stage(DEEPSEEK, UNIFORM, **old), "MTP projection") == saved(stage(DEEPSEEK, **old), "MTP projection")


def test_larger_groups_with_mtp_are_refused_as_megatron_refuses_them() -> None:
    with pytest.raises(SpecError, match=r"recompute_num_layers.*mtp_num_layers.*set it to 1"):
        stage(DEEPSEEK, RecomputeSpec(granularity="full", method="uniform", num_layers=2))


@pytest.mark.parametrize("recompute", [UNIFORM, BLOCK])
def test_full_recomputation_frees_nothing_in_a_hybrid(recompute: RecomputeSpec) -> None:
    """MambaStack.forward of megatron-core 0.16 runs its layers one by one and never asks for the granularity."""
    model, core = resolve_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"), {"megatron_core": (0, 16)}
    assert stage(model, recompute, **core).activation_bytes == stage(model, **core).activation_bytes


@pytest.mark.parametrize("core", [(0, 16), (0, 19)])
def test_no_layer_of_a_hybrid_is_sent_to_the_host(core: tuple[int, int]) -> None:
    """TransformerBlock enters Transformer Engine's offloading context; MambaStack and HybridStack have none."""
    model = resolve_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    asked = stage(model, megatron_core=core, cpu_offloading_num_layers=4)
    assert asked.activation_bytes == stage(model, megatron_core=core).activation_bytes
    run = RunSpec(model=model, implementation=ImplementationSpec(megatron_core=core, cpu_offloading_num_layers=4))
    found = estimate(run)
    assert [a for a in found.assumptions if "cpu_offloading_num_layers (4) does nothing" in a]
    assert not [feature for feature in found.not_modelled if "cpu_offloading" in str(feature)]


def test_offloading_counts_elements_in_their_own_dtype() -> None:
    """Llama-3.2-1B (32 heads of 64), 16384 tokens: of what core attention keeps the log-sum-exps are 16384 x 32 =
    524288 elements of 4 bytes, fewer than 2^20 though 2 MiB; queries and the output are 16384 x 2048 elements, keys and
    values a quarter."""
    model = resolve_model("meta-llama/Llama-3.2-1B")

    def sent(**options: object) -> int:
        impl = ImplementationSpec(offload_modules=("core_attn", "attn_proj"), **options)
        run = RunSpec(model=model, batch=BatchSpec(seq_length=16384), implementation=impl)
        return layer_block(model.layers[0], context_of(run)).cost.offloaded

    wide = 16384 * 2048
    of_attention = 2 * (wide + wide + wide // 4 + wide // 4)
    assert sent() == of_attention
    assert sent(min_offloaded_tensor_size=524288) == of_attention + 4 * 524288
    assert sent(min_offloaded_tensor_size=wide // 4 + 1) == 2 * 2 * wide
    assert sent(min_offloaded_tensor_size=wide + 1) == 0
    alone = RunSpec(model=model, implementation=ImplementationSpec(min_offloaded_tensor_size=5))
    assert [line for line in estimate(alone).assumptions if "min_offloaded_tensor_size (5) does nothing" in line]


@pytest.mark.parametrize("implementation", ["transformer_engine", "local"])
@pytest.mark.parametrize("name", ["meta-llama/Llama-3.2-1B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V2-Lite"])
def test_a_module_whose_offloading_moves_nothing_is_named(name: str, implementation: str) -> None:
    """Every module of fine-grained offloading takes bytes from the GPU, or the estimate says that it does nothing."""
    base = RunSpec(model=name).with_fields(transformer_impl=implementation)
    peak = estimate(base).peak_stage.peak_bytes
    for module in OFFLOAD_MODULES:
        modules = ("core_attn", module) if module == "attn_proj" else (module,)
        found = estimate(base.with_fields(offload_modules=modules))
        idle = [line for line in found.assumptions if f"offload_modules ({module}) does nothing" in line]
        assert bool(idle) == (found.peak_stage.peak_bytes == peak), module


def test_norms_before_local_mlps_are_offloaded() -> None:
    """transformer_layer.py: _forward_pre_mlp_layernorm. Llama-3.2-1B, 16 layers, the last of which is not offloaded:
    the input of its norm is 4,096 tokens of 2,048 bf16 numbers."""
    base = RunSpec(model="meta-llama/Llama-3.2-1B").with_fields(transformer_impl="local", seq_length=4096)
    offloaded = base.with_fields(offload_modules=("mlp_norm",))
    kept, sent = (estimate(run).peak_stage.peak_bytes for run in (base, offloaded))
    assert kept - sent == 15 * 4096 * 2048 * 2
