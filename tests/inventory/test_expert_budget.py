"""Experts of Transformer Engine's operations, on a budget of rows, with a stash: hand counts of what a layer keeps."""

from __future__ import annotations

import pytest

from bridge_memory import ParallelSpec, RunSpec, SpecError, estimate, explain
from bridge_memory.components import Part, Role

#: Qwen3-30B-A3B: 48 layers, h 2048, experts of 768, 8 of 128 chosen.
TOKENS, TOPK, WIDTH, INNER, LAYERS = 4096, 8, 2048, 768, 48
ARRIVING = TOKENS * TOPK


def run_of(**fields: object) -> RunSpec:
    run = RunSpec(model="Qwen/Qwen3-30B-A3B", parallel=ParallelSpec(world_size=8, expert_model_parallel_size=8))
    named = {
        "moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "hybridep", "megatron_core": (0, 19),
        "use_transformer_engine_op_fuser": True,
    }  # fmt: skip
    return run.with_fields(**{**named, **fields})


def kept(run: RunSpec) -> int:
    """Bytes that the experts of a layer keep: fc1's output, and the activation, for fc2's weight gradient."""
    found = [c.bytes for c in explain(run, 0).components if c.part is Part.MOE_EXPERTS and c.role is Role.ACTIVATION]
    return sum(found) // LAYERS


def test_operations_keep_what_modules_with_fused_activations_keep() -> None:
    """fc1's output, [R, 2 f], and the activation, [R, f], in bf16."""
    assert kept(run_of()) == ARRIVING * 3 * INNER * 2
    assert kept(run_of(bias_activation_fusion=False)) == ARRIVING * 3 * INNER * 2
    modules = run_of(use_transformer_engine_op_fuser=False)
    assert kept(modules) == ARRIVING * 3 * INNER * 2
    assert kept(modules.with_fields(bias_activation_fusion=False)) > ARRIVING * 3 * INNER * 2


@pytest.mark.parametrize("imbalance", [1.0, 1.4])
def test_a_budget_fixes_the_rows_however_many_tokens_come(imbalance: float) -> None:
    """1.3 x 4096 x 8 is 42,598.4: 42,598 rows, up to a multiple of 256."""
    run = run_of(moe_expert_rank_capacity_factor=1.3, moe_imbalance=imbalance)
    assert kept(run) == 42_752 * 3 * INNER * 2


def test_a_stash_keeps_what_comes_on_average_and_a_tenth_more() -> None:
    """Of 49,152 rows in a budget of 1.5, 32,768 come; fc1's input is stashed by fc1, its output and the probabilities
    by the activation, that one's output by fc2: 2,048 + 3 x 768 elements and a number in fp32 a row."""
    run = run_of(moe_expert_rank_capacity_factor=1.5, moe_paged_stash=True)
    rows = 1.1 * ARRIVING
    assert kept(run) == pytest.approx(rows * ((WIDTH + 3 * INNER) * 2 + 4), abs=8)
    more = run.with_fields(moe_paged_stash_buffer_size_factor_cuda=1.2)
    assert kept(more) == pytest.approx(1.2 * ARRIVING * ((WIDTH + 3 * INNER) * 2 + 4), abs=8)


def test_blocks_of_gates_and_values_are_copied_but_in_quantized_operations() -> None:
    """The copy is kept in place of fc1's output; both are there for a moment."""
    for fields in ({}, {"use_transformer_engine_op_fuser": False}):
        assert kept(run_of(moe_mlp_glu_interleave_size=32, **fields)) == kept(run_of(**fields))
    loss = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear", "moe_imbalance": 4.0}

    def peak(**fields: object) -> int:
        return explain(run_of(**loss, **fields), 0).peak_bytes

    assert peak(moe_mlp_glu_interleave_size=32) > peak()
    in_fp8 = {"fp8": "e4m3", "precision.fp8_recipe": "mxfp8", "gpu_arch": "blackwell"}
    assert peak(moe_mlp_glu_interleave_size=32, **in_fp8) == peak(**in_fp8)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"moe_paged_stash": True}, "moe_paged_stash (True) needs moe_expert_rank_capacity_factor"),
        ({"moe_expert_rank_capacity_factor": 0}, "moe_expert_rank_capacity_factor (0) drops every token"),
        (
            {"moe_expert_rank_capacity_factor": 1.5, "moe_flex_dispatcher_backend": "deepep"},
            "moe_expert_rank_capacity_factor (1.5) needs moe_token_dispatcher_type flex",
        ),
        (
            {"moe_expert_rank_capacity_factor": 1.5, "use_transformer_engine_op_fuser": False},
            "moe_expert_rank_capacity_factor (1.5) needs use_transformer_engine_op_fuser",
        ),
        ({"offload_modules": ("moe_act",)}, "use_transformer_engine_op_fuser (True) does not go with moe_act"),
        ({"moe_apply_probs_on_input": True, "moe_router_topk": 1}, "use_transformer_engine_op_fuser (True)"),
    ],
)
def test_what_megatron_core_refuses(fields: dict[str, object], said: str) -> None:
    """``TransformerConfig.__post_init__``, ``TEGroupedMLP._is_fused_impl_supported``."""
    fields.pop("moe_router_topk", None)
    with pytest.raises(SpecError) as refusal:
        run_of().with_fields(**fields)
    assert str(refusal.value).startswith(said)


def test_routers_that_pad_send_more_rows_and_experts_copy_none() -> None:
    """mxfp8 wants multiples of 32: 16 rows more on average for each of 128 experts from each of 8 ranks, of which a
    rank has 16: 2,048. Without, a rank's experts pad 16 rows each, in a copy."""
    fields = {"fp8": "e4m3", "precision.fp8_recipe": "mxfp8", "gpu_arch": "blackwell"}
    fields |= {"moe_token_dispatcher_type": "alltoall", "use_transformer_engine_op_fuser": False}
    # fc1's input and fc2's, with scales of a byte for each 32, fc1's output in bf16.
    row = (WIDTH + INNER) * 33 // 32 + 2 * INNER * 2
    assert kept(run_of(**fields)) == (ARRIVING + 16 * 16) * row
    assert kept(run_of(moe_router_padding_for_quantization=True, **fields)) == (ARRIVING + 128 * 16) * row
    with pytest.raises(SpecError, match="does not go with moe_token_dispatcher_type allgather"):
        run_of(moe_router_padding_for_quantization=True, **{**fields, "moe_token_dispatcher_type": "allgather"})


def test_operations_make_no_activation_again() -> None:
    """``_ScaledGLU.__init__`` refuses it, and releases before do not know the word."""
    plain = run_of()
    again = plain.with_fields(recompute_granularity="selective", recompute_modules=("moe_act",))
    assert kept(again) == kept(plain)
    assert "recompute_modules (moe_act) does nothing" in " ".join(estimate(again).assumptions)
