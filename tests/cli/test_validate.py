"""``bridge-memory validate``: every kind of file, all that is wrong with it at once, and the exit code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge_memory.cli import main

pytest.importorskip("yaml")

GOOD = {
    "ds.json": ("deepspeed", '{"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "scheduler": {}}'),
    "acc.yaml": ("accelerate", "distributed_type: MULTI_GPU\nnum_processes: 8\nmixed_precision: bf16\n"),
    "args.yaml": ("training_args", "output_dir: out\nper_device_train_batch_size: 2\nlearning_rate: 1e-5\n"),
    "args.json": ("training_args", '{"output_dir": "out", "gradient_checkpointing": true, "optim": "adamw_torch"}'),
    "train.toml": ("torchtitan", '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\n'),
    "calc.json": ("calculator", '{"model": {"num_parameters": "7B"}, "engine": {"type": "megatron_lm"}}'),
    "bridge.yaml": ("bridge", "model:\n  tensor_model_parallel_size: 2\ntrain:\n  global_batch_size: 8\n"),
    "config.json": ("model", '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, '
                    '"intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}'),
    "commented.json": ("deepspeed", '{"zero_optimization": {"stage": 2}, // of ours\n "train_batch_size": 8,}'),
    "adapter_config.json": ("peft", '{"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "lora_alpha": 16}'),
    "sft.yaml": ("training_args", "torch_dtype: bfloat16\nuse_peft: true\nlora_target_modules: all-linear\n"
                 "output_dir: out\n"),
    "run.sh": ("megatron", "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 "
               "--seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --vocab-size 128 --bf16"),
}  # fmt: skip
#: Name -> text, and the fields that are wrong in it.
BAD = {
    "ds.json": ('{"zero_optimization": {"stage": 4, "overlap_com": true}, "bf16": {"enabled": 1}, "steps_per_prnt": 2}',
                ["zero_optimization.stage", "zero_optimization.overlap_com", "bf16.enabled", "steps_per_prnt"]),
    "acc.yaml": ("distributed_type: FSPD\nmixed_precision: bf8\ncolour: 1\n",
                 ["distributed_type", "mixed_precision", "colour"]),
    "args.json": ('{"output_dir": "o", "bf16": true, "fp16": true, "optim": "adamw_trch", "gradient_checkpoint": true}',
                  ["fp16", "optim", "gradient_checkpoint"]),
    "adapter_config.json": ('{"peft_type": "LORA", "r": 0, "target_modules": ["q_proj"], "rank": 8}', ["r", "rank"]),
    "flavor.toml": ('[model]\nname = "llama3"\nflavor = "9B"\n', ["model.flavor"]),
    "train.toml": ('[training]\nseq_length = 1\n[optimizer]\nname = "Lion"\n',
                   ["optimizer.name", "training.seq_length"]),
    "bridge.yaml": ("model:\n  tensor_parallel_size: 2\ntrain:\n  global_batchsize: 8\n",
                    ["model.tensor_parallel_size", "train.global_batchsize"]),
    "config.json": ('{"model_type": "llama", "architectures": [], "hidden_size": "big"}', ["config.json"]),
    "run.sh": ("python pretrain_gpt.py --num-layer 2 --hidden-size 64 --foo 1",
               ["--num-layer", "--foo", "--num-attention-heads"]),
}  # fmt: skip


def validated(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, text: str) -> tuple[int, Any]:
    (tmp_path / name).write_text(text)
    code = main(["validate", str(tmp_path / name), "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", GOOD)
def test_a_sound_file_is_told_by_its_keys(capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    code, found = validated(capsys, tmp_path, name, GOOD[name][1])
    assert (code, found["problems"], found["kind"]) == (0, [], GOOD[name][0])


@pytest.mark.parametrize("name", BAD)
def test_everything_that_is_wrong_is_listed_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    text, fields = BAD[name]
    code, found = validated(capsys, tmp_path, name, text)
    assert code == 2 and sorted(p["field"] for p in found["problems"]) == sorted(fields)
    assert all(p["what"] and p["fix"] for p in found["problems"])
    main(["validate", str(tmp_path / name)])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(field in shown for field in fields)


BRIDGE = """
_target_: megatron.bridge.training.config.ConfigContainer
model:
  _target_: megatron.bridge.models.llama.llama_provider.Llama3ModelProvider8B
  num_layers: 32
  hidden_size: 4096
  ffn_hidden_size: 14336
  num_attention_heads: 32
  num_query_groups: 8
  seq_length: 8192
  vocab_size: 128256
  tensor_model_parallel_size: 2
  params_dtype: {_target_: torch.bfloat16, _call_: false}
  bf16: true
  gated_linear_unit: true
  normalization: RMSNorm
  position_embedding_type: rope
  add_bias_linear: false
  activation_func: {_target_: torch.nn.functional.silu, _call_: false}
  attention_backend: {_target_: megatron.core.transformer.enums.AttnBackend, _call_: true, _args_: [5]}
train: {micro_batch_size: 1, global_batch_size: 128}
optimizer: {optimizer: adam, use_distributed_optimizer: true}
ddp: {use_distributed_optimizer: true}
dataset: {sequence_length: 8192}
mixed_precision: bf16_mixed
"""


def test_a_whole_container_is_built(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As Bridge writes one: classes, dtypes and enums by their import paths."""
    assert validated(capsys, tmp_path, "cfg.yaml", BRIDGE)[0] == 0
    wrong = BRIDGE.replace("tensor_model_parallel_size: 2", "tensor_model_parallel_size: 3")
    code, found = validated(capsys, tmp_path, "cfg.yaml", wrong)
    assert code == 2 and "tensor_model_parallel_size (3)" in str(found["problems"][0])


def test_gpus_are_held_against_the_batch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 3}')
    assert main(["validate", str(path)]) == 0
    assert main(["validate", str(path), "--num-gpus", "8"]) == 2
    assert "train_batch_size is 32" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "hello", "[]", "{", "a: [", "\x00", "x" * 100, "- a\n- b", '{"a": 1}'])
def test_what_is_no_configuration_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    path = tmp_path / "file"
    path.write_text(text)
    assert main(["validate", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and "Traceback" not in printed.err and not printed.out


def test_the_kind_may_be_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"optimizer": {"type": "AdamW"}, "scheduler": {}}')
    assert main(["validate", str(tmp_path / "x.json")]) == 2
    assert "--kind" in capsys.readouterr().err
    assert main(["validate", str(tmp_path / "x.json"), "--kind", "deepspeed"]) == 0


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, (kind, text) in GOOD.items() if text[0] == "{"])
def test_a_configuration_on_one_line_is_no_list_of_measured_runs(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text + "\n")
    assert main(["validate", str(tmp_path / name)]) == 0


def test_what_we_wrote_ourselves_is_no_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["estimate", "meta-llama/Llama-3.2-1B", "--num-gpus", "1", "--json"]) == 0
    (tmp_path / "estimate.json").write_text(capsys.readouterr().out)
    assert main(["validate", str(tmp_path / "estimate.json")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "bridge-memory itself wrote" in err
