"""What tests in a real browser share: they skip without one, saying what there is to install."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import with_browser

AXE = with_browser.AXE
needs_browser = pytest.mark.skipif(bool(with_browser.missing()), reason=with_browser.missing())
needs_axe = pytest.mark.skipif(not Path(AXE).is_file(), reason="AXE_CORE does not name axe-core's axe.min.js")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with with_browser.browser() as one:
        yield one
