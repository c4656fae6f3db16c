"""Mixers and experts of published models under Transformer Engine: one layer each, tensor by tensor, peaks included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bridge_memory.readers import resolve_model
from bridge_memory.rehearse.compare import compare_layer
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    GatedDeltaNetSpec,
    ImplementationSpec,
    LayerSpec,
    MambaSpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    ParallelSpec,
    RunSpec,
)

NEMOTRON_H, NEMOTRON_NANO = "nvidia/Nemotron-H-56B-Base-8K", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
QWEN3_NEXT, GPT_OSS = "Qwen/Qwen3-Next-80B-A3B-Instruct", "openai/gpt-oss-20b"


def check(model: ModelSpec, layer: int, *, tp: int = 1, ep: int = 1, batch: int = 1, **impl: Any) -> None:
    """A fifth of a per cent of what is kept, half a per cent of both peaks."""
    run = RunSpec(
        model=model,
        parallel=ParallelSpec(
            world_size=32, tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1
        ),
        batch=BatchSpec(seq_length=2048, micro_batch_size=batch),
        implementation=ImplementationSpec(**impl),
    )
    found = compare_layer(run, layer)
    explained = "\n" + "\n".join(found.lines())
    assert abs(found.saved_error) <= 0.002, explained
    assert abs(found.forward_error) <= 0.005, explained
    assert abs(found.backward_error) <= 0.005, explained


def first(model: ModelSpec, mixer: type) -> int:
    return next(i for i, layer in enumerate(model.layers) if isinstance(layer.mixer, mixer))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", [NEMOTRON_H, NEMOTRON_NANO])
def test_mamba(name: str, tp: int, batch: int) -> None:
    """More than one sequence is copied to batch first, and the copy's source is a variable to the mixer's end."""
    model = resolve_model(name)
    check(model, first(model, MambaSpec), tp=tp, batch=batch)


def with_an_mlp(name: str) -> ModelSpec:
    """Without the experts, which are larger than the mixers."""
    model = resolve_model(name)
    layers = tuple(LayerSpec(layer.mixer, MLPSpec(1024, gated=True)) for layer in model.layers)
    return replace(model, layers=layers, mtp_num_layers=0, mtp_layer=None)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("mixer", [GatedDeltaNetSpec, AttentionSpec])
def test_both_mixers_of_qwen3_next(mixer: type, tp: int, batch: int) -> None:
    """At TP 2 a rank has one query group, of which the gate is a view: the whole of q, gate, k and v is kept."""
    model = with_an_mlp(QWEN3_NEXT)
    check(model, first(model, mixer), tp=tp, batch=batch)


@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (32, 1), (8, 2)])
@pytest.mark.parametrize("norm", [None, "head"])
@pytest.mark.parametrize("tp", [1, 2])
def test_output_gates(heads: tuple[int, int], norm: Any, tp: int) -> None:
    if heads[1] % tp:
        pytest.skip("fewer groups than ranks")
    attention = AttentionSpec(*heads, 128, attention_output_gate=True, qk_layernorm=norm)
    layer = LayerSpec(attention, MLPSpec(2048, gated=True))
    check(ModelSpec(name="two layers", model_type="test", hidden_size=4096, vocab_size=32000, layers=(layer,) * 2), 1,
          tp=tp)  # fmt: skip


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("router", [None, "fp32"])
@pytest.mark.parametrize("ep", [1, 4])
def test_experts_with_biases(fused: bool, router: Any, ep: int) -> None:
    """gpt-oss: fc2's biases, weighted, are added expert by expert, in the router's dtype if that is wider."""
    check(resolve_model(GPT_OSS), 0, ep=ep, bias_activation_fusion=fused, moe_router_dtype=router)


@pytest.mark.parametrize("router", [None, "fp32"])
@pytest.mark.parametrize("activation", ["silu", "squared_relu"])
def test_an_activation_times_its_probability(activation: str, router: Any) -> None:
    """Unfused, backward multiplies the gradient with both factors before it casts and sums."""
    experts = MoESpec(8, 2, 14336, gated=activation == "silu", activation=activation)
    layer = LayerSpec(AttentionSpec(32, 8, 128), experts)
    model = ModelSpec(name="two layers", model_type="test", hidden_size=4096, vocab_size=32000, layers=(layer,) * 2)
    check(model, 1, ep=4, bias_activation_fusion=False, moe_router_dtype=router)
