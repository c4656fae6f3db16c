"""Rows of throughput: what their ``config`` says, what the recipe of their release says, and what is in the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge_memory import find_gpu
from bridge_memory.accuracy.throughput import MeasuredRun, Unread, measured, read_throughput
from bridge_memory.cli import main
from bridge_memory.estimation import peaks
from bridge_memory.readers import resolve_model
from bridge_memory.spec.layout import layout

CORPUS = Path(__file__).parents[1] / "data" / "throughput" / "runs.jsonl"
#: Rows of Bridge's tables whose layout is not one that can have run: 70B on 64 GPUs, TP 1 and PP 1, without FSDP; a
#: micro batch of 2 on four stages without recomputation or interleaving; and one whose own recipe is not at hand.
NOT_AS_STATED = {164, 166, 268}

ROW = {
    "id": 1, "framework": "megatron-bridge 0.4.2 / core 0.17.1", "task": "pretrain", "model": "DeepSeek-V3",
    "gpu": "B300", "gpus": 256, "precision": "BF16", "tp": 8, "pp": 8, "vp": 1, "cp": 1, "ep": 32, "etp": 1, "mbs": 1,
    "gbs": 256, "seq": 4096, "status": "ok", "step_time_s": 12.5, "recompute": "full, uniform, 1 layer",
    "network": "EFA: 16 x 400 Gbit/s a node of 8 GPUs; EP>8 crosses nodes",
    "config": {
        "cross_entropy": "te fused (recipe)", "cuda_graph": "transformer_engine [attn, moe_router]", "data": "mock",
        "grad_reduce_in_fp32": False, "moe_flex_dispatcher_backend": "hybridep", "moe_token_dispatcher_type": "flex",
        "optimizer": "precision-aware Adam: bf16 moments, bf16 main grads, fp32 main params (recipe)",
        "overlap_grad_reduce": True, "overlap_param_gather": False, "mtp_num_layers": 1,
        "pipeline_layout": "(8,1): E+8t, 6x8t, 5t+mtp+loss (recipe layout map)",
        "pipeline_model_parallel_layout": "Etttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttttt|tttttmL",
        "recompute_granularity": "selective", "recompute_modules": ["mla_up_proj", "moe_act"],
        "tp_comm_overlap": False,
    },
}  # fmt: skip


def read(**changes: Any) -> MeasuredRun:
    found = measured({**ROW, **changes})
    assert isinstance(found, MeasuredRun), found
    return found


def reason(**changes: Any) -> str:
    found = measured({**ROW, **changes})
    assert isinstance(found, Unread)
    return found.reason


def config(**words: Any) -> dict[str, Any]:
    return {**ROW["config"], **words}  # type: ignore[dict-item]


def test_a_row_is_the_run_that_its_config_says() -> None:
    """Each field against the row's own words; 16 x 400 Gbit/s over eight GPUs are 100 GB/s a GPU."""
    found = read()
    run, impl = found.run, found.run.implementation
    assert (impl.moe_token_dispatcher_type, impl.moe_flex_dispatcher_backend) == ("flex", "hybridep")
    assert (impl.cuda_graph_impl, impl.cuda_graph_modules) == ("transformer_engine", ("attn", "moe_router"))
    assert (run.recompute.granularity, run.recompute.modules) == ("selective", ("mla_up_proj", "moe_act"))
    assert not run.data_parallel.grad_reduce_in_fp32 and not run.data_parallel.overlap_param_gather
    o = run.optimizer
    assert (o.main_grads_dtype, o.exp_avg_dtype, o.exp_avg_sq_dtype, o.main_params_dtype) == ("bf16",) * 3 + ("fp32",)
    assert [c.num_layers for (c,) in layout(run.model, run.parallel).stages] == [8] * 7 + [5]
    assert found.hardware.network == 100e9 and found.kernels.efa and impl.megatron_core == (0, 17)


def test_a_row_that_offloads_activations_names_the_modules() -> None:
    """Megatron's own spelling: a list under the switch's name."""
    run = read(config=config(fine_grained_activation_offloading=["moe_act"])).run
    assert run.implementation.offload_modules == ("moe_act",)


def test_tensor_parallel_overlap_is_on_where_it_was() -> None:
    assert not read().kernels.tensor_parallel_overlap
    assert read(config=config(tp_comm_overlap=True)).kernels.tensor_parallel_overlap
    # NeMo's and MLPerf's pages leave it open, but for those that print the script.
    mlperf = {"framework": "NeMo (Megatron-core) NVIDIA", "model": "LLAMA3_70B", "ep": 1, "pp": 4, "gpu": "H100",
              "precision": "FP8", "network": None}  # fmt: skip
    assert not read(**mlperf, config=None).kernels.tensor_parallel_overlap
    assert read(**mlperf, config="set -e\nexport TP_COMM_OVERLAP=True\n").kernels.tensor_parallel_overlap


@pytest.mark.parametrize(
    ("changes", "words"),
    (
        ({"config": config(frobnication=3)}, "config.'frobnication' (3)"),
        ({"config": config(cross_entropy="by hand")}, "config.cross_entropy ('by hand')"),
        ({"config": None}, "its dispatcher is not stated"), ({"gpu": "TPU v9"}, "the GPU TPU v9"),
        ({"config": config(moe_token_dispatcher_type="pigeon")}, "moe_token_dispatcher_type ('pigeon')"),
        ({"gbs": None, "mbs": None}, "mbs and gbs not stated"), ({"task": "distil"}, "task distil"),
        ({"model": "Strange-7B"}, "Strange-7B"), ({"framework": "torchtitan FSDP2"}, "torchtitan FSDP2"),
        ({"recipe": "nobody_knows_config", "tp": None}, "its recipe is none of those at hand"),
    ),
    ids=str,
)
def test_a_row_that_cannot_be_read_names_the_word_or_field(changes: dict[str, Any], words: str) -> None:
    assert words in reason(**changes)


TABLE = {
    "config": None, "recompute": None, "framework": "megatron-bridge", "model": "DeepSeekV3", "gpu": "GB300",
    "precision": "MXFP8", "tp": 1, "pp": 2, "vp": 8, "network": None, "gbs": 4096, "step_time_s": None, "etp": None,
    "tokens_per_s_per_gpu": 6338,
}  # fmt: skip


def test_a_table_s_row_has_the_recipe_of_its_release() -> None:
    """Of Bridge's DeepSeek-V3 on 256 GB300, EP 32, PP 2, VPP 8: ``perf_recipes/deepseek/gb300/deepseek_v3.py`` of 0.6.2
    has a micro batch of 1, graphs of the full iteration, overlapped exchanges and nothing recomputed; the scripts of
    early 2026 (``deepseek_workload_base_configs.py``) a micro batch of 2, ``mla_up_proj`` recomputed and no graphs."""
    ref = "docs/performance-summary-archive.md@067f987df:L{} ({} NeMo Container)"
    new = read(**TABLE, mbs=1, ref=ref.format(111, "26.06")).run
    old = read(**TABLE, mbs=2, ref=ref.format(204, "26.04.01")).run
    assert new.implementation.cuda_graph_impl == "full_iteration" and old.implementation.cuda_graph_impl == "none"
    overlaps = [run.implementation.overlap_moe_expert_parallel_comm for run in (new, old)]
    assert overlaps == [True, False]
    assert new.recompute.modules == () and old.recompute.modules == ("mla_up_proj",)
    for run in (new, old):
        assert run.implementation.moe_token_dispatcher_type == "flex" and not run.data_parallel.grad_reduce_in_fp32
        assert run.precision.fp8_recipe == "mxfp8" and run.precision.fp8_param
        assert [sum(c.num_layers for c in s) for s in layout(run.model, run.parallel).stages] == [32, 29]
    # In a table of 2025 the same layout had another dispatcher; one of another size has no recipe.
    for changes in ({"mbs": 1, "ref": ref.format(9, "25.09")}, {"mbs": 4, "ref": ref.format(9, "26.06")}):
        assert "no recipe of its release with this layout" in reason(**TABLE, **changes)


def test_a_model_without_its_mtp_layer() -> None:
    """DeepSeek-V3 has one; "(w/o MTP)" of a table takes it away, and 61 layers stay."""
    plain = read(config=config(mtp_num_layers=0, pipeline_model_parallel_layout=None, pipeline_layout=None), pp=1, tp=1,
                 ep=256, model="DeepSeekV3 (w/o MTP)").run.model  # fmt: skip
    assert plain.mtp_num_layers == 0 and len(plain.layers) == 61 and resolve_model("DeepSeek-V3").mtp_num_layers == 1


def test_a_card_has_the_sizes_of_its_recipe_if_its_figures_do() -> None:
    """``qwen3_30b_a3b_pretrain_8gpu_gb300_fp8mx_config``: EP 8, micro batch 8, 512 sequences of 4,096 in 5.85 s on
    eight GPUs are 44,800 tokens/s/GPU; half of that is another batch's."""
    card = {
        "id": 1, "framework": "megatron-bridge", "gpu": "GB300", "gpus": 8, "model": "qwen3-30b-a3b",
        "precision": "fp8_mx", "task": "pretrain_performance", "status": "ok",
        "recipe": "qwen3_30b_a3b_pretrain_8gpu_gb300_fp8mx_config", "step_time_s": 5.85,
        "tokens_per_s_per_gpu": 44800.0,
    }  # fmt: skip
    found = measured(card)
    assert isinstance(found, MeasuredRun) and found.seconds == 5.85
    p, b = found.run.parallel, found.run.batch
    assert (p.ep, b.micro_batch_size, b.global_batch_size, b.seq_length) == (8, 8, 512, 4096)
    other = measured({**card, "tokens_per_s_per_gpu": 22400.0})
    assert isinstance(other, Unread) and "tokens a step" in other.reason


@pytest.mark.slow
def test_layouts_that_ran_are_said_to_fit() -> None:
    """Bridge's rows, 405B and 70B fine-tuning and Nemotron Nano among them: gradients in bf16 and recomputation as the
    recipes have them."""
    ran = 0
    for row in read_throughput(CORPUS):
        if isinstance(row, MeasuredRun) and not row.out_of_memory and row.source == "NVIDIA-NeMo/Megatron-Bridge":
            fits = max(s.peak_bytes for s in peaks(row.run)) <= find_gpu(row.hardware.name).capacity_bytes
            assert fits or row.number in NOT_AS_STATED, row.number
            ran += 1
    assert ran > 150


def test_nemotron_3_super_has_the_size_in_its_name() -> None:
    """120B, 12B active, by hand from Bridge's ``Nemotron3SuperProvider``: 40 MoE layers of 512 experts between latent
    widths of 1,024, each 2 x 1,024 x 2,688, with two projections of 4,096 x 1,024, a router and a shared expert of
    5,376; 40 Mamba mixers of width 8,192; 8 attentions; and twice 131,072 words."""
    h, latent, inner = 4096, 1024, 8192
    moe = 512 * 2 * latent * 2688 + 2 * h * latent + 512 * h + 2 * h * 5376
    mamba = h * (2 * inner + 2 * 8 * 128 + 128) + inner * h
    attention = h * (32 + 2 * 2) * 128 + 32 * 128 * h
    total = 40 * (moe + mamba) + 8 * attention + 2 * 131072 * h
    assert 119e9 < total < 122e9
    model = resolve_model("nemotron 3 super")
    kinds = [type(x.mixer or x.ffn).__name__ for x in model.layers]
    assert [kinds.count(k) for k in ("MoESpec", "MambaSpec", "AttentionSpec")] == [40, 40, 8]


def test_a_file_of_speed_of_which_half_cannot_be_read_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows with a ``config``, which records of memory have too; the summary is printed."""
    some, strange = tmp_path / "runs.jsonl", {**ROW, "gpu": "TPU v9"}
    for rows, code in (([ROW, ROW, strange], 0), ([ROW, strange], 1), ([strange], 1)):
        some.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        assert main(["accuracy", str(some), "--summary"]) == code
        shown = capsys.readouterr()
        assert "rows are runs" in shown.out and ("cannot be read" in shown.err) == bool(code)


def test_a_file_of_engines_of_which_half_cannot_be_read_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (Path(__file__).parents[1] / "data" / "engines" / "runs.jsonl").read_text().splitlines()
    graded = [row for row in map(json.loads, lines) if row.get("grade") in ("A", "B")]
    some = tmp_path / "runs.jsonl"
    strange = [{**row, "model": "Strange-7B", "model_facts": None} for row in graded[:2]]
    some.write_text("".join(f"{json.dumps(row)}\n" for row in strange))
    assert main(["accuracy", str(some)]) == 1
    assert "100% of the rows cannot be read" in capsys.readouterr().err
