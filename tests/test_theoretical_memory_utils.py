"""The drop-in by hand counts and by the figures of Megatron Bridge's own unit tests; no Bridge is needed.

Beside Bridge's own functions: ``tests/test_drop_in.py``.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory import theoretical_memory_utils as ours
from bridge_memory.spec import SpecError
from bridge_memory.table2 import Activations, HeldLayers, Layers, ModelState


def container(data_parallel_size: int | None = 8, *, micro_batch_size: int = 1, distributed: bool = True, **model: Any):
    """Llama-3-8B unless told otherwise, with only the fields that Bridge's own functions read."""

    def silu() -> None: ...

    fields = dict(
        num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8,
        kv_channels=128, num_moe_experts=None, gated_linear_unit=True, activation_func=silu, seq_length=8192,
        vocab_size=128256, should_pad_vocab=True, make_vocab_size_divisible_by=128,
        share_embeddings_and_output_weights=False, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None, sequence_parallel=True, recompute_granularity="selective",
    )  # fmt: skip
    config = SimpleNamespace(
        model=SimpleNamespace(**{**fields, **model}),
        train=SimpleNamespace(micro_batch_size=micro_batch_size),
        optimizer=SimpleNamespace(use_distributed_optimizer=distributed),
    )
    if data_parallel_size is not None:
        config.data_parallel_size = data_parallel_size
    return config


def states(estimate: ours.TrainingMemoryEstimate) -> dict[str, float]:
    return {c.name: c.memory_bytes for c in estimate.model_state_components}


# ---- the figures of Bridge 0.6.2's unit tests (tests/unit_tests/training/utils/test_theoretical_memory_utils.py) ----

#: Their model: LayerNorm, no gate, tied embeddings, 2 sequences of 8 tokens, on 4 replicas of TP 2 PP 2.
TINY = dict(
    num_layers=4, hidden_size=16, seq_length=8, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=None,
    kv_channels=4, vocab_size=32, make_vocab_size_divisible_by=1, should_pad_vocab=False, activation_func=None,
    gated_linear_unit=False, share_embeddings_and_output_weights=True, tensor_model_parallel_size=2,
    pipeline_model_parallel_size=2, expert_tensor_parallel_size=1,
)  # fmt: skip

UNEVEN = dict(
    num_layers=8, tensor_model_parallel_size=1, pipeline_model_parallel_size=4, num_layers_in_first_pipeline_stage=1,
    num_layers_in_last_pipeline_stage=3, share_embeddings_and_output_weights=False,
)  # fmt: skip

#: Changes -> for each component (parameters of the model, of one GPU, bytes each, bytes); None is not stated there.
NVIDIAS = [
    ({}, 4, [(13088, 3400, 9, 30600)]),
    (UNEVEN, 4, [(None, 9952, 9, 89568)]),
    (
        {**UNEVEN, "num_moe_experts": 2, "moe_layer_freq": [0, 1, 0, 0, 1, 0, 1, 1], "moe_ffn_hidden_size": 32},
        4,
        [(None, 5856, None, None), (None, 4096, None, None)],
    ),
    (
        dict(
            pipeline_model_parallel_size=1, context_parallel_size=2, num_moe_experts=8, moe_layer_freq=2,
            moe_ffn_hidden_size=32, expert_model_parallel_size=4,
        ),
        8,
        [(8992, 4496, 6.75, 30348), (16384, 4096, 7.5, 30720)],
    ),
    (
        dict(
            pipeline_model_parallel_size=1, num_moe_experts=4, moe_layer_freq=[0, 1, 0, 1], moe_ffn_hidden_size=32,
            moe_shared_expert_intermediate_size=8, moe_latent_size=4, mtp_num_layers=1,
        ),
        4,
        [(11232, 5616, None, None), (3072, 3072, None, None)],
    ),
]  # fmt: skip


def tiny(data_parallel_size: int = 4, **model: Any) -> Any:
    return container(data_parallel_size, micro_batch_size=2, **{**TINY, **model})


@pytest.mark.parametrize(("changes", "replicas", "expected"), NVIDIAS)
def test_model_state_is_what_nvidias_tests_say(changes: dict[str, Any], replicas: int, expected: list[Any]) -> None:
    estimate = ours.estimate_training_memory(tiny(replicas, **changes), include_activation=False)
    assert len(estimate.model_state_components) == len(expected)
    for component, figures in zip(estimate.model_state_components, expected, strict=True):
        got = (
            component.parameter_count, component.parameter_count_per_gpu, component.bytes_per_parameter,
            component.memory_bytes,
        )  # fmt: skip
        assert [g for g, f in zip(got, figures, strict=True) if f is not None] == [f for f in figures if f is not None]
    assert estimate.total_parameters == sum(c.parameter_count for c in estimate.model_state_components)
    assert estimate.weight_and_optimizer_bytes == sum(c.memory_bytes for c in estimate.model_state_components)


@pytest.mark.parametrize(
    ("changes", "microbatches", "expected"),
    [
        ({"pipeline_model_parallel_size": 1, "context_parallel_size": 2}, 1, 9568),
        ({"virtual_pipeline_model_parallel_size": 2}, 4, 22240),
    ],
)
def test_activations_are_what_nvidias_tests_say(changes: dict[str, Any], microbatches: int, expected: int) -> None:
    estimate = ours.estimate_training_memory(tiny(**changes), microbatches)
    assert estimate.activation is not None and estimate.activation.memory_bytes == expected
    assert estimate.total_memory_bytes == estimate.weight_and_optimizer_bytes + expected


def test_the_printed_line_is_what_nvidias_test_says(capsys: pytest.CaptureFixture[str]) -> None:
    ours.report_theoretical_memory(tiny(), num_microbatches=4)
    assert capsys.readouterr().out == (
        "Theoretical memory footprints: weight and optimizer=0.03 MB, activation=0.02 MB, total=0.05 MB\n\n"
    )


# ---- Bridge's rules, counted by hand ----


def test_what_is_not_set_is_what_bridge_takes() -> None:
    """No data_parallel_size and no expert_tensor_parallel_size: 1 each. The numbers stay; remarks say it."""
    config = container(None, **{**QWEN3_30B, "expert_tensor_parallel_size": None})
    one = container(1, **{**QWEN3_30B, "expert_tensor_parallel_size": 1})
    assert ours.estimate_training_memory(config) == ours.estimate_training_memory(one)
    said = " ".join(ours.remarks(config))
    # With expert parallelism Bridge makes it 1 itself; alone, megatron-core takes tensor parallelism's 4.
    assert "data_parallel_size is not set" in said and "expert_tensor_parallel_size" not in said
    alone = container(None, **{**QWEN3_30B, "expert_tensor_parallel_size": None, "expert_model_parallel_size": 1})
    assert "Megatron takes 4" in " ".join(ours.remarks(alone))
    assert "is not set" not in " ".join(ours.remarks(one))


def test_a_dense_llama_leaves_nothing_to_remark() -> None:
    assert ours.remarks(container()) == ()
    with_activations, without = (
        container(pipeline_model_parallel_size=4, sequence_parallel=on) for on in (True, False)
    )
    assert len(ours.remarks(with_activations)) == 1  # the last stage's logits
    assert ours.remarks(without) == ()
    assert ours.remarks(container(pipeline_model_parallel_size=4), include_activation=False) == ()


def test_moe_activations_are_those_of_the_experts_that_a_token_uses() -> None:
    """s b h (18 + 4 (8 x 768 + 1024)/h) in a layer with experts, 48 of them; embedding 8 s b + s b h; logits."""
    config = container(
        **{**QWEN3_30B, "pipeline_model_parallel_size": 1, "tensor_model_parallel_size": 1}, moe_router_topk=8,
        moe_shared_expert_intermediate_size=1024, should_pad_vocab=False,
    )  # fmt: skip
    s, h = 8192, 2048
    expected = 48 * s * (18 * h + 4 * (8 * 768 + 1024)) + 8 * s + s * h + 4 * s * (h + 151936)
    assert ours.compute_activation_memory(config, 1) == pytest.approx(expected)


def test_layouts_are_averaged_by_bridge_and_the_heaviest_stage_is_remarked_on() -> None:
    """Two stages of 6 and 2 layers: Bridge counts 4 + a table; the first holds 6 + a table."""
    config = container(
        num_layers=8, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et*6|t*2L", should_pad_vocab=False
    )
    layer, table = 2 * 4096 * 40 * 128 + 3 * 4096 * 14336 + 4 * 4096, 128256 * 4096
    counted = (4 * layer + 4096 + table) * 7.5
    assert ours.compute_weight_and_optimizer_memory(config) == counted
    first = ours.estimate_training_memory_by_stage(config, method="table2")[0].weight_and_optimizer_bytes
    assert first == (6 * layer + table) * 7.5
    (said,) = ours.remarks(config, include_activation=False)
    assert f"heaviest stage is 0, with {first / 2**30:.2f} GiB" in said and f"{counted / 2**30:.2f} GiB" in said


def test_a_gate_other_than_swiglu_is_not_counted_as_in_bridge() -> None:
    """Gemma's GeGLU: Bridge counts two matrices of the three. A remark says so."""

    def gelu() -> None: ...

    swiglu, geglu = container(), container(activation_func=gelu)
    third = 32 * 4096 * 14336 * (6 + 12 / 8)
    assert ours.compute_weight_and_optimizer_memory(swiglu) - ours.compute_weight_and_optimizer_memory(
        geglu
    ) == pytest.approx(third)
    assert any("gate" in remark for remark in ours.remarks(geglu))
    assert not any("gate" in remark for remark in ours.remarks(swiglu))


# ---- the formatted line ----


def test_the_line_in_both_units_and_no_other() -> None:
    """One dense layer of h = 1024 without gate and vocabulary 1024: counted by hand.

    Attention 4 h^2, MLP 8 h^2, norms 4 h, final norm 2 h, two tables of h^2, 18 bytes each.
    """
    config = container(
        None, distributed=False, num_layers=1, hidden_size=1024, ffn_hidden_size=4096, num_attention_heads=8,
        num_query_groups=None, kv_channels=None, gated_linear_unit=False, vocab_size=1024, seq_length=1024,
    )  # fmt: skip
    estimate = ours.estimate_training_memory(config)
    h = 1024
    parameters = 14 * h * h + 6 * h
    activation = h * h * (18 + 16) + 8 * h + h * h + 4 * h * h * 2
    assert estimate.total_parameters == parameters
    assert estimate.weight_and_optimizer_bytes == 18 * parameters
    assert estimate.activation is not None and estimate.activation.memory_bytes == activation
    assert estimate.total_memory_mb == (18 * parameters + activation) / 2**20
    assert estimate.total_memory_gb == (18 * parameters + activation) / 2**30
    assert ours.format_training_memory_estimate(estimate) == (
        "Theoretical memory footprints: dense parameters and optimizer=252.11 MB, activation=43.01 MB, total=295.11 MB"
    )
    assert ours.format_training_memory_estimate(estimate, unit="gb").endswith("total=0.29 GB")
    bare = ours.estimate_training_memory(config, include_activation=False)
    assert bare.activation is None
    assert ours.format_training_memory_estimate(bare) == (
        "Theoretical memory footprints: dense parameters and optimizer=252.11 MB, total=252.11 MB"
    )
    with pytest.raises(ValueError, match=r"^Unsupported memory unit: TB$"):
        ours.format_training_memory_estimate(estimate, unit="TB")


# ---- experts, counted by hand ----

QWEN3_30B = dict(
    num_layers=48, hidden_size=2048, ffn_hidden_size=6144, num_attention_heads=32, num_query_groups=4,
    kv_channels=128, vocab_size=151936, num_moe_experts=128, moe_ffn_hidden_size=768, moe_layer_freq=1,
    tensor_model_parallel_size=4, pipeline_model_parallel_size=2, expert_model_parallel_size=4,
    expert_tensor_parallel_size=1,
)  # fmt: skip


def test_routed_experts_follow_their_own_groups() -> None:
    """TP4 PP2 EP4 ETP1 on DP 8: an expert is held by 8*4/4 = 8 ranks, a stage has 24 layers of 32 experts."""
    routed = 24 * 32 * 3 * 2048 * 768 * (6 + 12 / 8)
    attention = 2 * 2048 * (32 + 4) * 128
    dense = 24 * (attention + 4 * 2048) + 2048 + 151936 // 1 * 2048
    estimate = ours.estimate_training_memory(container(**QWEN3_30B, should_pad_vocab=False))
    assert states(estimate) == pytest.approx(
        {
            "dense parameters and optimizer": dense / 4 * (6 + 12 / 8),
            "routed expert parameters and optimizer": routed,
        }
    )
    assert estimate.weight_and_optimizer_bytes == ours.compute_weight_and_optimizer_memory(
        container(**QWEN3_30B, should_pad_vocab=False)
    )


def test_context_parallel_ranks_shard_both_optimizers() -> None:
    """CP 2 doubles the dense shard (8 x 2) and the expert one (8 x 2 x 4 / 4)."""
    one = states(ours.estimate_training_memory(container(**QWEN3_30B)))
    two = states(ours.estimate_training_memory(container(**QWEN3_30B, context_parallel_size=2)))
    for name in one:
        assert two[name] / one[name] == pytest.approx((6 + 12 / 16) / (6 + 12 / 8))
    a, b = (ours.compute_activation_memory(container(**QWEN3_30B, context_parallel_size=cp), 8) for cp in (1, 2))
    assert a == 2 * b


def test_moe_layer_freq_as_int_and_as_list_agree() -> None:
    listed = {**QWEN3_30B, "moe_layer_freq": [1, 0] * 24}
    every_second = {**QWEN3_30B, "moe_layer_freq": 2}
    assert ours.estimate_training_memory(container(**listed)) == ours.estimate_training_memory(
        container(**every_second)
    )


def test_shared_and_latent_experts() -> None:
    """Shared experts are dense (3 h f_shared a layer); latent experts work in 512 instead of 2048."""
    plain = ours.estimate_training_memory(container(**QWEN3_30B))
    shared = ours.estimate_training_memory(container(**QWEN3_30B, moe_shared_expert_intermediate_size=1536))
    dense = "dense parameters and optimizer"
    routed = "routed expert parameters and optimizer"
    assert states(shared)[dense] - states(plain)[dense] == pytest.approx(24 * 3 * 2048 * 1536 / 4 * 7.5)
    latent = ours.estimate_training_memory(container(**QWEN3_30B, moe_latent_size=512))
    assert states(latent)[routed] == pytest.approx(states(plain)[routed] / 4)
    assert states(latent)[dense] - states(plain)[dense] == pytest.approx(24 * 2 * 2048 * 512 / 4 * 7.5)


def test_an_mtp_depth_is_one_more_layer_of_the_last_stage() -> None:
    """Without its projection and its own norms, as Bridge counts it, which a remark says."""
    without = ours.estimate_training_memory_by_stage(container(**QWEN3_30B), method="table2")
    with_mtp = ours.estimate_training_memory_by_stage(container(**QWEN3_30B, mtp_num_layers=1), method="table2")
    assert with_mtp[0].weight_and_optimizer_bytes == without[0].weight_and_optimizer_bytes
    h = 2048
    dense = 2 * h * 36 * 128 + 4 * h
    more = dense / 4 * 7.5 + 32 * 3 * h * 768 * 7.5
    assert with_mtp[1].weight_and_optimizer_bytes - without[1].weight_and_optimizer_bytes == pytest.approx(more)
    assert any("MTP depth" in remark for remark in ours.remarks(container(**QWEN3_30B, mtp_num_layers=1)))


def test_uneven_stages_hold_the_layers_they_are_given() -> None:
    """61 layers over 4 stages with 16 in the last: stages of 15; Llama-3 layers; no embedding in the middle."""
    config = container(num_layers=61, pipeline_model_parallel_size=4, num_layers_in_last_pipeline_stage=16)
    layer = 2 * 4096 * 40 * 128 + 3 * 4096 * 14336 + 4 * 4096
    table = 128256 * 4096
    norm = 2 * 4096
    expected = [15 * layer + table, 15 * layer, 15 * layer, 16 * layer + table + norm]
    stages = ours.estimate_training_memory_by_stage(config, method="table2")
    assert [s.weight_and_optimizer_bytes for s in stages] == pytest.approx([n * 7.5 for n in expected])
    assert ours.estimate_training_memory(config).weight_and_optimizer_bytes == pytest.approx(
        expected[-1] * 7.5
    )


def test_activations_fall_along_the_pipeline_and_the_last_stage_has_the_logits() -> None:
    """1F1B: stage r holds min(4 - r, m) microbatches; the last stage adds 4 s (h + V) bytes."""
    config = container(pipeline_model_parallel_size=4, should_pad_vocab=False)
    tokens, h = 8192, 4096
    layer = tokens * (18 * h + 4 * 14336)
    embedding = 8 * tokens + tokens * h
    logits = 4 * tokens * (h + 128256)
    for m, held in ((8, (4, 3, 2, 1)), (2, (2, 2, 2, 1))):
        stages = ours.estimate_training_memory_by_stage(config, m, method="table2")
        expected = [8 * layer * n for n in held]
        expected[0] += embedding * held[0]
        expected[-1] += logits
        assert [s.activation.memory_bytes for s in stages] == pytest.approx(expected)


def test_first_stage_by_stage_is_bridges_number_under_virtual_stages() -> None:
    config = container(pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=4)
    first = ours.estimate_training_memory_by_stage(config, 64, method="table2")[0]
    assert first.activation.memory_bytes == pytest.approx(ours.compute_activation_memory(config, 64))


def test_dense_first_layers_sit_on_the_first_stage() -> None:
    """DeepSeek-like: three dense layers in front; the layout string says who holds what."""
    freq = [0] * 3 + [1] * 9
    model = {
        **QWEN3_30B, "num_layers": 12, "moe_layer_freq": freq, "ffn_hidden_size": 32768,
        "pipeline_model_parallel_layout": "Ettt|t*9,L",
    }  # fmt: skip
    first, last = ours.estimate_training_memory_by_stage(container(**model), method="table2")
    routed = "routed expert parameters and optimizer"
    assert states(first)[routed] == 0
    assert states(last)[routed] == pytest.approx(9 * 32 * 3 * 2048 * 768 * 7.5)
    whole = ours.estimate_training_memory(container(**model))
    assert states(whole)[routed] == pytest.approx(9 / 2 * 32 * 3 * 2048 * 768 * 7.5)  # Bridge averages layouts
    assert any("the heaviest stage is 1" in remark for remark in ours.remarks(container(**model)))


def test_the_closed_forms_need_no_container() -> None:
    """GPT-3 (h = 12288, 96 layers and heads, s = 2048) on TP8 PP8, one microbatch of 1: 12 h^2 + 4 h parameters a
    layer, h V of a tied table and 2 h of the final norm; 34 s b h bytes of activations a layer, of 12 a stage, 8
    microbatches in flight on the first; all of it over TP."""
    h, s, vocab = 12288, 2048, 51200
    layers = Layers((False,) * 96)
    gpt3 = ModelState(
        layers=layers, hidden_size=h, num_attention_heads=96, num_query_groups=96, kv_channels=128,
        ffn_hidden_size=4 * h, projections=2.0, vocab_size=vocab, share_embeddings_and_output_weights=True, tp=8, pp=8,
    )  # fmt: skip
    assert gpt3.total_parameters == 96 * (12 * h * h + 4 * h) + h * vocab + 2 * h
    assert gpt3.dense_bytes_per_parameter == 18
    kept = Activations(
        layers=layers, seq_length=s, micro_batch_size=1, hidden_size=h, ffn_hidden_size=4 * h, moe_width=0,
        vocab_size=vocab, tp=8, pp=8,
    )  # fmt: skip
    assert kept.layer_bytes == 34 * s * h
    first = HeldLayers(12.0, 0.0, embedding=True, output=False)
    expected = (12 * 34 * s * h + 8 * s + s * h) * 8 / 8
    assert kept.stage_bytes(0, first, 8) == pytest.approx(expected) == pytest.approx(kept.first_stage_bytes(8))


def test_the_stages_and_the_drop_in_agree_where_both_say_the_same() -> None:
    """Layers stated for the first and last stage: the heaviest dense and routed parts. An even split of equal layers:
    the first stage's activations. One stage: everything. And always the parameters of the model."""
    draw = random.Random(10)
    for _ in range(200):
        pp, vpp = draw.choice((1, 2, 3, 4)), draw.choice((None, 1, 2))
        per_chunk = [draw.randint(1, 3) for _ in range(pp)]
        per_chunk[1:-1] = per_chunk[1:2] * (pp - 2)
        sizes = [n * (vpp or 1) for n in per_chunk]
        layers = sum(sizes)
        stated = dict(
            num_layers_in_first_pipeline_stage=sizes[0], num_layers_in_last_pipeline_stage=sizes[-1]
        ) if pp > 1 else {}  # fmt: skip
        config = container(
            **{
                **QWEN3_30B, "num_layers": layers, "pipeline_model_parallel_size": pp, **stated,
                "moe_layer_freq": [draw.randint(0, 1) for _ in range(layers)], "moe_router_topk": 8,
                "virtual_pipeline_model_parallel_size": vpp if pp > 1 else None,
                "mtp_num_layers": draw.choice((None, 1, 2)),
                "share_embeddings_and_output_weights": draw.random() < 0.5,
            }
        )  # fmt: skip
        whole = ours.estimate_training_memory(config, 6)
        stages = ours.estimate_training_memory_by_stage(config, 6, method="table2")
        for name, size in states(whole).items():
            assert max(states(stage)[name] for stage in stages) == pytest.approx(size)
        assert {stage.total_parameters for stage in stages} == {whole.total_parameters}
        if pp == 1:
            assert stages[0].total_memory_bytes == pytest.approx(whole.total_memory_bytes)
        even = container(**{**QWEN3_30B, "pipeline_model_parallel_size": pp, "num_layers": 4 * pp})
        even.model.virtual_pipeline_model_parallel_size = vpp if pp > 1 else None
        assert ours.estimate_training_memory_by_stage(even, 3, method="table2")[
            0
        ].activation.memory_bytes == pytest.approx(ours.compute_activation_memory(even, 3))


# ---- refusals ----


def test_stages_take_the_replicas_from_the_world_size_or_are_refused(monkeypatch) -> None:
    def states_of(config: Any) -> list[float]:
        stages = ours.estimate_training_memory_by_stage(config, method="table2")
        return [stage.weight_and_optimizer_bytes for stage in stages]

    known = states_of(container(8, tensor_model_parallel_size=2))
    config = container(None, tensor_model_parallel_size=2)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SpecError, match="data_parallel_size is not set"):
        states_of(config)
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert states_of(config) == known
    monkeypatch.setenv("WORLD_SIZE", "15")
    with pytest.raises(SpecError, match=r"WORLD_SIZE \(15\) is not divisible"):
        states_of(config)


def test_a_container_that_was_not_validated_has_what_validation_sets() -> None:
    """Where Bridge fails: kv_channels h/a, ffn_hidden_size 4 h, the sequence length of the dataset."""
    whole = container(ffn_hidden_size=16384)
    bare = container(ffn_hidden_size=None, kv_channels=None, seq_length=None)
    bare.dataset = SimpleNamespace(seq_length=8192)
    assert ours.estimate_training_memory(bare) == ours.estimate_training_memory(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "model.vocab_size is not set"),
        ({"hidden_size": 0}, r"model.hidden_size \(0\)"),
        ({"num_layers": "many"}, r"num_layers \('many'\) is not a whole number of at least 1"),
        ({"num_moe_experts": 8, "moe_layer_freq": [1, 0]}, "moe_layer_freq has 2 entries for 32 layers"),
        ({"num_moe_experts": 8, "moe_layer_freq": "x"}, "model.moe_layer_freq is 'x'; give a number, or a list"),
        ({"expert_model_parallel_size": -1}, r"expert_model_parallel_size \(-1\)"),
        ({"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 40}, "do not fit num_layers"),
        ({"num_layers_in_last_pipeline_stage": 4}, "more than one pipeline stage"),
    ],
)
def test_wrong_fields_are_named(change, message) -> None:
    with pytest.raises(SpecError, match=message):
        ours.estimate_training_memory(container(**change))


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(SpecError, match="method"):
        ours.estimate_training_memory(container(), method="guess")


# ---- the inventory method in the same shapes ----


def test_the_inventory_in_bridges_shapes_adds_up_to_the_estimate() -> None:
    """Each stage's parts are the estimate's components; the most loaded stage is the estimate's peak stage."""
    from bridge_memory.estimation import estimate
    from bridge_memory.readers.config_container import run_from_config_container

    config = container(8, pipeline_model_parallel_size=4, tensor_model_parallel_size=2, bf16=True)
    answer = estimate(run_from_config_container(config, num_microbatches=8))
    stages = ours.estimate_training_memory_by_stage(config, 8)
    assert [s.total_memory_bytes for s in stages] == [s.peak_bytes for s in answer.stages]
    assert [s.weight_and_optimizer_bytes for s in stages] == [
        s.bytes_of("weights", "gradients", "optimizer", "buffers") for s in answer.stages
    ]
    assert ours.estimate_training_memory(config, 8, method="inventory").total_memory_bytes == (
        answer.peak_stage.peak_bytes
    )
    assert stages[0].total_parameters == answer.parameters


# ---- the verdict ----


def test_the_verdict_says_unknown_where_what_is_not_modelled_decides_it() -> None:
    """Llama-3-8B with TP 4: a little on a card of 141 GB; a teacher of unknown size beside it may be anything."""
    config = container(tensor_model_parallel_size=4, add_bias_linear=False, normalization="RMSNorm", num_layers=32)
    alone = ours.verdict(config, 8, gpus=["H200"])
    assert alone.startswith("verdict: FITS H200: peak ") and "not modelled" not in alone
    config.model.teacher = object()
    beside = ours.verdict(config, 8, gpus=["H200"])
    assert beside.startswith("verdict: UNKNOWN for H200: modelled peak ") and "model.teacher" in beside
    # What is known to be there does not fit, whatever is beside it.
    assert "DOES NOT FIT T4" in ours.verdict(config, 8, gpus=["T4"])
    with pytest.raises(SpecError, match="gpus"):
        ours.verdict(config, 8, gpus="H200")
    with pytest.raises(SpecError, match="H2000"):
        ours.verdict(config, 8, gpus=["H2000"])
