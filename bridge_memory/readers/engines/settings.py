"""The settings that configuration files give, before a RunSpec is built: its groups, and values that depend on the
number of GPUs or on the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bridge_memory.readers.engines.sections import Diagnostics
from bridge_memory.spec.unmodelled import Effect

#: Name of a dtype in accelerate's and the Trainer's files -> its name in specs.
DTYPES = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "half": "fp16", "fp32": "fp32",
    "float32": "fp32", "float": "fp32", "no": "fp32",
}  # fmt: skip
#: Group -> field -> value. Files that are read later override earlier ones.
Groups = dict[str, dict[str, Any]]


@dataclass(slots=True)
class Settings:
    """The fields that files set, by group."""

    diagnostics: Diagnostics
    groups: Groups = field(default_factory=dict)
    #: GPUs of the job; None: no file gives it.
    world_size: int | None = None
    #: Gradient accumulation steps: microbatches per step and rank.
    accumulation: int | None = None
    #: The model that a file names, as ``resolve_model`` takes it.
    model: str | None = None

    def set(self, **fields: Any) -> None:
        """Set fields, named group__field: ``batch__micro_batch_size=4``. None leaves a field unchanged."""
        for name, value in fields.items():
            group, _, member = name.partition("__")
            if value is not None:
                self.groups.setdefault(group, {})[member] = value

    def get(self, group: str, member: str, default: Any = None) -> Any:
        return self.groups.get(group, {}).get(member, default)

    @property
    def engine(self) -> str | None:
        engine: str | None = self.get("data_parallel", "engine")
        return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Specified:
    """What flags, the model or other files specify in addition to a file."""

    #: GPUs of the job, from a flag or another file; None: unknown.
    world_size: int | None = None
    #: The model's hidden size, which sizes DeepSpeed's "auto" buckets.
    hidden_size: int | None = None
    #: Dtype of the weights, from a flag.
    weights: str | None = None
    #: The model's ``model_type``, which determines peft's default targets.
    model_type: str | None = None
    #: The release of transformers whose Trainer reads the file.
    transformers: tuple[int, int] = (4, 57)


def autocast(mixed: str | None, weights: str, settings: Settings) -> str | None:
    """The dtype of torch.autocast, or None if it has no weights to cast."""
    if mixed is None or weights == "fp32":
        return mixed
    if weights != mixed:
        settings.diagnostics.refuse(
            mixed,
            f"is the mixed precision, and weights are in {weights}: autocast from one to the other is not counted here",
            f"mix in {weights}, or load the model in fp32",
        )
    elif settings.get("peft", "scheme") is not None:
        settings.diagnostics.feature(
            f"{mixed}: inputs of adapters, which autocast narrows; counted in the adapters' fp32",
            Effect.DOWN,
            order="2 bytes for each element that enters an adapter, in every layer",
        )
    settings.diagnostics.assume(f"autocast to {mixed} over weights in {weights} is counted as without it")
    # A launcher's file may have set it for weights in fp32.
    settings.groups.get("transformers", {}).pop("autocast", None)
    return None
