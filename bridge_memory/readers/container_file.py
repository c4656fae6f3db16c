"""Loading a Megatron Bridge ConfigContainer: from the YAML that Bridge writes with its checkpoints
(``run_config.yaml``), or from a recipe of the installed Megatron Bridge.

The YAML is read without Megatron Bridge, and nothing that it names is imported or called. An object becomes a namespace
with its fields and its class's name; a function becomes a class with its name. Source of the format:
``utils/yaml_utils.py: safe_yaml_representers`` (``_target_``, ``_call_``, ``_partial_``, ``_args_``) and
``training/utils/omegaconf_utils.py``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

from bridge_memory.readers.engines.files import read_table
from bridge_memory.spec import SpecError
from bridge_memory.spec.errors import bounded

RECIPES = "megatron.bridge.recipes"
#: megatron-core's enums that the YAML stores by value: value -> name (``transformer/enums.py: AttnBackend``).
_MEMBERS = {"AttnBackend": {1: "flash", 2: "fused", 3: "unfused", 4: "local", 5: "auto"}}
_GIVE = "give the run_config.yaml that Megatron Bridge writes"
_MARKS = ("_target_", "_call_", "_partial_", "_args_")
#: Parts of a container that are mappings, and no objects.
_MAPPINGS = ("env_vars",)


def container_from_file(path: str | os.PathLike[str]) -> Any:
    """The container of a ``run_config.yaml``, as namespaces that ``run_from_config_container`` reads.

    Raises:
        SpecError: The file cannot be read, or is not a container's YAML.
    """
    return container_of_table(read_table(os.fspath(path), _GIVE), bounded(os.fspath(path), 120))


def container_of_table(data: Mapping[str, Any], name: str) -> Any:
    """``container_from_file`` of a table that was read; ``name``: of its source, for messages."""
    give = _GIVE
    if not isinstance(data.get("model"), Mapping):
        raise SpecError(f"{name} has no model; {give}")
    if "_target_" not in data["model"]:
        raise SpecError(f"the model of {name} has no _target_, the class of its provider; {give}")
    container = _object(data)
    return _whole(container) if isinstance(container, dict) else container


def _object(value: Any) -> Any:
    if isinstance(value, list):
        return [_object(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    target = value.get("_target_")
    fields = {key: _object(item) for key, item in value.items() if key not in _MARKS}
    if not isinstance(target, str):
        if "_target_" in value:
            raise SpecError(f"_target_ ({bounded(str(target), 60)}) in a container is the name of a class; correct it")
        return fields
    module, _, name = target.rpartition(".")
    name = name or target
    if module == "torch":
        return target  # a dtype
    if value.get("_args_") and not value.get("_partial_"):
        given = value["_args_"] if isinstance(value["_args_"], list) else [value["_args_"]]
        number = given[0] if isinstance(given[0], int) else -1
        return _MEMBERS.get(name, {}).get(number, given[0])
    of_class = type(name if name.isidentifier() else "Unknown", (SimpleNamespace,), {"__module__": module})
    if value.get("_partial_"):
        return SimpleNamespace(func=of_class, keywords=fields)
    if value.get("_call_") is False:
        return of_class  # a function: only its name matters
    return of_class(**fields)


def _whole(fields: dict[str, Any]) -> Any:
    """The container itself. A part without its class's name (a file that was edited) is read as the others are."""
    return SimpleNamespace(**{
        name: SimpleNamespace(**part) if isinstance(part, dict) and name not in _MAPPINGS else part
        for name, part in fields.items()
    })  # fmt: skip


#: By which DeepSeek-V4's recipes ask whether there is a Blackwell GPU, as they import it (Megatron Bridge
#: ``models/deepseek/deepseek_v4_bridge.py``).
_ASKS = "deepseek_v4_supports_blackwell_fused_kernels"


@contextmanager
def kernels_of(recipe: Callable[..., Any], gpu_arch: str | None) -> Iterator[None]:
    """Let a recipe turn on the kernels that it turns on where it sees a GPU of this generation; None: as it sees."""
    module = sys.modules.get(getattr(recipe, "__module__", ""))
    asked = getattr(module, _ASKS, None)
    if asked is None or gpu_arch is None:
        yield
        return
    setattr(module, _ASKS, lambda: gpu_arch == "blackwell")
    try:
        yield
    finally:
        setattr(module, _ASKS, asked)


def container_from_recipe(name: str, gpu_arch: str | None = None) -> Any:
    """The container that a recipe of the installed Megatron Bridge returns, such as ``llama3_8b_pretrain_config``.

    ``gpu_arch``: generation of the GPU that it is for; None: whatever the recipe finds.

    Raises:
        SpecError: Megatron Bridge cannot be imported, has no such recipe, or the recipe fails.
    """
    try:
        recipes = importlib.import_module(RECIPES)
    except Exception as error:  # a package of it may be missing, or refuse this machine
        raise SpecError(
            f"--bridge-recipe needs Megatron Bridge, which does not import here ({type(error).__name__}: "
            f"{bounded(str(error), 120)}); run it in Bridge's container, or give --container run_config.yaml"
        ) from None
    known = sorted(n for n in dir(recipes) if n.endswith("_config") and callable(getattr(recipes, n)))
    found = next((n for n in (name, f"{name}_pretrain_config", f"{name}_config") if n in known), "")
    if not found:
        near = get_close_matches(name, known, n=3, cutoff=0.3)
        raise SpecError(f"--bridge-recipe {name} is none; {'did you mean ' + ' or '.join(near) if near else RECIPES}")
    recipe = getattr(recipes, found)
    try:
        with kernels_of(recipe, gpu_arch):
            return recipe()
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(
            f"--bridge-recipe {found} does not build here ({type(error).__name__}: {bounded(str(error), 160)}); give "
            "--container run_config.yaml of a run of it"
        ) from None
