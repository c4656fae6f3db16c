"""Estimate every recipe of the installed Megatron Bridge (pretrain, sft, peft) and write
references/generated/bridge_recipes.md.

    python scripts/bridge_recipes.py [--write | --check] [--only llama3_8b ...]

Needs megatron-bridge and megatron-core; runs on a CPU. Prints the table; ``--write`` writes
it, ``--check`` exits 1, with a diff, where that file is out of date.

Hugging Face configs come from the package's presets instead of the hub; tests/bridge_stubs.py stubs CUDA-only packages.
A config that is not among the presets has its class's defaults with the sizes of published_sizes.py, or without them;
its rows say which.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import io
import json
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import cache, partial, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from published_sizes import published

ROOT = Path(__file__).resolve().parents[1]
PRESETS = ROOT / "bridge_memory" / "readers" / "presets"
TABLE = ROOT / "references" / "generated" / "bridge_recipes.md"
GIB = 1 << 30
#: Remarks on features that are not modelled: those that move the peak by less than NARROW in all, and others.
NARROW = 0.02
BOUNDED, MISSING = "within 2 %, not modelled: ", "not modelled: "
#: Parts of a container by which recipes differ.
SAME = (
    "model", "optimizer", "ddp", "dist", "train", "dataset", "mixed_precision", "comm_overlap", "peft", "env_vars",
)  # fmt: skip
#: The recipes are for these GPUs; MoE dispatchers read capability and name.
DEVICE = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 * GIB)

#: Hub name -> the name that it redirects to.
_OTHER_NAMES = {f"meta-llama/Meta-Llama-3.1-{size}": f"meta-llama/Llama-3.1-{size}" for size in ("8B", "70B", "405B")}


#: For models whose config is not among the presets: part of the hub name -> model type of transformers whose defaults
#: replace the config. The first part that the name contains counts.
_MODEL_TYPES = {
    "DeepSeek-V4": "deepseek_v4", "GLM-5": "glm_moe_dsa", "GLM-4.5V": "glm4v_moe", "GLM-4.7-Flash": "glm4_moe_lite",
    "Qwen3.5-35B-A3B": "qwen3_5_moe", "Qwen3.5-122B-A10B": "qwen3_5_moe", "Qwen3.5-397B-A17B": "qwen3_5_moe",
    "Qwen3.5": "qwen3_5", "Qwen3.6-35B-A3B": "qwen3_5_moe", "Qwen3.6": "qwen3_5",
    "Qwen3-VL-30B-A3B": "qwen3_vl_moe", "Qwen3-VL-235B-A22B": "qwen3_vl_moe", "Qwen3-VL": "qwen3_vl",
    "Qwen3-Omni": "qwen3_omni_moe", "Qwen2.5-VL": "qwen2_5_vl", "Qwen2-Audio": "qwen2_audio", "Qwen2-": "qwen2",
    "EXAONE-4.5": "exaone4_5", "EXAONE-4.0": "exaone4", "K-EXAONE": "exaone_moe",
    "gemma-4": "gemma4", "gemma-3-1b": "gemma3_text", "gemma-3": "gemma3", "gemma-2": "gemma2",
    "NVIDIA-Nemotron-3": "nemotron_h", "MiniMax-M3": "minimax_m3_vl", "Ministral-3": "mistral3",
    "Step-3.5": "step3p5", "Step-3.7": "step3p7",
}  # fmt: skip
#: The architecture in their config.json, by which Megatron Bridge chooses.
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
    "mistral3": "Mistral3ForConditionalGeneration", "step3p5": "Step3p5ForCausalLM",
    "step3p7": "Step3p7ForConditionalGeneration",
}  # fmt: skip
#: Wrappers without a class in transformers and Bridge: part of the hub name -> (architecture, key of the language
#: model, preset with its sizes; None: Bridge's provider has all but the vocabulary).
_WRAPPERS: dict[str, tuple[str, str, str | None]] = {
    "Kimi-K2.5": ("KimiK25ForConditionalGeneration", "text_config", "moonshotai/Kimi-K2-Instruct"),
    "Nano-12B-v2-VL": ("NemotronH_Nano_VL_V2", "llm_config", None),
    "Nemotron-3-Nano-Omni": (
        "NemotronH_Nano_Omni_Reasoning_V3", "llm_config", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    ),
}  # fmt: skip
#: Tokens of the tokenizer of Nemotron Nano v2.
_NANO_V2_WORDS = 131072

#: Fields that Bridge reads and the class does not set; none is a size.
_UNSET: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {"indexer_rope_interleave": True},
    "glm4v_moe": {"text_config.head_dim": 128, "text_config.use_qk_norm": False},
    "deepseek_v4": {"rope_scaling": {"rope_theta": 1e4, "factor": 16, "original_max_position_embeddings": 65536}},
}

#: Modality encoders that the class leaves out: field -> class of their config.
_ENCODERS: dict[str, dict[str, str]] = {"gemma4": {"vision_config": "gemma4_vision"}}

#: Every fourth layer of Step-3.5 has full attention; its MTP depths continue the pattern (Bridge: step37_bridge.py,
#: step35_bridge.py).
_STEP_LAYERS = (["full_attention", *["sliding_attention"] * 3] * 12)[:48]
_STEP = {
    "num_hidden_layers": 45, "layer_types": _STEP_LAYERS[:45], "mtp_layer_types": _STEP_LAYERS[45:],
    "sliding_window": 512, "use_qk_norm": True, "use_moe_router_bias": True, "moe_router_activation": "sigmoid",
    "tie_word_embeddings": False,
}  # fmt: skip

#: Published sizes that differ from the class's defaults: part of the hub name -> fields of its config.json. The name of
#: a preset means its text model.
_PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-VL-30B-A3B": {"text_config": "Qwen/Qwen3-30B-A3B"},
    "Qwen3-VL-235B-A22B": {"text_config": "Qwen/Qwen3-235B-A22B"},
    # Features are as wide as the language model; chunks are those that ``_get_feat_extract_output_lengths`` counts in.
    "Qwen3-Omni-30B-A3B": {
        "thinker_config.text_config": "Qwen/Qwen3-30B-A3B", "thinker_config.vision_config": {"out_hidden_size": 2048},
        "thinker_config.audio_config": {"output_dim": 2048, "n_window": 50},
    },
    "Qwen3.5-397B-A17B": {
        "text_config": {
            "num_hidden_layers": 60, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "hidden_size": 4096, "num_attention_heads": 32, "num_experts": 512, "num_experts_per_tok": 10,
            "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "linear_num_value_heads": 64,
            "vocab_size": 248320,
        },
    },
    "gemma-4-E4B": {
        "text_config": {
            "num_hidden_layers": 42, "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 2,
            "num_kv_shared_layers": 18, "final_logit_softcapping": 30.0,
        },
    },
    "gemma-4-26B-A4B": {
        "text_config": {
            "num_hidden_layers": 30, "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "hidden_size": 2816, "intermediate_size": 2112, "num_attention_heads": 16, "num_key_value_heads": 8,
            "num_global_key_value_heads": 2, "attention_k_eq_v": True, "sliding_window": 1024,
            "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8,
            "moe_intermediate_size": 704, "final_logit_softcapping": 30.0,
        },
    },
    "Step-3.5": {"": _STEP},
    "Step-3.7": {"text_config": _STEP},
    "Nemotron-3-Super-120B-A12B": {
        "": {
            "layers_block_type": (
                "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
            ),
            "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 2, "n_routed_experts": 512,
            "num_experts_per_tok": 22, "moe_latent_size": 1024, "moe_intermediate_size": 2688,
            "moe_shared_expert_intermediate_size": 5376, "num_nextn_predict_layers": 1,
        },
    },
}  # fmt: skip
_BLOCKS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
#: Models whose sizes the class's defaults do not describe.
_UNPUBLISHED = ("Nemotron-3-Ultra",)


def model_type_of(name: str) -> str | None:
    """The model type of transformers whose defaults replace the config of a hub name; None: there is none."""
    if any(part in name for part in _UNPUBLISHED):
        return None
    return next((kind for part, kind in _MODEL_TYPES.items() if part in name), None)


def wrapper_of(name: str) -> tuple[str, str, str | None] | None:
    """Architecture, key and preset of the language model of a wrapper without a class; None: not such a wrapper."""
    return next((found for part, found in _WRAPPERS.items() if part in name), None)


def wrapped(architecture: str, key: str, preset: str | None) -> Any:
    """The config of a wrapper without a class, around a preset's language model."""
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    fields: dict[str, Any] = {"vocab_size": _NANO_V2_WORDS}
    if preset is not None:
        fields = json.loads((PRESETS / f"{preset.replace('/', '__')}.json").read_text())
    cls = CONFIG_MAPPING["deepseek_v3"] if fields.get("model_type") == "kimi_k2" else PretrainedConfig
    config = PretrainedConfig(architectures=[architecture], vision_config=PretrainedConfig())
    setattr(config, key, cls(**fields))
    if "Omni" in architecture:
        config.sound_config = CONFIG_MAPPING["parakeet_encoder"](projection_hidden_size=4096)
        config.sound_context_token_id = 27
    return config


def stand_in(name: str, kind: str) -> Any:
    """A config with the class's defaults and the published sizes of the model."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[kind]()
    config.architectures = [_ARCHITECTURES[kind]]
    for key, encoder in _ENCODERS.get(kind, {}).items():
        setattr(config, key, CONFIG_MAPPING[encoder]())
    for key, value in _UNSET.get(kind, {}).items():
        *path, last = key.split(".")
        setattr(reduce(getattr, path, config), last, value)
    theirs = [fields for part, fields in _PUBLISHED.items() if part in name]
    written = published(name)
    theirs += [written.fields] if written is not None else []
    for fields in theirs:
        for where, sizes in fields.items():
            target = reduce(getattr, where.split("."), config) if where else config
            if isinstance(sizes, str):
                preset = json.loads((PRESETS / f"{sizes.replace('/', '__')}.json").read_text())
                sizes = {key: value for key, value in preset.items() if key in _TEXT_SIZES}
            sizes = dict(sizes)
            pattern = sizes.get("layers_block_type")
            if pattern:
                sizes["layers_block_type"] = [_BLOCKS[letter] for letter in pattern]
            n, kinds = sizes.get("num_hidden_layers"), sizes.get("layer_types") or getattr(target, "layer_types", None)
            if n and kinds and len(kinds) != n:
                unit = kinds[: kinds.index("full_attention") + 1] if "full_attention" in kinds else kinds
                sizes["layer_types"] = (unit * (n // len(unit) + 1))[:n]
            for key, value in sizes.items():
                setattr(target, key, value)
    return config


#: Fields that a preset of a text model shares with another model of its sizes.
_TEXT_SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok", "vocab_size",
)  # fmt: skip


@cache
def vocabulary_of(name: str) -> int | None:
    """Vocabulary size of a hub name's tokenizer; None where its config is not available."""
    preset = PRESETS / f"{name.replace('/', '__')}.json"
    if preset.exists():
        size = json.loads(preset.read_text())["vocab_size"]
    else:
        kind = "nemotron_h" if "nemotron" in name.lower() else model_type_of(name)
        if kind is None:
            return None
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING

        if kind not in CONFIG_MAPPING:
            return None
        size = getattr(stand_in(name, kind).get_text_config(), "vocab_size", None)
    return int(size) if size else None

#: Hub names whose config was replaced by a class's defaults, in the current recipe.
_STOOD_IN: list[str] = []


#: Hub names of the current recipe whose sizes ``published_sizes.py`` has -> the sentence that says so.
_WRITTEN: dict[str, str] = {}


def _written(name: str) -> None:
    found = published(name)
    if found is not None:
        encoder = "; its encoder has the class's defaults" if found.encoder_unknown else ""
        _WRITTEN[name] = f"sizes of `{name}`: {found.source}{encoder}"


class ConfigNotAtHand(Exception):
    """The recipe's Hugging Face config is not among the presets."""


@contextmanager
def bridge_on_cpu() -> Iterator[Any]:
    """Import Bridge's recipes with configs from the presets and a GPU's properties. Yields the recipes module."""
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
        wrapper = wrapper_of(name)
        if wrapper is not None:
            if wrapper[2] is None and published(name) is None:
                _STOOD_IN.append(name)
            _written(name)
            config = wrapped(*wrapper)
            sizes = written.fields if (written := published(name)) is not None else {}
            for key, value in sizes.get("vision_config", {}).items():
                setattr(config.vision_config, key, value)
            return config
        if not preset.exists():
            kind = model_type_of(name)
            if kind is None or kind not in CONFIG_MAPPING:
                raise ConfigNotAtHand(str(path))
            if not any(part in name for part in _PUBLISHED) and published(name) is None:
                _STOOD_IN.append(name)
            _written(name)
            return stand_in(name, kind)
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

    def tokenizer(path: Any, *args: Any, **kwargs: Any) -> Any:
        """A tokenizer with the vocabulary size of the config, which is all that recipes read."""
        size = vocabulary_of(str(path))
        if size is None:
            raise OSError(f"the tokenizer of {path} is not at hand")
        return range(size)

    saved: list[tuple[Any, str, Any]] = []

    def patch(holder: Any, key: str, value: Any) -> None:
        saved.append((holder, key, getattr(holder, key)))
        setattr(holder, key, value)

    for module in (auto_bridge, causal_lm, safe_config_loader):
        if hasattr(module, "safe_load_config_with_retry"):
            patch(module, "safe_load_config_with_retry", load)
    patch(transformers.AutoConfig, "from_pretrained", load)
    patch(transformers.AutoTokenizer, "from_pretrained", tokenizer)
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
    """All recipes of the release: pretrain, sft and peft."""
    return sorted(n for n in dir(recipes) if n.endswith("_config") and callable(getattr(recipes, n)))


def build(recipe: Callable[..., Any]) -> Any:
    """The recipe's container, with the fusions that it has on a GPU and not on this machine."""
    # One recipe of 0.3.1 requires a precision.
    needed = "mixed_precision_recipe" in inspect.signature(recipe).parameters
    from bridge_memory.readers.container_file import kernels_of

    with kernels_of(recipe, "blackwell" if re.search(r"g?b[23]00", recipe.__name__) else None):
        config = recipe(mixed_precision_recipe="bf16_with_mxfp8_mixed") if needed else recipe()
    if hasattr(config.model, "gradient_accumulation_fusion"):
        config.model.gradient_accumulation_fusion = True
    tokenizer = getattr(config.tokenizer, "tokenizer_model", None)
    if config.model.vocab_size is None and tokenizer:
        # Bridge takes it from the tokenizer, which is not available; the config of the same name has it.
        config.model.vocab_size = vocabulary_of(str(tokenizer))
        config.model.should_pad_vocab = config.model.vocab_size is not None
    return config


def experts_divide_tensors(config: Any) -> int:
    """The expert tensor parallel size that an unset one becomes (``BRIDGE_EXPERTS_OUTSIDE_TP``)."""
    import megatron.bridge

    from bridge_memory.releases import BRIDGE_EXPERTS_OUTSIDE_TP, release_in

    m = config.model
    here = release_in(megatron.bridge.__version__)
    outside = here is None or here >= BRIDGE_EXPERTS_OUTSIDE_TP
    return 1 if outside and m.expert_model_parallel_size > 1 else int(m.tensor_model_parallel_size)


def smallest_world(config: Any) -> int:
    """GPUs of the smallest job of the recipe: one replica, times what EP needs."""
    m = config.model
    dense = m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size
    etp = m.expert_tensor_parallel_size or experts_divide_tensors(config)
    experts = etp * m.expert_model_parallel_size * m.pipeline_model_parallel_size
    world = dense
    while world % experts:
        world += dense
    return int(world)


def world_of(config: Any, names: Iterable[str]) -> int:
    """The number of GPUs in a recipe's name, else the smallest job."""
    said = [int(found[1]) for name in names if (found := re.search(r"_(\d+)gpu_", name))]
    return said[0] if said else smallest_world(config)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the table to {TABLE.relative_to(ROOT)}")
    parser.add_argument("--check", action="store_true", help="compare it with what is committed; exit 1 if it differs")
    parser.add_argument("--only", nargs="*", help="recipes whose name starts with one of these")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Progress goes to standard error.
    logging.disable(logging.WARNING)
    with bridge_on_cpu() as recipes:
        names = [n for n in recipe_names(recipes) if not args.only or n.startswith(tuple(args.only))]
        text = table(grouped(recipes, names))
    if args.check:
        committed = TABLE.read_text()
        diff = list(
            difflib.unified_diff(committed.splitlines(), text.splitlines(), "committed", "generated", lineterm="")
        )
        print("\n".join(diff[:200]))
        return int(bool(diff))
    if args.write:
        TABLE.write_text(text)
    else:
        print(text, end="")
    return 0


class Row(NamedTuple):
    """One line of the table."""

    names: list[str]
    kind: str
    cells: str


#: Outcome of a recipe -> its words in the table's head, in that order.
KINDS = {
    "estimated": "are estimated as they are",
    "estimated all the same": (
        "are refused by Megatron Bridge or megatron-core themselves, for a setting that is no size or for a model that "
        "this megatron-core has not (DeepSeek-V4), and estimated as they are"
    ),
    "mended": (
        "are refused by Megatron Bridge or megatron-core themselves, and estimated with the changes that the refusal "
        "asks for"
    ),
    "broken": "are refused by Megatron Bridge itself, which gives the model no sizes",
    "refused": "are refused by this project",
    "no config": "need a config that is published on the hub alone and is not at hand",
    "not built": (
        "Megatron Bridge does not build here: a gated download (FLUX), or its own refusal (Qwen3-Next with adapters)"
    ),
}


def grouped(recipes: Any, names: list[str]) -> list[Row]:
    """One row for recipes with equal containers, in the order of the names."""
    groups: dict[str, list[str]] = {}
    # Per group: the reason why there is no row, or the container and the names of replaced configs.
    found: dict[str, Row | tuple[Any, tuple[str, ...], tuple[str, ...]]] = {}
    for name in names:
        _STOOD_IN.clear()
        _WRITTEN.clear()
        try:
            config = build(getattr(recipes, name))
        except ConfigNotAtHand as missing:
            key = f"its config `{missing}` is not at hand"
            found[key] = Row([], "no config", f"| | | | | {key} |")
        except (AttributeError, NotImplementedError, OSError) as refusal:
            key = f"Megatron Bridge does not build it: {str(refusal).splitlines()[0]}"
            found[key] = Row([], "not built", f"| | | | | {key} |")
        else:
            # Addresses of functions and hooks differ between runs.
            said = " ".join(repr(getattr(config, part, None)) for part in SAME)
            key = re.sub(r" at 0x[0-9a-f]+", "", said)
            found.setdefault(key, (config, tuple(_STOOD_IN), tuple(_WRITTEN.values())))
        groups.setdefault(key, []).append(name)
    rows = []
    for key, aliases in groups.items():
        what = found[key]
        if isinstance(what, Row):
            rows.append(what._replace(names=aliases))
            continue
        recipe = getattr(recipes, aliases[0])
        kind, row = row_of(what[0], world_of(what[0], aliases), partial(build, recipe), what[1], what[2])
        rows.append(Row(aliases, kind, row))
    return rows


def row_of(
    config: Any, world: int, again: Callable[[], Any], stood_in: tuple[str, ...], written: tuple[str, ...] = ()
) -> tuple[str, str]:
    """(outcome, cells). ``again`` builds the recipe anew, since validation changes a container. ``written``: sentences
    on sizes with a source."""
    from bridge_memory.spec import SpecError

    theirs = refusal_of_bridge(again(), world)
    notes = [] if theirs is None else [f"Megatron Bridge refuses it as it is: {theirs}"]
    notes += written
    try:
        row = estimate_row(config, world, stood_in, notes)
    except SpecError as error:
        refusal = str(error)
    else:
        return "estimated" if theirs is None else "estimated all the same", row
    changes: list[str] = []
    mended = again()
    while theirs is not None:
        change = mend(mended, world, refusal)
        if change is None or len(changes) > len(_MENDS):
            return "broken", refused_row(config, world, [*notes, refusal])
        changes.append(change)
        try:
            notes.append(f"estimated with {', '.join(changes)}")
            row = estimate_row(mended, world, stood_in, notes)
        except SpecError as error:
            refusal = str(error)
            notes.pop()
            continue
        validated = again()
        for settled in _MENDS.values():
            copy_settings(mended, validated, settled)
        still = refusal_of_bridge(validated, world)
        if still is not None:
            notes.append(f"and then refuses: {still}")
            row = estimate_row(mended, world, stood_in, notes)
        return "mended", row
    return "refused", refused_row(config, world, [refusal])


#: Words of a refusal -> the change that it requires.
_MENDS: dict[str, tuple[str, ...]] = {
    "differs from dataset.seq_length": ("model.seq_length",),
    "set sequence_parallel to True": ("model.sequence_parallel",),
    "set num_layers_in_first_pipeline_stage": (
        "model.num_layers_in_first_pipeline_stage", "model.num_layers_in_last_pipeline_stage",
    ),
    "global_batch_size (": ("train.global_batch_size",),
    "use a2a or all_gather": ("model.cp_comm_type",),
    "set use_mamba_mem_eff_path to True": ("model.use_mamba_mem_eff_path",),
    "set it, or dataset.enable_offline_packing, to False": ("dataset.enable_offline_packing",),
}  # fmt: skip


def mend(config: Any, world: int, refusal: str) -> str | None:
    """Make the change that a refusal requires and describe it; None: there is no such change."""
    model, train = config.model, config.train
    found = next((words for words in _MENDS if words in refusal), None)
    if found == "differs from dataset.seq_length":
        model.seq_length = config.dataset.seq_length
    elif found == "set sequence_parallel to True":
        model.sequence_parallel = True
    elif found == "set num_layers_in_first_pipeline_stage":
        numbers = re.search(r"_first_pipeline_stage to (\d+) and num_layers_in_last_pipeline_stage to (\d+)", refusal)
        if numbers is None:
            return None
        model.num_layers_in_first_pipeline_stage, model.num_layers_in_last_pipeline_stage = map(int, numbers.groups())
    elif found == "global_batch_size (":
        replicas = replicas_of(config, world)
        step = train.micro_batch_size * replicas
        train.global_batch_size = -(-train.global_batch_size // step) * step
    elif found == "use a2a or all_gather":
        model.cp_comm_type = "a2a"
    elif found == "set use_mamba_mem_eff_path to True":
        model.use_mamba_mem_eff_path = True
    elif found == "set it, or dataset.enable_offline_packing, to False":
        config.dataset.enable_offline_packing = False
        for name in ("offline_packing_specs", "packed_sequence_specs"):  # of 0.6 and before
            if hasattr(config.dataset, name):
                setattr(config.dataset, name, None)
    else:
        return None
    return " and ".join(f"{field} {_at(config, field)}" for field in _MENDS[found])


def _at(config: Any, field: str) -> Any:
    part, name = field.split(".")
    return getattr(getattr(config, part), name)


def copy_settings(source: Any, target: Any, fields: Iterable[str]) -> None:
    for field in fields:
        part, name = field.split(".")
        if hasattr(getattr(target, part), name):
            setattr(getattr(target, part), name, _at(source, field))


def replicas_of(config: Any, world: int) -> int:
    m = config.model
    return int(world // (m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size))


def refusal_of_bridge(config: Any, world: int) -> str | None:
    """Why training would not start, in a line of Bridge's or megatron-core's; None: no check here refuses it.

    What Bridge does to a container before it trains, then what megatron-core checks when it lays out its layers, its
    microbatches and its first pass. Changes ``config``. Paths that a user has to give are given.
    """
    import torch
    from megatron.bridge.training import config as bridge_config
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    from bridge_memory.readers.container_registry import CORE_ATTENTION_OF_SPECS

    with tempfile.TemporaryDirectory() as folder, ExitStack() as patches:
        patches.enter_context(mock.patch.dict(os.environ))
        supply_what_is_elsewhere(config, folder)
        if getattr(config.model, "dsa_kernel_backend", "none") != "none":  # kernels of a GPU's packages
            patches.enter_context(mock.patch.object(config.model, "dsa_kernel_backend", "none"))
        patches.enter_context(mock.patch.object(bridge_config, "get_world_size_safe", lambda: world))
        patches.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: True))
        patches.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        try:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                bridge_config.runtime_config_update(config)
                m, train = config.model, config.train
                ConstantNumMicroBatchesCalculator(
                    train.global_batch_size, train.micro_batch_size, config.data_parallel_size, False, rank=0
                )
                if not getattr(m, "hybrid_layer_pattern", None):
                    for rank in range(m.pipeline_model_parallel_size):
                        with mock.patch.object(
                            parallel_state, "get_pipeline_model_parallel_rank", lambda rank=rank: rank
                        ):
                            for chunk in range(m.virtual_pipeline_model_parallel_size or 1):
                                get_num_layers_to_build(
                                    m, chunk if m.virtual_pipeline_model_parallel_size else None, rank
                                )
        except (AssertionError, ValueError, ZeroDivisionError, NotImplementedError, RuntimeError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            # Its first sentence: a set, in no fixed order, may follow.
            return f"{type(error).__name__}: {re.split('[.] ', lines[0])[0].rstrip('.') if lines else 'no message'}"
    if m.num_moe_experts and m.tensor_model_parallel_size > 1 and not m.sequence_parallel:
        # moe/moe_layer.py: MoELayer.forward
        return "ValueError: MoE and tensor parallelism are enabled without also enabling sequence parallelism"
    packed = any(getattr(config.dataset, f"{name}_specs", None) for name in ("packed_sequence", "offline_packing"))
    if packed and getattr(getattr(m, "transformer_layer_spec", None), "__name__", "") in CORE_ATTENTION_OF_SPECS:
        return "ValueError: Packed sequence is not supported by DotProductAttention"
    hybrid = getattr(m, "hybrid_layer_pattern", None) or getattr(m, "hybrid_override_pattern", None)
    if hybrid and packed and not getattr(m, "use_mamba_mem_eff_path", True):
        # ssm/mamba_mixer.py: MambaMixer.forward
        return "AssertionError: Training with packed sequences is not supported in the non-memory-efficient code path"
    return None


def supply_what_is_elsewhere(config: Any, folder: str) -> None:
    """Set the checkpoint and the data that a user would name."""
    if config.peft is not None:
        config.checkpoint.pretrained_checkpoint = folder
    dataset = config.dataset
    if getattr(dataset, "path", "") is None and not hasattr(dataset, "F_latents"):  # Wan's has data without one
        dataset.path = folder
    for name in ("source", "validation_source", "test_source"):
        arguments = getattr(getattr(dataset, name, None), "load_kwargs", None)
        if arguments and "data_files" in arguments:
            arguments["data_files"] = folder


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


def estimate_row(config: Any, world: int, stood_in: tuple[str, ...], said: list[str]) -> str:
    """Layout, Bridge's total, table2 and inventory by stage, unmodelled features. Raises SpecError."""
    from bridge_memory.estimation import estimate
    from bridge_memory.readers.config_container import run_from_config_container

    config.world_size = world
    found = estimate(run_from_config_container(config))
    notes = [*said, *(f"the config of `{name}` is its class's defaults" for name in dict.fromkeys(stood_in))]
    if found.not_modelled:
        within = found.peak_bounds
        narrow = (
            within.least is not None and within.most is not None
            and within.most - within.least <= NARROW * found.peak_stage.peak_bytes
        )
        what = ", ".join(dict.fromkeys(feature.split(":")[0] for feature in found.not_modelled))
        notes.append(f"{BOUNDED if narrow else MISSING}{what}")
    return cells(config, world, " ".join(f"{s.peak_bytes / GIB:.1f}" for s in found.stages), notes)


def refused_row(config: Any, world: int, notes: list[str]) -> str:
    config.world_size = world
    return cells(config, world, "refused", notes)


def cells(config: Any, world: int, inventory: str, notes: list[str]) -> str:
    from bridge_memory.spec import SpecError
    from bridge_memory.theoretical_memory_utils import estimate_training_memory_by_stage

    replicas, batch = replicas_of(config, world), config.train.global_batch_size
    microbatches = batch // (config.train.micro_batch_size * replicas) if batch else None
    try:
        stages = estimate_training_memory_by_stage(config, microbatches, method="table2")
        table2 = " ".join(f"{e.total_memory_gb:.1f}" for e in stages)
    except SpecError:
        table2 = "refused"
    return (
        f"| {layout_words(config, world)} | {bridge_itself(config, replicas, microbatches)} | {table2} | {inventory} "
        f"| {'; '.join(notes).replace('|', '/')} |"
    )


def bridge_itself(config: Any, replicas: int, microbatches: int | None) -> str:
    """GiB by the installed release's functions, for a validated container."""
    import copy

    from megatron.bridge.training.utils import theoretical_memory_utils as bridge

    seen = copy.copy(config)
    seen.model, seen.data_parallel_size = copy.copy(config.model), replicas
    m = seen.model
    try:
        m.kv_channels = m.kv_channels or m.hidden_size // m.num_attention_heads
        m.ffn_hidden_size = m.ffn_hidden_size or 4 * m.hidden_size
        if m.vocab_size is None:
            m.vocab_size, m.should_pad_vocab = config.tokenizer.vocab_size, True
        nbytes = bridge.compute_weight_and_optimizer_memory(seen)
        nbytes += bridge.compute_activation_memory(seen, num_microbatches=microbatches)
    except (TypeError, ValueError, ZeroDivisionError, AttributeError, AssertionError) as error:
        return f"{type(error).__name__}"
    return f"{float(nbytes) / GIB:.1f}"


def table(rows: list[Row]) -> str:
    import bridge_stubs
    import megatron.bridge
    import megatron.core

    counted = {kind: sum(len(row.names) for row in rows if row.kind == kind) for kind in KINDS}
    total = sum(counted.values())
    built = total - counted["no config"] - counted["not built"]
    estimated = sum(counted[kind] for kind in ("estimated", "estimated all the same", "mended"))
    guessed = sum(len(row.names) for row in rows if "is its class's defaults" in row.cells)
    sized = sum(len(row.names) for row in rows if "sizes of `" in row.cells)
    half = sum(len(row.names) for row in rows if "its encoder has the class's defaults" in row.cells)
    open_ = sum(len(row.names) for row in rows if f"; {MISSING}" in row.cells or f"| {MISSING}" in row.cells)
    counts = "\n".join(f"- {counted[kind]} {words}" for kind, words in KINDS.items() if counted[kind])
    head = f"""# Megatron Bridge's recipes

Generated by `scripts/bridge_recipes.py --write` from megatron-bridge {megatron.bridge.__version__} and megatron-core
{megatron.core.__version__}; do not edit. GiB on one GPU.

Of {total} recipes {built} are built, and {estimated} estimated:

{counts}

The published config of {guessed + sized} of the estimated ones is not at hand. {sized} of them have sizes from the
source that the last column names (`scripts/published_sizes.py`; {half} of these with an encoder of its class's
defaults), the other {guessed} the defaults of their class, and say so.
A recipe runs on the number of GPUs that its name says, else on its smallest world (one replica, or what its expert
parallelism needs), with its own batch. "Megatron Bridge refuses it as it is" quotes what stops it on that world:
Bridge's `runtime_config_update`, which validates the container, and megatron-core's layout of layers and microbatches
are run; checkpoints and data are taken to be there.
Recipes with equal containers are one row. "Bridge" is what the release's own functions return, or the error that they
end with; "table2" are its closed forms by pipeline stage; "inventory" is this project's peak by stage, without the
sizes of what the last column lists: of {estimated} estimates {estimated - open_} list nothing, or what moves the peak
by less than 2 %. Transformer Engine is taken as {bridge_stubs.TRANSFORMER_ENGINE}. Fusions that need a GPU's packages
are taken as available.

| recipe | layout | Bridge | table2 by stage | inventory by stage | remarks |
|---|---|---:|---|---|---|
"""
    lines = []
    for names, _, row in rows:
        short = sorted((name.removesuffix("_config") for name in names), key=lambda n: (len(n), n))
        lines.append(f"| {', '.join(f'`{name}`' for name in short)} {row}\n")
    return head + "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
