"""Estimate every pretraining recipe of the installed Megatron Bridge and write references/bridge_recipes.md.

    python scripts/bridge_recipes.py [--write references/bridge_recipes.md] [--only llama3_8b ...]

Runs on a CPU: Hugging Face configs come from the package's presets instead of the hub, and CUDA-only packages are
stubbed by tests/bridge_stubs.py. A recipe whose config is not among the presets is listed as such.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PRESETS = ROOT / "bridge_memory" / "readers" / "presets"
GIB = 1 << 30
#: The recipes are written for these cards; capability and name are asked for by the MoE dispatchers.
DEVICE = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * GIB)

#: Hub names that redirect to another.
_OTHER_NAMES = {f"meta-llama/Meta-Llama-3.1-{size}": f"meta-llama/Llama-3.1-{size}" for size in ("8B", "70B", "405B")}


#: Of models whose config is not among the presets: a part of the hub name, and the class of transformers whose defaults
#: stand in for it. The first that is found in the name counts.
_MODEL_TYPES = {
    "DeepSeek-V4": "deepseek_v4", "GLM-5": "glm_moe_dsa", "GLM-4.5V": "glm4v_moe", "GLM-4.7-Flash": "glm4_moe_lite",
    "Qwen3.5-35B-A3B": "qwen3_5_moe", "Qwen3.5-122B-A10B": "qwen3_5_moe", "Qwen3.5-397B-A17B": "qwen3_5_moe",
    "Qwen3.5": "qwen3_5", "Qwen3.6-35B-A3B": "qwen3_5_moe", "Qwen3.6": "qwen3_5",
    "Qwen3-VL-30B-A3B": "qwen3_vl_moe", "Qwen3-VL-235B-A22B": "qwen3_vl_moe", "Qwen3-VL": "qwen3_vl",
    "Qwen3-Omni": "qwen3_omni_moe", "Qwen2.5-VL": "qwen2_5_vl", "Qwen2-Audio": "qwen2_audio", "Qwen2-": "qwen2",
    "EXAONE-4.5": "exaone4_5", "EXAONE-4.0": "exaone4", "K-EXAONE": "exaone_moe",
    "gemma-4": "gemma4", "gemma-3-1b": "gemma3_text", "gemma-3": "gemma3", "gemma-2": "gemma2",
    "NVIDIA-Nemotron-3": "nemotron_h", "MiniMax-M3": "minimax_m3_vl", "Ministral-3": "mistral3",
}  # fmt: skip
#: What their config.json calls the model's class; Megatron Bridge chooses by it.
_ARCHITECTURES = {
    "deepseek_v4": "DeepseekV4ForCausalLM", "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration", "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration", "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration", "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_audio": "Qwen2AudioForConditionalGeneration", "qwen2": "Qwen2ForCausalLM",
    "exaone4_5": "Exaone4_5_ForConditionalGeneration", "exaone4": "Exaone4ForCausalLM",
    "exaone_moe": "ExaoneMoEForCausalLM", "gemma4": "Gemma4ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM", "gemma3": "Gemma3ForConditionalGeneration", "gemma2": "Gemma2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM", "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
    "mistral3": "Mistral3ForConditionalGeneration",
}  # fmt: skip

#: What Bridge reads and the class does not set; no size among it.
_UNSET: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {"indexer_rope_interleave": True},
    "glm4v_moe": {"text_config.head_dim": 128, "text_config.use_qk_norm": False},
    "deepseek_v4": {"rope_scaling": {"rope_theta": 1e4, "factor": 16, "original_max_position_embeddings": 65536}},
}


def model_type_of(name: str) -> str | None:
    """The class of transformers whose defaults stand in for the config of a hub name; None: there is none."""
    return next((kind for part, kind in _MODEL_TYPES.items() if part in name), None)


class ConfigNotAtHand(Exception):
    """The recipe's Hugging Face config is not among the presets."""


@contextmanager
def bridge_on_cpu() -> Iterator[Any]:
    """Bridge's recipes with the hub pointed at the presets and a card to ask about. Yields the recipes module."""
    sys.path.insert(0, str(ROOT / "tests"))
    from bridge_stubs import require_bridge  # type: ignore[import-not-found]

    require_bridge()
    import torch
    import transformers
    from megatron.bridge import recipes
    from megatron.bridge.models.conversion import auto_bridge
    from megatron.bridge.models.hf_pretrained import causal_lm, safe_config_loader

    folder = tempfile.TemporaryDirectory()

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from_pretrained = transformers.AutoConfig.from_pretrained

    def load(path: Any, *args: Any, **kwargs: Any) -> Any:
        name = _OTHER_NAMES.get(str(path), str(path))
        preset = PRESETS / (name.replace("/", "__") + ".json")
        if not preset.exists():
            kind = model_type_of(name)
            if kind is None or kind not in CONFIG_MAPPING:
                raise ConfigNotAtHand(str(path))
            config = CONFIG_MAPPING[kind]()
            config.architectures = [_ARCHITECTURES[kind]]
            for key, value in _UNSET.get(kind, {}).items():
                *path, last = key.split(".")
                setattr(reduce(getattr, path, config), last, value)
            return config
        target = Path(folder.name) / preset.stem
        target.mkdir(exist_ok=True)
        text = preset.read_text()
        (target / "config.json").write_text(text)
        try:
            return from_pretrained(target)
        except (ValueError, KeyError):  # a model_type that needs remote code: its fields as they are
            fields = json.loads(text)
            cls = CONFIG_MAPPING["deepseek_v3"] if fields["model_type"] == "kimi_k2" else transformers.PretrainedConfig
            return cls(**fields)

    saved: list[tuple[Any, str, Any]] = []

    def patch(holder: Any, key: str, value: Any) -> None:
        saved.append((holder, key, getattr(holder, key)))
        setattr(holder, key, value)

    for module in (auto_bridge, causal_lm, safe_config_loader):
        if hasattr(module, "safe_load_config_with_retry"):
            patch(module, "safe_load_config_with_retry", load)
    patch(transformers.AutoConfig, "from_pretrained", load)
    patch(torch.cuda, "get_device_properties", lambda *a, **k: DEVICE)
    patch(torch.cuda, "get_device_capability", lambda *a, **k: (DEVICE.major, DEVICE.minor))
    patch(torch.cuda, "get_device_name", lambda *a, **k: DEVICE.name)
    patch(torch.cuda, "current_device", lambda *a, **k: 0)
    try:
        yield recipes
    finally:
        for holder, key, value in reversed(saved):
            setattr(holder, key, value)
        folder.cleanup()


def recipe_names(recipes: Any) -> list[str]:
    """Every recipe that the release ships: pretrain, sft and peft."""
    return sorted(n for n in dir(recipes) if n.endswith("_config") and callable(getattr(recipes, n)))


def build(recipe: Callable[..., Any]) -> Any:
    """The recipe's container with the fusions that its GPU container has and this machine has not."""
    # One recipe of 0.3.1 wants to be told its precision.
    needed = "mixed_precision_recipe" in inspect.signature(recipe).parameters
    config = recipe(mixed_precision_recipe="bf16_with_mxfp8_mixed") if needed else recipe()
    if hasattr(config.model, "gradient_accumulation_fusion"):
        config.model.gradient_accumulation_fusion = True
    tokenizer = getattr(config.tokenizer, "tokenizer_model", None)
    preset = PRESETS / f"{str(tokenizer).replace('/', '__')}.json"
    if config.model.vocab_size is None and preset.exists():
        # Bridge takes it from the tokenizer, which is not here; the config of the same name has it.
        config.model.vocab_size = json.loads(preset.read_text())["vocab_size"]
        config.model.should_pad_vocab = True
    return config


def smallest_world(config: Any) -> int:
    """GPUs of one replica, times what EP needs: the smallest job that the recipe can be."""
    m = config.model
    dense = m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size
    etp = m.expert_tensor_parallel_size or m.tensor_model_parallel_size
    experts = etp * m.expert_model_parallel_size * m.pipeline_model_parallel_size
    world = dense
    while world % experts:
        world += dense
    return world


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="write the table to this file instead of standard output")
    parser.add_argument("--only", nargs="*", help="recipes whose name starts with one of these")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from bridge_memory.spec import SpecError

    rows = []
    with bridge_on_cpu() as recipes:
        for name in recipe_names(recipes):
            if args.only and not name.startswith(tuple(args.only)):
                continue
            try:
                config = build(getattr(recipes, name))
            except ConfigNotAtHand as missing:
                rows.append((name, f"| | | | | its config `{missing}` is not among the presets |"))
                continue
            try:
                rows.append((name, estimate_row(config)))
            except SpecError as error:
                rows.append((name, f"| | | | | refused: {error} |"))
    text = table(rows)
    if args.write:
        args.write.write_text(text)
    else:
        print(text, end="")
    return 0


def layout_words(config: Any, world: int) -> str:
    m = config.model
    words = [
        f"{label}{size}"
        for label, size in (
            ("TP", m.tensor_model_parallel_size), ("PP", m.pipeline_model_parallel_size),
            ("VPP", m.virtual_pipeline_model_parallel_size or 1), ("CP", m.context_parallel_size),
            ("EP", m.expert_model_parallel_size),
        )
        if size > 1
    ]  # fmt: skip
    return f"{world} GPUs {' '.join(words)}".strip()


def estimate_row(config: Any) -> str:
    from bridge_memory.theoretical_memory_utils import estimate_training_memory, estimate_training_memory_by_stage

    world = smallest_world(config)
    config.world_size = world
    batch = config.train.global_batch_size
    m = config.model
    replicas = world // (
        m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size
    )
    microbatches = batch // (config.train.micro_batch_size * replicas) if batch else None
    theirs = estimate_training_memory(config, microbatches)
    table2 = estimate_training_memory_by_stage(config, microbatches, method="table2")
    ours = estimate_training_memory_by_stage(config, microbatches)

    def stages(estimates: Any) -> str:
        return " ".join(f"{e.total_memory_gb:.1f}" for e in estimates)

    return (
        f"| {layout_words(config, world)} | {bridge_itself(config, replicas, microbatches):.1f} "
        f"| {theirs.total_memory_gb:.1f} | {stages(table2)} | {stages(ours)} |"
    )


def bridge_itself(config: Any, replicas: int, microbatches: int | None) -> float:
    """GiB by the installed release's own functions, on a container as ``validate()`` leaves it."""
    import copy

    from megatron.bridge.training.utils import theoretical_memory_utils as bridge

    seen = copy.copy(config)
    seen.model, seen.data_parallel_size = copy.copy(config.model), replicas
    m = seen.model
    m.kv_channels = m.kv_channels or m.hidden_size // m.num_attention_heads
    m.ffn_hidden_size = m.ffn_hidden_size or 4 * m.hidden_size
    if m.vocab_size is None:
        m.vocab_size, m.should_pad_vocab = config.tokenizer.vocab_size, True
    nbytes = bridge.compute_weight_and_optimizer_memory(seen)
    nbytes += bridge.compute_activation_memory(seen, num_microbatches=microbatches)
    return float(nbytes) / GIB


def table(rows: list[tuple[str, str]]) -> str:
    head = """# Megatron Bridge's pretraining recipes

Generated by `scripts/bridge_recipes.py` from the installed megatron-bridge; do not edit. GiB on one GPU. Each recipe
runs on its smallest world (one replica, or what its expert parallelism needs) with its own batch, so optimizer state
is sharded as little as it can be. "0.3.1" is what that release's own functions return; "drop-in" is our default method,
which follows its documented successor (experts, context parallelism, uneven stages: largest dense part + largest expert
part + first stage's activations); "table2" are the same closed forms by pipeline stage; "inventory" is this project's
peak by stage. Fusions that need a GPU's packages are taken as available.

| recipe | layout | 0.3.1 | drop-in | table2 by stage | inventory by stage |
|---|---|---:|---:|---|---|
"""
    return head + "".join(f"| {name.removesuffix('_pretrain_config')} {row}\n" for name, row in rows)


if __name__ == "__main__":
    sys.exit(main())
