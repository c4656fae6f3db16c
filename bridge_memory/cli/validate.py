"""``bridge-memory validate FILE``: everything that is wrong with a configuration, each with its field and its fix.

The file may be a DeepSpeed config, accelerate's YAML, TrainingArguments, torchtitan's TOML, a calculator's JSON, a
Megatron Bridge YAML, Megatron-LM's arguments (text or launch script), a model's config.json or peft's
adapter_config.json.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge_memory.arguments.flags import integer
from bridge_memory.cli.output import add_output_arguments
from bridge_memory.spec import SpecError

if TYPE_CHECKING:
    from bridge_memory.readers.engines.sections import Diagnostics, Problem

SCHEMA = "bridge-memory/validate/2"
EXIT_PROBLEMS = 2

#: Kind -> what it is, for people.
KINDS = {
    "deepspeed": "a DeepSpeed config", "accelerate": "accelerate's YAML", "training_args": "TrainingArguments",
    "torchtitan": "torchtitan's TOML", "calculator": "a calculator's JSON", "bridge": "a Megatron Bridge YAML",
    "megatron": "Megatron-LM's arguments", "model": "a model's config.json",
    "peft": "peft's adapter_config.json",
}  # fmt: skip
#: Kind -> keys of which its files have some.
_KEYS = {
    "accelerate": ("distributed_type", "compute_environment", "fsdp_config", "deepspeed_config", "num_machines"),
    "deepspeed": ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size",
                  "gradient_clipping", "steps_per_print", "zero_allow_untested_optimizer"),
    "training_args": ("per_device_train_batch_size", "output_dir", "gradient_checkpointing", "learning_rate", "optim",
                      "num_train_epochs", "deepspeed", "fsdp"),
    "calculator": ("training", "parallelism", "engine", "hardware"),
    "bridge": ("ddp", "train", "mixed_precision", "dataset", "tokenizer", "dist", "comm_overlap", "checkpoint",
               "logger"),
    "model": ("model_type", "architectures", "num_hidden_layers"),
    "peft": ("peft_type", "target_modules", "lora_alpha", "lora_dropout", "base_model_name_or_path"),
}  # fmt: skip
#: ``megatron.core.transformer.enums.AttnBackend``, as Bridge's YAML writes an enum: by its value.
_ATTENTION = {1: "flash", 2: "fused", 3: "unfused", 4: "local", 5: "auto"}
_GIVE = "give a configuration file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("file", nargs="?", metavar="FILE", help="the configuration")
    parser.add_argument("--kind", choices=tuple(KINDS), metavar="|".join(KINDS),
                        help="kind of file (default: recognized by its content)")
    parser.add_argument("--num-gpus", "--world-size", type=integer, metavar="N", dest="num_gpus",
                        help="GPUs of the job, to check sizes against")
    add_output_arguments(parser, f"by the schema {SCHEMA}")


def run(args: argparse.Namespace) -> int:
    """Check and print. Returns 2 where anything is wrong, else 0."""
    if args.file is None:
        raise SpecError("FILE is missing; name a configuration file")
    if args.num_gpus is not None and args.num_gpus < 1:
        raise SpecError(f"--num-gpus ({args.num_gpus}) is below 1; give 1 or more")
    kind, diagnostics = checked(args.file, args.kind, args.num_gpus)
    problems = [*diagnostics.problems, *diagnostics.ignored]
    if args.json:
        json.dump(_document(args.file, kind, diagnostics, problems), sys.stdout, indent=2)
        print()
    else:
        _print(args.file, kind, diagnostics, problems)
    return EXIT_PROBLEMS if problems else 0


def checked(path: str, kind: str | None = None, world_size: int | None = None) -> tuple[str, Diagnostics]:
    """(kind of file, what is wrong with it). Raises SpecError for a file that cannot be read or is no configuration."""
    from bridge_memory.files import read_text
    from bridge_memory.readers.engines.files import table_of
    from bridge_memory.readers.engines.sections import Diagnostics

    text = read_text(path, _GIVE)
    kind = kind or kind_of(text, path)
    diagnostics = Diagnostics(os.path.basename(path))
    try:
        if kind == "megatron":
            _megatron(text, diagnostics, world_size)
        elif kind == "model":
            from bridge_memory.readers.resolve import model_from_json_text

            model_from_json_text(text, os.path.basename(path))
        elif kind == "calculator":
            _calculator(table_of(text, path), diagnostics)
        elif kind == "bridge":
            _bridge(table_of(text, path), diagnostics, world_size)
        else:
            diagnostics = _engine_file(path, kind, world_size)
    except SpecError as error:
        diagnostics.problems.append(_as_problem(str(error)))
    return kind, diagnostics


def kind_of(text: str, path: str) -> str:
    """What a file is, by its keys. Raises SpecError where it is no configuration that is known."""
    from bridge_memory.readers.engines.files import table_of, without_comments

    name = os.path.basename(path)
    if path.endswith(".jsonl") or _is_corpus(text):
        raise SpecError(f"{name} holds measured runs; `bridge-memory accuracy` compares them with their predictions")
    if path.endswith(".toml"):
        return "torchtitan"
    if "MODEL_ARGS:" in text or (not text.lstrip().startswith(("{", "[")) and "--" in text and _options(text)):
        return "megatron"
    try:
        table = table_of(text, path)
    except SpecError:
        # Comments are for DeepSpeed to read.
        table = {} if path.endswith((".yaml", ".yml")) else _or_empty(without_comments(text), path)
        if not table:
            raise
    if _is_output(table):
        raise SpecError(
            f"{name} is what bridge-memory itself wrote ({table['schema']}), no configuration; give the file that the "
            "run was read from"
        )
    if "model" in table and not isinstance(table["model"], Mapping) and "training" not in table:
        pass
    elif "model" in table and any(key in table for key in _KEYS["calculator"]):
        return "calculator"
    elif isinstance(table.get("model"), Mapping):
        return "bridge"
    scores = {kind: sum(key in table for key in keys) for kind, keys in _KEYS.items()}
    for dtype in ("bf16", "fp16"):  # a table in DeepSpeed's, a switch in the Trainer's
        scores["deepspeed"] += isinstance(table.get(dtype), Mapping)
        scores["training_args"] += isinstance(table.get(dtype), bool)
    best = max(scores, key=lambda kind: scores[kind])
    if not scores[best]:
        raise SpecError(f"{name} looks like no configuration that is known; say what it is with --kind, or give one")
    return best


def _or_empty(text: str, path: str) -> Mapping[str, Any]:
    from bridge_memory.readers.engines.files import table_of

    try:
        return table_of(text, path)
    except SpecError:
        return {}


def _is_output(table: Mapping[str, Any]) -> bool:
    """JSON of a command of ours names its schema first: "bridge-memory/estimate/3"."""
    schema = table.get("schema")
    return isinstance(schema, str) and schema.split("/")[0] == "bridge-memory"


def _options(text: str) -> bool:
    import re

    return len(re.findall(r"(?m)(?:^|\s)--[a-z][a-z0-9-]+", text)) >= 2


def _is_corpus(text: str) -> bool:
    """JSON records, one a line; a single one is told from a configuration by its file's name alone."""
    from bridge_memory.files import parse_json

    lines = text.split("\n", 2)
    if len(lines) < 2 or not lines[0].startswith("{"):
        return False
    try:
        return isinstance(parse_json(lines[0]), dict) and lines[1].startswith("{")
    except ValueError:
        return False


def _engine_file(path: str, kind: str, world_size: int | None) -> Diagnostics:
    from bridge_memory.readers.engines.run import fields_of, settings_from_files
    from bridge_memory.readers.engines.settings import Specified
    from bridge_memory.spec.run import GROUPS

    kind = "peft_config" if kind == "peft" else kind
    settings = settings_from_files(**{kind: path}, specified=Specified(world_size=world_size))  # type: ignore[arg-type]
    diagnostics = settings.diagnostics
    if not diagnostics.problems:
        for group, fields in fields_of(settings).items():
            try:
                GROUPS[group](**fields)
            except SpecError as error:
                diagnostics.problems.append(_as_problem(str(error)))
    return diagnostics


def _calculator(table: Mapping[str, Any], diagnostics: Diagnostics) -> None:
    from bridge_memory.calculator.form import read_form
    from bridge_memory.calculator.runs import run_of

    form = read_form(table, diagnostics)
    if not diagnostics.problems:
        run_of(form, diagnostics)


def _megatron(text: str, diagnostics: Diagnostics, world_size: int | None) -> None:
    """What Megatron-LM's parser would not know, then what the run that the arguments describe is refused for."""
    from difflib import get_close_matches

    from bridge_memory.readers.megatron_args import read_arguments, run_from_megatron_args
    from bridge_memory.readers.megatron_args.arguments import KNOWN, by_destination

    raw = read_arguments(text)
    for name in by_destination(dict(raw.values)):
        if name not in KNOWN:
            option = "--" + name.replace("_", "-")
            near = get_close_matches(name, KNOWN, n=1, cutoff=0.75)
            fix = f"did you mean --{near[0].replace('_', '-')}?" if near else "remove it"
            diagnostics.problem(option, "is no argument of Megatron-LM", fix)
    world = world_size or raw.world_size or _fewest(raw.values, diagnostics)
    found = run_from_megatron_args(text, world_size=world)
    diagnostics.not_modelled.extend(
        feature for feature in map(_feature, found.not_modelled) if "not an argument" not in feature
    )


def _fewest(values: Mapping[str, Any], diagnostics: Diagnostics) -> int:
    """GPUs that the parallel sizes ask for at least, where nobody says how many there are."""
    least = 1
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        value = str(values.get(name) or 1)
        least *= int(value) if value.isdecimal() and len(value) < 7 else 1
    diagnostics.assume(f"{least} GPUs, the fewest that the parallel sizes allow (--num-gpus)")
    return least


def _feature(sentence: str) -> Any:
    from bridge_memory.spec.unmodelled import as_feature

    return as_feature(sentence)


def _bridge(table: Mapping[str, Any], diagnostics: Diagnostics, world_size: int | None) -> None:
    """Fields that no part of a ConfigContainer has; and, where the file holds a whole container, what the run is
    refused for."""
    from difflib import get_close_matches

    from bridge_memory.readers.config_container import run_from_config_container
    from bridge_memory.readers.container_registry import HARMLESS, READ, known
    from bridge_memory.readers.container_unmodelled import PARTS

    for part, fields in table.items():
        if not isinstance(fields, Mapping) or part not in PARTS:
            continue
        names = {*READ.get(part, ()), *HARMLESS.get(part, {})}
        for name in fields:
            if not name.startswith("_") and not known(part, name):
                near = get_close_matches(name, names, n=1, cutoff=0.75)
                diagnostics.problem(
                    f"{part}.{name}",
                    "is no field that is known of a ConfigContainer",
                    f"did you mean {part}.{near[0]}?" if near else "remove it",
                )
    model = table.get("model")
    if isinstance(model, Mapping) and all(model.get(name) for name in ("hidden_size", "num_layers")):
        run_from_config_container(_as_objects(table), world_size=world_size or _fewest(model, diagnostics))
    else:
        diagnostics.assume("a partial file: its fields are checked by name, not what they give together")


def _as_objects(value: Any) -> Any:
    """Tables as objects with attributes; what a YAML of Bridge writes by its import path as its last word."""
    from types import SimpleNamespace

    if isinstance(value, Mapping):
        target = value.get("_target_")
        if isinstance(target, str) and set(value) <= {"_target_", "_call_", "_args_"}:
            name, arguments = target.rsplit(".", 1)[-1], value.get("_args_")
            if not (isinstance(arguments, list) and arguments):
                return name
            first = arguments[0]
            return _ATTENTION.get(first, first) if name == "AttnBackend" and isinstance(first, int) else first
        return SimpleNamespace(**{k: _as_objects(v) for k, v in value.items() if not k.startswith("_")})
    return [_as_objects(one) for one in value] if isinstance(value, list) else value


def _as_problem(message: str) -> Problem:
    """A refusal of one line as its field, what is wrong, and the fix."""
    from bridge_memory.readers.engines.sections import Problem

    what, semicolon, fix = message.rpartition("; ")
    if not semicolon:
        what, fix = message, "correct it"
    field, _, rest = what.partition(" ")
    return Problem(field.rstrip(":"), rest or "is wrong", fix)


def _document(path: str, kind: str, diagnostics: Diagnostics, problems: list[Problem]) -> dict[str, Any]:
    return {
        "schema": SCHEMA, "file": path, "kind": kind, "problems": [p._asdict() for p in problems],
        "not_estimated": [p._asdict() for p in diagnostics.refusals],
        "not_modelled": [str(feature) for feature in diagnostics.not_modelled],
        "assumptions": list(diagnostics.assumptions),
    }  # fmt: skip


def _print(path: str, kind: str, diagnostics: Diagnostics, problems: list[Problem]) -> None:
    from bridge_memory.report.document import Block, Bullets
    from bridge_memory.report.printing import print_blocks

    count = len(problems)
    said = "nothing wrong" if not count else f"{count} problem{'s' * (count > 1)}"
    blocks: list[Block] = [Bullets(f"{path}, {KINDS[kind]}: {said}", tuple(map(str, problems)))]
    for title, items in (
        ("Right, and not estimated here", tuple(map(str, diagnostics.refusals))),
        ("Not modelled", tuple(map(str, diagnostics.not_modelled))), ("Assumed", tuple(diagnostics.assumptions)),
    ):  # fmt: skip
        if items:
            blocks.append(Bullets(title, items))
    print_blocks(blocks)
