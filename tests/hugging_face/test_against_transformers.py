"""Recordings beside the real modules of transformers: saved bytes and both peaks of whole small models."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from hf_families import CONFIGS
from hf_side_by_side import errors

LLAMA = CONFIGS["llama"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [64, 640, 20000])
def test_llama(tied: bool, vocab_size: int) -> None:
    config = {**LLAMA, "tie_word_embeddings": tied, "vocab_size": vocab_size}
    assert max(map(abs, errors(config))) < 0.005


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_families(name: str) -> None:
    assert max(map(abs, errors(CONFIGS[name]))) < 0.005
