"""One name a number format, whoever spells it."""

from __future__ import annotations

import pytest

from bridge_memory.spec import SpecError
from bridge_memory.spec.dtypes import DTYPE_BYTES, TORCH_NAMES, dtype_name


def test_torchs_names_and_widths_are_torchs() -> None:
    torch = pytest.importorskip("torch")
    for name, words in TORCH_NAMES.items():
        for word in words:
            dtype = getattr(torch, word)
            assert dtype_name(dtype, "params_dtype") == dtype_name(str(dtype), "") == dtype_name(word, "") == name
            assert dtype.itemsize == DTYPE_BYTES[name]


def test_another_dtype_is_refused_by_its_field() -> None:
    with pytest.raises(SpecError, match=r"^exp_avg_dtype \('int3'\)"):
        dtype_name("int3", "exp_avg_dtype")
