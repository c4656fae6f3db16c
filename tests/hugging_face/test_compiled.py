"""Layers and losses that torch.compile makes, beside what Inductor's own partitioner keeps; torchtune's modules."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import compiled_oracle as real
import torch
import tune_oracle

from bridge_memory import BatchSpec, DataParallelSpec, ImplementationSpec, OptimizerSpec, RunSpec, estimate
from bridge_memory.inventory.stack import chunk_inventory
from bridge_memory.inventory.torch.blocks import layer_block
from bridge_memory.readers.huggingface import model_from_hf_config
from bridge_memory.spec import PrecisionSpec
from bridge_memory.spec.layout import layout
from bridge_memory.spec.transformers import COMPILED, TransformersSpec
from bridge_memory.tapes.context import context_of

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000,
    "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
#: Of the counters that the flash kernel keeps: seed, offset and, of no use, an empty one.
COUNTERS = 24


def run_of(
    config: dict[str, Any] | None = None, batch: int = 2, seq: int = 1024, impl: str = "transformers",
    optimizer: OptimizerSpec | None = None, **fields: Any,
) -> RunSpec:  # fmt: skip
    given: dict[str, Any] = {"attention_mask": "none", "transformers_version": (5, 12), **fields}
    return RunSpec(
        model=model_from_hf_config({**CONFIG, **(config or {})}, "small"),
        batch=BatchSpec(seq_length=seq, micro_batch_size=batch), precision=PrecisionSpec(params_dtype="bf16"),
        implementation=ImplementationSpec(transformer_impl=impl), transformers=TransformersSpec(**given),
        data_parallel=DataParallelSpec(engine="single"), optimizer=optimizer or OptimizerSpec(optimizer="adamw"),
    )  # fmt: skip


def of_model(run: RunSpec) -> Any:
    ((shape,),) = layout(run.model, run.parallel).shapes(run.model)
    return chunk_inventory(run.model, shape, context_of(run))


SIZES = {
    "3B": {"hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 24, "num_key_value_heads": 8,
           "head_dim": 128},
    "without groups": {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8,
                       "num_key_value_heads": 8},
    "wide": {"num_key_value_heads": 2, "intermediate_size": 8192},
}  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", COMPILED)
def test_a_layer_keeps_what_the_partitioner_keeps(kind: str, size: str) -> None:
    config = {**CONFIG, **SIZES[size], "model_type": kind}
    run = run_of(config, batch=2, seq=2048, torch_compile=True)
    kept = real.kept_by_layer(config, 2, 2048)
    ours = layer_block(run.model.layers[0], context_of(run)).cost.retained
    assert abs(ours - sum(kept.values())) <= COUNTERS, kept


def test_a_model_compiled_with_its_loss_keeps_logits_in_bf16() -> None:
    """Tables of rotation are counted beside, and labels."""
    run = run_of(torch_compile=True)
    kept = real.kept_by_model(CONFIG, 2, 1024)
    assert of_model(run).retained == pytest.approx(sum(kept.values()), rel=1e-3)
    logits = 2 * 1024 * 32000 * 2
    assert logits in kept.values() and 2 * logits not in kept.values()


def test_a_compiled_loss_keeps_its_input_and_two_numbers_a_row() -> None:
    def loss(logits: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")

    kept = real.kept_by_loss(1024, 32000, loss)
    assert sorted(kept.values()) == [4096, 4096, 8 * 1024, 1024 * 32000 * 2]


@pytest.mark.parametrize("change", [
    {"attn_implementation": "eager"}, {"attention_mask": "padded"}, {"use_cache": True},
    {"liger_kernel": ("rms_norm",)},
])  # fmt: skip
def test_what_was_not_recorded_stays_a_gap(change: dict[str, Any]) -> None:
    run = run_of(torch_compile=True, **change)
    assert not run.layers_compiled
    assert any("torch_compile" in str(feature) for feature in estimate(run).not_modelled)


# ---- torchtune ----

needs_torchtune = pytest.mark.skipif(not tune_oracle.available(), reason="needs torchtune")


@needs_torchtune
@pytest.mark.parametrize("size", SIZES)
def test_a_compiled_layer_of_torchtune(size: str) -> None:
    config = {**CONFIG, **SIZES[size]}
    run = run_of(config, batch=2, seq=2048, impl="torchtune", torch_compile=True)
    kept = tune_oracle.kept_by_layer(config, 2, 2048)
    ours = layer_block(run.model.layers[0], context_of(run)).cost.retained
    assert abs(ours - sum(kept.values())) <= COUNTERS, kept


@needs_torchtune
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("vocab_size", [512, 60000])
@pytest.mark.parametrize("chunks", [0, 2, 8])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_layers_and_loss_of_torchtune(chunks: int, vocab_size: int, tied: bool, checkpoints: bool) -> None:
    config = {**CONFIG, "vocab_size": vocab_size, "tie_word_embeddings": tied, "max_position_embeddings": 1024,
              "num_hidden_layers": 4}  # fmt: skip
    run = run_of(config, impl="torchtune", num_output_chunks=chunks, gradient_checkpointing=checkpoints,
                 optimizer_in_bwd=True)  # fmt: skip
    ours, found = of_model(run), tune_oracle.measure(config, 2, 1024, chunks, checkpoints=checkpoints)
    assert abs(ours.retained - found.retained) <= 1024
    assert ours.forward_peak == pytest.approx(found.forward, rel=0.06)
    assert ours.backward_peak == pytest.approx(found.backward, rel=0.001)
