"""torchtitan's TOML: its train configs, and every field of its JobConfig."""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bridge_memory.cli import main
from bridge_memory.readers.engines import torchtitan as reader
from bridge_memory.readers.engines.run import run_from_files
from bridge_memory.readers.engines.sections import Diagnostics
from bridge_memory.readers.engines.settings import Settings, Specified
from bridge_memory.spec import RunSpec, SpecError

if sys.version_info < (3, 11):
    pytest.importorskip("tomli")

#: As torchtitan's own ``models/llama3/train_configs/llama3_8b.toml`` has it.
LLAMA3_8B = """
[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"

[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100

[metrics]
log_freq = 10
enable_tensorboard = true

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"

[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 200

[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1

[checkpoint]
enable = false
folder = "checkpoint"
interval = 500

[activation_checkpoint]
mode = "full"

[compile]
enable = false
components = ["model", "loss"]

[quantize.linear.float8]
filter_fqns = ["output"]
"""


def read(tmp_path: Path, text: str, world_size: int | None = 8) -> RunSpec:
    path = tmp_path / "train.toml"
    path.write_text(text)
    return run_from_files(torchtitan=str(path), world_size=world_size)


def test_llama3_8b(tmp_path: Path) -> None:
    """FSDP2 with fp32 shards, gathered in bf16 and reduced in fp32 (``apply_fsdp``); a fused AdamW; the published."""
    run = read(tmp_path, LLAMA3_8B)
    assert run.model.name == "meta-llama/Llama-3.1-8B"
    assert (run.data_parallel.engine, run.fsdp.auto_wrap_policy) == ("fsdp2", "torchtitan")
    assert (run.precision.params_dtype, run.fsdp.param_dtype, run.fsdp.reduce_dtype) == ("fp32", "bf16", "fp32")
    assert (run.batch.seq_length, run.batch.micro_batch_size, run.batch.global_batch_size) == (8192, 1, 8)
    assert (run.optimizer.optimizer, run.optimizer.torch_implementation) == ("adamw", "fused")
    assert run.transformers.gradient_checkpointing and not run.not_modelled


def test_hybrid_sharding_ddp_and_one_gpu(tmp_path: Path) -> None:
    shard = "data_parallel_shard_degree"
    hybrid = LLAMA3_8B.replace(f"{shard} = -1", f"{shard} = 4").replace("replicate_degree = 1", "replicate_degree = 2")
    assert read(tmp_path, hybrid).fsdp.shard_degree == 4
    assert read(tmp_path, hybrid, None).parallel.world_size == 8
    ddp = LLAMA3_8B.replace(f"{shard} = -1", f"{shard} = 1").replace("replicate_degree = 1", "replicate_degree = 8")
    run = read(tmp_path, ddp)
    assert (run.data_parallel.engine, run.ddp.bucket_cap_mb, run.transformers.autocast) == ("ddp", 100, "bf16")
    assert read(tmp_path, LLAMA3_8B, 1).data_parallel.engine == "single"


@pytest.mark.parametrize(("old", "new", "words"), [
    ("seq_len = 8192", "seq_length = 8192", "training.seq_length is unknown, and torchtitan refuses it; did you mean"),
    ('mode = "full"', 'mode = "ful"', "did you mean full"),
    ("shard_degree = -1", "shard_degree = 3", "3 GPUs, not 8"),
    ("tensor_parallel_degree = 1", "tensor_parallel_degree = 2", "not counted here"),
    ("[metrics]", "[metric]", "metric is unknown"),
    ('name = "AdamW"', 'name = "Lion"', "'Lion', which is unknown"),
    ("[job]", "[job", "not valid TOML"),
])  # fmt: skip
def test_what_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        read(tmp_path, LLAMA3_8B.replace(old, new))


def test_what_is_not_counted_is_named(tmp_path: Path) -> None:
    text = LLAMA3_8B.replace('mode = "full"', 'mode = "selective"\nselective_ac_option = "op"').replace(
        'flavor = "8B"', 'flavor = "8B"\nconverters = ["quantize.linear.float8"]'
    ).replace("enable = false\nfolder", "enable = true\nfolder")
    run = read(tmp_path, text)
    assert "quantize.linear.float8" in " ".join(run.not_modelled)
    assert (run.implementation.transformer_impl, run.transformers.selective_ac_option) == ("torchtitan", "op")
    others = text.replace('name = "llama3"', 'name = "qwen3"')
    assert "selective, 'op'" in " ".join(read(tmp_path, others).not_modelled)


def test_the_command_takes_the_model_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.toml"
    path.write_text(LLAMA3_8B)
    assert main(["estimate", "--torchtitan", str(path), "--num-gpus", "8"]) == 0
    assert "Estimate of meta-llama/Llama-3.1-8B" in capsys.readouterr().out
    path.write_text(LLAMA3_8B.replace("8B", "9B"))
    assert main(["estimate", "--torchtitan", str(path), "--num-gpus", "8"]) == 2


def job_config() -> Any:
    """torchtitan's own class, of the release that reads TOML, without its package's other imports."""
    spec = find_spec("torchtitan")
    path = spec and spec.origin and Path(spec.origin).parent / "config" / "job_config.py"
    if not path or not path.is_file():
        pytest.skip("needs torchtitan before 0.3")
    import types

    module = types.ModuleType("job_config")
    sys.modules["job_config"] = module
    text = path.read_text().replace("from torchtitan.tools.logging import logger", "logger = None")
    exec(text, module.__dict__)
    return module.JobConfig


def test_every_field_of_the_job_config_is_known() -> None:
    config = job_config()()
    table = {
        f.name: {inner.name: value for inner in fields(part) if (value := getattr(part, inner.name)) is not None
                 and not is_dataclass(value)}
        for f in fields(config) for part in (getattr(config, f.name),)
    }  # fmt: skip
    settings = Settings(Diagnostics("train.toml"))
    reader.read_torchtitan(table, settings, Specified(world_size=8))
    assert [str(p) for p in settings.diagnostics.problems] == []
    assert settings.get("fsdp", "param_dtype") == "bf16" and settings.get("batch", "micro_batch_size") == 8
