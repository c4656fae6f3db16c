"""A small run and its readings, as a training job has them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from small_jobs import small_container


@pytest.fixture
def container() -> SimpleNamespace:
    return small_container()
