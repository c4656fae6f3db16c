"""Fixtures of every test, and what every test's name must be."""

import re

import pytest
from in_browser import browser

__all__ = ["browser"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """An address in a name differs between the processes of pytest-xdist, which then refuses to run any test."""
    moving = [item.nodeid for item in items if re.search(r" at 0x[0-9a-f]+", item.nodeid)]
    if moving:
        raise pytest.UsageError(f"a test's name holds an object's address; give its parameters ids: {moving[0]}")
