"""TrainingArguments are read as the installed transformers makes a run of them."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bridge_memory.estimation import estimate
from bridge_memory.readers.engines import training_args as reader
from bridge_memory.readers.engines.run import run_from_files, settings_from_files
from bridge_memory.readers.engines.settings import Specified
from bridge_memory.spec import RunSpec, SpecError

MODEL = "meta-llama/Llama-3.2-1B"


def read(tmp_path: Path, world_size: int = 8, **args: Any) -> RunSpec:
    path = tmp_path / "args.json"
    path.write_text(json.dumps(args))
    return run_from_files(MODEL, training_args=str(path), world_size=world_size)


def test_every_field_has_a_place() -> None:
    """Read, harmless for a reason, or not modelled: no field of TrainingArguments is taken for a typing error."""
    transformers = pytest.importorskip("transformers")
    names = {f.name for f in fields(transformers.TrainingArguments)}
    settings = SimpleNamespace(seen=set())

    class Asked(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            settings.seen.add(key)
            return default

    from bridge_memory.readers.engines.sections import Diagnostics
    from bridge_memory.readers.engines.settings import Settings

    reader.read_training_args(Asked(), Settings(Diagnostics("args")), Specified(world_size=2), lambda path: {})
    harmless = {name for words in reader.HARMLESS.values() for name in words.split()}
    asked = settings.seen | {"fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap", "liger_kernel_config"}
    assert names - harmless - asked == set()


def test_every_optimizer_has_a_place() -> None:
    training = pytest.importorskip("transformers.training_args")
    words = {member.value for member in training.OptimizerNames}
    assert words <= {*reader.OPTIMIZERS, *reader.OTHERS}


def test_the_defaults_are_the_trainers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    default = {f.name: f.default for f in fields(transformers.TrainingArguments)}
    run = read(tmp_path)
    assert run.batch.micro_batch_size == default["per_device_train_batch_size"]
    assert run.optimizer.clip_grad == default["max_grad_norm"]
    assert default["optim"] == "adamw_torch_fused" and run.optimizer.torch_implementation == "fused"
    assert run.data_parallel.engine == "ddp" and run.transformers.autocast is None
    assert run.ddp.find_unused_parameters  # Trainer: unless layers are checkpointed
    assert not read(tmp_path, gradient_checkpointing=True).ddp.find_unused_parameters


def test_one_gpu_needs_no_engine(tmp_path: Path) -> None:
    run = read(tmp_path, world_size=1, bf16=True, ddp_bucket_cap_mb=50)
    assert run.data_parallel.engine == "single" and run.transformers.autocast == "bf16"


def test_the_batch_of_a_step(tmp_path: Path) -> None:
    """2 sequences, 4 times, on 8 GPUs."""
    run = read(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, max_length=1024)
    assert (run.batch.micro_batch_size, run.batch.global_batch_size, run.batch.seq_length) == (2, 64, 1024)


OPTIMIZERS = {
    "adamw_torch": ("adamw", "foreach", False), "adamw_torch_fused": ("adamw", "fused", False),
    "paged_adamw_8bit": ("adamw_8bit", "fused", True), "adamw_bnb_8bit": ("adamw_8bit", "fused", False),
    "adafactor": ("adafactor", "for-loop", False), "lion_32bit": ("lion", "fused", False),
    "paged_adamw_32bit": ("adamw", "fused", True),
}  # fmt: skip


@pytest.mark.parametrize("word", OPTIMIZERS)
def test_optim(tmp_path: Path, word: str) -> None:
    o = read(tmp_path, world_size=1, optim=word).optimizer
    assert (o.optimizer, o.torch_implementation, o.paged) == OPTIMIZERS[word]


def test_checkpointing_has_two_names(tmp_path: Path) -> None:
    """The newer one goes before the older (transformers 5.24 ``TrainingArguments.__post_init__``)."""
    new = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}
    run = read(tmp_path, gradient_checkpointing=False, **new)
    assert run.transformers.gradient_checkpointing and run.transformers.use_reentrant
    off = read(tmp_path, gradient_checkpointing=True, activation_checkpointing=False)
    assert not off.transformers.gradient_checkpointing
    partly = read(tmp_path, activation_checkpointing=True, activation_checkpointing_kwargs={"every_n_layers": 2})
    assert any("every_n_layers (2)" in feature for feature in partly.not_modelled)


@pytest.mark.parametrize(("args", "words"), [
    ({"bf16": True, "fp16": True}, "fp16 is true, and so is bf16"),
    ({"optim": "adamw_trch"}, "did you mean adamw_torch"),
    ({"fsdp": "full_shard shard_grad_op"}, "keep one"),
    ({"fsdp": "offload"}, "offload alone"),
    ({"fsdp": "fully_shard"}, "fully_shard"),
    ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"reentrant": True}}, "reentrant is unknown"),
    ({"per_device_train_batch_size": "many"}, "it must be an integer"),
    ({"optim": "galore_adamw"}, "not counted here"),
    ({"fsdp": "full_shard", "deepspeed": {"zero_optimization": {"stage": 2}}}, "stands beside deepspeed"),
])  # fmt: skip
def test_what_is_refused(tmp_path: Path, args: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        read(tmp_path, **args)


FSDP: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"fsdp": "full_shard auto_wrap", "bf16": True, "fsdp_config": {
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "backward_prefetch": "backward_pre"}}, {}),
    ({"fsdp": "shard_grad_op auto_wrap offload"}, {}),
    ({"fsdp": "hybrid_shard auto_wrap", "fsdp_config": {"fsdp_use_orig_params": False, "forward_prefetch": True}}, {}),
    ({"fsdp": "full_shard"}, {}),
]


@pytest.mark.parametrize("args", [args for args, _ in FSDP], ids=lambda args: args["fsdp"])
def test_fsdp_words_give_the_plugin_that_the_trainer_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: dict[str, Any]
) -> None:
    """TrainingArguments of transformers 4 hand FSDP over in the environment, where accelerate's plugin reads it."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    if int(transformers.__version__.split(".")[0]) >= 5:
        pytest.skip("transformers 5 hands a table over")
    import copy
    import os

    from accelerate.utils import FullyShardedDataParallelPlugin

    before = {name: os.environ.get(name) for name in os.environ}
    for name in [name for name in os.environ if name.startswith("FSDP_")]:
        monkeypatch.delenv(name)
    ours = read(tmp_path, **args).fsdp
    try:
        transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], **{
            k: v for k, v in copy.deepcopy(args).items() if k != "bf16"})
        os.environ["FSDP_SYNC_MODULE_STATES"] = "false"  # true looks for a GPU
        theirs = FullyShardedDataParallelPlugin()
    finally:
        for name in [name for name in os.environ if name not in before]:
            del os.environ[name]
        from accelerate.state import AcceleratorState, PartialState

        AcceleratorState._reset_state()
        PartialState._reset_state()
    assert ours.sharding_strategy == theirs.sharding_strategy.name
    assert ours.use_orig_params == theirs.use_orig_params and ours.forward_prefetch == theirs.forward_prefetch
    assert ours.offload_params == theirs.cpu_offload.offload_params
    prefetch = theirs.backward_prefetch
    assert ours.backward_prefetch == ("NO_PREFETCH" if prefetch is None else prefetch.name)
    assert (ours.auto_wrap_policy != "NO_WRAP") == (theirs.auto_wrap_policy is not None)


@pytest.mark.parametrize(("fsdp", "config", "engine", "reshard"), [
    (True, {}, "fsdp2", None), ("full_shard", {}, "fsdp2", None), ("shard_grad_op", {}, "fsdp2", False),
    (True, {"version": 1}, "fsdp1", None), (True, {"reshard_after_forward": False}, "fsdp2", False),
])  # fmt: skip
def test_fsdp_of_transformers_5(fsdp: object, config: dict[str, Any], engine: str, reshard: bool | None) -> None:
    """``_process_fsdp_args``: version 2 unless told, every layer wrapped."""
    from bridge_memory.readers.engines.sections import Diagnostics
    from bridge_memory.readers.engines.settings import Settings

    settings = Settings(Diagnostics("args"))
    told = Specified(world_size=8, transformers=(5, 12))
    reader.read_training_args({"fsdp": fsdp, "fsdp_config": config, "bf16": True}, settings, told, lambda path: {})
    settings.diagnostics.check()
    assert settings.engine == engine and settings.get("fsdp", "reshard_after_forward") == reshard
    assert settings.get("fsdp", "param_dtype") == "bf16" and settings.get("fsdp", "auto_wrap_policy") != "NO_WRAP"


def test_liger_as_its_defaults_are(tmp_path: Path) -> None:
    run = read(tmp_path, world_size=1, use_liger_kernel=True, liger_kernel_config={"rope": False})
    assert run.transformers.liger_kernel == ("rms_norm", "swiglu", "fused_linear_cross_entropy")


def test_a_field_that_is_none_of_theirs_is_listed(tmp_path: Path) -> None:
    assert any("bf_16" in s and "bf16" in s for s in read(tmp_path, bf_16=True).assumptions)


def test_evaluation_and_noise_are_named(tmp_path: Path) -> None:
    args = {"eval_strategy": "steps", "per_device_train_batch_size": 2}
    unmodelled = estimate(read(tmp_path, **args, neftune_noise_alpha=5)).not_modelled
    assert sorted(feature.split(":")[0].split(" ")[0] for feature in unmodelled) == [
        "eval_strategy",
        "neftune_noise_alpha",
    ]
    assert not estimate(read(tmp_path, **args, per_device_eval_batch_size=2)).not_modelled


def test_evaluation_needs_no_more_than_training_at_its_batch(tmp_path: Path) -> None:
    """Its batch is four times as large: what training needs there is the bound, beside weights and states."""
    args = {"eval_strategy": "steps", "per_device_train_batch_size": 2, "bf16": True}
    found = estimate(read(tmp_path, **args))
    (feature,) = found.unmodelled
    larger = estimate(read(tmp_path, **{**args, "per_device_train_batch_size": 8}))
    assert feature.outside and feature.least == 0 and feature.most is not None
    assert larger.peak_stage.peak_bytes <= found.peak_stage.peak_bytes + feature.most
    assert found.peak_stage.peak_bytes + feature.most <= 1.2 * larger.peak_stage.peak_bytes
    (of_liger,) = estimate(read(tmp_path, **args, use_liger_kernel=True)).unmodelled
    assert of_liger.most is None


def test_yaml_and_files_that_it_names(tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": "auto"}}')
    path = tmp_path / "args.yaml"
    path.write_text("bf16: true\nlearning_rate: 1e-5\nper_device_train_batch_size: 1\ndeepspeed: ds.json\n")
    assert run_from_files(MODEL, training_args=str(path), world_size=4).data_parallel.engine == "zero3"
    path.write_text("bf16: true\nfp16: true\ndeepspeed: none.json\noptim: x\n")
    found = settings_from_files(training_args=str(path), specified=Specified(world_size=4)).diagnostics.problems
    assert [p.field for p in found] == ["fp16", "optim", "none.json"]
