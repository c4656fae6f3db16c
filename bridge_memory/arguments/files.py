"""The configuration files that flags name, and what they add to the flags beside them."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from bridge_memory.arguments.flags import FILES, spelling_or_name
from bridge_memory.spec import ModelSpec, SpecError, show


def named(args: argparse.Namespace) -> dict[str, str]:
    """Kind -> path of the files that were named."""
    return {name: path for name in FILES if (path := getattr(args, name, None)) is not None}


def model_of_files(args: argparse.Namespace) -> str | None:
    """The model that torchtitan's TOML names, if there is one. Raises SpecError where it has no preset."""
    if getattr(args, "torchtitan", None) is None:
        return None
    from bridge_memory.readers.engines.run import settings_from_files

    settings = settings_from_files(torchtitan=args.torchtitan)
    if settings.model is None and args.megatron_args is None:
        settings.notes.check()
        raise SpecError(f"{args.torchtitan}: its model has no preset; give MODEL, or its config.json, beside it")
    return settings.model


def with_files(args: argparse.Namespace, given: dict[str, dict[str, Any]], model: ModelSpec) -> tuple[
    list[str], tuple[str, ...]
]:  # fmt: skip
    """Put what the files say under the flags that were ``given`` (group -> field -> value). Returns assumptions, and
    what is not modelled. Raises SpecError. A flag wins, and it is said where a file says otherwise."""
    paths = named(args)
    if not paths:
        return [], ()
    from bridge_memory.readers.engines.run import fields_of, settings_from_files, settle
    from bridge_memory.readers.engines.settings import Specified

    world = given["parallel"].get("world_size")
    micro = given["batch"].get("micro_batch_size")
    specified = Specified(world_size=world, hidden_size=model.hidden_size, model_type=model.model_type)
    if "params_dtype" in given["precision"]:
        specified = replace(specified, weights=given["precision"]["params_dtype"])
    if "transformers_version" in given["transformers"]:
        specified = replace(specified, transformers=given["transformers"]["transformers_version"])
    settings = settings_from_files(**paths, told=specified, micro_batch_size=micro)
    settings.notes.check()
    engine = given["data_parallel"].get("engine")
    if engine is not None and settings.engine is not None and engine != settings.engine:
        raise SpecError(
            f"--engine {engine} is not what the file says ({settings.engine}); drop --engine, or the file"
        )
    assumptions = settings.notes.assumptions
    found = fields_of(settings)
    if world is None:
        world = settings.world_size
        if world is None:
            world = 1
            assumptions.append("1 GPU (--num-gpus)")
        given["parallel"]["world_size"] = world
    elif settings.world_size not in (None, world):
        assumptions.append(f"--num-gpus {world}, in place of {settings.world_size} of the file")
    for group, fields in found.items():
        own = given.setdefault(group, {})
        for field, value in fields.items():
            if field not in own:
                own[field] = value
            elif own[field] != value:
                ours = f"{spelling_or_name(group, field)} {_shown(own[field])}"
                assumptions.append(f"{ours}, in place of {_shown(value)} of the file")
    settle(given, settings, world)
    return assumptions, tuple(settings.notes.not_modelled)


def _shown(value: object) -> str:
    return value if isinstance(value, str) else show(value)
