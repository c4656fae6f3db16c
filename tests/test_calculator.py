"""The form of GPU memory calculators, its Python names, and the commands over it."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tiers import few_fast

from bridge_memory import SpecError, estimate, peaks, search
from bridge_memory.calculator import (
    EngineConfig,
    GPUConfig,
    GPUMemoryCalculator,
    MemoryResult,
    ModelConfig,
    ParallelismConfig,
    TrainingConfig,
)
from bridge_memory.calculator.form import parameter_count
from bridge_memory.calculator.shapes import PUBLISHED, model_of, nearest
from bridge_memory.cli import main
from bridge_memory.verdict import headroom

GIB = 1 << 30

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.json"))
LLAMA2_7B = {
    "num_parameters": "7B", "num_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "vocab_size": 32000,
    "max_seq_len": 4096,
}  # fmt: skip
MEGATRON = {"engine": {"type": "megatron_lm"}, "hardware": {"num_gpus": 8}}


def form(**tables: Any) -> dict[str, Any]:
    return {"model": {"name": "llama", **LLAMA2_7B}, **MEGATRON, **tables}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(path)]) == 0
    capsys.readouterr()
    assert main(["calculate", "--config", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    parts = sum(result["breakdown"].values())
    assert parts == pytest.approx(result["total_memory_per_gpu_gb"], rel=1e-9)
    assert result["fits_on_gpu"] == (result["verdict"] == "fits")


def test_there_is_an_example_of_every_engine() -> None:
    kinds = {json.loads(path.read_text())["engine"]["type"] for path in EXAMPLES}
    assert kinds == {"pytorch_ddp", "deepspeed", "megatron_lm", "fsdp", "megatron_deepspeed"}


def test_the_result_is_the_estimate() -> None:
    """Nothing is computed beside it: 4 ranks of each of two stages."""
    calculator = GPUMemoryCalculator(
        ModelConfig(name="Llama-3.2-1B", max_seq_len=4096), TrainingConfig(batch_size=2, optimizer="adam"),
        ParallelismConfig(pipeline_parallel_size=2), EngineConfig(type="megatron"), GPUConfig(num_gpus=8),
    )  # fmt: skip
    result, direct = calculator.calculate(), estimate(calculator.run)
    assert result.estimate.stages == direct.stages and calculator.run.parallel.pp == 2
    assert result.total_memory_per_gpu_gb == direct.peak_stage.peak_bytes / GIB
    assert result.total_memory_all_gpus_gb == sum(4 * s.peak_bytes for s in direct.stages) / GIB
    assert result.breakdown.total_memory_gb == pytest.approx(result.total_memory_per_gpu_gb)
    assert calculator.run.batch.micro_batch_size == 2 and calculator.run.batch.seq_length == 4096


def test_the_recommended_batch_is_the_largest_that_fits() -> None:
    calculator = GPUMemoryCalculator.from_dict(form(hardware={"num_gpus": 8, "gpu_memory_gb": 80}))
    batch = calculator.calculate().recommended_batch_size
    assert batch is not None

    def fits(size: int) -> bool:
        run = calculator.run
        batch = replace(run.batch, micro_batch_size=size, global_batch_size=None)
        changed = run.with_(batch=batch)
        return headroom(calculator.gpu, max(s.peak_bytes for s in peaks(changed)), changed) >= 0

    assert fits(batch) and not fits(batch + 1)
    small = GPUMemoryCalculator.from_dict(form(hardware={"num_gpus": 8, "gpu_memory_gb": 16})).calculate()
    assert small.recommended_batch_size is None and not small.fits_on_gpu and small.memory_utilization_percent > 100


def test_offloaded_states_are_counted_in_host_memory() -> None:
    """ZeRO-2 with its optimizer on the host: fp32 parameters and two moments, 12 bytes of each of 6,738,415,616
    parameters over all ranks, with the gradients that it steps by and buffers beside; nothing of it on the GPU."""
    calculator = GPUMemoryCalculator.from_dict(form(
        model={"name": "Llama-2-7b-hf", "max_seq_len": 512},
        engine={"type": "deepspeed", "zero_stage": 2, "offload_optimizer": "cpu"},
    ))  # fmt: skip
    result = calculator.calculate()
    least = 12 * 6_738_415_616 / GIB
    assert least <= result.cpu_memory_gb <= least * 1.75 and result.breakdown.optimizer_states_gb == 0
    assert GPUMemoryCalculator.from_dict(form()).calculate().cpu_memory_gb == 0


def test_sizes_given_by_numbers_become_a_model() -> None:
    """Llama-2-7B has 6,738,415,616 parameters with its FFN of 11008; asked for 7 B the FFN is what makes them."""
    model, said = model_of(ModelConfig(**{**LLAMA2_7B, "num_parameters": 6_738_415_616}))
    assert model.layers[0].ffn.ffn_hidden_size == 11008 and "6.738 B" in said[0]  # type: ignore[union-attr]
    model, said = model_of(ModelConfig(**LLAMA2_7B))
    assert estimate(GPUMemoryCalculator.from_dict(form()).run).parameters == pytest.approx(7e9, rel=0.005)
    gpt2 = ModelConfig(num_parameters="124M", num_layers=12, hidden_size=768, num_attention_heads=12, vocab_size=50257)
    assert model_of(gpt2)[0].share_embeddings_and_output_weights


def test_experts() -> None:
    """Mixtral-8x7B: 46,702,792,704 parameters, with 8 query groups in place of 32 fewer by 32 * 2 * 4096 * 3072."""
    config = ModelConfig(num_layers=32, hidden_size=4096, num_attention_heads=32, moe_enabled=True,
                         expert_intermediate_size=14336)  # fmt: skip
    run = GPUMemoryCalculator(config, engine_config=EngineConfig(type="megatron")).run
    assert estimate(run).parameters == 46_702_792_704 + 32 * 2 * 4096 * 3072


@pytest.mark.parametrize("engine", ["deepspeed", "fsdp", "megatron_lm", "pytorch_ddp"])
def test_the_batch_that_is_recommended_fits_and_one_more_does_not(engine: str) -> None:
    def calculated(batch: int, level: int = 4) -> MemoryResult:
        found = form(training={"batch_size": batch, "activation_checkpointing": level}, engine={"type": engine})
        return GPUMemoryCalculator.from_dict(found).calculate()

    most = calculated(1).recommended_batch_size
    if most is None:
        assert not calculated(1).fits_on_gpu
    else:
        assert calculated(most).fits_on_gpu and not calculated(most + 1).fits_on_gpu


def test_parts_of_another_type_are_one_line() -> None:
    with pytest.raises(SpecError, match="is no ModelConfig; give one"):
        GPUMemoryCalculator({"name": "x"})  # type: ignore[arg-type]


def test_a_preset_wins_over_numbers() -> None:
    run = GPUMemoryCalculator.from_dict(form(model={**LLAMA2_7B, "name": "Qwen/Qwen2.5-7B"})).run
    assert run.model.name == "Qwen/Qwen2.5-7B" and run.model.hidden_size == 3584
    assert GPUMemoryCalculator.from_dict(form(model="Llama-3.2-1B")).run.model.num_layers == 16


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_nearest_published_shape_is_itself(name: str) -> None:
    from bridge_memory.inventory.counts import model_parameters
    from bridge_memory.readers import resolve_model

    model, said = nearest(model_parameters(resolve_model(name))[0] * 1.01)
    assert model.name.endswith(f"B like {name}") and name in said[0] and "layers" not in said[0]


def test_between_published_shapes_layers_are_added() -> None:
    from bridge_memory.inventory.counts import model_parameters

    model, said = nearest(20e9)
    assert model_parameters(model)[0] == pytest.approx(20e9, rel=0.02) and f"with {model.num_layers} layers" in said[0]


@pytest.mark.parametrize(("parameters", "published"), [(134_515_008, "SmolLM2-135M"), (361_821_120, "SmolLM2-360M")])
def test_small_models_have_shapes_of_their_own(parameters: int, published: str) -> None:
    """Counts as the Hub has them."""
    from bridge_memory.inventory.counts import model_parameters

    model, _ = nearest(parameters)
    assert model_parameters(model)[0] == parameters and published in model.name


def test_every_size_that_is_answered_is_about_the_size_asked_for() -> None:
    from bridge_memory.inventory.counts import model_parameters

    for size in (5e7, 1e8, 2e8, 3e8, 5e8, 1e9, 2e9, 5e9, 1e10, 3e10, 6e10, 1e11, 3e11, 1e12):
        assert model_parameters(nearest(size)[0])[0] == pytest.approx(size, rel=0.1)
    with pytest.raises(SpecError, match="give hidden_size and num_layers"):
        nearest(1e6)
    assert nearest(2e8, "mine")[0].name == "mine"


@pytest.mark.parametrize(("text", "count"), [("7B", 7e9), ("350M", 350e6), ("7e9", 7e9), ("1.5 t", 1.5e12), (7e9, 7e9)])
def test_parameters_as_people_write_them(text: object, count: float) -> None:
    assert parameter_count(text) == count


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"engine": {"type": "horovod"}}, "engine.type is 'horovod', which is unknown; use one of pytorch_ddp"),
    ({"engine": {"type": "deepspeed", "zero_stage": 4}}, "engine.zero_stage is 4"),
    ({"engine": {"type": "fsdp", "sharding_strategy": "full"}}, "engine.sharding_strategy is 'full'"),
    ({"engine": {"type": "ddp", "zero_stage": 3}}, "engine pytorch_ddp has not"),
    ({"training": {"dtype": "float8"}}, "training.dtype is 'float8'.*did you mean float"),
    ({"training": {"dtype": "int4"}}, "in which nothing trains"),
    ({"training": {"optimizer": "adamw8bit"}}, "did you mean adamw_8bit"),
    ({"training": {"activation_checkpointing": 5}}, "activation_checkpointing is 5"),
    ({"training": {"batchsize": 5}}, "training.batchsize is unknown.*did you mean batch_size"),
    ({"parallelism": {"tensor_parallel_size": 0}}, "tensor_parallel_size is 0"),
    ({"parallelism": {"data_parallel_size": 4}}, "hardware.num_gpus is 8, not"),
    ({"model": {"num_parameters": "7X"}}, "num_parameters is '7X'"),
    ({"model": {**LLAMA2_7B, "num_parameters": "70B"}}, "does not go with hidden_size 4096"),
    ({"model": {**LLAMA2_7B, "num_attention_heads": 33}}, "not divisible by model.num_attention_heads"),
    ({"model": {"name": "x"}}, "neither num_parameters nor"),
    ({"hardware": {"num_gpus": 8, "total_gpu_memory_gb": 10}}, "total_gpu_memory_gb is 10"),
    ({"hardware": {"num_nodes": 2, "gpus_per_node": 8, "num_gpus": 8}}, "num_nodes x gpus_per_node"),
    ({"hardware": {"interconnect_type": "carrier pigeon"}}, "interconnect_type"),
    ({"hardwear": {}}, "hardwear is unknown.*did you mean hardware"),
]


@pytest.mark.parametrize(("tables", "words"), WRONG, ids=[words[:40] for _, words in WRONG])
def test_unknown_words_are_refused_in_one_line(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words) as refused:
        GPUMemoryCalculator.from_dict(form(**tables))
    assert "\n" not in str(refused.value)


def test_validate_lists_all_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(form(engine={"type": "ddpp"}, training={"dtype": "bf17", "optimizer": "adamw8"})))
    assert main(["validate", str(path), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)["problems"]
    assert [p["field"] for p in found] == ["training.optimizer", "training.dtype", "engine.type"]


ENGINES = {
    "pytorch_ddp": ("ddp", "fp32"), "pytorch": ("ddp", "fp32"), "ddp": ("ddp", "fp32"), "fsdp": ("fsdp2", "fp32"),
    "deepspeed": ("zero2", "bf16"), "megatron_lm": ("megatron_ddp", "bf16"), "megatron": ("megatron_ddp", "bf16"),
    "megatron-lm": ("megatron_ddp", "bf16"), "megatron_deepspeed": ("megatron_deepspeed", "bf16"),
}  # fmt: skip


@pytest.mark.parametrize("word", ENGINES)
def test_engines_and_the_dtype_of_their_parameters(word: str) -> None:
    run = GPUMemoryCalculator.from_dict(form(engine={"type": word})).run
    assert (run.data_parallel.engine, run.precision.params_dtype) == ENGINES[word]
    assert run.implementation.transformer_impl == (
        "transformer_engine" if word.startswith("megatron") else "transformers"
    )


def test_levels_of_checkpointing() -> None:
    def run(engine: str, level: int) -> Any:
        training = {"activation_checkpointing": level}
        return GPUMemoryCalculator.from_dict(form(engine={"type": engine}, training=training)).run

    assert run("fsdp", 4).transformers.gradient_checkpointing and not run("fsdp", 4).not_modelled
    assert "levels 1 to 3" in run("fsdp", 2).not_modelled[0] and not run("fsdp", 2).transformers.gradient_checkpointing
    assert run("megatron", 4).recompute.granularity == "full"
    # A level saves its share of what 4 saves, which is linear in the layers.
    for level in (1, 2, 3):
        recompute = run("megatron", level).recompute
        assert (recompute.granularity, recompute.method, recompute.num_layers) == ("full", "block", 8 * level)
    assert run("megatron", 0).recompute.granularity is None


def test_the_classes_have_the_fields_of_the_files() -> None:
    """Files of that form, field by field."""
    assert {f.name for f in fields(ModelConfig)} >= {*LLAMA2_7B, "name", "largest_layer_params", "moe_enabled", "top_k"}
    assert TrainingConfig().batch_size == 1 and ModelConfig().vocab_size == 32000 and GPUConfig().gpu_memory_gb == 80
    assert ModelConfig().num_experts == 8 and ModelConfig().top_k == 2 and ModelConfig().max_seq_len == 2048


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["0"], "SIZE (0.0) is not within"), (["nan"], "SIZE (nan) is no number"), (["1e6"], "SIZE (1e+06) is unlike"),
        (["7", "--zero-stage", "3"], "--zero-stage is 3, which engine pytorch_ddp has not"),
        (["7", "--activation-checkpointing", "5"], "--activation-checkpointing is 5; it must be an integer from 0"),
        (["7", "--dtype", "int4"], "--peft lora --load-in-4bit"),
        (["7", "--engine", "zero3"], "--engine is 'zero3'"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)  # fmt: skip
def test_quick_refuses_in_its_own_words(capsys: pytest.CaptureFixture[str], argv: list[str], words: str) -> None:
    assert main(["quick", *argv]) == 2
    line = capsys.readouterr().err
    assert words in line and line.count("\n") == 1


def test_a_number_of_parameters_in_quick(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for size in ("7", "7B", "7e9", "7000M"):
        assert main(["quick", size, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert all(one["result"] == found[0]["result"] for one in found)


def test_quick(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quick", "7", "--gpus", "8", "--engine", "megatron", "--gpu-mem", "80"]) == 0
    text = capsys.readouterr().out
    assert "meta-llama/Llama-2-7b-hf" in text and "80 GB" in text and "Largest batch" in text
    assert main(["quick", "350M", "--engine", "megatron"]) == 0
    for argv in ([], ["seven"], ["7", "--engine", "x"], ["-7"], ["7", "--gpus", "0"]):
        assert main(["quick", *argv]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    for size in ("seven", "999999999B"):
        assert main(["quick", size]) == 2
        assert "SIZE (" in capsys.readouterr().err


def _offered(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The command that `quick` prints for a layout that fits; no words where there is none."""
    main(["quick", *argv])
    lines = capsys.readouterr().out.splitlines()
    return next((shlex.split(line)[2:] for line in lines if line.startswith("  bridge-memory quick")), [])


def test_quick_offers_the_layout_that_search_finds(capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` searches the same two axes, as arrays and by its own margins."""
    offered = _offered(["70", "--gpus", "64", "--engine", "megatron"], capsys)
    rows = []
    for tp in (1, 2, 4, 8):
        parallel = {"tensor_parallel_size": tp, "sequence_parallel": tp > 1}
        asked = {"model": {"num_parameters": "70B"}, "engine": {"type": "megatron"}, "hardware": {"num_gpus": 64}}
        run = GPUMemoryCalculator.from_dict({**asked, "parallelism": parallel}).run
        rows += search(run, gpu="H100", num_gpus=64, global_batch_size=64, vary=["pp"]).rows[:1]
    best = min(rows, key=lambda row: row.time.seconds).run.parallel
    said = dict(pairwise(offered))
    sizes = best.tensor_model_parallel_size, best.pipeline_model_parallel_size
    assert (int(said["--tp"]), int(said["--pp"])) == sizes
    assert "--sequence-parallel" in offered and best.sequence_parallel
    assert int(said["--gradient-accumulation-steps"]) * best.data_parallel_size == 64


@pytest.mark.parametrize(
    "words",
    few_fast([
        "7 --gpus 16 --engine megatron --gpu-mem 24 --seq-length 8192",
        "13 --gpus 8 --engine megatron_deepspeed --batch-size 4", "Mixtral-8x7B-v0.1 --gpus 32 --engine megatron",
        "70 --gpus 48 --tp 8 --engine megatron_lm --seq-length 4096 --optimizer sgd", "70 --gpus 64 --engine megatron",
    ]),
)  # fmt: skip
def test_the_command_that_quick_offers_fits(capsys: pytest.CaptureFixture[str], words: str) -> None:
    """Typed, it says so itself, of the same model, sequences of a step and card, and offers nothing more."""
    main(["quick", *words.split(), "--json"])
    before = json.loads(capsys.readouterr().out)
    assert before["result"]["verdict"] == "does not fit"
    offered = _offered(words.split(), capsys)
    assert shlex.split(before["offer"]["command"])[2:] == offered
    assert offered and main(["quick", *offered, "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["result"]["verdict"] == before["offer"]["verdict"] and after["offer"] is None
    assert max(stage["peak_bytes"] for stage in after["estimate"]["stages"]) == before["offer"]["peak_bytes"]
    batches = [one["estimate"]["run"]["batch"].split(", ") for one in (before, after)]
    assert batches[0][:3] == batches[1][:3] and "global batch" in batches[0][2]
    assert before["estimate"]["run"]["model"] == after["estimate"]["run"]["model"]
    assert before["estimate"]["fits"][0]["gpu"] == after["estimate"]["fits"][0]["gpu"]
    assert _offered(offered, capsys) == []


def test_quick_says_that_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """Weights in bf16, gradients and optimizer states of 405e9 parameters are 7.3e12 bytes; 8 GPUs have 0.64e12."""
    assert main(["quick", "405B", "--gpus", "8", "--engine", "megatron"]) == 0
    assert "No TP with an even split over PP fits 80 GB on 8 GPUs" in capsys.readouterr().out
