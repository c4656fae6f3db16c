"""What is read of a DeepSpeed config is what transformers, accelerate and DeepSpeed themselves make of it."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory.estimation import estimate
from bridge_memory.readers.engines.files import without_comments
from bridge_memory.readers.engines.run import run_from_files
from bridge_memory.readers.engines.sections import AUTO
from bridge_memory.spec import RunSpec, SpecError

pytest.importorskip("deepspeed")
pytest.importorskip("accelerate")

HIDDEN = 2048  # Llama-3.2-1B
GPUS = 8
ALL_AUTO: dict[str, Any] = {
    "bf16": {"enabled": AUTO},
    "optimizer": {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO}},
    "zero_optimization": {
        "stage": 3, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "overlap_comm": True,
        "sub_group_size": 1e9, "reduce_bucket_size": AUTO, "stage3_prefetch_bucket_size": AUTO,
        "stage3_param_persistence_threshold": AUTO, "stage3_max_live_parameters": 2e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO, "steps_per_print": 2000, "train_batch_size": AUTO,
    "train_micro_batch_size_per_gpu": AUTO, "wall_clock_breakdown": False,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "zero3": ALL_AUTO,
    "zero2": {
        "bf16": {"enabled": True}, "zero_optimization": {
            "stage": 2, "allgather_bucket_size": 2e8, "reduce_scatter": True, "reduce_bucket_size": 3e8,
            "contiguous_gradients": False, "overlap_comm": True, "round_robin_gradients": True,
        }, "train_micro_batch_size_per_gpu": AUTO, "gradient_accumulation_steps": AUTO, "gradient_clipping": 0.5,
    },
    "zero1": {
        "bf16": {"enabled": AUTO}, "fp16": {"enabled": AUTO, "loss_scale": 0},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": AUTO}, "train_micro_batch_size_per_gpu": AUTO,
        "communication_data_type": "bf16",
    },
    "both offloaded": {
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 6, "buffer_size": 2e8},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pin_memory": False, "ratio": 0.5},
            "zero_hpz_partition_size": 8, "prefetch_bucket_size": 1e6, "param_persistence_threshold": 0,
        },
        "gradient_clipping": AUTO,
    },
    "nothing said": {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}},
    "given up": {"zero_optimization": {"stage": 2, "cpu_offload": True}, "bf16": {"enabled": True}},
}  # fmt: skip
#: What the Trainer is told.
ARGS: dict[str, Any] = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": True, "max_grad_norm": 0.5,
}


def of_the_trainer(config: dict[str, Any]) -> Any:
    """``TrainingArguments`` and ``Trainer`` without starting a process group: the very class that fills in "auto", and
    the configuration that DeepSpeed reads of it."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    args = SimpleNamespace(
        **ARGS, world_size=GPUS, learning_rate=1e-5, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8,
        weight_decay=0.0, fp16=False, fp16_full_eval=False, fp16_backend="auto", save_on_each_node=False,
        fp16_opt_level="O1", bf16_full_eval=False, get_warmup_steps=lambda steps: 10,
    )  # fmt: skip
    filled = HfTrainerDeepSpeedConfig(copy.deepcopy(config))
    filled.trainer_config_process(args)
    filled.trainer_config_finalize(args, SimpleNamespace(config=SimpleNamespace(hidden_size=HIDDEN)), 100)
    if "train_micro_batch_size_per_gpu" not in filled.config:  # accelerate adds it (set_deepspeed_weakref)
        filled.config["train_micro_batch_size_per_gpu"] = 4
        filled.config.setdefault("gradient_accumulation_steps", 1)
    return DeepSpeedConfig(filled.config)


@pytest.fixture(autouse=True)
def _eight_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed.runtime.config as config

    monkeypatch.setattr(config, "dist", SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: GPUS))


def ours(tmp_path: Path, config: dict[str, Any], **args: Any) -> RunSpec:
    ds, trainer = tmp_path / "ds.json", tmp_path / "args.json"
    ds.write_text(json.dumps(config))
    trainer.write_text(json.dumps({**ARGS, "deepspeed": str(ds), **args}))
    return run_from_files("meta-llama/Llama-3.2-1B", training_args=str(trainer), world_size=GPUS)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_read_as_deepspeed_reads_it(tmp_path: Path, name: str) -> None:
    theirs, run = of_the_trainer(CONFIGS[name]), ours(tmp_path, CONFIGS[name])
    zero, options = theirs.zero_config, run.deepspeed
    assert run.data_parallel.engine == f"zero{int(zero.stage)}"
    same = (
        "reduce_bucket_size", "allgather_bucket_size", "overlap_comm", "contiguous_gradients", "reduce_scatter",
        "round_robin_gradients", "sub_group_size", "zero_hpz_partition_size",
    )  # fmt: skip
    read = {n: getattr(options, n) for n in same}
    if read["overlap_comm"] is None:  # the engine's to decide
        read["overlap_comm"] = zero.stage == 3
    assert read == {n: getattr(zero, n) for n in same}
    for n in ("prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters", "max_reuse_distance",
              "gather_16bit_weights_on_model_save"):  # fmt: skip
        assert getattr(options, f"stage3_{n}") == getattr(zero, n), n
    for part in ("optimizer", "param"):
        offload = getattr(zero, f"offload_{part}")
        device = "none" if offload is None else getattr(offload.device, "value", offload.device)
        assert getattr(options, f"offload_{part}_device") == device
        if device != "none":
            assert getattr(options, f"offload_{part}_pin_memory") == offload.pin_memory
    if options.offload_param_device == "nvme":
        assert options.offload_param_buffer_count == zero.offload_param.buffer_count
        assert options.offload_param_buffer_size == zero.offload_param.buffer_size
    if options.offload_optimizer_device != "none":
        assert options.offload_optimizer_ratio == zero.offload_optimizer.ratio
    assert (run.precision.params_dtype == "bf16") is theirs.bfloat16_config.enabled
    assert options.bf16_master_weights_and_grads == theirs.bfloat16_config.bf16_master_weights_and_grads
    assert options.bf16_optimizer_states == theirs.bfloat16_config.bf16_optimizer_states
    assert run.optimizer.clip_grad == theirs.gradient_clipping
    assert run.batch.micro_batch_size == theirs.train_micro_batch_size_per_gpu
    assert run.batch.global_batch_size == theirs.train_batch_size
    assert options.grad_accum_dtype == theirs.grad_accum_dtype


def test_one_file_serves_several_stages(tmp_path: Path) -> None:
    """Below stage 3 DeepSpeed takes the options of stage 3 and does nothing with them."""
    zero = {
        "stage": 2, "sub_group_size": 1e9, "stage3_max_live_parameters": 1e9, "stage3_prefetch_bucket_size": AUTO,
        "stage3_gather_16bit_weights_on_model_save": True, "offload_param": {"device": "cpu", "pin_memory": True},
        "zero_hpz_partition_size": 4,
    }  # fmt: skip
    assert of_the_trainer({"zero_optimization": zero, "bf16": {"enabled": True}}).zero_config.stage == 2
    run = ours(tmp_path, {"zero_optimization": zero, "bf16": {"enabled": True}})
    alone = ours(tmp_path, {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    assert run.deepspeed == alone.deepspeed and run.data_parallel.engine == "zero2"
    assert any("sub_group_size" in s and "stage 2" in s for s in run.assumptions)
    assert any("offload_param does nothing" in s for s in run.assumptions)


COMMENTS = """{
  // one, with "a string"
  "zero_optimization": {"stage": 2, /* and
    another */ "reduce_bucket_size": 5e8,},
  # a third
  "bf16": {"enabled": true}, "aio": {"nvme_path": "http://x#y/*z*/"},
  "train_micro_batch_size_per_gpu": 2,
}"""


def test_comments_are_read_past_where_deepspeed_does(tmp_path: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    path, args = tmp_path / "ds.json", tmp_path / "args.json"
    path.write_text(COMMENTS)
    theirs = DeepSpeedConfig(str(path))
    assert json.loads(without_comments(COMMENTS)) == theirs._param_dict
    run = run_from_files("meta-llama/Llama-3.2-1B", deepspeed=str(path), world_size=GPUS)
    assert run.deepspeed.reduce_bucket_size == theirs.zero_config.reduce_bucket_size
    assert run.batch.micro_batch_size == theirs.train_micro_batch_size_per_gpu
    # transformers/integrations/deepspeed.py: HfDeepSpeedConfig reads JSON.
    args.write_text(json.dumps({**ARGS, "deepspeed": str(path)}))
    with pytest.raises(SpecError, match="not valid JSON"):
        run_from_files("meta-llama/Llama-3.2-1B", training_args=str(args), world_size=GPUS)


@pytest.mark.parametrize(("size", "bytes_each"), [(4, 2 / 4), (8, 2 / 8), (16, 2 / 8)], ids=str)
def test_the_secondary_partition_is_within_the_job(tmp_path: Path, size: int, bytes_each: float) -> None:
    """``groups.py: _create_zero_param_parallel_group`` takes no group larger than the job."""
    zero = {"stage": 3, "zero_hpz_partition_size": size, "stage3_param_persistence_threshold": 0}
    run = ours(tmp_path, {"zero_optimization": zero, "bf16": {"enabled": True}})
    (line,) = [c for c in estimate(run).peak_stage.components if "secondary partition" in c.name]
    assert line.bytes == pytest.approx(1_235_814_400 * bytes_each, rel=1e-3)
    with pytest.raises(SpecError, match=r"zero_hpz_partition_size \(3\) does not divide"):
        ours(tmp_path, {"zero_optimization": {**zero, "zero_hpz_partition_size": 3}, "bf16": {"enabled": True}})


def test_whole_weights_that_are_saved_do_not_leave_the_verdict_open(tmp_path: Path) -> None:
    """The phase is counted: a module's weights are whole in its forward pass too."""
    found = {save: estimate(ours(tmp_path, {
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": save}, "bf16": {"enabled": True}
    })) for save in (True, False)}  # fmt: skip
    phases = {save: dict(result.peak_stage.phases) for save, result in found.items()}
    saving = {save: rows[next(name for name in rows if "saving" in str(name))] for save, rows in phases.items()}
    assert saving[True] - saving[False] == 128256 * 2048 * 2 and saving[True] < found[True].peak_stage.peak_bytes
    assert not found[True].not_modelled


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"gradient_clipping": 1.0}, "gradient_clipping is 1.0, and max_grad_norm is 0.5"),
    ({"train_micro_batch_size_per_gpu": 2}, "per_gpu is 2, and per_device_train_batch_size is 4"),
    ({"bf16": {"enabled": False}}, "bf16.enabled is False, and bf16 is True"),
    ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps is 1"),
    ({"train_batch_size": 32}, "train_batch_size is 32"),
    ({"zero_optimization": {"stage": 3, "stage3_prefetch_buckets": 5}}, "stage3_prefetch_buckets is unknown"),
    ({"zero_optimization": {"stage": 5}}, "stage is 5"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}}, "device is 'gpu'"),
    ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}}, "ratio is 0.3"),
    ({"bf16": {"enabled": True, "fancy": 1}}, "bf16.fancy is unknown, and DeepSpeed refuses it"),
    ({"zero_optimization": {"stage": 2, "reduce_bucket_size": "big"}}, "reduce_bucket_size is 'big'"),
    ({"communication_data_type": "fp8"}, "communication_data_type is 'fp8'"),
]


@pytest.mark.parametrize(("change", "words"), WRONG, ids=[words[:40] for _, words in WRONG])
def test_what_they_refuse_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    config = {**ALL_AUTO, **change}
    with pytest.raises((ValueError, AssertionError)):
        of_the_trainer(config)
    with pytest.raises(SpecError, match=words):
        ours(tmp_path, config)


@pytest.mark.parametrize("name", ["steps_per_prnt", "zero_optimisation_settings"])
def test_a_top_level_key_that_deepspeed_ignores_is_listed(tmp_path: Path, name: str) -> None:
    of_the_trainer({**ALL_AUTO, name: 1})
    assert any(name in sentence for sentence in ours(tmp_path, {**ALL_AUTO, name: 1}).assumptions)


def test_every_key_of_zero_optimization_has_a_place() -> None:
    """Read, harmless or not modelled: none of DeepSpeed's own is taken for a typing error."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from bridge_memory.readers.engines import deepspeed as reader

    names = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    placed = {*reader._ZERO, *reader._ALIASES, *reader._ZERO_HARMLESS, *reader._ZERO_UNMODELLED}
    assert names <= placed | {"stage", "offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"}
