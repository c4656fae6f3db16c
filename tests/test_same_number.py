"""One run has one peak, the same stages and the same components, by every way it is asked for: every engine and source.

The ways of one estimate are in ``ways``; here every source is read (presets, config files, containers, arguments, files
of other trainers, forms), and every command, the page's API and the MCP server are asked for what it describes.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from drawn_runs import ENGINES, GPU, a_command, a_run, run_of
from tiers import few_fast
from ways import WAYS, Stages, band_in_json, band_in_text, bands, differences, expected_band, of_csv, of_json

from bridge_memory import (
    Estimate,
    RunSpec,
    SpecError,
    estimate,
    fit,
    list_presets,
    post_training,
    search,
    whole_job,
)
from bridge_memory import fits as public_fits
from bridge_memory import theoretical_memory_utils as drop_in
from bridge_memory.calculator import GPUMemoryCalculator
from bridge_memory.calibration import calibrated
from bridge_memory.calibration.residuals import Residual, config_digest
from bridge_memory.cli import main
from bridge_memory.cli.ranked import of_estimate
from bridge_memory.components import GIB, Role
from bridge_memory.emit.fixes import try_first
from bridge_memory.plan.changes import WhatIf
from bridge_memory.readers.config_container import run_from_config_container
from bridge_memory.readers.huggingface import model_from_hf_config
from bridge_memory.readers.megatron_args import run_from_megatron_args
from bridge_memory.readers.resolve import resolve_config
from bridge_memory.spec.gpus import find_gpu
from bridge_memory.speed.hardware import HARDWARE
from bridge_memory.timeline import step_timeline
from bridge_memory.verdict import fits
from bridge_memory.web.api import Api, Refused

#: Drawn of every engine or source.
DRAWN = 2
LLAMA = "meta-llama/Llama-3.2-1B"


def check(answer: Estimate) -> None:
    """Every way to ask for the numbers of ``answer``."""
    judged = fits(answer, ["H100"])
    wrong = {name: found for name, way in WAYS.items() if (found := differences(way(answer, judged), answer))}
    assert not wrong, answer.run
    if judged[0].peak_bytes == answer.peak_stage.peak_bytes:  # of the card's own generation
        assert set(bands(answer, judged).values()) == {expected_band(answer, "H100")}, answer.run


@pytest.mark.parametrize("engine", few_fast(ENGINES, 3))
def test_every_way_of_one_estimate(engine: str) -> None:
    draw = Random(f"one estimate {engine}")
    for _ in range(DRAWN):
        check(estimate(a_run(engine, draw)))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_every_way_of_many_estimates(engine: str) -> None:
    draw = Random(f"many estimates {engine}")
    for _ in range(6 * DRAWN):
        check(estimate(a_run(engine, draw)))


def test_every_way_of_a_calibrated_estimate() -> None:
    """A residual of 512 MiB that was measured on each stage."""
    run = a_run("megatron_ddp", Random("calibrated"))
    stages, digest = range(run.parallel.pp), config_digest(run)
    found = [Residual(run.model.name, digest, stage, "peak", 0, 512 << 20, {}) for stage in stages]
    answer = calibrated(estimate(run), found)
    assert answer.peak_stage.peak_bytes == estimate(run).peak_stage.peak_bytes + (512 << 20)
    for name in WAYS.keys() - {"explain", "peaks"}:  # these are asked for a run
        assert not differences(WAYS[name](answer, ()), answer), name


# ---- commands, the page and the MCP server ----


def printed(*words: str) -> str:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    assert code == 0, err.getvalue()
    return out.getvalue()


def by_command(words: Sequence[str]) -> dict[str, Stages]:
    """What ``estimate`` prints in its formats."""
    told = [*words, "--gpu", GPU]
    return {"--json": of_json(json.loads(printed("estimate", *told, "--json"))["stages"]),
            "--format csv": of_csv(printed("estimate", *told, "--format", "csv"))}  # fmt: skip


def check_command(words: Sequence[str], answer: Estimate, folder: Path) -> None:
    """The commands against the estimate of their run; ``answer`` is of the run on GPU."""
    for way, found in by_command(words).items():
        assert set(found) == set(range(len(answer.stages))) and not differences(found, answer), (way, words)
    worst = answer.peak_stage
    told = [*words, "--gpu", GPU, "--unit", "bytes"]
    for more in ((), ("-v",), ("--format", "md"), ("--brief",)):
        text = printed("estimate", *told, *more)
        bounds = answer.peak_bounds
        peak = (worst.peak_bytes, bounds.least, bounds.most)
        assert any(f"{n:,}" in text for n in peak if n is not None), (more, words)
        assert band_in_text(text) == expected_band(answer, GPU), (more, words)
    name = str(folder / "step.pickle")
    printed("estimate", *words, "--gpu", GPU, "--format", "snapshot", "--output", name, "--force")
    alive = highest = 0
    for event in pickle.loads(Path(name).read_bytes())["device_traces"][0]:
        alive += {"alloc": 1, "free_completed": -1}.get(event["action"], 0) * event["size"]
        highest = max(highest, alive)
    assert highest == worst.peak_bytes, words
    told = ["compare", name, *words, "--gpu", GPU, "--snapshot-stage", str(worst.stage), "--json"]
    measured = json.loads(printed(*told))["snapshot"]
    assert measured["predicted_peak_bytes"] == worst.peak_bytes
    # A trace has requested bytes, of which each block takes a multiple of 512.
    assert 0 <= measured["peak_bytes"] - worst.peak_bytes < 512 * sum(group["blocks"] for group in measured["groups"])


def options_of(words: Sequence[str]) -> dict[str, Any]:
    """Typed flags as the page's options."""
    from bridge_memory.web.options import options

    out: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        off = word.startswith("--no-") and word[5:] in options()
        option = options()[word[5:] if off else word[2:]]
        if option.kind == "switch":
            out[option.name] = not off
        else:
            text = next(rest)
            kinds: dict[str, Callable[[str], Any]] = {"integer": int, "number": float, "names": lambda t: t.split(",")}
            out[option.name] = kinds.get(option.kind, str)(text)
    return out


def check_page(question: dict[str, Any], answer: Estimate) -> None:
    found = Api().estimate({**question, "gpu": GPU})
    assert not differences(of_json(found["estimate"]["stages"]), answer)
    assert found["estimate"]["peak"]["bytes"] == answer.peak_stage.peak_bytes
    said = {band_in_json(found["estimate"]["verdict"]["band"]), band_in_json(found["fit"]["band"])}
    assert said == {expected_band(answer, GPU)}
    drawn = found["drawn"]
    assert drawn["timeline"]["peak"]["bytes"] == drawn["treemap"]["bytes"] == answer.stages[drawn["stage"]].peak_bytes


def check_whole_job(words: Sequence[str], question: dict[str, Any], run: RunSpec) -> None:
    """The answer by the whole job: in short, in full, as JSON, on the page, of a search's row and in Python."""
    told = ["estimate", *words, "--gpu", GPU]
    short, full = (json.loads(printed(*told, "--json", *more)) for more in ((), ("--phases",)))
    assert short["verdict"] == full["verdict"] and short["job"] == full["job"] and short["fits"] == full["fits"], words
    for more in ((), ("--phases",)):
        assert short["verdict"]["words"] in " ".join(printed(*told, *more).split()), (more, words)
    (fit,), job = short["fits"], short["job"]
    training = next(phase for phase in job["phases"] if phase["name"] == "training")
    assert fit["peak_bytes"] + fit["margin_bytes"] == training["driver_bytes"][1]
    assert (fit["least_bytes"], fit["replayed"]) == (training["driver_bytes"][0], job["reserved_replayed"])
    page = Api()
    found = page.estimate({**question, "gpu": GPU})
    assert found["fit"] == fit and found["estimate"]["verdict"]["answer"] == short["verdict"]["answer"]
    phases = page.phases({**question, "gpu": GPU})
    assert [p["driver_bytes"] for p in phases["phases"]] == [p["driver_bytes"] for p in job["phases"]]
    assert of_estimate(run, find_gpu(GPU)).verdict == short["verdict"]["answer"]
    whole = whole_job(run, GPU)
    assert whole.as_json() == job and str(whole.verdict) == short["verdict"]["answer"]


def test_what_plans_judges_by_the_whole_job_too(tmp_path: Path) -> None:
    """``sweep``, the first row of ``fit``, ``fits`` and the update of a post-training job: the number and verdict of
    ``estimate``. The reserved memory of an expert model that recomputes is far from a share of its peak."""
    def said(run: RunSpec) -> tuple[str, int]:
        job = whole_job(run, GPU)
        (training,) = (phase for phase in job.phases if phase.phase == "training")
        return str(job.verdict), job.gpu.capacity_bytes - training.driver.most

    question = tmp_path / "fleet.yaml"
    question.write_text(f"models: [{LLAMA}]\ngpus: [{GPU}]\nnum_gpus: [2]\nseq_lengths: 4096\nglobal_batch_size: 16\n")
    (cell,) = json.loads(printed("sweep", str(question), "--json"))["rows"]
    swept = search(RunSpec(model=LLAMA).with_fields(seq_length=4096), gpu=GPU, num_gpus=2, global_batch_size=16)
    verdict, free = said(swept.ranked(1).rows[0].run)
    assert (cell["verdict"], float(cell["free_gib"])) == (verdict, pytest.approx(free / GIB, abs=1e-3))
    given = RunSpec(model="Qwen/Qwen3-8B").with_fields(world_size=8, seq_length=8192)
    first = fit(given, gpu=GPU).ranked(1).rows[0].run
    for run in (swept.rows[-1].run, first):
        (found,) = public_fits(estimate(run), [GPU])
        assert (str(found.verdict), found.headroom_bytes) == said(run)
        assert found.fits == (said(run)[0] in ("fits", "tight"))
    assert said(first)[0] == "fits"
    rollout = post_training("verl", str(Path(__file__).parents[1] / "examples/verl_qwen3_30b_a3b.yaml"), GPU)
    update = next(phase for phase in rollout.phases if str(phase.phase) == "update")
    (found,) = public_fits(estimate(rollout.setup.update_run()), [GPU])
    assert found.replayed and update.reserved.most == found.peak_bytes + found.reserved_bytes


def check_mcp(words: Sequence[str], answer: Estimate, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tools as the server runs them, their command in this process."""
    pytest.importorskip("mcp.server.mcpserver", reason="mcp 2 is not installed")
    from bridge_memory.mcp_server import server

    async def answered(given: Sequence[str], *, seconds: float) -> Any:
        return json.loads(printed(*given, "--json"))

    monkeypatch.setattr(server, "answer", answered)
    run = server.Run(model=words[0], flags=list(words[1:]))
    found = asyncio.run(server.estimate(run=run, gpu=GPU))
    assert not differences(of_json(found["stages"]), answer)
    assert sum(c["bytes"] for c in found["largest_components"]) == answer.peak_stage.peak_bytes
    assert band_in_json(found["verdict"]["band"]) == expected_band(answer, GPU)


@pytest.mark.parametrize("engine", few_fast(ENGINES, 3))
def test_every_command_says_the_same(engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Random(f"commands {engine}")
    for number in range(DRAWN):
        words = a_command(engine, draw)
        answer = estimate(run_of(words))
        check_command(words, answer, tmp_path)
        question = {"model": words[0], "options": options_of(words[1:])}
        check_page(question, answer)
        if not number:
            check_whole_job(words, question, run_of(words))
        check_mcp(words, answer, monkeypatch)


# ---- sources ----


def on_gpu(run: RunSpec) -> RunSpec:
    """The run with the generation of GPU."""
    return run.with_(implementation=replace(run.implementation, gpu_arch=find_gpu(GPU).arch))


def hugging_face(draw: Random, folder: Path) -> tuple[list[str], dict[str, Any], RunSpec]:
    """A config.json of a size that no preset has."""
    while True:
        name = draw.choice(list_presets())
        config = dict(resolve_config(name)[1])
        drawn = {"num_hidden_layers": (2, 3, 7), "vocab_size": (1000, 50257), "hidden_size": (512, 2048)}
        for key, values in drawn.items():
            if key in config and draw.random() < 0.7:
                config[key] = draw.choice(values)
        try:
            model = model_from_hf_config(config, "drawn")
            run = on_gpu(RunSpec(model=model).with_fields(seq_length=1024))
        except SpecError:
            continue
        path = folder / "drawn.json"
        path.write_text(json.dumps(config))
        question = {"config": json.dumps(config), "options": {"seq-length": 1024, "num-gpus": 1}}
        return [str(path), "--seq-length", "1024", "--num-gpus", "1"], question, run


MEGATRON = (
    "--num-layers {layers} --hidden-size {h} --num-attention-heads 16 --ffn-hidden-size {f} --seq-length {s} "
    "--max-position-embeddings {s} --micro-batch-size {mbs} --global-batch-size 64 --vocab-size {v} --bf16 --swiglu "
    "--normalization RMSNorm --position-embedding-type rope --tensor-model-parallel-size {tp} "
    "--pipeline-model-parallel-size {pp} --use-distributed-optimizer {more} --world-size 16"
)


def megatron_arguments(draw: Random, folder: Path) -> tuple[list[str], dict[str, Any], RunSpec]:
    more = draw.choice((
        "--sequence-parallel", "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "--num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 2 --disable-bias-linear",
        "--untie-embeddings-and-output-weights", "--transformer-impl local", "--attention-softmax-in-fp32",
    ))  # fmt: skip
    tp = draw.choice((1, 2, 4))
    if "parallel" in more:
        tp = max(2, tp)
        more += " --sequence-parallel" * ("--sequence-parallel" not in more)
    text = MEGATRON.format(
        layers=draw.choice((4, 8)), h=draw.choice((1024, 2048)), f=draw.choice((4096, 5632)),
        v=draw.choice((32000, 50257)), s=draw.choice((1024, 4096)), mbs=draw.choice((1, 2)), tp=tp,
        pp=draw.choice((1, 2)), more=more,
    )  # fmt: skip
    text = text.replace(" --world-size 16", "")
    run = on_gpu(run_from_megatron_args(text, world_size=16))
    return ["--megatron-args", text, "--num-gpus", "16"], {"megatron_args": text, "options": {"num-gpus": 16}}, run


def container(draw: Random) -> Any:
    """A Megatron Bridge ConfigContainer, as far as readers ask for it."""
    heads = draw.choice((8, 16))
    layers, pp = draw.choice((4, 8)), draw.choice((1, 2, 4))
    tp, experts = draw.choice((1, 2)), draw.choice((None, None, 8))
    model = SimpleNamespace(
        num_layers=layers, hidden_size=1024, ffn_hidden_size=draw.choice((2816, 4096)), num_attention_heads=heads,
        num_query_groups=draw.choice((2, heads)), gated_linear_unit=True, activation_func="silu", add_bias_linear=False,
        normalization="RMSNorm", position_embedding_type="rope", seq_length=draw.choice((1024, 4096)),
        vocab_size=draw.choice((32000, 128256)), bf16=True, hidden_dropout=0.0, attention_dropout=0.0,
        share_embeddings_and_output_weights=draw.random() < 0.5, tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1, pipeline_model_parallel_size=pp, context_parallel_size=1,
        num_moe_experts=experts, moe_router_topk=2, moe_ffn_hidden_size=704, expert_model_parallel_size=1,
        should_pad_vocab=False, gradient_accumulation_fusion=True, bias_activation_fusion=True,
        recompute_granularity=draw.choice((None, "selective")),
    )  # fmt: skip
    return SimpleNamespace(
        model=model, train=SimpleNamespace(micro_batch_size=1, global_batch_size=32),
        optimizer=SimpleNamespace(optimizer="adam", use_distributed_optimizer=True),
        ddp=SimpleNamespace(grad_reduce_in_fp32=draw.random() < 0.5, use_distributed_optimizer=True),
        data_parallel_size=4,
    )  # fmt: skip


def bridge_container(draw: Random, folder: Path) -> tuple[list[str], None, RunSpec]:
    """Its run_config.yaml: JSON is YAML."""
    config = container(draw)
    parts = {name: {**vars(part)} for name, part in vars(config).items() if isinstance(part, SimpleNamespace)}
    parts["model"]["_target_"] = "megatron.bridge.models.gpt_provider.GPTModelProvider"
    if draw.random() < 0.5:  # as Bridge writes it; an edited file may have parts without their classes
        parts["train"]["_target_"] = "megatron.bridge.training.config.TrainingConfig"
        parts["ddp"]["_target_"] = "megatron.bridge.training.config.DistributedDataParallelConfig"
    path = folder / "run_config.yaml"
    path.write_text(json.dumps(parts))
    world = 4 * config.model.tensor_model_parallel_size * config.model.pipeline_model_parallel_size
    run = on_gpu(run_from_config_container(config, world_size=world))
    return ["--container", str(path), "--num-gpus", str(world)], None, run


FILES: dict[str, tuple[str, str, Callable[[Random], str]]] = {
    "DeepSpeed": ("--deepspeed", "ds.json", lambda draw: json.dumps({
        "train_micro_batch_size_per_gpu": draw.choice((1, 2)), "gradient_accumulation_steps": draw.choice((1, 4)),
        "bf16": {"enabled": True}, "zero_optimization": {"stage": draw.choice((1, 2, 3))},
    })),
    "accelerate": ("--accelerate", "accelerate.yaml", lambda draw: (
        "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nfsdp_config:\n  fsdp_version: "
        f"{draw.choice((1, 2))}\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
        f"  fsdp_activation_checkpointing: {draw.choice(('true', 'false'))}\n"
    )),
    "TrainingArguments": ("--training-args", "args.json", lambda draw: json.dumps({
        "per_device_train_batch_size": draw.choice((1, 4)), "gradient_accumulation_steps": 2, "bf16": True,
        "gradient_checkpointing": draw.random() < 0.5, "optim": draw.choice(("adamw_torch", "adamw_torch_fused")),
    })),
    "torchtitan": ("--torchtitan", "train.toml", lambda draw: (
        f"[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nlocal_batch_size = {draw.choice((1, 2))}\n"
        f"seq_len = {draw.choice((2048, 8192))}\n[activation_checkpoint]\nmode = '{draw.choice(('none', 'full'))}'\n"
    )),
    "peft": ("--peft-config", "adapter_config.json", lambda draw: json.dumps({
        "peft_type": "LORA", "r": draw.choice((4, 16)), "target_modules": ["q_proj"], "task_type": "CAUSAL_LM",
    })),
}  # fmt: skip


def file_of(kind: str) -> Callable[[Random, Path], tuple[list[str], None, RunSpec]]:
    """A file of another trainer, with a small model beside it."""
    def drawn(draw: Random, folder: Path) -> tuple[list[str], None, RunSpec]:
        flag, name, text = FILES[kind]
        path = folder / name
        path.write_text(text(draw))
        words = ["meta-llama/Llama-3.2-1B"] * (kind != "torchtitan") + [flag, str(path), "--num-gpus", "8"]
        words += ["--seq-length", "2048"] * (kind != "torchtitan") + ["--engine", "fsdp2"] * (kind == "peft")
        return words, None, run_of(words)

    return drawn


SOURCES: dict[str, Callable[[Random, Path], tuple[list[str], dict[str, Any] | None, RunSpec]]] = {
    "config.json": hugging_face, "Megatron-LM": megatron_arguments, "ConfigContainer": bridge_container,
    **{kind: file_of(kind) for kind in FILES},
}  # fmt: skip


@pytest.mark.parametrize("source", few_fast(SOURCES, 3))
def test_every_source_says_the_same(source: str, tmp_path: Path) -> None:
    draw = Random(f"source {source}")
    for _ in range(DRAWN):
        words, question, run = SOURCES[source](draw, tmp_path)
        answer = estimate(run)
        check_command(words, answer, tmp_path)
        if question is not None:
            check_page(question, answer)


def test_the_drop_in_has_the_stages_of_the_estimate() -> None:
    """Its components are those of static roles; activations are what else is alive at the peak."""
    draw = Random("drop-in")
    for _ in range(6 * DRAWN):
        config = container(draw)
        answer = estimate(run_from_config_container(config))
        found = drop_in.estimate_training_memory_by_stage(config)
        assert [s.total_memory_bytes for s in found] == [s.peak_bytes for s in answer.stages]
        for ours, stage in zip(found, answer.stages, strict=True):
            named = {c.name: c.memory_bytes for c in ours.model_state_components}
            assert named == {c.name: c.bytes for c in stage.components if c.role.value in STATIC}
            assert ours.activation is not None
            assert ours.activation.memory_bytes == stage.activation_bytes + stage.transient_bytes
        highest = drop_in.estimate_training_memory(config, method="inventory")
        assert highest.total_memory_bytes == answer.peak_stage.peak_bytes


STATIC = ("weights", "gradients", "optimizer", "buffers")
FORMS = (
    {"type": "pytorch_ddp"}, {"type": "fsdp"}, {"type": "fsdp", "sharding_strategy": "no_shard"},
    *({"type": "deepspeed", "zero_stage": stage} for stage in (0, 1, 2, 3)), {"type": "megatron_lm"},
    {"type": "megatron_deepspeed", "zero_stage": 1},
)  # fmt: skip


@pytest.mark.parametrize("engine", FORMS, ids=lambda engine: "-".join(map(str, engine.values())))
def test_the_calculator_has_the_roles_of_the_estimate(engine: dict[str, Any], tmp_path: Path) -> None:
    draw = Random(f"calculator {engine}")
    form = {
        "model": {"name": "meta-llama/Llama-3.2-1B", "max_seq_len": draw.choice((1024, 4096))},
        "training": {"batch_size": 2, "dtype": "bf16", "activation_checkpointing": draw.choice((0, 4))},
        "engine": engine, "hardware": {"num_gpus": 8},
    }  # fmt: skip
    calculator = GPUMemoryCalculator.from_dict(form)
    result, answer = calculator.calculate(), estimate(calculator.run)
    check(answer)
    worst, parts = answer.peak_stage, result.breakdown
    assert result.total_memory_per_gpu_gb * GIB == worst.peak_bytes
    shown = {
        Role.WEIGHTS: parts.model_params_gb, Role.GRADIENTS: parts.gradients_gb,
        Role.OPTIMIZER: parts.optimizer_states_gb, Role.ACTIVATION: parts.activations_gb,
    }  # fmt: skip
    assert {role: gib * GIB for role, gib in shown.items()} == {role: worst.bytes_of(role) for role in shown}
    assert parts.overhead_gb * GIB == pytest.approx(worst.buffers_bytes + worst.transient_bytes)
    path = tmp_path / "form.json"
    path.write_text(json.dumps(form))
    assert json.loads(printed("calculate", "--config", str(path), "--json"))["result"] == result.to_dict()


# ---- searches and fixes ----


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_of_a_search_is_the_estimate_of_its_run(engine: str) -> None:
    if engine in ("megatron_fsdp", "megatron_deepspeed"):
        pytest.skip("not searched by a fixed engine")
    found = search(
        "meta-llama/Llama-3.2-1B", gpu="H100", num_gpus=1 if engine == "single" else 4, global_batch_size=16,
        engine=None if engine.startswith("megatron") else engine,
    )  # fmt: skip
    draw = Random(engine)
    for i in sorted(draw.sample(range(len(found.rows)), min(12, len(found.rows)))):
        row = found.rows[i]
        answer = estimate(row.run)
        assert (row.peak, row.stage) == (answer.peak_stage.peak_bytes, answer.peak_stage.stage)
        (fit,) = fits(answer, ["H100"])
        assert row.headroom == fit.headroom_bytes
    assert sorted(found.rows.peaks())[0] == min(row.peak for row in found.rows)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["megatron_ddp", "fsdp2", "zero3", "ddp"])
def test_the_command_line_and_the_page_propose_the_same_fix(engine: str) -> None:
    """Of a run that does not fit: the change to try first, and what it costs."""
    draw, seen = Random(f"fix {engine}"), 0
    while seen < DRAWN:
        words = a_command(engine, draw)
        run = run_of(words, "RTX-4090")
        (fit,) = fits(estimate(run), ["RTX-4090"])
        if str(fit.verdict) != "does not fit" or fit.lacks:
            continue
        seen += 1
        question = {"model": words[0], "gpu": "RTX-4090", "options": options_of(words[1:])}
        with contextlib.suppress(Refused):
            page, said = Api().whatif(question)["cheapest"], try_first(run, find_gpu("RTX-4090"))
            assert (page is None) == said.startswith("no single option"), words
            if page is not None:
                effects = {e.peak: e for e in WhatIf(run, HARDWARE["RTX-4090"]).singles}
                assert page["peak_bytes"] in effects and page["fits"]
                changed = [name for name, value in page["options"].items() if value is not None]
                assert all(f"--{name}" in said or f"--no-{name}" in said for name in changed), (said, page)


# ---- a step over time ----


@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1", "zero2", "ddp", "single"])
def test_gradients_that_backward_makes_are_alive_once(engine: str) -> None:
    """Llama-3.2-1B: before backward no gradient of this step exists; after it all of them do."""
    run = RunSpec(model="meta-llama/Llama-3.2-1B").with_fields(engine=engine, world_size=1 if engine == "single" else 8)
    timeline = step_timeline(run, 0)
    points = list(timeline.points())
    forward = [p for p in points if 0 <= p.pass_number < len(timeline.passes)
               and timeline.passes[p.pass_number].phase == "forward"]  # fmt: skip
    assert all(p.gradients == 0 for p in forward)
    stage = estimate(run).stages[0]
    whole = sum(c.bytes for c in (*stage.components, *stage.carried_over) if c.role == "gradients")
    held = sum(nbytes for role, nbytes in timeline.persistent.items() if role == "gradients")
    assert held + points[-1].gradients == whole


def test_sent_outputs_that_stay_are_in_the_step_over_time() -> None:
    """Llama-3.2-1B over two stages of two chunks, 1,024 tokens of 2,048 bf16 numbers: an output sent is 4 MiB, of
    every microbatch in flight of every chunk but the last."""
    run = RunSpec(model="meta-llama/Llama-3.2-1B").with_fields(
        world_size=2, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, seq_length=1024,
        deallocate_pipeline_outputs=False,
    )  # fmt: skip
    sent = [[chunk.sent for chunk in step_timeline(run, stage).chunks] for stage in (0, 1)]
    assert sent == [[4 << 20, 4 << 20], [4 << 20, 0]]
    check(estimate(run))




def test_virtual_stages_that_do_not_run_carry_over() -> None:
    """Qwen3-30B-A3B with recomputed MoE layers over four stages: only virtual stages that ran backward last keep the
    inputs of their layers and these inputs' gradients, each of 8,192 tokens of 2,048 bf16 numbers."""
    run = RunSpec(model="Qwen/Qwen3-30B-A3B").with_fields(
        world_size=16, pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=3, seq_length=8192,
        expert_model_parallel_size=4, global_batch_size=32, recompute_granularity="selective",
        recompute_modules=("moe",),
    )  # fmt: skip
    check(estimate(run))
    each = 4 * 2 * (8192 * 2048 * 2)  # of a virtual stage of four layers
    carried = [{one.carried_over for one in step_timeline(run, stage).passes} for stage in range(4)]
    assert carried == [{0, each, 2 * each}] * 4
    rows = search(run, gpu="H200", vary=["ep", "vpp", "recompute"]).rows
    several = [row for row in rows if row.run.parallel.vpp > 1 and "moe" in row.run.recompute.modules]
    assert len(several) > 1
    for row in several:
        assert row.peak == estimate(row.run).peak_stage.peak_bytes


def test_what_the_generator_found_is_refused_or_estimated() -> None:
    """A layout of virtual stages, which Megatron-DeepSpeed has not; a base in 4 bits without adapters, whose weights
    are then all there is of it."""
    pipeline = {"world_size": 2, "pipeline_model_parallel_size": 2}
    llama = RunSpec(model="meta-llama/Llama-3.2-1B")
    of_deepspeed = {"engine": "megatron_deepspeed", **pipeline}
    estimate(llama.with_fields(**of_deepspeed, pipeline_model_parallel_layout="Et*8|t*8L"))
    with pytest.raises(SpecError, match="has virtual stages, which engine megatron_deepspeed has not"):
        llama.with_fields(**of_deepspeed, pipeline_model_parallel_layout="Et*4|t*4|t*4|t*4L")
    quantized = {"engine": "single", "load_in_4bit": True, "peft.scheme": "lora", "peft.dim": 0}
    (stage,) = estimate(llama.with_fields(**quantized)).stages
    assert stage.gradients_bytes == 0 and 0 < stage.weights_bytes < 2 * stage.parameters
