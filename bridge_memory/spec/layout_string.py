"""The two forms of ``pipeline_model_parallel_layout``: Megatron's string, and lists of layer types.

Source: megatron-core ``transformer/pipeline_parallel_layer_layout.py: PipelineParallelLayerLayout``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from bridge_memory.spec.errors import SpecError

#: Letters of Megatron's layout string (``PipelineParallelLayerLayout.parse_str_to_list``).
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
#: No model has nearly this many layers; a longer layout is a typing error and would exhaust memory.
_MOST_SLOTS = 100_000


def layout_string(value: Any) -> str | None:
    """``pipeline_model_parallel_layout`` in any form (string, nested list, megatron-core's class) as a string.

    An entry of the nested form is a layer type's name in any case ("embedding", "decoder", "mtp", "loss") or a
    ``LayerType`` member. Raises SpecError for any other.
    """
    if value is None or isinstance(value, str):
        return value
    raw = getattr(value, "input_data", None)  # megatron-core's PipelineParallelLayerLayout keeps what it was given
    if raw is not None:
        return layout_string(raw)
    return "|".join("".join(_letter(entry) for entry in stage) for stage in value)


def _letter(entry: Any) -> str:
    name = str(getattr(entry, "name", entry)).strip().lower()
    if name not in _LETTERS:
        raise SpecError(f"pipeline_model_parallel_layout holds {name[:40]!r}; use {', '.join(_LETTERS)}")
    return _LETTERS[name]


def parse_layout_string(text: str) -> list[str]:
    """The chunks of a layout string in order, as one string of letters (E, t, m, L) each.

    "Et*3|(tt|)*2,mL" -> ["Ettt", "tt", "tt", "mL"]. Commas are ignored; ``(...)*n`` is unrolled first, then
    ``x*n``; ``|`` ends a stage. Source: ``PipelineParallelLayerLayout.parse_str_to_list``. Raises SpecError.
    """

    def unroll(match: re.Match[str]) -> str:
        body, times = match.group(1), match.group(2)
        if len(times) > 6 or len(body) * int(times) > _MOST_SLOTS:
            raise SpecError(
                f"pipeline_model_parallel_layout {quote(text)} repeats {quote(body)} {times[:12]} times; "
                f"use at most {_MOST_SLOTS} layers in all"
            )
        return body * int(times)

    flat = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        flat = re.sub(pattern, unroll, flat)
        if len(flat) > _MOST_SLOTS:
            raise SpecError(f"pipeline_model_parallel_layout {quote(text)} has over {_MOST_SLOTS} layers; shorten it")
    wrong = next((c for c in flat if c not in "EtmL|"), None)
    if wrong is not None:
        raise SpecError(
            f"pipeline_model_parallel_layout {quote(text)} has {wrong!r}; use E, t, m, L, '|' between "
            "stages, and x*n or (...)*n to repeat"
        )
    return flat.split("|")


def short_layout_string(chunks: Sequence[str]) -> str:
    """The inverse of ``parse_layout_string``, with repetitions abbreviated: ["Ett", "tttt", "tttt", "L"] ->
    "Ett|(t*4|)*2L"."""
    parts = [re.sub("t{4,}", lambda run: f"t*{len(run[0])}", chunk) for chunk in chunks]
    text = ""
    for part, alike in groupby(parts[:-1]):
        times = len(list(alike))
        text += f"({part}|)*{times}" if times > 1 else f"{part}|"
    return text + parts[-1]


def quote(text: str) -> str:
    """A user's text, quoted and shortened to one line."""
    return repr(text if len(text) <= 80 else text[:77] + "...")
