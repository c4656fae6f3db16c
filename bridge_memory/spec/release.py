"""Parsing a release number that a user gives."""

from __future__ import annotations

from bridge_memory.releases import Release, parse_release
from bridge_memory.spec.errors import SpecError


def read_release(given: Release | str | None, field: str) -> Release | None:
    """(0, 16), "0.16" or "0.16.1" -> (0, 16); None stays None. Raises SpecError naming ``field``."""
    if not isinstance(given, str):
        return given
    try:
        return parse_release(given, field)
    except ValueError as error:
        raise SpecError(str(error)) from None
