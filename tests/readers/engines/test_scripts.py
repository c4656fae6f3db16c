"""Files of TRL and LLaMA-Factory say how the model is loaded and what of it trains, beside TrainingArguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge_memory.estimation import estimate
from bridge_memory.readers.engines.run import run_from_files, settings_from_files
from bridge_memory.readers.engines.settings import Specified
from bridge_memory.spec import RunSpec, SpecError

MODEL = "meta-llama/Llama-3.1-8B"
#: As alignment-handbook's recipes have it.
TRL: dict[str, Any] = {
    "model_name_or_path": "mistralai/Mistral-7B-v0.1", "model_revision": "main", "torch_dtype": "bfloat16",
    "attn_implementation": "flash_attention_2", "load_in_4bit": True, "use_peft": True, "lora_r": 16, "lora_alpha": 16,
    "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "chat_template": "x",
    "dataset_mixer": {"a": 1.0}, "dataset_splits": ["train"], "bf16": True, "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False}, "max_seq_length": 2048,
    "per_device_train_batch_size": 4,
}  # fmt: skip
FACTORY: dict[str, Any] = {
    "model_name_or_path": MODEL, "stage": "sft", "do_train": True, "finetuning_type": "lora", "lora_rank": 8,
    "lora_target": "all", "dataset": "identity", "template": "llama3", "cutoff_len": 1024, "max_samples": 1000,
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "bf16": True, "plot_loss": True,
}  # fmt: skip


def read(tmp_path: Path, args: dict[str, Any], world_size: int = 1) -> RunSpec:
    path = tmp_path / "args.json"
    path.write_text(json.dumps(args))
    return run_from_files(MODEL, training_args=str(path), world_size=world_size)


def test_qlora_of_trl(tmp_path: Path) -> None:
    run = read(tmp_path, TRL)
    assert run.peft.scheme == "lora" and run.peft.dim == 16
    assert sorted(run.peft.target_modules) == ["k_proj", "o_proj", "q_proj", "v_proj"]
    hf = run.transformers
    assert hf.load_in_4bit and hf.bnb_4bit_compute_dtype == "bf16" and hf.lora_dropout == 0.05
    assert hf.attn_implementation == "flash_attention_2" and hf.gradient_checkpointing and hf.use_reentrant is False
    assert run.precision.params_dtype == "bf16" and not hf.prepare_model_for_kbit_training
    assert run.batch.seq_length == 2048 and run.batch.micro_batch_size == 4
    # NF4 of 6.98 B weights in linears is half a byte each; embeddings and output layer stay in bf16.
    worst = estimate(run).peak_stage
    linears = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    weights = linears * (0.5 + 4 / 64) + 2 * 128256 * 4096 * 2
    adapters = 32 * 16 * (3 * (4096 + 4096) - 4096 + 2 * (4096 + 1024)) * 4
    assert worst.static_bytes == pytest.approx(weights + 4 * adapters, rel=0.1)


def test_what_is_not_quantised_is_in_fp32_where_trl_does_not_cast_it(tmp_path: Path) -> None:
    run = read(tmp_path, {name: value for name, value in TRL.items() if name != "bf16"})
    assert run.transformers.prepare_model_for_kbit_training
    run = read(tmp_path, {name: value for name, value in TRL.items() if name != "torch_dtype"})
    assert run.transformers.prepare_model_for_kbit_training and run.transformers.autocast == "bf16"
    assert run.transformers.bnb_4bit_compute_dtype == "fp32"


def test_lora_words_do_nothing_without_use_peft(tmp_path: Path) -> None:
    args = {**TRL, "use_peft": False, "load_in_4bit": False}
    run = read(tmp_path, args)
    assert run.peft.scheme == "none" and run.precision.params_dtype == "bf16" and run.transformers.autocast is None
    with pytest.raises(SpecError, match="load_in_4bit is true without use_peft"):
        read(tmp_path, {**TRL, "use_peft": False})


@pytest.mark.parametrize(
    ("more", "dtype", "autocast"),
    [
        ({"bf16": True}, "fp32", "bf16"), ({"bf16": True, "torch_dtype": "float32"}, "fp32", "bf16"),
        ({"bf16": True, "dtype": "bfloat16"}, "bf16", None), ({"torch_dtype": "auto"}, "bf16", None),
        ({"bf16": True, "model_init_kwargs": {"torch_dtype": "bfloat16"}}, "bf16", None), ({}, "fp32", None),
    ],
)  # fmt: skip
def test_the_dtype_of_weights(tmp_path: Path, more: dict[str, Any], dtype: str, autocast: str | None) -> None:
    run = read(tmp_path, {"per_device_train_batch_size": 1, **more})
    assert (run.precision.params_dtype, run.transformers.autocast) == (dtype, autocast)


def test_transformers_5_loads_the_checkpoints_own_dtype(tmp_path: Path) -> None:
    path = tmp_path / "args.json"
    path.write_text(json.dumps({"bf16": True}))
    for release, dtype in (((4, 57), "fp32"), ((5, 0), "bf16"), ((5, 12), "bf16")):
        settings = settings_from_files(training_args=str(path), specified=Specified(transformers=release))
        assert settings.get("precision", "params_dtype") == dtype


def test_under_fsdp_what_trains_is_upcast_and_what_is_frozen_is_not(tmp_path: Path) -> None:
    sharded = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"version": 2}, "load_in_4bit": False}
    assert read(tmp_path, {**TRL, **sharded, "use_peft": False}, 8).precision.params_dtype == "fp32"
    assert read(tmp_path, {**TRL, **sharded}, 8).precision.params_dtype == "bf16"


def test_llama_factory(tmp_path: Path) -> None:
    run = read(tmp_path, FACTORY)
    assert run.peft.dim == 8 and run.peft.target_modules == ("all-linear",) and run.batch.seq_length == 1024
    hf = run.transformers
    assert hf.gradient_checkpointing and hf.use_reentrant and run.precision.params_dtype == "bf16"
    assert not read(tmp_path, {**FACTORY, "disable_gradient_checkpointing": True}).transformers.gradient_checkpointing
    hf = read(tmp_path, {**FACTORY, "quantization_bit": 4}).transformers
    assert hf.load_in_4bit and hf.bnb_4bit_use_double_quant and hf.bnb_4bit_compute_dtype == "bf16"
    full = read(tmp_path, {**FACTORY, "finetuning_type": "full"})
    assert full.peft.scheme == "none" and full.precision.params_dtype == "fp32" and full.transformers.autocast == "bf16"
    pure = {**FACTORY, "finetuning_type": "full", "pure_bf16": True, "bf16": False}
    assert read(tmp_path, pure).precision.params_dtype == "bf16"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"stage": "dpo"}, "stage is dpo"), ({"finetuning_type": "freeze"}, "finetuning_type is freeze"),
        ({"use_unsloth": True}, "use_unsloth is True"), ({"use_galore": True}, "use_galore is True"),
        ({"finetuning_type": "full", "quantization_bit": 4}, "quantization_bit is 4 without adapters"),
        ({"quantization_bit": 4, "quantization_method": "hqq"}, "quantization_bit is 4 by hqq"),
        ({"additional_target": "embed_tokens"}, "additional_target trains other parameters"),
        ({"lora_target": 7}, "lora_target is no list of names"), ({"flash_attn": "fa9"}, "flash_attn is 'fa9'"),
        ({"fp16": True, "bf16": False, "torch_dtype": "bfloat16", "finetuning_type": None, "cutoff_len": None,
          "lora_rank": None, "lora_target": None}, "fp16 is the mixed precision, and weights are in bf16"),
        ({"torch_dtype": "bf61"}, "torch_dtype is 'bf61'"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        read(tmp_path, {**FACTORY, **change})


@pytest.mark.parametrize("text", ["{ /* ", '{"\\"', '{"', "{// ", "{, "], ids=range(5))
def test_comments_that_never_end_are_read_once(text: str) -> None:
    """A text of a MiB takes no more than its length."""
    from time import process_time

    from bridge_memory.readers.engines.files import without_comments

    start = process_time()
    without_comments(text * (1_000_000 // len(text)))
    without_comments(text[0] + text[1:] * (1_000_000 // (len(text) - 1)))
    assert process_time() - start < 5
