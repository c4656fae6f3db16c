"""Configs of public models that ship with the package, one ``<org>__<name>.json`` each."""

from __future__ import annotations

import os

_FOLDER = os.path.dirname(os.path.abspath(__file__))
_SUFFIX = ".json"
#: Names before their maker renamed the repositories; Hugging Face redirects the old ones, and recipes still have them.
_RENAMED = ("meta-llama/meta-llama-3.1-", "meta-llama/llama-3.1-")


def list_presets() -> list[str]:
    """List the models whose configs ship with the package, as ``org/name``, sorted without regard to case.

    Example:
        >>> from bridge_memory import list_presets
        >>> "meta-llama/Llama-3.1-8B" in list_presets()
        True
    """
    names = [f[: -len(_SUFFIX)].replace("__", "/", 1) for f in os.listdir(_FOLDER) if f.endswith(_SUFFIX)]
    return sorted(names, key=str.lower)


def find_presets(name: str) -> list[str]:
    """The presets called ``name``, ignoring case: ``org/name``, or all with this name if ``name`` has no org."""
    wanted = name.lower().replace(*_RENAMED)
    if "/" in wanted:
        return [p for p in list_presets() if p.lower() == wanted]
    return [p for p in list_presets() if p.lower().split("/")[1] == wanted]


def preset_path(preset: str) -> str:
    """Path of the config.json of a preset of ``list_presets``."""
    return os.path.join(_FOLDER, preset.replace("/", "__", 1) + _SUFFIX)
