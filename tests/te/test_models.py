"""Mixers and experts of published models under Transformer Engine: one layer each, tensor by tensor, peaks included."""

from __future__ import annotations

from typing import Any

import pytest
from installed import HERE
from test_saved_tensors import GQA, model
from test_state_space_layers import MIXERS, check, check_mixer

from bridge_memory.readers import resolve_model
from bridge_memory.rehearsal import model as rehearsed
from bridge_memory.rehearsal.compare import compare_layer
from bridge_memory.rehearsal.world import installed_release
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    ImplementationSpec,
    MLPSpec,
    MoESpec,
    ParallelSpec,
    RunSpec,
)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("name", "mixer"), MIXERS)
def test_a_mixer(name: str, mixer: type, tp: int, batch: int) -> None:
    """Mamba copies more than one sequence to batch first, and the copy's source is a variable to the mixer's end. At
    TP 2 a rank of Qwen3-Next has one query group, of which the gate is a view: all of q, gate, k and v is kept."""
    check_mixer(name, mixer, ImplementationSpec(transformer_engine=HERE), tp=tp, batch=batch)


@pytest.mark.parametrize("heads", [(32, 8), (32, 32), (32, 1), (8, 2)])
@pytest.mark.parametrize("norm", [None, "head"])
@pytest.mark.parametrize("tp", [1, 2])
def test_output_gates(heads: tuple[int, int], norm: Any, tp: int) -> None:
    if heads[1] % tp:
        pytest.skip("fewer groups than ranks")
    attention = AttentionSpec(*heads, 128, attention_output_gate=True, qk_layernorm=norm)
    check(model(attention, MLPSpec(2048, gated=True), 4096), 1, ImplementationSpec(transformer_engine=HERE), tp=tp)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("router", [None, "fp32"])
@pytest.mark.parametrize("ep", [1, 4])
def test_experts_with_biases(fused: bool, router: Any, ep: int) -> None:
    """gpt-oss: fc2's biases, weighted, are added expert by expert, in the router's dtype if that is wider."""
    implementation = ImplementationSpec(transformer_engine=HERE, bias_activation_fusion=fused, moe_router_dtype=router)
    check(resolve_model("openai/gpt-oss-20b"), 0, implementation, ep=ep)


@pytest.mark.parametrize("router", [None, "fp32"])
@pytest.mark.parametrize("activation", ["silu", "squared_relu"])
def test_an_activation_times_its_probability(activation: str, router: Any) -> None:
    """Unfused, backward multiplies the gradient with both factors before it casts and sums."""
    experts = MoESpec(8, 2, 14336, gated=activation == "silu", activation=activation)
    implementation = ImplementationSpec(transformer_engine=HERE, bias_activation_fusion=False, moe_router_dtype=router)
    check(model(GQA, experts, 4096), 1, implementation, ep=4)


@pytest.mark.skipif((installed_release() or (0, 0)) < (0, 16), reason="before, attention knows nothing of YaRN")
@pytest.mark.parametrize(("tp", "batch", "seq"), [(1, 1, 1024), (2, 1, 4096), (1, 2, 2048)])
def test_yarn_is_not_fused(tp: int, batch: int, seq: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss: whatever the option says, megatron-core rotates unfused where YaRN multiplies cosine and sine."""

    def asked(run: RunSpec, **more: Any) -> Any:
        config = of_run(run, **more)
        config.apply_rope_fusion, config.yarn_rotary_scaling_factor = True, 32.0
        return config

    of_run = rehearsed.transformer_config
    monkeypatch.setattr(rehearsed, "transformer_config", asked)
    run = RunSpec(
        model=resolve_model("openai/gpt-oss-20b"),
        parallel=ParallelSpec(
            world_size=64, tensor_model_parallel_size=tp, expert_model_parallel_size=4, expert_tensor_parallel_size=1
        ),
        batch=BatchSpec(seq_length=seq, micro_batch_size=batch),
        implementation=ImplementationSpec(transformer_engine=HERE),
    )
    found = compare_layer(run, 1)
    assert max(map(abs, (found.saved_error, found.forward_error, found.backward_error))) < 3e-4, found.lines()
