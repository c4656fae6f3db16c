"""GPU lookup by name, and guessing vendor and compute capability from a name that matches no card."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from bridge_memory.cards.generations import AMD, NVIDIA, Capability, generation_of
from bridge_memory.cards.gpu import Gpu
from bridge_memory.cards.rows import GPUS

# ---- cards ----


def name_key(name: str) -> str:
    """``name`` in lower case, without spaces, punctuation, vendor and "GB"."""
    key = "".join(c for c in name.casefold() if c.isalnum())
    for vendor in ("nvidia", "tesla", "amd", "instinct", "geforce"):
        key = key.replace(vendor, "")
    for unit in ("gib", "gb"):
        key = key.removesuffix(unit)
    return key


@cache
def _by_key() -> dict[str, Gpu]:
    aliases = {name_key(alias): gpu for gpu in GPUS.values() for alias in gpu.aliases}
    return aliases | {name_key(gpu.name): gpu for gpu in GPUS.values()}


def gpu_called(name: str) -> Gpu | None:
    """The card called ``name`` ("H100", "a100-80gb", "NVIDIA H100 80GB"); None if no card is."""
    return _by_key().get(name_key(name))


def near_names(name: str) -> list[str]:
    """Names of cards that begin with ``name``; if there are none, the most similar names."""
    key, by_key = name_key(name), {name_key(gpu.name): gpu for gpu in GPUS.values()}
    close = [gpu.name for k, gpu in by_key.items() if key and k.startswith(key)]
    if not close:
        import difflib

        close = [by_key[k].name for k in difflib.get_close_matches(key, by_key, n=3, cutoff=0.5)]
    return close


# ---- names that match no card ----


class NamedGpu(NamedTuple):
    """What a name implies about a GPU."""

    vendor: str
    capability: Capability

    @property
    def generation(self) -> str | None:
        """One of GENERATIONS; None for AMD's GPUs and for those older than Volta."""
        return generation_of(self.capability) if self.vendor == NVIDIA else None


#: (pattern, vendor, compute capability) of families without a row and of other spellings of rows; the first match
#: counts. "@": no alphanumeric character before, "#": no digit after. Source: developer.nvidia.com/cuda-gpus.
_FAMILIES: tuple[tuple[str, str, Capability], ...] = (
    ("MI35", AMD, (9, 5)),
    ("MI3", AMD, (9, 4)),
    ("MI2|Instinct", AMD, (9, 0)),
    ("GB10#", NVIDIA, (12, 1)),
    ("RTX.?PRO|RTX.?50[5-9]0", NVIDIA, (12, 0)),
    ("B300#", NVIDIA, (10, 3)),
    ("B[12]00#|blackwell", NVIDIA, (10, 0)),
    ("H[128]00#|@H20#|hopper", NVIDIA, (9, 0)),
    ("@L4#|@L[24]0S?#|RTX.?40[5-9]0|@ada(?![a-z])", NVIDIA, (8, 9)),
    ("A[18]00#|@A30#|ampere", NVIDIA, (8, 0)),
    ("@A10G?#|@A16#|@A40#|@A6000|RTX.?30[5-9]0|RTX.?A[2-6]", NVIDIA, (8, 6)),
    ("@T4#|Quadro.?RTX|Titan.?RTX|RTX.?20[5-9]0|turing", NVIDIA, (7, 5)),
    ("V100#|Titan.?V|volta", NVIDIA, (7, 0)),
)


def _pattern(words: str) -> re.Pattern[str]:
    return re.compile(words.replace("@", "(?<![A-Za-z0-9])").replace("#", r"(?!\d)"), re.IGNORECASE)


@cache
def _patterns() -> tuple[tuple[re.Pattern[str], NamedGpu], ...]:
    """Patterns of every card's name, without its memory size; then those of ``_FAMILIES``."""
    rows = ((re.sub(r"-\d+GB$", "", gpu.name).replace("-", ".?"), gpu) for gpu in GPUS.values())
    return (
        *((_pattern(f"@{words}(?![A-Za-z0-9])"), NamedGpu(gpu.vendor, gpu.capability)) for words, gpu in rows),
        *((_pattern(words), NamedGpu(vendor, capability)) for words, vendor, capability in _FAMILIES),
    )


def gpu_of_name(name: str) -> NamedGpu | None:
    """Vendor and compute capability that ``name`` implies ("NVIDIA H100 80GB HBM3", "dgx_a100"); None if neither."""
    return next((known for pattern, known in _patterns() if pattern.search(name)), None)
