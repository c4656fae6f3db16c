"""The time model set right by measured steps: one factor for all rates, or one for computing and one for sending."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from typing import NamedTuple

from bridge_memory.spec import RunSpec, SpecError
from bridge_memory.speed.constants import DEFAULT, Constants
from bridge_memory.speed.hardware import Hardware
from bridge_memory.speed.megatron.step_time import Step, StepTime

#: Shares of a rate, which a faster machine raises, and seconds, which it lowers.
_COMPUTING = (
    ("gemm_ampere", "gemm_hopper", "gemm_blackwell", "gemm_blackwell_ultra", "scan", "memory", "host_memory"),
    ("layer", "layer_blocking", "launch", "launch_expert", "kernel"),
)
_SENDING = (
    (
        "nvlink", "nvlink_sharp", "nvlink_exchange", "deepep_sm", "network", "network_exchange", "efa_exchange",
        "host_link",
    ),
    ("nvlink_latency", "exchange_latency", "network_latency", "efa_latency", "efa_latency_deepep"),
)
#: A measured step so many times longer or shorter than predicted is a mistake and no measurement.
MOST = 10.0
#: Shares of sending in the measured steps that differ by less cannot separate computing from sending.
_DISTINCT = 0.05
#: Weight of a factor's being 1 beside one measured step, both in squares of logarithms.
_PRIOR = 0.01


class MeasuredStep(NamedTuple):
    """One measured step."""

    #: As it was given.
    name: str
    run: RunSpec
    seconds: float


class Calibrated(NamedTuple):
    """Constants that measured steps agree with, and what was changed."""

    constants: Constants
    words: str


def log_ratio(what: str, seconds: float, predicted: float) -> float:
    """Logarithm of measured over predicted seconds. Raises SpecError beyond ``MOST``. ``what``: the step, in words."""
    ratio = seconds / predicted
    if not 1 / MOST <= ratio <= MOST:
        raise SpecError(
            f"{what} is {ratio:.3g} times the {predicted:.3g} s that the time model gives; give the seconds of a whole "
            f"step, within {MOST:g} times"
        )
    return log(ratio)


def calibrated(measured: Sequence[MeasuredStep], hardware: Hardware, c: Constants = DEFAULT) -> Calibrated:
    """``c`` with its rates multiplied by what the steps say. Raises SpecError for a step that none could take.

    One measured step moves all rates together, which changes seconds and no rank. Several with different shares of
    communication move those of computing and those of sending apart.
    """
    steps = [Step(m.run, hardware, c) for m in measured]
    times = [step.time() for step in steps]
    logs = [
        log_ratio(f"measured step time ({m.name})", m.seconds, time.seconds)
        for m, time in zip(measured, times, strict=True)
    ]
    all_rates = exp(-sum(logs) / len(logs))
    shares = [_sent(time) for time in times]
    said = ", ".join(f"{m.name}: predicted {time.seconds:.3g} s" for m, time in zip(measured, times, strict=True))
    if max(shares) - min(shares) < _DISTINCT:
        both = _scaled(_scaled(c, _COMPUTING, all_rates), _SENDING, all_rates)
        return Calibrated(both, f"all rates x {all_rates:.3g} by the measured step times ({said}); ranks stay")

    def error(computing: float, sending: float) -> float:
        there = _scaled(_scaled(c, _COMPUTING, exp(computing)), _SENDING, exp(sending))
        misses = [log(m.seconds / step.at(there).seconds) for m, step in zip(measured, steps, strict=True)]
        middle = log(all_rates)
        return sum(x * x for x in misses) + _PRIOR * ((computing - middle) ** 2 + (sending - middle) ** 2)

    best, width = (log(all_rates), log(all_rates)), 1.0
    while width > 1e-3:
        around = [(best[0] + i * width, best[1] + j * width) for i in (-1, 0, 1) for j in (-1, 0, 1)]
        found = min(around, key=lambda at: error(*at))
        if found == best:
            width /= 2
        best = found
    computing, sending = map(exp, best)
    return Calibrated(
        _scaled(_scaled(c, _COMPUTING, computing), _SENDING, sending),
        f"rates of computing x {computing:.3g}, of communication x {sending:.3g} by the measured step times ({said})",
    )


def _sent(time: StepTime) -> float:
    return time.exposed_communication / time.seconds


def _scaled(c: Constants, of: tuple[Sequence[str], Sequence[str]], factor: float) -> Constants:
    rates, seconds = of
    return c._replace(
        **{name: getattr(c, name) * factor for name in rates}, **{name: getattr(c, name) / factor for name in seconds}
    )
