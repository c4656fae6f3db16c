"""The formats of ``--emit``, and for which trainers each is written."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from bridge_memory.emit.commands import Emitted
from bridge_memory.spec import RunSpec, SpecError

#: Format -> the searches whose rows it can say: "megatron" (layouts of megatron-core), "torch" (PyTorch's engines and
#: DeepSpeed).
FORMATS: Mapping[str, tuple[str, ...]] = {
    "estimate": ("megatron", "torch"),
    "megatron-args": ("megatron",),
    "bridge": ("megatron",),
    "deepspeed": ("torch",),
    "accelerate": ("torch",),
    "trainer": ("torch",),
    "trl": ("torch",),
    "torchtitan": ("torch",),
}

#: What each format but a command is called.
TITLES: Mapping[str, str] = {
    "megatron-args": "Megatron-LM arguments", "bridge": "Megatron Bridge overrides", "deepspeed": "DeepSpeed JSON",
    "accelerate": "accelerate YAML", "trainer": "TrainingArguments", "trl": "TRL YAML",
    "torchtitan": "torchtitan TOML",
}  # fmt: skip


def formats_of(trainer: str) -> tuple[str, ...]:
    """The formats for one kind of trainer."""
    return tuple(name for name, trainers in FORMATS.items() if trainer in trainers)


def emitted(
    how: str, trainer: str, run: RunSpec, args: argparse.Namespace, gpu: str, changed: Mapping[str, Any]
) -> Emitted:
    """``run`` in the format ``how``. ``args``: the flags of the search; ``changed``: "group.field" -> value, of what
    the row says otherwise than they. Raises SpecError where the format has no word for something in ``run``."""
    assert trainer in FORMATS[how], (how, trainer)
    if trainer == "torch":
        from bridge_memory.emit import torch

        return torch.emitted(how, run, args, gpu, changed)
    from bridge_memory.emit import megatron

    return megatron.emitted(how, run, args, gpu)


def texts_of(run: RunSpec, args: argparse.Namespace, gpu: str) -> Iterator[tuple[str, str, Emitted]]:
    """(format, its title, the run in it), of every format but a command that can say ``run``."""
    trainer = "torch" if run.implementation.torch_layers else "megatron"
    for how, title in TITLES.items():
        if trainer in FORMATS[how]:
            with suppress(SpecError):
                yield how, title, emitted(how, trainer, run, args, gpu, {})
