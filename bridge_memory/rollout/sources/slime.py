"""slime's arguments: Megatron-LM's, SGLang's behind ``--sglang-``, and its own.

Source: slime 624b824 ``utils/arguments.py``, ``backends/megatron_utils/actor.py: sleep, wake_up``,
``backends/sglang_utils/arguments.py``.
"""

from __future__ import annotations

import os
import re
import shlex
from typing import Any

from bridge_memory.files import read_text
from bridge_memory.readers.megatron_args import run_from_megatron_args
from bridge_memory.rollout.inference import InferenceSpec
from bridge_memory.rollout.setup import PostTraining, Reference
from bridge_memory.rollout.sources.common import MOST_BYTES, model_of
from bridge_memory.rollout.sources.hydra import command_of_script
from bridge_memory.spec import SpecError
from bridge_memory.spec.errors import bounded

#: slime's own flags that are read here, with the number of their values.
_READ = {
    "--hf-checkpoint": 1, "--actor-num-nodes": 1, "--actor-num-gpus-per-node": 1, "--colocate": 0,
    "--num-gpus-per-node": 1,
    "--rollout-num-gpus-per-engine": 1, "--rollout-num-gpus": 1, "--max-tokens-per-gpu": 1,
    "--use-dynamic-batch-size": 0,
    "--rollout-temperature": 1, "--rollout-max-response-len": 1, "--rollout-max-prompt-len": 1,
    "--rollout-max-context-len": 1,
    "--log-probs-chunk-size": 1, "--log-probs-max-tokens-per-gpu": 1, "--entropy-coef": 1, "--use-kl-loss": 0,
    "--kl-coef": 1, "--kl-loss-coef": 1, "--ref-load": 1, "--advantage-estimator": 1, "--n-samples-per-prompt": 1,
    "--rollout-batch-size": 1, "--update-weight-buffer-size": 1, "--offload": 0, "--offload-train": 0,
    "--offload-rollout": 0, "--use-rollout-logprobs": 0, "--train-backend": 1, "--balance-data": 0,
}  # fmt: skip
#: Flags of slime that move no memory: by name.
_HARMLESS = re.compile(
    r"--(load|save|save-interval|ref-.*|prompt-data|input-key|label-key|apply-chat-template.*|rollout-(shuffle|"
    r"top-.*|stop.*|function-path|seed|skip.*|health.*)|rm-type|num-rollout|num-epoch|"
    r"num-steps-per-rollout|"
    r"over-sampling.*|dynamic-sampling.*|partial-rollout|eval-.*|kl-loss-type|eps-clip.*|lr.*|weight-decay|adam-.*|"
    r"use-wandb|wandb-.*|use-tis|tis-.*|custom-.*|loss-.*|reward-.*|group-rm|metadata-key|tool-key|megatron-to-hf-mode|"
    r"model-name|debug-.*|use-fault-tolerance|normalize-advantages|skip-eval.*|log-.*|use-tensorboard|tb-.*|"
    r"rotary-base|"
    r"make-vocab.*|no-load-.*|no-save-.*|update-weights-interval|train-env-vars|disable-.*normalization)"
)
#: SGLang's options that the engine here has.
_SGLANG = {
    "mem-fraction-static": "mem_fraction_static", "max-running-requests": "max_num_seqs",
    "chunked-prefill-size": "chunked_prefill_size", "context-length": "max_model_len", "ep-size": "expert_parallel",
    "expert-parallel-size": "expert_parallel", "dp-size": "data_parallel_size", "kv-cache-dtype": "kv_cache_dtype",
}  # fmt: skip
_SGLANG_HARMLESS = ("log-level", "router", "server", "cuda-graph-max-bs", "attention-backend", "enable-metrics",
                    "decode-log", "watchdog", "moe-a2a", "deepep", "moe-dense", "enable-ep-moe")  # fmt: skip


def read_slime(
    source: str, *, release: str = "", model: str | None = None, text: str | None = None
) -> PostTraining:
    """The job of slime's arguments, as text or in a launch script that calls ``train.py``. ``text``: as in
    ``verl.read_verl``. Raises SpecError."""
    files = text is None
    if text is None and os.path.isfile(source):
        text = read_text(source, "give the script that starts slime", MOST_BYTES)
    if text is not None and "train.py" in text:
        words = command_of_script(text, "train.py")
    else:
        source = source if text is None else text.replace("\\\n", " ")
        try:
            words = shlex.split(source)
        except ValueError as error:
            raise SpecError(f"slime's arguments: {error}; close the quotes") from None
    own, rest, sglang, not_modelled = _sorted(words)
    if "--colocate" not in own:
        raise SpecError(
            "--colocate is not among slime's arguments: an engine on GPUs of its own is not modelled; add it"
        )
    if own.get("--train-backend", ["megatron"])[0] != "megatron":
        raise SpecError("--train-backend is not megatron; other backends of slime are not modelled; give megatron")
    assumptions: list[str] = []
    path = own.get("--hf-checkpoint", [""])[0]
    if not path and model is None:
        raise SpecError("--hf-checkpoint is not among slime's arguments; add it, or give MODEL")
    found, said = model_of(path, "--hf-checkpoint", model, files=files)
    assumptions += [said] * bool(said)
    per_node = _number(own, "--actor-num-gpus-per-node", 8)
    world = per_node * _number(own, "--actor-num-nodes", 1)
    longest = _number(own, "--rollout-max-context-len", 0) or (
        _number(own, "--rollout-max-prompt-len", 0) + _number(own, "--rollout-max-response-len", 0)
    )  # fmt: skip
    if "--rollout-max-prompt-len" not in own and "--rollout-max-context-len" not in own:
        assumptions.append("prompts of at most 1,024 tokens (--rollout-max-prompt-len)")
        longest += 1024
    text = "\n" + " ".join(map(shlex.quote, rest))  # A line break: it is never taken for a file's name.
    if "--seq-length" not in rest:
        text += f" --seq-length {max(longest, 1)}"
    if "--micro-batch-size" not in rest:
        text += " --micro-batch-size 1"
    if "--bf16" not in rest and "--fp16" not in rest:
        text += " --bf16"
    if "--use-distributed-optimizer" not in rest:
        text += " --use-distributed-optimizer"
    run = run_from_megatron_args(text, world_size=world, model=found)
    run = run.with_fields(packed_sequences=True)
    dynamic = "--use-dynamic-batch-size" in own
    rows = run.batch.micro_batch_size
    update = _number(own, "--max-tokens-per-gpu", longest) * run.parallel.cp if dynamic else rows * longest
    logs = _number(own, "--log-probs-max-tokens-per-gpu", 0) * run.parallel.cp or update
    reference = Reference.NONE
    if "--use-kl-loss" in own or _real(own, "--kl-coef", 0.0):
        reference = Reference.SWAPPED
    if own.get("--advantage-estimator", ["grpo"])[0] == "ppo":
        not_modelled.append("--advantage-estimator ppo: the critic")
    sequences = _number(own, "--rollout-batch-size", 1) * _number(own, "--n-samples-per-prompt", 1)
    batch = run.batch.global_batch_size or sequences
    number = re.match(r"v?(\d+)\.(\d+)", release)
    engine: dict[str, Any] = {"max_model_len": longest}
    for name, value in sglang.items():
        engine[_SGLANG[name]] = _sglang_value(name, value)
    return PostTraining(
        framework="slime", release=(int(number[1]), int(number[2])) if number else (0, 0), trainer=run,
        engine=InferenceSpec(
            model=found, framework="sglang",
            tensor_parallel_size=_number(own, "--rollout-num-gpus-per-engine", 1), **engine,
        ),
        longest=longest, update_tokens=max(update, longest), log_prob_tokens=max(logs, longest),
        update_sequences=max(1, batch // run.parallel.data_parallel_size), hard_limit=True, dynamic=dynamic,
        update_entropy=bool(_real(own, "--entropy-coef", 0.0)), log_prob_entropy=False,
        log_probs="--use-rollout-logprobs" not in own, chunk_size=max(0, _number(own, "--log-probs-chunk-size", 0)),
        param_offload=True, optimizer_offload=True, reference=reference, sleep_level=2,
        rescaled_logits=_real(own, "--rollout-temperature", 1.0) != 1.0,
        bucket_bytes=_number(own, "--update-weight-buffer-size", 512 << 20), gpus_per_node=per_node,
        assumptions=tuple(assumptions), not_modelled=tuple(not_modelled),
    )  # fmt: skip


def _sorted(words: list[str]) -> tuple[dict[str, list[str]], list[str], dict[str, str], list[str]]:
    """(slime's own flags with their values, Megatron-LM's words, SGLang's options, what is not modelled)."""
    own: dict[str, list[str]] = {}
    rest: list[str] = []
    sglang: dict[str, str] = {}
    not_modelled: list[str] = []
    at = 0
    while at < len(words):
        flag, equals, value = words[at].partition("=")
        at += 1
        if not flag.startswith("--"):
            rest.append(words[at - 1])
            continue
        values = [value] if equals else []
        while at < len(words) and not words[at].startswith("--"):
            values.append(words[at])
            at += 1
        if flag in _READ:
            own[flag] = values[: _READ[flag]] if _READ[flag] else []
            if _READ[flag] and not values:
                raise SpecError(f"{flag} has no value; give one")
        elif flag.startswith("--sglang-"):
            name = flag.removeprefix("--sglang-")
            if name in _SGLANG and values:
                sglang[name] = values[0]
            elif not name.startswith(_SGLANG_HARMLESS):
                not_modelled.append(bounded(flag, 80))
        elif not _HARMLESS.fullmatch(flag):
            rest += [flag, *values]
    return own, rest, sglang, not_modelled


def _sglang_value(name: str, text: str) -> Any:
    """As the engine's field has it: a text, a share, or a whole number."""
    if name == "kv-cache-dtype":
        return text
    try:
        return float(text) if name == "mem-fraction-static" else int(text)
    except ValueError:
        raise SpecError(f"--sglang-{name} ({bounded(text, 40)}) is no number; give one") from None


def _real(own: dict[str, list[str]], name: str, default: float) -> float:
    text = own.get(name, [""])[0] if own.get(name) else ""
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        raise SpecError(f"{name} ({bounded(text, 40)}) is no number; give one") from None


def _number(own: dict[str, list[str]], name: str, default: int) -> int:
    text = own.get(name, [""])[0] if own.get(name) else ""
    if not text:
        return default
    if not re.fullmatch(r"\d{1,12}", text):
        raise SpecError(f"{name} ({bounded(text, 40)}) is no whole number; give one")
    return int(text)
