"""Estimates beside measured runs: errors, by family and feature, and fitted constants chosen again without a family."""
