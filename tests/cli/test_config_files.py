"""Files of other tools beside MODEL: what they say is estimated, and a flag beside them wins and is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bridge_memory.cli import main

ZERO2 = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
}  # fmt: skip


def ds(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({**ZERO2, **changes}))
    return str(path)


def estimated(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(["estimate", "Llama-3.2-1B", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["estimate", *argv]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_flags_and_a_file_are_the_same_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """h = 2048: a bucket of 2048 x 2048 elements."""
    flags = [
        "--engine", "zero2", "--implementation", "transformers", "--reduce-bucket-size", str(2048 * 2048),
        "--num-gpus", "8",
        "--micro-batch-size", "2", "--global-batch-size", "64", "--optimizer", "adamw", "--seq-length", "1024",
    ]  # fmt: skip
    of_flags = estimated(capsys, *flags)
    of_file = estimated(capsys, "--deepspeed", ds(tmp_path), "--num-gpus", "8", "--seq-length", "1024")
    assert of_file["stages"] == of_flags["stages"] and of_file["training"] == of_flags["training"]
    assert any("reduce_bucket_size is 4,194,304" in sentence for sentence in of_file["assumptions"])


def test_a_flag_wins_and_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = estimated(capsys, "--deepspeed", ds(tmp_path), "--num-gpus", "8", "--micro-batch-size", "1")
    assert found["training"]["micro_batch_size"] == 1
    assert "--micro-batch-size 1, in place of 2 of the file" in found["assumptions"]


def test_gpus_of_the_file_and_of_the_flag(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = ds(tmp_path, train_batch_size=32)
    assert estimated(capsys, "--deepspeed", path)["parallelism"]["world_size"] == 4
    line = refused(capsys, "Llama-3.2-1B", "--deepspeed", path, "--num-gpus", "8")
    assert "train_batch_size is 32" in line


def test_what_does_not_go_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = ds(tmp_path)
    assert "--engine ddp is not what the file says (zero2)" in refused(
        capsys, "Llama-3.2-1B", "--deepspeed", path, "--engine", "ddp"
    )
    assert "give exactly one of MODEL" in refused(capsys, "--deepspeed", path)
    beside = refused(capsys, "--megatron-args", "--num-layers 2", "--deepspeed", path)
    assert "beside it only MODEL and --num-gpus" in beside
    assert "drop the other files" in refused(capsys, "Llama-3.2-1B", "--deepspeed", path, "--torchtitan", path)
    assert "--tp (2) is not supported" in refused(
        capsys, "Llama-3.2-1B", "--deepspeed", path, "--num-gpus", "8", "--tp", "2"
    )


def test_a_field_of_a_file_is_called_as_the_file_calls_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = ds(tmp_path, zero_optimization={"stage": 2, "offload_optimizer": {"device": "nvme"}})
    line = refused(capsys, "Llama-3.2-1B", "--deepspeed", path, "--num-gpus", "8")
    assert "zero_optimization.offload_optimizer.device is 'nvme'" in line and "set stage to 3" in line
    args = tmp_path / "args.json"
    args.write_text('{"load_in_4bit": true}')
    assert "load_in_4bit is true without" in refused(capsys, "Llama-3.2-1B", "--training-args", str(args))


def test_weights_in_bf16_under_mixed_precision(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The script loads them, which no file of a launcher says; autocast has nothing to cast then."""
    launcher = {"distributed_type": "MULTI_GPU", "num_processes": 8, "mixed_precision": "bf16"}
    (tmp_path / "acc.json").write_text(json.dumps(launcher))
    (tmp_path / "args.json").write_text('{"bf16": true, "per_device_train_batch_size": 1}')
    flags = ["--engine", "ddp", "--implementation", "transformers", "--optimizer", "adamw", "--num-gpus", "8"]
    pure = estimated(capsys, *flags, "--precision", "bf16")
    launched = estimated(capsys, "--accelerate", str(tmp_path / "acc.json"), "--precision", "bf16")
    assert launched["stages"] == pure["stages"]
    assert "autocast to bf16 over weights in bf16 is counted as without it" in launched["assumptions"]
    trained = estimated(
        capsys, "--training-args", str(tmp_path / "args.json"), "--precision", "bf16", "--num-gpus", "8")
    bytes_of = [c["bytes"] for c in trained["stages"][0]["components"] if c["name"] == "weights"]
    assert bytes_of == [c["bytes"] for c in pure["stages"][0]["components"] if c["name"] == "weights"]
    line = refused(
        capsys, "Llama-3.2-1B", "--accelerate", str(tmp_path / "acc.json"), "--precision", "fp16")
    assert "bf16 is the mixed precision, and weights are in fp16" in line


def test_options_of_stage_3_in_a_file_of_stage_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Flags that do nothing are refused; a file is as people have it."""
    of_3 = {"sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "reduce_bucket_size": "auto"}
    path = ds(tmp_path, zero_optimization={"stage": 2, **of_3})
    found = estimated(capsys, "--deepspeed", path, "--num-gpus", "8", "--seq-length", "1024")
    assert found["stages"] == estimated(
        capsys, "--deepspeed", ds(tmp_path), "--num-gpus", "8", "--seq-length", "1024")["stages"]
    assert "--sub-group-size does nothing without --engine zero3" in refused(
        capsys, "Llama-3.2-1B", "--engine", "zero2", "--num-gpus", "8", "--sub-group-size", "7")


def test_training_arguments_under_accelerate_launch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The launcher says how many processes and FSDP; the Trainer says the batch, and its own precision wins."""
    pytest.importorskip("yaml")
    launcher, args = tmp_path / "acc.yaml", tmp_path / "args.json"
    launcher.write_text(
        "distributed_type: FSDP\nnum_processes: 4\nmixed_precision: 'no'\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    )
    args.write_text(json.dumps({"per_device_train_batch_size": 3, "bf16": True, "gradient_accumulation_steps": 2}))
    found = estimated(capsys, "--accelerate", str(launcher), "--training-args", str(args), "--seq-length", "512")
    assert found["parallelism"]["world_size"] == 4
    assert found["training"]["micro_batch_size"] == 3 and found["training"]["global_batch_size"] == 3 * 2 * 4
    text = json.dumps(found)
    assert "fsdp2" in text.lower() and "bf16" in text


def test_a_flavor_without_a_preset_wants_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text('[model]\nname = "llama3"\nflavor = "debugmodel"\n')
    assert "its model has no preset; give MODEL" in refused(capsys, "--torchtitan", str(path))


def test_an_engine_may_be_spelled_with_a_hyphen(capsys: pytest.CaptureFixture[str]) -> None:
    gpus = ("--num-gpus", "8")
    assert estimated(capsys, *gpus, "--engine", "megatron-deepspeed") == estimated(
        capsys, *gpus, "--engine", "megatron_deepspeed"
    )
    assert "'megatron-deepsped'" in refused(capsys, "Llama-3.2-1B", *gpus, "--engine", "megatron-deepsped")
