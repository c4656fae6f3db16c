"""A verdict and features that are not modelled, as lines begin with or name them."""

from __future__ import annotations

from collections.abc import Iterable

from bridge_memory.verdict import Verdict

#: A verdict as the line begins with it.
VERDICT_WORDS = {
    Verdict.FITS: "FITS", Verdict.TIGHT: "TIGHT on", Verdict.UNKNOWN: "UNKNOWN for",
    Verdict.DOES_NOT_FIT: "DOES NOT FIT",
}  # fmt: skip


def names_of(features: Iterable[str]) -> list[str]:
    """The field names that the sentences of unmodelled features begin with, each once."""
    return list(dict.fromkeys(str(feature).partition(":")[0] for feature in features))
