"""DeepSeek Sparse Attention through cuDNN's and FlashMLA's kernels: what their autograd functions are seen to keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bridge_memory import SpecError
from bridge_memory.caveats.unmodelled import unmodelled_features
from bridge_memory.inventory.layer import layer_block
from bridge_memory.spec import (
    BatchSpec,
    ImplementationSpec,
    IndexerSpec,
    LayerSpec,
    MLASpec,
    ModelSpec,
    ParallelSpec,
    RunSpec,
    SparseSpec,
)
from bridge_memory.tapes.context import context_of

T, HEADS, TOPK = 4096, 64, 2048
CUDNN = SparseSpec(topk=TOPK, kernels="cudnn", sparse_loss=True)
#: GLM-5's attention.
GLM = MLASpec(HEADS, 2048, 512, 192, 64, 256, True, False, IndexerSpec(32, 128), CUDNN)


def run_of(mixer: MLASpec, tp: int = 1, **fields: Any) -> RunSpec:
    model = ModelSpec("GLM-5 attention", "gpt", 6144, 4096, (LayerSpec(mixer, None),), rotary_dim=64)
    parallel = ParallelSpec(world_size=tp, tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
    return RunSpec(
        model=model, parallel=parallel, batch=BatchSpec(seq_length=T),
        implementation=ImplementationSpec(megatron_core=(0, 19), **fields),
    )  # fmt: skip


def kept(mixer: MLASpec, tp: int = 1, **fields: Any) -> dict[str, int]:
    run = run_of(mixer, tp, **fields)
    return {t.name: t.bytes for t in layer_block(run.model.layers[0], context_of(run)).cost.tensors}


def test_what_the_functions_keep() -> None:
    """``FusedIndexerSparseAttnFunc``: query, key, indices in int32, output, log-sum-exp, and gradients of the indexer's
    query, key and weights; the output is what the value's up-projection keeps too."""
    found = kept(GLM)
    assert found["query"] == T * HEADS * 576 * 2
    assert found["key"] == T * 576 * 2
    assert found["chosen keys for backward"] == 4 * T * TOPK
    assert found["attention context"] == T * HEADS * 512 * 2
    assert found["log-sum-exp of the chosen keys"] == 4 * T * HEADS
    assert found["gradient of the indexer query"] == T * 32 * 128 * 2
    assert found["gradient of the indexer key"] == T * 128 * 2
    assert found["gradient of the indexer weights"] == T * 32 * 2
    # No scores, and nothing of the indexer's own forward pass but the inputs of its linears and norms.
    assert not [name for name in found if "scores" in name or name == "chosen keys of every token"]


def test_without_a_loss_the_choice_itself_is_kept() -> None:
    found = kept(replace(GLM, sparse=replace(CUDNN, indexer_loss=False)))
    assert found["chosen keys of every token"] == 4 * T * TOPK
    assert "chosen keys for backward" not in found
    assert not [name for name in found if name.startswith("gradient of")]


def test_heads_are_padded_to_what_the_kernel_takes() -> None:
    """32 heads a rank run as 64, whose output and statistics a slice holds."""
    found = kept(GLM, tp=2)
    assert found["log-sum-exp of the chosen keys"] == 4 * T * 64
    assert found["attention context"] == T * 64 * 512 * 2


@pytest.mark.parametrize(
    ("mixer", "fields"),
    [
        (replace(GLM, kv_lora_rank=256), {}),
        (replace(GLM, num_attention_heads=48), {}),
        (GLM, {"attention_backend": "unfused"}),
        (replace(GLM, sparse=replace(CUDNN, kernels="none")), {}),
    ],
)
def test_what_the_kernels_decline_torch_runs(mixer: MLASpec, fields: dict[str, Any]) -> None:
    """Exponentials and shares of all heads, queries and keys in fp32."""
    found = kept(mixer, **fields)
    assert found["exponentials"] == 4 * mixer.num_attention_heads * T * T


def test_what_is_not_counted_is_listed() -> None:
    other = run_of(replace(GLM, sparse=replace(CUDNN, kernels="tilelang")))
    assert any("dsa_kernel_backend (tilelang)" in feature for feature in unmodelled_features(other))
    old = replace(run_of(GLM), implementation=ImplementationSpec(megatron_core=(0, 18)))
    assert any("megatron-core 0.18" in feature for feature in unmodelled_features(old))


def test_refusals() -> None:
    with pytest.raises(SpecError, match=r"dsa_kernel_backend .* is unknown; use one of none, tilelang, cudnn"):
        run_of(replace(GLM, sparse=replace(CUDNN, kernels="triton")))
    with pytest.raises(SpecError, match="topk"):
        run_of(replace(GLM, sparse=replace(CUDNN, topk=0)))
    with pytest.raises(SpecError, match="set sparse too"):
        run_of(replace(GLM, sparse=None))
    with pytest.raises(SpecError, match="use all_gather"):
        replace(run_of(GLM), parallel=ParallelSpec(world_size=2, context_parallel_size=2))
    with pytest.raises(SpecError, match="set sequence_parallel to True"):
        replace(
            run_of(GLM),
            parallel=ParallelSpec(world_size=2, tensor_model_parallel_size=2, sequence_parallel=False),
        )
