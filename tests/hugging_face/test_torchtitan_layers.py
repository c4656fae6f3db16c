"""torchtitan's layers as they are recorded beside torchtitan's own, with its selective and full checkpointing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("transformers")

from titan_oracle import available, kept_by_layer, measure, reserved

from bridge_memory import BatchSpec, ImplementationSpec, ParallelSpec, RunSpec, SpecError
from bridge_memory.inventory.stack import chunk_inventory
from bridge_memory.inventory.torch.blocks import layer_block
from bridge_memory.readers.huggingface import model_from_hf_config
from bridge_memory.reserved import replayed
from bridge_memory.spec import DataParallelSpec, OptimizerSpec, PeftSpec, PrecisionSpec
from bridge_memory.spec.engine_options import FSDPOptions
from bridge_memory.spec.layout import layout
from bridge_memory.spec.transformers import TransformersSpec
from bridge_memory.tapes.context import context_of

#: Of torchtitan's sizes: the feed-forward block's are 8 h / 3 up to a multiple.
CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 640, "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}  # fmt: skip


def run_of(mode: str = "none", option: str = "op", **fields: Any) -> RunSpec:
    given: dict[str, Any] = {"gradient_checkpointing": mode == "full"}
    if mode == "full":
        given["use_reentrant"] = False
    if mode == "selective":
        given["selective_ac_option"] = option
    return RunSpec(
        model=model_from_hf_config({**CONFIG, **fields.pop("config", {})}, "small"),
        batch=fields.pop("batch", None) or BatchSpec(seq_length=128, micro_batch_size=2, global_batch_size=4),
        precision=PrecisionSpec(params_dtype="bf16"), data_parallel=DataParallelSpec(engine="single"),
        implementation=ImplementationSpec(transformer_impl="torchtitan"),
        transformers=TransformersSpec(attention_mask="none", **given, **fields),
    )


@pytest.mark.skipif(not available(), reason="needs torchtitan")
@pytest.mark.parametrize("vocab_size", [64, 20000])
@pytest.mark.parametrize(("mode", "option"), [
    ("none", ""), ("full", ""), ("selective", "op"), ("selective", "2"), ("selective", "3"),
])  # fmt: skip
def test_layers_and_checkpoints(mode: str, option: str, vocab_size: int) -> None:
    config = {"vocab_size": vocab_size}
    run = run_of(mode, option, config=config)
    ((shape,),) = layout(run.model, run.parallel).shapes(run.model)
    ours, real = chunk_inventory(run.model, shape, context_of(run)), measure({**CONFIG, **config}, 2, 128, mode, option)
    assert 0 <= ours.retained - real.retained <= 3072
    # Forward what a layer is to keep of all its products is counted from its beginning.
    assert ours.forward_peak == pytest.approx(real.forward, rel=0.03 if option == "op" else 0.01)
    assert ours.backward_peak == pytest.approx(real.backward, rel=0.005)


@pytest.mark.skipif(not available(), reason="needs torchtitan")
@pytest.mark.parametrize("groups", [2, 8])
def test_a_compiled_layer(groups: int) -> None:
    """Beside a counter of the kernel's."""
    config = {**CONFIG, "num_key_value_heads": groups}
    run = run_of(torch_compile=True, config={"num_key_value_heads": groups}, batch=BatchSpec(seq_length=512))
    kept = kept_by_layer(config, 1, 512)
    ours = layer_block(run.model.layers[0], context_of(run)).cost.retained
    assert abs(ours - sum(kept.values())) <= 24, kept


@pytest.mark.skipif(not available(), reason="needs torchtitan")
@pytest.mark.parametrize("groups", [2, 8])
def test_a_compiled_layer_whose_operations_are_kept(groups: int) -> None:
    """Backward asks for the layer's input, wq's, wv's and w1's products, and attention's output: not for w2's."""
    config = {**CONFIG, "num_key_value_heads": groups}
    given: dict[str, Any] = {"config": {"num_key_value_heads": groups}, "batch": BatchSpec(seq_length=512)}
    whole, run = (run_of(mode, torch_compile=True, **given) for mode in ("full", "selective"))
    kept = kept_by_layer(config, 1, 512, "selective")
    ((shape,),) = layout(run.model, run.parallel).shapes(run.model)
    ours, inputs = (chunk_inventory(r.model, shape, context_of(r)).retained for r in (run, whole))
    # The layer's input, which both keep; a counter of the kernel's.
    assert abs((ours - inputs) / 4 + 512 * 256 * 2 - sum(kept.values())) <= 24, kept


def test_op_keeps_attention_and_every_second_product_by_hand() -> None:
    """256 tokens of a layer: its input, wq, wv, w1 and w2 of 256 + 64 + 768 + 256, attention's 256 in bf16 and 8
    statistics in fp32; nothing else."""
    run, whole = run_of("selective", "op"), run_of("full")
    ((shape,),) = layout(run.model, run.parallel).shapes(run.model)
    ours, inputs = (chunk_inventory(r.model, shape, context_of(r)).retained for r in (run, whole))
    assert ours - inputs == 4 * 256 * (2 * (256 + 64 + 768 + 256 + 256) + 4 * 8)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"transformers": TransformersSpec(selective_ac_option="op", gradient_checkpointing=True)}, "drop one"),
        ({"transformers": TransformersSpec(liger_kernel=("rope",))}, "liger_kernel"),
        ({"peft": PeftSpec(scheme="lora", dim=8, target_modules=("q_proj",))}, "peft.scheme"),
        ({"model": "Qwen/Qwen3-0.6B"}, "model_type .qwen3."),
        ({"implementation": ImplementationSpec(transformer_impl="transformers"),
          "transformers": TransformersSpec(selective_ac_option="2")}, "selective_ac_option"),
    ],
)
def test_what_it_cannot_do_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        run_of().with_(**change)


@pytest.mark.skipif(not available(), reason="needs torchtitan")
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_reserved_memory_under_fsdp2(mode: str) -> None:
    """torchtitan's own model and checkpoints under the real engine, and the estimate's storages: both replayed through
    torch's allocator. Nothing but the real sizes of a model makes more than the pages that any has."""
    config = {
        **CONFIG, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 4,
        "num_hidden_layers": 3, "vocab_size": 64000,
    }  # fmt: skip
    small = run_of(mode, config=config)
    run = small.with_(
        parallel=ParallelSpec(world_size=8), batch=BatchSpec(seq_length=4096, micro_batch_size=2, global_batch_size=16),
        precision=PrecisionSpec(params_dtype="fp32"), data_parallel=DataParallelSpec(engine="fsdp2"),
        optimizer=OptimizerSpec(optimizer="adamw", torch_implementation="fused"),
        fsdp=FSDPOptions(param_dtype="bf16", reduce_dtype="fp32", auto_wrap_policy="torchtitan"),
        implementation=replace(small.implementation, cublas_workspace_bytes=0),
    )
    ours, real = replayed(run), reserved(config, 2, 4096, 8, mode)
    assert ours.segments == pytest.approx(real.segments, rel=0.015)
    assert ours.expandable == pytest.approx(real.expandable, rel=0.015)
    for name, nbytes in real.expandable_of:
        assert dict(ours.expandable_of)[name] == pytest.approx(nbytes, rel=0.02, abs=2 * (20 << 20))
