"""A run under DDP, FSDP or ZeRO in the words of those who run it: DeepSpeed's JSON, accelerate's YAML, the HF Trainer's
arguments, the YAML of TRL's scripts, torchtitan's TOML. Whatever is written is read back by this package's own readers
before it is printed; what they do not find in it are flags beside it, and a row that the file would contradict is
refused.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from bridge_memory.arguments.flags import FLAG_OF, FLAGS
from bridge_memory.emit.commands import Emitted, estimate_words, field_words, given_fields, names_files
from bridge_memory.plan.torch.space import is_of
from bridge_memory.readers.engines.run import apply_world_size, fields_of, settings_from_files
from bridge_memory.readers.engines.settings import Specified
from bridge_memory.readers.engines.torchtitan import MODELS as TITANS
from bridge_memory.readers.engines.torchtitan import RECORDED
from bridge_memory.readers.engines.training_args import OPTIMIZERS
from bridge_memory.releases import release_words
from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.spec.canonical import canonical
from bridge_memory.spec.dtypes import TORCH_NAMES
from bridge_memory.spec.engine_options import DEFAULT_DEEPSPEED_OPTIONS
from bridge_memory.spec.fields import called
from bridge_memory.spec.run import GROUPS

Table = dict[str, Any]

_ENGINE = "data_parallel.engine"

#: Format of ``--emit`` -> keyword of ``settings_from_files``, its suffix.
_READ_AS = {
    "deepspeed": ("deepspeed", ".json"), "accelerate": ("accelerate", ".yaml"), "trainer": ("training_args", ".json"),
    "trl": ("training_args", ".yaml"), "torchtitan": ("torchtitan", ".toml"),
}  # fmt: skip
#: Groups whose fields a file decides: a run that differs from what it says there is another run.
_ENGINES_OWN = ("ddp", "fsdp", "deepspeed")
#: What TrainingArguments decide beside.
_TRAINERS_OWN = (
    "optimizer.optimizer", "optimizer.torch_implementation", "optimizer.paged", "optimizer.clip_grad",
    "batch.micro_batch_size", "batch.global_batch_size", "data_parallel.sync_each_batch",
    "transformers.gradient_checkpointing",
    "transformers.use_reentrant", "transformers.liger_kernel", "transformers.autocast",
)  # fmt: skip
#: ``zero_optimization``'s tables of offloading, and how their keys are called here.
_OFFLOADS = {
    "offload_optimizer": {"device": "offload_optimizer_device", "pin_memory": "offload_optimizer_pin_memory",
                          "ratio": "offload_optimizer_ratio"},
    "offload_param": {"device": "offload_param_device", "pin_memory": "offload_param_pin_memory",
                      "buffer_count": "offload_param_buffer_count", "buffer_size": "offload_param_buffer_size"},
}  # fmt: skip
_OUTSIDE_OF_ZERO = ("stage", "communication_data_type", "grad_accum_dtype", "bf16_master_weights_and_grads",
                    "bf16_optimizer_states")  # fmt: skip
_WORDS = {
    "deepspeed": "DeepSpeed's JSON", "accelerate": "accelerate's YAML", "trainer": "TrainingArguments",
    "trl": "TRL's SFTConfig", "torchtitan": "torchtitan's TOML",
}  # fmt: skip
_SAID_BY_FLAGS = frozenset(flag.field for flag in FLAGS)
#: Files that say how long a sequence is.
_WITH_LENGTH = ("trl", "torchtitan")
#: GPUs of a machine, as accelerate counts machines.
_A_MACHINE = 8


def emitted(
    how: str, run: RunSpec, args: argparse.Namespace, gpu: str, changed: Mapping[str, Any]
) -> Emitted:
    """A run in one of the formats of ``formats.FORMATS`` for "torch"; ``changed``: "group.field" -> value, of what
    differs from what ``args`` give. Raises SpecError where there is no such file for the run."""
    if how == "estimate":
        return Emitted(estimate_command(run, args, gpu, changed))
    text, command = config_file(how, run, args, gpu)
    return Emitted(text, f"what the file leaves to the script, with the file's name for FILE: {command}")


def estimate_command(run: RunSpec, args: argparse.Namespace, gpu: str, changed: Mapping[str, Any]) -> str:
    """The ``estimate`` command that shows this run."""
    engine = run.data_parallel.engine
    given = {name: value for name, value in given_fields(args).items() if is_of(engine, name)} | dict(changed)
    given.pop(_ENGINE, None)
    return shlex.join(estimate_words(run, args, gpu, given if names_files(args) else {_ENGINE: engine, **given}))


# ---- files ----


def config_file(how: str, run: RunSpec, args: argparse.Namespace, gpu: str) -> tuple[str, str]:
    """(the file, the ``estimate`` command with FILE in it and what the file leaves to the script). Raises SpecError
    where there is no such file for the run."""
    engine = run.data_parallel.engine
    if how == "deepspeed" and not engine.startswith("zero"):
        raise SpecError(f"--emit deepspeed is for engine zero1, zero2 or zero3, not {engine}; use --emit accelerate")
    wanted = "torchtitan" if how == "torchtitan" else "transformers"
    if run.implementation.transformer_impl != wanted:
        raise SpecError(
            f"--emit {how} is for models of {wanted}, not of {run.implementation.transformer_impl}; use --emit estimate"
        )
    if how == "deepspeed":
        text = json.dumps(deepspeed_config(run), indent=2)
    elif how == "trainer":
        text = json.dumps(trainer_arguments(run), indent=2)
    elif how == "torchtitan":
        text = _toml(torchtitan_config(run))
    else:
        text = _yaml(how, trl_config(run) if how == "trl" else accelerate_config(run))
    beside = left_to_the_script(how, text, run)
    keyword, _ = _READ_AS[how]
    words = estimate_words(run, args, gpu, {}, files=False)
    return text, shlex.join([*words, FLAG_OF[keyword], "FILE", *field_words(beside)])


def left_to_the_script(how: str, text: str, run: RunSpec) -> Table:
    """"group.field" -> value of what the file does not say and the run has. Raises SpecError where the file says
    otherwise of what is its own to say."""
    run, read = canonical(run), canonical(read_back(how, text, run))
    engine = run.data_parallel.engine
    if read.data_parallel.engine != engine:
        gpus = run.parallel.world_size
        raise SpecError(
            f"--emit {how}: {_WORDS[how]} on {gpus} GPU{'s' * (gpus > 1)} starts engine {read.data_parallel.engine}, "
            f"not {engine}; use --emit estimate"
        )
    found: Table = {} if how in _WITH_LENGTH else {"batch.seq_length": run.batch.seq_length}
    for group, cls in GROUPS.items():
        if group in ("parallel",):
            continue
        for f in fields(cls):
            value, name = getattr(getattr(run, group), f.name), f"{group}.{f.name}"
            said = getattr(getattr(read, group), f.name)
            if value == said or name in ("implementation.gpu_arch", "data_parallel.engine"):
                continue
            engines_own = group in _ENGINES_OWN and not _of_the_cluster(run, name)
            if engines_own or name not in _SAID_BY_FLAGS or value is None or _decides(how, run, name):
                raise SpecError(
                    f"--emit {how}: {_WORDS[how]} has no word for {called(cls, f.name)}; {_fix(how, group)}"
                )
            found[name] = value
    return found


def _fix(how: str, group: str) -> str:
    if group == "deepspeed" and how == "accelerate":
        return "use --emit deepspeed, and name its file in deepspeed_config_file"
    if group == "fsdp" and how != "torchtitan":
        return "search with --mixed-precision, which sets engines up as accelerate does, or use --emit estimate"
    return "use --emit estimate"


def read_back(how: str, text: str, run: RunSpec) -> RunSpec:
    """The run that this package's reader makes of a file, with the model and the GPUs of ``run``."""
    keyword, suffix = _READ_AS[how]
    handle, path = tempfile.mkstemp(suffix)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        specified = Specified(
            world_size=run.parallel.world_size, hidden_size=run.model.hidden_size,
            transformers=run.transformers.transformers_version,
        )  # fmt: skip
        settings = settings_from_files(specified=specified, micro_batch_size=None, **{keyword: path})
    finally:
        os.unlink(path)
    settings.diagnostics.check()
    given = fields_of(settings)
    if how not in _WITH_LENGTH:
        given.setdefault("batch", {})["seq_length"] = run.batch.seq_length
    apply_world_size(given, settings, run.parallel.world_size)
    groups: Table = {name: GROUPS[name](**values) for name, values in given.items() if name != "parallel"}
    return RunSpec(model=run.model, parallel=run.parallel, **groups)


def _of_the_cluster(run: RunSpec, name: str) -> bool:
    """FSDP1's hybrid strategies divide over a machine, whatever the file."""
    return name == "fsdp.shard_degree" and run.data_parallel.engine == "fsdp1"


def _decides(how: str, run: RunSpec, name: str) -> bool:
    if how in ("trainer", "trl") and name in _TRAINERS_OWN:
        return True
    return name == "precision.params_dtype" and run.data_parallel.engine.startswith("zero")


def deepspeed_config(run: RunSpec) -> Table:
    """DeepSpeed's JSON; what is its default is left out."""
    z, engine, dtype = run.deepspeed, run.data_parallel.engine, run.params_dtype
    zero: Table = {"stage": int(engine[-1])}
    nested = {name for keys in _OFFLOADS.values() for name in keys.values()}
    for f in fields(z):
        value = getattr(z, f.name)
        ours = f.name not in nested and f.name not in _OUTSIDE_OF_ZERO
        if ours and value != getattr(DEFAULT_DEEPSPEED_OPTIONS, f.name):
            zero[f.name] = value
    for table, keys in _OFFLOADS.items():
        if getattr(z, keys["device"]) == "none":
            continue
        zero[table] = {
            key: getattr(z, name) for key, name in keys.items()
            if key in ("device", "pin_memory") or getattr(z, name) != getattr(DEFAULT_DEEPSPEED_OPTIONS, name)
        }  # fmt: skip
    config: Table = {
        "train_micro_batch_size_per_gpu": run.batch.micro_batch_size,
        "gradient_accumulation_steps": run.num_microbatches, "gradient_clipping": run.optimizer.clip_grad,
    }  # fmt: skip
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    for name in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
        if getattr(z, name) and dtype == "bf16":
            config["bf16"][name] = True
    if z.communication_data_type is not None:
        config["communication_data_type"] = z.communication_data_type
    if z.grad_accum_dtype is not None:
        config["data_types"] = {"grad_accum_dtype": z.grad_accum_dtype}
    config["zero_optimization"] = zero
    if z.offload_optimizer_device != "none" and run.optimizer.optimizer in ("adam", "adamw"):
        # States on the host want DeepSpeed's own Adam, which it makes where the config names the optimizer.
        config["optimizer"] = {"type": "AdamW" if run.optimizer.optimizer == "adamw" else "Adam", "params": {}}
    return config


def accelerate_config(run: RunSpec) -> Table:
    """accelerate's YAML as ``accelerate config`` writes it."""
    engine, gpus, z = run.data_parallel.engine, run.parallel.world_size, run.deepspeed
    kind = {"single": "NO", "ddp": "MULTI_GPU" if gpus > 1 else "NO"}.get(engine) or (
        "FSDP" if engine in ("fsdp1", "fsdp2") else "DEEPSPEED"
    )
    config: Table = {
        "compute_environment": "LOCAL_MACHINE", "distributed_type": kind, "mixed_precision": _mixed_precision(run),
        "num_machines": -(-gpus // _A_MACHINE), "num_processes": gpus, "machine_rank": 0, "main_training_function":
        "main", "rdzv_backend": "static", "use_cpu": False,
    }  # fmt: skip
    if kind == "FSDP":
        config["fsdp_config"] = {f"fsdp_{name}": value for name, value in _fsdp(run).items()}
        degree = run.fsdp.shard_degree
        if engine == "fsdp2" and degree is not None:
            config["parallelism_config"] = {
                "parallelism_config_dp_replicate_size": gpus // degree, "parallelism_config_dp_shard_size": degree,
            }  # fmt: skip
    elif kind == "DEEPSPEED":
        config["deepspeed_config"] = {
            "zero_stage": int(engine[-1]), "gradient_accumulation_steps": run.num_microbatches,
            "gradient_clipping": run.optimizer.clip_grad, "offload_optimizer_device": z.offload_optimizer_device,
            "offload_param_device": z.offload_param_device, "zero3_init_flag": engine == "zero3",
            "zero3_save_16bit_model": z.stage3_gather_16bit_weights_on_model_save,
        }  # fmt: skip
    return config


def _mixed_precision(run: RunSpec) -> str:
    engine = run.data_parallel.engine
    if engine.startswith("zero"):
        dtype = run.params_dtype
    else:
        dtype = (run.fsdp.param_dtype if engine in ("fsdp1", "fsdp2") else run.transformers.autocast) or "fp32"
    return "no" if dtype == "fp32" else dtype


def _fsdp(run: RunSpec) -> Table:
    """accelerate's names without "fsdp_"."""
    f, two = run.fsdp, run.data_parallel.engine == "fsdp2"
    wrap = "NO_WRAP" if f.auto_wrap_policy == "NO_WRAP" else "TRANSFORMER_BASED_WRAP"
    table: Table = {"version": 2 if two else 1, "auto_wrap_policy": wrap}
    if two:
        table["reshard_after_forward"] = f.reshard_after_forward is not False
    else:
        table |= {
            "sharding_strategy": f.sharding_strategy.removeprefix("_"), "use_orig_params": f.use_orig_params,
            "backward_prefetch": f.backward_prefetch, "forward_prefetch": f.forward_prefetch,
        }  # fmt: skip
        if not f.limit_all_gathers:
            table["limit_all_gathers"] = False
    table["offload_params"] = f.offload_params
    table["state_dict_type"] = "SHARDED_STATE_DICT"
    if run.transformers.gradient_checkpointing and run.transformers.use_reentrant is False:
        table["activation_checkpointing"] = True
    return table


def trainer_arguments(run: RunSpec) -> Table:
    """TrainingArguments, as JSON."""
    engine, o, hf, b = run.data_parallel.engine, run.optimizer, run.transformers, run.batch
    words = [
        word for word, optimizer in OPTIMIZERS.items()
        if (optimizer.name, optimizer.paged) == (o.optimizer, o.paged)
        and (o.optimizer != "adamw" or o.paged or optimizer.implementation == o.torch_implementation)
    ]  # fmt: skip
    if not words:
        raise SpecError(
            f"--emit trainer: optimizer ({o.optimizer}, {o.torch_implementation}) is none of the Trainer's; use "
            "--optimizer adamw"
        )
    table: Table = {
        "output_dir": "output", "per_device_train_batch_size": b.micro_batch_size,
        "gradient_accumulation_steps": run.num_microbatches, "gradient_checkpointing": hf.gradient_checkpointing,
    }  # fmt: skip
    if hf.gradient_checkpointing and hf.use_reentrant is not None:
        table["gradient_checkpointing_kwargs"] = {"use_reentrant": hf.use_reentrant}
    mixed = _mixed_precision(run)
    table |= {"bf16": mixed == "bf16", "fp16": mixed == "fp16", "optim": words[0], "max_grad_norm": o.clip_grad}
    if hf.liger_kernel:
        table["use_liger_kernel"] = True
        table["liger_kernel_config"] = {
            name: name in hf.liger_kernel
            for name in ("rope", "rms_norm", "swiglu", "cross_entropy", "fused_linear_cross_entropy")
        }  # fmt: skip
    if engine.startswith("zero"):
        table["deepspeed"] = deepspeed_config(run)
    elif engine in ("fsdp1", "fsdp2"):
        table |= _trainers_fsdp(run)
    elif engine == "ddp":
        d = run.ddp
        table |= {"ddp_find_unused_parameters": d.find_unused_parameters, "ddp_bucket_cap_mb": int(d.bucket_cap_mb)}
        if d.static_graph:
            table["ddp_static_graph"] = True
    return table


def trl_config(run: RunSpec) -> Table:
    """The file of ``trl sft --config``: SFTConfig, which is TrainingArguments, and ModelConfig."""
    hf, peft = run.transformers, run.peft
    table: Table = {
        "model_name_or_path": run.model.name, "dtype": TORCH_NAMES[run.precision.params_dtype][0],
        "attn_implementation": hf.attn_implementation, **trainer_arguments(run),
        "max_length": run.batch.seq_length, "packing": run.batch.packed_sequences,
    }  # fmt: skip
    if peft.trains_adapters:
        table |= {
            "use_peft": True, "lora_r": peft.dim, "lora_target_modules": list(peft.target_modules),
            "lora_dropout": hf.lora_dropout, "use_dora": peft.use_dora,
        }  # fmt: skip
    for name in ("load_in_4bit", "load_in_8bit"):
        if getattr(hf, name):
            table |= {name: True, "use_bnb_nested_quant": hf.bnb_4bit_use_double_quant}
    return table


def torchtitan_config(run: RunSpec) -> Table:
    """torchtitan's tables. Raises SpecError for a model that it has not."""
    f, b, o, hf, engine = run.fsdp, run.batch, run.optimizer, run.transformers, run.data_parallel.engine
    names = next((key for key, preset in TITANS.items() if preset == run.model.name), None)
    if names is None:
        known = ", ".join(preset for (name, _), preset in TITANS.items() if name in RECORDED)
        raise SpecError(f"--emit torchtitan: torchtitan has no {run.model.name}; its models are {known}")
    gpus = run.parallel.world_size
    shard = (f.shard_degree or gpus) if engine == "fsdp2" else 1
    dtypes = {"fp32": "float32", "bf16": "bfloat16"}
    stored = run.precision.params_dtype
    compute = (f.param_dtype if engine == "fsdp2" else hf.autocast) or stored
    checkpoint: Table = {"mode": "none"}
    if hf.gradient_checkpointing:
        checkpoint = {"mode": "full"}
    elif hf.selective_ac_option is not None:
        checkpoint = {"mode": "selective", "selective_ac_option": hf.selective_ac_option}
    training: Table = {
        "local_batch_size": b.micro_batch_size, "seq_len": b.seq_length, "max_norm": o.clip_grad,
        "global_batch_size": run.num_microbatches * b.micro_batch_size * gpus,
        "dtype": dtypes.get(stored, stored), "mixed_precision_param": dtypes.get(compute, compute),
        "mixed_precision_reduce": "float32",
    }  # fmt: skip
    if f.offload_params:
        training["enable_cpu_offload"] = True
    parallelism: Table = {
        "data_parallel_replicate_degree": gpus // shard, "data_parallel_shard_degree": shard,
        "fsdp_reshard_after_forward": "never" if f.reshard_after_forward is False else "default",
    }  # fmt: skip
    implementation = {"name": "Adam" if o.optimizer == "adam" else "AdamW", "implementation": o.torch_implementation}
    tables: Table = {
        "model": {"name": names[0], "flavor": names[1]}, "training": training, "parallelism": parallelism,
        "optimizer": implementation, "activation_checkpoint": checkpoint,
    }  # fmt: skip
    loss = canonical(run).transformers.compile_loss
    if parts := ["model"] * hf.torch_compile + ["loss"] * bool(loss):
        tables["compile"] = {"enable": True, "components": parts}
    return tables


def _trainers_fsdp(run: RunSpec) -> Table:
    """Words and a table beside them. Before transformers 5 the words say the strategy, wrapping and offloading, and
    nothing says FSDP2 (``training_args.py: TrainingArguments.__post_init__``)."""
    f, version = run.fsdp, run.transformers.transformers_version
    two, newer = run.data_parallel.engine == "fsdp2", version >= (5, 0)
    if two and not newer:
        raise SpecError(
            f"--emit trainer: TrainingArguments of transformers {release_words(version)} cannot ask for FSDP2; use "
            "--transformers-version 5.0, or --emit accelerate"
        )
    words = "full_shard" if two else f.sharding_strategy.lower().removeprefix("_")
    words += "" if f.auto_wrap_policy == "NO_WRAP" else " auto_wrap"
    words += " offload" if f.offload_params else ""
    config: Table = {"version": 2 if two else 1} if newer else {}
    if two:
        config["reshard_after_forward"] = f.reshard_after_forward is not False
    else:
        config |= {
            "backward_prefetch": f.backward_prefetch.lower(), "forward_prefetch": f.forward_prefetch,
            "use_orig_params": f.use_orig_params,
        }  # fmt: skip
        if not f.limit_all_gathers:
            config["limit_all_gathers"] = False
    return {"fsdp": words, "fsdp_config": config}


def _yaml(how: str, table: Table) -> str:
    """In YAML's block style. Raises SpecError without PyYAML."""
    try:
        import yaml
    except ImportError:
        raise SpecError(f"--emit {how} needs PyYAML, which is not installed; pip install pyyaml") from None
    return str(yaml.safe_dump(table, sort_keys=False)).rstrip("\n")


def _toml(tables: Table) -> str:
    """Tables of plain values; a list or a string is JSON's."""
    return "\n\n".join(
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())])
        for name, table in tables.items()
    )
