"""Configuration files of DeepSpeed, accelerate, the HF Trainer and torchtitan -> settings of one run.

    settings_from_files(deepspeed="ds_config.json", training_args="args.yaml", specified=Specified(world_size=8))
    run_from_files("Llama-3.1-8B", deepspeed="ds_config.json", world_size=8)

Several files may describe one run, such as TrainingArguments with a DeepSpeed config, started by ``accelerate launch``.
The Trainer's settings then override accelerate's, as in its code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge_memory.files import read_text
from bridge_memory.readers.engines.accelerate import ReadFile, read_accelerate
from bridge_memory.readers.engines.deepspeed import Filler, read_deepspeed
from bridge_memory.readers.engines.files import MOST_BYTES, read_table, table_of, without_comments
from bridge_memory.readers.engines.peft import read_peft
from bridge_memory.readers.engines.sections import Diagnostics
from bridge_memory.readers.engines.settings import Settings, Specified
from bridge_memory.readers.engines.torchtitan import read_torchtitan
from bridge_memory.readers.engines.training_args import read_training_args
from bridge_memory.readers.resolve import resolve_model
from bridge_memory.spec import ModelSpec, ParallelSpec, RunSpec, SpecError, show
from bridge_memory.spec.parts import ENGINE_OPTIONS, layers_by_default
from bridge_memory.spec.run import GROUPS

Path = str | os.PathLike[str]
#: Kind of file -> what to give, for messages.
KINDS = {
    "deepspeed": "a DeepSpeed config (JSON)", "accelerate": "accelerate's YAML",
    "training_args": "TrainingArguments as JSON or YAML", "torchtitan": "torchtitan's TOML",
    "peft_config": "peft's adapter_config.json",
}  # fmt: skip


def settings_from_files(
    *, deepspeed: str | None = None, accelerate: str | None = None, training_args: str | None = None,
    torchtitan: str | None = None, peft_config: str | None = None, specified: Specified | None = None,
    micro_batch_size: int | None = None,
) -> Settings:  # fmt: skip
    """The settings of a run that the files give.

    Problems with their content are in ``Settings.diagnostics``; ``Diagnostics.check`` raises them.

    Args:
        deepspeed, accelerate, training_args, torchtitan, peft_config: Paths of the files.
        specified: What flags or the model give.
        micro_batch_size: The value of the flag, which fills in "auto".

    Raises:
        SpecError: A file cannot be read, or torchtitan's is given together with others.
    """
    specified = specified or Specified()
    named = [path for path in (training_args, accelerate, deepspeed, torchtitan, peft_config) if path is not None]
    settings = Settings(Diagnostics(os.path.basename(named[0]) if len(named) == 1 else " with ".join(
        os.path.basename(path) for path in named)))
    if torchtitan is not None:
        if len(named) > 1:
            raise SpecError("--torchtitan says the whole run; drop the other files")
        read_torchtitan(read_table(torchtitan, f"give {KINDS['torchtitan']}"), settings, specified)
        return settings
    if peft_config is not None:
        read_peft(read_table(peft_config, f"give {KINDS['peft_config']}"), settings, specified)
    if micro_batch_size is not None:
        settings.set(batch__micro_batch_size=micro_batch_size)
    ds = None if deepspeed is None else _deepspeed_table(deepspeed, settings, alone=len(named) == 1)
    args = None if training_args is None else read_table(training_args, f"give {KINDS['training_args']}")
    if accelerate is not None:
        table = read_table(accelerate, f"give {KINDS['accelerate']}")
        ds = _launched(table, accelerate, settings, specified, ds, trainer=args is not None)
    if args is not None:
        read_file = file_reader(training_args or "", settings.diagnostics)
        read_training_args(args, settings, _with_world(specified, settings), read_file, deepspeed=ds)
    elif deepspeed is not None and ds is not None:
        if '"auto"' in json.dumps(ds):
            settings.diagnostics.assume(
                'what is "auto" in the DeepSpeed config as the HF Trainer fills it in with bf16=True and else its '
                "defaults (--training-args)"
            )
        read_deepspeed(ds, settings, _with_world(specified, settings), _alone(settings))
    if (
        settings.engine is not None
        and settings.get("optimizer", "optimizer") is None
        and not settings.diagnostics.refusals
    ):
        settings.set(optimizer__optimizer="adamw")
        settings.diagnostics.assume("torch's AdamW: the files leave the optimizer to the script (--optimizer)")
    if settings.engine is not None and settings.get("batch", "micro_batch_size") is None:
        settings.diagnostics.assume(
            "micro batches of 1 sequence: the files leave them to the script (--micro-batch-size)"
        )
    return settings


def _deepspeed_table(path: str, settings: Settings, *, alone: bool) -> Mapping[str, Any]:
    """A parsed DeepSpeed config. Comments are allowed only without other files and without "auto": DeepSpeed accepts
    them, but accelerate and the Trainer, which fill in "auto", parse plain JSON."""
    text = read_text(path, f"give {KINDS['deepspeed']}", MOST_BYTES)
    try:
        return table_of(text, path)
    except SpecError:
        if not alone or path.endswith((".yaml", ".yml", ".toml")):
            raise
        try:
            table = table_of(without_comments(text), path)
        except SpecError:
            table = {}
        if not table or '"auto"' in json.dumps(table):
            raise
    settings.diagnostics.assume(
        "comments in the DeepSpeed config, which DeepSpeed reads past; accelerate and the HF Trainer refuse them"
    )
    return table


def file_reader(path: str, diagnostics: Diagnostics) -> ReadFile:
    """A function that reads files named in the file at ``path``: from the working directory, as the tools do, else from
    the folder of ``path``. A file that cannot be read is recorded as a problem and counts as empty."""

    def read(name: str) -> Mapping[str, Any]:
        near = os.path.join(os.path.dirname(path), name)
        try:
            return read_table(name if os.path.exists(name) or not os.path.exists(near) else near, "give the file")
        except SpecError as error:
            what, _, fix = str(error).rpartition("; ")
            diagnostics.problem(name, what.removeprefix(name).strip(": ") or str(error), fix or "give the file")
            return {}

    return read


def no_files(diagnostics: Diagnostics) -> ReadFile:
    """In place of ``file_reader`` for a text without files: each that it names is recorded as a problem."""

    def read(name: str) -> Mapping[str, Any]:
        diagnostics.problem(name, "is a file, and no file is read here", "put its table in place of its name")
        return {}

    return read


def _with_world(specified: Specified, settings: Settings) -> Specified:
    return specified if specified.world_size else replace(specified, world_size=settings.world_size)


def _launched(
    table: Mapping[str, Any],
    path: str,
    settings: Settings,
    specified: Specified,
    ds: Mapping[str, Any] | None,
    *,
    trainer: bool,
) -> Mapping[str, Any] | None:
    """Read accelerate's YAML. Returns the DeepSpeed config of a Trainer that accelerate launches: ``ds``, else the file
    that the YAML names (``ACCELERATE_USE_DEEPSPEED``)."""
    section = table.get("deepspeed_config")
    named = section.get("deepspeed_config_file") if isinstance(section, Mapping) else None
    if trainer and ds is None and isinstance(named, str):
        ds = file_reader(path, settings.diagnostics)(named)
    read_accelerate(table, settings, specified, file_reader(path, settings.diagnostics), deepspeed_read=ds is not None)
    return ds


def _alone(settings: Settings) -> Filler:
    """The filler of "auto" for a DeepSpeed config without other files: the Trainer's defaults, and the flags."""
    return Filler(who="the HF Trainer", values={
        "train_micro_batch_size_per_gpu": settings.get("batch", "micro_batch_size"), "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0, "bf16.enabled": True, "fp16.enabled": False,
    })  # fmt: skip


def fields_of(settings: Settings) -> dict[str, dict[str, Any]]:
    """Group -> field -> value, without the options of engines that are not used."""
    kept: dict[str, dict[str, Any]] = {}
    own = ENGINE_OPTIONS.get(settings.engine or "")
    for group, fields in settings.groups.items():
        if group in ("ddp", "fsdp", "deepspeed") and group != own:
            continue
        if group in GROUPS:
            kept[group] = dict(fields)
    fields, _ = layers_by_default(settings.engine)
    if fields:
        kept["implementation"] = {**fields, **kept.get("implementation", {})}
    return kept


def run_from_files(
    model: ModelSpec | Path | None = None, *, world_size: int | None = None, seq_length: int | None = None,
    deepspeed: Path | None = None, accelerate: Path | None = None, training_args: Path | None = None,
    torchtitan: Path | None = None, peft_config: Path | None = None,
) -> RunSpec:  # fmt: skip
    """Read the configuration files of DeepSpeed, accelerate, the HF Trainer or torchtitan as a run.

    Several files may describe one run. TrainingArguments override accelerate's settings.

    Args:
        model: The model: a ModelSpec or what ``resolve_model`` takes. None: the model that torchtitan's file names.
        world_size: GPUs of the job. None: from a file, else 1.
        seq_length: Tokens per sequence. None: from a file, else 4096.
        deepspeed: A DeepSpeed config (JSON).
        accelerate: The YAML of ``accelerate config``.
        training_args: TrainingArguments as JSON or YAML.
        torchtitan: torchtitan's TOML, which describes the whole run.
        peft_config: peft's adapter_config.json.

    Returns:
        The run. Its ``assumptions`` list what the files leave to the script.

    Raises:
        SpecError: A file cannot be read, contradicts another, or sets an option that cannot be estimated.

    Example:
        >>> from pathlib import Path
        >>> from bridge_memory import run_from_files
        >>> config = Path("ds_config.json")
        >>> _ = config.write_text('''{
        ...     "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4, "bf16": {"enabled": true},
        ...     "zero_optimization": {"stage": 3}
        ... }''')
        >>> run = run_from_files("meta-llama/Llama-3.1-8B", deepspeed=config, world_size=8)
        >>> run.data_parallel.engine, run.batch.global_batch_size
        ('zero3', 64)
    """
    files = {
        "deepspeed": deepspeed, "accelerate": accelerate, "training_args": training_args, "torchtitan": torchtitan,
        "peft_config": peft_config,
    }  # fmt: skip
    paths: dict[str, Any] = {}
    for kind, path in files.items():
        if path is not None and not isinstance(path, (str, os.PathLike)):
            raise SpecError(f"{kind} ({show(path)}) is no path; give that of {KINDS[kind]}")
        paths[kind] = None if path is None else os.fspath(path)
    if model is None and paths["torchtitan"] is not None:
        model = settings_from_files(torchtitan=paths["torchtitan"]).model
    if model is None:
        raise SpecError("the model is missing; name a preset, a path or a Hub id")
    spec = model if isinstance(model, ModelSpec) else resolve_model(model)
    specified = Specified(world_size=world_size, hidden_size=spec.hidden_size, model_type=spec.model_type)
    settings = settings_from_files(**paths, specified=specified)
    settings.diagnostics.check()
    return _run_of(spec, settings, world_size, seq_length)


def _run_of(spec: ModelSpec, settings: Settings, world_size: int | None, seq_length: int | None) -> RunSpec:
    given = fields_of(settings)
    if seq_length is not None:
        given.setdefault("batch", {})["seq_length"] = seq_length
    if world_size is None and settings.world_size is None:
        settings.diagnostics.assume("1 GPU (world_size)")
    apply_world_size(given, settings, world_size or settings.world_size or 1)
    groups: dict[str, Any] = {name: GROUPS[name](**fields) for name, fields in given.items() if name != "parallel"}
    parallel = ParallelSpec(**given.get("parallel", {}), world_size=world_size or settings.world_size or 1)
    return RunSpec(
        model=spec, parallel=parallel, assumptions=tuple(settings.diagnostics.assumptions),
        not_modelled=tuple(settings.diagnostics.not_modelled), **groups,
    )  # fmt: skip


def run_from_torchtitan(config: Mapping[str, Any], *, world_size: int | None = None) -> RunSpec:
    """The run of torchtitan's configuration as a table, such as the one that a log holds. Raises SpecError."""
    specified = Specified(world_size=world_size)
    settings = Settings(Diagnostics("torchtitan's configuration"))
    read_torchtitan(config, settings, specified)
    if settings.model is None:
        settings.diagnostics.check()
        raise SpecError("torchtitan's configuration names no model that is known here; name the MODEL")
    model = resolve_model(settings.model)
    settings = Settings(Diagnostics("torchtitan's configuration"))
    specified = Specified(world_size=world_size, hidden_size=model.hidden_size, model_type=model.model_type)
    read_torchtitan(config, settings, specified)
    settings.diagnostics.check()
    return _run_of(model, settings, world_size, None)


def apply_world_size(given: dict[str, dict[str, Any]], settings: Settings, world_size: int) -> None:
    """Complete ``given`` with what depends on the number of GPUs: global_batch_size, and engine single on one GPU."""
    batch, engine = given.setdefault("batch", {}), given.setdefault("data_parallel", {})
    parallel = given.get("parallel", {})
    if world_size == 1 and engine.get("engine") == "ddp":
        engine["engine"] = "single"
        given.pop("ddp", None)
    if "global_batch_size" not in batch and settings.accumulation is not None:
        replicas = world_size // (
            parallel.get("tensor_model_parallel_size", 1) * parallel.get("pipeline_model_parallel_size", 1)
        )
        batch["global_batch_size"] = batch.get("micro_batch_size", 1) * settings.accumulation * max(1, replicas)
