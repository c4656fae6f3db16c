"""What readers of several frameworks share."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from bridge_memory.files import parse_json, read_text
from bridge_memory.readers import resolve_model
from bridge_memory.spec import ModelSpec, SpecError
from bridge_memory.spec.errors import bounded

#: Tables of configurations are a few kB, composed ones some 40.
MOST_BYTES = 1 << 20


@cache
def defaults(name: str) -> dict[str, Any]:
    """A table of defaults that lies beside this module."""
    path = os.path.join(os.path.dirname(__file__), f"{name}.json")
    found: dict[str, Any] = parse_json(read_text(path, "reinstall bridge-memory"))
    return found


def model_of(text: str, key: str, given: str | None = None, *, files: bool = True) -> tuple[ModelSpec, str]:
    """(the model, an assumption or ""). A path of another machine is taken by its last parts.

    ``given``: a model that was named beside the configuration; ``files`` False: no file is read, and the network not
    asked. Raises SpecError.
    """
    if not files:
        return _embedded(given or text, key)
    if given is not None:
        return resolve_model(given), ""
    path = os.path.expanduser(text)
    if os.path.exists(path):
        return resolve_model(path), ""
    parts = [part for part in text.replace("\\", "/").split("/") if part and not part.startswith(("$", "~", "."))]
    tried = ["/".join(parts[-2:])] * (len(parts) > 1) + parts[-1:]
    if len(parts) == 2 and not text.startswith(("/", "~", "$", ".")):
        return resolve_model(text), ""
    for one in tried:
        name = one.removeprefix("models--").replace("--", "/")
        if name.count("/") == 1 and not _preset(name):
            continue
        try:
            return resolve_model(name), f"{key} ({bounded(text, 60)}) is not here: taken as {bounded(name, 60)}"
        except SpecError:
            continue
    raise SpecError(
        f"{key} ({bounded(text, 80)}) is neither here nor a model that is known; give MODEL beside the configuration"
    )


def _embedded(text: str, key: str) -> tuple[ModelSpec, str]:
    """An embedded model of a text's last parts."""
    from bridge_memory.readers.presets import find_presets

    parts = [part.removeprefix("models--").replace("--", "/") for part in text.replace("\\", "/").split("/") if part]
    for name in ("/".join(parts[-2:]), *parts[-1:]):
        found = find_presets(name)
        if len(found) == 1:
            said = "" if text == found[0] else f"{key} ({bounded(text, 60)}) taken as {found[0]}"
            return resolve_model(found[0]), said
    raise SpecError(f"{key} ({bounded(text, 80)}) is no embedded model; put the name of one beside the configuration")


def _preset(name: str) -> bool:
    from bridge_memory.readers.presets import find_presets

    return bool(find_presets(name))
