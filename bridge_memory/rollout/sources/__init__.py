"""Configurations of post-training frameworks, read as a ``PostTraining``."""
