"""The run that a text is of, where its trainer printed it.

Megatron-LM prints its arguments, Megatron Bridge its container as YAML (``print_yaml``), torchtitan its configuration
as JSON (``config/job_config.py``), verl its own as Python prints a dict (``trainer/main_ppo.py``).
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from math import prod
from typing import Any, NamedTuple

from bridge_memory.comparison.compare import run_printed_in
from bridge_memory.comparison.logs import arguments_in
from bridge_memory.emit.commands import field_words
from bridge_memory.failure.texts import bare
from bridge_memory.files import Unparsed, parse_json
from bridge_memory.spec import RunSpec, SpecError


class Trainer(str, Enum):
    """Whose words a change is said in."""

    MEGATRON = "Megatron-LM"
    BRIDGE = "Megatron Bridge"
    TORCHTITAN = "torchtitan"
    VERL = "verl"
    DEEPSPEED = "DeepSpeed"
    HUGGING_FACE = "the Hugging Face Trainer"
    TORCH = "PyTorch"
    SGLANG = "SGLang"
    VLLM = "vLLM"

    def __str__(self) -> str:
        return self.value


class Printed(NamedTuple):
    """What a text says of its run. ``why_not``: why ``run`` is None though something was printed."""

    trainer: Trainer
    run: RunSpec | None
    source: str
    why_not: str = ""


#: Texts that only one trainer prints, or names in a traceback; the first that is found counts.
_NAMED = (
    (Trainer.VERL, ("actor_rollout_ref", "/verl/")),
    (Trainer.TORCHTITAN, ("torchtitan",)),
    (Trainer.BRIDGE, ("megatron/bridge/", "megatron.bridge")),
    (Trainer.MEGATRON, ("megatron/training/", "pretrain_gpt.py", "megatron/core/", "arguments ------")),
    (Trainer.DEEPSPEED, ("/deepspeed/", "[deepspeed]")),
    (Trainer.HUGGING_FACE, ("transformers/trainer.py", "/trl/trainer/")),
    (Trainer.SGLANG, ("/sglang/", "sglang.srt", "--mem-fraction-static", "SGLangEngine")),
    (Trainer.VLLM, ("/vllm/", "vllm.v1", "(EngineCore")),
)
#: Inference engines, which train nothing.
ENGINES = (Trainer.SGLANG, Trainer.VLLM)
#: Lines of one printed configuration.
_MOST_LINES = 20_000


def printed_in(text: str, world_size: int | None = None) -> Printed:
    """The run of a text, as far as it says one. ``world_size``: GPUs of the job, where it does not say."""
    named = next((who for who, marks in _NAMED if any(mark in text for mark in marks)), Trainer.TORCH)
    for mark, trainer, source, read in _READERS:
        if mark not in text:
            continue
        try:
            found = read(text, world_size)
        except SpecError as error:
            return Printed(trainer, None, source, str(error))
        if found is not None:
            return Printed(trainer, found, source)
    return Printed(named, None, "")


def _megatron(text: str, world_size: int | None) -> RunSpec | None:
    lines = [bare(line) for line in _from(text, "arguments ------")]
    return None if arguments_in(lines) is None else run_printed_in("the log", lines)


def _from(text: str, mark: str) -> Sequence[str]:
    start = text.rfind("\n", 0, text.find(mark)) + 1
    return text[start : start + (4 << 20)].split("\n", _MOST_LINES)[:_MOST_LINES]


#: A line of YAML's block style: of a mapping or a list.
_YAML_LINE = re.compile(r"^(?:\s*(?:- )?[A-Za-z_][\w.]*:(?:\s.*)?|\s+\S.*|\s*- .*|\s*)$")


def _bridge(text: str, world_size: int | None) -> RunSpec | None:
    """The YAML around ``_target_: ...ConfigContainer``, which is one of its first lines or its last."""
    from bridge_memory.readers.config_container import run_from_config_container
    from bridge_memory.readers.container_file import container_of_table
    from bridge_memory.readers.engines.files import table_of

    lines = [bare(line) for line in text.split("\n")]
    at = next((i for i, line in enumerate(lines) if re.match(r"_target_: .*ConfigContainer\s*$", line)), None)
    if at is None:
        return None
    first = last = at
    while first > max(0, at - _MOST_LINES) and _YAML_LINE.match(lines[first - 1]):
        first -= 1
    while last < min(len(lines) - 1, at + _MOST_LINES) and _YAML_LINE.match(lines[last + 1]):
        last += 1
    table = table_of("\n".join(lines[first : last + 1]), "the container in the log")
    return run_from_config_container(
        container_of_table(table, "the container in the log"), world_size=world_size or _world(text)
    )


#: A value of the summary: "  tensor_model_parallel_size: 4  (Mcore default: 1)".
_SUMMED = re.compile(r"^\s{2,}(\w+): (.*?)(?:\s+\(Mcore default: .*\))?\s*$")
#: Field of the summary -> field of a RunSpec.
_SUMMED_FIELDS = {
    **{name: f"parallel.{name}" for name in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
        "context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size",
        "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
    )},
    **{f"recompute_{name}": f"recompute.{name}" for name in ("granularity", "method", "num_layers", "modules")},
    "micro_batch_size": "batch.micro_batch_size", "global_batch_size": "batch.global_batch_size",
    "seq_length": "batch.seq_length", "sequence_length": "batch.seq_length", "fp8": "precision.fp8",
}  # fmt: skip


def _bridge_summary(text: str, world_size: int | None) -> RunSpec | None:
    """The summary that Bridge's setup logs (``config.py: log_non_default_values``): fields of megatron-core's classes
    alone, without the vocabulary and the activation function. Raises SpecError with the flags of what it says."""
    fields: dict[str, Any] = {}
    for line in _from(text, "Configuration Summary"):
        found = _SUMMED.match(bare(line))
        if found is None or found[1] not in _SUMMED_FIELDS:
            continue
        try:
            value = ast.literal_eval(found[2])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if value is not None:
            fields.setdefault(_SUMMED_FIELDS[found[1]], tuple(value) if isinstance(value, list) else value)
    world = world_size or _world(text)
    words = [f"--num-gpus {world}"] if world else []
    words.append(shlex.join(field_words(fields)))
    raise SpecError(
        "it leaves out the vocabulary and the activation function; add --container run_config.yaml of the checkpoint, "
        f"or MODEL with what it says: {' '.join(words)}"
    )


def _torchtitan(text: str, world_size: int | None) -> RunSpec | None:
    """The JSON after "Running with configs:"."""
    from bridge_memory.readers.engines.run import run_from_torchtitan

    table = _braced(text, "Running with configs:", parse_json)
    return None if table is None else run_from_torchtitan(table, world_size=world_size or _world_of_torchtitan(text))


#: As launchers, torch and trainers print it.
_WORLD = re.compile(r"(?i)\bworld[_ ]size\W{1,4}(\d{1,7})\b")


def _world(text: str) -> int | None:
    found = _WORLD.search(text)
    return None if found is None else int(found[1]) or None


#: Sizes of a mesh whose product is the number of GPUs, as torchtitan names them; and the list of earlier releases.
_SIZES = re.compile(r"\b(?:pp|dp_replicate|dp_shard|cp|tp)=(\d{1,6})\b")
_MESH = re.compile(r"device mesh with (?:parallelism: ([^\n]{1,200})|\[[^\]]*\], \[([\d, ]{1,80})\])")


def _world_of_torchtitan(text: str) -> int | None:
    """From the mesh that torchtitan prints; None where it did not."""
    found = _MESH.search(text)
    if found is None:
        return None
    sizes = _SIZES.findall(found[1]) if found[1] else found[2].split(",")
    return prod(int(size) for size in sizes) if sizes else None


def _verl(text: str, world_size: int | None) -> RunSpec | None:
    from bridge_memory.rollout.sources.verl import update_of_verl

    table = _braced(text, "{'actor_rollout_ref'", ast.literal_eval)
    return None if table is None else update_of_verl(table)


def _braced(text: str, mark: str, parse: Callable[[str], Any]) -> dict[str, Any] | None:
    """The value of the braces at or after ``mark``, over lines that a launcher may have prefixed."""
    at = text.find(mark)
    start = text.find("{", at) if at >= 0 else -1
    if start < 0:
        return None
    depth, kept = 0, []
    for line in text[start : start + (1 << 20)].split("\n", _MOST_LINES):
        plain = bare(line)
        kept.append(plain)
        outside = re.sub(r"'(?:[^'\\\n]|\\.)*'|\"(?:[^\"\\\n]|\\.)*\"", "", plain)
        depth += outside.count("{") - outside.count("}")
        if depth <= 0:
            break
    whole = "\n".join(kept)
    try:
        value = parse(whole[: whole.rfind("}") + 1])
    except (Unparsed, ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


_READERS: tuple[tuple[str, Trainer, str, Callable[[str, int | None], RunSpec | None]], ...] = (
    ("arguments ------", Trainer.MEGATRON, "the arguments that Megatron-LM printed", _megatron),
    ("ConfigContainer", Trainer.BRIDGE, "the container that Megatron Bridge printed", _bridge),
    ("Configuration Summary", Trainer.BRIDGE, "the summary that Megatron Bridge logged", _bridge_summary),
    ("Running with configs:", Trainer.TORCHTITAN, "the configuration that torchtitan printed", _torchtitan),
    ("{'actor_rollout_ref'", Trainer.VERL, "the configuration that verl printed", _verl),
)


def on_generation(run: RunSpec, arch: str | None) -> RunSpec:
    """``run`` with the library workspaces of a GPU generation."""
    if arch is None or arch == run.implementation.gpu_arch:
        return run
    return run.with_(implementation=replace(run.implementation, gpu_arch=arch))
