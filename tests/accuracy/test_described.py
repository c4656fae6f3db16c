"""Runs described in words: what a word says in any order and spelling; no word is silent, and nothing crashes."""

from __future__ import annotations

import copy
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bridge_memory.accuracy.corpus import RecordLine, read_corpus
from bridge_memory.accuracy.described.figures import Meaning, figures_of
from bridge_memory.accuracy.described.outcomes import Outcome, outcomes, outcomes_of, share_unread, totals
from bridge_memory.accuracy.described.run import read_run
from bridge_memory.cli import main
from bridge_memory.estimation import explain
from bridge_memory.readers.presets.common_names import preset_called
from bridge_memory.spec import MambaSpec, RunSpec, SpecError

RUNS = Path(__file__).parents[1] / "data" / "field" / "runs.jsonl"
ROWS = {row.data["id"]: row.data for row in read_corpus(RUNS)}
MIB, GIB, GB = 1 << 20, 1 << 30, 10**9


def row(args: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """A small row of Megatron-LM's, changed."""
    args = {"seq_length": 4096, "micro_batch_size": 1, "global_batch_size": 16, "precision": "bf16"} | (args or {})
    return {
        "id": "a/row", "family": "a", "grade": "A", "framework": "Megatron-LM core_v0.16.0, TE 2.10",
        "gpu": "H100 80GB", "world_size": 8, "model": "Qwen3-4B",
        "config": {"kind": "described", "args": args, "parallel": {"TP": 1}},
        "measured_verbatim": {"max_allocated_GB": 40.0}, "measured_meaning": "rank 0, GB=1e9", "kind": "run",
    } | fields  # fmt: skip


def read(args: dict[str, Any] | None = None, **fields: Any) -> RunSpec:
    return read_run(row(args, **fields)).run


def scored(data: dict[str, Any]) -> list[Outcome]:
    return outcomes_of(RecordLine("here", data))


# --------------------------------------------------------------------------------------------------
# The rows
# --------------------------------------------------------------------------------------------------

#: What a row leaves open, or what is not modelled: the word that its refusal names.
UNREAD = {
    "b200/dsv3-512": "seq_length", "mlm2772/ep8": "micro_batch_size", "torchtitan/nvfp4/Qwen3 8B/BF16": "qwen3",
    "automodel2932/eager": "expert_model_parallel_size", "pith/qwen3-30b/pp_rank0": "pithtrain",
    "automodel2932/TE graph attn (48 captured)": "expert_model_parallel_size",
}  # fmt: skip


@pytest.mark.slow
def test_rows_are_read_or_say_which_word_is_not() -> None:
    found = outcomes(read_corpus(RUNS))
    unread = {o.id: o.reason for o in found if o.status == "unread"}
    assert unread.keys() == UNREAD.keys()
    for name, reason in unread.items():
        assert UNREAD[name] in reason
    assert {o.id for o in found} == ROWS.keys()


def test_a_measured_figure_is_what_its_source_printed() -> None:
    """Megatron-LM prints MB of 2^20 bytes, Megatron Bridge GB of 10^9; a counter is no memory."""
    lines = figures_of(ROWS["fixstars/gpt-6.4b/8"])
    assert [(f.meaning, f.nbytes, f.rank, f.after) for f in lines] == [
        (Meaning.STATIC, round(48465.275390625 * MIB), 0, 20), (Meaning.PEAK, round(75078.4326171875 * MIB), 0, 20),
        (Meaning.RESERVED, 75682 * MIB, 0, 20), (Meaning.RESERVED, 75682 * MIB, 0, 20),
    ]  # fmt: skip
    bridge = {(f.meaning, f.nbytes) for f in figures_of(ROWS["nvidia/dgxc/llama3-8b"])}
    assert bridge == {
        (Meaning.STATIC, 51_072_000_000), (Meaning.PEAK, 194_410_000_000), (Meaning.RESERVED, 216_890_000_000),
    }  # fmt: skip
    two = figures_of(ROWS["bridge/qwen3-omni-thinker"])
    assert [(f.meaning, f.rank, f.after) for f in two] == [
        (Meaning.PEAK, 0, 1), (Meaning.RESERVED, 0, 1), (Meaning.PEAK, 16, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("verbatim", "meaning", "expected"),
    [
        ({"max_allocated_GB_after_it1_rank0": 79.86}, "GB=1e9", (Meaning.PEAK, 79.86 * GB, 0, 1)),
        ({"max_allocated_GB_run_last_rank": 81.84}, "W&B run maxima", (Meaning.RUN_MAXIMUM, 81.84 * GB, -1, 0)),
        ({"reserved_GB_last_logged_step_last_rank": 70.2}, "", (Meaning.RESERVED, 70.2 * GB, -1, 0)),
        ({"driver_peak_GiB_all_64_GPUs": 85.3}, "nvidia-smi-like", (Meaning.DRIVER, 85.3 * GIB, None, 0)),
        ({"nvidia_smi_GB": 137.36}, '"NV" = nvidia-smi', (Meaning.DRIVER, 137.36 * GB, None, 0)),
        ({"Max Reserved(MB)": 45552.0}, "max reserved, MB=2^20", (Meaning.RESERVED, 45552 * MIB, None, 0)),
        ({"GiB": 179.94}, "max reserved GiB", (Meaning.RESERVED, 179.94 * GIB, None, 0)),
        ({"log": "memory: 68.57GiB"}, "max reserved", (Meaning.RESERVED, 68.57 * GIB, None, 0)),
        ({"log": "39.92GiB-47.32GiB"}, "max reserved", (Meaning.RESERVED, 47.32 * GIB, None, 0)),
        ({"Peak allocated GB": 39.0}, "peak allocated", (Meaning.PEAK, 39 * GB, None, 0)),
        ({"peak_GB": 39.0}, "peak allocated, GB=2^30, rank 3", (Meaning.PEAK, 39 * GIB, 3, 0)),
        ({"mem-allocated-gigabytes after one iteration": 73.65}, "rank 0", (Meaning.STATIC, 73.65 * GB, 0, 1)),
        ({"memory": 20.5}, "allocated after step 2, GB", (Meaning.STATIC, 20.5 * GB, None, 2)),
        ({"mem-max-allocated-gigabytes": 2.0}, "rank 0 iteration 10, GB=1e9", (Meaning.PEAK, 2 * GB, 0, 10)),
        ({"GB": 20.5}, "static, allocated", (Meaning.STATIC, 20.5 * GB, None, 0)),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_what_a_figure_is(verbatim: dict[str, Any], meaning: str, expected: tuple[Any, float, Any, int]) -> None:
    (found,) = figures_of({"measured_verbatim": verbatim, "measured_meaning": meaning})
    assert (found.meaning, found.nbytes, found.rank, found.after) == (expected[0], round(expected[1]), *expected[2:])


@pytest.mark.parametrize(
    ("verbatim", "meaning", "reason"),
    [
        ({"peak_GB": 90.5}, '"peak", meaning unstated', "is not stated"), ({"x_GB": 3}, "rank 0", "is not stated"),
        ({"max_allocated": 3.0}, "rank 0", "unit is not stated"),
        ({"peak_GiB_off": 3.0}, "peak allocated", "another run"),
        ({"repeat": "78.43 / 91.53"}, "max allocated", "another run"), ({"OOM": "at 80 GiB"}, "", "out of memory"),
        ({"max_allocated_GB (E-028)": 3.0}, "", "another run (e-028)"), ({"max_allocated_GB": -3.0}, "", "no amount"),
        ({"max_allocated_GB": float("nan")}, "", "no amount"), ({"max_allocated_GB": 1e300}, "", "any GPU"),
        ({"max_allocated_GB": "lots"}, "", "not one number"), ({"max_allocated_GB": True}, "", "not a number"),
        ({"peak_GB": 1.0}, "peak; do not score against training", "not to compare"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)  # fmt: skip
def test_a_figure_that_stands_for_no_prediction_says_why(verbatim: dict[str, Any], meaning: str, reason: str) -> None:
    (found,) = figures_of({"measured_verbatim": verbatim, "measured_meaning": meaning})
    assert reason in found.not_compared


def test_two_memories_of_one_text() -> None:
    found = figures_of(ROWS["geodesic/nano30b-pretrain/E-046-6934039"])
    assert [(f.meaning, f.nbytes) for f in found] == [
        (Meaning.RUN_MAXIMUM, 76_060_000_000), (Meaning.RESERVED, 94_610_000_000),
    ]  # fmt: skip


def test_a_peak_after_one_step_is_without_moments_and_a_run_maximum_with_them() -> None:
    """E-001, rank 0 and the last rank of one stage: bf16 moments, twice 2 bytes a parameter, sharded."""
    outcomes = scored(ROWS["geodesic/nano30b-pretrain/E-001"])
    peak, longest = (o for o in outcomes if o.meaning in (Meaning.PEAK, Meaning.RUN_MAXIMUM))
    assert peak.predicted_bytes is not None and longest.predicted_bytes is not None
    # 29.0 of 31.6 B parameters are experts' over 16 ranks a group of EP 4; the others are over all 64.
    assert longest.predicted_bytes - peak.predicted_bytes == pytest.approx(4 * (29.0e9 / 64 + 2.6e9 / 64), rel=0.05)


@pytest.mark.slow
def test_megatron_fsdp_has_no_dummy_weight_gradients_under_bridge_of_2025() -> None:
    """Three layouts of 4 B parameters, whose static memory the dummies' 0.98 GB had put 1.3 to 2.8 % too high."""
    found = [o for o in outcomes(read_corpus(RUNS)) if "mfsdp" in o.id]
    assert len(found) == 3
    for o in found:
        assert o.residual == pytest.approx(0, abs=0.005), o.id


@pytest.mark.parametrize(
    "name",
    ["geodesic/nano30b-pretrain/E-001", "geodesic/nano30b-pretrain/train-6354507", "fixstars/gpt-6.4b/8",
     "geodesic/nano30b-midtrain/step0", "aisg/qwen3-4b/older-container"],
)  # fmt: skip
def test_reserved_memory_of_megatron_is_near_what_was_measured(name: str) -> None:
    """As the allocator was set, after one step where that is when it was read."""
    found = [o for o in scored(ROWS[name]) if o.meaning is Meaning.RESERVED]
    assert found
    assert all(o.residual is not None and abs(o.residual) < 0.03 for o in found)


def test_the_allocators_setting_is_read_where_figures_are_described() -> None:
    for words, on in (("MB=2^20; expandable_segments", True), ("expandable_segments:False", False), ("", False)):
        assert read(measured_meaning=f"rank 0, GB=1e9; {words}").implementation.expandable_segments is on
    sure = read({"alloc_conf": "expandable_segments:False"}, measured_meaning="expandable_segments")
    assert not sure.implementation.expandable_segments


def test_residuals_are_measured_minus_predicted() -> None:
    (found,) = (o for o in scored(row()) if o.predicted_bytes)
    assert found.predicted_bytes is not None and found.residual is not None
    assert found.residual * 40e9 == pytest.approx(40e9 - found.predicted_bytes)


def test_totals_are_of_the_figures_that_they_count() -> None:
    found = [
        Outcome(f"r{i}", "f", "A", status, meaning=Meaning.PEAK, measured_bytes=100, predicted_bytes=predicted)
        for i, (status, predicted) in enumerate([("counted", 101), ("counted", 97), ("unmodelled", 50)])
    ]
    (few,) = totals(found)
    assert (few.figures, few.within, few.targets) == (2, 1, 2)
    assert (few.mean, few.worst, few.bias) == (pytest.approx(0.02), pytest.approx(0.03), pytest.approx(0.01))
    (every,) = totals(found, "family", all_predicted=True)
    assert (every.group, every.figures, every.worst) == ("f", 3, pytest.approx(0.5))


# --------------------------------------------------------------------------------------------------
# Words
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("full block 12 of 36", {"granularity": "full", "method": "block", "num_layers": 12}),
        ("full, block, 12 layers", {"granularity": "full", "method": "block", "num_layers": 12}),
        ("full uniform 2", {"granularity": "full", "method": "uniform", "num_layers": 2}),
        ("full", {"granularity": "full", "method": "uniform", "num_layers": 1}),
        ("Full, 1 layer", {"granularity": "full", "num_layers": 1}), (True, {"granularity": "full"}),
        ("selective [core_attn, mlp]", {"granularity": "selective", "modules": ("core_attn", "mlp")}),
        ("selective", {"granularity": "selective", "modules": ("core_attn",)}),
        (["layernorm"], {"granularity": "selective", "modules": ("layernorm",)}),
        ("Selective (core attention; layernorm)", {"modules": ("core_attn", "layernorm")}),
        (None, {"granularity": None}), ("none", {"granularity": None}), (False, {"granularity": None}),
        ([], {"granularity": None}), ("activation checkpointing", {"granularity": "full"}),
    ],
    ids=str,
)  # fmt: skip
def test_recomputation(words: object, fields: dict[str, Any]) -> None:
    recompute = read({"recompute": words}).recompute
    assert {name: getattr(recompute, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("bf16_mixed (grad_reduce_in_fp32 True)", {"params_dtype": "bf16", "fp8": None, "grad_reduce_in_fp32": True}),
        ("bf16_mixed, grad_reduce_in_fp32=False", {"grad_reduce_in_fp32": False}),
        ("bf16, grads bf16", {"grad_reduce_in_fp32": False}), ("bf16, fp32 grads, Adam", {"grad_reduce_in_fp32": True}),
        ("FP8 current scaling, bf16 params, bf16 grads", {"fp8_recipe": "tensorwise", "fp8_param": False}),
        ("bf16 + FP8 delayed (e4m3), fp8_param True", {"fp8": "e4m3", "fp8_recipe": "delayed", "fp8_param": True}),
        ("blockwise FP8, fp8-param-gather", {"fp8": "e4m3", "fp8_recipe": "blockwise", "fp8_param": True}),
        ("fp8 current scaling, first 2/last 3 layers bf16",
         {"num_layers_at_start_in_bf16": 2, "num_layers_at_end_in_bf16": 3}),
        ("bf16_with_fp8_current_scaling_mixed", {"fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    ],
    ids=str,
)  # fmt: skip
def test_precision(words: str, fields: dict[str, Any]) -> None:
    run = read({"precision": words})
    found = {f: getattr(run.data_parallel if f == "grad_reduce_in_fp32" else run.precision, f) for f in fields}
    assert found == fields


def test_mxfp8_needs_a_card_that_has_it() -> None:
    assert read({"precision": "MXFP8"}, gpu="B200").precision.fp8_recipe == "mxfp8"


def test_optimizer() -> None:
    words = "adam, precision-aware, exp_avg/exp_avg_sq bf16, distributed optimizer"
    optimizer = read({"optimizer": words}).optimizer
    assert (optimizer.use_precision_aware_optimizer, optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype) == (
        True, "bf16", "bf16",
    )  # fmt: skip
    assert read({"optimizer_cpu_offload": 1.0}).optimizer.optimizer_cpu_offload
    half = read({"optimizer_cpu_offload": 0.5}).optimizer
    assert half.optimizer_cpu_offload and half.optimizer_offload_fraction == 0.5


@pytest.mark.parametrize(
    ("words", "dispatcher", "backend"),
    [("alltoall", "alltoall", None), ("flex/hybridep", "flex", "hybridep"), ("flex deepep", "flex", "deepep"),
     ("HybridEP", "flex", "hybridep"), ("all-to-all", "alltoall", None), ("allgather", "allgather", None)],
)  # fmt: skip
def test_dispatcher(words: str, dispatcher: str, backend: str | None) -> None:
    parallel = {"kind": "described", "parallel": {"EP": 8}}
    base = row({"dispatcher": words}, model="Qwen3-30B-A3B")
    base["config"] = base["config"] | parallel
    implementation = read_run(base).run.implementation
    assert implementation.moe_token_dispatcher_type == dispatcher
    assert backend is None or implementation.moe_flex_dispatcher_backend == backend


@pytest.mark.parametrize(
    ("words", "core", "te", "torch"),
    [
        ("Megatron-LM core_r0.15.0", (0, 15), (2, 9), (2, 9)),
        ("Megatron-LM core_v0.13.0 + patches", (0, 13), None, None),
        ("Megatron Bridge (fork; mcore 0.19 pin), NeMo 26.04: torch 2.11, TE 2.14.1", (0, 19), (2, 14), (2, 11)),
        ("Megatron Bridge, nemo:25.11 container", (0, 15), (2, 9), (2, 9)),
        ("Megatron Bridge NeMo 26.02", (0, 16), (2, 12), (2, 10)),
        ("Megatron-LM (core 0.16-ish), Transformer Engine 2.10", (0, 16), (2, 10), None),
        ("Megatron Bridge 0.2.0", (0, 15), (2, 9), (2, 9)),
        ("Megatron Bridge perf scripts, 2025-12 (llmb)", (0, 15), (2, 9), (2, 9)),
        ("Megatron Bridge 2025-12-24, core 0.16", (0, 16), (2, 12), (2, 10)),
        ("Megatron-LM core_r0.8.0, torch 2.4", (0, 8), (1, 8), (2, 4)), ("Megatron-LM 2025-12", None, None, None),
    ],
)  # fmt: skip
def test_releases(words: str, core: object, te: object, torch: object) -> None:
    implementation = read(framework=words).implementation
    assert (implementation.megatron_core, implementation.transformer_engine, implementation.torch) == (core, te, torch)


@pytest.mark.parametrize(
    ("args", "parallel", "framework", "engine"),
    [
        ({"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads"}, {"DP": 8},
         "Megatron Bridge, nemo:25.11", "megatron_fsdp"),
        ({}, {"FSDP2": 8}, "Automodel", "fsdp2"), ({}, {"zero": 3}, "DeepSpeed ZeRO-3", "zero3"),
        ({}, {"engine": "zero2"}, "DeepSpeed", "zero2"),
        ({"zero_stage": 2}, {"TP": 2, "DP": 4, "engine": "zero2"}, "Megatron-DeepSpeed", "megatron_deepspeed"),
        ({}, {"DP": 8}, "Megatron-LM", "megatron_ddp"),
    ],
)  # fmt: skip
def test_engines(args: dict[str, Any], parallel: dict[str, Any], framework: str, engine: str) -> None:
    data = row({"recompute": None} | args, framework=framework, gpu="H200", model="Llama 3.1 8B")
    data["config"]["parallel"] = parallel
    assert read_run(data).run.data_parallel.engine == engine


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("Llama 3 8B", "meta-llama/Meta-Llama-3-8B"), ("llama3-70b", "meta-llama/Meta-Llama-3-70B"),
        ("Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"), ("Qwen3-4B", "Qwen/Qwen3-4B"),
        ("Nemotron-3-Nano-30B-A3B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"), ("GPT-3 175B", "openai/GPT-3-175B"),
        ("Kimi K2", "moonshotai/Kimi-K2-Instruct"), ("Mixtral 8x7B", "mistralai/Mixtral-8x7B-v0.1"),
        ("Llama 8B", None), ("", None), ("GPT 52B", None), ("8B", None),
    ],
)  # fmt: skip
def test_common_names(name: str, preset: str | None) -> None:
    assert preset_called(name) == preset


def test_a_model_of_sizes() -> None:
    """Megatron's default of the MLP with SwiGLU is two thirds of 4 h, in steps of 64."""
    model = read(model="GPT 30L x 4096, ffn default swiglu, 32 heads, GPT-2 vocab").model
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (30, 4096, 50257)
    assert model.layers[0].ffn.ffn_hidden_size == 10880  # type: ignore[union-attr]
    llama = read(model="Llama-like 32L x 4096, ffn 11008, 8 kv heads, Llama2 vocab 32000, untied").model
    assert llama.layers[0].mixer.num_query_groups == 8  # type: ignore[union-attr]
    assert not llama.share_embeddings_and_output_weights


@pytest.mark.parametrize(
    ("notes", "tied"),
    [
        # 30 layers of 4 h^2 + 3 h f and the embedding of 50304 rows once or twice, at 6 + 12 / 8 bytes (MB of 2^20).
        ("Theoretical 46038.57 MB.", False),
        ("Theoretical memory footprints: weight and optimizer=44565.07 MB", True),
        ("Theoretical 60000 MB", True), ("", True), ("Theoretical dreams", True), ("Theoretical 0 MB", True),
    ],
)  # fmt: skip
def test_weights_are_tied_as_the_rows_log_counts_them(notes: str, tied: bool) -> None:
    run = read_run(ROWS["fixstars/gpt-6.4b/8"] | {"notes": notes}).run
    assert run.model.share_embeddings_and_output_weights is tied
    said = any("billion parameters of its log" in words for words in run.assumptions)
    assert said is ("46038" in notes or "44565" in notes)


@pytest.mark.parametrize(
    ("words", "modules"),
    [
        ("MoE activation recompute", ("moe",)), ("moe activation checkpointing, layernorm", ("moe", "layernorm")),
        ("moe activation", ("moe_act",)), ("moe_act recompute", ("moe_act",)), ("moe recompute", ("moe",)),
    ],
)  # fmt: skip
def test_activation_recomputation_of_moe_is_of_its_layers(words: str, modules: tuple[str, ...]) -> None:
    assert read({"recompute": words}, model="Qwen3-30B-A3B").recompute.modules == modules


def test_doubts_are_shown_and_not_read() -> None:
    doubted = row({"precision_aware": "maybe"}, notes="job 7; the batch may be 2. all else as committed")
    run, sure = read_run(doubted).run, read()
    assert run.with_(assumptions=()) == sure.with_(assumptions=())
    assert "its notes say: the batch may be 2" in run.assumptions
    assert any(words.startswith("precision_aware is in doubt") for words in run.assumptions)
    assert not any("job 7" in words for words in run.assumptions)


def test_a_miss_lists_what_its_row_leaves_open(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    far = row({"precision_aware": "maybe"}, id="x/far", measured_verbatim={"max_allocated_GB": 400.0})
    near = row({}, id="x/near")
    (peak,) = scored(near)
    assert peak.predicted_bytes
    near["measured_verbatim"]["max_allocated_GB"] = peak.predicted_bytes / GB
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(far)}\n{json.dumps(near)}\n")
    assert main(["accuracy", str(tmp_path / "rows.jsonl"), "--summary"]) == 0
    misses = capsys.readouterr().out.split("Outside of their targets")[1].split("In all")[0]
    assert "x/far" in misses
    assert "in doubt" in misses
    assert "x/near" not in misses


@pytest.mark.parametrize(
    ("model", "gpu", "scripts", "graph"),
    [
        ("Llama-3.1-8B", "GB300", True, "full_iteration"), ("Llama 3 8B", "B200", True, "full_iteration"),
        ("Llama-3.1-8B", "H100", True, "none"), ("Llama-3.1-8B", "GB300", False, "none"),
        ("Qwen3-8B", "B200", True, "none"),
    ],
)  # fmt: skip
def test_performance_scripts_capture_iterations_of_small_llamas(
    model: str, gpu: str, scripts: bool, graph: str
) -> None:
    framework = "Megatron Bridge perf scripts" if scripts else "Megatron Bridge"
    assert read(framework=framework, model=model, gpu=gpu).implementation.cuda_graph_impl == graph
    stated = read({"cuda_graph": "none"}, framework=framework, model=model, gpu=gpu).implementation
    assert (stated.cuda_graph_impl, stated.create_attention_mask) == ("none", False)


@pytest.mark.parametrize(("day", "compiles"), [("2025-03-07", False), ("2025-04-01", None), ("no day", None)])
def test_torchtitan_compiled_no_loss_before_it_said_so(day: str, compiles: bool | None) -> None:
    row = copy.deepcopy(ROWS["torchtitan929/39.92GiB-47.32GiB"])
    row["source"] = f"pytorch/torchtitan issue #929 ({day})"
    found = read_run(row).run.transformers
    assert found.torch_compile and found.compile_loss is compiles


def test_code_of_a_fork_is_listed_and_bends_nothing() -> None:
    data = ROWS["geodesic/nano30b-midtrain/step2"]
    stock = copy.deepcopy(data)
    for word in ("moe_experts_impl", "fp32_ssm_state"):
        del stock["config"]["args"][word]
    mine, theirs = read_run(data).run, read_run(stock).run
    layers = [layer for layer in mine.model.layers if isinstance(layer.mixer, MambaSpec)]
    assert len(layers) == 23
    assert all(layer.mixer.recompute_scan for layer in layers)
    as_stock = replace(mine.model, layers=theirs.model.layers)
    assert mine.checkpoint.experts_in_one_tensor  # as its source says of a load: no training step has to do with it
    assert mine.with_(model=as_stock, checkpoint=theirs.checkpoint, not_modelled=(), assumptions=()) == theirs.with_(
        not_modelled=(), assumptions=()
    )
    assert [word.split()[0] for word in mine.not_modelled if word not in theirs.not_modelled] == [
        "moe_experts_impl", "fp32_ssm_state",
    ]  # fmt: skip
    assert mine.implementation.cross_entropy_fusion_impl == "linear"
    assert any(word.startswith("chunked linear cross entropy") for word in mine.not_modelled)


@pytest.mark.parametrize(
    ("words", "again"),
    [
        ("checkpointed scan patch (X_FP32_SSM_STATE=checkpoint): scan recomputed", True), ("checkpoint", True),
        ("fp32, scan recomputed", True), ("fp32", False), ("off (stock)", False), ("true", False),
        ("on (X_FP32_SSM_STATE=1)", False), ("X_FP32_SSM_STATE=0", False),
    ],
)  # fmt: skip
def test_a_recomputed_scan_keeps_no_output_before_its_gate(words: str, again: bool) -> None:
    """23 Mamba layers, d_inner 4096 in bf16, 8192 tokens: 64 MiB each."""
    data = copy.deepcopy(ROWS["geodesic/nano30b-pretrain/E-011"])
    data["config"]["args"]["fp32_ssm_state"] = "off"
    stock = explain(read_run(data).run, 0).peak_bytes
    data["config"]["args"]["fp32_ssm_state"] = words
    assert stock - explain(read_run(data).run, 0).peak_bytes == 23 * 64 * MIB * again


def test_recipes_of_nemotron_3_fuse_the_weighted_squared_relu() -> None:
    """Bridge's, by default: 23 MoE layers then keep no unweighted activation. 8192 tokens to 6 experts of 1856."""
    data = copy.deepcopy(ROWS["geodesic/nano30b-pretrain/E-011"])
    fused = explain(read_run(data).run, 0).peak_bytes
    data["config"]["args"]["use_fused_weighted_squared_relu"] = False
    assert explain(read_run(data).run, 0).peak_bytes - fused == 23 * 8192 * 6 * 1856 * 2


# --------------------------------------------------------------------------------------------------
# No silent word, and nothing crashes
# --------------------------------------------------------------------------------------------------

#: Keys whose value is prose about the run and its source.
PROSE = ("host_bundle", "patch", "full_args", "ds_config", "config", "steps", "experiment", "ckpt_format")


def _texts() -> list[tuple[str, str]]:
    read_rows = (i for i in ROWS if i not in UNREAD)
    return [
        (i, key) for i in read_rows for key, value in ROWS[i]["config"]["args"].items()
        if isinstance(value, str) and key not in PROSE and key not in ("alloc_conf", "data_parallel_sharding_strategy")
    ]  # fmt: skip


@pytest.mark.parametrize("place", [0, 1], ids=["before", "behind"])
def test_no_word_of_a_value_is_silent(place: int) -> None:
    texts = _texts()
    assert len(texts) > 150
    for name, key in texts:
        data = copy.deepcopy(ROWS[name])
        value = data["config"]["args"][key]
        data["config"]["args"][key] = f"frobnicated {value}" if place == 0 else f"{value} frobnicated"
        (found,) = scored(data)
        assert found.status == "unread", (name, key)
        assert "frobnicated" in found.reason, (name, key, found.reason)


@pytest.mark.parametrize("part", ["args", "parallel"])
@pytest.mark.parametrize("value", [1, True, "on", None, [1], {"a": 1}], ids=str)
def test_no_key_is_silent(part: str, value: object) -> None:
    data = row()
    data["config"][part] = {**data["config"][part], "frobnication_size": value}
    (found,) = scored(data)
    assert found.status == "unread" and "frobnication_size" in found.reason


def test_contradictions_are_refused() -> None:
    for args, parallel in (
        ({"use_distributed_optimizer": False, "optimizer": "adam, distributed optimizer"}, {}),
        ({"fp16": True}, {}), ({}, {"DP": 3}), ({"recompute": "full block 12 of 99"}, {}),
        ({"grad_reduce_in_fp32": True, "precision": "bf16, bf16 grads"}, {}),
    ):  # fmt: skip
        data = row(args)
        data["config"]["parallel"] = parallel
        with pytest.raises(SpecError):
            read_run(data)


#: Fragments: words, and what they have to say of a run of Qwen3-4B (36 layers) or Qwen3-30B-A3B (48 layers).
PRECISIONS = {
    "bf16": {}, "bf16_mixed (grad_reduce_in_fp32 True)": {"grad_reduce_in_fp32": True},
    "BF16, grads bf16": {"grad_reduce_in_fp32": False}, "fp16, fp32 gradients": {"params_dtype": "fp16"},
    "FP8 current scaling, bf16 grads": {"fp8": "hybrid", "grad_reduce_in_fp32": False},
    "bf16 + blockwise fp8 (e4m3), fp8_param True": {"fp8": "e4m3", "fp8_param": True},
}  # fmt: skip
OPTIMIZERS = {
    "adam": {}, "AdamW, distributed optimizer": {"use_distributed_optimizer": True},
    "adam; exp_avg bf16; exp_avg_sq bf16; precision-aware": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "distributed optimizer, adam, moments in bf16, precision aware": {"exp_avg_sq_dtype": "bf16"},
}  # fmt: skip
RECOMPUTES = {
    "full uniform {n}": {"recompute_granularity": "full", "recompute_num_layers": "n"},
    "FULL block {n}": {"recompute_method": "block", "recompute_num_layers": "n"},
    "selective [{module}]": {"recompute_granularity": "selective", "recompute_modules": "module"},
    "selective: {module}": {"recompute_modules": "module"}, "off": {"recompute_granularity": None},
}  # fmt: skip
SPELLINGS = (
    str.upper, str.lower, lambda key: key.replace("_", "-"), lambda key: key.replace("_", " "), lambda key: key,
)  # fmt: skip


def _value(run: RunSpec, name: str) -> Any:
    if name.startswith("recompute_"):
        return getattr(run.recompute, name.removeprefix("recompute_"))
    groups = (run.precision, run.optimizer, run.data_parallel, run.batch, run.parallel, run.implementation)
    return next(getattr(group, name) for group in groups if hasattr(group, name))


@pytest.mark.parametrize("seed", range(60))
def test_words_recombined_say_the_same(seed: int) -> None:
    """Other sizes, modules, orders and spellings than those of the rows."""
    draw = random.Random(seed)
    sizes = {"n": draw.choice([1, 2, 3, 6, 9, 18]), "module": draw.choice(["core_attn", "mlp", "layernorm"])}
    precision, optimizer, recompute = (draw.choice(list(t)) for t in (PRECISIONS, OPTIMIZERS, RECOMPUTES))
    expected = {**PRECISIONS[precision], **OPTIMIZERS[optimizer]}
    for name, value in RECOMPUTES[recompute].items():
        found = sizes.get(value, value) if isinstance(value, str) else value
        expected[name] = (found,) if name == "recompute_modules" else found
    tp, pp, dp = draw.choice([1, 2, 4]), draw.choice([1, 2]), draw.choice([1, 2, 8])
    seq, micro = draw.choice([1024, 2048, 8192, 32768]), draw.choice([1, 2, 4])
    batch = micro * dp * draw.choice([2, 4])
    expected |= {
        "seq_length": seq, "micro_batch_size": micro, "global_batch_size": batch, "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp, "world_size": tp * pp * dp,
    }  # fmt: skip
    args = {
        draw.choice(["seq_length", "seq", "max_length"]): draw.choice([seq, str(seq), f"{seq:,}"]),
        draw.choice(["micro_batch_size", "mbs", "local_batch_size"]): micro,
        draw.choice(["global_batch_size", "gbs"]): batch, "precision": precision, "optimizer": optimizer,
        draw.choice(["recompute", "activation_recompute"]): recompute.format(**sizes),
        "overlap_grad_reduce": draw.choice([True, "true", "on"]), "bucket_size": draw.choice([10**6, "10,000,000"]),
    }  # fmt: skip
    items = list(args.items())
    draw.shuffle(items)
    spelled = {draw.choice(SPELLINGS)(key): value for key, value in items}
    data = row(framework=draw.choice(["Megatron-LM core_v0.16.0, TE 2.10", "TE 2.12; megatron-core 0.17, Megatron-LM"]))
    data["world_size"] = tp * pp * dp
    data["config"] = {"kind": "described", "args": spelled, "parallel": {"PP": pp, "tp": tp, "DP": dp}}
    run = read_run(data).run
    assert {name: _value(run, name) for name in expected} == expected
    assert run.data_parallel.overlap_grad_reduce


_HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 10**400, float("nan"), float("inf"), "", " ", "x" * 5000, [], [None], {}, {"a": {}}, "1e99",
    "\x00", "ß∞", [[[]]], 3.5, "full block 99999 of 99999", "{}", "((((", "| a: b |", -(10**30), b"bytes",
)  # fmt: skip


def _places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [found for key, value in items for found in ((*path, key), *_places(value, (*path, key)))]


@pytest.mark.parametrize("seed", range(40))
def test_hostile_rows_do_not_crash(seed: int) -> None:
    """Missing fields, nulls, wrong types, huge numbers, anywhere in a row: it is scored, or unread for a reason."""
    draw = random.Random(seed)
    for name in draw.sample(sorted(ROWS), 6):
        data = copy.deepcopy(ROWS[name])
        for _ in range(draw.choice([1, 1, 2, 5])):
            *path, last = draw.choice(_places(data) or [("id",)])
            holder = data
            for key in path:
                holder = holder[key]
            if draw.random() < 0.3:
                del holder[last]
            else:
                holder[last] = copy.deepcopy(draw.choice(_HOSTILE))
        found = outcomes_of(RecordLine("here", data))
        assert found
        for o in found:
            assert o.status in ("counted", "unmodelled") or o.reason, (name, data)
            assert "malformed" not in o.reason, (o.reason, data)
            assert o.residual is None or o.residual == o.residual
            json.dumps(o.as_json())


# --------------------------------------------------------------------------------------------------
# The command
# --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_scores_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["accuracy", str(RUNS), "--summary"]) == 0
    shown = capsys.readouterr().out
    assert "40 of 46 rows are read" in shown and "Residuals by family" in shown
    assert main(["accuracy", str(RUNS), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "bridge-memory/accuracy-described/1"
    assert {row["id"] for row in document["unread"]} == UNREAD.keys()


def test_a_file_of_which_half_cannot_be_read_exits_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readable, other = row(), row({"frobnication": 1}, id="another")
    file = tmp_path / "rows.jsonl"
    for rows, code in (([readable, other], 1), ([readable, readable | {"id": "third"}, other], 0)):
        file.write_text("".join(f"{json.dumps(r)}\n" for r in rows))
        assert main(["accuracy", str(file), "--summary"]) == code
    assert "50% of the rows cannot be read" in capsys.readouterr().err
    assert share_unread([]) == 0.0
