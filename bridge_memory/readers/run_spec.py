"""A RunSpec as JSON, and back: the format of recorded rehearsals.

Only values that differ from the defaults are written, so that old records stay readable when fields are added. The
layer stack is stored as ``layer_kinds``, the distinct layers, and ``layers``, pairs of (index of the kind, number of
consecutive layers).
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from itertools import groupby
from typing import Any, Union, get_args, get_origin, get_type_hints

from bridge_memory.readers.fields import MAX_LAYERS
from bridge_memory.spec import FeedForward, LayerSpec, Mixer, ModelSpec, RunSpec, SpecError, show
from bridge_memory.spec.errors import bounded

#: Mixers and feed-forward blocks are stored with their class, since a layer may hold any of them.
_BLOCKS = {cls.__name__: cls for cls in (*get_args(Mixer), *get_args(FeedForward))}


def run_to_json(run: RunSpec) -> dict[str, Any]:
    """``run`` as dicts, lists, strings and numbers."""
    record: dict[str, Any] = _encoded(run)
    return record


def run_from_json(data: object) -> RunSpec:
    """The inverse of ``run_to_json``. Raises SpecError, naming the field, for any other input."""
    run = _decoded(data, RunSpec, "run")
    assert isinstance(run, RunSpec)
    return run


def _encoded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_encoded(x) for x in value]
    if not is_dataclass(value):
        return value
    cls: Any = type(value)
    out: dict[str, Any] = {"type": cls.__name__} if cls in _BLOCKS.values() else {}
    for f in _fields(cls):
        member = getattr(value, f.name)
        if f.name == "layers":
            kinds = list(dict.fromkeys(member))
            out["layer_kinds"] = [_encoded(kind) for kind in kinds]
            out["layers"] = [[kinds.index(kind), len(list(run))] for kind, run in groupby(member)]
        elif _default(f) is MISSING or member != _default(f):
            out[f.name] = _encoded(member)
    return out


@cache
def _fields(cls: type) -> tuple[Field[Any], ...]:
    return tuple(f for f in fields(cls) if f.init)


def _default(f: Field[Any]) -> Any:
    return f.default if f.default_factory is MISSING else f.default_factory()


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _decoded(value: Any, hint: Any, where: str) -> Any:
    if is_dataclass(hint):
        return _object(value, hint, where)
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return _one_of(value, parts, where)
    if origin is tuple:
        if not isinstance(value, list) or (parts[-1] is not Ellipsis and len(value) != len(parts)):
            raise SpecError(f"{where} is {show(value)}; a list of {hint} is expected")
        members = [parts[0]] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(_decoded(v, h, f"{where}[{i}]") for i, (v, h) in enumerate(zip(value, members, strict=True)))
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise SpecError(f"{where} is {show(value)}; {getattr(hint, '__name__', hint)} is expected")
    return value


def _one_of(value: Any, parts: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in parts:
        return None
    others = [part for part in parts if part is not type(None)]
    if len(others) == 1:
        return _decoded(value, others[0], where)
    kind = value.get("type") if isinstance(value, Mapping) else None
    cls = _BLOCKS.get(kind) if isinstance(kind, str) else None
    if cls not in others:
        raise SpecError(f"{where}.type is {show(kind)}; it must be one of {', '.join(c.__name__ for c in others)}")
    return _object({k: v for k, v in value.items() if k != "type"}, cls, where)


def _object(value: Any, cls: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} is {show(value)}; an object is expected")
    given = dict(value)
    if cls is ModelSpec:
        given["layers"] = _layers(given, where)
    known = {f.name: f for f in _fields(cls)}
    for name in given:
        if name not in known:
            path = f"{where}.{bounded(name, 60)}"
            raise SpecError(f"{path} is no field of {cls.__name__}; the record is of another release")
    for name, f in known.items():
        if name not in given and _default(f) is MISSING:
            raise SpecError(f"{where}.{name} is missing; {cls.__name__} cannot be read without it")
    hints = _hints(cls)
    return cls(
        **{k: v if k == "layers" else _decoded(v, hints[k], f"{where}.{k}") for k, v in given.items()}
    )


def _layers(given: dict[str, Any], where: str) -> tuple[LayerSpec, ...]:
    kinds = _decoded(given.pop("layer_kinds", None), tuple[LayerSpec, ...], f"{where}.layer_kinds")
    rows = _decoded(given.get("layers"), tuple[tuple[int, int], ...], f"{where}.layers")
    if sum(count for _, count in rows) > MAX_LAYERS:
        raise SpecError(f"{where}.layers has more than {MAX_LAYERS} layers; give those of the model")
    for kind, count in rows:
        if not 0 <= kind < len(kinds) or count < 1:
            raise SpecError(f"{where}.layers has ({kind}, {count}); give pairs of one of layer_kinds and a count")
    return tuple(kinds[kind] for kind, count in rows for _ in range(count))
