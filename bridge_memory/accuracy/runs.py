"""The RunSpec of a record, read from its configuration as a user would specify it.

Measured figures are not used here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from bridge_memory.accuracy.records import Record
from bridge_memory.readers.megatron_args import run_from_megatron_args
from bridge_memory.readers.run_spec import run_from_json
from bridge_memory.releases import Release, release_in
from bridge_memory.spec import RunSpec, SpecError, show


class NotComparable(Exception):
    """Raised for a record that is too incomplete to be predicted, or contradictory. One line."""


class NotARun(Exception):
    """Raised for a record that is not a training run, such as a single layer. One line."""


def run_of(record: Record) -> RunSpec:
    """The RunSpec of a record, by its ``config.kind``: ``run_spec``, or ``megatron_args`` verbatim.

    Raises SpecError for a contradiction, NotComparable where no reader knows the kind, NotARun for ``not_a_run``.
    """
    kind = record.config.get("kind")
    if kind == "run_spec":
        return _run_spec(record)
    if kind == "megatron_args":
        return _megatron_args(record)
    if kind == "not_a_run":
        raise NotARun(str(record.config.get("reason", "the record does not say what it is")))
    if kind == "described":
        raise NotComparable(
            "described in words; scripts/maintain/convert_described.py makes a run of them where it can"
        )
    raise NotComparable(f"config.kind is {show(kind)}; run_spec and megatron_args can be read")


def _run_spec(record: Record) -> RunSpec:
    run = run_from_json(record.config.get("run"))
    world = run.parallel.world_size
    if world != record.world_size:
        raise SpecError(f"world_size ({record.world_size}) is not that of the recorded run ({world}); correct one")
    return run


def _megatron_args(record: Record) -> RunSpec:
    core = record.framework.get("megatron_core")
    te, torch = record.framework.get("transformer_engine"), record.framework.get("torch")
    container = str(record.framework.get("container", ""))
    env = record.config.get("env")
    return run_from_megatron_args(
        record.arguments,
        world_size=record.world_size,
        gpu=record.gpu,
        megatron_core=str(core) if core else None,
        transformer_engine=_te_release(str(te or ""), container),
        torch=release_in(torch) if torch else _shipped(container, _CONTAINER_TORCH),
        env=env if isinstance(env, Mapping) else None,
    )


#: Transformer Engine of NVIDIA's PyTorch containers (their release notes), (major, minor).
_CONTAINER_TE = {
    "24.01": (1, 2), "24.10": (1, 11), "25.03": (2, 1), "25.05": (2, 3), "25.06": (2, 4), "25.09": (2, 7),
    "25.11": (2, 9),
}
#: PyTorch of the same containers; that of 26.06 is not known.
_CONTAINER_TORCH = {
    "20.12": (1, 8), "24.01": (2, 2), "24.10": (2, 5), "25.03": (2, 7), "25.05": (2, 8), "25.06": (2, 8),
    "25.09": (2, 9), "25.11": (2, 10),
}
#: Git revisions of Transformer Engine, by what their builds call themselves ("2.17.1+4329ff84").
_REVISIONS = {
    "71bbefbf": (2, 14), "42b84005": (2, 15), "b9d690e0": (2, 16), "4329ff84": (2, 17), "e7c550c5": (2, 18),
}  # fmt: skip


def _te_release(stated: str, container: str) -> tuple[int, int] | None:
    """The release or revision that a record states, else the one its container ships; None for neither."""
    named = re.search(r"(?:^|release_v)(\d+)\.(\d+)", stated)
    if named:
        return int(named.group(1)), int(named.group(2))
    revision = re.search(r"\b([0-9a-f]{8})[0-9a-f]{32}\b", stated)
    if revision and revision.group(1) in _REVISIONS:
        return _REVISIONS[revision.group(1)]
    return _shipped(container, _CONTAINER_TE)


def _shipped(container: str, releases: Mapping[str, Release]) -> Release | None:
    """The release in NVIDIA's PyTorch container of that name; None for others."""
    month = re.search(r"pytorch:(\d\d\.\d\d)", container)
    return releases.get(month.group(1)) if month else None
