"""Corners that random layouts found: each beside megatron-core itself."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from parameters_of import stage_parameters

from bridge_memory.readers import resolve_model
from bridge_memory.readers.presets import list_presets
from bridge_memory.rehearsal.imports import placeholder_packages
from bridge_memory.rehearsal.model import NotBuildable, build_chunks
from bridge_memory.rehearsal.patches.replace import replaced
from bridge_memory.rehearsal.rank import on_rank
from bridge_memory.rehearsal.run import rehearse
from bridge_memory.rehearsal.summary import ComparedQuantity, Quantity, rows
from bridge_memory.rehearsal.world import installed_release
from bridge_memory.spec import BatchSpec, ImplementationSpec, ParallelSpec, RecomputeSpec, RunSpec
from bridge_memory.spec.model import ModelSpec

LOCAL = ImplementationSpec(
    transformer_impl="local", moe_grouped_gemm=False, megatron_core=installed_release() or (0, 16)
)


def first_layers(name: str, number: int) -> ModelSpec:
    model = resolve_model(name)
    return replace(model, layers=model.layers[:number], mtp_num_layers=0, mtp_layer=None)


def table(run: RunSpec, stage: int = 0) -> dict[Quantity, ComparedQuantity]:
    return {row.quantity: row for row in rows(rehearse(run, stage))}


@pytest.mark.parametrize("name", list_presets())
def test_parameters_come_in_the_order_in_which_modules_register_them(name: str) -> None:
    """By which DDP fills its buffers and cuts them into buckets and shards."""
    model = first_layers(name, 6)
    experts = max((layer.ffn.num_experts for layer in model.layers if hasattr(layer.ffn, "num_experts")), default=1)
    parallel = ParallelSpec(world_size=experts, expert_model_parallel_size=experts)
    run = RunSpec(model=model, parallel=parallel, batch=BatchSpec(seq_length=256), implementation=LOCAL)
    with on_rank(run, 0):
        try:
            real = [name for chunk in build_chunks(run) for name, _ in chunk.named_parameters()]
        except NotBuildable as error:
            pytest.skip(str(error))
    assert [p.name for chunk in stage_parameters(run, 0) for p in chunk] == real


@pytest.mark.parametrize(("gpus", "ep", "tp"), [(2, 2, 1), (8, 2, 4), (32, 16, 4)])
def test_padding_between_parameters_has_no_optimizer_state(gpus: int, ep: int, tp: int) -> None:
    """Softmax offsets, 16 on a rank of 4: the gap after them is in the buffer and in nobody's state."""
    run = RunSpec(
        model=first_layers("openai/gpt-oss-20b", 1), implementation=LOCAL, batch=BatchSpec(seq_length=256),
        parallel=ParallelSpec(
            world_size=gpus, tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=1
        ),
    )  # fmt: skip
    found = table(run)
    for quantity in (Quantity.WEIGHTS, Quantity.GRADIENTS, Quantity.OPTIMIZER):
        assert found[quantity].difference == 0, quantity


@pytest.mark.parametrize("name", ["meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-8B", "deepseek-ai/DeepSeek-V3"])
def test_recomputed_attention_copies_the_gradient_of_its_values(name: str) -> None:
    """Not where keys and values are repeated. 4,096 tokens, so that attention is the highest in backward."""
    run = RunSpec(
        model=first_layers(name, 1), implementation=LOCAL, batch=BatchSpec(seq_length=4096),
        parallel=ParallelSpec(world_size=1), recompute=RecomputeSpec(granularity="selective", modules=("core_attn",)),
    )  # fmt: skip
    backward = table(run)[Quantity.BACKWARD]
    assert backward.found is not None and abs(backward.predicted / backward.found - 1) < 1e-4


def test_queries_keys_and_values_of_latent_attention_stay_to_its_end() -> None:
    """Variables of ``MultiLatentAttention.forward``, which nothing else keeps in a first pass without gradients: the
    output projection makes its sum beside them. 16 of 128 heads on each of 8 ranks."""
    run = RunSpec(
        model=first_layers("deepseek-ai/DeepSeek-V3", 2), implementation=LOCAL, batch=BatchSpec(seq_length=512),
        parallel=ParallelSpec(world_size=16, tensor_model_parallel_size=8, pipeline_model_parallel_size=2),
        recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1),
    )  # fmt: skip
    forward = table(run)[Quantity.FORWARD]
    assert forward.found == forward.predicted >= 512 * 2 * (16 * (2 * 192 + 128 + 128) + 7168)


def test_a_stage_without_layers_has_no_optimizer() -> None:
    run = RunSpec(
        model=first_layers("meta-llama/Llama-3.2-1B", 2), implementation=LOCAL, batch=BatchSpec(seq_length=256),
        parallel=ParallelSpec(
            world_size=4, pipeline_model_parallel_size=4, pipeline_model_parallel_layout="Et||t|L"
        ),
    )  # fmt: skip
    assert table(run, 1)[Quantity.OPTIMIZER] == ComparedQuantity(Quantity.OPTIMIZER, 0, 0)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_deterministic_unpermutation_keeps_its_rows(dispatcher: str) -> None:
    """And hidden dropout keeps nothing but masks."""
    model = replace(first_layers("mistralai/Mixtral-8x7B-v0.1", 2), hidden_dropout=0.1)
    saved = {}
    for deterministic in (True, False):
        implementation = replace(LOCAL, deterministic_mode=deterministic, moe_token_dispatcher_type=dispatcher)
        run = RunSpec(
            model=model, implementation=implementation, batch=BatchSpec(seq_length=512),
            parallel=ParallelSpec(world_size=4, expert_model_parallel_size=2, pipeline_model_parallel_size=2),
        )  # fmt: skip
        row = table(run)[Quantity.SAVED]
        assert row.found is not None and abs(row.predicted / row.found - 1) < 1e-4
        saved[deterministic] = row.predicted
    # Two experts a token, two bytes an element; and an index of 8 bytes a token.
    assert saved[True] - saved[False] == 512 * 2 * 4096 * 2 + 512 * 8


def test_a_chunk_without_layers_keeps_what_it_received() -> None:
    """The schedule does; the copy that it sends, the next input and the last one's gradient pass by. 512 tokens."""
    run = RunSpec(
        model=first_layers("meta-llama/Llama-3.2-1B", 3), implementation=LOCAL, batch=BatchSpec(seq_length=512),
        parallel=ParallelSpec(
            world_size=4, pipeline_model_parallel_size=4, pipeline_model_parallel_layout="Et|tt||L"
        ),
    )  # fmt: skip
    found, hidden = table(run, 2), 512 * 2048 * 2
    for quantity, states in ((Quantity.SAVED, 1), (Quantity.FORWARD, 3), (Quantity.BACKWARD, 3)):
        assert found[quantity] == ComparedQuantity(quantity, states * hidden, states * hidden)


def test_what_the_embedding_looked_up_stays_to_its_end() -> None:
    """Variables of ``LanguageModelEmbedding.forward``: words, positions, their sum, and its transpose."""
    run = RunSpec(
        model=first_layers("openai/GPT-3-175B", 2), implementation=LOCAL,
        batch=BatchSpec(seq_length=512, micro_batch_size=3),
        parallel=ParallelSpec(world_size=16, tensor_model_parallel_size=8, pipeline_model_parallel_size=2),
        recompute=RecomputeSpec(granularity="full", method="uniform", num_layers=1),
    )  # fmt: skip
    forward = table(run)[Quantity.FORWARD]
    assert forward.found is not None and forward.predicted >= 4 * 3 * 512 * 12288 * 2
    assert abs(forward.predicted / forward.found - 1) < 0.005


@pytest.mark.parametrize("stage", [0, 1])
def test_recomputed_norms_give_their_inputs_gradients(stage: int) -> None:
    """Before megatron-core 0.16 the rehearsal lost them to the hooks by which it sees saved tensors."""
    run = RunSpec(
        model=first_layers("meta-llama/Llama-2-7b-hf", 2), implementation=LOCAL, batch=BatchSpec(seq_length=4096),
        parallel=ParallelSpec(world_size=2, pipeline_model_parallel_size=2),
        recompute=RecomputeSpec(granularity="selective", modules=("layernorm",)),
    )  # fmt: skip
    backward = table(run, stage)[Quantity.BACKWARD]
    assert backward.found is not None and abs(backward.predicted / backward.found - 1) < 1e-3


def test_what_a_release_has_not_is_not_replaced() -> None:
    """Where a whole module is missing, what would be in it is None."""
    with replaced(None, "tracker", {}), replaced(pytest, "no_such_name", 1):
        assert not hasattr(pytest, "no_such_name")


def test_a_placeholder_of_triton_has_kernels_with_configurations() -> None:
    """Which megatron-core 0.19 compares when it is to be deterministic (``ssm/ops/determinism.py``)."""
    with placeholder_packages("triton"):
        triton = importlib.import_module("triton")
        found = [triton.Config({"BLOCK_SIZE_M": size}, num_warps=4, num_stages=2) for size in (128, 64)]
    assert [(c.kwargs, c.num_warps, c.num_stages) for c in found] == [
        ({"BLOCK_SIZE_M": 128}, 4, 2), ({"BLOCK_SIZE_M": 64}, 4, 2)
    ]  # fmt: skip
