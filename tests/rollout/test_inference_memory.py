"""What an inference engine holds: weights by count, the measured rows of engines, sleep, and the budget both ways."""

from __future__ import annotations

import ast
import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripts_of import load_script

import bridge_memory.rollout.inference as inference_room
from bridge_memory import SpecError, find_gpu, list_presets, model_from_hf_config, resolve_model
from bridge_memory.components import GIB
from bridge_memory.inventory.counts import model_parameters
from bridge_memory.outside.amount import Range, total
from bridge_memory.readers.resolve import resolve_config
from bridge_memory.rollout.inference import (
    NOT_MODELLED,
    InferenceMemory,
    InferenceSpec,
    beside,
    defaults,
    graphs,
    inference_memory,
    kv_capacity,
)
from bridge_memory.rollout.inference.weights import Weight, padded_vocab, weight_amount, weight_bytes, weights
from bridge_memory.spec import AttentionSpec, GatedDeltaNetSpec, LayerSpec, MLPSpec, ModelSpec, MoESpec

ROWS: dict[int, dict[str, Any]] = {
    row["id"]: row
    for row in map(json.loads, (Path(__file__).parents[1] / "data/rollout/runs.jsonl").read_text().splitlines())
}
H100, A100 = find_gpu("H100"), find_gpu("A100-80GB")
ALONE = Range(0, 0)


@cache
def model(name: str) -> ModelSpec:
    return resolve_model(name)


def engine(name: str, gpu: Any = H100, other: Range = ALONE, **options: Any) -> InferenceMemory:
    return inference_memory(InferenceSpec(model=model(name), **options), gpu, other_bytes=other)


def within(nbytes: float, found: Range | Any) -> bool:
    return bool(found.least <= nbytes <= found.most)


@pytest.mark.parametrize("name", list_presets())
def test_weights_are_the_models(name: str) -> None:
    """On one rank: the parameters that transformers counts (tests/data/hf_parameter_counts.json holds the inventory to
    them), rows that pad the vocabulary to 64, and the experts' biases, which some published counts leave out."""
    spec = InferenceSpec(model=model(name))
    m = spec.model
    tables = 1 if m.share_embeddings_and_output_weights else 2
    padding = (padded_vocab(spec) - m.vocab_size) * m.hidden_size * tables
    biases = sum(
        layer.ffn.num_experts
        for layer in m.layers
        if isinstance(layer.ffn, MoESpec) and layer.ffn.router_enable_expert_bias
        and not layer.ffn.expert_bias_in_published_count
    )  # fmt: skip
    assert sum(one.numel for one in weights(spec, 0)) == model_parameters(m)[0] + padding + biases


def test_an_indexer_is_whole_on_every_rank() -> None:
    """DeepSeek-V3.2 beside V3: 64 heads of 128 from the query latent of 1536, a key of 128 and 64 weights from 7168, a
    norm of 128, in each of 61 layers. The parameters are those that the inventory counts."""
    _, config = resolve_config("deepseek-ai/DeepSeek-V3")
    with_indexer = model_from_hf_config({**config, **load_script("maintain/inference_kv").SPARSE}, "V3.2")

    def numel(m: ModelSpec, tp: int) -> int:
        return sum(one.numel for one in weights(InferenceSpec(model=m, tensor_parallel_size=tp), 0))

    indexers = 61 * (64 * 128 * 1536 + (128 + 64) * 7168 + 2 * 128)
    for tp in (1, 8):
        assert numel(with_indexer, tp) - numel(model("deepseek-ai/DeepSeek-V3"), tp) == indexers
    assert model_parameters(with_indexer)[0] - model_parameters(model("deepseek-ai/DeepSeek-V3"))[0] == indexers


def test_stages_and_ranks_share_the_weights() -> None:
    """Llama-3.1-70B: 80 layers of 855,654,400 weights, tables of 128256 x 8192, a norm of 8192. Four stages have twenty
    layers each, the first and the last a table; of eight ranks each has an eighth but for the norms of 8192."""
    spec = InferenceSpec(model=model("meta-llama/Llama-3.1-70B"), pipeline_parallel_size=4)
    layer, table = 8192 * (8192 * 2 + 2 * 1024) + 3 * 8192 * 28672 + 2 * 8192, 128256 * 8192
    numel = [sum(one.numel for one in weights(spec, stage)) for stage in range(4)]
    assert numel == [20 * layer + table, 20 * layer, 20 * layer, 20 * layer + table + 8192]
    spec = InferenceSpec(model=model("meta-llama/Llama-3.1-70B"), tensor_parallel_size=8)
    sharded, whole = 80 * (layer - 2 * 8192) + 2 * table, (80 * 2 + 1) * 8192
    assert sum(one.numel for one in weights(spec, 0)) == sharded // 8 + whole


def test_kv_heads_are_copied_where_ranks_outnumber_them() -> None:
    """Qwen3-30B-A3B has 4 KV heads of 128: with 8 ranks each holds one, so that keys and values are there twice."""
    [qkv] = {one for one in weights(InferenceSpec(model=model("Qwen/Qwen3-30B-A3B"), tensor_parallel_size=8), 0)
             if one.name == "qkv_proj"}  # fmt: skip
    assert qkv.rows == 32 // 8 * 128 + 2 * 128


def test_experts_are_divided_whole_or_in_slices() -> None:
    """128 experts of 3 x 2048 x 768 over eight ranks: 16 whole ones, or 128 of width 96."""
    def experts(**options: Any) -> dict[str, Weight]:
        spec = InferenceSpec(model=model("Qwen/Qwen3-30B-A3B"), **options)
        return {one.name: one for one in weights(spec, 0) if one.name.startswith("experts")}

    sliced = experts(tensor_parallel_size=8)
    whole = experts(tensor_parallel_size=4, data_parallel_size=2, expert_parallel=True)
    assert (sliced["experts w13"].copies, sliced["experts w13"].rows) == (128, 2 * 96)
    assert (whole["experts w13"].copies, whole["experts w13"].rows) == (16, 2 * 768)
    assert experts(framework="sglang", tensor_parallel_size=8, expert_parallel=8) == whole


def test_quantised_weights() -> None:
    """Llama-3.1-8B in fp8: 6,979,321,856 weights of linears in a byte, four tensors a layer with an fp32 scale each,
    and two tables of 128256 x 4096 and 65 norms of 4096 in bf16. gpt-oss-20b in mxfp4: 17 bytes for 32 weights of an
    expert."""
    spec = InferenceSpec(model=model("meta-llama/Llama-3.1-8B"), quantization="fp8")
    assert weight_bytes(spec, 0) == 6_979_321_856 + 32 * 4 * 4 + 2 * (2 * 128256 * 4096 + 65 * 4096)
    spec = InferenceSpec(model=model("openai/gpt-oss-20b"), quantization="mxfp4")
    experts = 24 * 32 * 3 * 2880 * 2880
    assert sum(one.nbytes(spec) for one in weights(spec, 0) if one.name in ("experts w13", "experts w2")) == (
        experts * 17 // 32
    )
    assert weight_amount(spec, 0).least < weight_amount(spec, 0).most


@pytest.mark.parametrize(("row", "utilization"), [(35, 0.38), (36, 0.3)])
def test_the_cache_of_measured_engines(row: int, utilization: float) -> None:
    """Rows 35 and 36, vLLM with Qwen3-4B on an idle A100: the log's tokens lie in the range; bytes are 36 layers x 8
    heads x 128 x 2 x 2 a token."""
    found = engine("Qwen/Qwen3-4B", A100, gpu_memory_utilization=utilization, max_model_len=8192)
    measured = ROWS[row]["extra"]
    assert within(measured["kv_tokens"], found.kv_tokens)
    assert found.kv_bytes_per_token == 36 * 8 * 128 * 2 * 2
    gib = measured["kv_tokens"] * found.kv_bytes_per_token / GIB
    assert gib == pytest.approx(measured["kv_GiB"], abs=0.05)
    assert found.kv_tokens.most / found.kv_tokens.least < 1.15


def test_the_profile_of_measured_engines() -> None:
    """Row 110, vLLM 0.6.5 with Llama-3-8B on two H100: weights and activations; what is beside torch, 3.58 GiB, is 0.3
    above the range, which has two communicators of two ranks (a miss, as the page says). Row 111: what vLLM asked for is the sum of its parts. Row 115: Qwen3-8B's tokens are its bytes over 147,456."""
    found = engine("meta-llama/Meta-Llama-3-8B", release="0.6.5", tensor_parallel_size=2, gpu_memory_utilization=0.9)
    part = {one.name: one for one in found.components}
    measured = ROWS[110]["extra"]
    assert round(part["weights"].least / GIB, 2) == measured["weights"]
    assert within(measured["act_peak"] * GIB, part["activations and logits"])
    outside = total([*beside.process(H100), beside.loaded_late(), *beside.communicators(found.spec, H100)])
    assert outside.least <= measured["non_torch"] * GIB <= 1.09 * outside.most
    row = ROWS[111]["extra"]
    budget = ROWS[111]["driver_used"]
    assert row["kv"] == pytest.approx(budget - row["weights"] - row["non_torch"] - row["act_peak"], abs=0.02)
    row = ROWS[115]["extra"]
    found = engine("Qwen/Qwen3-8B", release="0.21.0", max_num_seqs=256, max_model_len=16384)
    assert round(row["kv_tokens"] * found.kv_bytes_per_token / GIB, 2) == row["kv"]
    sizes = [len(of(found.spec, H100)) for of in (defaults.piecewise_graph_sizes, defaults.decode_graph_sizes)]
    assert sizes == [51, 35]  # "PIECEWISE 51, FULL 35" in the row's log
    assert within(row["graph"] * GIB, {one.name: one for one in found.components}["CUDA graphs"])


def test_what_measured_engines_keep_asleep() -> None:
    """Row 80: 774 MiB of a vLLM process of one rank asleep; row 81: 2440 MiB of one of two. Row 132: SGLang with
    Llama-3.2-1B on an RTX 4090 keeps 1.1 GB when all is paused, after 3.4 before its weights were and 4.5 before the
    requests' table was: 2.3 and 1.1 GB."""
    one = engine("meta-llama/Llama-3.2-1B", release="0.8.3", enforce_eager=True)
    assert within(ROWS[80]["extra"]["MiB"] << 20, one.asleep(1).total)
    two = engine("meta-llama/Llama-3.2-1B", release="0.8.3", tensor_parallel_size=2)
    assert within(ROWS[81]["extra"]["MiB"] << 20, two.asleep(1).total)
    card = find_gpu("RTX 4090")
    found = engine("meta-llama/Llama-3.2-1B", card, framework="sglang", enforce_eager=True)
    _, cached, table, paused = ROWS[132]["extra"]["seq"]
    assert within(paused * 1e9, found.asleep(2).total)
    part = {one.name: one for one in found.components}
    assert part["weights"].least == pytest.approx((table - paused) * 1e9, rel=0.1)
    assert part["request tables"].least == pytest.approx((cached - table) * 1e9, rel=0.05)


def test_communicators_of_measured_engines() -> None:
    """Rows 126 and 127: about 1 GiB of a rank of four, 958 MiB of one of eight with expert parallelism."""
    eight: dict[str, Any] = {"tensor_parallel_size": 8, "expert_parallel": True}
    for row, options in ((126, {"tensor_parallel_size": 4}), (127, eight)):
        spec = InferenceSpec(model=model("Qwen/Qwen3-30B-A3B"), **options)
        nccl = total(one for one in beside.communicators(spec, H100) if one.name.startswith("NCCL"))
        assert within(ROWS[row]["driver_used"] * GIB, nccl)


def test_releases_count_differently() -> None:
    """Before 0.9 the trainer's memory came out of vLLM's budget; before 0.11 NCCL did; since 0.20 graphs do."""
    options: dict[str, Any] = {"gpu_memory_utilization": 0.6, "tensor_parallel_size": 2, "max_num_seqs": 256}
    other = Range(8 * GIB, 8 * GIB)

    def space(release: str) -> Range:
        return engine("Qwen/Qwen3-8B", H100, other, release=release, **options).available

    assert space("0.9.2").least - space("0.8.5").least >= 8 * GIB
    assert space("0.11.0").least > space("0.10.2").least
    assert space("0.19.0").least > space("0.20.0").least
    assert space("0.33.0") == space("") == space("v0.33.0.post1")


def test_an_engine_does_not_start_on_a_full_card() -> None:
    """0.6 of 79.1 GiB do not fit beside 40; the same share of what is free does, with SGLang."""
    other = Range(38 * GIB, 40 * GIB)
    vllm = engine("Qwen/Qwen3-8B", H100, other, gpu_memory_utilization=0.6)
    assert not vllm.starts and not vllm.may_start and vllm.why_not.startswith("free memory (")
    assert engine("Qwen/Qwen3-8B", H100, other, framework="sglang", mem_fraction_static=0.8).starts
    heavy = engine("meta-llama/Llama-3.1-70B", H100, framework="sglang")
    assert not heavy.may_start and "weights leave nothing" in heavy.why_not
    assert "is less than weights, KV cache" in engine("meta-llama/Llama-3.1-70B", H100).why_not
    long = engine("Qwen/Qwen3-8B", H100, gpu_memory_utilization=0.3, max_model_len=40960)
    assert not long.starts and "one sequence of 40960 tokens" in long.why_not


def test_sleep_and_staged_wake_up() -> None:
    """Level 1 moves weights to the host, level 2 drops them; the cache is dropped; what is woken is back."""
    found = engine("Qwen/Qwen3-8B", H100, gpu_memory_utilization=0.6, tensor_parallel_size=2)
    first, second = found.asleep(1), found.asleep(2)
    assert first.components == second.components and not second.host
    assert {"weights", "KV cache", "activations and logits"}.isdisjoint(one.name for one in first.components)
    assert within(found.weights.least, first.host_bytes)
    weights_awake = found.awake(["weights"])
    names = [one.name for one in weights_awake.components]
    assert "weights" in names and "KV cache" not in names and not weights_awake.host
    everything = found.awake(["weights", "kv_cache"])
    assert everything.total.most == total(one.amount for one in found.held if one.tag != "step").most
    graphs = engine("Qwen/Qwen3-8B", H100, sleep_cuda_graphs=True).asleep(1)
    assert "CUDA graphs" not in [one.name for one in graphs.components]
    assert [one.name for one in graphs.host] == ["weights on the host", "CUDA graphs on the host"]
    sglang = engine("Qwen/Qwen3-8B", H100, framework="sglang")
    kept = [one.name for one in sglang.asleep(1, ["kv_cache"]).components]
    assert "weights" in kept and "KV cache" not in kept


@pytest.mark.parametrize("framework", ["vllm", "sglang"])
def test_the_share_for_some_tokens_is_the_least(framework: str) -> None:
    """A utilization of one ten-thousandth less holds fewer tokens."""
    found = engine("Qwen/Qwen3-14B", H100, Range(4 * GIB, 5 * GIB), framework=framework)
    share = found.utilization_for(100_000)
    assert found.at_utilization(share).kv_tokens.least >= 100_000
    assert found.at_utilization(share - 1e-4).kv_tokens.least < 100_000
    with pytest.raises(SpecError, match="do not fit"):
        found.utilization_for(10**9)


NAMES = ("Qwen/Qwen3-4B", "openai/gpt-oss-20b", "Qwen/Qwen3-Next-80B-A3B-Instruct", "deepseek-ai/DeepSeek-V2-Lite",
         "google/gemma-3-12b-pt", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(NAMES), st.sampled_from(["vllm", "sglang"]), st.sampled_from([1, 2]), st.sampled_from([1, 2, 3]),
    st.sampled_from(["H100", "RTX 4090", "B200", "A100-40GB"]), st.integers(0, 60), st.integers(1, 9500),
    st.sampled_from([1, 17, 4096, 100_000]), st.sampled_from(["", "0.8.5", "0.10.2", "0.19.0", "0.24.0"]),
)  # fmt: skip
def test_ranges_are_ranges_and_more_memory_is_more_cache(
    name: str, framework: str, tp: int, pp: int, card: str, other: int, share: int, length: int, release: str
) -> None:
    """Whatever is asked: least is at most most, nothing is negative, 5% more share and fewer others never lose tokens.
    (SGLang's states are whole: a share that is larger by less than one of them can lose tokens.)"""
    gpu = find_gpu(card)
    spec = InferenceSpec(
        model=model(name), framework=framework, tensor_parallel_size=tp, pipeline_parallel_size=pp,
        max_model_len=length, release=release if framework == "vllm" else "",
    )  # fmt: skip
    found = inference_memory(spec, gpu, other_bytes=Range(other * GIB // 2, other * GIB)).at_utilization(share / 10_000)
    more = found.at_utilization(share / 10_000 + 0.05)
    for one in (*found.components, found.total, found.asleep(1).total, found.asleep(2).host_bytes, found.kv_tokens):
        assert 0 <= one[-2 if len(one) == 2 else 1] <= one[-1 if len(one) == 2 else 2]
    assert found.may_start or not found.starts
    assert bool(found.why_not) != found.starts
    assert more.kv_tokens.least >= found.kv_tokens.least and more.kv_tokens.most >= found.kv_tokens.most
    fewer = inference_memory(found.spec, gpu, other_bytes=Range(0, 0))
    assert fewer.kv_tokens.least >= found.kv_tokens.least
    assert found.concurrent_sequences(length).least >= found.concurrent_sequences(length + 1000).least


@pytest.mark.parametrize(("call", "says"), [
    (lambda m: m.asleep(3), "level"), (lambda m: m.asleep(True), "level"), (lambda m: m.asleep(1, ["graphs"]), "tag"),
    (lambda m: m.concurrent_sequences(0), "length"), (lambda m: m.utilization_for(1.5), "kv_tokens"),
    (lambda m: m.at_utilization(2), "gpu_memory_utilization"), (lambda m: m.at_utilization("half"), "utilization"),
    (lambda m: inference_memory(m.spec, m.gpu, other_bytes=(5, 1)), "other_bytes"),
    (lambda m: inference_memory(replace(m.spec, sleep_mode=False), m.gpu).asleep(), "sleep_mode"),
])  # fmt: skip
def test_wrong_questions_are_refused(call: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        call(engine("Qwen/Qwen3-4B"))


def test_what_is_not_modelled_is_named() -> None:
    assert all(one.name and one.why for one in NOT_MODELLED)
    assert "speculative decoding" in {one.name for one in NOT_MODELLED}


def test_every_field_is_read() -> None:
    """No option of an engine does nothing in silence."""
    room = Path(inference_room.__file__).parent
    read = {
        node.attr
        for path in room.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }
    assert {field.name for field in fields(InferenceSpec)} <= read


def test_graphs_of_measured_engines_with_nccl() -> None:
    """Row 114: 2464 MiB with graphs beyond eager, of vLLM 0.5.4 on four RTX 4090: 35 graphs of 60 layers, all with
    NCCL. That release captured whole decoding steps alone, 1 to 256 sequences."""
    spec = InferenceSpec(
        model=replace(model("Qwen/Qwen2.5-32B"), layers=model("Qwen/Qwen2.5-32B").layers[:1] * 60),
        tensor_parallel_size=4, max_num_seqs=256, max_num_batched_tokens=256,
    )  # fmt: skip
    card = find_gpu("RTX 4090")
    sizes = defaults.decode_graph_sizes(spec, card)
    assert len(sizes) == 35 and sizes[-1] == 256
    whole = graphs.graph_amount(spec, card, 0).most * len(sizes) / graphs.number_of_graphs(spec, card)
    assert whole == pytest.approx(ROWS[114]["extra"]["graph_MiB"] << 20, rel=0.01)
    assert graphs.graph_amount(spec, H100, 0).most < graphs.graph_amount(spec, card, 0).most / 3


def test_what_the_numbers_rest_on_is_said() -> None:
    assert engine("Qwen/Qwen3-8B").assumptions == ()
    assert "0.5.23 stand for 0.4.1" in engine("Qwen/Qwen3-8B", framework="sglang", release="0.4.1").assumptions[0]
    assert "MTP" in engine("deepseek-ai/DeepSeek-V3", tensor_parallel_size=8).assumptions[0]


def test_adapters() -> None:
    """Llama-3.2-1B, one adapter of rank 8 on the fused linears of 16 layers in bf16: q, k, v of 2048 + 2 x 512 rows, o,
    gate and up of 2 x 8192 rows, down; each has (rows + columns) x 8 weights at least."""
    found = {one.name: one for one in engine("meta-llama/Llama-3.2-1B", max_loras=1, max_lora_rank=8).components}
    rows_and_columns = (3072 + 2048) + (2048 + 2048) + (16384 + 2048) + (2048 + 8192)
    assert found["LoRA adapters"].least == 16 * rows_and_columns * 8 * 2
    assert "LoRA adapters" not in {one.name for one in engine("meta-llama/Llama-3.2-1B").components}


def test_the_block_of_a_measured_hybrid() -> None:
    """Row 116, vLLM with a 27B hybrid in an fp8 cache: blocks of 1568 tokens, states padded by 0.13%.

    With Qwen3.5-27B's sizes a state is 48 x 128 x 128 x 4 bytes and 3 x 10240 x 2 of its convolution: 3,207,168. A
    token of 4 KV heads of 2 x 256 takes 2048, and 98 blocks of 16 hold a state: 3,211,264.
    """
    mixers = (GatedDeltaNetSpec(16, 48, 128, 128), AttentionSpec(24, 4, 256, attention_output_gate=True))
    layers = tuple(LayerSpec(mixer, MLPSpec(17408, gated=True)) for mixer in mixers)
    hybrid = ModelSpec(
        name="27B", model_type="qwen3_5_text", hidden_size=5120, vocab_size=248320,
        layers=(layers[0], layers[0], layers[0], layers[1]) * 16, max_position_embeddings=262144,
    )  # fmt: skip
    spec = InferenceSpec(model=hybrid, kv_cache_dtype="fp8_e4m3")
    capacity = kv_capacity(spec, find_gpu("RTX A6000"), 16 * GIB)
    assert capacity.block_size == 1568
    page, state = 1568 * 2048, 48 * 128 * 128 * 4 + 3 * 10240 * 2
    assert capacity.nbytes == (capacity.num_blocks * 16 * page,)
    assert f"block {capacity.block_size} tokens, mamba page padded {page / state - 1:.2%}" in ROWS[116]["phase"]


def test_the_page_table_of_measured_graphs() -> None:
    """Row 133, SGLang with a context of 1,048,576 and graphs of up to 256 sequences: 1.07 GB a table, of which its four
    draft runners have one each. Nothing puts it to sleep."""
    row = ROWS[133]
    spec = InferenceSpec(
        model=model("Qwen/Qwen3-8B"), framework="sglang", max_model_len=row["config"]["context"],
        cuda_graph_sizes=(1, row["config"]["graph_bs"]),
    )  # fmt: skip
    table = graphs.graph_tables(spec, H100, 1)
    assert row["extra"]["draft"] == f"4x{table.least / 1e9:.2f}"
    asleep = inference_memory(spec, H100).asleep(2)
    assert table in asleep.components
