"""What blocks keep otherwise from megatron-core 0.17 and Transformer Engine 2.12 on, by hand counts on both sides of
each release."""

from __future__ import annotations

from dataclasses import replace

import pytest
from parameters_of import stage_parameters
from plain_tapes import cost_of

from bridge_memory.inventory.layer import layer_block, output_block
from bridge_memory.readers import resolve_model
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
    ParallelSpec,
    RecomputeSpec,
    RunSpec,
)
from bridge_memory.tapes.alive import BlockCost
from bridge_memory.tapes.context import context_of
from bridge_memory.tapes.tape import Tape

TOKENS, EXPERTS, TOPK = 1024, 64, 6
Release = tuple[int, int]


def one_layer(layer: LayerSpec, hidden: int = 2048) -> ModelSpec:
    return ModelSpec(name="a layer", model_type="test", hidden_size=hidden, vocab_size=32000, layers=(layer,))


def cost(layer: LayerSpec, core: Release, hidden: int = 2048, **impl: object) -> BlockCost:
    run = RunSpec(
        model=one_layer(layer, hidden), batch=BatchSpec(seq_length=TOKENS),
        implementation=ImplementationSpec(megatron_core=core, **impl),
    )  # fmt: skip
    return layer_block(layer, context_of(run)).cost


def grown(layer: LayerSpec, before: Release, after: Release, **impl: object) -> int:
    """Bytes that the layer keeps for backward more under the later release."""
    return cost(layer, after, **impl).retained - cost(layer, before, **impl).retained


def experts(**router: object) -> LayerSpec:
    return LayerSpec(
        AttentionSpec(16, 16, 128),
        MoESpec(EXPERTS, TOPK, 1408, router_load_balancing_type="none", **router),  # type: ignore[arg-type]
    )


def test_the_unfused_permutation_keeps_the_order_of_the_whole_map() -> None:
    """int64 for each of 1024 x 64 places, instead of a byte of the map and a bf16 probability for each."""
    places = TOKENS * EXPERTS
    assert grown(experts(), (0, 16), (0, 17), moe_permute_fusion=False) == 8 * places - places - 2 * places
    assert grown(experts(), (0, 16), (0, 17), moe_permute_fusion=True) == 0
    assert grown(experts(), (0, 16), (0, 17), moe_token_dispatcher_type="allgather", moe_permute_fusion=False) == 0


def test_sigmoid_scores_of_the_auxiliary_loss_are_fp32() -> None:
    """2 bytes more for each of 1024 x 64, where the router works in bf16 and its kernels are not fused."""
    layer = LayerSpec(
        AttentionSpec(16, 16, 128),
        MoESpec(EXPERTS, TOPK, 1408, router_score_function="sigmoid", router_load_balancing_type="seq_aux_loss"),
    )
    fused = {"moe_permute_fusion": True}
    assert grown(layer, (0, 16), (0, 17), **fused) == 2 * TOKENS * EXPERTS
    assert grown(layer, (0, 16), (0, 17), **fused, moe_router_dtype="fp32") == 0
    assert grown(layer, (0, 16), (0, 17), **fused, moe_router_fusion=True) == 0


def test_corrected_scores_stay_in_fp32() -> None:
    """The bf16 copy of all scores goes; the k chosen scores and their sum, a token, double."""
    layer = experts(router_score_function="sigmoid", router_enable_expert_bias=True)
    assert grown(layer, (0, 17), (0, 18)) == 2 * TOKENS * (TOPK + 1) - 2 * TOKENS * EXPERTS
    assert grown(layer, (0, 17), (0, 18), moe_router_dtype="fp32") == 0


@pytest.mark.parametrize(("refills", "peak"), [(True, 1000 + 700 + 700 + 10), (False, 1000 + 700 + 10)])
def test_what_is_recomputed_takes_the_place_of_what_was_discarded(refills: bool, peak: int) -> None:
    """A kept input of 1000 bytes, 700 made of it again, and the consumer's gradient of 10."""
    tape = Tape(refills=refills)
    x = tape.input("x", 1000, requires_grad=False)
    with tape.discardable("region", (x,)) as region:
        made = tape.make("made", x, 700, saves=(x,), grad=False)
    out = tape.make("out", made, 10, saves=(made,))
    tape.discard(region, made)
    tape.output(out)
    found = cost_of(tape)
    assert found.retained == 1000
    assert found.backward_peak == peak


def test_releases_recompute_in_place_from_0_17_on() -> None:
    """The input norm of a layer whose MLP is small, 1024 x 4096 in bf16, is there once at the backward peak."""
    layer = LayerSpec(AttentionSpec(32, 32, 128), MLPSpec(512, gated=True))
    recompute = RecomputeSpec(granularity="selective", modules=("layernorm",))

    def backward(core: Release) -> int:
        run = RunSpec(
            model=one_layer(layer, 4096), batch=BatchSpec(seq_length=TOKENS), recompute=recompute,
            implementation=ImplementationSpec(megatron_core=core, transformer_impl="local", moe_grouped_gemm=False),
        )  # fmt: skip
        return layer_block(layer, context_of(run)).cost.backward_peak

    assert backward((0, 16)) - backward((0, 17)) == 2 * TOKENS * 4096


def test_the_delta_net_keeps_the_projection_and_no_copies() -> None:
    """Qwen3-Next, h 2048: 16 heads of 128 for query and key, 32 for value and gate; T = 1024, bf16.

    in_proj's output is 2 x 2048 + 2 x 4096 + 2 x 32 wide. Query and key of unit length, 2 x 2048, with an fp32
    deviation for each of 32 heads; repeated, 2 x 4096; value, gate and output, 4096 each; A, 64 wide for each of 32
    heads; g in fp32, beta and alpha; the output norm's deviations in fp32 and what out_proj keeps, 4096.
    """
    mixer = next(
        layer.mixer for layer in resolve_model("Qwen/Qwen3-Next-80B-A3B-Instruct").layers
        if isinstance(layer.mixer, GatedDeltaNetSpec)
    )  # fmt: skip
    found = cost(LayerSpec(mixer, None), (0, 18), transformer_impl="local", moe_grouped_gemm=False)
    values = 2 * 2048 + 2 * 4096 + 2 * 32 + 2 * 2048 + 2 * 4096 + 3 * 4096 + 64 * 32 + 2 * 32 + 4096
    statistics = 32 + 32 + 32
    residual_and_norm = 2 * 2 * 2048 + 4
    assert found.retained == TOKENS * (2 * values + 4 * statistics + residual_and_norm)


def names(model: ModelSpec, core: Release, **parallel: int) -> dict[str, tuple[int, ...]]:
    run = RunSpec(
        model=model, parallel=ParallelSpec(**parallel), implementation=ImplementationSpec(megatron_core=core)
    )
    return {p.name: tuple(p.shape) for chunk in stage_parameters(run, 0) for p in chunk}


def test_parameters_are_called_as_the_release_calls_them() -> None:
    mamba = one_layer(LayerSpec(MambaSpec(num_heads=64, head_dim=64, state_dim=128, num_groups=8), None))
    assert "decoder.layers.0.mixer.conv1d.weight" in names(mamba, (0, 18))
    assert "decoder.layers.0.mixer.conv1d_weight" in names(mamba, (0, 19))
    dense = LayerSpec(AttentionSpec(16, 16, 128), MLPSpec(1024, gated=True))
    predicting = replace(one_layer(dense), mtp_num_layers=1, mtp_layer=dense)
    weight = "mlp.linear_fc1.weight"
    assert f"mtp.layers.0.transformer_layer.{weight}" in names(predicting, (0, 16))
    assert f"mtp.layers.0.mtp_model_layer.{weight}" in names(predicting, (0, 17))


def test_a_query_without_a_latent_has_a_norm_in_its_projection() -> None:
    """2048 parameters more, of the hidden states; none where there is a latent, whose norm there was before."""
    added = "decoder.layers.0.self_attention.linear_q_proj.layer_norm_weight"
    for latent in (None, 768):
        model = one_layer(LayerSpec(MLASpec(16, latent, 512, 128, 64, 128), MLPSpec(1024, gated=True)))
        before, after = names(model, (0, 18)), names(model, (0, 19))
        assert after == (before | {added: (2048,)} if latent is None else before)


# ---- Transformer Engine ----

ROW = 2 * 32000


@pytest.mark.parametrize(
    ("release", "kept", "forward"),
    [((2, 17), ROW, ROW), ((2, 18), 2 * ROW, 3 * ROW), ((2, 19), ROW + 8, 2 * ROW + 8), (None, ROW + 8, 2 * ROW + 8)],
)
def test_the_fused_loss(release: Release | None, kept: int, forward: int) -> None:
    """A token's logits are 32000 in bf16; beside them stand, in 2.18, the gradient in fp32, from 2.19 on a copy and
    two fp32 statistics. The loss's scratch and the losses are 16 bytes, the hidden states 2 x 2048."""
    model = one_layer(LayerSpec(AttentionSpec(16, 16, 128), MLPSpec(512, gated=True)))
    run = RunSpec(
        model=model, batch=BatchSpec(seq_length=TOKENS),
        implementation=ImplementationSpec(
            transformer_engine=release, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te"
        ),
    )  # fmt: skip
    found = output_block(False, True, context_of(run)).cost
    hidden = 2 * 2048
    assert found.retained == TOKENS * (kept + hidden)
    # The scratch of 12 bytes is that of releases which sum a row in several kernels.
    assert found.forward_peak - TOKENS * (forward + hidden) in (TOKENS * 4, TOKENS * 16)


def ring(release: Release, how: str, ranks: int) -> BlockCost:
    """32 heads of 128, h 4096, beside a small MLP; 1024 tokens of each of the ranks."""
    layer = LayerSpec(AttentionSpec(32, 32, 128), MLPSpec(512, gated=True))
    run = RunSpec(
        model=one_layer(layer, 4096), batch=BatchSpec(seq_length=TOKENS * ranks),
        parallel=ParallelSpec(world_size=ranks, context_parallel_size=ranks),
        implementation=ImplementationSpec(transformer_engine=release, cp_comm_type=how),
    )  # fmt: skip
    return layer_block(layer, context_of(run)).cost


def test_all_gather_keeps_one_output() -> None:
    """[1024, 4096] in bf16 less."""
    before, after = ring((2, 14), "all_gather", 4), ring((2, 15), "all_gather", 4)
    assert before.retained - after.retained == 2 * TOKENS * 4096


def test_the_ring_holds_four_buffers_whatever_its_length() -> None:
    """Before, 8 ranks hold 8 buffers of keys and values, 16 MiB each, 8 outputs of 8 MiB with 128 KiB of statistics,
    and the sum in fp32, 16 MiB. Then 4 buffers and 2 outputs with statistics."""
    keys, output, statistics = 4 * TOKENS * 4096, 2 * TOKENS * 4096, 4 * TOKENS * 32
    before, after = ring((2, 19), "p2p", 8), ring((2, 20), "p2p", 8)
    assert before.retained == after.retained
    saved = 4 * keys + 6 * (output + statistics) + statistics + 2 * output
    assert before.forward_peak - after.forward_peak == saved
    assert ring((2, 20), "p2p", 8).forward_peak == ring((2, 20), "p2p", 4).forward_peak
