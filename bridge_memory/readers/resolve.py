"""Resolving a model that a user names: a preset, a path, a Hub id or JSON text -> its config -> ModelSpec."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from bridge_memory.files import Unparsed, parse_json, read_text
from bridge_memory.readers.fields import shown
from bridge_memory.readers.huggingface import model_from_hf_config
from bridge_memory.readers.presets import find_presets, list_presets, preset_path
from bridge_memory.readers.presets.common_names import preset_called
from bridge_memory.spec import ModelSpec, SpecError

#: What maps a Hugging Face config to Megatron's: "builtin": this package; "mbridge": mbridge's TransformerConfig (needs
#: the megatron extra); "bridge": Megatron Bridge's provider (needs megatron-bridge).
MAPPINGS = ("builtin", "mbridge", "bridge")

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
#: A config.json is a few kB; a larger file is something else.
_MAX_CONFIG_BYTES = 16 * 2**20


def resolve_model(
    source: str | os.PathLike[str], mapping: str = "builtin", *, make_vocab_size_divisible_by: int | None = None
) -> ModelSpec:
    """Read the model that a name means.

    Args:
        source: Tried in this order: a preset ``org/name``; a path to a config.json or to its folder; a preset's name
            without ``org``, or its common name ("Llama 3.1 8B"); a Hub id ``org/name`` (with huggingface_hub's cache,
            token, HF_HUB_OFFLINE and HF_ENDPOINT).
        mapping: What maps the config to Megatron's: "builtin", or "mbridge" or "bridge" if mbridge or Megatron Bridge
            is installed.
        make_vocab_size_divisible_by: The vocabulary is padded to a multiple of this times TP. None: as in
            ``model_from_hf_config``.

    Returns:
        The architecture, in global sizes.

    Raises:
        SpecError: There is no such model (the message suggests similar presets), or its config cannot be read.

    Example:
        >>> from bridge_memory import resolve_model
        >>> model = resolve_model("Qwen/Qwen3-30B-A3B")
        >>> model.num_layers, model.hidden_size, model.has_experts
        (48, 2048, True)
    """
    name, config = resolve_config(source)
    return model_from_config(config, name, mapping, make_vocab_size_divisible_by)


def model_from_json_text(
    text: str,
    name: str = "custom config",
    mapping: str = "builtin",
    *,
    make_vocab_size_divisible_by: int | None = None,
) -> ModelSpec:
    """The model of a config.json given as text (``--custom-config``). ``make_vocab_size_divisible_by`` as in
    ``model_from_hf_config``. Raises SpecError."""
    return model_from_config(parse_config(text, name), name, mapping, make_vocab_size_divisible_by)


def model_from_config(
    config: Mapping[str, Any],
    name: str,
    mapping: str = "builtin",
    make_vocab_size_divisible_by: int | None = None,
) -> ModelSpec:
    """The model of a parsed config, read with one of MAPPINGS. Raises SpecError."""
    if mapping not in MAPPINGS:
        raise SpecError(f"mapping is {shown(mapping)}; it must be one of {', '.join(MAPPINGS)}")
    if mapping == "mbridge":
        from bridge_memory.readers.mbridge_mapping import model_from_mbridge

        return model_from_mbridge(config, name, make_vocab_size_divisible_by=make_vocab_size_divisible_by)
    if mapping == "bridge":
        from bridge_memory.readers.bridge_mapping import model_from_bridge

        return model_from_bridge(config, name, make_vocab_size_divisible_by=make_vocab_size_divisible_by)
    return model_from_hf_config(config, name, make_vocab_size_divisible_by=make_vocab_size_divisible_by)


def resolve_config(source: str | os.PathLike[str]) -> tuple[str, Mapping[str, Any]]:
    """(name, parsed config) of the model that ``source`` names, as in ``resolve_model``. Raises SpecError."""
    if isinstance(source, os.PathLike):
        source = os.fspath(source)
    if not isinstance(source, str):
        raise SpecError(
            f"the model ({shown(source)}) is no name; give a preset, a path or a Hub id, or a parsed config to "
            "model_from_hf_config"
        )
    if not source.strip():
        raise SpecError("the model is empty; give a preset (see bridge-memory models), a path or a Hub id")
    if "/" in source and (presets := find_presets(source)):
        return presets[0], read_config(preset_path(presets[0]), presets[0])
    path = os.path.expanduser(source)
    if os.path.isdir(path):
        path = os.path.join(path, "config.json")
        if os.path.isfile(path):
            return os.path.basename(os.path.abspath(os.path.dirname(path))), read_config(path, source)
    elif os.path.isfile(path):
        stem, _ = os.path.splitext(os.path.basename(path))
        folder = os.path.basename(os.path.dirname(os.path.abspath(path)))
        return (folder if stem == "config" and folder else stem), read_config(path, source)
    presets = find_presets(source)
    if len(presets) == 1:
        return presets[0], read_config(preset_path(presets[0]), presets[0])
    if presets:
        raise SpecError(f"{shown(source)} names several presets: {', '.join(presets)}; write one in full")
    if os.path.isdir(os.path.expanduser(source)):
        raise SpecError(f"the folder {shown(source)} holds no config.json")
    if source.endswith(".json") or source.startswith((".", "/", "~")):
        raise SpecError(f"there is no file {shown(source)}")
    if not _HUB_ID.fullmatch(source):
        called = preset_called(source)
        if called is not None:
            return called, read_config(preset_path(called), called)
        near = suggestions(source)
        raise SpecError(f"{shown(source)} is no preset, no path and no Hub id (org/name){near}")
    from bridge_memory.readers.hub import fetch_config

    return source, read_config(fetch_config(source, suggestions(source)), source)


def suggestions(source: str) -> str:
    """The end of a message: '; near presets: a, b', or how to list presets if no name is similar."""
    from difflib import get_close_matches

    bare = source.lower().rsplit("/", 1)[-1]
    names = {p.lower().split("/")[1]: p for p in list_presets()}
    near = get_close_matches(bare, names, n=3, cutoff=0.6)
    if not near:
        return "; bridge-memory models lists the presets"
    return "; near presets: " + ", ".join(names[n] for n in near)


def read_config(path: str, name: str) -> Mapping[str, Any]:
    """Parse a config.json. Raises SpecError."""
    return parse_config(read_text(path, "give a config.json", _MAX_CONFIG_BYTES), name)


def parse_config(text: str, name: str) -> Mapping[str, Any]:
    """A JSON object from text. Raises SpecError."""
    try:
        config = parse_json(text)
    except Unparsed as error:
        raise SpecError(f"{name}: not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise SpecError(f"{name}: the config is {shown(config)}; it must be a JSON object")
    return config
