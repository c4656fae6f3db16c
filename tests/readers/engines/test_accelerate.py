"""accelerate's YAML is read as accelerate itself reads it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory.readers.engines.run import run_from_files, settings_from_files
from bridge_memory.readers.engines.settings import Specified
from bridge_memory.spec import RunSpec, SpecError

yaml = pytest.importorskip("yaml")

MODEL = "meta-llama/Llama-3.2-1B"
BASE: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE", "debug": False, "downcast_bf16": "no", "machine_rank": 0,
    "main_training_function": "main", "mixed_precision": "bf16", "num_machines": 1, "num_processes": 8,
    "rdzv_backend": "static", "same_network": True, "tpu_env": [], "tpu_use_cluster": False, "tpu_use_sudo": False,
    "use_cpu": False,
}  # fmt: skip
FSDP: dict[str, dict[str, Any]] = {
    "fsdp1": {
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_backward_prefetch": "BACKWARD_PRE",
        "fsdp_forward_prefetch": False, "fsdp_offload_params": False, "fsdp_sharding_strategy": "FULL_SHARD",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_sync_module_states": True, "fsdp_use_orig_params": True,
        "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_cpu_ram_efficient_loading": True,
    },
    "numbers": {"fsdp_sharding_strategy": 2, "fsdp_offload_params": True, "fsdp_use_orig_params": False},
    "hybrid": {"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2", "fsdp_backward_prefetch": "BACKWARD_POST",
               "fsdp_forward_prefetch": True},
    "nothing said": {},
    "fsdp2": {
        "fsdp_version": 2, "fsdp_reshard_after_forward": True, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_activation_checkpointing": True, "fsdp_cpu_ram_efficient_loading": True,
    },
    "fsdp2 kept": {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_offload_params": True},
}  # fmt: skip


def written(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in {**BASE, **changes}.items() if v is not None}))
    return str(path)


def read(tmp_path: Path, **changes: Any) -> RunSpec:
    return run_from_files(MODEL, accelerate=written(tmp_path, **changes))


def plugin(path: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The plugin of a process that ``accelerate launch --config_file path`` started: its own parser, its own check of
    the file, the environment that it hands over."""
    pytest.importorskip("accelerate")
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.launch import prepare_multi_gpu_env

    args = launch_command_parser().parse_args(["--config_file", path, "train.py"])
    args, _, _ = _validate_launch_command(args)
    for name in [name for name in os.environ if name.startswith("FSDP_")]:
        monkeypatch.delenv(name)
    for name, value in prepare_multi_gpu_env(args).items():
        if name.startswith("FSDP_") and name not in ("FSDP_SYNC_MODULE_STATES", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
            monkeypatch.setenv(name, value)  # those two look for a GPU
    made = FullyShardedDataParallelPlugin()
    made.set_mixed_precision(args.mixed_precision)
    return made


@pytest.mark.parametrize("name", FSDP)
def test_fsdp_is_read_as_the_plugin_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    run = read(tmp_path, distributed_type="FSDP", fsdp_config=FSDP[name])
    theirs = plugin(written(tmp_path, distributed_type="FSDP", fsdp_config=FSDP[name]), monkeypatch)
    ours = run.fsdp
    assert run.data_parallel.engine == f"fsdp{theirs.fsdp_version}"
    policy = theirs.mixed_precision_policy
    words = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
    assert (ours.param_dtype, ours.reduce_dtype) == (words[str(policy.param_dtype)], words[str(policy.reduce_dtype)])
    if theirs.fsdp_version == 1:
        assert ours.sharding_strategy == theirs.sharding_strategy.name
        assert ours.use_orig_params == theirs.use_orig_params and ours.forward_prefetch == theirs.forward_prefetch
        prefetch = theirs.backward_prefetch
        assert ours.backward_prefetch == ("NO_PREFETCH" if prefetch is None else prefetch.name)
        assert ours.limit_all_gathers == theirs.limit_all_gathers
        assert ours.offload_params == theirs.cpu_offload.offload_params
    else:
        assert (ours.reshard_after_forward is not False) == theirs.reshard_after_forward
        assert ours.offload_params == (type(theirs.cpu_offload).__name__ == "CPUOffloadPolicy")
    wraps = theirs.auto_wrap_policy is not None
    assert (ours.auto_wrap_policy != "NO_WRAP") == wraps
    assert run.transformers.gradient_checkpointing == theirs.activation_checkpointing
    assert run.parallel.world_size == 8 and run.precision.params_dtype == "fp32"


@pytest.mark.parametrize("key", ["fsdp_reshard_after_forwrd", "fsdp_colour"])
def test_a_key_of_fsdp_config_that_accelerate_passes_over_is_listed(tmp_path: Path, key: str) -> None:
    run = read(tmp_path, distributed_type="FSDP", fsdp_config={"fsdp_version": 2, key: 1})
    assert any(key in sentence for sentence in run.assumptions)


@pytest.mark.parametrize(("changes", "words"), [
    ({"distributed_type": "FSDP", "colour": 1}, "colour is unknown"),
    ({"distributed_type": None}, "distributed_type is missing"),
    ({"distributed_type": "FDSP"}, "did you mean FSDP"),
    ({"distributed_type": "MULTI_GPU", "mixed_precision": "bf8"}, "mixed_precision is 'bf8'"),
    ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "fsdp_reshard_after_forward": "FULL_SHARD"}},
     "it must be true or false"),
    ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_sharding_strategy": "HALF_SHARD"}}, "HALF_SHARD"),
    ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_auto_wrap_policy": "WRAP"}}, "WRAP"),
])  # fmt: skip
def test_what_accelerate_refuses_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        read(tmp_path, **changes)
    if "FSDP" in str(changes.get("distributed_type")):
        with pytest.raises((ValueError, KeyError, AttributeError)):
            plugin(written(tmp_path, **changes), monkeypatch)


def test_ddp_and_one_gpu(tmp_path: Path) -> None:
    run = read(tmp_path, distributed_type="MULTI_GPU")
    assert (run.data_parallel.engine, run.parallel.world_size) == ("ddp", 8)
    assert (run.precision.params_dtype, run.transformers.autocast) == ("fp32", "bf16")
    run = read(tmp_path, distributed_type="NO", num_processes=None, mixed_precision="no")
    assert (run.data_parallel.engine, run.parallel.world_size, run.transformers.autocast) == ("single", 1, None)


def test_deepspeed_without_a_file(tmp_path: Path) -> None:
    """The plugin that ``accelerate launch`` makes of the YAML's own words (``DeepSpeedPlugin.__post_init__``)."""
    config = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "none",
              "gradient_accumulation_steps": 4, "gradient_clipping": 0.3, "zero3_init_flag": True,
              "zero3_save_16bit_model": True}  # fmt: skip
    run = read(tmp_path, distributed_type="DEEPSPEED", deepspeed_config=config)
    assert run.data_parallel.engine == "zero3" and run.precision.params_dtype == "bf16"
    assert run.deepspeed.offload_optimizer_device == "cpu" and run.deepspeed.offload_param_device == "none"
    assert run.deepspeed.stage3_gather_16bit_weights_on_model_save
    assert run.optimizer.clip_grad == 0.3 and run.batch.global_batch_size == 4 * 8


def test_deepspeed_of_a_file_beside_the_yaml(tmp_path: Path) -> None:
    """accelerate makes buckets of the model's hidden size (2048) where the file says "auto"."""
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "bf16": {"enabled": "auto"},'
        ' "train_micro_batch_size_per_gpu": 3}'
    )
    run = read(tmp_path, distributed_type="DEEPSPEED", deepspeed_config={"deepspeed_config_file": "ds.json"})
    assert run.data_parallel.engine == "zero2" and run.deepspeed.reduce_bucket_size == 2048 * 2048
    assert run.batch.micro_batch_size == 3 and run.precision.params_dtype == "bf16"
    with pytest.raises(SpecError, match="zero_stage stands beside deepspeed_config_file"):
        both = {"deepspeed_config_file": "ds.json", "zero_stage": 2}
        read(tmp_path, distributed_type="DEEPSPEED", deepspeed_config=both)


def test_every_field_of_the_cluster_config_has_a_place() -> None:
    pytest.importorskip("accelerate")
    from dataclasses import fields

    from accelerate.commands.config.config_args import ClusterConfig

    from bridge_memory.readers.engines import accelerate as reader

    assert {f.name for f in fields(ClusterConfig)} <= set(reader._KNOWN)


@pytest.mark.parametrize("key", ["a\nb", "x" * 5000, "\x1b[2J", "\u202e"])
def test_a_key_of_any_letters_stays_on_one_line(tmp_path: Path, key: str) -> None:
    with pytest.raises(SpecError) as refused:
        read(tmp_path, distributed_type="MULTI_GPU", **{key: 1})
    assert str(refused.value).isprintable() and len(str(refused.value)) < 400


def test_a_file_of_any_shape_ends_in_one_line(tmp_path: Path) -> None:
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [" + ",".join([f"*{chr(97 + i)}"] * 9) + "]\n" for i in range(8)
    )
    for text in ("", "[]", "3", "a: [", "\x00", "{", bomb, "a: &a {b: *a}", "? {a: b}\n: c", "distributed_type: {}"):
        path = tmp_path / "x.yaml"
        path.write_text(text)
        with pytest.raises(SpecError):
            settings_from_files(accelerate=str(path), specified=Specified()).diagnostics.check()


def test_sizes_of_parallelism_make_the_processes(tmp_path: Path) -> None:
    """``ParallelismConfig._validate_accelerator``, which asks an Accelerator of three things."""
    theirs = pytest.importorskip("accelerate.parallelism_config")
    for shard, fits in ((4, True), (2, False)):
        sizes = {"dp_replicate_size": 2, "dp_shard_size": shard}
        changes = {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2},
                   "parallelism_config": {f"parallelism_config_{k}": v for k, v in sizes.items()}}  # fmt: skip
        job = SimpleNamespace(multi_device=True, num_processes=8, is_fsdp2=True, distributed_type="FSDP")
        if fits:
            theirs.ParallelismConfig(**sizes)._validate_accelerator(job)
            assert read(tmp_path, **changes).fsdp.shard_degree == 4
        else:
            with pytest.raises(ValueError, match="does not match num_processes"):
                theirs.ParallelismConfig(**sizes)._validate_accelerator(job)
            with pytest.raises(SpecError, match="parallelism_config has sizes of a product of 4, and there are 8 proc"):
                read(tmp_path, **changes)


def test_a_word_that_yaml_reads_as_false(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="distributed_type is False, which is unknown; quote it: 'no'"):
        read(tmp_path, distributed_type=False)
