"""Units, and rounding that keeps sums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge_memory.report.units import (
    DECIMALS,
    UNITS,
    format_bytes,
    format_count,
    format_ticks,
    ranges,
    share,
    ticks,
)
from bridge_memory.spec import SpecError


def test_units_are_what_their_names_say() -> None:
    assert (UNITS["GiB"], UNITS["MiB"], UNITS["GB"], UNITS["MB"], UNITS["bytes"]) == (2**30, 2**20, 10**9, 10**6, 1)


@pytest.mark.parametrize(
    ("nbytes", "unit", "text"),
    [
        (0, "GiB", "0.00 GiB"),
        (3 * 2**29, "GiB", "1.50 GiB"),
        (80 * 10**9, "GB", "80.00 GB"),
        (80 * 10**9, "GiB", "74.51 GiB"),
        (2**40, "MiB", "1,048,576.0 MiB"),
        (123456789, "bytes", "123,456,789 bytes"),
        (-(2**29), "GiB", "-0.50 GiB"),
    ],
)
def test_bytes_are_shown_with_their_unit(nbytes: int, unit: str, text: str) -> None:
    assert format_bytes(nbytes, unit) == text


def test_an_unknown_unit_is_refused() -> None:
    with pytest.raises(SpecError, match="'KB'"):
        format_bytes(1, "KB")


sizes = st.lists(st.integers(0, 2**40) | st.integers(0, 2**24) | st.just(0), max_size=12)


@given(sizes, st.sampled_from(list(UNITS)))
def test_shares_add_up_and_are_off_by_less_than_a_digit(parts: list[int], unit: str) -> None:
    shown = share(parts, unit)
    assert sum(shown) == ticks(sum(parts), unit)
    for part, value in zip(parts, shown, strict=True):
        assert abs(part * 10 ** DECIMALS[unit] - value * UNITS[unit]) < UNITS[unit]
        assert part or not value  # nothing stays nothing


@given(sizes, sizes, st.sampled_from(list(UNITS)))
def test_shares_of_shares_add_up_too(some: list[int], others: list[int], unit: str) -> None:
    """As in the report: components within a kind, kinds within a stage."""
    total = ticks(sum(some) + sum(others), unit)
    first = ticks(sum(some), unit)
    assert sum(share(some, unit, first)) + sum(share(others, unit, total - first)) == total


@given(st.integers(-(2**50), 2**50), st.sampled_from(list(UNITS)))
def test_a_shown_number_reads_back(value: int, unit: str) -> None:
    shown = format_ticks(value, unit).replace(",", "")
    assert round(float(shown) * 10 ** DECIMALS[unit]) == value


def test_parameters_are_counted_in_billions_and_millions() -> None:
    counts = (768, 124_439_808, 671_026_404_352, 1_043_000_000_000)
    assert [format_count(n) for n in counts] == ["768", "124.44 M", "671.03 B", "1.04 T"]


def test_neighbouring_numbers_are_one_range() -> None:
    assert ranges([0, 1, 2, 3, 16, 17, 40]) == "0-3, 16-17, 40"
    assert ranges([]) == ""


def test_a_unit_is_taken_in_any_case() -> None:
    for unit in UNITS:
        for typed in (unit.lower(), unit.upper()):
            assert format_bytes(3 << 30, typed) == format_bytes(3 << 30, unit)
