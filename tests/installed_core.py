"""Runs without a stated megatron-core are of the one that is installed, where a test compares the two."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bridge_memory import clear_caches, releases


@pytest.fixture(scope="module", autouse=True)
def unset_is_installed() -> Iterator[None]:
    try:
        from megatron.core import __version__
    except ImportError:
        yield
        return
    before, here = releases.DEFAULT_MEGATRON_CORE, releases.release_in(__version__)
    releases.DEFAULT_MEGATRON_CORE = here or before
    clear_caches()
    yield
    releases.DEFAULT_MEGATRON_CORE = before
    clear_caches()
