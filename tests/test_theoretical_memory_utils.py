"""The drop-in has Megatron Bridge's numbers where Bridge defines them, and hand counts where it is newer."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from bridge_stubs import require_bridge

from bridge_memory import theoretical_memory_utils as ours
from bridge_memory.spec import SpecError
from bridge_memory.table2 import Table2, Table2Stage


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


# ---- against Bridge 0.3.1's own functions ----

DENSE = [
    dict(zip(("tensor_model_parallel_size", "pipeline_model_parallel_size"), sizes, strict=True)) | more
    for sizes, more in itertools.product(
        ((1, 1), (2, 1), (1, 4), (8, 4)),
        ({}, {"share_embeddings_and_output_weights": True, "vocab_size": 50257}, {"should_pad_vocab": False}),
    )
] + [
    {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 8, "num_query_groups": None},
    {"gated_linear_unit": False, "ffn_hidden_size": 16384},
    {"sequence_parallel": False},
    {"recompute_granularity": "full"},
    {"recompute_granularity": None, "pipeline_model_parallel_size": 2},
]


@pytest.mark.parametrize("microbatches", [None, 2, 64])
def test_dense_models_print_bridges_lines_letter_for_letter(microbatches, capsys) -> None:
    require_bridge()
    import torch.nn.functional as F
    from megatron.bridge.training.utils import theoretical_memory_utils as theirs

    for model in DENSE:
        for distributed, micro in ((True, 1), (False, 4)):
            config = container(distributed=distributed, micro_batch_size=micro, **{"activation_func": F.silu, **model})
            for verbose in (False, True):
                theirs.report_theoretical_memory(config, num_microbatches=microbatches, verbose=verbose)
                expected = capsys.readouterr().out
                ours.report_theoretical_memory(config, num_microbatches=microbatches, verbose=verbose)
                assert capsys.readouterr().out == expected, (model, distributed)
            assert ours.compute_weight_and_optimizer_memory(config) == pytest.approx(
                theirs.compute_weight_and_optimizer_memory(config), rel=1e-12
            )
            assert ours.compute_activation_memory(config, microbatches) == pytest.approx(
                theirs.compute_activation_memory(config, microbatches), rel=1e-12
            )


def test_a_gate_other_than_swiglu_is_not_counted_as_in_bridge() -> None:
    """Gemma's GeGLU: Bridge counts two matrices of the three. The estimate says so."""

    def gelu() -> None: ...

    swiglu, geglu = container(), container(activation_func=gelu)
    third = 32 * 4096 * 14336 * (6 + 12 / 8)
    assert ours.compute_weight_and_optimizer_memory(swiglu) - ours.compute_weight_and_optimizer_memory(
        geglu
    ) == pytest.approx(third)
    assert any("gate" in a for a in ours.estimate_training_memory(geglu).assumptions)


# ---- the printed line ----


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
    assert estimate.total_memory_mb == (18 * parameters + activation) / 2**20 == estimate.memory_mb
    assert estimate.total_memory_gb == (18 * parameters + activation) / 2**30 == estimate.memory_gb
    assert ours.format_training_memory_estimate(estimate) == (
        "Theoretical memory footprints: weight and optimizer=252.11 MB, activation=43.01 MB, total=295.11 MB"
    )
    assert ours.format_training_memory_estimate(estimate, unit="GB").endswith("total=0.29 GB")
    bare = ours.estimate_training_memory(config, include_activation=False)
    assert bare.activation is None
    assert ours.format_training_memory_estimate(bare) == (
        "Theoretical memory footprints: weight and optimizer=252.11 MB"
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


def test_mtp_adds_a_layer_and_its_projection_to_the_last_stage() -> None:
    """One depth: eh_proj 2 h^2, three norms, and a layer with experts."""
    without = ours.estimate_training_memory_by_stage(container(**QWEN3_30B), method="table2")
    with_mtp = ours.estimate_training_memory_by_stage(container(**QWEN3_30B, mtp_num_layers=1), method="table2")
    assert with_mtp[0].weight_and_optimizer_bytes == without[0].weight_and_optimizer_bytes
    h = 2048
    dense = 2 * h * h + 6 * h + 2 * h * 36 * 128 + 4 * h
    more = dense / 4 * 7.5 + 32 * 3 * h * 768 * 7.5
    assert with_mtp[1].weight_and_optimizer_bytes - without[1].weight_and_optimizer_bytes == pytest.approx(more)


def test_uneven_stages_hold_the_layers_they_are_given() -> None:
    """61 layers over 4 stages with 16 in the last: stages of 15; Llama-3 layers; no embedding in the middle."""
    config = container(num_layers=61, pipeline_model_parallel_size=4, num_layers_in_last_pipeline_stage=16)
    layer = 2 * 4096 * 40 * 128 + 3 * 4096 * 14336 + 4 * 4096
    table = 128256 * 4096
    norm = 2 * 4096 / 4
    expected = [15 * layer + table, 15 * layer, 15 * layer, 16 * layer + table]
    stages = ours.estimate_training_memory_by_stage(config, method="table2")
    assert [s.weight_and_optimizer_bytes for s in stages] == pytest.approx([(n + norm) * 7.5 for n in expected])
    assert ours.estimate_training_memory(config).weight_and_optimizer_bytes == pytest.approx(
        (expected[-1] + norm) * 7.5
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
    assert states(whole)[routed] == states(last)[routed]
    assert any("different stages" in a for a in whole.assumptions)


def test_the_closed_forms_need_no_container() -> None:
    """GPT-3 (h = 12288, 96 layers and heads, s = 2048) on TP8 PP8, one microbatch of 1: 12 h^2 + 4 h parameters a
    layer, h V of a tied table and 2 h of the final norm; 34 s b h bytes of activations a layer, of 12 a stage, 8
    microbatches in flight on the first; all of it over TP."""
    h, s, vocab = 12288, 2048, 51200
    stages = tuple(Table2Stage(12.0, 0.0, embedding=r == 0, output=r == 7) for r in range(8))
    gpt3 = Table2(
        num_layers=96, hidden_size=h, num_attention_heads=96, num_query_groups=96, kv_channels=128,
        ffn_hidden_size=4 * h, gated_linear_multiplier=1.0, vocab_size=vocab, share_embeddings_and_output_weights=True,
        seq_length=s, micro_batch_size=1, tp=8, pp=8, vpp=None, cp=1, ep=1, etp=8, data_parallel_size=1,
        use_distributed_optimizer=False, num_experts=0, moe_ffn_hidden_size=4 * h,
        moe_shared_expert_intermediate_size=0, moe_latent_size=None, mtp_num_layers=0, mtp_is_moe=False, stages=stages,
    )  # fmt: skip
    assert gpt3.total_parameters == 96 * (12 * h * h + 4 * h) + h * vocab + 2 * h
    assert gpt3.layer_activation_bytes == 34 * s * h
    embedding = 8 * s + s * h
    assert gpt3.activation_bytes(0, 8) == pytest.approx(8 * (12 * 34 * s * h + embedding) / 8)
    assert gpt3.dense_bytes_per_parameter == 18


# ---- refusals ----


def test_a_missing_data_parallel_size_comes_from_the_world_size_or_is_refused(monkeypatch) -> None:
    known = ours.compute_weight_and_optimizer_memory(container(8, tensor_model_parallel_size=2))
    config = container(None, tensor_model_parallel_size=2)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SpecError, match="data_parallel_size is not set"):
        ours.compute_weight_and_optimizer_memory(config)
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert ours.compute_weight_and_optimizer_memory(config) == known
    monkeypatch.setenv("WORLD_SIZE", "15")
    with pytest.raises(SpecError, match=r"WORLD_SIZE \(15\) is not divisible"):
        ours.compute_weight_and_optimizer_memory(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": None}, "model.vocab_size is not set"),
        ({"hidden_size": 0}, r"model.hidden_size \(0\)"),
        ({"num_moe_experts": 8, "moe_layer_freq": [1, 0]}, "moe_layer_freq has 2 entries for 32 layers"),
        ({"num_moe_experts": 8, "moe_layer_freq": "x"}, "model.moe_layer_freq is 'x'; give a number, or a list"),
        ({"num_moe_experts": 8, "expert_model_parallel_size": 3}, "not divisible by expert_model_parallel_size"),
        ({"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 40}, "do not fit num_layers"),
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
    from bridge_memory.estimate import estimate
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
