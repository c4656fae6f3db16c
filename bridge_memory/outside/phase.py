"""The phases of a job, in order of time."""

from __future__ import annotations

from enum import Enum


class Phase(str, Enum):
    """A stretch of a job that has a peak of its own."""

    BUILD = "build"
    LOAD = "load"
    FIRST_STEP = "first step"
    TRAINING = "training"
    EVALUATION = "evaluation"
    SAVE = "save"
    RESUME = "resume"

    def __str__(self) -> str:
        return self.value
