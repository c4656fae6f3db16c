"""KV capacity is vLLM's and SGLang's own: the table that their functions computed on the CPU.

Releases and the command are in scripts/maintain/inference_kv.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from scripts_of import load_script

from bridge_memory import SpecError, find_gpu, model_from_hf_config, resolve_model
from bridge_memory.readers.resolve import resolve_config
from bridge_memory.rollout.inference import InferenceSpec, defaults, inference_memory, kv_capacity, kv_sglang

TABLES: dict[str, Any] = json.loads((Path(__file__).parents[1] / "data/rollout/kv_capacity.json").read_text())
H100 = find_gpu("H100")
#: Blocks that the attention backends of a card take -> that card.
CARDS = {'[["multiple", 16]]': "H100", "[64]": "H100", '[["multiple", 64]]': "H100", "[32, 64]": "B200"}


def rows_of(table: str) -> list[dict[str, Any]]:
    return [{**TABLES[table]["usual"], **row} for row in TABLES[table]["rows"]]


@cache
def model(name: str, sparse: bool = False) -> Any:
    if sparse:
        _, config = resolve_config(name)
        return model_from_hf_config({**config, **load_script("maintain/inference_kv").SPARSE}, name)
    return resolve_model(name)


def vllm_spec(row: dict[str, Any]) -> InferenceSpec:
    return InferenceSpec(
        model=model(row["model"], row["sparse"]), tensor_parallel_size=row["tp"], pipeline_parallel_size=row["pp"],
        kv_cache_dtype=row["kv_cache_dtype"], block_size=row["block_size"], max_model_len=row["max_model_len"],
        max_num_batched_tokens=row["max_num_batched_tokens"], enable_prefix_caching=row["prefix_caching"],
        mamba_ssm_cache_dtype=row["state_dtype"], release=TABLES["vllm"]["release"],
    )  # fmt: skip


def sglang_spec(row: dict[str, Any]) -> InferenceSpec:
    return InferenceSpec(
        model=model(row["model"], row["sparse"]), framework="sglang", tensor_parallel_size=row["tp"],
        pipeline_parallel_size=row["pp"],
        kv_cache_dtype=row["kv_cache_dtype"], block_size=row["page_size"], max_model_len=row["context_length"],
        chunked_prefill_size=8192, enable_prefix_caching=row["radix_cache"], max_num_seqs=row["max_running_requests"],
        mamba_full_memory_ratio=row["mamba_full_memory_ratio"], swa_full_tokens_ratio=row["swa_full_tokens_ratio"],
        release=TABLES["sglang"]["release"],
    )  # fmt: skip


def test_blocks_tokens_and_bytes_are_vllms() -> None:
    """MHA, GQA, MLA, sparse attention, windows, recurrent layers, quantised caches with scales or not, pipelines."""
    checked = 0
    for row in rows_of("vllm"):
        gpu, found = find_gpu(CARDS[json.dumps(row["kernel_blocks"])]), row["found"]
        if "refused" not in found:
            capacity = kv_capacity(vllm_spec(row), gpu, row["available_bytes"])
            expected = (found["num_blocks"], found["block_size"], found["kv_tokens"], tuple(found["bytes"]))
            assert tuple(capacity) == expected, row
            checked += 1
    assert checked > 80


def test_an_engine_starts_where_vllm_starts() -> None:
    """vLLM asks for one sequence of max_model_len beside its null block, and refuses otherwise."""
    refused = 0
    for row in rows_of("vllm"):
        gpu = replace(find_gpu(CARDS[json.dumps(row["kernel_blocks"])]), capacity_bytes=1 << 50)
        spec = replace(vllm_spec(row), kv_cache_memory_bytes=row["available_bytes"])
        found = inference_memory(spec, gpu)
        assert found.starts == ("refused" not in row["found"]), (row, found.why_not)
        refused += "refused" in row["found"]
        if found.starts:
            concurrency = row["found"]["concurrency"]
            sequences = found.concurrent_sequences(row["max_model_len"])
            assert concurrency - 1 <= sequences.least <= concurrency
    assert refused > 10


def test_pools_are_sglangs() -> None:
    """Tokens of full attention and of windows, and recurrent states, of every stage."""
    checked = 0
    for row in rows_of("sglang"):
        spec, found = sglang_spec(row), row["found"]
        if "refused" in found:
            continue
        stages = [
            kv_sglang.sizes(spec, H100, kv_sglang.pools(spec, stage), row["available_bytes"], row["page_size"])
            for stage in range(row["pp"])
        ]
        expected = [(one["kv_tokens"], one["sliding_tokens"] or 0, one["states"] or 0) for one in found["stages"]]
        assert [tuple(one) for one in stages] == expected, row
        assert kv_capacity(spec, H100, row["available_bytes"]).kv_tokens == found["kv_tokens"]
        checked += 1
    assert checked > 60


def test_the_share_and_the_graphs_are_sglangs() -> None:
    """mem_fraction_static, chunked_prefill_size and the sizes of graphs by card (``handle_gpu_memory_settings``)."""
    for row in rows_of("sglang_memory"):
        gpu = replace(H100, capacity_bytes=row["mib"] << 20)
        spec = InferenceSpec(
            model=model("deepseek-ai/DeepSeek-V3" if row["mla"] else "Qwen/Qwen3-8B"), framework="sglang",
            tensor_parallel_size=row["tp"], pipeline_parallel_size=row["pp"], data_parallel_size=row["attn_dp"],
            dp_attention=row["attn_dp"] > 1, chunked_prefill_size=row["chunked_prefill_size"],
            max_num_seqs=row["max_running_requests"], enforce_eager=row["disable_cuda_graph"],
        )  # fmt: skip
        found = row["found"]
        assert defaults.mem_fraction_static(spec, gpu) == found["mem_fraction_static"], row
        assert defaults.max_num_batched_tokens(spec, gpu) == found["chunked_prefill_size"], row
        if not row["disable_cuda_graph"]:
            assert list(defaults.decode_graph_sizes(spec, gpu)) == found["decode"], row
            if row["pp"] == 1:
                assert list(defaults.piecewise_graph_sizes(spec, gpu)) == found["prefill"], row


def folder_of(package: str) -> Path | None:
    """The folder that holds an engine's package: installed, or unzipped into $INFERENCE_ENGINES."""
    for place in filter(None, (os.environ.get("INFERENCE_ENGINES"),)):
        for folder in (Path(place), Path(place) / package):
            if (folder / package / "__init__.py").exists() or (folder / package / "srt").exists():
                return folder
    found = importlib.util.find_spec(package)
    return Path(found.submodule_search_locations[0]).parent if found and found.submodule_search_locations else None


@pytest.mark.slow
@pytest.mark.parametrize("package", ["vllm", "sglang"])
def test_the_table_is_what_the_packages_compute(package: str) -> None:
    """The stored table, computed again where the wheel is at hand."""
    pytest.importorskip("torch")
    folder = folder_of(package)
    if folder is None:
        pytest.skip(f"{package} is neither installed nor in $INFERENCE_ENGINES")
    tables = load_script("maintain/inference_kv").tables(*((folder, None) if package == "vllm" else (None, folder)))
    for name, table in tables.items():
        assert json.loads(json.dumps(table)) == TABLES[name]


@pytest.mark.parametrize(("given", "says"), [
    ({"framework": "trtllm"}, "framework"), ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
    ({"tensor_parallel_size": True}, "tensor_parallel_size"),
    ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization"),
    ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization"), ({"quantization": "awq"}, "quantization"),
    ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"), ({"mem_fraction_static": 0.8}, "mem_fraction_static"),
    ({"framework": "sglang", "max_num_batched_tokens": 8192}, "max_num_batched_tokens"),
    ({"release": "new"}, "release"),
    ({"cuda_graph_sizes": (0, 8)}, "cuda_graph_sizes"), ({"pipeline_parallel_size": 99}, "pipeline_parallel_size"),
    ({"expert_parallel": 3}, "expert_parallel"), ({"max_num_seqs": -1}, "max_num_seqs"), ({"dtype": "fp8"}, "dtype"),
    ({"framework": "sglang", "dp_attention": True, "data_parallel_size": 2}, "data_parallel_size"),
])  # fmt: skip
def test_a_refusal_names_the_field(given: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says) as refusal:
        InferenceSpec(model=model("Qwen/Qwen3-8B"), **given)
    assert ";" in str(refusal.value) and "\n" not in str(refusal.value)


def test_defaults_and_graphs_are_vllms() -> None:
    """Tokens and sequences of a step by card, and the sizes of graphs (``get_batch_defaults``,
    ``_set_cudagraph_sizes``)."""
    cards = {"NVIDIA A100-SXM4-80GB": "A100-80GB", "NVIDIA GeForce RTX 4090": "RTX 4090"}
    for row in rows_of("vllm_defaults"):
        gpu = replace(find_gpu(cards.get(row["card"], row["card"])), capacity_bytes=row["bytes"])
        spec = InferenceSpec(
            model=model("Qwen/Qwen3-8B"), served=row["served"], max_num_seqs=row["max_num_seqs"],
            max_num_batched_tokens=row["max_num_batched_tokens"],
        )  # fmt: skip
        found = row["found"]
        assert defaults.max_num_batched_tokens(spec, gpu) == found["max_num_batched_tokens"], row
        assert defaults.max_num_seqs(spec, gpu) == found["max_num_seqs"], row
        assert list(defaults.piecewise_graph_sizes(spec, gpu)) == found["sizes"], row
