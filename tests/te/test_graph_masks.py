"""Masks of Transformer Engine's graphs, counted in what megatron-core itself hands to the capture."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory.readers import resolve_model
from bridge_memory.spec import BatchSpec, ImplementationSpec, ParallelSpec, RunSpec
from bridge_memory.spec.graphs import static_masks
from bridge_memory.spec.layout import layout

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")


@pytest.fixture(autouse=True)
def with_keywords(monkeypatch: pytest.MonkeyPatch) -> None:
    """``make_graphed_callables`` takes keyword arguments in every Transformer Engine since 1.10."""
    from megatron.core.transformer import cuda_graphs

    monkeypatch.setattr(cuda_graphs, "is_te_min_version", lambda *_: True)


def distinct_masks(layers: list[int], rank: int, pp: int, m: int, group: int) -> int:
    """Masks that ``_get_sample_arguments`` makes on one rank with ``layers`` in its chunks, by the real schedule."""
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table
    from megatron.core.transformer import cuda_graphs

    chunks = len(layers)
    peers = SimpleNamespace(
        pp_group=SimpleNamespace(size=lambda: pp, rank=lambda: rank),
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )
    warmup = get_pp_rank_microbatches(m, chunks, group, False, p2p_communicator=peers)[2]
    order = cuda_graphs.convert_schedule_table_to_order(warmup, chunks, get_schedule_table(m, chunks, group))

    def inputs(*_: Any) -> dict[str, Any]:
        return {name: torch.empty(2, 2, device="meta") for name in ("hidden_states", "attention_mask")}

    held = [[SimpleNamespace(get_layer_static_inputs=inputs) for _ in range(n)] for n in layers]
    helper: Any = object.__new__(cuda_graphs.TECudaGraphHelper)
    helper.__dict__.update(
        num_model_chunks=chunks, num_microbatches=m, num_layers_per_chunk=layers, callables_per_chunk=held,
        flattened_callables=[layer for chunk in held for layer in chunk], seq_length=2, micro_batch_size=1,
        chunks_with_decoder=[SimpleNamespace(decoder=SimpleNamespace(layers=chunk)) for chunk in held],
        config=SimpleNamespace(cuda_graph_scope=[], cuda_graph_modules=[], multi_latent_attention=True),
    )  # fmt: skip
    _, kwargs = helper._get_sample_arguments(order)
    return len({id(one["attention_mask"]) for one in kwargs})


@pytest.mark.parametrize(
    ("pp", "vp", "m", "group"),
    [(2, 1, 8, 2), (4, 1, 8, 4), (4, 1, 2, 4), (2, 2, 8, 2), (2, 4, 8, 2), (4, 2, 8, 4), (2, 2, 2, 2), (2, 2, 8, 4)],
)
def test_the_bounds_hold_what_megatron_core_makes(pp: int, vp: int, m: int, group: int) -> None:
    """Exact without virtual stages; between the bounds with them."""
    model = resolve_model("meta-llama/Llama-3.2-1B")
    run = RunSpec(
        model=model, batch=BatchSpec(seq_length=1024, micro_batch_size=1, global_batch_size=m),
        parallel=ParallelSpec(
            world_size=pp, pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
            microbatch_group_size_per_vp_stage=group if vp > 1 else None,
        ),
        implementation=ImplementationSpec(cuda_graph_impl="transformer_engine"),
    )  # fmt: skip
    stages = layout(model, run.parallel).stages
    made = [
        distinct_masks([len(chunk.layers) for chunk in chunks], rank, pp, m, group)
        for rank, chunks in enumerate(stages)
    ]
    found = static_masks(run)
    assert found.least <= min(made) * 1024 * 1024
    assert max(made) * 1024 * 1024 <= found.most
    if vp == 1:
        assert found == (min(made) * 1024 * 1024, max(made) * 1024 * 1024)
    assert static_masks(run.with_fields(cuda_graph_impl="none")) == (0, 0)
