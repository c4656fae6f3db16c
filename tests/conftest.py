"""Fixtures of every test."""

from in_browser import browser

__all__ = ["browser"]
