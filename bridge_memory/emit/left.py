"""What an emitted text does not say of a run: the fields in which the run that is read back from it differs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from bridge_memory.arguments.flags import SPECS
from bridge_memory.releases import release_words
from bridge_memory.spec import ImplementationSpec, ModelSpec, RunSpec
from bridge_memory.spec.canonical import canonical
from bridge_memory.spec.fields import called
from bridge_memory.spec.run import GROUPS

#: What the text leaves to be said elsewhere: "group.field" -> its value in the run.
Left = Mapping[str, Any]

#: Unset, the trainer decides.
BY_TRAINER = "checkpoint.adopt_optim_states"
_SUPPOSED = ImplementationSpec()
#: Fields that are an environment variable of the job: field -> "NAME=value", of its value.
_VARIABLES: Mapping[str, Callable[[Any], str]] = {
    "implementation.nvte_deterministic": lambda on: f"NVTE_ALLOW_NONDETERMINISTIC_ALGO={int(not on)}",
    "implementation.expandable_segments": lambda on: f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:{bool(on)}",
    "implementation.cublas_workspace_bytes": lambda n: (
        "CUBLAS_WORKSPACE_CONFIG unset" if n is None else f"CUBLAS_WORKSPACE_CONFIG=:{n >> 10}:1"
    ),
    "implementation.moe_hybridep_ranks_per_nvlink_domain": lambda n: (
        "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN " + ("unset" if n is None else f"= {n}")
    ),
}


def left_out(run: RunSpec, read: RunSpec) -> dict[str, Any]:
    """"group.field" -> value in ``run``, of every field with an effect in which ``read`` is another run."""
    ours, theirs = canonical(run), canonical(read)
    found: dict[str, Any] = {}
    for group, cls in (("model", ModelSpec), *GROUPS.items()):
        one, other = getattr(ours, group), getattr(theirs, group)
        found |= {
            f"{group}.{f.name}": getattr(getattr(run, group), f.name)
            for f in fields(cls) if f.compare and getattr(one, f.name) != getattr(other, f.name)
        }  # fmt: skip
    if BY_TRAINER in found:
        found[BY_TRAINER] = ours.checkpoint.adopt_optim_states
    if run.teacher != read.teacher:
        found["teacher"] = run.teacher
    return found


def beside(run: RunSpec) -> dict[str, Any]:
    """The machine and the releases of ``run`` where they are not those that a reader supposes: no text of a trainer
    says them, and what it is read as depends on them."""
    return {
        f"implementation.{name}": value
        for name in ("megatron_core", "transformer_engine", "torch", "gpu_arch")
        if (value := getattr(run.implementation, name)) != getattr(_SUPPOSED, name)
    }  # fmt: skip


def left_words(left: Left) -> str:
    """"megatron_core 0.16, moe_imbalance 1.5": for people."""
    return ", ".join(_words(name, value) for name, value in left.items())


def _words(name: str, value: Any) -> str:
    group, _, field = name.partition(".")
    if name in _VARIABLES:
        return _VARIABLES[name](value)
    if name == "teacher":
        return f"the teacher ({value.model.name})" if value is not None else "no teacher"
    if group == "model":
        return f"the model's {field}"
    if isinstance(value, tuple):
        plain = release_words(value) if value and type(value[0]) is int else ",".join(map(str, value)) or "none"
    else:
        plain = str(value)
    return f"{called(GROUPS[group], field) if group in SPECS else field} {plain}"
