"""TRL's GRPOConfig, and ms-swift's arguments of ``swift rlhf --rlhf_type grpo``: vLLM in the trainer's process.

Source: TRL 1.16 ``trainer/grpo_config.py``, ``trainer/grpo_trainer.py``, ``generation/vllm_generation.py`` (sleep level
2), ``trainer/utils.py: add_fused_lm_head`` (log-probabilities of chunks of tokens: no logits); ms-swift 3
``rlhf_trainers/grpo_trainer.py`` (``sleep_level``, ``offload_model``, ``offload_optimizer``).
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bridge_memory.files import read_text
from bridge_memory.readers.engines.files import read_table, table_of
from bridge_memory.readers.engines.run import apply_world_size, fields_of, file_reader, no_files
from bridge_memory.readers.engines.sections import Diagnostics
from bridge_memory.readers.engines.settings import Settings, Specified
from bridge_memory.readers.engines.training_args import read_training_args
from bridge_memory.rollout.inference import InferenceSpec
from bridge_memory.rollout.setup import PostTraining, Reference
from bridge_memory.rollout.sources.common import MOST_BYTES, model_of
from bridge_memory.rollout.sources.hydra import Options, command_of_script, scalar
from bridge_memory.spec import ParallelSpec, RunSpec, SpecError
from bridge_memory.spec.errors import bounded
from bridge_memory.spec.run import GROUPS

#: Options of GRPO with their defaults (``GRPOConfig``); the Trainer's are read as everywhere.
_TRL: dict[str, Any] = {
    "num_generations": 8, "max_prompt_length": None, "max_completion_length": 512, "use_vllm": False,
    "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_tensor_parallel_size": 1,
    "vllm_enable_sleep_mode": False, "vllm_max_model_length": None, "beta": 0.0, "steps_per_generation": None,
    "sync_ref_model": False, "use_liger_loss": False, "temperature": 1.0, "loss_type": "dapo",
}  # fmt: skip
_HARMLESS = (
    "vllm_server", "vllm_group_port", "vllm_guided", "vllm_structured", "vllm_importance", "vllm_model_impl", "reward",
    "scale_rewards", "epsilon", "delta", "top_", "min_p", "repetition", "cache_implementation", "generation_",
    "num_iterations", "importance_sampling", "mask_truncated", "log_completions", "num_completions_to_print",
    "wandb_log", "ref_model_", "shuffle_dataset", "disable_dropout", "dataset", "system_prompt", "script_args",
    "num_generations_eval", "top_entropy_quantile", "vespo", "sapo", "ds3_gather", "chat_template",
)  # fmt: skip
#: Tokens of a prompt where nothing says them.
_PROMPT = 512
#: ms-swift's name -> TRL's, the Trainer's or peft's.
_SWIFT = {
    "model": "model_name_or_path", "vllm_max_model_len": "vllm_max_model_length", "lora_rank": "lora_r",
    "torch_dtype": "torch_dtype", "vllm_tensor_parallel_size": "vllm_tensor_parallel_size",
}  # fmt: skip
_SWIFT_READ = ("sleep_level", "offload_model", "offload_optimizer", "train_type", "tuner_type", "rlhf_type",
               "attn_impl", "padding_free", "max_length", "target_modules", "deepspeed", "vllm_max_num_seqs",
               "vllm_enforce_eager", "move_model_batches", "freeze_vit", "num_infer_workers")  # fmt: skip
#: Default temporary weights: ``attn_implementation`` of a file goes to the Trainer's reader unread.
_OF_TRAINER_ONLY = ("model_init_kwargs",)


def read_trl(
    source: str, *, world_size: int | None = None, release: str = "", model: str | None = None,
    text: str | None = None,
) -> PostTraining:  # fmt: skip
    """The job of GRPOConfig's arguments in JSON or YAML. ``text``: as in ``verl.read_verl``. Raises SpecError."""
    if text is None:
        table = dict(read_table(source, "give TRL's GRPO arguments as JSON or YAML"))
    else:
        table = dict(table_of(text, source))
    return _read("trl", source, table, world_size, model, {}, release, text is None)


def read_ms_swift(
    source: str, *, world_size: int | None = None, release: str = "", model: str | None = None,
    text: str | None = None,
) -> PostTraining:  # fmt: skip
    """The job of ``swift rlhf``'s arguments: as text, in a script, or in YAML or JSON. ``text``: as in
    ``verl.read_verl``. Raises SpecError."""
    files = text is None
    if text is None and os.path.isfile(source):
        text = read_text(source, "give ms-swift's arguments", MOST_BYTES)
    if text is not None:
        if source.endswith((".yaml", ".yml", ".json")) or re.match(r"\s*(\{|#|\w+:\s)", text):
            table = dict(table_of(text, source))
        else:
            table = _words(command_of_script(text, "swift rlhf" if "swift rlhf" in text else "rlhf"))
    else:
        try:
            table = _words(shlex.split(source.removeprefix("swift rlhf")))
        except ValueError as error:
            raise SpecError(f"ms-swift's arguments: {error}; close the quotes") from None
    own = {name: table.pop(name) for name in _SWIFT_READ if name in table}
    if own.get("rlhf_type", "grpo") != "grpo":
        raise SpecError(f"--rlhf_type ({bounded(str(own['rlhf_type']), 40)}) is not modelled; give grpo")
    table = {_SWIFT.get(name, name): value for name, value in table.items()}
    if str(own.get("train_type", own.get("tuner_type", "lora"))) == "lora":
        table.setdefault("lora_r", 8)
        table["use_peft"] = True
    zero = str(own.get("deepspeed", ""))
    if zero.startswith("zero"):
        stage: dict[str, Any] = {"stage": int(zero[4]) if zero[4:5].isdigit() else 0}
        if "offload" in zero:
            stage |= {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
        table["deepspeed"] = {
            "zero_optimization": stage, "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
        }  # fmt: skip
    elif zero:
        table["deepspeed"] = zero
    return _read("ms-swift", source, table, world_size, model, own, release, files)


def _old(release: str) -> bool:
    """TRL before 1.0, which makes the logits."""
    return release.lstrip("v").startswith("0.")


def _words(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    at = 0
    while at < len(words):
        if not words[at].startswith("--"):
            raise SpecError(f"{bounded(words[at], 60)} is no argument of ms-swift; give --name value")
        name, equals, value = words[at][2:].partition("=")
        at += 1
        if not equals:
            values = []
            while at < len(words) and not words[at].startswith("--"):
                values.append(words[at])
                at += 1
            value = " ".join(values)
        found[name] = scalar(value, name) if value else True
    return found


def _read(
    framework: str,
    source: str,
    table: dict[str, Any],
    world_size: int | None,
    given: str | None,
    own: Mapping[str, Any],
    release: str,
    files: bool,
) -> PostTraining:
    grpo = Options(_TRL, "TRL's GRPOConfig")
    grpo.update([(name, table.pop(name)) for name in list(table) if name in _TRL])
    for name in list(table):
        if name.startswith(_HARMLESS) or name in _OF_TRAINER_ONLY:
            table.pop(name)
    if not grpo.flag("use_vllm", framework == "ms-swift") or grpo.text("vllm_mode") != "colocate":
        raise SpecError("vllm_mode is not colocate: an engine on GPUs of its own, or none, is not modelled; give "
                        "use_vllm and vllm_mode colocate")  # fmt: skip
    path = str(table.get("model_name_or_path", table.pop("model", "")) or "")
    if not path and given is None:
        raise SpecError("model_name_or_path is not given; give it, or MODEL beside the configuration")
    model, said = model_of(path, "model_name_or_path", given, files=files)
    prompt, response = grpo.integer("max_prompt_length"), grpo.integer("max_completion_length")
    longest = grpo.integer("vllm_max_model_length") or 0
    assumptions: list[str] = [said] * bool(said)
    if not longest:
        longest = (prompt or _PROMPT) + (response or 0)
        if prompt is None:
            assumptions.append(f"prompts of at most {_PROMPT} tokens (vllm_max_model_length)")
    # TRL's defaults, unlike the Trainer's.
    table.setdefault("bf16", not table.get("fp16", False))
    table.setdefault("gradient_checkpointing", True)
    world = world_size or 1
    run = _run(framework, source, table, model, world, longest, files)
    lora = run.peft.scheme != "none"
    swift = Options({}, "ms-swift")
    swift.update(own.items())
    level = swift.integer("sleep_level", 0, 0) or 0
    if framework == "trl":
        level = 2 if grpo.flag("vllm_enable_sleep_mode") else 0
    if level not in (0, 1, 2):
        raise SpecError(f"sleep_level ({level}) is neither 0, 1 nor 2; give one")
    rows = run.batch.micro_batch_size
    beta = grpo.number("beta") or (0.04 if framework == "ms-swift" and "beta" not in grpo.given else 0.0)
    reference = Reference.NONE if not beta else Reference.ADAPTERS_OFF if lora else Reference.GPU
    fields: dict[str, Any] = {}
    if (most := swift.integer("vllm_max_num_seqs")) is not None:
        fields["max_num_seqs"] = most
    engine = InferenceSpec(
        model=model, tensor_parallel_size=grpo.integer("vllm_tensor_parallel_size") or 1,
        gpu_memory_utilization=grpo.number("vllm_gpu_memory_utilization"), served=False,
        max_model_len=grpo.integer("vllm_max_model_length") or longest,
        enforce_eager=swift.flag("vllm_enforce_eager"),
        sleep_mode=bool(level), **fields,
    )  # fmt: skip
    moves_none = ("temperature", "loss_type", "sync_ref_model", "num_generations", "steps_per_generation")
    not_modelled = [name for name in grpo.unread() if name not in moves_none]
    fused = framework == "trl" and not _old(release)
    if world_size is None:
        assumptions.append("1 GPU (--num-gpus)")
    return PostTraining(
        framework=framework, release=(0, 0), trainer=run, engine=engine, longest=longest, update_tokens=rows * longest,
        log_prob_tokens=rows * longest, dynamic=False, fused_kernels=fused,
        param_offload=swift.flag("offload_model"), optimizer_offload=swift.flag("offload_optimizer"),
        reference=reference, sleep_level=level, in_process=True,
        gpus_per_node=min(8, world), assumptions=tuple(assumptions), not_modelled=tuple(not_modelled),
    )  # fmt: skip


def _run(
    framework: str, source: str, table: dict[str, Any], model: Any, world: int, longest: int, files: bool
) -> RunSpec:
    """The trainer, as ``--training-args`` reads it."""
    name = os.path.basename(source) if files and os.path.exists(source) else framework
    settings = Settings(Diagnostics(bounded(name, 60)))
    specified = Specified(world_size=world, hidden_size=model.hidden_size, model_type=model.model_type)
    reader = file_reader(source, settings.diagnostics) if files else no_files(settings.diagnostics)
    read_training_args(table, settings, specified, reader)
    settings.diagnostics.check()
    fields = fields_of(settings)
    fields.setdefault("batch", {})["seq_length"] = longest
    apply_world_size(fields, settings, world)
    groups: dict[str, Any] = {group: GROUPS[group](**of) for group, of in fields.items() if group != "parallel"}
    run = RunSpec(
        model=model, parallel=ParallelSpec(world_size=world), assumptions=tuple(settings.diagnostics.assumptions),
        not_modelled=tuple(settings.diagnostics.not_modelled), **groups,
    )  # fmt: skip
    return run.with_(transformers=replace(run.transformers, keeps_outputs=False))
