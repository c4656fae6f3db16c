"""Every rule that depends on a release of megatron-core, Transformer Engine or PyTorch.

A rule is named for what a release does, with the function in which it does it, and is asked of whoever says which
releases run (an ``ImplementationSpec``)::

    QKV_OUTPUT_HELD = since(core=(0, 15))
    if QKV_OUTPUT_HELD(impl): ...

One policy for releases that are not known: an unset Transformer Engine or PyTorch counts as the newest, and a
megatron-core outside the known range as its nearer end. Imports nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

Release = tuple[int, int]

#: megatron-core releases whose rules are known: read in the sources of 0.12 to 0.16, measured from 0.9 to 0.20.
RELEASES = ((0, 9), (0, 20))
#: Where nobody says which megatron-core runs.
DEFAULT_MEGATRON_CORE = (0, 16)


class Releases(Protocol):
    """Who knows what runs; None where that is not known."""

    @property
    def megatron_core(self) -> Release: ...
    @property
    def transformer_engine(self) -> Release | None: ...
    @property
    def torch(self) -> Release | None: ...


@dataclass(frozen=True, slots=True)
class Rule:
    """True from the named releases on; None where a package does not matter."""

    core: Release | None = None
    te: Release | None = None
    torch: Release | None = None

    def __call__(self, impl: Releases) -> bool:
        if self.core is not None and impl.megatron_core < self.core:
            return False
        if self.te is not None and impl.transformer_engine is not None and impl.transformer_engine < self.te:
            return False
        return not (self.torch is not None and impl.torch is not None and impl.torch < self.torch)


def since(*, core: Release | None = None, te: Release | None = None, torch: Release | None = None) -> Rule:
    """A rule that holds from these releases on, all of them where more than one is named."""
    return Rule(core, te, torch)


def parse_release(text: str, field: str = "megatron_core") -> Release:
    """"0.16", "v0.16.1" or "0.15.0rc8" -> (0, 16). Raises ValueError with one line that names ``field``."""
    match = re.fullmatch(r"v?(\d{1,4})\.(\d{1,4})(?:[.\-+a-z].*)?", text.strip())
    if match is None:
        raise ValueError(f"{field} {text[:40]!r} is not a release such as 0.16")
    return int(match[1]), int(match[2])


def release_words(release: Release) -> str:
    """A release as people write it: "0.16"."""
    return f"{release[0]}.{release[1]}"


def nearest_known(release: Release) -> Release:
    """``release`` itself where its rules are known, else the end of the known range that is nearer."""
    return min(max(release, RELEASES[0]), RELEASES[1])


def known_releases() -> str:
    """The range of megatron-core releases whose rules are known: "0.9 to 0.20"."""
    return " to ".join(map(release_words, RELEASES))
