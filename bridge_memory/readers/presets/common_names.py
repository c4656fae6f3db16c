"""Presets by the names that people write: "Llama 3.1 70B", "Qwen3-30B-A3B-Instruct", "Nemotron-3-Nano-30B-A3B"."""

from __future__ import annotations

import re
from functools import cache

from bridge_memory.readers.presets import list_presets

#: Names that no preset's own name gives, by letters and digits.
_OTHERS = {
    "moonlight16b": "moonshotai/Moonlight-16B-A3B", "nemotron3nano": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nemotronnano330ba3b": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "kimik2": "moonshotai/Kimi-K2-Instruct", "gpt2small": "openai-community/gpt2",
    "nemotron3super": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "qwen3235b": "Qwen/Qwen3-235B-A22B",
    "nemotronsuper49b": "nvidia/Llama-3_3-Nemotron-Super-49B-v1", "phi4mini": "microsoft/Phi-4-mini-instruct",
}  # fmt: skip
#: What makers put before and after a model's name.
_BEFORE = re.compile(r"^(?:nvidia|meta|openai)(?=[a-z])")
_AFTER = re.compile(r"(?:hf|instruct|base|bf16|fp8|chat|it|pt|0?8k|4k|v01|v03|0924|thinking|2507)$")


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isascii() and c.isalnum())


def _spellings(plain: str) -> list[str]:
    """``plain`` and what is left of it without the words before and after a name."""
    found = [plain]
    for one in found:
        found.extend(s for s in (_BEFORE.sub("", one), _AFTER.sub("", one)) if len(s) > 3 and s not in found)
    return found


@cache
def _table() -> dict[str, str]:
    """A spelling of letters and digits -> the preset; spellings of several presets are left out."""
    exact = {_plain(preset.partition("/")[2]): preset for preset in list_presets()}
    others: dict[str, set[str]] = {}
    for plain, preset in exact.items():
        for spelling in _spellings(plain):
            others.setdefault(spelling, set()).add(preset)
    one = {spelling: min(presets) for spelling, presets in others.items() if len(presets) == 1}
    return one | _OTHERS | exact


def preset_called(name: str) -> str | None:
    """The preset that a common name means, whatever its spaces, hyphens and case; None if none or several are."""
    table = _table()
    return next((table[s] for s in _spellings(_plain(name)[:80]) if s in table), None)
