"""State-space mixers without Transformer Engine: what a layer keeps and its peaks, against megatron-core's own."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")
pytest.importorskip("einops")

from bridge_memory.readers import resolve_model
from bridge_memory.rehearsal.compare import compare_layer
from bridge_memory.spec import (
    AttentionSpec,
    BatchSpec,
    GatedDeltaNetSpec,
    ImplementationSpec,
    LayerSpec,
    MambaSpec,
    MLPSpec,
    ModelSpec,
    ParallelSpec,
    RunSpec,
)

LOCAL = ImplementationSpec(transformer_impl="local", moe_grouped_gemm=False)
MIXERS = [
    ("nvidia/Nemotron-H-56B-Base-8K", MambaSpec),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", MambaSpec),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", GatedDeltaNetSpec),
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", AttentionSpec),
]


def check(
    model: ModelSpec, layer: int, implementation: ImplementationSpec, *, tp: int = 1, ep: int = 1, batch: int = 1
) -> None:
    """A fifth of a per cent of what is kept, half a per cent of both peaks."""
    run = RunSpec(
        model=model,
        parallel=ParallelSpec(
            world_size=32, tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1
        ),
        batch=BatchSpec(seq_length=2048, micro_batch_size=batch),
        implementation=implementation,
    )
    found = compare_layer(run, layer)
    explained = "\n" + "\n".join(found.lines())
    assert abs(found.saved_error) <= 0.002, explained
    assert abs(found.forward_error) <= 0.005, explained
    assert abs(found.backward_error) <= 0.005, explained


def check_mixer(name: str, mixer: type, implementation: ImplementationSpec, *, tp: int, batch: int) -> None:
    """The first layer with this mixer; a small MLP in place of experts, which are larger than the mixers."""
    model = resolve_model(name)
    if mixer is not MambaSpec:
        layers = tuple(LayerSpec(layer.mixer, MLPSpec(1024, gated=True)) for layer in model.layers)
        model = replace(model, layers=layers, mtp_num_layers=0, mtp_layer=None)
    index = next(i for i, layer in enumerate(model.layers) if isinstance(layer.mixer, mixer))
    check(model, index, implementation, tp=tp, batch=batch)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("name", "mixer"), MIXERS)
def test_a_mixer(name: str, mixer: type, tp: int, batch: int) -> None:
    check_mixer(name, mixer, LOCAL, tp=tp, batch=batch)
